from tools import ToolError, Turn, tool


@tool(read_only=True)
def count_words(path: str, *, turn: Turn) -> str:
    """Count the words of a text file."""
    real = turn.path(path)
    try:
        return f"{len(real.read_text(errors='replace').split())} words"
    except OSError as problem:
        raise ToolError(f"Cannot read {real}: {problem.strerror}") from None
