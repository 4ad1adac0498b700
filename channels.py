"""How messages enter and leave the program: many chats, one agent.

A channel turns a person's text into an InboundMessage, and shows the person an OutboundMessage:

    InboundMessage("telegram", "7", "42", "What is in a.txt?")  → bus →  the agent
    OutboundMessage("telegram", "42", "It says hello.")         ← bus ←  the agent

The one rule: a sender keeps its message until the receiver acknowledges it. `await bus.publish(…)`
ends when the agent has stored the message; `on_delivered` is called when an answer has arrived.
Telegram, for example: `getUpdates(offset=501)` returns message 501. Only when 501 is on disk, the
next request asks from 502 on, which tells the server to forget 501.
Read this file last. Not covered: turns, sessions, options. The file works alone:

    import asyncio
    from channels import CLI, OutboundMessage

    asyncio.run(CLI().send(OutboundMessage("cli", "me", "It says hello.")))
"""

import asyncio
import html
import io
import itertools
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from asyncio import create_task, run_coroutine_threadsafe, timeout, wait, wrap_future
from codecs import getincrementaldecoder
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime, timedelta, tzinfo
from functools import cache, lru_cache
from pathlib import Path
from queue import Empty, SimpleQueue
from secrets import compare_digest, token_hex, token_urlsafe
from select import select
from typing import Annotated, Literal
from unicodedata import east_asian_width
from urllib.parse import quote, unquote
from zoneinfo import ZoneInfo

log = logging.getLogger("nanobot.channels")

# ---- Many channels, one agent ----


@dataclass
class InboundMessage:
    channel: str
    sender_id: str
    chat_id: str
    content: str
    media: Sequence[Path] = ()
    message_id: str = ""  # set by the channel; the agent ignores a second message with the same id
    speaker: str = ""  # the sender's name; only in a group
    stored: asyncio.Future | None = None  # done when the message is on disk

    @property
    def session_key(self):
        return f"{self.channel}:{self.chat_id}"

    def confirm(self):
        """Tell the sender that the message is on disk."""
        if self.stored and not self.stored.done():  # false if nobody is waiting
            self.stored.set_result(None)


class MessageBus:
    def __init__(self, sleep=asyncio.sleep):
        self.channels = {}  # name → Channel
        self._inbound = asyncio.Queue()  # of InboundMessage
        self._listening = []  # tasks
        self._waiting = defaultdict(deque)  # (channel, chat id, is it a file?) → messages
        self._deliveries = {}  # the same keys → tasks
        self._sleep = sleep

    def open(self, channel: "Channel"):
        """Start to receive messages from the channel, and to send messages to the channel."""
        self.channels[channel.name] = channel
        self._listening.append(create_task(channel.listen(self)))

    def publish(self, message: InboundMessage):
        """Queue a message. The future is done after `confirm()`, when the message is on disk."""
        message.stored = asyncio.Future()
        self._inbound.put_nowait(message)
        return message.stored

    async def next(self) -> InboundMessage:
        """Wait for a message. The caller writes the message to disk, then calls `confirm()`."""
        return await self._inbound.get()

    def send(self, message: "OutboundMessage"):
        """Queue a message for its chat. A slow chat delays no other chat, and an upload no text."""
        channel = self.channels.get(message.channel)
        if not channel:
            if message.kind == "final":
                log.warning("There is no channel %r: the answer is dropped", message.channel)
            return
        key = (message.channel, message.chat_id, message.kind == "file")
        waiting = self._waiting[key]
        waiting.append(message)
        if len(waiting) == 1:  # otherwise, `deliver` is running already
            self._deliveries[key] = create_task(deliver(channel, waiting, self._sleep))

    async def close(self, seconds):
        """Wait at most `seconds` for the delivery of queued messages, then stop the channels."""
        deliveries = self._deliveries.values()
        if deliveries:
            await wait(deliveries, timeout=seconds)
        await end_all([*deliveries, *self._listening], 1.0)


@dataclass
class OutboundMessage:
    channel: str
    chat_id: str
    content: str  # an empty final message only reports that the turn has ended
    # also "delta" (a piece of an answer), "progress", "tool_hint", "retry" and "file" (only media)
    kind: str = "final"
    media: Sequence[Path] = ()
    reply_to: str = ""  # the message_id of the InboundMessage that is answered
    parts_sent: int = 0  # the number of parts already sent; a retry skips these parts
    failures: int = 0  # the number of failed attempts to send the message
    on_delivered: Callable = lambda: None


class Refused(Exception):
    """`Channel.send` raises Refused if a message can never be delivered: there is no retry."""


class Channel:
    """A place where people write, such as Telegram. `start` publishes messages from allowed people
    until its task is cancelled. `send` delivers a message. If `send` raises Refused, a retry cannot
    help. Any other exception may have an attribute `retry_after`: the seconds until a retry."""

    name = ""
    shows_deltas = False  # do people see an answer while the model writes it?

    def __init__(self, allow_from=()):
        self.allow_from = [str(sender_id) for sender_id in allow_from]

    async def start(self, bus: MessageBus): ...
    async def send(self, message: OutboundMessage): ...

    async def listen(self, bus):
        try:
            await self.start(bus)
        except Exception as problem:
            log.error("%s: the channel has stopped listening: %s", self.name, problem)

    def is_allowed(self, sender_id):
        """[] → nobody, ["*"] → everybody, ["7", 8] → senders whose id is exactly 7 or 8."""
        return "*" in self.allow_from or str(sender_id) in self.allow_from


# ======== Second reading: outboxes, the terminal, Telegram, timed jobs, the web page ========


# ---- The delivery to a chat ----
# Each chat has its own queue. If Telegram answers "429 Too Many Requests: retry after 30" in one
# chat, the other chats do not wait. The files of a chat have a queue of their own.


async def deliver(channel, waiting, sleep):
    """Send the messages for one chat in order, until none is waiting. Retry each answer or file
    until it arrives or is refused, with pauses of 1, 2, 4, … up to 60 s. Try the other kinds, such
    as a delta, once."""
    while waiting:
        message = waiting[0]
        chat = f"{channel.name}: chat {message.chat_id}"
        try:
            await channel.send(message)
        except Refused as refusal:
            log.error("%s refuses a message, which is dropped: %s", chat, refusal)  # go on below
        except Exception as problem:
            if not message.failures:  # log the first failure only
                log.warning("%s cannot be reached yet: %s", chat, problem)
            if message.kind in ("final", "file"):
                await sleep(getattr(problem, "retry_after", 0) or min(2**message.failures, 60))
                message.failures += 1
                continue
        try:
            message.on_delivered()
        except Exception as problem:  # the message has arrived: no retry
            log.error("%s: a delivery could not be recorded: %s", chat, problem)
        waiting.popleft()  # not earlier, because `MessageBus.send` starts a task if none is waiting


async def end_all(tasks, seconds=None):
    """Cancel all unfinished tasks; wait at most `seconds` until the tasks have ended."""
    for task in tasks:
        if not task.cancelling():  # a second cancel would interrupt the task's cleanup
            task.cancel()
    if tasks:
        await wait(tasks, timeout=seconds)


# ---- Text for a terminal ----
# Text from a web page may clear the screen ("\x1b[2J") or reverse the direction of writing.

# Control characters (C0 except tab and newline, DEL, C1), bidi controls, zero-width characters,
# tag characters, letters that look like blanks (U+2800, U+115F), and lone surrogates, which cannot
# be encoded. The soft hyphen and the two joiners are allowed: a Persian word or the emoji of a
# family may contain a joiner.
UNSAFE = (
    "[\0-\b\v-\x1f\x7f-\x9f\u061c\u115f\u1160\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\u2800\u3164\ud800-\udfff\ufeff\uffa0\ufff9-\ufffb\U000e0000-\U000e01ef]"
)  # "\x1b[2J"
# Invisible letters that are allowed in an answer, as in "می\u200cخواهم", but not in a command to be
# approved: "r\u200dm" looks like "rm".
JOINERS = "[\xad\u034f\u17b4\u17b5\u180b-\u180d\u200c\u200d\ufe00-\ufe0f]"


def printable(text, unsafe=UNSAFE):
    """Show each unsafe character as text: ESC, which starts a color code, becomes `\\x1b`."""
    return re.sub(unsafe, lambda match: match[0].encode("unicode_escape").decode(), text)


class PrintableFormatter(logging.Formatter):
    """Shows unsafe characters as text, because a warning may quote a tool's result. All lines after
    the first are indented, so that a quoted text cannot imitate a log line."""

    def format(self, record):
        return printable(super().format(record)).replace("\n", "\n    ")


MARKED = {"command": "$ ", "old_text": "-", "new_text": "+", "content": "+", "source": "+"}


