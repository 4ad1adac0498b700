"""What survives the turn: the journal under every kind of damage, its inbox, what moves into the memory."""

import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from channels import Channel, InboundMessage, MessageBus
from chats import DOWN, Chats, Gate, Model, said, serve_chats, waiting_tool
from conftest import lines_of, link
from memory import (
    Governed,
    Inbox,
    MemoryRepository,
    MemoryStore,
    Session,
    SessionBusy,
    SessionManager,
    SkillsLoader,
    estimate,
    remember_terminals,
    total_tokens,
    readable,
)
from nanobot import AgentLoop, Config, JobRunner, Program
from providers import LLMProvider, LLMResponse, ToolCallRequest, legal
from test_providers import called, user
from test_providers import said as answer
from tools import FILE_TOOLS, Tool, ToolRegistry, tool

ROOT = Path(__file__).parent.parent
DATA = Path(__file__).parent / "data"
KEY = "cli:direct"
CHAT = "desk:1"
needs_git = pytest.mark.skipif(not shutil.which("git"), reason="git is missing")
posix = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="FIFOs and fcntl are POSIX")


# ---- What the tests say and look at ----


def result(id_: str, text: str) -> dict:
    return {"role": "tool", "tool_call_id": id_, "name": "read_file", "content": text}


def call(name: str, **arguments: object) -> LLMResponse:
    return LLMResponse(
        None, [ToolCallRequest(f"c{time.monotonic_ns()}", name, arguments)], "tool_calls"
    )


def saving(
    entry: str, update: str = "- A fact", summary: str | None = None, **more: object
) -> LLMResponse:
    more |= {} if summary is None else {"summary": summary}
    return call("save_memory", history_entry=entry, memory_update=update, **more)


CUT = LLMResponse("x", finish_reason="length")
USELESS = LLMResponse("I would rather not.")
HOUR = "[2026-04-03 00:02] "


def make_loop(workspace: Path, model: LLMProvider, *tools: Tool, **defaults: object) -> AgentLoop:
    config = Config()
    for name, value in ({"workspace": str(workspace)} | defaults).items():
        setattr(config.defaults, name, value)
    registry = ToolRegistry([*FILE_TOOLS, *tools])
    return AgentLoop(config, model, registry, program=Program(config.workspace))


def say(loop: AgentLoop, *texts: str, key: str = KEY) -> list[str]:
    """What the user reads, answer after answer, when the memory has settled too."""

    async def talk():
        answers = []
        for text in texts:
            answers.append((await loop.process_direct(text, key)).final_content)
            await loop.background.settled()
        return answers

    return asyncio.run(talk())


def tokens_in(text: object) -> list[str]:
    """`<7>` marks a text, so that it is found wherever it goes; each once, in order."""
    return list(dict.fromkeys(re.findall(r"<[\w.]+>", str(text))))


def loaded(workspace: Path, key: str = KEY) -> Session:
    """The session as a program that starts now sees it."""
    memory = MemoryStore(workspace)
    return SessionManager(workspace, memory).get(key)


def contents(messages: list[dict]) -> list[str]:
    return [message["content"] for message in messages]


def history_of(workspace: Path) -> list[str]:
    path = workspace / "memory" / "history.jsonl"
    return contents(lines_of(path)) if path.exists() else []


def append(memory: MemoryStore, *texts: str) -> None:
    for text in texts:
        memory.append_history(text)


def another_program(code: str, *arguments: object) -> subprocess.Popen:
    """A real process that imports memory.py; it can be talked to line by line."""
    program = f"import sys\nfrom pathlib import Path\nfrom memory import *\n{code}"
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=ROOT, encoding="utf-8", stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


# ---- A gateway with one channel ----


def serve(workspace: Path, model: LLMProvider, work, *tools: Tool, **defaults: object) -> Chats:
    """Runs `work(chats)` while the bus is served, and ends as a gateway ends."""
    return serve_chats(make_loop(workspace, model, *tools, **defaults), work)


def chat(workspace: Path, model: LLMProvider, *texts: str) -> list[str]:
    """What a gateway sends that lives as long as this takes: each is said when the last was answered."""

    async def work(chats):
        for _ in range(100):  # it goes on with what there is
            await asyncio.sleep(0)
        for count, text in enumerate(texts, 1):
            await chats.say(text)
            await chats.answered(count)
        await chats.at_rest()

    return serve(workspace, model, work).finals()


# ---- The journal on disk ----


def brief(line: dict) -> str:
    """`{"n": 1, "role": "user", "content": "Hi", …}` → `1 user Hi`"""
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", line["timestamp"]), "each has its time"
    keys = ("mark", "key", "n", "role", "id", "content", "upto")
    return " ".join(str(line[key]) for key in keys if line.get(key))


def test_a_conversation_stands_in_its_journal_like_this(tmp_path):
    """The sample of DESIGN 6, told by a chat."""
    gate = Gate()

    def talk(request):
        is_first = request.messages[-1]["role"] == "user" and len(request.messages) == 2
        return call("slow") if is_first else "a.txt says hello, b.txt too"

    async def work(chats):
        await chats.say("Read a.txt", id_="501")
        await gate.reached.wait()
        await chats.say("And b.txt?", id_="502")
        gate.open.set()
        await chats.answered(1)
        await chats.at_rest()
        for _ in range(2):  # the second one is ignored
            await chats.say("/new", id_="504")
        await chats.answered(2)
        await chats.at_rest()

    serve(tmp_path, Model(talk), work, waiting_tool(gate))
    path = tmp_path / "sessions" / "desk%3A1.jsonl"
    assert [brief(line) for line in lines_of(path)] == [
        "session desk:1",
        "1 user 501 Read a.txt",
        "2 assistant",
        "3 tool done",
        "4 user 502 And b.txt?",
        "5 assistant a.txt says hello, b.txt too",
        "delivered 5",
        "new 504",
        "delivered 5",
    ]


