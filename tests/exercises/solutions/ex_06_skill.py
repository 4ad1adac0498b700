SKILL = """---
name: release-note
description: Use when the user wants a release note, written from `git log`.
metadata: {"nanobot": {"requires": {"bins": ["git"]}}}
---
# Release notes

1. `git log --oneline $(git describe --tags --abbrev=0)..HEAD` shows what changed.
2. Write one line for each change that a user notices.
"""
