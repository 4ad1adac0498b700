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
import traceback
import zoneinfo
from concurrent.futures import Future
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from types import SimpleNamespace
from zoneinfo import ZoneInfo

import pytest

from channels import (
    CLI, BackgroundLoop, Channel, CronError, CronJob, CronService, FileChannel, Heartbeat, InboundMessage,
    JobStore, MessageBus, NoSuchBot, NobodyToAsk, OutboundMessage, PrintableFormatter, Telegram,
    TelegramError, Terminated, Waiting, active_tasks, approval_question, as_html, in_thread, machine_zone,
    next_run, plain_text, prepare_streams, printable, read_answer, split_html, text_of_pipe, verdict,
)  # fmt: skip
from fake_telegram import CONFLICT, PATIENCE, FakeTelegram, Parser, Refusal, units

pty = pytest.importorskip("pty", reason="pseudo-terminals are POSIX")

ROOT = Path(__file__).parent.parent
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


# ---- The bus ----


class Talk(Channel):
    """Publishes what it is given and keeps what arrives; `failures` are raised first, one a try."""

    def __init__(self, name: str, *lines: str, failures: int = 0):
        super().__init__(["*"])
        self.name, self.lines, self.failures = name, lines, failures
        self.arrived: list[OutboundMessage] = []
        self.tries = 0
        self.is_open, self.ended = asyncio.Event(), False
        self.is_open.set()

    async def start(self, bus: MessageBus) -> None:
        try:
            for line in self.lines:
                await bus.publish(InboundMessage(self.name, "7", "42", line))
            await asyncio.Event().wait()
        finally:
            self.ended = True

    async def send(self, message: OutboundMessage) -> None:
        self.tries += 1
        await self.is_open.wait()
        if self.failures:
            self.failures -= 1
            raise ConnectionError("no network")
        self.arrived.append(message)

    def texts(self) -> list[str]:
        return [message.content for message in self.arrived]