def test_a_write_that_fails_is_said_and_leaves_no_trace(tmp_path):
    resource = pytest.importorskip("resource")
    session = loaded(tmp_path)
    session.append(user("before"))
    before = session.path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5_000, limits[1]))  # a full disk
    try:
        with pytest.raises(OSError, match=re.escape(session.path.name)):
            session.append(user("x" * 20_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert session.path.read_bytes() == before
    session.append(user("after"))
    assert contents(loaded(tmp_path).messages) == ["before", "after"]


KEYS = [
    "cli:direct",
    "telegram:-100",
    "x:../../etc",
    "x:..",
    "x:A",
    "x:a",
    "x:aÄab",
    "x:ü 日本",
    "x:%3A:B",
    "x:con",
    "x:" + "y" * 40,
    "x:a\0b",
]


def test_every_key_has_a_file_of_its_own_and_the_one_used_last_is_listed_first(tmp_path):
    sessions = SessionManager(tmp_path)
    for age, key in enumerate(KEYS):
        sessions.get(key).append(user(f"in {key!a} \u2028 \x85 \ud800 \0"))
        os.utime(sessions.path(key), (1_000_000 - age, 1_000_000 - age))
    if os.name == "posix":  # Emacs, while it edits
        (sessions.folder / ".#x%3Aa.jsonl").symlink_to("me@host.4711:1775174400")
    assert SessionManager(tmp_path).list_keys() == KEYS
    for key in KEYS:
        assert contents(loaded(tmp_path, key).messages) == [f"in {key!a} \u2028 \x85 ? \0"]


def test_a_turn_that_was_stopped_after_it_had_begun_is_the_latest_conversation(tmp_path):
    sessions = SessionManager(tmp_path)
    session = sessions.get("cli:a")
    session.origin = {"folder": "/p", "typed": True}
    session.append({"role": "user", "content": "hi"})
    session.end_open_turn("it was stopped")
    assert sessions.latest("/p") == ""
    session.append({"role": "assistant", "content": "Half an ans", "cut": "it was stopped"})
    assert sessions.latest("/p") == "cli:a"


# ---- Damage ----
# A whole conversation: a part is in the memory, a turn has calls, `/new` is behind some messages.

BEFORE_NEW = [
    user("<33> Read a.txt", id="31"),
    called("c1"),
    result("c1", "<55> hello"),
    answer("<66> Yes"),
]
AFTER_NEW = [
    user("<77> Hi", runtime="It is Monday", id="32"),
    answer("<88> Hel", cut="it was stopped"),
    user("<99> Well?", id="33"),
    answer("<00> Fine"),
]
OLD_TOKENS = {"<33>", "<55>", "<66>"}
NEW_TOKENS = {"<77>", "<88>", "<99>", "<00>"}


def damaged_sample(workspace: Path, with_new: bool) -> Path:
    memory = MemoryStore(workspace)
    session = SessionManager(workspace, memory).get(CHAT)
    session.append(user("<11> My boat is called Vesta", id="30"), answer("<22> Nice"))
    origin = {"session": CHAT, "created_at": session.created_at, "summary": "About a boat."}
    memory.append_history(f"{HOUR}They spoke of the boat Vesta.", **origin, upto=2)
    session.mark("saved", upto=2, summary="About a boat.")
    session.append(*BEFORE_NEW)
    session.mark("delivered", upto=6)
    if with_new:
        session.mark("new")
    session.append(*AFTER_NEW)
    return session.path


@contextlib.contextmanager
def told(where: str):
    try:
        yield
    except BaseException as problem:
        problem.add_note(where)
        raise


def check_damaged(workspace: Path, path: Path, whole: bytes, data: bytes) -> None:
    """Each line that is not damaged stays what it was; what comes next stands behind all of them."""
    path.write_bytes(data)
    for each in path.parent.glob("*.corrupt*"):
        each.unlink()
    there = set(data.split(b"\n"))
    intact = [json.loads(line) for line in whole.split(b"\n") if line and line in there]
    undamaged = {n for line in intact for n in tokens_in(line.get("content"))}
    sessions = SessionManager(workspace, MemoryStore(workspace))
    session = sessions.get(CHAT)
    shown = tokens_in([readable(line) for line in sessions.messages(CHAT)])
    assert undamaged <= set(shown), "no undamaged line is lost"
    sent = tokens_in(session.conversation())
    is_new = any(line.get("mark") == "new" for line in intact)
    hidden = {*OLD_TOKENS} if is_new else set()
    hidden |= {"<11>", "<22>"} if b'"saved"' in data else set()  # else it was cut before that
    wanted = NEW_TOKENS if b'"new"' in whole else OLD_TOKENS | NEW_TOKENS
    assert wanted & undamaged <= set(sent), "none is hidden"
    assert not hidden & undamaged & set(sent), "and none comes back"
    session.append(user("<11> go on"))
    assert said(loaded(workspace, CHAT).history())[-1].endswith("<11> go on")
    aside = b"".join(each.read_bytes() for each in path.parent.glob("*.corrupt*"))
    assert all(line in path.read_bytes() + aside for line in data.split(b"\n")[:-1]), "is kept"


@pytest.mark.parametrize("count", [150, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("with_new", [True, False])
def test_of_a_journal_with_one_damaged_byte_every_other_line_goes_on(tmp_path, with_new, count):
    """Not of its numbers: nothing shows that a number was another one."""
    path = damaged_sample(tmp_path, with_new)
    whole = path.read_bytes()
    changes = []
    for text in re.finditer(rb'(?s)(?:(?<="n":)|(?<="upto":)) \d+|(.)', whole):
        if text[1]:
            byte = text[1][0]
            others = {byte ^ 1, byte ^ 0x20, byte ^ 0x80, *b"\n\x009-"} - {byte}
            changes += [(text.start(), other) for other in sorted(others)]
    for place, byte in random.Random(17).sample(changes, count or len(changes)):
        data = whole[:place] + bytes([byte]) + whole[place + 1 :]
        with told(f"byte {place} is {byte}: {data[max(place - 60, 0) : place + 30]}"):
            check_damaged(tmp_path, path, whole, data)


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("with_new", [True, False])
def test_a_journal_that_is_cut_at_any_byte_goes_on(tmp_path, with_new, every):
    path = damaged_sample(tmp_path, with_new)
    whole = path.read_bytes()
    for place in range(0, len(whole), every):
        for tail in (b"", b"\0" * 4_096):
            with told(f"cut at byte {place}"):
                check_damaged(tmp_path, path, whole, whole[:place] + tail)


ODD_LINES = [
    ("a torn line", '{"n": 2, "role": "assistant", "cont'),
    ("a number that is no JSON", '{"n": 2, "role": "user", "content": "x", "y": NaN}'),
    (
        "a call without a name",
        '{"n": 2, "role": "assistant", "content": null, '
        '"tool_calls": [{"id": "c", "function": {"mane": "f", "arguments": ""}}]}',
    ),
    (
        "a call without an id",
        '{"n": 2, "role": "assistant", "content": null, '
        '"tool_calls": [{"di": "c", "function": {"name": "f", "arguments": ""}}]}',
    ),
    ("a result of no call", '{"n": 2, "role": "tool", "content": "x"}'),
    ("a role that nobody knows", '{"n": 2, "role": "uses", "content": "x"}'),
    ("nested too deep", "[" * 50_000),
]


@pytest.mark.parametrize(("what", "line"), ODD_LINES)
def test_a_line_that_is_no_message_is_skipped_put_aside_once_and_told(tmp_path, caplog, what, line):
    """One such line made every later turn fail."""
    loop = make_loop(tmp_path, Model())
    say(loop, "before")
    path = loop.sessions.path(KEY)
    with open(path, "a", encoding="utf-8") as file:
        file.write(line + "\n")
    for _ in range(2):
        model = Model()
        assert say(make_loop(tmp_path, model), "after") == ["Fine."]
    assert said(model.asked[0].messages) == ["before", "after", "after"]
    aside = path.with_name(f"{path.name}.corrupt")
    assert aside.read_text(encoding="utf-8") == line + "\n"
    assert "1 unreadable line skipped, and copied to cli%3Adirect.jsonl.corrupt" in caplog.text


@pytest.mark.parametrize(
    "junk", [b"no journal at all\n", b"\xff\xfe\x00", b"{}\n[]\n", b"\0\0\0x\n"]
)
def test_a_file_in_which_nothing_can_be_read_is_moved_aside(tmp_path, caplog, junk):
    path = tmp_path / "sessions" / "cli%3Adirect.jsonl"
    path.parent.mkdir()
    path.write_bytes(junk)
    assert say(make_loop(tmp_path, Model()), "hi") == ["Fine."]
    [moved] = path.parent.glob("*.corrupt-*")
    assert moved.read_bytes() == junk and str(moved) in caplog.text
    assert contents(loaded(tmp_path).messages) == ["hi", "Fine."]


MARKS = [
    ("a damaged upto hides nothing that comes later", {"mark": "saved", "upto": 99}, 2, [*"cd"]),
    ("a delivery of what is not there, too", {"mark": "delivered", "upto": 99}, 0, [*"abcd"]),
    ("a mark that nobody knows is skipped", {"mark": "folded", "upto": 4}, 0, [*"abcd"]),
]


@pytest.mark.parametrize(("law", "mark", "saved", "left"), MARKS)
def test_marks(tmp_path, law, mark, saved, left):
    session = loaded(tmp_path)
    session.append(user("a"), answer("b"))
    with open(session.path, "a") as file:
        file.write(json.dumps(mark) + "\n")
    loaded(tmp_path).append(user("c"), answer("d"))
    again = loaded(tmp_path)
    assert (again.saved, contents(again.messages)) == (saved, left)
    assert contents(again.undelivered)[-1] == "d"


def test_a_round_that_the_history_has_and_the_journal_not_is_marked_with_its_summary(tmp_path):
    """A kill between the two writes, or a `saved` mark that is damaged."""
    memory = MemoryStore(tmp_path)
    session = loaded(tmp_path)
    session.append(user("<aa>"), answer("one"), user("<bb>"), answer("two"))
    origin = {"session": KEY, "created_at": session.created_at}
    memory.append_history("They talked.", **origin, upto=2, summary="It was about aa.")
    memory.append_history("Of a session that was deleted", session=KEY, created_at="2020", upto=4)
    history = loaded(tmp_path).history()
    assert tokens_in(history) == ["<bb>"] and "It was about aa." in history[0]["content"]
    memory.append_history("A journal that lost its end.", **origin, upto=40)
    again = loaded(tmp_path)
    again.append(user("next"))
    assert again.messages[-1]["n"] == 41, "above every number of the history, too"


# ---- What is sent of a journal ----

GAPS = [
    (
        "what broke off is told where the user goes on",
        [user("a"), answer("b", cut="no network"), user("c")],
        ["a", "b", "[the answer above broke off: no network]\n\nc"],
    ),
    (
        "what has no answer, too",
        [user("a"), "it was stopped", user("c", runtime="It is Monday")],
        ["a", "[the message above was not answered: it was stopped]\n\nIt is Monday\n\nc"],
    ),
    (
        "/continue goes on where an answer stops",
        [user("a"), answer("b", cut="it was stopped")],
        ["a", "b", "[the answer above broke off: it was stopped] Go on where the answer stops."],
    ),
    ("a rest without its question stays", [answer("b"), user("c")], ["b", "c"]),
]


@pytest.mark.parametrize(("law", "lines", "sent"), GAPS)
def test_what_is_sent_of_a_conversation(tmp_path, law, lines, sent):
    session = loaded(tmp_path)
    for line in lines:
        session.append(line) if isinstance(line, dict) else session.end_open_turn(line)
    assert contents(session.history()) == contents(loaded(tmp_path).history()) == sent
    own = {"runtime", "cut", "id", "timestamp"}
    assert not any(own & set(message) for message in session.history())


# ---- Journals of the system that this kit re-creates ----


def old_journals(folder: Path) -> Path:
    shutil.copytree(DATA / "old_journals", folder)
    return folder


@pytest.mark.parametrize(
    ("key", "sent", "unfinished"),
    [
        ("cli:first", ["what is in a.txt?", "It says hello."], False),  # cli_first.jsonl
        ("desk:9", ["hello", "Hi!", "are you still there?"], True),  # desk_9.jsonl, without its key
    ],
)
def test_a_journal_of_the_earlier_system_goes_on_where_it_was(tmp_path, key, sent, unfinished):
    """They are read in place and never rewritten."""
    workspace = old_journals(tmp_path / "ws")
    session = loaded(workspace, key)
    before = session.path.read_bytes()
    assert contents(session.conversation()) == sent
    assert (session.unfinished, session.is_open) == (unfinished, False)
    model = Model()
    say(make_loop(workspace, model), "and now?", "/new", "afresh", key=key)
    assert sent[0] in said(model.asked[0].messages)[0]
    assert said(model.asked[-1].messages) == ["afresh"]
    assert session.path.read_bytes().startswith(before)


def test_an_import_sends_nothing_again_and_resumes_nothing(tmp_path):
    model = Model()
    assert chat(old_journals(tmp_path / "ws"), model) == [] == model.asked


# ---- The inbox ----


APPEND = """
inbox = Inbox(Path(sys.argv[1]))
for n in range(int(sys.argv[2])):
    inbox.append({"id": f"{sys.argv[3]}.{n}", "kind": "user", "content": "x"})
"""


def test_programs_that_append_and_remove_at_once_lose_nothing(tmp_path):
    path = tmp_path / "x.inbox"
    programs = [another_program(APPEND, path, 40, name) for name in "ab"]
    inbox = Inbox(path)
    seen = []
    while len(seen) < 80:
        ids = [line["id"] for line in inbox.read()[:3]]
        seen += ids
        inbox.remove({*ids})
        assert ids or any(program.poll() is None for program in programs) or inbox.read(), "lost"
    for program in programs:
        program.communicate()
    for name in "ab":
        own = [each for each in seen if each.startswith(name)]
        assert own == [f"{name}.{n}" for n in range(40)], "in order"
    assert not path.exists()
    for _ in range(2):
        inbox.append({"id": "1", "kind": "user", "content": "x"})
    assert len(inbox.read()) == 1, "a known id is ignored"


# ---- Locks ----

HOLD = """
sessions = SessionManager(Path(sys.argv[1]))
if len(sys.argv) > 3:  # as if it were Windows
    import fcntl, os, types
    lock = lambda descriptor, mode, count: fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    sys.modules |= {"fcntl": None, "msvcrt": types.SimpleNamespace(locking=lock, LK_NBLCK=2)}
    os.name = "nt"
with sessions.lock(sys.argv[2]):
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_a_session_is_one_programs_and_a_killed_one_holds_nothing(tmp_path):
    sessions = SessionManager(tmp_path)
    with another_program(HOLD, tmp_path, KEY) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(SessionBusy, match=f"Session {KEY} is in use by another program. .* -s"):
            say(make_loop(tmp_path, Model()), "hi")
        assert not sessions.path(KEY).exists(), "nothing of it is journalled"
        other.kill()
    sessions.get(KEY)
    with sessions.lock(KEY):
        with sessions.lock(KEY):  # of the same program, inside a turn
            pass
        with pytest.raises(SessionBusy), SessionManager(tmp_path).lock(KEY):
            pytest.fail("the inner block released it")
    assert say(make_loop(tmp_path, Model()), "hi") == ["Fine."]
    assert contents(sessions.get(KEY).messages) == ["hi", "Fine."], "it is read again"


@posix
def test_windows_has_a_lock_too(tmp_path):
    with another_program(HOLD, tmp_path, KEY, "nt") as first:
        assert first.stdout.readline() == "held\n"
        assert another_program(HOLD, tmp_path, KEY, "nt").communicate("\n")[0] == ""
        first.kill()
    assert another_program(HOLD, tmp_path, KEY, "nt").communicate("\n")[0] == "held\n"


IN_USE = """
import os
path = Path(sys.argv[1]) / "a.txt"
write_atomically(path, "one")
os.name, replace = "nt", os.replace  # as if it were Windows, where a file that is open cannot be replaced
refusals = [PermissionError(13, "in use")] * 3

def replace_later(*paths):
    if refusals:
        raise refusals.pop()
    replace(*paths)

os.replace = replace_later
write_atomically(path, "two")
print(path.read_text())
refusals = [PermissionError(13, "in use")] * 1_000
try:
    write_atomically(path, "three")
except PermissionError:
    print(path.read_text())
"""


@posix
def test_on_windows_a_file_that_is_open_is_replaced_a_moment_later_or_stays_without_a_draft(
    tmp_path,
):
    out, _ = another_program(IN_USE, tmp_path).communicate()
    assert out.split() == ["two"] * 2 and not list(tmp_path.glob(".a.txt*"))


# ---- Turns that were killed, stopped or failed ----

GIVEN_UP = (
    "Your last message was not answered: nanobot was interrupted. /continue resumes the turn."
)
OPEN_TURNS = [
    ("a call without its result, resumed once", [called("c1")], 1, 23, "Fine."),
    ("resumed twice: it may be what kills the program", [], 2, 0, GIVEN_UP),
    ("more than a day old", [], 0, 25, GIVEN_UP),
    ("answered, and perhaps not delivered", [answer("yes")], 0, 0, "yes"),
]


def restarted(workspace: Path, model: LLMProvider) -> list[str]:
    """What a gateway sends by itself."""

    async def work(chats):
        await chats.answered()
        await chats.at_rest()

    return serve(workspace, model, work).finals()


@pytest.mark.parametrize(("what", "lines", "resumes", "hours", "sent"), OPEN_TURNS)
def test_what_the_next_gateway_does_with_a_killed_turn(tmp_path, what, lines, resumes, hours, sent):
    session = loaded(tmp_path, CHAT)
    session.append(user("<q>"), *lines)
    for _ in range(resumes):
        session.mark("resumed")
    os.utime(session.path, (time.time() - hours * 3_600,) * 2)
    model = Model()
    assert restarted(tmp_path, model) == [sent]
    assert len(model.asked) == (sent == "Fine.")
    assert chat(tmp_path, model, "/continue" if hours == 25 else "next") == ["Fine."]
    assert tokens_in(model.asked[-1].messages) == ["<q>"]
    assert ("not answered: interrupted" in str(model.asked[-1].messages)) is (resumes == 2)


def test_a_thousand_ids_are_remembered_whatever_went_into_the_memory(tmp_path):
    session = loaded(tmp_path, CHAT)
    for n in range(1_001):
        session.append(user("x", id=str(n)), answer("y"))
    session.mark("delivered", upto=session.last)
    session.mark("saved", upto=session.last, summary="Many.")
    model = Model()

    async def work(chats):
        await chats.say("again", id_="1000")
        await chats.say("again", id_="1")
        assert model.asked == []
        await chats.say("too long ago to know", id_="0")
        await chats.answered(1)

    serve(tmp_path, model, work)


@pytest.mark.parametrize("is_stopped", [True, False])
def test_what_a_chat_was_not_shown_of_an_answer_is_not_kept_as_said(tmp_path, is_stopped):
    """Else the user gets the second half of an answer, and never the first."""
    gate = Gate()

    async def half(request):
        await request.show("Half", " an ans")
        return await gate.wait()

    async def work(chats):
        await chats.say("<q>")
        await gate.reached.wait()
        if is_stopped:  # else the gateway ends
            await chats.say("/stop")
            await chats.answered(1)

    serve(tmp_path, Model(half), work)
    model = Model()
    assert chat(tmp_path, model, *["/continue"] * is_stopped) == ["Fine."]
    assert not re.search("Half|Go on where", str(model.asked[0].messages))


# ---- Consolidation: from the journal into the memory ----


def talk_of(workspace: Path, turns: int, size: int = 0, key: str = KEY) -> Session:
    session = loaded(workspace, key)
    for n in range(turns):
        session.append(user(f"<q.{n}> {'x ' * (size // 2)}"), answer(f"<a.{n}>"))
    return session


def saved_tokens(request) -> list[str]:
    return tokens_in(request.messages[1]["content"].partition("# Conversation")[2])


def test_after_a_turn_the_oldest_turns_move_until_half_the_window_is_left(tmp_path):
    talk_of(tmp_path, 5)
    model = Model(save=saving(f"{HOUR}They talked.", "- The boat is Vesta", "About a boat."))
    loop = make_loop(tmp_path, model, memory_window=12)
    say(loop, "sixth")
    assert model.saves == [], "as many messages as the window has may be unsaved"
    say(loop, "seventh")
    [request] = model.saves
    assert saved_tokens(request) == tokens_in([f"<q.{n}><a.{n}>" for n in range(4)])
    session = loaded(tmp_path)
    assert (session.saved, len(session.messages)) == (8, 6)
    [entry] = MemoryStore(tmp_path).entries()
    assert (entry["timestamp"], entry["upto"]) == ("2026-04-03 00:02", 8)
    say(make_loop(tmp_path, model, memory_window=12), "eighth")
    system, summary, *rest = model.asked[-1].messages
    assert "The boat is Vesta" in system["content"] and "They talked." in system["content"]
    assert "About a boat." in summary["content"] and "<q.0>" not in str(rest)


def test_a_turn_runs_within_80_percent_of_the_budget_and_its_system_prompt_stays_the_same(tmp_path):
    """The check runs before a turn and between its steps; nothing of this turn moves."""

    def talk(request):
        steps = len([m for m in request.messages if m["role"] == "tool"])
        page = call("read_file", path="large.txt", offset=steps + 1, limit=165)
        return "Done." if steps == 6 else page

    talk_of(tmp_path, 12, 3_200)
    model = Model(talk, saving(f"{HOUR}They talked.", "- new", "Earlier things."))
    loop = make_loop(tmp_path, model, context_window_tokens=16_000, max_tokens=2_000)
    (tmp_path / "large.txt").write_text("some words of a line\n" * 200)
    assert say(loop, "<task> read it") == ["Done."]
    assert len(model.saves) > 1, "before the turn, and between its steps"
    first, *rest = [request.messages[0] for request in model.asked]
    assert all(each == first for each in rest), "although MEMORY.md has changed meanwhile"
    for request in model.asked:
        size = total_tokens(request.messages) + estimate(json.dumps(request.tools))
        assert size <= 0.8 * (16_000 - 2_000 - 1_024) + 100
        assert "<task>" in str(request.messages) and "left out" not in str(request.messages)


@needs_git
def test_a_consolidation_is_a_commit_that_can_be_shown_and_undone_by_its_id(tmp_path):
    loop = make_loop(tmp_path, Model(save=saving("They talked.", "- one\n- three\n- four")))
    loop.memory.facts.write_text("- one\n- two\n")
    loop.sessions.get(KEY).append(*BEFORE_NEW)
    told_texts = []
    loop.tell = lambda text: asyncio.sleep(0, told_texts.append(text))
    say(loop, "/new", "hi")
    text = loop.provider.saves[0].messages[1]["content"].partition("# Conversation")[2]
    in_order = "user: <33>.*assistant: calls now.*tool read_file: <55>.*assistant: <66>"
    assert re.search(f"(?s){in_order}", text)
    last, first = say(loop, "/dream-log")[0].split("\n")
    counts = "1 file changed, 2 insertions(+), 1 deletion(-)"
    assert told_texts == [f"4 older messages moved to the memory; memory: {counts}"]
    assert last.endswith(f"saved from a conversation: {counts}")
    assert "edited by you or the agent" in first, "what the user wrote is a commit of its own"
    id_ = last.split()[0]
    assert "-- two\n+- three\n" in say(loop, f"/dream-log {id_}")[0]
    loop.memory.facts.write_text("- 1\n- three\n- four\n")  # the line before the change
    assert say(loop, f"/dream-restore {id_}")[0].startswith("Undone: 1 file changed")
    assert loop.memory.read_facts() == "- 1\n- two\n"


ANSWERS = [
    ("an answer without a call is no help: raw at once", [USELESS], 1, "raw"),
    ("a call with wrong arguments neither", [call("save_memory", history_entry=5)], 1, "raw"),
    ("a cut answer is asked for again", [CUT, saving("Saved.")], 2, "Saved."),
    ("three times at most", [CUT] * 5, 3, "raw"),
    ("too long for the model: raw", [replace(DOWN, is_overflow=True)] * 2, 1, "raw"),
    ("thoughts are no part of an entry", [saving("<think>hm</think>\nSaved.")], 1, "Saved."),
    ("an unreachable model: the round waits", [DOWN], 1, None),
]


@pytest.mark.parametrize(("law", "replies", "asks", "entry"), ANSWERS)
def test_whatever_the_model_says_nothing_is_lost(tmp_path, law, replies, asks, entry):
    rest = iter(replies)
    model = Model(save=lambda _: next(rest))
    loop = make_loop(tmp_path, model)
    loop.memory.facts.write_text("- The cat is Tom\n")
    say(loop, "<aa>", "<bb>")
    assert say(loop, "/new")[0].startswith("A new conversation begins")
    assert len(model.saves) == asks
    if entry is None:
        assert history_of(tmp_path) == [] and loaded(tmp_path).saved == 0
        model.save, entry = saving(f"{HOUR}Saved."), "Saved."
        say(loop, "and later")
        assert saved_tokens(model.saves[-1]) == ["<aa>", "<bb>"]
    assert loaded(tmp_path).saved == 4
    [kept] = history_of(tmp_path)
    if entry == "raw":
        assert kept.startswith("[RAW]") and tokens_in(kept) == ["<aa>", "<bb>"]
        assert loop.memory.read_facts() == "- The cat is Tom\n"
    else:
        assert kept == entry


@pytest.mark.parametrize(
    ("changes", "text", "entry"),
    [(3, "- Old\n- New\n", "Entry."), (9, "- By hand, 3\n", "[RAW]")],
)
def test_memory_that_changes_meanwhile_is_asked_for_again_and_never_overwritten(
    tmp_path, changes, text, entry
):
    facts = MemoryStore(tmp_path).facts

    def save(request):
        if len(model.saves) < changes:
            facts.write_text(f"- By hand, {len(model.saves)}\n")
        return saving("Entry.", "- Old\n- New")

    model = Model(save=save)
    say(make_loop(tmp_path, model), "hello", "/new")
    assert facts.read_text() == text and len(model.saves) == 3
    assert history_of(tmp_path)[0].startswith(entry)


def test_a_summary_that_is_missing_is_the_entry_and_the_earlier_one_is_carried_on(tmp_path):
    talk_of(tmp_path, 12)
    replies = iter([saving("First entry.", summary="It began."), saving("Second entry.")])
    model = Model(save=lambda _: next(replies))
    loop = make_loop(tmp_path, model, memory_window=8)
    say(loop, "a", "b", "c", "d")
    assert "It began." in model.saves[1].messages[1]["content"]
    summary = loaded(tmp_path).history()[0]["content"]
    assert "It began." in summary and "Second entry." in summary


def test_a_turn_that_fits_and_new_wait_for_no_memory(tmp_path):
    async def talk() -> None:
        gate = Gate()
        loop = make_loop(
            tmp_path, Model(save=lambda _: gate.wait(saving("Entry."))), memory_window=2
        )
        for n in range(3):
            await loop.process_direct(f"question {n}", KEY)
        await gate.reached.wait()
        for text in ("question 3", "/new", "question 4", "/status"):
            assert (await loop.process_direct(text, KEY)).stop_reason == "completed"
        gate.open.set()
        await loop.background.settled()
        assert loop.sessions.get(KEY).start == 8

    asyncio.run(talk())
    assert history_of(tmp_path) and set(history_of(tmp_path)) == {"Entry."}


# ---- Requests fit the window, whatever the conversation was ----


def random_conversation(dice: random.Random) -> tuple[list[dict], dict]:
    """A lawful request, and the message that its turn is about. `<said>` marks what must stay."""
    letters = [" word", '{}[]":', "日本", "🙂", "0123456789abcdef", "=" * 9]

    def text() -> str:
        return dice.choice(letters) * dice.choice([1, 10, 100, 600, 4_000])

    image = {"type": "image_url", "image_url": {"url": "data:,x"}}
    messages = [{"role": "system", "content": "You are <said>." + text()}]
    messages += [user("[Summary] " + "word " * 200, is_summary=True)] * dice.choice([0, 0, 1])
    turns = dice.randint(1, 12)
    for n in range(turns):
        is_last = n == turns - 1
        begin = len(messages)
        messages.append(user("<said>" + text() if is_last else text()))
        for step in range(dice.choice([0, 1, 2, 15])):
            ids = [f"{n}.{step}.{k}" for k in range(dice.randint(1, 3))]
            messages += [called(*ids), *(result(id_, text()) for id_ in ids)]
            if is_last and dice.random() < 0.2:
                messages.append(user([image, {"type": "text", "text": "<said>"}]))
        if not is_last:
            messages.append(answer(text()))
    return messages, messages[begin]


@pytest.mark.parametrize("count", [150, pytest.param(3_000, marks=pytest.mark.slow)])
def test_every_request_fits_is_lawful_and_keeps_what_the_user_said_in_this_turn(count):
    dice = random.Random(4)
    for n in range(count):
        messages, task = random_conversation(dice)
        before = json.dumps(messages)
        stays = [m for m in messages[messages.index(task) :] if m["role"] == "user"]
        stays += [m for m in messages if "is_summary" in m]
        least = total_tokens([messages[0], *stays]) + 700
        budget = least + dice.choice([0, 100, 2_000, 20_000, 200_000])
        with told(f"conversation {n}"):
            request = Governed(messages, budget, dict(task))  # a hook may have copied it
            assert json.dumps(messages) == before, "the conversation itself is not changed"
            fits = total_tokens(messages) <= budget
            assert (request.messages == messages and not request.notes) is fits
            assert request.tokens <= budget, (request.tokens, budget, request.notes)
            sent = str(request.messages)
            assert sent.count("<said>") == before.count("<said>"), "what was said stays"
            lawful = legal(request.messages)
            assert legal(lawful) == lawful


SAMPLES = json.loads((DATA / "token_counts.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", SAMPLES)
def test_the_estimate_is_within_0_6_and_2_4_of_the_true_count(name):
    assert 0.6 <= estimate(SAMPLES[name]["text"]) / SAMPLES[name]["tokens"] <= 2.4


def test_a_turn_that_is_longer_than_the_window_keeps_what_it_did(tmp_path):
    """Each request of a turn with twelve large pages: the oldest steps become one list of calls."""

    def talk(request):
        step = len(model.asked)
        return "Done." if step == 13 else call("read_file", path=f"page{step}.txt")

    for n in range(1, 13):
        (tmp_path / f"page{n}.txt").write_text(f"Title {n}\n" + "some words of a line\n" * 200)
    model = Model(talk)
    loop = make_loop(tmp_path, model, context_window_tokens=11_000, max_tokens=2_000)
    assert say(loop, "<task> Read all pages") == ["Done."]
    text = model.asked[-1].messages[1]["content"].partition("<task> Read all pages\n\n")[2]
    assert "messages left out. The calls, and the first line" in text
    for n in range(1, 9):
        call_of_page = f'assistant: calls read_file({{"path": "page{n}.txt"}})'
        assert f"\n{call_of_page}\ntool read_file: 1| Title {n}\n" in f"{text}\n"
    assert all(total_tokens(request.messages) < 8_000 for request in model.asked)


# ---- The history ----


def test_cursors_rise_whatever_happened_to_the_files(tmp_path):
    memory = MemoryStore(tmp_path)
    append(memory, "One.")
    with open(memory.history, "a") as file:
        file.write('{"cursor": 40, "timestamp": "x", "content": 5}\n{"cursor": 9, "time')
    append(memory, "Two.")
    (memory.folder / ".dream_cursor").write_text("50")
    append(memory, "Three.", "Four.")
    assert [entry["cursor"] for entry in memory.entries()] == [1, 2, 51, 52]
    assert [entry["cursor"] for entry in memory.unread()] == [51, 52]
    for damage in (b"", b"-5", b"\xff", b"9" * 5_000):
        (memory.folder / ".dream_cursor").write_bytes(damage)
        assert len(memory.unread()) == 4, "then nothing counts as read"


APPEND_HISTORY = """
for n in range(60):
    MemoryStore(Path(sys.argv[1])).append_history(f"{sys.argv[2]}.{n}")
"""


def test_programs_that_write_the_history_at_once_lose_and_double_nothing(tmp_path):
    memory = MemoryStore(tmp_path)
    append(memory, "before")
    programs = [another_program(APPEND_HISTORY, tmp_path, name) for name in "ab"]
    while any(program.poll() is None for program in programs):
        (memory.folder / ".dream_cursor").write_text("1000000")
        memory.archive_old(keep=10)
    for program in programs:
        program.communicate()
    entries = lines_of(memory.folder / "history-archive.jsonl") + memory.entries()
    texts = [f"{name}.{n}" for name in "ab" for n in range(60)]
    assert sorted(contents(entries)) == sorted(["before", *texts])
    assert len({entry["cursor"] for entry in entries}) == 121
    unread = contents(memory.entries())
    (memory.folder / ".dream_cursor").write_text("0")
    memory.archive_old(keep=1)
    assert contents(memory.entries()) == unread, "what Dream has not read stays"


def test_recent_history_is_what_dream_has_not_read_and_the_last_five_anyway(tmp_path):
    memory = MemoryStore(tmp_path)
    append(memory, *(f"{HOUR}entry {n}" for n in range(1, 13)))
    for read, first in ((6, 7), (12, 8)):
        (memory.folder / ".dream_cursor").write_text(str(read))
        assert memory.recent_history() == [f"{HOUR}entry {n}" for n in range(first, 13)]
    append(memory, "so long " * 1_500)
    assert 1_400 < estimate(memory.recent_history()[-1]) < 1_800, "what the others do not need"


def test_what_people_said_at_terminals_is_an_entry_after_an_hour_with_all_of_it(tmp_path):
    """And with the names of files; no model is asked."""
    sessions = SessionManager(tmp_path)

    def talk(key: str, text: str, hours: float, typed: bool = True) -> None:
        session = sessions.get(key)
        session.origin = {"folder": f"/{key}", "typed": typed}
        session.append(*[answer("Done. " * 500)] * 15, user(text), called("c", name="write_annex"))
        os.utime(session.path, (time.time() - hours * 3_600,) * 2)

    def entries() -> list[str]:
        remember_terminals(sessions)
        return history_of(tmp_path)

    text = "The tax number is 231/140/07755. " + "Two members sign. " * 60 + "Due on 3 December."
    talk("cli:a", text, 5)
    talk("cli:c", "script", 4, typed=False)
    talk("cli:d", "now", 0.5)
    [entry] = entries()
    assert "In /cli:a:" in entry and text in entry and "calls write_annex({})" in entry
    assert "not answered" in entry and estimate(entry) < 6_500
    talk("cli:a", "two", 2)  # somebody continued it
    assert entries() == entries() and len(entries()) == 2
    assert "user: two" in entries()[1] and text not in entries()[1]


FACTS = [
    ("nothing empties it", "- a\n", "", "- a\n"),
    ("a long text may not shrink to less than half", "x" * 400, "x" * 150, "x" * 400),
    ("to half it may", "x" * 400, "y" * 200, "y" * 200 + "\n"),
]


@pytest.mark.parametrize(("law", "before", "new", "after"), FACTS)
def test_memory_md(tmp_path, law, before, new, after):
    memory = MemoryStore(tmp_path)
    memory.folder.mkdir()
    elsewhere = tmp_path / "elsewhere.md"
    elsewhere.write_text(before)
    elsewhere.chmod(0o600)
    link(memory.facts, elsewhere)
    assert memory.write_facts(new, instead_of=before)
    assert elsewhere.read_text() == after and memory.facts.is_symlink(), "a link stays a link"
    assert elsewhere.stat().st_mode & 0o777 == 0o600
    assert not memory.write_facts("- other", instead_of="- what it was not")
    assert elsewhere.read_text() == after


# ---- One fence reads every file that goes into a request ----


PLANTED = {
    "a link to the settings file": lambda path, secret: path.symlink_to(secret),
    "a FIFO": lambda path, _: os.mkfifo(path),
    "a device": lambda path, _: path.symlink_to("/dev/zero"),
    "a folder": lambda path, _: path.mkdir(),
    "20 MB": lambda path, _: [path.touch(), os.truncate(path, 20_000_000)],
}
PLACES = [
    "HEARTBEAT.md",
    "memory/MEMORY.md",
    "SOUL.md",
    "skills/odd/SKILL.md",
]


@posix
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("odd", PLANTED)
def test_no_file_that_a_command_planted_gets_into_a_request_or_holds_it_up(
    tmp_path, own_home, odd, place
):
    """HEARTBEAT.md linked to the settings file sent the keys; a FIFO hung the gateway."""
    secret = own_home / ".nanobot" / "config.json"
    secret.parent.mkdir()
    secret.write_text('{"providers": {"openai": {"apiKey": "sk-secret"}}}')
    model = Model(lambda request: "[MEMORY] x" if "# History" in str(request.messages) else "Fine.")
    loop = make_loop(tmp_path / "ws", model)
    loop.config.gateway.heartbeat.enabled = True
    loop.program.sleep = lambda seconds: asyncio.sleep(0, slept.append(seconds))
    slept = []
    loop.memory.append_history("Something happened.")
    path = loop.workspace / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    PLANTED[odd](path, secret)

    async def work() -> None:
        runner = JobRunner(loop)
        runner.add_system_jobs()
        assert (await loop.process_direct("hi", KEY)).stop_reason == "completed"
        for job in runner.clock.jobs():
            with contextlib.suppress(OSError, ValueError):  # a dream that may not read its files
                await runner.run_job(job, "name")

    asyncio.run(asyncio.wait_for(work(), 60))
    assert slept == [600.0], "who has just opened the page does not wait for a dream"
    assert model.asked and "sk-secret" not in str([request.messages for request in model.asked])
    assert all(len(str(request.messages)) < 100_000 for request in model.asked)


# ---- Dream ----
BLUE = "- Favourite colour: blue\n"
GREEN = "- Favourite colour: green\n"


def dreamer(
    home: Path, *edits: tuple, found: object = "[MEMORY] blue", end: object = "Noted."
) -> AgentLoop:
    """The real loop and tools: phase 1 finds, phase 2 makes these calls, one after the other."""
    calls = iter([call(name, **arguments) for name, arguments in edits])

    def talk(request):
        return next(calls, end) if "# Findings" in str(request.messages) else found

    return make_loop(home, Model(talk))


def edit(old: str, new: str, path: str = "memory/MEMORY.md") -> tuple[str, dict]:
    return "edit_file", {"path": path, "old_text": old, "new_text": new}


def write(text: str, path: str = "skills/mine/SKILL.md") -> tuple[str, dict]:
    return "write_file", {"path": path, "content": text}


@pytest.fixture
def home(tmp_path):
    """A workspace in which three things have happened."""
    make_loop(tmp_path / "ws", Model())
    memory = MemoryStore(tmp_path / "ws")
    append(memory, *(f"[2026-04-03 00:0{n}] Thing {n}." for n in range(3)))
    memory.facts.write_text(GREEN)
    return tmp_path / "ws"


@needs_git
def test_a_dream_reads_what_is_unread_edits_and_is_one_commit_and_the_users_edits_are_another(home):
    (home / "SOUL.md").write_text("# Be kind.\n")  # by the user
    found = "Here:\n- [MEMORY] blue\n[MEMORY-REMOVE] green\nAll."
    loop = dreamer(home, edit("green", "blue"), found=found)
    [told_text] = say(loop, "/dream")
    assert told_text.startswith("Dreamt about 3 entries: 1 file changed, 1 insertion(+), 1 del")
    find, phase_2 = (request.messages[1]["content"] for request in loop.provider.asked[:2])
    assert "[2026-04-03 00:02] Thing 2." in find and GREEN in find
    assert "# Findings\n\n[MEMORY] blue\n\n[MEMORY-REMOVE] green" in phase_2
    assert loop.memory.read_facts() == BLUE and say(loop, "/dream")[0].startswith("There is noth")
    first, second = say(loop, "/dream-log")[0].split("\n")
    assert "dream: 1 file changed" in first and "edited by you" in second


FINDINGS = [
    ("[USER] a", "edits"),
    ("<think>\n[MEMORY] no\n</think>\n[SKIP]", "nothing"),
    ("<think>maybe [SKIP]?</think>Hello", "failed"),
    ("<think>[MEMORY] never ends", "failed"),
]


@pytest.mark.parametrize(("found", "outcome"), FINDINGS)
def test_what_a_dream_finds(home, monkeypatch, found, outcome):
    monkeypatch.setenv("PATH", "")  # without git
    loop = dreamer(home, found=found)
    [told_text] = say(loop, "/dream")
    assert len(loop.provider.asked) == (2 if outcome == "edits" else 1)
    assert ("The dream failed. Nothing is lost" in told_text) is (outcome == "failed")
    assert len(loop.memory.unread()) == (3 if outcome == "failed" else 0)


def test_three_failures_in_a_row_skip_the_entries_and_an_endpoint_that_is_down_never_does(
    home, caplog
):
    told_text = say(dreamer(home, end=DOWN), *["/dream"] * 4)[-1]
    assert "did not reach the model. Nothing is lost" in told_text
    *failed, skipped = say(dreamer(home, found="What a nice day."), *["/dream"] * 3)
    assert failed[1].startswith("The dream failed")
    assert skipped.startswith("Dreamt about 3 ")
    assert "these entries are skipped" in caplog.text


FINE = [
    edit("green", "blue"),
    ("read_file", {"path": "SOUL.md"}),
    write("---\nname: mine\n---\n1. Do it."),
    write("1. Do it.", "skills/mine/data/list.txt"),
]
REFUSED = [
    edit("{", "[", "memory/history.jsonl"),
    ("read_file", {"path": "{secret}"}),
    ("read_file", {"arguments": '{"path": "{secret}"}'}),
    ("write_file", {"arguments": {"path": "SOUL.md", "content": "Be rude."}}),
    write("x", "skills/../SOUL.md"),
    write("x", "skills/link/SKILL.md"),
]
FENCE = [*((step, True) for step in FINE), *((step, False) for step in REFUSED)]


@pytest.mark.parametrize(("step", "may"), FENCE, ids=[str(step)[:70] for step, _ in FENCE])
def test_a_dreamer_edits_three_files_and_its_own_skills_only(home, own_home, tmp_path, step, may):
    """Arguments are judged in the form that will run, a skill in the form that is loaded."""
    (own_home / "id_rsa").write_text("sk-secret")
    (home / "skills").mkdir()
    if "link" in str(step):
        link(home / "skills" / "link", tmp_path)
    step = json.loads(json.dumps(step).replace("{secret}", (own_home / "id_rsa").as_posix()))
    loop = dreamer(home, step)

    def texts() -> set[bytes]:
        return {path.read_bytes() for path in tmp_path.rglob("*.[jmt]*") if path.is_file()}

    before = texts()
    say(loop, "/dream")
    assert "sk-secret" not in str([request.messages for request in loop.provider.asked])
    assert (texts() != before) is (may and step[0] != "read_file")


# ---- What was dreamt can be undone ----

UNDONE = {  # before and after a dream, a setting of the user's
    "lines that look like a diff's own": (b"- a\n-- x\n++ y\n", b"- a\n+++ z\n", ""),
    "lines behind a missing line end": (b"old", b"new\nmore", ""),
    "bytes that are no UTF-8": (b"caf\xe9\nold\n", b"caf\xe9\nnew\n", ""),
    "line ends that git may change": (b"- a\r\n", b"- b\r\n", "* text=auto eol=crlf"),
    "what git could fill in": (b"- $Id$\n", b"- $Id$\n- b\n", "*.md ident"),
}


@needs_git
@pytest.mark.parametrize("name", UNDONE)
def test_what_a_dream_changed_is_undone_to_the_byte_with_modes_kept(home, name):
    before, after, attributes = UNDONE[name]
    (home / ".gitattributes").write_text(f"{attributes}\n")
    path = home / "memory" / "MEMORY.md"
    soul = home / "SOUL.md"
    path.write_bytes(before)
    path.chmod(0o600)
    repository = MemoryRepository(home)
    repository.record("other changes")
    path.write_bytes(after)
    assert repository.commit("dream")
    soul.write_text("later\n")
    assert repository.restore().startswith("Undone: 1 file changed")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (before, 0o600)
    assert soul.read_text() == "later\n", "what came later stays"
    assert "the commit is undone already" in repository.restore()


@needs_git
def test_with_a_damaged_repository_it_dreams_all_the_same_and_says_what_to_do(home):
    say(dreamer(home, found="[SKIP]"), "/dream")
    folder = home / ".nanobot" / "memory.git"
    (folder / "HEAD").write_text("nonsense")
    memory = MemoryStore(home)
    memory.append_history("More.")
    [told_text] = say(dreamer(home, edit("green", "blue")), "/dream")
    remedy = f"If {folder} is damaged, remove it: the next dream begins a new one."
    assert "cannot be shown or undone" in told_text and remedy in told_text
    shutil.rmtree(folder)
    memory.append_history("More.")
    skill = write("---\ndescription: Use to publish.\n---\n1. Do it.")
    say(dreamer(home, edit("blue", "red"), skill), "/dream")
    assert "red" in memory.read_facts() and list(home.glob("skills/mine/*"))
    say(dreamer(home), "/dream-restore")
    assert memory.read_facts() == BLUE and not list(home.glob("skills/mine/*"))
    assert "/dream-log lists the commits" in MemoryRepository(home).restore("--help")


@needs_git
def test_a_lock_that_a_killed_git_has_left_does_not_end_the_history(home):
    MemoryRepository(home).commit("first")
    (home / ".nanobot" / "memory.git" / "index.lock").touch()
    [told] = say(dreamer(home, edit("green", "blue")), "/dream")
    assert "1 insertion(+), 1 deletion(-)" in told and MemoryStore(home).read_facts() == BLUE


@needs_git
def test_the_users_own_repository_and_settings_are_left_alone(home, own_home, monkeypatch):
    outer = home.parent
    subprocess.run(["git", "init", "-q"], cwd=outer)
    (own_home / ".gitconfig").write_text("[commit]\ngpgsign = true\n[user]\nname = Somebody\n")
    monkeypatch.setenv("GIT_DIR", str(outer / ".git"))  # as in a hook of git
    monkeypatch.setenv("GIT_INDEX_FILE", str(outer / ".git" / "index"))
    _, log = say(dreamer(home, edit("green", "blue")), "/dream", "/dream-log")
    assert "dream: 1 file changed" in log
    assert not list(home.rglob(".git")) and not (outer / ".git" / "index").exists()


def test_one_dream_at_a_time_and_nothing_is_undone_meanwhile(home):
    async def two():
        gate = Gate()
        loop = make_loop(home, Model(lambda _: gate.wait("[SKIP]")))
        first = asyncio.create_task(loop.process_direct("/dream"))
        await gate.reached.wait()
        with pytest.raises(SessionBusy, match="Another dream"):
            await make_loop(home, Model("[SKIP]")).process_direct("/dream")
        assert "Nothing is changed" in MemoryRepository(home).restore()
        gate.open.set()
        assert "Dreamt about 3" in (await first).final_content

    asyncio.run(two())


# ---- Skills ----


def skill_file(folder: Path, text: str | bytes, name: str = "demo") -> Path:
    path = folder / name / "SKILL.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def read_skill(folder: Path, text: str | bytes):
    skill_file(folder, text)
    [skill] = SkillsLoader(folder).load()
    return skill


DESCRIPTIONS = [
    ('"In quotes: yes"', "In quotes: yes"),
    ('Use to say "hi"', 'Use to say "hi"'),
    (">-\n  Use for\n  the weather.", "Use for the weather."),
    ("|\n  Use for: the weather.", "Use for: the weather."),
    (
        "Use for\n  the weather.\n  Note: not for the sea.",
        "Use for the weather. Note: not for the sea.",
    ),
    ('"say \\"hi\\" # twice" # once', 'say "hi" # twice'),
]


@pytest.mark.parametrize(("written", "read"), DESCRIPTIONS)
def test_a_description_is_read_as_it_was_meant(tmp_path, written, read):
    text = f"---\ndescription: {written}\nalways: no\nname: x\n---\nDo it.\n"
    for form in (text, "\ufeff" + text.replace("\n", "\r\n")):
        skill = read_skill(tmp_path, form)
        assert (skill.description, skill.always, skill.name) == (read, False, "x")
        assert skill.text == "Do it."
    for form in ("Do it.", b"\xff\xfe Do it."):
        assert read_skill(tmp_path, form).text.endswith("Do it.")


NEEDS = ["program no-such-b", "environment variable NO_SUCH_A"]
REQUIRES = [
    ('metadata: {"nanobot": {"requires": {"bins": ["no-such-b"], "env": ["NO_SUCH_A"]}}}', NEEDS),
    ('metadata: {\n "nanobot": {"requires":\n   {"bins": ["no-such-b"]}}\n }', NEEDS[:1]),
    (
        "metadata:\n  nanobot:\n    requires:\n      bins:\n"
        f"        - {'cmd' if os.name == 'nt' else 'sh'}\n        - no-such-b\n"
        "      env: [NO_SUCH_A]  # the key",
        NEEDS,
    ),
    ("metadata: " + "[" * 50_000, []),
]


@pytest.mark.parametrize(("front", "missing"), REQUIRES, ids=range(len(REQUIRES)))
def test_what_a_skill_requires_and_this_machine_lacks_is_named(tmp_path, front, missing):
    skill = read_skill(tmp_path, f"---\nname: x\n{front}\ndescription: Use it.\n---\nDo it.")
    assert (skill.missing, skill.description, skill.text) == (missing, "Use it.", "Do it.")


def test_an_always_skill_is_in_the_prompt_in_full_or_listed_as_unavailable(tmp_path):
    """One of the workspace shadows the kit's of its name."""
    loop = make_loop(tmp_path, Model())
    skills = tmp_path / "skills"
    skill_file(skills, "---\nalways: True\n---\nRule one.", "one")
    skill_file(skills, "---\nalways: yes\nrequires:\n  bins: [no-such]\n---\nRule two.", "two")
    skill_file(skills, "---\ndescription: My own.\n---\nMine.", "weather")
    say(loop, "hi")
    system = loop.provider.asked[0].messages[0]["content"]
    assert "## one\n\nRule one." in system and "Rule two." not in system
    assert re.search(r"- two: .*SKILL.md\) \[unavailable: needs program no-such\]", system)
    assert system.count("- weather:") == 1 and "- weather: My own." in system


def test_a_broken_skill_is_named_once_and_the_others_stay(tmp_path, caplog):
    skill_file(tmp_path, "My own.")
    (tmp_path / "folder" / "SKILL.md").mkdir(parents=True)
    loader = SkillsLoader(tmp_path)
    for _ in range(3):
        (skill,) = loader.load()
    assert skill.text == "My own."
    assert caplog.text.count("folder/SKILL.md is left out".replace("/", os.sep)) == 1


# ---- Nothing that reads foreign text takes long ----

FOREIGN = [
    *"aA0 \t\n\r-:[]{}<>#\"'|*.,\\/_=é日",
    "- ",
    ": ",
    "a: ",
    " a:\n",
    "\n ",
    "[ ",
    "<think>",
    "---\n",
]


@pytest.mark.long
@pytest.mark.parametrize("piece", FOREIGN, ids=ascii)
def test_100000_characters_of_anything_are_read_within_a_second(tmp_path, monkeypatch, piece):
    monkeypatch.setenv("PATH", "")
    text = piece * (100_000 // len(piece))
    loop = dreamer(tmp_path, found=text)
    append(loop.memory, text, "[2026-04-03 00:02]" + text, "[2026-" + text)
    works = [
        partial(say, loop, "/dream"),
        partial(Governed, [user(text)], 100, None),
        partial(append, loop.memory, f"[{text}"),
    ]
    for head in ("", "metadata: ", "description: ", "requires:\n ", f"{piece}: "):
        folder = tmp_path / f"s{len(works)}"
        skill_file(folder, f"---\n{head}{text}"[:100_000])
        works.append(SkillsLoader(folder).load)
    for work in works:
        began = time.process_time()
        work()
        assert time.process_time() - began < 1, work


# ---- A long conversation ----


def keeping(pattern: str):
    """A model that saves what it finds in a conversation, and gives MEMORY.md back whole."""

    def save(request):
        facts, _, talked = request.messages[1]["content"].partition("# Conversation")
        found = re.findall(pattern, talked)
        lines = re.findall(r"(?m)^- .*$", facts) + [f"- The user's {each}" for each in found]
        return saving(
            f"{HOUR}Saved: {' '.join(found)}", "\n".join(dict.fromkeys(lines)), "This and that."
        )

    return save


def talkative_loop(workspace: Path, window: int = 65_536) -> AgentLoop:
    """Its model reads a file in each turn, and keeps what the user likes best. bench.py uses it, too."""

    def talk(request):
        is_read = request.messages[-1]["role"] == "tool"
        return "It says something." if is_read else call("read_file", path="a.txt")

    model = Model(talk, keeping(r"my (favourite \w+ is \w+)"))
    (workspace / "a.txt").write_text("a line of text\n" * 200)
    return make_loop(workspace, model, context_window_tokens=window, max_tokens=2_000)


@pytest.mark.long
@pytest.mark.parametrize("turns", [210, pytest.param(2_000, marks=pytest.mark.slow)])
def test_a_conversation_of_2000_turns_forgets_nothing_and_what_is_sent_does_not_grow(
    tmp_path, turns
):
    loop = talkative_loop(tmp_path, 8_000)
    model = loop.provider
    sizes = []

    async def work() -> None:
        for n in range(turns):
            text = "my favourite colour is green" if n == 3 else f"question {n}"
            await loop.process_direct(text, KEY)
            await loop.background.settled()
            requests = [*model.asked, *model.saves]
            sizes.append(sum(len(json.dumps(request.messages)) for request in requests))
            model.asked, model.saves = [], []

    asyncio.run(work())
    assert sum(sizes[-70:]) <= 1.3 * sum(sizes[70:140]), (
        "of 70 turns: rounds of consolidation even out"
    )
    assert "favourite colour is green" in loop.memory.read_facts()
    session = loaded(tmp_path)
    assert session.saved > 4 * (turns - 70) and "green" not in str(session.history())


# ---- A gateway that test_long_run.py kills ----


def die_at_write(workspace: Path, moment: int) -> None:
    """`kill -9` before the process writes to, renames or removes its `moment`th file; 0: never."""
    writes = itertools.count(1)

    def look(event: str, arguments: tuple) -> None:
        is_write = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        is_ours = (
            is_write and str(workspace) in str(arguments[0]) and ".lock" not in str(arguments[0])
        )
        if (is_ours or event in ("os.rename", "os.remove")) and next(writes) == moment:
            os.kill(os.getpid(), 9)

    sys.addaudithook(look)


class Wire(Channel):
    name = "desk"

    async def start(self, bus):
        while True:
            number, text = await asyncio.to_thread(self.pipe.recv)
            await bus.publish(InboundMessage("desk", "7", "1", text, message_id=f"id-{number}"))
            self.pipe.send(("confirmed", number))

    async def send(self, message):
        if message.kind == "final":
            self.pipe.send(("sent", message.content))


def gateway(workspace: Path, pipe, seed: int, moment: int, window: int) -> None:
    """Answers all that it sees and nobody has answered, with random steps before it."""
    dice = random.Random(seed)

    async def talk(request):
        asked = tokens_in(said(request.messages))
        pipe.send(("asked", asked))
        is_first = request.messages[-1]["role"] == "user"
        if dice.random() < 0.5 if seed else is_first and "<go.on>" not in asked:
            return call("work", times=dice.choice([0, 1, 3, 20]) if seed else -1)
        answers = " ".join(str(m["content"]) for m in request.messages if m["role"] == "assistant")
        return " ".join(token for token in asked if token not in answers) or "nothing is open"

    @tool
    async def work(times: int) -> str:
        """Work."""
        pipe.send(("works", times))
        files = [SessionManager(workspace).path(CHAT), SessionManager(workspace).inbox(CHAT).path]
        while times < 0 and not any(
            file.exists() and b"<b>" in file.read_bytes() for file in files
        ):
            await asyncio.sleep(0.001)
        await asyncio.sleep(times / 1_000)
        return "worked"

    async def serve() -> None:
        bus, wire = MessageBus(), Wire()
        wire.pipe = pipe
        bus.open(wire)
        model = Model(talk, keeping(r"user: (<[\w.]+>)"))
        await make_loop(workspace, model, work, memory_window=window).run(bus)

    die_at_write(workspace, moment)
    asyncio.run(serve())
