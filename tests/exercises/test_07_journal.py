import json
import subprocess
import sys
import time

from grading import ROOT, check, exercise, settings

LOOK = 'NOTES.md "What the journal can do"'


def line(n, role, content=None, **more):
    return {"n": n, "role": role, "content": content, **more}


def calls(*ids):
    return [{"id": each, "type": "function", "function": {"name": "exec", "arguments": "{}"}} for each in ids]


BEGIN = [{"mark": "session", "key": "cli:direct"}, line(1, "user", "Count the lines.")]
CALLED = [*BEGIN, line(2, "assistant", None, tool_calls=calls("a", "b"))]
DONE = [*CALLED, line(3, "tool", "7", tool_call_id="b"), line(4, "tool", "9", tool_call_id="a")]
JOURNALS = [
    (BEGIN[:1], "nothing"), (BEGIN, "asking"), (CALLED, "working"), (DONE[:-1], "working"), (DONE, "asking"),
    ([*DONE, line(5, "assistant", "7 and 9.")], "nothing"),
    ([*DONE, line(5, "assistant", "7 and 9."), {"mark": "delivered", "upto": 5}], "nothing"),
    ([*DONE, {"mark": "ended", "why": "it was stopped"}], "ended"),
    ([*BEGIN, {"mark": "resumed"}], "asking"),
    ([*DONE, {"mark": "ended", "why": "it was stopped"}, line(5, "user", "And now?")], "asking"),
    ([*DONE, line(5, "assistant", "7 and", cut="it was stopped"), {"mark": "ended", "why": "it was stopped"}], "ended"),
]  # fmt: skip


def test_journals_that_were_written_by_hand():
    explain = exercise("07_journal").explain
    for journal, right in JOURNALS:
        shown = "\n          ".join(json.dumps(each) for each in journal[-3:])
        check(explain(journal) == right, f'"{right}" for a journal that ends with\n          {shown}', explain(journal), LOOK)


def test_a_real_kill(folder):
    explain = exercise("07_journal").explain
    config = settings(folder)
    sleep = f'{sys.executable} -c "import time; time.sleep(20)"'
    command = [sys.executable, str(ROOT / "nanobot.py"), "agent", "--config", str(config.path), "-m", f"run `{sleep}`"]
    agent = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    journal, lines = folder / "home" / "sessions" / "cli%3Adirect.jsonl", []
    ends = time.monotonic() + 4
    while not any(each.get("tool_calls") for each in lines) and time.monotonic() < ends:
        time.sleep(0.02)
        if journal.exists():
            lines = [json.loads(text) for text in journal.read_text(encoding="utf-8").split("\n")[:-1]]
    agent.kill()  # kill -9
    agent.wait()
    check(explain(lines) == "working", '"working" for an agent that was killed while its command ran', explain(lines), LOOK)
