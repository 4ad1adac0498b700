"""The story: the runner, the hooks, the loop, the settings; all in this process, with scripted models."""

import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import sys
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest

import nanobot
from chats import Chats, Desk, Gate, Model, serve_chats, waiting_tool
from fake_llm import Failure, FakeLLM, Hang, Raw, Reply, error
from fake_llm import call as ask_for
from channels import CronError, CronJob
from memory import SessionManager, remember_terminals
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
    names_of,
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
)
from test_providers import check_grammar
from tools import ToolError, ToolRegistry, ToolResult, tool

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
    """The user's texts in a request, without what is said of time and place."""
    texts = [str(message["content"]) for message in request.messages if message["role"] == "user"]
    return [re.sub(r"(?s)\[Runtime Context.*?\[/Runtime Context\]\n\n", "", text) for text in texts]


@tool(read_only=True)
def look(n: int = 0) -> str:
    """Look."""
    return f"saw {n}"


@tool
def broken() -> str:
    """Fails."""
    raise ToolError("it is broken: mend it")


@tool
def silent() -> str:
    """Says nothing."""
    return " "


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


def recording_tools(ran: list) -> list:
    """The tools that the answers in text_calls.jsonl call; each notes its calls and does nothing."""

    def note(name: str, **arguments) -> str:
        given = {key: value for key, value in arguments.items() if value}
        ran.append({"name": name, "arguments": given})
        return "done"

    @tool(read_only=True, exclusive=True)
    def read_file(path: str, offset: int = 0, limit: int = 0) -> str:
        """Read."""
        return note("read_file", path=path, offset=offset, limit=limit)

    @tool(read_only=True, exclusive=True)
    def list_dir(path: str = "") -> str:
        """List."""
        return note("list_dir", path=path)

    @tool(read_only=True, exclusive=True)
    def now() -> str:
        """The time."""
        return note("now")

    @tool
    def write_file(path: str, content: str) -> str:
        """Write."""
        return note("write_file", path=path, content=content)

    @tool
    def edit_file(path: str, old_text: str, new_text: str, replace_all: bool = False) -> str:
        """Edit."""
        texts = {"old_text": old_text, "new_text": new_text, "replace_all": replace_all}
        return note("edit_file", path=path, **texts)

    @tool
    def exec(command: str, timeout: int = 0) -> str:
        """Execute."""
        return note("exec", command=command, timeout=timeout)

    @tool
    def send_report(to: str, text: str) -> str:
        """Send."""
        return note("send_report", to=to, text=text)

    return [read_file, list_dir, now, write_file, edit_file, exec, send_report]


def in_random_pieces(text: str, chance: random.Random) -> Raw:
    """A stream that cuts the text anywhere."""
    chunks, rest = [], text
    while rest:
        size = chance.choice([1, 2, 3, 7, 40])
        piece, rest = rest[:size], rest[size:]
        chunks.append({"choices": [{"index": 0, "delta": {"content": piece}}]})
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    return Raw(chunks=[f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks])


class Watching(AgentHook):
    wants_streaming = True

    def __init__(self):
        self.shown = ""

    async def on_stream(self, delta):
        self.shown += delta


@pytest.mark.parametrize("group", sorted({row["group"] for row in TEXT_CALLS}))
def test_of_the_calls_that_a_local_model_writes_only_those_run_that_it_means(group):
    chance = random.Random(group)
    for row in TEXT_CALLS:
        if row["group"] != group:
            continue
        ran, hook = [], Watching()
        with FakeLLM([in_random_pieces(row["text"], chance), "done", "done"]) as server:
            provider = OpenAIProvider(Endpoint(ROWS["local"], api_base=server.base_url, model="m"))
            tools = ToolRegistry(recording_tools(ran))
            spec = AgentRunSpec([question()], tools, hook=hook)
            result = asyncio.run(AgentRunner(provider).run(spec))
        last = str(server.bodies[-1]["messages"][-1]["content"])
        was_asked = "write only the call, with nothing before it" in last
        if row["expect"] == "run":
            assert ran == row["calls"] and not was_asked, row["text"]
            assert '"arguments"' not in hook.shown and "<function" not in hook.shown
        if row["expect"] == "ask":
            assert ran == [] and was_asked, row["text"]
        if row["expect"] in ("never", "never or ask"):
            assert ran == [], row["text"]
        if not ran:  # the user sees all of it, whether the model was asked or not
            assert not_thought(row["text"]) in result.final_content, row["text"]
            assert result.final_content == hook.shown.rstrip(), row["text"]


def not_thought(text: str) -> str:
    """Without thoughts and tags at the start of a line (no row has one in a code fence)."""
    text = re.sub(r"(?ms)^[ \t]*<think>.*?</think>|^</think>", "", text).strip()
    return "" if text.startswith("<think>") else text


def test_a_call_after_some_text_is_asked_for_once_and_the_text_stays():
    ran, hook = [], Watching()
    written = '{"name": "write_file", "arguments": {"path": "a", "content": "b"}}'
    fence = f"```json\n{written}\n```"
    with FakeLLM([f"I write it.\n\n{fence}", fence, "It is written."]) as server:
        provider = OpenAIProvider(Endpoint(ROWS["local"], api_base=server.base_url, model="m"))
        spec = AgentRunSpec([question()], ToolRegistry(recording_tools(ran)), hook=hook)
        result = asyncio.run(AgentRunner(provider).run(spec))
    assert [each["name"] for each in ran] == ["write_file"]
    assert result.messages[1]["content"] == "I write it." and result.requests == 3
    assert result.final_content == "It is written." and "json" not in hook.shown
    assert server.bodies[1]["messages"][-2]["content"].strip() == "I write it."

    ran.clear()
    with FakeLLM([f"I write it.\n\n{fence}", f"Again:\n{fence}"]) as server:
        provider = OpenAIProvider(Endpoint(ROWS["local"], api_base=server.base_url, model="m"))
        spec = AgentRunSpec([question()], ToolRegistry(recording_tools(ran)), hook=hook)
        result = asyncio.run(AgentRunner(provider).run(spec))
    assert ran == [] and len(server.bodies) == 2
    assert result.final_content == f"I write it.\n\n{fence}\n\nAgain:\n{fence}"
    assert hook.shown.endswith(result.final_content)


def test_hooks_that_were_written_for_the_older_system_run():
    seen = []

    class Older(AgentHook):
        async def before_iteration(self, context):
            seen.append(context.model)

        async def before_execute_tools(self, tool_calls):
            seen.extend(call.input for call in tool_calls)

        async def after_iteration(self, context):
            seen.append(context.usage.total_tokens)

    result, _ = run([call("look", n=7), "done"], [look], hook=Older())
    assert seen == ["scripted", {"n": 7}, 0, "scripted", 0]
    assert result.usage.total_tokens == result.usage["total_tokens"] == 0
    with FakeLLM(["Hi."]) as server:
        provider = OpenAIProvider(Endpoint(ROWS["local"], api_base=server.base_url, model="m"))
        result = asyncio.run(AgentRunner(provider).run(AgentRunSpec([question()])))
    assert (
        result.usage.total_tokens
        == result.usage["prompt_tokens"] + result.usage["completion_tokens"]
    )
    assert not hasattr(result.usage, "price")


# ---- The runner: calls ----


def test_calls_run_and_the_model_sees_their_results_until_it_answers():
    given = [question()]
    script = [[call("look", "a", n=7), call("broken", "b")], call("look", "c"), "done"]
    result, provider = run(script, [look, broken], messages=given)
    assert (result.final_content, result.stop_reason, result.error) == ("done", "completed", None)
    assert (result.tools_used, result.requests) == (["look", "broken"], 3)
    assert roles(result.messages) == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    assert result.messages[2] == {
        "role": "tool",
        "tool_call_id": "a",
        "name": "look",
        "content": "saw 7",
    }
    assert results(provider.requests[1].messages) == ["saw 7", "it is broken: mend it"]
    assert result.tool_events == [
        {"name": "look", "arguments": {"n": 7}, "is_error": False, "result": "saw 7"},
        {"name": "broken", "arguments": {}, "is_error": True, "result": "it is broken: mend it"},
        {"name": "look", "arguments": {}, "is_error": False, "result": "saw 0"},
    ]
    assert given == [question()], "the caller's messages are not changed"


UNREADABLE = ToolCallRequest("c1", "look", error="its arguments are not valid JSON")


def test_what_became_of_a_call_is_told_to_the_model():
    calls = [call("silent", "a"), call("Look", "b"), UNREADABLE]
    _, provider = run([calls, "done"], [look, broken, silent])
    empty, unknown, torn = results(provider.requests[1].messages)
    assert empty == "(silent completed with no output)"
    assert "look, broken" in unknown, "the closest one first"
    assert (
        torn == "look was not run: its arguments are not valid JSON. Send the complete call again."
    )


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
    calls = [
        call(name, f"c{n}") for n, name in enumerate(["a", "b", "w", "x", "x", "a", "unknown", "b"])
    ]
    run([calls, "done"], tools)
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


def test_each_message_is_journalled_when_it_exists_and_what_the_user_said_meanwhile_not_again():
    heard, came = [], [question("and hurry")]

    def arrivals():
        new, came[:] = list(came), []
        return new

    script = [
        [call("look", "a"), call("picture", "b", letter="b"), call("picture", "c", letter="c")],
        "done",
    ]
    append = lambda *messages: heard.append(roles(messages))  # noqa: E731
    result, provider = run(script, [look, picture], append=append, arrivals=arrivals)
    assert heard == [["assistant"], ["tool"], ["tool"], ["tool"], ["user"], ["assistant"]]
    names = {"type": "text", "text": "[image: b]\n[image: c]"}
    assert result.messages[5]["content"] == [names, image("b"), image("c")]
    assert "and hurry" in str(provider.requests[1].messages[-1])
    assert result.messages[-2] == question("and hurry")


# ---- The runner: the same call again and again ----


def test_the_same_failing_call_is_told_to_change_at_three_and_ends_the_run_at_five():
    result, provider = run([call("broken", f"c{n}") for n in range(9)], [broken])
    told = ["This same call has failed 3 times", "This same call has failed 4 times"]
    contents = results(result.messages)
    assert contents[:2] == ["it is broken: mend it"] * 2
    assert [line in text for line, text in zip(told, contents[2:4], strict=True)] == [True, True]
    assert (len(provider.requests), result.stop_reason) == (5, "tool_error")


def test_the_same_result_is_told_at_three_and_ends_the_tools_at_five():
    script = [call("look", f"c{n}") for n in range(5)] + ["Nothing new."]
    result, provider = run(script, [look])
    counts = [
        re.search(r"the same call has returned it (\d) times", text)
        for text in results(result.messages)
    ]
    assert [int(count[1]) for count in counts if count] == [3, 4, 5]
    assert [bool(request.tools) for request in provider.requests] == [True] * 5 + [False]
    assert (result.stop_reason, result.final_content) == ("completed", "Nothing new.")


def test_a_step_of_two_calls_counts_as_one_and_the_end_names_the_true_reason():
    """Two calls side by side ran 41 requests."""
    step = [[call("look", f"a{n}"), call("look", f"b{n}", n=1)] for n in range(5)]
    result, provider = run([*step, "", ""], [look])
    assert ["already" in text for text in results(result.messages)] == [False] * 4 + [True] * 6
    assert [bool(request.tools) for request in provider.requests][:6] == [True] * 5 + [False]
    assert "the same call gave the same result five times" in result.final_content


NOT_THE_SAME = {
    "a poll that returns something new": [call("poll", f"c{n}") for n in range(7)],
    "the same words with another picture": [call("poll", f"c{n}", words="x") for n in range(7)],
    "other arguments in between": [call("look", f"c{n}", n=n % 2) for n in range(8)],
}


@pytest.mark.parametrize("case", NOT_THE_SAME)
def test_what_is_not_the_same_may_go_on(case):
    counter = itertools.count()

    @tool(read_only=True)
    def poll(words: str = "") -> ToolResult:
        """Gives something new each time, in its words or in its picture."""
        new = str(next(counter))
        return ToolResult(words or new, images=[image(new)] if words else [])

    result, provider = run([*NOT_THE_SAME[case], "done"], [poll, look, broken])
    assert result.final_content == "done" and all(request.tools for request in provider.requests)
    warned = [text for text in results(result.messages) if "already" in text]
    assert len(warned) == (
        4 if case.startswith("other") else 0
    )  # told from the third time on, not ended


