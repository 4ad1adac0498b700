import asyncio
import os

from grading import check, exercise, file_of

from tools import Tool, ToolRegistry, Turn

LOOK = "tools.py:Turn.path"


def test_the_fence(folder):
    count_words = exercise("08_fence").count_words
    if "raise NotImplementedError" in file_of("08_fence").read_text(encoding="utf-8"):
        raise NotImplementedError("make `count_words` a tool in ex_08_fence.py")
    check(isinstance(count_words, Tool), "`count_words` under @tool", count_words, "tools.py:tool")
    check(len(count_words.description) > 10, "a docstring: it is the tool's description", count_words.description, "tools.py:tool")
    names = list(count_words.parameters["properties"])
    check(names == ["path"], "a schema with `path` only: `turn` is handed in by the agent", names, "tools.py:signature_schema")
    home, work = folder / "home", folder / "work"
    for place in (home, work):
        place.mkdir()
    (work / "a.txt").write_text("one two three\nfour")
    (folder / "diary.txt").write_text("my secret thoughts")
    (work / "config.json").write_text('{"apiKey": "sk-1"}')
    turn = Turn(home, work, restrict=True, secret=(work / "config.json",))

    def run(path):
        os.chdir(home)  # where the program was started is not where the agent works
        return asyncio.run(ToolRegistry([count_words]).execute("count_words", {"path": path}, turn))

    for path in ("a.txt", str(work / "a.txt")):
        result = run(path)
        check(not result.is_error and "4" in result.text, f"{path} has 4 words; relative paths begin in turn.cwd", result.text, LOOK)
    outside = ["../diary.txt", str(folder / "diary.txt"), "config.json"]
    try:
        (work / "link.txt").symlink_to(folder / "diary.txt")
        outside.append("link.txt")
    except OSError:
        pass  # Windows without the right to make links
    for path in outside:
        result = run(path)
        check(result.is_error, f"{path} is refused: it leads outside or holds keys", result.text, LOOK)
    missing = run("nothing.txt")
    in_words = missing.is_error and "Errno" not in missing.text
    check(in_words, "a file that is missing is a ToolError in words of your own", missing.text, "tools.py:ToolError")
