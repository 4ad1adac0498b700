"""★★ A lawful history

Goal: endpoints answer 400 if a call has no result, if a result has no call, if two user messages stand in a row, or if the
      list ends with the assistant. Write `lawful`: it takes a damaged conversation and returns one that every endpoint
      accepts. What users said is never lost.
Read: providers.py:legal (the docstring has an example), NOTES.md "What the journal can do"
Hint: go through the list once. Behind an assistant message with calls comes one result for each call, in the order of the
      calls; if the history has none, put {"role": "tool", "tool_call_id": …, "content": "[interrupted]"}. Some models use
      the same ids again in each turn: a result belongs to the nearest message with calls before it.
"""


def lawful(messages):
    """Return a lawful copy of `messages` (user, assistant and tool messages; no system message)."""
    raise NotImplementedError("write `lawful` in ex_03_history.py")
