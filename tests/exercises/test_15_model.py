"""★ Be the model for a whole task

Goal: the user says: "Write the number of lines of poem.txt into count.txt." You are the model. Give your answers, one line each:
      a call, such as  list_dir(".")  , or a text, which ends the turn. Look first, then write the number (4, not
      "four" or "4 lines"), then tell the user.
Read: providers.py:HumanProvider; try it for real: nanobot --provider human
Hint: `nanobot prompt` shows the tools and their parameters. The grader puts a poem.txt of four lines into the working folder.
      You know that; a model does not, so one of your calls has to look.
"""

from grading import check, exercise, result_of, settings

from nanobot import AgentLoop, Program
from providers import HumanProvider

LOOK = "providers.py:HumanProvider"


NONE_LEFT = "no answer is left in ANSWERS"  # a text, so it ends the turn


def play(folder, answers):
    """(result, the answers of the model, the files) of a turn in which somebody gives these answers.
    Raises Wrong for a line that looks like a call and is none."""
    config = settings(folder)
    work = folder / "work"
    work.mkdir()
    (work / "poem.txt").write_text(
        "Roses are red\nviolets are blue\nsugar is sweet\nand so are you\n"
    )
    rest, refused = iter(answers), []

    async def ask(question, what, **details):
        if details["refused"] is not None:
            refused.append(details["refused"])
            return NONE_LEFT
        return next(rest, NONE_LEFT)

    loop, told = AgentLoop(config, HumanProvider(ask), program=Program(work)), []
    loop.listeners.append(lambda event: told.append(event.get("answer")))
    result = result_of(loop, "Write the number of lines of poem.txt into count.txt.")
    check(
        not refused,
        'a call like read_file("poem.txt"): a tool of the list, texts in quotes, ")" at the end',
        "".join(refused[:1]),
        "nanobot prompt",
    )
    return result, [answer for answer in told if answer], work


def test_the_task(folder):
    answers = exercise("15_model", "ANSWERS")
    if not answers:
        raise NotImplementedError("write ANSWERS in ex_15_model.py")
    check(isinstance(answers, list), "a list of answers: [first, second, …]", answers, LOOK)
    result, given, work = play(folder, answers)
    check(
        result.final_content != NONE_LEFT,
        "a last answer without a call: a text for the user, which ends the turn",
        f"{len(answers)} answers, the last one is {answers[-1]!r}",
        LOOK,
    )
    names = [call.name for answer in given for call in answer.tool_calls]
    failed = [event for event in result.tool_events if event["is_error"]]
    check(not failed, "calls that work", failed[0]["result"] if failed else "", "nanobot prompt")
    looked = [name in ("read_file", "exec", "grep") for name in names]
    wrote = [name in ("write_file", "exec") for name in names]
    check(
        any(looked),
        "a call that looks into poem.txt: a model does not know what is in it",
        names,
        LOOK,
    )
    file = work / "count.txt"
    check(file.exists(), "a call that writes count.txt", names, "tools.py:write_file")
    check(
        looked.index(True) < len(wrote) - 1 - wrote[::-1].index(True) or names == ["exec"],
        "first look, then write",
        names,
        LOOK,
    )
    check(
        file.read_text().strip() == "4", "4 in count.txt", file.read_text(), "tools.py:write_file"
    )
    check(
        "4" in result.final_content,
        "an answer that tells the user the number, 4",
        result.final_content,
        LOOK,
    )
    check(len(given) <= 6, "at most 6 requests", len(given), "nanobot.py:AgentRunner.run")
