from pathlib import Path

from tools import ToolError, Turn, tool


@tool(read_only=True)
def count_words(path: str, *, turn: Turn) -> str:
    """Count the words of a text file."""
    real = Path(turn.cwd, path)
    if ".." in path or not str(real).startswith(str(turn.cwd)):
        raise ToolError(f"{path} is outside.")
    try:
        return f"{len(real.read_text().split())} words"
    except OSError as problem:
        raise ToolError(str(problem)) from None