async def settled(condition) -> None:
    """Gives the other tasks their turn until the condition holds: nothing here waits for a time."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    pytest.fail("it never happened")


async def echo(bus: MessageBus) -> None:
    """The smallest agent."""
    while True:
        message = await bus.next()
        message.confirm()
        bus.send(OutboundMessage(message.channel, message.chat_id, message.content.upper()))


def test_a_file_of_questions_becomes_a_file_of_answers(tmp_path):
    questions, answers = tmp_path / "questions", tmp_path / "answers"
    questions.write_text("Grüße\nwhat is in a.txt?\n", encoding="utf-8")

    async def gateway() -> None:
        bus = MessageBus()
        with questions.open(encoding="utf-8") as lines, answers.open("w", encoding="utf-8") as page:
            bus.open(FileChannel(lines, page))
            agent = asyncio.create_task(echo(bus))
            await settled(lambda: answers.read_text(encoding="utf-8").count("\n") == 2)
            agent.cancel()
            await bus.close()

    asyncio.run(gateway())
    assert answers.read_text(encoding="utf-8") == "GRÜSSE\nWHAT IS IN A.TXT?\n"


def test_a_message_is_confirmed_when_the_agent_has_it_and_not_before():
    async def talk() -> None:
        bus = MessageBus()
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

    asyncio.run(talk())
    assert InboundMessage("telegram", "7", "42", "hi").session_key == "telegram:42"


def test_a_channel_that_no_longer_waits_does_not_disturb_the_agent():
    async def talk() -> None:
        bus = MessageBus()
        publishing = asyncio.create_task(bus.publish(InboundMessage("a", "7", "1", "one")))
        message = await bus.next()
        publishing.cancel()
        await asyncio.wait([publishing])
        message.confirm()
        message.confirm(OSError("and once more"))

    asyncio.run(talk())


def test_a_slow_channel_slows_nobody_and_loses_no_answer():
    slow, quick = Talk("slow"), Talk("quick")

    async def talk() -> None:
        bus = MessageBus()
        bus.open(slow)
        bus.open(quick)
        slow.is_open.clear()
        for number in range(1_000):
            bus.send(OutboundMessage("slow", "42", f"{number} ", "delta"))
            bus.send(OutboundMessage("slow", "42", "a hint", "tool_hint"))
        for number in range(300):
            bus.send(OutboundMessage("slow", "42", f"answer {number}"))
        bus.send(OutboundMessage("quick", "1", "at once"))
        await settled(lambda: quick.texts() == ["at once"])
        slow.is_open.set()
        await bus.close(seconds=600)  # it ends as soon as all is delivered

    asyncio.run(talk())
    finals = [message.content for message in slow.arrived if message.kind == "final"]
    assert finals == [f"answer {number}" for number in range(300)]
    assert len(slow.arrived) == 300 + 100
    assert slow.texts()[:3] == ["0 ", "a hint", "1 "]
    assert slow.texts()[99] == "a hint", "no piece of an answer joins a hint"


def test_pieces_of_an_answer_that_find_no_room_join_those_of_their_chat():
    slow = Talk("slow")

    async def talk() -> None:
        bus = MessageBus()
        bus.open(slow)
        slow.is_open.clear()
        sent = [OutboundMessage("slow", str(n % 2), f"{n} ", "delta") for n in range(500)]
        for message in sent:
            bus.send(message)
        assert sent[99].content == "99 ", "not ours"
        slow.is_open.set()
        await bus.close()

    asyncio.run(talk())
    for chat in ("0", "1"):
        text = "".join(message.content for message in slow.arrived if message.chat_id == chat)
        assert text == "".join(f"{n} " for n in range(int(chat), 500, 2))


def test_an_answer_is_tried_three_times_and_then_once_more_when_another_gets_through(caplog):
    channel, slept, delivered = Talk("phone", failures=3 + 1), [], []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    def answer(text: str) -> OutboundMessage:
        return OutboundMessage("phone", "42", text, on_delivered=lambda: delivered.append(text))

    async def talk() -> None:
        bus = MessageBus(sleep)
        bus.open(channel)
        bus.send(answer("one"))
        await settled(lambda: channel.tries == 3 and len(slept) == 3)
        assert (channel.texts(), delivered) == ([], [])
        bus.send(answer("two"))
        await settled(lambda: len(delivered) == 2)
        await bus.close()

    asyncio.run(talk())
    assert slept == [1.0, 2.0, 4.0, 1.0]
    assert channel.texts() == delivered == ["two", "one"]
    assert "no network" in caplog.text


def test_an_event_is_tried_once_and_what_fails_behind_a_delivery_sends_nothing_twice(caplog):
    channel = Talk("phone", failures=1)

    def full() -> None:
        raise OSError("No space left on device")

    async def talk() -> None:
        bus = MessageBus()
        bus.open(channel)
        bus.send(OutboundMessage("phone", "42", "looking", "progress"))
        bus.send(OutboundMessage("phone", "42", "done", on_delivered=full))
        await bus.close()

    asyncio.run(talk())
    assert (channel.texts(), channel.tries) == (["done"], 2)
    assert "No space left" in caplog.text


def test_a_channel_that_fails_does_not_stop_the_others(caplog):
    class Broken(Talk):
        async def start(self, bus: MessageBus) -> None:
            raise LookupError("the token is wrong")

        async def stop(self) -> None:
            raise LookupError("it never began")

    broken, fine = Broken("broken"), Talk("fine", "hello", "again")

    async def talk() -> None:
        bus = MessageBus()
        bus.open(broken)
        bus.open(fine)
        agent = asyncio.create_task(echo(bus))
        await settled(lambda: fine.texts() == ["HELLO", "AGAIN"])
        bus.send(OutboundMessage("broken", "42", "can you hear me?"))
        bus.send(OutboundMessage("nowhere", "42", "is there anybody?"))
        agent.cancel()
        await bus.close()

    asyncio.run(talk())
    assert (broken.texts(), fine.ended) == (["can you hear me?"], True)
    for complaint in ("the token is wrong", "it never began", "no channel 'nowhere'"):
        assert complaint in caplog.text


def test_a_channel_that_never_delivers_does_not_hold_the_end():
    channel = Talk("stuck")

    async def talk() -> None:
        bus = MessageBus()
        bus.open(channel)
        channel.is_open.clear()
        bus.send(OutboundMessage("stuck", "42", "lost for now", on_delivered=pytest.fail))
        await settled(lambda: channel.tries == 1)
        await bus.close(seconds=0.01)
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []

    asyncio.run(talk())
    assert channel.ended


def test_what_channels_exist_is_known_and_an_event_for_another_one_is_no_news(caplog):
    async def talk() -> None:
        bus = MessageBus()
        bus.open(Talk("a"))
        bus.open(Talk("b"))
        assert bus.channels == ["a", "b"]
        bus.send(OutboundMessage("nowhere", "42", "Hel", "delta"))
        await bus.close()

    asyncio.run(talk())
    assert caplog.text == ""


def test_messages_that_say_the_same_are_equal_whoever_waits_for_them():
    async def talk() -> None:
        waited_for = InboundMessage("a", "7", "1", "one")
        publishing = asyncio.create_task(MessageBus().publish(waited_for))
        await settled(lambda: waited_for.journalled)
        publishing.cancel()
        assert waited_for == InboundMessage("a", "7", "1", "one", media=(), metadata={}, message_id="")
        assert "Future" not in repr(waited_for)

    asyncio.run(talk())
    answer = OutboundMessage("a", "1", "one", on_delivered=print)
    assert answer == OutboundMessage("a", "1", "one", kind="final", media=(), reply_to="")
    assert "print" not in repr(answer)


def test_the_lines_of_a_file_are_messages_and_only_answers_go_into_the_other(tmp_path):
    async def gateway() -> None:
        bus, page = MessageBus(), io.StringIO()
        channel = FileChannel(io.StringIO("  hello \n"), page)
        bus.open(channel)
        message = await bus.next()
        assert message == InboundMessage("file", "me", "direct", "hello")
        assert channel.is_allowed("me")
        bus.send(OutboundMessage("file", "direct", "looking", "progress"))
        bus.send(OutboundMessage("file", "direct", "It says hello."))
        await bus.close()
        assert page.getvalue() == "It says hello.\n"

    asyncio.run(gateway())


def test_of_answers_that_nobody_could_get_the_newest_twenty_are_kept():
    channel = Talk("phone", failures=3 * 25)

    async def talk() -> None:
        bus = MessageBus(lambda seconds: asyncio.sleep(0))
        bus.open(channel)
        for number in range(25):
            bus.send(OutboundMessage("phone", "42", str(number)))
        await settled(lambda: channel.tries == 3 * 25)
        for text in ("through", "again"):
            bus.send(OutboundMessage("phone", "42", text))
        await settled(lambda: len(channel.arrived) == 22)
        await bus.close()

    asyncio.run(talk())
    assert channel.texts() == ["through", "again", *map(str, range(5, 25))]


def test_an_end_waits_for_what_is_on_its_way_and_for_whoever_puts_things_in_order():
    class Unhurried(Talk):
        async def start(self, bus: MessageBus) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await self.pause()
                self.ended = True

        async def send(self, message: OutboundMessage) -> None:
            await self.pause()
            self.arrived.append(message)

        async def pause(self) -> None:
            for _ in range(50):
                await asyncio.sleep(0)

    channel = Unhurried("phone")

    async def talk() -> None:
        bus = MessageBus()
        bus.open(channel)
        await asyncio.sleep(0)
        for text in ("one", "two"):
            bus.send(OutboundMessage("phone", "42", text))
        await bus.close()
        assert (channel.texts(), channel.ended) == (["one", "two"], True)

    asyncio.run(talk())


def test_the_log_says_which_channel_has_which_trouble_and_how_bad_it_is(caplog):
    class Broken(Talk):
        async def start(self, bus: MessageBus) -> None:
            raise LookupError("the token is wrong")

        async def stop(self) -> None:
            raise LookupError("it never began")

    def full() -> None:
        raise OSError("disk full")

    async def talk() -> None:
        bus = MessageBus(lambda seconds: asyncio.sleep(0))
        channel = Broken("phone", failures=4)
        bus.open(channel)
        bus.send(OutboundMessage("phone", "42", "looking", "progress"))
        bus.send(OutboundMessage("phone", "42", "one"))
        bus.send(OutboundMessage("phone", "42", "two", on_delivered=full))
        bus.send(OutboundMessage("nowhere", "42", "three"))
        await settled(lambda: len(channel.arrived) == 2)
        await bus.close()

    asyncio.run(talk())
    assert {record.name for record in caplog.records} == {"nanobot.channels"}
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert told == [
        ("WARNING", "There is no channel 'nowhere': its answer is shown nowhere"),
        ("ERROR", "phone: nobody listens there any more: the token is wrong"),
        ("WARNING", "phone: cannot deliver (progress): no network"),
        ("WARNING", "phone: cannot deliver (final): no network"),
        ("WARNING", "phone: cannot deliver (final): no network"),
        ("WARNING", "phone: cannot deliver (final): no network"),
        ("ERROR", "phone: an answer for 42 is kept for later"),
        ("ERROR", "phone: a delivery could not be noted: disk full"),
        ("WARNING", "phone: did not stop as it should: LookupError('it never began')"),
    ]


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
        logger.warning("a tool said %s", "\u202egnp.exe", exc_info=True)
    assert out.getvalue().startswith("WARNING a tool said \\u202egnp.exe\nTraceback")
    assert out.getvalue().endswith("ValueError: \\x1b]0;owned\\x07\n")


@pytest.mark.parametrize(
    ("arguments", "question"),
    [
        ({"command": "ls"}, 'exec {"command": "ls"}\nRun it? [y/n/always] '),
        ({"command": "ls\nRun it?"}, 'exec {"command": "ls\\nRun it?"}\nRun it? [y/n/always] '),
        ({"command": "echo \x1b[2J"}, 'exec {"command": "echo \\u001b[2J"}\nRun it? [y/n/always] '),
        ({"command": "echo \x9b2J\u202e"}, 'exec {"command": "echo \\x9b2J\\u202e"}\nRun it? [y/n/always] '),
        ({"command": "r\u200dm\xad"}, 'exec {"command": "r\\u200dm\\xad"}\nRun it? [y/n/always] '),
        ({"command": f"a{' ' * 999};rm x"}, 'exec {"command": "a[999 blanks];rm x"}\nRun it? [y/n/always] '),
        ({"command": "a   b    c"}, 'exec {"command": "a   b[4 blanks]c"}\nRun it? [y/n/always] '),
        ({"command": "Grüße"}, 'exec {"command": "Grüße"}\nRun it? [y/n/always] '),
        ({}, "exec {}\nRun it? [y/n/always] "),
    ],
)
def test_a_call_to_be_approved_is_shown_whole_on_one_line(arguments, question):
    assert approval_question("exec", arguments) == question


def test_the_size_of_a_long_call_stands_where_it_is_seen():
    question = approval_question("write_file", {"content": "x" * 3_000})
    assert question.endswith("\nwrite_file, 3,026 characters. Run it? [y/n/always] ")
    assert question.count("x") == 3_000


@pytest.mark.parametrize(
    ("length", "prompt"), [(500, "Run it? "), (501, "write_file, 501 characters. Run it? ")]
)
def test_a_call_that_fills_no_screen_is_shown_without_its_size(length, prompt):
    question = approval_question("write_file", {"a": "x" * (length - len('write_file {"a": ""}'))})
    assert question.splitlines()[1] == f"{prompt}[y/n/always] "


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


def test_whoever_sits_at_the_terminal_may_write():
    cli = CLI(io.StringIO(), io.StringIO())
    assert (cli.name, cli.is_allowed("me")) == ("cli", True)


def test_only_the_kinds_that_are_wanted_are_shown_beside_the_answer():
    out, err = io.StringIO(), io.StringIO()
    send(CLI(out, err, kinds=("retry",)), *TURN)
    assert (out.getvalue(), err.getvalue()) == ("It says hello.\n", "again in 2 s\n")


def test_an_answer_keeps_its_indentation_in_a_pipe():
    out = io.StringIO()
    send(CLI(out, io.StringIO()), event("final", "    code\n  more"))
    assert out.getvalue() == "    code\n  more\n"


def test_into_a_file_an_answer_goes_byte_for_byte(tmp_path):
    answer = "\x1b[31mred\x1b[0m \u202e می\u200cخواهم\r\n\ttab \x00 \ufeff"
    with (tmp_path / "review.md").open("w", encoding="utf-8", newline="") as out:
        send(CLI(out, io.StringIO()), event("delta", answer), event("final", answer))
        send(CLI(out, io.StringIO()), event("final", "lone \ud800\n"))
    assert (tmp_path / "review.md").read_bytes() == f"{answer}\nlone ?\n".encode()


ANSWER_AND_WAIT = """
import asyncio, sys
from channels import CLI, OutboundMessage
asyncio.run(CLI().send(OutboundMessage("cli", "direct", "Hello.")))
sys.stdin.readline()
"""


def test_an_answer_comes_out_of_a_pipe_at_once():
    command = [sys.executable, "-c", ANSWER_AND_WAIT]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environ = {**os.environ, "PYTHONUNBUFFERED": ""}
    with subprocess.Popen(command, cwd=ROOT, env=environ, **streams) as process:
        clock = threading.Timer(30, process.kill)
        clock.start()
        assert process.stdout.readline() == "Hello.\n"  # before it may end
        process.communicate("\n")
        clock.cancel()


def test_on_a_terminal_a_piece_is_shown_as_soon_as_it_comes(terminal):
    cli = CLI(terminal.stream, terminal.stream)
    for piece in ("It ", "says ", "\x1b[2J"):
        send(cli, event("delta", piece))
        assert terminal.read() == printable(piece)


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


def test_on_a_terminal_the_rest_of_a_text_beside_calls_is_shown_too(terminal):
    cli = CLI(terminal.stream, terminal.stream)
    send(cli, event("delta", "Let me"), event("progress", "Let me look."), event("tool_hint", "ls"))
    assert terminal.read() == "Let me look.\nls\n"
    send(cli, event("progress", "Text that was not streamed."))
    assert terminal.read() == "Text that was not streamed.\n"


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


def test_ctrl_d_is_the_end(tmp_path):
    assert typed(b"\x04", tmp_path / "history") == "the end"


def test_with_output_into_a_pipe_the_prompt_goes_to_standard_error(tmp_path):
    command = [sys.executable, "-c", READ_A_LINE, str(tmp_path / "history")]
    done = subprocess.run(command, cwd=ROOT, input="hello\n", capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "> 'hello'\n")


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


def test_a_turn_that_fails_leaves_its_traceback_in_a_log_that_wants_it(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    converse(tmp_path, monkeypatch, ["hello\n"], LookupError("no model"))
    [record] = caplog.records
    assert (record.levelname, record.getMessage()) == ("INFO", "the turn failed")
    assert record.exc_info[0] is LookupError


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


def test_an_exception_comes_out_as_it_was_raised_and_the_loop_goes_on():
    async def fail() -> None:
        raise LookupError("no such thing")

    with PatientLoop() as background:
        for _ in range(2):
            with pytest.raises(LookupError, match="no such thing"):
                background.complete(fail())
        assert background.complete(asyncio.sleep(0, "fine")) == "fine"


def test_the_thread_of_a_loop_ends_with_its_block():
    before = set(threading.enumerate())
    with PatientLoop() as background:
        [thread] = set(threading.enumerate()) - before
        assert thread.daemon, "no thread may hold the exit"
    thread.join(5)
    assert not thread.is_alive()
    assert background.loop.is_closed(), "its pipes and threads are let go of"


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


ONE_QUESTION = """
from channels import BackgroundLoop
background = BackgroundLoop()
print(repr(background.complete(background.ask("Run it? "))))
"""


def test_an_answer_that_is_no_text_is_no_yes():
    environ = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    command = [sys.executable, "-c", ONE_QUESTION]
    done = subprocess.run(command, cwd=ROOT, env=environ, input=b"y\xff\n", capture_output=True, timeout=20)
    assert (done.returncode, done.stdout) == (0, b"''\n"), done.stderr


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


def test_ctrl_c_is_not_lost_when_it_comes_before_the_work_has_begun():
    printed = interrupted("busy", at=("working",))
    assert printed.endswith("interrupted\nyes\n")
    assert "tidying" not in printed


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


def test_a_question_while_a_stopped_turn_tidies_up_is_refused(monkeypatch):
    keyboard, refused = Keyboard(), []
    monkeypatch.setattr(sys, "stdin", keyboard)
    keyboard.lines.put("")

    async def turn() -> None:
        try:
            await background.ask("one? ")
        finally:
            with pytest.raises(NobodyToAsk, match="Nobody can be asked"):
                await background.ask("save it? ")
            refused.append("save it? ")

    with PatientLoop() as background, pytest.raises(KeyboardInterrupt):
        background.complete(turn())
    assert refused == ["save it? "]


STOPPED_AT_THE_END = """
import asyncio, signal, sys, threading
from channels import BackgroundLoop
signal.signal(signal.SIGINT, signal.default_int_handler)

