"""★★ A fact that survives /new

Goal: after `/new` the model no longer gets the old conversation; what it still knows comes from MEMORY.md. When a conversation
      is saved, the model is asked to call `save_memory`. Be that model: return the arguments of the call, so that the agent
      knows in the next conversation that the user is called Ada, and still knows what it knew before.
Read: memory.py:Consolidator, memory.py:MemoryStore, templates/consolidate.md
Hint: `prompt` is the whole text that the model is asked with: today's MEMORY.md below a line `# MEMORY.md`, the conversation
      below `# Conversation`. Two keys count here: history_entry says in a line what happened, memory_update is the complete
      new text of MEMORY.md, with facts only. Leave out the time and the summary that the template also asks for.
"""


def save_memory(prompt):
    """Return {"history_entry": "…", "memory_update": "…"} for the conversation in `prompt`."""
    raise NotImplementedError("write `save_memory` in ex_05_memory.py")
