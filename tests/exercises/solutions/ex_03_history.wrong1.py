def lawful(messages):
    """Drops results without a call, but invents none for a call without a result."""
    ids = {call["id"] for each in messages for call in each.get("tool_calls") or []}
    clean = []
    for message in messages:
        if message["role"] == "user" and clean and clean[-1]["role"] == "user":
            clean[-1]["content"] += "\n\n" + message["content"]
        elif message["role"] != "tool" or message["tool_call_id"] in ids:
            clean.append(dict(message))
    while clean and clean[-1]["role"] == "assistant":
        clean.pop()
    return clean
