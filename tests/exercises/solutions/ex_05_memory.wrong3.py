def save_memory(prompt):
    """Keeps the whole conversation."""
    return {
        "history_entry": "Ada introduced herself and has a new bicycle.",
        "memory_update": prompt,
    }
