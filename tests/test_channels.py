"""How words get in and out: the bus, harmless text, the answer once and in its place, keyboard and Ctrl-C."""

import asyncio
import contextlib
import io
import itertools
import json
import logging
import os
import queue
import re
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
import zoneinfo
from concurrent.futures import Future
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from zoneinfo import ZoneInfo

import pytest

from channels import (
    CLI, BackgroundLoop, Channel, CronError, CronJob, CronService, InboundMessage,
    JobStore, MessageBus, NoSuchBot, NobodyToAsk, OutboundMessage, PrintableFormatter, Refused, Telegram,
    TelegramError, Terminated, Waiting, active_tasks, approval_question, as_html, in_thread, machine_zone,
    next_run, plain_text, prepare_streams, printable, read_answer, split_html, text_of_pipe,
)  # fmt: skip
from memory import locked
from fake_telegram import CONFLICT, PATIENCE, FakeTelegram, Parser, Refusal, units

pty = pytest.importorskip("pty", reason="pseudo-terminals are POSIX")

ROOT = Path(__file__).parent.parent
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


# ---- The bus and the outboxes ----


class Talk(Channel):
    """Publishes what it is given; a chat in `trouble` fails with its exceptions first, one a try."""

    def __init__(self, name: str = "talk", *lines: str, **trouble: list[Exception]):
        super().__init__(["*"])
        self.name, self.lines, self.trouble = name, lines, trouble
        self.arrived: list[OutboundMessage] = []
        self.ended = False

    async def start(self, bus: MessageBus) -> None:
        try:
            for line in self.lines:
                await bus.publish(InboundMessage(self.name, "7", "ann", line))
            await asyncio.Event().wait()
        finally:
            self.ended = True

    async def send(self, message: OutboundMessage) -> None:
        if self.trouble.get(message.chat_id):
            raise self.trouble[message.chat_id].pop(0)
        self.arrived.append(message)

    def texts(self, chat: str = "ann") -> list[str]:
        return [message.content for message in self.arrived if message.chat_id == chat]


async def settled(condition) -> None:
    """Gives the other tasks their turn until the condition holds: nothing here waits for a time."""
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(0)
    pytest.fail("it never happened")


def talk(test, *channels: Channel) -> list[float]:
    """Runs `test(bus)` with these channels; gives the pauses that were made."""
    pauses = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        await asyncio.sleep(0)

    async def run() -> None:
        bus = MessageBus(sleep)
        for channel in channels:
            bus.open(channel)
        await test(bus)
        await bus.close(0.1)

    asyncio.run(run())
    return pauses


def to(chat: str, text: str, kind: str = "final", **more) -> OutboundMessage:
    return OutboundMessage("talk", chat, text, kind, **more)


def test_a_message_is_confirmed_when_the_agent_has_it_and_not_before():
    async def test(bus: MessageBus) -> None:
        first, second = InboundMessage("a", "7", "1", "one"), InboundMessage("b", "7", "2", "two")
        publishing = [asyncio.create_task(bus.publish(message)) for message in (first, second)]
        assert [await bus.next(), await bus.next()] == [first, second]
        assert [task.done() for task in publishing] == [False, False]
        second.confirm()
        await publishing[1]
        assert not publishing[0].done()
        first.confirm(OSError("No space left on device"))
        with pytest.raises(OSError, match="No space left"):
            await publishing[0]
        first.confirm(OSError("once more"))  # nobody waits for it: that is no trouble

    talk(test)
    assert InboundMessage("telegram", "7", "42", "hi").session_key == "telegram:42"


def test_a_chat_that_is_blocked_flooded_or_unreachable_delays_no_other(caplog):
    """Each chat gets its answers in order; only a refused one is dropped, and told of as delivered."""
    flood = ConnectionError("429 Too Many Requests")
    flood.retry_after = 17
    trouble = {"blocked": [Refused("403 bot was blocked by the user")] * 3, "flooded": [flood],
               "down": [ConnectionError("no network")] * 9}  # fmt: skip
    phone, delivered = Talk(**trouble), []

    async def test(bus: MessageBus) -> None:
        for number in range(3):
            for chat in ("blocked", "flooded", "down", "ann"):
                noted = partial(delivered.append, (chat, number))
                bus.send(to(chat, str(number), on_delivered=noted))
        await settled(lambda: len(delivered) == 12)

    pauses = talk(test, phone)
    for chat in ("ann", "flooded", "down"):
        assert phone.texts(chat) == ["0", "1", "2"]
    assert phone.texts("blocked") == []
    assert delivered.index(("ann", 2)) < delivered.index(("flooded", 0)) < delivered.index(("down", 0))
    assert [number for chat, number in delivered if chat == "blocked"] == [0, 1, 2]
    assert pauses[:3] == [17, 1, 2] and sorted(pauses)[-4:] == [32, 60, 60, 60]
    told = "talk: chat blocked refuses a message, it is dropped: 403 bot was blocked by the user"
    assert [record.getMessage() for record in caplog.records].count(told) == 3
    assert caplog.text.count("no network") == 1, "a line where trouble begins, none for each try"


def test_an_event_is_tried_once_and_what_fails_behind_a_delivery_sends_nothing_twice(caplog):
    def broken() -> None:
        raise OSError("No space left on device")

    async def test(bus: MessageBus) -> None:
        bus.send(to("ann", "looking", "progress"))
        bus.send(to("ann", "the answer", on_delivered=broken))
        bus.send(OutboundMessage("nowhere", "1", "lost", "progress"))
        bus.send(OutboundMessage("nowhere", "1", "lost"))
        await settled(lambda: phone.texts() == ["the answer"])

    phone = Talk(ann=[ConnectionError("no network")])
    assert talk(test, phone) == []
    assert "a delivery could not be noted: No space left" in caplog.text
    assert caplog.text.count("There is no channel 'nowhere': its answer is shown nowhere") == 1


def test_a_slow_chat_gets_every_answer_and_its_pieces_take_no_room_without_end():
    gate = asyncio.Event()

    class Slow(Talk):
        async def send(self, message: OutboundMessage) -> None:
            await gate.wait()
            await super().send(message)

    async def test(bus: MessageBus) -> None:
        for _ in range(300):
            bus.send(to("ann", "x", "delta"))
        for number in range(200):
            bus.send(to("ann", str(number)))
        bus.send(to("ann", "too late for an event", "progress"))
        gate.set()
        await settled(lambda: phone.texts() and phone.texts()[-1] == "199")

    phone = Slow()
    talk(test, phone)
    deltas = [message.content for message in phone.arrived if message.kind == "delta"]
    assert len(deltas) == 100 and "".join(deltas) == "x" * 300
    assert phone.texts()[100:] == [str(number) for number in range(200)]


def test_a_channel_that_fails_stops_no_other_and_one_that_hangs_does_not_hold_the_end(caplog):
    class Deaf(Talk):
        async def start(self, bus: MessageBus) -> None:
            raise ConnectionError("no such host")

        async def send(self, message: OutboundMessage) -> None:
            await asyncio.Event().wait()

        async def stop(self) -> None:
            raise OSError("it was gone already")

    async def test(bus: MessageBus) -> None:
        bus.send(OutboundMessage("deaf", "1", "never"))
        message = await bus.next()
        message.confirm()
        bus.send(replace(message and to("ann", "hello"), channel="other"))
        await settled(lambda: other.texts() == ["hello"])
        assert list(bus.channels) == ["deaf", "other"]

    other = Talk("other", "hi")
    talk(test, Deaf("deaf"), other)
    assert other.ended
    assert "deaf: nobody listens there any more: no such host" in caplog.text
    assert "deaf: did not stop as it should: OSError('it was gone already')" in caplog.text


def test_an_end_waits_for_what_is_on_its_way():
    class Slow(Talk):
        async def send(self, message: OutboundMessage) -> None:
            await asyncio.sleep(0.005)
            await super().send(message)

    async def run() -> None:
        bus = MessageBus()
        bus.open(phone)
        for number in range(3):
            bus.send(to("ann", str(number)))
        await bus.close(30.0)

    phone = Slow()
    asyncio.run(run())
    assert phone.texts() == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("allow_from", "sender_id", "is_allowed"),
    [
        ([], "7", False),
        (["*"], "7", True),
        (["7"], "7", True),
        ([7], "7", True),
        (["7"], 7, True),
        (["77"], "7", False),
        (["7|maria"], "7", False),
        (["8", "7"], "7", True),
        ([""], "7", False),
    ],
)
def test_who_may_write(allow_from, sender_id, is_allowed):
    assert Channel(allow_from).is_allowed(sender_id) is is_allowed


# ---- What came from a model is made harmless ----

ASKED = "Run it? [y/n/always] (always: every later exec, until the program ends) "


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\tand\nlines", "plain\tand\nlines"),
        ("Grüße, 你好 🙂", "Grüße, 你好 🙂"),
        ("\x1b[31mred\x1b]0;title\x07", "\\x1b[31mred\\x1b]0;title\\x07"),
        ("hidden\rshown", "hidden\\rshown"),
        ("back\b\x7f\x00", "back\\x08\\x7f\\x00"),
        ("C1 \x9b31m \x85", "C1 \\x9b31m \\x85"),
        ("\u202egpj.exe\u202c \u2066x\u2069 \u200f", "\\u202egpj.exe\\u202c \\u2066x\\u2069 \\u200f"),
        ("zero\u200bwidth\ufeff", "zero\\u200bwidth\\ufeff"),
        ("tag\U000e0041", "tag\\U000e0041"),
        ("Arabic letter mark \u061c", "Arabic letter mark \\u061c"),
        ("one\u2028two\u2029", "one\\u2028two\\u2029"),
        ("lone \ud800", "lone ?"),
        ("می\u200cخواهم 👩\u200d💻 Donau\xaddampf", "می\u200cخواهم 👩\u200d💻 Donau\xaddampf"),
        ("", ""),
    ],
)
def test_what_would_steer_a_terminal_is_made_visible(text, shown):
    assert printable(text) == shown
    assert printable(shown) == shown


def test_a_log_line_is_made_harmless_with_its_traceback():
    out, logger = io.StringIO(), logging.getLogger("test_channels")
    handler = logging.StreamHandler(out)
    handler.setFormatter(PrintableFormatter("%(levelname)s %(message)s"))
    logger.addHandler(handler)
    try:
        raise ValueError("\x1b]0;owned\x07")
    except ValueError:
        logger.warning("a job: %s", "\u202egnp.exe\n12:00 INFO forged", exc_info=True)
    assert out.getvalue().startswith("WARNING a job: \\u202egnp.exe\\n12:00 INFO forged\nTraceback")
    assert out.getvalue().endswith("ValueError: \\x1b]0;owned\\x07\n")


@pytest.mark.parametrize(
    ("arguments", "question"),
    [
        ({"command": "ls"}, 'exec {"command": "ls"}\n' + ASKED),
        ({"command": "ls\nRun it?"}, 'exec {"command": "ls\\nRun it?"}\n' + ASKED),
        ({"command": "echo \x1b[2J"}, 'exec {"command": "echo \\u001b[2J"}\n' + ASKED),
        ({"command": "a \x9b\u202e"}, 'exec {"command": "a \\x9b\\u202e"}\n' + ASKED),
        ({"command": "a\u2800\u115f\uffa0"}, 'exec {"command": "a\\u2800\\u115f\\uffa0"}\n' + ASKED),
        ({"command": "r\u200dm\xad"}, 'exec {"command": "r\\u200dm\\xad"}\n' + ASKED),
        ({"command": f"a{' ' * 999};rm x"}, 'exec {"command": "a[999 blanks];rm x"}\n' + ASKED),
        ({"command": "a   b    c"}, 'exec {"command": "a   b[4 blanks]c"}\n' + ASKED),
        ({"command": "Grüße"}, 'exec {"command": "Grüße"}\n' + ASKED),
        ({}, "exec {}\n" + ASKED),
    ],
)
def test_a_call_to_be_approved_is_shown_whole_on_one_line(arguments, question):
    assert approval_question("exec", arguments) == question


def test_the_size_of_a_long_call_stands_where_it_is_seen():
    question = approval_question("write_file", {"content": "x" * 3_000})
    assert "\nwrite_file, 3,026 characters. Run it? [y/n/always] (always: " in question
    assert question.count("x") == 3_000


# ---- The answer and what stands beside it ----


def event(kind: str, content: str) -> OutboundMessage:
    return OutboundMessage("cli", "direct", content, kind)


def send(cli: CLI, *events: OutboundMessage) -> None:
    async def one_after_the_other() -> None:
        for each in events:
            await cli.send(each)

    asyncio.run(one_after_the_other())


class Terminal:
    """A real pseudo-terminal; a CLI writes both its streams to it, as on a person's screen."""

    def __init__(self) -> None:
        self.screen, slave = pty.openpty()
        self.stream = open(slave, "w", encoding="utf-8")  # noqa: SIM115 (the test closes it)

    def read(self) -> str:
        """What is on the screen by now, without the dimming of notes."""
        print(end="(so far)", file=self.stream, flush=True)
        raw = b""
        while not raw.endswith(b"(so far)"):  # the system hands it over in pieces
            raw += os.read(self.screen, 65_536)
        text = raw.decode().removesuffix("(so far)").replace("\r\n", "\n")
        return text.replace(DIM, "").replace(PLAIN, "")


