"""What the graders share, and the command behind `nanobot exercises`.

An exercise is a file `ex_NN_name.py` that you complete; its grader is `test_NN_name.py`. A grader says what it expected, what
it got and where to look. It works without pytest, without a key and without network:

    python tests/exercises/grading.py        lists the exercises and their state
    python tests/exercises/grading.py 04     runs one
"""

import importlib.util
import inspect
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT), str(HERE), str(ROOT / "tests")]  # fake_llm.py: a model of the grader's


class Wrong(AssertionError):
    """What a grader says of a wrong solution."""


def check(is_right: bool, expected: str, got: Any = "", look: str = "") -> None:
    """Raises Wrong if the solution is not right; `look` names a place to read: nanobot.py:AgentRunner.run"""
    if not is_right:
        lines = [f"expected: {expected}"]
        if got != "":
            lines.append(f"got:      {got if isinstance(got, str) else repr(got)}"[:600])
        if look:
            lines.append(f"look at:  {look}")
        raise Wrong("\n".join(lines))


def file_of(name: str) -> Path:
    """`ex_<name>.py`, of the folder in NANOBOT_EXERCISES or of this one."""
    return Path(os.environ.get("NANOBOT_EXERCISES", HERE)).absolute() / f"ex_{name}.py"


def exercise(name: str) -> ModuleType:
    """What is defined in the file of an exercise."""
    file = file_of(name)
    if not file.exists():
        raise NotImplementedError(f"copy {HERE / file.name} to {file.parent}")
    spec = importlib.util.spec_from_file_location(f"ex_{name}", file)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as problem:
        raise Wrong(f"{file.name} cannot be loaded: {type(problem).__name__}: {problem}") from problem
    return module


def settings(folder: Path, **more: Any) -> Any:
    """The settings of an agent that lives in this folder, whatever the settings of the user are."""
    from nanobot import load_config

    file = folder / "config.json"
    defaults = {"workspace": str(folder / "home"), "provider": "offline"}
    file.write_text(json.dumps({"agents": {"defaults": defaults}, **more}), encoding="utf-8")
    return load_config(file, environ={})


def graders() -> dict[str, Path]:
    """{"01": tests/exercises/test_01_loop.py, …}"""
    return {file.name.split("_")[1]: file for file in sorted(HERE.glob("test_[0-9]*.py"))}


def about(number: str) -> tuple[str, str]:
    """The first line of an exercise's docstring, `★ Your own loop`, and the rest: goal, what to read, a hint."""
    file = next(HERE.glob(f"ex_{number}_*.py"))
    title, _, task = file.read_text(encoding="utf-8").split('"""')[1].partition("\n")
    return title, task.strip()


def grade(file: Path) -> str:
    """What is wrong with a solution; "" if nothing is."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    home = os.getcwd()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.chdir(folder)
        try:
            spec.loader.exec_module(module)
            for name, test in list(vars(module).items()):
                if name.startswith("test_"):
                    test(*([Path(folder)] if inspect.signature(test).parameters else []))
        except Wrong as mistake:
            return str(mistake)
        except NotImplementedError as missing:
            return f"not begun: {missing}"
        except Exception as problem:
            last = traceback.extract_tb(problem.__traceback__)[-1]
            return f"{type(problem).__name__} in {Path(last.filename).name}, line {last.lineno}: {problem}"
        finally:
            os.chdir(home)
    return ""


def main(numbers: list[str]) -> int:
    """Prints the state of all exercises, or what is still wrong with some."""
    sys.stdout.reconfigure(errors="replace")
    files, numbers = graders(), [number.zfill(2) for number in numbers]  # 1 is 01
    unknown = [number for number in numbers if number not in files]
    if unknown:
        print(f"There is no exercise {unknown[0]}; there are {', '.join(files)}.", file=sys.stderr)
        return 2
    failed = 0
    for number in numbers or files:
        problem = grade(files[number])
        failed += bool(problem)
        state = "solved" if not problem else "not begun" if problem.startswith("not begun") else "not yet right"
        title, task = about(number)
        print(f"{number} {title}: {state}")
        if numbers and problem:
            name = files[number].stem.removeprefix("test_")
            begin = f"\n\n{task}" if state == "not begun" else ""
            print(f"{problem}{begin}\n\nThe exercise: {file_of(name)}")
    if not numbers:
        print(f"\n{len(files) - failed} of {len(files)} solved. `nanobot exercises 01` says what is wrong with one.")
    return int(bool(numbers and failed))


if __name__ == "__main__":
    import grading  # not `__main__`: graders raise `grading.Wrong`

    sys.exit(grading.main(sys.argv[1:]))