async def close():
    while sys._current_frames()[threading.main_thread().ident].f_code.co_name != "wait":
        await asyncio.sleep(0.01)  # until the main thread waits for this
    print("closing", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    print("closed", flush=True)

with BackgroundLoop(close):
    pass
print("the end", flush=True)
"""


def test_ctrl_c_at_the_end_leaves_nothing_behind():
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", STOPPED_AT_THE_END], cwd=ROOT, **streams) as process:
        clock = threading.Timer(20, process.kill)
        clock.start()
        assert process.stdout.readline() == "closing\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate("\n")[0] == "closed\nthe end\n"
        clock.cancel()


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


class Screen(io.TextIOWrapper):
    """A terminal as a program sees it that keeps back what is not flushed."""

    def __init__(self):
        super().__init__(io.BufferedWriter(io.BytesIO()), encoding="utf-8")

    def isatty(self) -> bool:
        return True

    def seen(self) -> str:
        text = self.buffer.raw.getvalue().decode()
        for escape, mark in (("\r\x1b[K\x1b[?7l", "<"), ("\x1b[?7h\r", ">"), ("\r\x1b[K", "|")):
            text = text.replace(escape, mark)
        return text.replace(DIM, "").replace(PLAIN, "")


def test_all_that_is_shown_is_seen_at_once(tmp_path, monkeypatch):
    clock, out, err = Clock(), Screen(), Screen()
    cli = CLI(out, err)
    cli.waiting = waiting = Waiting(err, clock)
    send(cli, event("delta", "Hel"))
    assert out.seen() == "Hel"
    send(cli, event("final", "Hello."))
    assert out.seen() == "Hello.\n"
    cli.note("a note")
    assert err.seen() == "a note\n"
    waiting.begin("the model")
    clock.now += 2
    waiting.draw()
    assert err.seen() == "a note\n<waiting for the model, 2 s>"
    waiting.end()
    assert err.seen() == "a note\n<waiting for the model, 2 s>|"
    piped, seen = CLI(io.StringIO(), err), []
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(readline=lambda: seen.append(err.seen()) or "\n"))
    piped.read_line("> ", tmp_path / "history")
    assert seen[0].endswith("|> ")


def test_into_a_pipe_and_on_a_dumb_terminal_no_waiting_is_shown(terminal, monkeypatch):
    clock, pipe = Clock(), io.StringIO()
    monkeypatch.setenv("TERM", "dumb")
    for stream in (pipe, terminal.stream, None):
        waiting = Waiting(stream, clock)
        waiting.begin("the model")
        clock.now += 5
        waiting.draw()
        waiting.end()
    assert (pipe.getvalue(), shown_on(terminal)) == ("", "")


def test_a_turn_shows_its_waiting_and_takes_it_away_at_its_end(terminal):
    clock = Clock()
    waiting = Waiting(terminal.stream, clock)
    seen = []

    def read_screen() -> None:
        while "9 s" not in "".join(seen) and select.select([terminal.screen], [], [], 20)[0]:
            seen.append(os.read(terminal.screen, 1_000).decode())

    async def turn() -> None:
        waiting.begin("the model")
        clock.now += 9
        await asyncio.to_thread(read_screen)

    with PatientLoop(waiting=waiting) as background:
        background.complete(turn())
        assert shown_on(terminal) == "|"
    assert "waiting for the model, 9 s" in "".join(seen)


QUESTION_WHILE_WAITING = """
import asyncio, sys
from channels import BackgroundLoop, Waiting

class Clock:
    now = 0.0
    def __call__(self):
        self.now += 1.0
        return self.now

waiting = Waiting(sys.stderr, Clock())

async def turn():
    waiting.begin("the model")
    while not waiting.drawn:
        await asyncio.sleep(0.01)
    answer = await background.ask("Run it? ")
    return answer

with BackgroundLoop(waiting=waiting) as background:
    print("answer:", background.complete(turn()))
"""


def test_a_question_stands_on_a_line_of_its_own():
    screen, keyboard = pty.openpty()
    command = [sys.executable, "-c", QUESTION_WHILE_WAITING]
    streams = {"stdin": keyboard, "stdout": keyboard, "stderr": keyboard}
    shown = b""
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, "TERM": "xterm"}, **streams) as process:
        clock = threading.Timer(20, process.kill)
        clock.start()
        os.close(keyboard)
        for expected, keys in ((b"Run it? ", b"y\n"), (b"answer: y", b"")):
            while expected not in shown:
                shown += os.read(screen, 1_000)
            os.write(screen, keys)
        clock.cancel()
    os.close(screen)
    drawn, question = shown.split(b"Run it? ")
    assert b"waiting for the model" in drawn
    assert drawn.rindex(b"\r\x1b[K") > drawn.rindex(b"waiting for the model")
    assert b"waiting" not in question.split(b"y\r\n")[0]


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


def test_streams_that_are_closed_are_opened_to_nothing(monkeypatch):
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    prepare_streams()
    streams = [sys.stdin, sys.stdout, sys.stderr]
    monkeypatch.undo()
    assert [stream.name for stream in streams] == [os.devnull] * 3
    assert [stream.mode for stream in streams] == ["r", "w", "w"]
    assert {(stream.encoding, stream.errors) for stream in streams} == {("utf-8", "replace")}
    for stream in streams:
        stream.close()


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


def test_another_program_may_have_removed_the_same_old_files(tmp_path):
    class Shared(type(Path())):
        """A folder that was listed just before the other program was there."""

        def glob(self, pattern: str) -> list[Path]:
            return [self / f"20200101-0000{number:02}-1.txt" for number in range(30)]

    text = text_of_pipe(io.BytesIO(b"x" * 100_001), Shared(tmp_path / "piped"))
    assert "100,001 bytes" in text
    assert len(list((tmp_path / "piped").iterdir())) == 1


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


def test_a_waiter_that_gives_up_lets_the_thread_finish_in_peace(monkeypatch):
    goes_on, threads, complaints = threading.Event(), [], []
    monkeypatch.setattr(threading, "excepthook", complaints.append)

    def work() -> None:
        threads.append(threading.current_thread())
        goes_on.wait(PATIENCE)

    async def test() -> None:
        waiter = asyncio.create_task(in_thread(work))
        await settled(lambda: threads)
        waiter.cancel()
        await asyncio.wait([waiter])
        assert waiter.cancelled()

    asyncio.run(test())
    goes_on.set()
    threads[0].join(PATIENCE)
    assert complaints == []


# ---- Telegram ----

GROUP = {"id": -100, "type": "supergroup", "title": "Friends"}


class Desk:
    """A bot in a test: the server, the bus, a clock that does not wait, and the journal."""

    def __init__(self, server: FakeTelegram, folder: Path, allow_from=(7,), **options):
        self.server, self.naps, self.journal = server, [], []
        self.bus, self.sent = MessageBus(), []
        settings = {"api_base": server.base_url, "media_folder": folder / "w" / "media", "sleep": self.sleep}
        self.bot = Telegram(options.pop("token", server.token), allow_from, **{**settings, **options})

    async def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        if seconds == 4.0:
            await asyncio.Event().wait()  # one signal is enough here
        await asyncio.sleep(0)

    async def __aenter__(self):
        self.listening = asyncio.create_task(self.bot.start(self.bus))
        return self

    async def __aexit__(self, *exception):
        self.listening.cancel()
        await self.bot.stop()
        await asyncio.wait([self.listening], timeout=PATIENCE)
        assert self.listening.cancelled()

    async def next(self) -> InboundMessage:
        """The next message, not yet in the journal."""
        return await asyncio.wait_for(self.bus.next(), PATIENCE)

    async def take(self) -> InboundMessage:
        message = await self.next()
        message.confirm()
        return message

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


def test_over_kills_at_any_moment_nothing_is_lost_and_nothing_doubled(tmp_path):
    """The journal knows a message by its id, as the agent's does; all else is forgotten with each kill."""

    async def test(server):
        journal, random = {}, Random(5)
        for number in range(30):
            server.say(f"message {number}", sender=random.choice([7, 8, 9]))

        async def agent(bus: MessageBus) -> None:
            while True:
                message = await bus.next()
                known = journal.setdefault((message.chat_id, message.message_id), message.content)
                assert known == message.content
                problem = random.choice([None, None, None, OSError("it is written, but nobody knows")])
                message.confirm(problem)

        while server.updates:
            async with Desk(server, tmp_path, allow_from="*") as desk:
                working = asyncio.create_task(agent(desk.bus))
                last = len(server.requests) + random.randint(1, 40)
                await desk.until(lambda last=last: len(server.requests) >= last or not server.updates)
            working.cancel()
        texts = list(journal.values())
        assert sorted(texts) == sorted(f"message {number}" for number in range(30))

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


@pytest.mark.parametrize("allow_from", [("7",), (7,), ("*",), ["1", "7"]])
def test_allowed_people_are_heard(tmp_path, allow_from):
    async def test(server):
        async with Desk(server, tmp_path, allow_from) as desk:
            server.say("hi")
            assert (await desk.take()).content == "hi"

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
            assert message.chat_id == "-100"

    in_telegram(test)


def test_a_group_may_be_open_but_only_to_allowed_people(tmp_path):
    async def test(server):
        async with Desk(server, tmp_path, group_policy="open") as desk:
            server.say("from a stranger", sender=8, chat=GROUP)
            server.say("from Ann", chat=GROUP)
            assert (await desk.take()).content == "from Ann"

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
        def photo(number: int, **parts) -> None:
            sizes = [
                server.file(f"photos/{number}s.jpg", b"s"),
                server.file(f"photos/{number}.jpg", b"large"),
            ]
            server.say(media_group_id="A1", photo=sizes, **parts)

        async def sleep(seconds: float) -> None:
            if seconds == 1.0 and len(server.updates) < 4:
                photo(2)
                photo(3)
            await desk.sleep(seconds)

        desk = Desk(server, tmp_path)
        desk.bot.sleep = sleep
        photo(1, caption="Where is this?")
        server.say("something else", sender=8)
        async with desk:
            message = await desk.take()
            assert (message.content, len(message.media)) == ("Where is this?", 3)
            assert (message.sender_id, message.chat_id, message.message_id) == ("7", "7", "2")
            assert [path.read_bytes() for path in message.media] == [b"large"] * 3
            await desk.until(lambda: not server.updates)
            server.say("next")
            assert (await desk.take()).content == "next"
        assert [nap for nap in desk.naps if nap != 4.0] == [1.0, 1.0]
        assert [poll["timeout"] for poll in server.calls("getUpdates")][:4] == [50, 0, 0, 50]

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
        assert names[4:] == ["é" * 96 + ".txt", "y" * 99], "cut, and hidden from nobody"
        assert {path.parent for message in messages for path in message.media} == {tmp_path / "w" / "media"}
        contents = [message.media[0].read_bytes() for message in messages]
        assert contents == [b"one", b"two", b"three", b"four", b"", b"six"]
        assert [message.content for message in messages] == ["two", "", "", "", "", ""]

    in_telegram(test)


def test_whatever_a_message_holds_its_words_and_its_file_are_taken(tmp_path):
    async def test(server):
        async with Desk(server, tmp_path) as desk:
            for number, kind in enumerate(("document", "voice", "audio", "video", "video_note")):
                server.say(**{kind: server.file(f"files/{kind} {number}", b"x")})
                server.files[f"quoted {number}"] = (f"files/{kind}%20{number}", kind.encode())
            server.say(sticker={"file_id": "S", "emoji": "🙂"})
            server.say(photo=[], caption="no photo")
            server.say(sticker={"file_id": "S"})  # no word and no file
            server.say("the end")
            messages = [await desk.take() for _ in range(8)]
        assert [message.content for message in messages] == [""] * 5 + ["🙂", "no photo", "the end"]
        contents = [[path.read_text() for path in message.media] for message in messages]
        assert contents == [["document"], ["voice"], ["audio"], ["video"], ["video_note"], [], [], []]

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


def test_a_flood_wait_is_kept_to_the_second(tmp_path, caplog):
    async def test(server):
        wait = Refusal(429, "Too Many Requests: retry after 17", {"retry_after": 17})
        server.refuse("getUpdates", wait)
        server.refuse("sendMessage", wait, wait)
        async with Desk(server, tmp_path) as desk:
            await desk.bot.send(OutboundMessage("telegram", "7", "hello"))
            server.say("hi")
            await desk.take()
        assert [nap for nap in desk.naps if nap > 4] == [17, 17, 17]
        assert server.texts() == ["hello"] * 3
        assert caplog.text.count("Telegram lets sendMessage wait 17 s (429).") == 2

    in_telegram(test)


@pytest.mark.parametrize(("parameters", "tries"), [({"retry_after": 7}, 5), ({}, 1)])
def test_a_flood_that_does_not_end_is_an_error(tmp_path, parameters, tries):
    async def test(server):
        server.refuse("sendMessage", *[Refusal(429, "Too Many Requests", parameters)] * 6)
        desk = Desk(server, tmp_path)
        with pytest.raises(TelegramError, match="^sendMessage: 429 Too Many Requests$") as failure:
            await desk.bot.send(OutboundMessage("telegram", "7", "hello"))
        assert failure.value.status == 429
        assert (desk.naps, len(server.texts())) == ([7] * (tries if parameters else 0), tries)

    in_telegram(test)


@pytest.mark.parametrize("page", [b"<html>bad gateway</html>", b"7", b'["no"]', b"", b"\xff"])
def test_what_is_no_answer_of_telegrams_is_an_error_with_its_status(tmp_path, page):
    async def test(server):
        server.refuse("sendMessage", Refusal(502, body=page or b" "), Refusal(0))
        bot = Desk(server, tmp_path).bot
        for text, status in (("^sendMessage: 502 not the Bot API$", 502), ("RemoteDisconnected", 0)):
            with pytest.raises(TelegramError, match=text) as failure:
                await bot.send(OutboundMessage("telegram", "7", "hello"))
            assert failure.value.status == status

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


@pytest.mark.parametrize(("status", "ends"), [(401, True), (404, True), (403, False), (500, False)])
def test_only_a_token_that_telegram_does_not_know_ends_the_channel(tmp_path, status, ends):
    async def test(server):
        server.refuse("getMe", Refusal(status, "no"))
        async with contextlib.AsyncExitStack() as stack:
            if ends:
                desk = Desk(server, tmp_path)
                with pytest.raises(NoSuchBot):
                    await asyncio.wait_for(desk.bot.start(desk.bus), PATIENCE)
            else:
                await stack.enter_async_context(Desk(server, tmp_path))
                await asyncio.to_thread(server.wait_until, lambda: server.calls("getUpdates"))
        assert len(server.calls("getMe")) == (1 if ends else 2)

    in_telegram(test)


def test_a_token_and_an_address_may_have_a_blank_or_a_slash_too_many(tmp_path):
    async def test(server):
        desk = Desk(server, tmp_path, token=f" {server.token}\n", api_base=f"{server.base_url}/")
        assert desk.bot.api.base == server.base_url
        await desk.bot.send(OutboundMessage("telegram", "7", "hello", reply_to="no number"))
        assert server.calls("sendMessage") == [{"chat_id": "7", "text": "hello", "parse_mode": "HTML"}]

    in_telegram(test)
    bot = Telegram("110201543:AAH")
    assert (bot.api.base, bot.media_folder) == ("https://api.telegram.org", Path("media"))
    assert (bot.name, bot.group_policy, bot.allow_from) == ("telegram", "mention", [])


def test_typing_is_shown_for_five_minutes_at_most_and_its_trouble_is_no_trouble(tmp_path, caplog):
    naps = []

    async def sleep(seconds: float) -> None:
        naps.append(seconds)

    async def test(server):
        async with Desk(server, tmp_path, sleep=sleep) as desk:
            for before, signals in ((0, 75), (75, 76)):
                server.say("hi")
                await desk.take()
                await desk.until(lambda before=before: len(server.calls("sendChatAction")) > before)
                await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task(), desk.listening})
                assert len(server.calls("sendChatAction")) == signals
                server.refuse("sendChatAction", Refusal(400, "chat not found"))
        assert naps == [4.0] * 75

    in_telegram(test)
    assert caplog.records == []


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


