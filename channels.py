"""How words get in and out: many chats, one agent.

A channel turns what somebody writes into a message, and an event of the agent into what they see:

    InboundMessage("telegram", "7", "42", "What is in a.txt?")  → bus →  the agent
    OutboundMessage("telegram", "42", "It says hello.")         ← bus ←  the agent

The one idea: who hands something over learns when it is safe (`publish` returns, `on_delivered` is
called) and tries again until then. Works alone; read last. Not covered: turns, sessions, options.
"""

import asyncio
import contextlib
import io
import json
import logging
import os
import queue
import re
import select
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, TextIO

# ---- Many channels, one agent ----

@dataclass
class InboundMessage:
    channel: str
    sender_id: str
    chat_id: str
    content: str
    media: Sequence[Path] = ()
    metadata: dict = field(default_factory=dict)
    message_id: str = ""  # the channel's own: the same message is not taken twice
    journalled: asyncio.Future | None = field(default=None, repr=False, compare=False)

    @property
    def session_key(self) -> str:
        return f"{self.channel}:{self.chat_id}"

    def confirm(self, problem: Exception | None = None) -> None:
        """The agent has journalled it, or this problem keeps it from that."""
        if self.journalled and not self.journalled.done():  # else nobody waits for it
            self.journalled.set_result(problem)


class MessageBus:
    """All that is opened on it lives on one event loop."""

    def __init__(self, sleep: Callable[[float], Awaitable] = asyncio.sleep):
        self._inbound: asyncio.Queue[InboundMessage] = asyncio.Queue()
        self._open: dict[str, Connection] = {}
        self._sleep = sleep

    def open(self, channel: "Channel") -> None:
        """From now on the channel is listened to, and what is for it is delivered."""
        self._open[channel.name] = Connection(channel, self, self._sleep)

    @property
    def channels(self) -> list[str]:
        return list(self._open)

    async def publish(self, message: InboundMessage) -> None:
        """Returns when the agent has journalled the message, or raises what kept it from that."""
        message.journalled = asyncio.get_running_loop().create_future()
        self._inbound.put_nowait(message)
        if problem := await message.journalled:
            raise problem

    async def next(self) -> InboundMessage:
        """For the agent, which journals it and then calls its `confirm`."""
        return await self._inbound.get()

    def send(self, message: "OutboundMessage") -> None:
        """Into the queue of its channel: no channel waits for another, and the agent for none."""
        if message.channel in self._open:
            self._open[message.channel].put(message)
        elif message.kind == "final":
            log.warning("There is no channel %r: its answer is shown nowhere", message.channel)

    async def close(self, seconds: float = 5.0) -> None:
        """What is on its way out gets these seconds, then the channels stop."""
        await asyncio.gather(*(connection.close(seconds) for connection in self._open.values()))


@dataclass
class OutboundMessage:
    channel: str
    chat_id: str
    content: str
    kind: str = "final"  # or delta (a piece of the answer), progress, tool_hint, retry
    media: Sequence[Path] = ()
    reply_to: str = ""  # the message_id that it answers
    on_delivered: Callable[[], None] | None = field(default=None, repr=False, compare=False)


class Channel:
    """A place where people write. `start` listens and publishes what is allowed, `stop` lets go of
    what it holds, `send` delivers, or raises where another try may help (no network)."""

    name = ""

    def __init__(self, allow_from: Sequence[str | int] = ()):
        self.allow_from = [str(sender_id) for sender_id in allow_from]

    async def start(self, bus: MessageBus) -> None: ...
    async def stop(self) -> None: ...
    async def send(self, message: OutboundMessage) -> None: ...

    def is_allowed(self, sender_id: str | int) -> bool:
        """[] → nobody, ["*"] → everybody, ["7", 8] → those whose id is exactly 7 or 8."""
        return "*" in self.allow_from or str(sender_id) in self.allow_from


class FileChannel(Channel):
    """A whole channel: each line of one open file is a message, another file gets the answers."""

    def __init__(self, questions: TextIO, answers: TextIO):
        super().__init__(allow_from=["*"])
        self.name, self.questions, self.answers = "file", questions, answers

    async def start(self, bus: MessageBus) -> None:
        for line in self.questions:
            await bus.publish(InboundMessage(self.name, "me", "direct", line.strip()))

    async def send(self, message: OutboundMessage) -> None:
        if message.kind == "final":
            print(message.content, file=self.answers, flush=True)


# ======== Second reading: slow channels, the terminal, and time as one more channel ========


# ---- A channel that is slow or fails ----
# Without this a phone without a network holds up every other chat, and so does Telegram's
# "429 Too Many Requests: retry after 30".


log = logging.getLogger("nanobot.channels")


