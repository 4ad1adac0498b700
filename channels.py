"""How words get in and out: many chats, one agent.

A channel turns what somebody writes into a message, and an event of the agent into what they see:

    InboundMessage("telegram", "7", "42", "What is in a.txt?")  → bus →  the agent
    OutboundMessage("telegram", "42", "It says hello.")         ← bus ←  the agent

The one rule: who hands over a message learns when it is safe, and keeps it until then. `publish`
returns when a message is on disk; `on_delivered` is called when an answer has arrived.
Read it last. Not covered: turns, sessions, options. The file works alone:

    import asyncio
    from channels import CLI, OutboundMessage

    asyncio.run(CLI().send(OutboundMessage("cli", "me", "It says hello.")))
"""

import asyncio
import contextlib
import contextvars
import functools
import html
import io
import itertools
import json
import logging
import os
import queue
import re
import secrets
import select
import shutil
import signal
import sys
import threading
import time
import urllib.parse
import zoneinfo
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, date, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple, TextIO

# ---- Many channels, one agent ----

@dataclass
class InboundMessage:
    channel: str
    sender_id: str
    chat_id: str
    content: str
    media: Sequence[Path] = ()
    message_id: str = ""  # set by the channel: a message with a known id is dropped
    speaker: str = ""  # in a group: the name of who said it
    journalled: asyncio.Future | None = field(default=None, repr=False, compare=False)

    @property
    def session_key(self) -> str:
        return f"{self.channel}:{self.chat_id}"

    def confirm(self, problem: Exception | None = None) -> None:
        """Lets `publish` return, as the message is on disk, or raise the problem."""
        if self.journalled and not self.journalled.done():  # else nobody waits for it
            self.journalled.set_result(problem)


class MessageBus:
    def __init__(self, sleep: Callable[[float], Awaitable] = asyncio.sleep):
        self.channels: dict[str, Channel] = {}
        self._inbound: asyncio.Queue[InboundMessage] = asyncio.Queue()
        self._listening: list[asyncio.Task] = []
        self._outboxes: dict[tuple[str, str], Outbox] = {}
        self._sleep = sleep

    def open(self, channel: "Channel") -> None:
        """From now on the channel listens, and messages for it are delivered."""
        self.channels[channel.name] = channel
        self._listening.append(asyncio.create_task(channel.listen(self)))

    def shows_deltas(self, channel: str) -> bool:
        return channel in self.channels and self.channels[channel].shows_deltas

    async def publish(self, message: InboundMessage) -> None:
        """Returns when the message is on disk; raises the problem if it cannot be written."""
        message.journalled = asyncio.get_running_loop().create_future()
        self._inbound.put_nowait(message)
        if problem := await message.journalled:
            raise problem

    async def next(self) -> InboundMessage:
        """The oldest message. The agent writes it to disk, then calls `message.confirm()`."""
        return await self._inbound.get()

    def send(self, message: "OutboundMessage") -> None:
        """Queue it for its chat: a slow chat delays neither the agent nor other chats."""
        chat = (message.channel, message.chat_id)
        if message.channel in self.channels:
            if chat not in self._outboxes:
                channel = self.channels[message.channel]
                self._outboxes[chat] = Outbox(channel, message.chat_id, self._sleep)
            self._outboxes[chat].put(message)
        elif message.kind == "final":
            log.warning("There is no channel %r: its answer is shown nowhere", message.channel)

    async def close(self, seconds: float = 5.0) -> None:
        """Deliver what is queued for at most `seconds`, then stop the channels."""
        tasks = [outbox.task for outbox in self._outboxes.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        tasks += self._listening
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)


@dataclass
class OutboundMessage:
    channel: str
    chat_id: str
    content: str  # may be empty in a final message: the turn ended, nothing to show
    kind: str = "final"  # or delta (a piece of the answer), progress, tool_hint, retry
    media: Sequence[Path] = ()
    reply_to: str = ""  # the message_id that it answers
    parts_sent: int = 0  # of a long message; the next try goes on after them
    on_delivered: Callable[[], None] | None = field(default=None, repr=False, compare=False)


class Refused(Exception):
    """`Channel.send` raises it if a message can never be delivered: no further try is made."""


class Channel:
    """A place where people write. `start` listens and publishes what is allowed, until it is
    cancelled; `send` delivers. `send` raises Refused, or any other exception if another try may
    help (no network); that may have an attribute `retry_after`, in seconds."""

    name = ""
    shows_deltas = False  # do people see an answer while it is written?

    def __init__(self, allow_from: Sequence[str | int] = ()):
        self.allow_from = [str(sender_id) for sender_id in allow_from]

    async def start(self, bus: MessageBus) -> None: ...
    async def send(self, message: OutboundMessage) -> None: ...

    async def listen(self, bus: MessageBus) -> None:
        try:
            await self.start(bus)
        except Exception as problem:
            log.error("%s: nobody listens there any more: %s", self.name, problem)

    def is_allowed(self, sender_id: str | int) -> bool:
        """[] → nobody, ["*"] → everybody, ["7", 8] → those whose id is exactly 7 or 8."""
        return "*" in self.allow_from or str(sender_id) in self.allow_from


# ======== Second reading: slow chats, the terminal, and time as one more channel ========


# ---- An outbox per chat ----
# Without this one user who blocked the bot, or one "429 Too Many Requests: retry after 30", holds
# up all other chats.

log = logging.getLogger("nanobot.channels")


class Outbox:
    """The messages on their way to one chat, in order."""

    first_pause, longest_pause = 1.0, 60.0  # seconds between two tries of an answer

    def __init__(self, channel: Channel, chat_id: str, sleep: Callable[[float], Awaitable]):
        self.channel, self.sleep = channel, sleep
        self.name = f"{channel.name}: chat {chat_id}"
        self.waiting: deque[OutboundMessage] = deque()
        self.task: asyncio.Task | None = None

    def put(self, message: OutboundMessage) -> None:
        self.waiting.append(message)
        if self.task is None or self.task.done():
            self.task = asyncio.create_task(self._deliver())

    async def _deliver(self) -> None:
        """An event is tried once, an answer until it arrives or is refused."""
        while self.waiting:
            message, pause = self.waiting.popleft(), self.first_pause
            while problem := await self._try(message):
                if pause == self.first_pause:  # one line an answer, none for each try
                    log.warning("%s cannot be reached yet: %s", self.name, problem)
                if message.kind != "final":
                    break
                await self.sleep(getattr(problem, "retry_after", 0) or pause)
                pause = min(2 * pause, self.longest_pause)

    async def _try(self, message: OutboundMessage) -> Exception | None:
        """Returns why another try is needed."""
        try:
            await self.channel.send(message)
        except Refused as refusal:
            log.error("%s refuses a message, it is dropped: %s", self.name, refusal)
        except Exception as problem:
            return problem
        try:
            if message.on_delivered:
                message.on_delivered()
        except Exception as problem:  # it has arrived all the same: not to be sent again
            log.error("%s: a delivery could not be noted: %s", self.name, problem)
        return None


# ---- Text for a terminal ----
# A page that the model quotes may clear the screen ("\x1b[2J") or turn the direction of writing.

# C0 but tab and newline, DEL, C1; bidi controls, zero-widths, tags; letters that look like blanks
# (U+2800, U+115F). Not the soft hyphen and the two joiners: Persian words and the emoji of a family
# are made with them.
UNSAFE = (
    "[\0-\b\v-\x1f\x7f-\x9f\u061c\u115f\u1160\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\u2800\u3164\ufeff\uffa0\ufff9-\ufffb\U000e0000-\U000e01ef]"
)  # "\x1b[2J"
JOINERS = "[\xad\u200c\u200d]"  # "می\u200cخواهم"; between Latin letters nobody sees it
BLANKS = r"\s{4,}"  # "true                                    ; rm -rf ~"


def printable(text: str) -> str:
    """A red word → `\\x1b[31mred`: what would steer the terminal is shown instead of obeyed."""
    return encodable(escaped(UNSAFE, text))


def escaped(letters: str, text: str) -> str:
    return re.sub(letters, lambda match: match[0].encode("unicode_escape").decode(), text)


def encodable(text: str) -> str:
    return text.encode("utf-8", errors="replace").decode("utf-8")  # a lone surrogate is not


