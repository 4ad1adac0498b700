"""The command `nanobot exercises`: the list of the exercises, one exercise, or who of a class has solved what.

python tests/exercises/exercises.py                    lists the exercises and their state
python tests/exercises/exercises.py 04                 checks exercise 04
python tests/exercises/exercises.py --class FOLDER     FOLDER has one folder for each student: ada/ex_01_loop.py …
"""

import argparse
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import grading  # noqa: E402  (the line above finds it)

AFTER = {  # what was learnt, what to try next
    "01": (
        "An agent is a loop: ask, run the calls, append the results, ask again. The rest of the kit is care for this loop.",
        "Add a limit of 10 requests; then read nanobot.py:AgentRunner.run and find where it does the same.",
    ),
    "02": (
        "The model sees only a schema, which is made from the signature and the docstring; it never sees your code.",
        'Call it with "12 km" as the distance: tools.py:cast and validate answer before your function runs.',
    ),
    "03": (
        "Each call has exactly one result, right after it. A program that may be killed has to repair its history.",
        "Compare with providers.py:legal: which damage does it handle that yours does not?",
    ),
    "04": (
        "Endpoints differ in small ways. A table of remedies is easier to check than an `if` in the middle of the client.",
        "Read providers.py:HEALING, and guess for two rows which endpoint made them necessary.",
    ),
    "05": (
        "The long-term memory is a text that the model writes itself. What it leaves out is forgotten in later requests.",
        "Play the model yourself: nanobot --provider human; say your name, type /new, then ask for the name.",
    ),
    "06": (
        "A skill costs one line in each request; its instructions are read only if a task needs them.",
        "Put your skill into ~/.nanobot/workspace/skills/release-note/SKILL.md and look at `nanobot prompt`.",
    ),
    "07": (
        "Each message is on the disk before the next thing happens. So the journal alone says what was going on.",
        'Do it by hand: nanobot "run sleep 60", kill -9 the process, then `nanobot -c -m /continue`.',
    ),
    "08": (
        "First find out where a path really leads, then decide. A check of the text misses links and `..`.",
        "Which attack is left if somebody replaces the folder between check and use? NOTES.md names it.",
    ),
    "09": (
        "A tool can live in another program. Schema, call and result are the same as those of a function.",
        'Put it into "mcpServers" of ~/.nanobot/config.json (README.md shows the form), then ask: roll a die.',
    ),
    "10": (
        "A helper sees nothing but its task, so the task must say all. In return its long work stays out of your context.",
        "Play both models: nanobot --provider human; call spawn, and answer as the helper.",
    ),
    "11": (
        "A time without a zone is a bug that appears twice a year. The job keeps the zone, not an offset.",
        "nanobot web --offline, then: remind me in 1 minute to stretch. `nanobot cron` lists the job.",
    ),
    "12": (
        "The sender keeps a message until the receiver has it on disk. Between the two it may exist twice, but never not at all.",
        "Kill your channel between `publish` and `unlink`: what does the id of the message prevent?",
    ),
    "13": (
        "A hook sees each request and each call, so limits need no change in the loop.",
        "Give the three parameters default values (0, 0.15, 0.60), then: python agent.py 13 --offline (in `course`) opens the page.",
    ),
    "14": (
        "The program decides which calls run, not the prompt. A model that was convinced by a file still cannot act.",
        "python agent.py 14 --provider human (in `course`) opens the page with your hook: play a model that obeys the file.",
    ),
    "15": (
        "A model sees the request, and nothing else. All that it does is text; the program turns it into actions.",
        "nanobot web --provider human: play it again, but call a tool with a wrong argument first.",
    ),
    "16": (
        "Rules can call tools, too. What they cannot do is understand a sentence that nobody foresaw.",
        "Find a sentence that should fit your rule and does not. How many of them would a user need?",
    ),
}


