"""What survives the turn: the journal under every kind of damage, how much fits a request, memory, skills."""

import asyncio
import contextlib
import copy
import io
import json
import logging
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from fake_llm import FakeLLM
from fake_llm import call as call_of
from memory import (
    Consolidator,
    Dream,
    MemoryRepository,
    MemoryStore,
    Session,
    SessionBusy,
    SessionManager,
    Skill,
    SkillsLoader,
    TokenCounter,
    begins_turn,
    compact,
    count_waiting,
    findings_in,
    govern,
    in_thread,
    is_known,
    known_entries,
    locked,
    measure,
    middle_out,
    newest,
    place_now,
    place_of_last,
    project,
    read_skill,
    readable,
    reason_to_refuse,
    shortened,
    transcripts,
    write_atomically,
)
from providers import LLMResponse, ToolCallRequest, legal

ROOT = Path(__file__).parent.parent
FULL = bool(os.environ.get("NANOBOT_TEST_FULL"))
KEY = "cli:direct"


@pytest.fixture
def sessions(tmp_path):
    return SessionManager(tmp_path)


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def answer(text: str) -> dict:
    return {"role": "assistant", "content": text}


def call(*ids: str) -> dict:
    function = {"name": "read_file", "arguments": "{}"}
    calls = [{"id": each, "type": "function", "function": function} for each in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(id_: str, text: str) -> dict:
    return {"role": "tool", "tool_call_id": id_, "content": text}


def cut(text: str, why: str) -> dict:
    return {"role": "assistant", "content": text, "cut": why}


def image(data: str) -> dict:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def texts(session: Session) -> list[str]:
    return [line["content"] for line in session.lines if line]


def loaded(workspace: Path, key: str = KEY) -> Session:
    """The session as a program that starts now would see it."""
    return SessionManager(workspace).get(key)


def journal(sessions: SessionManager, *messages: dict) -> Path:
    """A journal with these messages; the manager is left to forget that it knows it."""
    sessions.get(KEY).append(*messages)
    return sessions.path(KEY)


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().removesuffix(b"\n").split(b"\n")]


def another_program(code: str, *arguments: object) -> subprocess.Popen:
    """A real process that imports memory.py; its standard output can be read line by line."""
    program = f"import sys\nfrom pathlib import Path\nfrom memory import *\n{code}"
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


# ---- The journal as a file ----


def test_a_journal_is_a_metadata_line_and_then_one_message_a_line(sessions):
    path = journal(sessions, user("Wie geht's? 你好"), answer("Gut."))
    metadata, *messages = records(path)
    keys = {"_type", "key", "created_at", "updated_at", "metadata", "start", "last_consolidated"}
    assert set(metadata) == keys | {"summary", "lines", "crc"}
    assert (metadata["_type"], metadata["key"]) == ("metadata", KEY)
    assert (metadata["start"], metadata["last_consolidated"]) == (0, 0)
    assert all(each.pop("timestamp") for each in messages)
    assert messages == [user("Wie geht's? 你好"), answer("Gut.")]
    assert "你好" in path.read_text(encoding="utf-8"), "people read journals too"


def test_what_a_library_user_leaves_out_is_this(sessions, tmp_path):
    session = Session(KEY, tmp_path / "x.jsonl")
    assert (session.lines, session.metadata, session.summary, session.stamp) == ([], {}, {}, None)
    assert (session.start, session.last_consolidated) == (0, 0)
    assert (session.unsynced, session.is_new) == (False, False)
    keeper, dreamer = consolidator(sessions), dream(tmp_path, Model())
    assert (keeper.budget, keeper.window) == (56_320, 100)
    assert (dreamer.budget, dreamer.max_batch, dreamer.failures) == (56_320, 20, 0)
    skill = Skill("demo", tmp_path)
    assert (skill.description, skill.text, skill.always) == ("", "", False)
    assert (skill.missing, skill.problem) == ([], "")
    assert sessions.syncer.pause == 0.5


def test_a_message_keeps_its_own_time_and_else_gets_the_one_at_which_it_was_written(sessions):
    session = sessions.get(KEY)
    session.append({**user("one"), "timestamp": "2026-04-03T10:00:00+0200"}, {**user("two"), "timestamp": ""})
    first, second = (line["timestamp"] for line in session.lines)
    assert first == "2026-04-03T10:00:00+0200"
    metadata = records(session.path)[0]
    for stamp in (second, metadata["created_at"], metadata["updated_at"]):
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}", stamp)
        assert stamp[:4] == time.strftime("%Y")


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        ([image("A")], "[image]"),
        ([{"type": "text", "text": "[a.png]"}, image("A")], "[a.png]"),
        ([{"type": "text", "text": "a"}, image("A"), {"type": "text", "text": "b"}], "a\nb"),
        (None, None),
    ],
)
def test_of_images_the_journal_keeps_the_lines_that_name_them(sessions, tmp_path, content, kept):
    message = {"role": "user", "content": content}
    sessions.get(KEY).append(message)
    assert texts(loaded(tmp_path)) == [kept]
    assert message == {"role": "user", "content": content}, "the caller's is left as it is"


def test_an_append_leaves_every_earlier_byte_as_it_was(sessions):
    path = journal(sessions, user("one"))
    before = path.read_bytes()
    sessions.get(KEY).append(answer("two"), user("three"))
    assert path.read_bytes().startswith(before)
    assert texts(loaded(sessions.folder.parent)) == ["one", "two", "three"]


def test_a_torn_last_line_is_dropped_and_cut_off_before_the_next_append(sessions, tmp_path):
    path = journal(sessions, user("one"), answer("two"))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"role": "user", "content": "thr')
    session = sessions.get(KEY)
    assert texts(session) == ["one", "two"]
    assert path.read_bytes().startswith(whole), "reading alone changes nothing"
    session.append(user("four"))
    assert texts(loaded(tmp_path)) == ["one", "two", "four"]
    assert b"thr" not in path.read_bytes()


def test_a_whole_last_line_that_lacks_only_its_newline_is_kept(sessions, tmp_path):
    path = journal(sessions, user("one"), answer("two"))
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    session = sessions.get(KEY)
    assert texts(session) == ["one", "two"]
    session.append(user("three"))
    assert texts(loaded(tmp_path)) == ["one", "two", "three"]


def test_a_tail_of_null_bytes_is_dropped_like_a_torn_line(sessions, tmp_path):
    path = journal(sessions, user("one"))
    path.write_bytes(path.read_bytes() + b"\0" * 4096)
    session = sessions.get(KEY)
    assert texts(session) == ["one"]
    session.append(answer("two"))
    assert texts(loaded(tmp_path)) == ["one", "two"]
    assert b"\0" not in path.read_bytes()


@pytest.mark.parametrize(
    "junk", [b"{not json", b"[1, 2]", b"null", b"{}", b"\xff\xfe\x00", b"\0" * 20, b"[" * 100_000]
)
def test_an_unreadable_line_is_skipped_with_a_warning_and_kept_once(sessions, tmp_path, caplog, junk):
    path = journal(sessions, user("one"), answer("two"))
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:2], junk, *lines[2:]]))
    for _ in range(3):
        assert texts(loaded(tmp_path)) == ["one", "two"]
    assert "unreadable" in caplog.text
    assert path.with_name(path.name + ".corrupt").read_bytes() == junk + b"\n"
    assert junk in path.read_bytes(), "the journal itself is never rewritten"


def test_how_many_lines_are_unreadable_and_where_they_are_kept_is_said(sessions, tmp_path, caplog):
    path = journal(sessions, user("one"))
    path.write_bytes(path.read_bytes() + b"junk\n\n[1]\n")
    assert texts(loaded(tmp_path)) == ["one"]
    told = f"{path}: 2 unreadable lines skipped, kept in cli%3Adirect.jsonl.corrupt"
    assert caplog.record_tuples == [("nanobot.memory", logging.WARNING, told)]
    kept = path.with_name("cli%3Adirect.jsonl.corrupt").read_bytes()
    assert kept == b"junk\n[1]\n", "an empty line is no damage"


def test_a_damaged_metadata_line_hides_no_message(sessions, tmp_path):
    path = journal(sessions, user("one"), answer("two"))
    path.write_bytes(b'{"_type": "metad\n' + path.read_bytes().split(b"\n", 1)[1])
    session = loaded(tmp_path)
    assert texts(session) == ["one", "two"] and len(session.lines) == 2
    assert (session.metadata, session.last_consolidated) == ({}, 0)


def test_a_journal_without_metadata_is_read_from_its_first_line(sessions, tmp_path):
    sessions.folder.mkdir()
    sessions.path(KEY).write_text("".join(json.dumps(line) + "\n" for line in [user("one"), answer("two")]))
    assert loaded(tmp_path).lines == [user("one"), answer("two")]


def test_an_append_reads_no_more_than_the_end_of_a_whole_file(sessions):
    session, reads = sessions.get(KEY), []
    session.append(user("one"))

    def look(frame, event, function):
        if event == "c_call" and isinstance(getattr(function, "__self__", None), io.FileIO):
            reads.append(function.__name__)

    sys.setprofile(look)
    session.append(answer("two"))
    sys.setprofile(None)
    assert reads.count("read") == 1


@pytest.mark.parametrize("junk", [b"no journal\nat all\n", b"\0" * 512, b"\x89PNG\r\n\x1a\n", b"[]\n[]\n"])
def test_a_file_with_nothing_readable_is_moved_aside_and_never_overwritten(sessions, tmp_path, caplog, junk):
    sessions.folder.mkdir()
    sessions.path(KEY).write_bytes(junk)
    session = sessions.get(KEY)
    session.append(user("a new start"))
    [aside] = [each for each in sessions.folder.iterdir() if ".corrupt" in each.name]
    assert aside.read_bytes() == junk
    assert aside.name in caplog.text
    assert texts(loaded(tmp_path)) == ["a new start"]
    assert sessions.list_keys() == [KEY]


def test_an_empty_file_is_a_new_session_and_gets_its_metadata(sessions, tmp_path):
    sessions.folder.mkdir()
    sessions.path(KEY).touch()
    sessions.get(KEY).append(user("one"))
    assert [each.get("_type") for each in records(sessions.path(KEY))] == ["metadata", None]
    assert texts(loaded(tmp_path)) == ["one"]


def test_a_file_with_empty_lines_alone_is_no_damage(sessions, tmp_path, caplog):
    sessions.folder.mkdir()
    sessions.path(KEY).write_bytes(b"\n\n")
    sessions.get(KEY).append(user("one"))
    assert texts(loaded(tmp_path)) == ["one"]
    assert [path.name for path in sessions.folder.iterdir()] == ["cli%3Adirect.jsonl"] and not caplog.text


def test_new_in_a_new_session_writes_one_metadata_line_in_folders_that_it_makes(tmp_path):
    sessions = SessionManager(tmp_path / "not" / "there")
    sessions.get(KEY).restart()
    [metadata] = records(sessions.path(KEY))
    assert (metadata["start"], metadata["last_consolidated"], metadata["lines"]) == (0, 0, 0)


@pytest.mark.parametrize("text", ["a\u2028b\u2029c", "a\x85b", "a\nb", "a\r\nb\rc", "\x00\x1f", "naïve 🙂"])
def test_no_character_of_a_text_ends_its_line(sessions, tmp_path, text):
    path = journal(sessions, user(text), answer("next"))
    assert path.read_bytes().count(b"\n") == 3
    assert texts(loaded(tmp_path)) == [text, "next"]


def test_lone_surrogates_never_stop_a_write(sessions, tmp_path):
    path = journal(sessions, user("bad \ud800 byte"), answer("fine"))
    path.read_text(encoding="utf-8")  # raises if the file is not UTF-8
    first, second = texts(loaded(tmp_path))
    assert (first[:4], first[-5:], second) == ("bad ", " byte", "fine")


def test_files_are_for_their_owner_only(sessions, tmp_path):
    old = os.umask(0o022)
    try:
        path = journal(sessions, user("one"))
        path.write_bytes(path.read_bytes() + b"junk\n")
        sessions.get(KEY)
        with sessions.lock(KEY):
            modes = {each.suffix: each.stat().st_mode & 0o777 for each in sessions.folder.iterdir()}
    finally:
        os.umask(old)
    assert modes == {".jsonl": 0o600, ".corrupt": 0o600, ".lock": 0o600}
    assert sessions.folder.stat().st_mode & 0o777 == 0o700


FILL_THE_DISK = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
session = SessionManager(Path(sys.argv[1])).get(sys.argv[2])
session.append({"role": "user", "content": "one"})
resource.setrlimit(resource.RLIMIT_FSIZE, (session.path.stat().st_size + 100_000, -1))
try:
    session.append({"role": "assistant", "content": "x" * 300_000})
except OSError as problem:
    print("failed:", problem, flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
"""


def test_a_write_that_fails_half_way_is_said_and_costs_no_earlier_message(sessions, tmp_path):
    pytest.importorskip("resource", reason="file size limits are POSIX")
    with another_program(FILL_THE_DISK, tmp_path, KEY) as process:
        said = process.stdout.read()
    assert said.startswith("failed: [Errno 27] File too large: ") and "cli%3Adirect.jsonl" in said
    assert sessions.path(KEY).read_bytes().endswith(b"}\n"), "nothing of it stays"
    session = sessions.get(KEY)
    assert texts(session) == ["one"]
    session.append(answer("two"))
    assert texts(loaded(tmp_path)) == ["one", "two"]


# ---- Laws of the journal ----

TALK = [user("Was ist in ä.txt?"), call("c1"), result("c1", "🙂\n2| \u2028"), answer('Ein \\, "'), user("ok")]


def test_a_journal_cut_at_any_byte_loads_to_a_prefix_and_goes_on_from_there(sessions, tmp_path):
    path = journal(sessions, *TALK)
    whole = path.read_bytes()
    said = [line["content"] for line in TALK]
    for place in range(len(whole) + 1):
        path.write_bytes(whole[:place])
        session = loaded(tmp_path)
        kept = texts(session)
        assert kept == said[: len(kept)], place
        assert len(kept) >= whole[:place].count(b"\n") - 1, place
        session.append(user("next"), sync=False)
        again = loaded(tmp_path)
        assert texts(again) == [*kept, "next"], place
        assert None not in again.lines, place
        for aside in sessions.folder.glob("*.corrupt*"):
            aside.unlink()


def test_whatever_happens_to_some_lines_the_others_load(sessions, tmp_path):
    path = journal(sessions, *(user(f"message {n}") for n in range(30)))
    lines = path.read_bytes().removesuffix(b"\n").split(b"\n")
    chance = random.Random(2)
    for _ in range(100 if FULL else 20):
        hit = chance.sample(range(1, len(lines)), 5)
        junk = [chance.randbytes(40).replace(b"\n", b"?") for _ in lines]
        path.write_bytes(b"\n".join(junk[n] if n in hit else lines[n] for n in range(len(lines))) + b"\n")
        session = loaded(tmp_path)
        assert texts(session) == [f"message {n - 1}" for n in range(1, len(lines)) if n not in hit]
        assert len(session.lines) == 30, "an unreadable line counts, so that last_consolidated stays true"


WRITE_UNTIL_KILLED = """
session = SessionManager(Path(sys.argv[1])).get(sys.argv[2])
number = len(session.lines)
while True:
    size = 10 if number % 3 else 300_000
    session.append(*({"role": "user", "content": f"{n} " + "x" * size} for n in (number, number + 1)))
    number += 2
    print(number, flush=True)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kill -9 is POSIX")
def test_kill_9_loses_and_doubles_no_message_that_was_reported_as_written(tmp_path):
    chance = random.Random(3)
    for killed in range(100 if FULL else 6):
        workspace = tmp_path / str(killed // 10)  # or the journal would grow and grow
        with another_program(WRITE_UNTIL_KILLED, workspace, KEY) as process:
            process.stdout.readline()
            time.sleep(chance.random() * 0.05)
            process.kill()
            reported = [int(line) for line in process.stdout.read().split()]
        numbers = [int(text.split()[0]) for text in texts(loaded(workspace))]
        assert numbers == list(range(len(numbers))), "each once, in order"
        assert len(numbers) >= max(reported, default=0)


# Each process is forked from one that has loaded the SDK: to load it anew takes longer than the test.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["nanobot", "openai", "test_command_line", "test_memory"])


def take_turns(workspace: str, base_url: str) -> None:
    import nanobot

    environ = {"OPENAI_BASE_URL": base_url, "NANOBOT_MODEL": "test-model", "OPENAI_API_KEY": "sk-test"}
    config = nanobot.load_config(environ=environ)
    config.defaults.workspace = workspace
    loop = nanobot.AgentLoop(config)
    while True:
        asked = [line for line in loop.sessions.get(KEY).lines if line and line["role"] == "user"]
        asyncio.run(loop.process_direct(f"turn {len(asked)}"))


def two_calls_then_an_answer(body: dict) -> list[dict] | str:
    asked_again = body["messages"][-1]["role"] == "tool"
    return "done" if asked_again else [call_of("list_dir", path="."), call_of("glob", pattern="*.md")]


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kill -9 is POSIX")
def test_kill_9_in_a_turn_loses_and_doubles_nothing_and_each_call_has_one_answer(tmp_path):
    chance = random.Random(8)
    with FakeLLM(two_calls_then_an_answer) as server:
        for _ in range(200 if FULL else 20):
            before = len(server.requests)
            process = FORKS.Process(target=take_turns, args=(str(tmp_path), server.base_url))
            process.start()
            wanted = before + chance.randrange(1, 5)  # at any place of a turn
            while len(server.requests) < wanted:
                assert process.is_alive()
                time.sleep(0.002)
            time.sleep(chance.random() * 0.01)
            process.kill()
            process.join()
            session = loaded(tmp_path)
            asked = [line["content"] for line in session.lines if line and line["role"] == "user"]
            assert asked == [f"turn {n}" for n in range(len(asked))], "each once, in order"
            answers = [line["tool_call_id"] for line in session.lines if line and line["role"] == "tool"]
            assert len(answers) == len(set(answers))
            bodies = [body["messages"] for body in server.bodies if body]  # one may be torn
            turns = [messages for messages in bodies if "You are nanobot" in messages[0]["content"]]
            last = turns[-1][-1]  # the others are of the memory
            if last["role"] == "user":
                known = [text for text in asked if last["content"].endswith(text)]
                assert known, "what the model was asked is in the journal"
            else:
                assert last["tool_call_id"] in answers, "what the model was told, too"
            sent = legal(session.get_history())
            called = [call["id"] for message in sent for call in message.get("tool_calls", [])]
            assert called == [message["tool_call_id"] for message in sent if message["role"] == "tool"]


# ---- Metadata, keys, the sessions of a workspace ----


@pytest.mark.parametrize("odd", [-1, 99, True, "2", 1.5, None, [], {}])
def test_an_odd_last_consolidated_hides_nothing(sessions, odd):
    path = journal(sessions, user("one"), answer("two"))
    later = {"_type": "metadata", "last_consolidated": odd}
    path.write_bytes(path.read_bytes() + json.dumps(later).encode() + b"\n")
    session = sessions.get(KEY)
    assert session.last_consolidated == 0
    assert session.get_history() == [user("one"), answer("two")]


@pytest.mark.parametrize(
    ("count", "then", "now", "place"),
    [
        (7, 12, 12, 7),
        (7, 12, 11, 6),
        (7, 12, 14, 7),
        (0, 12, 12, 0),
        (12, 12, 12, 12),
        (1, 12, 9, 0),
        (0, 0, 0, 0),
        (13, 12, 12, None),
        (-1, 12, 12, None),
        (True, 12, 12, None),
        ("2", 12, 12, None),
        (None, 12, 12, None),
        (2, None, 12, None),
        (1, True, 12, None),
    ],
)
def test_a_count_of_lines_points_to_the_same_place_among_those_that_are_left(count, then, now, place):
    assert place_now(count, then, now) == place


SUMMED_UP = "[Summary of the conversation so far, which is not sent any more]\n\nRome."


@pytest.mark.parametrize(
    ("summary", "first"),
    [
        ({"text": "Rome.", "until": 2}, SUMMED_UP),
        ({"text": "Rome.", "until": 9}, "one"),
        ({"text": "Rome.", "until": "2"}, "one"),
        ({"text": "Rome."}, "one"),
        ({"text": 5, "until": 2}, "one"),
        ([], "one"),
    ],
)
def test_a_summary_stands_for_the_lines_before_its_place_and_an_odd_one_hides_nothing(
    sessions, tmp_path, summary, first
):
    path = journal(sessions, user("one"), answer("two"), user("three"))
    later = {"_type": "metadata", "summary": summary}
    path.write_bytes(path.read_bytes() + json.dumps(later).encode() + b"\n")
    history = loaded(tmp_path).get_history()
    assert history[0]["content"] == first
    assert history[1:] == ([user("three")] if first != "one" else [answer("two"), user("three")])


def test_odd_metadata_replaces_nothing_that_is_known(sessions, tmp_path):
    path = journal(sessions, user("one"))
    good = {"_type": "metadata", "created_at": "2026-04-03", "metadata": {"a": 1}}
    odd = {"_type": "metadata", "created_at": None, "metadata": [1]}
    path.write_bytes(path.read_bytes() + b"".join(json.dumps(each).encode() + b"\n" for each in (good, odd)))
    session = loaded(tmp_path)
    assert (session.created_at, session.metadata) == ("2026-04-03", {"a": 1})
    assert not list(sessions.folder.glob("*.corrupt")), "it is no damage"


def test_metadata_that_was_damaged_and_is_still_json_is_not_believed(sessions, tmp_path):
    session = sessions.get(KEY)
    session.append(user("one"), user("two"))
    session.note(last_consolidated=2)
    whole = session.path.read_bytes()
    session.path.write_bytes(whole.replace(b'"last_consolidated": 2', b'"last_consolidated": 1'))
    assert loaded(tmp_path).last_consolidated == 0
    assert b'"last_consolidated": 1' in session.path.with_name("cli%3Adirect.jsonl.corrupt").read_bytes()
    session.path.write_bytes(whole)
    assert loaded(tmp_path).last_consolidated == 2


def test_a_later_metadata_line_replaces_an_earlier_one(sessions, tmp_path):
    path = journal(sessions, user("one"), answer("two"), user("three"))
    later = {"_type": "metadata", "created_at": "2026-04-03", "metadata": {"a": 1}, "last_consolidated": 2}
    path.write_bytes(path.read_bytes() + json.dumps(later).encode() + b"\n")
    sessions.get(KEY).append(answer("four"))
    session = loaded(tmp_path)
    assert (session.created_at, session.metadata, session.last_consolidated) == ("2026-04-03", {"a": 1}, 2)
    assert texts(session) == ["one", "two", "three", "four"]
    assert legal(session.get_history()) == [user("three")]


def test_last_consolidated_counts_unreadable_lines_too(sessions):
    path = journal(sessions, user("one"), answer("two"), user("three"))
    lines = path.read_bytes().split(b"\n")
    lines[1] = b"junk"
    path.write_bytes(b"\n".join(lines) + b'{"_type": "metadata", "last_consolidated": 2}\n')
    assert legal(sessions.get(KEY).get_history()) == [user("three")]


def test_restart_sends_nothing_of_what_was_and_deletes_nothing(sessions, tmp_path):
    journal(sessions, user("old"), answer("old too"))
    sessions.get(KEY).restart()
    sessions.get(KEY).append(user("new"))
    session = loaded(tmp_path)
    assert legal(session.get_history()) == [user("new")]
    assert texts(session) == ["old", "old too", "new"]


KEYS = ["telegram:a_b", "telegram:a:b", "telegram:a%3Ab", "a/b", "../../etc/passwd", "..", ".", "~", "",
        "Grüße:你好", "a.b", "a.jsonl", "a b", "con\n", "x\0y", "\udcff"]  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
def test_every_key_round_trips_through_a_file_inside_the_folder(sessions, key):
    sessions.get(key).append(user("hello"))
    [file] = sessions.folder.iterdir()
    assert file == sessions.path(key)
    assert sessions.list_keys() == [key]


def test_two_keys_never_share_a_file(sessions):
    assert len({sessions.path(key) for key in KEYS}) == len(KEYS)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("telegram:a_b", "telegram%3Aa_b.jsonl"),
        ("a b@c+d,e=f", "a b@c+d,e=f.jsonl"),
        ("../ä", "%2E%2E%2F%C3%A4.jsonl"),
        ("50%", "50%25.jsonl"),
        ("\udcff", "%ED%B3%BF.jsonl"),
    ],
)
def test_a_person_finds_the_file_of_a_key(sessions, tmp_path, key, name):
    assert sessions.path(key) == tmp_path / "sessions" / name