class PrintableFormatter(logging.Formatter):
    """For logs on a terminal: what a tool or an endpoint said is in warnings, too. Lines behind the
    first are indented: a line end in a text begins no line that looks like ours."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record)).replace("\n", "\n    ")


def approval_question(name: str, arguments: dict) -> str:
    """A call in full, on one line: nothing in it can look like our question or scroll it away.

    ("exec", {"command": "ls\\nRun it?"}) → `exec {"command": "ls\\\\nRun it?"}`, then `Run it? [y…`
    """
    call = f"{name} {json.dumps(arguments, ensure_ascii=False)}"
    shown = escaped(JOINERS, printable(call))
    shown = re.sub(BLANKS, lambda blanks: f"[{len(blanks[0])} blanks]", shown)
    size = f"{name}, {len(shown):,} characters. " if len(shown) > 500 else ""
    always = f"always: every later {name}, until the program ends"
    return f"{shown}\n{size}Run it? [y/n/always] ({always}) "


# ---- What a program inherits ----
# `2>&-`, `>&-` and `nohup nanobot gateway &` work.

class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP: as Ctrl-C it stops a turn, and it ends a conversation, too."""


def terminate(*_: Any) -> None:
    raise Terminated


def end_on_signals(handler: Callable[..., None] = terminate) -> None:
    """SIGTERM and SIGHUP call the handler; one that was ignored at the start stays ignored."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # there is no SIGHUP on Windows
        if number and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def prepare_streams() -> None:
    """Opens what is closed to nothing, else the journal would get the number 1 and what is
    printed to it. A letter that an encoding does not have is replaced, going in and out."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
        if isinstance(getattr(sys, name), io.TextIOWrapper):  # a notebook has others
            getattr(sys, name).reconfigure(errors="replace")


# ---- The keyboard ----
# A `y` that was typed too early approves nothing.

def read_answer(question: str) -> str:
    """An answer to a question of one or more lines."""
    before, line_end, prompt = printable(question).rpartition("\n")
    with contextlib.suppress(ImportError):  # there is no termios on Windows
        import termios

        if sys.stdin.isatty():
            termios.tcflush(sys.stdin, termios.TCIFLUSH)  # what was typed before is no answer
    print(before, end=line_end, file=sys.stderr, flush=True)
    return type_at(prompt, sys.stdout.isatty(), sys.stderr)


def type_at(prompt: str, live: bool, err: TextIO) -> str:
    """A line from the keyboard. stdout is for the answer: if it is no terminal, stderr prompts."""
    if not live:
        print(prompt, end="", file=err, flush=True)
    return input(prompt if live else "")


# ---- Waiting is shown ----

class Waiting:
    """`waiting for the model, 12 s`: one line, gone before anything else is printed. Only the main
    thread draws it, when it has nothing else to do: so never at a prompt."""

    def __init__(self, err: TextIO | None, clock: Callable[[], float] = time.monotonic):
        self.err, self.clock = err, clock
        self.can_draw = err is not None and err.isatty() and os.environ.get("TERM") != "dumb"
        self.what, self.since = "", 0.0
        self.drawn = ""
        self._lock = threading.RLock()  # the loop's thread prints

    def begin(self, what: str) -> None:
        """From now on this is waited for (`the model`), no longer what was before it."""
        with self.silence():
            self.what, self.since = what, self.clock()

    def end(self) -> None:
        self.begin("")

    def draw(self) -> None:
        with self._lock:
            seconds = int(self.clock() - self.since)
            what = printable(" ".join(self.what.split()))[:60]
            line = f"waiting for {what}, {seconds} s"
            if self.can_draw and what and seconds >= 1 and line != self.drawn:
                self.drawn = line
                # Without wrapping (?7l): a second line could not be erased. The cursor goes back
                # to the left: what others print, a warning say, begins there.
                line = f"\r\x1b[K\x1b[?7l\x1b[2m{line}\x1b[0m\x1b[?7h\r"
                print(line, end="", file=self.err, flush=True)

    def erase(self) -> None:
        with self._lock:
            if self.drawn:
                self.drawn = ""
                print("\r\x1b[K", end="", file=self.err, flush=True)

    @contextlib.contextmanager
    def silence(self) -> Iterator[None]:
        """For whoever prints: the line is gone and does not come back in between."""
        with self._lock:
            self.erase()
            yield


# ---- The loop behind the keyboard ----
# `input` would stop the event loop, and Ctrl-C reaches the main thread only: it has the keyboard.

class NobodyToAsk(Exception):
    """A question came when no turn was waited for: at the prompt, or after Ctrl-C."""


class BackgroundLoop:
    """The agent works on the event loop of a daemon thread, the main thread has the keyboard:

        main thread                               loop's thread
        complete(turn)      ── start ──────────►  the turn …
        reads the keyboard  ◄─ question ────────  await ask("Run it? ")
                            ── answer ─────────►  … goes on
        Ctrl-C              ── cancel ─────────►  … its `finally`
        returns             ◄─ None ────────────  … its end
    """

    def __init__(self, close: Callable | None = None, waiting: Waiting | None = None):
        self.loop = asyncio.new_event_loop()
        self.close = close  # what is done at the end, on the loop
        self.waiting = waiting or Waiting(None)  # drawn while a turn is waited for
        self._turn: asyncio.Task | None = None  # that is waited for, or was the last
        self._questions: queue.SimpleQueue = queue.SimpleQueue()  # of this turn
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        self.loop.run_forever()
        self.loop.close()  # lets go of its pipes and threads

    def complete(self, work: Coroutine) -> Any:
        """Runs it to its end. Ctrl-C cancels it, waits for its end and raises KeyboardInterrupt."""
        questions: queue.SimpleQueue = queue.SimpleQueue()  # of its own: nothing late is in it

        def start() -> None:
            self._questions, self._turn = questions, self.loop.create_task(work)
            self._turn.add_done_callback(lambda _: questions.put(None))

        try:
            self.loop.call_soon_threadsafe(start)
            while question := self._next(questions):
                self._answer(*question)
        except BaseException as stop:
            self.loop.call_soon_threadsafe(lambda: self._turn.cancel())
            while self._next(questions):
                pass  # they are refused when the turn has ended
            if isinstance(stop, EOFError):  # Ctrl-D at a question
                raise KeyboardInterrupt from None
            raise
        finally:
            self.waiting.end()
        return self._turn.result()

    def _next(self, questions: queue.SimpleQueue) -> Any:
        """A question, or None at the end. Looks up now and then: a Ctrl-C that another thread was
        given wakes nobody."""
        while True:
            try:
                return questions.get(timeout=0.2)
            except queue.Empty:
                self.waiting.draw()

    def _answer(self, answer: Future, question: str) -> None:
        if answer.set_running_or_notify_cancel():  # else whoever asked is gone
            self.waiting.erase()
            answer.set_result(read_answer(question))

    async def ask(self, question: str) -> str:
        """One line from the person at the terminal; raises NobodyToAsk outside of `complete`."""
        turn, answer = self._turn, Future()
        if turn is None or turn.done():
            raise NobodyToAsk("Nobody can be asked: no turn is waited for at the terminal.")
        self._questions.put((answer, question))
        answered = asyncio.wrap_future(answer)
        try:
            await asyncio.wait([answered, turn], return_when="FIRST_COMPLETED")
            if answered.done():
                return answered.result()
            raise NobodyToAsk("Nobody can be asked: the turn has ended.")
        finally:
            answer.cancel()

    def __enter__(self) -> "BackgroundLoop":
        return self

    def __exit__(self, *_: Any) -> None:
        ended = asyncio.run_coroutine_threadsafe(self._end(), self.loop)
        while not ended.done():
            with contextlib.suppress(KeyboardInterrupt):  # else processes would be left behind
                wait([ended])
        self.loop.call_soon_threadsafe(self.loop.stop)
        if problem := ended.exception():
            log.warning("not everything was put in order at the end: %s", problem)

    async def _end(self) -> None:
        """Whatever still works gets its `finally`; what does not end in 5 s is left behind."""
        try:
            if self.close:
                await self.close()
        finally:
            rest = asyncio.all_tasks() - {asyncio.current_task()}
            for task in rest:
                task.cancel()
            if rest:
                await asyncio.wait(rest, timeout=5.0)


# ---- The terminal ----

