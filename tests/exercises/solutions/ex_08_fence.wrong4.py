from tools import Turn, tool


@tool(read_only=True)
def count_words(path, *, turn: Turn) -> str:
    """Count the words of a text file."""
    return f"{len(turn.path(path).read_text().split())} words"