def test_network_trouble_is_told_once_and_waited_out(tmp_path, caplog):
    async def test(server):
        page = Refusal(502, body=b"<html>bad gateway</html>")
        server.refuse("getUpdates", page, page, Refusal(0), Refusal(500, "Internal Server Error"))
        async with Desk(server, tmp_path) as desk:
            server.say("hi")
            assert (await desk.take()).content == "hi"
            await desk.until(lambda: not server.updates)
        waits = [nap for nap in desk.naps if nap != 4.0]
        assert len(waits) == 4
        assert 5 <= waits[0] < waits[3] <= 24
        assert caplog.text.count("502") == 1

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


def test_plain_text_only_where_the_html_is_at_fault(tmp_path):
    async def test(server):
        desk = Desk(server, tmp_path)
        server.refuse("sendMessage", Refusal(400, "Bad Request: can't parse entities: Unexpected end tag"))
        await desk.bot.send(OutboundMessage("telegram", "7", "**a** < b"))
        assert server.texts() == ["<b>a</b> &lt; b", "a < b"]
        assert "parse_mode" not in server.calls("sendMessage")[1]
        for refusal in (Refusal(400, "Bad Request: chat not found"), Refusal(0), Refusal(0, after=True)):
            server.requests.clear()
            server.refuse("sendMessage", refusal)
            with pytest.raises(TelegramError):
                await desk.bot.send(OutboundMessage("telegram", "7", "**a**"))
            assert len(server.texts()) == 1

    in_telegram(test)


