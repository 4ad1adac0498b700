"""Long conversations and `kill -9`, from outside: nothing is lost or doubled, late turns cost as early."""

import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from channels import Channel, InboundMessage, MessageBus
from fake_llm import FakeLLM, Hang, call as called
from memory import MemoryStore, SessionManager
from providers import OfflineProvider
from test_command_line import nanobot, start
from test_memory import CHAT, HOUR, KEY, Model, answer, call, contents, history_of, lines_of, loaded
from test_memory import make_loop, no_network, posix, said, saving, say, told, tokens_in, user
from tools import tool

__all__ = ["no_network"]  # a fixture of all tests here, too


# ---- The whole cycle, without a key ----


def test_what_was_said_is_known_in_a_new_session_and_the_offline_model_dreams_nothing(own_home):
    for text in ("my favourite colour is green", "what is 2+2?", "/new"):
        assert nanobot("--offline", "-m", text)[0] == 0
    workspace = own_home / ".nanobot" / "workspace"
    assert "favourite colour is green" in history_of(workspace)[0], "the program ended when it was there"
    _, out, _ = nanobot("--offline", "-s", "other", "-m", "what is my favourite colour?")
    assert "The user's favourite colour is green" in out
    assert ": 0 changes. " in nanobot("--offline", "-m", "/dream")[1]
    assert "There is nothing new" in nanobot("--offline", "-m", "/dream")[1]


def test_ctrl_c_ends_the_waiting_for_the_memory_and_the_next_turn_keeps_it(own_home):
    replies = {"save": Hang(60)}

    def script(body):
        saves = any(each["function"]["name"] == "save_memory" for each in body.get("tools") or [])
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
        assert history_of(workspace) == []
        replies["save"] = called("save_memory", history_entry=f"{HOUR}m-17.", memory_update="- m-17")
        assert nanobot("-m", "hi", server=server)[1] == "Hello!\n"
    assert history_of(workspace) == ["m-17."]
    assert "m-17" in (workspace / "memory" / "MEMORY.md").read_text()


def test_prompt_and_status_show_what_is_left_out(own_home):
    settings = {"agents": {"defaults": {"contextWindowTokens": 8_000, "maxTokens": 2_000}}}
    (own_home / ".nanobot").mkdir()
    (own_home / ".nanobot" / "config.json").write_text(json.dumps(settings))
    session = SessionManager(own_home / ".nanobot" / "workspace").get(KEY)
    for n in range(30):
        session.append(user(f"question {n} " + "word " * 200), answer("Yes."))
    before = session.path.read_bytes()
    status, out, err = nanobot("prompt", "--offline", "and now?")
    assert status == 0 and "and now?" in out and "question 3 " not in out
    assert re.search(r"\d+ turns left out \(~[\d,]+ tokens\)", out + err)
    assert "turns left out" in nanobot("--offline", "-m", "/status")[1]
    assert session.path.read_bytes() == before, "neither moves or writes anything"


# ---- 2,000 turns ----


def keep_favourites(request):
    """Saves what begins with `my favourite`, and gives MEMORY.md back whole."""
    facts, _, talked = request.messages[1]["content"].partition("# Conversation")
    old = re.findall(r"^- .*$", facts, re.MULTILINE)
    new = [f"- The user's {fact}" for fact in re.findall(r"my (favourite \w+ is \w+)", talked)]
    return saving(f"{HOUR}They talked.", "\n".join(dict.fromkeys([*old, *new])), "This and that.")


def reads_now_and_then(request):
    if request.messages[-1]["role"] == "tool":
        return "It says something."
    numbers = re.findall(r"question (\d+)", request.messages[-1]["content"])
    is_large = int(numbers[-1]) % 7 == 0 if numbers else False
    return call("read_file", path="large.txt" if is_large else "small.txt")


