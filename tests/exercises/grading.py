"""What the graders share, and how one solution is graded; exercises.py is the command `nanobot exercises`.

An exercise is a file `ex_NN_name.py` that you complete; its grader is `test_NN_name.py`, which repeats the task: your file may
be damaged. A grader says what it expected, what it got and where to look. It works without pytest, without a key and without
network. Each solution runs in a process of its own, which gets no keys from the environment; it is no sandbox.

    python tests/exercises/exercises.py        lists the exercises and their state
    python tests/exercises/exercises.py 04     runs one
    pytest -s tests/exercises/test_04_healing.py      the same with a debugger, which needs the terminal and more time
"""

import ast
import asyncio
import contextlib
import gc
import inspect
import json
import linecache
import logging
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# The student's copies: $NANOBOT_EXERCISES ("~/lessons"), or the current folder or its `exercises`, or this folder. It is
# an absolute path, because a grader changes the current folder.
COPIES = [Path.cwd(), Path.cwd() / "exercises"]
OWN = [folder for folder in COPIES if any(folder.glob("ex_[0-9]*.py"))] or [HERE]
os.environ["NANOBOT_EXERCISES"] = str(
    Path(os.environ.get("NANOBOT_EXERCISES") or OWN[0]).expanduser().absolute()
)
ROOT = HERE.parent.parent
SECONDS = 60  # for one exercise
sys.path[:0] = [str(ROOT), str(HERE), str(ROOT / "tests")]  # fake_llm.py: a model of the grader's

# What Python and the programs that an exercise starts need. Any other variable may hold a key.
KEPT_VARIABLES = """
    PATH HOME USER LOGNAME SHELL LANG LC_ALL LC_CTYPE TERM TZ TMPDIR VIRTUAL_ENV LD_LIBRARY_PATH DYLD_LIBRARY_PATH
    APPDATA COMSPEC HOMEDRIVE HOMEPATH LOCALAPPDATA PATHEXT PROCESSOR_ARCHITECTURE PROGRAMDATA PROGRAMFILES SYSTEMDRIVE
    SYSTEMROOT TEMP TMP USERNAME USERPROFILE WINDIR
    PYTHONDONTWRITEBYTECODE PYTHONHOME PYTHONIOENCODING PYTHONPATH PYTHONUSERBASE PYTHONUTF8
    NANOBOT_EXERCISES
"""
SOLVED, NOT_BEGUN, WRONG = "solved", "not begun", "not yet right"
Verdict = tuple[str, str]  # the state of an exercise, and what is said of it


class Wrong(AssertionError):
    """What a grader says of a wrong solution."""

    state = WRONG


class Missing(Wrong):
    state = "file missing"


class NotUTF8(Wrong):
    state = "not UTF-8"


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
    """`ex_<name>.py`, of the folder in NANOBOT_EXERCISES."""
    return Path(os.environ["NANOBOT_EXERCISES"]) / f"ex_{name}.py"


def check_begun(file: Path) -> None:
    """Raises Missing or NotUTF8, or NotImplementedError if the file is as it was handed out."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        fix = f"copy {HERE / file.name} to {file.parent}"
        if file.parent == HERE:
            fix = f"`git restore tests/exercises/{file.name}` brings it back"
        raise Missing(f"{file.name} is missing: {fix}") from None
    except UnicodeDecodeError:
        cause = f"{file.name} is not UTF-8 (the > of PowerShell writes UTF-16)"
        raise NotUTF8(f"{cause}: save it as UTF-8 in your editor") from None
    stub = re.search(r'^ *raise NotImplementedError\("(.+)"\)', text, re.MULTILINE)
    if stub:
        raise NotImplementedError(f"{stub[1]}, in place of its line `raise NotImplementedError`")


def exercise(name: str, wanted: str) -> Any:
    """What is defined under the `wanted` name in the file of an exercise."""
    file = file_of(name)
    check_begun(file)
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


def about(grader: Path) -> tuple[str, str]:
    """The first line of a grader's docstring, `★ Your own loop`, and the rest: goal, what to read, a hint."""
    docstring = ast.get_docstring(ast.parse(grader.read_text(encoding="utf-8")))
    title, _, task = docstring.partition("\n")
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
    if "a coroutine was expected" in str(problem):
        return f"a function in {file.name} must begin with `async def`, not `def`"
    said = str(problem) or (theirs[-1].line if theirs else "")  # `assert` says nothing itself
    return f"{type(problem).__name__} {place}: {said}"


def verdict_on(problem: BaseException, solution: Path) -> Verdict:
    """The verdict if the grader of this solution raised an exception."""
    if isinstance(problem, Wrong):
        return problem.state, str(problem)
    if isinstance(problem, NotImplementedError):
        return NOT_BEGUN, str(problem)
    return WRONG, told(problem, solution)


