def explain(lines):
    """Looks at the last line only."""
    last = lines[-1]
    if last.get("mark") == "ended":
        return "ended"
    if last.get("tool_calls"):
        return "working"
    return "asking" if last.get("role") in ("user", "tool") else "nothing"