def test_sessions_are_listed_with_the_one_used_last_first(sessions):
    assert sessions.list_keys() == []
    for age, key in enumerate(["a:1", "b:2", "c:3"]):
        sessions.get(key).append(user("hello"))
        os.utime(sessions.path(key), (age, age))
    assert sessions.list_keys() == ["c:3", "b:2", "a:1"]


def test_the_64_sessions_used_last_stay_in_memory(sessions):
    first, second, third = sessions.get("n:0"), weakref.ref(sessions.get("n:1")), sessions.get("n:2")
    for number in range(3, 64):
        sessions.get(f"n:{number}")
    assert sessions.get("n:0") is first, "64 fit, and this one is now the last used"
    assert second() is not None
    sessions.get("n:64")
    assert second() is None
    sessions.get("n:65")
    assert sessions.get("n:0") is first
    assert sessions.get("n:2") is third, "a turn holds it: two of it would not know of each other's lines"


SAY = "SessionManager(Path(sys.argv[1])).get(sys.argv[2]).append({'role': 'user', 'content': sys.argv[3]})"


def test_a_session_that_another_process_changed_is_read_again(sessions, tmp_path):
    mine = sessions.get(KEY)
    mine.append(user("mine"))
    assert sessions.get(KEY) is mine
    assert another_program(SAY, tmp_path, KEY, "theirs").wait() == 0
    assert texts(sessions.get(KEY)) == ["mine", "theirs"]


def test_what_another_process_wrote_is_not_forgotten_when_we_write_without_looking(sessions, tmp_path):
    """A consolidation in the background notes how far it is, while another program takes a turn."""
    mine = sessions.get(KEY)
    mine.append(user("mine"), answer("two"))
    assert another_program(SAY, tmp_path, KEY, "theirs").wait() == 0
    mine.note(last_consolidated=1)
    assert texts(sessions.get(KEY)) == ["mine", "two", "theirs"]
    assert sessions.get(KEY).get_history() == [user("theirs")]


def test_a_key_that_is_no_utf_8_keeps_its_metadata(sessions, tmp_path):
    sessions.get("\udcff").append(user("old"))
    sessions.get("\udcff").restart()
    assert loaded(tmp_path, "\udcff").start == 1
    assert not list(sessions.folder.glob("*.corrupt"))


def test_a_session_whose_file_a_person_deleted_begins_anew(sessions):
    journal(sessions, user("one")).unlink()
    assert sessions.get(KEY).lines == []


