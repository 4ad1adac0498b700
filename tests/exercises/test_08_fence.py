"""★★ A tool that respects the fence

Goal: make `count_words` a tool that says how many words a text file has. It must read only what the agent may read: with
      restrictToWorkspace nothing outside of the workspace and the working folder, wherever a link leads, and never the settings file.
      A path that is refused and a file that is missing are a ToolError, which the model reads; for the second in words of your own.
Read: tools.py:Turn.path, tools.py:read_file, tools.py:ToolError
Hint: a parameter `*, turn: Turn` is handed in by the agent; the model does not see it. `turn.path(text)` says where a path
      leads, or raises ToolError with words for the model. A relative path begins in turn.cwd.
"""

import asyncio
import os
import re

from grading import check, exercise

from tools import Tool, ToolRegistry, Turn

LOOK = "tools.py:Turn.path"


def test_the_fence(folder):
    count_words = exercise("08_fence", "count_words")
    check(isinstance(count_words, Tool), "`count_words` under @tool", count_words, "tools.py:tool")
    check(
        len(count_words.description) > 10,
        "a docstring: it is the tool's description",
        count_words.description,
        "tools.py:tool",
    )
    names = list(count_words.parameters["properties"])
    check(
        names == ["path"],
        "a schema with `path` only: `turn` is handed in by the agent",
        names,
        "tools.py:signature_schema",
    )
    field = count_words.parameters["properties"]["path"]
    check(
        field.get("type") == "string",
        "`path: str` in the signature",
        field,
        "tools.py:signature_schema",
    )
    check(
        count_words.read_only,
        "@tool(read_only=True): it changes nothing",
        "read_only=False",
        "tools.py:Tool",
    )
    home, work = folder / "home", folder / "work"
    for place in (home, work):
        place.mkdir(exist_ok=True)
    (work / "a.txt").write_text("one two three\nfour")
    (work / "b.txt").write_text("word " * 12)
    (folder / "diary.txt").write_text("my secret thoughts")
    (work / "config.json").write_text('{"apiKey": "sk-1"}')
    turn = Turn(home, work, restrict=True, secret=(work / "config.json",))

    def run(path):
        os.chdir(home)  # where the program was started is not where the agent works
        return asyncio.run(ToolRegistry([count_words]).execute("count_words", {"path": path}, turn))

    for path, count in [("a.txt", "4"), (str(work / "a.txt"), "4"), ("b.txt", "12")]:
        result = run(path)
        is_right = not result.is_error and count in re.findall(r"\w+", result.text)
        check(
            is_right,
            f"{path} has {count} words; relative paths begin in turn.cwd",
            result.text,
            LOOK,
        )
    outside = ["../diary.txt", str(folder / "diary.txt"), "config.json"]
    try:
        (work / "link.txt").symlink_to(folder / "diary.txt")
        outside.append("link.txt")
    except OSError:
        pass  # Windows without the right to make links
    for path in outside:
        result = run(path)
        why = "it leads outside or holds keys: let the ToolError of turn.path pass"
        check(result.is_error, f"{path} is refused as an error, as {why}", result.text, LOOK)
    missing = run("nothing.txt")
    in_words = missing.is_error and "Errno" not in missing.text
    check(
        in_words,
        "a file that is missing is a ToolError in words of your own",
        missing.text,
        "tools.py:ToolError",
    )
