"""The documents are true: README's commands and examples, and every place that NOTES.md names."""

import ast
import asyncio
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import nanobot
from exercises.walk import Follower

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
NOTES = (ROOT / "NOTES.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def run(*arguments: str, folder: Path = ROOT, **environ: str) -> str:
    """What this Python prints."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env={**os.environ, **environ}, stdin=subprocess.DEVNULL,
        capture_output=True, encoding="utf-8",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_first_command_stands_within_twelve_lines_and_gets_a_useful_answer(own_home):
    assert blocks("sh")[0].strip() in "\n".join(README.split("\n")[:12])
    assert "pytest" in blocks("sh")[1] and len(README.split("\n")) <= 150
    out = run("nanobot.py", "agent", "-m", re.search(r'-m "(.+?)"', blocks("sh")[0])[1])
    assert "MIT License" in out and "pyproject.toml" in out


def test_the_programs_in_readme_do_what_it_says(own_home, tmp_path):
    (tmp_path / "a.txt").write_text("x")
    assert "offline model" in run("-c", blocks("python")[0], folder=tmp_path, PYTHONPATH=str(ROOT))
    shutil.copy(ROOT / "tools.py", tmp_path)
    assert run("-c", blocks("python")[1], folder=tmp_path, PYTHONPATH="") == blocks("text")[-1]


@pytest.mark.parametrize("name", ["tools", "providers", "memory", "channels"])
def test_the_example_of_a_leaf_runs_if_the_file_is_copied_alone(name, tmp_path):
    source = shutil.copy(ROOT / f"{name}.py", tmp_path)
    about = ast.get_docstring(ast.parse(Path(source).read_text(encoding="utf-8")))
    examples = [block for block in re.findall(r"(?:^    .*\n|^\n)+", f"{about}\n", re.M) if "import" in block]
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
    assert {f"{name}.py" for name in ("nanobot", "providers", "tools", "memory", "channels")} <= named


@pytest.mark.budget
def test_the_sizes_in_readme_are_those_of_the_files():
    sizes = dict(re.findall(r"^(\w+\.py) +([\d,]+) lines", README, re.MULTILINE))
    assert {name: int(size.replace(",", "")) for name, size in sizes.items()} == {
        f"{name}.py": (ROOT / f"{name}.py").read_text(encoding="utf-8").count("\n")
        for name in ("nanobot", "providers", "memory", "tools", "channels")
    }


def symbols(file: str) -> set[str]:
    """Names that a file defines: `nanobot.py:AgentRunner`, `nanobot.py:AgentRunner.run`."""
    found = set()
    for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        names = [getattr(node, "name", None), *(getattr(each, "id", None) for each in targets)]
        inner = [f"{names[0]}.{each.name}" for each in getattr(node, "body", []) if hasattr(each, "name")]
        found |= {f"{file}:{name}" for name in (*names, *inner)}
    return found


def test_every_place_in_notes_exists():
    places = set(re.findall(r"`(\w+\.py:[\w.]+)`", NOTES))
    defined = set().union(*(symbols(file) for file in {place.split(":")[0] for place in places}))
    assert places - defined == set() and len(places) > 30


# ---- The tour ----


def tour_rows() -> list[tuple[list[str], list[str]]]:
    """(places, data) of each row of the tour in NOTES.md."""
    table = NOTES.partition("## The tour")[2].partition("\n## ")[0]
    rows = []
    for line in table.split("\n"):
        if re.match(r"\| \d+ \|", line):
            _, _, places, data, _, _ = re.split(r"(?<!\\)\|", line)
            rows.append((re.findall(r"`(\w+\.py:[\w.]+)`", places), re.findall(r"`(.+?)`", data)))
    return rows


class Tour(Follower):
    """Keeps the verdicts on the answers, too: they are in no file."""

    verdicts = ()

    def note(self, frame, event, argument):
        super().note(frame, event, argument)
        if event == "return" and frame.f_code.co_name == "verdict":
            self.verdicts += (argument,)


def take_the_tour(home: Path) -> tuple[list[str], list[str], str]:
    """The functions that the turn enters, in order; those of the first readings; all data that it leaves."""
    (home / "a.txt").write_text("hello\n", encoding="utf-8")
    config = nanobot.Config()
    config.cwd, config.defaults.workspace, config.defaults.provider = home, str(home / "ws"), "offline"
    loop, tour, told = nanobot.AgentLoop(config), Tour(ROOT, is_long=True), []
    loop.provider.trace = nanobot.Trace(home / "trace.jsonl")

    async def note(event):
        told.append(event.content)

    result = tour.follow(lambda: asyncio.run(loop.process_direct("read a.txt", on_event=note)))
    files = [loop.sessions.path("cli:direct"), home / "trace.jsonl"]
    data = ["cli:direct", *told, *tour.verdicts, result.stop_reason, *(file.read_text("utf-8") for file in files)]
    first_readings = Follower(ROOT, is_long=False)
    story = [place for place, code in tour.seen.items() if first_readings.is_shown(code)]
    return list(tour.seen), story, "\n".join(data)


def test_the_tour_has_the_places_of_a_turn_in_their_order_all_of_the_story_and_its_data(tmp_path):
    entered, story, left = take_the_tour(tmp_path)
    rows = tour_rows()
    named = {place for places, _ in rows for place in places}
    assert named - set(entered) == set() and len(rows) > 20
    firsts = [entered.index(places[0]) for places, _ in rows]
    assert firsts == sorted(firsts)
    assert {place for place in story if place.startswith("nanobot.py:") and "<" not in place} - named == set()
    data = [text.replace("\\|", "|") for _, row in rows for text in row]
    assert [text for text in data if text not in left] == []


def test_the_project_speaks_of_itself_alone():
    words = re.compile(r"/work/|/root/|/tmp/venv|pypi\.org|files\.pythonhosted", re.IGNORECASE)
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split("\n")
    for name in filter(None, listed):
        if name != "tests/test_docs.py":
            assert not words.search((ROOT / name).read_text(encoding="utf-8", errors="replace")), name


def test_walk_prints_the_places_of_the_tour_and_what_the_turn_gave(own_home, tmp_path):
    (tmp_path / "a.txt").write_text("hello\n")
    printed = run(str(ROOT / "nanobot.py"), "walk", "--offline", "-m", "read a.txt", folder=tmp_path)
    firsts = [places[0] for places, _ in tour_rows() if "AgentHook" not in places[0]]
    assert [place for place in firsts if f"{place}(" not in printed] == [] and "1| hello" in printed
