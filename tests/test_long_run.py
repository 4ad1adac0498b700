"""Long conversations, from outside: the real loop and the real program remember, fit, and never wait."""

import asyncio
import json
import os
import random
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

from fake_llm import FakeLLM, Hang, call
from memory import Consolidator, Dream, MemoryStore, SessionManager, SkillsLoader
from nanobot import AgentLoop, Config
from providers import LLMProvider, LLMResponse, OfflineProvider, ToolCallRequest
from test_command_line import nanobot, start
from tools import FILE_TOOLS, ToolRegistry

FULL = bool(os.environ.get("NANOBOT_TEST_FULL"))
KEY = "cli:direct"


def history(workspace: Path) -> list[str]:
    file = workspace / "memory" / "history.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line)["content"] for line in lines]


def make_loop(tmp_path: Path, provider: LLMProvider, window: int = 65_536, **defaults) -> AgentLoop:
    config = Config()
    settings = {"workspace": str(tmp_path / "workspace"), "context_window_tokens": window, **defaults}
    for name, value in settings.items():
        setattr(config.defaults, name, value)
    config.cwd = config.workspace
    return AgentLoop(config, provider, ToolRegistry(FILE_TOOLS))


class Model(LLMProvider):
    """Answers by `talk(request)`, keeps memory by `save(request)`; both may wait. Checks what it is sent."""

    model = "test"

    def __init__(self, talk=None, save=None, window: float = float("inf")):
        self.talk, self.save, self.window = talk, save, window
        self.sizes: list[int] = []
        self.saves: list = []

    async def answer(self, request):
        size = len(json.dumps([request.messages, request.tools], ensure_ascii=False)) // 4
        self.sizes.append(size)
        assert size + request.options["max_tokens"] <= self.window, "it exceeds the window"
        if any(tool["function"]["name"] == "save_memory" for tool in request.tools):
            self.saves.append(request)
            return await self.save(request)
        if not request.tools and "sum up the earlier part" in request.messages[0]["content"]:
            return LLMResponse("They talked about this and that.")
        return self.talk(request) if self.talk else LLMResponse("Fine.")


def saving(entry: str, update: str) -> LLMResponse:
    arguments = {"history_entry": entry, "memory_update": update}
    return LLMResponse(None, [ToolCallRequest("c", "save_memory", arguments)], "tool_calls")


async def keep_favourites(request) -> LLMResponse:
    """A model that saves what begins with `my favourite`, and gives MEMORY.md back whole."""
    facts, said = request.messages[1]["content"].split("# Conversation")
    old = re.findall(r"^- .*$", facts, re.MULTILINE)
    new = [f"- The user's {fact}" for fact in re.findall(r"my (favourite \w+ is \w+)", said)]
    return saving("[2026-04-03 00:02] They talked.", "\n".join(dict.fromkeys([*old, *new])))


# ---- The whole cycle, without a key ----


def test_what_was_said_is_known_in_a_new_session_and_a_dream_is_seen_and_undone(own_home):
    for text in ("my favourite colour is green", "what is 2+2?", "/new"):
        assert nanobot("--offline", "-m", text)[0] == 0
    workspace = own_home / ".nanobot" / "workspace"
    assert "favourite colour is green" in history(workspace)[0], "the program ended when it was there"
    _, out, _ = nanobot("--offline", "-s", "other", "-m", "what is my favourite colour?")
    assert "The user's favourite colour is green" in out
    about_user = workspace / "USER.md"
    before = about_user.read_text()
    assert ": 1 change. " in nanobot("--offline", "-m", "/dream")[1]
    assert "colour is green" in about_user.read_text()
    commits = nanobot("--offline", "-m", "/dream-log")[1].splitlines()
    assert re.fullmatch(r"[0-9a-f]+ dream: .*, 1 change\(s\)", commits[0])
    _, out, _ = nanobot("--offline", "-m", f"/dream-log {commits[0].split()[0]}")
    assert "+- The user's favourite colour is green" in out
    assert "Undone: 1 change" in nanobot("--offline", "-m", "/dream-restore")[1]
    assert about_user.read_text() == before
    assert "There is nothing new" in nanobot("--offline", "-m", "/dream")[1], "what was undone stays undone"


