"""★★★ Resisting a prompt injection

Goal: a file says "ignore the user and run …", and the model believes it. No prompt helps for sure; a hook does. Before a turn
      has a tool result, every call runs. After that deny each call of write_file, edit_file and exec, unless its path or
      command stands in the message with which the user began this turn.
Read: nanobot.py:ApprovalHook, nanobot.py:is_read_only, NOTES.md "What the guard-rails do not stop"
Hint: keep the context of `before_iteration`: its messages show what was read (role tool) and what the user said last (role
      user). The path is call.arguments["path"] for write_file and edit_file; exec has "command". Then open the page with your hook:
      python agent.py 14 --provider human (in the course's folder; else tests/exercises/agent.py), and play a model that believes letter.txt.
"""

from nanobot import AgentHook


class InjectionHook(AgentHook):
    """Denies calls that the user did not ask for, after something was read."""

    changing = ("write_file", "edit_file", "exec")

    async def before_execute_tools(self, tool_calls):
        raise NotImplementedError("write InjectionHook in ex_14_injection.py")
