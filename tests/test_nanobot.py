"""The story: the runner, the hooks, the loop, the settings; all in this process, with scripted models."""

import asyncio
import contextlib
import itertools
import json
import random
import re
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

import nanobot
from conftest import lines_of, need_bash
from chats import Chats, Gate, Model, serve_chats, waiting_tool
from chats import said as said_by_user
from fake_llm import FakeLLM, Raw, Reply, error
from fake_llm import call as ask_for
from channels import CronError, CronJob
from memory import SessionManager
from nanobot import (
    AgentHook,
    AgentLoop,
    AgentRunner,
    AgentRunSpec,
    ApprovalHook,
    CompositeHook,
    Config,
    ConfigError,
    CostTrackingHook,
    JobRunner,
    Price,
    load_config,
    Program,
)
from providers import (
    ROWS,
    Endpoint,
    LLMProvider,
    LLMResponse,
    OpenAIProvider,
    ScriptedProvider,
    ToolCallRequest,
    failed,
    legal,
    parameters_by_name,
)
from test_providers import check_grammar
from tools import Tool, ToolError, ToolRegistry, ToolResult, tool

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 16


def call(name: str, id_: str = "c1", **arguments) -> ToolCallRequest:
    return ToolCallRequest(id_, name, arguments)


def cut(text: str | None, *calls: ToolCallRequest) -> LLMResponse:
    """An answer that its length limit ended."""
    return LLMResponse(text, list(calls), "length")


def question(text: str = "do it") -> dict:
    return {"role": "user", "content": text}


def run(replies, tools=(), **spec):
    """Run a script to its end; gives the result and the provider that played it."""
    provider = ScriptedProvider(replies)
    messages = spec.pop("messages", [question()])
    full = AgentRunSpec(messages, ToolRegistry(tools), **spec)
    return asyncio.run(AgentRunner(provider).run(full)), provider


def roles(messages) -> list[str]:
    return [message["role"] for message in messages]


def results(messages) -> list[str]:
    """What the calls in these messages gave."""
    return [message["content"] for message in messages if message["role"] == "tool"]


def users(request) -> list[str]:
    return said_by_user(request.messages)


@tool(read_only=True)
def look(n: int = 0) -> str:
    """Look."""
    return f"saw {n}"


@tool
def broken() -> str:
    """Fails."""
    raise ToolError("it is broken: mend it")


@tool(read_only=True)
def picture(letter: str) -> ToolResult:
    """A picture."""
    return ToolResult(f"[image: {letter}]", images=[image(letter)])


def image(letter: str) -> dict:
    return {"type": "image_url", "image_url": {"url": f"data:{letter}"}}


# ---- Calls written as text ----

TEXT_CALLS = [
    json.loads(line)
    for line in (Path(__file__).parent / "data" / "text_calls.jsonl").read_text("utf-8").split("\n")
    if line
]


FORMS = {  # what the answers in text_calls.jsonl call; a "string" has to be given
    "read_file": {"path": "string", "offset": "integer", "limit": "integer"},
    "list_dir": {"path": ["string"]},
    "now": {},
    "write_file": {"path": "string", "content": "string"},
    "edit_file": {
        "path": "string",
        "old_text": "string",
        "new_text": "string",
        "replace_all": "boolean",
    },
    "exec": {"command": "string", "timeout": "integer"},
    "send_report": {"to": "string", "text": "string"},
}


class Noted(Tool):
    """Notes its calls and does nothing."""

    exclusive = True

    def __init__(self, name: str, ran: list):
        kinds = FORMS[name]
        self.name, self.ran = name, ran
        self.read_only = name in ("read_file", "list_dir", "now")
        self.parameters = {
            "type": "object",
            "properties": {key: {"type": kind} for key, kind in kinds.items()},
            "required": [key for key, kind in kinds.items() if kind == "string"],
        }

    def run(self, **arguments) -> str:
        self.ran.append({"name": self.name, "arguments": arguments})
        return "done"


def ask_local(server: FakeLLM, ran: list, hook: AgentHook):
    """One question to a local endpoint that writes its calls as text."""
    provider = OpenAIProvider(Endpoint(ROWS["local"], api_base=server.base_url, model="m"))
    tools = ToolRegistry([Noted(name, ran) for name in FORMS])
    return asyncio.run(AgentRunner(provider).run(AgentRunSpec([question()], tools, hook=hook)))


def in_pieces(text: str, size: int) -> Raw:
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    choices = [{"index": 0, "delta": {"content": piece}} for piece in pieces]
    choices.append({"index": 0, "delta": {}, "finish_reason": "stop"})
    events = [f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices]
    return Raw("".join(events).encode())


class Watching(AgentHook):
    wants_streaming = True

    def __init__(self):
        self.shown = ""

    async def on_stream(self, delta):
        self.shown += delta


@pytest.mark.parametrize("group", sorted({row["group"] for row in TEXT_CALLS}))
def test_of_the_calls_that_a_local_model_writes_only_those_run_that_it_means(group):
    chance = random.Random(group)
    for row in [row for row in TEXT_CALLS if row["group"] == group]:
        ran, hook, text = [], Watching(), row["text"]
        with FakeLLM([in_pieces(text, chance.choice([1, 3, 7, 40])), "done", "done"]) as server:
            result = ask_local(server, ran, hook)
        last = str(server.bodies[-1]["messages"][-1]["content"])
        was_asked = "write only the call, with nothing before it" in last
        if row["expect"] == "run":
            assert ran == row["calls"] and not was_asked, text
            assert '"arguments"' not in hook.shown and "<function" not in hook.shown
        if row["expect"] == "ask":
            assert ran == [] and was_asked, text
        if row["expect"] in ("never", "never or ask"):
            assert ran == [], text
        if not ran:  # the user sees all of it, whether the model was asked or not
            assert not_thought(text) in result.final_content, text
            assert result.final_content == hook.shown.rstrip(), text


def not_thought(text: str) -> str:
    """Without thoughts and tags at the start of a line (no row has one in a code fence)."""
    text = re.sub(r"(?ms)^[ \t]*<think>.*?</think>|^</think>", "", text).strip()
    return "" if text.startswith("<think>") else text


def test_a_call_after_some_text_is_asked_for_once_and_the_text_stays():
    ran, hook = [], Watching()
    written = '{"name": "write_file", "arguments": {"path": "a", "content": "b"}}'
    fence = f"```json\n{written}\n```"
    with FakeLLM([f"I write it.\n\n{fence}", fence, "It is written."]) as server:
        result = ask_local(server, ran, hook)
    assert [each["name"] for each in ran] == ["write_file"]
    assert result.messages[1]["content"] == "I write it." and len(server.bodies) == 3
    assert result.final_content == "It is written." and "json" not in hook.shown

    ran.clear()
    with FakeLLM([f"I write it.\n\n{fence}", f"Again:\n{fence}"]) as server:
        result = ask_local(server, ran, hook)
    assert ran == [] and len(server.bodies) == 2
    assert result.final_content == f"I write it.\n\n{fence}\n\nAgain:\n{fence}"
    assert hook.shown.endswith(result.final_content)


# ---- The runner: calls ----


def test_calls_run_and_the_model_sees_their_results_until_it_answers():
    given = [question()]
    script = [[call("look", "a", n=7), call("broken", "b")], call("look", "c"), "done"]
    result, provider = run(script, [look, broken], messages=given)
    assert (result.final_content, result.tools_used) == ("done", ["look", "broken"])
    assert results(provider.requests[1].messages) == ["saw 7", "it is broken: mend it"]
    event = {"name": "look", "arguments": {"n": 7}, "is_error": False, "result": "saw 7"}
    assert result.tool_events[0] == event
    assert given == [question()], "the caller's messages are not changed"


UNREADABLE = ToolCallRequest("c1", "look", error="its arguments are not valid JSON")


def test_what_became_of_a_call_is_told_to_the_model():
    _, provider = run([[call("Look", "b"), UNREADABLE], "done"], [look, broken])
    unknown, torn = results(provider.requests[1].messages)
    assert "look, broken" in unknown, "the closest one first"
    why = "look was not run: its arguments are not valid JSON."
    assert torn == f"{why}\nSend the complete call again."


def test_neighbours_that_only_read_go_together_and_whatever_else_alone():
    steps = []

    def step(name: str, **flags):
        @tool(name=name, **flags)
        async def work() -> str:
            """Work."""
            steps.append(f"+{name}")
            await asyncio.sleep(0)
            steps.append(f"-{name}")
            return "done"

        return work

    tools = [step("a", read_only=True), step("b", read_only=True), step("w")]
    tools.append(step("x", read_only=True, exclusive=True))
    run([[call(name, f"c{n}") for n, name in enumerate("abwxxa?b")], "done"], tools)
    assert " ".join(steps) == "+a +b -a -b +w -w +x -x +x -x +a -a +b -b"