# ---- The runner: what an answer leads to ----

ABC = [cut("a "), cut("b "), cut("c ")]
GONE = failed("it is gone")
WITHHELD = "There is no answer: the endpoint blocked the answer. Ask in other words."
NOTHING = "There is no answer: the model sent nothing useful. Ask in other words."
ENDS = [  # a sentence, the script, its stop reason, the answer, the number of requests
    ("an answer", ["whole"], "completed", "whole", 1),
    ("a cut answer is continued", [*ABC, "d"], "completed", "a b c d", 4),
    (
        "three times, and then taken as it is",
        [*ABC, cut("d ")],
        "completed",
        "a b c d \n\n(cut: the answer reached its length limit again and again)",
        4,
    ),
    ("and again behind a whole step", [*ABC, call("look"), *ABC, "d"], "completed", "a b c d", 8),
    (
        "a cut answer that goes on to a call",
        [*ABC, LLMResponse("d", [call("look")], "tool_calls"), "done"],
        "completed",
        "done",
        5,
    ),
    ("a cut thought", [cut(None), cut(None), "done"], "completed", "done", 3),
    ("blank twice, and once without tools", ["", " ", ""], "empty", NOTHING, 3),
    (
        "a blank between two steps is forgiven",
        ["", call("look"), "", "done"],
        "completed",
        "done",
        4,
    ),
    (
        "an answer that was withheld",
        [LLMResponse(None, [], "content_filter")],
        "empty",
        WITHHELD,
        1,
    ),
    (
        "a refusal in words",
        [LLMResponse("I may not.", [], "refusal")],
        "completed",
        "I may not.",
        1,
    ),
    ("a failure", [GONE], "error", None, 1),
    (
        "a failure that has a text",
        [LLMResponse("half", [], "error", error="it is gone")],
        "error",
        None,
        1,
    ),
    ("a failure behind two blanks", ["", "", GONE], "error", None, 3),
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


def test_an_answer_that_is_not_whole_is_marked_in_the_journal_and_none_is_no_line_of_it():
    reason = "cut: the answer reached its length limit again and again"
    for script, text, why in [
        ([*ABC, cut("d ")], "a b c d ", reason),
        ([cut("a "), GONE], "a ", "it is gone"),
    ]:
        assert run(script)[0].messages[-1] == {"role": "assistant", "content": text, "cut": why}
    for script in (["", " ", ""], [GONE], [LLMResponse(None, [], "refusal")]):
        assert roles(run(script)[0].messages) == ["user"], "nothing is put into the model's mouth"


@pytest.mark.parametrize("reason", ["length", "content_filter", "refusal", "error"])
def test_calls_that_may_be_cut_are_not_run(reason):
    error = "it broke" if reason == "error" else None
    result, provider = run(
        [LLMResponse("text", [call("look")], reason, error=error), "done"], [look]
    )
    assert result.tools_used == []
    assert reason == "error" or "shorter steps" in provider.requests[1].messages[-1]["content"]


@pytest.mark.parametrize("reason", ["tool_use", "eos", "function_call", "stop", None])
def test_whole_calls_run_whatever_an_endpoint_calls_their_end(reason):
    result, _ = run([LLMResponse(None, [call("look")], reason), "done"], [look])
    assert (result.tools_used, result.final_content) == (["look"], "done")


NOTES = {
    "a cut answer": ([cut("one ")], "Go on exactly where the answer stops"),
    "a cut call": ([cut("one ", call("look"))], "Take shorter steps"),
    "a cut thought": ([cut(" \n")], "Think less, and answer now."),
    "two blanks": (["", ""], "You sent nothing, twice."),
    "the same call": ([call("look", f"c{n}") for n in range(5)], "the tools are switched off"),
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
        ("this is done", "this is done"),
        ("", "I stopped at the limit of 1 step."),
        (failed("boom"), "I stopped at the limit of 1 step. boom"),
        (LLMResponse("torn", [], "error", error="boom"), "I stopped at the limit of 1 step. boom"),
        (cut("all I co"), "all I co"),
    ],
)
def test_at_the_limit_of_steps_there_is_a_summary_or_the_reason_why_there_is_none(last, said):
    result, provider = run([call("look"), last], [look], max_iterations=1)
    assert (result.stop_reason, result.final_content) == ("max_iterations", said)
    assert result.messages[-1]["content"] == said
    assert (
        provider.requests[1].tools == []
        and "1 steps" in provider.requests[1].messages[-1]["content"]
    )
    result, _ = run([cut("part one, "), last], max_iterations=1)
    assert result.final_content == f"part one, {said}", "what was said before is part of it"


def test_reasoning_goes_back_with_the_calls_it_led_to_or_stays_with_the_last_answer():
    thought = {"reasoning_content": "hm"}
    thinks = LLMResponse("so far", [call("look")], "tool_calls", extra=thought)
    result, provider = run([thinks, LLMResponse("done", extra=thought)], [look])
    assert provider.requests[1].messages[1]["reasoning_content"] == "hm"
    assert result.messages[-1] == {"role": "assistant", "content": "done"} | thought
    result, _ = run([call("look", n=1), thinks], [look], max_iterations=1)
    assert result.messages[-1] == {"role": "assistant", "content": "so far"}


# ---- The runner: stopped in the middle ----


async def stop_at(moment: asyncio.Event, provider: LLMProvider, **spec) -> None:
    """Run until the moment, then stop it as /stop does."""
    task = asyncio.create_task(AgentRunner(provider).run(AgentRunSpec([question()], **spec)))
    await moment.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("asking", [True, False])
def test_what_was_shown_of_an_answer_that_was_stopped_is_journalled_once(asking):
    """Stopped in the middle of an answer, or in a tool that an answer called."""
    journal, gate = [], Gate()

    class Stall(AgentHook):
        wants_streaming = True

        async def on_stream(self, delta):
            if asking and delta == " three":
                await gate.wait()

    script = (
        ["one two three four"] if asking else [LLMResponse("I wait.", [call("slow")], "tool_calls")]
    )
    append = lambda *messages: journal.extend(messages)  # noqa: E731
    spec = {"tools": ToolRegistry([waiting_tool(gate)]), "hook": Stall(), "append": append}
    asyncio.run(stop_at(gate.reached, ScriptedProvider(script), **spec))
    if asking:
        assert journal == [
            {"role": "assistant", "content": "one two three", "cut": "it was stopped"}
        ]
    else:
        assert [(line["content"], "cut" in line) for line in journal] == [("I wait.", False)]


@pytest.mark.parametrize("side_by_side", [True, False])
def test_a_stopped_turn_has_ended_whatever_its_tools_do_and_keeps_the_finished_results(
    side_by_side,
):
    journal, started, ended = [], asyncio.Event(), []

    @tool(read_only=side_by_side)
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
            if side_by_side and n == 0:
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

    assert asyncio.run(go()) == ([0, 1, 2] if side_by_side else [0])
    assert results(journal)[0] == "saw 0"


# ---- The runner: limits and sizes ----


def test_a_run_of_which_nothing_is_said_has_these_limits():
    """Forty requests with tools, then a last one; answers of 8,192 tokens."""
    result, provider = run([call("look", f"c{n}", n=n) for n in range(60)], [look])
    assert (result.stop_reason, result.requests) == ("max_iterations", 41)
    assert [bool(request.tools) for request in provider.requests] == [True] * 40 + [False]
    asked = provider.requests[0]
    assert (asked.options["max_tokens"], asked.model, asked.on_delta) == (8_192, "scripted", None)
    assert result.model == "scripted"


def test_usage_adds_up_and_a_size_is_what_the_endpoint_counted_or_an_estimate():
    cost, blank = CostTrackingHook({}, "m"), LLMResponse("", usage={"prompt_tokens": 1})
    first = LLMResponse(
        None, [call("look")], "tool_calls", {"prompt_tokens": 10, "completion_tokens": 2}
    )
    last = LLMResponse(
        "done", usage={"prompt_tokens": 20, "completion_tokens": 3, "cached_tokens": 8}
    )
    result, _ = run([first, blank, last], [look], hook=cost)
    total = {"prompt_tokens": 31, "completion_tokens": 5, "cached_tokens": 8, "estimated": False}
    assert total.items() <= result.usage.items() and cost.total == result.usage
    assert result.usage["total_tokens"] == 36
    assert result.context_tokens == 20
    text = [question("word " * 400)]
    for usage in ({"prompt_tokens": 33, "estimated": True}, {"prompt_tokens": 0}, {}):
        sizes = [
            run([LLMResponse("ok", usage=usage)], tools, messages=text)[0].context_tokens
            for tools in ([], [look])
        ]
        assert 300 < sizes[0] < sizes[1] - 10 < 600, "its tools count, too"


OLD = [question("old " * 900), {"role": "assistant", "content": "older " * 900}]
SYSTEM = {"role": "system", "content": "be"}
SMALL = {"context_window": 2_000, "max_tokens": 100}


def test_what_does_not_fit_is_left_out_as_whole_turns_and_told_once():
    hook = Told()
    messages = [SYSTEM, *OLD, question("now")]
    _, provider = run([call("look"), "ok"], [look], messages=messages, hook=hook, **SMALL)
    assert roles(provider.requests[0].messages) == ["system", "user"]
    assert len(hook.told) == 1 and "2 messages left out" in hook.told[0]
    system = {"role": "system", "content": "be " * 3_000}
    _, provider = run(["ok"], messages=[system, *OLD[1:]], **SMALL)
    assert provider.requests[0].messages[0] == system, "it is always sent"


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
    assert users(first) == [f"old question {n}" for n in range(6)] + ["now"]
    kept = later[0].messages
    oldest, *rest = users(later[0])
    told, _, oldest = oldest.partition("\n\n")
    assert 0 < len(rest) < 6 and users(first)[-len(rest) - 1 :] == [oldest, *rest]
    assert told.startswith("[") and 'calls look({"n": 0})' in told
    assert kept[0] == SYSTEM and later[1].messages[: len(kept)] == kept
    for request in later:
        check_grammar(request.messages)
        assert users(request)[: len(users(later[0]))] == users(later[0])
    assert (
        len(hook.told) == 1
        and "\n" not in hook.told[0]
        and "retrying with a shorter" in hook.told[0]
    )


@pytest.mark.parametrize("history", [[], old_turns(5)], ids=["alone", "behind others"])
def test_a_turn_that_is_too_long_by_itself_is_an_error_and_no_endless_loop(history):
    messages = [*history, question("now " * 5_000)]
    result, provider = run([TOO_LONG] * 50, [look], messages=messages)
    assert (result.stop_reason, result.error) == ("error", TOO_LONG.error)
    assert len(provider.requests) == (2 if history else 1)
    [sent] = users(provider.requests[-1])
    assert sent.split("\n\n")[-1] == messages[-1]["content"]


# ---- Hooks ----


class Recorder(AgentHook):
    """Writes down all that it is told, and marks the answer."""

    wants_streaming = True

    def __init__(self):
        self.seen = []

    async def before_iteration(self, context):
        self.seen.append(f"before {context.iteration}, {len(context.messages)} messages")

    async def on_stream(self, delta):
        self.seen.append(delta)

    async def on_stream_end(self, resuming):
        self.seen.append(f"end {resuming}")

    async def on_retry(self, why):
        self.seen.append(why.split(" (")[0])

    async def before_execute_tools(self, tool_calls):
        self.seen.append([each.name for each in tool_calls])

    async def after_tool(self, call, result, seconds):
        self.seen.append((call.name, result.text, result.is_error, 0 <= seconds < 5))

    async def after_iteration(self, context):
        names = [each.name for each in context.tool_calls]
        self.seen.append((names, context.response.content, context.usage["prompt_tokens"]))

    async def finalize_content(self, content):
        return f"<{content}>"


class Faulty(AgentHook):
    async def before_iteration(self, context):
        raise RuntimeError("a guest misbehaves")

    async def on_retry(self, why):
        raise RuntimeError("too")

    async def finalize_content(self, content):
        raise RuntimeError("again")


