"""The rules of the house: import directions, lazy imports, one size, short functions. Ruff finds silent and bare `except`s."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = ["nanobot", "providers", "memory", "tools", "channels"]
NODES_AT_MOST = 47_000  # of the syntax tree, in all five files: packing a line gains nothing
LEAVES = [name for name in FILES if name != "nanobot"]
SOURCES = {name: (ROOT / f"{name}.py").read_text(encoding="utf-8") for name in FILES}
TREES = {name: ast.parse(source) for name, source in SOURCES.items()}
ALL_NODES = [(name, node) for name, tree in TREES.items() for node in ast.walk(tree)]


def imported(tree: ast.Module) -> set[str]:
    names = {
        each.name for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names
    }
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("name", LEAVES)
def test_a_leaf_imports_no_other_file(name):
    assert not imported(TREES[name]) & set(FILES)


def test_importing_the_kit_loads_the_standard_library_only():
    heavy = ["openai", "json_repair", "pydantic", "httpx2", "mcp"]
    code = f"import nanobot, sys; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, encoding="utf-8"
    )
    assert done.stdout.strip() == "[]", done.stderr


SECOND_READING = re.compile(r"^# ======== Second reading: .+ ========$", re.MULTILINE)


@pytest.mark.budget
def test_one_line_divides_each_file_into_two_readings():
    parts = {name: SECOND_READING.split(source) for name, source in SOURCES.items()}
    assert [name for name, halves in parts.items() if len(halves) != 2] == []


MARKS = (ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop)  # "+", "and", "load"
HAS_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def size(tree: ast.Module) -> int:
    """Nodes of a syntax tree, without docstrings."""
    nodes = [node for node in ast.walk(tree) if not isinstance(node, MARKS)]
    owners = [node for node in nodes if isinstance(node, HAS_DOCSTRING)]
    docstrings = [node for node in owners if ast.get_docstring(node, clean=False) is not None]
    return len(nodes) - 2 * len(docstrings)


@pytest.mark.budget
def test_all_five_files_together_keep_to_their_size():
    sizes = {name: size(tree) for name, tree in TREES.items()}
    assert sum(sizes.values()) <= NODES_AT_MOST, sizes


@pytest.mark.budget
def test_the_runner_begins_by_line_250_and_functions_have_at_most_50_lines():
    runner = next(
        node for node in TREES["nanobot"].body if getattr(node, "name", "") == "AgentRunner"
    )
    assert runner.lineno <= 250
    for name, node in ALL_NODES:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 50, f"{name}.py: {node.name}"


def test_nothing_but_the_known_files_at_the_top_level():
    if not shutil.which("git"):
        pytest.skip("git is missing")
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, encoding="utf-8"
    ).stdout.split()
    if not listed:
        pytest.skip("not a git checkout")
    top = {path.split("/")[0] for path in listed if not path.startswith(".")}
    known = {f"{name}.py" for name in FILES} | {"templates", "skills", "tests"}
    assert top == known | {"NOTES.md", "README.md", "LICENSE", "pyproject.toml"}


def test_the_inline_script_metadata_equals_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    block = re.search(r"^# /// script\n((?:#.*\n)+?)# ///$", SOURCES["nanobot"], re.MULTILINE)
    inline = tomllib.loads(re.sub(r"^# ?", "", block[1], flags=re.MULTILINE))
    assert inline["dependencies"] == project["dependencies"]
    assert inline["requires-python"] == project["requires-python"]