def test_a_second_try_goes_on_where_the_first_broke_off(tmp_path):
    async def test(server):
        desk = Desk(server, tmp_path)
        message = OutboundMessage("telegram", "7", "a" * 4_000 + "\n" + "b" * 4_000 + "\n" + "c" * 4_000)
        server.refuse("sendMessage", Refusal(500, "x"))
        with pytest.raises(TelegramError):
            await desk.bot.send(message)
        server.requests.clear()
        await desk.bot.send(replace(message, content="first\n" + "x" * 5_000))
        server.requests.clear()
        server.refuse("sendDocument", Refusal(500, "x"))
        file = tmp_path / "a.txt"
        file.write_text("hello")
        message = replace(message, media=[file])
        for _ in range(2):
            with contextlib.suppress(TelegramError):
                await desk.bot.send(message)
        assert [text[0] for text in server.texts()] == ["a", "b", "c"]
        assert len(server.calls("sendDocument")) == 2

    in_telegram(test)


def test_only_what_is_worth_a_message_is_sent(tmp_path):
    async def test(server):
        desk = Desk(server, tmp_path)
        for kind in ("delta", "retry"):
            await desk.bot.send(OutboundMessage("telegram", "7", "x", kind=kind))
        for blank in ("", " \n ", "**", "``` ```"):
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
        with pytest.raises(FileNotFoundError):
            await desk.bot.send(OutboundMessage("telegram", "7", "", media=[tmp_path / "gone"]))

    in_telegram(test)


def test_photos_are_told_from_other_files_by_their_names(tmp_path):
    names = dict.fromkeys(["a.jpg", "b.JPEG", "c.png", "d.webp"], "photo")
    names |= dict.fromkeys(["e.gif", "f.svg", "jpg", 'a b"c.txt'], "document")

    async def test(server):
        for name in names:
            (tmp_path / name).write_text(name)
        media = [tmp_path / name for name in names]
        await Desk(server, tmp_path).bot.send(OutboundMessage("telegram", "7", "all", media=media))
        sent = [(request.method, request.files) for request in server.requests[1:]]
        assert sent == [
            (f"send{kind.title()}", {kind: (name.replace(" ", "_").replace('"', "_"), name.encode())})
            for name, kind in names.items()
        ]

    in_telegram(test)


@pytest.mark.parametrize(
    "base", ["http://127.0.0.1:1", "http://127.0.0.1:1/ x", "gopher://x", "nonsense", "{}"]
)
def test_the_token_is_in_no_log_and_no_error(tmp_path, caplog, base):
    caplog.set_level(logging.DEBUG)

    async def test(server):
        secret = server.token.partition(":")[2]
        server.refuse("getMe", Refusal(500, f"no such bot{server.token}"), Refusal(0))
        server.refuse("sendMessage", Refusal(400, f"bad /bot{server.token}/sendMessage"))
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
            assert str(failure.value) == "sendMessage: 400 bad /bot<token>/sendMessage"

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


def test_a_text_that_telegram_takes_whole_is_one_part():
    assert split_html("a" * 4_096) == ["a" * 4_096]
    assert split_html("a" * 4_097) == ["a" * 4_096, "a"]


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


def test_months_and_days_have_names():
    names = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
    for number, name in enumerate(names, 1):
        assert next_run(f"0 0 1 {name} *", local("2026-01-01T00:00"), BERLIN).month == number
    for number, name in enumerate(["mon", "tue", "wed", "thu", "fri", "sat", "sun"], 1):
        assert next_run(f"0 0 * * {name}", local("2026-01-01T00:00"), BERLIN).isoweekday() == number


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

    def __init__(self, folder: Path, now: datetime = START):
        self.now, self.fired, self.fire = now, [], None
        self.path = folder / "w" / "cron" / "jobs.json"
        self.service = CronService(self.path, self.on_fire, now=lambda: self.now, zone=BERLIN)

    async def on_fire(self, job: CronJob) -> None:
        self.fired.append((job.message, self.now.strftime("%d %H:%M:%S")))
        if self.fire:
            await self.fire(job)

    def add(self, message: str, **schedule) -> str:
        """The new job's id."""
        return self.service.cron("add", message, turn=CHAT, **schedule).split()[2].rstrip(",")

    def rows(self) -> list:
        return json.loads(self.path.read_text())["jobs"]

    def pass_time(self, seconds: float, step: float = 1) -> list:
        """What was fired meanwhile, as (message, time)."""

        async def run() -> None:
            for _ in range(round(seconds / step)):
                self.now = (self.now.astimezone(UTC) + timedelta(seconds=step)).astimezone(BERLIN)
                await asyncio.gather(*await self.service.tick())

        self.fired.clear()
        asyncio.run(run())
        return self.fired