HOLD = """
with SessionManager(Path(sys.argv[1])).lock(sys.argv[2]):
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_a_session_is_one_programs_for_a_turn_and_a_killed_one_holds_nothing(sessions, tmp_path):
    pytest.importorskip("fcntl", reason="file locks are POSIX")
    for end in (lambda process: process.communicate("\n"), lambda process: process.kill()):
        with another_program(HOLD, tmp_path, KEY) as process:
            assert process.stdout.readline() == "held\n"
            with pytest.raises(SessionBusy, match=KEY), sessions.lock(KEY):
                pass
            with sessions.lock("cli:other"):
                pass
            end(process)
            process.wait()
        with sessions.lock(KEY):
            pass


def test_an_exception_in_a_turn_lets_go_of_the_session(sessions):
    with pytest.raises(ZeroDivisionError), sessions.lock(KEY):
        raise ZeroDivisionError
    with sessions.lock(KEY):
        pass


def test_who_finds_a_session_in_use_learns_which_and_what_to_do(sessions):
    pytest.importorskip("fcntl", reason="file locks are POSIX")
    told = "Session cli:direct is in use by another program. Wait, or name another: -s."
    with sessions.lock(KEY), pytest.raises(SessionBusy, match=re.escape(told)), sessions.lock(KEY):
        pass
    assert sessions.path(KEY).with_name("cli%3Adirect.lock").exists()


# ---- The projection ----


def test_history_begins_at_a_user_message_where_the_window_cuts_a_turn(sessions):
    session = sessions.get(KEY)
    session.append(user("a"), call("c1"), result("c1", "x"), answer("b"), user("c"))
    session.last_consolidated = 2
    assert legal(session.get_history()) == [user("c")]


def test_what_never_got_an_answer_is_completed_in_the_copy_only(sessions):
    session = sessions.get(KEY)
    session.append(user("killed"), user("stopped"), call("c1", "c2"), result("c1", "x"), user("now"))
    before = session.path.read_bytes()
    history = legal(session.get_history())
    assert [(each["role"], each["content"]) for each in history] == [
        ("user", "killed\n\n[the message above was not answered: interrupted]\n\nstopped"),
        ("assistant", None),
        ("tool", "x"),
        ("tool", "[interrupted before it finished]"),
        ("user", "now"),
    ]
    assert session.path.read_bytes() == before


def test_runtime_facts_stand_before_the_text_and_our_own_keys_are_not_sent(sessions):
    session = sessions.get(KEY)
    session.append({**user("hello"), "runtime": "[It is Monday]"})
    assert legal(session.get_history()) == [user("[It is Monday]\n\nhello")]


def test_none_of_our_own_keys_is_sent_and_all_others_are(sessions):
    session = sessions.get(KEY)
    own = {"timestamp": "2026", "runtime": "r", "cut": "why", "id": "7", "beside": True, "unseen": 0}
    session.append(user("a"), {**answer("b"), **own, "name": "n"}, {**user("c"), "id": "8"})
    assert session.get_history() == [
        user("a"),
        {**answer("b"), "name": "n"},
        user("[the answer above broke off: why]\n\nc"),
    ]


def test_history_is_the_same_bytes_twice_and_after_a_restart_and_changes_nothing(sessions, tmp_path):
    session = sessions.get(KEY)
    session.append(*TALK, {**user("x"), "runtime": "r"}, user("y"))
    before = copy.deepcopy(session.lines)
    once, twice, restarted = (legal(each.get_history()) for each in (session, session, loaded(tmp_path)))
    assert json.dumps(once) == json.dumps(twice) == json.dumps(restarted)
    assert session.lines == before


def test_history_only_grows_at_its_end_so_that_prompt_caches_hold(sessions):
    session = sessions.get(KEY)
    session.append(*TALK)
    before = legal(session.get_history())
    session.append(answer("fine"), user("more"))
    assert legal(session.get_history())[: len(before)] == before


@pytest.mark.parametrize(
    ("messages", "unfinished"),
    [
        ([], False),
        ([user("a")], True),
        ([user("a"), answer("b")], False),
        ([user("a"), call("c1")], True),
        ([user("a"), call("c1"), result("c1", "x")], True),
        ([user("a"), call("c1"), result("c1", "x"), answer("b")], False),
        ([user("a"), cut("b", "no network")], True),
        ([user("a"), cut("", "it was stopped")], True),
        ([user("a"), user("c"), {**answer("b"), "unseen": 1}], True),
        ([user("a"), user("c"), {**answer("b"), "unseen": 0}], False),
    ],
)
def test_continue_has_something_to_do_where_the_last_turn_has_no_answer(sessions, messages, unfinished):
    session = sessions.get(KEY)
    for message in messages:
        session.append(message)
    assert session.unfinished is unfinished


def test_after_restart_there_is_nothing_to_continue(sessions):
    session = sessions.get(KEY)
    session.append(user("a"))
    session.restart()
    assert not session.unfinished


def test_what_went_into_the_memory_is_not_continued(sessions):
    session = sessions.get(KEY)
    session.append(user("a"), call("c1"))
    session.note(last_consolidated=2)
    assert not session.unfinished


# ---- What a power cut may take ----


@contextlib.contextmanager
def watched_disk():
    """Writes and fsyncs of this process in order: [("write", "x.jsonl"), ("fsync", "x.jsonl"), …].

    The interpreter reports each call of a C function to a profiler, on every thread; nothing is replaced.
    """
    seen: list[tuple[str, str]] = []

    def look(frame, event, function):
        name = getattr(function, "__name__", "")
        if event == "c_call" and name == "fsync" and frame.f_code.co_filename.endswith("memory.py"):
            seen.append((name, frame.f_locals["path"].name))
        if event == "c_call" and name == "write" and isinstance(function.__self__, io.FileIO):
            seen.append((name, Path(function.__self__.name).name))

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        yield seen
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def test_an_append_is_one_write_and_one_fsync_and_a_new_name_is_synced_with_its_folder(sessions):
    session = sessions.get(KEY)
    name = session.path.name
    with watched_disk() as disk:
        session.append(user("x" * 300_000), answer("two"))
    assert disk == [("write", name), ("fsync", name), ("fsync", "sessions")]
    with watched_disk() as disk:
        session.append(user("three"), answer("four"))
    assert disk == [("write", name), ("fsync", name)]


def test_new_is_on_the_disk_when_it_is_answered(sessions):
    session = sessions.get(KEY)
    session.append(user("old"))
    with watched_disk() as disk:
        session.restart()
    assert disk == [("write", session.path.name), ("fsync", session.path.name)]


def test_what_is_appended_without_fsync_is_synced_once_on_another_thread(sessions):
    session, threads = sessions.get(KEY), []

    async def turn() -> None:
        session.append(user("one"), sync=False)
        session.append(answer("two"), sync=False)
        assert not [kind for kind, _ in disk if kind == "fsync"]
        threads.append(threading.active_count())
        await session.synced()
        await session.synced()

    with watched_disk() as disk:
        asyncio.run(turn())
    name = session.path.name
    assert disk == [("write", name), ("write", name), ("fsync", name), ("fsync", "sessions")]
    assert not session.unsynced


def test_synced_waits_for_what_another_thread_is_syncing(sessions):
    session = sessions.get(KEY)
    session.append(user("hello"))

    async def wait_for_it() -> None:
        with session.syncing:
            waits = asyncio.create_task(session.synced())
            for _ in range(20):
                await asyncio.sleep(0)
            assert not waits.done()
        await asyncio.wait_for(waits, 20)

    asyncio.run(wait_for_it())


def test_what_nobody_waits_for_is_synced_soon(sessions):
    session = sessions.get(KEY)
    session.append(user("hello"), sync=False)
    threads = threading.active_count()
    for _ in range(100):
        sessions.syncer.sync_soon(session)
    assert threading.active_count() <= threads + 5, "one thread for all of them"
    deadline = time.monotonic() + 20
    while session.unsynced and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not session.unsynced


def test_a_file_that_cannot_be_synced_keeps_no_other_from_it_and_later_ones_have_their_turn(sessions):
    gone, other = sessions.get("cli:gone"), sessions.get(KEY)
    sessions.syncer.pause = 0.01
    for _ in range(2):
        gone.append(user("a"), sync=False)
        gone.path.unlink()
        other.append(user("b"), sync=False)
        before = set(threading.enumerate())
        sessions.syncer.sync_soon(gone)
        sessions.syncer.sync_soon(other)
        for thread in set(threading.enumerate()) - before:
            thread.join(20)
        assert gone.unsynced and not other.unsynced


def test_what_is_written_meanwhile_is_synced_in_the_same_go(sessions):
    session, before = sessions.get(KEY), set(threading.enumerate())
    session.append(user("hello"), sync=False)
    sessions.syncer.pause = 60
    sessions.syncer.sync_soon(session)
    [thread] = set(threading.enumerate()) - before
    thread.join(0.02)
    assert thread.is_alive() and session.unsynced, "it waits for more"
    assert thread.daemon, "the end of the program does not wait for it"


def test_facts_are_on_the_disk_before_they_get_their_name_and_then_the_name_is(tmp_path):
    store = MemoryStore(tmp_path)
    with watched_disk() as disk:
        store.write_facts("- Likes blue", instead_of="")
    draft = f".MEMORY.md.{os.getpid()}.tmp"
    assert disk == [("write", draft), ("fsync", "MEMORY.md"), ("fsync", "memory")]


def test_where_a_file_cannot_be_replaced_no_draft_of_it_stays(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_atomically(tmp_path / "folder", "text")
    assert [path.name for path in tmp_path.iterdir() if path.name != "home"] == ["folder"]


def test_a_disk_that_refuses_the_fsync_is_said_and_tried_again(sessions):
    session = sessions.get(KEY)
    session.append(user("one"), sync=False)
    whole = session.path.rename(session.path.with_suffix(".away"))
    with pytest.raises(OSError, match="jsonl"):
        asyncio.run(session.synced())
    assert session.unsynced
    whole.rename(session.path)
    asyncio.run(session.synced())
    assert not session.unsynced


def test_a_thread_whose_result_nobody_waits_for_any_more_ends_without_a_word(monkeypatch):
    """A turn that is stopped while its last line is synced."""
    gate, threads, said = threading.Event(), [], []
    monkeypatch.setattr(threading, "excepthook", said.append)

    def work() -> None:
        threads.append(threading.current_thread())
        gate.wait(20)

    async def stopped() -> None:
        task = asyncio.create_task(in_thread(work))
        while not threads:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(stopped())
    gate.set()
    threads[0].join(20)
    assert said == []
    assert threads[0].daemon, "the end of the program does not wait for it"


def test_no_file_is_left_open(sessions, tmp_path):
    def next_number() -> int:
        number = os.dup(2)
        os.close(number)
        return number

    before, path = next_number(), skill_file(tmp_path, "Do it.")
    for n in range(20):
        sessions.get(KEY).append(user(f"q{n}"))
        read_skill(path)
    assert next_number() < before + 20


# ---- Damage in the wrong place ----


def test_a_newline_that_is_lost_before_new_hides_and_shows_nothing(sessions, tmp_path):
    """Two lines became one, so that `/new` counted more lines than there are."""
    session = sessions.get(KEY)
    session.append(user("one"), answer("two"), user("three"), answer("four"))
    session.restart()
    session.append(user("five"), answer("six"))
    whole = session.path.read_bytes()
    place = [match.start() for match in re.finditer(b"\n", whole)][1]
    session.path.write_bytes(whole[:place] + b"X" + whole[place + 1 :])
    assert loaded(tmp_path).get_history() == [user("five"), answer("six")]
    loaded(tmp_path).append(user("seven"))
    assert loaded(tmp_path).get_history() == [user("five"), answer("six"), user("seven")]


def test_a_byte_that_became_a_newline_before_new_shows_nothing_of_what_was(sessions, tmp_path):
    """One line became two, so that `/new` counted fewer lines than there are."""
    session = sessions.get(KEY)
    session.append(user("one"), user("two"))
    session.restart()
    session.append(user("three"))
    session.path.write_bytes(session.path.read_bytes().replace(b'"one"', b'"o\ne"'))
    assert loaded(tmp_path).get_history() == [user("three")]


def test_a_last_line_whose_newline_alone_is_damaged_is_kept_aside(sessions):
    path = journal(sessions, user("one"), answer("two"))
    path.write_bytes(path.read_bytes()[:-1] + b"\x0b")
    session = sessions.get(KEY)
    assert texts(session) == ["one"]
    session.append(user("three"))
    assert b'"two"' in path.with_name(path.name + ".corrupt").read_bytes()


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "Infinity", "1e999"])
def test_a_number_that_is_no_json_costs_its_line_and_not_the_session(sessions, tmp_path, number):
    path = journal(sessions, user("one"), answer("two"))
    with open(path, "a", encoding="utf-8") as file:
        file.write(f'{{"role": "user", "content": "x", "weight": {number}}}\n')
    session = loaded(tmp_path)
    assert texts(session) == ["one", "two"]
    json.dumps(session.get_history(), allow_nan=False)


def test_a_session_of_an_older_version_is_read_as_it_was(sessions, tmp_path):
    old = {"_type": "metadata", "key": KEY, "metadata": {"a": 1}, "last_consolidated": 0}
    new = {**old, "last_consolidated": 2}
    lines = [old, user("one"), answer("two"), new, user("three")]
    sessions.folder.mkdir()
    sessions.path(KEY).write_text("".join(json.dumps(line) + "\n" for line in lines))
    session = loaded(tmp_path)
    assert session.get_history() == [user("three")]
    session.append(answer("four"))
    assert loaded(tmp_path).get_history() == [user("three"), answer("four")]


def test_a_byte_flipped_anywhere_costs_its_line_at_most_two_where_it_was_a_newline(sessions, tmp_path):
    session = sessions.get(KEY)
    session.append(*(user(f"m{n}") for n in range(4)))
    session.restart()
    session.append(*(user(f"m{n}") for n in range(4, 8)))
    whole, all_of_it = session.path.read_bytes(), [f"m{n}" for n in range(8)]
    chance = random.Random(5)
    places = range(len(whole)) if FULL else chance.sample(range(len(whole)), 400)
    for place in places:
        bit = 1 << chance.randrange(8)
        session.path.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
        after = loaded(tmp_path)
        lost = set(all_of_it) - set(texts(after))
        sent = " ".join(message["content"] for message in after.get_history())
        lost |= {text for text in all_of_it[4:] if text not in sent}
        assert len(lost) <= (2 if whole[place] == 10 else 1), (place, bit)
        after.append(user("next"), sync=False)
        assert loaded(tmp_path).get_history()[-1]["content"].endswith("next"), (place, bit)
        for aside in sessions.folder.glob("*.corrupt*"):
            aside.unlink()


# ---- What is said of an answer that is missing ----


def test_what_fills_a_gap_is_in_no_assistant_message(sessions):
    session = sessions.get(KEY)
    session.append(user("one"), user("two"), cut("Well", "the connection was lost"), user("three"))
    assert session.get_history() == [
        user("one"),
        user("[the message above was not answered: interrupted]\n\ntwo"),
        answer("Well"),
        user("[the answer above broke off: the connection was lost]\n\nthree"),
    ]
    assert "broke off" in readable(session.lines[2])


def test_the_gap_is_told_before_the_runtime_facts_and_before_the_blocks_of_another_program(sessions):
    session = sessions.get(KEY)
    blocks = [{"type": "text", "text": "c"}]
    session.append(user("a"), {**user("b"), "runtime": "[Monday]"})
    session.lines.append({"role": "user", "content": blocks})
    gap = "[the message above was not answered: interrupted]"
    assert session.get_history()[1:] == [
        user(f"{gap}\n\n[Monday]\n\nb"),
        user(f"{gap}\n\n{json.dumps(blocks)}"),
    ]
    session.restart()
    session.lines.append({"role": "user", "content": blocks})
    assert session.get_history() == [{"role": "user", "content": blocks}]


def test_an_answer_that_broke_off_can_be_continued_where_it_stops(sessions):
    session = sessions.get(KEY)
    session.append(user("count"), cut("one, two", "stopped by the user"))
    assert session.unfinished
    history = legal(session.get_history())
    assert history[:-1] == [user("count"), answer("one, two")]
    assert history[-1]["role"] == "user" and "stopped by the user" in history[-1]["content"]
    session.append(answer(", three"))
    assert not session.unfinished
    assert session.get_history() == [user("count"), answer("one, two"), answer(", three")]


def test_what_is_told_of_an_answer_that_broke_off_stands_where_the_user_goes_on(sessions):
    session = sessions.get(KEY)
    session.append(user("a"), cut("Well", "no network"))
    go_on = user("[the answer above broke off: no network] Go on where it stops.")
    assert session.get_history() == [user("a"), answer("Well"), go_on]
    session.restart()
    session.append(user("a"), user("b"), {**cut("Well", "no network"), "unseen": 1})
    told = user("[the answer above broke off: no network]\n\nb")
    assert session.get_history() == [user("a"), answer("Well"), told], "the user has gone on already"
    session.restart()
    session.append(user("a"), cut("", "it was stopped"))
    assert session.get_history() == [user("a")], "no word of it was said"


def test_one_answer_is_for_both_where_a_message_came_beside_another(sessions):
    session = sessions.get(KEY)
    session.append(user("a"), {**user("b"), "beside": True}, answer("both"))
    assert session.get_history() == [user("a"), user("b"), answer("both")]
    session.restart()
    session.append(user("a"), cut("", "it was stopped"), {**user("b"), "beside": True})
    told = user("[the message above was not answered: interrupted]\n\nb")
    assert session.get_history() == [user("a"), told]
    session.restart()
    session.append(user("a"), cut("Well", "no network"), {**user("b"), "beside": True})
    told = user("[the answer above broke off: no network]\n\nb")
    assert session.get_history() == [user("a"), answer("Well"), told]


WAITING = [user("a"), answer("b"), None, user("c"), user("d")]


@pytest.mark.parametrize(
    ("lines", "waiting"),
    [
        ([], 0),
        ([user("a")], 1),
        ([user("a"), answer("b")], 0),
        (WAITING, 2),
        ([user("a"), user("b"), {**answer("c"), "unseen": 1}], 1),
        ([user("a"), user("b"), {**answer("c"), "unseen": 1}, user("d")], 2),
        ([user("a"), answer("c"), {**user("pictures of a tool"), "unseen": 1}], 1),
        ([user("a"), {**answer("c"), "unseen": True}, user("d")], 1),
    ],
)
def test_the_messages_that_nobody_has_answered_are_counted(lines, waiting):
    assert count_waiting(lines) == waiting


@pytest.mark.parametrize(("count", "place"), [(0, 5), (1, 4), (2, 3), (3, 0)])
def test_new_keeps_the_messages_that_wait(count, place):
    assert place_of_last(WAITING, count) == place


def test_new_in_front_of_waiting_messages_sends_these_and_nothing_else(sessions, tmp_path):
    session = sessions.get(KEY)
    session.append(user("old"), answer("old too"), user("c"), {**user("d"), "beside": True})
    session.restart(waiting=2)
    assert loaded(tmp_path).get_history() == [user("c"), user("d")]


def test_a_message_is_known_by_its_id_while_it_is_one_of_the_last_1000_lines(sessions):
    session = sessions.get(KEY)
    session.lines = [{**user("a"), "id": "7"}, None, *[answer("b")] * 997, {**user("c"), "id": "8"}]
    assert [is_known(session, each) for each in ("7", "8", "9")] == [True, True, False]
    session.lines.append(answer("d"))
    assert [is_known(session, each) for each in ("7", "8", "9")] == [False, True, False]


# ---- The projection grows ----


def test_a_projection_that_grew_is_the_one_made_at_once(sessions, tmp_path):
    chance = random.Random(6)
    for number in range(40):
        session = sessions.get(f"n:{number}")
        for _ in range(chance.randrange(1, 30)):
            new = chance.choice([user("u"), answer("a"), call("c"), result("c", "r"), cut("a", "why")])
            session.append(new, sync=False)
            if chance.random() < 0.3:
                session.get_history()
            if chance.random() < 0.05:
                session.restart(sync=False)
            if chance.random() < 0.05:
                session.lines.append(None)
        lines = session.lines[session.start :]
        assert session.get_history()[: len(project(lines))] == project(lines)


def test_a_message_that_came_before_its_answer_was_begun_stands_behind_it(sessions):
    session = sessions.get(KEY)
    seen = [user("a"), call("c1"), user("b"), {**result("c1", "x"), "unseen": 1}]
    for line in seen:
        session.append(line, sync=False)
        session.get_history()  # it is asked for at each step
    session.append({**answer("for a"), "unseen": 1}, answer("for b"), sync=False)
    expected = [user("a"), call("c1"), result("c1", "x"), answer("for a"), user("b"), answer("for b")]
    assert session.get_history() == expected == project(session.lines)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (user("hi"), "user: hi"),
        ({**answer(None), "timestamp": "2026-04-03T10:00:00+0200"}, "[2026-04-03T10:00:00+0200] assistant: "),
        (call("c1"), "assistant: calls read_file({})"),
        ({**call("c1", "c2"), "content": "Well"},
         "assistant: Well\ncalls read_file({})\ncalls read_file({})"),
        (cut("Well", "no network"), "assistant: Well [broke off: no network]"),
        ({**answer("x"), "tool_calls": [{}, "odd", {"function": {"name": "f"}}]}, "assistant: x"),
        ({"role": "user", "content": [{"text": "ä"}]}, 'user: [{"text": "ä"}]'),
    ],
)  # fmt: skip
def test_a_line_is_shown_to_people_like_this(line, shown):
    assert readable(line) == shown


def test_a_late_projection_costs_as_much_as_an_early_one(sessions):
    """Counted in calls of Python functions, not in time: so many a new message, however many there are."""
    session, counts = sessions.get(KEY), []
    for size in (10, 2_000):
        session.append(*[user("x"), answer("y")] * (size // 2), sync=False)
        session.get_history()
        session.append(answer("y"), sync=False)
        events: list[str] = []
        sys.setprofile(lambda frame, event, function, events=events: events.append(event))
        session.get_history()
        sys.setprofile(None)
        counts.append(events.count("call"))
    assert counts[0] == counts[1]


def test_a_late_line_that_names_more_waiting_messages_than_there_are_moves_none():
    """A damaged line may have been one of them."""
    late = {**answer("late"), "unseen": 3}
    gap = "[the message above was not answered: interrupted]\n\n"
    sent = project([user("a"), user("b"), late, user("c")])
    assert sent == [user("a"), user(f"{gap}b"), user(f"{gap}c")]


# ---- How much fits a request ----


@pytest.mark.parametrize("text", ["", "hello " * 50, "Grüße " * 50, "你好" * 50, "🙂" * 50, "\ud800" * 50])
def test_bytes_bound_tokens_and_are_what_is_sent(text):
    size, tokens = measure(user(text))
    assert size == len(json.dumps(user(text), ensure_ascii=False).encode("utf-8", errors="replace"))
    assert 0 < tokens <= size


def test_text_that_is_mostly_not_ascii_counts_three_bytes_a_token():
    assert measure(user("a" * 12_000))[1] == pytest.approx(3_000, abs=20)
    assert measure(user("你" * 4_000))[1] == pytest.approx(4_000, abs=20)


@pytest.mark.parametrize(
    ("content", "size", "tokens"),
    [
        ("", 31, 8),
        ("hello", 36, 10),
        ("é" * 31, 93, 24),
        ("é" * 32, 95, 32),
        ("你好" * 10, 91, 31),
        ([{"type": "text", "text": "a"}], 60, 16),
        ([{"type": "text", "text": "a"}, image("A")], 1_060, 1_016),
        ([image("A"), image("B")], 2_031, 2_008),
    ],
)
def test_bytes_and_estimated_tokens_of_a_message_are_these(content, size, tokens):
    assert measure({"role": "user", "content": content}) == (size, tokens)


def test_an_image_counts_as_1000_tokens_however_large_its_data():
    def tokens(*images: dict) -> int:
        return measure({"role": "user", "content": [{"type": "text", "text": "Look"}, *images]})[1]

    assert tokens(image("A"), image("B")) == pytest.approx(tokens() + 2_000, abs=5)
    assert tokens(image("A")) == tokens(image("A" * 900_000))


def test_each_message_is_measured_once():
    counter, message = TokenCounter(), user("x" * 400)
    before = counter.total([message, message])
    message["content"] *= 100  # nobody does that to a message; here it would show a second look
    assert counter.total([message, message]) == before


def test_sizes_of_more_than_10000_messages_are_kept_only_where_one_request_has_as_many():
    counter, message = TokenCounter(), user("x" * 400)
    before = counter.size(message)
    message["content"] *= 2
    counter.total(others := [{} for _ in range(9_999)])
    assert counter.total([message]) == before
    counter.total([*others, {}])
    assert counter.total([message]) == before + 100


def test_the_sizes_of_a_long_request_are_kept():
    counter, messages = TokenCounter(), [user("x" * 400) for _ in range(11_000)]
    before = counter.total(messages)
    for message in messages:
        message["content"] *= 2
    assert counter.total(messages) == before


def test_tools_are_measured_together_and_anew_only_where_they_are_others():
    counter = TokenCounter(lambda: lambda text: len(text))
    assert counter.size_of_tools([]) == 0
    assert counter.size_of_tools([{}, user("hello")]) == 11
    before = set(threading.enumerate())
    counter.count_exactly_from_now_on()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert counter.size_of_tools([{}, user("hello")]) == 11, "equal ones are not measured again"
    assert counter.size_of_tools([user("hello")]) == 36


def test_the_vocabulary_counts_long_texts_in_pieces(monkeypatch):
    pieces = []

    def encode(text: str) -> list[str]:
        pieces.append(len(text))
        return list(text)

    def get_encoding(name: str) -> SimpleNamespace:
        assert name == "o200k_base"
        return SimpleNamespace(encode_ordinary=encode)

    monkeypatch.setitem(sys.modules, "tiktoken", SimpleNamespace(get_encoding=get_encoding))
    counter = TokenCounter()
    before = set(threading.enumerate())
    counter.count_exactly_from_now_on()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert counter.size(user("z" * 4_500)) == 4_531
    assert pieces == [2_000, 2_000, 531]


# ---- The request fits, whatever the conversation was ----


def estimating() -> TokenCounter:
    """A counter that does not look for a vocabulary in the network."""

    def load():
        raise OSError("there is no network in tests")

    return TokenCounter(load)


def step(name: str, number: int, size: int, text: str = "x") -> list[dict]:
    function = {"name": name, "arguments": json.dumps({"path": f"{number}.txt"})}
    asked = {"role": "assistant", "content": None}
    asked["tool_calls"] = [{"id": f"c{number}", "type": "function", "function": function}]
    return [asked, {**result(f"c{number}", text * size), "name": name}]


def conversation(turns: int, size: int = 400, name: str = "read_file") -> list[dict]:
    messages = [{"role": "system", "content": "You are …"}]
    for n in range(turns):
        messages += [user(f"q{n}"), *step(name, n, size), answer(f"a{n}")]
    return [*messages, user("the task"), *step(name, turns, size)]


def test_nothing_is_done_to_what_fits():
    messages, counter = conversation(5), estimating()
    governed = govern(messages, 2 * counter.total(messages), counter)
    assert (governed.messages, governed.notes) == (messages, [])
    assert governed.tokens == counter.total(messages)


def test_old_results_become_lines_above_80_percent_of_the_budget_and_not_before():
    messages, counter = conversation(14, 2_000), estimating()
    while counter.total(messages) % 4:
        messages[1]["content"] += "?"
    budget = counter.total(messages) * 5 // 4
    assert govern(messages, budget, counter).messages == messages
    assert govern(messages, budget - 1, counter).messages != messages


def test_turns_are_left_out_above_the_whole_budget_and_not_before():
    messages, counter = conversation(3, 400, "message"), estimating()
    total, first = counter.total(messages), counter.total(messages[1:5])
    assert govern(messages, total, counter).messages == messages
    for budget in (total - 1, total - first):
        governed = govern(messages, budget, counter)
        assert governed.messages == [messages[0], *messages[5:]]
        assert governed.notes == [f"1 of 4 turns, ~{first} tokens, are left out"]
        assert governed.tokens == total - first
    governed = govern(messages[1:], total - 20, counter)
    assert governed.messages == messages[5:], "without a system prompt, too"


def test_the_summary_stays_longer_than_the_turns_and_not_longer_than_the_task(sessions):
    session = sessions.get(KEY)
    session.append(*(user(f"q{n}") for n in range(4)))
    session.note(summary={"text": "They talked.", "until": 1})
    system, counter = {"role": "system", "content": "You are … " * 50}, estimating()
    messages = [system, *session.get_history()]
    summary, *_, task = messages[1:]
    assert summary["content"].endswith("They talked.")
    for rest in ([system, summary, task], [system, task]):
        governed = govern(messages, counter.total(rest), counter)
        assert governed.messages == rest
        assert governed.tokens == counter.total(rest)


def test_without_a_question_the_system_prompt_stays():
    messages = [{"role": "system", "content": "You are …"}, answer("x" * 4_000)]
    assert govern(messages, 500, estimating()).messages[0] == messages[0]
    assert govern([], 500, estimating()).messages == []
    task = user("x" * 9_000)
    assert govern([task], 500, estimating()).messages == [task], "there is nothing to cut"


def test_a_task_that_a_hook_took_out_gives_way_to_the_last_question():
    messages, counter = conversation(3, 400, "message"), estimating()
    governed = govern(messages, counter.total(messages) - 1, counter, user("gone"))
    assert governed.messages == [messages[0], *messages[5:]]
    governed = govern(messages, counter.total(messages) - 1, counter, messages[1])
    assert governed.messages[:2] == messages[:2], "the first question is the task"


def test_old_results_become_lines_that_say_what_was_there_but_the_10_newest_and_short_ones_stay():
    messages, counter = conversation(14, 2_000), estimating()
    messages[3]["name"] = "message"  # cannot be called again
    messages[7]["content"] = "short"
    governed = govern(messages, int(counter.total(messages) * 1.1), counter)
    contents = [message["content"] for message in governed.messages if message["role"] == "tool"]
    lines = [text for text in contents if "left out" in text]
    assert lines == [
        f'[2,000 characters of read_file({{"path": "{n}.txt"}}) are left out.'
        " Call it again if you need them.]"
        for n in (2, 3, 4)
    ]
    assert contents[0] == "x" * 2_000 and contents[1] == "short"
    assert [len(text) for text in contents[-10:]] == [2_000] * 10
    assert governed.notes == ["3 old tool results sent as one line each"]


def test_the_line_for_a_result_names_its_call_as_far_as_it_is_known():
    messages, counter = conversation(14, 500), estimating()
    results = [message for message in messages if message["role"] == "tool"]
    results[1]["content"] = "x" * 499
    messages[10]["tool_calls"][0]["function"] = {"name": "grep", "arguments": "y" * 300}
    messages[14]["tool_calls"][0]["function"] = {}
    lines = [message for message in govern(messages, counter.total(messages), counter).messages]
    told = [message["content"] for message in lines if message["role"] == "tool"][:5]
    assert told == [
        '[500 characters of read_file({"path": "0.txt"}) are left out. Call it again if you need them.]',
        "x" * 499,
        f"[500 characters of grep({'y' * 200}) are left out. Call it again if you need them.]",
        "[500 characters of the tool() are left out. Call it again if you need them.]",
        '[500 characters of read_file({"path": "4.txt"}) are left out. Call it again if you need them.]',
    ]


@pytest.mark.parametrize(
    ("name", "becomes_a_line"),
    [("read_file", True), ("exec", True), ("grep", True), ("glob", True), ("list_dir", True),
     ("web_search", True), ("web_fetch", True), ("message", False), ("edit_file", False), ("cron", False)],
)  # fmt: skip
def test_only_results_of_tools_that_can_be_called_again_become_lines(name, becomes_a_line):
    messages, counter = conversation(10, 600, name), estimating()
    governed = govern(messages, counter.total(messages), counter)
    assert ("left out" in governed.messages[3]["content"]) is becomes_a_line


def test_results_that_the_model_has_not_seen_yet_become_no_lines():
    ids = [f"c{n}" for n in range(14)]
    messages = [user("look at all of them"), call(*ids)]
    messages += [{**result(each, "x" * 600), "name": "read_file"} for each in ids]
    counter = estimating()
    assert govern(messages, counter.total(messages), counter).messages == messages


def a_long_turn(size: int) -> list[dict]:
    """System prompt, task, and eight steps, with a question and a picture behind the first ones."""
    messages = [{"role": "system", "content": "You are …"}, user("the task")]
    for n in range(8):
        messages += step("message", n, size)
    messages[4:4] = [user("a question"), {"role": "user", "content": [image("A")]}]
    return messages


def test_no_more_results_of_the_turn_become_lines_than_needed_and_the_last_ones_never():
    messages, counter = a_long_turn(2_000), estimating()
    expected = list(messages)
    for count, place in enumerate((3, 7, 9, 11, 13, 15, 17), 1):
        number = json.loads(messages[place - 1]["tool_calls"][0]["function"]["arguments"])["path"]
        call = f'message({{"path": "{number}"}})'
        text = f"[2,000 characters of {call} are left out. Call it again if you need them.]"
        expected[place] = {**messages[place], "content": text}
        governed = govern(messages, counter.total(expected), counter, messages[1])
        assert governed.messages == expected
        assert governed.notes == [f"{count} old tool result{'s' * (count > 1)} sent as one line each"]


def test_no_more_steps_of_the_turn_are_left_out_than_needed_and_no_question():
    messages, counter = a_long_turn(100), estimating()
    total, question = counter.total(messages), messages[4]
    gone = 0
    for count, place in enumerate((2, 6, 8, 10, 12), 1):
        step = messages[place : place + 2] if count > 1 else [*messages[2:4], messages[5]]
        gone += counter.total(step)
        note = user(f"[{count} earlier steps of this turn are left out; what they did is done]")
        expected = [*messages[:2], note, question, *messages[max(place + 2, 6) :]]
        governed = govern(messages, total - gone + 50, counter, messages[1])
        assert governed.messages == expected
        assert governed.notes == [f"{count} step{'s' * (count > 1)} of this turn left out"]
        assert governed.tokens == counter.total(expected)


def test_at_last_pictures_go_and_the_last_results_share_the_room():
    counter = estimating()
    picture = {"role": "user", "content": [{"type": "text", "text": "[a.png]"}, image("A")]}
    task = {"role": "user", "content": [{"type": "text", "text": "Look."}, image("B")]}
    results = [result("c1", "x" * 9_000), result("c2", "y" * 9_000)]
    governed = govern([task, dict(picture), call("c1", "c2"), *results, picture], 1_500, counter, task)
    first, before, asked, *results, after = governed.messages
    assert (first, asked) == (task, call("c1", "c2")), "what the user sent stays"
    assert before["content"] == after["content"] == "[a.png]"
    room = 1_500 - counter.total([first, before, asked, after])
    for message in results:
        assert 0.7 * room / 2 < counter.size(message) <= room / 2


def test_one_last_result_gets_all_the_room_that_is_left():
    counter = estimating()
    messages = [user("q" * 3_400), *step("exec", 1, 9_000)]
    governed = govern(messages, 1_000, counter)
    room = 1_000 - counter.total(messages[:2])
    assert 0.7 * room < counter.size(governed.messages[-1]) <= room


def test_the_oldest_whole_turns_are_left_out_and_no_more_than_needed():
    chance = random.Random(4)
    for _ in range(40):
        turns = chance.randint(1, 12)
        messages, counter = conversation(turns, chance.randint(1, 60), "message"), estimating()
        alone = counter.total([messages[0], *messages[1 + 4 * turns :]])
        budget = chance.randint(max(alone, 200), max(counter.total(messages), 200))
        governed = govern(messages, budget, counter)
        if len(governed.messages) == len(messages):
            continue
        start = len(messages) - len(governed.messages) + 1
        assert governed.messages[0] is messages[0]
        assert [m["role"] for m in governed.messages[1:]] == [m["role"] for m in messages[start:]]
        assert messages[start]["role"] == "user"
        assert counter.total([*governed.messages, *messages[start - 4 : start]]) > budget
        gone, size = (start - 1) // 4, counter.total(messages[1:start])
        assert governed.notes[-1] == f"{gone} of {turns + 1} turns, ~{size:,} tokens, are left out"


def test_one_result_takes_a_quarter_of_the_budget_at_most():
    counter = estimating()
    messages = [user("look"), *step("web_fetch", 1, 100_000)]
    governed = govern(messages, 8_000, counter)
    assert 1_610 < counter.size(governed.messages[-1]) <= 2_000
    text = governed.messages[-1]["content"].lstrip("x")
    kept = len(governed.messages[-1]["content"]) - len(text)
    assert text == f"\n[{100_000 - kept:,} more characters are left out: ask for a part of it]"
    assert governed.notes == ["1 tool result cut to ~2,000 tokens"]
    quarter = 4 * counter.size(messages[-1])
    assert govern(messages, quarter, counter).messages == messages
    assert govern(messages, quarter - 1, counter).messages != messages


@pytest.mark.parametrize(("length", "kept"), [(1_000, 42), (79, 40), (62, 49), (40, 32)])
def test_of_a_result_some_letters_are_kept_however_small_the_room_is(length, kept):
    cut = shortened({**result("c1", "x" * length), "name": "exec"}, 1)
    note = f"[{length - kept} more characters are left out: ask for a part of it]"
    assert cut == {**result("c1", f"{'x' * kept}\n{note}"), "name": "exec"}


def test_a_turn_that_outgrows_the_window_goes_on():
    """Old results of this turn become lines, then its oldest steps go; what the model has not seen stays."""
    counter = estimating()
    messages = [{"role": "system", "content": "You are …"}, user("the task")]
    for n in range(60):
        messages += step("exec", n, 3_000)
        if n == 30:
            messages.append(user("and do not forget b.txt"))
        governed = govern(messages, 4_000, counter, messages[1])
        assert governed.tokens <= 4_000
        assert governed.messages[-1] is messages[-1] or messages[-1]["role"] == "user"
        assert user("the task") in governed.messages
    assert user("and do not forget b.txt") in governed.messages
    assert " of this turn left out" in governed.notes[-1]
    assert any("what they did is done" in (m["content"] or "") for m in governed.messages)


def random_conversation(chance: random.Random) -> list[dict]:
    messages = [{"role": "system", "content": "s" * chance.randrange(400)}]
    names = ["read_file", "exec", "message", "edit_file"]
    for number in range(chance.randrange(1, 25)):
        messages.append(user("q" * chance.randrange(1, 900)))
        for more in range(chance.choice([0, 0, 1, 2, 12])):
            size = chance.choice([10, 600, 5_000, 40_000])
            messages += step(chance.choice(names), 100 * number + more, size, chance.choice("x你"))
            if chance.random() < 0.1:
                messages.append({"role": "user", "content": [{"type": "text", "text": "a.png"}, image("A")]})
        if chance.random() < 0.9:
            messages.append(answer("a" * chance.randrange(1, 900)))
    while messages[-1]["role"] == "assistant":
        messages.pop()
    return messages


def test_what_is_sent_never_exceeds_the_budget_and_is_lawful_and_what_was_said_never_changes():
    chance = random.Random(7)
    for number in range(600 if FULL else 120):
        messages, counter, budget = random_conversation(chance), estimating(), chance.randrange(1_500, 9_000)
        before = copy.deepcopy(messages)
        governed = govern(messages, budget, counter)
        assert messages == before, number
        assert governed.tokens == counter.total(governed.messages)
        assert governed.tokens <= budget, number
        lawful = legal(governed.messages)
        assert legal(lawful) == lawful
        assert lawful[-1]["role"] != "assistant"
        kept = [m["content"] for m in governed.messages if m["role"] == "user"]
        task = next(m for m in reversed(messages) if m["role"] == "user")
        assert task["content"] in kept or isinstance(task["content"], list)
        called = {c["id"] for m in governed.messages for c in m.get("tool_calls", [])}
        assert {m["tool_call_id"] for m in governed.messages if m["role"] == "tool"} <= called


def test_exact_counting_is_never_waited_for_and_only_wanted_where_bytes_do_not_fit():
    gate, loads = threading.Event(), []

    def load():
        loads.append(threading.current_thread())
        gate.wait()
        return lambda text: 7

    counter = TokenCounter(load)
    messages = [user("x" * 400)]
    govern(messages, 1_000, counter)
    assert loads == []
    govern(messages, 300, counter)
    govern([user("y" * 400)], 300, counter)
    assert len(loads) == 1, "once"
    assert counter.size(user("z" * 400)) > 100, "an estimate, as long as it is not there"
    gate.set()
    [thread] = loads
    thread.join()
    assert counter.size(user("z" * 400)) == 7
    assert counter.size(messages[0]) > 100, "counted once"


@pytest.mark.parametrize(("budget", "is_wanted"), [(400, False), (399, True)])
def test_exact_counting_begins_where_four_bytes_a_token_are_more_than_the_budget(budget, is_wanted):
    gate, before = threading.Event(), set(threading.enumerate())
    govern([user("x" * 368)], budget, TokenCounter(gate.wait))  # 399 bytes, estimated as 100 tokens
    threads = set(threading.enumerate()) - before
    gate.set()
    assert len(threads) == is_wanted


def test_without_a_vocabulary_tokens_are_estimated(caplog):
    caplog.set_level("INFO")

    def load():
        raise OSError("no network")

    counter, before = TokenCounter(load), set(threading.enumerate())
    counter.count_exactly_from_now_on()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert counter.size(user("z" * 400)) == 108
    assert "tokens are estimated: no network" in caplog.text


def test_a_long_memory_keeps_its_newest_lines_and_says_where_the_rest_is():
    lines = [f"- fact {n}" for n in range(1_000)]
    kept = newest(lines, 500, "memory/MEMORY.md")
    assert kept[-1] == lines[-1] and len(kept) < 300
    assert kept[0] == f"[{1_000 - len(kept) + 1} older lines are in memory/MEMORY.md: grep it]"
    assert newest(lines[:3], 500, "x") == lines[:3]


def test_of_a_long_memory_as_much_is_kept_as_fits():
    lines = [f"- fact {n:04}" for n in range(1_000)]
    for most in (100, 500, 2_000):
        kept = measure({"content": "\n".join(newest(lines, most, "x")[1:])})[1]
        assert 0.85 * most < kept <= most
    assert newest(["x" * 1_000, "y" * 1_000], 100, "x") == ["[2 older lines are in x: grep it]"]
    assert newest([], 100, "x") == []


# ---- Long-term memory ----


def remember(workspace: Path, *lines: dict | str, cursor: bytes | None = None) -> list[str]:
    store = MemoryStore(workspace)
    store.folder.mkdir(exist_ok=True)
    raw = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines]
    store.history.write_text("".join(f"{line}\n" for line in raw), encoding="utf-8")
    if cursor is not None:
        (store.folder / ".dream_cursor").write_bytes(cursor)
    return store.recent_history()


def entry(cursor: object, content: object = "text", **more: object) -> dict:
    return {"cursor": cursor, "timestamp": "2026-04-03 00:02", "content": content, **more}


def test_without_files_there_is_no_memory(tmp_path):
    assert MemoryStore(tmp_path).recent_history() == []
    assert MemoryStore(tmp_path).read_facts() == ""


def test_recent_history_is_what_dream_has_not_read(tmp_path):
    entries = [entry(n, f"entry {n}") for n in (1, 2, 3)]
    assert remember(tmp_path, *entries) == [f"[2026-04-03 00:02] entry {n}" for n in (1, 2, 3)]
    assert remember(tmp_path, *entries, cursor=b"2\n") == ["[2026-04-03 00:02] entry 3"]


@pytest.mark.parametrize("cursor", [b"", b"garbage", b"\xff\xfe", b"-7", b"1.5", b"true", b"\0\0\0\0"])
def test_a_damaged_dream_cursor_hides_nothing(tmp_path, cursor):
    assert len(remember(tmp_path, entry(1), entry(2), cursor=cursor)) == 2


@pytest.mark.parametrize("odd", ["5", "x", 5.0, True, 0, -5, None, [5], {"a": 5}])
def test_an_entry_with_an_odd_cursor_is_ignored(tmp_path, odd):
    assert remember(tmp_path, entry(odd, "odd"), entry(1, "good")) == ["[2026-04-03 00:02] good"]


NO_TIME = {"cursor": 9, "content": "text"}


@pytest.mark.parametrize("bad", ["", "{torn", "[1, 2]", "null", "7", {"cursor": 9}, NO_TIME, entry(9, None)])
def test_a_bad_history_line_is_skipped(tmp_path, bad):
    assert remember(tmp_path, bad, entry(1, "a\u2028b"), bad) == ["[2026-04-03 00:02] a\u2028b"]


def test_recent_history_is_at_most_50_entries_and_32000_characters_the_newest(tmp_path):
    many = remember(tmp_path, *(entry(n, f"entry {n}") for n in range(1, 101)))
    assert [line.rsplit(" ", 1)[1] for line in many] == [str(n) for n in range(51, 101)]
    long = remember(tmp_path, *(entry(n, f"{n}" + "x" * 4_980) for n in range(10, 30)))
    assert [line[19:21] for line in long] == ["24", "25", "26", "27", "28", "29"]
    assert len("\n".join(long)) <= 32_000
    assert remember(tmp_path, entry(1, "x" * 31_982)) == []
    assert remember(tmp_path, entry(1, "x" * 31_981)) == [f"[2026-04-03 00:02] {'x' * 31_981}"]


def test_facts_are_read_whatever_their_bytes(tmp_path):
    store = MemoryStore(tmp_path)
    store.folder.mkdir()
    store.facts.write_bytes("Likes Grün. ".encode() + b"\xff")
    assert store.read_facts() == "Likes Grün. \ufffd"


def test_lone_surrogates_stop_no_memory(tmp_path):
    store = MemoryStore(tmp_path)
    store.append_history("Hello.")
    store.append_history("bad \ud800 byte")
    assert store.write_facts("- bad \ud800 byte", instead_of="")
    for text in (contents(store)[1], store.read_facts(), (store.folder / "HISTORY.md").read_text()):
        assert "bad ? byte" in text


# ---- The history and its cursors ----


def contents(store: MemoryStore) -> list[str]:
    return [entry["content"] for entry in store.unread()]


def test_an_entry_gets_the_next_cursor_its_own_time_and_no_thoughts(tmp_path):
    store = MemoryStore(tmp_path)
    store.append_history("<think>\nHm.\n</think>[2026-04-03 00:02] The user planned a trip.")
    store.append_history("Without a time.")
    store.append_history("<think>only thoughts")
    first, second = records(store.history)
    assert first == {"cursor": 1, "timestamp": "2026-04-03 00:02", "content": "The user planned a trip."}
    assert (second["cursor"], second["content"]) == (2, "Without a time.")
    assert store.recent_history()[0] == "[2026-04-03 00:02] The user planned a trip."
    store.append_history("x" * 100_000)
    assert len(contents(store)[-1]) <= 64_000 and contents(store)[-1].endswith("[cut]")


def test_an_entry_of_more_than_64000_letters_is_cut(tmp_path):
    store = MemoryStore(tmp_path)
    store.append_history("x" * 64_000)
    store.append_history("x" * 64_001)
    assert contents(store) == ["x" * 64_000, "x" * 63_990 + " [cut]"]


def test_an_entry_without_a_time_gets_the_current_one_and_all_that_is_said_of_it_is_kept(tmp_path):
    store = MemoryStore(tmp_path)
    store.append_history("Hello.", session=KEY, until=7)
    [entry] = records(store.history)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", entry.pop("timestamp"))
    assert entry == {"cursor": 1, "content": "Hello.", "session": KEY, "until": 7}


def test_only_the_time_at_the_beginning_of_an_entry_is_its_own(tmp_path):
    store = MemoryStore(tmp_path)
    store.append_history("\n[2026-04-03 00:02]  Said [2026-04-03 00:01] hello. [2026-04-03 00:00]\n")
    store.append_history("Said [2026-04-03 00:01] hello.")
    first, second = records(store.history)
    said = "Said [2026-04-03 00:01] hello. [2026-04-03 00:00]"
    assert (first["timestamp"], first["content"]) == ("2026-04-03 00:02", said)
    assert second["timestamp"] != "2026-04-03 00:01" and second["content"] == "Said [2026-04-03 00:01] hello."


GOOD = b'{"cursor": 7, "timestamp": "2026-04-03 00:02", "content": "good"}'


@pytest.mark.parametrize(
    ("written", "known", "aside"),
    [
        (b"", [], None),
        (b"\n", [], None),
        (b"x", [], b"x\n"),
        (b"\0", [], None),
        (GOOD, ["good"], None),
        (GOOD + b"\n", ["good"], None),
        (GOOD[:-1], [], GOOD[:-1] + b"\n"),
        (GOOD + b"\n{", ["good"], b"{\n"),
        (GOOD + b"\n\0\0", ["good"], None),
    ],
)
def test_an_entry_behind_a_torn_one_stands_in_a_line_of_its_own(tmp_path, written, known, aside):
    store = MemoryStore(tmp_path)
    store.folder.mkdir()
    store.history.write_bytes(written)
    store.append_history("new")
    assert contents(MemoryStore(tmp_path)) == [*known, "new"]
    corrupt = store.folder / "history.jsonl.corrupt"
    assert (corrupt.read_bytes() if corrupt.exists() else None) == aside


@pytest.mark.parametrize("bad", ["5", 7.5, True, -3, None])
def test_the_next_cursor_is_one_more_than_the_largest_good_one(tmp_path, bad):
    remember(tmp_path, entry(1), entry(9), entry(bad), "{torn", NO_TIME)
    store = MemoryStore(tmp_path)
    store.append_history("new")
    assert store.unread()[-1]["cursor"] == 10
    assert len(store.history.read_bytes().split(b"\n")) == 7, "what cannot be read stays where it is"
    store.history.unlink()
    store.append_history("after the file was lost")
    assert store.unread()[-1]["cursor"] == 11, "or Dream would take it for read"


@pytest.mark.parametrize("name", [".cursor", ".dream_cursor"])
@pytest.mark.parametrize(("written", "following"), [(b"-7", 1), (b"x", 1), (b"0", 1), (b"7\n", 8)])
def test_the_next_cursor_is_larger_than_all_that_were_noted(tmp_path, name, written, following):
    store = MemoryStore(tmp_path)
    store.folder.mkdir()
    (store.folder / name).write_bytes(written)
    store.append_history("new")
    assert records(store.history)[0]["cursor"] == following
    assert (store.folder / ".cursor").read_text() == str(following)


APPEND_MANY = """
store = MemoryStore(Path(sys.argv[1]))
for number in range(40):
    store.append_history(f"{sys.argv[2]} {number}")