@pytest.fixture
def terminal():
    made = Terminal()
    yield made
    made.stream.close()
    os.close(made.screen)


TURN = [
    event("delta", "Let me "),
    event("delta", "look."),
    event("progress", "Let me look."),
    event("tool_hint", 'read_file("a.txt")'),
    event("retry", "again in 2 s"),
    event("delta", "It says "),
    event("delta", "hello."),
    event("final", "It says hello."),
]


def test_into_a_pipe_goes_the_final_answer_once_and_nothing_else():
    out, err = io.StringIO(), io.StringIO()
    send(CLI(out, err), *TURN)
    assert out.getvalue() == "It says hello.\n"
    assert err.getvalue() == 'Let me look.\nread_file("a.txt")\nagain in 2 s\n'


def test_only_the_kinds_that_are_wanted_are_shown_beside_the_answer():
    out, err = io.StringIO(), io.StringIO()
    send(CLI(out, err, kinds=("retry",)), *TURN)
    assert (out.getvalue(), err.getvalue()) == ("It says hello.\n", "again in 2 s\n")


def test_into_a_file_an_answer_goes_byte_for_byte(tmp_path):
    answer = "\x1b[31mred\x1b[0m \u202e می\u200cخواهم\r\n\ttab \x00 \ufeff"
    with (tmp_path / "review.md").open("w", encoding="utf-8", newline="") as out:
        send(CLI(out, io.StringIO()), event("delta", answer), event("final", answer))
        send(CLI(out, io.StringIO()), event("final", "lone \ud800\n"))
    assert (tmp_path / "review.md").read_bytes() == f"{answer}\nlone ?\n".encode()


def test_on_a_terminal_a_turn_reads_from_top_to_bottom_with_nothing_twice(terminal):
    send(CLI(terminal.stream, terminal.stream), *TURN)
    assert terminal.read() == 'Let me look.\nread_file("a.txt")\nagain in 2 s\nIt says hello.\n'


@pytest.mark.parametrize(
    ("pieces", "final", "screen"),
    [
        ([], "Hello.", "Hello.\n"),
        (["Hel", "lo."], "Hello.", "Hello.\n"),
        ([" Hello."], "Hello.", " Hello.\n"),
        (["\n\nHello."], "Hello.", "\n\nHello.\n"),
        (["Hello. "], "Hello.", "Hello. \n"),
        (["Hello."], "Hello.\n\n(2 tokens)", "Hello.\n\n(2 tokens)\n"),
        (["Hello"], "Bye.", "Hello\nBye.\n"),
        (["\n"], "Hello.", "\nHello.\n"),
    ],
)
def test_on_a_terminal_the_final_answer_adds_only_what_was_not_streamed(terminal, pieces, final, screen):
    cli = CLI(terminal.stream, terminal.stream)
    send(cli, *(event("delta", piece) for piece in pieces), event("final", final))
    assert terminal.read() == screen


def test_a_note_after_half_an_answer_begins_a_line_of_its_own(terminal):
    cli = CLI(terminal.stream, terminal.stream)
    send(cli, event("delta", "Half an ans"))
    cli.note("the connection broke")
    send(cli, event("final", "A whole one."))
    assert terminal.read() == "Half an ans\nthe connection broke\nA whole one.\n"


def test_notes_are_dimmed_on_a_terminal_and_plain_in_a_file(terminal):
    err = io.StringIO()
    CLI(err, err).note("note \x1b[1m")
    assert err.getvalue() == "note \\x1b[1m\n"
    CLI(terminal.stream, terminal.stream).note("note")
    shown = b""
    while not shown.endswith(b"\n"):
        shown += os.read(terminal.screen, 1000)
    assert shown.decode() == f"{DIM}note{PLAIN}\r\n"


# ---- The keyboard ----

READ_A_LINE = """
import sys
from pathlib import Path
from channels import CLI
try:
    print(repr(CLI().read_line("> ", Path(sys.argv[1]))), file=sys.stderr)
except EOFError:
    print("the end", file=sys.stderr)
"""


def typed(keys: bytes, history: Path, prompt: bytes = b"> ") -> str:
    """What a new program reads when a person types this at its prompt."""
    screen, keyboard = pty.openpty()
    command = [sys.executable, "-c", READ_A_LINE, str(history)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=keyboard, stdout=keyboard, stderr=subprocess.PIPE, text=True
    ) as process:
        os.close(keyboard)
        clock = threading.Timer(30, process.kill)
        clock.start()
        shown = b""
        while prompt not in shown:
            shown += os.read(screen, 1000)  # raises OSError where the program is gone
        os.write(screen, keys)
        said = process.stderr.read()
        clock.cancel()
    os.close(screen)
    return said.strip()


def test_a_typed_line_is_read_and_another_program_recalls_it(tmp_path):
    pytest.importorskip("readline", reason="no line editing on this system")
    history = tmp_path / "new" / ".nanobot" / "prompt-history"
    assert typed("Grüße 你\n".encode(), history) == "'Grüße 你'"
    assert typed(b"second\n", history) == "'second'"
    assert typed(b"\n", history) == "''"
    assert typed(b"\x1b[A\x1b[A\n", history) == "'Grüße 你'", "two keys up, past no empty line"
    assert history.stat().st_mode & 0o777 == 0o600


def test_pasted_lines_are_one_message(tmp_path, monkeypatch):
    pytest.importorskip("readline", reason="no line editing on this system")
    (tmp_path / "inputrc").write_text("set enable-bracketed-paste off\n")  # as older systems have it
    monkeypatch.setenv("INPUTRC", str(tmp_path / "inputrc"))
    monkeypatch.setenv("TERM", "xterm")
    paste_is_marked = b"\x1b[?2004h"  # what asks a terminal to put \x1b[200~ and \x1b[201~ around it
    pasted = b"\x1b[200~one\ntwo\n\x1b[201~\n"
    assert typed(pasted, tmp_path / "history", paste_is_marked) in (r"'one\ntwo\n'", r"'one\ntwo'")


class Script:
    """Stands for sys.stdin: a text is read as a line, an exception is raised; then comes the end."""

    def __init__(self, *steps: str | BaseException):
        self.steps = list(steps)

    def fileno(self) -> int:
        raise OSError("it is no file")

    def readline(self) -> str:
        step = self.steps.pop(0) if self.steps else ""
        if isinstance(step, BaseException):
            raise step
        return step


def converse(folder: Path, monkeypatch, lines: list, *failures: BaseException) -> tuple:
    """What was asked, what `converse` returned, and standard error; `failures` are what turns raise."""
    asked, err, failing = [], io.StringIO(), list(failures)

    def ask(text: str) -> None:
        asked.append(text)
        if failing:
            raise failing.pop(0)

    monkeypatch.setattr(sys, "stdin", Script(*lines))
    code = CLI(io.StringIO(), err).converse(ask, folder / "history")
    return asked, code, err.getvalue()


@pytest.mark.parametrize(
    ("lines", "asked", "err"),
    [
        (["hello\n", "  what?  \n"], ["hello", "what?"], "> > > \n"),
        ([], [], "> \n"),
        (["\n", "   \n"], [], "> > > \n"),
        (["exit\n", "hello\n"], [], "> "),
        (["quit\n", "hello\n"], [], "> "),
        (["/exit\n", "hello\n"], [], "> "),
        (["hello\n", " /quit \n"], ["hello"], "> > "),
        (["exit now\n"], ["exit now"], "> > \n"),
        ([KeyboardInterrupt(), "hello\n"], ["hello"], "> \n> > \n"),
    ],
)
def test_a_conversation_goes_on_until_somebody_leaves(tmp_path, monkeypatch, lines, asked, err):
    assert converse(tmp_path, monkeypatch, lines) == (asked, 0, err)


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (KeyboardInterrupt(), "\nstopped; /continue goes on with the turn\n"),
        (LookupError("no model."), "Sorry, that failed: no model.\n"),
        (LookupError("no model"), "Sorry, that failed: no model.\n"),
    ],
)
def test_a_turn_that_is_stopped_or_fails_does_not_end_the_conversation(tmp_path, monkeypatch, failure, told):
    outcome = converse(tmp_path, monkeypatch, ["one\n", "two\n"], failure)
    assert outcome == (["one", "two"], 0, f"> {told}> > \n")


def test_a_conversation_ends_with_its_program_and_with_its_terminal(tmp_path, monkeypatch):
    with pytest.raises(Terminated):
        converse(tmp_path, monkeypatch, [Terminated(), "hello\n"])
    with pytest.raises(Terminated):
        converse(tmp_path, monkeypatch, ["hello\n"], Terminated())
    with pytest.raises(OSError, match="the terminal is gone"):
        converse(tmp_path, monkeypatch, [OSError("the terminal is gone")])


def test_a_question_of_several_lines_is_shown_whole(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", Script("y\n"))
    assert read_answer('exec {"command": "\x9b2J"}\nRun it? ') == "y"
    assert capsys.readouterr() == ("", 'exec {"command": "\\x9b2J"}\nRun it? ')


def test_what_was_typed_before_a_question_was_shown_is_no_answer(monkeypatch):
    screen, keyboard = pty.openpty()

    class Person(io.StringIO):
        def write(self, text: str) -> int:
            if text == "Run it? ":  # it is read only now
                os.write(screen, b"n\n")
            return len(text)

    os.write(screen, b"y\n")
    with open(keyboard) as stdin:
        assert select.select([stdin], [], [], PATIENCE)[0]
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys, "stderr", Person())
        assert read_answer("Run it? ") == "n"
    os.close(screen)


# ---- The loop behind the keyboard ----


class PatientLoop(BackgroundLoop):
    """A loop whose `complete` makes a test fail, and not hang, where it would never return."""

    def complete(self, work):
        outcome = Future()

        def complete_it() -> None:
            try:
                outcome.set_result(super(PatientLoop, self).complete(work))
            except BaseException as problem:
                outcome.set_exception(problem)

        threading.Thread(target=complete_it, daemon=True).start()
        return outcome.result(10)


def test_a_coroutine_runs_to_its_result_also_inside_a_running_loop():
    async def answer(number: int) -> int:
        await asyncio.sleep(0)
        return number

    async def outer() -> int:
        with PatientLoop() as inner:
            return inner.complete(answer(2))

    with PatientLoop() as background:
        assert [background.complete(answer(n)) for n in range(3)] == [0, 1, 2]
    assert asyncio.run(outer()) == 2


QUESTIONS = """
import asyncio
from channels import BackgroundLoop
background = BackgroundLoop()

async def work():
    first = await background.ask("one? ")
    together = await asyncio.gather(background.ask("two? "), background.ask("three? "))
    return [first, *together]

print(background.complete(work()))
try:
    background.complete(background.ask("more? "))
except KeyboardInterrupt:
    print("nobody is there to answer")
"""


def test_questions_are_answered_at_the_keyboard_in_their_order_and_kept_out_of_the_answer():
    command = [sys.executable, "-c", QUESTIONS]
    done = subprocess.run(
        command, cwd=ROOT, input="y\nn\nalways\n", capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 0
    assert done.stdout == "['y', 'n', 'always']\nnobody is there to answer\n"
    assert done.stderr == "one? two? three? more? "


INTERRUPTED = """
import asyncio, signal, sys, threading
from channels import BackgroundLoop

signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started this may ignore it
interrupted, tidied = threading.Event(), threading.Event()
how = sys.argv[1]

async def work():
    print("working", flush=True)
    if how == "elsewhere":
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
    try:
        await asyncio.Event().wait()
    finally:
        print("tidying", flush=True)
        # "impatient": goes on only when complete has been left; else it must not be left before the end
        await asyncio.to_thread(interrupted.wait, 10 if how == "impatient" else 0.2)
        print("tidy", flush=True)
        tidied.set()

with BackgroundLoop() as background:
    if how == "busy":  # the loop gets to the work only after the signal has been dealt with
        calls = threading.Semaphore(0)
        call_soon = background.loop.call_soon_threadsafe

        def counted(*arguments):
            handle = call_soon(*arguments)
            calls.release()
            return handle

        def block():
            calls.acquire()  # the start of the work
            print("working", flush=True)
            calls.acquire()  # its cancellation

        call_soon(block)
        background.loop.call_soon_threadsafe = counted
    try:
        background.complete(work())
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    interrupted.set()
    if how != "busy":
        tidied.wait(10)
    print(background.complete(background.ask("go on? ")), flush=True)
"""


def interrupted(how: str, at: tuple[str, ...]) -> str:
    """What the program above prints when it gets a real SIGINT at each of these lines."""
    command = [sys.executable, "-c", INTERRUPTED, how]
    printed = ""
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        clock = threading.Timer(20, process.kill)
        clock.start()
        for line in at:
            while not printed.endswith(f"{line}\n"):
                printed += process.stdout.readline() or pytest.fail(f"it ended after: {printed}")
            process.send_signal(signal.SIGINT)
        printed += process.communicate("yes\n")[0]
        clock.cancel()
    return printed


def test_ctrl_c_waits_until_the_work_has_put_things_in_order():
    printed = interrupted("idle", at=("working",))
    assert printed == "working\ntidying\ntidy\ninterrupted\nyes\n"


def test_a_second_ctrl_c_does_not_wait_and_the_next_turn_can_still_ask():
    printed = interrupted("impatient", at=("working", "tidying"))
    assert printed == "working\ntidying\ninterrupted\ntidy\nyes\n"


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="signals to a thread are POSIX")
def test_a_ctrl_c_that_the_system_gave_to_another_thread_is_noticed():
    assert interrupted("elsewhere", at=()) == "working\ntidying\ntidy\ninterrupted\nyes\n"


