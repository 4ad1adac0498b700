"""What students write, and what the grader must say of it; tests/test_exercises.py checks each row."""

import shutil
from pathlib import Path

SOLUTIONS = Path(__file__).parent / "solutions"


def code_of(name: str) -> str:
    """The text of a solution, `01_loop`, or of a mistake, `01_loop.wrong3`."""
    return (SOLUTIONS / f"ex_{name}.py").read_text(encoding="utf-8")


TASK = "def save_memory(prompt):\n    return "
ROW = "from providers import Remedy\nREMEDY = "
RULE = code_of("16_rule")
LOOP = code_of("01_loop")
FENCE = code_of("08_fence")
CHANNEL = code_of("12_channel")
MESSAGES = [  # exercise, what a student writes, what the grader must say of it
    (
        "01_loop",
        code_of("01_loop.wrong3"),
        "request 2 with the messages ['user', 'assistant', 'tool', 'tool']: results mean",
    ),
    (
        "01_loop",
        code_of("01_loop.wrong4"),
        "yours has asked 20 times, and the script has three answers",
    ),
    (
        "01_loop",
        LOOP.replace("response.to_message()", "response"),
        "response.to_message() makes one",
    ),
    (
        "01_loop",
        LOOP.replace("call.name,", "call.nam,"),
        "AttributeError in ex_01_loop.py, line 8: ",
    ),
    ("01_loop", LOOP.replace("def ask", "def aks"), "`ask` is missing in ex_01_loop.py"),
    (
        "01_loop",
        LOOP + "    )",
        "SyntaxError while the grader used your ex_01_loop.py: unmatched ')' (ex_01_loop.py, line 10)",
    ),
    (
        "01_loop",
        "import asyncio\n\nasync def ask(*_):\n    raise asyncio.CancelledError\n",
        "CancelledError in ex_01_loop.py, line 4",
    ),
    ("01_loop", LOOP.replace("await p", "p"), "`await` is missing before the call of chat(…)"),
    ("01_loop", LOOP.replace("await r", "r"), "`await` is missing before the call of execute(…)"),
    ("01_loop", "def ask(*_):\n    return 1\n", "must begin with `async def`, not `def`"),
    (
        "03_history",
        code_of("03_history.wrong3"),
        "expected: each call keeps the result of its own turn, also if a later turn uses its id again",
    ),
    (
        "03_history",
        code_of("03_history.wrong4"),
        "messages 0 and 1 are both the user's: make one of them",
    ),
    ("04_healing", code_of("04_healing.wrong4"), "expected: an answer also with other numbers: "),
    (
        "04_healing",
        ROW + '("of 64", "changed", dict)',
        "expected: REMEDY = Remedy(complaint, notice, change)",
    ),
    ("04_healing", ROW + 'Remedy("of 64", "", lambda body: body)', "expected: a notice"),
    (
        "04_healing",
        ROW
        + 'Remedy("of (64", "changed", lambda body: {**body, "max_tokens": body["max_tokens"] // 64 * 64})',
        "while the grader used your ex_04_healing.py: missing ), unterminated subpattern",
    ),
    (
        "05_memory",
        TASK + "None",
        'expected: a dict: {"history_entry": "…", "memory_update": "…"}\ngot:      None',
    ),
    (
        "05_memory",
        TASK + '{"history_entry": "Ada said hello", "memory_update": ["Ada"]}',
        "expected: a text as memory_update\ngot:      ['Ada']",
    ),
    ("08_fence", FENCE.replace("path: str", "path"), "expected: `path: str`"),
    ("08_fence", FENCE.replace("(read_only=True)", ""), "expected: @tool(read_only=True)"),
    (
        "08_fence",
        code_of("08_fence.wrong3"),
        "../diary.txt is refused as an error",
    ),
    (
        "06_skill",
        code_of("06_skill.wrong2"),
        "expected: one line in each request, not the instructions",
    ),
    (
        "06_skill",
        code_of("06_skill.wrong3"),
        "expected: instructions below the front matter that name `git log`",
    ),
    (
        "12_channel",
        CHANNEL.replace("await bus.publish", "await bus.publsh"),
        "logged:   folder: the channel has stopped listening: ",
    ),
    (
        "15_model",
        code_of("15_model").replace(
            '    "poem.txt has 4 lines; the number is in count.txt.",\n', ""
        ),
        "expected: a last answer without a call: a text for the user, which ends the turn",
    ),
    (
        "15_model",
        code_of("15_model").replace("poem.txt has 4 lines; the number is in count.txt.", ""),
        "expected: a last answer without a call: a text for the user, which ends the turn",
    ),
    (
        "15_model",
        "ANSWERS = ['read_file(poem.txt)', 'It has 4 lines.']\n",
        'expected: a call like read_file("poem.txt")',
    ),
    (
        "16_rule",
        RULE.replace("are in|does) <a_file>", "are in|does) <fiel>"),
        "ex_16_rule.py, line 3: <fiel> is not defined above: a file's name is <a_file>",
    ),
    (
        "16_rule",
        RULE.replace("wc -m <a_file>", "wc -m notes.txt"),
        "expected: `count the characters of b.txt` runs wc -m b.txt: the command has <a_file>",
    ),
    (
        "16_rule",
        code_of("16_rule.wrong3"),
        "expected: `how many lines are in notes.txt?` still goes to its own rule",
    ),
]

# ---- Projects ----

DICE_RULE = (SOLUTIONS.parent / "project" / "dice" / "rule.md").read_text(encoding="utf-8")
TOOL = '''from tools import tool


@tool
def {0}() -> str:
    """Say the name."""
    return "{0}"
'''
PASSES = "def test_it():\n    assert True\n"
FAILS = "def test_it():\n    open('grades.csv').close()\n    assert 1 == 2\n"
GREEDY = "## say all\n- ...\ntool: greedy\n"
TWIN = "## throw\n- throw [a] dice with <number> sides\ntool: twin\n"
TYPO = "## hop\n- hop <fiel>\ntool: typo\n"
PROJECTS = [  # a project that is left out, its rule and its test, what is said of it
    ("bad", DICE_RULE.replace("roll\n", "bad\n"), FAILS, "test_tool.py, line 3: assert 1 == 2"),
    ("old_rule", DICE_RULE, PASSES, "rule.md names the tool roll; tool.py has old_rule"),
    ("greedy", GREEDY, PASSES, "its rule takes `read a.txt`, too"),
    ("twin", TWIN, PASSES, "its rule and that of dice both take `throw dice with 5 sides`"),
    ("typo", TYPO, PASSES, "rule.md, line 2: <fiel> is not defined"),
]


def lay_out_projects(dice: Path, folder: Path) -> dict[str, str]:
    """Copy the dice into the folder, and write the projects beside it: {"bad": what is said of it, …}"""
    shutil.copytree(dice, folder / "dice")
    for name, rule, test, _ in PROJECTS:
        (folder / name).mkdir()
        files = {"tool.py": TOOL.format(name), "rule.md": rule, "test_tool.py": test}
        for file, text in {**files, "grades.csv": ""}.items():
            (folder / name / file).write_text(text, encoding="utf-8")
    return {name: problem for name, _, _, problem in PROJECTS}