def main(arguments: Any, make_loop: Any = None) -> int:
    """`arguments` has the numbers of exercises, and the folder of a class or None."""
    sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    files = grading.graders()
    numbers = [number.zfill(2) for number in arguments.numbers]  # 1 is 01
    unknown = [number for number in numbers if number not in files]
    if unknown:
        print(f"There is no exercise {unknown[0]}; there are {', '.join(files)}.", file=sys.stderr)
        return 2
    if arguments.folder:
        return show_class(Path(arguments.folder).expanduser(), numbers or list(files))
    if not numbers:
        solved = sum([show(number, is_long=False) for number in files])
        print(
            f"\n{solved} of {len(files)} solved. `nanobot exercises 01` says what is wrong with one."
        )
        return 0
    return int(not all([show(number, is_long=True) for number in numbers]))


def show(number: str, is_long: bool) -> bool:
    """Print the state of an exercise. Returns whether it is solved."""
    grader = grading.graders()[number]
    state, problem = grading.grade_apart(grader, is_quiet=not is_long)
    title, task = grading.about(grader)
    print(f"{number} {title}: {state}")
    if is_long and state == grading.SOLVED:
        learnt, further = AFTER[number]
        print(f"learnt:   {learnt}\ntry next: {further}")
    elif is_long:
        print(problem)
        if state == grading.NOT_BEGUN:
            print(f"\n{task}")
        print(f"\nThe exercise: {grading.file_of(grader.stem.removeprefix('test_'))}")
    sys.stdout.flush()  # before the next solution prints
    return state == grading.SOLVED


# ---- A class ----

MARKS = {grading.SOLVED: "✓", grading.NOT_BEGUN: "·", grading.Missing.state: "·"}


def show_class(folder: Path, numbers: list[str]) -> int:
    """Print a table: a line for each student, a mark for each exercise; then what is wrong."""
    students = sorted({file.parent for file in folder.glob("*/**/ex_[0-9]*.py")})
    names = {student: student.relative_to(folder).parts[0] for student in students}
    if not students:
        print(
            f"{folder} has no folder with exercises. It must have one for each student: "
            f"{folder / 'ada' / 'ex_01_loop.py'}",
            file=sys.stderr,
        )
        return 2
    sandbox, how = sandbox_here()
    print(f"This runs the code of {len(students)} students on this machine, {how}.", flush=True)
    width = max(map(len, names.values()))
    print(f"{'':{width}}  {' '.join(numbers)}")
    problems = []
    for student in students:
        os.environ["NANOBOT_EXERCISES"] = str(student.absolute())
        graders = [grading.graders()[number] for number in numbers]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            verdicts = list(pool.map(lambda each: grading.grade_apart(each, sandbox), graders))
        marks = [f"{MARKS.get(state, '✗'):2}" for state, _ in verdicts]
        solved = [state for state, _ in verdicts].count(grading.SOLVED)
        print(f"{names[student]:{width}}  {' '.join(marks)} {solved} solved", flush=True)
        for number, (state, problem) in zip(numbers, verdicts, strict=True):
            if state not in MARKS:
                first = problem.partition("\n")[0]
                problems.append(f"{names[student]} {number} {state}: {first}")
    print("\n✓ solved, ✗ not yet right, · not begun\n" + "\n".join(problems))
    return 0


def sandbox_here() -> tuple[Any, str]:
    """What begins a command in bubblewrap, as a function of the folder that it may write, and a description."""
    from tools import BWRAP, SYSTEM, sandbox_problem

    if os.name != "posix" or sandbox_problem():
        return None, "without a sandbox: it can read and change your files, and use the network"

    def beginning(place: str) -> list[str]:
        shown = [*SYSTEM, sys.prefix, sys.base_prefix, str(grading.ROOT)]
        shown.append(os.environ["NANOBOT_EXERCISES"])  # the student's folder
        reads = [word for path in shown for word in ("--ro-bind-try", path, path)]
        return [*BWRAP.split(), *reads, "--bind", place, place, "--chdir", place]

    return beginning, "in a sandbox: it sees no file of yours but its own folder, and no network"


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("numbers", nargs="*")
    options.add_argument("--class", dest="folder")
    try:
        sys.exit(main(options.parse_args()))
    except BrokenPipeError:  # `… | head`: nobody reads the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        sys.exit(130)
