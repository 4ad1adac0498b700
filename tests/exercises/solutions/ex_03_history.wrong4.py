def lawful(messages):
    """Leaves two user messages in a row."""
    clean = []
    for place, message in enumerate(messages):
        if message["role"] == "tool":
            continue
        clean.append(dict(message))
        results = results_after(messages, place)
        for call in message.get("tool_calls") or []:
            missing = {"role": "tool", "tool_call_id": call["id"], "content": "[interrupted]"}
            clean.append(dict(results.get(call["id"], missing)))
    while clean and clean[-1]["role"] == "assistant":
        clean.pop()
    return clean


def results_after(messages, place):
    results = {}
    for message in messages[place + 1 :]:
        if message["role"] != "tool":
            break
        results[message["tool_call_id"]] = message
    return results