class CLI(Channel):
    """The answer goes to `out` and nothing else does: live on a terminal, once into a pipe."""

    name = "cli"
    shows_deltas = True

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None, kinds: Sequence = ()):
        super().__init__(allow_from=["*"])
        self.out, self.err = out or sys.stdout, err or sys.stderr
        self.kinds = kinds or ("progress", "tool_hint", "retry")  # shown besides the answer
        self.live = self.out.isatty()
        self.waiting = Waiting(self.err)
        self._streamed = ""  # of a text whose end has not come yet
        self._word, self._column = "", 0  # a word whose end has not come yet; where it begins
        self._is_code = False  # between two lines that begin with ```
        self._prompt = ""  # that is waited at

    async def send(self, message: OutboundMessage) -> None:
        match message.kind:
            case "delta" if self.live:
                self._streamed += message.content
                self._print(message.content)
            case "final":
                self._end_text(message.content)
            case "progress" if self._streamed:  # text beside calls was streamed like an answer
                self._end_text(message.content)
            case kind if kind in self.kinds:
                self.note(message.content)

    def _print(self, text: str) -> None:
        """Into a pipe or a file goes what the model wrote, unchanged; terminals get no escapes."""
        shown = self._wrapped(printable(text)) if self.live else encodable(text)
        with self.waiting.silence():
            print(shown, end="", file=self.out, flush=True)

    def _wrapped(self, text: str) -> str:
        """With line ends between words, but not in code, which people copy."""
        *words, self._word = re.split(r"(?<=\s)", self._word + text)
        width, wrapped = shutil.get_terminal_size().columns, ""
        for word in words:
            if word.startswith("```"):
                self._is_code = not self._is_code
            if self._column and self._column + len(word.rstrip()) > width and not self._is_code:
                wrapped, self._column = wrapped + "\n", 0
            self._column = 0 if word.endswith("\n") else self._column + len(word)
            wrapped += word
        return wrapped

    def _end_text(self, text: str) -> None:
        rest = not_yet_shown(text, self._streamed)
        self._streamed = ""
        self._print(rest.removesuffix("\n") + "\n")

    def note(self, text: str) -> None:
        """A line on stderr, dim on a terminal; an answer still streaming gets a line end."""
        if self._streamed:
            self._end_text(self._streamed)
        line = printable(text)
        if self.err.isatty():
            line = f"\x1b[2m{line}\x1b[0m"
        with self.waiting.silence():
            print(line, file=self.err, flush=True)

    def report(self, text: str) -> None:
        """What a job says, at once. A prompt comes again below it, with what was typed so far."""
        prompt, screen = self._prompt, self.out if self.live else self.err
        with contextlib.suppress(ImportError):
            import readline

            prompt = prompt and prompt + printable(readline.get_line_buffer())
        with self.waiting.silence():
            print(end="\r\x1b[K" if prompt else "", file=screen, flush=True)
            self._print(text.removesuffix("\n") + "\n")
            print(end=prompt, file=screen, flush=True)

    def converse(self, ask: Callable[[str], Any], history: Path) -> int:
        """Line by line, until the user leaves. Ctrl-C stops a turn, Ctrl-D leaves."""
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
                self.note("\nstopped; /continue goes on with the turn" if text else "")
            except Exception as problem:  # whatever happens in a turn, the conversation goes on
                if not text:
                    raise  # not in a turn: the terminal is gone
                log.info("the turn failed", exc_info=True)
                self.note(f"Sorry, that failed: {str(problem).rstrip('.')}.")

    def read_line(self, prompt: str, history: Path) -> str:
        """A line from the user, with line editing and history; raises EOFError on Ctrl-D."""
        with contextlib.suppress(ImportError, OSError):  # there is no readline on Windows
            import readline

            readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines are one message
            if not readline.get_current_history_length():
                history.parent.mkdir(parents=True, exist_ok=True)
                history.touch(0o600)  # nothing can be appended to a file that is not there
                readline.read_history_file(history)
        self._prompt = prompt
        try:
            line = type_at(prompt, self.live, self.err)
        finally:
            self._prompt = ""
        if line and self.live:
            with contextlib.suppress(ImportError, OSError):
                import readline

                readline.append_history_file(1, history)
        return line

    def read_piped(self, beside_message: bool, folder: Path) -> str:
        """What was piped in. Beside a message nobody may write to the pipe: it has 3 s to begin."""
        if beside_message and os.name == "posix" and not select.select([sys.stdin], [], [], 3.0)[0]:
            self.note("nanobot: standard input is open but silent, going on without it")
            return ""
        return text_of_pipe(sys.stdin.buffer, folder)


def not_yet_shown(text: str, streamed: str) -> str:
    """("Hello.", "Hel") → "lo."; ("Bye.", "Hel") → "\\nBye.", on a line of its own."""
    shown = streamed.strip()  # the blanks at its edges do not count: providers cut them off
    if shown and text.lstrip().startswith(shown):
        return text.lstrip().removeprefix(shown)
    return f"\n{text}" if shown else text


# ---- A pipe with more than a message ----
# `nanobot -m "what went wrong?" < server.log` must not put 50 MB into the journal.

MOST_PIPED = 100_000  # characters of standard input that a message may hold
HEAD_OF_PIPED = 10_000  # characters that the model gets of more than that


def text_of_pipe(stream: BinaryIO, folder: Path) -> str:
    """All of it; of more than a message should hold the beginning, and the file that has it all."""
    beginning = stream.read(4 * MOST_PIPED + 1)  # a character has up to four bytes
    text = beginning.decode("utf-8", errors="replace")
    if len(text) <= MOST_PIPED:
        return text.strip()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    with path.open("wb") as file:
        file.write(beginning)
        shutil.copyfileobj(stream, file)
    return (
        f"{text[:HEAD_OF_PIPED]}\n[standard input goes on, {path.stat().st_size:,} bytes in all: "
        f"look into {path} with grep, or with read_file in pages]"
    )


# ---- The Bot API of Telegram ----
# The token is a part of every address: it must be in no log.

async def in_thread(function: Callable, /, *args: Any) -> Any:
    """Await a blocking function on a daemon thread: the threads of the usual pool hold the exit."""
    future: Future = Future()
    future.set_running_or_notify_cancel()  # a cancelled waiter lets the thread finish

    def work() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as failure:
            future.set_exception(failure)

    threading.Thread(target=work, daemon=True).start()
    return await asyncio.wrap_future(future)


class TelegramError(Exception):
    """Why a call of the Bot API may be tried again. The text never holds the token."""

    def __init__(self, text: str, retry_after: float = 0):
        super().__init__(text)
        self.retry_after = retry_after  # seconds, after 429 "Too Many Requests"


class NoSuchBot(Exception):
    """401 Unauthorized, 404 Not Found: the token is wrong."""


class BotAPI:
    """`await api.call("sendMessage", chat_id=1, text="Hi")`: https://core.telegram.org/bots/api"""

    may_pass = (408, 409, 429)  # of the 4xx: a time-out, a rival, a flood

    def __init__(self, token: str, base: str):
        self.token, self.base = token.strip(), base.rstrip("/")

    async def call(self, method: str, seconds: float = 60, **fields: Any) -> Any:
        """The method's result. A path among the fields is uploaded. Raises Refused if the same call
        is refused again (400, 403 "bot was blocked", 413), TelegramError if it may pass; OSError if
        a file cannot be read."""
        body, kind = await in_thread(as_body, fields)
        status, data = await self._exchange(f"bot{self.token}/{method}", body, kind, seconds)
        answer = {"error_code": status, "description": "not the Bot API"}  # but a proxy's page
        with contextlib.suppress(ValueError, TypeError):
            answer |= json.loads(data)
        if answer.get("ok"):
            return answer.get("result")
        problem = self._scrub(f"{method}: {answer['error_code']} {answer['description']}")
        if "ok" in answer and status in (401, 404):
            raise NoSuchBot(BAD_TOKEN)
        if "ok" in answer and 400 <= status < 500 and status not in self.may_pass:
            raise Refused(problem)
        raise TelegramError(problem, (answer.get("parameters") or {}).get("retry_after", 0))

    async def download(self, path: str) -> bytes:
        """A file by its `file_path`, which getFile tells; the server gives none over 20 MB."""
        address = f"file/bot{self.token}/{urllib.parse.quote(path)}"
        status, data = await self._exchange(address, None, "", seconds=60)
        if status != 200:
            raise TelegramError(f"the file cannot be fetched: HTTP {status}")
        return data

    async def _exchange(self, address: str, body: bytes | None, kind: str, seconds: float) -> tuple:
        """Status and body of what came back."""
        try:
            async with asyncio.timeout(seconds):  # looking up a name has no time limit of its own
                return await in_thread(fetch, f"{self.base}/{address}", body, kind, seconds)
        except TimeoutError:
            problem = f"no answer in {seconds:g} s"
        except Exception as failure:  # any error: its text may hold the token
            problem = self._scrub(f"{type(failure).__name__}: {failure}")
        raise TelegramError(problem)  # out here, where no traceback leads to the one with the token

    def _scrub(self, text: str) -> str:
        return text.replace(self.token, "<token>") if self.token else text


def fetch(url: str, body: bytes | None, kind: str, seconds: float) -> tuple[int, bytes]:
    import urllib.request

    request = urllib.request.Request(url, body, {"Content-Type": kind})
    try:
        with urllib.request.urlopen(request, timeout=seconds) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as refusal:  # it has a body, as any answer
        with refusal:
            return refusal.code, refusal.read()


