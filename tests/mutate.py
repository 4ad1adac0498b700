"""Which wrong lines would no test notice? A script; pytest does not collect it.

    python tests/mutate.py --count 120 --seed 7 [channels.py …] | grep UNNOTICED

It changes one line at a time in a copy of the checkout and runs the tests, the file's own first. What
stays green is printed for a person to judge: either no user could notice the change, or a test is missing.

All of it runs in a sandbox that can write nothing but the copy: a guard that is broken for a trial must
not let a test delete real files.
"""

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = ["nanobot.py", "providers.py", "memory.py", "tools.py", "channels.py"]
SWAPPED = {
    "==": "!=",
    "!=": "==",
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "+": "-",
    "-": "+",
    "and": "or",
    "or": "and",
    "not": "",
    "is": "is not",
    "True": "False",
    "False": "True",
}


def wrong_lines(file: str) -> list[tuple[str, int, str]]:
    """File, number and new text of a line: a token swapped, a number one higher, or a call left out."""
    with tokenize.open(ROOT / file) as source:
        tokens = list(tokenize.generate_tokens(source.readline))
    lines, found = (ROOT / file).read_text(encoding="utf-8").split("\n"), []
    for token in tokens:
        (number, start), end, text = token.start, token.end[1], SWAPPED.get(token.string)
        if token.type == tokenize.NUMBER:
            text = f"({token.string} + 1)"
        if text is not None:
            found.append((file, number, lines[number - 1][:start] + text + lines[number - 1][end:]))
    calls = [
        (number, re.fullmatch(r"( +)(await )?[\w.]+\(.*\)", line))
        for number, line in enumerate(lines, 1)
    ]
    return found + [(file, number, f"{call[1]}pass") for number, call in calls if call]


def pytest(folder: Path, first: str, *options: str) -> str:
    """Which tests fail in the copy; it can write nowhere but into this folder."""
    walls = [
        "timeout",
        "600",
        "bwrap",
        "--ro-bind",
        "/",
        "/",
        "--dev",
        "/dev",
        "--proc",
        "/proc",
        "--unshare-pid",
        "--die-with-parent",
        "--bind",
        str(folder),
        str(folder),
    ]
    files = sorted(
        (folder / "copy" / "tests").glob("test_*.py"), key=lambda path: path.name != f"test_{first}"
    )
    command = [
        *walls,
        sys.executable,
        "-B",
        "-m",
        "pytest",
        "-n",
        "auto",
        "--tb=no",
        "-rfE",
        *options,
        *files,
    ]
    environ = {**os.environ, "TMPDIR": str(folder / "tmp")}
    streams = {
        "stdin": subprocess.DEVNULL,
        "capture_output": True,
        "encoding": "utf-8",
        "errors": "replace",
    }
    done = subprocess.run(command, cwd=folder / "copy", env=environ, **streams)
    failing = re.findall(r"^(?:FAILED|ERROR) (\S+?::\w+)", done.stdout, re.MULTILINE)
    return " ".join(failing) or ("the start, or the time limit" if done.returncode else "")


def main() -> None:
    parser = argparse.ArgumentParser(description="Which wrong lines would no test notice?")
    parser.add_argument("files", nargs="*", default=FILES)
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    if not shutil.which("bwrap"):
        sys.exit(
            "apt install bubblewrap: without a sandbox a broken guard could delete real files."
        )
    everything = [each for file in arguments.files for each in wrong_lines(file)]
    folder = Path(tempfile.mkdtemp()).resolve()
    shutil.copytree(
        ROOT, folder / "copy", ignore=shutil.ignore_patterns("__pycache__", ".git", ".venv")
    )
    (folder / "tmp").mkdir()
    known = [
        f"--deselect={test}" for test in pytest(folder, "").split()
    ]  # they would notice anything
    for file, number, text in random.Random(arguments.seed).sample(everything, arguments.count):
        lines = (ROOT / file).read_text(encoding="utf-8").split("\n")
        told = f"{file}:{number}:  {lines[number - 1].strip()}  →  {text.strip()}"
        lines[number - 1] = text
        (folder / "copy" / file).write_text("\n".join(lines), encoding="utf-8")
        noticed = pytest(folder, file, "-x", *known)
        shutil.copy(ROOT / file, folder / "copy")
        print(f"{told}  {noticed or 'UNNOTICED'}", flush=True)


if __name__ == "__main__":
    main()
