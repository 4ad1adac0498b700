"""★ Your own loop

Goal: write the loop of an agent in about ten lines. Ask the model, and append its message, also the last one. If it has
      calls, run each, append one result for each, and ask again; if it has none, return its text.
Read: nanobot.py:AgentRunner.run, nanobot.py:AgentRunner._act, providers.py:LLMResponse.to_message
Hint: a result is {"role": "tool", "tool_call_id": call.id, "content": result.text}. `await registry.execute(call.name,
      call.arguments)` runs a call. Both are coroutines: without `await` you get no answer, but a promise of one.
"""


async def ask(provider, registry, messages):
    """Ask until there is an answer; returns its text. `messages` holds the whole conversation at the end.

    `await provider.chat(messages, registry.get_definitions())` returns an LLMResponse.
    """
    raise NotImplementedError("write `ask` in ex_01_loop.py")