NEVER_DONE = """
import asyncio
from channels import BackgroundLoop
asyncio.run_coroutine_threadsafe(asyncio.sleep(600), BackgroundLoop().loop)
print("bye")
"""


def test_unfinished_work_does_not_hold_the_exit_of_the_program():
    command = [sys.executable, "-c", NEVER_DONE]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=20)
    assert done.stdout == "bye\n"  # TimeoutExpired if it does


def test_a_question_between_two_turns_is_refused():
    with PatientLoop() as background:
        background.complete(asyncio.sleep(0))
        asked = asyncio.run_coroutine_threadsafe(background.ask("more? "), background.loop)
        with pytest.raises(NobodyToAsk, match="no turn is waited for"):
            asked.result(timeout=10)


class Keyboard:
    """Stands for sys.stdin: says when somebody reads, and gives what is typed; an empty text is the end."""

    def __init__(self) -> None:
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.is_read = threading.Event()

    def fileno(self) -> int:
        raise OSError("it is no file")

    def readline(self) -> str:
        self.is_read.set()
        return self.lines.get(timeout=20)


def test_a_question_from_beside_the_turn_is_answered_or_refused_and_a_given_up_one_harms_nobody(
    monkeypatch, capsys, caplog
):
    keyboard, asides = Keyboard(), []
    monkeypatch.setattr(sys, "stdin", keyboard)

    async def turn() -> str:
        at_the_keyboard = asyncio.create_task(background.ask("first? "))
        await asyncio.to_thread(keyboard.is_read.wait, 20)
        in_the_queue = asyncio.create_task(background.ask("given up? "))
        asides.append(asyncio.create_task(background.ask("aside? ")))
        await asyncio.sleep(0)
        at_the_keyboard.cancel()
        in_the_queue.cancel()
        for line in ("for nobody\n", "one\n", "two\n"):
            keyboard.lines.put(line)
        return await background.ask("turn? ")

    async def never_answered() -> None:
        asides.append(asyncio.create_task(background.ask("nobody answers? ")))
        keyboard.lines.put("")
        await asyncio.Event().wait()

    async def outcomes() -> list:
        return await asyncio.gather(*asides, return_exceptions=True)

    with PatientLoop() as background:
        assert background.complete(turn()) == "two"
        with pytest.raises(KeyboardInterrupt):
            background.complete(never_answered())
        answered, refused = background.complete(outcomes())
    assert (answered, type(refused)) == ("one", NobodyToAsk)
    assert str(refused) == "Nobody can be asked: the turn has ended."
    assert capsys.readouterr().err == "first? aside? turn? nobody answers? "
    assert caplog.records == []


def test_at_the_end_what_works_in_the_background_gets_its_finally(caplog):
    seen = []

    async def forever(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            seen.append(name)

    async def begin() -> list[asyncio.Task]:
        tasks = [asyncio.create_task(forever(name)) for name in ("one", "two")]
        await asyncio.sleep(0)
        return tasks

    async def close() -> None:
        seen.append("closed")
        raise OSError("a server did not listen")

    with PatientLoop(close) as background:
        tasks = background.complete(begin())
    assert seen[0] == "closed" and set(seen[1:]) == {"one", "two"}
    assert all(task.cancelled() for task in tasks)
    assert "a server did not listen" in caplog.text


# ---- Waiting is shown ----


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def shown_on(terminal: Terminal) -> str:
    """What the program has written by now: a line that waits begins with `<` and is erased by `|`."""
    marks = {"\r\x1b[K\x1b[?7l": "<", "\x1b[?7h\r": ">", "\r\x1b[K": "|"}
    text = terminal.read()
    for escape, mark in marks.items():
        text = text.replace(escape, mark)
    return text


def test_what_is_waited_for_is_shown_after_a_second_and_is_gone_before_anything_else(terminal):
    clock = Clock()
    cli = CLI(terminal.stream, terminal.stream)
    cli.waiting = waiting = Waiting(terminal.stream, clock)
    waiting.draw()
    waiting.begin("the model")
    clock.now += 0.9
    waiting.draw()
    assert shown_on(terminal) == ""
    clock.now += 1.2
    waiting.draw()
    waiting.draw()
    clock.now += 10
    waiting.draw()
    assert shown_on(terminal) == "<waiting for the model, 2 s><waiting for the model, 12 s>"
    waiting.begin('read_file("a\x1b[2J.txt")\n')
    clock.now += 61
    waiting.draw()
    assert shown_on(terminal) == '|<waiting for read_file("a\\x1b[2J.txt"), 61 s>'
    cli.note("a note")
    assert shown_on(terminal) == "|a note\n"
    waiting.draw()
    send(cli, event("delta", "Half an ans"))
    clock.now += 10
    waiting.draw()
    send(cli, event("final", "Half an answer."))
    assert shown_on(terminal) == '<waiting for read_file("a\\x1b[2J.txt"), 61 s>|Half an answer.\n'
    waiting.draw()
    waiting.end()
    clock.now += 10
    waiting.draw()
    assert shown_on(terminal) == '<waiting for read_file("a\\x1b[2J.txt"), 71 s>|'


@pytest.mark.parametrize(
    ("seconds", "what", "shown"),
    [
        (0.99, "the model", ""),
        (1.0, "the model", "<waiting for the model, 1 s>"),
        (59.9, "two\twords", "<waiting for two words, 59 s>"),
        (2.0, "x" * 100, f"<waiting for {'x' * 60}, 2 s>"),
        (2.0, "", ""),
    ],
)
def test_how_a_wait_is_shown(terminal, seconds, what, shown):
    clock = Clock()
    waiting = Waiting(terminal.stream, clock)
    waiting.begin(what)
    clock.now += seconds
    waiting.draw()
    assert shown_on(terminal) == shown


# ---- What the program inherits, and what is piped in ----


INHERITED = """
import asyncio, os, sys
from channels import CLI, OutboundMessage, prepare_streams
if sys.argv[1] == "prepared":
    prepare_streams()
    print("an error", file=sys.stderr)
    assert open(__file__ if "__file__" in globals() else os.devnull).fileno() > 2
cli = CLI()
asyncio.run(cli.send(OutboundMessage("cli", "direct", "Hello.")))
cli.note("a note")
print(cli.read_piped(True, None))
"""


@pytest.mark.skipif(os.name != "posix", reason="a closed descriptor is a POSIX thing")
@pytest.mark.parametrize("how", ["prepared", "bare"])
@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_streams_are_nothing_to_read_and_nowhere_to_write(how, closed):
    def close() -> None:
        for number in closed:
            os.close(number)

    done = subprocess.run([sys.executable, "-c", INHERITED, how], cwd=ROOT, input="", text=True,
                          capture_output=True, preexec_fn=close, timeout=30)  # fmt: skip
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert done.stdout.startswith("Hello.\n") == (1 not in closed)
    assert "an error" not in done.stdout
    assert ("a note" in done.stderr) == (2 not in closed)


SIGNALLED = """
import sys
from channels import Terminated, end_on_signals
end_on_signals()
try:
    print("ready", flush=True)
    sys.stdin.readline()
    print("went on")
except Terminated:
    print("terminated")
"""


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="there is no SIGHUP on Windows")
@pytest.mark.parametrize(
    ("number", "before", "printed"),
    [
        (signal.SIGHUP, signal.SIG_IGN, "went on\n"),
        (signal.SIGHUP, signal.SIG_DFL, "terminated\n"),
        (signal.SIGTERM, signal.SIG_DFL, "terminated\n"),
    ],
)
def test_a_signal_that_was_ignored_at_the_start_stays_ignored(number, before, printed):
    command, inherit = [sys.executable, "-c", SIGNALLED], lambda: signal.signal(number, before)
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, preexec_fn=inherit, **streams) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.communicate("\n", timeout=30)[0] == printed


def test_a_letter_that_an_encoding_does_not_have_is_replaced_going_in_and_out(monkeypatch):
    page = io.BytesIO()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8"))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(page, encoding="ascii"))
    monkeypatch.setattr(sys, "stderr", io.StringIO())  # as a notebook has it
    prepare_streams()
    print("Grüße", file=sys.stdout, flush=True)
    print("Grüße", file=sys.stderr)
    assert (sys.stdin.read(), page.getvalue()) == ("caf\ufffd", b"Gr??e\n")
    assert sys.stderr.getvalue() == "Grüße\n"


def test_a_pipe_beside_a_message_is_read_if_it_begins_in_time(tmp_path, monkeypatch):
    err, waited = io.StringIO(), []
    cli = CLI(io.StringIO(), err)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b" a log \n")))
    assert cli.read_piped(False, tmp_path) == "a log"  # alone it is waited for, however long it takes
    reading, writing = os.pipe()
    with open(reading) as pipe:
        monkeypatch.setattr(sys, "stdin", pipe)
        os.write(writing, b"a log\n")
        os.close(writing)
        assert (cli.read_piped(True, tmp_path), err.getvalue()) == ("a log", "")

    def nothing_came(reads: list, writes: list, errors: list, seconds: float) -> tuple:
        waited.append(seconds)
        return [], [], []

    monkeypatch.setattr(select, "select", nothing_came)
    assert (cli.read_piped(True, tmp_path), waited) == ("", [3.0])
    assert err.getvalue() == "nanobot: standard input is open but silent, going on without it\n"
    monkeypatch.setattr(sys, "stdin", None)
    assert cli.read_piped(False, tmp_path) == ""


def test_what_is_piped_in_is_a_message_up_to_a_size(tmp_path):
    assert text_of_pipe(io.BytesIO(b" caf\xe9 \n"), tmp_path) == "caf\ufffd"
    for text in ("你" * 100_000, "🙂" * 100_000, "x" * 100_000):
        assert text_of_pipe(io.BytesIO(text.encode()), tmp_path / "piped") == text
    assert not (tmp_path / "piped").exists()


@pytest.mark.parametrize("letter", ["x", "🙂"])
def test_more_than_that_goes_into_a_file_and_the_model_gets_its_beginning(tmp_path, letter):
    folder, raw = tmp_path / "w" / "piped", (letter * 100_001).encode() + b"\xff" * 1_000_000
    text = text_of_pipe(io.BytesIO(raw), folder)
    [file] = folder.iterdir()
    assert file.read_bytes() == raw
    [first, beginning, last] = text.splitlines()
    assert beginning == letter * 10_000
    assert first.startswith("[standard input: ") and last.startswith("[standard input goes on: look into ")
    assert str(file) in first and str(file) in last
    assert f"{len(raw):,} bytes" in first
    assert re.fullmatch(rf"\d{{8}}-\d{{6}}-{os.getpid()}\.txt", file.name)
    assert folder.stat().st_mode & 0o777 == 0o700, "it may hold what is nobody else's business"


def test_only_so_many_piped_files_are_kept(tmp_path):
    folder = tmp_path / "piped"
    folder.mkdir()
    for number in range(30):
        (folder / f"20200101-0000{number:02}-1.txt").touch()
    text = text_of_pipe(io.BytesIO(b"x" * 100_001), folder)
    kept = sorted(folder.iterdir())
    assert len(kept) == 20
    assert str(kept[-1]) in text


# ---- What blocks gets a thread ----


def test_a_function_on_a_thread_gives_its_result_or_its_failure_and_holds_no_exit():
    def fail() -> None:
        raise SystemExit("it wants to leave")

    async def test() -> None:
        thread = await in_thread(threading.current_thread)
        assert thread is not threading.main_thread()
        assert thread.daemon
        assert await in_thread(max, 1, 2) == 2
        with pytest.raises(SystemExit, match="it wants to leave"):
            await in_thread(fail)

    with contextlib.suppress(SystemExit):
        asyncio.run(test())


# ---- Telegram ----

GROUP = {"id": -100, "type": "supergroup", "title": "Friends"}