class Connection:
    """An open channel: one task listens to it, another delivers what is for it, in order."""

    pauses = (1.0, 2.0, 4.0)  # seconds, each behind a failed try
    most_waiting = 100  # messages; behind them only final answers are sure of a place
    most_kept = 20  # final answers that could not be delivered

    def __init__(self, channel: Channel, bus: MessageBus, sleep: Callable[[float], Awaitable]):
        self.channel, self.sleep = channel, sleep
        self.waiting: deque[OutboundMessage | None] = deque()  # None: the end
        self.kept: deque[OutboundMessage] = deque(maxlen=self.most_kept)
        self.news = asyncio.Event()
        self.listening = asyncio.create_task(self._listen(bus))
        self.delivering = asyncio.create_task(self._deliver())

    def put(self, message: OutboundMessage) -> None:
        """Never waits. Without room an event is left out: what it tells is in the final answer."""
        if message.kind == "final" or len(self.waiting) < self.most_waiting:
            self.waiting.append(replace(message))  # a copy: a piece may be joined to it
            self.news.set()
        elif message.kind == "delta":
            self._join(message)

    def _join(self, delta: OutboundMessage) -> None:
        """`Hel` waits, `lo.` comes → `Hello.` waits, if nothing of that chat stands in between."""
        messages = filter(None, reversed(self.waiting))
        last = next((old for old in messages if old.chat_id == delta.chat_id), None)
        if last and last.kind == "delta":
            last.content += delta.content

    async def _listen(self, bus: MessageBus) -> None:
        try:
            await self.channel.start(bus)
        except Exception as problem:
            log.error("%s: nobody listens there any more: %s", self.channel.name, problem)

    async def _deliver(self) -> None:
        while await self.news.wait():
            self.news.clear()
            while self.waiting:
                message = self.waiting.popleft()
                if message is None:
                    return
                await self._deliver_one(message)

    async def _deliver_one(self, message: OutboundMessage) -> None:
        """An event is tried once; a final answer three times, then again when one gets through."""
        if message.kind != "final":
            await self._try(message)
            return
        for seconds in self.pauses:
            if await self._try(message):
                self.waiting.extend(self.kept)
                self.kept.clear()
                return
            await self.sleep(seconds)
        log.error("%s: an answer for %s is kept for later", self.channel.name, message.chat_id)
        self.kept.append(message)

    async def _try(self, message: OutboundMessage) -> bool:
        try:
            await self.channel.send(message)
        except Exception as problem:
            log.warning("%s: cannot deliver (%s): %s", self.channel.name, message.kind, problem)
            return False
        try:
            if message.on_delivered:
                message.on_delivered()
        except Exception as problem:  # it has arrived all the same: not to be sent again
            log.error("%s: a delivery could not be noted: %s", self.channel.name, problem)
        return True

    async def close(self, seconds: float) -> None:
        self.waiting.append(None)
        self.news.set()
        await asyncio.wait([self.delivering], timeout=seconds)
        try:
            await asyncio.wait_for(self.channel.stop(), 2.0)
        except Exception as problem:
            log.warning("%s: did not stop as it should: %r", self.channel.name, problem)
        tasks = [self.listening, self.delivering]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=1.0)


# ---- Text for a terminal ----
# Without this a page that the model quotes clears the screen ("\x1b[2J"), and "exe.gpj" is read
# as "jpg.exe" behind a character that turns the direction of writing.

# C0 but tab and newline, DEL, C1; bidi controls, zero-widths, tags. Not the soft hyphen and the
# two joiners: Persian words and the emoji of a family are made with them.
UNSAFE = re.compile(
    "[\0-\b\v-\x1f\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff"
    "\ufff9-\ufffb\U000e0000-\U000e01ef]"
)  # "\x1b[2J"
JOINERS = re.compile("[\xad\u200c\u200d]")  # "می\u200cخواهم"; between Latin letters nobody sees it
BLANKS = re.compile(r"\s{4,}")  # "true                                    ; rm -rf ~"


def printable(text: str) -> str:
    """A red word → `\\x1b[31mred`: what would steer the terminal is shown instead of obeyed."""
    return encodable(UNSAFE.sub(as_escape, text))


def as_escape(match: re.Match) -> str:
    return match[0].encode("unicode_escape").decode()


def encodable(text: str) -> str:
    return text.encode("utf-8", errors="replace").decode("utf-8")  # a lone surrogate is not


