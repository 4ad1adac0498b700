"""`nanobot walk`: the functions of the kit that one turn enters, each with its data and the first line of its docstring."""

import asyncio
import sys
import threading
from contextvars import ContextVar
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

DEPTH = ContextVar("depth", default=0)  # of shown functions; a task begins with that of the function that creates it


def walk(loop: Any, message: str, house: Path, is_long: bool) -> int:
    """Run one turn and print the functions in the order of their first calls; `is_long`: of the second readings, too."""
    follower = Follower(house, is_long)
    threading.setprofile(follower.note)
    sys.setprofile(follower.note)
    result = asyncio.run(loop.process_direct(message, "cli:walk"))
    sys.setprofile(None)
    print("\n".join(follower.lines).encode("utf-8", "replace").decode())
    print(f"\nanswer: {result.final_content or result.error or ''}")
    return int(result.stop_reason == "error")


class Follower:
    def __init__(self, house: Path, is_long: bool):
        self.lines: list[str] = []
        self.seen: set[str] = set()
        self.ends: dict[str, int] = {}  # by file: the line where its first reading ends
        for file in house.glob("*.py"):
            story = file.read_text(encoding="utf-8").partition("# ======== Second")[0]
            self.ends[str(file)] = sys.maxsize if is_long else story.count("\n")

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        """Called by Python when a function is entered or left; an `await` that waits leaves and enters again."""
        code = frame.f_code
        if code is threading.Thread.start.__code__:  # the new thread begins with this depth, too
            frame.f_locals["self"].depth = DEPTH.get()
        if code is threading.Thread.run.__code__ and event == "call":
            DEPTH.set(frame.f_locals["self"].depth)
        if event not in ("call", "return") or not self.is_shown(code):
            return
        depth = DEPTH.get()
        DEPTH.set(depth + 1 if event == "call" else depth - 1)
        name = f"{Path(code.co_filename).name}:{code.co_qualname}"
        if event == "return" or name in self.seen:
            return
        self.seen.add(name)
        data = ", ".join(brief(frame.f_locals[each]) for each in code.co_varnames[: code.co_argcount] if each != "self")
        self.lines.append(f"{'  ' * depth}{name}({data})")
        if code.co_consts and isinstance(code.co_consts[0], str):
            self.lines.append(f"{'  ' * depth}    {code.co_consts[0].strip().splitlines()[0]}")

    def is_shown(self, code: CodeType) -> bool:
        return code.co_firstlineno < self.ends.get(code.co_filename, 0) and "<" not in code.co_name


def brief(value: Any) -> str:
    return ascii(value)[:50] if isinstance(value, str | int | list | dict | Path) else type(value).__name__