class Desk:
    """A bot in a test: the server, the bus, a clock that does not wait, and the journal."""

    def __init__(self, server: FakeTelegram, folder: Path, allow_from=(7,), **options):
        self.server, self.naps = server, []
        self.bus = MessageBus(self.pause)
        settings = {"api_base": server.base_url, "media_folder": folder / "w" / "media", "sleep": self.sleep}
        self.bot = Telegram(options.pop("token", server.token), allow_from, **{**settings, **options})

    async def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        if seconds == 4.0:
            await asyncio.Event().wait()  # one signal is enough here
        await asyncio.sleep(0)

    async def pause(self, seconds: float) -> None:
        """Between two tries of an answer."""
        self.naps.append(seconds)
        await asyncio.sleep(0)

    async def __aenter__(self):
        self.bus.open(self.bot)
        return self

    async def __aexit__(self, *exception):
        await self.bus.close(1.0)

    async def next(self) -> InboundMessage:
        """The next message, not yet in the journal."""
        return await asyncio.wait_for(self.bus.next(), PATIENCE)

    async def take(self) -> InboundMessage:
        message = await self.next()
        message.confirm()
        return message

    async def deliver(self, text: str, chat: str = "7", **more) -> None:
        """Through the outbox of a chat, until it has arrived or was dropped."""
        arrived = asyncio.Event()
        self.bus.send(OutboundMessage("telegram", chat, text, on_delivered=arrived.set, **more))
        await asyncio.wait_for(arrived.wait(), PATIENCE)

    async def until(self, condition) -> None:
        await asyncio.to_thread(self.server.wait_until, condition)

    async def until_confirmed(self, update_id: int) -> None:
        await self.until(lambda: all(update["update_id"] > update_id for update in self.server.updates))


def in_telegram(test, *arguments, **options):
    async def run() -> None:
        with FakeTelegram() as server:
            await test(server, *arguments, **options)

    asyncio.run(run())


def test_a_telegram_message_is_typed_at_answered_and_confirmed(tmp_path):
    async def test(server):
        async with Desk(server, tmp_path) as desk:
            number = server.say("What is in a.txt?")
            message = await desk.take()
            assert (message.channel, message.sender_id, message.chat_id) == ("telegram", "7", "7")
            assert (message.content, message.session_key) == ("What is in a.txt?", "telegram:7")
            assert message.message_id == "2"
            await desk.until(lambda: server.calls("sendChatAction"))
            await desk.bot.send(OutboundMessage("telegram", "7", "**Hello** & bye.", reply_to="2"))
            await desk.until_confirmed(number)
        [answer] = server.calls("sendMessage")
        reply = {"message_id": 2, "allow_sending_without_reply": True}
        assert answer == {"chat_id": "7", "text": "<b>Hello</b> &amp; bye.", "parse_mode": "HTML",
                          "reply_parameters": reply}  # fmt: skip
        assert server.calls("sendChatAction") == [{"chat_id": "7", "action": "typing"}]
        first = server.calls("getUpdates")[0]
        assert first == {"offset": 0, "timeout": 50, "allowed_updates": ["message"]}

    in_telegram(test)


def test_an_update_is_confirmed_only_when_it_is_in_the_journal(tmp_path):
    async def test(server):
        async with Desk(server, tmp_path) as desk:
            server.say("one")
            server.say("two")
            message = await desk.next()
            assert [poll["offset"] for poll in server.calls("getUpdates")] == [0]
            assert len(server.updates) == 2
            message.confirm()
            assert (await desk.next()).content == "two"
            assert len(server.updates) == 2
        assert [poll["offset"] for poll in server.calls("getUpdates")] == [0]
        async with Desk(server, tmp_path) as desk:  # the next start: both come again, by the same names
            again = [await desk.take(), await desk.take()]
            assert [message.content for message in again] == ["one", "two"]
            assert again[0].message_id == message.message_id
            await desk.until(lambda: not server.updates)

    in_telegram(test)


def test_what_the_journal_did_not_take_comes_again_and_nothing_twice(tmp_path, caplog):
    async def test(server):
        async with Desk(server, tmp_path) as desk:
            for text in ("one", "two", "three"):
                server.say(text)
            await desk.take()
            (await desk.next()).confirm(OSError("disk full"))
            texts = [(await desk.take()).content, (await desk.take()).content]
            assert texts == ["two", "three"]
            await desk.until(lambda: not server.updates)
            server.say("four")
            assert (await desk.take()).content == "four"
        assert caplog.text.count("disk full") == 1

    in_telegram(test)


@pytest.mark.parametrize("allow_from", [(), (8,), ("ann",), ("77",)])
def test_strangers_get_no_sign_of_life(tmp_path, allow_from):
    async def test(server):
        async with Desk(server, tmp_path, allow_from) as desk:
            number = server.say("hi", document=server.file("a.pdf", b"%PDF"))
            await desk.until_confirmed(number)
            assert not (tmp_path / "w").exists()
        methods = {request.method for request in server.requests}
        assert methods == {"getMe", "deleteWebhook", "getUpdates"}

    in_telegram(test)


@pytest.mark.parametrize(
    ("is_heard", "parts"),
    [
        (True, {"text": "@kit_bot what is this?"}),
        (True, {"text": "what is this, @Kit_Bot?"}),
        (True, {"text": "/stop@kit_bot"}),
        (True, {"caption": "@kit_bot look", "photo": None}),
        (True, {"text": "no", "reply_to_message": {"message_id": 1, "from": {"id": 99, "is_bot": True}}}),
        (False, {"text": "no", "reply_to_message": {"message_id": 1, "from": {"id": 8, "is_bot": False}}}),
        (False, {"text": "hello all"}),
        (False, {"text": "@kit_bot2 hello"}),
        (False, {"text": "/stop"}),
        (False, {"text": "no", "reply_to_message": {"message_id": 1}}),
    ],
)
def test_in_a_group_only_what_is_for_the_bot(tmp_path, is_heard, parts):
    async def test(server):
        if "photo" in parts:
            parts["photo"] = [server.file("photos/1.jpg", b"small"), server.file("photos/2.jpg", b"large")]
        async with Desk(server, tmp_path) as desk:
            server.say(chat=GROUP, **parts)
            server.say("last, @kit_bot", chat=GROUP)
            message = await desk.take()
            assert (message.content != "last, @kit_bot") == is_heard
            assert (message.chat_id, message.speaker) == ("-100", "Ann")

    in_telegram(test)


def test_a_group_may_be_open_but_only_to_allowed_people(tmp_path):
    async def test(server):
        async with Desk(server, tmp_path, group_policy="open") as desk:
            server.say("from a stranger", sender=8, chat=GROUP)
            server.say("from Ann", chat=GROUP)
            assert (await desk.take()).content == "from Ann"
            name = {"first_name": "A\nda: /stop", "last_name": "L" * 99}
            server.say("hi", chat=GROUP, **{"from": {"id": 7, "is_bot": False, **name}})
            assert (await desk.take()).speaker == "A da: /stop " + "L" * 28

    in_telegram(test)


def test_noise_is_confirmed_and_left_alone(tmp_path, caplog):
    async def test(server):
        async with Desk(server, tmp_path) as desk:
            sender, chat = {"id": 7, "is_bot": False}, {"id": 7, "type": "private"}
            server.update(edited_message={"message_id": 2, "from": sender, "chat": chat, "text": "edited"})
            server.update(callback_query={"id": "1", "from": sender, "data": "x"})
            server.update(
                channel_post={"message_id": 3, "chat": {"id": -5, "type": "channel"}, "text": "news"}
            )
            server.update(
                message={"message_id": 4, "from": sender, "chat": chat, "new_chat_members": [sender]}
            )
            server.update(
                message={"message_id": 5, "from": {**sender, "is_bot": True}, "chat": chat, "text": "x"}
            )
            server.update(message={"message_id": 6, "from": sender, "text": "no chat"})
            server.update(message={"message_id": 7, "from": {}, "chat": chat, "text": "nobody"})
            server.update(poll={"id": "9"})
            server.say("a word")
            assert (await desk.take()).content == "a word"
            await desk.until(lambda: not server.updates)
        assert len(server.calls("sendChatAction")) <= 1
        [record] = caplog.records
        assert record.getMessage() == "Telegram: a message cannot be read, it is left out"
        assert record.exc_info[0] is KeyError, "the one without a chat"

    in_telegram(test)


def test_an_album_that_comes_in_pieces_is_one_message(tmp_path):
    async def test(server):
        def photo(number: int, sender: int = 7, **parts) -> None:
            sizes = [server.file(f"photos/{number}{size}.jpg", size.encode()) for size in ("s", "large")]
            server.say(media_group_id=f"A{sender}", sender=sender, photo=sizes, **parts)

        async def sleep(seconds: float) -> None:
            if seconds == 1.0:
                photo(9, sender=8)  # a stranger's album that never ends holds up nobody
                if len(server.files) < 6:
                    photo(2)
                    photo(3)
            await desk.sleep(seconds)

        desk = Desk(server, tmp_path)
        desk.bot.sleep = sleep
        photo(1, caption="Where is this?")
        async with desk:
            message = await desk.take()
            assert (message.content, len(message.media)) == ("Where is this?", 3)
            assert (message.sender_id, message.chat_id, message.message_id) == ("7", "7", "2")
            assert [path.read_bytes() for path in message.media] == [b"large"] * 3
            await desk.until(lambda: not server.updates)
            server.say("next")
            assert (await desk.take()).content == "next"
        assert desk.naps.count(1.0) == 2, "it waits until nothing of the album came for a second"

    in_telegram(test)


def test_an_album_is_waited_for_three_seconds_at_most(tmp_path):
    async def test(server):
        async def sleep(seconds: float) -> None:
            if seconds == 1.0:
                server.say(media_group_id="A", photo=[server.file("photos/1.jpg", b"x")])
            await desk.sleep(seconds)

        desk = Desk(server, tmp_path)
        desk.bot.sleep = sleep
        server.say(media_group_id="A", photo=[server.file("photos/0.jpg", b"x")])
        async with desk:
            assert len((await desk.take()).media) >= 3
        assert desk.naps.count(1.0) == 3

    in_telegram(test)


def test_files_come_in_under_names_of_their_own(tmp_path):
    async def test(server):
        async with Desk(server, tmp_path) as desk:
            server.say(
                "", caption="two", document=server.file("documents/1.pdf", b"one", file_name="a b.pdf")
            )
            server.say("", document=server.file("documents/2.pdf", b"two", file_name="a b.pdf"))
            server.say("", voice=server.file("voice/3.oga", b"three"))
            server.say("", document=server.file("documents/4", b"four", file_name="../../../evil"))
            server.say("", document=server.file("documents/5", b"", file_name="é" * 200 + ".txt"))
            server.say("", document=server.file("documents/6", b"six", file_name=f"x.{'y' * 99}"))
            messages = [await desk.take() for _ in range(6)]
        names = [message.media[0].name for message in messages]
        assert names[:4] == ["U1-a_b.pdf", "U2-a_b.pdf", "U3-3.oga", "U4-.._.._.._evil"]
        assert names[4:] == ["U5-" + "é" * 50 + ".txt", "U6-x." + "y" * 9], "the id stays"
        assert {path.parent for message in messages for path in message.media} == {tmp_path / "w" / "media"}
        contents = [message.media[0].read_bytes() for message in messages]
        assert contents == [b"one", b"two", b"three", b"four", b"", b"six"]
        assert [message.content for message in messages] == ["two", "", "", "", "", ""]

    in_telegram(test)


def test_a_file_that_cannot_be_fetched_is_told_and_holds_up_nothing(tmp_path):
    async def test(server):
        async with Desk(server, tmp_path) as desk:
            server.refuse("getFile", Refusal(400, "Bad Request: file is too big"))
            server.say(caption="this", document=server.file("a.bin", b"x"))
            message = await desk.take()
            assert (message.content.splitlines()[0], message.media) == ("this", [])
            assert "cannot be fetched: getFile: 400 Bad Request: file is too big" in message.content
            server.say(document=server.file("a lost.bin", b"x"))  # its place has to be quoted
            message = await desk.take()
            problem = "the file cannot be fetched: HTTP 404"
            assert message.content == f"[a file came with this, but it cannot be fetched: {problem}]"
            server.say(document=server.file("b.bin", b"x"))
            assert (await desk.take()).media

    in_telegram(test)


def test_two_programs_for_one_bot_are_named_and_do_not_spin(tmp_path, caplog):
    async def test(server):
        server.refuse("getUpdates", *[Refusal(409, CONFLICT)] * 3)
        async with Desk(server, tmp_path) as desk:
            server.say("hello")
            assert (await desk.take()).content == "hello"
            await desk.until(lambda: not server.updates)
        waits = [nap for nap in desk.naps if nap != 4.0]
        assert len(waits) == 3
        assert min(waits) >= 5
        assert caplog.text.count("Another program asks for this bot's messages") == 1
        assert caplog.text.count("Telegram answers again") == 1

    in_telegram(test)


def test_a_webhook_is_removed(tmp_path):
    async def test(server):
        server.webhook = "https://elsewhere"
        async with Desk(server, tmp_path) as desk:
            server.say("one")
            await desk.take()
            server.webhook = "https://elsewhere"
            server.say("two")
            assert (await desk.take()).content == "two"

    in_telegram(test)


@pytest.mark.parametrize("token", ["123456:AAE-wrong", "nonsense", "", "12 34:x\ny"])
def test_a_wrong_token_ends_the_channel_with_what_to_do(tmp_path, token):
    async def test(server):
        desk = Desk(server, tmp_path, token=token)
        with pytest.raises(NoSuchBot, match="does not know this bot token. Copy it again from @BotFather"):
            await asyncio.wait_for(desk.bot.start(desk.bus), PATIENCE)
        assert desk.naps == []

    in_telegram(test)