def test_a_result_is_journalled_when_its_call_ends_and_sent_in_the_order_of_the_calls():
    journal, gate = [], asyncio.Event()

    @tool(read_only=True)
    async def wait(n: int) -> str:
        """Wait."""
        if n == 0:
            await gate.wait()
        else:
            asyncio.get_running_loop().call_soon(gate.set)
        return f"waited {n}"

    script = [[call("wait", "a", n=0), call("wait", "b", n=1)], "done"]
    _, provider = run(script, [wait], append=lambda *messages: journal.extend(messages))
    assert results(journal) == ["waited 1", "waited 0"]
    assert results(provider.requests[1].messages) == ["waited 0", "waited 1"]


def test_images_stand_behind_all_results():
    pictures = [call("picture", letter, letter=letter) for letter in "bc"]
    result, _ = run([[call("look"), *pictures], "done"], [look, picture])
    for letter, message in zip("bc", result.messages[5:7], strict=True):
        name = {"type": "text", "text": f"[image: {letter}]"}
        assert message == {"role": "user", "content": [name, image(letter)]}


# ---- The runner: the same call again and again ----


def test_the_same_failing_call_is_told_to_change_at_three_and_ends_the_run_at_five():
    result, provider = run([call("broken", f"c{n}") for n in range(9)], [broken])
    third, fourth = results(result.messages)[2:4]
    assert results(result.messages)[:2] == ["it is broken: mend it"] * 2
    assert "This same call has failed 3 times" in third and "failed 4 times" in fourth
    assert (len(provider.requests), result.stop_reason) == (5, "tool_error")


def test_the_same_result_is_told_at_three_and_ends_the_tools_at_five():
    """Two calls side by side ran 41 requests."""
    steps = [[call("look", f"a{n}"), call("look", f"b{n}", n=1)] for n in range(5)]
    result, provider = run([*steps, "Nothing new."], [look])
    assert ["already" in text for text in results(result.messages)] == [False] * 4 + [True] * 6
    assert [bool(request.tools) for request in provider.requests] == [True] * 5 + [False]
    assert (result.stop_reason, result.final_content) == ("completed", "Nothing new.")


def test_what_is_not_the_same_may_go_on():
    """Other arguments in between: it is told from the third time on, but not ended."""
    result, provider = run([*(call("look", f"c{n}", n=n % 2) for n in range(8)), "done"], [look])
    assert result.final_content == "done" and all(request.tools for request in provider.requests)
    assert str(result.messages).count("already") == 4


# ---- The runner: what an answer leads to ----

ABC = [cut("a "), cut("b "), cut("c ")]
GONE = failed("it is gone")
WITHHELD = "There is no answer: the endpoint blocked the answer. Ask in other words."
NOTHING = "There is no answer: the model sent nothing useful. Ask in other words."
ODD_ENDS = [
    LLMResponse(None, [call("look", n=n)], reason) for n, reason in enumerate(["eos", "stop", None])
]
REPEATED = "cut: the answer reached its length limit again and again"
ENDS = [  # a sentence, the script, its stop reason, the answer, the number of requests
    ("a cut answer is continued", [*ABC, "d"], "completed", "a b c d", 4),
    (
        "three times, and then taken as it is",
        [*ABC, cut("d ")],
        "completed",
        f"a b c d \n\n({REPEATED})",
        4,
    ),
    (
        "a cut answer that goes on to a call",
        [*ABC, LLMResponse("d", [call("look")], "tool_calls"), "done"],
        "completed",
        "done",
        5,
    ),
    ("blank twice, and once without tools", ["", " ", ""], "empty", NOTHING, 3),
    ("a withheld answer", [LLMResponse(None, [], "content_filter")], "empty", WITHHELD, 1),
    ("a failure", [LLMResponse("half", [], "error", error="it is gone")], "error", None, 1),
    ("whole calls whatever their end is called", [*ODD_ENDS, "done"], "completed", "done", 4),
    ("a failure behind a cut answer", [cut("a "), GONE], "error", "a ", 2),
]


@pytest.mark.parametrize(
    ("what", "script", "reason", "said", "count"), ENDS, ids=[row[0] for row in ENDS]
)
def test_what_an_answer_leads_to(what, script, reason, said, count):
    result, provider = run(script, [look])
    assert (result.stop_reason, result.final_content) == (reason, said)
    assert len(provider.requests) == count
    assert result.error == ("it is gone" if reason == "error" else None)
    *_, last = result.messages
    if reason == "empty" or said is None:
        assert last == question(), "nothing is put into the model's mouth"
    else:
        why = REPEATED if "three times" in what else result.error
        assert last["role"] == "assistant" and last.get("cut") == why


@pytest.mark.parametrize("reason", ["length", "content_filter", "refusal", "error"])
def test_calls_that_may_be_cut_are_not_run(reason):
    error = "it broke" if reason == "error" else None
    cut_off = LLMResponse("text", [call("look")], reason, error=error)
    assert run([cut_off, "done"], [look])[0].tools_used == []


NOTES = {
    "a cut answer": ([cut("one ")], "Go on exactly where the answer stops"),
    "a cut call": ([cut("one ", call("look"))], "Take shorter steps"),
    "a cut thought": ([cut(" \n")], "Think less, and answer now."),
    "two blanks": (["", ""], "You sent nothing, twice."),
    "the same call": ([call("look", f"c{n}") for n in range(5)], "the tools are switched off"),
    "five steps are left": ([call("look", f"c{n}", n=n) for n in range(34)], "Five more steps"),
}


@pytest.mark.parametrize("case", NOTES)
def test_a_note_to_the_model_stands_last_in_the_next_request_and_nowhere_else(case):
    replies, note = NOTES[case]
    result, provider = run([*replies, call("look", n=1), "done"], [look])
    asked, *later = provider.requests[len(replies) :]
    assert asked.messages[-1]["role"] == "user" and note in asked.messages[-1]["content"]
    assert bool(asked.tools) is (case not in ("two blanks", "the same call"))
    assert note not in str(result.messages)
    assert not asked.tools or note not in str(later[0].messages)


@pytest.mark.parametrize(
    ("last", "said"),
    [
        ("", "I stopped at the limit of 1 step."),
        (failed("boom"), "I stopped at the limit of 1 step. boom"),
        (cut("all I co"), "all I co"),
    ],
)
def test_at_the_limit_of_steps_there_is_a_summary_or_the_reason_why_there_is_none(last, said):
    result, provider = run([call("look"), last], [look], max_iterations=1)
    assert (result.stop_reason, result.final_content) == ("max_iterations", said)
    assert result.messages[-1]["content"] == said
    assert provider.requests[1].tools == []
    result, _ = run([cut("part one, "), last], max_iterations=1)
    assert result.final_content == f"part one, {said}", "what was said before is part of it"


def test_reasoning_stays_with_the_answer_that_it_led_to():
    thought = {"reasoning_content": "hm"}
    result, _ = run([LLMResponse("done", extra=thought)])
    assert result.messages[-1] == {"role": "assistant", "content": "done"} | thought


# ---- The runner: stopped in the middle ----


async def stop_at(moment: asyncio.Event, provider: LLMProvider, **spec) -> None:
    """Run until the moment, then stop it as /stop does."""
    task = asyncio.create_task(AgentRunner(provider).run(AgentRunSpec([question()], **spec)))
    await moment.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


NOT_RUN = "[not run: the turn was stopped before this call began]"
UNKNOWN = "[interrupted: its outcome is unknown. Check before you repeat it]"
STOPS = [  # where it is stopped, what the journal has of the answer, and what became of its calls
    ("in the answer", "one two three", "it was stopped", []),
    ("at the question of an approval", "one two three four", None, [NOT_RUN, NOT_RUN]),
    ("in the first of two calls", "one two three four", None, [UNKNOWN, NOT_RUN]),
]


@pytest.mark.parametrize(("where", "shown", "why", "outcomes"), STOPS)
def test_what_was_shown_and_called_when_a_turn_was_stopped_is_journalled_once(
    where, shown, why, outcomes
):
    journal, gate = [], Gate()

    class Stall(AgentHook):
        wants_streaming = True

        async def on_stream(self, delta):
            if delta == " three" and "answer" in where:
                await gate.wait()

        async def before_execute_tools(self, tool_calls):
            if "approval" in where:
                await gate.wait()

    calls = [call("slow", "a"), call("slow", "b")]
    script = [LLMResponse("one two three four", calls, "tool_calls")]
    append = lambda *messages: journal.extend(messages)  # noqa: E731
    spec = {"tools": ToolRegistry([waiting_tool(gate)]), "hook": Stall(), "append": append}
    asyncio.run(stop_at(gate.reached, ScriptedProvider(script), **spec))
    (answer,) = [line for line in journal if line["role"] == "assistant"]
    assert (answer["content"], answer.get("cut")) == (shown, why)
    assert results(legal(journal)) == outcomes