def test_every_cron_and_at_each_in_its_time(tmp_path):
    office = Office(tmp_path)
    office.add("drink", every_seconds=600)
    office.add("lunch", cron_expr="30 12 * * *")
    office.add("stretch", at="2026-11-21T12:25")
    assert office.pass_time(1_800, step=60) == [
        ("drink", "21 12:10:00"), ("drink", "21 12:20:00"), ("stretch", "21 12:25:00"),
        ("drink", "21 12:30:00"), ("lunch", "21 12:30:00"),
    ]  # fmt: skip
    assert [row["message"] for row in office.rows()] == ["drink", "lunch"]
    assert office.pass_time(86_400 - 600, step=600)[-1] == ("drink", "22 12:20:00")
    assert office.pass_time(600, step=600) == [("drink", "22 12:30:00"), ("lunch", "22 12:30:00")]


def test_each_job_remembers_its_chat_and_names_its_run(tmp_path):
    office, names = Office(tmp_path), []

    async def fire(job: CronJob) -> None:
        names.append((job.channel, job.chat_id, job.id, job.since))

    office.fire = fire
    id = office.add("drink", every_seconds=60)
    office.pass_time(120, step=60)
    assert [name[:3] for name in names] == [("telegram", "42", id)] * 2
    assert names[0] != names[1]


def test_a_repeated_job_keeps_its_phase_over_a_restart_and_a_long_run(tmp_path):
    office = Office(tmp_path)
    office.add("drink", every_seconds=3_600)
    office = Office(tmp_path, local("2026-11-21T15:20"))
    assert office.pass_time(3_600, step=60) == [("drink", "21 16:00:00")]

    async def slow(job: CronJob) -> None:
        office.now += timedelta(minutes=90)

    office.fire = slow
    assert office.pass_time(3_000, step=60)[:1] == [("drink", "21 17:00:00")]
    office.fire = None
    assert office.pass_time(3_600, step=60)[0][1].endswith(":00:00")


@pytest.mark.parametrize(
    ("job", "due", "expected"),
    [
        (CronJob("a", every_seconds=60), "12:00:01", "wait"),
        (CronJob("a", every_seconds=60), None, "wait"),
        (CronJob("a", every_seconds=60, enabled=False), "12:00", "wait"),
        (CronJob("a", every_seconds=60), "12:00", "fire"),
        (CronJob("a", every_seconds=60), "11:59", "fire"),
        (CronJob("a", every_seconds=60), "11:58:59", "skip"),
        (CronJob("a", cron_expr="* * * * *"), "11:58:59", "skip"),
        (CronJob("a", every_seconds=60, system=True), "06:00", "fire"),
        (CronJob("a", at="x"), "06:00", "fire"),
    ],
)
def test_what_a_look_at_the_clock_means(job, due, expected):
    assert verdict(job, local(f"2026-11-21T{due}") if due else None, START) == expected


@pytest.mark.parametrize(
    ("due", "expected"),
    [("2026-11-20T12:00", "fire"), ("2026-11-20T11:59:59", "missed"), ("2026-11-21T12:00", "fire")],
)
def test_a_reminder_is_of_use_for_a_day(due, expected):
    assert verdict(CronJob("a", at=due), local(due), START) == expected


def test_a_job_stands_in_the_file_with_all_that_is_known_of_it(tmp_path):
    office = Office(tmp_path)
    id = office.add("drink \ud800 Grüße", every_seconds=600)
    [row] = office.rows()
    assert row == {
        "id": id, "message": "drink ? Grüße", "every_seconds": 600, "cron_expr": "", "tz": "", "at": "",
        "channel": "telegram", "chat_id": "42", "created": "2026-11-21T12:00:00+01:00",
        "since": "2026-11-21T12:00:00+01:00", "enabled": True, "system": False, "runs": [],
    }  # fmt: skip
    assert "Grüße" in office.path.read_text(encoding="utf-8"), "a person reads it, too"
    assert sorted(path.name for path in office.path.parent.iterdir()) == ["jobs.json", "jobs.lock"]

    async def slow(job: CronJob) -> None:
        office.now += timedelta(seconds=2.34)

    office.fire = slow
    office.pass_time(600, step=600)
    [done] = office.rows()
    began = "2026-11-21T12:10:00+01:00"
    assert done == {**row, "since": began, "runs": [{"began": began, "seconds": 2.3, "error": ""}]}


def test_a_list_tells_of_the_last_run_only_and_cuts_what_is_long(tmp_path):
    office, failures = Office(tmp_path), [LookupError("no model " * 30), None, LookupError("again")]
    id = office.add("drink " * 20, cron_expr="*/10 * * * *", tz="Asia/Tokyo")

    async def fire(job: CronJob) -> None:
        if failure := failures.pop(0):
            raise failure

    office.fire, tails = fire, []
    for _ in range(3):
        office.pass_time(600, step=600)
        line = office.service.cron("list", turn=CHAT)
        schedule, _, tail = line.partition(" · telegram:42 · ")
        tails.append(tail)
    assert schedule == f"{id} · cron */10 * * * * Asia/Tokyo · next Sat 2026-11-21 20:40 JST"
    message = ("drink " * 20)[:80]
    error = f"LookupError: {'no model ' * 30}"[:200]
    assert tails == [f"{message} · failed: {error}", message, f"{message} · failed: LookupError: again"]


def test_a_missed_at_comes_once_and_one_of_long_ago_is_only_told(tmp_path):
    office = Office(tmp_path)
    office.add("call Ann", at="2026-11-21T13:00")
    office.add("old", at="2026-11-21T12:30")
    office = Office(tmp_path, local("2026-11-22T12:45"))
    told = "Only tell the user that this was missed on Sat 2026-11-21 12:30 CET: old"
    assert office.pass_time(5) == [("call Ann", "22 12:45:01"), (told, "22 12:45:01")]
    assert Office(tmp_path, office.now).pass_time(5) == []
    assert office.rows() == []


def test_a_job_that_fails_keeps_its_times_and_the_clock_goes_on(tmp_path):
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
    assert rows["good"]["runs"][-1]["error"] == ""
    assert rows["once"]["enabled"] is False
    listing = office.service.cron("list", turn=CHAT)
    assert (
        f"{once} · at 2026-11-21T12:01:00+01:00 · off · telegram:42 · once · failed: ConnectionError"
        in listing
    )


def test_a_job_that_hangs_or_is_stopped_holds_up_no_other(tmp_path):
    office = Office(tmp_path)

    async def test() -> None:
        gate = asyncio.Event()

        async def fire(job: CronJob) -> None:
            if job.message == "slow":
                await gate.wait()
            if job.message == "stopped":
                raise asyncio.CancelledError

        office.fire = fire
        for name in ("slow", "quick", "stopped"):
            office.add(name, every_seconds=60)
        for minute in range(1, 4):
            office.now = START + timedelta(minutes=minute)
            tasks = await office.service.tick()
            await asyncio.wait(tasks[-2:], timeout=PATIENCE)
        assert [message for message, _ in office.fired].count("slow") == 1
        assert [message for message, _ in office.fired].count("quick") == 3
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
            other.service.cron("remove", job_id=removed, turn=CHAT)
            other.now = office.now
            other.add("new", every_seconds=60)
            rows = other.rows()
            next(row for row in rows if row["id"] == off)["enabled"] = False
            other.path.write_text(json.dumps({"jobs": rows}))

    office.fire = meanwhile
    office.pass_time(60, step=60)
    office.fire = None
    assert sorted(row["message"] for row in office.rows()) == ["kept", "new", "off"]
    assert sorted(message for message, _ in office.pass_time(60, step=60)) == ["kept", "new"]


def test_a_job_may_be_added_while_one_runs(tmp_path):
    office = Office(tmp_path)

    async def fire(job: CronJob) -> None:
        if job.message == "first":
            await asyncio.to_thread(office.add, "second", at="2026-11-21T12:02")

    office.fire = fire
    office.add("first", at="2026-11-21T12:01")
    assert [message for message, _ in office.pass_time(120, step=60)] == ["first", "second"]


