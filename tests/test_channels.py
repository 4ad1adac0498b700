"""How words get in and out: the bus, harmless text, the answer once and in its place, keyboard and Ctrl-C,
Telegram over HTTP, jobs in their time."""

import asyncio
import contextlib
import io
import itertools
import json
import logging
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from types import SimpleNamespace
from zoneinfo import ZoneInfo

import pytest

from channels import (
    CLI,
    BackgroundLoop,
    BottomLine,
    Channel,
    CronError,
    CronJob,
    CronService,
    InboundMessage,
    JobStore,
    MessageBus,
    OutboundMessage,
    PrintableFormatter,
    Telegram,
    TelegramError,
    Terminated,
    active_tasks,
    approval_question,
    as_html,
    next_run,
    plain_text,
    printable,
    split_html,
)
from fake_telegram import CONFLICT, PATIENCE, FakeTelegram, Parser, Refusal, units
from memory import locked, write_atomically

ROOT = Path(__file__).parent.parent


# ---- The bus and the outboxes ----


class Talk(Channel):
    """A chat in `trouble` fails with its exceptions first, one a try."""

    def __init__(self, name: str = "talk", **trouble: list[Exception]):
        super().__init__(["*"])
        self.name, self.trouble = name, trouble
        self.arrived: list[OutboundMessage] = []

    async def send(self, message: OutboundMessage) -> None:
        if self.trouble.get(message.chat_id):
            raise self.trouble[message.chat_id].pop(0)
        self.arrived.append(message)

    def texts(self) -> list[str]:
        return [message.content for message in self.arrived]


async def settled(condition) -> None:
    """Gives the other tasks their turn until the condition holds."""
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0)


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


def test_an_event_is_tried_once_and_what_fails_behind_a_delivery_sends_nothing_twice(caplog):
    def broken() -> None:
        raise OSError("No space left on device")

    async def test(bus: MessageBus) -> None:
        bus.send(to("ann", "looking", "progress"))
        bus.send(to("ann", "the answer", on_delivered=broken))
        await settled(lambda: phone.texts() == ["the answer"])

    phone = Talk(ann=[ConnectionError("no network")])
    assert talk(test, phone) == []
    assert "a delivery could not be recorded: No space left" in caplog.text


# ---- What came from a model is made harmless ----


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\tand\nlines Grüße, 你好 🙂", "plain\tand\nlines Grüße, 你好 🙂"),
        ("\x1b[31mred\x1b]0;title\x07", "\\x1b[31mred\\x1b]0;title\\x07"),
        (
            "\u202egpj.exe\u202c \u2066x\u2069 \u200f",
            "\\u202egpj.exe\\u202c \\u2066x\\u2069 \\u200f",
        ),
        (
            "zero\u200bwidth\ufeff tag\U000e0041 \u061c",
            "zero\\u200bwidth\\ufeff tag\\U000e0041 \\u061c",
        ),
        ("می\u200cخواهم 👩\u200d💻 Donau\xaddampf", "می\u200cخواهم 👩\u200d💻 Donau\xaddampf"),
    ],
)
def test_what_would_steer_a_terminal_is_made_visible(text, shown):
    assert printable(text) == shown
    assert printable(shown) == shown


def test_a_log_line_is_made_harmless_with_its_traceback():
    out = io.StringIO()
    logger = logging.getLogger("test_channels")
    handler = logging.StreamHandler(out)
    handler.setFormatter(PrintableFormatter("%(levelname)s %(message)s"))
    logger.addHandler(handler)
    try:
        raise ValueError("\x1b]0;owned\x07")
    except ValueError:
        logger.warning("a job: %s", "\u202egnp.exe\n12:00 INFO forged", exc_info=True)
    assert out.getvalue().startswith(
        "WARNING a job: \\u202egnp.exe\n    12:00 INFO forged\n    Traceback"
    )
    assert out.getvalue().endswith("ValueError: \\x1b]0;owned\\x07\n")


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({"command": "ls\nRun it?\n$ ls"}, "act\n$ ls\n> Run it?\n> $ ls"),
        ({"command": 5, "source": "> 1"}, 'act {"command": 5}\n+> 1'),
        ({"command": "r\u200dm\xad", "n": 1}, 'act {"n": 1}\n$ r\\u200dm\\xad'),
        (
            {"path": "a", "old_text": "1\n2\n3", "new_text": "1\nRun it?\n3"},
            'act {"path": "a"}\n-1\n-2\n-3\n+1\n+Run it?\n+3',
        ),
        ({"path": "a", "content": "1\n\n2\n"}, 'act {"path": "a"}\n+1\n+\n+2'),
        ({"path": "a", "content": "1\n\n"}, 'act {"path": "a"}\n+1\n+'),
        ({"old_text": "}", "new_text": "}\n"}, "act\n-}\n+}\n+"),
    ],
)
def test_a_call_to_be_approved_is_shown_whole_and_cannot_imitate_the_question(arguments, shown):
    always = "[y/N/always] (n REASON; always: git status until you quit) "
    assert approval_question("act", arguments, "git status") == f"{shown}\nRun it? {always}"
    only_once = f"{shown}\nRun it? [y/N] (or n REASON) "
    assert approval_question("act", arguments) == only_once


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
        if not hasattr(os, "openpty"):
            pytest.skip("pseudo-terminals are POSIX")
        self.screen, slave = os.openpty()
        self.stream = open(slave, "w", encoding="utf-8")  # noqa: SIM115 (the test closes it)

    def read(self) -> str:
        """What is on the screen by now."""
        print(end="(so far)", file=self.stream, flush=True)
        raw = b""
        while not raw.endswith(b"(so far)"):  # the system hands it over in pieces
            raw += os.read(self.screen, 65_536)
        shown = raw.decode().removesuffix("(so far)").replace("\r\n", "\n")
        return re.sub(r"\x1b\[[02]m", "", shown)