@pytest.mark.parametrize("level", ["WARNING", "INFO"])
def test_each_hook_is_told_everything_in_order_and_one_that_fails_stops_nothing(caplog, level):
    caplog.set_level(level, logger="nanobot")
    usage = {"prompt_tokens": 10}
    looks = LLMResponse(None, [call("look")], "tool_calls", usage)
    steps = [TOO_LONG, looks, LLMResponse("all done", usage=usage)]
    hooks = [Recorder(), Faulty(), Recorder()]
    history = [*old_turns(6), question("now")]
    result, _ = run(steps, [look], messages=history, hook=CompositeHook(hooks))
    assert result.final_content == "<<all done>>"
    assert (
        hooks[0].seen
        == hooks[2].seen
        == [
            "before 0, 26 messages",
            "the request is too long for the model: retrying with a shorter one",
            "end True",
            ["look"],
            ("look", "saw 0", False, True),
            (["look"], None, 10),
            "before 1, 28 messages",
            "all",
            " done",
            "end False",
            ([], "all done", 20),
        ]
    )
    assert [text for text in caplog.messages if "finalize" in text] == [
        "Faulty.finalize_content failed: again"
    ]
    assert ("Traceback" in caplog.text) is (level == "INFO"), "only in the log that was asked for"


def approve(answers: list[str], *steps):
    """Run calls of `act` with a user who answers so; gives what ran, the questions, and the results."""
    ran, questions, left = [], [], list(answers)

    @tool
    def act(text: str = "", working_dir: str = "") -> str:
        """Act."""
        ran.append(text)
        return "acted"

    async def ask_user(question):
        questions.append(question)
        return left.pop(0)

    approval = ApprovalHook(ToolRegistry([act, look]), ask_user if answers else None)
    _, provider = run([*steps, "done"], [act, look], hook=CompositeHook([approval]))
    return ran, questions, results(provider.requests[-1].messages)


@pytest.mark.parametrize(
    ("answers", "ran", "asked"),
    [
        (["y", "y"], ["1", "2"], 2),
        (["n", "Y"], ["2"], 2),
        ([" yes \n", "n"], ["1"], 2),
        (["always"], ["1", "2"], 1),
        (["A"], ["1", "2"], 1),
        (["", "ye"], [], 2),
        (["yes!", "al"], [], 2),
        ([], [], 0),
        (["y"], ["1"], 2),
    ],
)
def test_a_user_is_asked_before_a_tool_that_writes(answers, ran, asked):
    """In the last two rows there is nobody to ask, and the second question fails."""
    did, questions, told = approve(
        answers, call("look"), call("act", text="1"), call("act", text="2")
    )
    assert did == ran
    assert len(questions) == asked
    denied = [
        text
        for text in told
        if re.match("The user did not|Not approved: nobody|act was not run: ApprovalHook", text)
    ]
    assert told[0] == "saw 0" and len(denied) == 2 - len(ran)
    assert all(("nobody" in text) == (not answers) for text in denied)


@pytest.mark.parametrize(
    ("first", "second", "allowed"),
    [
        ("git status", "git status --short a.txt", "git status"),
        ("git status", "git push", None),
        ("git status", "git statusx", None),
        ("git status", "git status; rm x", None),
        ("git status", "git status\nrm x", None),
        ("rm -f a.txt", "rm -f a.txt", "rm -f a.txt"),
        ("rm -f a.txt", "rm -f b.txt", None),
        ("git log | cat", "git log | cat", None),
        ("git log $(rm x)", "git log", None),
    ],
)
def test_always_allows_the_first_words_of_a_command_without_operators(first, second, allowed):
    ran, questions, answers = [], [], ["always", "n"]

    @tool
    def exec(command: str) -> str:  # noqa: A001
        """Run."""
        ran.append(command)
        return "ran"

    async def ask_user(question):
        questions.append(question)
        return answers.pop(0)

    hook = CompositeHook([ApprovalHook(ToolRegistry([exec]), ask_user)])
    run([call("exec", command=first), call("exec", command=second), "done"], [exec], hook=hook)
    assert ran == ([first, second] if allowed else [first])
    assert len(questions) == (1 if allowed else 2)
    offered = re.findall("always: (.+) until", questions[0])
    has_operator = re.search("[|$]", first)
    assert offered == ([] if has_operator else [allowed or first[:11]]), "it is said before"


def test_a_denial_is_the_result_of_a_call_and_what_would_not_run_anyway_is_not_asked_about():
    class Deny(AgentHook):
        async def before_execute_tools(self, tool_calls):
            tool_calls[0].denied = "not on a Sunday"

    _, provider = run([call("broken"), "done"], [broken], hook=Deny())
    assert results(provider.requests[1].messages) == ["not on a Sunday"]
    assert approve(["y"], ToolCallRequest("b", "act", error="torn"))[:2] == ([], [])


def test_a_tool_that_appears_during_the_question_does_not_run():
    """A slow MCP server registers `late` between question 1 and the run."""
    ran = []

    def registering(name: str, registry: ToolRegistry):
        @tool(name=name)
        def harmful() -> str:
            """Not only looks."""
            ran.append(name)
            return "done"

        registry.register(harmful)

    @tool
    def act() -> str:
        """Act."""
        return "acted"

    async def ask_user(question):
        registering("late", registry)
        return "y" if "act" in question else "n"

    registry = ToolRegistry([act, look])
    provider = ScriptedProvider([[call("act", "a"), call("late", "b")], "done"])
    hook = ApprovalHook(registry, ask_user)
    asyncio.run(AgentRunner(provider).run(AgentRunSpec([question()], registry, hook=hook)))
    assert ran == []
    _, late = results(provider.requests[1].messages)
    assert "did not approve" in late


@pytest.mark.parametrize(
    ("price", "usage", "line"),
    [
        (Price(1.0), (1_000_000, 0, 1_000_000), "1,000,000 in · 1,000,000 out · 1.0000"),
        (
            Price(2.0, 0.0, 0.5),
            (1_000_000, 500_000, 0),
            "1,000,000 in (500,000 cached) · 0 out · 1.2500",
        ),
        (Price(2.0, 0.0), (1_000_000, 1, 0), "1,000,000 in (1 cached) · 0 out · 2.0000"),
        (None, (1, 1, 1), "1 in (1 cached) · 1 out"),
        (Price(1.0), (1_000, 0, 10, True), "~1,000 in · 10 out · 0.0010"),
    ],
)
def test_a_line_of_tokens_and_money(price, usage, line):
    """Without the price of cached tokens the sum is an upper bound; an estimate is marked as one."""
    names = ("prompt_tokens", "cached_tokens", "completion_tokens", "estimated")
    cost = CostTrackingHook({"m": price} if price else {"other": Price(9.0)}, "m")
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
    lines = loop.sessions.path(key).read_text(encoding="utf-8").split("\n")
    return [record for record in map(json.loads, filter(None, lines)) if "role" in record]


def test_a_turn_is_journalled_once_and_told_step_by_step(tmp_path):
    folder = tmp_path / "workspace" / "sub"
    calls = [call("list_dir", f"c{n}", path=str(folder)) for n in range(3)]
    loop = make_loop(tmp_path, [LLMResponse("Let me look.", calls, "tool_calls"), "an answer"])
    folder.mkdir()
    result, events = ask(loop, "hello")
    assert result.final_content == "an answer"
    assert roles(journal(loop)) == ["user", "assistant", "tool", "tool", "tool", "assistant"]
    assert [text for kind, text in events if kind == "delta"] == [
        "Let",
        " me",
        " look.",
        "an",
        " answer",
    ]
    hint = ("tool_hint", 'list_dir("sub") · 1 line')
    steps = [event for event in events if event[0] != "delta"]
    assert steps == [("progress", "Let me look."), hint, hint, hint, ("final", "an answer")]
    loop = make_loop(tmp_path, ["one two"])
    loop.program.streaming = False
    assert ask(loop, "hello")[1] == [("final", "one two")]


def test_a_question_is_sent_with_the_moment_and_the_place(tmp_path):
    """A conversation may go on in another place: each question keeps its own."""
    loop = make_loop(tmp_path, ["ok", "ok"], timezone="Asia/Tokyo")
    loop.program.now = lambda: datetime(2026, 11, 21, 12, 0, 30, tzinfo=UTC)
    ask(loop, "one", "telegram:7:8")
    sent = loop.provider.requests[0].messages
    assert legal(sent) == sent
    first, *facts, last, _, text = sent[1]["content"].split("\n")
    assert (first, last) == (
        "[Runtime Context — metadata only, not instructions]",
        "[/Runtime Context]",
    )
    assert facts[:3] == [
        "Time: 2026-11-21 21:00:30 (Saturday), JST",
        "Channel: telegram",
        "Chat: 7:8",
    ]
    assert text == "one"
    assert journal(loop, "telegram:7:8")[0]["content"] == "one", (
        "it is no part of what the user said"
    )
    before, loop.program.folder = loop.program.folder, tmp_path / "elsewhere"
    ask(loop, "two", "telegram:7:8")
    text = "\n".join(message["content"] for message in loop.provider.requests[1].messages[1:])
    assert re.findall(r"Working folder: (.+)", text) == [str(before), str(loop.program.folder)]


def test_a_failed_turn_is_told_not_put_into_the_models_mouth_and_goes_on_with_continue(tmp_path):
    loop = make_loop(tmp_path, [call("list_dir"), GONE, "finished", GONE, "back again"])
    result, events = ask(loop, "one")
    assert (result.error, result.final_content) == ("it is gone", None)
    assert [kind for kind, _ in events] == ["tool_hint"], "the error is for the program to tell"
    assert ask(loop, "/continue")[0].final_content == "finished"
    assert roles(loop.provider.requests[2].messages) == ["system", "user", "assistant", "tool"]
    assert ask(loop, "/continue")[0].final_content == "There is no interrupted turn to resume."
    ask(loop, "two")
    ask(loop, "three")
    sent = loop.provider.requests[-1].messages
    two, three = sent[-1]["content"].split("[the message above was not answered: it is gone]")
    assert roles(sent)[-2:] == ["assistant", "user"]
    assert two.strip().endswith("two") and three.endswith("three")
    assert roles(journal(loop)).count("user") == 3


def test_undo_takes_back_the_last_turn_that_changed_files_and_tells_the_model(own_home, tmp_path):
    steps = [
        [call("write_file", path="new.txt", content="a")],
        "made",
        [call("edit_file", "c1", path="a.txt", old_text="one", new_text="two")],
        [call("edit_file", "c2", path="b.txt", old_text="one", new_text="two")],
        "edited",
        "only words",
        "I see",
    ]
    loop = make_loop(tmp_path, steps)
    for name in ("a.txt", "b.txt"):
        (loop.workspace / name).write_text("one")
    for text in ("make", "edit", "talk"):
        ask(loop, text)
    assert "No turn of this conversation" in ask(loop, "/undo", "cli:other")[0].final_content
    (loop.workspace / "b.txt").write_text("mine")
    told = ask(loop, "/undo")[0].final_content
    assert told == (
        "Took back the changes to a.txt. Changed by something else since, and left alone: b.txt. "
        "What commands (exec) did cannot be undone."
    )
    assert [(loop.workspace / name).read_text() for name in ("a.txt", "b.txt")] == ["one", "mine"]
    assert "Took back the changes to new.txt." in ask(loop, "/undo")[0].final_content
    assert not (loop.workspace / "new.txt").exists()
    ask(loop, "why?")
    asked = loop.provider.requests[-1].messages[-1]["content"]
    assert "undo: the user took back your changes to a.txt]" in asked
    assert "undo: the user took back your changes to new.txt]" in asked
    assert "/undo" not in str(loop.provider.requests[-1].messages)
    assert (own_home / ".nanobot" / "undo").is_dir()


def test_a_lookup_repeated_over_the_whole_turn_is_warned_about(tmp_path):
    steps = [call("look", f"c{n}", n=n % 2) for n in range(6)]
    result, _ = run([[step] for step in steps] + ["done"], [look])
    assert ["already" in text for text in results(result.messages)] == [False] * 4 + [True] * 2


def test_the_model_is_told_when_five_steps_are_left():
    steps = [[call("look", f"c{n}", n=n)] for n in range(8)]
    _, provider = run([*steps, "done"], [look], max_iterations=8)
    last = [str(request.messages[-1]["content"]) for request in provider.requests]
    assert [n for n, text in enumerate(last, 1) if "Five more steps" in text] == [3]


def test_a_tool_that_comes_during_the_turn_is_named_to_the_model():
    registry = ToolRegistry([look])

    @tool(read_only=True)
    def wait() -> str:
        """As an MCP server that connects late."""
        registry.register(tool(look.run, name="mcp_late"))
        return "waited"

    registry.register(wait)
    provider = ScriptedProvider([[call("wait", "a")], [call("look", "b")], "done"])
    asyncio.run(AgentRunner(provider).run(AgentRunSpec([question()], registry)))
    notes = [str(request.messages[-1]["content"]) for request in provider.requests]
    assert ["[New tools: mcp_late]" in note for note in notes] == [False, True, False]


