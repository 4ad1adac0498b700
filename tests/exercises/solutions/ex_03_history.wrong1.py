def lawful(messages):
    """Drops results without a call, but invents none for a call without a result."""
    ids = {call["id"] for each in messages for call in each.get("tool_calls") or []}
    clean = [
        dict(each) for each in messages if each["role"] != "tool" or each["tool_call_id"] in ids
    ]
    while clean and clean[-1]["role"] == "assistant":
        clean.pop()
    return clean