"""


def test_programs_that_append_at_once_get_numbers_of_their_own(tmp_path):
    programs = [another_program(APPEND_MANY, tmp_path, name) for name in "abc"]
    assert [program.wait() for program in programs] == [0, 0, 0]
    store = MemoryStore(tmp_path)
    assert [entry["cursor"] for entry in store.unread()] == list(range(1, 121))
    assert sorted(contents(store)) == sorted(f"{name} {n}" for name in "abc" for n in range(40))


def test_what_cannot_be_read_survives_a_compaction_to_the_byte(tmp_path):
    remember(tmp_path, *(entry(n) for n in range(1, 6)), cursor=b"5")
    store, odd = MemoryStore(tmp_path), b'{"cursor": "6", "content": "by hand"}\nGr\xfcn\n'
    store.history.write_bytes(odd + store.history.read_bytes())
    compact(store, keep=2)
    assert store.history.read_bytes().startswith(odd)
    assert [each["cursor"] for each in known_entries(MemoryStore(tmp_path).history)] == [4, 5]


def test_entries_whose_numbers_began_anew_are_archived_too(tmp_path):
    """Somebody deleted the history and its cursors, and left the archive."""
    store, archive = MemoryStore(tmp_path), tmp_path / "memory" / "history-archive.jsonl"
    for text in ("old", "new"):
        remember(tmp_path, *(entry(n, f"{text} {n}") for n in range(1, 4)), cursor=b"3")
        compact(store, keep=1)
    assert [each["content"] for each in records(archive)] == ["old 1", "old 2", "new 1", "new 2"]


def test_compaction_moves_what_was_read_and_keeps_what_was_not(tmp_path):
    remember(tmp_path, *(entry(n, f"entry {n}") for n in range(1, 31)), cursor=b"12")
    store = MemoryStore(tmp_path)
    compact(store, keep=25)
    assert [each["cursor"] for each in records(store.history)] == list(range(6, 31))
    compact(store, keep=5)
    assert [each["cursor"] for each in records(store.history)] == list(range(13, 31)), "unread ones stay"
    archive = store.folder / "history-archive.jsonl"
    assert [each["cursor"] for each in records(archive)] == list(range(1, 13))
    store.history.write_bytes(archive.read_bytes() + store.history.read_bytes())  # killed in between
    compact(store, keep=5)
    assert [each["cursor"] for each in records(archive)] == list(range(1, 13)), "each once"


def test_a_dream_leaves_1000_entries_in_the_history(home, monkeypatch):
    monkeypatch.setenv("PATH", "")  # no git: it would take its time
    remember(home, *(entry(n) for n in range(1, 1_004)), cursor=b"1002")
    asyncio.run(dream(home, Model("[SKIP]")).run())
    assert [each["cursor"] for each in records(home / "memory" / "history-archive.jsonl")] == [1, 2, 3]
    kept = [each["cursor"] for each in records(home / "memory" / "history.jsonl")]
    assert kept == list(range(4, 1_004))


def test_history_md_is_the_same_for_people_and_is_made_anew_where_it_is_gone(tmp_path):
    store, path = MemoryStore(tmp_path), tmp_path / "memory" / "HISTORY.md"
    for n in range(3):
        store.append_history(f"[2026-04-03 00:0{n}] entry {n}")
    before = path.read_text()
    assert before.startswith("[2026-04-03 00:00] entry 0\n\n[2026-04-03 00:01] entry 1")
    path.unlink()
    (store.folder / ".dream_cursor").write_text("3")
    compact(store, keep=1)
    store.append_history("[2026-04-03 00:03] entry 3")
    assert path.read_text() == before + "[2026-04-03 00:03] entry 3\n\n"


def test_an_entry_that_a_killed_program_did_not_add_for_people_is_added_with_the_next(tmp_path):
    store, path = MemoryStore(tmp_path), tmp_path / "memory" / "HISTORY.md"
    store.append_history("[2026-04-03 00:01] one")
    before = path.read_text()
    store.append_history("[2026-04-03 00:02] two")
    path.write_bytes(before.encode() + b"\xff\n")
    store.append_history("[2026-04-03 00:03] three")
    store.append_history("[2026-04-03 00:04] four")
    said = re.findall(r"\] (\w+)", path.read_text(errors="replace"))
    assert said == ["one", "two", "three", "four"]
    path.write_text("[2026-04-03 00:04] four\n\n")
    store.append_history("[2026-04-03 00:05] five")
    assert path.read_text() == "[2026-04-03 00:04] four\n\n[2026-04-03 00:05] five\n\n", "people tidy up"


def test_an_entry_with_line_ends_of_windows_or_of_a_progress_bar_is_there_once_for_people(tmp_path):
    store = MemoryStore(tmp_path)
    for text in ("one\r\ntwo", "10 %\r20 %", "three"):
        store.append_history(f"[2026-04-03 00:02] {text}")
    people = (store.folder / "HISTORY.md").read_bytes()
    assert [people.count(text) for text in (b"one\r\ntwo", b"10 %\r20 %", b"three")] == [1, 1, 1]


KILLED_BEFORE_IT_RENAMES = """
import signal
kill = partial(os.kill, os.getpid(), signal.SIGKILL)
sys.addaudithook(lambda event, arguments: event == "os.rename" and kill())
MemoryStore(Path(sys.argv[1])).write_facts("- the first", instead_of="")
"""


def test_what_a_killed_program_with_the_same_number_left_is_no_part_of_a_file(tmp_path):
    """In a container each start has the same process id."""
    killed, store = another_program(KILLED_BEFORE_IT_RENAMES, tmp_path), MemoryStore(tmp_path)
    assert killed.wait() == -signal.SIGKILL
    [left] = store.folder.glob(".*.tmp")
    left.rename(left.with_name(left.name.replace(str(killed.pid), str(os.getpid()))))
    assert store.write_facts("- the second", instead_of="")
    assert store.read_facts() == "- the second\n"
    assert not list(store.folder.glob(".*.tmp")), "and it is gone"


def test_facts_are_written_whole_and_only_over_what_was_read(tmp_path):
    store = MemoryStore(tmp_path)
    assert store.write_facts("- Likes blue", instead_of="")
    assert store.read_facts() == "- Likes blue\n"
    assert not store.write_facts("- Likes red", instead_of="- Likes green\n"), "somebody else wrote"
    assert store.read_facts() == "- Likes blue\n"
    assert [path.name for path in store.folder.iterdir() if ".tmp" in path.name] == []


def test_facts_keep_their_mode_and_stay_a_link(tmp_path):
    store, target = MemoryStore(tmp_path), tmp_path / "elsewhere.md"
    store.folder.mkdir()
    target.write_text("old")
    target.chmod(0o640)
    store.facts.symlink_to(target)
    assert store.write_facts("new", instead_of="old")
    assert (target.read_text(), store.facts.is_symlink()) == ("new\n", True)
    assert target.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("text", ["", "  \n", "- one line"])
def test_no_answer_of_a_model_empties_the_facts(tmp_path, caplog, text):
    store, facts = MemoryStore(tmp_path), "- a fact\n" * 100
    store.folder.mkdir()
    store.facts.write_text(facts)
    assert store.write_facts(text, instead_of=facts)
    assert store.read_facts() == facts
    assert "stays as it is" in caplog.text


def test_a_nul_never_gets_into_the_facts(tmp_path):
    """Git and the file tools would take them for binary: no dream could edit or undo anything."""
    store = MemoryStore(tmp_path)
    assert store.write_facts("- The cat\0 is Tom\n", instead_of="")
    assert store.read_facts() == "- The cat is Tom\n"
    assert store.write_facts("\0\n\0", instead_of="- The cat is Tom\n")
    assert store.read_facts() == "- The cat is Tom\n", "nothing but NULs is nothing"


@pytest.mark.parametrize(
    ("before", "after", "is_written"),
    [(300, 1, True), (301, 149, False), (301, 150, True), (300, 0, False), (0, 1, True)],
)
def test_only_long_facts_may_not_shrink_to_less_than_half(tmp_path, caplog, before, after, is_written):
    store = MemoryStore(tmp_path)
    store.folder.mkdir()
    store.facts.write_text("x" * before)
    assert store.write_facts("y" * after, instead_of="x" * before), "the file was not outdated"
    assert store.read_facts() == ("y" * after + "\n" if is_written else "x" * before)
    assert ("MEMORY.md stays as it is" in caplog.text) is not is_written


def test_facts_in_which_nothing_is_new_are_not_written_again(tmp_path, caplog):
    store = MemoryStore(tmp_path)
    store.write_facts("- Likes blue", instead_of="")
    before = store.facts.stat()
    assert store.write_facts("\n- Likes blue", instead_of="- Likes blue\n")
    assert store.facts.stat() == before and not caplog.text


# ---- The Consolidator ----


class Model:
    """Plays replies back, and keeps what it was asked: (messages, tools, tool_choice)."""

    def __init__(self, *replies):
        self.replies, self.asked = list(replies), []

    async def __call__(self, messages, tools, tool_choice):
        self.asked.append((messages, tools, tool_choice))
        reply = self.replies.pop(0) if self.replies else FAILED
        reply = reply() if callable(reply) else reply
        return LLMResponse(reply) if isinstance(reply, str) else reply


FAILED = LLMResponse(finish_reason="error", error="the endpoint is down")


def saves(entry: object, update: object = "", finish_reason: str = "tool_calls") -> LLMResponse:
    arguments = {"history_entry": entry, "memory_update": update}
    return LLMResponse(None, [ToolCallRequest("c", "save_memory", arguments)], finish_reason)


def talk(session: Session, turns: int, size: int = 20, name: str = "grep") -> Session:
    for n in range(turns):
        session.append(user(f"q{n}"), *step(name, n, size), answer(f"a{n}"), sync=False)
    return session


def consolidator(sessions: SessionManager, *replies, **settings) -> Consolidator:
    store = MemoryStore(sessions.folder.parent)
    settings = {"counter": estimating(), **settings}
    return Consolidator(store, Model(*replies), "Save it.", "Sum it up.", **settings)


def test_a_turn_that_ends_while_the_memory_is_busy_asks_for_no_round_of_a_few_lines(sessions):
    session = talk(sessions.get(KEY), 30)
    keeper = consolidator(sessions, saves("They talked."), saves("More."), saves("Too often."))

    async def two_turns():
        first = asyncio.create_task(keeper.after_turn(session, 0))
        await asyncio.sleep(0)
        assert keeper.one_at_a_time.locked()
        await asyncio.gather(first, keeper.after_turn(talk(session, 1), 0))

    asyncio.run(two_turns())
    assert contents(keeper.store) == ["They talked.", "More."] and session.last_consolidated == 72


def test_by_count_the_oldest_turns_go_to_memory_and_half_a_window_stays(sessions, tmp_path):
    session = talk(sessions.get(KEY), 30)  # 120 lines
    keeper = consolidator(sessions, saves("[2026-04-03 00:02] They talked.", "- Likes blue"),
                          saves("More.", "- Likes blue\n- Likes Rome"))  # fmt: skip
    asyncio.run(keeper.after_turn(session, 0))
    assert session.last_consolidated == 72 == loaded(tmp_path).last_consolidated
    assert session.get_history()[0] == user("q18"), "at a question"
    assert contents(keeper.store) == ["They talked.", "More."]
    assert keeper.store.read_facts() == "- Likes blue\n- Likes Rome\n"
    first, second = (asked[0][1]["content"] for asked in keeper.ask.asked)
    assert "q0" in first and "q14" in first and "q15" not in first, "60 lines a round"
    assert "- Likes blue" in second and "q15" in second
    assert {asked[0][0]["role"] for asked in keeper.ask.asked} == {"system"}


def test_below_window_and_budget_no_model_is_asked(sessions):
    session, keeper = talk(sessions.get(KEY), 24), consolidator(sessions)
    asyncio.run(keeper.after_turn(session, 1_000))
    asyncio.run(keeper.before_turn(session, 1_000))
    assert (keeper.ask.asked, session.last_consolidated) == ([], 0)
    assert not list(sessions.folder.glob("*.memory.lock")), "no other program is waited for"


@pytest.mark.parametrize(("count", "moved"), [(3, 0), (4, 2), (5, 3), (6, 4)])
def test_from_as_many_messages_as_the_window_has_half_of_it_stays(sessions, count, moved):
    session, keeper = sessions.get(KEY), consolidator(sessions, *[saves("Entry.")] * 9, window=4)
    session.append(*(user(f"q{n}") for n in range(count)), sync=False)
    session.lines.insert(0, None)
    asyncio.run(keeper.after_turn(session, 0))
    assert session.last_consolidated == (moved + 1 if moved else 0), "an unreadable line is none"


def test_what_fits_the_budget_to_the_token_stays(sessions):
    session = talk(sessions.get(KEY), 3, 2_000)
    size = sum(measure(message)[1] for message in session.get_history())
    for others, told in ((0, ""), (1, "older messages went into the memory")):
        keeper = consolidator(sessions, *[saves("Entry.")] * 9, budget=size)
        assert asyncio.run(keeper.before_turn(session, others)) == told
        assert bool(session.last_consolidated) is bool(told)


def test_a_question_that_waits_for_its_answer_is_not_moved_whatever_came_behind_it(sessions):
    """While servers were starting a second message came, and the first one was never sent."""
    session = talk(sessions.get(KEY), 10)
    session.append(user("the question"), {**user("and one more thing"), "beside": True})
    keeper = consolidator(sessions, *[saves("Entry.")] * 9, budget=1_000)
    assert asyncio.run(keeper.before_turn(session, 900)) != ""
    assert session.get_history()[0] == user("the question")
    session.append(answer("for both"), user("next"))
    asyncio.run(keeper.after_turn(session, 1_000))
    assert session.get_history() == [user("next")]


def test_five_rounds_at_a_time_are_made_and_of_what_new_dropped_all(sessions):
    session = talk(sessions.get(KEY), 120)  # 480 lines
    keeper = consolidator(sessions, *[saves("Entry.")] * 20)
    asyncio.run(keeper.after_turn(session, 0))
    assert (len(keeper.ask.asked), session.last_consolidated) == (5, 300)
    session.start = 480
    talk(session, 60)
    session.restart()
    asyncio.run(keeper.archive(session))
    assert (len(keeper.ask.asked), session.last_consolidated) == (12, 720)


def test_a_conversation_that_another_program_saves_is_left_to_it(sessions):
    pytest.importorskip("fcntl", reason="file locks are POSIX")
    session, keeper = talk(sessions.get(KEY), 30), consolidator(sessions, *[saves("Entry.")] * 9)
    with locked(sessions.folder / "cli%3Adirect.memory.lock"):
        asyncio.run(keeper.after_turn(session, 0))
    assert (keeper.ask.asked, session.last_consolidated) == ([], 0)
    asyncio.run(keeper.after_turn(session, 0))
    assert session.last_consolidated == 72


@pytest.mark.parametrize(
    ("more", "first"),
    [
        ({"until": 4}, "q1"),
        ({"until": 8}, "q2"),
        ({"until": 0}, "q0"),
        ({"until": 13}, "q0"),
        ({"until": "4"}, "q0"),
        ({"until": True}, "q0"),
        ({"until": 4, "session": "cli:other"}, "q0"),
        ({"until": 4, "created_at": "2020-01-01"}, "q0"),
    ],
)
def test_a_round_begins_behind_what_a_killed_program_has_saved_of_it(sessions, more, first):
    session = talk(sessions.get(KEY), 3)
    session.restart()
    keeper = consolidator(sessions, saves("Entry."))
    origin = {"session": KEY, "created_at": session.created_at}
    keeper.store.append_history("Saved.", **(origin | more))
    asyncio.run(keeper.archive(session))
    asked = keeper.ask.asked[0][0][1]["content"]
    assert re.search(r"user: (q\d)", asked)[1] == first
    assert (len(keeper.ask.asked), session.last_consolidated) == (1, 12)


def test_a_round_that_a_killed_program_has_saved_is_only_noted(sessions):
    session = talk(sessions.get(KEY), 3)
    session.restart()
    keeper = consolidator(sessions)
    keeper.store.append_history("Saved.", session=KEY, created_at=session.created_at, until=12)
    asyncio.run(keeper.archive(session))
    assert (keeper.ask.asked, session.last_consolidated) == ([], 12)
    assert contents(keeper.store) == ["Saved."]


def test_over_the_budget_room_is_made_until_half_of_it_is_free(sessions):
    session = talk(sessions.get(KEY), 10, 2_000)
    session.append({**user("now"), "runtime": "It is Monday"})
    keeper = consolidator(sessions, *[saves("Entry.", "- fact")] * 9, budget=4_000)
    asyncio.run(keeper.before_turn(session, 500))
    left = session.get_history()
    assert left[0]["role"] == "user" and left[-1]["content"].endswith("now")
    assert sum(measure(message)[1] for message in left) + 500 <= 2_000
    assert len(left) > 1
    for messages, _, _ in keeper.ask.asked:
        assert sum(measure(message)[1] for message in messages) <= 2_200, "half the budget"
        assert "It is Monday" not in messages[1]["content"]


@pytest.mark.parametrize(("more", "left"), [(0, 3), (-2, 2)])
def test_as_many_messages_stay_as_half_the_budget_takes(sessions, more, left):
    session = sessions.get(KEY)
    stamp = {"timestamp": "2026-04-03T10:00:00+0200"}
    session.append(*({**user("x" * 400), **stamp} for _ in range(10)))
    size = measure({"content": session.lines[0]})[1]
    keeper = consolidator(sessions, *[saves("Entry.")] * 9, budget=2 * (3 * size + 50) + more)
    asyncio.run(keeper.before_turn(session, 50))
    assert session.last_consolidated == 10 - left


@pytest.mark.parametrize(
    "replies",
    [
        ["I would rather talk.", "No."],
        [saves(""), saves("", "x")],
        [saves(None, "x"), saves("<think>hm</think>", "x")],
        [saves("cut", "x", "length"), saves("cut", "x", "length")],
        [saves("cut", "x", "content_filter"), saves("cut", "x", "content_filter")],
        [LLMResponse(None, [ToolCallRequest("c", "exec", {})], "tool_calls"), ""],
        [FAILED],
    ],
)
def test_where_the_model_does_not_save_the_raw_text_goes_to_the_history_and_it_stops(sessions, replies):
    session, keeper = talk(sessions.get(KEY), 40), consolidator(sessions, *replies)
    asyncio.run(keeper.after_turn(session, 0))
    assert len(keeper.ask.asked) == len(replies)
    assert [asked[2] for asked in keeper.ask.asked] == [None, "required"][: len(replies)]
    assert session.last_consolidated == 60, "one round, and no more"
    [raw] = contents(keeper.store)
    assert raw.startswith("[RAW] ") and "q14" in raw and len(raw) <= 16_006
    assert keeper.store.read_facts() == ""


def test_a_model_is_asked_to_save_like_this(sessions):
    session = sessions.get(KEY)
    session.lines = [{**user("I like blue."), "timestamp": "2026-04-03"}, answer("Fine."), user("next")]
    session.start = 2
    keeper = consolidator(sessions, "I would rather talk.", saves("They talked.", "- Likes blue"))
    keeper.store.write_facts("- Likes Rome", instead_of="")
    asyncio.run(keeper.archive(session))
    first, second = keeper.ask.asked
    said = "[2026-04-03] user: I like blue.\nassistant: Fine."
    question = f"# MEMORY.md\n\n- Likes Rome\n\n\n# Conversation\n\n{said}"
    assert first[0] == second[0] == [{"role": "system", "content": "Save it."}, user(question)]
    assert (first[2], second[2]) == (None, "required")
    [tool] = first[1]
    assert (tool["type"], tool["function"]["name"]) == ("function", "save_memory")
    assert "worth keeping" in tool["function"]["description"]
    schema = tool["function"]["parameters"]
    assert (schema["type"], schema["required"]) == ("object", ["history_entry", "memory_update"])
    assert [each["type"] for each in schema["properties"].values()] == ["string", "string"]
    assert "[YYYY-MM-DD HH:MM]" in schema["properties"]["history_entry"]["description"]
    assert "whole new MEMORY.md" in schema["properties"]["memory_update"]["description"]
    assert keeper.store.read_facts() == "- Likes blue\n"
    [entry] = records(keeper.store.history)
    assert (entry["content"], entry["until"], entry["session"]) == ("They talked.", 2, KEY)
    assert entry["created_at"] == session.created_at


def test_an_update_on_an_outdated_text_is_asked_for_again(sessions):
    session = talk(sessions.get(KEY), 25)
    keeper = consolidator(sessions)

    def meanwhile():
        keeper.store.facts.write_text("- The cat is Tom\n")
        return saves("Entry.", "- Likes blue")

    keeper.store.folder.mkdir()
    keeper.ask.replies = [meanwhile, saves("Entry.", "- The cat is Tom\n- Likes blue")]
    asyncio.run(keeper.after_turn(session, 0))
    assert "- The cat is Tom" in keeper.ask.asked[1][0][1]["content"]
    assert keeper.store.read_facts() == "- The cat is Tom\n- Likes blue\n"
    assert contents(keeper.store) == ["Entry."], "once"


def test_where_the_facts_change_three_times_the_text_goes_to_the_history_as_it_is(sessions):
    session = talk(sessions.get(KEY), 1)
    session.restart()
    keeper = consolidator(sessions)
    keeper.store.folder.mkdir()

    def meanwhile():
        with open(keeper.store.facts, "a") as file:
            file.write("- one more\n")
        return saves("Entry.", "- Likes blue")

    keeper.ask.replies = [meanwhile] * 9
    asyncio.run(keeper.archive(session))
    assert len(keeper.ask.asked) == 3
    assert keeper.store.read_facts() == "- one more\n" * 3
    [raw] = records(keeper.store.history)
    assert raw["content"].startswith("[RAW] ") and "q0" in raw["content"]
    assert (raw["until"], raw["session"], raw["created_at"]) == (4, KEY, session.created_at)


def test_new_archives_what_it_drops_and_nothing_else(sessions, tmp_path):
    session = talk(sessions.get(KEY), 20)
    session.restart()
    session.append(user("new"))
    keeper = consolidator(sessions, saves("One."), saves("Two."))
    asyncio.run(keeper.archive(session))
    assert contents(keeper.store) == ["One.", "Two."]
    assert (session.last_consolidated, session.start) == (80, 80)
    assert not session.unsynced, "a power cut takes nothing of it back"
    assert loaded(tmp_path).get_history() == [user("new")]
    assert "new" not in keeper.ask.asked[-1][0][1]["content"].split()
    asyncio.run(keeper.archive(session))
    assert len(keeper.ask.asked) == 2


def test_new_is_never_stuck_where_the_model_fails(sessions):
    session, keeper = talk(sessions.get(KEY), 100), consolidator(sessions, FAILED)
    session.restart()
    asyncio.run(keeper.archive(session))
    assert session.last_consolidated == 400
    assert len(keeper.ask.asked) == 1, "it is not asked again and again"
    assert all(text.startswith("[RAW]") for text in contents(keeper.store))
    assert len(contents(keeper.store)) == 7


def test_what_a_crash_in_new_left_is_archived_the_next_time(sessions, tmp_path):
    talk(sessions.get(KEY), 3).restart()
    session = loaded(tmp_path)
    session.append(user("hello"), answer("hi"))
    keeper = consolidator(sessions, saves("The three turns."))
    asyncio.run(keeper.after_turn(session, 0))
    assert contents(keeper.store) == ["The three turns."]
    assert session.last_consolidated == 12


def test_a_turn_that_is_cancelled_meanwhile_moves_no_cursor(sessions):
    session, keeper = talk(sessions.get(KEY), 40), consolidator(sessions)

    async def cancelled() -> None:
        started = asyncio.Event()

        async def hang(*_) -> None:
            started.set()
            await asyncio.Event().wait()

        keeper.ask = hang
        task = asyncio.create_task(keeper.after_turn(session, 0))
        await started.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(cancelled())
    assert session.last_consolidated == 0
    assert contents(keeper.store) == []


@contextlib.contextmanager
def fsyncs_on_this_thread():
    """For whom this thread brings something to the disk: ["write_atomically"]"""
    seen: list[str] = []

    def look(frame, event, function):
        if event == "c_call" and getattr(function, "__name__", "") == "fsync":
            seen.append(frame.f_code.co_name)

    sys.setprofile(look)
    try:
        yield seen
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("replies", [[saves("Entry.", "- Likes blue")], []], ids=["saved", "raw"])
def test_what_new_drops_reaches_the_disk_and_not_on_the_thread_of_the_loop(sessions, replies):
    session, keeper = talk(sessions.get(KEY), 3), consolidator(sessions, *replies)
    session.restart()
    with fsyncs_on_this_thread() as on_the_loop:
        asyncio.run(keeper.archive(session))
    assert (on_the_loop, session.last_consolidated, len(contents(keeper.store))) == ([], 12, 1)
    assert keeper.store.read_facts() == ("- Likes blue\n" if replies else "")


def test_a_turn_that_is_stopped_while_it_saves_ends_when_all_is_saved_and_nothing_is_twice(sessions):
    session, keeper = talk(sessions.get(KEY), 3), consolidator(sessions, *[saves("Entry.", "- Blue")] * 2)
    session.restart()
    is_held, is_enough, done_early = threading.Event(), threading.Event(), []

    def busy_elsewhere() -> None:
        with locked(keeper.store.folder / ".lock"):
            is_held.set()
            is_enough.wait(5)

    async def stop() -> None:
        saving = asyncio.create_task(keeper.archive(session))
        while not keeper.ask.asked:
            await asyncio.sleep(0.001)
        saving.cancel()
        await asyncio.sleep(0.01)
        done_early.append(saving.done())
        is_enough.set()
        await asyncio.wait([saving])
        assert saving.cancelled() and keeper.store.read_facts() == "- Blue\n"
        await keeper.archive(session)

    other = threading.Thread(target=busy_elsewhere)
    other.start()
    is_held.wait(5)
    asyncio.run(stop())
    other.join()
    assert (done_early, contents(keeper.store), session.last_consolidated) == ([False], ["Entry."], 12)


def test_a_consolidation_in_the_background_does_not_take_back_new(sessions, tmp_path):
    """Another program said `/new` in this session while the model was thinking."""
    session = talk(sessions.get(KEY), 30)

    def meanwhile():
        loaded(tmp_path).restart()
        return saves("Entry.")

    keeper = consolidator(sessions, meanwhile, saves("Entry."))
    asyncio.run(keeper.after_turn(session, 0))
    assert loaded(tmp_path).get_history() == []
    assert len(keeper.ask.asked) == 1, "the other program goes on"
    assert loaded(tmp_path).start == 120


def test_a_large_turn_is_split_and_long_messages_are_shortened(sessions):
    session = sessions.get(KEY)
    session.append(user("look at all of it"))
    for n in range(80):
        session.append(*step("read_file", n, 9_000), sync=False)
    session.append(answer("done"), user("next"), sync=False)
    keeper = consolidator(sessions, *[saves(f"Part {n}.") for n in range(40)], budget=3_000)
    asyncio.run(keeper.after_turn(session, 0))
    assert session.last_consolidated == 162, "a turn is never cut"
    assert len(contents(keeper.store)) > 1
    for messages, _, _ in keeper.ask.asked:
        assert sum(measure(message)[1] for message in messages) <= 1_700


def lines_of(*lines: dict | None) -> Session:
    return Session(KEY, Path("never-written.jsonl"), list(lines))


def test_a_conversation_is_read_in_texts_that_are_as_full_as_they_may_be():
    chance = random.Random(9)
    session = lines_of(*(user("x" * chance.randrange(20, 250)) for _ in range(200)))
    parts = transcripts(session, 0, 200, 300)
    begins = [0, *(part.until for part in parts)]
    for part, begin in zip(parts, begins, strict=False):
        lines = [middle_out(readable(line), 100) for line in session.lines[begin : part.until]]
        assert part.text == "\n".join(lines)
        assert part.tokens <= 300
    for part in parts[:-1]:
        [first] = transcripts(session, part.until, part.until + 1, 300)
        assert part.tokens + first.tokens > 300, "one more would be too much"
    assert begins[-1] == 200 and len(parts) > 10


@pytest.mark.parametrize(("room", "ends"), [(52, [2]), (51, [1, 2]), (26, [1, 2])])
def test_two_messages_that_fit_a_text_to_the_token_are_read_in_one(room, ends):
    session = lines_of(user("x" * 79), user("y" * 79))  # 26 tokens each
    parts = transcripts(session, 0, 2, room)
    assert [part.until for part in parts] == ends
    assert parts[-1].text.endswith("user: " + "y" * 79), "and none is shortened"


def test_a_room_that_is_too_small_for_anything_ends_in_short_texts():
    [part] = transcripts(lines_of(user("x" * 400)), 0, 1, 9)
    assert part.until == 1 and len(part.text) <= 50


def test_a_call_and_its_results_are_read_in_one_text():
    session = lines_of(user("a"), call("c1", "c2"), result("c1", "x"), None, result("c2", "y"), answer("b"))
    assert [(part.text, part.until) for part in transcripts(session, 0, 6, 25)] == [
        ("user: a", 1),
        ("assistant: calls read_file({})\ncalls read_file({})\ntool: x\ntool: y", 5),
        ("assistant: b", 6),
    ]


def test_of_a_turn_that_is_too_long_for_a_text_most_is_kept():
    session = lines_of(call("c1"), *(result("c1", "x" * 100) for _ in range(19)))
    [part] = transcripts(session, 0, 20, 500)  # 521 tokens
    assert part.text.startswith("assistant: calls read_file({})\ntool: x") and part.text.endswith("x")
    assert 375 < part.tokens <= 500


@pytest.mark.parametrize(
    ("length", "most", "kept"),
    [(30, 30, "a" * 15 + "z" * 15), (32, 30, "a" * 16 + "z" * 4 + " […] " + "z" * 10), (0, 10, "")],
)
def test_of_a_long_text_the_beginning_and_the_end_are_kept(length, most, kept):
    assert middle_out("a" * (length // 2) + "z" * (length // 2), most) == kept


@pytest.mark.parametrize("budget", [1_000, 4_000, 64_000])
def test_a_message_is_shortened_to_2000_characters_or_less_where_the_room_is_small(sessions, budget):
    session = sessions.get(KEY)
    session.append(user("x" * 9_000), answer("ok"))
    session.restart()
    keeper = consolidator(sessions, saves("Entry."), budget=budget)
    asyncio.run(keeper.archive(session))
    sent = keeper.ask.asked[0][0][1]["content"].count("x")
    assert sent == pytest.approx({1_000: 100, 4_000: 365, 64_000: 2_000}[budget], abs=45)


def test_beside_large_facts_an_eighth_of_the_budget_is_for_the_conversation(sessions):
    session = sessions.get(KEY)
    session.append(user("x" * 9_000), answer("ok"))
    session.restart()
    keeper = consolidator(sessions, saves("Entry."), budget=8_000)
    keeper.store.write_facts("- fact\n" * 2_500, instead_of="")
    asyncio.run(keeper.archive(session))
    assert keeper.ask.asked[0][0][1]["content"].count("x") == pytest.approx(217, abs=15)


def test_over_80_percent_the_oldest_turns_are_summed_up_once(sessions, tmp_path):
    session = talk(sessions.get(KEY), 12, 1_000, "message")
    session.append(user("the task"))
    tokens = sum(measure(message)[1] for message in session.get_history())
    settings = {"budget": int(tokens / 0.85)}
    keeper = consolidator(sessions, "They looked for q0 to q5.", **settings)
    told = [asyncio.run(keeper.before_turn(session, 0)) for _ in range(2)]
    assert told == ["the older part of this conversation is summed up", ""]
    [(messages, _, _)] = keeper.ask.asked
    assert messages[0]["content"] == "Sum it up." and "q0" in messages[1]["content"]
    first = session.get_history()
    assert "They looked" in first[0]["content"] and first[0]["role"] == "user"
    assert first[1] == user("q7") and len(first) - 1 == 21, "whole turns, and the 20 newest stay"
    assert session.last_consolidated == 0 and contents(keeper.store) == [], "it is not in memory"
    again = loaded(tmp_path)
    again.append(answer("done"), user("more"))
    assert again.get_history()[: len(first)] == first, "prompt caches hold"
    again.note(last_consolidated=again.summary["until"])
    assert again.get_history()[0] == user("q7"), "memory has passed it"
    assert loaded(tmp_path).get_history() == again.get_history()


def test_the_20_newest_messages_are_not_summed_up_and_a_long_summary_is_cut(sessions):
    session = sessions.get(KEY)
    session.append(*(user(f"q{n:02}" + "x" * 397) for n in range(30)))
    budget = int(sum(measure(message)[1] for message in session.get_history()) / 0.85)
    keeper = consolidator(sessions, "a" * 3_000 + "z" * 3_000, budget=budget)
    asyncio.run(keeper.before_turn(session, 0))
    [(messages, tools, choice)] = keeper.ask.asked
    assert (messages[0], tools, choice) == ({"role": "system", "content": "Sum it up."}, [], None)
    assert re.findall(r"user: (q\d\d)", messages[1]["content"]) == [f"q{n:02}" for n in range(10)]
    assert messages[1]["content"].startswith("[20"), "nothing stands before the conversation"
    assert session.summary["until"] == 10
    most = budget // 4
    assert session.summary["text"] == f"{'a' * (most * 2 // 3)} […] {'z' * -(-most // 3)}"


def test_up_to_80_percent_nothing_is_summed_up_and_where_nothing_is_older_neither(sessions):
    session = sessions.get(KEY)
    session.append(*[user("x" * 401), answer("y" * 400)] * 16)
    size = sum(measure(message)[1] for message in session.get_history())
    assert size % 4 == 0
    keeper = consolidator(sessions, "They talked.", budget=size * 5 // 4)
    assert asyncio.run(keeper.before_turn(session, 0)) == "" and keeper.ask.asked == []
    assert asyncio.run(keeper.before_turn(session, 1)) != ""
    session.restart()
    session.append(*[user("x" * 401), answer("y" * 400)] * 9, user("z"))
    before = session.path.read_bytes()
    keeper = consolidator(sessions, budget=size * 9 // 16 + 10)
    assert asyncio.run(keeper.before_turn(session, 0)) == "" and keeper.ask.asked == []
    assert session.path.read_bytes() == before, "nothing is noted"


def test_a_summary_that_the_memory_has_passed_is_no_part_of_the_next_one(sessions):
    session = sessions.get(KEY)
    session.append(*(user(f"q{n:02}" + "x" * 397) for n in range(40)))
    session.note(summary={"text": "Earlier: Rome.", "until": 5}, last_consolidated=8)
    budget = int(sum(measure(message)[1] for message in session.get_history()) / 0.85)
    keeper = consolidator(sessions, "They talked.", budget=budget)
    asyncio.run(keeper.before_turn(session, 0))
    [(messages, _, _)] = keeper.ask.asked
    assert "Rome" not in messages[1]["content"] and "q07" not in messages[1]["content"]
    assert "q08" in messages[1]["content"]


def test_old_results_count_as_the_lines_that_are_sent_of_them_above_80_percent_and_not_before(sessions):
    session = talk(sessions.get(KEY), 14, 2_000)
    size = sum(measure(message)[1] for message in session.get_history())
    keeper = consolidator(sessions, *[saves("Entry.")] * 9, budget=size - 1)
    asyncio.run(keeper.before_turn(session, 0))
    assert session.last_consolidated == 0, "as lines they fit"
    keeper.budget = 2 * size
    asyncio.run(keeper.before_turn(session, size))
    assert session.last_consolidated == 0
    asyncio.run(keeper.before_turn(session, size + 1))
    assert session.last_consolidated > 0, "they are sent whole, and do not fit"


@pytest.mark.parametrize(
    ("questions", "ends"),
    [([1], [1, 100]), ([60], [60, 100]), ([61], [61, 100]), ([59, 60, 61], [60, 100]), ([61, 62], [61, 100])],
)
def test_a_round_ends_at_a_question_after_60_lines_at_most_or_behind_one_whole_turn(
    sessions, questions, ends
):
    session = sessions.get(KEY)
    asked = [0, *questions]
    session.append(*(user("q") if n in asked else answer("a") for n in range(100)), sync=False)
    session.restart(sync=False)
    keeper = consolidator(sessions, *[saves("Entry.")] * 9)
    asyncio.run(keeper.archive(session))
    assert [each["until"] for each in records(keeper.store.history)] == ends


def test_a_question_that_came_between_the_steps_of_a_turn_begins_none():
    late = {**result("c1", "x"), "unseen": 2}
    lines = [user("a"), call("c1"), user("b"), None, user("c"), late, {**answer("for a"), "unseen": 2},
             answer("for b and c"), user("d"), {"role": "user", "content": [image("A")]}]  # fmt: skip
    assert [n for n in range(len(lines)) if begins_turn(lines, n)] == [0, 8]


def test_a_second_summary_is_made_of_the_first_and_what_came_since(sessions):
    session = talk(sessions.get(KEY), 12, 1_000, "message")
    keeper = consolidator(sessions)
    session.note(summary={"text": "Earlier: Rome.", "until": 16})
    talk(session, 6, 1_000, "message")
    session.append(user("the task"))
    tokens = sum(measure(message)[1] for message in session.get_history())
    keeper.ask.replies, keeper.budget = ["Earlier: Rome, and q4."], int(tokens / 0.85)
    asyncio.run(keeper.before_turn(session, 0))
    question = keeper.ask.asked[0][0][1]["content"]
    assert "Earlier: Rome." in question and "q4" in question and "q3" not in question
    assert "and q4" in session.get_history()[0]["content"]


def test_where_the_summary_fails_the_turn_goes_on_without_it(sessions):
    session = talk(sessions.get(KEY), 12, 1_000, "message")
    session.append(user("the task"))
    tokens = sum(measure(message)[1] for message in session.get_history())
    no_summary = LLMResponse("Let me look.", [ToolCallRequest("c", "read_file", {})], "stop")
    withheld = LLMResponse("They talked about", [], "content_filter")
    cut_ones = [LLMResponse("cut", [], reason) for reason in ("length", "error")]
    for reply in (FAILED, *cut_ones, withheld, no_summary, "", " \n", "<think>They talked."):
        keeper = consolidator(sessions, reply, budget=int(tokens / 0.85))
        assert asyncio.run(keeper.before_turn(session, 0)) == ""
        assert session.get_history()[0] == user("q0")


def test_nobody_waits_for_a_summary_of_more_than_five_requests(sessions):
    """A journal of another version, or a model with a smaller window than the last one."""
    session = sessions.get(KEY)
    session.append(*[user("q" + "x" * 300), answer("a" * 700)] * 200, user("the task"), sync=False)
    keeper = consolidator(sessions, *["They talked."] * 100, budget=5_000)
    keeper.ask.replies[0] = FAILED  # a model that is of no help: nothing is saved
    asyncio.run(keeper.before_turn(session, 0))
    assert len(keeper.ask.asked) == 1 and session.summary == {}


def keeps_favourites(messages, tools, tool_choice) -> LLMResponse:
    """A model that saves what begins with `my favourite`, and gives MEMORY.md back whole."""
    facts, said = messages[1]["content"].split("# Conversation")
    old = re.findall(r"^- .*$", facts, re.MULTILINE)
    new = [f"- {fact}" for fact in re.findall(r"my favourite \w+ is \w+", said)]
    return saves("[2026-04-03 00:02] They talked.", "\n".join(dict.fromkeys([*old, *new])))


@pytest.mark.parametrize("window", [8_000, 65_536])
def test_a_long_conversation_always_fits_costs_the_same_late_as_early_and_forgets_nothing(tmp_path, window):
    turns = 2_000 if FULL else 300
    sessions, counter, budget = SessionManager(tmp_path), estimating(), window - 2_000 - 1_024
    keeper = Consolidator(MemoryStore(tmp_path), None, "Save.", "Sum up.", budget, counter=counter)
    calls_by_turn, summaries = [], []

    async def ask(messages, tools, tool_choice):
        assert counter.total(messages) <= budget * 0.6
        if tools:
            return keeps_favourites(messages, tools, tool_choice)
        summaries.append(messages)
        return LLMResponse("They talked about this and that.")

    async def turn(session: Session, n: int) -> None:
        system = {"role": "system", "content": "You are … " + keeper.store.read_facts()}
        text = "my favourite colour is green" if n == 3 else f"question {n}"
        session.append({**user(text), "runtime": f"turn {n}"}, sync=False)
        await keeper.before_turn(session, counter.size(system))
        messages = [system, *session.get_history()]
        for call_number in range(3):
            governed = govern(messages, budget, counter)
            assert governed.tokens <= budget, n
            assert governed.messages[0] is system and text in str(governed.messages)
            new = step("read_file", 10 * n + call_number, 6_000 if n % 7 == 0 else 300)
            session.append(*new, sync=False)
            messages += new
        session.append(answer(f"answer {n}"), sync=False)
        await keeper.after_turn(session, counter.size(system))

    async def talk_on() -> None:
        for n in range(turns):
            events: list[str] = []
            if n % 50 > 40:  # not always: to look on costs ten times as much
                sys.setprofile(lambda frame, event, function, events=events: events.append(event))
            await turn(sessions.get(KEY), n)
            sys.setprofile(None)
            calls_by_turn.append(len(events))

    keeper.ask = ask
    asyncio.run(talk_on())
    early, late = (sorted(filter(None, part)) for part in (calls_by_turn[:200], calls_by_turn[-100:]))
    assert late[len(late) // 2] <= 1.3 * early[len(early) // 2]
    session = loaded(tmp_path)
    assert len(session.lines) == 8 * turns, "what was said is all there"
    assert len(session.get_history()) < 150
    assert "- my favourite colour is green" in MemoryStore(tmp_path).read_facts()
    assert "green" not in str(session.get_history()), "from memory, and from there alone"


# ---- Dream ----


@dataclass
class Result:
    stop_reason: str = "completed"


class Agent:
    """Plays phase 2: makes these calls as far as they are not refused."""

    def __init__(self, home: Path, *calls, stop_reason: str = "completed"):
        self.home, self.calls, self.stop_reason = home, calls, stop_reason
        self.messages, self.refused = [], []

    async def __call__(self, messages, refuse):
        self.messages.append(messages)
        for name, path, text in self.calls:
            if why := refuse(name, {"path": path, "content": text}):
                self.refused.append((name, path, why))
                continue
            (self.home / path).parent.mkdir(parents=True, exist_ok=True)
            (self.home / path).write_text(text)
        return Result(self.stop_reason)


def dream(home: Path, model: Model, *calls, stop_reason: str = "completed", **settings) -> Dream:
    agent = Agent(home, *calls, stop_reason=stop_reason)
    skills = SkillsLoader(home / "skills", ROOT / "skills")
    return Dream(MemoryStore(home), model, agent, "[SKIP] [MEMORY]", "Edit.", skills, **settings)


@pytest.fixture
def home(tmp_path):
    """A workspace in which three things have happened."""
    home = tmp_path / "workspace"
    home.mkdir()
    for name in ("SOUL.md", "USER.md"):
        (home / name).write_text(f"# {name}\n")
    store = MemoryStore(home)
    for n in range(3):
        store.append_history(f"[2026-04-03 00:0{n}] Thing {n}.")
    store.write_facts("- Favourite colour: green", instead_of="")
    return home


BLUE = ("edit_file", "memory/MEMORY.md", "- Favourite colour: blue\n")


def test_a_dream_finds_and_edits_and_is_one_commit(home):
    model = Model("Here:\n- [MEMORY] Favourite colour: blue\n[MEMORY-REMOVE] green: outdated\nThat is all.")
    dreamer = dream(home, model, BLUE)
    told = asyncio.run(dreamer.run())
    assert "Dreamt about 3 entries: 2 changes." in told
    question = model.asked[0][0][1]["content"]
    assert "[2026-04-03 00:02] Thing 2." in question and "Favourite colour: green" in question
    assert time.strftime("%Y-%m-%d") in question
    [phase_2] = dreamer.run_agent.messages
    assert "# Findings\n\n[MEMORY] Favourite colour: blue\n\n[MEMORY-REMOVE] green" in phase_2[1]["content"]
    assert "- memory:" in phase_2[1]["content"], "the skills that exist"
    assert dreamer.store.dream_cursor == 3 and dreamer.store.unread() == []
    log = MemoryRepository(home).log()
    first, second = log.split("\n")
    assert re.fullmatch(r"[0-9a-f]{7,} dream: [\d-]+ [\d:]+, 2 change\(s\)", first)
    assert "changes outside of dreams" in second
    diff = MemoryRepository(home).log(first.split()[0])
    assert "-- Favourite colour: green\n+- Favourite colour: blue" in diff


def test_a_dream_brings_nothing_to_the_disk_on_the_thread_of_the_loop(home, monkeypatch):
    monkeypatch.setenv("PATH", "")  # no git: it would take its time
    remember(home, *(entry(n) for n in range(1, 1_004)), cursor=b"1002")
    with fsyncs_on_this_thread() as on_the_loop:
        asyncio.run(dream(home, Model("[SKIP]")).run())
    assert (on_the_loop, MemoryStore(home).dream_cursor) == ([], 1_003)
    assert (home / "memory" / "history-archive.jsonl").exists()


def test_a_dream_is_asked_what_happened_and_then_what_to_edit(home, monkeypatch):
    monkeypatch.setenv("PATH", "")  # no git: it would take its time
    skill_file(home / "skills", "---\ndescription: Use to sing.\n---\nSing.", name="sing")
    (home / "skills" / "broken" / "SKILL.md").mkdir(parents=True)
    model = Model("[MEMORY] a\n[USER] b")
    dreamer = dream(home, model, max_batch=2)
    days = [time.strftime("Today is %Y-%m-%d, %A.")]
    told = asyncio.run(dreamer.run())
    days.append(time.strftime("Today is %Y-%m-%d, %A."))  # midnight may have been in between
    assert told == "Dreamt about 2 entries: 0 changes. /dream-log shows them."
    [(messages, tools, choice)] = model.asked
    assert (tools, choice) == ([], None)
    assert messages[0] == {"role": "system", "content": "[SKIP] [MEMORY]"}
    today, rest = messages[1]["content"].split("\n\n", 1)
    files = [f"# {home}/memory/MEMORY.md", "- Favourite colour: green\n",
             f"# {home}/SOUL.md", "# SOUL.md\n", f"# {home}/USER.md", "# USER.md\n"]  # fmt: skip
    happened = ["[2026-04-03 00:00] Thing 0.", "[2026-04-03 00:01] Thing 1."]
    assert today in days
    assert rest == "\n\n".join([*files, "# History", *happened])
    [[system, question]] = dreamer.run_agent.messages
    assert system == {"role": "system", "content": "Edit."}
    _, findings, more = re.split("# Findings\n\n|\n\n# Skills\n\n", question["content"])
    assert findings == "\n\n".join(["[MEMORY] a", "[USER] b", *files])
    assert f"- sing: Use to sing. ({home}/skills/sing/SKILL.md)" in more.split("\n\n")
    assert "broken" not in more


@pytest.mark.parametrize(
    ("text", "findings"),
    [
        ("[USER] a", ["[USER] a"]),
        ("- [SOUL] a\n* [SKILL-REMOVE] b\n  [MEMORY]c", ["[SOUL] a", "[SKILL-REMOVE] b", "[MEMORY]c"]),
        ("[SKIP]\n[USER-REMOVE] a", ["[USER-REMOVE] a"]),
        ("[SKIP]", []),
        ("<think>\n[MEMORY] no\n</think>\n[SKIP]", []),
        ("<think>maybe [SKIP]?</think>Hello", None),
        ("<think>[MEMORY] never ends", None),
        ("[MEMORY]", None),
        ("[OTHER] a", None),
        ("I noted [MEMORY] a", None),
        ("", None),
    ],
)
def test_findings_are_lines_that_begin_with_their_kind(text, findings):
    assert findings_in(text) == findings


def test_without_anything_new_no_model_is_asked(home):
    model = Model()
    (home / "memory" / ".dream_cursor").write_text("3")
    assert asyncio.run(dream(home, model).run()) == "There is nothing new to dream about."
    assert model.asked == []


def test_skip_moves_the_cursor_and_makes_no_commit_of_its_own(home):
    dreamer = dream(home, Model("<think>[MEMORY] no</think>\n[SKIP]"), BLUE)
    asyncio.run(dreamer.run())
    assert dreamer.store.dream_cursor == 3
    assert dreamer.run_agent.messages == []
    assert "dream: " not in MemoryRepository(home).log()


def test_an_endpoint_that_is_down_costs_no_memories_however_often(home):
    for _ in range(5):
        assert "Nothing is lost" in asyncio.run(dream(home, Model(FAILED), BLUE).run())
        stopped = dream(home, Model("[MEMORY] x"), stop_reason="error")
        assert "Nothing is lost" in asyncio.run(stopped.run())
    assert MemoryStore(home).dream_cursor == 0


def test_what_fails_three_times_for_another_reason_is_skipped_with_a_warning(home, caplog):
    dreamer = dream(home, Model("What a nice day.", "[MEMORY] x", "Hello!"), stop_reason="max_iterations")
    assert "Nothing is lost" in asyncio.run(dreamer.run())
    assert "Nothing is lost" in asyncio.run(dreamer.run())
    assert MemoryStore(home).dream_cursor == 0
    asyncio.run(dreamer.run())
    assert MemoryStore(home).dream_cursor == 3
    assert "these are skipped" in caplog.text


def test_only_failures_in_a_row_count_and_each_outcome_is_told(home, monkeypatch):
    monkeypatch.setenv("PATH", "")  # no git: it would take its time
    lost = " Nothing is lost: the next one tries again."
    failed, unreachable = "The dream failed." + lost, "The dream did not reach the model." + lost
    dreamer = dream(home, Model("Hm.", "", FAILED, "Hm.", "Hm.", FAILED, FAILED, FAILED, FAILED))
    outcomes = [asyncio.run(dreamer.run()) for _ in range(9)]
    assert outcomes == [failed] * 2 + [unreachable] + [failed] * 2 + [unreachable] * 4
    dreamer = dream(home, Model(*["[MEMORY] x"] * 4), stop_reason="error")
    assert [asyncio.run(dreamer.run()) for _ in range(4)] == [unreachable] * 4
    assert MemoryStore(home).dream_cursor == 0
    dreamer = dream(home, Model(FAILED, *["Hm."] * 6), max_batch=1)
    first, *outcomes = (asyncio.run(dreamer.run()) for _ in range(7))
    assert first == unreachable
    assert outcomes[:2] == outcomes[3:5] == [failed] * 2, "the next entries have three tries again"
    assert "Dreamt" in outcomes[2] and "Dreamt" in outcomes[5]
    assert MemoryStore(home).dream_cursor == 2


def test_one_dream_at_a_time(home):
    async def two_at_once() -> None:
        dreaming, go_on = asyncio.Event(), asyncio.Event()

        async def slow(*_) -> LLMResponse:
            dreaming.set()
            await go_on.wait()
            return LLMResponse("[SKIP]")

        first = asyncio.create_task(dream(home, slow).run())
        await dreaming.wait()
        with pytest.raises(SessionBusy, match="Another dream"):
            await dream(home, Model("[SKIP]")).run()
        go_on.set()
        assert "Dreamt about 3" in await first

    pytest.importorskip("fcntl", reason="file locks are POSIX")
    asyncio.run(two_at_once())


def test_a_broken_repository_costs_no_dream(home, caplog):
    (home / ".nanobot").mkdir()
    (home / ".nanobot" / "memory.git").write_text("no repository")
    told = asyncio.run(dream(home, Model("[MEMORY] blue"), BLUE).run())
    assert told.startswith("Dreamt about 3 entries: 0 changes")
    assert re.search("memory is not under git: .*memory.git", caplog.text)


def test_a_batch_is_at_most_20_entries_and_half_the_budget(home):
    store = MemoryStore(home)
    for n in range(30):
        store.append_history(f"entry {n}")
    asyncio.run(dream(home, Model("[SKIP]")).run())
    assert store.dream_cursor == 20
    store.append_history("x" * 40_000)
    store.append_history("last")
    asyncio.run(dream(home, Model("[SKIP]"), budget=4_000).run())
    assert store.dream_cursor == 33
    asyncio.run(dream(home, Model("[SKIP]"), budget=4_000).run())
    assert store.dream_cursor == 34, "at least one"


def test_a_batch_takes_as_much_as_half_the_budget(home, monkeypatch):
    monkeypatch.setenv("PATH", "")  # no git: it would take its time
    (home / "memory" / ".dream_cursor").write_text("3")
    for _ in range(3):
        MemoryStore(home).append_history("x" * 3_400)  # some 900 tokens
    told = asyncio.run(dream(home, Model("[SKIP]"), budget=4_000).run())
    assert told.startswith("Dreamt about 2 entries")
    assert not (home / "memory" / "history-archive.jsonl").exists(), "a short history stays whole"


def test_what_is_larger_than_the_window_stops_no_dreams(home, monkeypatch):
    monkeypatch.setenv("PATH", "")
    for name in ("SOUL.md", "USER.md", "memory/MEMORY.md"):
        (home / name).write_text("first line\n" + "a fact about the world\n" * 3_000 + "last line\n")
    MemoryStore(home).append_history("from here " + "x" * 60_000 + " to there")
    (home / "memory" / ".dream_cursor").write_text("3")
    dreamer = dream(home, Model("[MEMORY] blue"), budget=4_000)
    asyncio.run(dreamer.run())
    questions = [dreamer.ask.asked[0][0], *dreamer.run_agent.messages]
    for messages in questions:
        assert sum(measure(message)[1] for message in messages) <= 4_000
        assert str(messages).count("first line") == str(messages).count("last line") == 3
    assert "from here" in str(questions[0]) and "to there" in str(questions[0])
    assert dreamer.store.dream_cursor == 4


def test_a_dream_that_the_model_has_no_room_for_fails_and_is_skipped_in_the_end(home, monkeypatch):
    monkeypatch.setenv("PATH", "")
    too_long = LLMResponse(finish_reason="error", error="maximum context length", is_overflow=True)
    dreamer = dream(home, Model(too_long, too_long, too_long))
    told = [asyncio.run(dreamer.run()).split(".")[0] for _ in range(3)]
    assert told == ["The dream failed", "The dream failed", "Dreamt about 3 entries: 0 changes"]


KIT = ROOT / "skills"


@pytest.mark.parametrize(
    ("name", "path", "text", "is_fine"),
    [
        ("edit_file", "memory/MEMORY.md", "", True),
        ("edit_file", "SOUL.md", "", True),
        ("edit_file", "{home}/USER.md", "", True),
        ("edit_file", "AGENTS.md", "", False),
        ("edit_file", "memory/history.jsonl", "", False),
        ("edit_file", "skills/mine/SKILL.md", "", False),
        ("write_file", "skills/mine/SKILL.md", "---\nname: mine\n---\n1. Do it.", True),
        ("write_file", "skills/mine/list.txt", "x", True),
        ("write_file", "skills/SKILL.md", "x", False),
        ("write_file", "skills/../SOUL.md", "x", False),
        ("write_file", "memory/MEMORY.md", "x", False),
        ("write_file", "skills/weather/SKILL.md", "x", False),
        ("write_file", "skills/weather/data/list.txt", "x", False),
        ("write_file", "skills/mine/data/list.txt", "x", True),
        ("write_file", "skills/mine/SKILL.md", "---\nname: memory\n---\nx", False),
        ("write_file", "skills/mine/SKILL.md", "---\nname: mine\nalways: true\n---\nx", False),
        ("write_file", "skills/link/SKILL.md", "x", False),
        ("write_file", "/etc/passwd", "x", False),
        ("read_file", "memory/HISTORY.md", "", True),
        ("read_file", str(KIT / "weather" / "SKILL.md"), "", True),
        ("read_file", "/etc/passwd", "", False),
        ("read_file", "~/.ssh/id_rsa", "", False),
        ("exec", "SOUL.md", "", False),
        ("edit_file", "a\0b", "", False),
    ],
)
def test_a_dream_has_a_fence(home, tmp_path, name, path, text, is_fine):
    (home / "skills").mkdir()
    (home / "skills" / "link").symlink_to(tmp_path)
    arguments = {"path": path.format(home=home), "content": text}
    why = reason_to_refuse(dream(home, Model()), name, arguments)
    assert bool(why) is not is_fine


@pytest.mark.parametrize(
    ("name", "path", "text", "why"),
    [
        ("read_file", "/etc/passwd", "", "Read files below {home} only."),
        ("edit_file", "AGENTS.md", "", "Edit memory/MEMORY.md, SOUL.md, USER.md only."),
        ("write_file", "SOUL.md", "x", "Write only skills, like {home}/skills/NAME/SKILL.md."),
        ("exec", "SOUL.md", "", "Write only skills, like {home}/skills/NAME/SKILL.md."),
        ("write_file", "skills/weather/SKILL.md", "x",
         "A skill may not be `always`, nor have the name of the kit's."),
        ("read_file", "a\0b", "", "That is no usable path: "),
        ("read_file", "", "", ""),
    ],
)  # fmt: skip
def test_a_dreamer_is_told_what_it_may_do_instead(home, name, path, text, why):
    told = reason_to_refuse(dream(home, Model()), name, {"path": path, "content": text} if path else {})
    assert told.startswith(why.format(home=home)) and bool(told) is bool(why)


def test_a_dream_with_the_real_loop_and_tools_edits_what_it_may_and_nothing_else(tmp_path):
    import nanobot
    from providers import ScriptedProvider

    config = nanobot.load_config(environ={})
    config.defaults.workspace = str(tmp_path)
    fact = {"old_text": "Lasting facts, one a line.", "new_text": "- Favourite colour: green"}
    edits = [
        ToolCallRequest("1", "write_file", {"path": "SOUL.md", "content": "Be rude."}),
        ToolCallRequest("2", "exec", {"command": "touch x"}),
        ToolCallRequest("3", "edit_file", {"path": "memory/MEMORY.md", **fact}),
    ]
    loop = nanobot.AgentLoop(config, ScriptedProvider(["[MEMORY] Favourite colour: green", edits, "Noted."]))
    loop.memory.append_history("[2026-04-03 00:02] The user likes green best.")
    soul = (tmp_path / "SOUL.md").read_text()
    assert "Dreamt about 1 entry: 2 changes" in asyncio.run(loop.dream.run())
    assert "- Favourite colour: green" in loop.memory.read_facts()
    assert (tmp_path / "SOUL.md").read_text() == soul and not (tmp_path / "x").exists()
    results = [m["content"] for m in loop.provider.requests[-1].messages if m["role"] == "tool"]
    assert "Write only skills" in results[0]
    find, edit = loop.provider.requests[0].messages, loop.provider.requests[1].messages
    assert "[SKIP]" in find[0]["content"] and "[MEMORY]" in find[0]["content"]
    assert "# Findings" in edit[1]["content"]
    turn = loop.turn(KEY)
    assert "Favourite colour: green" in loop.context.system_prompt(turn), "it is known in a new session"


# ---- What was dreamt can be undone ----


def git(*arguments: str, cwd: Path) -> str:
    return subprocess.run(["git", *arguments], cwd=cwd, capture_output=True, text=True).stdout.strip()


def test_a_dream_is_undone_as_a_new_commit_and_is_not_dreamt_again(home):
    dreamer = dream(home, Model("[MEMORY] blue"), BLUE, ("write_file", "skills/mine/SKILL.md", "1. Do it."))
    asyncio.run(dreamer.run())
    (home / "SOUL.md").write_text("# Be kind.\n")
    assert MemoryRepository(home).restore() == "Undone: 3 changes."
    assert MemoryStore(home).read_facts() == "- Favourite colour: green\n"
    assert (home / "SOUL.md").read_text() == "# Be kind.\n", "what came later stays"
    assert not (home / "skills" / "mine" / "SKILL.md").exists()
    assert MemoryStore(home).dream_cursor == 3
    titles = [line.split(" ", 1)[1] for line in MemoryRepository(home).log().split("\n")]
    kinds = [re.sub(r": \d{4}-.*", "", title) for title in titles]
    assert re.fullmatch("restore of [0-9a-f]{7}", kinds[0])
    assert kinds[1:] == ["changes outside of dreams", "dream", "changes outside of dreams"]
    assert titles[1].endswith(", 2 change(s)")
    assert len(records(MemoryStore(home).history)) == 3, "the history is no part of it"


UNDONE = {  # before and after a dream, and the lines that it changed
    "lines that look like a diff's own": (b"- a\n-- x\n++ y\n", b"- a\n+++ z\n", 3),
    "lines behind a missing line end": (b"old", b"new\nmore", 3),
    "bytes that are no UTF-8": (b"caf\xe9\nold\n", b"caf\xe9\nnew\n", 2),
}


@pytest.mark.parametrize("name", UNDONE)
def test_what_a_dream_changed_is_counted_and_undone_to_the_byte(home, name):
    before, after, changes = UNDONE[name]
    memory, repository = home / "memory" / "MEMORY.md", MemoryRepository(home)
    memory.write_bytes(before)
    repository.commit("changes outside of dreams")
    memory.write_bytes(after)
    assert repository.commit("dream") == changes
    assert repository.restore() == f"Undone: {changes} changes."
    assert memory.read_bytes() == before


def test_what_does_not_fit_any_more_is_left_alone_and_said(home):
    asyncio.run(dream(home, Model("[MEMORY] blue"), BLUE).run())
    MemoryStore(home).facts.write_text("- Favourite colour: red\n")
    assert MemoryRepository(home).restore().startswith("Nothing is changed: ")
    assert MemoryStore(home).read_facts() == "- Favourite colour: red\n"


@pytest.mark.parametrize("sha", ["0123456", "HEAD; rm", "--help", "..", "zzz"])
def test_an_unknown_commit_is_a_friendly_error(home, caplog, sha):
    caplog.set_level("INFO")
    asyncio.run(dream(home, Model("[MEMORY] blue"), BLUE).run())
    assert "/dream-log lists them" in MemoryRepository(home).restore(sha)
    assert ("fatal: " in caplog.text) is (sha == "0123456"), "what git says is in the log"
    assert "/dream-log lists them" in MemoryRepository(home).log(sha)


def test_a_repository_around_the_workspace_and_its_settings_are_left_alone(home, monkeypatch):
    outer = home.parent
    git("init", "-q", cwd=outer)
    (outer / ".git" / "hooks" / "pre-commit").write_text("#!/bin/sh\nexit 1\n")
    (outer / ".git" / "hooks" / "pre-commit").chmod(0o755)
    (outer / ".gitignore").write_text("workspace/memory\n*.md\n")
    git("add", "-A", cwd=outer)
    git("-c", "user.name=x", "-c", "user.email=x@y", "commit", "-q", "--no-verify", "-m", "mine", cwd=outer)
    monkeypatch.setenv("GIT_DIR", str(outer / ".git"))
    asyncio.run(dream(home, Model("[MEMORY] blue"), BLUE).run())
    monkeypatch.delenv("GIT_DIR")
    assert "dream: " in MemoryRepository(home).log()
    assert git("log", "--format=%s", cwd=outer) == "mine"
    assert git("diff", "HEAD", "--stat", cwd=outer) == ""
    assert not list(home.rglob(".git"))


def test_without_git_everything_else_works(home, monkeypatch):
    monkeypatch.setenv("PATH", "")
    dreamer = dream(home, Model("[MEMORY] blue"), BLUE)
    asyncio.run(dreamer.run())
    assert dreamer.store.dream_cursor == 3
    why = "there has been no dream yet, or git is not installed."
    assert MemoryRepository(home).log() == f"There is no log: {why}"
    assert MemoryRepository(home).restore() == f"Nothing is changed: {why}"
    (home / ".nanobot" / "memory.git").mkdir()
    assert MemoryRepository(home).log() == f"There is no log: {why}", "one that was never finished is none"
    assert MemoryRepository(home).commit("notes") == 0


def test_a_commit_is_nanobots_whatever_the_users_settings_are_and_says_what_changed(
    home, own_home, monkeypatch
):
    (own_home / ".gitconfig").write_text("[commit]\ngpgsign = true\n[user]\nname = Somebody\n")
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Somebody")
    repository = MemoryRepository(home)
    (home / "skills").mkdir()
    git("init", "-q", "skills/foreign", cwd=home)  # git refuses to add it: it has no commit
    (home / ".gitignore").write_text("*.md\nmemory\n")
    (home / "memory" / "history-archive.jsonl").touch()
    assert repository.commit("notes") == 3, "without a dream before it"
    assert repository.commit("notes") == 0, "nothing is new"
    monkeypatch.delenv("GIT_AUTHOR_NAME")
    show = ["--git-dir", str(repository.folder), "show", "--name-only"]
    author, title, _, *lines = git(*show, "--format=%an <%ae>%n%B", cwd=home).split("\n")
    assert author == "nanobot <nanobot@localhost>"
    assert re.fullmatch(r"notes: \d{4}-\d\d-\d\d \d\d:\d\d, 3 change\(s\)", title)
    changed, files = lines[:3], lines[5:]
    assert sorted(changed) == ["+# SOUL.md", "+# USER.md", "+- Favourite colour: green"]
    histories = ["memory/history-archive.jsonl", "memory/history.jsonl"]
    assert files == ["SOUL.md", "USER.md", "memory/MEMORY.md", *histories]


def test_what_was_there_before_the_first_dream_cannot_be_undone(home):
    repository = MemoryRepository(home)
    repository.commit("notes")
    (home / "USER.md").unlink()
    (home / "SOUL.md").write_bytes(b"Caf\xe9\n")
    assert repository.commit("notes") == 3, "what was deleted, too"
    assert "+Caf\ufffd" in repository.log(repository.log().split()[0])
    assert repository.restore() == (
        "Nothing is changed: no dream has changed anything yet. /dream-log lists all commits."
    )
    _, first = repository.log().split("\n")
    assert repository.restore(first.split()[0]).endswith(
        "there is no such commit, or none before it. /dream-log lists them."
    )
    assert (home / "SOUL.md").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse the name")
def test_what_git_says_of_a_folder_whose_name_is_no_utf_8_is_a_warning(tmp_path, caplog):
    workspace = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    (workspace / ".nanobot").mkdir(parents=True)
    (workspace / ".nanobot" / "memory.git").write_text("no repository")
    assert MemoryRepository(workspace).commit("notes") == 0
    assert re.search("memory is not under git: .*\ufffd", caplog.text)


def test_the_git_of_the_users_path_is_the_one_that_runs(home, tmp_path, monkeypatch, caplog):
    fake = tmp_path / "bin" / "git"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho not today >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}{os.pathsep}{os.environ['PATH']}")
    assert MemoryRepository(home).commit("notes") == 0
    assert "memory is not under git: not today" in caplog.text


def test_a_memory_that_is_kept_elsewhere_costs_the_other_files_nothing_and_is_said(home, caplog):
    """Git takes nothing that lies behind a link, like a folder that is synced between machines."""
    (home / "memory").rename(home.parent / "synced")
    (home / "memory").symlink_to(home.parent / "synced")
    soul = ("edit_file", "SOUL.md", "# Be brief.\n")
    told = asyncio.run(dream(home, Model("[MEMORY] blue"), BLUE, soul).run())
    assert "2 changes" in told and "not under git: fatal: " in caplog.text
    assert MemoryRepository(home).restore() == "Undone: 2 changes."
    assert (home / "SOUL.md").read_text() == "# SOUL.md\n"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs on this system")
def test_a_file_that_git_cannot_read_keeps_no_other_out(home):
    skill = home / "skills" / "odd" / "SKILL.md"
    skill.parent.mkdir(parents=True)
    skill.write_text("Odd.")
    MemoryRepository(home).commit("changes outside of dreams")
    skill.unlink()
    os.mkfifo(skill)
    (home / "memory" / "MEMORY.md").write_text("- blue\n")
    repository = MemoryRepository(home)
    repository.commit("dream")
    assert "+- blue" in repository.log(repository.git("rev-parse", "HEAD").strip())


@pytest.mark.parametrize("attributes", ["*.md binary", "* text=auto eol=crlf", "* text=auto", "*.md ident"])
def test_what_the_user_set_for_a_repository_around_it_is_not_meant_for_the_memory(home, attributes):
    (home / ".gitattributes").write_text(f"{attributes}\n")
    memory, before = home / "memory" / "MEMORY.md", b"- $Id$\n- of Windows\r\n"
    memory.write_bytes(before)
    MemoryRepository(home).commit("changes outside of dreams")
    memory.write_bytes(before + b"- blue\n")
    assert MemoryRepository(home).commit("dream") == 1
    assert MemoryRepository(home).restore() == "Undone: 1 change."
    assert memory.read_bytes() == before


def test_while_a_dream_goes_on_nothing_is_undone(home):
    """Else the half of it that is there would count as somebody else's."""
    repository, told = MemoryRepository(home), []

    async def edit(messages, refuse):
        MemoryStore(home).facts.write_text(BLUE[2])
        told.append(repository.restore())
        return Result()

    asyncio.run(dream(home, Model("[MEMORY] teal"), ("edit_file", "SOUL.md", "# Be brief.\n")).run())
    MemoryStore(home).append_history("more")
    dreamer = dream(home, Model("[MEMORY] blue"))
    dreamer.run_agent = edit
    assert "2 changes" in asyncio.run(dreamer.run())
    assert told == ["Nothing is changed: Another dream is going on."]
    assert repository.restore() == "Undone: 2 changes."