@pytest.fixture
def terminal():
    made = Terminal()
    yield made
    made.stream.close()
    os.close(made.screen)


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
    screen, keyboard = os.openpty()
    command = [sys.executable, "-c", READ_A_LINE, str(history)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=keyboard, stdout=keyboard, stderr=subprocess.PIPE, encoding="utf-8"
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
    history = tmp_path / "new" / "prompt-history"
    assert typed("Grüße 你\n".encode(), history) == "'Grüße 你'"
    assert typed(b"\n", history) == "''"
    assert typed(b"\x1b[A\n", history) == "'Grüße 你'", "one key up, past no empty line"
    assert history.stat().st_mode & 0o777 == 0o600


def test_pasted_lines_are_one_message(tmp_path, monkeypatch):
    pytest.importorskip("readline", reason="no line editing on this system")
    (tmp_path / "inputrc").write_text(
        "set enable-bracketed-paste off\n"
    )  # as older systems have it
    monkeypatch.setenv("INPUTRC", str(tmp_path / "inputrc"))
    monkeypatch.setenv("TERM", "xterm")
    paste_is_marked = (
        b"\x1b[?2004h"  # what asks a terminal to put \x1b[200~ and \x1b[201~ around it
    )
    pasted = b"\x1b[200~one\ntwo\n\x1b[201~\n"
    assert typed(pasted, tmp_path / "history", paste_is_marked) in (r"'one\ntwo\n'", r"'one\ntwo'")


class Keyboard:
    """Stands for sys.stdin: says when somebody reads, and gives what is typed; an empty text is the end."""

    def __init__(self, *steps: str | BaseException) -> None:
        self.lines, self.is_read = queue.SimpleQueue(), threading.Event()
        for step in steps:
            self.lines.put(step)

    def fileno(self) -> int:
        raise OSError("it is no file")

    def isatty(self) -> bool:
        return False

    def readline(self) -> str:
        self.is_read.set()
        step = self.lines.get(timeout=20)
        if isinstance(step, BaseException):
            raise step
        return step


@pytest.mark.parametrize(
    ("lines", "failures", "asked", "err"),
    [
        (["\x04\n", "hello\n"], [], [], "> \n"),  # Ctrl-D on Windows
        ([KeyboardInterrupt(), "\n", " hello \n"], [], ["hello"], "> \n> > > \n"),
        (["one\n"], [LookupError("no model.")], ["one"], "> Sorry, that failed: no model.\n> \n"),
        (["one\n", "two\n"], [Terminated()], ["one"], "> "),
        ([OSError("the terminal is gone"), "one\n"], [], [], "> "),
    ],
)
def test_a_conversation_goes_on_until_somebody_leaves(
    tmp_path, monkeypatch, lines, failures, asked, err
):
    """Whatever happens in a turn; but it ends with its program and with its terminal."""
    said = []
    shown = io.StringIO()

    def ask(text: str) -> None:
        said.append(text)
        for failure in failures:
            raise failure

    monkeypatch.setattr(sys, "stdin", Keyboard(*lines, ""))
    monkeypatch.setattr(sys, "stderr", shown)
    with contextlib.suppress(Terminated, OSError):
        assert CLI(io.StringIO(), shown).converse(ask, tmp_path / "history") == 0
    assert (said, shown.getvalue()) == (asked, err)


# ---- The loop behind the keyboard ----


INTERRUPTED = """
import asyncio, os, signal, sys, threading
from channels import BackgroundLoop

signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started this may ignore it
is_impatient, left, tidied = sys.argv[1] == "impatient", threading.Event(), threading.Event()

async def work():
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
    try:
        await asyncio.Event().wait()
    finally:
        if is_impatient:
            os.kill(os.getpid(), signal.SIGINT)
        await asyncio.to_thread(left.wait, 10 if is_impatient else 0.1)
        print("tidy", flush=True)
        tidied.set()

with BackgroundLoop() as background:
    try:
        background.complete(work())
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    left.set()
    tidied.wait(10)
    print(background.complete(background.ask("go on? ")), flush=True)
"""


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="signals to a thread are POSIX")
def test_ctrl_c_waits_until_the_work_has_put_things_in_order_a_second_one_does_not():
    """Also if the system gave it to another thread; and the next turn can still ask."""
    for how, printed in (
        ("patient", "tidy\ninterrupted\nyes\n"),
        ("impatient", "interrupted\ntidy\nyes\n"),
    ):
        command = [sys.executable, "-c", INTERRUPTED, how]
        done = subprocess.run(
            command, cwd=ROOT, input="yes\n", capture_output=True, encoding="utf-8", timeout=30
        )
        assert (done.stdout, done.stderr) == (printed, "go on? ")


def test_a_question_from_beside_the_turn_is_answered_or_refused_and_a_given_up_one_harms_nobody(
    monkeypatch, capsys
):
    keyboard = Keyboard()
    monkeypatch.setattr(sys, "stdin", keyboard)

    async def turn() -> str:
        given_up = asyncio.create_task(background.ask("given up? "))
        await asyncio.to_thread(keyboard.is_read.wait, 20)
        aside = asyncio.create_task(background.ask("aside? "))
        await asyncio.sleep(0)
        given_up.cancel()
        for line in ("for nobody\n", "one\n", "two\n"):
            keyboard.lines.put(line)
        return await background.ask("a line?\nturn? "), await aside

    with BackgroundLoop() as background:
        assert background.complete(turn()) == ("two", "one")
        late = asyncio.run_coroutine_threadsafe(background.ask("more? "), background.loop)
        with pytest.raises(RuntimeError, match="Nobody can be asked: no turn is running"):
            late.result(timeout=10)
    assert capsys.readouterr().err == "given up? aside? a line?\nturn? "


# ---- Waiting is shown ----


def test_what_is_waited_for_is_shown_after_a_second_and_is_gone_before_anything_else(terminal):
    clock = SimpleNamespace(now=100.0)
    cli = CLI(terminal.stream, terminal.stream)
    cli.bottom = waiting = BottomLine(terminal.stream, lambda: clock.now)

    def drawn_after(seconds: float) -> str:
        """A line that waits begins with `<`; `|` erases it."""
        clock.now += seconds
        waiting.draw()
        return terminal.read().replace("\r\x1b[K", "<").replace("\r\x1b[J", "|")

    waiting.begin("the model")
    assert drawn_after(0.9) == ""
    assert drawn_after(1.2) == "<waiting for the model …"
    assert drawn_after(57) == "", "the user may be typing behind it"
    waiting.begin('read_file("a\x1b[2J.txt")\n')
    assert drawn_after(1) == '|<waiting for read_file("a\\x1b[2J.txt") …'
    send(cli, event("final", "The answer."))
    assert drawn_after(0).startswith("|The answer.\n<waiting for read_file")
    waiting.begin("")
    assert drawn_after(10) == "|"


# ---- What the program inherits, and what is piped in ----


def test_pipes_are_utf8_whatever_the_code_page_is_and_the_null_device_is_no_terminal():
    program = """
import sys
from channels import CLI, prepare_streams
prepare_streams()
print("→ ü", [each.isatty() for each in (sys.stdin, sys.stdout, sys.stderr)], ascii(CLI().read_piped(False, None)))
"""
    settings = {"PYTHONIOENCODING": "", "PYTHONUTF8": "0"}
    for given, read in (("\ufeff→ ü", r"'\u2192 \xfc'"), (None, "''")):
        source = {"input": given} if given else {"stdin": subprocess.DEVNULL}
        done = subprocess.run(  # PowerShell begins with a BOM
            [sys.executable, "-c", program],
            cwd=ROOT,
            env=os.environ | settings,
            capture_output=True,
            encoding="utf-8",
            **source,
        )
        assert done.stdout == f"→ ü [False, False, False] {read}\n", done.stderr


