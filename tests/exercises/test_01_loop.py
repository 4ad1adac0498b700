"""★ Your own loop

Goal: write the loop of an agent in about ten lines. Ask the model, and append its message, also the last one. If it has
      calls, run each, append one result for each, and ask again; if it has none, return its text.
Read: nanobot.py:AgentRunner.run, nanobot.py:AgentRunner._act, providers.py:LLMResponse.to_message
Hint: a result is {"role": "tool", "tool_call_id": call.id, "content": result.text}. `await registry.execute(call.name,
      call.arguments)` runs a call. Both are coroutines: without `await` you get no answer, but a promise of one.
"""

import asyncio

from grading import check, exercise

from nanobot import AgentRunner, AgentRunSpec
from providers import ScriptedProvider, ToolCallRequest
from tools import ToolRegistry, tool

LOOK = "nanobot.py:AgentRunner._act"
QUESTION = {"role": "user", "content": "Square 2, 3 and 4."}


@tool(read_only=True)
def square(number: int) -> str:
    """The square of a number."""
    return str(number * number)


class Script(ScriptedProvider):
    """Two calls side by side, one more, then the answer. Notes the roles of what it is really given: `legal` drops
    a result without a call."""

    def __init__(self):
        calls = [ToolCallRequest(f"c{n}", "square", {"number": n}) for n in (2, 3, 4)]
        super().__init__([calls[:2], [calls[2]], "4, 9 and 16."])
        self.roles = []

    async def chat(self, messages, *arguments, **options):
        for message in messages:
            check(
                isinstance(message, dict),
                "each message is a dict: response.to_message() makes one of an answer",
                message,
                LOOK,
            )
            is_text = isinstance(message.get("content"), str | None)
            check(
                is_text,
                "each message's content is a text: a result has it in `result.text`",
                message.get("content"),
                LOOK,
            )
        self.roles.append([message["role"] for message in messages])
        ends = "a loop that ends: yours has asked 20 times, and the script has three answers. When does it return?"
        check(len(self.roles) < 20, ends, look="nanobot.py:AgentRunner.run")
        return await super().chat(messages, *arguments, **options)


def test_the_loop():
    ask, registry, theirs = exercise("01_loop", "ask"), ToolRegistry([square]), Script()
    asyncio.run(AgentRunner(theirs).run(AgentRunSpec([QUESTION], registry)))
    provider, messages = Script(), [QUESTION]
    answer = asyncio.run(ask(provider, registry, messages))
    for number, (seen, right) in enumerate(zip(provider.roles, theirs.roles, strict=False), 1):
        without = [role for role in right if role != "assistant"]
        why = (
            ": results mean nothing without the answer that has their calls"
            if seen == without
            else ""
        )
        check(seen == right, f"request {number} with the messages {right}{why}", seen, LOOK)
    check(
        len(provider.roles) == 3,
        "three requests to the model",
        len(provider.roles),
        "nanobot.py:verdict",
    )
    check(
        answer == "4, 9 and 16.",
        'the text of the last answer, "4, 9 and 16."',
        answer,
        "nanobot.py:AgentRunner.run",
    )
    results = {m.get("tool_call_id"): m["content"] for m in messages if m["role"] == "tool"}
    check(
        results == {"c2": "4", "c3": "9", "c4": "16"},
        "each result under the id of its call: 4 under c2 …",
        results,
        LOOK,
    )
    is_last = isinstance(messages[-1], dict) and messages[-1].get("content") == answer
    check(
        is_last,
        "the answer as the last message of `messages`",
        messages[-1],
        "nanobot.py:AgentRunner._finish",
    )
