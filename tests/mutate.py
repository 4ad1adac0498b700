"""Which wrong lines would no test notice? A script; pytest does not collect it.

    python tests/mutate.py --count 120 --seed 7 [channels.py …]

It changes one line at a time in a copy of the checkout and runs the tests that execute this line.
What stays green is printed for a person to judge: either no user could notice the change (it is
equivalent), or a test is missing.

    channels.py:91:  if message.channel in self._open:  →  if message.channel not in self._open:

All of it runs in a sandbox that can write nothing but the copy: a guard that is broken for a trial
must not let a test delete real files.
"""

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = ["nanobot.py", "providers.py", "memory.py", "tools.py", "channels.py"]
FLIPPED = {
    "==": "!=", "!=": "==", "<": "<=", "<=": "<", ">": ">=", ">=": ">",
    "in": "not in", "not in": "in", "is": "is not", "is not": "is",
}  # fmt: skip


# ---- What can be wrong with a line ----


@dataclass
class Mutation:
    file: str
    line: int
    before: bytes
    after: bytes

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:  {self.before.decode().strip()}  →  {self.after.decode().strip()}"


def mutations_of(file: str) -> list[Mutation]:
    """Each change of each kind; positions of the syntax tree count bytes, so the lines are bytes."""
    source = (ROOT / file).read_bytes()
    lines = source.split(b"\n")
    tree = ast.parse(source)
    untouched = set(map(id, words_for_people(tree)))
    found = []
    for node in ast.walk(tree):
        for first, begin, last, end, text in changes(node, lines):
            if first == last and id(node) not in untouched:
                before = lines[first - 1]
                found.append(Mutation(file, first, before, before[:begin] + text + before[end:]))
    return [mutation for mutation in found if mutation.before != mutation.after]


def words_for_people(tree: ast.Module) -> Iterator[ast.AST]:
    """Nodes that no program sees (docstrings, hints), and parts of f-strings, whose place is not known."""
    for node in ast.walk(tree):
        hint = getattr(node, "annotation", None) or getattr(node, "returns", None)
        if hint or isinstance(node, ast.JoinedStr):
            yield from ast.walk(hint or node)
        elif isinstance(node, ast.Expr):
            yield node.value


def changes(node: ast.AST, lines: list[bytes]) -> Iterator[tuple[int, int, int, int, bytes]]:
    """(line, column, line, column, what stands there instead)"""
    place = [getattr(node, name, 0) for name in ("lineno", "col_offset", "end_lineno", "end_col_offset")]
    match node:
        case ast.Compare():
            for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
                yield between(left, right, lines, lambda match: FLIPPED[match[0]])
        case ast.BoolOp():
            other = "or" if isinstance(node.op, ast.And) else "and"
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield between(left, right, lines, lambda match: other)
        case ast.Constant(value=bool()):
            yield (*place, str(not node.value).encode())
        case ast.Constant(value=int() | float()):
            yield (*place, str(node.value + 1).encode())
            yield (*place, str(node.value - 1).encode())
        case ast.Constant(value=str() | bytes()) if node.value:
            yield (*place, repr(type(node.value)()).encode())
        case ast.UnaryOp(op=ast.Not()):
            yield (*place[:2], node.operand.lineno, node.operand.col_offset, b"")
        case ast.Return(value=ast.AST()):
            yield (*place, b"return None")
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield (*place, b"pass")


def between(left: ast.AST, right: ast.AST, lines: list[bytes], other) -> tuple[int, int, int, int, bytes]:
    """The operator between two operands, replaced."""
    text = lines[left.end_lineno - 1][left.end_col_offset : right.col_offset].decode()
    changed = re.sub(r"not in|is not|\w+|[=<>!]+", other, text, count=1) if text.strip("() ") else text
    return (left.end_lineno, left.end_col_offset, right.lineno, right.col_offset, changed.encode())


# ---- Which test executes which line ----

