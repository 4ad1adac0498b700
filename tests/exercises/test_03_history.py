"""★★ A lawful history

Goal: endpoints answer 400 if a call has no result, if a result has no call, if two user messages stand in a row, or if the
      list ends with the assistant. Write `lawful`: it takes a damaged conversation and returns one that every endpoint
      accepts. What users said is never lost.
Read: providers.py:legal (the docstring has an example), NOTES.md "What the journal can do"
Hint: go through the list once. Behind an assistant message with calls comes one result for each call, in the order of the
      calls; if the history has none, put {"role": "tool", "tool_call_id": …, "content": "[interrupted]"}. Some models use
      the same ids again in each turn: a result belongs to the nearest message with calls before it.
"""

import copy
import random
from itertools import pairwise

from grading import check, exercise

LOOK = "providers.py:legal"


def call(number):
    return {"id": f"c{number}", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def whole(chance):
    """A lawful conversation of random turns."""
    messages, number = [], 0
    for turn in range(chance.randint(1, 4)):
        messages.append({"role": "user", "content": f"question {turn}"})
        for _ in range(chance.randint(0, 2)):
            calls = [call(number + n) for n in range(chance.randint(1, 3))]
            number += len(calls)
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
            messages += [
                {"role": "tool", "tool_call_id": each["id"], "content": f"result of {each['id']}"}
                for each in calls
            ]
        messages.append({"role": "assistant", "content": f"answer {turn}"})
    return messages


def damaged(chance):
    """The same after a kill, a lost line, or results in another order."""
    messages = whole(chance)
    for _ in range(chance.randint(1, 3)):
        place = chance.randrange(len(messages))
        match chance.randint(0, 2):
            case 0:
                messages = messages[: max(1, place)]
            case 1 if messages[place]["role"] != "user":
                del messages[place]
            case 2 if (
                place + 1 < len(messages)
                and messages[place]["role"] == messages[place + 1]["role"] == "tool"
            ):
                messages[place], messages[place + 1] = messages[place + 1], messages[place]
    return messages or [{"role": "user", "content": "hi"}]


def problem_with(messages):
    """The first law that is broken, or ""."""
    place = 0
    while place < len(messages):
        message = messages[place]
        if message["role"] == "tool":
            return f"message {place}, a result of {message['tool_call_id']}, belongs to no call before it"
        ids = [each["id"] for each in message.get("tool_calls") or []]
        behind = messages[place + 1 : place + 1 + len(ids)]
        if [each.get("tool_call_id") for each in behind] != ids:
            return f"message {place} has the calls {ids}; behind it are {[each.get('tool_call_id') for each in behind]}"
        place += 1 + len(ids)
    for place, (message, after) in enumerate(pairwise(messages)):
        if message["role"] == after["role"] == "user":
            return f"messages {place} and {place + 1} are both the user's: make one of them"
    if messages and messages[-1]["role"] == "assistant":
        return "the last message is the assistant's"
    return ""


def test_300_damaged_histories():
    lawful = exercise("03_history", "lawful")
    for seed in range(300):
        messages = damaged(random.Random(seed))
        before = copy.deepcopy(messages)
        result = lawful(messages)
        check(isinstance(result, list), "a list of messages", result, LOOK)
        check(
            messages == before,
            "a copy: the list that was given stays as it was",
            "it was changed",
            LOOK,
        )
        check(not problem_with(result), f"history {seed} is lawful", problem_with(result), LOOK)
        said = [each["content"] for each in before if each["role"] == "user"]
        kept = [each["content"] for each in result if each["role"] == "user"]
        check(
            all(any(text in other for other in kept) for text in said),
            "all that the user said is kept",
            kept,
            LOOK,
        )
        ids = {each["id"] for message in before for each in message.get("tool_calls") or []}
        real = {
            each["content"]
            for each in before
            if each["role"] == "tool" and each["tool_call_id"] in ids
        }
        got = {each["content"] for each in result if each["role"] == "tool"}
        if before[-1]["role"] == "user":
            check(
                real <= got,
                f"history {seed} keeps the results that have a call",
                sorted(real - got),
                LOOK,
            )
        check(
            lawful(result) == result,
            "a lawful history stays as it is",
            "it was changed again",
            LOOK,
        )


def test_ids_that_are_used_again():
    """In three histories: a whole one, one without the first result and one without the second."""
    lawful = exercise("03_history", "lawful")
    for lost in ("nothing", "result 1", "result 2"):
        messages = []
        for turn in (1, 2):
            messages += [
                {"role": "user", "content": f"question {turn}"},
                {"role": "assistant", "content": None, "tool_calls": [call(0)]},
                {"role": "tool", "tool_call_id": "c0", "content": f"result {turn}"},
            ]
        messages = [each for each in messages if each["content"] != lost]
        result = lawful(messages)
        problem = problem_with(result)
        check(not problem, f"a lawful history if {lost} was lost", problem, LOOK)
        contents = [each["content"] for each in result if each["role"] == "tool"]
        for turn, content in enumerate(contents, 1):
            own, other = f"result {turn}", f"result {3 - turn}"
            check(
                content != other and (content == own or lost == own),
                "each call keeps the result of its own turn, also if a later turn uses its id again",
                f"{content!r} in turn {turn} ({lost} was lost)",
                "providers.py:with_results",
            )