def test_a_stopped_turn_has_ended_whatever_its_tools_do_and_keeps_the_finished_results():
    journal, started, ended = [], asyncio.Event(), []

    @tool(read_only=True)
    async def stubborn(n: int) -> str:
        """Catches its cancellation, and takes its time to tidy up."""
        while not results(journal):
            await asyncio.sleep(0)
        started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.01 * n)
            ended.append(n)
            if n == 0:
                raise
        return "stopped, said the tool"

    async def go() -> list[int]:
        provider = ScriptedProvider(
            [[call("look"), *(call("stubborn", f"s{n}", n=n) for n in range(3))], "on"]
        )
        append = lambda *messages: journal.extend(messages)  # noqa: E731
        await stop_at(started, provider, tools=ToolRegistry([look, stubborn]), append=append)
        assert len(provider.requests) == 1
        return sorted(ended)

    assert asyncio.run(go()) == [0, 1, 2]
    assert results(journal)[0] == "saw 0"


# ---- The runner: limits and sizes ----


SYSTEM = {"role": "system", "content": "be"}


# ---- The runner: longer than the model's window ----

TOO_LONG = LLMResponse(None, [], "error", error="the conversation is too long", is_overflow=True)


class Told(AgentHook):
    """Keeps what the user is told while the answer takes longer."""

    def __init__(self):
        self.told = []

    async def on_retry(self, why):
        self.told.append(why)


def old_turns(count: int) -> list[dict]:
    """A system message and whole turns of about 250 tokens, tool calls in each."""
    messages = [SYSTEM]
    for n in range(count):
        calls = LLMResponse(None, [call("look", f"old{n}", n=n)]).to_message()
        result = {"role": "tool", "tool_call_id": f"old{n}", "content": "saw " * 100}
        messages += [question(f"old question {n}"), calls, result]
        messages.append({"role": "assistant", "content": f"answer {n} " * 50})
    return messages


def test_what_is_too_long_for_the_model_is_asked_again_without_the_oldest_turns_which_stay_out():
    script = [TOO_LONG, call("look", "c1"), cut("one "), "two"]
    hook, history = Told(), [*old_turns(6), question("now")]
    result, provider = run(script, [look], messages=history, hook=hook)
    assert result.final_content == "one two"
    assert result.messages[: len(history)] == history, "nothing is lost"
    first, *later = provider.requests
    kept = later[0].messages
    oldest, *rest = users(later[0])
    assert 0 < len(rest) < 6 and users(first)[-len(rest) :] == rest
    assert oldest.startswith("[") and 'calls look({"n": 0})' in oldest
    for request in later:
        check_grammar(request.messages)
        assert request.messages[: len(kept)] == kept and kept[0] == SYSTEM
    assert len(hook.told) == 1 and "retrying with a shorter" in hook.told[0]


@pytest.mark.parametrize("history", [[], old_turns(5)], ids=["alone", "behind others"])
def test_a_turn_that_is_too_long_by_itself_is_an_error_and_no_endless_loop(history):
    text = "now " * 5_000
    result, provider = run([TOO_LONG] * 50, [look], messages=[*history, question(text)])
    assert (result.stop_reason, result.error) == ("error", TOO_LONG.error)
    assert len(provider.requests) == (2 if history else 1)
    [sent] = users(provider.requests[-1])
    assert sent.endswith(text)


# ---- Hooks ----


class Recorder(AgentHook):
    """Writes down all that it is told, and marks the answer; some names are of the older system."""

    wants_streaming = True

    def __init__(self):
        self.seen = []

    async def on_stream(self, delta):
        self.seen.append(delta)

    async def on_stream_end(self, resuming):
        self.seen.append(f"end {resuming}")

    async def before_execute_tools(self, tool_calls):
        self.seen.append([(each.name, each.input) for each in tool_calls])

    async def after_tool(self, call, result, seconds):
        self.seen.append((call.name, result.text, 0 <= seconds < 5))

    async def after_iteration(self, context):
        self.seen.append((context.model, context.usage.total_tokens, context.response.content))

    async def finalize_content(self, content):
        return f"<{content}>"


class Faulty(AgentHook):
    async def before_iteration(self, context):
        raise RuntimeError("a guest misbehaves")

    async def finalize_content(self, content):
        raise RuntimeError("again")


def test_each_hook_is_told_everything_in_order_and_one_that_fails_stops_nothing(caplog):
    hooks = [Recorder(), Faulty(), Recorder()]
    result, _ = run([call("look", n=7), "all done"], [look], hook=CompositeHook(hooks))
    assert result.final_content == "<<all done>>" and hooks[0].seen == hooks[2].seen
    assert hooks[0].seen == [
        "end True",
        [("look", {"n": 7})],
        ("look", "saw 7", True),
        ("scripted", 0, None),
        "all",
        " done",
        "end False",
        ("scripted", 0, "all done"),
    ]
    assert "Faulty.finalize_content failed: again" in caplog.messages


def approve(answers: list[str], *steps, name: str = "act"):
    """Run calls with a user who answers so; gives what ran, the questions, and the results."""
    ran, questions, left = [], [], list(answers)

    @tool(name=name)
    def act(command: str = "") -> str:
        """Act."""
        ran.append(command)
        return "acted"

    async def ask_user(question):
        questions.append(question)
        return left.pop(0)

    approval = ApprovalHook(ToolRegistry([act, look]), ask_user if answers else None)
    _, provider = run([*steps, "done"], [act, look], hook=CompositeHook([approval]))
    return ran, questions, results(provider.requests[-1].messages)


@pytest.mark.parametrize(
    ("answers", "ran", "asked", "reason"),
    [
        (["n", "Y"], ["2"], 2, ""),
        (["No, not now", "Y"], ["2"], 2, ": not now"),
        (["don't run it", "Y"], ["2"], 2, ": don't run it"),
        ([" yes \n", "n"], ["1"], 2, ""),
        (["always"], ["1", "2"], 1, ""),
        (["", "yes!"], [], 2, ""),
        ([], [], 0, ""),
    ],
)
def test_a_user_is_asked_before_a_tool_that_writes(answers, ran, asked, reason):
    """What is said with a no is the reason. In the last row there is nobody to ask."""
    steps = [call("look"), call("act", command="1"), call("act", command="2")]
    did, questions, told = approve(answers, *steps)
    assert (did, len(questions)) == (ran, asked)
    assert told[0] == "saw 0" and told.count("acted") == len(ran)
    assert ("not approved: nobody" in told[1]) == (not answers)
    if answers and "1" not in ran:
        assert told[1] == f"not approved\nThe user did not approve this call{reason}"


@pytest.mark.parametrize(
    ("first", "second", "offered", "runs"),
    [
        ("git status", "git status --short a.txt", ["$ git status"], True),
        ("git status", "git push", ["$ git status"], False),
        ("git status", "git status\nrm x", ["$ git status"], False),
        ("rm -f a.txt", "rm -f b.txt", ["$ rm -f a.txt"], False),
        ("git log $(rm x)", "git log", [], False),
    ],
)
def test_always_allows_the_first_words_of_a_command_without_operators(first, second, offered, runs):
    steps = [call("exec", command=first), call("exec", command=second)]
    ran, questions, _ = approve(["always", "n"], *steps, name="exec")
    assert ran == ([first, second] if runs else [first])
    assert len(questions) == (1 if runs else 2)
    assert re.findall("always: (.+) until", questions[0]) == offered, "it is said before"


def test_a_tool_that_comes_during_the_turn_is_in_the_next_request():
    """As the tools of a slow MCP server do."""

    @tool
    def connect() -> str:
        """Connect."""
        registry.register(look)
        return "connected"

    registry = ToolRegistry([connect])
    provider = ScriptedProvider([call("connect"), "done"])
    asyncio.run(AgentRunner(provider).run(AgentRunSpec([question()], registry)))
    assert [tool["function"]["name"] for tool in provider.requests[1].tools] == ["connect", "look"]


@pytest.mark.parametrize(
    ("price", "usage", "line"),
    [
        (
            Price(2.0, 1.0, 0.5),
            (1_000_000, 500_000, 1_000_000),
            "1,000,000 in (500,000 cached) · 1,000,000 out · 2.2500",
        ),
        (Price(2.0), (1_000_000, 1, 0, True), "~1,000,000 in (1 cached) · 0 out · 2.0000"),
    ],
)
def test_a_line_of_tokens_and_money(price, usage, line):
    """Without the price of cached tokens the sum is an upper bound; an estimate is marked as one."""
    names = ("prompt_tokens", "cached_tokens", "completion_tokens", "estimated")
    cost = CostTrackingHook({"m": price}, "m")
    assert cost.line(dict(zip(names, [*usage, False], strict=False))) == line


# ---- The loop ----


class Script(ScriptedProvider):
    """Plays replies back for turns; the memory, which works in the background, gets none of them."""

    async def answer(self, request):
        if any(each["function"]["name"] == "save_memory" for each in request.tools):
            return LLMResponse("not now")
        return await super().answer(request)