@pytest.mark.parametrize("window", [8_000, 65_536])
@pytest.mark.parametrize("turns", [210, pytest.param(2_000, marks=pytest.mark.slow)])
def test_a_conversation_of_2000_turns_costs_late_as_early_and_forgets_nothing(tmp_path, window, turns):
    """The cost is what is sent, and how many functions are called for it."""
    model = Model(reads_now_and_then, keep_favourites)
    loop = make_loop(tmp_path, model, context_window_tokens=window, max_tokens=2_000)
    (tmp_path / "small.txt").write_text("a line\n" * 30)
    (tmp_path / "large.txt").write_text("a longer line of text\n" * 400)
    costs = []

    async def talk() -> None:
        calls = itertools.count()
        for n in range(turns):
            before = next(calls)
            sys.setprofile(lambda frame, event, _: next(calls) if event == "call" else 0)
            text = "my favourite colour is green" if n == 3 else f"question {n}"
            result = await loop.process_direct(text, KEY)
            await loop.background.settled()
            sys.setprofile(None)
            assert result.final_content == "It says something."
            requests = [*model.asked, *model.saves]
            sent = sum(len(json.dumps(request.messages)) for request in requests)
            costs.append((sent, next(calls) - before, len(requests)))
            model.asked.clear()
            model.saves.clear()

    asyncio.run(talk())
    period = 70  # turns: a multiple of 7, and rounds of consolidation are evened out
    for kind in range(3):
        early, late = (sum(cost[kind] for cost in part) for part in (costs[70:140], costs[-period:]))
        assert late <= 1.3 * early, (kind, early, late)
    offline = make_loop(tmp_path, OfflineProvider())
    assert "favourite colour is green" in say(offline, "what is my favourite colour?", key="cli:other")[0]
    session = loaded(tmp_path)
    assert session.saved > 4 * (turns - 70) and "green" not in str(session.history())
    assert len([line for line in lines_of(session.path) if "role" in line]) == 4 * turns


# ---- Killed between any two writes of the memory ----


def run_until_killed(work, workspace: Path, moment: int) -> None:
    die_at_write(workspace, moment)
    work(workspace)


def consolidate(workspace: Path) -> None:
    def save(request):
        facts, _, talked = request.messages[1]["content"].partition("# Conversation")
        tokens = tokens_in(re.findall("user: .*", talked))
        lines = dict.fromkeys(re.findall(r"^- .*$", facts, re.MULTILINE) + [f"- {token}" for token in tokens])
        return saving(" ".join(tokens), "\n".join(lines), "Things.") if "<5>" not in tokens else "I refuse."

    loop = make_loop(workspace, Model(save=save), context_window_tokens=6_000, max_tokens=2_000)
    say(loop, "/status", "/new")


def dream(workspace: Path) -> None:
    def talk(request):
        text = request.messages[1]["content"]
        if "# Findings" not in text:
            facts, _, happened = text.partition("# History")
            new = [token for token in tokens_in(happened) if token not in facts]
            return "\n".join(f"[MEMORY] {token}" for token in new) or "[SKIP]"
        edits = len([message for message in request.messages if message["role"] == "tool"])
        new = tokens_in(text.partition("# Findings")[2].partition("\n\n# /")[0])[edits:]
        text = f"- The cat is Tom\n- {new[0]}\n" if new else ""
        change = {"path": "memory/MEMORY.md", "old_text": "- The cat is Tom\n", "new_text": text}
        return call("edit_file", **change) if new else "Noted."

    say(make_loop(workspace, Model(talk)), "/dream")


def first_consolidation(workspace: Path) -> list[str]:
    session = loaded(workspace)
    for n in range(40):
        session.append(user(f"<{n}> " + "x " * 100), answer("Yes. "))
    return [f"<{n}>" for n in range(40)]


def first_dream(workspace: Path) -> list[str]:
    memory = MemoryStore(workspace)
    memory.append_history(*(f"The user said <{n}>." for n in range(4)))
    memory.facts.write_text("- The cat is Tom\n")
    return [f"<{n}>" for n in range(4)]


@posix
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("work", "first"), [(consolidate, first_consolidation), (dream, first_dream)])
def test_kill_9_between_any_two_writes_loses_and_doubles_nothing(tmp_path, work, first, every):
    tokens = first(tmp_path / "0")
    for kills in itertools.count():
        workspace = tmp_path / f"killed-{kills}"
        shutil.copytree(tmp_path / "0", workspace)
        process = FORKS.Process(target=run_until_killed, args=(work, workspace, 1 + kills * every))
        process.start()
        process.join()
        for _ in range(2):  # five rounds at a time
            work(workspace)
        with told(f"killed before write {1 + kills * every}"):
            entries, facts = history_of(workspace), tokens_in(MemoryStore(workspace).read_facts())
            assert sorted(re.findall(r"<\d+>", " ".join(entries))) == sorted(tokens)
            lines = MemoryStore(workspace).read_facts().splitlines()
            raw = tokens_in([entry for entry in entries if entry.startswith("[RAW]")])
            assert len(lines) == len(set(lines)) and set(facts) >= set(tokens) - set(raw)
            assert MemoryStore(workspace).unread() == [] or loaded(workspace).saved == 80
        if process.exitcode != -signal.SIGKILL:
            break
    assert kills > 15 // every, "else nothing was tested"


