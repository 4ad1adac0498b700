"""The documents are true: README's commands and examples, and every place that NOTES.md names."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import pytest

import nanobot

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
NOTES = (ROOT / "NOTES.md").read_text(encoding="utf-8")
COURSE = (ROOT / "tests/exercises/README.md").read_text(encoding="utf-8")
TOUR = (ROOT / "tests/exercises/tour.md").read_text(encoding="utf-8")
FILES = [f"{name}.py" for name in ("nanobot", "providers", "tools", "memory", "channels")]


def blocks(kind: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run(*arguments: str, folder: Path = ROOT, **environ: str) -> str:
    """What this Python prints."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "encoding": "utf-8"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env={**os.environ, **environ}, **streams).stdout


def test_the_first_command_stands_within_twelve_lines_and_gets_a_useful_answer(own_home):
    assert blocks("sh")[0].strip() in "\n".join(README.split("\n")[:12])
    assert "pytest" in blocks("sh")[1] and len(README.split("\n")) <= 150
    assert len(README.split()) < 1200 and "tests/exercises/README.md" in README.partition("```")[0]
    out = run("nanobot.py", "agent", "-m", re.search(r'-m "(.+?)"', blocks("sh")[0])[1])
    assert "MIT License" in out and "pyproject.toml" in out


def test_the_program_in_readme_does_what_it_says(own_home, tmp_path):
    (tmp_path / "a.txt").write_text("x")
    assert "a.txt" in run("-c", blocks("python")[1], folder=tmp_path, PYTHONPATH=str(ROOT))


LADDER = blocks("python", NOTES)
SAID = [  # by each program of the ladder; the fourth is killed in its first run
    "hello\n",
    "Wrote b.txt\n> read b.txt\n    read_file {'path': 'b.txt'} -> good morning\ngood morning\n",
    "    result: This agent only reads.\n",
    '\'{"path": "a.txt"}\'}}]\n[interrupted: its outcome is unknown. Check before you repeat it]\n',
    "> what do you know about me\nThe user: I like tea\n",
    "to bob: 12 * 7 = 84\n",
]


def test_each_program_of_the_ladder_runs_as_it_is_printed(own_home, tmp_path):
    assert LADDER[0] == blocks("python")[0] and "import nanobot" not in LADDER[0]
    for program, said in zip(LADDER, SAID, strict=True):
        assert 12 <= program.count("\n") <= 50
        texts = [run("-c", program, folder=tmp_path, PYTHONPATH=str(ROOT)) for _ in range(2)]
        assert said in texts[1], program


@pytest.mark.parametrize("name", FILES[1:])
def test_the_example_of_a_leaf_runs_if_the_file_is_copied_alone(name, tmp_path):
    source = shutil.copy(ROOT / name, tmp_path)
    about = ast.get_docstring(ast.parse(Path(source).read_text(encoding="utf-8")))
    examples = [
        block
        for block in re.findall(r"(?:^    .*\n|^\n)+", f"{about}\n", re.M)
        if "import" in block
    ]
    assert run("-c", textwrap.dedent(examples[-1]), folder=tmp_path, PYTHONPATH="").strip()


def test_each_command_line_in_readme_is_one(capsys):
    lines = [line.partition("nanobot ")[2] for line in "\n".join(blocks("sh")[2:]).split("\n")]
    lines += re.findall(r"`nanobot ([^`]+)`", README)
    commands = [shlex.split(re.split(r"[|>]", line)[0], comments=True) for line in lines]
    for words in filter(None, commands):
        with pytest.raises(SystemExit):  # a command that there is shows its flags
            nanobot.main(["agent" if words[0].startswith("-") else words[0], "--help"])
        shown = capsys.readouterr().out
        assert [word for word in words if word.startswith("-") and word not in shown] == [], words
    assert len(commands) > 10


def test_the_tree_in_readme_is_what_is_there():
    named = {line.split()[0].rstrip("/") for line in blocks("text")[0].strip().split("\n")}
    assert named == {path.name for path in ROOT.iterdir() if path.name in named}


@pytest.mark.budget
def test_the_lines_of_the_first_readings_are_stated():
    sources = [(ROOT / name).read_text(encoding="utf-8") for name in FILES]
    lines = [source.partition("# ======== Second reading")[0].count("\n") for source in sources]
    stated = f"{sum(lines):,} lines"
    assert stated in README and stated in NOTES
    listed = dict(re.findall(r"^(\w+\.py) +([\d,]+) lines", README, re.MULTILINE))
    assert listed == {name: f"{count:,}" for name, count in zip(FILES, lines, strict=True)}


def test_every_place_in_notes_and_course_exists():
    places = set(re.findall(r"`(\w+)\.py:([\w.]+)`", NOTES + COURSE + TOUR))
    for file, name in places:
        attrgetter(name)(import_module(file))


def test_the_project_speaks_of_itself_alone():
    places = "/work/|/root/|/tmp/venv|pypi[.]org|files[.]pythonhosted"
    if not shutil.which("git"):
        pytest.skip("git is missing")
    found = ["git", "grep", "-liE", places, "--", ":!tests/test_docs.py"]
    assert subprocess.run(found, cwd=ROOT, capture_output=True, encoding="utf-8").stdout == ""
