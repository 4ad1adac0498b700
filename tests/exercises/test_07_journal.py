"""★★ Kill it, and explain the journal

Goal: an agent was killed at a random moment. Say from its journal alone what it was doing:
      "nothing"      the journal has no message, or its last turn was answered
      "asking"       the model was asked, for the first time or after results, and its answer had not come
      "working"      a tool was running: a call has no result
      "ended"        the turn was ended without an answer: stopped, or the endpoint failed
Read: NOTES.md "What the journal can do", memory.py:Session.unfinished, nanobot.py:AgentRunner._act
Hint: the grader kills two agents (kill -9) and prints their journals with your answer, as soon as `explain` returns something.
      Look at the last message (a line with `n`), at its role and its tool_calls, and at the marks after it.
"""

import json
import subprocess
import sys
import time

from grading import ROOT, check, exercise, settings

LOOK = 'NOTES.md "What the journal can do"'


def line(n, role, content=None, **more):
    return {"n": n, "role": role, "content": content, **more}


def calls(*ids):
    return [
        {"id": each, "type": "function", "function": {"name": "exec", "arguments": "{}"}}
        for each in ids
    ]


BEGIN = [{"mark": "session", "key": "cli:direct"}, line(1, "user", "Count the lines.")]
CALLED = [*BEGIN, line(2, "assistant", None, tool_calls=calls("a", "b"))]
DONE = [*CALLED, line(3, "tool", "7", tool_call_id="b"), line(4, "tool", "9", tool_call_id="a")]
JOURNALS = [
    (BEGIN[:1], "nothing"),
    (BEGIN, "asking"),
    (CALLED, "working"),
    (DONE[:-1], "working"),
    (DONE, "asking"),
    ([*DONE, line(5, "assistant", "7 and 9.")], "nothing"),
    ([*DONE, line(5, "assistant", "7 and 9."), {"mark": "delivered", "upto": 5}], "nothing"),
    ([*DONE, {"mark": "ended", "why": "it was stopped"}], "ended"),
    ([*BEGIN, {"mark": "resumed"}], "asking"),
    ([*DONE, {"mark": "ended", "why": "it was stopped"}, line(5, "user", "And now?")], "asking"),
    (
        [
            *DONE,
            line(5, "assistant", "7 and", cut="it was stopped"),
            {"mark": "ended", "why": "it was stopped"},
        ],
        "ended",
    ),
]


AGENT = """
import asyncio, sys, time
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from nanobot import AgentLoop, load_config
from providers import ScriptedProvider, ToolCallRequest
from tools import tool

@tool
def wait() -> str:
    "Takes its time."
    time.sleep(20)
    return "done"

class Slow(ScriptedProvider):
    async def answer(self, request):
        if sys.argv[3] == "asking":
            await asyncio.sleep(20)
        return await super().answer(request)

loop = AgentLoop(load_config(Path(sys.argv[2]), environ={}), Slow([[ToolCallRequest("c1", "wait", {})]]))
loop.tools.register(wait)
asyncio.run(loop.process_direct("Wait.", "cli:direct"))
"""  # no command: a machine of the class may have no bash


def journal_of_killed(folder, state):
    """The journal's lines of an agent that was killed (kill -9) in this state. It is printed, too."""
    home = folder / state
    home.mkdir()
    config = settings(home)
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, str(ROOT), str(config.path), state],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    journal, lines = home / "home" / "sessions" / "cli%3Adirect.jsonl", []
    wanted = "user" if state == "asking" else "assistant"
    ends = time.monotonic() + 15
    while agent.poll() is None and time.monotonic() < ends:
        time.sleep(0.02)
        if journal.exists():
            texts = journal.read_text(encoding="utf-8").split("\n")[:-1]
            lines = [json.loads(text) for text in texts]
            if any(each.get("role") == wanted for each in lines):
                break
    agent.kill()  # kill -9
    said = agent.communicate()[1].decode(errors="replace")
    assert any(each.get("role") == wanted for each in lines), (
        f"the grader's own agent did not work: {said[-300:]}"
    )
    print(f"Process {agent.pid}, an agent, was killed with kill -9. Its journal:")
    for each in lines:
        shown = {key: value for key, value in each.items() if key not in ("runtime", "timestamp")}
        print(f"    {json.dumps(shown, ensure_ascii=False)[:150]}")
    return lines


def test_real_kills(folder):
    explain = exercise("07_journal", "explain")
    for state, when in (("asking", "while the model was asked"), ("working", "while a tool ran")):
        said = explain(journal_of_killed(folder, state))
        print(f"Your `explain` says: {said}\n", flush=True)
        check(said == state, f'"{state}" for an agent that was killed {when}', said, LOOK)


def test_journals_that_were_written_by_hand():
    explain = exercise("07_journal", "explain")
    for journal, right in JOURNALS:
        shown = "\n          ".join(json.dumps(each) for each in journal[-3:])
        check(
            explain(journal) == right,
            f'"{right}" for a journal that ends with\n          {shown}',
            explain(journal),
            LOOK,
        )