# ---- The life of a chat message ----
# A gateway in a process of its own; the test is its channel: it sends again what was not confirmed.

FORKS = multiprocessing.get_context("forkserver" if hasattr(os, "fork") else "spawn")
if hasattr(os, "fork"):
    FORKS.set_forkserver_preload(["nanobot", "test_memory"])  # to load them takes longer than the test


def die_at_write(workspace: Path, moment: int) -> None:
    """`kill -9` before the process writes to, renames or removes its `moment`th file."""
    writes = itertools.count(1)

    def look(event: str, arguments: tuple) -> None:
        is_write = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        is_ours = is_write and str(workspace) in str(arguments[0]) and ".lock" not in str(arguments[0])
        if (is_ours or event in ("os.rename", "os.remove")) and next(writes) == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)


class Wire(Channel):
    name = "desk"

    def __init__(self, pipe):
        super().__init__(["*"])
        self.pipe = pipe

    async def start(self, bus):
        here, arrived = asyncio.get_running_loop(), asyncio.Queue()
        here.add_reader(self.pipe.fileno(), lambda: arrived.put_nowait(self.pipe.recv()))
        while True:
            id_, text = await arrived.get()
            await bus.publish(InboundMessage("desk", "7", "1", text, message_id=id_))
            self.pipe.send(("confirmed", id_))

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
        await asyncio.sleep(dice.choice([0, 0, 0.002]) if seed else 0)
        answers = " ".join(str(m["content"]) for m in request.messages if m["role"] == "assistant")
        return " ".join(token for token in asked if token not in answers) or "nothing is open"

    def save(request):
        questions = re.findall(r"(?m)^\[\S+\] user: .*", request.messages[1]["content"])
        return saving(HOUR + " ".join(tokens_in(questions)), "- A fact", "Some words.")

    @tool
    async def work(times: int) -> str:
        """Work."""
        pipe.send(("works", times))
        files = [SessionManager(workspace).path(CHAT), SessionManager(workspace).inbox(CHAT).path]
        while times < 0 and not any(file.exists() and b"<b>" in file.read_bytes() for file in files):
            await asyncio.sleep(0.001)
        for _ in range(times):
            await asyncio.sleep(0.001)
        return "worked"

    async def serve_wire() -> None:
        loop = make_loop(workspace, Model(talk, save), work, memory_window=window, max_tool_iterations=1_000)
        bus = MessageBus()
        bus.open(Wire(pipe))
        await loop.run(bus)

    die_at_write(workspace, moment)
    asyncio.run(serve_wire())


