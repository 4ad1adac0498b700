import asyncio

from grading import check, exercise

from nanobot import AgentRunner, AgentRunSpec
from providers import ScriptedProvider, ToolCallRequest, legal
from tools import ToolRegistry, tool


@tool(read_only=True)
def square(number: int) -> str:
    """The square of a number."""
    return str(number * number)


def script():
    """Two calls side by side, one more, then the answer."""
    calls = [ToolCallRequest(f"c{n}", "square", {"number": n}) for n in (2, 3, 4)]
    return ScriptedProvider([calls[:2], [calls[2]], "4, 9 and 16."])


def conversation():
    return [{"role": "user", "content": "Square 2, 3 and 4."}]


def test_the_loop():
    solution, registry, look = exercise("01_loop"), ToolRegistry([square]), "nanobot.py:AgentRunner._act"
    spec = AgentRunSpec(conversation(), registry)
    theirs = asyncio.run(AgentRunner(script()).run(spec))
    provider, messages = script(), conversation()
    answer = asyncio.run(solution.ask(provider, registry, messages))
    check(answer == "4, 9 and 16.", 'the text of the last answer, "4, 9 and 16."', answer, "nanobot.py:AgentRunner.run")
    for number, request in enumerate(provider.requests, 1):
        seen = [message["role"] for message in request.messages]
        right = [message["role"] for message in legal(theirs.messages)][: len(seen)]
        check(seen == right, f"request {number} with the messages {right}", seen, look)
    results = {m.get("tool_call_id"): m["content"] for m in messages if m["role"] == "tool"}
    right = {"c2": "4", "c3": "9", "c4": "16"}
    check(results == right, f"each result under the id of its call: {right}", results, look)
    check(len(provider.requests) == 3, "three requests to the model", len(provider.requests), "nanobot.py:verdict")
    check(messages[-1].get("content") == answer, "the answer as the last message of `messages`", messages[-1],
          "nanobot.py:AgentRunner._finish")  # fmt: skip