def as_body(fields: dict[str, Any]) -> tuple[bytes, str]:
    """JSON, or with a file among the fields a form; and the content type."""
    if not any(isinstance(value, Path) for value in fields.values()):
        return json.dumps(fields).encode(), "application/json"
    border, body = os.urandom(16).hex(), b""
    for name, value in fields.items():
        head = f"Content-Disposition: form-data; name={name}"
        if isinstance(value, Path):
            head += "; filename=" + re.sub(r"[^\w.-]", "_", value.name)  # a"b.txt ends too soon
            data = value.read_bytes()
        else:
            data = (value if isinstance(value, str) else json.dumps(value)).encode()
        body += f"--{border}\r\n{head}\r\n\r\n".encode() + data + b"\r\n"
    return body + f"--{border}--\r\n".encode(), f"multipart/form-data; boundary={border}"


# ---- Telegram as a channel ----
# The server forgets a message when a higher offset is asked for, and until then gives it again.

RIVAL = (  # 409 "Conflict: terminated by other getUpdates request; make sure that only one bot …"
    "Another program asks for this bot's messages, too. Stop it, or give it a bot of its own."
)
BAD_TOKEN = (
    "Telegram does not know this bot token. Copy it again from @BotFather into "
    "channels.telegram.token (and look at apiBase, if it is set); then start anew."
)


class Telegram(Channel):
    """A bot of the user's own. The files that people send go into `media_folder`."""

    name = "telegram"
    poll_seconds = 50  # the server answers by then, with nothing if there is nothing
    slack_seconds = 15  # after these on top the line is dead, and another one is opened
    album_seconds = 2.0  # the pictures of an album come one by one
    typing_seconds = 4.0  # the signal lasts 5
    most_typing = 75  # signals: five minutes

    def __init__(
        self, token: str, allow_from: Sequence[str | int] = (), *,
        api_base: str = "https://api.telegram.org",
        group_policy: str = "mention",  # "open": in groups, too, every message of allowed people
        media_folder: Path = Path("media"),
        sleep: Callable[[float], Awaitable] = asyncio.sleep,
    ):  # fmt: skip
        super().__init__(allow_from)
        self.api = BotAPI(token, api_base)
        self.group_policy, self.media_folder, self.sleep = group_policy, media_folder, sleep
        self.bot: dict = {}  # its id and username, once the server told
        self._offset = 0  # of the first update that is not on disk
        self._typing: dict[str, asyncio.Task] = {}

    async def start(self, bus: MessageBus) -> None:
        """Listens until it is cancelled. Raises NoSuchBot."""
        told = ""
        while True:
            try:
                await self._poll(bus)
                told = ""
            except NoSuchBot:
                raise
            except Exception as failure:  # whatever it is, people go on writing
                if str(failure) != told:  # a line when trouble begins or changes
                    is_rival = "terminated by other getUpdates" in str(failure)
                    hint = RIVAL if is_rival else "It is tried again."
                    log.warning("Telegram: %s. %s", failure, hint)
                told = str(failure)
                self.bot = {}  # introduced anew, without the webhook that may be the trouble
                await self.sleep(max(10.0, getattr(failure, "retry_after", 0)))

    async def _introduce(self) -> None:
        """In groups people call the bot by its name: ask for it."""
        if not re.fullmatch(r"\d+:[\w-]+", self.api.token):  # 110201543:AAHdqTcvCH1vGWJxfSeofSAs0
            raise NoSuchBot(BAD_TOKEN)
        self.bot = await self.api.call("getMe")
        await self.api.call("deleteWebhook")

    async def _poll(self, bus: MessageBus) -> None:
        """Take what is new. Once a message is on disk, the offset passes it."""
        if not self.bot:
            await self._introduce()
        updates = await self._get_updates(self.poll_seconds)
        if any(map(album_of, filter(self._is_from_people, updates))):
            await self.sleep(self.album_seconds)
            updates = await self._get_updates(0)  # the same again, and what came since
        wanted = filter(self._is_from_people, updates)
        for _, group in itertools.groupby(wanted, lambda each: album_of(each) or each["update_id"]):
            arrival = list(group)
            await self._take([update["message"] for update in arrival], bus)
            self._offset = arrival[-1]["update_id"] + 1
        if updates:
            self._offset = updates[-1]["update_id"] + 1

    async def _get_updates(self, seconds: float) -> list[dict]:
        """`allowed_updates` leaves out edits and buttons from now on; older ones may still come."""
        fields = {"offset": self._offset, "timeout": seconds, "allowed_updates": ["message"]}
        return await self.api.call("getUpdates", seconds + self.slack_seconds, **fields)

    def _is_from_people(self, update: dict) -> bool:
        """No answer to strangers, not even a refusal: it would tell them that somebody is here."""
        sender = (update.get("message") or {}).get("from") or {}
        return not sender.get("is_bot", True) and self.is_allowed(sender.get("id", ""))

    async def _take(self, messages: list[dict], bus: MessageBus) -> None:
        """One message, or an album of several."""
        try:
            inbound = await self._inbound(messages)
        except Exception:  # it would come again for ever, and nothing behind it would ever come
            log.warning("Telegram: a message cannot be read, it is left out", exc_info=True)
            return
        if inbound:
            await bus.publish(inbound)
            self._stop_typing(inbound.chat_id)
            self._typing[inbound.chat_id] = asyncio.create_task(self._type(inbound.chat_id))

    async def _inbound(self, messages: list[dict]) -> InboundMessage | None:
        """What it is for the agent; None if it is nothing, or in a group not meant for the bot."""
        chat, sender = messages[0]["chat"], messages[0]["from"]
        is_open = chat["type"] == "private" or self.group_policy == "open"
        if not is_open and not any(is_call(message, self.bot) for message in messages):
            return None
        texts, media = [words_in(message) for message in messages], []
        for file in filter(None, map(file_in, messages)):
            try:
                media.append(await self._save(file))
            except (TelegramError, Refused, OSError) as failure:
                texts.append(f"[a file came with this, but it cannot be fetched: {failure}]")
        content = "\n".join(filter(None, texts))
        if not content and not media:
            return None  # somebody joined the group, a message was pinned
        return InboundMessage(
            self.name, str(sender["id"]), str(chat["id"]), content, media,
            message_id=f"{messages[0]['message_id']}/{self.bot['id']}",  # another bot counts anew
            speaker="" if chat["type"] == "private" else name_of(sender),
        )  # fmt: skip

    async def _save(self, file: dict) -> Path:
        """Two files named report.pdf are two: `AgADBQ-report.pdf`. Sent again, one is the same."""
        place = (await self.api.call("getFile", file_id=file["file_id"]))["file_path"]
        path = self.media_folder / file_name(file, place)
        data = await self.api.download(place)
        path.parent.mkdir(parents=True, exist_ok=True)
        await in_thread(path.write_bytes, data)
        return path

    def _stop_typing(self, chat_id: str) -> None:
        if task := self._typing.pop(chat_id, None):
            task.cancel()

    async def _type(self, chat_id: str) -> None:
        with contextlib.suppress(TelegramError, NoSuchBot, Refused):  # worth no error
            for _ in range(self.most_typing):
                await self.api.call("sendChatAction", chat_id=chat_id, action="typing")
                await self.sleep(self.typing_seconds)

    async def send(self, message: OutboundMessage) -> None:
        """Text in as many parts as it needs, then files. Tried again, it goes on where it broke."""
        if message.kind in ("delta", "retry"):
            return
        if message.kind == "final":
            self._stop_typing(message.chat_id)
        target: dict[str, Any] = {"chat_id": message.chat_id}
        if own := re.fullmatch(r"(\d+)/\d+", message.reply_to):
            reply = {"message_id": int(own[1]), "allow_sending_without_reply": True}
            target["reply_parameters"] = reply
        parts = [*split_html(as_html(message.content)), *map(Path, message.media)]
        for part in parts[message.parts_sent :]:
            if isinstance(part, str):
                await self._send_text(part, target)
            else:
                await self._send_file(part, target)
            message.parts_sent += 1

    async def _send_text(self, text: str, target: dict) -> None:
        """As plain text only if it was refused: after a time-out it would arrive twice."""
        try:
            await self.api.call("sendMessage", text=text, parse_mode="HTML", **target)
        except Refused:  # 400 can't parse entities
            await self.api.call("sendMessage", text=plain_text(text), **target)

    async def _send_file(self, path: Path, target: dict) -> None:
        """A file that is refused is told of, so that nobody waits for it."""
        methods = {"sendDocument": "document"}
        if path.suffix.lower() in (".jpg", ".jpeg", ".png", ".webp"):
            methods = {"sendPhoto": "photo", **methods}  # 400 PHOTO_INVALID_DIMENSIONS: a document
        for method, field_name in methods.items():
            try:
                return await self.api.call(method, 300, **{field_name: path}, **target)
            except (Refused, OSError) as failure:
                problem = failure
        await self._send_text(as_html(f"[{path.name} cannot be sent: {problem}]"), target)


def album_of(update: dict) -> str:
    return update["message"].get("media_group_id", "")