def test_a_flood_wait_is_kept_to_the_second(tmp_path):
    async def test(server):
        wait = Refusal(429, "Too Many Requests: retry after 17", {"retry_after": 17})
        server.refuse("getUpdates", wait)
        server.refuse("sendMessage", wait, Refusal(429, "Too Many Requests", {"retry_after": 7}))
        async with Desk(server, tmp_path) as desk:
            await desk.deliver("hello")
            server.say("hi")
            await desk.take()
        assert sorted(nap for nap in desk.naps if nap != 4.0) == [7, 17, 17]
        assert server.texts() == ["hello"] * 3

    in_telegram(test)


def test_between_tries_it_waits_longer_and_longer_up_to_a_minute_and_then_begins_anew(tmp_path, caplog):
    async def test(server):
        trouble = Refusal(500, "Internal Server Error")
        server.refuse("getUpdates", *[trouble] * 13)
        async with Desk(server, tmp_path) as desk:
            server.say("one")
            await desk.take()
            await desk.until(lambda: not server.updates)
            server.refuse("getUpdates", trouble)
            for text in ("two", "three"):
                server.say(text)
                await desk.take()
            await desk.until(lambda: not server.updates)
        waits = [nap for nap in desk.naps if nap != 4.0]
        assert waits == [5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55, 60, 60, 5]
        lines = [record.getMessage() for record in caplog.records]
        told = "Telegram: getUpdates: 500 Internal Server Error. It is tried again."
        assert lines == [told, "Telegram answers again."] * 2
        assert {record.levelname for record in caplog.records} == {"WARNING"}

    in_telegram(test)


def test_typing_ends_with_the_answer_with_the_next_message_and_with_the_bot(tmp_path):
    begun, ended = [], []

    async def sleep(seconds: float) -> None:
        begun.append(seconds)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(seconds)

    async def test(server):
        async with Desk(server, tmp_path, sleep=sleep) as desk:

            async def typed_at(number: int) -> None:
                server.say("hi")
                await desk.take()
                while len(begun) < number:
                    await asyncio.sleep(0.001)

            await typed_at(1)
            await desk.bot.send(OutboundMessage("telegram", "7", "looking", "progress"))
            await desk.bot.send(OutboundMessage("telegram", "8", "for somebody else"))
            assert ended == []
            await typed_at(2)
            assert ended == [4.0]
            await desk.bot.send(OutboundMessage("telegram", "7", "It says hello."))
            assert ended == [4.0] * 2
            await typed_at(3)
            assert ended == [4.0] * 2
        assert ended == [4.0] * 3

    in_telegram(test)


def test_a_line_that_went_dead_is_noticed(tmp_path, caplog):
    async def test(server):
        server.refuse("getUpdates", Refusal(0, stalls=True))
        desk = Desk(server, tmp_path)
        desk.bot.poll_seconds, desk.bot.slack_seconds = 0.05, 0.2
        async with desk:
            await desk.until(lambda: len(server.calls("getUpdates")) > 1)
            desk.bot.slack_seconds = 15
            server.say("hi")
            assert (await desk.take()).content == "hi"
        assert "no answer in 0.25 s" in caplog.text

    in_telegram(test)


def test_plain_text_only_where_the_html_was_refused(tmp_path):
    async def test(server):
        desk = Desk(server, tmp_path)
        server.refuse("sendMessage", Refusal(400, "Bad Request: can't parse entities: Unexpected end tag"))
        await desk.bot.send(OutboundMessage("telegram", "7", "**a** < b"))
        assert server.texts() == ["<b>a</b> &lt; b", "a < b"]
        assert "parse_mode" not in server.calls("sendMessage")[1]
        for refusal in (Refusal(500, "x"), Refusal(0), Refusal(0, after=True), Refusal(400, body=b"a proxy")):
            server.requests.clear()
            server.refuse("sendMessage", refusal)
            with pytest.raises(TelegramError):
                await desk.bot.send(OutboundMessage("telegram", "7", "**a**"))
            assert len(server.texts()) == 1, "it may have arrived"

    in_telegram(test)


def test_chats_that_block_flood_or_fail_delay_no_other_and_nothing_comes_twice(tmp_path, caplog):
    """Long answers go on where they broke off, whatever other chats do meanwhile."""

    async def test(server):
        long = "\n".join(letter * 4_000 for letter in "abc")
        server.chats["8"] = Refusal(403, "Forbidden: bot was blocked by the user")
        server.chats["9"] = Refusal(429, "Too Many Requests", {"retry_after": 3_600})
        server.chats["10"] = Refusal(502, body=b"<html>bad gateway</html>")
        async with Desk(server, tmp_path) as desk:
            for chat in ("9", "10"):
                desk.bus.send(OutboundMessage("telegram", chat, long))
                desk.bus.send(OutboundMessage("telegram", chat, "the end"))
            await desk.until(lambda: len(server.texts("9")) > 3 and len(server.texts("10")) > 3)
            for number in range(12):
                await desk.deliver(f"report {number}", "8")  # it counts as delivered
            for number in range(3):
                await desk.deliver(f"{number}")
            assert server.texts("7") == ["0", "1", "2"]
            assert server.texts("8") == [f"report {number}" for number in range(12)]
            server.refuse("sendMessage", *[Refusal(500, "x")] * 5)
            server.chats.clear()
            await desk.until(lambda: all("the end" in server.texts(chat) for chat in ("9", "10")))
        for chat in ("9", "10"):
            texts = [text[:3] for text in server.texts(chat)]
            first = [texts.index(part) for part in ("aaa", "bbb", "ccc", "the")]
            assert first == sorted(first)
        assert len([line for line in caplog.messages if "chat 8 refuses a message" in line]) == 12
        assert caplog.text.count("bad gateway") == 0 and caplog.text.count("502 not the Bot API") == 1

    in_telegram(test)


def test_a_second_try_goes_on_where_the_first_broke_off(tmp_path):
    async def test(server):
        desk = Desk(server, tmp_path)
        file = tmp_path / "a.txt"
        file.write_text("hello")
        message = OutboundMessage("telegram", "7", "a" * 4_000 + "\n" + "b" * 4_000, media=[file])
        server.refuse("sendDocument", Refusal(500, "x"))
        with pytest.raises(TelegramError):
            await desk.bot.send(message)
        await desk.bot.send(OutboundMessage("telegram", "7", "x" * 5_000))
        await desk.bot.send(message)
        assert [text[0] for text in server.texts()] == ["a", "b", "x", "x"]
        assert len(server.calls("sendDocument")) == 2

    in_telegram(test)


def test_a_file_that_cannot_be_sent_is_told_of(tmp_path):
    async def test(server):
        desk = Desk(server, tmp_path)
        (tmp_path / "big_one.zip").write_bytes(b"x")
        server.refuse("sendDocument", Refusal(413, "Request Entity Too Large"))
        media = [tmp_path / "big_one.zip", tmp_path / "gone"]
        await desk.bot.send(OutboundMessage("telegram", "7", "", media=media))
        first, second = server.texts()
        assert first == "[big_one.zip cannot be sent: sendDocument: 413 Request Entity Too Large]"
        assert second.startswith("[gone cannot be sent: [Errno 2] No such file or directory")

    in_telegram(test)


def test_only_what_is_worth_a_message_is_sent(tmp_path):
    async def test(server):
        desk = Desk(server, tmp_path)
        for kind in ("delta", "retry"):
            await desk.bot.send(OutboundMessage("telegram", "7", "x", kind=kind))
        for blank in ("", " \n ", "**", "``` ```", "```\n \n```"):
            await desk.bot.send(OutboundMessage("telegram", "7", blank))
        for kind in ("progress", "tool_hint"):
            await desk.bot.send(OutboundMessage("telegram", "7", kind, kind=kind))
        assert server.texts() == ["**", "progress", "tool_hint"]

    in_telegram(test)


def test_photos_and_files_go_out(tmp_path):
    async def test(server):
        desk = Desk(server, tmp_path)
        photo, file = tmp_path / "a.PNG", tmp_path / 'odd"näme.txt'
        photo.write_bytes(b"\x89PNG\r\n--\r\n")
        file.write_bytes(b"hello\r\n")
        await desk.bot.send(OutboundMessage("telegram", "7", "", media=[photo, file], reply_to="5"))
        [first, second] = [request for request in server.requests if request.files]
        assert (first.method, first.files) == ("sendPhoto", {"photo": ("a.PNG", b"\x89PNG\r\n--\r\n")})
        assert first.fields["chat_id"] == "7"
        assert json.loads(first.fields["reply_parameters"])["message_id"] == 5
        assert second.method == "sendDocument"
        assert second.files["document"][1] == b"hello\r\n"
        server.requests.clear()
        server.refuse("sendPhoto", Refusal(400, "Bad Request: PHOTO_INVALID_DIMENSIONS"))
        await desk.bot.send(OutboundMessage("telegram", "7", "", media=[photo]))
        assert [request.method for request in server.requests] == ["sendPhoto", "sendDocument"]
        server.requests.clear()
        server.refuse("sendPhoto", Refusal(500, "Internal Server Error"))
        with pytest.raises(TelegramError):
            await desk.bot.send(OutboundMessage("telegram", "7", "", media=[photo]))
        assert [request.method for request in server.requests] == ["sendPhoto"], "it may have arrived"

    in_telegram(test)


@pytest.mark.parametrize(
    "base", ["http://127.0.0.1:1", "http://127.0.0.1:1/ x", "gopher://x", "nonsense", "{}"]
)
def test_the_token_is_in_no_log_and_no_error(tmp_path, caplog, base):
    caplog.set_level(logging.DEBUG)

    async def test(server):
        secret = server.token.partition(":")[2]
        server.refuse("getMe", Refusal(500, f"no such bot{server.token}"), Refusal(0))
        server.refuse("sendMessage", Refusal(500, f"bad /bot{server.token}/sendMessage"))
        desk = Desk(server, tmp_path, api_base=base.replace("{}", server.base_url))
        with pytest.raises(TelegramError) as failure:
            await desk.bot.send(OutboundMessage("telegram", "7", "x"))
        task = asyncio.create_task(desk.bot.start(desk.bus))
        while len(desk.naps) < 2:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait([task], timeout=PATIENCE)
        shown = "".join(traceback.format_exception(failure.value))
        while error := failure.value.__context__:
            failure.value.__context__ = error.__context__
            shown += repr(error)
        assert secret not in shown
        assert secret not in caplog.text
        if base == "{}":
            assert str(failure.value) == "sendMessage: 500 bad /bot<token>/sendMessage"

    in_telegram(test)


def test_a_bot_stops_at_once_in_the_middle_of_a_long_poll(tmp_path):
    async def test(server):
        desk = Desk(server, tmp_path)
        task = asyncio.create_task(desk.bot.start(desk.bus))
        await desk.until(lambda: server.calls("getUpdates"))
        task.cancel()
        await asyncio.wait([task], timeout=PATIENCE)
        assert task.cancelled()

    in_telegram(test)


@pytest.mark.parametrize(
    ("markdown", "shown"),
    [
        ("a < b & c > d", "a &lt; b &amp; c &gt; d"),
        ("**bold** and *italic* and _italic_", "<b>bold</b> and <i>italic</i> and <i>italic</i>"),
        ("***both***", "<i><b>both</b></i>"),
        ("**bold *and italic* too**", "<b>bold <i>and italic</i> too</b>"),
        ("*italic **and bold** too*", "<i>italic <b>and bold</b> too</i>"),
        ("**a *b** c*", "<b>a *b</b> c*"),
        ("a lone * stays, 2 * 3 * 4, a*b, **open", "a lone * stays, 2 * 3 * 4, a*b, **open"),
        ("snake_case_name __init__ _x", "snake_case_name __init__ _x"),
        ("`a < *b*`", "<code>a &lt; *b*</code>"),
        ("``a ` b``", "<code>a ` b</code>"),
        ("**see `x_y`**", "<b>see <code>x_y</code></b>"),
        ("# Plan\ntext\n## **Next** #\nx", "<b>Plan</b>\ntext\n<b>Next</b>\nx"),
        ("#hashtag", "#hashtag"),
        ("- one\n  * two *three*\n1. four", "- one\n  * two <i>three</i>\n1. four"),
        ("[a](https://a.b/c_d_(e)?x=\"2\")", '<a href="https://a.b/c_d_(e)?x=&quot;2&quot;">a</a>'),
        ("[no](javascript:x) [x] (y)", "[no](javascript:x) [x] (y)"),
        ("```py\na < b\n*x*\n```\nend", '<pre><code class="language-py">a &lt; b\n*x*\n</code></pre>\nend'),
        ("```\nnever closed <b>", "<pre><code>never closed &lt;b&gt;</code></pre>"),
        ("<b>&amp;</b>", "&lt;b&gt;&amp;amp;&lt;/b&gt;"),
        ("\ue0000\ue001 lone \ud800", "0 lone ?"),
        ("[`run.py`](https://x.y) is `it`", '<a href="https://x.y">run.py</a> is <code>it</code>'),
        ("```npm install```\nand **more**", "<code>npm install</code>\nand <b>more</b>"),
        ("# #\n## a  # b ##", "<b>#</b>\n<b>a  # b</b>"),
    ],
)  # fmt: skip
def test_markdown_as_telegrams_html(markdown, shown):
    assert as_html(markdown) == shown
    Parser(shown)