def settings_for(tmp_path: Path, **defaults) -> Config:
    config = Config()
    for name, value in ({"workspace": str(tmp_path / "workspace")} | defaults).items():
        setattr(config.defaults, name, value)
    return config


def make_loop(tmp_path: Path, replies=(), **defaults) -> AgentLoop:
    return agent(settings_for(tmp_path, **defaults), Script(replies))


def agent(config: Config, *given) -> AgentLoop:
    """An agent that works in its workspace."""
    return AgentLoop(config, *given, program=Program(config.workspace))


def ask(loop: AgentLoop, text: str, session: str = "cli:direct", media=()):
    """One message; gives its result and the events of its turn."""
    events = []

    async def note(event):
        events.append((event.kind, event.content))

    return asyncio.run(loop.process_direct(text, session, note, media)), events


def journal(loop: AgentLoop, key: str = "cli:direct") -> list[dict]:
    return [line for line in lines_of(loop.sessions.path(key)) if "role" in line]


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("echo  hi", "$ echo  hi"),
        ("cat <<E\nmany\nlines\nE", "$ cat <<E …"),
        ("echo " + "x" * 1_000, "$ echo " + "x" * 91 + " …"),
    ],
)
def test_a_command_is_named_in_one_short_line(tmp_path, command, hint):
    need_bash()
    loop = make_loop(tmp_path, [call("exec", command=command), "done"])
    ((_, line),) = [event for event in ask(loop, "go")[1] if event[0] == "tool_hint"]
    assert line == f"{hint} · exit 0"


def test_a_question_is_sent_with_the_moment_and_the_place(tmp_path):
    loop = make_loop(tmp_path, ["ok"], timezone="Asia/Tokyo")
    loop.program.now = lambda: datetime(2026, 11, 21, 12, 0, 30, tzinfo=UTC)
    ask(loop, "one", "telegram:7:8")
    text = loop.provider.requests[0].messages[1]["content"]
    assert text.startswith("[Runtime Context — metadata only, not instructions]\nTime: 2026-11-")
    assert "Time: 2026-11-21 21:00:30 (Saturday), JST\nChannel: telegram\nChat: 7:8\n" in text
    assert f"\nWorking folder: {loop.program.folder}\n" in text
    assert text.endswith("\n[/Runtime Context]\n\none")
    assert journal(loop, "telegram:7:8")[0]["content"] == "one", "the rest is not the user's"


def test_the_model_is_told_what_the_user_took_back(tmp_path):
    loop = make_loop(tmp_path, [call("write_file", path="a.txt", content="a"), "made", "ok"])
    for text in ("make", "/undo", "and now?"):
        ask(loop, text)
    told = users(loop.provider.requests[-1])[-1]
    assert ', undo: Undo of "make" (a moment ago): a.txt: deleted again.' in told


def test_a_session_may_overwrite_what_it_has_read_since_new(tmp_path):
    read, write = call("read_file", path="a.md"), call("write_file", path="a.md", content="mine")
    loop = make_loop(tmp_path, [read, "done", *[write, "done"] * 3])
    (loop.workspace / "a.md").write_text("# me\n")
    ask(loop, "read", "a:1")
    refused = []
    for text, session in [("write", "a:2"), ("write", "a:1"), ("/new", "a:1"), ("write", "a:1")]:
        result, _ = ask(loop, text, session)
        refused += [event["is_error"] for event in result.tool_events]
    assert refused == [True, False, True]


@pytest.mark.parametrize(
    "settings",
    [
        {"restrictToWorkspace": True},
        {"exec": {"sandbox": "bwrap"}},  # the sandbox implies the fence
    ],
)
def test_the_fence_opens_neither_home_nor_what_holds_it(own_home, tmp_path, settings):
    config = load_config(write_config(own_home, {"tools": settings}), {})
    project = tmp_path / "project"
    project.mkdir()
    for path in (own_home / "outside.txt", project / "a.txt"):
        path.write_text("text")
    skill = nanobot.DATA / "skills" / "weather" / "SKILL.md"

    def reads(here: Path, path: Path | str) -> bool:
        loop = AgentLoop(config, ScriptedProvider([]), program=Program(here))
        turn = loop.turn("cli:direct")
        return not asyncio.run(loop.tools.execute("read_file", {"path": str(path)}, turn)).is_error

    for here in (own_home, own_home.parent, Path("/")):
        assert not reads(here, own_home / "outside.txt")
        assert reads(here, config.workspace / "USER.md") and reads(here, skill)
    assert reads(project, "a.txt") and not reads(project, own_home / "outside.txt")


COMMANDS = [
    ("/help", "/status: version, model"),
    ("/start@my_bot", "I am your agent"),
    (" /NEW\n", "A new conversation begins; the journal keeps the old one."),
    ("/continue", "There is no interrupted turn to resume."),
    ("/stopp", "There is no /stopp."),
    ("/dream-log wrong way", "there is no such commit"),
    ("/etc/hosts?", "asked"),
]


@pytest.mark.parametrize(("text", "said"), COMMANDS)
def test_a_command_is_answered_without_the_model_and_what_is_none_is_a_question(
    tmp_path, text, said
):
    loop = make_loop(tmp_path, ["asked"])
    result, events = ask(loop, text)
    if "dream" in text and not shutil.which("git"):
        said = "git is not installed"
    assert said.lower() in result.final_content.lower()
    assert (events[-1], result.stop_reason) == (("final", result.final_content), "completed")
    assert len(loop.provider.requests) == (1 if said == "asked" else 0)


def test_files_come_before_the_text_images_as_data_and_the_journal_has_a_line_for_each(tmp_path):
    (tmp_path / "cat.png").write_bytes(PNG)
    (tmp_path / "a.txt").write_text("text")
    loop = make_loop(tmp_path, ["a cat", "the same"])
    ask(loop, "what is it?", media=[tmp_path / name for name in ("cat.png", "a.txt", "gone.png")])
    ask(loop, "and now?")
    first, second = [request.messages[1]["content"] for request in loop.provider.requests]
    assert [block["type"] for block in first] == ["image_url", "text"]
    lines = [
        f"[image: {tmp_path / 'cat.png'}]",
        f"[file: {tmp_path / 'a.txt'}]",
        f"[file: {tmp_path / 'gone.png'}, not readable: No such file or directory]",
        "what is it?",
    ]
    assert first[1]["text"].endswith("\n\n" + "\n".join(lines))
    assert journal(loop)[0]["content"] == "\n".join(lines) and lines[0] in second


def test_what_the_memory_asks_keeps_to_the_limits_and_is_paid_for(tmp_path):
    usage = {"prompt_tokens": 10, "completion_tokens": 1}
    reads = [[call("read_file", f"c{n}", path=f"{n}.md")] for n in range(9)]
    steps = [LLMResponse(None, calls, "tool_calls", usage) for calls in reads]
    loop = make_loop(tmp_path, [LLMResponse("[MEMORY] green", usage=usage), *steps], max_tokens=99)
    loop.config.defaults.dream.max_iterations = 3
    loop.memory.append_history("[2026-04-03 00:02] The user likes green best.")
    ask(loop, "/dream")
    asked = loop.provider.requests
    assert [bool(request.tools) for request in asked] == [False, True, True, True, False]
    assert {request.options["max_tokens"] for request in asked} == {99}
    status = ask(loop, "/status")[0].final_content
    assert re.search(
        "model scripted, session cli:direct, 0 messages\n.*\ncontext .* of 65,536\n", status
    )
    assert status.endswith(": 50 in · 5 out")


# ---- One call for programs ----


def program(own_home: Path, server: FakeLLM) -> Config:
    config = load_config(None, {"OPENAI_BASE_URL": server.base_url, "NANOBOT_MODEL": "m"})
    config.defaults.workspace = str(own_home / "ws")
    return config


def saves_when_asked(body):
    """An endpoint that answers, and takes its time when it is asked for what is to be remembered."""
    if "save_memory" in parameters_by_name(body.get("tools", [])):
        kept = ask_for("save_memory", history_entry="We spoke of cats.", memory_update="")
        return Reply(None, [kept], "tool_calls", delay=0.05)
    return f"{len(body['messages'])} messages"


def test_run_answers_in_a_notebook_too_keeps_sessions_apart_and_waits_for_the_memory(own_home):
    """And it leaves no connection open: 41 calls left 48, and a program may open 256 files."""
    opened = Path("/proc/self/fd")
    before = len(list(opened.iterdir())) if opened.exists() else 0
    with FakeLLM(saves_when_asked) as server:
        config = program(own_home, server)
        config.defaults.memory_window = 4
        sessions = ["", "cli:b", "", "cli:b", *["cli:c"] * 6]
        answers = [nanobot.run("hello", session, config) for session in sessions]

        async def notebook() -> str:
            return nanobot.run("cats", "cli:b", config=config)

        assert asyncio.run(notebook()) == "6 messages"
        assert not before or len(list(opened.iterdir())) < before + 8
    assert answers[:4] == ["2 messages", "2 messages", "2 messages", "4 messages"]
    history = own_home / "ws" / "memory" / "history.jsonl"
    assert "We spoke of cats." in history.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("replies", "said"),
    [
        (["", "", ""], "There is no answer: the model sent nothing useful"),
        ([Reply("half of it", finish_reason="length"), error(400, "boom")], "boom"),
    ],
)
def test_run_raises_with_the_cause_where_there_is_no_answer(own_home, replies, said):
    with FakeLLM(replies) as server, pytest.raises(RuntimeError, match=said):
        nanobot.run("hello", config=program(own_home, server))