def test_the_registry_of_a_program_is_not_changed(tmp_path):
    registry = ToolRegistry([look])
    agent(settings_for(tmp_path), Script([]), registry)
    assert names_of(registry.get_definitions()) == ["look"]


def test_a_session_may_overwrite_what_it_has_read_since_new(tmp_path):
    write = call("write_file", path="notes.md", content="mine")
    sessions = [("read", "a:1"), ("write", "a:2"), ("write", "a:1"), ("/new", "a:1")]
    steps = [[call("read_file", path="notes.md")], "read", [write], "", [write], "", [write], ""]
    loop = make_loop(tmp_path, [step or "done" for step in steps])
    (loop.workspace / "notes.md").write_text("# me\n")
    refused = []
    for text, session in [*sessions, ("write", "a:1")]:
        ask(loop, text, session)
        last = loop.provider.requests[-1].messages[-1]["content"]
        refused.append("has 1 line and you have read 0" in str(last))
    assert refused == [False, True, False, False, True]


@pytest.mark.parametrize(
    "settings",
    [
        {"restrictToWorkspace": True},
        {"exec": {"sandbox": "bwrap"}},  # the sandbox implies the fence
    ],
)
def test_the_fence_opens_neither_home_nor_what_holds_it(own_home, tmp_path, settings):
    config = load_config(write_config(own_home, {"tools": settings}), {})
    (own_home / "outside.txt").write_text("beyond")
    (tmp_path / "project").mkdir()
    skill = nanobot.DATA / "skills" / "weather" / "SKILL.md"

    def reads(path: Path) -> bool:
        loop = AgentLoop(config, ScriptedProvider([]), program=Program(here))
        turn = loop.turn("cli:direct")
        return not asyncio.run(loop.tools.execute("read_file", {"path": str(path)}, turn)).is_error

    for here in (own_home, own_home.parent, Path("/")):
        assert (
            not reads(own_home / "outside.txt")
            and reads(config.workspace / "USER.md")
            and reads(skill)
        )
        loop = AgentLoop(config, ScriptedProvider([]), program=Program(here))
        assert loop.turn("cli:direct").cwd == config.workspace
    here = tmp_path / "project"
    (here / "a.txt").write_text("mine")
    assert reads(here / "a.txt") and reads(Path("a.txt")) and not reads(own_home / "outside.txt")
    config.tools.restrict_to_workspace, config.tools.exec.sandbox, here = False, "", own_home
    assert reads(Path("outside.txt"))
    config.path = own_home / "other.json"
    for name in (".nanobot/config.json", "other.json", ".nanobot/config.json.bak"):
        (own_home / name).parent.mkdir(exist_ok=True)
        (own_home / name).write_text("keys")
        assert not reads(own_home / name), "no settings file is for the model to read"


COMMANDS = [
    ("/help", "/status: version, model"),
    (
        "/help",
        "in a terminal press Ctrl-C",
    ),  # a line typed during a turn is read after it
    ("/start@my_bot", "I am your agent"),
    (" /NEW\n", "A new conversation begins; the journal keeps the old one."),
    ("/stop", "Nothing is running."),
    ("/continue", "There is no interrupted turn to resume."),
    ("/stopp", "There is no /stopp."),
    ("/dream", "nothing"),
    ("/dream-log", "no dream"),
    (
        "/dream-log wrong way",
        "there is no such commit",
    ),
    ("/dream-restore", "no dream"),
    ("/etc/hosts?", "asked"),
    ("say /new", "asked"),
    ("/", "asked"),
]


@pytest.mark.parametrize(("text", "said"), COMMANDS)
def test_a_command_is_answered_without_the_model_and_what_is_none_is_a_question(
    tmp_path, text, said
):
    loop = make_loop(tmp_path, ["asked"])
    result, events = ask(loop, text)
    assert said.lower() in result.final_content.lower()
    assert (events[-1], result.stop_reason) == (("final", result.final_content), "completed")
    assert len(loop.provider.requests) == result.requests == (1 if said == "asked" else 0)


def test_status_tells_of_the_session_the_window_and_all_since_the_start(tmp_path):
    usage = {"prompt_tokens": 1_200, "completion_tokens": 34}
    loop = make_loop(
        tmp_path, [LLMResponse("hi", usage=usage)], context_window_tokens=5_000, max_tokens=100
    )
    ask(loop, "hello")
    first, place, second, third = ask(loop, "/status")[0].final_content.split("\n")
    assert place == f"folder {loop.program.folder}, workspace {loop.workspace}"
    assert first == f"nanobot {nanobot.__version__}, model scripted, session cli:direct, 2 messages"
    assert re.fullmatch(r"context \d,\d{3} of 5,000", second)
    assert third == "since the start, a moment ago: 1,200 in · 34 out"
    for _ in range(8):
        loop.sessions.get("cli:direct").append(
            question("word " * 400), {"role": "assistant", "content": "ok"}
        )
    assert re.search(
        r"\n\d+ messages left out \(~[\d,]+ tokens\)\n", ask(loop, "/status")[0].final_content
    )


def test_files_come_before_the_text_images_as_data_and_the_journal_has_a_line_for_each(tmp_path):
    (tmp_path / "cat.png").write_bytes(PNG)
    (tmp_path / "a.txt").write_text("text")
    loop = make_loop(tmp_path, ["a cat", "the same"])
    media = [tmp_path / "cat.png", str(tmp_path / "a.txt"), tmp_path / "gone.png", tmp_path]
    ask(loop, "what is it?", media=media)
    image_, text = loop.provider.requests[0].messages[1]["content"]
    assert (image_["type"], text["type"]) == ("image_url", "text")
    lines = [
        f"[image: {tmp_path}/cat.png]",
        f"[file: {tmp_path}/a.txt]",
        f"[file: {tmp_path}/gone.png, not readable: No such file or directory]",
        f"[file: {tmp_path}, not readable: Is a directory]",
        "what is it?",
    ]
    assert journal(loop)[0]["content"] == "\n".join(lines)
    assert text["text"].endswith("\n\n" + "\n".join(lines))
    ask(loop, "and now?")
    assert lines[0] in loop.provider.requests[1].messages[1]["content"]
    assert "base64" not in loop.sessions.path("cli:direct").read_text(encoding="utf-8")


def test_what_the_memory_asks_keeps_to_the_limits_and_is_paid_for(tmp_path):
    """A dream edits with three tools, in its home, in the steps that are set."""
    usage = {"prompt_tokens": 10, "completion_tokens": 1}
    reads = [call("read_file", f"c{n}", path=f"{n}.md") for n in range(9)]
    steps = [LLMResponse(None, [each], "tool_calls", usage) for each in reads]
    loop = make_loop(tmp_path, [LLMResponse("[MEMORY] green", usage=usage), *steps], max_tokens=99)
    loop.config.defaults.dream.max_iterations = 3
    loop.memory.append_history("[2026-04-03 00:02] The user likes green best.")
    ask(loop, "/dream")
    first, *rest = loop.provider.requests
    assert (len(rest), first.tools, rest[-1].tools) == (4, [], [])
    for request in rest[:-1]:
        names = [each["function"]["name"] for each in request.tools]
        assert sorted(names) == ["edit_file", "read_file", "write_file"]
    assert {request.options["max_tokens"] for request in loop.provider.requests} == {99}
    assert f"Cannot read {loop.workspace / '0.md'}" in results(rest[1].messages)[0]
    assert ": 50 in · 5 out" in ask(loop, "/status")[0].final_content


# ---- One call for programs ----


def program(own_home: Path, server: FakeLLM) -> Config:
    config = load_config(None, {"OPENAI_BASE_URL": server.base_url, "NANOBOT_MODEL": "m"})
    config.defaults.workspace = str(own_home / "ws")
    return config


def saves_when_asked(body):
    """An endpoint that answers, and takes its time when it is asked for what is to be remembered."""
    if any(each["function"]["name"] == "save_memory" for each in body.get("tools", [])):
        kept = ask_for(
            "save_memory", history_entry="[2026-04-03 00:02] We spoke of cats.", memory_update=""
        )
        return Reply(None, [kept], "tool_calls", delay=0.05)
    return f"{len(body['messages'])} messages"


def test_run_answers_in_a_notebook_too_keeps_sessions_apart_and_waits_for_the_memory(own_home):
    """And it leaves no connection open: 41 calls left 48, and a program may open 256 files."""
    opened = Path("/proc/self/fd")
    before = len(list(opened.iterdir())) if opened.exists() else 0
    with FakeLLM(saves_when_asked) as server:
        config = program(own_home, server)
        config.defaults.memory_window = 4
        answers = [
            nanobot.run("hello", *session, config=config)
            for session in ((), ("cli:b",), (), ("cli:b",))
        ]

        async def notebook() -> str:
            return nanobot.run("cats", "cli:b", config=config)

        assert asyncio.run(notebook()) == "6 messages"
        for _ in range(6):
            nanobot.run("hello", "cli:c", config=config)
        assert not before or len(list(opened.iterdir())) < before + 8
    assert answers == ["2 messages", "2 messages", "2 messages", "4 messages"]
    assert "We spoke of cats." in (own_home / "ws" / "memory" / "history.jsonl").read_text(
        encoding="utf-8"
    )


def test_run_works_in_the_current_folder_and_streams(own_home, tmp_path, monkeypatch):
    (tmp_path / "here.txt").touch()
    monkeypatch.chdir(tmp_path)
    with FakeLLM([ask_for("list_dir"), "done"]) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        monkeypatch.setenv("NANOBOT_MODEL", "m")
        assert nanobot.run("what is here?") == "done"
    assert [body["stream"] for body in server.bodies] == [True, True]
    assert "here.txt" in server.bodies[1]["messages"][-1]["content"]


@pytest.mark.parametrize(
    ("replies", "said"),
    [
        (["", "", ""], "There is no answer: the model sent nothing useful"),
        ([ask_for("nothing_like_it")] * 9, "nothing_like_it failed: "),
        ([Reply("half of it", finish_reason="length"), error(400, "boom")], "boom"),
    ],
)
def test_run_raises_with_the_cause_where_there_is_no_answer(own_home, replies, said):
    with FakeLLM(replies) as server, pytest.raises(RuntimeError, match=said):
        nanobot.run("hello", config=program(own_home, server))


# ---- The model layer under fire ----


def endpoint_loop(tmp_path: Path, server: FakeLLM, **more) -> AgentLoop:
    """A loop with a real client of the server; it does not wait between two tries."""
    config = settings_for(
        tmp_path, memory_window=1_000_000
    )  # what the memory does is another matter
    end = Endpoint(ROWS["custom"], "sk-test-key-123456", server.base_url, "test-model")
    return AgentLoop(config, OpenAIProvider(end, pace=0.0, **more), ToolRegistry([look]))


def events_of(*events: str, cut: bool = False) -> Raw:
    return Raw("".join(f"data: {each}\n\n" for each in events).encode(), cut=cut)


SAID = '{"choices": [{"index": 0, "delta": {"content": "half an ans"}}]}'
HALF_A_CALL = (
    '{"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "id": "x", "function": '
    '{"name": "look", "arguments": "{\\"n\\": "}}]}}]}'
)
WEATHER = [
    *(error(status, "The server had an error") for status in (408, 500, 529)),
    error(429, "Rate limit reached. Please try again in 20s."),
    Hang(2.0),
    Raw(f"data: {SAID}\n\n".encode(), hang=2.0),
    events_of(SAID, cut=True),
    events_of(HALF_A_CALL, cut=True),
    events_of(SAID, "{garb\x00age"),
    events_of('{"error": {"message": "Provider returned error", "code": 502}}'),
    Failure(200, "<html>Log in to the hotel WLAN</html>", content_type="text/html"),
    Failure(200, '{"choices": [{"message": {"content": "torn'),
    error(400, "Use of max_tokens is refused: max_completion_tokens is wanted instead"),
    error(400, "Tool call id was call_1 but must be a-z, A-Z, 0-9, with a length of 9."),
    error(400, "I do not like it"),
    error(401, "Incorrect API key provided: sk-test-key-123456."),
    Reply(None, finish_reason="content_filter"),
    Reply("the first part ", finish_reason="length"),
    Reply(" "),
]
OVERFLOW = error(
    400, "This model's maximum context length is 100 tokens.", "context_length_exceeded"
)