def test_a_failure_is_in_the_log_with_its_traceback(tmp_path, caplog):
    office = Office(tmp_path)
    id = office.add("drink", every_seconds=60)

    async def fail(job: CronJob) -> None:
        raise LookupError("no model")

    office.fire = fail
    office.pass_time(60, step=60)
    [record] = caplog.records
    assert (record.levelname, record.getMessage()) == ("WARNING", f"cron: job {id} failed")
    assert record.exc_info[0] is LookupError


def test_a_system_job_goes_on_with_its_runs_at_the_pace_of_the_newest_start(tmp_path):
    beats = []

    async def beat() -> None:
        beats.append(1)

    def started(now: datetime, seconds: float) -> Office:
        office = Office(tmp_path, now)
        office.service.add_system("heartbeat", seconds, beat)
        return office

    office = started(START, 1_800)
    office.add("drink", at="2026-11-21T23:00")
    office.pass_time(1_800, step=600)
    rows = office.rows()
    heartbeat = next(row for row in rows if row["id"] == "heartbeat")
    heartbeat["enabled"] = False  # by hand; the settings decide
    office.path.write_text(json.dumps({"jobs": rows}))
    office = started(office.now, 600)
    heartbeat = next(row for row in office.rows() if row["id"] == "heartbeat")
    assert (heartbeat["every_seconds"], heartbeat["enabled"], heartbeat["system"]) == (600, True, True)
    assert len(heartbeat["runs"]) == 1
    office.pass_time(600, step=600)
    assert len(beats) == 2
    assert [row["id"] == "heartbeat" for row in office.rows()] == [False, True]


def test_system_jobs_are_listed_and_protected(tmp_path):
    beats = []

    def started(now: datetime) -> Office:
        office = Office(tmp_path, now)

        async def beat() -> None:
            beats.append(office.now.strftime("%H:%M"))

        office.service.add_system("heartbeat", 1_800, beat)
        return office

    office = started(START)
    office.pass_time(3_600, step=600)
    assert beats == ["12:30", "13:00"]
    assert "heartbeat · every 1800 s · next Sat 2026-11-21 13:30 CET · system · " in office.service.cron(
        "list", turn=CHAT
    )
    with pytest.raises(CronError, match="heartbeat is a job of the system: it cannot be removed"):
        office.service.cron("remove", job_id="heartbeat", turn=CHAT)
    office = started(local("2026-11-21T15:10"))  # it missed some: one at once, then in its rhythm
    office.pass_time(1_800, step=600)
    assert beats[2:] == ["15:20", "15:30"]
    assert len(office.rows()) == 1
    assert Office(tmp_path, office.now).pass_time(7_200, step=600) == []  # nobody here knows what it does


def test_a_disk_that_refuses_makes_nothing_run_twice(tmp_path, caplog):
    office = Office(tmp_path)
    office.add("drink", every_seconds=60)
    once = office.add("once", at="2026-11-21T12:01")
    assert len(office.pass_time(1)) == 0
    temporary = office.path.with_suffix(".tmp")
    temporary.mkdir()  # no file can be written there
    assert office.pass_time(120) == [
        ("drink", "21 12:01:00"),
        ("once", "21 12:01:00"),
        ("drink", "21 12:02:00"),
    ]
    assert f"cron: the run of {once} cannot be noted: " in caplog.text
    assert "Is a directory" in caplog.text
    assert {record.levelname for record in caplog.records} == {"ERROR"}
    temporary.rmdir()
    assert office.pass_time(60) == [("drink", "21 12:03:00")]
    assert office.pass_time(60) == [("drink", "21 12:04:00")]


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"jobs": {}}', b"\x00" * 50, b"\xff\xfe{", b"null"])
def test_a_damaged_file_is_set_aside_and_never_taken_for_no_jobs(tmp_path, caplog, damage):
    office = Office(tmp_path)
    office.add("drink", every_seconds=60)
    office.path.write_bytes(damage)
    office = Office(tmp_path)
    with pytest.raises(CronError, match="jobs.json cannot be read"):
        office.service.cron("list", turn=CHAT)
    assert office.pass_time(60, step=60) == []
    assert office.path.read_bytes() == damage
    office.add("new", every_seconds=60)
    [aside] = office.path.parent.glob("jobs.json.corrupt-*")
    assert aside.read_bytes() == damage
    assert f"it is now {aside}. Mend it." in caplog.text
    assert ("it holds no list of jobs" in caplog.text) == (damage in (b"[]", b'{"jobs": {}}', b"null"))
    assert f"{aside} was damaged" in office.service.cron("list", turn=CHAT)
    assert [row["message"] for row in office.rows()] == ["new"]


def test_a_file_that_is_damaged_meanwhile_is_made_new_from_what_is_known(tmp_path, caplog):
    office = Office(tmp_path)
    office.add("drink", every_seconds=60)
    assert len(office.pass_time(60, step=60)) == 1
    office.path.write_bytes(office.path.read_bytes()[:40])  # somebody is just writing it
    assert len(office.pass_time(60, step=60)) == 1
    assert [row["message"] for row in office.rows()] == ["drink"]
    told = caplog.records[0].getMessage()
    assert told.startswith(f"{office.path}: ") and told.endswith(". The jobs known before go on.")


def test_what_means_nothing_in_the_file_is_told_once(tmp_path, caplog):
    office = Office(tmp_path)
    strange = [{"id": "s1", "every_seconds": -1}, {"id": "s2", "cron_expr": "x"}, "s3" * 100]
    strange += [{"id": "s4", "cron_expr": "1 1 * * *", "tz": "Mars/Olympus"}, {"id": "s5"}]
    JobStore(office.path).change(lambda rows: strange)
    office.pass_time(3)
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert told == [
        ("WARNING", "cron: {'id': 's1', 'every_seconds': -1} is no job: it does not say when"),
        ("WARNING", "cron: {'id': 's2', 'cron_expr': 'x'} is no job: 'x' has 1 fields instead of five: "
         "minute, hour, day of month, month, day of week"),
        ("WARNING", f"cron: {'s3' * 50} is no job: 'str' object has no attribute 'get'"),
        ("WARNING", "cron: {'id': 's4', 'cron_expr': '1 1 * * *', 'tz': 'Mars/Olympus'} is no job: "
         "there is no time zone 'Mars/Olympus'; write it like Europe/Berlin"),
        ("WARNING", "cron: {'id': 's5'} is no job: it does not say when"),
    ]  # fmt: skip


def test_what_means_nothing_in_the_file_is_kept(tmp_path):
    office = Office(tmp_path)
    office.path.parent.mkdir(parents=True)
    by_hand = {"id": "hand", "message": "by hand", "cron_expr": "1 12 * * *", "tz": None, "colour": "red"}
    strange = ["text", 7, None, {}, {"id": "x"}, {"id": "y", "every_seconds": -1}]
    strange += [{"id": "z", "cron_expr": "x"}, {"id": "n", "every_seconds": "often"}]
    strange += [{"id": "t", "cron_expr": "1 1 * * *", "tz": "Mars/Olympus"}]
    office.path.write_text(json.dumps({"jobs": [*strange, by_hand]}))
    assert office.pass_time(120, step=60) == [("by hand", "21 12:01:00")]
    rows = office.rows()
    assert rows[:-1] == strange
    assert rows[-1].pop("runs")
    assert rows[-1].pop("since")
    assert rows[-1] == {**by_hand, "enabled": True}
    listed = office.service.cron("list", turn=CHAT)
    assert listed == "hand · cron 1 12 * * * · next Sun 2026-11-22 12:01 CET · : · by hand"


KILLED = """
import os, sys
from datetime import datetime, timezone
from pathlib import Path
from channels import CronJob, JobStore
from dataclasses import asdict
step, kept = int(sys.argv[2]), []

def audit(event, arguments):
    path = str(arguments[0]) if arguments else ""
    if (event in ("open", "os.rename") and "jobs" in path) or event == "fcntl.flock":
        kept.append(event)
        if len(kept) > step:
            os._exit(9)

sys.addaudithook(audit)
JobStore(Path(sys.argv[1])).change(lambda rows: [*rows, {"id": "new", "message": "x" * 100_000}])
"""


def test_a_kill_between_any_two_steps_of_writing_leaves_all_or_nothing(tmp_path):
    ends = set()
    for step in itertools.count():
        path = tmp_path / str(step) / "jobs.json"
        path.parent.mkdir()
        path.write_text('{"jobs": [{"id": "old"}]}')
        done = subprocess.run([sys.executable, "-c", KILLED, path, str(step)], cwd=ROOT)
        ids = [row["id"] for row in JobStore(path).read()]
        assert ids in (["old"], ["old", "new"])
        ends.add(tuple(ids))
        JobStore(path).change(lambda rows: [*rows, {"id": "next"}])  # no lock and no rest is in the way
        assert [row["id"] for row in JobStore(path).read()] == [*ids, "next"]
        if done.returncode == 0:
            break
    assert step >= 3
    assert len(ends) == 2


