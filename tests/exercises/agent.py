"""Start the agent with what students have made: a tool, a hook, or the projects of a whole class.

python tests/exercises/agent.py 14 --provider human     the page, with the hook of your exercise 14
python tests/exercises/agent.py 02 --offline            the page, with your tool of exercise 02
python tests/exercises/agent.py FOLDER --offline        the page, with the projects in FOLDER

A project is a folder with tool.py (functions with @tool), rule.md (rules for the offline model) and test_tool.py. It takes
part if its test passes. What follows the first argument goes to `nanobot web`, or to another command if it names one.
"""

import inspect
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import grading  # noqa: E402  (the line above finds it)

SECONDS = 30  # for the test of a project
RULES = grading.ROOT / "templates" / "offline" / "rules.md"
KEPT = (  # a project's rule leaves these sentences to the rules of the kit
    "read a.txt",
    "list the files here",
    "what is 12 * 7",
    "how many lines are in a.txt",
    "hello",
    "an odd sentence without a rule",
)
GREETING = "## greet"  # the rules of a class stand before this one


def tools_and_hooks(names: dict) -> tuple[list, list]:
    """The tools in a program's names, and an object of each hook class that needs no arguments."""
    from nanobot import AgentHook
    from tools import Tool

    tools = [each for each in names.values() if isinstance(each, Tool)]
    hooks = []
    for each in names.values():
        if inspect.isclass(each) and issubclass(each, AgentHook) and each is not AgentHook:
            needed = inspect.signature(each).parameters.values()
            if all(one.default is not one.empty for one in needed):
                hooks.append(each())
            else:
                print(f"{each.__name__} needs arguments: give them default values.")
    return tools, hooks


def with_rules(rules: str, names: list[str]) -> str:
    """The text of rules.md with these rules before the rule that greets; they may name these tools."""
    text = RULES.read_text(encoding="utf-8")
    for name in names:
        text = text.replace("\n<tool>: ", f"\n<tool>: {name}|", 1)
    before, greet, after = text.partition(GREETING)
    return f"{before}{rules}\n\n{greet}{after}"


def problem_of(rules: str, names: list[str]) -> str:
    """What is wrong with these rules, `rule.md, line 2: …`, or ""."""
    from providers import Rules

    for name in re.findall(r"(?m)(?:^|\| )tool: *(\S+)", rules):
        if not re.search(rf"(?m)^<tool>: (.*\|)?{re.escape(name)}(\||$)", with_rules("", names)):
            return f"rule.md names the tool {name}; tool.py has {', '.join(names)}"
    for problem in Rules(with_rules(rules, names)).problems:
        number, text = re.search(r"line (\d+): (.*)", problem).groups()
        first = RULES.read_text(encoding="utf-8").partition(GREETING)[0].count("\n")
        return f"rule.md, line {int(number) - first}: {text}"
    return ""


def title_for(sentence: str, rules: Any) -> str:
    from providers import Plan

    fits = rules.matches(Plan(None, rules).masked(sentence))
    return fits[0][0].get("title", "") if fits else ""


def spoken(sentence: str) -> str:
    """One way to say a sentence of a rule: `(roll|throw) [a] die with <number> sides` → `roll die with 5 sides`"""
    said, before = sentence.partition(" | ")[0], ""
    while said != before:  # the innermost brackets first
        before = said
        said = re.sub(r"\[[^][()]*\]", "", said)
        said = re.sub(r"\(([^][()|]*)[^][()]*\)", r"\1", said)
    examples = dict(re.findall(r"(?m)^<(\w+)> \((.+?)\): ", RULES.read_text(encoding="utf-8")))
    said = re.sub(r"<(\w+)>", lambda word: examples.get(word[1], "something"), said)
    return " ".join(said.replace("...", "").split())


def clash(project: dict, others: list[dict]) -> str:
    """Which sentence of the kit or of another project goes to this project's rule, or the reverse; or ""."""
    from providers import Rules

    kit, own = Rules(with_rules("", [])), Rules(with_rules(project["rules"], project["tools"]))
    for sentence in KEPT:
        if title_for(sentence, own) != title_for(sentence, kit):
            return f"its rule takes `{sentence}`, too: make its sentences narrower"
    for other in others:
        theirs = Rules(with_rules(other["rules"], other["tools"]))
        for sentence in [*said_to(own, project), *said_to(theirs, other)]:
            if takes(own, project, sentence) and takes(theirs, other, sentence):
                return f"its rule and that of {other['name']} both take `{sentence}`: change yours"
    return ""


def takes(rules: Any, project: dict, sentence: str) -> bool:
    """Does a rule of this project fit the sentence? `rules` are those of the kit and of the project."""
    return f"## {title_for(sentence, rules)}" in project["rules"].splitlines()


def said_to(rules: Any, project: dict) -> list[str]:
    """One way to say each sentence of a project's rules, of those that its rules understand."""
    said = [spoken(line) for line in re.findall(r"(?m)^- (.+)", project["rules"])]
    return [sentence for sentence in said if takes(rules, project, sentence)]


# ---- Projects ----