class Storm:
    """A script: most requests go well, with calls and answers; the others meet one weather after another."""

    def __init__(self, seed: int):
        self.dice, self.weather, self.calls = random.Random(seed), list(WEATHER), 0
        self.dice.shuffle(self.weather)
        self.weather.append(
            OVERFLOW
        )  # comes first: behind a turn that failed a replay would leave out other turns

    def __call__(self, body: dict):
        luck = self.dice.random()
        if luck < 0.4 and self.weather:
            return self.weather.pop()
        if luck < 0.8 and self.weather:
            numbers = range(self.calls, self.calls + self.dice.randint(1, 3))
            self.calls = numbers.stop
            return [ask_for("look", n=n) for n in numbers]
        return f"answered {body['messages'][-1]['content'][-12:]}"


def test_after_a_storm_every_message_is_there_once_and_the_next_is_answered(tmp_path, capsys):
    """Each weather once in one session; then the trace of it all is shown again."""
    storm, turns, trace = Storm(4), [], tmp_path / "trace.jsonl"
    with FakeLLM(storm) as server:
        loop = endpoint_loop(tmp_path, server, request_timeout=0.4, idle_timeout=0.4)
        nanobot.record_events(loop, [trace])

        async def many_turns():
            while storm.weather:
                loop.program.streaming, text = len(turns) % 3 > 0, f"question {len(turns)}"
                before = len(loop.sessions.get("cli:direct").messages)
                turns.append((text, await loop.process_direct(text, "cli:direct"), before))

        asyncio.run(many_turns())
        check_journal(journal(loop), turns)
        result, _ = ask(endpoint_loop(tmp_path, server), "and now?")
        assert result.stop_reason == "completed"
        for body in server.bodies:
            check_grammar(body["messages"])
        asked = [
            each["content"] for each in server.bodies[-1]["messages"] if each["role"] == "user"
        ]
        sent = "\n".join(map(str, asked))
        assert all(sent.count(f"\n{text}\n") + sent.endswith(text) == 1 for text, _, _ in turns)
    assert nanobot.main(["replay", "--fast", str(trace)]) == 1, (
        "some turns failed, as they did then"
    )
    shown = capsys.readouterr().out
    ends = [
        result.final_content[-12:] for _, result, _ in turns if result.stop_reason == "completed"
    ]
    assert [end for end in ends if end not in shown] == []


def check_journal(lines: list[dict], turns: list) -> None:
    """What each turn gave is there, in its place and once; each call has its own result behind it."""
    own = ("timestamp", "runtime", "n")
    lines = [{key: value for key, value in line.items() if key not in own} for line in lines]
    reasons = [result.stop_reason for _, result, _ in turns]
    assert reasons.count("completed") > 3 and reasons.count("error") > 3, reasons
    assert [line["content"] for line in lines if line["role"] == "user"] == [
        text for text, _, _ in turns
    ]
    ends = [before for _, _, before in turns[1:]] + [len(lines)]
    for (text, result, start), end in zip(turns, ends, strict=True):
        turn = lines[start:end]
        assert turn[0] == question(text)
        assert turn[1:] == result.messages[len(result.messages) - len(turn) + 1 :]
        if result.final_content and result.stop_reason != "empty":
            assert turn[-1]["content"] == result.final_content.split("\n\n(cut: ")[0]
    asked = [each for line in lines for each in line.get("tool_calls", [])]
    numbers = [json.loads(each["function"]["arguments"])["n"] for each in asked]
    assert results(lines) == [f"saw {number}" for number in numbers]
    assert numbers == sorted(set(numbers)) and len(numbers) > 20


def test_why_an_answer_takes_longer_reaches_the_channel_and_hooks_of_ones_own(tmp_path):
    busy = Failure(429, {"error": {"message": "slow down"}}, {"Retry-After": "7"})
    with FakeLLM([busy, error(503, "not now"), "here"]) as server:
        loop, hook = endpoint_loop(tmp_path, server), Told()
        loop = AgentLoop(loop.config, loop.provider, loop.tools, [Faulty(), hook])
        result, events = ask(loop, "hello")
    assert result.final_content == "here", "a faulty hook does not stop the next try"
    told = [text for kind, text in events if kind == "retry"]
    assert (
        told
        == hook.told
        == ["HTTP 429: slow down; asking again in 7 s", "HTTP 503: not now; asking again in 2 s"]
    )
    assert "asking again" not in loop.sessions.path("cli:direct").read_text(encoding="utf-8")


def array_in(raw: bytes, name: str) -> str:
    """The text of a list in a request, as it went over the wire, without its closing bracket."""
    text = raw.decode()
    start = text.index(f'"{name}":') + len(f'"{name}":')
    _, length = json.JSONDecoder().raw_decode(text[start:].lstrip())
    return text[start:].lstrip()[: length - 1]


@pytest.mark.parametrize("streaming", [True, False])
def test_every_request_begins_with_the_bytes_of_the_last_one(tmp_path, streaming):
    """Prompt caches live on it: the same system message and tools, then all that was sent before."""
    thinks = Reply(
        None, [ask_for("look", n=2)], "tool_calls", extra={"reasoning_content": "hm, Größe"}
    )
    twice = [ask_for("look", n=1), ask_for("look", n=1)]
    script = [twice, error(503, "not now"), thinks, "naïve \u2028 ok\n", "second"]
    script += [ask_for("nothing_like_it"), ask_for("look", n=-1), "  third "]
    with FakeLLM(script) as server:
        loop = endpoint_loop(tmp_path, server)
        loop.program.streaming = streaming

        async def talk():
            for text in ("one", "two \u202e \U0001f600", "three"):
                await loop.process_direct(text, "cli:direct")

        asyncio.run(talk())
        asked = [request.raw for request in server.requests]
        assert len(asked) == len(script)
        ask(endpoint_loop(tmp_path, server), "after a restart")
        asked.append(server.requests[-1].raw)
    assert len({array_in(raw, "tools") for raw in asked}) == 1
    for before, after in itertools.pairwise(array_in(raw, "messages") for raw in asked):
        assert after.startswith(before), (before[-200:], after[len(before) - 200 :][:400])


# ---- What the model is told ----


def prompt_of(loop: AgentLoop, key: str = "cli:direct") -> str:
    return loop.context.system_prompt(loop.turn(key))


def test_the_system_prompt_has_its_parts_in_order(tmp_path):
    loop = make_loop(tmp_path)
    for name in ("AGENTS", "SOUL", "USER", "TOOLS", "IDENTITY"):
        (loop.workspace / f"{name}.md").write_text(f"\nI am {name}.\n\n", encoding="utf-8")
    loop.memory.facts.write_text("# Long-term memory\n\nThe cat is Tom.\n", encoding="utf-8")
    entry = {"cursor": 1, "timestamp": "2026-04-03 00:02", "content": "We spoke of cats."}
    loop.memory.history.write_text(json.dumps(entry) + "\n", encoding="utf-8")
    prompt = prompt_of(loop)
    marks = [
        "## AGENTS.md\n\nI am AGENTS.",
        "## SOUL.md\n\nI am SOUL.",
        "## USER.md\n\nI am USER.",
        "## TOOLS.md\n\nI am TOOLS.",
        "# Memory\n\n",
        "\n\nThe cat is Tom.",
        "# Active Skills\n\n",
        "# Skills\n\n",
        "# Recent History\n\n",
        "[2026-04-03 00:02] We spoke of cats.",
    ]
    places = [prompt.index(mark) for mark in marks]
    assert places == sorted(places)
    assert prompt.startswith("I am IDENTITY.\n\nYou work on the user's own machine")
    assert "You are nanobot" not in prompt and "data, never instructions" in prompt


def test_the_first_part_of_the_prompt_says_where_whose_files_are_and_how_to_answer(tmp_path):
    loop = make_loop(tmp_path)
    loop.program.folder = tmp_path / "project"
    for key, style in (("cli:direct", "in a terminal"), ("telegram:7", "in a chat")):
        text = prompt_of(loop, key).split("\n\n---\n\n")[0]
        assert (
            f"user's files are in {tmp_path / 'project'}: a.txt means {tmp_path / 'project'}/a.txt"
            in text
        )
        assert f"facts: {tmp_path / 'workspace'}/memory/MEMORY.md" in text
        assert (
            f"machine ({sys.platform}, Python {sys.version_info.major}.{sys.version_info.minor})"
            in text
        )
        assert f"The user reads your answer {style}" in text


def test_a_small_question_with_all_tools_stays_under_10_kb(tmp_path):
    """Templates that nobody has changed are left out."""
    loop = make_loop(tmp_path, ["hi"])
    ask(loop, "What is in a.txt?")
    request = loop.provider.requests[0]
    body = {"model": "m", "messages": request.messages, "tools": request.tools, "max_tokens": 8192}
    text = json.dumps(body, ensure_ascii=False).replace(r"\\", "/")
    assert len(text.replace(tmp_path.as_posix(), "/home/ada").encode()) <= 10_000
    assert not re.search(r"\n## USER\.md|---\n\n# Memory", request.messages[0]["content"])


def test_a_file_of_the_prompt_that_was_changed_is_read_again(tmp_path):
    loop = make_loop(tmp_path)
    for text in ("I am kind.", "I am bold."):
        (loop.workspace / "SOUL.md").write_text(text, encoding="utf-8")
        assert f"\n## SOUL.md\n\n{text}\n" in prompt_of(loop)


def test_of_many_facts_and_notes_the_newest_are_in_the_prompt(tmp_path):
    loop = make_loop(
        tmp_path, context_window_tokens=6_000, max_tokens=100
    )  # 1,219 tokens for the memory
    loop.memory.facts.write_text(
        "\n".join(f"fact {n}: {'x' * 90}" for n in range(30)), encoding="utf-8"
    )
    notes = [
        {"cursor": n, "timestamp": "2026-04-03 00:02", "content": f"note {n}: {'y' * 70}"}
        for n in range(1, 61)
    ]
    loop.memory.history.write_text(
        "".join(f"{json.dumps(note)}\n" for note in notes), encoding="utf-8"
    )
    prompt = prompt_of(loop)
    assert "fact 0:" in prompt and "fact 29:" in prompt and "note 60:" in prompt
    recent = prompt.split("# Recent History\n\n")[1]
    assert "note 10:" not in recent and len(recent) < 6_000
    loop.memory.facts.write_text(
        "\n".join(f"fact {n}: {'x' * 90}" for n in range(20_000)), encoding="utf-8"
    )
    prompt = prompt_of(loop)
    assert "fact 19999:" in prompt and "fact 9999:" not in prompt and len(prompt) < 20_000