# ---- Telegram ----

GROUP = {"id": -100, "type": "supergroup", "title": "Friends"}


class Desk:
    """A bot in a test: the server, the bus, a clock that does not wait, and the journal."""

    def __init__(self, server, folder, allow_from=(7,), token="", poll=50, slack=15, **options):
        self.server, self.folder, self.naps = server, folder, []
        self.bus = MessageBus(self.pause)
        places = {"api_base": server.base_url, "media_folder": folder / "w" / "media"}
        settings = {**places, "sleep": self.sleep, **options}
        self.bot = Telegram(token or server.token, allow_from, **settings)
        self.bot.poll_seconds, self.bot.slack_seconds = poll, slack

    async def sleep(self, seconds: float) -> None:
        if seconds == 4.0:
            await asyncio.Event().wait()  # one signal is enough here
        await self.pause(seconds)

    async def pause(self, seconds: float) -> None:
        self.naps.append(seconds)
        await asyncio.sleep(0)

    async def __aenter__(self):
        self.bus.open(self.bot)
        return self

    async def __aexit__(self, *exception):
        async with asyncio.timeout(PATIENCE / 3):  # whatever hangs
            await self.bus.close(1.0)

    async def next(self) -> InboundMessage:
        """The next message, not yet in the journal."""
        return await asyncio.wait_for(self.bus.next(), PATIENCE)

    async def take(self) -> InboundMessage:
        message = await self.next()
        message.confirm()
        return message

    async def send(self, text: str, chat: str = "7", **more) -> None:
        await self.bot.send(OutboundMessage("telegram", chat, text, **more))

    async def deliver(self, text: str, chat: str = "7") -> None:
        """Through the outbox of a chat, until it has arrived or was dropped."""
        arrived = asyncio.Event()
        self.bus.send(OutboundMessage("telegram", chat, text, on_delivered=arrived.set))
        await asyncio.wait_for(arrived.wait(), PATIENCE)

    async def until(self, condition) -> None:
        await asyncio.to_thread(self.server.wait_until, condition)

    async def until_confirmed(self) -> None:
        await self.until(lambda: not self.server.updates)


def in_telegram(test, *arguments, **options):
    async def run() -> None:
        with FakeTelegram() as server:
            await test(server, *arguments, **options)

    asyncio.run(run())


def telegram(**options):
    """For `async def test(server, desk, caplog)`: a server, and a bot that listens to it."""

    def decorate(test):
        def run(tmp_path, caplog):
            async def with_desk(server: FakeTelegram) -> None:
                async with Desk(server, tmp_path, **options) as desk:
                    await test(server, desk, caplog)

            in_telegram(with_desk)

        return run

    return decorate


@telegram()
async def test_a_telegram_message_is_typed_at_answered_and_confirmed(server, desk, caplog):
    server.say("What is in a.txt?")
    message = await desk.take()
    assert (message.session_key, message.sender_id) == ("telegram:7", "7")
    assert (message.content, message.message_id) == ("What is in a.txt?", "2/99")
    await desk.until(lambda: server.calls("sendChatAction"))
    await desk.send("**Hello** & bye.", reply_to=message.message_id)
    await desk.until_confirmed()
    assert server.calls("sendMessage") == [
        {
            "chat_id": "7",
            "text": "<b>Hello</b> &amp; bye.",
            "parse_mode": "HTML",
            "reply_parameters": {"message_id": 2, "allow_sending_without_reply": True},
        }
    ]
    assert server.calls("sendChatAction") == [{"chat_id": "7", "action": "typing"}]
    assert server.calls("getUpdates")[0]["offset"] == 0


def test_an_update_is_confirmed_only_when_it_is_in_the_journal_and_comes_again_until_then(
    tmp_path,
):
    async def test(server):
        async with Desk(server, tmp_path) as desk:
            for text in ("one", "two", "three"):
                server.say(text)
            await desk.take()
            message = await desk.next()
            await desk.until(lambda: len(server.updates) == 2)  # the first one is confirmed
            await desk.until(lambda: len(server.calls("getUpdates")) > 2)
            assert server.updates[0]["message"]["text"] == "two"
        # the next start: all that is not stored comes again, by the same names
        async with Desk(server, tmp_path) as desk:
            again = await desk.next()
            assert (again.content, again.message_id) == ("two", message.message_id)
            again.confirm()
            assert (await desk.take()).content == "three"
            await desk.until_confirmed()

    in_telegram(test)


def test_strangers_get_no_sign_of_life(tmp_path):
    async def test(server):
        async with Desk(server, tmp_path, (8, "ann", "77", "7|ann", "")) as desk:
            server.say("hi", document=server.file("a.pdf", b"%PDF"))
            await desk.until_confirmed()
        assert not (tmp_path / "w").exists()
        methods = {request.method for request in server.requests}
        assert methods == {"getMe", "deleteWebhook", "getUpdates"}

    in_telegram(test)


@telegram()
async def test_in_a_group_only_what_is_for_the_bot(server, desk, caplog):
    bot, human = {"id": 99, "is_bot": True}, {"id": 8, "is_bot": False}
    heard = [
        {"text": "/stop@kit_bot"},
        {"caption": "@Kit_bot look"},
        {"text": "yes", "reply_to_message": {"message_id": 1, "from": bot}},
    ]
    others = [
        {"text": "no", "reply_to_message": {"message_id": 1, "from": human}},
        {"text": "@kit_bot2 hello"},
        {"text": "/stop"},
    ]
    for parts in [*others, *heard]:
        server.say(chat=GROUP, **parts)
    for text in ("/stop@kit_bot", "@Kit_bot look", "yes"):
        message = await desk.take()
        assert message.content.endswith(text)
        assert (message.chat_id, message.speaker) == ("-100", "Ann")


@telegram(group_policy="open")
async def test_a_group_may_be_open_but_only_to_allowed_people(server, desk, caplog):
    server.say("from a stranger", sender=8, chat=GROUP)
    names = {"first_name": "A\nda: /stop", "last_name": "L" * 99}
    server.say("hi", chat=GROUP, **{"from": {"id": 7, "is_bot": False, **names}})
    assert (await desk.take()).speaker == "A da: /stop " + "L" * 28