TRACER = """
import os, sys, threading
seen = {}
def trace(frame, event, argument):
    name = os.path.basename(frame.f_code.co_filename)
    if name not in FILES:
        return None
    test = os.environ.get("PYTEST_CURRENT_TEST", "").split(" (")[0].split("[")[0]
    lines = seen.setdefault((test, name), set())
    def note(frame, event, argument):
        if frame.f_lineno not in lines:
            lines.add(frame.f_lineno)
            try:
                with open(OUT, "a") as file:  # at once: some of these processes are killed
                    file.write(f"{test} {name} {frame.f_lineno}\\n")
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
    out = box.folder / "lines.txt"
    if not out.exists():
        tracer = box.folder / "tracer"
        tracer.mkdir()
        (tracer / "sitecustomize.py").write_text(f"FILES = {FILES}\nOUT = {str(out)!r}\n{TRACER}")
        (tracer / "trace_again.py").write_text(AGAIN)
        done = box.pytest(["-rf", "-p", "trace_again"], 3_600, PYTHONPATH=str(tracer))
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+?::\w+)", done.stdout, re.MULTILINE)
        (box.folder / "failed.txt").write_text("\n".join(failed))
    failed = (box.folder / "failed.txt").read_text().split()
    tests = defaultdict(set)
    for row in out.read_text().split("\n")[:-1]:
        test, file, line = row.split(" ")
        if test not in failed:  # it would notice anything
            tests[file, int(line)].add(test)
    return tests


def tests_for(mutation: Mutation, tests: dict) -> list[str]:
    """The file's own tests first, and the special ones, which are quick, before those that run everything."""
    stem = mutation.file.removesuffix(".py")
    covering = tests.get((mutation.file, mutation.line), set())
    if "" in covering:  # it runs when the file is imported: who needs it cannot be seen
        names = {name for covering in tests.values() for name in covering}
        files = tuple(f"tests/test_{room}.py" for room in (stem, "nanobot", "command_line"))
        covering = {name for name in names if name.startswith(files)}
    sizes = {test: 0 for test in covering}
    for names in tests.values():
        for test in names & covering:
            sizes[test] += 1
    return sorted(covering, key=lambda test: (f"test_{stem}.py" not in test, sizes[test]))


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
        command = [*walls, sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider"]
        environ = {**os.environ, "TMPDIR": str(self.folder / "tmp"), **environ}
        return subprocess.run(
            [*command, *arguments], cwd=self.copy, env=environ, timeout=seconds,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            encoding="utf-8", errors="replace",
        )  # fmt: skip

    def change(self, mutation: Mutation, text: bytes) -> None:
        path = self.copy / mutation.file
        lines = path.read_bytes().split(b"\n")
        lines[mutation.line - 1] = text
        path.write_bytes(b"\n".join(lines))
        for compiled in self.copy.glob("**/__pycache__"):  # of the same size and second as the new one
            shutil.rmtree(compiled)

    def outcome(self, mutation: Mutation, tests: list[str], seconds: float) -> str:
        """Which test noticed it; "" if none did."""
        self.change(mutation, mutation.after)
        try:
            done = self.pytest(["-x", "-rfE", *tests], seconds)
        except subprocess.TimeoutExpired:
            return "the time limit"
        finally:
            self.change(mutation, mutation.before)
        if done.returncode not in (0, 1, 2):  # 2: it cannot even be imported
            raise RuntimeError(f"{mutation}\n{done.stdout}")
        noticed = re.search(r"^(?:FAILED|ERROR) (.*)", done.stdout, re.MULTILINE)
        return "" if done.returncode == 0 else (noticed[1] if noticed else "the start")


def main() -> int:
    parser = argparse.ArgumentParser(description="Which wrong lines would no test notice?")
    parser.add_argument("files", nargs="*", default=FILES)
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=300, help="limit of one trial")
    parser.add_argument("--keep", type=Path, help="a folder that keeps the map of lines for the next sample")
    arguments = parser.parse_args()
    if not shutil.which("bwrap"):
        sys.exit("apt install bubblewrap: without a sandbox a broken guard could delete real files.")
    places = defaultdict(list)
    for file in arguments.files:
        for mutation in mutations_of(file):
            places[file, mutation.line].append(mutation)
    chance = random.Random(arguments.seed)
    chosen = chance.sample(sorted(places), min(arguments.count, len(places)))  # a line counts once
    folder = arguments.keep or Path(tempfile.mkdtemp())
    folder.mkdir(exist_ok=True)
    box = Sandbox(folder.resolve())
    tests = map_of_lines(box)
    unnoticed = []
    for number, place in enumerate(chosen, 1):
        mutation = chance.choice(places[place])
        names = tests_for(mutation, tests)
        noticed = names and box.outcome(mutation, names, arguments.seconds)
        if not noticed:
            unnoticed.append(f"{mutation}  ({len(names)} tests)")
        print(f"{number}/{len(chosen)} {mutation}  {noticed or 'UNNOTICED'}", file=sys.stderr, flush=True)
    print("\n".join([f"{len(chosen)} tried, {len(unnoticed)} unnoticed:", *unnoticed]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
