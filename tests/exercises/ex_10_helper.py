"""★ Delegating to a helper

Goal: the user asks "How many lines does notes.txt have?". You are the main model, and let a helper do it: give the arguments
      of the tool `spawn`. Its result must be the helper's answer, so that you can tell the user at once.
Read: nanobot.py:SubagentManager.spawn, templates/subagent.md
Hint: the helper sees nothing of the conversation: only the task. Without `wait` the answer comes later, as a message.
"""

SPAWN = {}  # {"task": "…", …}
