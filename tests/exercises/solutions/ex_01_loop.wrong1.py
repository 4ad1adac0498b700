async def ask(provider, registry, messages):
    """Runs only the first call of each answer."""
    while True:
        response = await provider.chat(messages, registry.get_definitions())
        messages.append(response.to_message())
        if not response.has_tool_calls:
            return response.content
        call = response.tool_calls[0]
        result = await registry.execute(call.name, call.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result.text})