def test_what_was_undone_or_changed_since_is_said_to_be(home):
    asyncio.run(dream(home, Model("[MEMORY] blue"), BLUE).run())
    repository = MemoryRepository(home)
    assert repository.restore() == "Undone: 2 changes."
    assert repository.restore() == (
        "Nothing is changed: what it did is undone already, or these lines have changed since."
    )


def test_a_repository_whose_making_was_interrupted_is_finished(home):
    folder = home / ".nanobot" / "memory.git"
    folder.mkdir(parents=True)
    (folder / "HEAD").write_text("ref: refs/heads/master\n")
    assert MemoryRepository(home).commit("notes") == 3


def test_a_workspace_may_be_named_from_the_current_folder(home, monkeypatch):
    monkeypatch.chdir(home.parent)
    repository = MemoryRepository(Path(home.name))
    assert repository.commit("notes") == 3
    assert "3 change(s)" in repository.log() and (home / ".nanobot" / "memory.git" / "HEAD").exists()


@pytest.mark.parametrize("lock", ["index.lock", "HEAD.lock", "refs/heads/master.lock"])
def test_a_lock_that_a_killed_git_left_stops_nothing(home, lock):
    asyncio.run(dream(home, Model("[SKIP]")).run())
    (home / ".nanobot" / "memory.git" / lock).touch()
    MemoryStore(home).append_history("more")
    asyncio.run(dream(home, Model("[MEMORY] blue"), BLUE).run())
    assert "dream: " in MemoryRepository(home).log()


