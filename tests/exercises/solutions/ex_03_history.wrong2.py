def lawful(messages):
    """Everything right, but the assistant may have the last word."""
    results = {each["tool_call_id"]: each for each in messages if each["role"] == "tool"}
    clean = []
    for message in messages:
        if message["role"] != "tool":
            clean.append(dict(message))
            for call in message.get("tool_calls") or []:
                missing = {"role": "tool", "tool_call_id": call["id"], "content": "[interrupted]"}
                clean.append(dict(results.get(call["id"], missing)))
    return clean