def approval_question(name, arguments, always=""):
    """Shows the whole call. The lines of a command and of a change are marked, so that they cannot
    imitate the question; the other arguments are JSON. `always`: what this answer would allow.

    ("edit_file", {"path": "a.py", "old_text": "x = 1", "new_text": "x = 2"}, "edit_file")
    → `edit_file {"path": "a.py"}`, `-x = 1`, `+x = 2`, `Run it? [y/N/always] …`
    """
    rest = dict(arguments)
    lines = []
    for key, mark in MARKED.items():
        if isinstance(rest.get(key), str):
            text = rest.pop(key)
            if key == "content":  # of a file: "a\n" is one line, not a line and an empty one
                text = text.removesuffix("\n")
            # as bash marks the lines: "$ cat <<E", "> hi", "> E"
            lines.append(mark + text.replace("\n", "\n" + mark.replace("$", ">")))
    others = json.dumps(rest, ensure_ascii=False) if rest else ""
    question = "Run it? [y/N] (or n REASON) "
    if always:
        question = f"Run it? [y/N/always] (n REASON; always: {always} until you quit) "
    lines = [f"{name} {others}".rstrip(), *lines, question]
    return printable("\n".join(lines), f"{UNSAFE}|{JOINERS}")


# ---- Signals and standard streams ----
# The program also works after `2>&-`, `>&-` (closed streams) and with `nohup nanobot gateway &`.


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM and SIGHUP, to stop the current turn (like Ctrl-C) and the conversation."""


def terminate(*_):
    raise Terminated


def end_on_signals(handler=terminate):
    """SIGTERM and SIGHUP call `handler`; a signal that was ignored at the start stays ignored."""
    for name in ("SIGTERM", "SIGHUP", "SIGBREAK"):  # Windows has no SIGHUP, only it has Ctrl-Break
        number = getattr(signal, name, None)
        if number and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def prepare_streams():
    """Open each closed standard stream as the null device, because Python sets a closed stream to
    None, which has no method `isatty`. Replace characters that cannot be encoded."""
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if not stream:
            stream = open(os.devnull, "r" if name == "stdin" else "w")  # noqa: SIM115
            setattr(sys, name, stream)
        if isinstance(stream, io.TextIOWrapper):  # false in a notebook
            stream.reconfigure(errors="replace")
            if os.name == "nt":
                os.system("")  # switches the escape codes on, else cmd.exe shows `←[2m`
                if isinstance(
                    getattr(stream.buffer, "raw", stream.buffer), io.FileIO
                ):  # not a console: UTF-8, whatever the code page is
                    stream.reconfigure(encoding="utf-8")
                    stream.isatty = lambda: False  # Windows says that NUL is a terminal


# ---- The keyboard ----


# Keys that type nothing: the arrows "\x1b[A"   "\x1b[1;5C"   F1 "\x1bOP"   Ctrl-A "\x01"
# Alt-b "\x1bb"
SILENT_KEY = r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|O.|.)?|[\0-\x07\x0b-\x14\x16\x18-\x1a\x1c-\x1f]"
ERASING_KEYS = {  # key → what it erases at the end of a line
    "\x7f": r"[^\n]\Z",  # Backspace
    "\x15": r"(?<![^\n])[^\n]+\Z",  # Ctrl-U: the whole line
    "\x17": r"(?<!\S)\S+[^\S\n]*\Z",  # Ctrl-W: the last word, and the blanks after it
}


def edited(draft, keys):
    """The draft after some keys were pressed: ("ab", "c\\x7fd") → "abd" """
    for key in re.sub(SILENT_KEY, "", keys.replace("\r", "\n")):
        if key in ERASING_KEYS:
            draft = re.sub(ERASING_KEYS[key], "", draft)
        else:
            draft += key
    return draft


# ---- The bottom line of the terminal ----


def start_of(text, columns):
    """The longest start of the text that fits: ("abcde", 3) → "abc"; ("漢字", 3) → "漢" """
    start = text[:columns]
    while start and width_of(start) > columns:
        start = start[:-1]
    return start


def width_of(text):
    """The columns that a text takes. A Chinese character or an emoji takes two."""
    return sum(2 if east_asian_width(letter) in "WF" else 1 for letter in text)


def write_now(text, file):
    print(text, end="", file=file, flush=True)


class BottomLine:
    """During a turn, the last line shows what the user types, or else what the turn waits for:

    › and look at b.t
    queued: and look at b.txt
    waiting for the model …

    It stands below the text that is printed: CLI prints everything by `print`, which erases the
    line first. The terminal itself shows no key, because keys would appear in the middle of an
    answer. Only the main thread begins to draw, because it knows whether a question is open."""

    prompt = ""  # the prompt or question at which the user is typing now
    draft = ""  # what the user is typing; after the turn, it stands in the next prompt
    what = ""  # what the turn waits for
    drawn = ""  # what the line shows now
    unfinished = ""  # the last line of the printed text; "" if that line has ended
    _usual = None  # the terminal's settings, while it does not show the keys

    def __init__(self, err, clock=time.monotonic):
        self.err = err
        self.clock = clock
        self.can_draw = err.isatty()
        self.queued = []  # what was typed and ended with Enter
        self._lock = threading.RLock()  # the main thread and the loop's thread both print
        self._decoder = getincrementaldecoder("utf-8")("replace")  # a letter comes in parts

    def begin(self, what):
        """After a second, show what the turn waits for, such as `the model`; "": for nothing."""
        if not self.what:
            self.since = self.clock()  # since when it waits
        self.what = what

    def close(self):
        """Erase the line, and let the terminal show the keys again."""
        self.what = ""
        self.erase()
        self.unfinished = ""
        if self._usual:
            import termios

            termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, self._usual)
            self._usual = None

    def ask(self, question):
        """Print a question, which may have several lines. Returns the user's answer: what was typed
        before, also the rest of a line that the user is typing, is none, but stays in the draft."""
        try:
            self.hear(0.5)
        finally:
            self.close()
        before, line_end, prompt = printable(question).rpartition("\n")
        write_now(before + line_end, sys.stderr)
        return self.read(prompt)

    def read(self, prompt):
        """Read a line from the keyboard. If stdout is no terminal, print the prompt to stderr."""
        self.prompt = prompt
        if not sys.stdout.isatty():
            write_now(prompt, sys.stderr)
            prompt = ""
        try:
            line = input(prompt)
        finally:
            self.prompt = ""
        if line == "\x04":  # Ctrl-D and Enter on Windows, where the end is Ctrl-Z
            raise EOFError
        return line

    def hear(self, quiet=0.0):
        """Take what was typed, until the keyboard has been quiet for so many seconds. Enter queues
        the draft. Pasted lines are one message; if the last of them has no end, it waits for
        Enter."""
        self.draft = edited(self.draft, self._decoder.decode(self._keys(quiet)))
        if self.draft.endswith("\n"):
            if line := self.draft.strip():
                self.queued.append(line)
            self.draft = ""

    def _keys(self, quiet):
        data = b""
        with suppress(ImportError, OSError, AttributeError):  # Windows, or no terminal
            import termios
            import tty

            keyboard = sys.stdin.fileno()
            if os.tcgetpgrp(keyboard) != os.getpgrp():
                return data  # the system would stop a background program that reads
            settings = termios.tcgetattr(keyboard)
            if settings[tty.LFLAG] & termios.ECHO and (self.can_draw or quiet):
                self._usual = settings
                tty.setcbreak(keyboard, termios.TCSANOW)  # keys come at once and are not shown
            while select([keyboard], [], [], quiet)[0]:
                data += os.read(keyboard, 4_096)
        return data

    def take_back(self):
        """Queued messages go into the next prompt, where the user can change them; commands run."""
        messages = [line for line in self.queued if not line.startswith("/")]
        self.draft = "\n".join([*messages, self.draft]).strip()
        self.queued = [line for line in self.queued if line not in messages]

    def draw(self):
        with self._lock:
            line = self._line() if self.can_draw else ""
            if line == self.drawn:
                return
            self.erase()
            self.drawn = line
            self.drawn_width = self._columns  # the window may become narrower or wider
            if line:
                write_now(f"{self._way_below()}\r\x1b[K\x1b[2m{line}\x1b[0m", self.err)

    @property
    def _columns(self):
        return os.get_terminal_size(self.err.fileno()).columns or 80  # a serial line says 0

    def _line(self):
        room = self._columns - 1  # a full row would break the line
        if self.draft:
            draft = printable(self.draft.expandtabs(1).replace("\n", "⏎"))
            return "› " + start_of(draft[::-1], room - 2)[::-1]  # the end of a long draft
        if self.queued:
            line = f"queued: {self.queued[-1]}"
        elif self.what and self.clock() >= self.since + 1.0:
            line = f"waiting for {self.what} …"
        else:
            return ""
        return start_of(printable(" ".join(line.split())), room)

    def _way_below(self):
        """Codes that keep the place in an unfinished line, and move to the row below."""
        if not self.unfinished:
            return ""
        # after the last column of a row, the cursor is still in that row: a blank moves it on
        wrap = "" if width_of(self.unfinished) % self._columns else " \r"
        return f"{wrap}\x1bD\x1b[A\x1b7\n"  # in the last row of the window, \x1bD scrolls

    def erase(self):
        with self._lock:
            if self.drawn:
                # a window that became narrower has broken the line into several rows
                up = "\x1b[A" * ((width_of(self.drawn) - 1) // self._columns)
                if self.drawn_width != self._columns:
                    self.unfinished = ""  # the place has moved: go on in a row of its own
                back = "\x1b8" if self.unfinished else ""
                self.drawn = ""
                write_now(f"{up}\r\x1b[J{back}", self.err)

    def print(self, text, file):
        """Print text above the line."""
        with self._lock:
            was_drawn = self.drawn
            self.erase()
            write_now(text, file)
            self.unfinished = (self.unfinished + text).rpartition("\n")[2]
            if was_drawn:  # not while a question is open
                self.draw()


# ---- The event loop on its own thread ----
# The main thread reads the keyboard, because `input` blocks and Ctrl-C reaches only this thread.


class BackgroundLoop:
    """The agent runs on the event loop of a daemon thread; the main thread reads the keyboard:

    main thread                               loop's thread
    complete(turn)      ── start ──────────►  the turn …
    reads the keyboard  ◄─ question ────────  await ask("Run it? ")
                        ── answer ─────────►  … goes on
    Ctrl-C              ── cancel ─────────►  … its `finally`
    returns             ◄─ None ────────────  … its end
    """

    def __init__(self, close=None):
        self.loop = asyncio.new_event_loop()
        self.close = close  # awaited on the loop when the `with` block ends
        self.bottom = BottomLine(io.StringIO())  # this draws nothing
        self._turn = self.loop.create_future()  # the current or the last turn
        self._turn.cancel()  # no turn is running
        self._questions = SimpleQueue()  # (answer, question), or None at the end
        on_thread(self._serve)

    def _serve(self):
        self.loop.run_forever()
        self.loop.close()  # releases the loop's pipes and threads

    def complete(self, work, hears=False):
        """Run `work`. On Ctrl-C, cancel `work`, wait for its end, and raise KeyboardInterrupt.
        `hears`: what the user types meanwhile is queued in `bottom`."""
        questions = SimpleQueue()  # a new queue contains no old question and no old None
        self._questions = questions

        def start():
            self._turn = self.loop.create_task(work)
            self._turn.add_done_callback(lambda _: questions.put(None))

        try:
            self.loop.call_soon_threadsafe(start)
            while asked := self._next(hears):
                answer, question = asked
                if answer.set_running_or_notify_cancel():  # false if `ask` was cancelled
                    answer.set_result(self.bottom.ask(question))
        except BaseException as stop:
            self.loop.call_soon_threadsafe(lambda: self._turn.cancel())
            while self._next(hears):
                pass  # do not answer questions: `ask` fails when the turn has ended
            if isinstance(stop, EOFError):  # Ctrl-D at a question
                raise KeyboardInterrupt from None
            raise
        finally:
            self.bottom.close()
        return self._turn.result()

    def _next(self, hears):
        """Return a question, or None if the turn has ended."""
        while True:
            if hears:
                self.bottom.hear()
            self.bottom.draw()
            # without a timeout, `get` would ignore a Ctrl-C that reached another thread
            with suppress(Empty):
                return self._questions.get(timeout=0.05)  # a key is shown within this time

    async def ask(self, question, what="", **details):
        """Ask the person at the terminal for a line. `what` and `details` are for the web page.
        Raises RuntimeError if no turn is running, or if it ends before the person answers."""
        answer = Future()
        self._questions.put((answer, question))
        answered = wrap_future(answer)
        try:
            await wait([answered, self._turn], return_when="FIRST_COMPLETED")
            if answered.done():
                return answered.result()
            raise RuntimeError("Nobody can be asked: no turn is running at the terminal.")
        finally:
            answer.cancel()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        ended = run_coroutine_threadsafe(self._end(), self.loop)
        while not ended.done():
            with suppress(KeyboardInterrupt):  # Ctrl-C must not stop the cleanup
                ended.exception()  # waits for the end
        self.loop.call_soon_threadsafe(self.loop.stop)
        if problem := ended.exception():
            log.warning("the cleanup at the end has failed: %s", problem)

    async def _end(self):
        """Call `close`, cancel all other tasks, and wait at most 5 s for the end of these tasks."""
        try:
            if self.close:
                await self.close()
        finally:
            await end_all(asyncio.all_tasks() - {asyncio.current_task()}, 5.0)


# ---- The terminal ----


COLOURS = {"+": 32, "-": 31}  # first character → ANSI code; else 2, dim


class CLI(Channel):
    """Prints answers to `out`: piece by piece on a terminal, only whole answers into a pipe."""

    name = "cli"
    shows_deltas = True
    _streamed = ""  # the text of an unfinished answer so far

    def __init__(
        self,
        out=None,
        err=None,
        kinds=("progress", "tool_hint", "retry"),  # printed to `err`
    ):
        self.out = out or sys.stdout
        self.err = err or sys.stderr
        self.kinds = kinds
        self.live = self.out.isatty()
        self.bottom = BottomLine(self.err)
        self.bottom.can_draw &= self.live  # in `nanobot -m hi | cat`, cat prints at any time

    async def send(self, message):
        kind = message.kind
        if kind == "delta":
            if self.live:
                self._streamed += message.content
                self.bottom.begin("")
                self._print(message.content)
        elif kind == "final" or (kind == "progress" and self._streamed):
            self._end_text(message.content)
        elif kind in self.kinds:
            self.note(message.content)

    def _print(self, text):
        """Print `text`: unchanged to a pipe or file, with visible escape codes on a terminal."""
        if self.live:
            text = printable(text)
        self.bottom.print(text, self.out)

    def _end_text(self, text):
        """Print the rest of the answer: after "Hel", of "Hello." the text "lo."; but a different
        text, "Bye.", gets a new line."""
        shown = self._streamed.strip()  # providers remove blanks at both ends of the final text
        rest = text.lstrip()
        rest = rest.removeprefix(shown) if rest.startswith(shown) else f"\n{text}"
        self._print(rest.removesuffix("\n") + "\n")
        self._streamed = ""

    def note(self, text):
        """Print lines to stderr, on a terminal dim, or red and green if they are of a diff. First,
        end a streamed answer's line."""
        if self._streamed:
            self._end_text(self._streamed)
        lines = printable(text).split("\n")
        if self.err.isatty():
            lines = [f"\x1b[{COLOURS.get(line[:1], 2)}m{line}\x1b[0m" for line in lines]
        self.bottom.print("\n".join(lines) + "\n", self.err)

    def report(self, text):
        """Print a job's report at once, then the prompt again with the text typed so far."""
        if prompt := self.bottom.prompt:
            with suppress(ImportError):
                import readline

                prompt += printable(readline.get_line_buffer())
        self.bottom.print(f"\r\x1b[K{printable(text).rstrip()}\n{prompt}", self.err)
        self.bottom.unfinished = ""  # Enter will end the line of the prompt

    def take_queued(self):
        """The lines that the running turn gets, as keywords for messages; a command waits for the
        turn's end."""
        queued = self.bottom.queued
        taken = []
        while queued and not queued[0].startswith("/"):
            line = queued.pop(0)
            self.note(f"› {line}")
            taken.append({"content": line})
        return taken

    def converse(self, ask, history):
        """Read and answer lines until the user exits. Ctrl-C stops a turn; Ctrl-D exits."""
        while True:
            text = ""
            try:
                text = self.read_line("> ", history).strip()
                if text in ("exit", "quit", "/exit", "/quit"):
                    return 0
                if text:
                    ask(text)
            except EOFError:
                self.note("")
                return 0
            except Terminated:
                raise
            except KeyboardInterrupt:
                self.note("\nstopped; /continue resumes the turn" if text else "")
                self.bottom.take_back()
            except Exception as problem:  # a failed turn does not end the conversation
                if not text:
                    raise  # `read_line` failed, for example because the terminal is closed
                log.info("the turn failed", exc_info=True)
                self.note(f"Sorry, that failed: {problem}")

    def read_line(self, prompt, history):
        """Read a line, with line editing and history; the first one may be queued already. Raises
        EOFError on Ctrl-D."""
        if self.bottom.queued:
            line = self.bottom.queued.pop(0)
            self.note(f"{prompt}{line}")
            return line
        # there is no readline on Windows; other systems have one without some of the functions
        missing = (ImportError, OSError, AttributeError)
        with suppress(*missing):
            import readline

            def insert_draft():
                readline.insert_text(self.bottom.draft)
                self.bottom.draft = ""
                readline.set_startup_hook()  # the next input may be the answer to a question

            readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines are one message
            readline.set_startup_hook(insert_draft)
            if not readline.get_current_history_length():  # this program's first line
                history.parent.mkdir(exist_ok=True)
                history.touch(0o600)  # `append_history_file` needs the file to exist
                readline.read_history_file(history)
        line = self.bottom.read(prompt)
        if line and self.live:
            with suppress(*missing):
                import readline

                readline.append_history_file(1, history)
        return line

    def read_piped(self, beside_message, folder):
        """Read standard input. With -m, wait at most 3 s, because a pipe may never send a byte, and
        leave a file alone that another program is reading. Return the text, or save a long text in
        a file and return the start and the path: `nanobot -m "what went wrong?" < server.log` must
        not put 50 MB into the journal."""
        begun = b""
        if beside_message:
            if stdin_is_partly_read():
                return ""
            try:  # Windows cannot `select` a pipe
                begun = on_thread(os.read, sys.stdin.fileno(), 65_536).result(3.0)
            except TimeoutError:
                self.note("nanobot: standard input is open but silent, going on without it")
                return ""
        data = begun + sys.stdin.buffer.read()
        text = data.decode("utf-8-sig", "replace").strip()  # PowerShell sends a BOM
        if text and beside_message:
            self.note(f"attached: {len(text):,} characters from standard input")
        if len(text) <= 100_000:
            return text
        folder.mkdir(0o700, exist_ok=True)
        path = folder / f"{token_hex(8)}.txt"
        path.write_bytes(data)
        return (
            f"{text[:10_000]}\n[standard input is longer: all of it is in {path}. Use grep, or "
            "read_file in pages]"
        )


