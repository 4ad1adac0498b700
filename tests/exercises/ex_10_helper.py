"""★ Delegating to a helper

Goal: the user asks "How many lines does notes.txt have?". You are the main model, and let a helper do it: give the arguments
      of the tool `spawn`, so that the answer can stand in your very next message.
Read: nanobot.py:SubagentManager.spawn, templates/subagent.md
Hint: the helper sees nothing of the conversation: only the task. Without `wait` its result comes later, as a message.
"""

SPAWN = {}  # {"task": "…", …}
