"""How words get in and out of the agent.

A channel turns what somebody says into a call of the agent, and the agent's events into what they see:

    OutboundMessage("cli", "direct", 'read_file("a.txt")', kind="tool_hint")
    OutboundMessage("cli", "direct", "It says hello.", kind="final")

The one channel so far is the terminal. What came from a model or a file is made harmless before it is shown.
This file works alone. Read it last. Not covered: the options of the command line (nanobot.py).
"""

import asyncio
import contextlib
import logging
import os
import queue
import re
import select
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

log = logging.getLogger("nanobot.channels")


@dataclass
class OutboundMessage:
    """An event on its way out. Kinds: final, delta (a piece of the answer), progress, tool_hint, retry."""

    channel: str
    chat_id: str
    content: str
    kind: str = "final"


# C0 but tab and newline, DEL, C1; bidi controls, zero-widths, tags: they rewrite what a reader sees
UNSAFE = re.compile(
    "[\0-\b\v-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff"
    "\ufff9-\ufffb\U000e0000-\U000e01ef]"
)


def printable(text: str) -> str:
    """Text for a terminal: control, escape, bidi and invisible characters are shown as `\\x1b`, `\\u202e`."""
    safe = UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
    return safe.encode("utf-8", errors="replace").decode("utf-8")  # a lone surrogate has no UTF-8


class PrintableFormatter(logging.Formatter):
    """For logs on a terminal: what a tool or an endpoint said is in warnings, too."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP: as Ctrl-C it stops a turn, and it ends a conversation, too."""


def terminate(*_: Any) -> None:
    raise Terminated


def wait_for(items: queue.SimpleQueue) -> Any:
    """The next item. Looks up now and then: a Ctrl-C that the system gave to another thread wakes nobody."""
    while True:
        with contextlib.suppress(queue.Empty):
            return items.get(timeout=0.2)


def type_at(prompt: str, live: bool, err: TextIO) -> str:
    """A line from the keyboard. stdout is for the answer: where it is no terminal, stderr has the prompt."""
    print(end="" if live else prompt, file=err, flush=True)
    return input(prompt if live else "")


def read_answer(question: str, words: Sequence[str] = ()) -> str:
    """An answer to a question, which may have several lines; the tab key completes the words."""
    with contextlib.suppress(ImportError):
        import readline

        readline.set_completer(lambda text, n: [*(word for word in words if word.startswith(text)), None][n])
        readline.parse_and_bind("tab: complete")
    before, line_end, prompt = printable(question).rpartition("\n")
    with contextlib.suppress(ImportError):  # there is no termios on Windows
        import termios

        with contextlib.suppress(termios.error, OSError):
            termios.tcflush(sys.stdin, termios.TCIFLUSH)  # what was typed before is no answer
    try:
        print(end=before + line_end, file=sys.stderr, flush=True)
        return type_at(prompt, sys.stdout.isatty(), sys.stderr)
    except UnicodeDecodeError:
        return ""  # what is no text is no yes


class BackgroundLoop(contextlib.AbstractContextManager):
    """An event loop on a daemon thread: the agent goes on while the main thread keeps the keyboard."""

    def __init__(self, close: Callable[[], Coroutine] | None = None):
        self.loop, self._questions = asyncio.new_event_loop(), queue.SimpleQueue()  # None: the end
        self.close = close  # what is done at the end, on the loop
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        self.loop.run_forever()
        self.loop.close()  # lets go of its pipes and threads

    def __exit__(self, *_: Any) -> None:
        ended = asyncio.run_coroutine_threadsafe(self.close(), self.loop) if self.close else None
        while ended and not ended.done():
            with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C would leave processes behind
                wait([ended])
        self.loop.call_soon_threadsafe(self.loop.stop)

    def complete(self, work: Coroutine) -> Any:
        """Run a coroutine to its end. Ctrl-C cancels it, waits for its end and raises KeyboardInterrupt."""
        questions = self._questions = queue.SimpleQueue()  # nothing late of an earlier turn is in it
        task: asyncio.Task | None = None

        def start() -> None:
            nonlocal task
            task = self.loop.create_task(work)
            task.add_done_callback(lambda _: questions.put(None))

        self.loop.call_soon_threadsafe(start)
        try:
            while question := wait_for(questions):
                answer, *asked = question
                answer.set_result(read_answer(*asked))
        except (KeyboardInterrupt, EOFError) as stop:
            self.loop.call_soon_threadsafe(lambda: task.cancel())
            while wait_for(questions):
                pass
            raise stop if isinstance(stop, Terminated) else KeyboardInterrupt from None
        return task.result()

    async def ask(self, question: str, words: Sequence[str] = ()) -> str:
        """One line from the person at the terminal; the tab key completes the words."""
        answer: Future = Future()
        self._questions.put((answer, question, words))
        return await asyncio.wrap_future(answer)


class CLI:
    """The terminal. The answer goes to `out` and nothing else does: live on a terminal, once into a pipe."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None, kinds: tuple[str, ...] = ()):
        self.out, self.err, self._streamed = out or sys.stdout, err or sys.stderr, ""
        self.kinds = kinds or ("progress", "tool_hint", "retry")  # what is shown besides the answer
        self.live = self.out.isatty()

    async def send(self, event: OutboundMessage) -> None:
        if event.kind == "delta" and self.live:
            self._streamed += event.content
            print(printable(event.content), end="", file=self.out, flush=True)
        elif event.kind == "final" or (event.kind == "progress" and self._streamed):
            text, shown, self._streamed = event.content, self._streamed.strip(), ""
            if shown:  # the blanks at its edges do not count: providers cut them off
                text = text.lstrip().removeprefix(shown) if text.lstrip().startswith(shown) else f"\n{text}"
            print(printable(text), file=self.out, flush=True)
        elif event.kind in self.kinds:
            self.note(event.content)

    def note(self, text: str) -> None:
        """A line beside the answer, dimmed where colours are; half an answer before it ends its line."""
        print(end="\n" if self._streamed else "", file=self.out, flush=True)
        self._streamed = ""
        dim, plain = ("\x1b[2m", "\x1b[0m") if self.err.isatty() else ("", "")
        print(f"{dim}{printable(text)}{plain}", file=self.err, flush=True)

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

            readline.append_history_file(1 if line and self.live else 0, history)  # it keeps no empty line
        return line

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

    def read_piped(self, beside_message: bool) -> str:
        """What was piped in. Beside a message it may be a pipe that nobody writes to: wait 3 s for a word."""
        if sys.stdin is None:
            return ""
        if beside_message and os.name == "posix" and not select.select([sys.stdin], [], [], 3.0)[0]:
            print("nanobot: standard input is open but silent, going on without it", file=self.err)
            return ""
        return sys.stdin.buffer.read().decode("utf-8", errors="replace").strip()