class PrintableFormatter(logging.Formatter):
    """For logs on a terminal: what a tool or an endpoint said is in warnings, too."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def approval_question(name: str, arguments: dict) -> str:
    """A call in full, on one line: nothing in it can look like our question or scroll it away.

    ("exec", {"command": "ls\\nRun it?"}) → `exec {"command": "ls\\\\nRun it?"}`, then `Run it? [y…`
    """
    call = f"{name} {json.dumps(arguments, ensure_ascii=False)}"
    shown = JOINERS.sub(as_escape, printable(call))
    shown = BLANKS.sub(lambda blanks: f"[{len(blanks[0])} blanks]", shown)
    size = f"{name}, {len(shown):,} characters. " if len(shown) > 500 else ""
    return f"{shown}\n{size}Run it? [y/n/always] "


NOBODY_TO_ASK = (
    "--approve: nobody can be asked, standard input is no terminal. What needs approval is refused."
    " Start it without a pipe to be asked, or without --approve to allow everything."
)


# ---- What a program inherits ----
# Without this `2>&-` prints errors into the answer, `>&-` ends in a traceback, and closing the
# window ends the job that `nohup nanobot gateway &` was to save from just that.


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
# Without this a `y` that was typed too early approves a command that nobody has read.


def read_answer(question: str, words: Sequence[str] = ()) -> str:
    """An answer to a question of one or more lines; the tab key completes the words."""
    before, line_end, prompt = printable(question).rpartition("\n")
    complete_with(words)
    with contextlib.suppress(ImportError):  # there is no termios on Windows
        import termios

        with contextlib.suppress(termios.error, OSError):
            termios.tcflush(sys.stdin, termios.TCIFLUSH)  # what was typed before is no answer
    print(before, end=line_end, file=sys.stderr, flush=True)
    try:
        return type_at(prompt, sys.stdout.isatty(), sys.stderr)
    except UnicodeDecodeError:
        return ""  # what is no text is no yes


def type_at(prompt: str, live: bool, err: TextIO) -> str:
    """A line from the keyboard. stdout is for the answer: if it is no terminal, stderr prompts."""
    if live:
        return input(prompt)
    print(prompt, end="", file=err, flush=True)
    return input()


def complete_with(words: Sequence[str]) -> None:
    def completion(beginning: str, number: int) -> str | None:
        fitting = [word for word in words if word.startswith(beginning)]
        return fitting[number] if number < len(fitting) else None

    with contextlib.suppress(ImportError):  # there is no readline on Windows
        import readline

        readline.set_completer(completion)
        readline.parse_and_bind("tab: complete")


# ---- Waiting is shown ----
# Without this a model that thinks for a minute looks like a program that hangs.


class Waiting:
    """`waiting for the model, 12 s`: one line, gone before anything else is printed.

    Only the main thread draws it, when it has nothing else to do: so never at a prompt.
    """

    def __init__(self, err: TextIO | None, clock: Callable[[], float] = time.monotonic):
        self.err, self.clock = err, clock
        self.can_draw = err is not None and err.isatty() and os.environ.get("TERM") != "dumb"
        self.what, self.since = "", 0.0
        self.drawn = ""
        self.is_mid_line = False  # half an answer stands where the line would have to be
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
            is_time = bool(what) and seconds >= 1 and line != self.drawn
            if self.can_draw and is_time and not self.is_mid_line:
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
# Without this nobody could be asked during a turn: `input` would stop the event loop, and with it
# every stream and tool. Ctrl-C reaches the main thread only, so that one has the keyboard.


def wait_for(questions: queue.SimpleQueue, waiting: Waiting) -> Any:
    """The next one. Looks up now and then: a Ctrl-C that another thread was given wakes nobody."""
    while True:
        try:
            return questions.get(timeout=0.2)
        except queue.Empty:
            waiting.draw()


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

    What goes to the right is called on the loop; what goes to the left is put into a queue.
    """

    def __init__(self, close: Callable | None = None, waiting: Waiting | None = None):
        self.loop = asyncio.new_event_loop()
        self.close = close  # what is done at the end, on the loop
        self.waiting = waiting or Waiting(None)  # drawn while a turn is waited for
        self._questions: queue.SimpleQueue | None = None  # of the turn that is waited for
        self._answers: set[asyncio.Future] = set()  # that are not there yet
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        self.loop.run_forever()
        self.loop.close()  # lets go of its pipes and threads

    def complete(self, work: Coroutine) -> Any:
        """Runs it to its end. Ctrl-C cancels it, waits for its end and raises KeyboardInterrupt."""
        questions: queue.SimpleQueue = queue.SimpleQueue()  # of its own: nothing late is in it
        task: asyncio.Task | None = None

        def start() -> None:
            nonlocal task
            self._questions = questions
            task = self.loop.create_task(work)
            task.add_done_callback(lambda _: questions.put(None))

        try:
            self.loop.call_soon_threadsafe(start)
            while question := wait_for(questions, self.waiting):
                self._answer(*question)
        except BaseException as stop:
            self.loop.call_soon_threadsafe(lambda: task.cancel())
            self.loop.call_soon_threadsafe(self._refuse)
            while wait_for(questions, self.waiting):
                pass  # these are refused, too
            if isinstance(stop, EOFError):  # Ctrl-D at a question
                raise KeyboardInterrupt from None
            raise
        finally:
            self.waiting.end()
            self.loop.call_soon_threadsafe(self._refuse)
        return task.result()

    def _answer(self, answer: asyncio.Future, question: str, words: Sequence[str]) -> None:
        if not answer.done():  # else whoever asked is gone
            self.waiting.erase()
            text = read_answer(question, words)
            self.loop.call_soon_threadsafe(self._settle, answer, text)

    async def ask(self, question: str, words: Sequence[str] = ()) -> str:
        """One line from the person at the terminal; raises NobodyToAsk outside of `complete`."""
        if self._questions is None:
            raise NobodyToAsk("Nobody can be asked: no turn is waited for at the terminal.")
        answer = self.loop.create_future()
        self._answers.add(answer)
        self._questions.put((answer, question, words))
        return await answer

    def _settle(self, answer: asyncio.Future, text: str) -> None:
        self._answers.discard(answer)
        if not answer.done():
            answer.set_result(text)

    def _refuse(self) -> None:
        """On the loop, so that no question slips in: who waits for an answer waits no longer."""
        self._questions = None
        for answer in self._answers:
            if not answer.done():
                answer.set_exception(NobodyToAsk("Nobody can be asked: the turn has ended."))
        self._answers.clear()

    def at_end(self, close: Callable) -> None:
        """For what is made later than the loop, as it needs its `ask`."""
        self.close = close

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
# Without this an answer that was streamed is printed twice, `> review.md` holds hints between the
# words of the answer, and each line of a pasted page is a question of its own.