def test_a_skill_that_was_dreamt_is_there_in_the_next_turn(home):
    text = "---\nname: mine\ndescription: Use to publish.\n---\n1. Do it."
    dreamer = dream(home, Model("[SKILL] mine: publish"), ("write_file", "skills/mine/SKILL.md", text))
    asyncio.run(dreamer.run())
    assert "Use to publish." in [skill.description for skill in dreamer.skills.load()]


# ---- Skills ----


def skill_file(folder: Path, text: str | bytes, name: str = "demo") -> Path:
    path = folder / name / "SKILL.md"
    path.parent.mkdir(parents=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


FRONT = "---\nname: demo\ndescription: Use to show things.\nalways: true\n---\n# Demo\n\nDo it.\n"


@pytest.mark.parametrize(
    "text", [FRONT, FRONT.replace("\n", "\r\n"), "\ufeff" + FRONT, FRONT.replace("---\n", "--- \n")],
    ids=["plain", "CRLF", "BOM", "a blank behind the dashes"],
)  # fmt: skip
def test_front_matter_and_text_are_told_apart(tmp_path, text):
    skill = read_skill(skill_file(tmp_path, text))
    assert (skill.name, skill.description, skill.always) == ("demo", "Use to show things.", True)
    assert (skill.text, skill.missing) == ("# Demo\n\nDo it.", [])


@pytest.mark.parametrize("text", ["Do it.", "---\n---\nDo it.", "---\nDo it.", "", b"\xff\xfe"])
def test_a_skill_without_front_matter_is_named_after_its_folder(tmp_path, text):
    skill = read_skill(skill_file(tmp_path, text))
    assert (skill.name, skill.description, skill.always, skill.missing) == ("demo", "", False, [])
    assert "Do it." in skill.text or "Do it." not in str(text)


@pytest.mark.parametrize(
    ("always", "is_always"),
    [("true", True), ("True", True), ("yes", True), ("YES", True), ('"true"', True),
     ("false", False), ("no", False), ("1", False), ("", False)],
)  # fmt: skip
def test_a_skill_is_always_in_the_prompt_where_it_says_so(tmp_path, always, is_always):
    skill = read_skill(skill_file(tmp_path, f"---\nname: other\nalways: {always}\n---\n\n Do it. \n"))
    assert (skill.always, skill.name, skill.text) == (is_always, "other", "Do it.")


@pytest.mark.parametrize(("size", "problem"), [(100_000, ""), (100_001, "it has more than 100,000 bytes")])
def test_a_skill_has_100000_bytes_at_most(tmp_path, size, problem):
    skill = read_skill(skill_file(tmp_path, "x" * size))
    assert (skill.problem, len(skill.text)) == (problem, 0 if problem else size)


def test_what_is_wrong_with_a_skill_is_said_anew_where_it_is_something_else(tmp_path, caplog):
    problems = iter([ValueError("too long"), ValueError("too long"), ValueError(), OSError("gone")])

    def read(path: Path) -> bytes:
        raise next(problems)

    path, loader = skill_file(tmp_path, FRONT), SkillsLoader(tmp_path, read=read)
    for _ in range(4):
        loader.load()
    said = [f"{path} is left out: {why}" for why in ("too long", "ValueError", "gone")]
    assert caplog.messages == said


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('"In quotes: yes"', "In quotes: yes"),
        ("'single'", "single"),
        ('Use to say "hi"', 'Use to say "hi"'),
        ("From a --- to b", "From a --- to b"),
        ("  padded  ", "padded"),
        ("", ""),
        (">-\n  Use for\n  the weather.", "Use for the weather."),
        ("|\n  Use for: the weather.", "Use for: the weather."),
        ("Use for\n  the weather.", "Use for the weather."),
        ("x > y\n  |z", "x > y |z"),
    ],
)
def test_a_description_is_read_as_it_was_meant(tmp_path, written, read):
    skill = read_skill(skill_file(tmp_path, f"---\ndescription: {written}\nalways: no\n---\nDo it.\n"))
    assert (skill.description, skill.always, skill.text) == (read, False, "Do it.")


