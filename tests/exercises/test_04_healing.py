"""★★ A row that heals

Goal: a new endpoint refuses the usual request: 400 "Parameter max_tokens must be a multiple of 64, got 1000." Write the row
      that mends it: the next request has the largest multiple of 64 that is not above the old max_tokens. The user gets an
      answer and is told what was changed.
Read: providers.py:HEALING, providers.py:Remedy, providers.py:find_remedy, providers.py:setting
Hint: Remedy(complaint, notice, change): complaint is a regular expression that fits this sentence only, notice a few words
      for the user, and change(body) returns the body to send instead. Do not
      change `body` itself.
"""

import asyncio
import re

from fake_llm import FakeLLM, error
from grading import check, exercise

import providers
from providers import ROWS, Endpoint, OpenAIProvider, Remedy

COMPLAINT = "Parameter max_tokens must be a multiple of 64, got {}."


QUESTION = [{"role": "user", "content": "hi"}]


def endpoint_says(body):
    size = body.get("max_tokens")
    if size is None or size % 64:
        return error(400, COMPLAINT.format(size))
    return f"answered with at most {size}"


def test_the_row():
    remedy = exercise("04_healing", "REMEDY")
    if remedy is None:
        raise NotImplementedError("write REMEDY in ex_04_healing.py")
    body, look = {"max_tokens": 1000, "messages": []}, "providers.py:find_remedy"
    check(
        isinstance(remedy, Remedy),
        "REMEDY = Remedy(complaint, notice, change)",
        remedy,
        "providers.py:Remedy",
    )
    check(
        len(str(remedy.notice)) > 5,
        "a notice that tells the user what was changed",
        remedy.notice,
        "providers.py:Remedy",
    )
    changed = remedy.change(body)
    check(
        isinstance(changed, dict),
        "`change` returns the body to send instead, a dict",
        changed,
        "providers.py:setting",
    )
    check(
        body == {"max_tokens": 1000, "messages": []},
        "`change` returns a new body",
        "it changed the one it got",
        look,
    )
    size = changed.get("max_tokens")
    check(
        size is not None, "a body that still has max_tokens: the endpoint wants one", changed, look
    )
    sizes = [size, remedy.change({"max_tokens": 500}).get("max_tokens")]
    check(
        sizes == [960, 448],
        "the largest multiples of 64 that are not above 1000 and 500: 960 and 448",
        sizes,
        look,
    )
    table = list(providers.HEALING)
    providers.HEALING.insert(0, remedy)
    try:
        with FakeLLM(endpoint_says) as server:
            answers, told, others = asyncio.run(talk(server.base_url))
            sent = [body.get("max_tokens") for body in server.bodies]
            answer_to_777 = asyncio.run(ask_with(777, server.base_url))
    finally:
        providers.HEALING[:] = table
    check(answers[0].error is None, "an answer", answers[0].error, look)
    check(
        answer_to_777.content == "answered with at most 768",
        f"an answer also with other numbers: {COMPLAINT.format(777)}",
        answer_to_777.error or answer_to_777.content,
        look,
    )
    check(
        len(told) == 1 and remedy.notice in told[0],
        "the user is told the notice once",
        told,
        "providers.py:Remedy",
    )
    check(
        len(sent) == 3,
        "three requests for two questions: what was learnt is remembered",
        sent,
        "providers.py:Remedy",
    )
    check(
        not others,
        "the row fits its own complaint only",
        f"it also fits: {others}",
        "providers.py:HEALING",
    )


async def talk(address):
    told = []

    async def note(line):
        told.append(line)

    model = OpenAIProvider(Endpoint(ROWS["custom"], "key", address, "new"))
    answers = [await model.chat(QUESTION, max_tokens=1000, on_retry=note) for _ in range(2)]
    await model.close()
    complaints = [
        "max_tokens is too large: 1000",
        "Rate limit reached",
        "The image must be a multiple of 64 pixels wide",
    ]
    fits = [
        text
        for text in complaints
        if re.search(providers.HEALING[0].complaint, text, re.IGNORECASE)
    ]
    return answers, told, fits


async def ask_with(limit, address):
    """The answer of a model that has learnt nothing yet."""
    model = OpenAIProvider(Endpoint(ROWS["custom"], "key", address, "new"))
    answer = await model.chat(QUESTION, max_tokens=limit)
    await model.close()
    return answer