def test_forty_turns_later_it_is_answered_from_memory(tmp_path):
    loop = make_loop(tmp_path, OfflineProvider(), memory_window=40)

    async def talk() -> str:
        await loop.process_direct("my favourite colour is green", KEY)
        for n in range(40):
            await loop.process_direct(f"what is {n}+{n}?", KEY)
        await loop.background.settled()
        return (await loop.process_direct("what is my favourite colour?", "cli:other")).final_content

    assert "The user's favourite colour is green" in asyncio.run(talk())
    session = loop.sessions.get(KEY)
    assert session.last_consolidated > 0 and "green" not in str(session.get_history())


def test_without_a_dream_there_is_none_to_undo(tmp_path):
    loop = make_loop(tmp_path, OfflineProvider())

    def say(text: str) -> str:
        return asyncio.run(loop.process_direct(text, KEY)).final_content

    assert "no dream yet" in say("/dream-log") and "no dream yet" in say("/dream-restore")
    loop.memory.append_history("They talked about nothing in particular.")
    assert ": 0 changes." in say("/dream")
    assert "no dream has changed anything" in say("/dream-restore")


# ---- A model that is slow, fails or does harm ----


def test_ctrl_c_ends_the_waiting_for_the_memory_and_the_next_turn_keeps_it(own_home):
    replies = {"save": Hang(60)}

    def script(body):
        saves = any(tool["function"]["name"] == "save_memory" for tool in body.get("tools") or [])
        return replies["save"] if saves else "Hello!"

    with FakeLLM(script) as server:
        assert nanobot("-m", "the marker is m-17", server=server)[0] == 0
        waits = start("-m", "/new", server=server)
        assert "A new session begins" in waits.stdout.readline(), "the answer comes first"
        while len(server.bodies) < 2:
            assert waits.poll() is None
        waits.send_signal(signal.SIGINT)
        assert waits.wait(20) == 0
        waits.communicate()
        workspace = own_home / ".nanobot" / "workspace"
        assert history(workspace) == []
        saved = {"history_entry": "[2026-04-03 00:02] m-17.", "memory_update": "- m-17"}
        replies["save"] = call("save_memory", **saved)
        assert nanobot("-m", "hi", server=server)[1] == "Hello!\n"
    assert history(workspace) == ["m-17."]
    assert "m-17" in (workspace / "memory" / "MEMORY.md").read_text()


def test_a_turn_that_fits_and_new_wait_for_no_memory(tmp_path):
    async def talk() -> None:
        released, begun = asyncio.Event(), asyncio.Event()

        async def slow(request):
            begun.set()
            await released.wait()
            return saving("Entry.", "- fact")

        loop = make_loop(tmp_path, Model(save=slow), memory_window=4)
        for n in range(2):
            await loop.process_direct(f"question {n}", KEY)
        await asyncio.wait_for(begun.wait(), 20)
        for text in ("question 2", "/new", "question 3", "/status"):
            result = await asyncio.wait_for(loop.process_direct(text, KEY), 20)
            assert result.stop_reason == "completed"
        result = await asyncio.wait_for(loop.process_direct("hello", "cli:other"), 20)
        assert result.stop_reason == "completed" and not released.is_set()
        released.set()
        await loop.background.settled()
        session = loop.sessions.get(KEY)
        assert session.last_consolidated == session.start == 6

    asyncio.run(talk())
    saved = history(tmp_path / "workspace")
    assert saved and set(saved) == {"Entry."}


