"""Which wrong lines would no test notice? A script; pytest does not collect it.

    python tests/mutate.py --count 120 --seed 7 [channels.py …]

It changes one line at a time in a copy of the checkout and runs the tests that execute this line. What
stays green is printed for a person to judge: either no user could notice the change, or a test is missing.

    channels.py:91:  if message.channel in self._open:  →  if message.channel not in self._open:

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
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = ["nanobot.py", "providers.py", "memory.py", "tools.py", "channels.py"]
SWAPPED = {
    "==": "!=", "!=": "==", "<": "<=", "<=": "<", ">": ">=", ">=": ">", "+": "-", "-": "+", "and": "or",
    "or": "and", "not": "", "in": "not in", "is": "is not", "True": "False", "False": "True",
}  # fmt: skip


@dataclass
class Mutation:
    file: str
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:  {self.before.strip()}  →  {self.after.strip()}"


def mutations_of(file: str) -> list[Mutation]:
    """Each token that can be swapped, each number, what is returned, and calls that are left out."""
    lines = (ROOT / file).read_text(encoding="utf-8").split("\n")
    found = []
    with tokenize.open(ROOT / file) as source:
        for token in tokenize.generate_tokens(source.readline):
            text = SWAPPED.get(token.string)
            if token.type == tokenize.NUMBER:
                text = f"({token.string} + 1)"
            if text is not None and token.type != tokenize.STRING:
                line = lines[token.start[0] - 1]
                changed = line[: token.start[1]] + text + line[token.end[1] :]
                found.append(Mutation(file, token.start[0], line, changed))
    for number, line in enumerate(lines, 1):
        call = re.match(r"( +)(return (?!None).*[^(\[{,]|(await )?[\w.]+\(.*\))$", line)
        if call:
            instead = "return None" if "return " in line else "pass"
            found.append(Mutation(file, number, line, call[1] + instead))
    return found


def is_python(mutation: Mutation) -> bool:
    """`for x not in y` is none, and a line of a docstring has no effect."""
    lines = (ROOT / mutation.file).read_text(encoding="utf-8").split("\n")
    before = compile("\n".join(lines), mutation.file, "exec", optimize=2)
    lines[mutation.line - 1] = mutation.after
    try:
        return compile("\n".join(lines), mutation.file, "exec", optimize=2) != before
    except SyntaxError:
        return False


# ---- Which test executes which line ----

TRACER = """
import os, sys, threading
seen = set()
def trace(frame, event, argument):
    name = os.path.basename(frame.f_code.co_filename)
    if name not in FILES:
        return None
    test = os.environ.get("PYTEST_CURRENT_TEST", "").split(" (")[0].split("[")[0]
    def note(frame, event, argument):
        row = f"{test} {name} {frame.f_lineno}\\n"
        if row not in seen:
            seen.add(row)
            try:
                with open(OUT, "a") as file:  # at once: some of these processes are killed
                    file.write(row)
            except OSError:  # a test that fills the disk
                pass
        return note
    return note(frame, event, argument)
threading.settrace(trace)
sys.settrace(trace)
"""
AGAIN = """
import sys
import sitecustomize
def pytest_runtest_setup():
    sys.settrace(sitecustomize.trace)  # a recursion without end in a test switches it off
"""


def map_of_lines(box: "Sandbox") -> dict[tuple[str, int], set[str]]:
    """{("channels.py", 91): {"tests/test_channels.py::test_x", …}}; "" stands for the import."""
    out, failing = box.folder / "lines.txt", box.folder / "failed.txt"
    if not out.exists():
        tracer = box.folder / "tracer"
        tracer.mkdir()
        (tracer / "sitecustomize.py").write_text(f"FILES = {FILES}\nOUT = {str(out)!r}\n{TRACER}")
        (tracer / "trace_again.py").write_text(AGAIN)
        done = box.pytest(["-rf", "-p", "trace_again"], 3_600, PYTHONPATH=str(tracer))
        failing.write_text("\n".join(re.findall(r"^(?:FAILED|ERROR) (\S+?::\w+)", done.stdout, re.MULTILINE)))
    tests = defaultdict(set)
    for row in out.read_text().split("\n")[:-1]:
        test, file, line = row.split(" ")
        if test not in failing.read_text().split():  # it would notice anything
            tests[file, int(line)].add(test)
    return tests


def tests_for(mutation: Mutation, tests: dict) -> list[str]:
    """The file's own tests first; all of them if the line runs when the file is imported."""
    own = f"tests/test_{mutation.file}"
    covering = tests.get((mutation.file, mutation.line), set())
    if "" in covering:
        everything = {name for names in tests.values() for name in names}
        covering = {name for name in everything if name.startswith((own, "tests/test_command_line.py"))}
    return sorted(covering, key=lambda test: (not test.startswith(own), test))


