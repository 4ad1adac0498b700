"""Which wrong lines would no test notice? A script; pytest does not collect it.

    python tests/mutate.py --count 120 --seed 7 [channels.py …]

It changes one line at a time in a copy of the checkout and runs the file's own tests, then all others. What
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


# ---- Trying it ----


class Sandbox:
    """A copy of the checkout, and pytest in it, which can write nowhere else."""

    def __init__(self, folder: Path):
        self.folder, self.copy = folder, folder / "copy"
        shutil.rmtree(self.copy, ignore_errors=True)
        leave_out = shutil.ignore_patterns("__pycache__", ".git", ".venv", ".pytest_cache")
        shutil.copytree(ROOT, self.copy, ignore=leave_out)
        (folder / "tmp").mkdir(exist_ok=True)

    def pytest(self, arguments: list[str], seconds: float) -> subprocess.CompletedProcess:
        walls = ["bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--unshare-pid",
                 "--die-with-parent", "--bind", str(self.folder), str(self.folder)]  # fmt: skip
        command = [*walls, sys.executable, "-B", "-m", "pytest", "-n", "auto", "--tb=no", "-rfE"]
        environ = {**os.environ, "TMPDIR": str(self.folder / "tmp")}
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

    def outcome(self, mutation: Mutation, failing: list[str], seconds: float) -> str:
        """Which test noticed it; "" if none did."""
        own = f"tests/test_{mutation.file}"
        known = [f"--deselect={test}" for test in failing]  # they would notice anything
        self.change(mutation, mutation.after)
        try:
            for chosen in ([own], [f"--ignore={own}"]):
                done = self.pytest(["-x", *known, *chosen], seconds)
                noticed = re.search(r"^(?:FAILED|ERROR) (.*)", done.stdout, re.MULTILINE)
                if done.returncode:
                    return noticed[1] if noticed else "the start"
        except subprocess.TimeoutExpired:
            return "the time limit"
        finally:
            self.change(mutation, mutation.before)
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(description="Which wrong lines would no test notice?")
    parser.add_argument("files", nargs="*", default=FILES)
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=600, help="limit of one run")
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
    box = Sandbox(Path(tempfile.mkdtemp()).resolve())
    done = box.pytest([], arguments.seconds)
    failing = re.findall(r"^(?:FAILED|ERROR) (\S+?::\w+)", done.stdout, re.MULTILINE)
    unnoticed = []
    for number, mutation in enumerate(chosen, 1):
        noticed = box.outcome(mutation, failing, arguments.seconds)
        if not noticed:
            unnoticed.append(str(mutation))
        print(f"{number}/{len(chosen)} {mutation}  {noticed or 'UNNOTICED'}", file=sys.stderr, flush=True)
    print("\n".join([f"{len(chosen)} tried, {len(unnoticed)} unnoticed:", *unnoticed]))


if __name__ == "__main__":
    main()