def name_of(sender: dict) -> str:
    """{"first_name": "Ada\\n", "last_name": "Lovelace"} → "Ada Lovelace", at most 40 characters"""
    names = f"{sender.get('first_name', '')} {sender.get('last_name', '')}"
    return " ".join(names.split())[:40]


def file_name(file: dict, place: str) -> str:
    """The id that no other file has, then the sender's name for it, cut in the middle: a name may
    have 255 bytes. No "../" is left."""
    path = Path(re.sub(r"[^\w.-]+", "_", file.get("file_name") or Path(place).name))
    stem = path.stem.encode()[:100].decode(errors="ignore")
    return re.sub(r"[^\w-]+", "_", file["file_unique_id"]) + f"-{stem}{path.suffix[:10]}"


def words_in(message: dict) -> str:
    texts = [message.get("text"), message.get("caption"), message.get("sticker", {}).get("emoji")]
    return next(filter(None, texts), "")


def file_in(message: dict) -> dict:
    """{"photo": [{small}, {"file_id": "A", …}]} → {"file_id": "A", …}; none → {}"""
    if message.get("photo"):
        return message["photo"][-1]  # the last one is the largest
    keys = ("document", "voice", "audio", "video", "video_note")
    return next((message[key] for key in keys if message.get(key)), {})


def is_call(message: dict, bot: dict) -> bool:
    """Does a group's message name the bot ("@my_bot, what…", "/stop@my_bot"), or answer it?"""
    author = (message.get("reply_to_message") or {}).get("from") or {}
    name = rf"@{re.escape(bot['username'])}(?!\w)"
    return author.get("id") == bot["id"] or bool(re.search(name, words_in(message), re.IGNORECASE))


# ---- Telegram: Markdown as its HTML, in parts that it takes ----
# Without this `a < b` is "400 can't parse entities", and a long answer "400 message is too long".
# It is cut when it is formatted, `<` being the four of `&lt;` by then, and leaves no tag open.
# Each expression is linear: what it may reach over ends at the next mark of its own kind.

# ```py ↵ a = 1 ↵ ```   or, never closed, to the end; not ```npm install```
FENCE = r"(?m)^[ \t]*```([\w+-]*)[^`\n]*\n((?:.*\n)*?.*?)(?:^[ \t]*```[ \t]*$|\Z)"
CODE = r"(?<!`)(`{1,3})(?!`)(.{1,2000}?)(?<!`)\1(?!`)"  # `a < b`   ``a ` b``
# [a](http://b/c_(d))
LINK = r"\[([^\[\]\n]{1,500})\]\((https?://(?:[^\s()\[\]]|\([^\s()\[\]]*\))+)\)"
HEADING = r"(?m)^#{1,6} +(\S.*)$"  # ## What to do
BOLD = r"\*\*(?=[^\s*])((?:[^*\n]|\*(?!\*))+?)(?<=[^\s*])\*\*"  # **now**
# *now*   *now and **then***   not 2 * 3 * 4; it reaches over no tag's end
ITALIC = r"(?<![\w*])\*(?=[^\s*])((?:[^*<>\n]|<b>[^<>\n]*</b>)+)(?<!\s)\*(?![\w*])"
UNDERLINED = r"(?<!\w)_(?=[^\s_])([^_<>\n]+)(?<!\s)_(?!\w)"  # _now_   not a_b_c
ASIDE = "\ue000(\\d+)\ue001"  # where the third code or link was: \ue0002\ue001
TAG = r"<[^>]+>"  # <b>   </b>   <a href="https://x.y">
ATOM = rf"(?s:{TAG}|&#?\w+;|[^<&])"  # <b>   &lt;   a
TO_BLANK = r"(?s).* (?![^<>]*>)"  # a blank between words, not in <a href="…">


def as_html(markdown: str) -> str:
    """"# Plan\\n**a** < `b`" → "<b>Plan</b>\\n<b>a</b> &lt; <code>b</code>"

    Code and links are put aside first: in `a_b_c` no mark is a mark.
    """
    aside: list[str] = []

    def put_aside(markup: str) -> str:
        aside.append(markup)
        return f"\ue000{len(aside) - 1}\ue001"

    def fence(match: re.Match) -> str:
        language = f' class="language-{match[1]}"' if match[1] else ""
        return put_aside(f"<pre><code{language}>{html.escape(match[2])}</code></pre>")

    def code_or_link(match: re.Match) -> str:
        if match[2]:
            return put_aside(f"<code>{html.escape(match[2])}</code>")
        words = html.escape(match[3].replace("`", ""))  # [`run.py`](…): no code in a link
        return put_aside(f'<a href="{html.escape(match[4])}">{words}</a>')

    text = re.sub(FENCE, fence, re.sub("[\0\ue000\ue001]", "", encodable(markdown)))
    text = re.sub(f"{CODE}|{LINK}", code_or_link, text)
    text = re.sub(HEADING, lambda line: f"**{line[1].strip().replace('**', '')}**", text)
    text = html.escape(text)
    for expression, tag in ((BOLD, "b"), (ITALIC, "i"), (UNDERLINED, "i")):
        text = re.sub(expression, rf"<{tag}>\1</{tag}>", text)
    return re.sub(ASIDE, lambda match: aside[int(match[1])], text)


def plain_text(html_text: str) -> str:
    return html.unescape(re.sub(TAG, "", html_text))


def split_html(text: str, limit: int = 4_096) -> list[str]:
    """Parts of at most `limit` UTF-16 units (Telegram counts so: "🙂" is 2) and what closes the
    open tags, which is not counted. They are cut at a line's end, else at a blank:

    "<b>one two</b>", 10 → "<b>one </b>", "<b>two</b>"
    """
    parts, opened = [], []
    while text:
        head = beginning(text, limit - len("".join(opened)))
        text = text[len(head) :]
        part = "".join([*opened, head])
        opened = open_tags(part)  # <code class="language-py"> is closed by </code>
        closings = [f"</{tag.strip('<>').split()[0]}>" for tag in reversed(opened)]
        parts.append("".join([part, *closings]))
    return [part for part in parts if plain_text(part).strip()]  # "400 message text is empty"


def beginning(text: str, limit: int) -> str:
    """As much as fits, up to a line's end or a blank; no half tag, at least one atom."""
    head = text.encode("utf-16-le")[: 2 * max(limit, 0)].decode("utf-16-le", "ignore")
    if head == text:
        return text
    whole = re.match(f"{ATOM}*", head)[0] or re.match(ATOM, text)[0]
    cut = re.match(r"(?s).*\n", whole) or re.match(TO_BLANK, whole)
    return cut[0] if cut else whole


def open_tags(part: str) -> list[str]:
    """The tags that are open in the end: "<b>x</b><i>y" → ["<i>"]"""
    still_open: list[str] = []
    for tag in re.findall(TAG, part):
        if tag.startswith("</"):
            still_open.pop()
        else:
            still_open.append(tag)
    return still_open


# ---- The calendar: when the five fields of a cron expression come next ----
# In March "at half past two" does not exist for a night, in October it comes twice.

ONE_DAY = timedelta(days=1)
MOST_DAYS = 5 * 366  # "0 0 29 2 *", a leap day, can be four years away
# *   */15   1-5   8-18/2   5; not 5/15, which has two meanings in use
PART = r"(?:\*|([0-9]{1,2})-([0-9]{1,2}))(?:/([0-9]{1,2}))?|([0-9]{1,2})"


class CronField(NamedTuple):
    """The values that a field may have; `names` stand for them, from the lowest on."""

    name: str
    lowest: int
    highest: int
    names: str = ""

    def values(self, text: str) -> set[int]:
        """"1-3,20" → {1, 2, 3, 20}; "*/20" → {0, 20, 40}; "sat-sun" → {6, 7}"""
        text = text.replace("-sun", "-7")  # in a range it is the last day
        for number, name in enumerate(self.names.split(), self.lowest):
            text = text.replace(name, str(number))
        return set().union(*(self._range(part) for part in text.split(",")))

    def _range(self, part: str) -> range:
        match = re.fullmatch(PART, part)
        if not match:
            raise ValueError(f"{self.name}: {part!r} is none of 5, 1-5, 1,5, *, */15 and 0-30/5")
        first, last, step, single = match.groups()
        low, high = int(first or single or self.lowest), int(last or single or self.highest)
        if not self.lowest <= low <= high <= self.highest or step == "0":
            allowed = f"{self.lowest}-{self.highest}; 22-2 is written as 22-23,0-2"
            raise ValueError(f"{self.name}: {part!r} is not within {allowed}")
        return range(low, high + 1, int(step or 1))


CRON_FIELDS = (
    CronField("minute", 0, 59),  # */15 * * * *: every quarter of an hour
    CronField("hour", 0, 23),  # 0 8-18/2 * * *: every two hours by day
    CronField("day of month", 1, 31),  # 0 9 1,15 * *: twice a month
    CronField("month", 1, 12, "jan feb mar apr may jun jul aug sep oct nov dec"),  # 0 9 1 jan *
    CronField("day of week", 0, 7, "sun mon tue wed thu fri sat"),  # 0 9 * * mon-fri
)