def random_markdown(random: Random, length: int) -> str:
    pieces = [
        "*",
        "**",
        "_",
        "`",
        "```",
        "```py\n",
        "\n",
        " ",
        "word",
        "<b>",
        "&lt;",
        "[a](https://b.c)",
        "# ",
        "🙂",
        "- ",
    ]
    return "".join(random.choice(pieces) for _ in range(length))


def test_whatever_the_markdown_telegram_can_parse_it():
    for seed in range(400):
        text = as_html(random_markdown(Random(seed), 40))
        assert Parser(text).text == plain_text(text), seed


PIECES = ["`", "` ", "`` ", "```a", "```\n", "[", "[a", "[a](http://", "[x](http://(", "# ", "#  ", "* "]
PIECES += ["*a ", "**a ", "**a", "*a**b ", "***a ", "_a ", "_a*b ", "<b>", "(", "&", "\t", "\u2800"]


@pytest.mark.parametrize("piece", PIECES)
def test_an_answer_of_whatever_mark_is_converted_in_no_time(piece):
    """One answer with many backquotes held up a gateway for 84 s, and again after each restart."""
    before = time.process_time()
    split_html(as_html((piece * 100_000)[:100_000]))
    split_html(as_html(("x" + piece * 3 + "y") * 1_000 + "x"))
    assert time.process_time() - before < 2, "a second for 100,000 characters"


@pytest.mark.parametrize("limit", [1, 20, 60, 300])
def test_parts_fit_lose_nothing_and_leave_no_tag_open(limit):
    for seed in range(60):
        text = as_html(random_markdown(Random(seed), 120))
        parts = split_html(text, limit)
        plain = "".join(Parser(part).text for part in parts)
        assert "".join(plain.split()) == "".join(plain_text(text).split()), seed
        if limit >= 60:
            assert max(units(part) for part in parts) <= limit, seed


@pytest.mark.parametrize(
    ("text", "limit", "parts"),
    [
        ("one two\nthree", 10, ["one two\n", "three"]),
        ("one two three", 10, ["one two ", "three"]),
        ("abcdefghij", 4, ["abcd", "efgh", "ij"]),
        ("<b>one two</b>", 13, ["<b>one </b>", "<b>two</b>"]),
        ("a&lt;b", 4, ["a", "&lt;", "b"]),
        ("🙂🙂🙂", 4, ["🙂🙂", "🙂"]),
        ("abc", 0, ["a", "b", "c"]),
        ("abc", -1, ["a", "b", "c"]),
        ("", 10, []),
        ("<b> </b>", 10, []),
    ],
)
def test_where_a_text_is_cut(text, limit, parts):
    assert split_html(text, limit) == parts


def test_long_code_is_closed_and_opened_again():
    text = as_html("Look:\n```python\n" + "x = 1 < 2\n" * 1_000 + "```\n**end**")
    parts = split_html(text)
    assert all(units(part) <= 4_096 for part in parts)
    assert all(part.startswith('<pre><code class="language-python">x = 1') for part in parts[1:])
    assert "".join(Parser(part).text for part in parts).count("x = 1 < 2\n") == 1_000


# ---- The calendar ----

BERLIN = ZoneInfo("Europe/Berlin")


def local(text: str, zone: str = "Europe/Berlin") -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone))


@pytest.mark.parametrize(
    ("expr", "after", "expected"),
    [
        ("* * * * *", "2026-11-21T12:00", "2026-11-21T12:01"),
        ("* * * * *", "2026-11-21T12:00:30", "2026-11-21T12:01"),
        ("30 9 * * *", "2026-11-21T09:29:59", "2026-11-21T09:30"),
        ("30 9 * * *", "2026-11-21T09:30", "2026-11-22T09:30"),
        ("*/15 * * * *", "2026-11-21T12:46", "2026-11-21T13:00"),
        ("5-59/20 * * * *", "2026-11-21T12:26", "2026-11-21T12:45"),
        ("0 8-18/2 * * *", "2026-11-21T18:00", "2026-11-22T08:00"),
        ("0 9 * * mon-fri", "2026-11-20T10:00", "2026-11-23T09:00"),
        ("0 9 * * MON,Wed", "2026-11-23T10:00", "2026-11-25T09:00"),
        ("0 9 * * 0", "2026-11-21T10:00", "2026-11-22T09:00"),
        ("0 9 * * 7", "2026-11-21T10:00", "2026-11-22T09:00"),
        ("0 9 * * sat-sun", "2026-11-21T10:00", "2026-11-22T09:00"),
        ("0 9 * * sat-sun", "2026-11-22T10:00", "2026-11-28T09:00"),
        ("0 9 * * sun-tue", "2026-11-21T10:00", "2026-11-22T09:00"),
        ("0 0 1 1 *", "2026-11-21T10:00", "2027-01-01T00:00"),
        ("0 0 1 jan,jul *", "2027-01-01T10:00", "2027-07-01T00:00"),
        ("0 0 29 2 *", "2026-11-21T10:00", "2028-02-29T00:00"),
        ("0 0 29 2 *", "2097-01-01T10:00", "2104-02-29T00:00"),
        ("0 0 31 * *", "2026-11-21T10:00", "2026-12-31T00:00"),
        # either day is enough where neither field begins with a star …
        ("0 9 13 * fri", "2026-11-14T10:00", "2026-11-20T09:00"),
        ("0 9 13 * fri", "2026-12-12T10:00", "2026-12-13T09:00"),
        ("0 9 1-7 * mon", "2026-11-08T10:00", "2026-11-09T09:00"),
        # … else both have to fit
        ("0 9 */2 * mon", "2026-11-21T10:00", "2026-11-23T09:00"),
        ("0 9 */2 * mon", "2026-11-24T10:00", "2026-12-07T09:00"),
        ("0 9 13 * *", "2026-11-14T10:00", "2026-12-13T09:00"),
        ("0 0 29 2 */7", "2026-11-21T10:00", "2032-02-29T00:00"),
        ("0 0 29 2 */7", "2088-03-01T10:00", "2128-02-29T00:00"),
        # the edges of each field
        ("59 23 31 12 *", "2026-11-21T10:00", "2026-12-31T23:59"),
        ("0-59/59 0-23/23 1-31/30 1-12/11 0-7/7", "2027-01-01T10:00", "2027-01-01T23:00"),
        # never
        ("0 0 31 2 *", "2026-11-21T10:00", None),
        ("0 0 30 feb */2", "2026-11-21T10:00", None),
    ],
)
def test_when_an_expression_comes_next(expr, after, expected):
    moment = next_run(expr, local(after), BERLIN)
    assert moment == (local(expected) if expected else None)
    assert expected is None or moment.tzinfo is BERLIN


@pytest.mark.parametrize(
    ("expr", "zone", "after", "expected"),
    [  # moments in UTC, one behind the other
        # Berlin, 29 March 2026: 02:00 is 03:00
        ("30 2 * * *", "Europe/Berlin", "2026-03-28T12:00", ["03-29T01:00", "03-30T00:30"]),
        ("0,30 2 * * *", "Europe/Berlin", "2026-03-28T12:00", ["03-29T01:00", "03-30T00:00"]),
        ("0 3 * * *", "Europe/Berlin", "2026-03-28T12:00", ["03-29T01:00", "03-30T01:00"]),
        ("0 2,3 * * *", "Europe/Berlin", "2026-03-28T12:00", ["03-29T01:00", "03-30T00:00"]),
        ("30 2 29 3 *", "Europe/Berlin", "2026-03-28T12:00", ["03-29T01:00", "2027-03-29T00:30"]),
        ("*/30 * * * *", "Europe/Berlin", "2026-03-29T00:15", ["03-29T00:30", "03-29T01:00", "03-29T01:30"]),
        ("*/30 2 * * *", "Europe/Berlin", "2026-03-28T12:00", ["03-30T00:00", "03-30T00:30"]),
        # 25 October: 03:00 is 02:00 again
        ("30 2 * * *", "Europe/Berlin", "2026-10-24T12:00", ["10-25T00:30", "10-26T01:30"]),
        ("30 2 * * *", "Europe/Berlin", "2026-10-25T00:30", ["10-26T01:30"]),
        ("30 2 * * *", "Europe/Berlin", "2026-10-25T01:00", ["10-26T01:30"]),
        ("30 * * * *", "Europe/Berlin", "2026-10-24T23:45", ["10-25T00:30", "10-25T01:30", "10-25T02:30"]),
        ("0 */2 * * *", "Europe/Berlin", "2026-10-24T23:45", ["10-25T00:00", "10-25T01:00", "10-25T03:00"]),
        # half an hour, a gap at midnight, a day that was left out, clocks that go back over midnight
        ("15 2 * * *", "Australia/Lord_Howe", "2026-10-03T12:00", ["10-03T15:30", "10-04T15:15"]),
        ("45 1 * * *", "Australia/Lord_Howe", "2026-04-04T12:00", ["04-04T14:45", "04-05T15:15"]),
        ("0 0 * * *", "Africa/Cairo", "2026-04-23T12:00", ["04-23T22:00", "04-24T21:00"]),
        ("0 10 30 12 *", "Pacific/Apia", "2011-12-29T12:00", ["2011-12-30T10:00"]),
        ("30 23 31 10 *", "America/St_Johns", "2009-10-31T12:00", ["2009-11-01T02:00", "2010-11-01T02:00"]),
        ("30 23 * * *", "America/St_Johns", "2010-11-06T12:00", ["2010-11-07T02:00", "2010-11-08T03:00"]),
        ("* * * * *", "America/St_Johns", "2010-11-07T02:29", ["2010-11-07T02:30", "2010-11-07T02:31"]),
    ],
)
def test_when_clocks_are_set(expr, zone, after, expected):
    moment = datetime.fromisoformat(after).replace(tzinfo=UTC)
    for text in expected:
        moment = next_run(expr, moment, ZoneInfo(zone)).astimezone(UTC)
        year = "" if text.startswith("20") else f"{after[:4]}-"
        assert moment == datetime.fromisoformat(year + text).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("expr", "complaint"),
    [
        ("", "has 0 fields instead of five: minute, hour"),
        ("0 9 * *", "has 4 fields"),
        ("0 0 9 * * *", "has 6 fields"),
        ("@daily", "has 1 fields"),
        ("60 * * * *", "minute: '60' is not within 0-59"),
        ("* 24 * * *", "hour: '24' is not within 0-23"),
        ("* * 0 * *", "day of month: '0' is not within 1-31"),
        ("* * * 13 *", "month: '13' is not within 1-12"),
        ("* * * * 8", "day of week: '8' is not within 0-7"),
        ("* * * mon *", "month: 'mon' is not within"),
        ("*/0 * * * *", "minute: './0' never comes"),
        ("0 22-2 * * *", "hour: '22-2' never comes; 22-2 is written as 22-23,0-2"),
        ("5/15 * * * *", "minute: '5/15' is none of"),
        ("*-5 * * * *", "minute: '.-5' is none of"),
        ("1,,2 * * * *", "minute: '' is none of"),
        ("-1 * * * *", "minute: '-1' is none of"),
        ("١ * * * *", "minute: '١' is none of"),
        ("0 9 ? * l", "day of month: '.' is none of"),
    ],
)
def test_a_bad_expression_says_what_is_wrong(expr, complaint):
    with pytest.raises(ValueError, match=complaint):
        next_run(expr, local("2026-11-21T12:00"), BERLIN)


def random_field(random: Random, lowest: int, highest: int, most: int = 59) -> tuple[str, set[int]]:
    """A field as text, and the values that it means."""
    low, high = random.randint(lowest, min(highest, most)), random.randint(lowest, min(highest, most))
    step = random.randint(1, 9)
    low, high = min(low, high), max(low, high)
    return random.choice([
        ("*", set(range(lowest, highest + 1))),
        (f"*/{step}", set(range(lowest, highest + 1, step))),
        (f"{low}", {low}),
        (f"{low},{high}", {low, high}),
        (f"{low}-{high}", set(range(low, high + 1))),
        (f"{low}-{high}/{step}", set(range(low, high + 1, step))),
    ])  # fmt: skip


def by_the_minute(texts: list[str], sets: list[set[int]], after: datetime, zone: ZoneInfo) -> datetime | None:
    """The oracle: look at the clock on the wall every minute, and at what it left out."""

    def fits(wall: datetime) -> bool:
        minutes, hours, days, months, weekdays = sets
        in_time = wall.minute in minutes and wall.hour in hours and wall.month in months
        in_month, in_week = wall.day in days, bool({wall.isoweekday(), wall.isoweekday() % 7} & weekdays)
        is_either = texts[2][0] != "*" and texts[4][0] != "*"
        return in_time and ((in_month or in_week) if is_either else (in_month and in_week))

    is_fixed = texts[0][0] != "*" and texts[1][0] != "*"
    moment = after.replace(second=0)
    for _ in range(4 * 24 * 60):
        before, moment = moment.astimezone(zone), moment + timedelta(minutes=1)
        wall = moment.astimezone(zone)
        naive, skipped = wall.replace(tzinfo=None), before.replace(tzinfo=None) + timedelta(minutes=1)
        is_second_time = wall.fold == 1
        if fits(wall) and not (is_fixed and is_second_time):
            return wall
        while is_fixed and skipped < naive:
            if fits(skipped):
                return wall
            skipped += timedelta(minutes=1)
    return None


