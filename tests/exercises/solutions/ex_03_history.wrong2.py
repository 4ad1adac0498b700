def lawful(messages):
    """Everything right, but the assistant may have the last word."""
    clean = []
    for place, message in enumerate(messages):
        if message["role"] == "tool":
            continue  # it comes with its call
        if message["role"] == "user" and clean and clean[-1]["role"] == "user":
            clean[-1]["content"] += "\n\n" + message["content"]
            continue
        clean.append(dict(message))
        results = results_after(messages, place)
        for call in message.get("tool_calls") or []:
            missing = {"role": "tool", "tool_call_id": call["id"], "content": "[interrupted]"}
            clean.append(dict(results.get(call["id"], missing)))
    return clean


def results_after(messages, place):
    """The results between this message and the next one of another kind, by id."""
    results = {}
    for message in messages[place + 1 :]:
        if message["role"] != "tool":
            break
        results[message["tool_call_id"]] = message
    return results