class Line:
    """The other end: what it wants to say, what was confirmed, sent and asked, over all lives."""

    def __init__(self, workspace: Path, window: int = 100):
        self.workspace, self.window, self.process = workspace, window, None
        self.open, self.confirmed, self.sent, self.asked, self.works = {}, [], [], [], 0
        self.may_come_twice: set[str] = set()

    def start(self, seed: int = 0, moment: int = 0) -> None:
        self.pipe, theirs = FORKS.Pipe()
        arguments = (self.workspace, theirs, seed, moment, self.window)
        self.process = FORKS.Process(target=gateway, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        for id_, text in self.open.items():
            self._tell(id_, text)

    def _tell(self, id_: str, text: str) -> None:
        with contextlib.suppress(OSError):  # it was killed: the next one gets it
            self.pipe.send((id_, text))

    def say(self, text: str) -> None:
        id_ = str(len(self.open) + len(self.confirmed) + 1)
        self.open[id_] = text
        self._tell(id_, text)

    def hear(self, seconds: float) -> bool:
        """One event; False if there is none, or nobody to tell one."""
        try:
            if not self.pipe.poll(seconds):
                return False
            kind, what = self.pipe.recv()
        except (EOFError, OSError):
            return False
        if kind == "confirmed":
            self.confirmed.append(self.open.pop(what, None))
        elif kind == "works":
            self.works += 1
        else:
            {"sent": self.sent, "asked": self.asked}[kind].append(what)
        return True

    def is_alive(self) -> bool:
        return self.process.is_alive()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        while self.hear(0):
            pass
        self.pipe.close()
        self.process.close()
        for text in contents(loaded(self.workspace, CHAT).undelivered):
            if text in self.sent:  # and the mark was not written
                self.may_come_twice.update(tokens_in(text))

    def until(self, condition, seconds: float = 60) -> bool:
        """False if the gateway ended before it was so."""
        patience = time.monotonic() + seconds
        while not condition():
            if not self.hear(0.2) and not self.is_alive() and not self.hear(0):
                return condition()
            assert time.monotonic() < patience, (self.open, self.sent[-3:], self.asked[-1:])
        return True

    def has_sent(self, words: str) -> bool:
        return any(words in text for text in self.sent)

    def check(self, tokens: list[str], may_be_unanswered: set[str] = frozenset()) -> None:
        """Each message stands in the journal once, was seen in order, and was answered once."""
        lines = [line for line in lines_of(SessionManager(self.workspace).path(CHAT)) if "role" in line]
        users = [token for line in lines if line["role"] == "user" for token in tokens_in(line["content"])]
        assert users == tokens
        seen = list(dict.fromkeys(itertools.chain.from_iterable(self.asked)))
        assert [token for token in seen if token in tokens] == tokens, "seen by the model, in order"
        answered = Counter(token for text in self.sent for token in tokens_in(text))
        for token in tokens:
            least = 0 if token in may_be_unanswered else 1
            most = 2 if token in self.may_come_twice else 1
            assert least <= answered[token] <= most, (token, answered[token], self.sent)
        results = Counter(line["tool_call_id"] for line in lines if line["role"] == "tool")
        assert set(results.values()) <= {1}


# What is said, and what is sent when it is done; the tool works until `<b>` is there.
LIFE = [("<a>", None), ("<b>", "<b>"), ("/new", "A new session"), ("<c>", "<c>"), ("<go.on>", "<go.on>")]


@posix
@pytest.mark.parametrize(
    ("window", "every"),
    [(100, 7), pytest.param(100, 1, marks=pytest.mark.slow), pytest.param(2, 1, marks=pytest.mark.slow)],
)
def test_kill_9_before_any_write_of_a_message_s_life_loses_and_doubles_nothing(tmp_path, window, every):
    """The table of DESIGN 6, step by step: two messages, one while a tool works, /new, two more."""
    kills = 0
    for moment in itertools.count(2, every):
        line = Line(tmp_path / str(moment), window)
        line.start(moment=moment)
        was_killed = False
        with told(f"killed before write {moment}"):
            for text, sign in LIFE:
                line.say(text)
                done = partial(line.has_sent, sign) if sign else lambda line=line: line.works
                if not was_killed and not line.until(done):
                    was_killed = True
                    line.kill()
                    line.start()
            assert line.until(partial(line.has_sent, "<go.on>"))
            line.kill()
            line.check([text for text, _ in LIFE if text != "/new"])
            assert window == 2 or not {"<a>", "<b>"} & set(tokens_in(line.asked[-1])), "/new was done"
        if not was_killed:
            break
        kills += 1
    assert kills > 30 // every, "else nothing was tested"


def tokens_of_ended_turns(workspace: Path) -> set[str]:
    tokens: list[str] = []
    ended: set[str] = set()
    for line in lines_of(SessionManager(workspace).path(CHAT)):
        if line.get("role") == "user":
            tokens += tokens_in(line["content"])
        elif line.get("mark") == "ended":
            ended.update(tokens)
        elif line.get("role") == "assistant" and "tool_calls" not in line:
            tokens.clear()
    return ended


@posix
@pytest.mark.parametrize(("seed", "kills"), [(1, 6), pytest.param(2, 200, marks=pytest.mark.slow)])
def test_whatever_comes_when_each_message_is_seen_in_order_and_answered_once(tmp_path, seed, kills):
    """Fault 1: random arrivals, stops, kills in mid turn and consolidations."""
    dice = random.Random(seed)
    line = Line(tmp_path, window=6)
    texts = []
    for life in range(kills + 1):
        line.start(seed=seed + life)
        for _ in range(dice.randint(2, 8)):
            texts.append("/stop" if dice.random() < 0.07 else f"<{len(texts)}>")
            line.say(texts[-1])
            for _ in range(dice.choice([0, 0, 1, 3, 10])):
                line.hear(0.01)
        for _ in range(dice.randint(0, 12)):
            line.hear(0.02)
        line.kill()
    line.start(seed=seed)
    for n in range(5):
        texts.append(f"<end.{n}>")
        line.say(texts[-1])
        assert line.until(partial(line.has_sent, texts[-1]))
    line.until(lambda: history_of(tmp_path))
    line.kill()
    line.check([text for text in texts if text != "/stop"], tokens_of_ended_turns(tmp_path))
    moved = Counter(token for entry in history_of(tmp_path) for token in tokens_in(entry))
    session = loaded(tmp_path, CHAT)
    assert set(moved.values()) == {1}, "each moved into the memory once"
    assert Counter([*moved, *tokens_in(said(session.messages))]) == Counter(set(texts) - {"/stop"})
