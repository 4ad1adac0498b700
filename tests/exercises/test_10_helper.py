"""★ Delegating to a helper

Goal: the user asks "How many lines does notes.txt have?". You are the main model, and let a helper do it: give the arguments
      of the tool `spawn`. Its result must be the helper's answer, so that you can tell the user at once.
Read: nanobot.py:SubagentManager.spawn, templates/subagent.md
Hint: the helper sees nothing of the conversation: only the task. Without `wait` the answer comes later, as a message.
"""

import re

from grading import check, exercise, result_of, settings

from nanobot import AgentLoop, Program
from providers import LLMProvider, LLMResponse, ToolCallRequest

LOOK = "nanobot.py:SubagentManager.spawn"


class Models(LLMProvider):
    """The main model plays the student's call; the helper knows only what its task says."""

    model = "graded"

    def __init__(self, spawn):
        self.spawn = spawn
        self.tasks = []

    async def answer(self, request):
        is_helper = "spawn" not in [tool["function"]["name"] for tool in request.tools]
        last = request.messages[-1]
        if is_helper and last["role"] == "user":
            task = last["content"].split("[/Runtime Context]")[-1]
            self.tasks.append(task)
            file = re.search(r"[\w./-]+\.txt", task)
            if not file:
                return LLMResponse("Which file do you mean?")
            return LLMResponse(
                None, [ToolCallRequest("h1", "read_file", {"path": file[0]})], "tool_calls"
            )
        if is_helper:
            is_about_lines = "line" in self.tasks[-1].lower()
            return LLMResponse(
                f"{len(last['content'].splitlines())} lines"
                if is_about_lines
                else "I have read it."
            )
        if last["role"] == "user":
            return LLMResponse(None, [ToolCallRequest("m1", "spawn", self.spawn)], "tool_calls")
        return LLMResponse(f"The helper says: {last['content']}")


def ask(folder, spawn):
    config = settings(folder)
    model = Models(spawn)
    loop = AgentLoop(config, model, program=Program(folder))
    return result_of(loop, "How many lines does notes.txt have?").final_content, model.tasks


def test_the_helper(folder):
    (folder / "notes.txt").write_text("one\ntwo\nthree\n")
    spawn = exercise("10_helper", "SPAWN")
    if not spawn:
        raise NotImplementedError("write SPAWN in ex_10_helper.py")
    answer, tasks = ask(folder, spawn)
    check(bool(tasks), "a call of spawn that passes its check", answer, LOOK)
    check(
        "Which file" not in answer,
        "a task that names the file: the helper sees nothing else",
        spawn,
        "templates/subagent.md",
    )
    check(
        "is at work" not in answer,
        "an answer with the helper's result in it: wait for it",
        answer,
        LOOK,
    )
    check(
        "3" in answer,
        "a task that says what is wanted: the number of lines, 3",
        answer,
        "templates/subagent.md",
    )
