from tools import ToolError, Turn, tool


@tool(read_only=True)
def count_words(path: str, *, turn: Turn) -> str:
    """Count the words of a text file."""
    try:
        return f"{len(turn.path(path).read_text().split())} words"
    except ToolError:
        return "not allowed"
