"""The lessons: each exercise can be solved, plausible mistakes get messages that help, and the tour is true."""

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nanobot
from exercises.mistakes import MESSAGES, SOLUTIONS, code_of, lay_out_projects
from test_docs import ROOT, TOUR, run

HERE = Path(__file__).parent / "exercises"
STUBS = {file.stem: file for file in sorted(HERE.glob("ex_*.py"))}
IN_EACH_RUN = ("08",)  # the others are marked slow
ENVIRONMENT = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUTF8": "1"}
NAMES = [
    pytest.param(name, marks=() if name[3:5] in IN_EACH_RUN else pytest.mark.slow) for name in STUBS
]


def about(file: Path) -> str:
    return file.read_text(encoding="utf-8").split('"""')[1]


def exercises(kit: Path, *numbers: str, **environ: str) -> tuple[int, str]:
    """The exit status of `nanobot exercises` in this checkout, and what it prints."""
    done = subprocess.run(
        [sys.executable, kit / "nanobot.py", "exercises", *numbers],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        env={**os.environ, **ENVIRONMENT, **environ},
    )
    assert not done.stderr
    return done.returncode, done.stdout


def graded(name: str, solution: Path, folder: Path) -> tuple[int, str]:
    """The exit status and the words of the grader for this solution."""
    folder.mkdir()
    shutil.copy(solution, folder / f"{name}.py")
    status, words = exercises(ROOT, name[3:5], NANOBOT_EXERCISES=str(folder))
    return status, words.split("The exercise:")[0]


@pytest.mark.parametrize("name", NAMES)
def test_it_can_be_solved_and_each_mistake_is_told_apart(name, tmp_path):
    status, words = graded(name, SOLUTIONS / f"{name}.py", tmp_path / "right")
    assert status == 0 and ": solved\nlearnt: " in words and "\ntry next: " in words, words
    status, stub = graded(name, STUBS[name], tmp_path / "stub")
    assert status == 1 and ": not begun" in stub and name in stub and "Goal: " in stub
    mistakes = sorted(SOLUTIONS.glob(f"{name}.wrong*.py"))
    messages = [graded(name, file, tmp_path / file.stem) for file in mistakes]
    assert all(
        status == 1 and "expected: " in words and "look at: " in words for status, words in messages
    ), messages
    assert len(messages) >= 2 and messages[0] != messages[1]


GRADE = """
import json, os, sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import grading

for number, folder in json.load(sys.stdin):
    os.environ["NANOBOT_EXERCISES"] = folder
    state, problem = grading.grade(grading.graders()[number], folder)
    print(json.dumps(problem))
"""


@pytest.mark.long
def test_a_message_names_what_the_student_did(tmp_path):
    jobs = []
    for number, (name, code, _) in enumerate(MESSAGES):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / f"ex_{name}.py").write_text(code, encoding="utf-8")
        jobs.append([name[:2], str(folder)])
    command = [sys.executable, "-c", GRADE, str(HERE)]
    done = subprocess.run(command, input=json.dumps(jobs), capture_output=True, encoding="utf-8")
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(said) == len(MESSAGES), done.stderr
    assert [
        (row[2], text) for row, text in zip(MESSAGES, said, strict=True) if row[2] not in text
    ] == []
    assert "Traceback" not in done.stderr


CRASH = b"import os, signal\n\nos.kill(os.getpid(), signal.SIGSEGV)\n"
DAMAGED = [  # exercise, the student's file (None: it is deleted), its state in the list, what is said of it
    ("01_loop", None, "file missing", "`git restore tests/exercises/ex_01_loop.py`"),
    ("02_tool", code_of("02_tool").encode("utf-16"), "not UTF-8", "save it as UTF-8"),
    ("03_history", b"x = 1\n", "not yet right", "`lawful` is missing in ex_03_history.py"),
    ("05_memory", b"import os\n\nos._exit(3)\n", "ended itself", "with os._exit(3)"),
    ("10_helper", code_of("10_helper").encode(), "solved", "learnt:   A helper sees nothing but"),
    ("14_injection", b"while True:\n    pass\n", "endless loop", "busy for seconds, here in line "),
]
if os.name == "posix":  # Windows has no signal that ends a program
    DAMAGED.append(("07_journal", CRASH, "crashed", "crashed (signal 11"))


@pytest.mark.long
def test_a_file_that_cannot_be_graded_is_told_and_all_others_are_graded(tmp_path):
    for name in ("templates", "skills", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for file in ROOT.glob("*.py"):
        shutil.copy(file, tmp_path)
    for name, content, _, _ in DAMAGED:
        file = tmp_path / "tests" / "exercises" / f"ex_{name}.py"
        file.unlink()
        if content:
            file.write_bytes(content)
    _, listed = exercises(tmp_path)
    for name, file in STUBS.items():
        title = about(file).partition("\n")[0]
        states = [row[2] for row in DAMAGED if f"ex_{row[0]}" == name]
        assert f"{name[3:5]} {title}: {(states or ['not begun'])[0]}\n" in listed, listed
    assert "1 of 16 solved" in listed
    _, said = exercises(tmp_path, *(row[0][:2] for row in DAMAGED))
    assert [words for _, _, _, words in DAMAGED if words not in said] == [], said


def test_the_table_of_a_class_runs_each_student_apart_and_says_that_it_runs_code(tmp_path):
    students = {"ada": code_of("01_loop"), "bob": "print(open('../ada/ex_01_loop.py').read())\n"}
    for name, code in students.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "ex_01_loop.py").write_text(code, encoding="utf-8")
    _, said = exercises(ROOT, "--class", str(tmp_path), "1", "2")
    assert "This runs the code of 2 students on this machine, in a sandbox" in said or (
        "without a sandbox: it can read and change your files" in said
    )
    assert "\nada  ✓  ·  1 solved\nbob  ✗  ·  0 solved\n" in said and "\nbob 01 " in said
    assert "has_tool_calls" not in said, "what a solution prints"


