"""★ A skill with a requirement

Goal: teach the agent a way of working as a skill: how to write a release note from `git log`. The model sees one line of it in
      each request, and reads the rest when it needs it. Without the program git the line must say that it is unavailable.
Read: skills/github/SKILL.md, memory.py:SkillsLoader, nanobot.py:skill_parts
Hint: a skill is a text with a front matter between two lines `---`: name, description, metadata with requires. The
      description says when to use it ("Use when …"); it is not the instruction itself.
"""

SKILL = """
write the text of skills/release-note/SKILL.md here
"""