class CronExpression:
    """The rules are those of Vixie's cron. Raises ValueError with what is wrong."""

    def __init__(self, text: str):
        parts = text.lower().split()
        if len(parts) != len(CRON_FIELDS):
            names = "minute, hour, day of month, month, day of week"
            raise ValueError(f"{text!r} has {len(parts)} fields instead of five: {names}")
        sets = [field.values(part) for field, part in zip(CRON_FIELDS, parts, strict=True)]
        self.minutes, self.hours, self.days, self.months, weekdays = sets
        self.weekdays = {number % 7 for number in weekdays}
        stars = [part.startswith("*") for part in parts]
        self.either_day = not stars[2] and not stars[4]  # 0 9 13 * fri: each 13th, and each Friday
        self.is_fixed = not stars[0] and not stars[1]  # 30 2 * * *, a time of day; not */30 * * * *

    def moments(self, day: date, zone: tzinfo) -> list[datetime]:
        """All of one day, in UTC."""
        fits = [day.day in self.days, day.isoweekday() % 7 in self.weekdays]
        day_fits = any(fits) if self.either_day else all(fits)
        if not day_fits or day.month not in self.months:
            return []
        times = itertools.product(self.hours, self.minutes)
        walls = [datetime(day.year, day.month, day.day, *time, tzinfo=zone) for time in times]
        return [moment for wall in walls for moment in moments_at(wall, self.is_fixed)]


def moments_at(wall: datetime, is_fixed: bool) -> list[datetime]:
    """When the clocks on the wall show a time, in UTC. Berlin in 2026:

    1 June, 12:00       10:00, as on most days
    29 March, 02:30     never, the clocks go from 2 to 3; a fixed time comes as 03:30, at 01:30
    25 October, 02:30   00:30, and 01:30 when they have been set back; a fixed time comes once
    """
    first, second = [wall.replace(fold=fold).astimezone(UTC) for fold in (0, 1)]
    if is_fixed or first == second:
        return [first]
    return [first, second] if first < second else []


def next_run(expr: str, after: datetime, zone: tzinfo) -> datetime | None:
    """The first moment behind `after` that fits, in UTC; None if there is none ("0 0 31 2 *")."""
    expression, today = CronExpression(expr), after.astimezone(zone).date()
    for number in range(MOST_DAYS):
        # with its neighbours: clocks set back over midnight show the end of a day after the next
        days = [today + (number + beside) * ONE_DAY for beside in (-1, 0, 1)]
        moments = itertools.chain(*(expression.moments(day, zone) for day in days))
        later = [moment for moment in moments if moment > after]
        if later:
            return min(later)
    return None


# ---- Jobs, in a file that several programs change ----

class CronError(ValueError):
    """A wish that cannot be met, in words for who has it: the cause, then what to do."""


@dataclass
class CronJob:
    """One of `every_seconds`, `cron_expr` and `at` says when. Times are texts in ISO 8601."""

    id: str
    message: str = ""
    every_seconds: float = 0
    cron_expr: str = ""
    tz: str = ""  # of cron_expr and at; empty: the agent's
    at: str = ""
    channel: str = ""  # the chat that asked for it
    chat_id: str = ""
    created: str = ""  # from here `every_seconds` are counted, whatever happens between
    since: str = ""  # what was due until then is done
    error: str = ""  # of the last run
    enabled: bool = True
    system: bool = False

    row = None  # of the file, from which it was made
    coming = None  # when it is due

    def due(self, after: datetime, zone: tzinfo) -> datetime | None:
        """The first time behind `after`, in UTC; None: never. Raises ValueError."""
        after, own_zone = after.astimezone(UTC), zone_named(self.tz, zone)
        if self.at:
            at = as_moment(self.at, own_zone)
            return at if at > after else None
        if self.cron_expr:
            return next_run(self.cron_expr, after, own_zone)
        if self.every_seconds <= 0:
            raise ValueError("it does not say when")
        first, period = as_moment(self.created, zone), timedelta(seconds=self.every_seconds)
        return first + period * ((after - first) // period + 1)

    def schedule(self) -> str:
        if self.every_seconds:
            return f"every {self.every_seconds:.10g} s"
        return (f"at {self.at}" if self.at else f"cron {self.cron_expr} {self.tz}").rstrip()


def as_moment(text: str, zone: tzinfo) -> datetime:
    """"2026-11-21T17:00" in the zone, or with an offset or a Z of its own, in UTC: two times of one
    zone are compared by the clock on the wall, wrong for an hour each autumn."""
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=zone)).astimezone(UTC)


def zone_named(name: str, default: tzinfo) -> tzinfo:
    try:
        return zoneinfo.ZoneInfo(name) if name else default
    except (KeyError, ValueError, OSError):  # "Mars/Olympus", "../x", "Europe"
        hint = "write it like Europe/Berlin; a Windows without any zone needs: pip install tzdata"
        raise CronError(f"there is no time zone {name!r}: {hint}") from None