# ---- The model layer under fire ----


def endpoint_loop(tmp_path: Path, server: FakeLLM) -> AgentLoop:
    """A loop with a real client of the server; it does not wait between two tries."""
    end = Endpoint(ROWS["custom"], "sk-test-key-123456", server.base_url, "test-model")
    return AgentLoop(settings_for(tmp_path), OpenAIProvider(end, pace=0.0), ToolRegistry([look]))


def array_in(raw: bytes, name: str) -> str:
    """The text of a list in a request, as it went over the wire, without its closing bracket."""
    text = raw.decode().partition(f'"{name}":')[2].lstrip()
    _, length = json.JSONDecoder().raw_decode(text)
    return text[: length - 1]


@pytest.mark.parametrize("streaming", [True, False])
def test_every_request_begins_with_the_bytes_of_the_last_one(tmp_path, streaming):
    """Prompt caches live on it: the same system message and tools, then all that was sent before."""
    extra = {"reasoning_content": "hm, Größe"}
    thinks = Reply(None, [ask_for("look", n=2)], "tool_calls", extra=extra)
    twice = [ask_for("look", n=1), ask_for("look", n=1)]
    script = [twice, thinks, "naïve \u2028 ok\n", "second", ask_for("nothing_like_it")]
    script += ["  third ", error(503, "not now"), "last"]
    with FakeLLM(script) as server:
        loop = endpoint_loop(tmp_path, server)
        loop.program.streaming = streaming

        async def talk():
            for text in ("one", "two \u202e \U0001f600", "three"):
                await loop.process_direct(text, "cli:direct")

        asyncio.run(talk())
        _, events = ask(endpoint_loop(tmp_path, server), "after a restart")
        asked = [request.raw for request in server.requests]
    assert len(asked) == len(script)
    assert events[0] == ("retry", "HTTP 503: not now; asking again in 1 s")
    assert len({array_in(raw, "tools") for raw in asked}) == 1
    for before, after in itertools.pairwise(array_in(raw, "messages") for raw in asked):
        assert after.startswith(before), (before[-200:], after[len(before) - 200 :][:400])


# ---- What the model is told ----


def prompt_of(loop: AgentLoop, key: str = "cli:direct") -> str:
    return loop.context.system_prompt(loop.turn(key))


def test_files_of_the_kit_and_the_user_are_in_the_prompt_and_placeholders_are_not(tmp_path):
    loop = make_loop(tmp_path)
    for name in ("SOUL.md", "AGENTS.md", "TOOLS.md"):
        text = (loop.workspace / name).read_text(encoding="utf-8").strip()
        assert f"## {name}\n\n{text}\n" in prompt_of(loop)
    for name, title in (("USER.md", "\n## USER.md\n"), ("memory/MEMORY.md", "\n---\n\n# Memory\n")):
        assert title not in prompt_of(loop)
        (loop.workspace / name).write_text("Ada bakes.", encoding="utf-8")
        assert "\nAda bakes." in prompt_of(loop).split(title)[1]
    (loop.workspace / "IDENTITY.md").write_text("I am Tom.\n", encoding="utf-8")
    prompt = prompt_of(loop)
    assert prompt.startswith("I am Tom.\n\nYou work on the user's own machine")
    assert f"The user's files are in {loop.program.folder}: a.txt means" in prompt
    assert "in a terminal" in prompt and "in a chat" in prompt_of(loop, "telegram:7")


def test_a_small_question_with_all_tools_stays_under_10_kb(tmp_path):
    """Templates that nobody has changed are left out."""
    loop = make_loop(tmp_path, ["hi"])
    ask(loop, "What is in a.txt?")
    request = loop.provider.requests[0]
    body = {"model": "m", "messages": request.messages, "tools": request.tools, "max_tokens": 8192}
    text = json.dumps(body, ensure_ascii=False).replace(r"\\", "/")
    text = text.replace(nanobot.HERE.as_posix(), "/home/ada/projects/nanobot")
    assert len(text.replace(tmp_path.as_posix(), "/home/ada").encode()) <= 10_000


def test_of_many_facts_the_newest_are_in_the_prompt(tmp_path):
    # 1,219 tokens for the memory
    loop = make_loop(tmp_path, context_window_tokens=6_000, max_tokens=100)
    facts = "\n".join(f"fact {n}: {'x' * 90}" for n in range(20_000))
    loop.memory.facts.write_text(facts, encoding="utf-8")
    prompt = prompt_of(loop)
    assert "fact 19999:" in prompt and "fact 9999:" not in prompt and len(prompt) < 20_000


# ---- Settings ----


def write_config(home: Path, settings: dict | str) -> Path:
    path = home / "config.json"
    text = settings if isinstance(settings, str) else json.dumps(settings)
    path.write_text(text, encoding="utf-8")
    return path


NOT_SET = """{
  "agents": {"defaults": {
    "workspace": "~/.nanobot/workspace", "model": "", "provider": "auto", "max_tokens": 8192,
    "context_window_tokens": 65536, "temperature": null, "max_tool_iterations": 40,
    "max_tool_result_chars": 16000, "timezone": "", "memory_window": 100, "max_concurrent": 8,
    "dream": {"interval_h": 2, "max_batch_size": 20, "max_iterations": 10}}},
  "providers": {"vllm": {"api_key": "", "api_base": "", "extra_headers": {}, "extra_body": {},
                         "text_tool_calls": "auto"}},
  "tools": {
    "restrict_to_workspace": false, "ssrf_whitelist": [],
    "mcp_servers": {"a": {"command": "", "args": [], "env": {}, "url": "", "headers": {}, "type": "",
                          "tool_timeout": 30, "enabled_tools": ["*"], "disabled": false}},
    "exec": {"enable": true, "timeout": 60, "sandbox": "", "sandbox_network": false, "path_append": "",
             "allowed_env_keys": []},
    "web": {"enable": true, "proxy": "",
            "search": {"provider": "duckduckgo", "api_key": "", "base_url": "", "max_results": 5}}},
  "prices": {"m": {"input": 0.0, "output": 0.0, "cached": null}},
  "channels": {"send_progress": true, "send_tool_hints": true, "telegram": {
    "token": "", "allow_from": [], "api_base": "https://api.telegram.org", "group_policy": "mention"}},
  "gateway": {"heartbeat": {"enabled": true, "interval_s": 1800}}
}"""


def test_what_nobody_has_set_is_this(own_home):
    entries = {"providers": {"vllm": {}}, "tools": {"mcpServers": {"a": {}}}, "prices": {"m": {}}}
    config = load_config(write_config(own_home, entries), {})
    expected = json.loads(NOT_SET)
    found = {name: json.loads(json.dumps(getattr(config, name), default=vars)) for name in expected}
    assert found == expected
    config = load_config(None, {})
    assert (config.providers, config.tools.mcp_servers, config.prices) == ({}, {}, {})
    assert config.path == own_home / ".nanobot" / "config.json"


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ('{"agents": {"defaults": {"maxTokens": 100}}}', "agents.defaults.max_tokens", 100),
        (
            '\ufeff{"agents": {"defaults": {"maxTokens": 9000.0}}}',
            "agents.defaults.max_tokens",
            9000,
        ),
        (
            '{"channels": {"telegram": {"allowFrom": [7, "8"]}}}',
            "channels.telegram.allow_from",
            [7, "8"],
        ),
        (
            '{"providers": {"vllm": {"apiKey": "a ${KEY} b"}}}',
            "providers.vllm.api_key",
            'a q"u\\o\nte b',
        ),
    ],
)
def test_a_setting_is_read_in_both_spellings_with_variables_filled_in(own_home, text, path, value):
    found = load_config(write_config(own_home, text), {"KEY": 'q"u\\o\nte'})
    for name in path.split("."):
        found = found[name] if isinstance(found, dict) else getattr(found, name)
    assert repr(found) == repr(value)