def stdin_is_partly_read():
    """True for the list of `while read name; do nanobot -m "…"; done < list`: a file from which
    another program reads line by line."""
    try:
        return os.lseek(sys.stdin.fileno(), 0, os.SEEK_CUR) > 0
    except OSError:  # a pipe, or a window of an IDE
        return False


# ---- The Bot API of Telegram ----
# Every URL contains the token, so the code removes the token from each error text.

# tools.py has `in_thread`, too, and memory.py `warn_once`: these files do not import each other.


async def in_thread(function, /, *args):
    return await wrap_future(on_thread(function, *args))


def on_thread(function, /, *args):
    """Run a blocking function on a daemon thread, because asyncio's own threads delay the exit."""
    future = Future()
    future.set_running_or_notify_cancel()  # if the caller is cancelled, the thread still finishes

    def work():
        try:
            future.set_result(function(*args))
        except BaseException as failure:
            future.set_exception(failure)

    threading.Thread(target=work, daemon=True).start()
    return future


class TelegramError(Exception):
    """A call of the Bot API has failed; a retry may help. The error text contains no token."""

    def __init__(self, text, retry_after=0):
        super().__init__(text)
        self.retry_after = retry_after  # in seconds, from a response 429 "Too Many Requests"


class BotAPI:
    """`await api.call("sendMessage", chat_id=1, text="Hi")`: https://core.telegram.org/bots/api"""

    def __init__(self, token, base):
        self.token = quote(token.strip(), safe=":")  # quoted if it is no token at all
        self.base = base.rstrip("/")

    async def call(self, method, seconds=60, **fields):
        """The method's result. Raises TelegramError if a retry may help (with a wrong token, after
        a minute), and Refused if a retry cannot help (400, 403 "bot was blocked", 413)."""
        return await self._ask(method, json.dumps(fields).encode(), "application/json", seconds)

    async def upload(self, kind, chat_id, path):
        """Send a file as a "photo" or a "document". Raises the errors of `call`, also Refused if
        the file is too large, and OSError if it cannot be read."""
        size = path.stat().st_size
        if size > 50_000_000:  # Telegram would refuse it after the upload
            raise Refused(f"it has {size:,} bytes, and Telegram accepts at most 50,000,000")
        boundary = token_hex(16)
        file_name = re.sub(r"[^\w.-]", "_", path.name)  # a"b.txt, for example
        head = (
            f"--{boundary}\r\n"
            f"Content-Disposition: form-data; name=chat_id\r\n\r\n{chat_id}\r\n"
            f"--{boundary}\r\n"
            f"Content-Disposition: form-data; name={kind}; filename={file_name}\r\n\r\n"
        )
        body = head.encode() + await in_thread(path.read_bytes) + f"\r\n--{boundary}--\r\n".encode()
        return await self._ask(
            f"send{kind.title()}", body, f"multipart/form-data; boundary={boundary}", 300
        )

    async def _ask(self, method, body, form, seconds):
        status, data = await self._exchange(f"bot{self.token}/{method}", seconds, body, form)
        try:
            answer = json.loads(data)
            if answer["ok"]:
                return answer["result"]
        except (ValueError, TypeError, KeyError):  # the page of a proxy
            raise TelegramError(f"{method}: {status} not the Bot API") from None
        problem = self._scrub(f"{method}: {status} {answer.get('description')}")
        if status in (401, 404):
            raise TelegramError(
                "Telegram does not know this bot token. Copy it again from @BotFather into "
                "channels.telegram.token (and check apiBase, if it is set), then restart nanobot",
                60,
            )
        if status in (400, 403, 413):
            raise Refused(problem)
        raise TelegramError(problem, answer.get("parameters", {}).get("retry_after", 0))

    async def download(self, path):
        """Download a file by the `file_path` from getFile; the server sends at most 20 MB."""
        status, data = await self._exchange(f"file/bot{self.token}/{quote(path)}", 300)
        if status != 200:
            raise TelegramError(f"HTTP {status}")
        return data

    async def _exchange(self, address, seconds, body=None, form=""):
        """Returns the status and the body of the response."""
        from urllib.error import HTTPError
        from urllib.request import Request, urlopen

        def fetch():
            request = Request(f"{self.base}/{address}", body, {"Content-Type": form})
            try:
                response = urlopen(request, timeout=seconds)
            except HTTPError as refusal:  # it has a status and a body, too
                response = refusal
            with response:
                return response.status, response.read()

        try:
            async with timeout(seconds):  # a DNS lookup has no time limit of its own
                return await in_thread(fetch)
        except TimeoutError:
            problem = f"no answer in {seconds:g} s"
        except Exception as failure:  # the text of any error may contain the token
            problem = self._scrub(f"{type(failure).__name__}: {failure}")
        raise TelegramError(problem)  # raised after `except`, so that no traceback shows the token

    def _scrub(self, text):
        return text.replace(self.token, "<token>")


