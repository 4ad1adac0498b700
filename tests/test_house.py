"""The rules of the house: one direction, small files, short functions, lazy imports, useful docstrings."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from statistics import median, quantiles

import pytest

ROOT = Path(__file__).parent.parent
BUDGETS = {"nanobot": 1180, "providers": 1330, "tools": 1490, "memory": 750, "channels": 550}  # lines
LEAVES = [name for name in BUDGETS if name != "nanobot"]
SOURCES = {name: (ROOT / f"{name}.py").read_text(encoding="utf-8") for name in BUDGETS}
TREES = {name: ast.parse(source) for name, source in SOURCES.items()}
FUNCTIONS = {
    f"{name}.{node.name}:{node.lineno}": node
    for name, tree in TREES.items()
    for node in ast.walk(tree)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
}


def imported(tree: ast.Module) -> set[str]:
    names = {each.name for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("name", LEAVES)
def test_a_leaf_imports_no_other_room(name):
    assert not imported(TREES[name]) & set(BUDGETS)


@pytest.mark.parametrize("name", LEAVES)
def test_a_leaf_works_alone_in_an_empty_folder(name, tmp_path):
    (tmp_path / f"{name}.py").write_text(SOURCES[name], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, '.'); import {name}"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_importing_the_kit_loads_the_standard_library_only():
    heavy = ["openai", "tiktoken", "json_repair", "pydantic", "httpx2", "mcp"]
    code = f"import nanobot, sys; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("name", BUDGETS)
def test_no_file_outgrows_its_budget(name):
    assert len(SOURCES[name].splitlines()) <= BUDGETS[name]


def test_the_whole_kit_stays_within_5000_lines():
    assert sum(len(source.splitlines()) for source in SOURCES.values()) <= 5000


def lines_of(node: ast.FunctionDef) -> int:
    return node.end_lineno - node.lineno + 1


def test_functions_are_short():
    sizes = [lines_of(node) for node in FUNCTIONS.values()]
    assert {name: lines_of(node) for name, node in FUNCTIONS.items() if lines_of(node) > 50} == {}
    assert median(sizes) <= 12
    assert quantiles(sizes, n=10)[-1] <= 30


def is_schema(name: str, node: ast.FunctionDef) -> bool:
    """A tool's parameters are its schema: they may be as many as it needs."""
    decorators = " ".join(ast.unparse(each) for each in node.decorator_list)
    return node.name in ("execute", "run") or re.match(r"tool\b", decorators) is not None


def test_functions_take_at_most_six_parameters():
    counts = {
        name: len([each for each in node.args.args + node.args.kwonlyargs if each.arg not in ("self", "cls")])
        for name, node in FUNCTIONS.items()
        if not is_schema(name, node)
    }
    assert {name: count for name, count in counts.items() if count > 6} == {}


def depth(node: ast.AST) -> int:
    """How deep blocks nest; an `elif` is no deeper than its `if`, a function within starts anew."""
    blocks = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try)
    deepest = 0
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            is_elif = field == "orelse" and isinstance(node, ast.If) and isinstance(child, ast.If)
            deepest = max(deepest, depth(child) + (isinstance(child, blocks) and not is_elif))
    return deepest


def test_blocks_nest_at_most_three_deep():
    assert {name: depth(node) for name, node in FUNCTIONS.items() if depth(node) > 3} == {}


@pytest.mark.parametrize("name", BUDGETS)
def test_a_module_says_what_it_is_in_5_to_25_lines(name):
    assert 5 <= len(ast.get_docstring(TREES[name]).splitlines()) <= 25


@pytest.mark.parametrize("name", BUDGETS)
def test_a_file_has_two_to_seven_titled_sections(name):
    if name == "channels":
        return  # one part so far
    assert 2 <= len(re.findall(r"^# ---- .+ ----$", SOURCES[name], re.MULTILINE)) <= 7


def test_every_signature_has_type_hints():
    bare = [
        f"{name}({argument.arg})"
        for name, node in FUNCTIONS.items()
        for argument in node.args.args + node.args.kwonlyargs
        if argument.annotation is None and argument.arg not in ("self", "cls")
    ]
    unsaid = [name for name, node in FUNCTIONS.items() if node.returns is None and node.name != "__init__"]
    assert bare == []
    assert unsaid == []


def test_no_docstring_only_repeats_the_name():
    def words(text: str) -> set[str]:
        return set(re.findall(r"[a-z]+", text.lower().replace("_", " "))) - {"the", "a", "an", "of", "is"}

    echoes = [
        name
        for name, node in FUNCTIONS.items()
        if (text := ast.get_docstring(node)) and words(text.split("\n")[0]) <= words(node.name)
    ]
    assert echoes == []


def test_no_except_is_silent_and_none_is_bare():
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler):
                assert node.type is not None, f"{name}:{node.lineno}"
                assert not all(isinstance(each, ast.Pass) for each in node.body), f"{name}:{node.lineno}"


def test_one_statement_a_line():
    for name, source in SOURCES.items():
        without_strings = re.sub(r'"""(?:.|\n)*?"""|"(?:\\.|[^"\\\n])*"|#.*', '""', source)
        assert not re.search(r";\s*\S", without_strings), name


def test_nothing_but_the_known_files_at_the_top_level():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    if not listed:
        pytest.skip("not a git checkout")
    top = {path.split("/")[0] for path in listed if not path.startswith(".")}
    known = {f"{name}.py" for name in BUDGETS} | {"templates", "skills", "tests"}
    assert top == known | {"NOTES.md", "README.md", "LICENSE", "pyproject.toml"}


def test_the_inline_script_metadata_equals_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    block = re.search(r"^# /// script\n((?:#.*\n)+?)# ///$", SOURCES["nanobot"], re.MULTILINE)
    inline = tomllib.loads(re.sub(r"^# ?", "", block[1], flags=re.MULTILINE))
    assert inline["dependencies"] == project["dependencies"]
    assert inline["requires-python"] == project["requires-python"]


def test_every_prompt_is_a_template_and_every_template_is_used():
    used = set(re.findall(r'template\(\s*"(\w+)"', SOURCES["nanobot"]))
    used |= {"cut_calls", "cut_answer", "cut_thinking"}  # put together from "cut_" and the kind
    files = {path.stem for path in (ROOT / "templates").glob("*.md")}
    first_files = {name for name in files if name[0].isupper()}
    assert files - first_files == used - first_files