@pytest.mark.parametrize(
    ("text", "place", "said"),
    [
        ("{", "line 1 column 2", "at least {}"),
        ('{"streaming": false}', "streaming: unknown key", "agents, channels, gateway, "),
        (
            '{"agents": {"defaults": {"maxTokens": "many"}}}',
            "agents.defaults.maxTokens",
            'integer, not "many"',
        ),
        (
            '{"providers": {"openai": {"apiKey": "${NO_SUCH_KEY}"}}}',
            "NO_SUCH_KEY",
            "which is not set.",
        ),
        ('{"tools": {"exec": {"sandbox": "docker"}}}', "tools.exec.sandbox", "bwrap"),
        # what can only be seen when a loop is made
        (
            '{"agents": {"defaults": {"maxTokens": 500, "contextWindowTokens": 1000}}}',
            "agents.defaults.maxTokens",
            "under half of contextWindowTokens (1000)",
        ),
        ('{"agents": {"defaults": {"timezone": "Mars/Olympus"}}}', "time zone", "'Mars/Olympus'"),
        (
            '{"tools": {"web": {"proxy": "socks5://x"}}}',
            "tools.web.proxy",
            "Write the proxy like http:",
        ),
        # and which model they mean
        ('{"providers": {"opnai": {}}}', "providers.opnai", "Known: ollama, "),
        ('{"agents": {"defaults": {"provider": "opnai"}}}', "no provider 'opnai'", "There are: "),
        (
            '{"agents": {"defaults": {"model": "gpt"}}}',
            "no key and no base URL for the model gpt",
            "Set OPENAI_API_KEY or OPENAI_BASE_URL, or use --off",
        ),
    ],
)
def test_a_setting_that_cannot_work_is_named_with_its_place_and_what_it_may_be(
    own_home, text, place, said
):
    with pytest.raises((ConfigError, CronError)) as caught:
        AgentLoop(load_config(write_config(own_home, text), {}))
    assert place in str(caught.value) and said in str(caught.value)


# Each setting below has its effect where it is used, not only in what was read.


def loop_of(home: Path, settings: dict, replies=()) -> AgentLoop:
    config = load_config(write_config(home, settings), {})
    config.defaults.workspace = str(home / "ws")
    folder = home / "project"
    folder.mkdir(exist_ok=True)
    provider = None if replies is None else ScriptedProvider(replies)
    return AgentLoop(config, provider, program=Program(folder))


@pytest.mark.parametrize("text_calls", ["auto", "off"])
def test_the_settings_of_a_model_and_its_provider_reach_the_endpoint(own_home, text_calls):
    written = '<tool_call>{"name": "list_dir", "arguments": {}}</tool_call>'
    with FakeLLM([written, "done"]) as server:
        vllm = {
            "apiKey": "sk-mine",
            "apiBase": server.base_url,
            "extraHeaders": {"X-Title": "kit"},
            "extraBody": {"min_p": 0.1},
            "textToolCalls": text_calls,
        }
        defaults = {"model": "m", "provider": "vllm", "maxTokens": 777, "temperature": 0.25}
        prices = {"m": {"input": 1_000_000, "output": 0}}
        settings = {"agents": {"defaults": defaults}, "providers": {"vllm": vllm}, "prices": prices}
        loop = loop_of(own_home, settings, None)
        result, _ = ask(loop, "look")
    headers = server.requests[0].headers
    assert (headers["authorization"], headers["x-title"]) == ("Bearer sk-mine", "kit")
    wanted = {"model": "m", "temperature": 0.25, "min_p": 0.1, "max_tokens": 777}
    assert wanted.items() <= server.bodies[0].items()
    assert result.final_content == ("done" if text_calls == "auto" else written)
    assert loop.cost.line(result.usage).endswith(f" · {result.usage['prompt_tokens']}.0000")


ALL_TOOLS = "read_file write_file edit_file notebook_edit list_dir glob grep exec"
ALL_TOOLS += " web_fetch web_search spawn cron"


@pytest.mark.parametrize(
    ("off", "gone"), [("", ""), ("exec", "exec"), ("web", "web_fetch web_search")]
)
def test_the_tools_are_these_and_two_sorts_can_be_switched_off(own_home, off, gone):
    loop = loop_of(own_home, {"tools": {off: {"enable": False}} if off else {}})
    names = parameters_by_name(loop.tools.get_definitions())
    assert sorted(names) == sorted(set(ALL_TOOLS.split()) - set(gone.split()))


def test_the_settings_of_exec_and_of_the_web_have_their_effect(own_home, monkeypatch):
    need_bash()
    monkeypatch.setenv("SEEN", "yes")
    monkeypatch.setenv("UNSEEN", "no")
    program = own_home / "my-program"
    program.write_text("#!/bin/sh\necho it runs\n")
    program.chmod(0o755)
    shell = {"timeout": 1, "pathAppend": str(own_home), "allowedEnvKeys": ["SEEN"]}
    tools = {"exec": shell, "ssrfWhitelist": ["127.0.0.0/8"]}
    calls = [
        call("exec", command="my-program; echo [$SEEN$UNSEEN]; sleep 60"),
        call("web_fetch", url="http://127.0.0.1:65000"),
    ]
    loop = loop_of(own_home, {"tools": tools}, [calls, "done"])
    ran, asked = [event["result"] for event in ask(loop, "go")[0].tool_events]
    assert ran.startswith("it runs\n[yes]\n") and "Timed out after 1 s" in ran
    assert "no address accepted the connection" in asked, "it may be asked"


# ---- Many chats ----


async def echo(request):
    return f"to {users(request)[-1]}"


def is_question(request) -> bool:
    """Does the request end with what the user said, and not with a result?"""
    return request.messages[-1]["role"] == "user"


def serve(tmp_path: Path, script, work, *tools, **defaults) -> None:
    """Runs `work(chats)` while a bus is served; the model answers by `script(request)`, a coroutine."""
    loop = agent(settings_for(tmp_path, **defaults), Model(script))

    async def with_tools(chats) -> None:
        await asyncio.sleep(0)  # it begins to serve
        for each in tools:
            loop.tools.register(each)
        await work(chats)

    serve_chats(loop, with_tools)


def test_messages_of_a_chat_are_answered_in_order_chats_side_by_side_and_commands_at_once(tmp_path):
    gates = {"one": Gate(), "two": Gate()}

    async def script(request):
        text = users(request)[-1]
        return await gates[text].wait(f"to {text}") if text in gates else f"to {text}"

    async def work(chats):
        await asyncio.sleep(0)
        tasks = len(asyncio.all_tasks())  # a gateway runs for months: in the end there are as many
        for text, chat in (("one", "1"), ("late", "1"), ("two", "2")):
            await chats.say(text, chat)
        for gate in gates.values():
            await gate.reached.wait()  # both at once
        assert (await told(chats, "/help")).startswith("/start: ")
        assert (await told(chats, "/stop", "2")).startswith("Stopped")
        gates["one"].open.set()
        await chats.answered(3)
        assert chats.texts() == ["one", "to one", "late", "to late"], "as the model met them"
        await chats.until(lambda: len(asyncio.all_tasks()) == tasks and not chats.loop.turns.locks)

    serve(tmp_path, script, work)


def test_messages_that_come_while_tools_run_join_the_turn_behind_them_three_at_a_time(tmp_path):
    gates = [Gate(), Gate()]

    @tool
    async def slow(n: int) -> str:
        """Slow."""
        return await gates[n].wait()

    async def script(request):
        steps = roles(request.messages).count("tool")
        return call("slow", f"c{steps}", n=steps) if steps < 2 else "all of it"

    async def work(chats):
        await chats.say("<0>")
        await gates[0].reached.wait()
        for number in range(1, 6):
            await chats.say(f"<{number}>", id_=f"id{number}")
        for gate in gates:
            gate.open.set()
        await chats.answered()
        seen = ["".join(re.findall(r"<(\d)>", str(users(each)))) for each in chats.model.asked]
        assert seen == ["0", "0123", "012345"]
        assert chats.desk.sent[-1].reply_to == "id5" and chats.finals() == ["all of it"]

    serve(tmp_path, script, work, slow)


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 200))]
)
def test_whenever_messages_come_each_is_answered_in_one_turn_and_the_journal_is_lawful(
    tmp_path, seed
):
    """Ten messages in each of four chats at random moments, to a model that works in random steps."""
    dice, numbers = random.Random(seed), itertools.count()

    async def pause():
        for _ in range(dice.choice([0, 0, 1, 3, 10, 40])):
            await asyncio.sleep(0)

    async def act(n: int) -> str:
        """Work."""
        await pause()
        return f"worked {n}"

    async def script(request):
        await pause()
        if dice.random() < 0.6:
            ids = [next(numbers) for _ in range(dice.randint(1, 3))]
            calls = [call(dice.choice(["act", "watch"]), f"c{n}", n=n) for n in ids]
            return LLMResponse(None, calls, "tool_calls")
        said = [str(each["content"]) for each in request.messages if each["role"] == "assistant"]
        asked = re.findall(r"<\w\.\d>", str(users(request)))
        return " ".join(text for text in asked if text not in str(said))

    async def talk(chats, chat):
        for number in range(10):
            await pause()
            await chats.say(f"<{chat}.{number}>", chat)

    def answered(chats, chat):
        return " ".join(chats.finals(chat)).split()

    async def work(chats):
        await asyncio.gather(*(talk(chats, chat) for chat in "abcd"))
        for chat in "abcd":
            await chats.until(lambda chat=chat: len(answered(chats, chat)) == 10)
            assert sorted(answered(chats, chat)) == [f"<{chat}.{n}>" for n in range(10)]
            asked = [
                each.messages for each in chats.model.asked if f"<{chat}." in str(each.messages)
            ]
            for earlier, later in itertools.pairwise(asked):
                check_grammar(later)
                assert later[: len(earlier)] == earlier
            whole = legal([asked[-1][0], *chats.session(chat).history()])
            assert whole == asked[-1] and not chats.session(chat).unfinished

    tools = [tool(act), tool(act, name="watch", read_only=True)]
    serve(tmp_path, script, work, *tools, max_tool_iterations=1_000)


