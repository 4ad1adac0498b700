"""What the graders share, and the command behind `nanobot exercises`.

An exercise is a file `ex_NN_name.py` that you complete; its grader is `test_NN_name.py`. A grader says what it expected, what
it got and where to look. It works without pytest, without a key and without network:

    python tests/exercises/grading.py        lists the exercises and their state
    python tests/exercises/grading.py 04     runs one
    pytest -s tests/exercises/test_04_healing.py      the same with a debugger, which needs the terminal and more time
"""

import asyncio
import contextlib
import inspect
import json
import logging
import multiprocessing
import os
import re
import runpy
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if "NANOBOT_EXERCISES" in os.environ:  # "~/lessons", "lessons": a grader changes the current folder
    os.environ["NANOBOT_EXERCISES"] = str(
        Path(os.environ["NANOBOT_EXERCISES"]).expanduser().absolute()
    )
ROOT = HERE.parent.parent
SECONDS = 60  # for one exercise
sys.path[:0] = [str(ROOT), str(HERE), str(ROOT / "tests")]  # fake_llm.py: a model of the grader's


class Wrong(AssertionError):
    """What a grader says of a wrong solution."""


def check(is_right: bool, expected: str, got: Any = "", look: str = "") -> None:
    """Raises Wrong if the solution is not right; `look` names a place to read: nanobot.py:AgentRunner.run"""
    if not is_right:
        lines = [f"expected: {expected}"]
        if got != "":
            lines.append(f"got:      {got if isinstance(got, str) else repr(got)}"[:600])
        if look:
            lines.append(f"look at:  {look}")
        raise Wrong("\n".join(lines))


def file_of(name: str) -> Path:
    """`ex_<name>.py`, of the folder in NANOBOT_EXERCISES or of this one."""
    return Path(os.environ.get("NANOBOT_EXERCISES", HERE)).absolute() / f"ex_{name}.py"


def exercise(name: str, wanted: str) -> Any:
    """What is defined under the `wanted` name in the file of an exercise."""
    file = file_of(name)
    if not file.exists():
        raise NotImplementedError(f"copy {HERE / file.name} to {file.parent}")
    stub = re.search(
        r'^ *raise NotImplementedError\("(.+)"\)', file.read_text(encoding="utf-8"), re.MULTILINE
    )
    if stub:
        raise NotImplementedError(f"{stub[1]}, in place of its line `raise NotImplementedError`")
    names = runpy.run_path(str(file))
    if wanted not in names:
        raise Wrong(f"`{wanted}` is missing in {file.name}")
    return names[wanted]


def settings(folder: Path, **more: Any) -> Any:
    """The settings of an agent that lives in this folder, whatever the settings of the user are."""
    from nanobot import load_config

    file = folder / "config.json"
    defaults = {"workspace": str(folder / "home"), "provider": "offline"}
    file.write_text(json.dumps({"agents": {"defaults": defaults}, **more}), encoding="utf-8")
    return load_config(file, environ={})


def result_of(loop: Any, text: str, session_key: str = "cli:direct") -> Any:
    """What one turn of an agent comes to; then the agent ends."""

    async def turn() -> Any:
        result = await loop.process_direct(text, session_key)
        await loop.close()
        return result

    return asyncio.run(turn())


def graders() -> dict[str, Path]:
    """{"01": tests/exercises/test_01_loop.py, …}"""
    return {file.name.split("_")[1]: file for file in sorted(HERE.glob("test_[0-9]*.py"))}


def about(number: str) -> tuple[str, str]:
    """The first line of an exercise's docstring, `★ Your own loop`, and the rest: goal, what to read, a hint."""
    file = next(HERE.glob(f"ex_{number}_*.py"))
    title, _, task = file.read_text(encoding="utf-8").split('"""')[1].partition("\n")
    return title, task.strip()


