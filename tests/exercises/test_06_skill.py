"""★ A skill with a requirement

Goal: teach the agent a way of working as a skill: how to write a release note from `git log`. The model sees one line of it in
      each request, and reads the rest when it needs it. Without the program git the line must say that it is unavailable.
Read: skills/github/SKILL.md, memory.py:SkillsLoader, nanobot.py:skill_parts
Hint: a skill is a text with a front matter between two lines `---`: name, description, metadata with requires. The
      description says when to use it ("Use when …"); it is not the instruction itself.
"""

import os

from grading import check, exercise, settings

from memory import skill_of
from nanobot import AgentLoop

LOOK = "memory.py:skill_of"


def prompt_lines(folder, path):
    """The lines of the system prompt if PATH is this folder."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = str(path)
    try:
        loop = AgentLoop(settings(folder))
        prompt = loop.context.system_prompt(loop.turn("cli:direct"))
    finally:
        os.environ["PATH"] = before
    return prompt.split("\n")


def line_about_it(lines):
    """`- release-note: …`, or "" if it is not in the list of skills."""
    return next((line for line in lines if line.startswith("- release-note:")), "")


def test_the_skill(folder):
    text = exercise("06_skill", "SKILL").lstrip("\n")
    if text.startswith("write the text"):
        raise NotImplementedError("write SKILL in ex_06_skill.py")
    file = folder / "home" / "skills" / "release-note" / "SKILL.md"
    file.parent.mkdir(parents=True)
    file.write_text(text, encoding="utf-8")
    programs, nothing = folder / "bin", folder / "nothing"
    programs.mkdir()
    nothing.mkdir()
    for name in ("git", "git.exe"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    lines = prompt_lines(folder, programs)
    shown = line_about_it(lines)
    check(
        "## release-note" not in lines,
        "one line in each request, not the instructions",
        "the prompt has all of it (always)",
        "nanobot.py:skill_parts",
    )
    check(
        shown != "",
        "a line about release-note in the system prompt (name: release-note)",
        "there is none",
        LOOK,
    )
    says_when = any(words in shown.lower() for words in ("use when", "use to", "use if"))
    check(
        says_when,
        'a description that says when to use it ("Use when …")',
        shown,
        "skills/github/SKILL.md",
    )
    check("unavailable" not in shown, "with git in the PATH it is available", shown, LOOK)
    missing = line_about_it(prompt_lines(folder, nothing))
    check(
        "needs program git" in missing,
        "without git: [unavailable: needs program git]",
        missing,
        "skills/tmux/SKILL.md",
    )
    body = skill_of(file, file.read_bytes()).text
    check(
        "git log" in body,
        "instructions below the front matter that name `git log`",
        body[:200],
        "skills/github/SKILL.md",
    )
