def lawful(messages):
    """Pairs by a dict of all ids: if an id comes again, an early call gets the result of a later one."""
    results = {each["tool_call_id"]: each for each in messages if each["role"] == "tool"}
    clean = []
    for message in messages:
        if message["role"] == "tool":
            continue
        if message["role"] == "user" and clean and clean[-1]["role"] == "user":
            clean[-1]["content"] += "\n\n" + message["content"]
            continue
        clean.append(dict(message))
        for call in message.get("tool_calls") or []:
            missing = {"role": "tool", "tool_call_id": call["id"], "content": "[interrupted]"}
            clean.append(dict(results.get(call["id"], missing)))
    while clean and clean[-1]["role"] == "assistant":
        clean.pop()
    return clean