def told(problem: BaseException, file: Path) -> str:
    """`KeyError in ex_05_memory.py, line 7: 'name'`: the student's line, not that of a library below it."""
    traceback.clear_frames(problem.__traceback__)  # after a MemoryError this needs what they hold
    theirs = [
        each
        for each in traceback.extract_tb(problem.__traceback__)
        if Path(each.filename).name == file.name
    ]
    place = (
        f"in {file.name}, line {theirs[-1].lineno}"
        if theirs
        else f"while the grader used your {file.name}"
    )
    return f"{type(problem).__name__} {place}: {problem}"


def grade(file: Path, folder: str) -> str:
    """What is wrong with a solution, which works in this folder; "" if nothing is."""
    solution, home, logged = file_of(file.stem.removeprefix("test_")), os.getcwd(), []
    handler, agent = logging.Handler(logging.WARNING), logging.getLogger("nanobot")
    handler.emit = lambda record: logged.append(
        told(record.exc_info[1], solution) if record.exc_info else record.getMessage()
    )
    agent.handlers, agent.propagate = (
        [handler],
        False,
    )  # else a traceback of the agent hides the one useful line
    agent.setLevel(logging.INFO)  # at this level a hook's failure has its exception
    os.chdir(folder)
    try:
        for name, test in runpy.run_path(str(file)).items():
            if name.startswith("test_"):
                test(*([Path(folder)] if inspect.signature(test).parameters else []))
    except Wrong as mistake:
        return "\n".join([str(mistake), *(f"logged:   {line[:300]}" for line in logged[-1:])])
    except NotImplementedError as missing:
        return f"not begun: {missing}"
    except (Exception, SystemExit) as problem:
        return told(problem, solution)
    finally:
        sys.stdout.flush()  # what the solution prints
        os.chdir(home)
    return ""


def at_most_4_gb() -> None:
    """A list that grows without end is a MemoryError then; else it fills a machine within a minute. Not on Windows."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # macOS may refuse
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))


def grades(files: list[Path]) -> Iterator[str]:
    """What `grade` says of each, from a process that is killed if a solution does not end."""
    processes = multiprocessing.get_context("spawn")
    pool = processes.Pool(1, at_most_4_gb)
    try:
        for file in files:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                try:
                    yield pool.apply_async(grade, [file, folder]).get(SECONDS)
                except multiprocessing.TimeoutError:
                    pool.terminate()
                    pool = processes.Pool(1, at_most_4_gb)
                    yield f"still running after {SECONDS} s: is there a loop without an end?"
    finally:
        pool.terminate()


def main(numbers: list[str]) -> int:
    """Prints the state of all exercises, or what is still wrong with some."""
    sys.stdout.reconfigure(errors="replace")
    files, numbers = graders(), [number.zfill(2) for number in numbers]  # 1 is 01
    unknown = [number for number in numbers if number not in files]
    if unknown:
        print(f"There is no exercise {unknown[0]}; there are {', '.join(files)}.", file=sys.stderr)
        return 2
    failed, asked = 0, numbers or list(files)
    for number, problem in zip(asked, grades([files[number] for number in asked]), strict=True):
        failed += bool(problem)
        state = (
            "solved"
            if not problem
            else "not begun"
            if problem.startswith("not begun")
            else "not yet right"
        )
        title, task = about(number)
        print(f"{number} {title}: {state}")
        if numbers and problem:
            begin = f"\n\n{task}" if state == "not begun" else ""
            print(
                f"{problem}{begin}\n\nThe exercise: {file_of(files[number].stem.removeprefix('test_'))}"
            )
    if not numbers:
        print(
            f"\n{len(files) - failed} of {len(files)} solved. `nanobot exercises 01` says what is wrong with one."
        )
    sys.stdout.flush()  # here, and not at exit, where Python reports a closed pipe
    return int(bool(numbers and failed))


if __name__ == "__main__":
    import grading  # not `__main__`: graders raise `grading.Wrong`

    try:
        sys.exit(grading.main(sys.argv[1:]))
    except BrokenPipeError:  # `nanobot exercises | head`: nobody reads the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        sys.exit(130)
