"""`nanobot walk`: the functions of the kit that one turn enters, with their lines in the files, their data, and what changed.

    ======== request 2: 4 messages, about 4,900 tokens ========
      + tool: 1| hello
    nanobot.py:233 AgentRunner.govern(RunState)

A function stands below the one that called it, and again when it runs again; but repetitions within a repetition are left out.
"""

import asyncio
import functools
import itertools
import json
import sys
import threading
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HOUSE = Path(__file__).resolve().parent.parent.parent
PLAIN = (str, int, list, dict, Path)  # other data are shown as the name of their type
STEP_BEGINS = ("AgentLoop._make_room", "AgentRunner.govern")  # one of them comes first in each step
HEADING, DATA = "heading", "data"  # names of lines that are no functions
WIDTH = 120
real_path = functools.cache(lambda name: Path(name).resolve())  # of ../kit/nanobot.py, of a link


@dataclass
class Shown:
    """A line of the walk: a function, a heading or data; `below` are the lines that belong to it."""

    name: str
    text: str = ""
    parent: "Shown | None" = None
    below: list = field(default_factory=list)
    is_again: bool = False

    @property
    def is_new(self) -> bool:
        """Is here, or below, something that was not shown before?"""
        return not self.is_again or any(each.is_new for each in self.below)

    def lines(self, depth: int = 0) -> list[str]:
        """This line and those below it. What ran before is not shown within what ran before."""
        first, *rest = self.text.split("\n")
        lines = [f"{'  ' * depth}{line}"[:WIDTH] for line in (first, *rest)]
        if self.name == HEADING:
            lines = ["", *self.text.split("\n")]
        below = [each for each in self.below if each.is_new or not self.is_again]
        for name, group in itertools.groupby(below, lambda each: each.name):
            neighbours = list(group)
            inner = neighbours if name in (HEADING, DATA) else neighbours[:1]
            for each in inner:
                lines += each.lines(depth + 1)
            if len(inner) < len(neighbours):
                lines.append(f"{'  ' * (depth + 1)}… {len(neighbours)} times in a row")
        return lines


# A task or a thread begins with the function that created it.
CURRENT: ContextVar[Shown | None] = ContextVar("current", default=None)


def main(arguments: Any, make_loop: Any) -> int:
    """Run one turn and print its functions; `--all`: those of the second readings, too; `--short`: those of the runner."""
    follower, loop = Follower(HOUSE, arguments.all), make_loop()
    follower.only = "AgentRunner." if arguments.short else ""
    follower.journal = loop.sessions.path("cli:walk")
    loop.listeners.append(follower.tell)

    async def turn() -> Any:
        return await loop.process_direct(arguments.message, "cli:walk", drop)

    print("The turn runs. Its steps are shown when it has ended.", file=sys.stderr, flush=True)
    result = follower.follow(lambda: asyncio.run(turn()))
    lines = [*follower.top.lines(-1)[1:], f"\nanswer: {result.final_content or result.error or ''}"]
    print("\n".join(lines).encode("utf-8", "replace").decode())
    return int(result.stop_reason == "error")


async def drop(message: Any) -> None:
    """Gets what a terminal would show: without it, answers are not streamed."""


