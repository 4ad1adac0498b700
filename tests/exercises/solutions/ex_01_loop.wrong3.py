async def ask(provider, registry, messages):
    """Appends the last answer only: the results stand behind no call."""
    while True:
        response = await provider.chat(messages, registry.get_definitions())
        if not response.has_tool_calls:
            messages.append(response.to_message())
            return response.content
        for call in response.tool_calls:
            result = await registry.execute(call.name, call.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result.text})