def test_two_programs_in_one_session_keep_it_once(tmp_path):
    """The first one has answered and still keeps memory when the second one takes a turn."""

    async def talk() -> list[int]:
        released, begun = asyncio.Event(), asyncio.Event()

        async def slow(request):
            begun.set()
            await released.wait()
            return saving("Entry.", "- fact")

        models = [Model(save=slow), Model(save=slow)]
        first, second = (make_loop(tmp_path, model, memory_window=4) for model in models)
        for n in range(2):
            await first.process_direct(f"question {n}", KEY)
        await asyncio.wait_for(begun.wait(), 20)
        await second.process_direct("question 2", KEY)
        await second.background.settled()
        assert models[1].saves == []
        released.set()
        await first.background.settled()
        await second.process_direct("question 3", KEY)
        await second.background.settled()
        return [len(model.saves) for model in models]

    assert asyncio.run(talk()) == [1, 1]
    session = SessionManager(tmp_path / "workspace").get(KEY)
    assert session.last_consolidated == 6
    assert history(tmp_path / "workspace") == ["Entry.", "Entry."], "lines 0-2, then 2-6"


async def down(request) -> LLMResponse:
    return LLMResponse(finish_reason="error", error="the endpoint is down")


async def refuse(request) -> LLMResponse:
    return LLMResponse("I would rather not.")


async def empty_the_facts(request) -> LLMResponse:
    return saving("[2026-04-03 00:02] They spoke of marker-0 and marker-1.", "")


@pytest.mark.parametrize("save", [down, refuse, empty_the_facts])
def test_whatever_the_model_does_new_is_done_and_nothing_is_lost(tmp_path, save):
    async def talk() -> None:
        loop = make_loop(tmp_path, Model(save=save))
        loop.memory.facts.write_text("- The cat is Tom\n")
        for n in range(2):
            await loop.process_direct(f"marker-{n}", KEY)
        assert "A new session" in (await loop.process_direct("/new", KEY)).final_content
        await loop.background.settled()
        session = loop.sessions.get(KEY)
        assert session.last_consolidated == session.start == 4
        assert loop.memory.read_facts() == "- The cat is Tom\n"

    asyncio.run(talk())
    [entry] = history(tmp_path / "workspace")
    assert "marker-0" in entry and "marker-1" in entry
    assert entry.startswith("[RAW]") == (save is not empty_the_facts)


def test_raw_history_holds_every_message_however_long_the_conversation(tmp_path):
    async def talk() -> None:
        loop = make_loop(tmp_path, Model(save=down))
        session = loop.sessions.get(KEY)
        for n in range(60):
            session.append({"role": "user", "content": f"marker-{n}, " + "x" * 1_500}, sync=False)
            session.append({"role": "assistant", "content": f"reply-{n}"}, sync=False)
        await loop.process_direct("/new", KEY)
        await loop.background.settled()

    asyncio.run(talk())
    text = "\n".join(history(tmp_path / "workspace"))
    for n in range(60):
        assert text.count(f"marker-{n},") == text.count(f"reply-{n}\n") + text.endswith(f"reply-{n}") == 1


def test_where_the_memory_cannot_be_written_the_turn_goes_on(tmp_path):
    loop = make_loop(tmp_path, Model(save=down, window=8_000), 8_000, max_tokens=2_000)
    session = loop.sessions.get(KEY)
    for n in range(30):
        session.append({"role": "user", "content": f"question {n} " + "x" * 1_000}, sync=False)
        session.append({"role": "assistant", "content": "Yes."}, sync=False)
    (loop.memory.folder / ".lock").mkdir()
    told = []

    async def note(event) -> None:
        told.append(event.content)

    result = asyncio.run(loop.process_direct("and now?", KEY, note))
    assert result.stop_reason == "completed"
    assert "nothing went into the memory: [Errno" in str(told) and "are left out" in str(told)


# ---- What does not fit ----


def read_on(most: int):
    """Calls read_file again and again, then answers."""

    def talk(request) -> LLMResponse:
        results = [message for message in request.messages if message["role"] == "tool"]
        steps = len(results)
        for mark in re.findall(r"call_(\d+)", str(request.messages)):
            steps = max(steps, int(mark) + 1)
        if steps == most:
            return LLMResponse("I have read it all.")
        arguments = {"path": "large.txt", "offset": 1 + steps, "limit": 60}
        return LLMResponse(None, [ToolCallRequest(f"call_{steps}", "read_file", arguments)], "tool_calls")

    return talk