class Follower:
    def __init__(self, house: Path, is_long: bool):
        self.top = Shown("")
        self.frames: dict[Any, Shown] = {}  # a coroutine is entered after each wait: one frame
        self.seen: dict[str, Any] = {}  # {"nanobot.py:AgentRunner.run": its code, …}, in order
        self.ends: dict[Path, int] = {}  # by file: the line where its first reading ends
        self.only = ""  # what the names of all functions begin with: "AgentRunner."
        self.requests = 0
        self.heading: Shown | None = None  # of a step whose request was not sent yet
        for file in house.glob("*.py"):
            story = file.read_text(encoding="utf-8").partition("# ======== Second")[0]
            self.ends[real_path(file)] = sys.maxsize if is_long else story.count("\n")

    def follow(self, work: Any) -> Any:
        """Run `work()` and note the functions that it enters, on every thread; returns its result."""
        threading.setprofile(self.note)
        sys.setprofile(self.note)
        try:
            return work()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def note(self, frame: Any, event: str, argument: Any) -> None:
        """Called by Python when a function is entered or left; an `await` that waits leaves and enters again."""
        if event not in ("call", "return") or not self.is_shown(frame.f_code):
            return
        if event == "return":
            shown = self.frames.get(frame)
            CURRENT.set(shown.parent if shown else None)
            return
        if frame not in self.frames:
            self.frames[frame] = self.entered(frame)
        CURRENT.set(self.frames[frame])

    def entered(self, frame: Any) -> Shown:
        """Add a function that is called now below its caller."""
        code = frame.f_code
        file, function = Path(code.co_filename).name, code.co_qualname
        parent = CURRENT.get() or self.top
        if function in STEP_BEGINS and self.heading is None:
            self.heading = Shown(HEADING, "", parent)
            parent.below.append(self.heading)
        given = [frame.f_locals[each] for each in code.co_varnames[: code.co_argcount]]
        if code.co_varnames[:1] == ("self",):
            del given[0]
        data = ", ".join(
            ascii(each)[:50] if isinstance(each, PLAIN) else type(each).__name__ for each in given
        )
        text = f"{file}:{code.co_firstlineno} {function}({data})"
        about = code.co_consts[0] if code.co_consts else ""
        if isinstance(about, str) and about.strip() and f"{file}:{function}" not in self.seen:
            text += f"\n    {about.strip().splitlines()[0]}"
        is_again = f"{file}:{function}" in self.seen
        self.seen.setdefault(f"{file}:{function}", code)
        shown = Shown(f"{file}:{function}", text, parent, is_again=is_again)
        parent.below.append(shown)
        return shown

    def tell(self, event: dict) -> None:
        """Add an event of the run: what was sent, what came back, and what is on disk now."""
        kind, heading = event["kind"], self.heading
        if kind == "request":
            self.requests += 1
            number, tokens = len(event["sent"]), sum(event["tokens"])
            title = f"request {self.requests}: {number} messages, about {tokens:,} tokens"
            new = [f"    + {message['role']}: {brief(message)}" for message in event["messages"]]
            text = "\n".join([f"======== {title} ========", *new])
            if heading:
                heading.text, self.heading = text, None
            else:  # of the memory, or shorter after a refusal
                self.add(HEADING, text)
        elif kind == "answer":
            self.add(DATA, f"= the model answers: {brief(vars(event['answer']))}")
        elif kind == "result":
            self.add(DATA, f"= the result: {brief({'content': event['text']})}")
        elif kind == "journal":
            lines = self.journal.read_text(encoding="utf-8").splitlines()
            number = event["line"].get("n")
            line = next(line for line in reversed(lines) if json.loads(line).get("n") == number)
            self.add(DATA, f"+ journal: {line}")

    def add(self, name: str, text: str) -> None:
        below = CURRENT.get() or self.top
        below.below.append(Shown(name, text, below))

    def is_shown(self, code: Any) -> bool:
        end = self.ends.get(real_path(code.co_filename), 0)
        is_wanted = code.co_qualname.startswith(self.only)
        return is_wanted and code.co_firstlineno < end and "<" not in code.co_name


def brief(message: dict) -> str:
    """A message or an answer in a line: `read_file {"path": "a.txt"}`, `1| hello`."""
    calls = []
    for call in message.get("tool_calls") or []:
        if isinstance(call, dict):
            calls.append(f"{call['function']['name']} {call['function']['arguments']}")
        else:
            calls.append(f"{call.name} {json.dumps(call.arguments, ensure_ascii=False)}")
    content = message.get("content") or ""
    said = content if isinstance(content, str) else "[text and images]"
    text = " ".join([*said.split(), *calls])
    return text if len(text) < 100 else text[:99] + "…"