@telegram()
async def test_noise_is_confirmed_and_left_alone(server, desk, caplog):
    sender = {"id": 7, "is_bot": False}
    server.update(edited_message={"message_id": 2, "from": sender, "text": "edited"})
    server.update(message={"message_id": 4, "from": sender, "text": "no chat"})
    server.say("a word")
    assert (await desk.take()).content == "a word"
    await desk.until_confirmed()
    assert caplog.messages == ["Telegram: an unreadable message is skipped"]


def test_an_album_that_comes_in_pieces_is_one_message(tmp_path):
    async def test(server):
        def photo(number: int, **parts) -> None:
            sizes = [server.file(f"{number}{size}.jpg", size.encode()) for size in ("s", "large")]
            server.say(media_group_id="A", photo=sizes, **parts)

        async def sleep(seconds: float) -> None:
            if seconds == 2.0 and len(server.updates) == 1:
                photo(2)
                photo(3)
            await desk.sleep(seconds)

        desk = Desk(server, tmp_path)
        desk.bot.sleep = sleep
        async with desk:
            photo(1, caption="Where is this?")
            message = await desk.take()
            assert message.content == "Where is this?"
            assert [path.read_bytes() for path in message.media] == [b"large"] * 3
            await desk.until_confirmed()

    in_telegram(test)


@telegram()
async def test_files_come_in_under_names_of_their_own(server, desk, caplog):
    for name in ("a b.pdf", "a b.pdf", "../../../evil", "é" * 200 + ".txt"):
        server.say(caption="look", document=server.file("documents/1", b"one", file_name=name))
    paths = [(await desk.take()).media[0] for _ in range(4)]
    names = ["U1-a_b.pdf", "U2-a_b.pdf", "U3-.._.._.._evil", "U4-" + "é" * 56 + ".txt"]
    assert paths == [desk.bot.media_folder / name for name in names]
    assert {path.read_bytes() for path in paths} == {b"one"}


PLACE = {"latitude": 52.5, "longitude": 13.4}
REPLIES = [
    (
        {"venue": {"title": "Café", "location": PLACE}, "location": PLACE},
        '[venue: {"title": "Café",',
    ),
    (
        {"text": "?", "reply_to_message": {"text": "a b", "from": {"first_name": "Bob"}}},
        "[in reply to: a b]\n?",
    ),
    ({"text": "/stop", "reply_to_message": {"text": "It rains."}}, "/stop"),
]


@telegram()
async def test_what_is_no_text_becomes_a_line_and_a_reply_comes_with_what_it_quotes(
    server, desk, caplog
):
    for parts, shown in REPLIES:
        server.say(**parts)
        content = (await desk.take()).content
        assert shown in content and content.count(shown[-5:]) == 1, content


@telegram()
async def test_a_rival_a_webhook_and_an_outage_are_told_once_and_waited_for(server, desk, caplog):
    """A flood wait is kept to the second, and a 404 of a moment does not end the bot."""
    for refusal, naps, hint in (
        (
            Refusal(409, CONFLICT),
            [10] * 3,
            "make sure that only one bot instance is running. Retried every 10 s",
        ),
        (Refusal(404, "Not Found"), [60] * 3, "Retried every 60 s"),
        (Refusal(429, "Too Many", {"retry_after": 77}), [77] * 3, "Retried every "),
    ):
        desk.naps.clear()
        caplog.clear()
        server.refuse("getUpdates", *[refusal] * 3)
        for text in ("one", "two"):  # the first call may be under way
            server.say(text)
            assert (await desk.take()).content == text
        await desk.until_confirmed()
        assert desk.naps == naps
        [line] = caplog.messages
        assert hint in line
    server.webhook = "https://elsewhere"
    for text in ("three", "four"):
        server.say(text)
        assert (await desk.take()).content == text


def test_typing_ends_with_the_answer_and_with_the_next_message(tmp_path):
    states = []

    async def sleep(seconds: float) -> None:
        states.append("begun")
        try:
            await asyncio.Event().wait()
        finally:
            states.append("ended")

    async def test(server):
        async with Desk(server, tmp_path, sleep=sleep) as desk:
            for number in (1, 2):
                server.say("hi")
                await desk.take()
                await settled(lambda number=number: states.count("begun") == number)
                await desk.send("looking", kind="progress")
                await desk.send("for somebody else", "8")
            assert states == ["begun", "ended", "begun"]
            await desk.send("It says hello.")
            await settled(lambda: states[-1] == "ended")

    in_telegram(test)


@telegram(poll=0.01, slack=0.04)
async def test_a_line_that_went_dead_is_noticed(server, desk, caplog):
    await desk.until(lambda: len(server.calls("getUpdates")) > 1)
    server.refuse("getUpdates", Refusal(0, stalls=True))
    await settled(lambda: "no answer in 0.05 s" in caplog.text)
    server.say("hi")
    assert (await desk.take()).content == "hi"


@telegram()
async def test_what_is_worth_a_message_is_sent_as_plain_text_only_if_the_html_was_refused(
    server, desk, caplog
):
    for kind in ("delta", "retry", "progress", "tool_hint"):
        await desk.send(kind, kind=kind)
    await desk.send("```\n \n```")
    assert server.texts() == ["progress", "tool_hint"]
    server.refuse("sendMessage", Refusal(400, "Bad Request: can't parse entities: Unexpected end"))
    await desk.send("**a** < b")
    assert server.texts()[2:] == ["<b>a</b> &lt; b", "a < b"]
    assert "parse_mode" not in server.calls("sendMessage")[3]
    for refusal in (Refusal(500, "x"), Refusal(0, after=True), Refusal(400, body=b"a proxy")):
        server.requests.clear()
        server.refuse("sendMessage", refusal)
        with pytest.raises(TelegramError):
            await desk.send("**a**")
        assert len(server.texts()) == 1, "it may have arrived"


@telegram()
async def test_chats_that_block_flood_or_fail_delay_no_other_and_nothing_comes_twice(
    server, desk, caplog
):
    """Long answers go on where they broke off, whatever other chats do meanwhile."""
    long = "\n".join(letter * 4_000 for letter in "abc")
    server.chats["8"] = Refusal(403, "Forbidden: bot was blocked by the user")
    server.chats["9"] = Refusal(429, "Too Many Requests", {"retry_after": 3_600})
    server.chats["10"] = Refusal(403, body=b'{"error": "blocked by a proxy"}')
    for chat in ("9", "10"):
        for text in (long, "the end"):
            desk.bus.send(OutboundMessage("telegram", chat, text))
    await desk.until(lambda: len(server.texts("9")) > 7 and len(server.texts("10")) > 7)
    await desk.deliver("report", "8")  # it counts as delivered
    await desk.deliver("hello")
    assert server.texts("7") == ["hello"] and "chat 8 refuses a message" in caplog.text
    pauses = [nap for nap in desk.naps if nap != 3_600]
    assert pauses[:8] == [1, 2, 4, 8, 16, 32, 60, 60]
    server.chats.clear()
    for chat in ("9", "10"):
        await desk.until(lambda chat=chat: "the end" in server.texts(chat))
        assert [*dict.fromkeys(text[0] for text in server.texts(chat))] == [*"abct"]
    assert caplog.text.count("403 not the Bot API") == 1


