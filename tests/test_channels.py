"""How words get in and out: harmless text, the answer once and in its place, the keyboard and Ctrl-C."""

import asyncio
import io
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from channels import CLI, BackgroundLoop, OutboundMessage, PrintableFormatter, printable

pty = pytest.importorskip("pty", reason="pseudo-terminals are POSIX")

ROOT = Path(__file__).parent.parent
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


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


def typed(keys: bytes, history: Path) -> str:
    """What a new program reads when a person types this at its prompt."""
    screen, keyboard = pty.openpty()
    command = [sys.executable, "-c", READ_A_LINE, str(history)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=keyboard, stdout=keyboard, stderr=subprocess.PIPE, text=True
    ) as process:
        os.close(keyboard)
        clock = threading.Timer(10, process.kill)
        clock.start()
        shown = b""
        while b"> " not in shown:
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
        command, cwd=ROOT, input="y\nn\nalways\n", capture_output=True, text=True, timeout=10
    )
    assert done.returncode == 0
    assert done.stdout == "['y', 'n', 'always']\nnobody is there to answer\n"
    assert done.stderr == "one? two? three? more? "


INTERRUPTED = """
import asyncio, sys, threading, time
from channels import BackgroundLoop

async def work(tidying):
    print("working", flush=True)
    try:
        await asyncio.sleep(60)
    finally:
        print("tidying", flush=True)
        await asyncio.sleep(tidying)
        print("tidy", flush=True)

with BackgroundLoop() as background:
    if sys.argv[1] == "busy":  # the loop gets to the work only after the signal
        background.loop.call_soon_threadsafe(lambda: (print("working", flush=True), time.sleep(0.5)))
    try:
        background.complete(work(float(sys.argv[2])))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    time.sleep(0.3)  # what is late may come now
    print(background.complete(background.ask("go on? ")), flush=True)
"""


def interrupted(*arguments: str, at: tuple[str, ...]) -> str:
    """What the program above prints when it gets a real SIGINT at each of these lines."""
    command = [sys.executable, "-c", INTERRUPTED, *arguments]
    printed = ""
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        clock = threading.Timer(10, process.kill)
        clock.start()
        for line in at:
            while not printed.endswith(f"{line}\n"):
                printed += process.stdout.readline() or pytest.fail(f"it ended after: {printed}")
            time.sleep(0.05)  # let it wait for what it waits for
            process.send_signal(signal.SIGINT)
        printed += process.communicate("yes\n")[0]
        clock.cancel()
    return printed


def test_ctrl_c_waits_until_the_work_has_put_things_in_order():
    printed = interrupted("idle", "0.1", at=("working",))
    assert printed == "working\ntidying\ntidy\ninterrupted\nyes\n"


def test_a_second_ctrl_c_does_not_wait_and_the_next_turn_can_still_ask():
    printed = interrupted("idle", "0.2", at=("working", "tidying"))
    assert printed == "working\ntidying\ninterrupted\ntidy\nyes\n"


def test_ctrl_c_is_not_lost_when_it_comes_before_the_work_has_begun():
    printed = interrupted("busy", "0", at=("working",))
    assert printed.endswith("interrupted\nyes\n")
    assert "tidying" not in printed


NEVER_DONE = """
import asyncio
from channels import BackgroundLoop
asyncio.run_coroutine_threadsafe(asyncio.sleep(60), BackgroundLoop().loop)
print("bye")
"""


def test_unfinished_work_does_not_hold_the_exit_of_the_program():
    command = [sys.executable, "-c", NEVER_DONE]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=10)
    assert done.stdout == "bye\n"  # TimeoutExpired if it does