# ---- Trying it ----


class Sandbox:
    """A copy of the checkout, and pytest in it, which can write nowhere else."""

    def __init__(self, folder: Path):
        self.folder, self.copy = folder, folder / "copy"
        shutil.rmtree(self.copy, ignore_errors=True)
        leave_out = shutil.ignore_patterns("__pycache__", ".git", ".venv", ".pytest_cache")
        shutil.copytree(ROOT, self.copy, ignore=leave_out)
        (folder / "tmp").mkdir(exist_ok=True)

    def pytest(self, arguments: list[str], seconds: float, **environ: str) -> subprocess.CompletedProcess:
        walls = ["bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--unshare-pid",
                 "--die-with-parent", "--bind", str(self.folder), str(self.folder)]  # fmt: skip
        command = [*walls, sys.executable, "-B", "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider"]
        environ = {**os.environ, "TMPDIR": str(self.folder / "tmp"), **environ}
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        letters = {"encoding": "utf-8", "errors": "replace"}
        return subprocess.run(
            [*command, *arguments], cwd=self.copy, env=environ, timeout=seconds, **streams, **letters
        )

    def change(self, mutation: Mutation, text: str) -> None:
        path = self.copy / mutation.file
        lines = path.read_text(encoding="utf-8").split("\n")
        lines[mutation.line - 1] = text
        path.write_text("\n".join(lines), encoding="utf-8")

    def outcome(self, mutation: Mutation, tests: list[str], seconds: float) -> str:
        """Which test noticed it; "" if none did."""
        self.change(mutation, mutation.after)
        try:
            done = self.pytest(["-x", "-rfE", *tests], seconds)
        except subprocess.TimeoutExpired:
            return "the time limit"
        finally:
            self.change(mutation, mutation.before)
        noticed = re.search(r"^(?:FAILED|ERROR) (.*)", done.stdout, re.MULTILINE)
        return "" if done.returncode == 0 else (noticed[1] if noticed else "the start")


def main() -> None:
    parser = argparse.ArgumentParser(description="Which wrong lines would no test notice?")
    parser.add_argument("files", nargs="*", default=FILES)
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=300, help="limit of one trial")
    parser.add_argument("--keep", type=Path, help="a folder that keeps the map of lines for the next sample")
    arguments = parser.parse_args()
    if not shutil.which("bwrap"):
        sys.exit("apt install bubblewrap: without a sandbox a broken guard could delete real files.")
    everything = [mutation for file in arguments.files for mutation in mutations_of(file)]
    random.Random(arguments.seed).shuffle(everything)
    chosen = []
    while everything and len(chosen) < arguments.count:
        mutation = everything.pop()
        if is_python(mutation):
            chosen.append(mutation)
    folder = arguments.keep or Path(tempfile.mkdtemp())
    folder.mkdir(exist_ok=True)
    box = Sandbox(folder.resolve())
    tests = map_of_lines(box)
    unnoticed = []
    for number, mutation in enumerate(chosen, 1):
        names = tests_for(mutation, tests)
        noticed = names and box.outcome(mutation, names, arguments.seconds)
        if not noticed:
            unnoticed.append(f"{mutation}  ({len(names)} tests)")
        print(f"{number}/{len(chosen)} {mutation}  {noticed or 'UNNOTICED'}", file=sys.stderr, flush=True)
    print("\n".join([f"{len(chosen)} tried, {len(unnoticed)} unnoticed:", *unnoticed]))


if __name__ == "__main__":
    main()