def test_a_class_has_a_folder_and_an_agent_with_each_project_whose_test_passes(tmp_path, own_home):
    course, projects = tmp_path / "course", tmp_path / "projects"
    said = run(str(HERE / "session0.py"), str(course))
    assert "\nREADY" in said and f'    cd "{course}"\n' in said and (course / "letter.txt").exists()
    problems = lay_out_projects(course / "project" / "dice", projects)
    start = [str(HERE / "agent.py"), str(projects), "agent", "--offline", "-m"]
    said = run(*start, "throw a die with 2 sides")
    told = dict(re.findall(r"✗ (\w+) is left out: (.*)", said))
    assert {name for name in problems if problems[name] in told.get(name, "")} == set(problems), (
        said
    )
    assert "✓ dice: roll; 2 tests passed" in said and "You have thrown a" in said


def test_a_solution_sees_no_keys_of_whoever_grades_it(tmp_path):
    lessons = tmp_path / "lessons"
    lessons.mkdir()
    code = code_of("10_helper") + "\nimport os\n\nprint(dict(os.environ))\n"
    (lessons / "ex_10_helper.py").write_text(code, encoding="utf-8")
    names = ("OPENAI_API_KEY", "GITHUB_TOKEN", "MY_SECRET", "DB_PASSWORD", "AWS_ACCESS_KEY_ID")
    keys = dict.fromkeys(names, "hunter2")
    _, said = exercises(ROOT, "10", "01", NANOBOT_EXERCISES=str(lessons), **keys)
    assert "helper: solved" in said and "NANOBOT_EXERCISES" in said and "hunter2" not in said
    assert f"ex_01_loop.py to {lessons}" in said


def test_the_list_names_each_exercise_and_a_wrong_number_is_told():
    command = [sys.executable, str(ROOT / "nanobot.py"), "exercises"]
    done = subprocess.run([*command, "99"], capture_output=True, encoding="utf-8")
    assert done.returncode == 2 and "There is no exercise 99" in done.stderr
    for name, file in STUBS.items():
        task = about(file)
        assert task.startswith("★"), file
        assert all(f"\n{word}: " in task for word in ("Goal", "Read", "Hint")), file
        assert about(HERE / f"test_{name[3:]}.py") == task, "the grader's copy, which is printed"


# ---- The tour ----


def tour_rows() -> list[tuple[list[str], list[str]]]:
    """(places, data) of each row of the tour's table."""
    rows = []
    for line in TOUR.split("\n"):
        if re.match(r"\| \d+ \|", line):
            _, _, places, data, _, _ = re.split(r"(?<!\\)\|", line)
            rows.append((re.findall(r"`(\w+\.py:[\w.]+)`", places), re.findall(r"`(.+?)`", data)))
    return rows


def walk(folder: Path, *flags: str) -> str:
    """What `nanobot walk` prints; the program is named as pupils write it."""
    (folder / "a.txt").write_text("hello\n", encoding="utf-8")
    program = os.path.relpath(ROOT / "nanobot.py", folder)
    return run(program, "walk", "--offline", *flags, "-m", "read a.txt", folder=folder)


def places_in(printed: str) -> list[str]:
    """The functions of a walk, in order: `nanobot.py:AgentRunner.run`."""
    found = re.findall(r"^ *(\w+\.py):\d+ ([\w.]+)\(", printed, re.MULTILINE)
    return [f"{file}:{name}" for file, name in found]


def test_the_tour_has_the_places_of_a_walk_in_their_order_all_of_the_story_and_the_turns_data(
    tmp_path,
):
    """And what runs in a task or a thread stands below its caller."""
    entered, printed = places_in(walk(tmp_path, "--all", "--workspace", "w")), walk(tmp_path)
    story = places_in(printed)
    rows = tour_rows()
    named = {place for places, _ in rows for place in places}
    assert named - set(entered) == set() and len(rows) > 20
    assert {place for place in story if place.startswith("nanobot.py:")} - named == set()
    firsts = [places[0] for places, _ in rows]
    order = [entered.index(place) for place in firsts]
    assert order == sorted(order)
    assert {place for place in firsts if "AgentHook" not in place} - set(story) == set()

    headings = re.findall(r"^======== (request \d: \d messages)", printed, re.MULTILINE)
    assert headings == ["request 1: 2 messages", "request 2: 4 messages"]
    second = printed.partition("request 2")[2]
    assert "    + tool: 1| hello" in second and '+ journal: {"n": 4, "role": "assistant"' in second
    steps = ("process_direct", "run", "_act", "_run_batch", "_call", "Tool.execute", "read_file")
    found = [re.search(rf"^( *)\w+\.py:\d+ [\w.]*\b{step}\(", printed, re.M) for step in steps]
    depths = [len(each[1]) for each in found]
    assert depths == sorted(set(depths)) and depths[0] == 0

    command = f"{sys.executable} {ROOT}/nanobot.py --offline -s tour --trace t.jsonl -m".split()
    streams = {"stdin": subprocess.DEVNULL, "capture_output": True, "encoding": "utf-8"}
    done = subprocess.run([*command, "read a.txt"], cwd=tmp_path, **streams)
    left = done.stdout + done.stderr + inspect.getsource(nanobot.verdict)  # its values are words
    for file in (*tmp_path.rglob("cli%3Atour.jsonl"), tmp_path / "t.jsonl"):
        left += file.read_text("utf-8")
    data = [text.replace("\\|", "|") for _, row in rows for text in row]
    assert [text for text in data if text not in left] == []