@telegram()
async def test_photos_and_files_go_out_and_one_that_cannot_is_told_of(server, desk, caplog):
    async def sent(*media: Path) -> list[str]:
        server.requests.clear()
        await desk.send("", media=media)
        return [request.method for request in server.requests if request.files]

    photo, file = desk.folder / "a.PNG", desk.folder / "odd&näme.txt"
    photo.write_bytes(b"\x89PNG\r\n--\r\n")
    file.write_bytes(b"hello\r\n" * 100_000)
    assert await sent(photo, file) == ["sendPhoto", "sendDocument"]
    first, second = [request.files for request in server.requests if request.files]
    assert first == {"photo": ("a.PNG", photo.read_bytes())}
    assert second["document"][1] == file.read_bytes()
    server.refuse("sendPhoto", Refusal(400, "Bad Request: PHOTO_INVALID_DIMENSIONS"))
    assert await sent(photo) == ["sendPhoto", "sendDocument"]
    await sent(desk.folder / "a&b")
    assert re.match(r"\[a&amp;b cannot be sent: \[(Errno|WinError) 2\]", server.texts()[-1])


def sparse(path: Path, size: int) -> Path:
    path.touch()
    os.truncate(path, size)
    return path


def file_for(chat: str, path: Path) -> OutboundMessage:
    return OutboundMessage("telegram", chat, "", "file", [path])


@telegram()
async def test_a_file_that_is_too_large_is_not_uploaded_again_and_the_chat_is_told(
    server, desk, caplog
):
    server.refuse("sendDocument", Refusal(413, "Request Entity Too Large"))
    for name, size in (("small.zip", 1_000), ("large.zip", 80_000_000)):
        desk.bus.send(file_for("7", sparse(desk.folder / name, size)))
    await desk.until(lambda: len(server.texts("7")) == 2)
    small, large = server.texts("7")
    assert "small.zip cannot be sent: sendDocument: 413 Request Entity Too Large" in small
    assert "large.zip cannot be sent: it has 80,000,000 bytes" in large
    assert len(server.calls("sendDocument")) == 1 and desk.naps == []


@telegram(allow_from=(7, 8))
async def test_a_file_outlasts_an_outage_in_which_its_chat_waits_and_no_other(server, desk, caplog):
    going_on = asyncio.Event()

    async def sleep(seconds: float) -> None:
        if seconds == 33:
            await going_on.wait()
        await desk.sleep(seconds)

    desk.bot.sleep = sleep
    flood = Refusal(429, "Too Many Requests: retry after 33", {"retry_after": 33})
    server.refuse("getFile", Refusal(502, body=b"<html>bad gateway"), flood)
    server.say(caption="this", document=server.file("a.bin", b"x"))
    server.say("after the file")
    server.say("elsewhere", sender=8)
    assert (await desk.take()).content == "elsewhere"
    assert len(server.updates) == 3, "nothing is confirmed before it is stored"
    going_on.set()
    message = await desk.take()
    assert (message.content, message.media[0].read_bytes()) == ("this", b"x")
    server.refuse("getFile", Refusal(400, "Bad Request: file is too big"))
    server.say(caption="lost", document=server.file("a.bin", b"x"))
    assert (await desk.take()).content == "after the file" and desk.naps == [10, 33]
    assert "file is too big" in (await desk.take()).content
    server.refuse("getFile", *[Refusal(502, body=b"<html>bad gateway")] * 30)
    server.say(caption="too late", document=server.file("a.bin", b"x"))
    assert "it cannot be fetched" in (await desk.take()).content


@telegram()
async def test_a_file_that_never_arrives_is_given_up_after_five_uploads_and_the_next_one_is_sent(
    server, desk, caplog
):
    server.cuts_uploads_after = 1_000_000
    desk.bus.send(file_for("7", sparse(desk.folder / "a.png", 20_000_000)))
    desk.bus.send(file_for("7", sparse(desk.folder / "b.zip", 1_000)))
    await desk.until(lambda: server.calls("sendDocument"))
    assert len(server.calls("sendPhoto")) == 5 and desk.naps == [1, 2, 4, 8]
    assert server.texts("7")[0].startswith("[a.png cannot be sent: ")


@telegram()
async def test_a_file_outlasts_an_outage_and_delays_no_text(server, desk, caplog):
    server.refuse("sendChatAction", *[Refusal(502, body=b"<html>bad gateway</html>")] * 9)
    server.refuse("sendDocument", Refusal(0, stalls=True))
    desk.bus.send(file_for("7", sparse(desk.folder / "a.zip", 1_000)))
    await desk.until(lambda: server.calls("sendDocument"))  # it hangs
    await desk.deliver("the answer")
    assert server.texts("7") == ["the answer"] and len(desk.naps) == 9


@pytest.mark.parametrize("base", ["http://127.0.0.1:1/ x", "{}"])
def test_the_token_is_in_no_log_and_no_error(tmp_path, caplog, base):
    caplog.set_level(logging.DEBUG)

    async def test(server):
        server.refuse("getMe", Refusal(500, f"no such bot{server.token}"), Refusal(0))
        server.refuse("sendMessage", Refusal(500, f"bad /bot{server.token}/sendMessage"))
        desk = Desk(server, tmp_path, api_base=base.replace("{}", server.base_url))
        with pytest.raises(TelegramError) as failure:
            await desk.send("x")
        async with desk:
            await settled(lambda: len(desk.naps) > 1)
        shown = "".join(traceback.format_exception(failure.value))
        assert server.token.partition(":")[2] not in shown + caplog.text
        assert repr(failure.value.__context__) == "None"

    in_telegram(test)