class CLI(Channel):
    """The answer goes to `out` and nothing else does: live on a terminal, once into a pipe."""

    name = "cli"

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None, kinds: Sequence = ()):
        super().__init__(allow_from=["*"])
        self.out = out or sys.stdout or io.StringIO()  # None: it was closed by `>&-`
        self.err = err or sys.stderr or io.StringIO()
        self.kinds = kinds or ("progress", "tool_hint", "retry")  # shown besides the answer
        self.live = self.out.isatty()
        self.waiting = Waiting(self.err)
        self._streamed = ""  # of a text whose end has not come yet

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
        shown = printable(text) if self.live else encodable(text)
        with self.waiting.silence():
            print(shown, end="", file=self.out, flush=True)
            self.waiting.is_mid_line = not shown.endswith("\n")

    def _end_text(self, text: str) -> None:
        rest = not_yet_shown(text, self._streamed)
        self._streamed = ""
        self._print(rest.removesuffix("\n") + "\n")

    def note(self, text: str) -> None:
        """A line beside the answer, dimmed where colours are; half an answer ends its line."""
        if self._streamed:
            self._streamed = ""
            self._print("\n")
        line = printable(text)
        if self.err.isatty():
            line = f"\x1b[2m{line}\x1b[0m"
        with self.waiting.silence():
            print(line, file=self.err, flush=True)

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
                stopped = "\nstopped; /continue goes on with the turn" if text else ""
                self.note(stopped)
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
        line = type_at(prompt, self.live, self.err)
        with contextlib.suppress(ImportError, OSError):
            import readline

            # it keeps no empty line
            readline.append_history_file(int(bool(line) and self.live), history)
        return line

    def read_piped(self, beside_message: bool, folder: Path) -> str:
        """What was piped in. Beside a message nobody may write to the pipe: it has 3 s to begin."""
        if sys.stdin is None:
            return ""
        may_be_silent = beside_message and os.name == "posix"
        if may_be_silent and not select.select([sys.stdin], [], [], 3.0)[0]:
            self.note("nanobot: standard input is open but silent, going on without it")
            return ""
        return text_of_pipe(sys.stdin.buffer, folder)


def not_yet_shown(text: str, streamed: str) -> str:
    """("Hello.", "Hel") → "lo."; ("Bye.", "Hel") → "\\nBye.", on a line of its own."""
    shown = streamed.strip()  # the blanks at its edges do not count: providers cut them off
    if not shown:
        return text
    if text.lstrip().startswith(shown):
        return text.lstrip().removeprefix(shown)
    return f"\n{text}"


# ---- A pipe with more than a message ----
# Without this `nanobot -m "what went wrong?" < server.log` puts 50 MB into the journal, for ever.

MOST_PIPED = 100_000  # characters of standard input that a message may hold
HEAD_OF_PIPED = 10_000  # characters that the model gets of more than that
KEPT_PIPED = 20  # files


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
    for old in sorted(folder.glob("*-*.txt"))[:-KEPT_PIPED]:
        old.unlink(missing_ok=True)
    return (
        f"[standard input: {path.stat().st_size:,} bytes, all of it in {path}; its beginning:]\n"
        f"{text[:HEAD_OF_PIPED]}\n"
        f"[standard input goes on: look into {path} with grep, or with read_file in pages]"
    )
