def save_memory(prompt):
    """Puts the fact into the history only."""
    known = [line for line in prompt.split("\n") if "dog" in line or "lives in" in line]
    return {"history_entry": "Ada introduced herself.", "memory_update": "\n".join(known)}
