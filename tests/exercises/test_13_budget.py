"""★★ A hook that stops at a price

Goal: write a hook that lets a turn spend a given limit. As soon as the requests so far cost more, no call runs any more: each
      is denied with a reason that names the limit, and the model answers with what it has. Example: the limit is 0.0065, and
      each request costs 0.003 and asks for two calls. Four calls run; those of the third request and of later ones do not.
Read: nanobot.py:AgentHook, nanobot.py:ApprovalHook, nanobot.py:CostTrackingHook
Hint: `context.usage` counts the tokens of the run so far, and is up to date when `before_execute_tools` is called; keep the
      context that `before_iteration` gets. `call.denied = "why"` keeps a call from running; the model is told why. The real
      agent takes the hook, too: AgentLoop(load_config(), hooks=[BudgetHook(0.05, 0.15, 0.60)]).
"""

import asyncio

from grading import check, exercise

from nanobot import AgentRunner, AgentRunSpec
from providers import LLMResponse, ScriptedProvider, ToolCallRequest
from tools import ToolRegistry, tool

LOOK = "nanobot.py:AgentHook"


def run(hook, steps=6):
    """Each request costs 1,000 tokens in and 100 out; each step calls `look` twice: 0.003 at 2 and 10 per million."""
    ran = []

    @tool(read_only=True)
    def look(place: int) -> str:
        """Look at a place."""
        ran.append(place)
        return f"nothing at {place}"

    usage = {"prompt_tokens": 1000, "completion_tokens": 100, "cached_tokens": 0}
    replies = []
    for step in range(steps):
        calls = [ToolCallRequest(f"c{step}{n}", "look", {"place": 2 * step + n}) for n in range(2)]
        replies.append(LLMResponse(None, calls, "tool_calls", dict(usage)))
    provider = ScriptedProvider([*replies, LLMResponse("That is all.", usage=dict(usage))])
    spec = AgentRunSpec([{"role": "user", "content": "Look."}], ToolRegistry([look]), hook=hook)
    result = asyncio.run(AgentRunner(provider).run(spec))
    return ran, result


def test_the_budget():
    make = exercise("13_budget", "BudgetHook")
    ran, result = run(make(0.0065, 2.0, 10.0))
    story = "each request costs 0.003 and asks for two calls; the limit is 0.0065. After two requests 0.006 are spent: their four calls run."
    check(
        ran == [0, 1, 2, 3],
        f"{story} With the third it is 0.009: no more call runs",
        f"{len(ran)} calls ran",
        LOOK,
    )
    denied = [
        each
        for each in result.messages
        if each["role"] == "tool" and "nothing at" not in each["content"]
    ]
    check(
        bool(denied),
        "later calls get a result that says why they did not run",
        "there is none",
        "nanobot.py:ApprovalHook",
    )
    check(
        "0.0065" in denied[0]["content"],
        "the reason names the limit, 0.0065",
        denied[0]["content"],
        "nanobot.py:ApprovalHook",
    )
    check(
        result.stop_reason in ("completed", "empty", "error"),
        "the run ends",
        result.stop_reason,
        "nanobot.py:verdict",
    )
    ran, _ = run(make(1.0, 2.0, 10.0))
    check(len(ran) == 12, "with a limit of 1.0 all twelve calls run", f"{len(ran)} ran", LOOK)
    again = make(0.0065, 2.0, 10.0)
    run(again)
    ran, _ = run(again)
    check(
        ran[:4] == [0, 1, 2, 3],
        "the limit is for one turn: in a second turn with the same hook four calls run, too",
        f"{len(ran)} ran",
        "nanobot.py:AgentHookContext",
    )