@pytest.mark.parametrize(
    ("markdown", "shown"),
    [
        ("a < b & c > d <b>&amp;</b>", "a &lt; b &amp; c &gt; d &lt;b&gt;&amp;amp;&lt;/b&gt;"),
        ("**bold** and *italic* and _italic_", "<b>bold</b> and <i>italic</i> and <i>italic</i>"),
        ("**bold *and italic* too**", "<b>bold <i>and italic</i> too</b>"),
        ("a lone * stays, 2 * 3 * 4, a*b, **open", "a lone * stays, 2 * 3 * 4, a*b, **open"),
        ("snake_case_name __init__ _x", "snake_case_name __init__ _x"),
        ("# Plan\n#hashtag\n## **Next** \nx", "<b>Plan</b>\n#hashtag\n<b>Next</b>\nx"),
        ('[a](https://a.b/c_d_(e)?x="2")', '<a href="https://a.b/c_d_(e)?x=&quot;2&quot;">a</a>'),
        (
            "```py\na < b\n*x*\n```\nend",
            '<pre><code class="language-py">a &lt; b\n*x*\n</code></pre>\nend',
        ),
        (
            "[`run.py`](https://x.y) is `it`",
            '<a href="https://x.y">`run.py`</a> is <code>it</code>',
        ),
        ("```npm install```\nand **more**", "<code>npm install</code>\nand <b>more</b>"),
    ],
)
def test_markdown_as_telegrams_html(markdown, shown):
    assert as_html(markdown) == shown
    Parser(shown)


PIECES = [
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


def test_whatever_the_markdown_its_parts_can_be_parsed_fit_and_lose_nothing():
    for seed in range(160):
        random = Random(seed)
        text = as_html("".join(random.choice(PIECES) for _ in range(100)))
        assert Parser(text).text == plain_text(text), seed
        limit = (100, 150, 300)[seed % 3]
        plain = [Parser(part).text for part in split_html(text, limit)]
        assert "".join("".join(plain).split()) == "".join(plain_text(text).split()), seed
        assert max(map(units, plain)) <= limit, seed


WORST = [
    "`",
    "` ",
    "```a",
    "```\n",
    "[",
    "[a](http://",
    "[x](http://(",
    "# ",
    "* ",
    "**a ",
]
WORST += [
    "**a",
    "*a**b ",
    "***a ",
    "_a*b ",
    "<b>",
    "\t",
    "\n",
    "- [x] ",
    "<!--",
    "\u2800",
]


@pytest.mark.long
@pytest.mark.parametrize("piece", WORST)
def test_whatever_its_letters_a_text_is_read_in_no_time(piece):
    """One answer with many backquotes held up a gateway for 84 s, and again after each restart."""
    text, before = (piece * 100_000)[:100_000], time.process_time()
    split_html(as_html(text))
    split_html(as_html(("x" + piece * 3 + "y") * 1_000 + "x"))
    active_tasks(text)
    approval_question("exec", {"command": text})
    assert time.process_time() - before < 1


# ---- The calendar ----

BERLIN = ZoneInfo("Europe/Berlin")


def local(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=BERLIN)


@pytest.mark.parametrize(
    ("expr", "after", "expected"),
    [
        ("0 9 * * MON,Wed", "2026-11-23T10:00", "2026-11-25T09:00"),
        ("0 0 29 2 *", "2026-11-21T10:00", "2028-02-29T00:00"),
        ("30 2 * * *", "2026-10-25T02:30", "2026-10-26T02:30"),  # 02:30 exists twice
    ],
)
def test_when_an_expression_comes_next(expr, after, expected):
    assert next_run(expr, local(after).timestamp(), BERLIN) == local(expected).timestamp()


@pytest.mark.parametrize(
    ("expr", "complaint"),
    [
        ("0 22-2 * * *", "hour: '22-2' .*within 0-23; 22-2 is written as 22-23,0-2"),
        ("١ * * * *", "minute: '١' is not like"),
    ],
)
def test_a_bad_expression_says_what_is_wrong(expr, complaint):
    with pytest.raises(ValueError, match=complaint):
        next_run(expr, local("2026-11-21T12:00").timestamp(), BERLIN)


def random_field(random: Random, lowest: int, highest: int, most: int = 59) -> tuple[str, set[int]]:
    """A field as text, and the values that it means."""
    low, high = sorted(random.randint(lowest, min(highest, most)) for _ in "lh")
    step = random.randint(1, 9)
    return random.choice(
        [
            ("*", {*range(lowest, highest + 1)}),
            (f"*/{step}", {*range(lowest, highest + 1, step)}),
            (f"{low},{high}", {low, high}),
            (f"{low}-{high}/{step}", {*range(low, high + 1, step)}),
        ]
    )


def by_the_minute(texts: list[str], sets: list[set[int]], after: datetime, zone: ZoneInfo):
    """The oracle: look at the clock on the wall every minute, and at what it left out."""
    minutes, hours, days, months, weekdays = sets

    def fits(wall: datetime) -> bool:
        in_week = not weekdays.isdisjoint({wall.isoweekday(), wall.isoweekday() % 7})
        is_day = [wall.day in days, in_week]
        is_either = texts[2][0] != "*" and texts[4][0] != "*"
        in_time = wall.minute in minutes and wall.hour in hours and wall.month in months
        return in_time and (any(is_day) if is_either else all(is_day))

    moment, minute = after.replace(second=0), timedelta(minutes=1)
    put_off = set()  # what a gap left out, as long behind it
    is_fixed = texts[1] not in ("*", "*/1")  # a job of every hour follows the clock
    for _ in range(3 * 24 * 60):
        skipped = moment.astimezone(zone).replace(tzinfo=None) + minute
        moment += minute
        wall = moment.astimezone(zone)
        naive = wall.replace(tzinfo=None)
        gap = naive - skipped
        while is_fixed and skipped < naive:
            put_off |= {skipped + gap} if fits(skipped) else set()
            skipped += minute
        if naive in put_off or (fits(wall) and not (is_fixed and wall.fold)):
            return moment
    return None


def test_the_calendar_agrees_with_a_clock_that_is_looked_at_every_minute():
    """In zones and weeks in which clocks are set: by an hour, by half of one, at midnight. Not here:
    a night in which Lord Howe skips half an hour."""
    changes = [
        ("Europe/Berlin", "2026-03-28"),
        ("Europe/Berlin", "2026-10-24"),
        ("Australia/Lord_Howe", "2026-04-04"),
        ("Africa/Cairo", "2026-04-23"),
        ("America/Nuuk", "2026-10-24"),
    ]
    random = Random(11)
    for name, day in changes * 6:
        zone = ZoneInfo(name)
        fields = [
            random_field(random, 0, 59),
            random_field(random, 0, 23, most=4),
            random.choice([random_field(random, 1, 31), ("*", {*range(1, 32)})]),
            ("*", {*range(1, 13)}),
            random.choice([random_field(random, 0, 7), ("*", {*range(8)})]),
        ]
        texts, sets = [field[0] for field in fields], [field[1] for field in fields]
        after = datetime.fromisoformat(f"{day}T00:00Z")
        after += timedelta(minutes=random.randint(0, 2_000))
        latest = after + timedelta(days=3)
        expected = by_the_minute(texts, sets, after, zone) or latest
        found = datetime.fromtimestamp(next_run(" ".join(texts), after.timestamp(), zone), UTC)
        assert found == expected or found > latest == expected, (texts, name, after)


def test_the_zone_of_this_machine_has_its_rules(monkeypatch):
    """A daily job keeps its hour when the clocks change, also if only the system knows the zone."""
    program = """
import time, zoneinfo
from channels import zone_named, next_run, CronService
zone, berlin = zone_named(""), zoneinfo.ZoneInfo("Europe/Berlin")
for expr in ("30 8 * * *", "30 2 * * *", "*/20 * * * *", "0 0 29 2 *"):
    for after in range(1_774_700_040, 1_775_000_000, 86_400):  # around 2026-03-29
        assert next_run(expr, after, zone) == next_run(expr, after, berlin), (expr, after)
    for after in range(1_792_800_000, 1_793_000_000, 3_600):  # around 2026-10-25
        assert next_run(expr, after, zone) == next_run(expr, after, berlin), (expr, after)
print(CronService(None, None, zone)._shown(1_774_700_040), zone)
"""
    if os.name != "posix":
        pytest.skip("Windows reads TZ in another way")
    for zone in (":Europe/Berlin", "Europe/Berlin", "CET-1CEST,M3.5.0,M10.5.0/3"):
        monkeypatch.setenv("TZ", zone)
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, capture_output=True, encoding="utf-8"
        )
        assert done.stdout == "Sat 2026-03-28 13:14 CET None\n", done.stderr


