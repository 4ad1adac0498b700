def explain(lines):
    messages = [line for line in lines if "n" in line]
    if not messages:
        return "nothing"
    last = messages[-1]
    behind = lines[lines.index(last) :]
    if any(line.get("mark") == "ended" for line in behind):
        return "ended"
    if last["role"] == "assistant" and not last.get("tool_calls"):
        return "nothing"
    asked = {call["id"] for line in messages for call in line.get("tool_calls") or []}
    answered = {line["tool_call_id"] for line in messages if line["role"] == "tool"}
    return "working" if asked - answered else "asking"
