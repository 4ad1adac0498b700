from pathlib import Path

from tools import Turn, tool


@tool(read_only=True)
def count_words(path: str, *, turn: Turn) -> str:
    """Count the words of a text file."""
    turn.path(path)
    return f"{len(Path(path).read_text().split())} words"