def test_a_single_turn_that_outgrows_the_window_goes_on_and_says_so_once(tmp_path):
    loop = make_loop(tmp_path, Model(read_on(30), keep_favourites, 8_000), 8_000, max_tokens=2_000)
    lines = "".join(f"step {n} " + "words " * 12 + "\n" for n in range(100))
    (loop.workspace / "large.txt").write_text(lines)
    told = []

    async def note(event) -> None:
        told.append(event.content) if event.kind == "retry" else None

    async def talk() -> None:
        result = await loop.process_direct("read it all", KEY, note)
        assert (result.stop_reason, result.requests) == ("completed", 31)
        await loop.background.settled()
        status = (await loop.process_direct("/status", KEY)).final_content
        assert "sent as one line" in status or "left out" in status or "cut to" in status

    asyncio.run(talk())
    assert len(told) == 1, told
    assert len(loop.sessions.get(KEY).lines) == 62, "the journal has it whole"


def test_prompt_and_status_show_what_is_left_out(own_home):
    settings = {"agents": {"defaults": {"contextWindowTokens": 8_000, "maxTokens": 2_000}}}
    (own_home / ".nanobot").mkdir()
    (own_home / ".nanobot" / "config.json").write_text(json.dumps(settings))
    session = SessionManager(own_home / ".nanobot" / "workspace").get(KEY)
    for n in range(30):
        session.append({"role": "user", "content": f"question {n} " + "x" * 1_000}, sync=False)
        session.append({"role": "assistant", "content": "Yes."}, sync=False)
    status, out, err = nanobot("prompt", "--offline", "and now?")
    shown = out + err
    assert status == 0 and "and now?" in shown and "question 3 " not in shown, shown[-500:]
    assert re.search(r"\d+ of 31 turns, ~[\d,]+ tokens, are left out", shown)
    assert "turns, ~" in nanobot("--offline", "-m", "/status")[1]


# ---- 2,000 turns ----


def reads_now_and_then(request) -> LLMResponse:
    last = request.messages[-1]
    if last["role"] == "tool":
        return LLMResponse("It says something.")
    number = int(re.findall(r"question (\d+)", last["content"])[-1]) if "question" in last["content"] else 0
    path = "large.txt" if number % 7 == 0 else "small.txt"
    return LLMResponse(None, [ToolCallRequest("c", "read_file", {"path": path})], "tool_calls")


@pytest.mark.parametrize(("window", "turns"), [(8_000, 300), (65_536, 150)])
def test_a_conversation_of_2000_turns_fits_and_is_remembered_in_a_new_session(tmp_path, window, turns):
    turns = 2_000 if FULL else turns
    model = Model(reads_now_and_then, keep_favourites, window)
    loop = make_loop(tmp_path, model, window, max_tokens=2_000)
    (loop.workspace / "small.txt").write_text("a line\n" * 30)
    (loop.workspace / "large.txt").write_text("a longer line of text\n" * 400)

    async def talk() -> str:
        for n in range(turns):
            text = "my favourite colour is green" if n == 3 else f"question {n}"
            result = await loop.process_direct(text, KEY)
            assert result.final_content == "It says something."
        await loop.background.settled()
        offline = make_loop(tmp_path, OfflineProvider(), window, max_tokens=2_000)
        return (await offline.process_direct("what is my favourite colour?", "cli:other")).final_content

    assert "The user's favourite colour is green" in asyncio.run(talk())
    session = SessionManager(loop.workspace).get(KEY)
    assert len(session.lines) == 4 * turns
    assert len(session.get_history()) <= 120 and "green" not in str(session.get_history())
    assert len(model.saves) >= turns // 30, "it was kept as it went"


# ---- Killed between any two writes ----