# ---- Telegram as a channel ----
# The server sends each message again until `getUpdates` asks for a higher offset.


class Telegram(Channel):
    """The user's own Telegram bot. Files that people send are saved in `media_folder`."""

    name = "telegram"
    poll_seconds = 50  # if no message arrives within this time, the server returns []
    slack_seconds = 15  # getUpdates times out so many seconds after the server should answer
    _offset = 0  # all updates with a lower id are on disk

    def __init__(
        self,
        token,
        allow_from,
        *,
        api_base="https://api.telegram.org",
        group_policy="mention",  # "open": the bot reads all group messages
        media_folder,
        sleep=asyncio.sleep,
    ):
        super().__init__(allow_from)
        self.api = BotAPI(token, api_base)
        self.group_policy = group_policy
        self.media_folder = media_folder
        self.sleep = sleep
        self.bot = {}  # the bot's id and username, from getMe
        self._storing = {}  # update id → task that ends with `confirm()`
        self._order = defaultdict(asyncio.Lock)  # chat id → lock
        self._typing = {}  # chat id → task

    async def start(self, bus):
        """Listen until cancelled."""
        told = ""
        while True:
            try:
                await self._poll(bus)
                told = ""
            except Exception as failure:  # any error: polling must continue
                pause = max(10, getattr(failure, "retry_after", 0))
                if str(failure) != told:  # log each new problem once
                    told = str(failure)
                    log.warning("Telegram: %s. Retried every %s s.", told, pause)
                self.bot = {}  # `_poll` deletes a webhook again
                await self.sleep(pause)

    async def _poll(self, bus):
        """Publish the new messages. Set the offset to the first update that is not on disk yet.
        The server repeats all updates from the offset on; `_storing` has the known ones."""
        if not self.bot:  # groups need the bot's username; a webhook blocks getUpdates
            self.bot = await self.api.call("getMe")
            await self.api.call("deleteWebhook")
        updates = await self._get_updates(self.poll_seconds)
        if any("media_group_id" in update.get("message", {}) for update in updates):
            await self.sleep(2.0)
            updates = await self._get_updates(0)  # the same updates, now with the whole album
        albums = defaultdict(list)  # all messages of an album have one id
        for update in updates:
            if self._is_new(update):
                album_id = update["message"].get("media_group_id", update["update_id"])
                albums[album_id].append(update)
        for album in albums.values():
            storing = create_task(self._take([each["message"] for each in album], bus))
            self._storing |= {update["update_id"]: storing for update in album}
        if self._storing:  # at most 1 s, because other chats do not wait for one that is slow
            await wait(self._storing.values(), timeout=1.0)
        for update in updates:
            number = update["update_id"]
            if number in self._storing and not self._storing[number].done():
                break
            self._storing.pop(number, None)
            self._offset = number + 1

    async def _get_updates(self, seconds):
        """`allowed_updates` excludes edits and clicks; but the server still sends queued ones."""
        return await self.api.call(
            "getUpdates",
            seconds + self.slack_seconds,
            offset=self._offset,
            timeout=seconds,
            allowed_updates=["message"],
        )

    def _is_new(self, update):
        """True if the update is a message from an allowed person, and is not being stored already.
        Strangers do not even get a refusal, because a refusal shows that the bot runs; the owner
        finds their ids in the log."""
        sender = update.get("message", {}).get("from", {})
        if update["update_id"] in self._storing or sender.get("is_bot", True):
            return False
        if self.is_allowed(sender["id"]):
            return True
        warn_once(
            f"Telegram: no answer to {sender['id']} ({name_of(sender)}): "
            "not in channels.telegram.allowFrom"
        )
        return False

    async def _take(self, messages, bus):
        """Publish a message, or an album, which consists of several messages. Wait until it is on
        disk. A chat keeps its order, also while a file of an earlier message is downloaded."""
        try:
            chat_id = str(messages[0]["chat"]["id"])
            async with self._order[chat_id]:
                inbound = await self._inbound(messages)
                if not inbound:
                    return
                stored = bus.publish(inbound)
            self._stop_typing(chat_id)
            self._typing[chat_id] = create_task(self._type(chat_id))
            await stored
        except Exception:  # otherwise Telegram would send this message again and again
            log.warning("Telegram: an unreadable message is skipped", exc_info=True)

    async def _inbound(self, messages):
        """Combine messages into one. Returns None if the messages are empty or not for the bot."""
        chat = messages[0]["chat"]
        sender = messages[0]["from"]
        is_private = chat["type"] == "private"
        is_called = any(is_call(message, self.bot) for message in messages)
        if not (is_private or is_called or self.group_policy == "open"):
            return None
        texts = []
        media = []
        for message in messages:
            texts.append(with_quote(message))
            try:
                if file := file_in(message):
                    async with timeout(300.0):  # seconds; meanwhile the chat waits
                        media.append(await self._save(file))
            except (TelegramError, Refused, OSError) as failure:
                why = str(failure) or "it did not come within five minutes"
                texts.append(f"[this message had a file, but it cannot be fetched: {why}]")
        content = "\n".join(filter(None, texts))
        if not content and not media:
            return None  # an event; for example, somebody joined the group
        return InboundMessage(  # another bot can use the same `message_id`, so add the bot's id
            self.name,
            str(sender["id"]),
            str(chat["id"]),
            content,
            media,
            f"{messages[0]['message_id']}/{self.bot['id']}",
            "" if is_private else name_of(sender),
        )

    async def _save(self, file):
        """Save as `AgADBQ-report.pdf`, to keep an earlier file that is also named `report.pdf`."""
        for attempt in range(1, 31):  # five minutes, because the message comes only once
            try:
                place = (await self.api.call("getFile", file_id=file["file_id"]))["file_path"]
                data = await self.api.download(place)
                break
            except TelegramError as failure:
                if attempt == 30:
                    raise
                await self.sleep(failure.retry_after or 10)
        path = self.media_folder / file_name(file, place)
        path.parent.mkdir(parents=True, exist_ok=True)
        await in_thread(path.write_bytes, data)
        return path

    def _stop_typing(self, chat_id):
        if task := self._typing.pop(chat_id, None):
            task.cancel()

    async def _type(self, chat_id):
        with suppress(TelegramError, Refused):  # "typing" is not important
            for _ in range(75):  # five minutes; Telegram shows each signal for 5 s
                await self.api.call("sendChatAction", chat_id=chat_id, action="typing")
                await self.sleep(4.0)

    async def send(self, message):
        """Send the text in parts, then the files. A retry skips the parts already sent."""
        if message.kind in ("delta", "retry"):
            return
        if message.kind == "final":
            self._stop_typing(message.chat_id)
        target = {"chat_id": message.chat_id}
        if message.reply_to:  # "17/123456": message 17, and the bot's id
            target["reply_parameters"] = {
                "message_id": int(message.reply_to.partition("/")[0]),
                "allow_sending_without_reply": True,
            }
        parts = [*split_html(as_html(message.content)), *map(Path, message.media)]
        for part in parts[message.parts_sent :]:
            if isinstance(part, str):
                await self._send_text(part, target)
            else:
                await self._send_file(part, message, target)
            message.parts_sent += 1

    async def _send_text(self, text, target):
        """If Telegram refuses the HTML text, send plain text."""
        try:
            await self.api.call("sendMessage", text=text, parse_mode="HTML", **target)
        except Refused:  # 400 can't parse entities
            await self.api.call("sendMessage", text=plain_text(text), **target)

    async def _send_file(self, path, message, target):
        """If a file cannot be sent, send the reason, so that nobody waits for the file."""
        # The chat shows "sending a file". During an outage this small request fails first, which
        # costs no upload, and `deliver` tries again until Telegram can be reached.
        await self.api.call("sendChatAction", action="upload_document", **target)
        try:
            if path.suffix.lower() in (".jpg", ".jpeg", ".png", ".webp"):
                with suppress(Refused):  # 400 PHOTO_INVALID_DIMENSIONS
                    return await self.api.upload("photo", message.chat_id, path)
            return await self.api.upload("document", message.chat_id, path)
        except (TelegramError, Refused, OSError) as failure:
            if isinstance(failure, TelegramError) and message.failures < 4:
                raise  # `deliver` tries again: five uploads, as `failures` is 0 at the first one
            await self._send_text(as_html(f"[{path.name} cannot be sent: {failure}]"), target)