class JobStore:
    """The file `{"jobs": [{…}, …]}`. Rows and keys that mean nothing here are kept as they are."""

    def __init__(self, path: Path, lock: Callable[[Path], Any]):
        self.path, self.lock, self.own_lock = path, lock, threading.Lock()

    def read(self) -> list:
        """Raises OSError if the file is damaged: it is never taken for one without jobs."""
        if not self.path.exists():
            return []
        try:
            match json.loads(self.path.read_bytes()):
                case {"jobs": list(rows)}:
                    return rows
            raise ValueError("it holds no list of jobs")
        except ValueError as problem:
            raise OSError(f"{self.path} is damaged: {problem}") from None

    def change(self, edit: Callable[[list], list]) -> None:
        """Write `edit(the file's rows)` back: all of the rows or none. Blocks."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.own_lock, self.lock(self.path.with_suffix(".lock")):
            rows = edit(self.read())
            temporary = self.path.with_suffix(".tmp")  # there is one writer: what a crash left goes
            with open(temporary, "w", encoding="utf-8", errors="replace") as file:
                json.dump({"jobs": rows}, file, ensure_ascii=False, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)


def id_of(row: Any) -> str:
    """"" for what is no job."""
    return str(row.get("id", "")) if isinstance(row, dict) else ""


def job_of(row: Any, now: datetime, zone: tzinfo) -> CronJob | None:
    """People write rows by hand, too: numbers become texts, what is missing or null is left out,
    and a `since` in the future counts as now. What is no job is None, and a line in the log."""
    try:
        given = [each for each in fields(CronJob) if row.get(each.name) is not None]
        job = CronJob(**{each.name: each.type(row[each.name]) for each in given})
        since = min(as_moment(job.since or now.isoformat(), zone), now)
        job.created = job.created or since.isoformat()
        job.row, job.coming = row, job.due(since, zone)  # raises what is wrong with it
        return job
    except Exception as problem:
        warn_once(f"cron: {str(row)[:100]} is no job: {problem}")
        return None


@functools.lru_cache(maxsize=100)
def warn_once(text: str) -> None:
    log.warning("%s", text)


# ---- The clock that runs them ----

class CronService:
    """`fire(job, run)` runs a job's turn; `run` names it: a run that a kill interrupted begins
    again under the same name. `run()` is the clock. `lock(path)` keeps others out of the file."""

    longest_delay = timedelta(hours=12)  # behind it a repeated job waits for its next time

    def __init__(
        self, path: Path, fire: Callable[[CronJob, str], Awaitable], *,
        now: Callable[[], datetime], zone: tzinfo,
        sleep: Callable[[float], Awaitable] = asyncio.sleep,
        lock: Callable[[Path], Any] = contextlib.nullcontext,
    ):  # fmt: skip
        self.store, self.fire, self.now, self.zone = JobStore(path, lock), fire, now, zone
        self.sleep = sleep
        self.is_wanted: Callable[[CronJob], bool] = lambda job: True
        self._system: dict[str, Callable[[], Awaitable]] = {}
        self._running: dict[str, asyncio.Task] = {}
        self._jobs: dict[str, CronJob] = {}
        self._looked = self._utc()  # when the file was read

    def _utc(self) -> datetime:
        return self.now().astimezone(UTC)

    def _shown(self, moment: datetime) -> str:
        return moment.astimezone(self.zone).strftime("%a %Y-%m-%d %H:%M %Z")

    def add_system(self, id: str, every_seconds: float, function: Callable[[], Awaitable]) -> None:
        """A job of the agent's own: it is listed, and cannot be removed."""
        self._system[id] = function
        now = self.now().isoformat()
        new = {"id": id, "system": True, "created": now, "since": now}
        settings = {"every_seconds": every_seconds, "enabled": True}

        def edit(rows: list) -> list:
            before = [row for row in rows if id_of(row) == id] or [new]
            return [*(row for row in rows if id_of(row) != id), before[0] | settings]

        self.store.change(edit)

    async def run(self, may_go_on: Callable[[], bool] = lambda: True) -> None:
        """A look at the clock and at the file each second. Cancelled, it cancels what runs; if it
        may not go on, it waits for that."""
        try:
            while may_go_on():
                await self.tick()
                await self.sleep(1)
            await asyncio.gather(*self._running.values(), return_exceptions=True)
        finally:
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def tick(self) -> list[asyncio.Task]:
        """One look; returns the tasks of what runs."""
        now = self._utc()
        if now < self._looked:  # the clock was set back: no time of before counts
            self._jobs = {}
        self._looked = now
        try:
            self._jobs = await in_thread(self._jobs_of_file, now)
        except Exception as problem:  # the file is damaged or may not be opened: those known go on
            warn_once(f"cron: the jobs cannot be looked at: {problem}")
        for job in self._jobs.values():
            is_due = job.enabled and job.coming is not None and job.coming <= now
            if is_due and job.id not in self._running and self.is_wanted(job):
                self._start(job, now)
        return list(self._running.values())

    def _jobs_of_file(self, now: datetime) -> dict[str, CronJob]:
        """If a row is unchanged, its job object is kept. Blocks."""
        jobs: dict[str, CronJob] = {}
        for row in self.store.read():
            job = self._jobs.get(id_of(row))
            if job is None or job.row != row:
                job = job_of(row, now, self.zone)
            if job and (job.id in self._system or not job.system):
                jobs.setdefault(job.id, job)
        return jobs

    def _start(self, job: CronJob, now: datetime) -> None:
        """Run what is due. A repeated job that is late by half the time to its next run waits for
        that; a reminder of long ago is only told."""
        due, message, late = job.coming, job.message, self._shown(job.coming)
        job.coming = None if job.at else job.due(now, self.zone)
        if job.at and now - due > ONE_DAY:
            message = f"Only tell the user that this was missed on {late}: {message}"
        elif not job.at and not job.system:
            half = ((job.due(due, self.zone) or due + ONE_DAY) - due) / 2
            due = job.due(now - min(half, self.longest_delay), self.zone)  # first not too late
            if due is None or due > now:
                told = "cron: %s was due on %s, too long ago: it waits for its next time"
                return log.warning(told, job.id, late)
        self._running[job.id] = asyncio.create_task(self._run(replace(job, message=message), due))

    async def _run(self, job: CronJob, due: datetime) -> None:
        """Cancelled, it is not noted: when the program is back, the job runs again."""
        began, name, error = self.now().isoformat(), f"{job.id}@{due:%Y-%m-%dT%H:%M:%SZ}", ""
        try:
            work = self._system[job.id]() if job.system else self.fire(job, name)
            [outcome] = await asyncio.gather(work, return_exceptions=True)
            if isinstance(outcome, asyncio.CancelledError):
                error = "stopped"
            elif isinstance(outcome, Exception):
                error = f"{type(outcome).__name__}: {outcome}"
                log.warning("cron: job %s failed", job.id, exc_info=outcome)
            await self._note(job, began, error)
        finally:
            del self._running[job.id]

    async def _note(self, job: CronJob, began: str, error: str) -> None:
        """Into the file; an `at` that went well leaves it, one that failed is off. If the disk
        refuses, the program remembers: the job does not run twice."""
        changes = {"since": began, "error": error} | ({"enabled": False} if job.at else {})

        def edit(rows: list) -> list:
            if job.at and not error:
                return [row for row in rows if id_of(row) != job.id]
            return [row | changes if id_of(row) == job.id else row for row in rows]

        try:
            await in_thread(self.store.change, edit)
        except Exception as problem:  # a full disk, a file that somebody spoilt
            log.error("cron: the run of %s cannot be noted: %s", job.id, problem)

    def cron(
        self,
        action: Literal["add", "list", "remove"],
        message: Annotated[str, "What to do then, in full: the run sees nothing of this chat"] = "",
        every_seconds: Annotated[int, "Again and again, so far apart"] = 0,
        cron_expr: Annotated[str, "Five fields, minute first: 30 8 * * mon-fri"] = "",
        tz: Annotated[str, "Time zone, like Europe/Berlin; default: the user's"] = "",
        at: Annotated[str, "Once: 2026-11-21T17:00, or with an offset"] = "",
        job_id: Annotated[str, "For remove: an id from list"] = "",
        *,
        turn: Any,
    ) -> str:
        """Reminders and regular tasks: each runs later as a turn of its own; its answer comes here.

        add needs a message and one of every_seconds, cron_expr and at. "In ten minutes": add them
        to the time in the runtime context, use `at`. "Every morning at 8": cron_expr "0 8 * * *".
        Tell the user the time that comes back. To change a job, remove it and add another.
        """
        if action == "list":
            jobs = [job_of(row, self._utc(), self.zone) for row in self.store.read()]
            return "\n".join(self._line(job) for job in jobs if job) or "There are no jobs."
        if action == "remove":
            return self._remove(job_id)
        if turn.channel == "cron":
            raise CronError("A job that runs adds no others: do what its message says.")
        job = CronJob(os.urandom(4).hex(), message.strip(), every_seconds, cron_expr, tz, at)
        job.channel, job.chat_id = turn.channel, turn.chat_id
        job.created = job.since = self.now().isoformat()
        return self._add(job)

    def _add(self, job: CronJob) -> str:
        schedules = [job.every_seconds != 0, job.cron_expr != "", job.at != ""]
        if not job.message:
            raise CronError("message is empty: say what is to be done then.")
        if schedules.count(True) != 1:
            raise CronError("Give exactly one of every_seconds, cron_expr and at.")
        try:
            if job.at:
                moment = as_moment(job.at, zone_named(job.tz, self.zone))
                job.at, job.tz = moment.astimezone(self.zone).isoformat(), ""
            due = job.due(self.now(), self.zone)
        except (ValueError, OverflowError) as problem:
            raise CronError(f"No job was made of {job.schedule()!r}: {problem}.") from None
        if due is None:
            raise CronError(f"{job.schedule()!r} never comes. It is now {self._shown(self.now())}.")
        self.store.change(lambda rows: [*rows, asdict(job)])
        return f"Added job {job.id}, {job.schedule()}: it runs next on {self._shown(due)}."

    def _remove(self, job_id: str) -> str:
        def edit(rows: list) -> list:
            found = [row for row in rows if job_id and id_of(row) == job_id]
            if not found:
                known = [id_of(row) for row in rows if id_of(row) and not row.get("system")]
                can_go = f"Those that can be removed: {', '.join(known) or 'none'}."
                raise CronError(f"There is no job {job_id!r}. {can_go}")
            if found[0].get("system"):
                raise CronError(f"{job_id} is a job of the system: it cannot be removed.")
            return [row for row in rows if row not in found]

        self.store.change(edit)
        return f"Removed job {job_id}."

    def _line(self, job: CronJob) -> str:
        """1a2b3c4d · cron 0 9 * * * · next Sun 2026-11-22 09:00 CET · telegram:42 · water plants"""
        now, due = self._utc(), job.coming if job.enabled else None
        if due and due < now and not job.at:
            due = job.due(now, self.zone)
        coming = f"next {self._shown(max(due, now))}" if due else "off"
        chat = "system" if job.system else f"{job.channel}:{job.chat_id}"
        failed = f" · failed: {job.error[:200]}" if job.error else ""
        return " · ".join([job.id, job.schedule(), coming, chat, job.message[:80]]) + failed