def test_the_calendar_agrees_with_a_clock_that_is_looked_at_every_minute():
    """In zones and weeks in which clocks are set: by an hour, by half of one, at midnight."""
    changes = [
        ("Europe/Berlin", "2026-03-28"),
        ("Europe/Berlin", "2026-10-24"),
        ("America/New_York", "2026-03-07"),
        ("Australia/Lord_Howe", "2026-04-04"),
        ("Australia/Lord_Howe", "2026-10-03"),
        ("Africa/Cairo", "2026-04-23"),
        ("Africa/Cairo", "2026-10-29"),
        ("Asia/Kolkata", "2026-01-01"),
        ("America/St_Johns", "2010-11-06"),
        ("America/Nuuk", "2026-10-24"),
    ]
    random = Random(11)
    for number in range(60):
        name, day = changes[number % len(changes)]
        zone = ZoneInfo(name)
        times = [random_field(random, 0, 59), random_field(random, 0, 23, most=4)]
        days = [random_field(random, 1, 31), ("*", set(range(1, 13))), random_field(random, 0, 7)]
        fields = times + days
        fields[2] = random.choice([fields[2], ("*", set(range(1, 32)))])
        fields[4] = random.choice([fields[4], ("*", set(range(8)))])
        texts, sets = [field[0] for field in fields], [field[1] for field in fields]
        after = datetime.fromisoformat(day).replace(tzinfo=UTC) + timedelta(minutes=random.randint(0, 2_000))
        expected = by_the_minute(texts, sets, after, zone)
        moment = next_run(" ".join(texts), after, zone)
        if expected is None:
            assert moment is None or moment > after + timedelta(days=3), (texts, name, after)
        else:  # in UTC: in an overlap Python holds no two times of different zones for equal
            assert moment.astimezone(UTC) == expected.astimezone(UTC), (texts, name, after)


def test_the_zone_of_this_machine_has_its_rules(tmp_path, monkeypatch):
    folder = next(Path(folder) for folder in zoneinfo.TZPATH if (Path(folder) / "Europe/Berlin").exists())
    link = tmp_path / "localtime"
    link.symlink_to(folder / "Europe/Berlin")
    monkeypatch.delenv("TZ", raising=False)
    zone = machine_zone(link)
    assert str(zone) == "Europe/Berlin"
    assert datetime(2026, 7, 1, tzinfo=zone).utcoffset() == timedelta(hours=2)
    assert machine_zone(tmp_path / "gone").utcoffset(None) is not None
    if Path("/etc/localtime").exists():
        assert isinstance(machine_zone(), ZoneInfo), "it is looked at where systems keep it"
    monkeypatch.setenv("TZ", ":Asia/Tokyo")
    assert str(machine_zone(link)) == "Asia/Tokyo"


# ---- Cron ----

START = local("2026-11-21T12:00")
CHAT = SimpleNamespace(channel="telegram", chat_id="42")


class Office:
    """A service in a test: a clock that the test sets, and what was fired."""

    def __init__(self, folder: Path, now: datetime = START, zone: ZoneInfo = BERLIN):
        self.now, self.fired, self.names, self.fire, self.zone = now, [], [], None, zone
        self.path = folder / "w" / "cron" / "jobs.json"
        self.service = CronService(
            self.path, self.on_fire, now=lambda: self.now.astimezone(zone), zone=zone, lock=locked
        )

    async def on_fire(self, job: CronJob, name: str) -> None:
        self.names.append(name)
        self.fired.append((job.message, self.now.astimezone(self.zone).strftime("%d %H:%M:%S")))
        if self.fire:
            await self.fire(job)

    def cron(self, action: str, *details, **more) -> str:
        return self.service.cron(action, *details, turn=CHAT, **more)

    def add(self, message: str, **schedule) -> str:
        """The new job's id."""
        return self.cron("add", message, **schedule).split()[2].rstrip(",")

    def rows(self) -> list:
        return json.loads(self.path.read_text())["jobs"]

    def write(self, *rows) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({"jobs": list(rows)}))

    def pass_time(self, seconds: float, step: float = 1) -> list:
        """What was fired meanwhile, as (message, time)."""

        async def run() -> None:
            for _ in range(round(seconds / step)):
                self.now = self.now.astimezone(UTC) + timedelta(seconds=step)
                await asyncio.gather(*await self.service.tick())

        self.fired.clear()
        asyncio.run(run())
        return self.fired


def test_every_cron_and_at_each_in_its_time_and_by_a_name_that_a_kill_does_not_change(tmp_path):
    office = Office(tmp_path)
    drink = office.add("drink", every_seconds=600)
    office.add("lunch", cron_expr="30 12 * * *")
    office.add("stretch", at="2026-11-21T12:25")
    before = office.path.read_bytes()
    assert office.pass_time(1_800, step=60) == [
        ("drink", "21 12:10:00"), ("drink", "21 12:20:00"), ("stretch", "21 12:25:00"),
        ("drink", "21 12:30:00"), ("lunch", "21 12:30:00"),
    ]  # fmt: skip
    assert [row["message"] for row in office.rows()] == ["drink", "lunch"]
    assert office.names[0] == f"{drink}@2026-11-21T11:10:00Z"
    office.path.write_bytes(before)  # the file as it was when a kill kept the runs from being noted
    again = Office(tmp_path, local("2026-11-21T12:09"))
    again.pass_time(1_260, step=60)
    assert again.names == office.names


NIGHTS = {
    "Europe/Berlin": ("2026-03-29T00:00", "2026-10-25T00:00"),
    "America/New_York": ("2026-03-08T00:00", "2026-11-01T00:00"),
    "Australia/Lord_Howe": ("2026-10-04T00:00", "2026-04-05T00:00"),
    "Australia/Sydney": ("2026-10-04T00:00", "2026-04-05T00:00"),
}


@pytest.mark.parametrize("name", NIGHTS)
@pytest.mark.parametrize("number", [0, 1], ids=["clocks go forward", "clocks go back"])
def test_in_the_nights_when_clocks_are_set_each_job_runs_as_often_as_it_should(tmp_path, name, number):
    """`every` and `at` are right to the minute of real time, `cron` once, the heartbeat each half hour."""
    zone = ZoneInfo(name)
    begin = datetime.fromisoformat(NIGHTS[name][number]).replace(tzinfo=zone)
    office, beats = Office(tmp_path, begin, zone), []

    async def beat() -> None:
        beats.append(office.now.astimezone(UTC))

    office.service.add_system("heartbeat", 1_800, beat)
    office.add("every", every_seconds=1_800)
    office.add("daily", cron_expr="30 4 * * *")
    moment = begin.astimezone(UTC) + timedelta(minutes=95)
    office.add("at", at=moment.isoformat())
    office.add("local", at=moment.astimezone(zone).isoformat())
    fired = office.pass_time(6 * 3_600, step=60)
    assert [message for message, _ in fired].count("every") == 12
    assert [message for message, _ in fired].count("daily") == 1
    assert beats == [begin.astimezone(UTC) + timedelta(minutes=30 * n) for n in range(1, 13)]
    wall = moment.astimezone(zone).strftime("%d %H:%M:%S")
    assert [each for each in fired if each[0] in ("at", "local")] == [("at", wall), ("local", wall)]


@pytest.mark.parametrize(
    ("schedule", "started", "fires"),
    [
        ({"cron_expr": "0 13 * * *"}, "2026-11-21T13:05", True),  # 61 s late was too late once
        ({"cron_expr": "0 13 * * *"}, "2026-11-22T00:59", True),
        ({"cron_expr": "0 13 * * *"}, "2026-11-22T01:01", False),
        ({"cron_expr": "0 13 * * *"}, "2026-11-25T13:30", True),  # of several days the last one
        ({"cron_expr": "0 13 * * mon"}, "2026-11-24T01:30", False),  # twelve hours at most
        ({"every_seconds": 3_600}, "2026-11-21T15:29", True),
        ({"every_seconds": 3_600}, "2026-11-21T15:31", False),
        ({"at": "2026-11-21T13:00"}, "2026-11-22T12:45", True),
    ],
)
def test_a_job_that_is_late_runs_once_if_that_is_of_use_and_else_the_log_says_so(
    tmp_path, caplog, schedule, started, fires
):
    Office(tmp_path).add("water", **schedule)
    office = Office(tmp_path, local(started))
    assert [message for message, _ in office.pass_time(30)] == ["water"] * fires
    assert ("too long ago: it waits for its next time" in caplog.text) == (not fires)
    assert Office(tmp_path, office.now).pass_time(30) == []


def test_a_reminder_of_long_ago_is_only_told_and_the_list_never_shows_the_past(tmp_path):
    office = Office(tmp_path)
    office.add("old", at="2026-11-21T12:30")
    id = office.add("daily", cron_expr="0 13 * * *")
    office = Office(tmp_path, local("2026-11-22T13:45"))
    listed = office.cron("list").splitlines()
    assert " · next Sun 2026-11-22 13:45 CET · " in listed[0]
    assert listed[1] == f"{id} · cron 0 13 * * * · next Mon 2026-11-23 13:00 CET · telegram:42 · daily"
    told = "Only tell the user that this was missed on Sat 2026-11-21 12:30 CET: old"
    assert told in [message for message, _ in office.pass_time(5)]
    assert Office(tmp_path, office.now).pass_time(5) == []
    assert [row["message"] for row in office.rows()] == ["daily"]


def test_a_repeated_job_keeps_its_phase_over_a_restart_and_a_long_run(tmp_path):
    office = Office(tmp_path)
    office.add("drink", every_seconds=3_600)
    office = Office(tmp_path, local("2026-11-21T15:40"))

    async def slow(job: CronJob) -> None:
        office.now += timedelta(minutes=90)

    office.fire = slow
    assert office.pass_time(3_000, step=60)[:1] == [("drink", "21 16:00:00")]
    office.fire = None
    assert office.pass_time(3_600, step=60)[0][1].endswith(":00:00")


def test_rows_written_by_hand_run_odd_ones_are_told_once_and_all_are_kept(tmp_path, caplog):
    office = Office(tmp_path)
    odd = ["text", 7, None, {}, {"id": "x"}, {"id": "s1", "every_seconds": -1}]
    odd += [{"id": "n", "every_seconds": "often"}, {"id": "z", "cron_expr": "x"}]
    odd += [{"id": "t", "cron_expr": "1 1 * * *", "tz": "Mars/Olympus"}, {"id": "q", "since": 5, "at": [1]}]
    by_hand = {"id": 1, "message": "by hand", "every_seconds": 60, "tz": None, "colour": "red", "runs": [7]}
    office.write(*odd, by_hand, by_hand)
    assert office.pass_time(180) == [("by hand", f"21 12:0{n}:01") for n in (1, 2)]
    rows = office.rows()
    assert rows[: len(odd)] == odd and rows[-1]["colour"] == "red"
    assert caplog.text.count("is no job") == len(odd)
    assert "cron: {'id': 's1', 'every_seconds': -1} is no job: it does not say when" in caplog.messages
    assert office.cron("list").startswith("1 · every 60 s · next ")
    assert office.cron("remove", job_id="1") == "Removed job 1."


def test_a_clock_that_was_ahead_stops_nothing(tmp_path):
    office = Office(tmp_path, local("2030-01-01T12:00"))
    office.add("drink", every_seconds=60)
    assert len(office.pass_time(60, step=60)) == 1
    office.now = START  # the same program: the clock is set back
    assert len(office.pass_time(130)) == 2
    row = office.rows()[0]
    office.write(row | {"since": "2030-01-01T12:00:00+01:00", "created": "2030-01-01T12:00:00+01:00"})
    assert len(Office(tmp_path).pass_time(120)) == 1


def test_a_thousand_jobs_are_read_when_the_file_changes_and_not_each_second(tmp_path, monkeypatch):
    office = Office(tmp_path)
    office.write(*({"id": f"j{n}", "cron_expr": f"{n % 60} 9 * * *", "message": "x"} for n in range(1_000)))
    office.pass_time(1)
    calls = []
    monkeypatch.setattr("channels.next_run", lambda *details: calls.append(1))
    monkeypatch.setattr(Path, "read_bytes", lambda path: calls.append(2))
    office.pass_time(60)
    assert calls == []


