"""`nanobot walk`: the functions of the kit that one turn enters, each with its data and the first line of its docstring."""

import asyncio
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any


def walk(loop: Any, message: str, house: Path, is_long: bool) -> int:
    """Run one turn and print the functions in the order in which they are entered first; without `is_long` those of the
    first readings only."""
    follower = Follower(house, is_long)
    result = follower.follow(lambda: asyncio.run(loop.process_direct(message, "cli:walk")))
    print("\n".join(follower.lines).encode("utf-8", "replace").decode())
    print(f"\nanswer: {result.final_content or result.error or ''}")
    return int(result.stop_reason == "error")


class Follower:
    def __init__(self, house: Path, is_long: bool):
        self.lines: list[str] = []
        self.seen: dict[str, CodeType] = {}  # {"nanobot.py:AgentRunner.run": …}, in the order of entry
        self.ends: dict[str, int] = {}  # by file: the line where its first reading ends
        for file in house.glob("*.py"):
            story = file.read_text(encoding="utf-8").partition("# ======== Second")[0]
            self.ends[str(file)] = sys.maxsize if is_long else story.count("\n")

    def follow(self, work: Callable[[], Any]) -> Any:
        """Run `work()` and note the functions that it enters, on every thread; returns its result."""
        before, before_in_threads = sys.getprofile(), threading.getprofile()
        threading.setprofile(self.note)
        sys.setprofile(self.note)
        try:
            return work()
        finally:
            sys.setprofile(before)
            threading.setprofile(before_in_threads)

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        """Called by Python at each call of a function."""
        code = frame.f_code
        name = f"{Path(code.co_filename).name}:{code.co_qualname}"
        if event != "call" or name in self.seen or not self.is_shown(code):
            return
        self.seen[name] = code
        depth, caller = 0, frame.f_back
        while caller:
            depth += self.is_shown(caller.f_code)
            caller = caller.f_back
        names = [each for each in code.co_varnames[: code.co_argcount] if each != "self"]
        data = ", ".join(brief(frame.f_locals[each]) for each in names)
        self.lines.append(f"{'  ' * depth}{name}({data})")
        if code.co_consts and isinstance(code.co_consts[0], str):
            self.lines.append(f"{'  ' * depth}    {code.co_consts[0].strip().splitlines()[0]}")

    def is_shown(self, code: CodeType) -> bool:
        return code.co_firstlineno < self.ends.get(code.co_filename, 0) and "<" not in code.co_name


def brief(value: Any) -> str:
    is_plain = isinstance(value, str | int | list | dict | Path)
    return ascii(value)[:50] if is_plain else type(value).__name__