@pytest.mark.parametrize(
    ("requires", "missing"),
    [
        ("null", []),
        ("{}", []),
        ('{"bins": null, "env": null}', []),
        ('{"bins": ["python3-of-nobody", "sh"]}', ["program python3-of-nobody"]),
        ('{"env": ["NOBODY_SET_THIS", "HOME"]}', ["environment variable NOBODY_SET_THIS"]),
        ('{"env": ["NO_A"], "bins": ["no-b"]}', ["program no-b", "environment variable NO_A"]),
    ],
)
def test_what_a_skill_requires_and_the_machine_lacks_is_named(tmp_path, requires, missing):
    front = f'---\nmetadata: {{"nanobot": {{"requires": {requires}}}}}\n---\n'
    assert read_skill(skill_file(tmp_path, front)).missing == missing


def test_metadata_may_take_several_lines_and_what_is_not_for_us_is_nobodys_fault(tmp_path, caplog):
    lines = ["{", '  "nanobot": {"requires":', '    {"bins": ["no-b"]}', "  }", "}"]
    path = skill_file(tmp_path, "")
    for first in ("metadata: {", "metadata:\n  {"):
        front = "\n  ".join([first, *lines[1:]])
        path.write_text(f"---\n{front}\n---\n")
        assert read_skill(path).missing == ["program no-b"]
    path.write_text("---\nmetadata:\n  author: me\n  version: 1\nname: x\n---\n")
    assert (read_skill(path).name, read_skill(path).missing, caplog.text) == ("x", [], "")


