import asyncio

from grading import check, exercise, file_of, settings

from nanobot import AgentLoop
from providers import LLMProvider, LLMResponse, ToolCallRequest

KNOWN = "- The user's dog is called Rex.\n- The user lives in Turin.\n"


class Model(LLMProvider):
    """Answers in one word, and lets the student answer what `save_memory` is for."""

    model = "graded"

    def __init__(self, save_memory):
        self.save_memory = save_memory
        self.systems = []
        self.saved = self.problem = None

    async def answer(self, request):
        if "save_memory" in [tool["function"]["name"] for tool in request.tools]:
            prompt = "\n\n".join(str(message["content"]) for message in request.messages)
            try:
                self.saved = self.save_memory(prompt)
            except Exception as problem:  # of the student, not of the agent, which would go on
                self.problem = problem
                raise
            return LLMResponse(None, [ToolCallRequest("c1", "save_memory", self.saved)], "tool_calls")
        self.systems.append(request.messages[0]["content"])
        return LLMResponse("Fine.")


async def talk(folder, model):
    loop = AgentLoop(settings(folder), model)
    loop.memory.facts.parent.mkdir(parents=True, exist_ok=True)
    loop.memory.facts.write_text(KNOWN, encoding="utf-8")
    for text in ("My name is Ada.", "I have a new bicycle.", "/new"):
        await loop.process_direct(text)
        await loop.background.settled()
    await loop.process_direct("Who am I?")
    await loop.close()
    return loop.memory.facts.read_text(encoding="utf-8")


def test_the_fact_survives(folder):
    solution, look = exercise("05_memory"), "memory.py:Consolidator"
    if "raise NotImplementedError" in file_of("05_memory").read_text(encoding="utf-8"):
        raise NotImplementedError("write `save_memory` in ex_05_memory.py")
    model = Model(solution.save_memory)
    facts = asyncio.run(talk(folder, model))
    if model.problem:
        raise model.problem
    check(model.saved is not None, "one request that offers save_memory, after /new", "there was none", look)
    wanted = {"history_entry", "memory_update"}
    check(wanted <= set(model.saved), f"the arguments {sorted(wanted)}", sorted(model.saved), "templates/consolidate.md")
    check("Ada" in facts, "MEMORY.md names Ada", facts, look)
    check("Rex" in facts and "Turin" in facts, "MEMORY.md still has what stood in it: memory_update replaces the file", facts, look)
    check("Ada" in model.systems[-1], "the next conversation's system prompt names Ada", model.systems[-1][-300:], look)
    entry = str(model.saved["history_entry"])
    check(len(entry) > 10, "history_entry says in a line what happened", entry, "memory.py:MemoryStore")