def name_of(sender):
    """{"first_name": "Ada\\n", "last_name": "Lovelace"} → "Ada Lovelace", at most 40 characters"""
    names = f"{sender.get('first_name', '')} {sender.get('last_name', '')}"
    return " ".join(names.split())[:40]


def file_name(file, place):
    """ "../a b.pdf" → "AgADBQ-.._a_b.pdf": the file's unique id and the end of its name, because
    file systems allow at most 255 bytes."""
    name = file.get("file_name", Path(place).name)
    return re.sub(r"[^\w.-]+", "_", f"{file['file_unique_id']}-{name[-60:]}")


def words_in(message):
    """The text, or what stands for it: {"location": {…}} → `[location: {"latitude": 52.5, …}]`"""
    words = message.get("text") or message.get("caption")
    if words:
        return words
    for key in ("venue", "location", "contact", "poll"):  # a venue has a location, too
        if key in message:
            return f"[{key}: {json.dumps(message[key], ensure_ascii=False)}]"
    return message.get("sticker", {}).get("emoji", "")


def with_quote(message):
    """The text after the text that it replies to. A command stays as it is."""
    text = words_in(message)
    quoted = words_in(message.get("reply_to_message", {}))
    if not quoted or text.startswith("/"):
        return text
    return f"[in reply to: {quoted[:1_000]}]\n{text}"


def file_in(message):
    """{"photo": [{small}, {"file_id": "A", …}]} → {"file_id": "A", …}; no file → {}"""
    if "photo" in message:
        return message["photo"][-1]  # the last picture is the largest
    for key in ("document", "voice", "audio", "video", "video_note"):
        if key in message:
            return message[key]
    return {}


def is_call(message, bot):
    """True if a message mentions the bot ("@my_bot, what…", "/stop@my_bot") or replies to it."""
    author = message.get("reply_to_message", {}).get("from", {})
    name = rf"(?i)@{re.escape(bot['username'])}(?!\w)"
    return author.get("id") == bot["id"] or re.search(name, words_in(message))


# ---- Telegram: Markdown becomes HTML, in parts of at most 4,096 characters ----
# Telegram refuses `a < b` ("400 can't parse entities") and a long text ("400 message is too long").
# Split a text after formatting, because `&lt;` is longer than `<`. Each part closes its open tags.
# Each pattern takes linear time: a match that starts with `**` ends at the next `**` at the latest.

# ```py ↵ a = 1 ↵ ```   not ```npm install```; an unclosed block extends to the end of the text
FENCE = (
    r"(?m)^[ \t]*```(?=[^`\n]*\n)(?:(?P<language>[\w+-]{0,40})[ \t]*\n)?"
    r"(?P<block>(?:.*\n)*?.*?)(?:^[ \t]*```[ \t]*$|\Z)"
)
CODE = r"(?<!`)(?P<ticks>`{1,3})(?!`)(?P<code>.{1,2000}?)(?<!`)(?P=ticks)(?!`)"  # `a`   ``a ` b``
LINK = (  # [a](http://b/c_(d))
    r"\[(?P<words>[^\[\]\n]{1,500})\]"
    r"\((?P<address>https?://(?:[^\s()\[\]]|\([^\s()\[\]]*\))+)\)"
)
HEADING = r"(?m)^#{1,6} +(\S.*)$"  # ## What to do
BOLD = r"\*\*(?=[^\s*])((?:[^*\n]|\*(?!\*))+?)(?<=[^\s*])\*\*"  # **now**
# *now*   *now and **then***   not 2 * 3 * 4; a match may contain <b>…</b>, but no other tag
ITALIC = r"(?<![\w*])\*(?=[^\s*])((?:[^*<>\n]|<b>[^<>\n]*</b>)+)(?<!\s)\*(?![\w*])"
UNDERLINED = r"(?<!\w)_(?=[^\s_])([^_<>\n]+)(?<!\s)_(?!\w)"  # _now_   not a_b_c
TAG = r"</?[a-z][^>]*>"  # <b>   </b>   <a href="https://x.y">