@pytest.mark.parametrize(
    "metadata",
    ["{broken", "[1]", "null", "bins: [x]", '{"nanobot": null}', '{"nanobot": {"requires": ["gh"]}}',
     '{"nanobot": {"requires": {"bins": 5}}}', '{"nanobot": {"requires": {"env": [5]}}}'],
)  # fmt: skip
def test_metadata_that_is_not_as_expected_is_said_and_stops_nothing(tmp_path, caplog, metadata):
    path = skill_file(tmp_path, f"---\nname: odd\nmetadata: {metadata}\n---\nDo it.\n")
    assert (read_skill(path).name, read_skill(path).missing) == ("odd", [])
    assert str(path) in caplog.text


def test_a_skill_of_the_workspace_shadows_the_kits(tmp_path):
    skill_file(tmp_path / "own", "mine")
    skill_file(tmp_path / "kit", "the kit's")
    skill_file(tmp_path / "kit", "only here", name="another")
    skills = SkillsLoader(tmp_path / "own", tmp_path / "kit").load()
    assert [(skill.name, skill.text) for skill in skills] == [("another", "only here"), ("demo", "mine")]
    assert SkillsLoader(tmp_path / "nowhere").load() == []


def test_every_skill_of_the_kit_has_a_description_and_a_text():
    skills = SkillsLoader(ROOT / "skills").load()
    assert [skill.name for skill in skills if not (skill.description and skill.text)] == []
    assert [skill.name for skill in skills if skill.always] == ["memory"]


@pytest.mark.parametrize(
    "odd",
    [
        {"role": "tool", "tool_call_id": [1], "content": "x"},
        {"role": "assistant", "tool_calls": "abc"},
        {"role": "assistant", "tool_calls": [1]},
        {"role": "user", "content": 1.5},
        {"role": ["user"], "content": "x"},
        {"role": "user"},
        {"content": "x"},
        {"role": "user", "content": ["x"]},
        {"role": "assistant", "tool_calls": []},
        {"role": "assistant", "tool_calls": [{"id": "c1", "function": "f"}]},
    ],
)
def test_a_line_that_is_json_but_no_message_is_skipped_and_kept_aside(sessions, odd):
    sessions.get("cli:odd").append(user("before"))
    path = sessions.path("cli:odd")
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(odd) + "\n")
    session = SessionManager(sessions.folder.parent).get("cli:odd")
    session.append(user("after"))
    assert [line["content"] for line in session.lines if line] == ["before", "after"]
    assert json.dumps(odd) in path.with_name(f"{path.name}.corrupt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "line",
    [
        {"role": "assistant", "content": None},
        {"role": "assistant", "tool_calls": [{"id": "c1"}]},
        {"role": "assistant", "content": "x", "tool_calls": None},
        {"role": "assistant", "content": "x", "tool_calls": []},
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "tool", "tool_call_id": "c1", "content": ""},
    ],
)
def test_a_message_of_another_program_is_read_as_it_is(sessions, tmp_path, line):
    path = journal(sessions, user("before"))
    path.write_bytes(path.read_bytes() + json.dumps(line).encode() + b"\n")
    assert loaded(tmp_path).lines[1:] == [line]
    assert not list(sessions.folder.glob("*.corrupt"))


def test_what_an_editor_leaves_beside_a_journal_does_not_stop_the_list(sessions):
    path = journal(sessions, user("hi"))
    (path.parent / f".#{path.name}").symlink_to("me@host.4711:1775174400")  # Emacs, while it edits
    assert sessions.list_keys() == [KEY]


def test_a_file_of_somebody_elses_does_not_stop_the_list(sessions):
    sessions.get("cli:mine").append(user("hello"))
    (sessions.folder / "bad%ff.jsonl").write_text("x")
    assert sessions.list_keys() == ["cli:mine"]


def broken_skills(folder: Path) -> dict[str, str]:
    """Four ways in which a SKILL.md is none, and what is said of them."""
    for name in ("device", "folder", "fifo", "huge"):
        (folder / name).mkdir(parents=True)
    os.symlink("/proc/self/mem", folder / "device" / "SKILL.md")
    (folder / "folder" / "SKILL.md").mkdir()
    os.mkfifo(folder / "fifo" / "SKILL.md")
    with open(folder / "huge" / "SKILL.md", "wb") as file:
        file.truncate(100_000_000)
    return {"device": "error", "folder": "directory", "fifo": "regular", "huge": "100,000"}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="FIFOs are POSIX")
def test_a_broken_skill_is_left_out_with_one_line_and_the_others_stay(tmp_path, caplog):
    wanted = broken_skills(tmp_path)
    skill_file(tmp_path, FRONT)
    loader = SkillsLoader(tmp_path)
    for _ in range(3):
        skills = {skill.name: skill for skill in loader.load()}
    assert {name for name, skill in skills.items() if not skill.problem} == {"demo"}
    for name, words in wanted.items():
        assert words in skills[name].problem.lower(), name
        told = [line for line in caplog.messages if str(skills[name].path) in line]
        assert len(told) == 1, "once, not every turn"


def test_a_skill_is_read_by_what_is_handed_in(tmp_path):
    path = skill_file(tmp_path, FRONT)

    def refuse(path: Path) -> bytes:
        raise RuntimeError(f"{path.name} is over the fence")

    [skill] = SkillsLoader(tmp_path, read=refuse).load()
    assert (skill.name, skill.problem) == ("demo", "SKILL.md is over the fence")
    assert skill.path == path and not skill.text


def test_front_matter_that_is_nested_too_deep_stops_nothing(tmp_path):
    path = skill_file(tmp_path, f"---\nmetadata: {'[' * 50_000}\n---\nDo it.\n")
    assert read_skill(path).text == "Do it."