def test_a_job_that_fails_keeps_its_times_and_the_clock_goes_on(tmp_path, caplog):
    office = Office(tmp_path)

    async def fail(job: CronJob) -> None:
        if job.message != "good":
            raise ConnectionError("no model")

    office.fire = fail
    for name in ("bad", "good"):
        office.add(name, every_seconds=60)
    once = office.add("once", at="2026-11-21T12:01")
    assert len(office.pass_time(1_500, step=60)) == 51
    rows = {row["message"]: row for row in office.rows()}
    assert [len(rows[name]["runs"]) for name in ("bad", "good")] == [20, 20]
    assert rows["bad"]["runs"][-1]["error"] == "ConnectionError: no model"
    assert (rows["good"]["runs"][-1]["error"], rows["once"]["enabled"]) == ("", False)
    line = f"{once} · at 2026-11-21T12:01:00+01:00 · off · telegram:42 · once · failed: ConnectionError"
    assert line in office.cron("list")
    assert caplog.records[0].exc_info[0] is ConnectionError


def test_a_job_that_hangs_or_is_stopped_holds_up_no_other(tmp_path):
    office = Office(tmp_path)

    async def test() -> None:
        gate = asyncio.Event()

        async def fire(job: CronJob) -> None:
            if job.message == "slow":
                await gate.wait()
            if job.message == "stopped":
                asyncio.current_task().cancel()
                await asyncio.sleep(0)

        office.fire = fire
        for name in ("slow", "quick", "stopped"):
            office.add(name, every_seconds=60)
        for minute in range(1, 4):
            office.now = START + timedelta(minutes=minute)
            tasks = await office.service.tick()
            await asyncio.wait(tasks[-2:], timeout=PATIENCE)
        messages = [message for message, _ in office.fired]
        assert (messages.count("slow"), messages.count("quick")) == (1, 3)
        rows = {row["message"]: row for row in office.rows()}
        assert [run["error"] for run in rows["stopped"]["runs"]] == ["stopped"] * 3
        gate.set()

    asyncio.run(test())


def test_other_programs_changes_are_picked_up_and_not_undone(tmp_path):
    office, other = Office(tmp_path), Office(tmp_path)
    kept, removed, off = [office.add(name, every_seconds=60) for name in ("kept", "removed", "off")]
    assert len(office.pass_time(60, step=60)) == 3

    async def meanwhile(job: CronJob) -> None:  # while the jobs run
        if job.id == kept:
            other.cron("remove", job_id=removed)
            other.now = office.now
            other.add("new", every_seconds=60)
            rows = other.rows()
            next(row for row in rows if row["id"] == off)["enabled"] = False
            other.write(*rows)

    office.fire = meanwhile
    office.pass_time(60, step=60)
    office.fire = None
    assert sorted(row["message"] for row in office.rows()) == ["kept", "new", "off"]
    assert sorted(message for message, _ in office.pass_time(60, step=60)) == ["kept", "new"]


def test_system_jobs_keep_their_pace_are_listed_and_protected(tmp_path):
    beats = []

    def started(now: datetime, seconds: float) -> Office:
        office = Office(tmp_path, now)

        async def beat() -> None:
            beats.append(office.now.astimezone(BERLIN).strftime("%H:%M"))

        office.service.add_system("heartbeat", seconds, beat)
        return office

    office = started(START, 1_800)
    office.pass_time(3_600, step=600)
    assert beats == ["12:30", "13:00"]
    assert "heartbeat · every 1800 s · next Sat 2026-11-21 13:30 CET · system · " in office.cron("list")
    with pytest.raises(CronError, match="heartbeat is a job of the system: it cannot be removed"):
        office.cron("remove", job_id="heartbeat")
    office.write(office.rows()[0] | {"enabled": False})  # by hand; the settings decide
    office = started(local("2026-11-21T15:10"), 1_200)  # it missed some: one at once, then in its rhythm
    office.pass_time(1_800, step=600)
    assert beats[2:] == ["15:20", "15:40"]
    assert len(office.rows()[0]["runs"]) == 4
    assert Office(tmp_path, office.now).pass_time(7_200, step=600) == []  # nobody here knows what it does


def test_a_disk_that_refuses_makes_nothing_run_twice(tmp_path, caplog):
    office = Office(tmp_path)
    office.add("drink", every_seconds=60)
    once = office.add("once", at="2026-11-21T12:01")
    temporary = office.path.with_suffix(".tmp")
    temporary.mkdir()  # no file can be written there
    drinks = [("drink", f"21 12:0{minute}:00") for minute in range(1, 5)]
    assert office.pass_time(120) == [drinks[0], ("once", "21 12:01:00"), drinks[1]]
    assert f"cron: the run of {once} cannot be noted: " in caplog.text
    temporary.rmdir()
    assert office.pass_time(120) == drinks[2:]


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"jobs": {}}', b"\x00" * 50, b"\xff\xfe{", b"null"])
def test_a_damaged_file_is_set_aside_and_never_taken_for_no_jobs(tmp_path, caplog, damage):
    office = Office(tmp_path)
    office.add("drink", every_seconds=60)
    office.path.write_bytes(damage)
    office = Office(tmp_path)
    with pytest.raises(CronError, match="jobs.json cannot be read"):
        office.cron("list")
    assert office.pass_time(60, step=60) == []
    assert office.path.read_bytes() == damage
    office.add("new", every_seconds=60)
    [aside] = office.path.parent.glob("jobs.json.corrupt-*")
    assert aside.read_bytes() == damage and f"it is now {aside}. Mend it." in caplog.text
    assert f"{aside} was damaged" in office.cron("list")
    assert [row["message"] for row in office.rows()] == ["new"]
    office.path.write_bytes(office.path.read_bytes()[:40])  # somebody is just writing it
    office.now += timedelta(seconds=120)
    assert office.service.store.rows != []


KILLED = """
import os, sys
from pathlib import Path
from channels import JobStore
from memory import locked
step, kept = int(sys.argv[2]), []

def audit(event, arguments):
    path = str(arguments[0]) if arguments else ""
    if (event in ("open", "os.rename") and "jobs" in path) or event == "fcntl.flock":
        kept.append(event)
        if len(kept) > step:
            os._exit(9)

sys.addaudithook(audit)
JobStore(Path(sys.argv[1]), locked).change(lambda rows: [*rows, {"id": "new", "message": "x" * 100_000}])
"""


def test_a_kill_between_any_two_steps_of_writing_leaves_all_or_nothing(tmp_path):
    ends = set()
    for step in itertools.count():
        path = tmp_path / str(step) / "jobs.json"
        path.parent.mkdir()
        path.write_text('{"jobs": [{"id": "old"}]}')
        done = subprocess.run([sys.executable, "-c", KILLED, path, str(step)], cwd=ROOT)
        store = JobStore(path, locked)
        ids = [row["id"] for row in store.read()]
        assert ids in (["old"], ["old", "new"])
        ends.add(tuple(ids))
        store.change(lambda rows: [*rows, {"id": "next"}])  # no lock and no rest is in the way
        assert [row["id"] for row in store.read()] == [*ids, "next"]
        if done.returncode == 0:
            break
    assert step >= 3
    assert len(ends) == 2


ADDING = """
import sys
from pathlib import Path
from channels import JobStore
from memory import locked
for number in range(20):
    JobStore(Path(sys.argv[1]), locked).change(lambda rows: [*rows, {"id": f"{sys.argv[2]}{number}"}])
"""


def test_two_programs_that_add_at_the_same_time_lose_nothing(tmp_path):
    path = tmp_path / "jobs.json"
    processes = [subprocess.Popen([sys.executable, "-c", ADDING, path, name], cwd=ROOT) for name in "ab"]
    assert [process.wait(PATIENCE) for process in processes] == [0, 0]
    assert len(JobStore(path, locked).read()) == 40


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"message": " ", "every_seconds": 60}, "message is empty"),
        ({"message": "x"}, "exactly one of every_seconds, cron_expr and at"),
        ({"message": "x", "every_seconds": 60, "at": "2026-12-01"}, "exactly one of"),
        ({"message": "x", "every_seconds": -5}, "it does not say when"),
        ({"message": "x", "every_seconds": 10**15}, "No job was made"),
        ({"message": "x", "every_seconds": 60, "tz": "Europe/Berlin"}, "tz is for cron_expr"),
        ({"message": "x", "cron_expr": "0 9 * * *", "tz": "Mars/Olympus"}, "no time zone 'Mars/Olympus'"),
        ({"message": "x", "cron_expr": "0 9 * * *", "tz": "../etc/passwd"}, "no time zone"),
        ({"message": "x", "cron_expr": "0 25 * * *"}, "hour: '25' is not within 0-23"),
        ({"message": "x", "cron_expr": "0 0 31 2 *"}, "never comes. It is now Sat 2026-11-21 12:00 CET"),
        ({"message": "x", "at": "2026-11-21T12:00"}, "never comes. It is now Sat 2026-11-21 12:00 CET"),
        ({"message": "x", "at": "tomorrow"}, "No job was made of 'at tomorrow'"),
    ],
)
def test_a_wish_that_cannot_be_met_says_why(tmp_path, arguments, complaint):
    office = Office(tmp_path)
    with pytest.raises(CronError, match=complaint):
        office.cron("add", **arguments)
    assert not office.path.exists()


@pytest.mark.parametrize(
    ("schedule", "shown", "answer"),
    [
        ({"at": "2026-11-21T17:00"}, "at 2026-11-21T17:00:00+01:00", "Sat 2026-11-21 17:00 CET"),
        ({"at": "2026-11-21T17:00Z"}, "at 2026-11-21T18:00:00+01:00", "Sat 2026-11-21 18:00 CET"),
        ({"at": "2027-07-01T17:00"}, "at 2027-07-01T17:00:00+02:00", "Thu 2027-07-01 17:00 CEST"),
        ({"cron_expr": "0 9 * * *"}, "cron 0 9 * * *", "Sun 2026-11-22 09:00 CET"),
        ({"cron_expr": "0 9 1 1 *", "tz": "UTC"}, "cron 0 9 1 1 * UTC", "Fri 2027-01-01 10:00 CET"),
        ({"every_seconds": 90}, "every 90 s", "Sat 2026-11-21 12:01 CET"),
    ],
)  # fmt: skip
def test_the_model_is_told_when_a_job_comes(tmp_path, schedule, shown, answer):
    office = Office(tmp_path)
    added = office.cron("add", "stretch", **schedule)
    id = office.rows()[0]["id"]
    assert added == f"Added job {id}, {shown}: it runs next on {answer}."
    assert office.cron("list") == f"{id} · {shown} · next {answer} · telegram:42 · stretch"
    assert re.fullmatch("[0-9a-f]{8}", id)


def test_the_tool_removes_and_makes_no_job_in_a_job(tmp_path):
    office = Office(tmp_path)
    assert office.cron("list") == "There are no jobs."
    id = office.add("water the plants", cron_expr="0 9 * * *")
    in_a_job = SimpleNamespace(channel="cron", chat_id=id)
    with pytest.raises(CronError, match="A job that runs adds no others"):
        office.service.cron("add", "more", every_seconds=60, turn=in_a_job)
    with pytest.raises(CronError, match=f"no job 'x'. There are: {id}."):
        office.cron("remove", job_id="x")
    assert office.service.cron("remove", job_id=id, turn=in_a_job) == f"Removed job {id}."
    assert office.rows() == []


def test_the_service_runs_until_it_is_cancelled_whatever_happens(tmp_path, caplog):
    office, naps, ended = Office(tmp_path), [], []
    for name in ("slow", "quick"):
        office.add(name, every_seconds=60)
    good = office.path.read_text()

    async def fire(job: CronJob) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(50 if job.message == "slow" else 1):
                await asyncio.sleep(0)
            ended.append(job.message)

    async def sleep(seconds: float) -> None:
        naps.append(seconds)
        office.now += timedelta(seconds=seconds)
        if len(naps) == 10:
            office.path.unlink()
            office.path.mkdir()  # what cannot be read
        if len(naps) == 12:
            office.path.rmdir()
            office.path.write_text(good)
        await asyncio.sleep(0 if len(naps) < 70 else 3_600)

    async def test() -> None:
        office.fire, office.service.sleep = fire, sleep
        task = asyncio.create_task(office.service.run())
        while len(naps) < 70:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=PATIENCE)
        assert task.cancelled()

    asyncio.run(test())
    assert ended == ["quick", "slow"], "it waits for every job that puts things in order"
    assert "cron: the jobs cannot be looked at: [Errno 21] Is a directory" in caplog.text
    assert office.rows()[0]["runs"] == []  # it was cut off: at the next start it runs again


# ---- Heartbeat ----


@pytest.mark.parametrize(
    ("text", "active"),
    [
        ("", ""),
        ("# Heartbeat\n\n## Tasks\n---\n- [ ]\n-\n", ""),
        ("<!-- write tasks here\n- [ ] like this -->\n", ""),
        ("<!-- never closed\n- [ ] water", ""),
        ("- [x] call Ann\n  her number is 555\n* [X] done\n", ""),
        ("- [x] call Ann\n  - [ ] ask for Bob", "- [ ] ask for Bob"),
        ("# Tasks\n- [x] call Ann\n- [ ] water the plants\n", "# Tasks\n\n- [ ] water the plants"),
        ("Look at the inbox.", "Look at the inbox."),
        ("#5 is open", "#5 is open"),
        ("# Tasks\r\n- [x] done\r\n", ""),
    ],
)
def test_what_is_to_be_done_at_a_heartbeat(text, active):
    assert active_tasks(text) == active