def check_project(folder: Path) -> dict:
    """Run the test of a project. Returns its tools' names. Raises Wrong, and whatever the test raises."""
    sys.path[:0] = [str(folder)]
    for name in ("tool.py", "rule.md", "test_tool.py"):
        if not (folder / name).exists():
            raise grading.Wrong(f"{name} is missing")
    tools, _ = tools_and_hooks(runpy.run_path(str(folder / "tool.py")))
    if not tools:
        raise grading.Wrong("tool.py has no function with @tool")
    names = [tool.name for tool in tools]
    problem = problem_of((folder / "rule.md").read_text(encoding="utf-8"), names)
    if problem:
        raise grading.Wrong(problem)
    tests = runpy.run_path(str(folder / "test_tool.py"))
    to_call = [tests[name] for name in tests if name.startswith("test_")]
    if not to_call:
        raise grading.Wrong("test_tool.py has no function whose name begins with test_")
    for test in to_call:
        test()
    return {"tools": names, "tests": len(to_call)}


def check_apart(folder: Path, sandbox: Any) -> dict:
    """`check_project` in a process of its own, in a copy of the folder: a test may open files that are
    beside it. {"tools": ["roll"], "tests": 1} or {"problem": "…"}"""
    os.environ["NANOBOT_EXERCISES"] = str(folder)
    kept = [name for name in grading.KEPT_VARIABLES.split() if name in os.environ]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        report = Path(place, "report.json")
        copy = shutil.copytree(folder, Path(place, folder.name))
        command = [sys.executable, Path(__file__).resolve(), "--check", copy, report]
        try:
            subprocess.run(
                [*(sandbox(place) if sandbox else []), *command],
                cwd=place,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env={name: os.environ[name] for name in kept},
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            return {
                "problem": f"its test still ran after {SECONDS} s: is there a loop without end?"
            }
        if not report.exists():
            return {"problem": "its program ended without a result"}
        return json.loads(report.read_text(encoding="utf-8"))


def check_and_report(folder: Path, report: str) -> None:
    os.chdir(folder)  # the sandbox begins in the folder above
    try:
        found = check_project(folder)
    except BaseException as problem:  # SystemExit, too
        line = grading.told(problem, folder / "test_tool.py")
        found = {"problem": str(problem) if isinstance(problem, grading.Wrong) else line}
    Path(report).write_text(json.dumps(found), encoding="utf-8")
    os._exit(0)  # threads of the project may go on without end


def assemble(folder: Path) -> tuple[list, str]:
    """The tools and the rules of all projects whose test passes."""
    from exercises import sandbox_here

    projects = sorted(each for each in folder.iterdir() if (each / "tool.py").exists())
    if not projects:
        print(f"{folder} has no projects: a project is a folder with tool.py in it.")
        raise SystemExit(2)
    sandbox, how = sandbox_here()
    print(f"The tests of {len(projects)} project(s) run {how}.", flush=True)
    tools, accepted = [], []
    for project in projects:
        found = check_apart(project.resolve(), sandbox)
        known = [name for name in found.get("tools", []) if name in [tool.name for tool in tools]]
        if known:
            found = {"problem": f"another project has a tool {known[0]}, too: rename yours"}
        if "problem" not in found:
            found["name"] = project.name
            found["rules"] = (project / "rule.md").read_text(encoding="utf-8").strip()
            found["problem"] = clash(found, accepted)
        if found["problem"]:
            print(f"✗ {project.name} is left out: {found['problem']}", flush=True)
            continue
        print(
            f"✓ {project.name}: {', '.join(found['tools'])}; {found['tests']} tests passed",
            flush=True,
        )
        sys.path.insert(0, str(project))
        tools += tools_and_hooks(runpy.run_path(str(project / "tool.py")))[0]
        accepted.append(found)
    print("Their tools now run in the agent, with your rights and without a sandbox.", flush=True)
    return tools, "\n\n".join(found["rules"] for found in accepted)


# ---- The agent ----


def start(tools: list, hooks: list, rules: str, words: list[str]) -> int:
    """Run `nanobot web` (or the command in `words`) with these tools, hooks and rules."""
    import nanobot
    from providers import OfflineProvider, Rules

    class ClassLoop(nanobot.AgentLoop):
        def __init__(self, *arguments: Any, **more: Any):
            super().__init__(*arguments, **more)
            for each in tools:
                self.tools.register(each)
            self.hooks += hooks
            if isinstance(self.provider, OfflineProvider):
                self.provider.rules = Rules(with_rules(rules, [tool.name for tool in tools]))

    nanobot.AgentLoop = ClassLoop  # the commands make their agent with this name
    is_command = words[:1] and words[0] in nanobot.COMMAND_LINE
    return nanobot.main(words if is_command else ["web", *words])


def main(words: list[str]) -> int:
    sys.stdout.reconfigure(encoding="utf-8")
    if not words:
        print(__doc__)
        return 2
    first, *rest = words
    graders = grading.graders()
    number = first.zfill(2)
    if number not in graders:
        if not Path(first).is_dir():
            print(f"{first!r} is neither the number of an exercise nor a folder", file=sys.stderr)
            return 2
        tools, rules = assemble(Path(first))
        return start(tools, [], rules, rest)
    file = grading.file_of(graders[number].stem.removeprefix("test_"))
    names = runpy.run_path(str(file))
    tools, hooks = tools_and_hooks(names)
    made = [tool.name for tool in tools] + [type(hook).__name__ for hook in hooks]
    print(f"{file.name}: {', '.join(made) or 'no tool and no hook'}", flush=True)
    return start(tools, hooks, names.get("RULE", ""), rest)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--check"]:
        check_and_report(Path(sys.argv[2]), sys.argv[3])
    sys.exit(main(sys.argv[1:]))
