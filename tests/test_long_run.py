"""The life of a chat message under `kill -9`, from outside: nothing is lost or doubled.

A gateway is a process of its own; the test is its channel, and sends again what was not confirmed.
"""

import contextlib
import itertools
import random
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from chats import said
from conftest import FORKS, fork, lines_of
from memory import MemoryStore, SessionManager
from test_memory import CHAT, contents, gateway, history_of, loaded, told, tokens_in


class Line:
    """The other end: what was said to it, and heard from it, over all its lives."""

    def __init__(self, workspace: Path, window: int = 100):
        self.workspace, self.window, self.said = workspace, window, []
        self.heard: dict[str, list] = defaultdict(list)  # confirmed, sent, asked, works
        self.unmarked = Counter()  # answers that were sent when it was killed, and not noted

    def start(self, seed: int = 0, moment: int = 0) -> None:
        self.pipe, theirs = FORKS.Pipe()
        self.process = fork(gateway, self.workspace, theirs, seed, moment, self.window)
        theirs.close()
        for number in sorted({*range(len(self.said))} - {*self.heard["confirmed"]}):
            self.pipe.send((number, self.said[number]))

    def say(self, text: str) -> None:
        self.said.append(text)
        with contextlib.suppress(OSError):  # it was killed: the next one gets it
            self.pipe.send((len(self.said) - 1, text))

    def hear(self, seconds: float) -> bool:
        """One event; False if there is none, or nobody to tell one."""
        with contextlib.suppress(EOFError, OSError):
            if self.pipe.poll(seconds):
                kind, what = self.pipe.recv()
                self.heard[kind].append(what)
                return True
        return False

    def until(self, words: str, kind: str = "sent") -> bool:
        """False if the gateway ended before they were heard."""
        while words not in str(self.heard[kind]):
            if not self.hear(0.2) and not self.process.is_alive() and not self.hear(0):
                return words in str(self.heard[kind])
        return True

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        while self.hear(0):
            pass
        self.pipe.close()
        self.process.close()
        undelivered = contents(loaded(self.workspace, CHAT).undelivered)
        self.unmarked.update(
            tokens_in([text for text in undelivered if text in self.heard["sent"]])
        )

    def check(self, may_be_unanswered: set[str] = frozenset()) -> None:
        """Each message stands in the journal once, was seen in order, and was answered once."""
        tokens = [text for text in self.said if text[0] != "/"]
        lines = [
            line for line in lines_of(SessionManager(self.workspace).path(CHAT)) if "role" in line
        ]
        assert [line["content"] for line in lines if line["role"] == "user"] == tokens
        seen = dict.fromkeys(itertools.chain.from_iterable(self.heard["asked"]))
        assert list(seen) == tokens, "seen by the model, in order"
        answered = Counter(token for text in self.heard["sent"] for token in tokens_in(text))
        for token in tokens:
            least = 0 if token in may_be_unanswered else 1
            assert least <= answered[token] <= 1 + self.unmarked[token], (token, answered[token])
        results = [line["tool_call_id"] for line in lines if line["role"] == "tool"]
        assert len(results) == len(set(results))
        facts = tokens_in(MemoryStore(self.workspace).read_facts())
        moved = [token for entry in history_of(self.workspace) for token in tokens_in(entry)]
        left = tokens_in(said(loaded(self.workspace, CHAT).messages))
        assert sorted([*moved, *left]) == sorted(tokens) and len(facts) == len(set(facts)), (
            "each moved once"
        )


# What is said, and what is heard when it is done; the tool works until `<b>` is there.
LIFE = [
    ("<a>", "-1", "works"),
    ("<b>", "<b>"),
    ("/new", "A new conversation"),
    ("<c>", "<c>"),
    ("<go.on>", "<go.on>"),
]


@pytest.mark.parametrize("window", [100, 2])
@pytest.mark.parametrize("every", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_kill_9_before_any_write_of_a_message_s_life_loses_and_doubles_nothing(
    tmp_path, window, every
):
    """The table of DESIGN 6, step by step: two messages, one while a tool works, /new, two more.
    With a window of 2 what was said moves into the memory all the time."""
    for moment in itertools.count(2, every):
        line = Line(tmp_path / str(moment), window)
        line.start(moment=moment)
        was_killed = False
        with told(f"killed before write {moment}"):
            for text, *sign in LIFE:
                line.say(text)
                if not was_killed and not line.until(*sign):
                    was_killed = True
                    line.kill()
                    line.start()
            assert line.until("<go.on>")
            line.kill()
            line.check()
            assert window == 2 or not {"<a>", "<b>"} & set(line.heard["asked"][-1]), "/new was done"
        if not was_killed:
            break
    assert moment > 30


@pytest.mark.parametrize(("seed", "kills"), [(1, 6), pytest.param(2, 200, marks=pytest.mark.slow)])
def test_whatever_comes_when_each_message_is_seen_in_order_and_answered_once(tmp_path, seed, kills):
    """Random arrivals, stops, kills in mid turn and consolidations."""
    dice = random.Random(seed)
    line = Line(tmp_path, window=6)
    for life in range(kills + 1):
        line.start(seed=seed + life)
        for _ in range(dice.randint(2, 8)):
            line.say("/stop" if dice.random() < 0.07 else f"<{len(line.said)}>")
            for _ in range(dice.choice([0, 0, 1, 3, 12])):
                line.hear(0.02)
        line.kill()
    line.start(seed=seed)
    for text in ("<end.1>", "<end.2>", "<end.3>", "<end.4>", "<end.5>"):
        line.say(text)
        assert line.until(text)
    while not history_of(tmp_path):
        line.hear(0.2)
    line.kill()
    turns = re.split(
        r'\n(?={"n": \d+, "role": "assistant", "content": ")',
        loaded(tmp_path, CHAT).path.read_text(),
    )
    line.check({token for turn in turns for token in tokens_in(turn) if '"mark": "ended"' in turn})
