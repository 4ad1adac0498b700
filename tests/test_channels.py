"""How words get in and out: the bus, harmless text, the answer once and in its place, keyboard and Ctrl-C."""

import asyncio
import io
import logging
import os
import queue
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from channels import (
    CLI, HEAD_OF_PIPED, KEPT_PIPED, MOST_PIPED, BackgroundLoop, Channel, Connection, FileChannel,
    InboundMessage, MessageBus, NobodyToAsk, OutboundMessage, PrintableFormatter, Waiting,
    approval_question, printable, text_of_pipe,
)  # fmt: skip

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
    assert len(slow.arrived) == 300 + Connection.most_waiting
    assert slow.texts()[:3] == ["0 ", "a hint", "1 "]
    assert slow.texts()[Connection.most_waiting - 1] == "a hint", "no piece of an answer joins a hint"


def test_pieces_of_an_answer_that_find_no_room_join_those_of_their_chat():
    slow = Talk("slow")

    async def talk() -> None:
        bus = MessageBus()
        bus.open(slow)
        slow.is_open.clear()
        sent = [OutboundMessage("slow", str(n % 2), f"{n} ", "delta") for n in range(500)]
        for message in sent:
            bus.send(message)
        assert sent[Connection.most_waiting - 1].content == f"{Connection.most_waiting - 1} ", "not ours"
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
        ({}, "exec {}\nRun it? [y/n/always] "),
    ],
)
def test_a_call_to_be_approved_is_shown_whole_on_one_line(arguments, question):
    assert approval_question("exec", arguments) == question


def test_the_size_of_a_long_call_stands_where_it_is_seen():
    question = approval_question("write_file", {"content": "x" * 3_000})
    assert question.endswith("\nwrite_file, 3,026 characters. Run it? [y/n/always] ")
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
    history = tmp_path / ".nanobot" / "prompt-history"
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


# ---- The loop behind the keyboard ----


def test_a_coroutine_runs_to_its_result_also_inside_a_running_loop():
    async def answer(number: int) -> int:
        await asyncio.sleep(0)
        return number

    async def outer() -> int:
        with BackgroundLoop() as inner:
            return inner.complete(answer(2))

    with BackgroundLoop() as background:
        assert [background.complete(answer(n)) for n in range(3)] == [0, 1, 2]
    assert asyncio.run(outer()) == 2


def test_an_exception_comes_out_as_it_was_raised_and_the_loop_goes_on():
    async def fail() -> None:
        raise LookupError("no such thing")

    with BackgroundLoop() as background:
        for _ in range(2):
            with pytest.raises(LookupError, match="no such thing"):
                background.complete(fail())
        assert background.complete(asyncio.sleep(0, "fine")) == "fine"


def test_the_thread_of_a_loop_ends_with_its_block():
    before = set(threading.enumerate())
    with BackgroundLoop():
        [thread] = set(threading.enumerate()) - before
        assert thread.daemon, "no thread may hold the exit"
    thread.join(5)
    assert not thread.is_alive()


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
        command, cwd=ROOT, input="y\nn\nalways\n", capture_output=True, text=True, timeout=60
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
    done = subprocess.run(command, cwd=ROOT, env=environ, input=b"y\xff\n", capture_output=True, timeout=60)
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
        clock = threading.Timer(30, process.kill)
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
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.stdout == "bye\n"  # TimeoutExpired if it does


def test_a_question_between_two_turns_is_refused():
    with BackgroundLoop() as background:
        background.complete(asyncio.sleep(0))
        asked = asyncio.run_coroutine_threadsafe(background.ask("more? "), background.loop)
        with pytest.raises(NobodyToAsk):
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

    with BackgroundLoop() as background:
        assert background.complete(turn()) == "two"
        with pytest.raises(KeyboardInterrupt):
            background.complete(never_answered())
        answered, refused = background.complete(outcomes())
    assert (answered, type(refused)) == ("one", NobodyToAsk)
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
            with pytest.raises(NobodyToAsk):
                await background.ask("save it? ")
            refused.append("save it? ")

    with BackgroundLoop() as background, pytest.raises(KeyboardInterrupt):
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
        clock = threading.Timer(30, process.kill)
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

    with BackgroundLoop(close) as background:
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

    with BackgroundLoop(waiting=waiting) as background:
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
        clock = threading.Timer(30, process.kill)
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


def test_what_is_piped_in_is_a_message_up_to_a_size(tmp_path):
    assert text_of_pipe(io.BytesIO(b" caf\xe9 \n"), tmp_path) == "caf\ufffd"
    for text in ("你" * MOST_PIPED, "🙂" * MOST_PIPED, "x" * MOST_PIPED):
        assert text_of_pipe(io.BytesIO(text.encode()), tmp_path / "piped") == text
    assert not (tmp_path / "piped").exists()


@pytest.mark.parametrize("letter", ["x", "🙂"])
def test_more_than_that_goes_into_a_file_and_the_model_gets_its_beginning(tmp_path, letter):
    folder, raw = tmp_path / "w" / "piped", (letter * (MOST_PIPED + 1)).encode() + b"\xff" * 1_000_000
    text = text_of_pipe(io.BytesIO(raw), folder)
    [file] = folder.iterdir()
    assert file.read_bytes() == raw
    assert text.count(letter * HEAD_OF_PIPED) == 1
    assert len(text) < HEAD_OF_PIPED + 1_000
    assert text.count(str(file)) == 2
    assert f"{len(raw):,} bytes" in text


def test_only_so_many_piped_files_are_kept(tmp_path):
    folder = tmp_path / "piped"
    folder.mkdir()
    for number in range(30):
        (folder / f"20200101-0000{number:02}-1.txt").touch()
    text = text_of_pipe(io.BytesIO(b"x" * (MOST_PIPED + 1)), folder)
    kept = sorted(folder.iterdir())
    assert len(kept) == KEPT_PIPED
    assert str(kept[-1]) in text
