"""Session 0: is this machine ready for the course? It also makes the folder in which the course happens.

python tests/exercises/session0.py             makes the folder `course` in your home, and checks
python tests/exercises/session0.py FOLDER      the same with another folder

What is in the folder already stays as it is. Needed is what begins with "missing"; the rest of the course works without
what begins with "without".
"""

import importlib.util
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE)]


LAUNCHER = """# Starts the agent with what you have made: python agent.py 14 --provider human
import runpy

runpy.run_path({file!r}, run_name="__main__")
"""


def make_folder(folder: Path) -> None:
    """Copy the files, the exercises and the example of a project into the folder; nothing is overwritten."""
    pairs = [(file, folder / file.name) for file in (HERE / "files").iterdir()]
    pairs += [(file, folder / "exercises" / file.name) for file in HERE.glob("ex_*.py")]
    for file in (HERE / "project").glob("*/*.*"):
        pairs.append((file, folder / file.relative_to(HERE)))
    for source, target in pairs:
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copy(source, target)
    launcher = LAUNCHER.format(file=str(HERE / "agent.py"))
    (folder / "agent.py").write_text(launcher, encoding="utf-8")  # the kit may have moved


def turn_problem(folder: Path) -> str:
    """What is wrong with a turn of the offline model in this folder, or ""."""
    try:
        from grading import result_of, settings

        from nanobot import AgentLoop, Program

        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
            loop = AgentLoop(settings(Path(place)), program=Program(folder))
            answer = result_of(loop, "read a.txt").final_content
        return "" if answer and "This is a.txt" in answer else f"it answered {answer!r}"
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"


def port_problem() -> str:
    """What keeps a page from being served on this machine, or ""."""
    try:
        with socket.create_server(("127.0.0.1", 0)):
            return ""
    except OSError as problem:
        return str(problem)


def findings(folder: Path) -> list[tuple[str, str, str]]:
    """(ok, missing or without; what; how to mend it) of each thing that the course uses."""
    found = []

    def note(problem: object, what: str, fix: str, is_needed: bool = True) -> None:
        word = "ok" if not problem else "missing" if is_needed else "without"
        found.append((word, what, fix if problem else ""))

    number = ".".join(map(str, sys.version_info[:3]))
    python = f"Python {number} ({sys.executable})"
    note(sys.version_info < (3, 11), python, "install Python 3.11 or newer")
    if found[0][0] != "ok":
        return found  # the rest cannot be imported
    try:
        make_folder(folder)
        note("", f"the folder {folder}", "")
    except OSError as problem:
        note(problem, f"the folder {folder}", f"{problem}: name another folder")
    problem = turn_problem(folder)
    note(problem, "an agent reads a.txt", problem)
    program = HERE.parent.parent / "nanobot.py"
    fix = f"activate the environment, or write: {sys.executable} {program}"
    note(not shutil.which("nanobot"), "the command nanobot", fix, is_needed=False)
    problem = port_problem()
    note(problem, "the page (session 1)", f"no program may listen on 127.0.0.1: {problem}")
    for name, use in (("openai>=3", "exercise 04, real models"), ("mcp>=2.3", "exercise 09")):
        fix = f'python -m pip install "{name}"'
        package = name.partition(">")[0]
        is_there = importlib.util.find_spec(package)
        note(not is_there, f"package {package} ({use})", fix, is_needed=False)
    fix = "install Git for Windows" if os.name == "nt" else "install bash"
    note(not shutil.which("bash"), "bash (commands)", f"{fix}; the exercises need none", False)
    return found


def main(words: list[str]) -> int:
    sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    folder = Path(words[0] if words else "~/course").expanduser().resolve()
    found = findings(folder)
    for word, what, fix in found:
        print(f"{word:8} {what}{': ' + fix if fix else ''}")
    missing = [what for word, what, _ in found if word == "missing"]
    if missing:
        print(f"\nNOT READY: {', '.join(missing)}")
        return 1
    print(f"\nREADY. Now: cd {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
