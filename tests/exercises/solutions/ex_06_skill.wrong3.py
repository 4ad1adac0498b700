SKILL = """---
name: release-note
description: Use when the user wants a release note, written from `git log`.
metadata: {"nanobot": {"requires": {"bins": ["git"]}}}
---
Write one line for each change that a user notices.
"""
