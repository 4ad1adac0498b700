def explain(lines):
    """Takes an `ended` of an earlier turn for one of this turn."""
    messages = [line for line in lines if "n" in line]
    if any(line.get("mark") == "ended" for line in lines):
        return "ended"
    if not messages or messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
        return "nothing"
    asked = {call["id"] for line in messages for call in line.get("tool_calls") or []}
    answered = {line["tool_call_id"] for line in messages if line["role"] == "tool"}
    return "working" if asked - answered else "asking"
