"""★★ A fact that survives /new

Goal: after `/new` the model no longer gets the old conversation; what it still knows comes from MEMORY.md. When a conversation
      is saved, the model is asked to call `save_memory`. Be that model: return the arguments of the call, so that the agent
      knows in the next conversation that the user is called Ada, and still knows what it knew before.
Read: memory.py:Consolidator, memory.py:MemoryStore, templates/consolidate.md
Hint: `prompt` is the whole text that the model is asked with: today's MEMORY.md below a line `# MEMORY.md`, the conversation
      below `# Conversation`. Two keys count here: history_entry says in a line what happened, memory_update is the complete
      new text of MEMORY.md, with facts only. Leave out the time and the summary that the template also asks for.
"""

import asyncio

from grading import check, exercise, settings

from nanobot import AgentLoop
from providers import LLMProvider, LLMResponse, ToolCallRequest

KNOWN = "- The user's dog is called Rex.\n- The user lives in Turin.\n"


class Model(LLMProvider):
    """Answers in one word, and lets the student answer what `save_memory` is for."""

    model = "graded"

    def __init__(self, save_memory):
        self.save_memory = save_memory
        self.systems = []
        self.asked, self.saved, self.problem = 0, None, None

    async def answer(self, request):
        if "save_memory" in [tool["function"]["name"] for tool in request.tools]:
            prompt = "\n\n".join(str(message["content"]) for message in request.messages)
            self.asked += 1
            try:
                self.saved = self.save_memory(prompt)
            except Exception as problem:  # of the student, not of the agent, which would go on
                self.problem = problem
                raise
            return LLMResponse(
                None,
                [
                    ToolCallRequest(
                        "c1", "save_memory", self.saved if isinstance(self.saved, dict) else {}
                    )
                ],
                "tool_calls",
            )
        self.systems.append(request.messages[0]["content"])
        return LLMResponse("Fine.")


async def talk(folder, model):
    loop = AgentLoop(settings(folder), model)
    loop.memory.facts.parent.mkdir(parents=True, exist_ok=True)
    loop.memory.facts.write_text(KNOWN, encoding="utf-8")
    for text in ("My name is Ada.", "I have a new bicycle.", "/new"):
        await loop.process_direct(text, "cli:direct")
        await loop.background.settled()
    await loop.process_direct("Who am I?", "cli:direct")
    await loop.close()
    return loop.memory.facts.read_text(encoding="utf-8")


def test_the_fact_survives(folder):
    model, look = Model(exercise("05_memory", "save_memory")), "memory.py:Consolidator"
    facts, saved = asyncio.run(talk(folder, model)), model.saved
    if model.problem:
        raise model.problem
    check(
        model.asked > 0, "one request that offers save_memory, after /new", "there was none", look
    )
    check(
        isinstance(saved, dict),
        'a dict: {"history_entry": "…", "memory_update": "…"}',
        saved,
        "templates/consolidate.md",
    )
    for name in ("history_entry", "memory_update"):
        value = saved.get(name, f"no {name}")
        check(
            name in saved and isinstance(value, str),
            f"a text as {name}",
            value,
            "templates/consolidate.md",
        )
    update = saved["memory_update"]
    check("Ada" in update, "memory_update names Ada", update, look)
    check(
        "Rex" in update and "Turin" in update,
        "memory_update still has what stood in MEMORY.md: it replaces the file",
        update,
        look,
    )
    check(
        "Fine." not in update,
        "memory_update has facts about the user only: the conversation does not belong into it",
        update,
        look,
    )
    check("Ada" in facts, "MEMORY.md names Ada", facts, look)
    check(
        "Ada" in model.systems[-1],
        "the next conversation's system prompt names Ada",
        model.systems[-1][-300:],
        look,
    )
    entry = saved["history_entry"]
    check(
        len(entry) > 10,
        "history_entry says in a line what happened",
        entry,
        "memory.py:MemoryStore",
    )