def as_html(markdown):
    """ "# Plan\\n**a** < `b`" → "<b>Plan</b>\\n<b>a</b> &lt; <code>b</code>"

    Placeholders replace code and links, because a `_` in code does not mean italic.
    """
    aside = []

    def put_aside(match):
        if match["words"]:
            aside.append(f'<a href="{match["address"][:1_000]}">{match["words"]}</a>')
        elif match["code"]:
            aside.append(f"<code>{match['code']}</code>")
        else:
            language = f' class="language-{match["language"]}"' if match["language"] else ""
            aside.append(f"<pre><code{language}>{match['block']}</code></pre>")
        return f"\ue000{len(aside) - 1}\ue001"

    text = re.sub("[\0\ud800-\udfff\ue000\ue001]", "", markdown)  # \ud800 cannot be encoded
    text = html.escape(text)
    text = re.sub(f"{FENCE}|{CODE}|{LINK}", put_aside, text)
    text = re.sub(HEADING, lambda line: f"**{line[1].strip().replace('**', '')}**", text)
    for expression, tag in ((BOLD, "b"), (ITALIC, "i"), (UNDERLINED, "i")):
        text = re.sub(expression, rf"<{tag}>\1</{tag}>", text)
    # the placeholder `\ue0000\ue001` stands for the first code or link
    return re.sub("\ue000(\\d+)\ue001", lambda match: aside[int(match[1])], text)


def plain_text(html_text):
    return html.unescape(re.sub(TAG, "", html_text))


def split_html(text, limit=4_096):
    """Parts of at most `limit` UTF-16 units (Telegram counts "🙂" as 2), not counting the closing
    tags that are added to a part. A part ends after a newline or, if there is none, after a space:

    "<b>one two</b>", 10 → "<b>one </b>", "<b>two</b>"
    """
    parts = []
    while text:
        part = beginning(text, limit)
        opened = []  # the tags that `part` does not close
        for tag in re.findall(TAG, part):
            if tag.startswith("</"):
                opened.pop()
            else:
                opened.append(tag)
        # The next part opens these tags again. A part is longer than that, so the loop ends: no tag
        # has more than 1,100 characters, and three at most are open.
        text = "".join(opened) + text[len(part) :]
        for tag in reversed(opened):  # <code class="language-py"> is closed by </code>
            part += f"</{tag.strip('<>').split()[0]}>"
        if plain_text(part).strip():  # "400 message text is empty"
            parts.append(part)
    return parts


def beginning(text, limit):
    """The start of a text, at most `limit` UTF-16 units. It ends after a newline or a space if
    there is one, and never inside a tag or inside `&lt;`."""
    head = text.encode("utf-16-le")[: 2 * limit].decode("utf-16-le", "ignore")
    if head == text:
        return text
    whole = re.match(rf"(?s:{TAG}|&#?\w+;|[^<&])*", head)[0]  # <b>   &lt;   a
    # up to the last newline, or else to the last space that is not in a tag like <a href="…">
    words = re.match(r"(?s).*\n|.* (?![^<>]*>)", whole)
    return words[0] if words else whole


# ---- The calendar: the next time that matches a cron expression ----
# In Berlin, 02:30 does not exist on one day in March, and exists twice on one day in October.

CRON_FIELDS = {  # the lowest number, the highest, and names for the numbers from the lowest on
    "minute": (0, 59, ""),  # */15 * * * *: every quarter of an hour
    "hour": (0, 23, ""),  # 0 8-18/2 * * *: every two hours by day
    "day of month": (1, 31, ""),  # 0 9 1,15 * *: twice a month
    "month": (1, 12, "jan feb mar apr may jun jul aug sep oct nov dec"),  # 0 9 1 jan *
    "day of week": (0, 7, "sun mon tue wed thu fri sat"),  # 0 9 * * mon-fri
}
# *   */15   1-5   8-18/2   5; not 5/15, which cron programs interpret differently
PART = r"(?:\*|([0-9]{1,2})-([0-9]{1,2}))(?:/([1-9][0-9]?))?|([0-9]{1,2})"


def cron_numbers(field, text):
    """("minute", "1-3,20") → {1, 2, 3, 20}; ("day of week", "sat-sun") → {6, 7}"""
    lowest, highest, names = CRON_FIELDS[field]
    text = text.replace("-sun", "-7")  # at the end of a range, Sunday is 7
    for number, name in enumerate(names.split(), lowest):
        text = text.replace(name, str(number))
    numbers = set()
    for part in text.split(","):
        match = re.fullmatch(PART, part)
        if match:
            # "8-18/2" → 8, 18, 2, None; "5" → None, None, None, 5; "*/15" → None, None, 15, None
            first, last, step, single = match.groups()
            low = int(first or single or lowest)
            high = int(last or single or highest)
        if not match or not lowest <= low <= high <= highest:
            raise ValueError(
                f"{field}: {part!r} is not like 5, 1-5, 1,5, *, */15 or 0-30/5, "
                f"within {lowest}-{highest}; 22-2 is written as 22-23,0-2"
            )
        numbers.update(range(low, high + 1, int(step or 1)))
    return numbers


@lru_cache  # the clock asks once a second, and the answer stays the same
def next_run(expr, after, zone):
    """The first time later than `after` that matches a cron expression, as in Vixie cron. Times are
    seconds since 1970, and `after` is a whole minute. Raises ValueError if the expression is
    invalid or no date matches, like 31 February. In Berlin in 2026:

    29 March, 02:30     is 03:30, because clocks skip an hour
    25 October, 02:30   is the first of two, because clocks repeat an hour
    with the hour `*`   it is both
    """
    parts = expr.lower().split()
    if len(parts) != 5:
        raise ValueError(
            f"{expr!r} must have five fields: minute, hour, day of month, month, day of week"
        )
    minutes, hours, days, months, weekdays = map(cron_numbers, CRON_FIELDS, parts)
    weekdays = {number % 7 for number in weekdays}  # Sunday is 0 or 7
    folds = [0, 1] if len(hours) == 24 else [0]  # 1: the second 02:30 of a day; 24: hour `*`
    # "0 9 13 * fri" runs on each 13th and on each Friday: any of the two suffices. "0 9 13 * *"
    # runs on each 13th only: all must match, and "*" always does
    suffices = all if "*" in parts[2] + parts[4] else any
    # From yesterday on, because clocks that go back at 0:01 repeat its last hour. Nine years have a
    # leap day, for "0 0 29 2 *": 2096, 2104; not 2100
    for number in range(-1, 9 * 366):
        day = datetime.fromtimestamp(after, zone) + timedelta(days=number)
        if day.month in months and suffices([day.day in days, day.isoweekday() % 7 in weekdays]):
            moments = [
                day.replace(hour=hour, minute=minute, fold=fold).timestamp()
                for hour, minute, fold in itertools.product(hours, minutes, folds)
            ]
            later = [moment for moment in moments if moment > after]
            if later:
                return min(later)
    raise ValueError("it never runs: no such date")


# ---- Jobs, in a file that several programs change ----


class CronError(ValueError):
    """An invalid request for a job, or an unknown time zone. The error text names the cause."""


