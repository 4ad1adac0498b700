"""The lessons: each exercise can be solved, each mistake in it is told apart, and the tour of NOTES.md is true."""

import asyncio
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nanobot
from exercises.walk import Follower
from test_docs import NOTES, ROOT, run

HERE = Path(__file__).parent / "exercises"
SOLUTIONS = HERE / "solutions"
STUBS = {file.stem: file for file in sorted(HERE.glob("ex_*.py"))}
IN_EACH_RUN = ("01", "08")  # the others are marked slow
NAMES = [
    pytest.param(name, marks=() if name[3:5] in IN_EACH_RUN else pytest.mark.slow) for name in STUBS
]


def graded(name: str, solution: Path, folder: Path) -> tuple[int, str]:
    """The exit status and the words of `nanobot exercises NN` for this solution."""
    folder.mkdir()
    shutil.copy(solution, folder / f"{name}.py")
    done = subprocess.run(
        [sys.executable, HERE / "grading.py", name[3:5]], capture_output=True, text=True, encoding="utf-8",
        timeout=30, env={**os.environ, "NANOBOT_EXERCISES": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout.split("The exercise:")[0]


@pytest.mark.parametrize("name", NAMES)
def test_it_can_be_solved_and_each_mistake_is_told_apart(name, tmp_path):
    status, words = graded(name, SOLUTIONS / f"{name}.py", tmp_path / "right")
    assert status == 0 and ": solved" in words, words
    status, stub = graded(name, STUBS[name], tmp_path / "stub")
    assert status == 1 and "not begun: " in stub and name in stub
    messages = [graded(name, SOLUTIONS / f"{name}.wrong{n}.py", tmp_path / f"wrong{n}") for n in (1, 2)]
    assert [status for status, _ in messages] == [1, 1]
    assert all("expected: " in words and "look at: " in words for _, words in messages), messages
    assert messages[0] != messages[1]


def test_the_list_names_each_exercise_and_a_wrong_number_is_told():
    command = [sys.executable, str(ROOT / "nanobot.py"), "exercises"]
    done = subprocess.run([*command, "99"], capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 2 and "There is no exercise 99" in done.stderr
    assert len(STUBS) >= 14
    for file in STUBS.values():
        about = file.read_text(encoding="utf-8").split('"""')[1]
        assert about.startswith("★") and all(f"\n{word}: " in about for word in ("Goal", "Read", "Hint")), file


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


def test_walk_prints_the_places_of_the_tour_and_what_the_turn_gave(own_home, tmp_path):
    (tmp_path / "a.txt").write_text("hello\n")
    printed = run(str(ROOT / "nanobot.py"), "walk", "--offline", "-m", "read a.txt", folder=tmp_path)
    firsts = [places[0] for places, _ in tour_rows() if "AgentHook" not in places[0]]
    assert [place for place in firsts if f"{place}(" not in printed] == [] and "1| hello" in printed
