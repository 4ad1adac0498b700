SKILL = """---
name: release-note
description: Use when the user wants a release note.
always: true
metadata: {"nanobot": {"requires": {"bins": ["git"]}}}
---
Look at `git log` and write one line for each change.
"""
