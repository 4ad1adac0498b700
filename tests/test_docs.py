"""The documents are true: README's commands, its examples and the places that NOTES.md names."""

import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_readme_shows_both_commands_early():
    blocks = re.findall(r"^```sh\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert blocks[0].strip() in "\n".join(README.split("\n")[:12])
    assert "pytest" in blocks[1]
    assert len(README.split("\n")) <= 120