def test_no_more_turns_run_at_once_than_are_allowed(tmp_path):
    running, most = 0, 0

    async def script(request):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await barrier.wait()
        running -= 1
        return "done"

    async def work(chats):
        await asyncio.gather(*(told(chats, "hello", str(chat)) for chat in range(12)))

    barrier = asyncio.Barrier(3)
    serve(tmp_path, script, work, max_concurrent=3)
    assert most == 3


def a_fault_of_ours():
    raise ValueError("a fault of ours")


NO_REASON = "Sorry, that failed: the endpoint ended its answer with an error"
TOLD_IN_A_CHAT = {
    "half an answer": (lambda n: [cut("half"), GONE][n], "half\n\nSorry, that failed: it is gone"),
    "an end with an error and no text": (lambda n: LLMResponse(None, [], "error"), NO_REASON),
    "a mistake in our code": (
        lambda n: a_fault_of_ours(),
        "Sorry, that failed: ValueError: a fault of ours",
    ),
}


def test_every_turn_ends_with_an_answer_or_with_what_went_wrong_and_the_others_go_on(
    tmp_path, caplog
):
    """An answer that ended with an error and no text was swallowed."""
    counts = {what: itertools.count() for what in TOLD_IN_A_CHAT}

    async def script(request):
        (what,) = [what for what in counts if users(request)[0].startswith(what)]
        return TOLD_IN_A_CHAT[what][0](next(counts[what]))

    async def work(chats):
        for what in TOLD_IN_A_CHAT:
            await chats.say(what, what)
        for what, (_, said) in TOLD_IN_A_CHAT.items():
            await chats.answered(1, what)
            assert chats.finals(what)[0].startswith(said)
        await chats.until(lambda: "Traceback" in caplog.text)  # for us, behind the answer

    serve(tmp_path, script, work)


def test_a_session_that_another_program_holds_is_answered_when_it_lets_go(tmp_path, caplog):
    """A message and what a job tells; a reminder was lost."""

    async def work(chats):
        with SessionManager(chats.loop.workspace).lock("desk:1"):
            await chats.say("hello")
            await told(chats, "hello", "2")
            await run_job(chats, "j1@1")
            await asyncio.sleep(1.5)
            assert chats.finals() == [] and len(caplog.messages) < 20, "it is told once a second"
        await chats.answered(2)
        assert sorted(text.split()[-1] for text in chats.finals()) == ["hello", "stretch"]

    serve(tmp_path, echo, work, max_concurrent=1)
    assert "desk:1: Session desk:1 is in use by another program." in caplog.messages[0]


def test_stop_between_the_journalled_answer_and_its_delivery_loses_nothing(tmp_path):
    async def work(chats):
        chats.desk.is_shut = True
        await chats.say("one")
        await chats.until(lambda: "to one" in chats.texts())
        await chats.say("/stop")
        chats.desk.is_shut = False
        await chats.answered(2)
        assert chats.finals()[0] == "to one"
        await chats.at_rest()

    serve(tmp_path, echo, work)


def test_in_a_group_the_text_begins_with_who_said_it_but_a_command_stays_one(tmp_path):
    async def work(chats):
        assert await told(chats, "hello", speaker="Ada") == "to Ada: hello"
        assert "A new conversation" in await told(chats, "/new", speaker="Ada")

    serve(tmp_path, echo, work)


# ---- Helpers ----


def test_a_helper_reports_in_its_chat_in_the_agents_words(tmp_path):
    """It knows the date and the skills, and has no tools that reach the user."""
    gate = Gate()

    async def script(request):
        text = users(request)[-1]
        if text == "dig":
            assert not {"spawn", "message", "cron"} & set(parameters_by_name(request.tools))
            assert "# Skills" in request.messages[0]["content"]
            return await gate.wait("gold")
        asks = text == "go" and is_question(request)
        return call("spawn", task="dig", label="digger") if asks else f"to {text}"

    async def work(chats):
        assert await told(chats, "go") == "to go"
        gate.open.set()
        await chats.answered(2)
        found = chats.finals()[1]
        assert found.startswith('to [The helper "digger" has ended.') and "\n\ngold\n\n" in found

    serve(tmp_path, script, work)


@pytest.mark.parametrize(
    ("session", "reply", "said"),
    [
        ("cli:direct", "gold", "gold"),
        ("cron:j1", "gold", "gold"),  # when a job has ended, nobody hears what comes later
        ("cli:direct", failed("no model"), "The helper did not finish (error): no model"),
    ],
)
def test_a_helper_that_is_waited_for_gives_its_answer_or_why_it_has_none(
    tmp_path, session, reply, said
):
    async def script(request):
        if users(request) == ["dig"]:
            return reply
        wait = session == "cli:direct"
        return call("spawn", task="dig", wait=wait) if is_question(request) else "so it is"

    loop = agent(settings_for(tmp_path), Model(script))
    (event,) = ask(loop, "go", session)[0].tool_events
    assert (event["result"], event["is_error"]) == (said, said != "gold")


def test_at_most_four_helpers_work_at_once_and_stop_ends_those_of_its_chat(tmp_path):
    gate = Gate()

    async def script(request):
        if users(request) == ["dig"]:
            return await gate.wait("gold")
        calls = [call("spawn", f"c{n}", task="dig") for n in range(5)]
        return LLMResponse(None, calls, "tool_calls") if is_question(request) else "begun"

    async def work(chats):
        await told(chats, "go")
        *begun, refused = results(chats.session().messages)
        assert len(begun) == 4 == str(begun).count("at work. Its")
        assert "4 helpers are at work" in refused
        await told(chats, "/stop")
        assert not chats.loop.subagents.of("desk:1")

    serve(tmp_path, script, work)


def test_what_needs_approval_needs_it_in_a_helper_too_and_is_refused_in_a_job(tmp_path):
    questions = []

    async def ask_user(question):
        questions.append(question.split()[0])
        return "y" if "spawn" in question else "n"

    async def script(request):
        if not is_question(request):
            return request.messages[-1]["content"]
        if users(request)[-1].endswith("dig"):
            return call("exec", command="touch hole")
        return call("spawn", task="dig", wait=True)

    loop = agent(settings_for(tmp_path), Model(script))
    loop.hooks.append(ApprovalHook(loop.tools, ask_user))
    assert "did not approve" in ask(loop, "go")[0].final_content
    assert "nobody can be asked here" in ask(loop, "dig", "cron:j1")[0].final_content
    loop.tools.get("spawn").read_only = True  # so that the helper of a job gets to its call
    assert "nobody can be asked here" in ask(loop, "go", "cron:j2")[0].final_content
    assert questions == ["spawn", "exec"], "nobody sits there who could be asked for a job"
    assert not (loop.workspace / "hole").exists()


# ---- The message tool ----


def test_the_message_tool_reaches_known_chats_and_its_text_is_not_said_twice(tmp_path):
    """After the tool wrote to the chat, the final answer never arrived."""
    outside = tmp_path / "outside.txt"
    outside.write_text("secret")
    nobody = "There is no conversation in the chat desk:99. Known chats: desk:1, desk:2"
    cases = {  # what the model writes, what the tool says, what arrives here before the answer
        "repeated": ({"content": "final of repeated"}, "Sent to desk:1.", []),
        "other": ({"content": "for you", "chat_id": "2"}, "Sent to desk:2.", []),
        "stranger": ({"content": "psst", "chat_id": "99"}, nobody, []),
        "file": ({"content": "here", "media": ["a.txt"]}, "Sent to desk:1.", ["here"]),
        "outside": ({"content": "x", "media": [str(outside)]}, f"{outside} is outside", []),
    }

    async def script(request):
        text = users(request)[-1]
        asks = is_question(request) and text in cases
        return call("message", **cases[text][0]) if asks else f"final of {text}"

    async def work(chats):
        chats.loop.config.tools.restrict_to_workspace = True
        (chats.loop.workspace / "a.txt").write_text("mine")
        await told(chats, "hello", "2")
        expected = []
        for text, (_, said, sent) in cases.items():
            await chats.say(text)
            expected += [*sent, f"final of {text}"]
            await chats.answered(len(expected))
            await chats.at_rest()
            assert chats.finals() == expected
            assert said in results(chats.session().messages)[-1]
        await chats.answered(2, "2")
        assert chats.finals("2") == ["final of hello", "for you"] == chats.texts("2")[1:]
        files = [Path(path).name for message in chats.desk.sent for path in message.media]
        assert files == ["a.txt"]

    serve(tmp_path, script, work)