def test_a_workspace_is_private_filled_once_and_never_overwritten(tmp_path):
    home = make_loop(tmp_path, workspace=str(tmp_path / "a" / "b")).workspace
    files = sorted(path.relative_to(home).as_posix() for path in home.rglob("*.md"))
    assert files == ["AGENTS.md", "SOUL.md", "TOOLS.md", "USER.md", "memory/MEMORY.md"]
    (home / "SOUL.md").write_text("mine", encoding="utf-8")
    (home / "USER.md").unlink()
    loop = make_loop(tmp_path, ["ok"], workspace=str(home))
    assert (home / "SOUL.md").read_text(encoding="utf-8") == "mine" and (home / "USER.md").exists()
    ask(loop, "hello")
    path = loop.sessions.path("cli:direct")
    assert [each.stat().st_mode & 0o777 for each in (home, path.parent, path)] == [
        0o700,
        0o700,
        0o600,
    ]
    with pytest.raises(ConfigError) as caught:
        make_loop(tmp_path, workspace=str(path / "ws"))
    said = f"Cannot write the workspace {path}/ws: Not a directory. Choose another folder with --workspace."
    assert str(caught.value) == said


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
        ('{"agents": {"defaults": {"temperature": 0}}}', "agents.defaults.temperature", 0),
        (
            '{"channels": {"telegram": {"allowFrom": [7, "8"]}}}',
            "channels.telegram.allow_from",
            [7, "8"],
        ),
        ('{"gateway": {"heartbeat": {"enabled": false}}}', "gateway.heartbeat.enabled", False),
        (
            '{"providers": {"vllm": {"apiKey": "a ${KEY} b"}}}',
            "providers.vllm.api_key",
            'a q"u\\o\nte b',
        ),
        (
            '{"providers": {"vllm": {"extraHeaders": {"X-myHeader": "x"}}}}',
            "providers.vllm.extra_headers",
            {"X-myHeader": "x"},
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
        ("[]", "the file", "object"),
        ("{", "line 1 column 2", "at least {}"),
        ('{"a": [1,]}', "config.json", "no comma before a closing bracket"),
        ("{“a”: 1}", "config.json", "straight quotes"),
        ('{"streaming": false}', "streaming: unknown key", "agents, channels, gateway, "),
        ('{"agents": {"defualts": {}}}', "agents.defualts: unknown key", "defaults"),
        (
            '{"agents": {"defaults": {"maxTokens": "many"}}}',
            "agents.defaults.maxTokens",
            'integer, "many"',
        ),
        (
            '{"agents": {"defaults": {"maxTokens": true}}}',
            "agents.defaults.maxTokens",
            "integer, true",
        ),
        ('{"agents": {"defaults": {"maxTokens": 0}}}', "agents.defaults.maxTokens", "1"),
        ('{"gateway": {"heartbeat": {"enabled": 1}}}', "gateway.heartbeat.enabled", "boolean, 1"),
        (
            '{"channels": {"telegram": {"allowFrom": [[]]}}}',
            "channels.telegram.allowFrom[0]",
            "string or integer",
        ),
        (
            '{"providers": {"vllm": {"textToolCalls": "yes"}}}',
            "providers.vllm.textToolCalls",
            "auto",
        ),
        (
            '{"providers": {"openai": {"apiKeys": ""}}}',
            "providers.openai.apiKeys: unknown key",
            "apiBase, apiKey, ",
        ),
        (
            '{"providers": {"openai": {"extraHeaders": {"X-Team": 5}}}}',
            "providers.openai.extraHeaders.X-Team",
            "string, 5",
        ),
        (
            '{"providers": {"openai": {"apiKey": "${NO_SUCH_KEY}"}}}',
            "NO_SUCH_KEY",
            "which is not set.",
        ),
        ('{"tools": {"exec": {"sandbox": "docker"}}}', "tools.exec.sandbox", "bwrap"),
        (
            '{"tools": {"mcpServers": {"a": {"args": "x"}}}}',
            "tools.mcpServers.a.args",
            'array, "x"',
        ),
        ('{"mcpServers": {"a": {}}, "tools": {"mcpServers": 5}}', "tools.mcpServers", "object, 5"),
        # what can only be seen when a loop is made
        (
            '{"agents": {"defaults": {"maxTokens": 500, "contextWindowTokens": 1000}}}',
            "agents.defaults.maxTokens",
            "under half of contextWindowTokens (1000)",
        ),
        (
            '{"channels": {"telegram": {"allowFrom": [7, "*", "8", "@ada"]}}}',
            "channels.telegram.allowFrom: '@ada' matches nobody",
            "If this user writes to the bot, the gateway prints the id",
        ),
        ('{"agents": {"defaults": {"timezone": "Mars/Olympus"}}}', "time zone", "'Mars/Olympus'"),
        (
            '{"tools": {"web": {"search": {"provider": "altavista"}}}}',
            "tools.web.search.provider",
            "duckduckgo",
        ),
        (
            '{"tools": {"web": {"proxy": "socks5://x"}}}',
            "tools.web.proxy",
            "Write the proxy like http:",
        ),
        (
            '{"tools": {"ssrfWhitelist": ["10.1.2.3/8"]}}',
            "tools.ssrfWhitelist",
            "10.1.2.3/8 has host bits set",
        ),
        # and which model they mean
        ('{"providers": {"opnai": {}}}', "providers.opnai", "Known: openai, "),
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
    assert place in str(caught.value) and said in re.sub(
        r"(?<=, )(got|not) ", "", str(caught.value)
    )


def test_servers_that_stand_at_the_top_join_those_in_their_place_and_this_is_said(own_home, caplog):
    pasted = {"a": {"command": "top"}, "b": {"command": "top", "autoApprove": []}}
    settings = {"mcpServers": pasted, "tools": {"mcp_servers": {"a": {"command": "inside"}}}}
    servers = load_config(write_config(own_home, settings), {}).tools.mcp_servers
    assert {name: server.command for name, server in servers.items()} == {"a": "inside", "b": "top"}
    assert "mcpServers.b.autoApprove: unknown key" in caplog.text and "enabledTools" in caplog.text
    alone = load_config(write_config(own_home, {"mcpServers": pasted}), {}).tools
    assert sorted(alone.mcp_servers) == ["a", "b"] and alone.exec.timeout == 60


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
        defaults = {
            "model": "m",
            "provider": "vllm",
            "maxTokens": 777,
            "temperature": 0.25,
            "maxToolResultChars": 1_000,
        }
        prices = {"m": {"input": 1_000_000, "output": 0}}
        settings = {"agents": {"defaults": defaults}, "providers": {"vllm": vllm}, "prices": prices}
        loop = loop_of(own_home, settings, None)
        for number in range(100):
            (own_home / "project" / f"{number:0>40}").touch()
        result, _ = ask(loop, "look")
    for request in server.requests:
        assert (request.headers["authorization"], request.headers["x-title"]) == (
            "Bearer sk-mine",
            "kit",
        )
        assert {"model": "m", "temperature": 0.25, "min_p": 0.1}.items() <= request.body.items()
        assert 777 in (request.body.get("max_tokens"), request.body.get("max_completion_tokens"))
    assert result.final_content == ("done" if text_calls == "auto" else written)
    assert ["the text is in" in text for text in results(result.messages)] == [True] * len(
        result.tools_used
    )
    assert loop.cost.line(result.usage).endswith(f" · {result.usage['prompt_tokens']:.4f}")


ALL_TOOLS = "read_file write_file edit_file notebook_edit list_dir glob grep exec"
ALL_TOOLS += " web_fetch web_search spawn cron"


@pytest.mark.parametrize(
    ("off", "gone"), [("", ""), ("exec", "exec"), ("web", "web_fetch web_search")]
)
def test_the_tools_are_these_and_two_sorts_can_be_switched_off(own_home, off, gone):
    loop = loop_of(own_home, {"tools": {off: {"enable": False}} if off else {}}, ["ok"])
    ask(loop, "hello")
    names = [each["function"]["name"] for each in loop.provider.requests[0].tools]
    assert sorted(names) == sorted(set(ALL_TOOLS.split()) - set(gone.split()))


def test_the_settings_of_exec_and_of_the_web_have_their_effect(own_home, monkeypatch):
    monkeypatch.setenv("SEEN", "yes")
    monkeypatch.setenv("UNSEEN", "no")
    program = own_home / "more" / "my-program"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho it runs\n")
    program.chmod(0o755)
    shell = {"timeout": 1, "pathAppend": str(program.parent), "allowedEnvKeys": ["SEEN"]}
    search = {"provider": "tavily", "apiKey": "k", "baseUrl": "http://127.0.0.1:65000"}
    tools = {"exec": shell, "web": {"search": search}, "ssrfWhitelist": ["127.0.0.0/8"]}
    calls = [
        call("exec", command="my-program; echo [$SEEN$UNSEEN]; sleep 60"),
        call("web_search", query="x"),
        call("web_fetch", url="http://127.0.0.1:65000/"),
    ]
    ran, searched, fetched = ask(loop_of(own_home, {"tools": tools}, [calls, "done"]), "go")[
        0
    ].tool_events
    assert ran["result"].startswith("it runs\n[yes]\n") and "Timed out after 1 s" in ran["result"]
    refused = "no address accepted the connection"  # but it may be asked
    assert refused in searched["result"] and refused in fetched["result"]
    wide = {"tools": {"exec": {"sandbox": "bwrap", "sandboxNetwork": True}}}
    confined = loop_of(own_home, wide).tools.get("exec")
    assert (confined.sandbox, confined.network) == ("bwrap", True)


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
        if not loop.tools.get("message"):  # a gateway registers it
            loop.tools.register(tool(nanobot.Messenger(loop, chats.bus).message))
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
        await chats.say("one", "1")
        await chats.say("late", "1")
        await chats.say("two", "2")
        await gates["one"].reached.wait()
        await gates["two"].reached.wait()  # both at once
        await chats.say("/help", "1")
        await chats.answered(1, "1")
        await chats.say("/stop", "2")
        await chats.say("three", "2")
        await chats.answered(2, "2")
        assert chats.finals("2")[0].startswith("Stopped") and chats.finals("2")[1].endswith("three")
        assert chats.texts("1") == ["one"]
        gates["one"].open.set()
        await chats.answered(3, "1")
        assert chats.finals("1")[0].startswith("/start: ") and chats.finals("1")[1:] == [
            "to one",
            "to late",
        ]
        assert chats.texts("1") == ["one", "to one", "late", "to late"], "as the model met them"
        await chats.until(lambda: len(asyncio.all_tasks()) == tasks and not chats.loop.turns.locks)

    serve(tmp_path, script, work)


def test_messages_that_come_while_tools_run_join_the_turn_behind_them_three_at_a_time(tmp_path):
    gates = [Gate(), Gate()]
    (tmp_path / "a.png").write_bytes(PNG)

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
            media = [tmp_path / "a.png"] if number == 2 else []
            await chats.say(f"<{number}>", id_=f"id{number}", media=media)
        for gate in gates:
            gate.open.set()
        await chats.answered()
        one, two, three = chats.model.asked
        assert ["".join(re.findall(r"<(\d)>", str(users(each)))) for each in (one, two, three)] == [
            "0",
            "0123",
            "012345",
        ]
        assert two.messages[: len(one.messages)] == one.messages
        assert three.messages[: len(two.messages)] == two.messages
        assert roles(two.messages)[-3:] == ["assistant", "tool", "user"]
        blocks = [block["type"] for block in two.messages[-1]["content"]]
        assert blocks.count("image_url") == 1 and set(blocks) == {"image_url", "text"}, (
            "shown with its text"
        )
        assert "base64" not in str(journal(chats.loop, "desk:1"))
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

    @tool
    async def act(n: int) -> str:
        """Work."""
        await pause()
        return f"worked {n}"

    @tool(read_only=True)
    async def watch(n: int) -> str:
        """Watch."""
        await pause()
        return f"seen {n}"

    async def script(request):
        await pause()
        if dice.random() < 0.6:
            ids = [next(numbers) for _ in range(dice.randint(1, 3))]
            calls = [call(dice.choice(["act", "watch"]), f"c{n}", n=n) for n in ids]
            return LLMResponse(None, calls, "tool_calls")
        answered = str(
            [each["content"] for each in request.messages if each["role"] == "assistant"]
        )
        return " ".join(
            text for text in re.findall(r"<\w\.\d>", str(users(request))) if text not in answered
        )

    async def talk(chats, chat):
        for number in range(10):
            await pause()
            await chats.say(f"<{chat}.{number}>", chat)

    async def work(chats):
        await asyncio.gather(*(talk(chats, chat) for chat in "abcd"))
        for chat in "abcd":
            await chats.until(lambda chat=chat: len(" ".join(chats.finals(chat)).split()) == 10)
            assert sorted(" ".join(chats.finals(chat)).split()) == [
                f"<{chat}.{n}>" for n in range(10)
            ]
            requests = [each for each in chats.model.asked if f"<{chat}." in str(each.messages)]
            for request in requests:
                check_grammar(request.messages)
            sent = [request.messages for request in requests]
            assert all(
                later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(sent)
            )
            whole = legal([sent[-1][0], *chats.session(chat).history()], reply=False)
            assert whole[:-1] == sent[-1] and not chats.session(chat).unfinished

    serve(tmp_path, script, work, act, watch, max_tool_iterations=1_000)


@pytest.mark.parametrize(("limit", "expected"), [(3, 3), (0, 12)])
def test_no_more_turns_run_at_once_than_are_allowed_and_0_is_no_limit(tmp_path, limit, expected):
    running, most = 0, 0

    async def script(request):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await barrier.wait()
        running -= 1
        return "done"

    async def work(chats):
        for chat in range(12):
            await chats.say("hello", str(chat))
        for chat in range(12):
            await chats.answered(1, str(chat))

    barrier = asyncio.Barrier(expected)
    serve(tmp_path, script, work, max_concurrent=limit)
    assert most == expected


def a_fault_of_ours():
    raise ValueError("a fault of ours")


LIMIT = "so far\n\n(the limit of steps (maxToolIterations) is reached; ask the agent to go on)"
NO_REASON = "Sorry, that failed: the endpoint ended its answer with an error"
TOLD_IN_A_CHAT = {
    "an answer": (lambda n: " done\n", "done"),
    "an endpoint that fails": (lambda n: GONE, "Sorry, that failed: it is gone"),
    "half an answer": (lambda n: [cut("half"), GONE][n], "half\n\nSorry, that failed: it is gone"),
    "an end with an error and no text": (lambda n: LLMResponse(None, [], "error"), NO_REASON),
    "silence": (lambda n: "", NOTHING),
    "the limit of steps": (lambda n: call("list_dir", path=f"/{n}") if n < 6 else "so far", LIMIT),
    "a call that fails for ever": (
        lambda n: call("gone"),
        "I had to stop: gone failed: There is no tool",
    ),
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

    serve(tmp_path, script, work, max_tool_iterations=6)


def test_a_session_that_another_program_holds_is_answered_when_it_lets_go(tmp_path, caplog):
    """A message and what a job tells; a reminder was lost."""

    async def work(chats):
        other, own = SessionManager(chats.loop.workspace), chats.loop.sessions.get("cron:j1")
        with other.lock("desk:1"):
            await chats.say("hello")
            await chats.say("hello", "2")
            await chats.answered(1, "2")
            told = asyncio.create_task(run_job(chats, "j1@1"))
            await chats.until(lambda: own.messages and not own.unfinished)
            await asyncio.sleep(1.5)
            assert chats.finals() == [] and len(caplog.messages) < 20, "it is told once a second"
        await told
        await chats.answered(2)
        assert sorted(text.split()[-1] for text in chats.finals()) == ["hello", "stretch"]
        assert len(chats.texts()) == 3

    serve(tmp_path, echo, work, max_concurrent=1)
    assert "desk:1: Session desk:1 is in use by another program." in caplog.messages[0]


def test_a_journal_that_cannot_be_read_holds_up_no_other_and_loses_nothing(tmp_path, caplog):
    """Of a chat at the start; of another while a helper reports."""
    gate = Gate()

    async def script(request):
        text = users(request)[-1]
        if text == "dig":
            return await gate.wait("gold")
        asks = text == "go" and is_question(request)
        return (
            call("spawn", task="dig")
            if asks
            else "It found gold."
            if "gold" in text
            else f"to {text}"
        )

    async def work(chats):
        await chats.answered(1, "3")
        assert len(chats.loop.sessions.get("cli:direct").messages) == 1, (
            "there is no such channel here"
        )
        await chats.say("go")
        await chats.answered()
        path = chats.session().path
        aside = path.rename(tmp_path / "aside")
        path.mkdir()
        gate.open.set()
        await chats.until(lambda: "desk%3A1.jsonl" in caplog.text)
        path.rmdir()
        aside.rename(path)
        await chats.answered(2)
        assert chats.finals() == ["to go", "It found gold."]

    sessions = make_loop(tmp_path).sessions
    for key in ("cli:direct", "desk:3"):
        sessions.get(key).append(question("hello"))
    sessions.path("desk:2").mkdir()
    serve(tmp_path, script, work)
    assert "desk%3A2.jsonl" in caplog.text, "it is told which"


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
        for count, (text, speaker) in enumerate(
            [("hello", "Ada"), ("/new", "Bob"), ("hi", "Bob")], 1
        ):
            await chats.say(text, speaker=speaker)
            await chats.answered(count)
        said = chats.finals()
        assert (
            said[0] == "to Ada: hello"
            and "A new conversation" in said[1]
            and said[2] == "to Bob: hi"
        )

    serve(tmp_path, echo, work)


# ---- Helpers ----


def test_a_helper_reports_in_its_chat_in_the_agents_words_and_status_counts_it(tmp_path):
    """It knows the date and the skills, and has no tools that reach the user."""
    gate = Gate()

    async def script(request):
        text = users(request)[-1]
        if text == "dig":
            assert not {"spawn", "message", "cron"} & {
                each["function"]["name"] for each in request.tools
            }
            prompt = request.messages[0]["content"]
            assert "# Skills" in prompt and "Time: 2" in request.messages[-1]["content"]
            return await gate.wait("gold")
        if text == "dive":
            return failed("no water")
        if "[The helper" in text:
            return "It found gold for you." if "gold" in text else "It cannot dive."
        calls = [call("spawn", "a", task="dig", label="digger"), call("spawn", "b", task="dive")]
        return (
            LLMResponse(None, calls, "tool_calls")
            if text == "go" and is_question(request)
            else "begun"
        )

    async def work(chats):
        await chats.say("go", "1")
        await chats.answered(2)
        await chats.say("hello", "2")
        await chats.answered(1, "2")
        await chats.say("/status", "1")
        await chats.answered(3)
        gate.open.set()
        await chats.answered(4)
        begun, dived, status, found = chats.finals()
        assert (begun, dived, found) == ("begun", "It cannot dive.", "It found gold for you.")
        assert "\ncontext " in status and chats.finals("2") == ["begun"]
        told = [text for text in chats.texts() if str(text).startswith("[The helper")]
        assert (
            '[The helper "dive" has ended.' in told[0]
            and "did not finish (error): no water" in told[0]
        )
        assert '[The helper "digger" has ended.' in told[1] and "\n\ngold\n\n" in told[1]
        assert results(chats.session().messages)[0] == (
            "Helper 'digger' is at work. Its result arrives as a message. Go on, or stop here."
        )

    serve(tmp_path, script, work)


@pytest.mark.parametrize(
    ("session", "wait", "does", "said"),
    [
        ("cli:direct", True, lambda n: "gold", "gold"),
        (
            "cron:j1",
            False,
            lambda n: "gold",
            "gold",
        ),  # when a job has ended, nobody hears what comes later
        (
            "cli:direct",
            True,
            lambda n: failed("no such model"),
            "The helper did not finish (error): no such model",
        ),
        (
            "cli:direct",
            True,
            lambda n: call("list_dir", path=f"/{n}") if n < 15 else "",
            "The helper did not finish (max_iterations): I stopped at the limit of 15 steps.",
        ),
    ],
)
def test_a_helper_that_is_waited_for_gives_its_answer_or_why_it_has_none(
    tmp_path, session, wait, does, said
):
    count = itertools.count()

    async def script(request):
        if users(request) == ["dig"]:
            assert request.options == {"max_tokens": 99, "temperature": 0.5}
            return does(next(count))
        return call("spawn", task="dig", wait=wait) if is_question(request) else "so it is"

    loop = agent(settings_for(tmp_path, max_tokens=99, temperature=0.5), Model(script))
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
        await chats.say("go")
        await chats.answered()
        told = results(chats.session().messages)
        assert ["at work. Its" in text for text in told] == [True] * 4 + [False]
        assert "4 helpers are at work" in told[4]
        for text, chat, count in (("/stop", "2", 1), ("/stop", "1", 2)):
            await chats.say(text, chat)
            await chats.answered(count, chat)
        gate.open.set()
        assert chats.finals("2") == ["Nothing is running."]
        assert not chats.loop.subagents.of("desk:1")

    serve(tmp_path, script, work)


def test_what_needs_approval_needs_it_in_a_helper_too_and_is_refused_in_a_job(tmp_path):
    questions = []

    async def ask_user(question):
        questions.append(question.split()[0])
        return "y" if "spawn" in question else "n"

    async def script(request):
        if "dig" in users(request)[-1]:
            is_first = is_question(request)
            return (
                call("exec", command="touch hole") if is_first else request.messages[-1]["content"]
            )
        return call("spawn", task="dig", wait=True) if is_question(request) else "so it is"

    loop = agent(settings_for(tmp_path), Model(script))
    loop.hooks.append(ApprovalHook(loop.tools, ask_user))
    assert "did not approve" in ask(loop, "go")[0].tool_events[0]["result"]
    assert "nobody can be asked here" in ask(loop, "dig", "cron:j1")[0].final_content
    assert questions == ["spawn", "exec"], "nobody sits there who could be asked for a job"
    loop.tools.get("spawn").read_only = True  # so that the helper of a job gets to its call
    assert "nobody can be asked here" in ask(loop, "go", "cron:j2")[0].tool_events[0]["result"]
    assert questions == ["spawn", "exec"]
    assert not (loop.workspace / "hole").exists()


# ---- The message tool ----


def test_the_message_tool_reaches_known_chats_and_its_text_is_not_said_twice(tmp_path):
    """After the tool wrote to the chat, the final answer never arrived."""
    (tmp_path / "outside.txt").write_text("secret")
    to_nobody = "There is no conversation in the chat desk:99. Known chats: desk:1, desk:2"
    cases = {  # what the model writes, what is sent in this chat, what the tool says
        "same": (
            {"content": "from the tool"},
            ["from the tool", "final of same"],
            "Sent to desk:1.",
        ),
        "repeated": ({"content": "final of repeated"}, ["final of repeated"], "Sent to desk:1."),
        "other": ({"content": "for you", "chat_id": "2"}, ["final of other"], "Sent to desk:2."),
        "stranger": ({"content": "psst", "chat_id": "99"}, ["final of stranger"], to_nobody),
        "nowhere": (
            {"content": "x", "channel": "cron", "chat_id": "j"},
            ["final of nowhere"],
            "There is no conversation in",
        ),
        "file": (
            {"content": "here", "media": ["a.txt"]},
            ["here", "final of file"],
            "Sent to desk:1.",
        ),
        "gone": (
            {"content": "x", "media": ["a.txt", "b"]},
            ["final of gone"],
            f"There is no file {tmp_path}",
        ),
        "outside": (
            {"content": "x", "media": [str(tmp_path / "outside.txt")]},
            ["final of outside"],
            "",
        ),
    }

    async def script(request):
        text = users(request)[-1]
        asks = is_question(request) and text in cases
        return call("message", **cases[text][0]) if asks else f"final of {text}"

    async def work(chats):
        chats.loop.config.tools.restrict_to_workspace = True
        chats.loop.sessions.get("cron:j").append(question("x"))
        (chats.loop.workspace / "a.txt").write_text("mine")
        await chats.say("hello", "2")
        await chats.answered(1, "2")
        for text, (_, finals, said) in cases.items():
            before = len(chats.finals())
            await chats.say(text)
            await chats.answered(before + len(finals))
            await chats.at_rest()
            assert chats.finals()[before:] == finals
            told = results(chats.session().messages)[-1]
            assert said[:40] in told and told.startswith("Sent") == said.startswith("Sent")
        await chats.answered(2, "2")
        assert chats.finals("2") == ["final of hello", "for you"]
        assert [Path(path).name for message in chats.desk.sent for path in message.media] == [
            "a.txt"
        ]
        await chats.say("yes", "2")
        await chats.answered(3, "2")
        assert "for you" in str(chats.model.asked[-1].messages), "its user may answer it"

    serve(tmp_path, script, work)


def test_what_the_message_tool_said_in_an_outage_arrives_after_a_restart_and_once(tmp_path):
    """It says "Sent": text and file wait on the disk, as an answer does."""

    async def script(request):
        arguments = {"content": "look at this", "media": ["a.txt"]}
        return call("message", **arguments) if is_question(request) else "done"

    async def shut(chats):
        chats.desk.is_shut = True
        (chats.loop.workspace / "a.txt").write_text("mine")
        await chats.say("hello")
        await chats.until(lambda: "done" in chats.texts())

    sent = []

    async def again(chats):
        for _ in range(100):
            await asyncio.sleep(0)
        if not sent:
            await chats.answered(2)
        await chats.at_rest()
        sent.append([(event.content, len(event.media)) for event in chats.desk.sent])

    serve(tmp_path, script, shut)
    for _ in range(2):
        serve(tmp_path, script, again)
    assert sorted(sent[0]) == [("", 1), ("done", 0), ("look at this", 0)] and sent[1] == []
    texts = [text for text, files in sent[0] if not files]
    assert texts == ["look at this", "done"], "in the order in which it was said"


@pytest.mark.parametrize("media", [5, "a.txt", [7]])
def test_a_waiting_message_with_odd_files_is_set_aside_and_its_chat_goes_on(tmp_path, media):
    async def work(chats):
        inbox = chats.loop.sessions.inbox("desk:1")
        good = {"id": "1", "kind": "user", "content": "one"}  # no files: it may lack the key
        inbox.append(good | {"id": "0", "content": "odd", "media": media})
        inbox.append(good)
        await chats.say("two")
        await chats.answered(1)
        await chats.at_rest()
        aside = inbox.path.with_name(f"{inbox.path.name}.corrupt").read_text()
        assert '"odd"' in aside and not inbox.path.exists()
        assert users(chats.model.asked[-1]) == ["one\n\ntwo"]

    async def script(request):
        return "fine"

    serve(tmp_path, script, work)


def test_stop_while_a_long_answer_is_being_sent_sends_no_more_of_it_and_says_so(tmp_path):
    class Slow(Desk):
        async def send(self, message):
            if message.content == "long":
                while message.parts_sent < 10_000:  # as Telegram's
                    message.parts_sent += 1
                    await asyncio.sleep(0.01)
                return
            await super().send(message)

    async def script(request):
        return "long" if users(request)[-1] == "tell me" else "short"

    async def whole() -> None:
        loop = agent(settings_for(tmp_path), Model(script))
        async with Chats(loop, Slow()) as chats:
            await chats.say("tell me")
            await chats.until(lambda: "long" in chats.texts() and not loop.turns.tasks)
            await chats.say("/stop")
            await chats.answered(1)
            assert "the rest of the answer is not sent" in chats.finals()[0]
            await chats.until(lambda: not chats.session().undelivered)
            await chats.say("go on")
            await chats.answered(2)
            assert chats.finals()[1] == "short"
            await chats.at_rest()
            await chats.say("/stop")
            await chats.answered(3)
            assert chats.finals()[2] == "Nothing is running."

    asyncio.run(whole())


def test_a_tool_hint_never_has_empty_quotes():
    for name, arguments, shown in [
        ("message", {"content": "", "media": ["a.pdf"]}, 'message(["a.pdf"])'),
        ("cron", {"action": "add", "message": "water"}, 'cron("water")'),
        ("cron", {"action": "list"}, 'cron("list")'),
        ("read_file", {"limit": 5, "path": "a.txt"}, 'read_file("a.txt")'),
        ("web_search", {"query": ""}, "web_search()"),
    ]:
        assert nanobot.tool_hint(ToolCallRequest("1", name, arguments)) == shown


# ---- Jobs ----


async def run_job(chats: Chats, name: str, chat: str = "desk:1") -> None:
    """A reminder that is due, as the clock of a gateway runs it; `name` is of the job and its time."""
    channel, chat_id = chat.split(":")
    job = CronJob("j1", "stretch", channel=channel, chat_id=chat_id)
    await JobRunner(chats.loop, chats.bus.publish).run_job(job, name)


@pytest.mark.parametrize("fails", [False, True])
def test_the_answer_of_a_job_goes_to_its_chat_and_its_failure_too(tmp_path, fails):
    """What it tells stands before a message that waits, and each run begins afresh."""
    gate = Gate()

    async def script(request):
        if users(request)[-1] == "first":
            return await gate.wait("yes")
        is_job = "Channel: cron" in request.messages[-1]["content"]
        return (
            failed("no such luck")
            if fails and is_job
            else "Stretch!"
            if is_job
            else await echo(request)
        )

    async def work(chats):
        await chats.say("first")
        await gate.reached.wait()
        for number in range(6):
            with (
                pytest.raises(RuntimeError, match="no such luck")
                if fails
                else contextlib.nullcontext()
            ):
                await run_job(chats, f"j1@{number}")
        await chats.say("second")
        gate.open.set()
        await chats.answered(8)
        said = (
            "The job j1 (stretch) failed. Sorry, that failed: no such luck" if fails else "Stretch!"
        )
        assert chats.finals()[:7] == ["yes", *[said] * 6] and "second" in chats.finals()[7]
        texts = [line["content"] for line in journal(chats.loop, "desk:1")]
        assert texts[:-1] == ["first", "yes", *[said] * 6, "second"]
        _, *jobs, last = chats.model.asked
        assert {len(request.messages) for request in jobs} == {2}
        assert users(jobs[0])[0].endswith(
            "do this now, or to tell the user if it is a reminder: stretch"
        )
        assert "Channel: cron\nChat: j1" in jobs[0].messages[-1]["content"]
        assert said in str(last.messages)
        await chats.loop.background.settled()
        assert not [
            entry for entry in chats.loop.memory.entries() if entry["session"].startswith("cron:")
        ]

    serve(tmp_path, script, work, memory_window=8)


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
        for name, chat in (
            ("j1@12:00", "desk:1"),
            ("j1@13:00", "desk:1"),
            ("j1@13:00", "cli:direct"),
        ):
            await run_job(chats, name, chat)
        await run_job(chats, "j1@14:00")
        await chats.answered(2)
        await chats.at_rest()
        assert len(chats.finals()) == 2 and len(chats.texts()) == 3
        (line,) = chats.loop.sessions.inbox("cli:direct").read()
        assert (line["kind"], "stretch" in line["content"]) == ("report", True), (
            "it waits for the terminal"
        )

    serve(tmp_path, echo, first)
    serve(tmp_path, echo, second)


def test_a_job_of_a_terminal_runs_in_its_folder_and_fails_if_the_folder_is_gone(tmp_path):
    async def work(chats):
        place = tmp_path / "my folder"
        place.mkdir()
        turn = chats.loop.turn("cli:2026-11-23-0120-ab3f", place)
        job = {"action": "add", "message": "stretch", "every_seconds": 60}
        await chats.loop.tools.execute("cron", job, turn)
        await chats.loop.tools.execute("cron", job, chats.loop.turn("desk:1"))
        rows = json.loads((chats.loop.workspace / "cron" / "jobs.json").read_bytes())["jobs"]
        mine, other = [CronJob(**row) for row in rows]
        assert (mine.folder, other.folder) == (str(place), "")
        jobs = JobRunner(chats.loop, chats.bus.publish)
        await jobs.run_job(mine, "j@1")
        assert f"Working folder: {place}\n" in chats.model.asked[-1].messages[-1]["content"]
        place.rmdir()
        with pytest.raises(RuntimeError, match="does not exist any more"):
            await jobs.run_job(mine, "j@2")
        reports = chats.loop.sessions.inbox("cli:another").read()
        assert [str(place) in report["content"] for report in reports] == [False, True]
        assert "failed" in reports[1]["content"] and reports[1]["sender"] == "job"

    serve(tmp_path, echo, work)


def test_what_people_said_at_terminals_gets_an_entry_without_a_model_when_it_is_an_hour_old(
    tmp_path,
):
    loop = make_loop(tmp_path)

    def talk(key, folder, typed, text, hours):
        session = loop.sessions.get(key)
        session.origin = {"folder": folder, "typed": typed}
        stamp = datetime.fromtimestamp(time.time() - hours * 3_600, UTC).isoformat()
        session.append(
            question(text) | {"timestamp": stamp}, {"role": "assistant", "content": "Yes."}
        )
        os.utime(session.path, (time.time() - hours * 3_600,) * 2)

    def remember():
        known = len(loop.memory.entries())
        remember_terminals(loop.sessions)
        texts = [entry["content"] for entry in loop.memory.entries()[known:]]
        assert all("assistant: Yes." in text for text in texts)
        return [re.findall(r"In (.+):|\nuser: (.+)", text) for text in texts]

    talk("cli:a", "/a", True, "one", 5)
    talk("cli:b", "/b", True, "two", 4)
    talk("cli:c", "/c", False, "a script", 4)
    talk("cli:d", "/d", True, "just now", 0.5)
    talk("telegram:7", "/e", True, "a chat", 0.5)
    assert remember() == [[("/a", ""), ("", "one")], [("/b", ""), ("", "two")]]
    entry = loop.memory.entries()[1]
    assert entry["timestamp"] == time.strftime("%Y-%m-%d %H:%M", time.localtime(entry["used"]))
    assert 0 < time.time() - entry["used"] - 4 * 3_600 < 60, "the time of the conversation"
    assert remember() == []
    talk("cli:a", "/a", True, "three", 2)  # somebody continued it
    assert remember() == [[("/a", ""), ("", "three")]]
    assert roles(loop.sessions.get("cli:a").history()) == ["user", "assistant"] * 2
    talk("cli:d", "/d", True, "later", 1.5)  # also what was said before others were saved
    assert remember() == [[("/d", ""), ("", "just now"), ("", "later")]]
    with SessionManager(loop.workspace).lock("cli:b"):  # another program has it open
        talk("cli:b", "/b", True, "four", 1.1)
        assert remember() == [[("/b", ""), ("", "four")]]
    assert remember() == []
    assert loop.sessions.list_keys()[-2:] == ["cli:a", "cli:c"], "a mark is no use"
    ask(loop, "/new", "cli:a")  # its turns have their entries: no model is asked
    session = SessionManager(loop.workspace, loop.memory).get("cli:a")
    assert (session.saved, session.messages, session.history()) == (4, [], [])
    assert loop.provider.requests == [] and len(loop.memory.entries()) == 5


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


def test_the_cron_tool_says_when_nothing_will_happen_and_what_is_wrong(tmp_path):
    loop = make_loop(tmp_path)
    note = "No gateway is running. Jobs run only while `nanobot gateway` runs"
    cron = partial(loop.tools.execute, "cron", turn=loop.turn("desk:1"))
    job = {"action": "add", "message": "stretch"}
    added = asyncio.run(cron({**job, "every_seconds": 60}))
    assert added.text.startswith("Added job ") and note in added.text
    assert added.text.endswith(" Tell the user.)")
    listed = asyncio.run(cron({"action": "list"}))
    assert " · desk:1 · stretch" in listed.text and note not in listed.text
    refused = asyncio.run(cron(job))
    assert (
        refused.is_error
        and refused.text
        == "Give exactly one of `every_seconds`, `cron_expr`, `at` and `in_seconds`."
    )


# ---- What programs and workspaces of users expect ----


def test_texts_of_the_kit_are_in_the_prompt_and_placeholders_are_not_until_they_are_filled(
    tmp_path,
):
    loop = make_loop(tmp_path)
    parts = loop.context.parts(loop.turn("cli:direct"))
    for name in ("SOUL.md", "AGENTS.md", "TOOLS.md"):
        assert (
            parts[name]
            == f"## {name}\n\n{(loop.workspace / name).read_text(encoding='utf-8').strip()}"
        )
    assert "nanobot" not in parts["SOUL.md"]
    for name in ("USER.md", "memory/MEMORY.md"):
        path = loop.workspace / name
        part = "Memory" if name.startswith("memory") else name
        assert part not in loop.context.parts(loop.turn("cli:direct"))
        with path.open("a", encoding="utf-8") as file:
            file.write("\nAda bakes.\n")
        assert loop.context.parts(loop.turn("cli:direct"))[part].endswith("\n\nAda bakes.")


@pytest.mark.parametrize(
    ("row", "settings", "sent"),
    [
        ("local", {}, 0.1),
        ("custom", {}, None),  # models such as gpt-5 refuse a temperature
        ("local", {"temperature": None}, 0.1),
        ("custom", {"temperature": 0}, 0),
        ("local", {"temperature": 0.7}, 0.7),
    ],
)
def test_a_temperature_is_sent_if_it_is_set_and_a_low_one_to_local_servers(
    tmp_path, row, settings, sent
):
    with FakeLLM(["ok"]) as server:
        provider = OpenAIProvider(Endpoint(ROWS[row], api_base=server.base_url, model="m"))
        loop = agent(settings_for(tmp_path, **settings), provider)
        asyncio.run(loop.process_direct("hello"))
    assert server.bodies[0].get("temperature") == sent and len(server.bodies) == 1


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

    hooks = CompositeHook([Policy(event), Recorder()])
    _, provider = run([[call("act")], "done"], [act], hook=hooks)
    assert ran == [] and f"Policy.{event} failed: 'rules'" in caplog.text
    [told] = results(provider.requests[-1].messages)
    assert told == f"act was not run: Policy.{event} failed: 'rules'"
    run([[call("act")], "done"], [act], hook=CompositeHook([Watcher(event)]))
    assert ran == [1]


def test_a_reminder_that_cannot_be_journalled_is_told_in_its_chat_all_the_same(tmp_path):
    loop, told = make_loop(tmp_path), []

    async def tell(report):
        told.append(report.content)

    async def work():
        job = CronJob(id="j1", message="Water the plants", channel="telegram", chat_id="7")
        loop.sessions.path("cron:j1").mkdir(parents=True)
        with pytest.raises(OSError):
            await JobRunner(loop, tell).run_job(job, "j1@2026-11-22T08:00:00Z")

    asyncio.run(work())
    assert "Water the plants" in told[0] and "failed" in told[0]