@dataclass
class CronJob:
    """A row of the jobs file. `every_seconds`, `cron_expr` or `at` says when the job runs."""

    id: str
    message: str = ""
    every_seconds: int = 0
    cron_expr: str = ""
    tz: str = ""  # the time zone of `cron_expr` and `at`; "" means the agent's zone
    at: str = ""  # 2026-11-21T17:00+01:00
    channel: str = ""  # the chat that asked for the job; "system" for the agent's own jobs
    chat_id: str = ""
    folder: str = ""  # the job runs in the folder of the terminal at which it was made
    after: float = 0  # the next run is the first one that is due after this time
    error: str = ""  # the error of the last run
    enabled: bool = True

    def due(self, after, zone):
        """The first time later than `after`, or None. Raises ValueError for a bad schedule."""
        own_zone = zone_named(self.tz, zone)
        if self.cron_expr:
            return next_run(self.cron_expr, after // 60 * 60, own_zone)
        if self.at:
            at = datetime.fromisoformat(self.at)
            moment = (at if at.tzinfo else at.replace(tzinfo=own_zone)).timestamp()
            return moment if moment > after else None
        if self.every_seconds <= 0:
            raise ValueError("the schedule is missing or negative")
        return after + self.every_seconds

    def schedule(self):
        """0 9 * * * Europe/Berlin   2026-11-21T17:00:00+01:00   every 3600 s"""
        return self.at or f"{self.cron_expr} {self.tz}".strip() or f"every {self.every_seconds} s"


def zone_named(name, default=None):
    """The zone, or the default if there is no name. None is the zone of the machine: `datetime`
    knows its summer time. (`astimezone().tzinfo` would be only the offset of one moment.)"""
    try:
        return ZoneInfo(name) if name else default
    except (KeyError, ValueError, OSError):  # "Mars/Olympus", "../x", "Europe"
        raise CronError(
            f"there is no time zone {name!r}: use a name like Europe/Berlin; "
            "if Windows finds no zone, run: pip install tzdata"
        ) from None


@dataclass
class JobStore:
    """Reads and writes the file `{"jobs": [{…}, …]}`. Unknown rows and keys stay unchanged. The
    methods block the thread, and wait while another thread or program changes the file."""

    path: Path
    lock: Callable  # `with lock(path):` waits for other threads and programs
    write: Callable  # `write(path, text)` replaces the file's content, or changes nothing

    def read(self):
        """Raises OSError if the file is damaged, so that a damaged file never looks empty."""
        if not self.path.exists():
            return []
        try:
            return list(json.loads(self.path.read_bytes())["jobs"])
        except (ValueError, KeyError, TypeError) as problem:
            raise OSError(
                f"{self.path} is damaged: {problem}. Repair the file, or move it away."
            ) from None

    def edit(self, id, changes, is_new=False):
        """Change these keys of a job; None removes the job. Without `is_new`, an unknown id changes
        nothing: another program may have removed the job."""
        with self.lock(self.path.with_suffix(".lock")):
            rows = self.read()
            found = [row for row in rows if str(row.get("id")) == id]
            if is_new and not found:
                found = [{"id": id}]
                rows += found
            for row in found:
                if changes is None:
                    rows.remove(row)
                else:
                    row.update(changes)
            self.write(self.path, json.dumps({"jobs": rows}, ensure_ascii=False, indent=1))


warn_once = cache(log.warning)  # the clock asks once a second


# ---- The clock that runs the jobs ----


@dataclass
class CronService:
    """`tick()`, called once a second, starts a task that awaits `fire(job, name)` for each job that
    is due, if `is_wanted(job)`. Each run has a unique `name`. If the program is killed, or the task
    is cancelled, the run is repeated with the same name. `now()` gives seconds since 1970."""

    store: JobStore
    fire: Callable
    zone: tzinfo  # None is the zone of the machine
    now: Callable = time.time
    sleep: Callable = asyncio.sleep
    is_wanted: Callable = lambda job: True
    running: dict = field(default_factory=dict)  # job id → the task of its run

    def jobs(self):
        """The valid jobs of the file. A person may have written the file: values get defaults."""
        jobs = []
        for row in self.store.read():
            try:
                job = CronJob(
                    **{
                        each.name: each.type(row[each.name])
                        for each in fields(CronJob)
                        if row.get(each.name) is not None
                    }
                )
                job.due(1e6, self.zone)  # raises an error if the schedule is invalid
                jobs.append(job)
            except Exception as problem:
                warn_once(f"cron: {str(row)[:100]} is no job: {problem}")
        return jobs

    async def tick(self):
        """Start all jobs that are due. Of several missed runs of a job, one is made up for."""
        busy = set(self.running)  # a run may end while the file is read
        try:
            jobs = await in_thread(self.jobs)
        except OSError as problem:
            warn_once(f"cron: the jobs wait: {problem}")
            return
        now = self.now()
        for job in jobs:
            after = job.after if job.after <= now else 0  # the clock may have been set back
            due = job.due(after, self.zone)
            is_due = due and due <= now and job.enabled
            if is_due and job.id not in busy and self.is_wanted(job):
                self.running[job.id] = create_task(self._run(job, f"{job.id}@{due:.0f}", now))

    async def _run(self, job, name, began):
        """Run a job and record the run. A run that ends with the program is repeated later."""
        changes = {"after": began, "error": ""}  # None removes the job
        # `gather`: if the user stops the run, only the run is cancelled, not this task
        [outcome] = await asyncio.gather(self.fire(job, name), return_exceptions=True)
        if isinstance(outcome, Exception):  # the CancelledError of a stopped run is none
            changes["error"] = repr(outcome)[:200]
            log.warning("cron: job %s failed", job.id, exc_info=outcome)
        elif job.at:
            changes = None
        while job.id in self.running:
            try:
                await in_thread(self.store.edit, job.id, changes)
                del self.running[job.id]
            except OSError as problem:  # a full disk: the job waits, or its run would be repeated
                log.error("cron: the run of %s cannot be recorded: %s", job.id, problem)
                await self.sleep(60)

    def _shown(self, moment):
        return datetime.fromtimestamp(moment).astimezone(self.zone).strftime("%a %Y-%m-%d %H:%M %Z")

    def add_system(self, id, every_seconds, enabled):
        """Add a system job, or change its settings. The tool `cron` lists, but never removes it."""
        self.store.edit(
            id,
            {"channel": "system", "every_seconds": every_seconds, "enabled": enabled},
            is_new=True,
        )

    def cron(
        self,
        action: Literal["add", "list", "remove"],
        message: Annotated[str, "The complete task: the later run does not see this chat"] = "",
        every_seconds: Annotated[int, "Seconds from one run to the next"] = 0,
        cron_expr: Annotated[str, "Five fields, minute first: 30 8 * * mon-fri"] = "",
        tz: Annotated[str, "Time zone, like Europe/Berlin; default: the user's zone"] = "",
        at: Annotated[str, "Run once: 2026-11-21T17:00"] = "",
        in_seconds: Annotated[int, "Run once, so many seconds from now"] = 0,
        job_id: Annotated[str, "For `remove`: the id of the job, from `list`"] = "",
        *,
        turn,
    ):
        """Reminders and regular tasks. Each job runs later as a turn; this chat gets the answer.

        `add` needs a message and one of `every_seconds`, `cron_expr`, `at` and `in_seconds`. For
        "daily at 8", `cron_expr` is "0 8 * * *". Tell the user the job's time.
        """
        if action == "list":
            return "\n".join(map(self._line, self.jobs())) or "There are no jobs."
        if action == "remove":
            return self._remove(job_id)
        if turn.channel == "cron":
            raise CronError("A running job cannot add jobs. Do what the job's message says.")
        count = sum(map(bool, (every_seconds, cron_expr, at, in_seconds)))
        if count != 1 or not message.strip():
            raise CronError(
                "Give a message and exactly one of `every_seconds`, `cron_expr`, `at` and "
                "`in_seconds`."
            )
        now = self.now()
        if in_seconds:
            at = datetime.fromtimestamp(now + in_seconds, UTC).isoformat()
        return self._add(
            CronJob(
                token_hex(4),
                message.strip(),
                every_seconds,
                cron_expr,
                tz,
                at,
                turn.channel,
                turn.chat_id,
                # a chat's jobs run in the gateway's folder
                str(turn.cwd) if turn.channel == "cli" else "",
                now,
            )
        )

    def _add(self, job):
        try:
            due = job.due(job.after, self.zone)
            if not due:
                raise CronError(f"it never runs. It is now {self._shown(job.after)}")
            if job.at:  # stored with its offset, because other programs may have other zones
                moment = datetime.fromtimestamp(due).astimezone(self.zone)
                job.at = moment.isoformat(timespec="seconds")
            added = f"Added job {self._line(job)}"
        except (ValueError, OverflowError, OSError) as problem:  # OSError: the year 30000, Windows
            raise CronError(f"No job was added for {job.schedule()!r}: {problem}.") from None
        self.store.edit(job.id, asdict(job), is_new=True)
        return added

    def _remove(self, job_id):
        if job_id not in [job.id for job in self.jobs() if job.channel != "system"]:
            raise CronError(
                f"No job {job_id!r} can be removed. In the list of jobs, each line begins with an "
                "id; jobs of the system stay."
            )
        self.store.edit(job_id, None)
        return f"Removed job {job_id}."

    def _line(self, job):
        """1a2b3c4d · 0 9 * * * · next Sun 2026-11-22 09:00 CET · telegram:42 · water plants"""
        due = job.due(job.after, self.zone)
        coming = f"next {self._shown(max(due, self.now()))}" if due and job.enabled else "off"
        # a system job has no chat and no message: "system: · " → "system"
        task = f"{job.channel}:{job.chat_id} · {job.message}".rstrip(" ·:")
        failed = f" · failed: {job.error}" if job.error else ""
        return f"{job.id} · {job.schedule()} · {coming} · {task}{failed}"


# ---- Heartbeat ----
# The model is asked only if HEARTBEAT.md has an open task.

COMMENT = r"(?s)<!--.*?(-->|\Z)"  # <!-- write tasks here -->
# - [x] call Ann ↵   her number is 555; a line belongs to it if it is indented deeper (\1 is the
# task's own indent) and is no task itself
DONE = r"(?m)^([ \t]*)[-*+] \[[xX]\].*(\n\1[ \t]+(?![-*+] \[ )\S.*)*"
NO_TASK = r"\s*(#+(\s.*)?|[-*+]\s*(\[ ?\]\s*)?|[-*_]{3,}\s*)?"  # ## Tasks   - [ ]   ---


def active_tasks(text):
    """The text without comments and ticked tasks; "" if no open task is left:

    "# Tasks\\n- [x] call Ann\\n- [ ] water the plants" → "# Tasks\\n\\n- [ ] water the plants"
    """
    rest = re.sub(DONE, "", re.sub(COMMENT, "", text))
    if all(re.fullmatch(NO_TASK, line) for line in rest.splitlines()):
        return ""
    return rest.strip()


# ---- The web page of `nanobot web` ----
# Without the token and the checks of Host and Origin, any web page that the user opens could send
# messages to the agent and read its answers.

# {0}: a random text, which the page's own scripts have, too; {1}: what else this page may or must
PAGE_POLICY = (
    "default-src 'none'; script-src 'nonce-{0}'; style-src 'nonce-{0}'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; {1}"
)
NO_COOKIE = (
    "This address is wrong, or a browser has used it: each address works once. "
    "Open the last address that `nanobot web` has printed in its terminal."
)


class WebPage(Channel):
    """A page on 127.0.0.1 for people with an address; each browser window shows one chat.

    An address works once: its first request gets the cookie. `tell(address)` gets each new address.
    `show(event)` sends an event (a dict) to the windows of its session, also after a reload.
    `ask(text)` shows a question of the current turn in all windows and waits for the answer.
    `journal_of("web:page")` returns the path of a chat's journal; the page shows each new line.
    `as_json(event)` writes an event without API keys. `runs` is the HTML with the recorded runs.
    `memory()`, which is set later, returns name → text of the parts of the prompt.
    """

    name = "web"
    shows_deltas = True
    polls = 0  # rises while a window is open

    def __init__(
        self,
        html,
        runs,
        journal_of,
        tell,
        as_json,
        port,
    ):
        # two pages: (HTML, what PAGE_POLICY adds for it); recorded runs, which may be a stranger's,
        # have no cookie and reach no server
        self.runs = runs, "sandbox allow-scripts"
        self.html = html, "connect-src 'self'"
        self.journal_of = journal_of
        self.tell = tell
        self.as_json = as_json
        self.turn_of = ContextVar("turn_of", default="")  # the current turn's chat
        self.chats = {}  # chat id → is "Step by step" ticked: a pause before requests and calls?
        # (number, chat id, JSON); all windows show the events of the chat id "memory"
        self.events = deque(maxlen=1_000)
        self.count = itertools.count(1)  # numbers of the events
        self.drafts = defaultdict(str)  # chat id → the part of an answer that was streamed so far
        self.questions = {}  # id → future with the answer
        self.server = self._server(port)
        port = self.server.server_port
        self.host = f"127.0.0.1:{port}"
        self.cookie = f"nanobot_{port}={token_urlsafe(24)}"
        self.renew()

    def renew(self):
        path = f"/?token={token_urlsafe(24)}"
        self.unused = {path: True}  # the address that no browser has used yet
        self.address = f"http://{self.host}{path}"
        self.tell(self.address)

    def _server(self, port):
        """Create the server. Import `http.server` only here, because the import takes 30 ms."""
        from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

        class Handler(PageRequest, BaseHTTPRequestHandler):
            page = self

        class Server(ThreadingHTTPServer):
            allow_reuse_address = os.name == "posix"  # on Windows, two programs could use one port

            def handle_error(self, *_):
                """A closed window needs no traceback."""

            def verify_request(self, *_):  # silent connections leave descriptors to the agent
                return threading.active_count() < 100

        return Server(("127.0.0.1", port), Handler)

    async def start(self, bus):
        self.bus = bus
        self.loop = asyncio.get_running_loop()
        on_thread(self.server.serve_forever)

    async def send(self, message):
        if message.kind == "delta":
            self.drafts[message.chat_id] += message.content
        elif message.kind == "final":
            self.show({"kind": "say", "key": message.chat_id, "content": message.content})

    def show(self, event):
        """Questions that the current task asks from now on belong to the session of this event."""
        chat_id = page_chat(event["key"].removeprefix("web:"))
        self.turn_of.set(chat_id)
        self.chats.setdefault(chat_id, False)
        if event["kind"] in ("journal", "say"):
            self.drafts[chat_id] = ""
        self._add(chat_id, **event)

    def _add(self, chat_id, **event):
        self.events.append((next(self.count), chat_id, self._json(**event)))

    def _json(self, **event):
        """JSON without API keys; but a question about a call shows the exact call."""
        as_json = json.dumps if event.get("what") in ("approve", "call") else self.as_json
        return as_json({"time": time.time(), **event})

    async def ask(self, text, what="approve", **details):
        """Returns None if no window is open for 3 s. A reload takes less than that; a browser that
        has lost its connection is back after 1 s (`retry` in `do_GET`). A step ("request", "call")
        is only asked in a session for which "Step by step" is ticked."""
        session = self.turn_of.get()
        if what in ("request", "call") and not self.chats.get(session):
            return ""
        number = token_hex(8)
        answer = asyncio.Future()
        self.questions[number] = answer
        self._add("memory", kind="ask", what=what, text=text, session=session, id=number, **details)
        question = self.events[-1]
        polls = -1
        try:
            while not answer.done() and self.polls != polls:
                polls = self.polls
                await wait([answer], timeout=3.0)
        finally:
            self.questions.pop(number, None)
            if question in self.events:  # later windows do not show it
                self.events.remove(question)
            self._add("memory", kind="asked", id=number)
        return answer.result() if answer.done() else None

    async def take(self, path, body):
        """Handle a request from the page; a message until it is on disk. Raises KeyError if a
        question was answered already."""
        if path == "/say":
            await self.bus.publish(
                InboundMessage(
                    self.name,
                    "local",
                    page_chat(body["chat"]),
                    str(body["text"]),
                    message_id=str(body["id"])[:64],
                )
            )
        elif path == "/step":
            self.chats[page_chat(body["chat"])] = body["on"]
        else:
            self.questions.pop(body["id"]).set_result(str(body["text"]))

    def news(self, chat_id, most):
        """Yield a chat's events, all chats' questions and the memory's events as JSON, after the
        last `most` lines of the journal. Also yield "" every 0.1 s to detect a closed window."""
        journal = self.journal_of(f"{self.name}:{chat_id}")
        yield self._json(kind="hello", step=self.chats.get(chat_id), chats=list(self.chats))
        position = 0
        seen = 0
        draft = ""
        while True:
            time.sleep(0.1)
            self.polls += 1
            if data := bytes_behind(journal, position).rpartition(b"\n")[0]:
                position += len(data) + 1
                lines = data.decode(errors="replace").split("\n")
                yield self._json(kind="lines", lines=lines[-most:])
            for number, owner, event in list(self.events):
                if number > seen and owner in ("memory", chat_id):
                    seen = number
                    yield event
            if self.drafts[chat_id] != draft:
                draft = self.drafts[chat_id]
                yield self._json(kind="draft", text=draft)
            yield ""


def bytes_behind(path, position):
    try:
        with open(path, "rb") as file:
            file.seek(position)
            return file.read()
    except FileNotFoundError:
        return b""


def page_chat(name):
    """ "my session" → "my-session" """
    return re.sub(r"[^\w.-]+", "-", str(name))[:60] or "page"


class PageRequest:
    """One HTTP request from a browser to `page`. Without a new token or the cookie, it gets 403."""

    timeout = 5  # seconds until a silent connection is closed

    def log_message(self, *_):
        """Log nothing: the first URL contains the token."""

    def _is_from_here(self):
        """Does the request come from this page? A DNS rebinding attack sends a wrong Host header;
        other web pages send a wrong Origin header."""
        own = self.page.host
        return self.headers["Host"] == own and self.headers["Origin"] in (None, f"http://{own}")

    def _is_allowed(self):
        own = self.page.cookie.encode()
        cookies = self.headers.get("Cookie", "").encode().split(b"; ")
        return self._is_from_here() and any(compare_digest(own, each) for each in cookies)

    def _reply(self, status, text, kind="text/plain", **more):
        self.send_response(status)
        for name, value in {
            "Content-Type": f"{kind}; charset=utf-8",
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            **more,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):  # noqa: N802
        path, _, query = self.path.partition("?")
        # `pop`: of two requests with the same address, one gets the cookie
        if self._is_from_here() and self.page.unused.pop(self.path, False):
            cookie = f"{self.page.cookie}; HttpOnly; SameSite=Strict; Path=/"
            # after a 303, a browser that comes from a file would not send this cookie
            self._reply(200, "", **{"Refresh": "0; url=/", "Set-Cookie": cookie})
            self.page.renew()
        elif not self._is_allowed():
            self._reply(403, NO_COOKIE)
        elif path == "/memory":
            self._reply(200, self.page.as_json(self.page.memory()))
        elif path == "/events":
            self._reply(200, "retry: 1000\n\n", "text/event-stream")  # milliseconds
            chat, most = unquote(query).split("&")
            for event in self.page.news(page_chat(chat), int(most)):
                line = f"data: {event}\n\n" if event else ":\n\n"
                self.wfile.write(line.encode())
        else:
            html, directive = self.page.runs if path == "/runs" else self.page.html
            nonce = token_urlsafe(16)
            self._reply(
                200,
                html.replace("%NONCE%", nonce),
                "text/html",
                **{"Content-Security-Policy": PAGE_POLICY.format(nonce, directive)},
            )

    def do_POST(self):  # noqa: N802
        if not self._is_allowed():
            return self._reply(403, NO_COOKIE)
        try:
            size = int(self.headers.get("Content-Length", 0))
            if not 0 <= size <= 1_000_000 or self.headers.get_content_type() != "application/json":
                return self._reply(413, "Send JSON of at most 1,000,000 bytes.")
            run_coroutine_threadsafe(
                self.page.take(self.path, json.loads(self.rfile.read(size))), self.page.loop
            ).result(5)
            self._reply(204, "")
        except OSError:  # also TimeoutError; after a 202 the page tries again, and says why
            self._reply(202, "waiting: the disk is full, cannot be written, or is slow")
        except Exception as problem:  # for example, invalid JSON
            self._reply(400, f"not accepted: {problem}")
