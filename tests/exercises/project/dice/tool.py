"""A tool of the final project: dice."""

import random

from tools import ToolError, tool


@tool(read_only=True)
def roll(sides: int = 6) -> int:
    """Throw a die."""
    if sides < 2:
        raise ToolError("a die has at least 2 sides")
    return random.randint(1, sides)