# ---- Cron ----

START = local("2026-11-21T12:00")
CHAT = SimpleNamespace(channel="telegram", chat_id="42")


class Office:
    """A service in a test: a clock that the test sets, and what was fired."""

    def __init__(self, folder: Path, now: datetime = START, zone: ZoneInfo = BERLIN):
        self.now, self.fired, self.names, self.fire, self.zone = now, [], [], None, zone
        self.path = folder / "w" / "cron" / "jobs.json"
        store = JobStore(self.path, locked, write_atomically)
        self.service = CronService(store, self.on_fire, zone, now=lambda: self.now.timestamp())

    async def on_fire(self, job: CronJob, name: str) -> None:
        self.names.append(name)
        shown = job.message or job.id
        self.fired.append((shown, self.now.astimezone(self.zone).strftime("%d %H:%M:%S")))
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
                await self.service.tick()
                await asyncio.gather(*self.service.running.values())

        self.fired.clear()
        asyncio.run(run())
        return self.fired


def test_every_cron_and_at_each_in_its_time_and_by_a_name_that_a_kill_does_not_change(tmp_path):
    office = Office(tmp_path)
    drink = office.add("drink", every_seconds=600)
    office.add("stretch", at="2026-11-21T12:25")
    before = office.path.read_bytes()
    assert office.pass_time(1_200, step=60) == [
        ("drink", "21 12:10:00"),
        ("drink", "21 12:20:00"),
    ]
    assert office.pass_time(600, step=60)[0] == ("stretch", "21 12:25:00")
    assert [row["message"] for row in office.rows()] == ["drink"]
    assert office.names[0] == f"{drink}@{local('2026-11-21T12:10').timestamp():.0f}"
    assert len({*office.names}) == 4, "else a report is taken for a repetition and dropped"
    office.path.write_bytes(before)  # the file as it was when a kill kept the runs from being noted
    again = Office(tmp_path, local("2026-11-21T12:09"))
    again.pass_time(1_260, step=60)
    assert again.names == office.names


@pytest.mark.parametrize(
    ("schedule", "started"),
    [
        ({"cron_expr": "0 13 * * *"}, "2026-11-21T13:05"),  # 61 s late was too late once
        ({"at": "2026-11-21T13:00"}, "2026-11-24T12:45"),
    ],
)
def test_a_job_that_is_late_runs_once(tmp_path, schedule, started):
    Office(tmp_path).add("water", **schedule)
    office = Office(tmp_path, local(started))
    assert f"{office.now:next %a %Y-%m-%d %H:%M}" in office.cron("list"), "never in the past"
    assert [message for message, _ in office.pass_time(20)] == ["water"]
    assert Office(tmp_path, office.now).pass_time(20) == []


def test_rows_written_by_hand_run_odd_ones_are_told_once_and_all_are_kept(tmp_path, caplog):
    office = Office(tmp_path)
    odd = [
        {},
        {"id": "n", "every_seconds": "often"},
        {"id": "t", "cron_expr": "1 1 * * *", "tz": "Mars/Olympus"},
    ]
    by_hand = {"id": 1, "message": 7, "every_seconds": 60, "tz": None, "colour": "red"}
    office.write(*odd, by_hand, {"id": "p", "message": "past", "at": "2026-11-21T11:59"})
    moments = [("7", "21 12:00:01"), ("past", "21 12:00:01"), ("7", "21 12:01:01")]
    assert office.pass_time(90) == moments
    *rows, row = office.rows()
    assert rows == odd and row["colour"] == "red"
    assert caplog.text.count("is no job") == len(odd)
    assert office.cron("remove", job_id="1") == "Removed job 1." and office.rows() == odd


def test_a_clock_that_was_ahead_stops_nothing(tmp_path):
    office = Office(tmp_path, local("2030-01-01T12:00"))
    office.add("drink", every_seconds=60)
    assert len(office.pass_time(60, step=60)) == 1
    office.now = START  # the same program: the clock is set back; the last run is repeated
    assert len(office.pass_time(130)) == 3


def test_a_job_that_hangs_fails_or_is_stopped_keeps_its_times_and_holds_up_no_other(tmp_path):
    office, names = Office(tmp_path), ("slow", "good", "bad", "stopped")

    async def fire(job: CronJob) -> None:
        if job.message == "slow":
            await asyncio.Event().wait()
        if job.message == "stopped":
            raise asyncio.CancelledError
        if job.message == "bad":
            raise ConnectionError("no model")

    async def test() -> None:
        office.fire = fire
        for name in names:
            office.add(name, every_seconds=60)
        for minute in range(1, 4):
            office.now = START + timedelta(minutes=minute)
            await office.service.tick()
            slow, *tasks = office.service.running.values()
            await asyncio.wait(tasks, timeout=PATIENCE)
        slow.cancel()

    asyncio.run(test())
    messages = [message for message, _ in office.fired]
    assert [messages.count(name) for name in names] == [1, 3, 3, 3]
    assert " · bad · failed: ConnectionError('no model')\n" in office.cron("list")