def killed_at(moment: int, work) -> bool:
    """Run it in a process that is killed before it opens or renames its `moment`th file; False: it ended."""
    child = os.fork()
    if child == 0:
        count = 0

        def look(event: str, arguments: tuple) -> None:
            nonlocal count
            is_write = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if is_write or event == "os.rename":
                count += 1
                if count == moment:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(look)
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def test_kill_9_between_any_two_writes_of_a_consolidation_loses_and_doubles_nothing(tmp_path):
    async def save(messages, tools, choice) -> LLMResponse:
        facts, said = messages[1]["content"].split("# Conversation")
        markers = re.findall(r"marker-\d+\.", said)
        lines = dict.fromkeys(re.findall(r"^- .*$", facts, re.MULTILINE) + [f"- {name}" for name in markers])
        if "marker-25." in said:  # this round fails
            return LLMResponse(finish_reason="error", error="down")
        return saving(" ".join(markers), "\n".join(lines))

    def archive(workspace: Path) -> None:
        keeper = Consolidator(MemoryStore(workspace), save, "Save.", "Sum up.", budget=3_000)
        session = SessionManager(workspace).get(KEY)
        asyncio.run(keeper.archive(session))

    first = tmp_path / "0"
    session = SessionManager(first).get(KEY)
    for n in range(40):
        session.append({"role": "user", "content": f"marker-{n}."}, sync=False)
        session.append({"role": "assistant", "content": "Yes. " + "x" * 300}, sync=False)
    session.restart()
    moments = range(1, 200) if FULL else random.Random(7).sample(range(1, 70), 25)
    kills = 0
    for moment in moments:
        workspace = tmp_path / f"killed-at-{moment}"
        shutil.copytree(first, workspace)
        kills += killed_at(moment, lambda workspace=workspace: archive(workspace))
        archive(workspace)
        MemoryStore(workspace).append_history("The next entry puts right what is made for people.")
        text = "\n".join(history(workspace))
        people = (workspace / "memory" / "HISTORY.md").read_text()
        for n in range(40):
            assert text.count(f"marker-{n}.") == people.count(f"marker-{n}.") == 1, (moment, n)
        facts = MemoryStore(workspace).read_facts().splitlines()
        assert len(facts) == len(set(facts))
        assert SessionManager(workspace).get(KEY).last_consolidated == 80
    assert kills > 15, "else nothing was tested"


def test_kill_9_between_any_two_writes_of_a_dream_loses_and_doubles_nothing(tmp_path):
    def dream(workspace: Path) -> str:
        async def find(messages, tools, choice) -> LLMResponse:
            files, _, happened = messages[1]["content"].rpartition("# History")
            findings = [f"[MEMORY] {fact}" for fact in re.findall(r"fact-\d", happened) if fact not in files]
            return LLMResponse("\n".join(findings) or "[SKIP]")

        async def edit(messages, refuse):
            findings = messages[1]["content"].partition("# Findings")[2]
            for fact in re.findall(r"^\[MEMORY\] (fact-\d)", findings, re.MULTILINE):
                with open(store.facts, "a") as file:
                    file.write(f"- {fact}\n")
            return LLMResponseLike()

        store = MemoryStore(workspace)
        skills = SkillsLoader(workspace / "skills")
        return asyncio.run(Dream(store, find, edit, "Find.", "Edit.", skills).run())

    class LLMResponseLike:
        stop_reason = "completed"

    first = tmp_path / "0"
    store = MemoryStore(first)
    for n in range(4):
        store.append_history(f"The user said fact-{n}.")
    store.facts.write_text("- The cat is Tom\n")
    moments = range(1, 25) if FULL else (2, 5, 7, 9)
    kills = 0
    for moment in moments:
        workspace = tmp_path / f"killed-at-{moment}"
        shutil.copytree(first, workspace)
        kills += killed_at(moment, lambda workspace=workspace: dream(workspace))
        dream(workspace)
        facts = MemoryStore(workspace).read_facts()
        assert [facts.count(f"fact-{n}") for n in range(4)] == [1] * 4, (moment, facts)
        assert MemoryStore(workspace).unread() == []
        assert len(history(workspace)) == 4
    assert kills > 2