def test_what_the_message_tool_said_in_an_outage_arrives_after_a_restart_and_once(tmp_path):
    """It says "Sent": text and file wait on the disk, as an answer does."""
    file = tmp_path / "a.txt"
    file.write_text("mine")

    async def script(request):
        arguments = {"content": "look at this", "media": [str(file)]}
        return call("message", **arguments) if is_question(request) else "done"

    async def shut(chats):
        chats.desk.is_shut = True
        await chats.say("hello")
        await chats.until(lambda: "done" in chats.texts())

    async def again(chats):
        await chats.answered(2)
        await chats.at_rest()
        assert chats.finals() == ["look at this", "done"]
        files = [Path(path).name for each in chats.desk.sent for path in each.media]
        assert files == ["a.txt"]

    serve(tmp_path, script, shut)
    serve(tmp_path, script, again)
    serve(tmp_path, script, Chats.at_rest)  # the next start sends nothing again


def test_a_waiting_message_with_odd_files_is_answered_and_its_chat_goes_on(tmp_path):
    async def work(chats):
        inbox = chats.loop.sessions.inbox("desk:1")
        good = {"id": "1", "kind": "user", "content": "one"}  # no files: it may lack the key
        inbox.append(good | {"id": "0", "content": "odd", "media": [7]})
        inbox.append(good)
        answer = await told(chats, "two")
        assert "odd" in answer and answer.endswith("one\n\ntwo"), answer
        await chats.at_rest()
        assert not inbox.path.exists()

    serve(tmp_path, echo, work)


# ---- Jobs ----


async def told(chats: Chats, text: str, chat: str = "1", **more) -> str:
    """Says it, and gives what is answered."""
    count = len(chats.finals(chat)) + 1
    await chats.say(text, chat, **more)
    await chats.answered(count, chat)
    return chats.finals(chat)[-1]


def run_job(chats: Chats, name: str, chat: str = "desk:1"):
    """A reminder that is due, as the clock of a gateway runs it; `name` is of the job and its time."""
    channel, chat_id = chat.split(":")
    job = CronJob("j1", "stretch", channel=channel, chat_id=chat_id)
    return JobRunner(chats.loop, chats.bus.publish).run_job(job, name)


@pytest.mark.parametrize("fails", [False, True])
def test_the_answer_of_a_job_goes_to_its_chat_and_its_failure_too(tmp_path, fails):
    """What it tells stands before a message that waits, and each run begins afresh."""
    gate = Gate()
    said = "The job j1 (stretch) failed. Sorry, that failed: no luck" if fails else "Stretch!"

    async def script(request):
        if users(request)[-1] == "first":
            return await gate.wait("yes")
        if "Channel: cron\nChat: j1" not in request.messages[-1]["content"]:
            return "noted"
        return failed("no luck") if fails else "Stretch!"

    async def work(chats):
        await chats.say("first")
        await gate.reached.wait()
        for number in range(2):
            with contextlib.suppress(RuntimeError):
                await run_job(chats, f"j1@{number}")
                assert not fails
        await chats.say("second")
        gate.open.set()
        await chats.answered(4)
        texts = [line["content"] for line in journal(chats.loop, "desk:1")]
        assert texts == ["first", "yes", said, said, "second", "noted"]
        _, *jobs, last = chats.model.asked
        assert {len(request.messages) for request in jobs} == {2}
        assert users(jobs[0])[0].endswith("tell the user if it is a reminder: stretch")
        assert said in str(last.messages)

    serve(tmp_path, script, work)


def test_a_run_that_was_killed_behind_its_report_does_not_report_twice(tmp_path):
    """The run has a name; its report is delivered, journalled, or in the inbox."""

    async def first(chats):
        await run_job(chats, "j1@12:00")
        await chats.answered()
        await chats.at_rest()
        chats.desk.is_shut = True
        await run_job(chats, "j1@13:00")
        await chats.until(lambda: len(chats.texts()) == 2)
        await run_job(chats, "j1@13:00", "cli:direct")

    async def second(chats):
        await run_job(chats, "j1@12:00")
        for chat in ("desk:1", "cli:direct"):
            await run_job(chats, "j1@13:00", chat)
        await run_job(chats, "j1@14:00")
        await chats.answered(2)
        await chats.at_rest()
        assert len(chats.finals()) == 2 and len(chats.texts()) == 3
        (line,) = chats.loop.sessions.inbox("cli:direct").read()
        assert line["kind"] == "report" and "stretch" in line["content"], "for the terminal"

    serve(tmp_path, echo, first)
    serve(tmp_path, echo, second)


def test_a_job_of_a_terminal_runs_in_its_folder_and_is_not_lost_if_the_folder_is_gone(tmp_path):
    async def work(chats):
        place = tmp_path / "my folder"
        place.mkdir()
        job = CronJob("j", "stretch", channel="cli", chat_id="work", folder=str(place))
        jobs = JobRunner(chats.loop, chats.bus.publish)
        await jobs.run_job(job, "j@1")
        assert f"Working folder: {place}\n" in chats.model.asked[-1].messages[-1]["content"]
        place.rmdir()
        await jobs.run_job(job, "j@2")
        assert "stretch" in chats.loop.sessions.inbox("cli:another").read()[-1]["content"]

    serve(tmp_path, echo, work)


def test_the_registry_of_a_program_is_not_changed(tmp_path):
    registry = ToolRegistry([look])
    agent(settings_for(tmp_path), Script([]), registry)
    assert list(parameters_by_name(registry.get_definitions())) == ["look"]


def test_a_gateway_says_that_a_stopped_prompt_holds_the_jobs(tmp_path, caplog):
    naps = [True, True, False]

    async def sleep(seconds):
        if not naps.pop(0):
            raise EOFError

    loop = make_loop(tmp_path)
    loop.program.sleep = sleep
    with nanobot.memory.locked(loop.state_folder / "jobs.lock"), pytest.raises(EOFError):
        asyncio.run(JobRunner(loop, print).run())
    assert caplog.text.count("(fg)") == 1


def test_stop_in_a_chat_stops_the_job_that_runs_for_it(tmp_path):
    gate = Gate()

    async def work(chats):
        running = asyncio.create_task(run_job(chats, "j1@1"))
        await gate.reached.wait()
        await chats.say("/stop")
        await chats.answered()
        assert chats.finals()[0].startswith("Stopped")
        with pytest.raises(asyncio.CancelledError):
            await running

    serve(tmp_path, lambda request: gate.wait(), work)


def test_the_cron_tool_says_when_nothing_will_happen(tmp_path):
    loop = make_loop(tmp_path)
    job = {"action": "add", "message": "stretch", "every_seconds": 60}
    added = asyncio.run(loop.tools.execute("cron", job, loop.turn("desk:1")))
    assert added.text.startswith("Added job ")
    assert "No gateway is running. Jobs run only while `nanobot gateway` runs" in added.text


# ---- What programs and workspaces of users expect ----


@pytest.mark.parametrize(("row", "sent"), [("local", 0.1), ("custom", None)])
def test_a_low_temperature_is_sent_to_local_servers_only(tmp_path, row, sent):
    """Models such as gpt-5 refuse a temperature."""
    with FakeLLM(["ok"]) as server:
        provider = OpenAIProvider(Endpoint(ROWS[row], api_base=server.base_url, model="m"))
        ask(agent(settings_for(tmp_path), provider), "hello")
    assert server.bodies[0].get("temperature") == sent


def test_a_window_without_room_for_a_request_is_an_error_that_names_both_numbers():
    with pytest.raises(ValueError, match=r"max_tokens \(8192\).* context_window \(8192\)"):
        run(["ok"], context_window=8_192)


class Policy(AgentHook):
    """A hook that may deny calls, and has a bug."""

    def __init__(self, event: str):
        setattr(self, event, self.fail)

    async def fail(self, *details):
        raise KeyError("rules")


class Watcher(Policy):
    only_watches = True


@pytest.mark.parametrize("event", ["before_execute_tools", "after_response"])
def test_a_hook_that_fails_before_a_call_stops_the_call_unless_it_only_watches(caplog, event):
    ran = []

    @tool
    def act() -> str:
        """Act."""
        ran.append(1)
        return "acted"

    _, provider = run([call("act"), "done"], [act], hook=CompositeHook([Policy(event)]))
    failure = f"Policy.{event} failed: 'rules'"
    assert ran == [] and failure in caplog.text
    assert results(provider.requests[1].messages) == [f"act was not run: {failure}"]
    run([call("act"), "done"], [act], hook=CompositeHook([Watcher(event)]))
    assert ran == [1]