def test_other_programs_changes_are_picked_up_and_not_undone(tmp_path):
    office, other = Office(tmp_path), Office(tmp_path)
    kept, removed = [office.add(name, every_seconds=60) for name in ("kept", "removed")]

    async def meanwhile(job: CronJob) -> None:  # while the jobs run
        if job.id == kept:
            other.cron("remove", job_id=removed)
            other.now = office.now
            other.add("new", every_seconds=60)

    office.fire = meanwhile
    office.pass_time(60, step=60)
    office.fire = None
    assert sorted(row["message"] for row in office.rows()) == ["kept", "new"]
    assert sorted(message for message, _ in office.pass_time(60, step=60)) == ["kept", "new"]


def test_system_jobs_keep_their_pace_are_listed_and_protected(tmp_path):
    def beats(now: datetime, seconds: float, pace: float, enabled: bool = True) -> list:
        office = Office(tmp_path, now)
        office.service.add_system("heartbeat", pace, enabled)
        assert (" · off · " in office.cron("list")) is not enabled
        with pytest.raises(CronError, match="No job 'heartbeat' can be removed"):
            office.cron("remove", job_id="heartbeat")
        return [moment[3:8] for _, moment in office.pass_time(seconds, step=600)]

    assert beats(START, 3_600, 1_800) == ["12:10", "12:40"]  # the first one at once
    later = START + timedelta(days=30, minutes=50)
    assert beats(later, 600, 7_200) == ["13:00"], "a machine that is seldom on misses no dream"
    assert beats(START, 7_200, 7_200, enabled=False) == []


def test_a_disk_that_refuses_makes_nothing_run_twice(tmp_path, caplog):
    """Nothing can be written there, until the second attempt to record the runs."""
    office = Office(tmp_path)
    once = office.add("once", at="2026-11-21T12:01")
    temporary = office.path.with_name(".jobs.json.tmp")
    temporary.mkdir()

    async def nap(seconds: float) -> None:
        await office.service.tick()
        temporary.rmdir()

    office.service.sleep = nap
    assert office.pass_time(60, step=60) == [("once", "21 12:01:00")]
    assert f"cron: the run of {once} cannot be recorded: " in caplog.text
    assert office.pass_time(120, step=60) == office.rows() == []


def test_a_run_that_ends_while_the_file_is_read_is_not_started_again(tmp_path):
    office = Office(tmp_path)
    office.add("drink", every_seconds=600)
    read = office.service.store.read

    def read_until_it_ran() -> list:
        rows = read()
        while office.service.running:
            time.sleep(0.001)
        return rows

    async def test() -> None:
        office.now += timedelta(minutes=10)
        office.fire = lambda job: asyncio.sleep(0.05)
        await office.service.tick()
        office.service.store.read = read_until_it_ran
        tick = asyncio.create_task(office.service.tick())
        await asyncio.sleep(0)
        office.service.store.read = read  # for the run that is recorded
        await tick

    asyncio.run(test())
    assert len(office.fired) == 1


@pytest.mark.parametrize("damage", [b"", b"[]", b"\xff\xfe{"])
def test_a_damaged_file_is_told_kept_and_never_taken_for_no_jobs(tmp_path, caplog, damage):
    office = Office(tmp_path)
    office.add("drink", every_seconds=60)
    office.path.write_bytes(damage)
    with pytest.raises(OSError, match="jobs.json is damaged: "):
        office.add("new", at="2027-01-01")
    assert office.pass_time(120) == []
    assert caplog.text.count("jobs.json is damaged: ") == 1
    assert office.path.read_bytes() == damage


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            {"message": "x", "cron_expr": "0 9 * * *", "tz": "Mars/Olympus"},
            "no time zone 'Mars/Olympus'",
        ),
        (
            {"message": "x", "cron_expr": "0 0 31 2 *"},
            "No job was added for '0 0 31 2 \\*': it never runs",
        ),
        ({"message": "x", "at": "2026-11-20"}, "never runs. It is now Sat 2026-11-21 12:00 CET"),
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
        ({"in_seconds": 600}, "2026-11-21T12:10:00+01:00", "Sat 2026-11-21 12:10 CET"),
        ({"cron_expr": "0 9 1 1 *", "tz": "UTC"}, "0 9 1 1 * UTC", "Fri 2027-01-01 10:00 CET"),
    ],
)
def test_the_model_is_told_when_a_job_comes(tmp_path, schedule, shown, answer):
    office = Office(tmp_path)
    added = office.cron("add", "Stretch!", **schedule)
    listed = f"{office.rows()[0]['id']} · {shown} · next {answer} · telegram:42 · Stretch!"
    assert (added, office.cron("list")) == (f"Added job {listed}", listed)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="only POSIX can fork")
def test_a_kill_between_any_two_steps_of_writing_leaves_all_or_nothing(tmp_path):
    def change_and_die(store: JobStore, step: int) -> None:
        steps = itertools.count()

        def audit(event: str, arguments: tuple) -> None:
            is_ours = event in ("open", "os.rename") and "jobs" in str(arguments[0])
            if (is_ours or event == "fcntl.flock") and next(steps) == step:
                os._exit(9)

        sys.addaudithook(audit)
        store.edit("new", {"message": "x" * 100_000}, is_new=True)
        os._exit(0)

    ends = []
    for step in itertools.count():
        path = tmp_path / str(step) / "jobs.json"
        path.parent.mkdir()
        path.write_text('{"jobs": [{"id": "old"}]}')
        store = JobStore(path, locked, write_atomically)
        child = os.fork()
        if not child:
            change_and_die(store, step)
        status = os.waitpid(child, 0)[1]
        ends.append([row["id"] for row in store.read()])
        store.edit("next", {}, is_new=True)  # no lock and no rest is in the way
        assert [row["id"] for row in store.read()] == [*ends[-1], "next"]
        if status == 0:
            break
    assert step >= 3 and ends == sorted(ends)
    assert (ends[0], ends[-1]) == (["old"], ["old", "new"])


def test_a_job_makes_no_job(tmp_path):
    in_a_job = SimpleNamespace(channel="cron", chat_id="1")
    with pytest.raises(CronError, match="A running job cannot add jobs"):
        Office(tmp_path).service.cron("add", "more", every_seconds=60, turn=in_a_job)


# ---- Heartbeat ----


@pytest.mark.parametrize(
    ("text", "active"),
    [
        ("# Heartbeat\r\n\n## Tasks\n---\n- [ ]\n-\n", ""),
        ("<!-- write tasks here\n- [ ] like this -->\n", ""),
        ("- [x] call Ann\n  her number is 555\n* [X] done\n", ""),
        ("# Tasks\n- [x] call Ann\n- [ ] water the plants\n", "# Tasks\n\n- [ ] water the plants"),
    ],
)
def test_what_is_to_be_done_at_a_heartbeat(text, active):
    assert active_tasks(text) == active
