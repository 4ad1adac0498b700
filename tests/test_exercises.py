"""The exercises: each can be solved, each stub says that it is not begun, each plausible mistake gets a message of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
    command = [sys.executable, str(HERE.parent.parent / "nanobot.py"), "exercises"]
    done = subprocess.run([*command, "99"], capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 2 and "There is no exercise 99" in done.stderr
    assert len(STUBS) >= 14
    for file in STUBS.values():
        about = file.read_text(encoding="utf-8").split('"""')[1]
        assert about.startswith("★") and all(f"\n{word}: " in about for word in ("Goal", "Read", "Hint")), file
