def lawful(messages):
    results = {each["tool_call_id"]: each for each in messages if each["role"] == "tool"}
    clean = []
    for message in messages:
        if message["role"] == "tool":
            continue  # it comes with its call
        clean.append(dict(message))
        for call in message.get("tool_calls") or []:
            missing = {"role": "tool", "tool_call_id": call["id"], "content": "[interrupted]"}
            clean.append(dict(results.get(call["id"], missing)))
    while clean and clean[-1]["role"] == "assistant":
        clean.pop()
    return clean