def grade(grader: Path, folder: str) -> Verdict:
    """The verdict on a solution, which runs in this process and works in this folder."""
    solution, home, logged = file_of(grader.stem.removeprefix("test_")), os.getcwd(), []
    handler, agent = logging.Handler(logging.WARNING), logging.getLogger("nanobot")
    handler.emit = lambda record: logged.append(
        told(record.exc_info[1], solution) if record.exc_info else record.getMessage()
    )
    agent.handlers = [handler]
    agent.propagate = False  # else a traceback of the agent hides the one useful line
    agent.setLevel(logging.INFO)  # at this level a hook's failure has its exception
    os.chdir(folder)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        verdict = run_tests(grader, folder, solution, logged)
        gc.collect()  # a coroutine that nobody awaited warns when it is removed
    os.chdir(home)
    forgotten = re.findall(r"coroutine '(\w+\.)?(\w+)' was never", str([w.message for w in warned]))
    if verdict[0] == WRONG and forgotten:
        call = forgotten[0][1]
        return WRONG, f"`await` is missing before the call of {call}(…)\n{verdict[1]}"
    return verdict


def run_tests(grader: Path, folder: str, solution: Path, logged: list[str]) -> Verdict:
    try:
        for name, test in runpy.run_path(str(grader)).items():
            if name.startswith("test_"):
                test(*([Path(folder)] if inspect.signature(test).parameters else []))
    except BaseException as problem:  # SystemExit and CancelledError, too
        state, text = verdict_on(problem, solution)
        if isinstance(problem, Wrong) and logged:
            text += f"\nlogged:   {logged[-1][:300]}"
        return state, text
    return SOLVED, ""


def at_most_4_gb() -> None:
    """A list that grows without end is a MemoryError then; else it fills a machine within a minute. Not on Windows."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # macOS may refuse
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))


def grade_and_exit(grader: str, folder: str, report: str) -> None:
    """Write the verdict into the file `report`, and end at once: threads of the solution may go on without end."""
    at_most_4_gb()
    sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    solution = file_of(Path(grader).stem.removeprefix("test_")).name
    threading.Thread(target=watch, args=[solution, report], daemon=True).start()
    verdict = grade(Path(grader), folder)
    Path(report).write_text(json.dumps(verdict), encoding="utf-8")
    with contextlib.suppress(OSError, ValueError):  # a closed pipe; the solution closed its stdout
        sys.stdout.flush()
    os._exit(0)


def watch(name: str, report: str) -> None:
    """End this process with a verdict if one call into the file of this name is busy for 3 s, or if
    this process has computed for 10 s: a solution needs less than one."""
    main_thread = threading.main_thread().ident
    running, place, times = None, "", 0
    while times < 15 and time.process_time() < 10:
        time.sleep(0.2)
        stack = traceback.walk_stack(sys._current_frames().get(main_thread))
        theirs = [each for each in stack if Path(each[0].f_code.co_filename).name == name]
        if theirs:
            times = times + 1 if theirs[-1][0] is running else 1
            running, (frame, line) = theirs[-1][0], theirs[0]
            text = linecache.getline(frame.f_code.co_filename, line).strip()
            place = f", here in line {line}: `{text}`"
    told = f"{name} has been busy for seconds{place}\nWhat ends the loop?"
    Path(report).write_text(json.dumps(["endless loop", told]), encoding="utf-8")
    os._exit(0)


def grade_apart(grader: Path, sandbox: Any = None, is_quiet: bool = True) -> Verdict:
    """The verdict on a solution, which runs in a process of its own: it may end, crash or never end.
    `sandbox(folder)` returns the beginning of a command that runs the rest in a sandbox. What the
    solution prints is shown unless `is_quiet`."""
    solution = file_of(grader.stem.removeprefix("test_"))
    try:
        check_begun(solution)
    except Exception as problem:
        return verdict_on(problem, solution)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        folder, report = Path(place, "work"), Path(place, "report.json")
        folder.mkdir()
        kept = [name for name in KEPT_VARIABLES.split() if name in os.environ]
        command = [sys.executable, HERE / "grading.py", grader, folder, report]
        try:
            done = subprocess.run(
                [*(sandbox(place) if sandbox else []), *command],
                stdin=subprocess.DEVNULL,  # `input()` is an EOFError, and does not wait
                stdout=subprocess.DEVNULL if is_quiet else None,
                stderr=subprocess.DEVNULL if is_quiet else None,
                env={name: os.environ[name] for name in kept},
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            question = "is there a loop without an end?"
            return "endless loop", f"still running after {SECONDS} s: {question}"
        if report.exists():
            state, problem = json.loads(report.read_text(encoding="utf-8"))
            return state, problem
        return verdict_on_end(done.returncode)


def verdict_on_end(status: int) -> Verdict:
    """The verdict on a solution whose process ended with this status before it was graded."""
    if status < 0:
        cause = f"signal {-status}, {signal.strsignal(-status)}"
    elif status >= 0xC0000000:  # so Windows reports a crash: 0xC0000005 is an access violation
        cause = f"{status:#x}"
    else:
        return "ended itself", f"your program ended itself with os._exit({status}): return instead"
    question = "is there a recursion or a list without an end?"
    return "crashed", f"your program crashed ({cause}): {question}"


if __name__ == "__main__":
    import grading  # not `__main__`: graders raise `grading.Wrong`

    grading.grade_and_exit(*sys.argv[1:])
