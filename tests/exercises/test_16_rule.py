"""★ A rule for the offline model

Goal: teach the offline model to count: "how many characters are in notes.txt?" and "count the characters of notes.txt" run `wc -m` on
      that file. Other sentences about the file still go to their own rules.
Read: templates/offline/rules.md (its first page says how a rule is written), providers.py:OfflineProvider
Hint: copy the rule that comes nearest and change it. <a_file> stands for the name of a file. A rule that comes first wins; the
      grader puts yours in front of "## greet".
"""

import os
import re
import shutil
import subprocess
import sys

from grading import ROOT, check, exercise, file_of

LOOK = "templates/offline/rules.md"


def test_the_rule(folder):
    rule = exercise("16_rule", "RULE").strip()
    if rule.startswith("write the rule"):
        raise NotImplementedError("write RULE in ex_16_rule.py")
    kinds = ("## ", "- ", "tool:")
    missing = [
        kind for kind in kinds if not any(line.startswith(kind) for line in rule.split("\n"))
    ]
    check(
        not missing,
        f"lines that begin with {', '.join(kinds)}",
        f"no line that begins with {', '.join(missing)}",
        LOOK,
    )
    kit = folder / "kit"
    kit.mkdir()
    for file in ROOT.glob("*.py"):
        shutil.copy(file, kit)
    for name in ("templates", "skills"):
        shutil.copytree(ROOT / name, kit / name)
    rules = kit / "templates" / "offline" / "rules.md"
    before, greet, after = rules.read_text(encoding="utf-8").partition("## greet")
    rules.write_text(f"{before}{rule}\n\n{greet}{after}", encoding="utf-8")
    (folder / "notes.txt").write_text("one two three four five\nsix seven\n")
    (folder / "b.txt").write_text("eight\n")
    (folder / "bash.exe").touch()  # on Windows without bash, the call is made, and fails

    def ask(text):
        command = [
            sys.executable,
            str(kit / "nanobot.py"),
            "agent",
            "--offline",
            "--workspace",
            str(folder / "home"),
            "-m",
            text,
        ]
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            encoding="utf-8",
            stdin=subprocess.DEVNULL,
            env={
                **os.environ,
                "HOME": str(folder),
                "USERPROFILE": str(folder),
                "PYTHONUTF8": "1",
                "PATH": os.environ["PATH"] + os.pathsep + str(folder),
            },
        )
        return done.stdout + done.stderr

    first = ask("how many characters are in notes.txt?")
    mistake = re.search(r"rules\.md, line (\d+): (.*)", first)
    if mistake:
        written = file_of("16_rule").read_text(encoding="utf-8")
        above = written.partition(rule)[0].count("\n") - before.count("\n")
        said = mistake[2].replace("write <files> or <text>", "a file's name is <a_file>")
        place = f"ex_16_rule.py, line {int(mistake[1]) + above}"
        check(False, "a rule without a mistake", f"{place}: {said}", LOOK)
    check("wc -m" in first, "`how many characters are in notes.txt?` runs wc -m", first, LOOK)
    if shutil.which("wc") and shutil.which("bash"):
        check("34" in first, "the number, 34", first, LOOK)
    for name in ("notes.txt", "b.txt"):
        other = ask(f"count the characters of {name}")
        check(
            f"wc -m {name}" in other.replace("-- ", ""),
            f"`count the characters of {name}` runs wc -m {name}: the command has <a_file>",
            other,
            LOOK,
        )
    reading = ask("read notes.txt")
    check(
        "six seven" in reading and "wc -m" not in reading,
        "`read notes.txt` still reads the file",
        reading,
        LOOK,
    )
    for text in ("how many lines are in notes.txt?", "count the lines of notes.txt"):
        lines = ask(text)
        check("wc -m" not in lines, f"`{text}` still goes to its own rule", lines, LOOK)