def machine_zone(path: Path = Path("/etc/localtime")) -> tzinfo:
    """This machine's zone with its rules: `datetime.now().astimezone()` has only today's offset."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        if name := os.environ.get("TZ", "").lstrip(":"):
            return zoneinfo.ZoneInfo(name)
        with open(path, "rb") as file:
            return zoneinfo.ZoneInfo.from_file(file, str(path.resolve()).rpartition("zoneinfo/")[2])
    return datetime.now().astimezone().tzinfo


# ---- Heartbeat ----
# An empty HEARTBEAT.md does not ask the model 48 times a day whether there is something to do.

COMMENT = r"(?s)<!--.*?(-->|\Z)"  # <!-- write tasks here -->
# - [x] call Ann ↵   her number is 555
DONE = r"(?m)^([ \t]*)[-*+] \[[xX]\].*(\n\1[ \t]+(?![-*+] \[ )\S.*)*"
NO_TASK = r"\s*(#+(\s.*)?|[-*+]\s*(\[ ?\]\s*)?|[-*_]{3,}\s*)?"  # ## Tasks   - [ ]   ---


def active_tasks(text: str) -> str:
    """What is left without comments and what is ticked off; "" where no task is among it:

    "# Tasks\\n- [x] call Ann\\n- [ ] water the plants" → "# Tasks\\n\\n- [ ] water the plants"
    """
    rest = re.sub(DONE, "", re.sub(COMMENT, "", text))
    tasks = [line for line in rest.splitlines() if not re.fullmatch(NO_TASK, line)]
    return rest.strip() if tasks else ""


# ---- The page: an agent behind glass ----
# Without the token and the checks of Host and Origin, any web page that the user opens could send
# a message to the agent, or read what it said.

PAGE_POLICY = (
    "default-src 'none'; script-src 'nonce-{0}'; style-src 'nonce-{0}'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
NO_COOKIE = "Open the address that `nanobot web` printed."


@dataclass
class PageChat:
    """What the page shows of one session besides its journal."""

    events: deque = field(default_factory=lambda: deque(maxlen=4_000))  # (number, JSON)
    count: int = 0  # of all events so far
    draft: str = ""  # the answer that streams
    sent: list[dict] = field(default_factory=list)  # the messages of the last request
    is_stepping: bool = False  # does it pause before each request and each call?


class WebPage(Channel):
    """A page on 127.0.0.1 for whoever has the token; each of its windows shows one chat.

    `show(chat_id, event)` brings a dict to all windows of the chat, also after a reload.
    `ask(text)` waits for an answer from the chat whose turn runs in this task. `files(chat_id)`
    gives the paths of its journal and of MEMORY.md, which are shown as they change; `scrub` takes
    keys out of an event.
    """

    name = "web"
    shows_deltas = True

    def __init__(self, html: str, files: Callable, port: int = 0, scrub: Callable = dict):
        super().__init__(["local"])
        self.html, self.files, self.scrub = html, files, scrub
        self.turn_of = contextvars.ContextVar("turn_of", default="page")  # the chat of this task
        self.chats: dict[str, PageChat] = defaultdict(PageChat)
        self.questions: dict[str, asyncio.Future] = {}
        self.server = self._server(port)
        port, token = self.server.server_port, secrets.token_urlsafe(24)
        self.host, self.address = f"127.0.0.1:{port}", f"http://127.0.0.1:{port}/?token={token}"
        self.path, self.cookie = f"/?token={token}", f"nanobot_{port}={token}"

    def _server(self, port: int) -> Any:
        """Not yet serving. `http.server` takes 30 ms to import: only the page pays."""
        from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

        class Handler(PageRequest, BaseHTTPRequestHandler):
            page = self

        class Server(ThreadingHTTPServer):
            allow_reuse_address = os.name == "posix"  # on Windows two programs would share a port

            def handle_error(self, *_: Any) -> None:  # a window was closed; no traceback for that
                log.debug("page: a request broke off", exc_info=True)

        return Server(("127.0.0.1", port), Handler)

    async def start(self, bus: MessageBus) -> None:
        self.bus, self.loop = bus, asyncio.get_running_loop()
        threading.Thread(target=self.server.serve_forever, args=(0.1,), daemon=True).start()

    async def send(self, message: OutboundMessage) -> None:
        if message.kind == "delta":
            self.chats[message.chat_id].draft += message.content
        elif message.kind == "final":
            self.show(message.chat_id, {"kind": "say", "content": message.content})

    def show(self, chat_id: str, event: dict) -> None:
        chat = self.chats[chat_id]
        if event["kind"] in ("answer", "say"):
            chat.draft = ""
        chat.count += 1
        chat.events.append((chat.count, self._json(**event)))

    def _json(self, **event: Any) -> str:
        """Without keys; but a call that waits for approval is shown, and edited, as it will run."""
        shown = event if event["kind"] == "ask" else self.scrub(event)
        return json.dumps({"time": time.time(), **shown}, default=str)

    async def ask(self, text: str, what: str = "approve", **details: Any) -> str:
        number, chat_id = secrets.token_hex(8), self.turn_of.get()
        self.questions[number] = asyncio.get_running_loop().create_future()
        self.show(chat_id, {"kind": "ask", "id": number, "what": what, "text": text, **details})
        try:
            return await self.questions[number]
        finally:
            del self.questions[number]
            self.show(chat_id, {"kind": "asked", "id": number})

    async def take(self, path: str, body: dict) -> None:
        """What a window sends. Raises ValueError if it is not understood."""
        if path == "/say":
            chat_id, number = page_chat(body["chat"]), str(body["id"])[:64]
            said = InboundMessage(self.name, "local", chat_id, str(body["text"]), (), number)
            await self.bus.publish(said)
        elif path == "/step":
            self.chats[page_chat(body["chat"])].is_stepping = bool(body["on"])
        elif body["id"] in self.questions and not self.questions[body["id"]].done():
            self.questions[body["id"]].set_result(str(body["text"]))
        else:
            raise ValueError("this question was answered already")

    def news(self, chat_id: str) -> Iterator[str]:
        """Events as JSON until the program ends; "" ten times a second."""
        chat, (journal, facts) = self.chats[chat_id], self.files(chat_id)
        yield self._json(kind="hello", step=chat.is_stepping, chats=list(self.chats))
        position, seen, draft, known = 0, 0, "", text_behind(facts)
        while True:
            time.sleep(0.1)
            lines = text_behind(journal, position).rpartition("\n")[0]
            if lines:
                position += len(lines.encode("utf-8", "surrogateescape")) + 1
                yield self._json(kind="journal", lines=lines.split("\n"))
            for number, event in list(chat.events):
                if number > seen:
                    seen = number
                    yield event
            if chat.draft != draft:
                draft = chat.draft
                yield self._json(kind="draft", text=draft)
            before, known = known, text_behind(facts)
            if before != known:
                yield self._json(kind="memory", before=before, after=known)
            yield ""


def text_behind(path: Path, position: int = 0) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(position)
            return file.read().decode("utf-8", "surrogateescape")
    except FileNotFoundError:
        return ""


def page_chat(name: Any) -> str:
    """"my session" → "my-session" """
    return re.sub(r"[^\w.-]+", "-", str(name))[:60] or "page"


class PageRequest:
    """One HTTP request of a browser, for `http.server`. Without token or cookie it gets 403."""

    page: WebPage
    timeout = 60  # seconds that a silent client may hold its thread

    def log_message(self, *_: Any) -> None:
        """Nothing: the token is in the first address."""

    def _has(self, secret: str, *texts: str) -> bool:
        """Is the secret among the texts, and the request from this page? A rebound name has another
        Host, and another page in this browser has another Origin."""
        own = self.page.host
        is_from_here = self.headers.get("Origin", f"http://{own}") == f"http://{own}"
        found = [secrets.compare_digest(text.encode(), secret.encode()) for text in texts]
        return self.headers.get("Host") == own and is_from_here and any(found)

    def _is_allowed(self) -> bool:
        return self._has(self.page.cookie, *self.headers.get("Cookie", "").split("; "))

    def _reply(self, status: int, text: str, kind: str = "text/plain", **more: str) -> None:
        self.send_response(status)
        headers = {
            "Content_Type": f"{kind}; charset=utf-8", "Cache_Control": "no-store",
            "X_Content_Type_Options": "nosniff", "Referrer_Policy": "no-referrer", **more,
        }  # fmt: skip
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(text.encode("utf-8"))

    def do_GET(self) -> None:  # noqa: N802
        path, _, query = self.path.partition("?")
        if self._has(self.page.path, self.path):  # out of the address bar: a projector shows it
            cookie = f"{self.page.cookie}; HttpOnly; SameSite=Strict; Path=/"
            self._reply(303, "", Location="/", Set_Cookie=cookie)
        elif not self._is_allowed():
            self._reply(403, NO_COOKIE)
        elif path == "/events":
            self._reply(200, "", "text/event-stream")
            chat = dict(urllib.parse.parse_qsl(query)).get("chat", "page")
            for event in self.page.news(page_chat(chat)):
                self.wfile.write(f"data: {event}\n\n".encode() if event else b":\n\n")
        else:
            nonce = secrets.token_urlsafe(16)
            html, policy = self.page.html.replace("%NONCE%", nonce), PAGE_POLICY.format(nonce)
            self._reply(200, html, "text/html", Content_Security_Policy=policy)

    def do_POST(self) -> None:  # noqa: N802
        if not self._is_allowed():
            return self._reply(403, NO_COOKIE)
        try:
            size = int(self.headers.get("Content-Length", 0))
            if not 0 <= size <= 1_000_000 or self.headers.get_content_type() != "application/json":
                return self._reply(413, "JSON of up to 1,000,000 bytes, please.")
            taking = self.page.take(self.path, json.loads(self.rfile.read(size)))
            asyncio.run_coroutine_threadsafe(taking, self.page.loop).result(10)
            self._reply(204, "")
        except Exception as problem:  # JSON that is none, a journal that cannot be written
            self._reply(400, f"The message was not taken: {problem}")
