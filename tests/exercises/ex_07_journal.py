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


def explain(lines):
    """`lines` are the journal's lines as dicts, in their order. Returns one of the four words."""
    raise NotImplementedError("write `explain` in ex_07_journal.py")
