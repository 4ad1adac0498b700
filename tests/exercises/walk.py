"""`nanobot walk`: the functions of the kit that one turn enters, each with its data and the first line of its docstring."""

import asyncio
import functools
import sys
import threading
from contextvars import ContextVar
from pathlib import Path
from typing import Any

PLAIN = (str, int, list, dict, Path)  # other data are shown as the name of their type
DEPTH = ContextVar(
    "depth", default=0
)  # of shown functions; a task or thread begins with that of its creator
real_path = functools.cache(lambda name: Path(name).resolve())  # of ../kit/nanobot.py, of a link


def walk(loop: Any, message: str, house: Path, is_long: bool) -> int:
    """Run one turn and print the functions in the order of their first calls; `is_long`: of the second readings, too."""
    follower = Follower(house, is_long)
    result = follower.follow(lambda: asyncio.run(loop.process_direct(message, "cli:walk")))
    lines = [*follower.lines, f"\nanswer: {result.final_content or result.error or ''}"]
    print("\n".join(lines).encode("utf-8", "replace").decode())
    return int(result.stop_reason == "error")


class Follower:
    def __init__(self, house: Path, is_long: bool):
        self.lines: list[str] = []
        self.seen: dict[
            str, Any
        ] = {}  # {"nanobot.py:AgentRunner.run": its code, …}, in the order of entry
        self.ends: dict[Path, int] = {}  # by file: the line where its first reading ends
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
        code, depth = frame.f_code, DEPTH.get()
        if event not in ("call", "return") or not self.is_shown(code):
            return
        DEPTH.set(depth + 1 if event == "call" else depth - 1)
        name = f"{Path(code.co_filename).name}:{code.co_qualname}"
        if event == "call" and name not in self.seen:
            self.seen[name] = code
            given = [
                frame.f_locals[each]
                for each in code.co_varnames[: code.co_argcount]
                if each != "self"
            ]
            data = [
                ascii(each)[:50] if isinstance(each, PLAIN) else type(each).__name__
                for each in given
            ]
            about = (
                code.co_consts[0] if code.co_consts and isinstance(code.co_consts[0], str) else ""
            )
            first_line = [f"    {line}" for line in about.strip().splitlines()[:1]]
            self.lines += [
                "  " * depth + line for line in (f"{name}({', '.join(data)})", *first_line)
            ]

    def is_shown(self, code: Any) -> bool:
        return (
            code.co_firstlineno < self.ends.get(real_path(code.co_filename), 0)
            and "<" not in code.co_name
        )
