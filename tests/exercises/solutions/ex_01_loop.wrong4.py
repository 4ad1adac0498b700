async def ask(provider, registry, messages):
    """Has no `return` in the loop."""
    answer = None
    while True:
        response = await provider.chat(messages, registry.get_definitions())
        messages.append(response.to_message())
        if not response.has_tool_calls:
            answer = response.content
        for call in response.tool_calls:
            result = await registry.execute(call.name, call.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result.text})
    return answer
