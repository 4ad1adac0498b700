"""★★ A tool that respects the fence

Goal: make `count_words` a tool that says how many words a text file has. It must read only what the agent may read: with
      restrictToWorkspace nothing outside of the workspace and the working folder, wherever a link leads, and never the settings file.
      A path that is refused and a file that is missing are a ToolError, which the model reads; for the second in words of your own.
Read: tools.py:Turn.path, tools.py:read_file, tools.py:ToolError
Hint: a parameter `*, turn: Turn` is handed in by the agent; the model does not see it. `turn.path(text)` says where a path
      leads, or raises ToolError with words for the model. A relative path begins in turn.cwd.
"""

from tools import ToolError, Turn, tool  # noqa: F401


def count_words(path):
    raise NotImplementedError("make `count_words` a tool in ex_08_fence.py")