def test_a_write_that_stopped_at_any_byte_does_no_harm(tmp_path):
    office = Office(tmp_path)
    office.add("drink", every_seconds=60)
    whole = office.path.read_bytes()
    for size in range(0, len(whole), 7):
        office.path.with_suffix(".tmp").write_bytes(whole[:size])
        assert [row["message"] for row in JobStore(office.path).read()] == ["drink"]
    office.add("second", every_seconds=60)
    assert len(office.rows()) == 2


def test_the_new_file_is_on_the_disk_before_it_takes_the_place_of_the_old_one(tmp_path, monkeypatch):
    office, synced = Office(tmp_path), []
    office.add("drink", every_seconds=60)

    def fsync(number: int) -> None:
        synced.append((os.fstat(number).st_size, len(office.rows())))

    monkeypatch.setattr(os, "fsync", fsync)
    office.add("second", every_seconds=60)
    assert synced == [(office.path.stat().st_size, 1)]
    assert len(office.rows()) == 2


ADDING = """
import sys
from pathlib import Path
from channels import JobStore
for number in range(20):
    JobStore(Path(sys.argv[1])).change(lambda rows: [*rows, {"id": f"{sys.argv[2]}{number}"}])
"""


def test_two_programs_that_add_at_the_same_time_lose_nothing(tmp_path):
    path = tmp_path / "jobs.json"

    def add() -> None:
        JobStore(path).change(lambda rows: [*rows, {"id": "t"}])

    processes = [subprocess.Popen([sys.executable, "-c", ADDING, path, name], cwd=ROOT) for name in "ab"]
    threads = [threading.Thread(target=add) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [process.wait(PATIENCE) for process in processes] == [0, 0]
    assert len(JobStore(path).read()) == 60


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
        ({"message": "x", "at": "2026-11-21T11:59"}, "never comes. It is now Sat 2026-11-21 12:00 CET"),
        ({"message": "x", "at": "2026-11-21T12:00"}, "never comes. It is now Sat 2026-11-21 12:00 CET"),
        ({"message": "x", "at": "tomorrow"}, "No job was made of 'at tomorrow'"),
    ],
)
def test_a_wish_that_cannot_be_met_says_why(tmp_path, arguments, complaint):
    office = Office(tmp_path)
    with pytest.raises(CronError, match=complaint):
        office.service.cron("add", turn=CHAT, **arguments)
    assert not office.path.exists()


@pytest.mark.parametrize(
    ("schedule", "answer"),
    [
        ({"at": "2026-11-21T17:00"}, "Sat 2026-11-21 17:00 CET"),
        ({"at": "2026-11-21T17:00:00Z"}, "Sat 2026-11-21 18:00 CET"),
        ({"at": "2027-07-01T17:00"}, "Thu 2027-07-01 17:00 CEST"),
        ({"cron_expr": "0 9 * * *", "tz": "America/New_York"}, "Sat 2026-11-21 09:00 EST"),
        ({"cron_expr": " 0 9 * * * "}, "Sun 2026-11-22 09:00 CET"),
        ({"every_seconds": 90}, "Sat 2026-11-21 12:01 CET"),
    ],
)
def test_the_model_is_told_when_a_job_comes(tmp_path, schedule, answer):
    office = Office(tmp_path)
    added = office.service.cron("add", "stretch", turn=CHAT, **schedule)
    job = CronJob(**office.rows()[0])
    assert added == f"Added job {job.id}, {job.schedule()}: it runs next on {answer}."
    assert re.fullmatch("[0-9a-f]{8}", job.id)


@pytest.mark.parametrize(
    ("schedule", "shown"),
    [
        ({"every_seconds": 1}, "every 1 s"),
        ({"at": "2026-11-21T17:00"}, "at 2026-11-21T17:00:00+01:00"),
        ({"cron_expr": "0 9 * * *"}, "cron 0 9 * * *"),
        ({"cron_expr": "0 9 * * *", "tz": "America/New_York"}, "cron 0 9 * * * America/New_York"),
    ],
)
def test_a_schedule_is_shown_as_it_was_given(tmp_path, schedule, shown):
    office = Office(tmp_path)
    office.add("stretch", **schedule)
    assert f" · {shown} · next " in office.service.cron("list", turn=CHAT)


def test_the_tool_lists_and_removes_and_makes_no_job_in_a_job(tmp_path):
    office = Office(tmp_path)
    assert office.service.cron("list", turn=CHAT) == "There are no jobs."
    id = office.add("water the plants", cron_expr="0 9 * * *")
    assert office.service.cron("list", turn=CHAT) == (
        f"{id} · cron 0 9 * * * · next Sun 2026-11-22 09:00 CET · telegram:42 · water the plants"
    )
    with pytest.raises(CronError, match=f"no job 'x'. There are: {id}"):
        office.service.cron("remove", job_id="x", turn=CHAT)
    in_a_job = SimpleNamespace(channel="cron", chat_id=id)
    with pytest.raises(CronError, match="A job that runs adds no others"):
        office.service.cron("add", "more", every_seconds=60, turn=in_a_job)
    other = office.add("drink", every_seconds=60)
    lines = office.service.cron("list", turn=CHAT).splitlines()
    assert [line.partition(" ")[0] for line in lines] == [id, other]
    with pytest.raises(CronError, match=f"no job 'x'. There are: {id}, {other}."):
        office.service.cron("remove", job_id="x", turn=CHAT)
    assert office.service.cron("remove", job_id=other, turn=CHAT) == f"Removed job {other}."
    assert office.service.cron("remove", job_id=id, turn=in_a_job) == f"Removed job {id}."
    assert office.rows() == []
    with pytest.raises(CronError, match=f"no job '{id}'. There are: none."):
        office.service.cron("remove", job_id=id, turn=CHAT)


def test_the_service_runs_until_it_is_cancelled_whatever_happens(tmp_path, caplog):
    office, naps = Office(tmp_path), []
    office.add("drink", every_seconds=60)
    good = office.path.read_text()

    async def test() -> None:
        gate, cancelled = asyncio.Event(), []

        async def fire(job: CronJob) -> None:
            try:
                await gate.wait()
            finally:
                cancelled.append(job.message)

        async def sleep(seconds: float) -> None:
            naps.append(seconds)
            office.now += timedelta(seconds=seconds)
            if len(naps) == 10:
                office.path.unlink()
                office.path.mkdir()  # what cannot be read
            if len(naps) == 12:
                office.path.rmdir()
                office.path.write_text(good)
            if len(naps) == 70:
                await gate.wait()
            await asyncio.sleep(0)

        office.fire, office.service.sleep = fire, sleep
        task = asyncio.create_task(office.service.run())
        while len(naps) < 70:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=PATIENCE)
        assert cancelled == ["drink"]

    asyncio.run(test())
    assert "cron: the jobs cannot be looked at: [Errno 21] Is a directory" in caplog.text
    assert naps == [1] * 70
    assert office.rows()[0]["runs"] == []  # it was cut off: at the next start it runs again


def test_the_end_of_the_service_waits_for_every_job_that_puts_things_in_order(tmp_path):
    office, tidied = Office(tmp_path), []

    async def fire(job: CronJob) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(50 if job.message == "slow" else 1):
                await asyncio.sleep(0)
            tidied.append(job.message)

    async def test() -> None:
        office.fire, office.service.sleep = fire, lambda seconds: asyncio.Event().wait()
        for name in ("slow", "quick"):
            office.add(name, every_seconds=60)
        office.now += timedelta(seconds=60)
        task = asyncio.create_task(office.service.run())
        await settled(lambda: len(office.fired) == 2)
        task.cancel()
        await asyncio.wait([task], timeout=PATIENCE)
        assert task.cancelled()
        assert tidied == ["quick", "slow"]

    asyncio.run(test())


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
        ("\ufeff# Tasks\r\n- [x] done\r\n", ""),
    ],
)
def test_what_is_to_be_done_at_a_heartbeat(tmp_path, text, active):
    path, asked = tmp_path / "HEARTBEAT.md", []
    path.write_text(text, encoding="utf-8", newline="")

    async def ask(tasks: str) -> None:
        asked.append(tasks)

    asyncio.run(Heartbeat(lambda: path.read_text(encoding="utf-8-sig"), ask).beat())
    assert asked == ([active] if active else [])
    assert active_tasks(text.removeprefix("\ufeff")) == active
