# /// script
# requires-python = ">=3.11"
# dependencies = ["openai>=3", "json-repair", "tzdata; sys_platform == 'win32'"]
# ///
"""The path of one message, from the user's question to the agent's answer.

A personal agent is a loop around a model. The agent asks the model. If the model calls tools, the
agent runs these tools and asks the model again. If the model answers in words, the user gets the
answer. All other code serves this loop:

    The user asks "What is in a.txt?".
      AgentLoop finds the session, journals the message and builds the request (ContextBuilder).
        AgentRunner makes the request fit into the context window and asks the model.
          The model (providers.py) calls read_file. The tool (tools.py) returns "1| hello".
          AgentRunner asks again. The model answers "It says hello".
      AgentLoop journals each message at once (memory.py) and sends events (channels.py).

    import nanobot
    print(nanobot.run("What is in a.txt?"))

Read this file first, then tools.py, providers.py, memory.py, channels.py. The main story of a file
is above the line "Second reading". Not covered here: how models differ, how tools work."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import difflib
import hashlib
import itertools
import json
import logging
import os
import re
import runpy
import shlex
import string
import sys
import time
import warnings
import weakref
import webbrowser
from asyncio import CancelledError, Lock, create_task, sleep, to_thread, wait
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from datetime import datetime
from functools import cache, partial, wraps
from pathlib import Path
from secrets import token_hex
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import channels
import memory
import providers
import tools
from channels import InboundMessage, OutboundMessage, end_all
from memory import Governed, MemoryStore, Session, SessionBusy, counted, locked, write_atomically
from providers import ROWS, HumanProvider, LLMResponse, OfflineProvider, ToolCallRequest
from tools import ToolError, ToolRegistry, ToolResult, Turn, in_thread

__version__ = "0.1.0"
log = logging.getLogger("nanobot")

HERE = Path(__file__).resolve().parent
DATA = HERE if (HERE / "templates").is_dir() else HERE / "nanobot_data"  # nanobot_data: in wheels

Media = Iterable[Path]  # files attached to a message
WITHHELD = ("content_filter", "refusal")  # values of `finish_reason`

# ---- The input and the result of a run ----


@dataclass
class AgentRunSpec:
    """The input of a run: messages, tools, limits and callbacks."""

    messages: list[dict]
    tools: ToolRegistry = field(default_factory=ToolRegistry)
    model: str | None = None
    max_iterations: int = 40  # maximum number of steps; then one last request asks for a summary
    max_tokens: int = 8_192  # limit of one answer, in tokens
    temperature: float | None = None  # None: the endpoint's default
    context_window: int = 65_536  # tokens
    hook: AgentHook = field(default_factory=lambda: AgentHook())
    on_event: Callable = providers.no_event  # gets each request, answer, call and result
    turn: Turn | None = None  # for tools with a parameter `turn`; None: `tools.turn`
    append: Callable = lambda *messages: None  # stores each new message at once
    arrivals: Callable = list  # returns new user messages, after it has journalled them
    make_room: Callable | None = None  # awaited before each request: messages, tokens → messages
    note: str = ""  # a message for the first request only
    keeps_half_answer: bool = True  # if the run is cancelled, journal the text that was streamed


@dataclass
class AgentRunResult:
    """The result of a run."""

    final_content: str | None = None
    messages: list[dict] = field(default_factory=list)
    usage: dict = field(default_factory=dict)
    stop_reason: str = ""  # completed, max_iterations, error, tool_error or empty
    tool_events: list[dict] = field(default_factory=list)  # name, arguments, is_error, result
    error: str | None = None
    context_tokens: int = 0  # size of the last request, in tokens

    @property
    def tools_used(self) -> list[str]:
        return list(dict.fromkeys(event["name"] for event in self.tool_events))


# ---- Hooks: what a program can watch or change in a run ----


@dataclass
class AgentHookContext:
    """The state of a run. If a hook changes `messages`, the next request contains the change."""

    messages: list[dict]
    iteration: int = 0  # steps so far
    response: LLMResponse = field(default_factory=LLMResponse)
    usage: providers.Usage = field(default_factory=lambda: providers.token_counts(0, 0))
    model: str = ""


class AgentHook:
    """Observes or changes a run. Override any of the methods. A step calls the methods in this
    order: before_iteration, before_request, on_stream, after_response, on_stream_end,
    before_execute_tools, after_tool, after_iteration. finalize_content may change the answer."""

    wants_streaming = False
    only_watches = False  # True: the calls of a step run even if this hook fails

    async def before_iteration(self, context: AgentHookContext): ...
    async def before_request(self, messages: list[dict], tools: list[dict]): ...
    async def on_stream(self, delta: str): ...
    async def on_stream_end(self, resuming: bool): ...
    async def on_retry(self, why: str): ...
    async def after_iteration(self, context: AgentHookContext): ...

    async def after_response(self, response: LLMResponse):
        """A hook may change `response.tool_calls`; the changed calls are journalled and run."""

    async def before_execute_tools(self, tool_calls: list[ToolCallRequest]):
        """To deny a call, set `call.denied = "reason"`; the model gets the reason as the result,
        and the user sees the reason's first line. The call does not run, but it is in the journal
        already, as a call of the model."""

    async def after_tool(self, call: ToolCallRequest, result: ToolResult, seconds: float):
        """Runs as soon as a tool call has ended; other tool calls may still be running."""

    async def finalize_content(self, content: str):
        return content


# ---- The state of a run ----


@dataclass
class Draft:
    """An unfinished answer, until its calls run or the run ends. If the length limit cuts the
    answer into parts, Draft joins them."""

    parts: list[str] = field(default_factory=list)
    streamed: str = ""  # streamed text of the current part
    # after a text, what may be a call or an example (`{"name": "ls"}`): not shown, not run yet
    unclear: str = ""
    has_asked: bool = False  # True: the model was asked whether it wants to run that call
    cuts: int = 0
    is_blank: bool = False  # True: the model was asked again, because its answer was empty

    def joined(self, rest: str | None):
        return "".join([*self.parts, rest or ""])


@dataclass(kw_only=True)
class RunState(AgentHookContext):
    spec: AgentRunSpec
    result: AgentRunResult = field(default_factory=AgentRunResult)
    draft: Draft = field(default_factory=Draft)  # the answer so far
    tools: list[dict] = field(default_factory=list)  # schemas of the tools in the request
    size_of_tools: int = 0  # in tokens
    may_call_tools: bool = True  # False: the model must now answer in words
    note: str = ""  # a message for the next request only
    failure: str = ""  # the error of the last failed call of this step
    outcomes: list[set] = field(default_factory=list)  # for each step: its calls with outcomes
    room: int = sys.maxsize  # token limit of requests; lowered after a request was too long
    omission_is_told: bool = False  # True: the user was informed that messages are left out

    @property
    def is_over_limit(self):
        """True in the request after the last allowed step; this request asks for a summary."""
        return self.iteration > self.spec.max_iterations

    def add(self, *messages: dict):
        """Append new messages to the journal and to the next request."""
        self.messages += messages
        self.spec.append(*messages)

    async def show(self, piece: str):
        """Stream a piece of the answer; the piece may be "". Before it, an `unclear` text becomes a
        part of the answer: it was no call, because the model did not repeat it as a call."""
        held = self.draft.unclear
        self.draft.unclear = ""
        if held:
            self.draft.parts.append(held)
        self.draft.streamed += piece
        if self.spec.hook.wants_streaming:
            await self.spec.hook.on_stream(held + piece)

    def add_warning(self, call: ToolCallRequest, result: ToolResult):
        """Append a warning to the result if this is the third step, or a later one, in which this
        call had this outcome. All failures of a call count as the same outcome."""
        this_call = lines_of_json(
            [call.name, call.arguments, None if result.is_error else [result.text, result.images]]
        )
        self.outcomes[-1].add(this_call)
        times = sum(this_call in step for step in self.outcomes)
        if times >= 3:
            result.text += "\n" + template(
                "same_failure" if result.is_error else "same_result", count=times
            )

    @property
    def goes_in_circles(self):
        """True if the last five steps had all calls and outcomes of this step."""
        recent = self.outcomes[-5:]
        return len(recent) == 5 and all(recent[-1] <= step for step in recent)


# ---- The runner: prepare a request, ask the model, run its calls, repeat ----


@dataclass
class AgentRunner:
    """Asks a model and runs its tool calls. Independent of channels, sessions and files."""

    provider: providers.LLMProvider

    async def run(self, spec: AgentRunSpec) -> AgentRunResult:
        """Ask the model until the run ends: in at most `max_iterations` + 1 steps. A step sends one
        request, or two if the first was too long for the model; HTTP retries and the requests of
        `make_room` are not counted. At the limit the user gets the model's summary, or "I stopped
        at the limit of 40 steps". Raises CancelledError, ValueError if `max_tokens` leaves no room
        for a request, and errors of the callbacks."""
        state = RunState(
            list(spec.messages),
            model=spec.model or self.provider.model,
            spec=spec,
            note=spec.note,
        )
        try:
            while not state.result.stop_reason:  # the run ends when it has a stop reason
                await spec.hook.before_iteration(state)
                state.iteration += 1
                self.prepare(state)
                if spec.make_room:  # the caller may remove old turns from the messages
                    state.messages = await spec.make_room(
                        state.messages, memory.total_tokens(state.messages) + state.size_of_tools
                    )
                response = await self._ask(state, self.govern(state))
                outcome = verdict(state, response)
                if outcome == "calls":
                    await self._act(state, response)
                else:
                    await self._conclude(state, response, outcome)
                await spec.hook.after_iteration(state)
        except CancelledError:
            if spec.keeps_half_answer:
                self._keep_half_answer(state, "it was stopped")
            raise
        return replace(state.result, messages=state.messages, usage=state.usage)

    def prepare(self, state: RunState):
        """Choose the tools of the next request: none if the model must answer in words. They are
        listed anew at each step, because an MCP server may have connected meanwhile. Tell the model
        if few steps are left."""
        if state.is_over_limit:
            state.may_call_tools = False
            state.note = template("out_of_iterations", limit=state.spec.max_iterations)
        elif state.spec.max_iterations - state.iteration == 5:
            # a note that is there already, like that for a cut answer, is more urgent
            state.note = state.note or "[Five more steps are allowed in this turn.]"
        state.tools = state.spec.tools.get_definitions() if state.may_call_tools else []
        state.size_of_tools = memory.estimate(lines_of_json(state.tools))

    def govern(self, state: RunState) -> Governed:
        """Copy the messages; if they exceed the context window, leave out old parts: [system, old
        question, old answer, question] → [system, question]. The context window must also hold the
        tools, the answer and 1,024 spare tokens. If `state.note` has a text, append the note."""
        spec = state.spec
        budget = spec.context_window - spec.max_tokens - 1_024
        if budget <= 0:
            raise ValueError(
                f"No room for a request: max_tokens ({spec.max_tokens}) and 1,024 spare tokens "
                f"must be less than context_window ({spec.context_window})."
            )
        # the message that began this turn is never left out
        task = next(
            (message for message in reversed(spec.messages) if message["role"] == "user"), None
        )
        request = Governed(state.messages, min(budget, state.room), task, state.size_of_tools)
        if state.draft.parts:  # to continue a cut answer, the model needs the parts so far
            request.messages.append({"role": "assistant", "content": state.draft.joined("")})
        if state.note:
            request.messages.append({"role": "user", "content": state.note})
        return request

    async def _ask(self, state, request):
        """Send a request. If the model rejects the request as too long, send a shorter one."""
        if request.notes and not state.omission_is_told:
            await self._tell(state, "; ".join(request.notes))
        response = await self._chat(state, request)
        if response.is_overflow:
            state.room = request.tokens // 2  # token limit of all later requests
            shorter = self.govern(state)
            if shorter.tokens < request.tokens:
                notes = ["the request is too long for the model: retrying with a shorter one"]
                await self._tell(state, "; ".join(notes + shorter.notes))
                response = await self._chat(state, shorter)
        state.note = ""
        return response

    async def _tell(self, state, why):
        """Tell the user why the request has not all messages."""
        state.omission_is_told = True
        state.spec.on_event("retry", text=why)
        await state.spec.hook.on_retry(why)

    async def _chat(self, state, request):
        spec = state.spec
        await spec.hook.before_request(request.messages, state.tools)
        response = await self.provider.chat(
            request.messages,
            state.tools,
            model=spec.model,
            max_tokens=spec.max_tokens,
            temperature=spec.temperature,
            on_delta=state.show if spec.hook.wants_streaming else None,
            on_retry=spec.hook.on_retry,
            on_event=partial(spec.on_event, step=state.iteration, total=request.tokens),
            read_only=[
                name
                for name in providers.parameters_by_name(state.tools)
                if is_read_only(name, spec.tools)
            ],
        )
        if response.usage.get("estimated"):  # one estimate everywhere, also in `nanobot prompt`
            response.usage["prompt_tokens"] = request.tokens
        await spec.hook.after_response(response)
        add_up(state.usage, response.usage)
        state.result.context_tokens = response.usage.get("prompt_tokens") or request.tokens
        state.response = response
        return response

    async def _act(self, state, response):
        """Journal the answer, then run its calls. The next request has the answer, one result per
        call, and new messages of the user. The results are journalled in the order in which the
        calls ended; `LLMProvider.chat` puts them into the order of the calls. If a kill interrupts
        a call, the call is not repeated; its result becomes `[interrupted: its outcome is unknown.
        …]`. If the turn is stopped before a call has begun, the call's result says so."""
        response.content = state.draft.joined(response.content).rstrip() or None
        state.add(response.to_message())
        state.draft = Draft()
        await state.spec.hook.on_stream_end(True)
        state.failure = ""
        state.outcomes.append(set())
        waiting = list(response.tool_calls)  # calls that have not begun
        try:
            await state.spec.hook.before_execute_tools(response.tool_calls)
            for batch in batches(response.tool_calls, state.spec.tools):
                del waiting[: len(batch)]
                await self._run_batch(state, batch)
        finally:  # Ctrl-C, also at the question whether a call may run: some calls are left
            for call in waiting:
                state.add(
                    tool_message(call, "[not run: the turn was stopped before this call began]")
                )
        if state.goes_in_circles:
            if state.failure:
                state.result.error = state.failure
                await self._finish(state, "tool_error", f"I had to stop: {state.failure}")
                return
            state.may_call_tools = False
            state.note = template("same_result_end")
        state.messages += state.spec.arrivals()  # arrivals are already journalled

    async def _run_batch(self, state, batch):
        """Run calls concurrently. Every call has ended when this method returns or raises. Images
        go into user messages after the results, because a tool message may not contain images."""
        try:
            async with asyncio.TaskGroup() as group:  # an error in one call cancels the others
                tasks = [group.create_task(self._call(state, call)) for call in batch]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        for task in tasks:
            result = task.result()
            if result.images:
                state.add(
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": result.text}, *result.images],
                    }
                )

    async def _call(self, state, call):
        """Run a call and journal its result at once."""
        spec = state.spec
        spec.on_event("call", id=call.id, name=call.name, arguments=call.arguments)
        began = time.monotonic()
        if call.error and not call.denied:
            call.denied = f"{call.name} was not run: {call.error}.\nSend the complete call again."
        if call.denied:
            cause = call.denied.partition("\n")[0]  # the next lines are for the model
            result = ToolResult(call.denied, is_error=True, shown=f"refused: {cause}")
        else:
            result = await spec.tools.execute(call.name, call.arguments, spec.turn)
        if result.is_error:
            state.failure = f"{call.name} failed: {result.text}"
        state.add_warning(call, result)
        state.result.tool_events.append(
            {
                "name": call.name,
                "arguments": call.arguments,
                "is_error": result.is_error,
                "result": result.text,
            }
        )
        state.add(tool_message(call, result.text))
        seconds = time.monotonic() - began
        spec.on_event(
            "result",
            id=call.id,
            text=result.text,
            is_error=result.is_error,
            outcome=result.shown,
            seconds=seconds,
        )
        await spec.hook.after_tool(call, result, seconds)
        return result

    async def _conclude(self, state, response, outcome):
        """Handle an answer that has no calls to run. End the run, or prepare the next request."""
        draft = state.draft
        result = state.result
        if draft.unclear:  # the model was asked about it, and did not repeat it as a call
            await state.show("")
        if outcome != "unclear" and response.unclear_at is not None:  # the model is not asked
            await state.show(response.content[response.unclear_at :])
        match outcome:
            case "unclear":  # hold back what looks like a call, and ask the model
                draft.parts.append(response.content[: response.unclear_at])
                draft.unclear = response.content[response.unclear_at :] + "\n\n"
                draft.streamed = ""
                draft.has_asked = True
                state.note = template("only_the_call")
            case "cut":
                draft.parts.append(response.content or "")
                note = "cut_answer"
                if response.has_tool_calls:
                    note = "cut_calls"
                    draft.parts.append("\n\n")  # separates the next part
                    await state.show("\n\n")
                state.note = template(note)
                draft.cuts += 1
                draft.streamed = ""
            case "blank":
                if draft.is_blank:
                    state.may_call_tools = False
                    state.note = template("blank_answer")
                draft.is_blank = True
            case "answered":
                is_cut = response.finish_reason == "length"
                await self._finish(state, "completed", response.content, is_cut)
            case "limit":
                text = response.content
                if response.finish_reason == "error" or not text:
                    steps = counted(state.spec.max_iterations, "step")
                    text = f"I stopped at the limit of {steps}. {response.error or ''}".strip()
                await self._finish(state, "max_iterations", text)
            case "empty":  # not journalled, because small models imitate earlier empty answers
                result.stop_reason = "empty"
                why = "the model sent nothing useful"
                if response.finish_reason in WITHHELD:
                    why = "the endpoint blocked the answer"
                result.final_content = f"There is no answer: {why}. Ask in other words."
            case "failed":
                result.stop_reason = "error"
                result.error = response.error or "the endpoint ended its answer with an error"
                result.final_content = self._keep_half_answer(state, result.error)
        await state.spec.hook.on_stream_end(not result.stop_reason)

    async def _finish(self, state, reason, text, is_cut=False):
        """End the run with `text`. Of a cut answer, the journal has the text and a field `cut`; the
        user sees the text and a note."""
        answer = await state.spec.hook.finalize_content(state.draft.joined(text))
        message = {"role": "assistant", "content": answer}
        # the reasoning, which some endpoints require in later requests; if an answer has calls, its
        # reasoning belongs to them
        if not state.response.has_tool_calls:
            message |= state.response.extra
        if is_cut:
            message["cut"] = "cut: the answer reached its length limit again and again"
            answer += f"\n\n({message['cut']})"
        state.add(message)
        state.draft = Draft()
        state.result.stop_reason = reason
        state.result.final_content = answer

    def _keep_half_answer(self, state, why):
        """Write the shown part of an answer to the journal, for the next request."""
        shown = state.draft.joined(state.draft.streamed)
        if not shown.strip():
            return None
        state.add({"role": "assistant", "content": shown, "cut": why})
        state.draft = Draft()
        return shown


def verdict(state: RunState, response: LLMResponse) -> str:
    """Classify an answer; the first row that applies counts:

    `limit`: if the step limit is reached, the run ends with a summary.
    `failed`: if the endpoint returned an error, the run ends, and the shown text is journalled.
    `cut`: if the length limit cut the answer, ask the model to go on (3 times for an answer).
    `calls`: if the model calls tools, run the tools and ask the model again.
    `unclear`: if the text ends with what may be a call or an example, ask the model (once).
    `answered`: if the answer has a text, the run ends with this text.
    `empty`: if a filter withheld the text, or a request without tools got no text, the run ends.
    `blank`: if text and calls are missing, ask again; after two blank answers, without tools.
    """
    is_withheld = response.finish_reason in WITHHELD
    # a content filter can stop an answer in the middle of a call's argument
    is_cut = response.finish_reason == "length" or (is_withheld and response.has_tool_calls)
    if state.is_over_limit:
        return "limit"
    if response.finish_reason == "error":
        return "failed"
    if is_cut and state.draft.cuts < 3:
        return "cut"
    if response.has_tool_calls and state.may_call_tools and not is_cut:  # a cut call is incomplete
        return "calls"
    if response.unclear_at is not None and state.may_call_tools and not state.draft.has_asked:
        return "unclear"
    if state.draft.joined(response.content).strip():
        return "answered"
    if is_withheld or not state.may_call_tools:
        return "empty"
    return "blank"


def batches(
    calls: list[ToolCallRequest], registry: ToolRegistry
) -> Iterator[list[ToolCallRequest]]:
    """Consecutive calls of read-only tools form a batch; any other call is a batch of its own.

    read_file, grep, write_file, read_file → [read_file, grep], [write_file], [read_file]
    """

    def is_safe(call):  # False for an unknown tool
        return getattr(registry.get(call.name), "concurrency_safe", False)

    for together, neighbours in itertools.groupby(calls, is_safe):
        if together:
            yield list(neighbours)
        else:
            for call in neighbours:
                yield [call]


# ---- The system prompt and the messages of a request ----


@dataclass
class ContextBuilder:
    """Builds the system prompt and the user's message. Prompt caches need a system prompt without
    the current time, so the user's message has it."""

    config: Config
    memory: MemoryStore
    skills: memory.SkillsLoader
    program: Program
    project: str = ""  # the project's own instructions, if the user has allowed them

    def __post_init__(self):
        self.zone = channels.zone_named(self.config.defaults.timezone)

    def system_prompt(self, turn: Turn) -> str:
        return PART_END.join(self.parts(turn).values())

    def parts(self, turn: Turn) -> dict[str, str]:
        """Name → text of each part of the system prompt, in order. "Memory" contains facts from
        MEMORY.md. "Recent History" has the history entries that Dream has not yet processed, and
        the last five anyway. The model can find older ones in `memory/` with the tool grep."""
        parts = {
            "identity": identity(turn, own_text(turn, turn.workspace / "IDENTITY.md")),
            "Read-only": template("read_only") if self.config.read_only else "",
        }
        for name in ("AGENTS.md", "SOUL.md", "USER.md", "TOOLS.md"):
            parts[name] = titled(f"## {name}", own_text(turn, turn.workspace / name))
        if turn.channel in ("cli", "web"):  # not in a job, and not in a chat
            parts["Project"] = self.project
        parts["Memory"] = titled(
            "# Memory",
            memory.fitted(own_text(turn, self.memory.facts), self.config.defaults.budget // 4),
        )
        parts |= skill_parts(self.skills.load())
        parts["Recent History"] = titled(
            "# Recent History", "\n".join(self.memory.recent_history())
        )
        return {name: text for name, text in parts.items() if text}

    def user_message(self, text: str, turn: Turn, media: Media = ()) -> tuple:
        """Returns the user's message for the journal, and the images for the request.

        {"role": "user", "content": "[image: cat.png]\\nWhat is it?", "runtime": "[Runtime …"}

        In a request, `runtime` (time, chat, working folder) precedes the text.
        """
        # str: a damaged line of an inbox may have a number instead of a path
        files = [attachment(Path(str(path))) for path in media]
        now = self.program.now().astimezone(self.zone)
        message = {
            "role": "user",
            "content": "\n".join([line for line, _ in files] + [text]),
            "runtime": template(
                "runtime",
                time=f"{now:%Y-%m-%d %H:%M:%S (%A), %Z}",
                **vars(turn),  # cwd, channel, chat_id
            ),
        }
        return message, [image for _, image in files if image]


# ---- From a message to a reply ----


class AgentLoop:
    """Answers messages, each in the session of its chat. A session runs one turn at a time."""

    def __init__(
        self,
        config: Config,
        provider: providers.LLMProvider | None = None,
        tools: ToolRegistry | None = None,
        hooks: Iterable[AgentHook] = (),
        program: Program | None = None,
    ):
        config.check()
        self.config = config
        self.program = program or Program()
        self.workspace = prepare_workspace(config.workspace)
        self.state_folder = self.workspace / ".nanobot"  # locks, results, uploads
        self.limits = config.defaults
        self.provider = provider or make_provider(config)
        self.tools = make_tools(config) if tools is None else tools.copy()
        self.files_seen = defaultdict(dict)  # session key → files read
        # listeners get the events of all runs. All turns of a session are one run in these events,
        # so that each message is sent to the listeners only once
        self.listeners = []
        self.events_of = cache(partial(RunEvents, self.listeners, "turn"))
        # the parts of a turn
        read = partial(read_own, self.turn())
        self.memory = MemoryStore(self.workspace, read)
        self.sessions = memory.SessionManager(self.workspace, self.memory, self.events_of)
        self.skills = memory.SkillsLoader(self.workspace / "skills", DATA / "skills", read=read)
        self.context = ContextBuilder(config, self.memory, self.skills, self.program)
        self.runner = AgentRunner(self.provider)
        self.consolidator, self.dream = memory_work(self)
        self.cost = CostTrackingHook(config.prices, self.provider.model)
        self.hooks = [self.cost, LoggingHook(), *hooks]
        self.turns = RunningTurns(self.sessions)
        # helpers, jobs and work in the background
        self.subagents = SubagentManager(partial(helper_answer, self))
        self.mcp = add_tools(self)
        self.started = time.time()
        self.background = Background()
        self.tell = None  # an open prompt's function: shows what background work has changed
        self.is_ending = False  # True if the gateway is stopping; the next start resumes open turns

    async def process_direct(
        self,
        text: str,
        session_key: str = "",
        on_event: Callable | None = None,
        media: Media = (),
        folder: Path | str = "",
        later_lines: Callable = list,
    ) -> AgentRunResult:
        """Answer one message, without a `session_key` in a new session; commands run in `folder`.
        `on_event` is awaited with each OutboundMessage; `later_lines` as in `answer`. Raises
        SessionBusy, and OSError if the journal cannot be written."""
        session_key = session_key or self.sessions.new_key()
        events = EventHook(on_event, self.turn(session_key, folder), self.program.streaming)
        command, argument = slash_command(text)
        if command and command not in WAITING:  # these commands run at once, even during a turn
            said = await answer_command(self, command, argument, events.turn)
            await events.send("final", said)
            return AgentRunResult(said, stop_reason="completed")
        async with self.turns.hold(session_key) as session:
            session.origin = session.origin or {"folder": str(events.turn.cwd)}
            result = await self.answer(
                session, events, [{"content": text, "media": media}], later_lines
            )
        if result.final_content:
            await events.send("final", result.final_content)
        if session.undelivered:
            session.mark("delivered", upto=session.last)
        return result

    def enter(self, session: Session, turn: Turn, lines: list[dict]) -> dict:
        """Journal what the user has typed or sent, so that it survives a kill during the request.
        A line: {"content": "What is it?", "media": ["cat.png"], "id": "501"}. Returns the images of
        each message, which are not in the journal: {3: [{"type": "image_url", …}]}"""
        images = {}
        for line in lines:
            message, found = self.context.user_message(line["content"], turn, line.get("media", ()))
            if "id" in line:  # of a chat's message
                message["id"] = line["id"]
            session.append(message)
            images[session.last] = found
        return images

    def arrive(self, session: Session, turn: Turn, lines: list[dict]) -> list[dict]:
        """Enter lines that came during the turn. Returns their messages, as the model gets them."""
        images = self.enter(session, turn, lines)
        return with_images(
            [memory.as_sent(message) for message in session.messages if message["n"] in images],
            images,
        )

    async def answer(
        self,
        session: Session,
        events: EventHook,
        lines: list[dict],
        later_lines: Callable,
    ) -> AgentRunResult:
        """Answer these lines, or a command of WAITING, and the lines that `later_lines` returns
        at each step. Without `lines`, resume the open turn.

        After Ctrl-C or /stop, the journal has the results of finished calls, the shown part of the
        answer (with `cut`) and the mark `ended`. Only /continue resumes a turn marked `ended`.
        """
        images = {}
        text = lines[0]["content"] if lines else ""
        events.turn = replace(events.turn, asked=begin_of(text, 50))
        command, _ = slash_command(text)
        if command:
            said = await begin_command(self, command, session, lines[0])
            if said:
                return AgentRunResult(said, stop_reason="completed")
        elif lines:
            session.end_open_turn("interrupted")
            images = self.enter(session, events.turn, lines)
        await self.mcp.connect(self.program.patience)
        spec = self.run_spec(with_images(session.history(), images), events)
        spec.note = "\n".join(self.mcp.told_problems)
        spec.append = session.append
        spec.arrivals = lambda: self.arrive(session, events.turn, later_lines())
        is_kept = events.turn.channel != "cron"  # the memory ignores the conversation of a job
        if is_kept:
            spec.make_room = partial(self._make_room, session, events)
        why = "it was stopped"
        try:
            result = await self.runner.run(spec)
            why = result.error or "there was no answer"
            return result
        except Exception as problem:
            why = f"{type(problem).__name__}: {problem}"
            raise
        finally:
            if not self.is_ending:
                session.end_open_turn(why)  # only if the turn has no answer
            await session.synced()  # fsync before the user sees the answer
            if is_kept:
                self.background.start(self.after_turn(session))

    def run_spec(self, history: list[dict], events: EventHook) -> AgentRunSpec:
        """The input of the runner: tools, hooks, the limits from the settings, and the request:

        [{"role": "system", "content": "You are nanobot …"}, …,
         {"role": "user", "content": "[Runtime Context …]\\n\\nWhat is in a.txt?"}]
        """
        return self.limited(
            [{"role": "system", "content": self.context.system_prompt(events.turn)}, *history],
            tools=self.tools,
            max_iterations=self.limits.max_tool_iterations,
            hook=CompositeHook([events, *self.hooks_for(events.turn)]),
            on_event=self.events_of(events.turn.session_key),
            turn=events.turn,
            keeps_half_answer=events.shows_deltas,
        )

    def limited(self, messages: list[dict], **own) -> AgentRunSpec:
        """The input of the runner for any messages, with the limits from the settings."""
        temperature = self.limits.temperature
        if temperature is None and self.provider.is_local:
            temperature = 0.1  # not elsewhere: gpt-5 refuses any temperature
        return AgentRunSpec(
            messages,
            max_tokens=self.limits.max_tokens,
            temperature=temperature,
            context_window=self.limits.context_window_tokens,
            **own,
        )

    def hooks_for(self, turn: Turn) -> list[AgentHook]:
        """The hooks of a turn and of its helpers. In jobs and in Telegram, no user can be asked to
        approve calls: an ApprovalHook that denies them stands in for the one that asks."""
        if turn.channel not in ("cron", "telegram"):
            return self.hooks
        return [
            ApprovalHook(self.tools, None) if isinstance(hook, ApprovalHook) else hook
            for hook in self.hooks
        ]

    async def _make_room(self, session, events, messages, size):
        """Move old turns to the memory if a request of `size` tokens is too long. Returns the
        remaining messages."""
        told = await self.consolidator.make_room(session, size)
        if told and events.turn.channel == "cli":  # in a chat, nobody reads MEMORY.md
            await events.on_retry(told)
        return session.without_saved(messages) if told else messages

    async def after_turn(self, session: Session):
        told = await self.consolidator.after_turn(session)
        if told and self.tell:
            await self.tell(told)

    async def run(self, bus: channels.MessageBus):
        """Serve a bus until cancelled. If the program is killed, no message is lost:

        Message: channel → inbox file → acknowledgement → wait for a slot (8 turns at once) and for
                 the session → journal → requests to the model → removal from the inbox.
        Answer:  journal → the chat's queue in the bus → channel → mark `delivered` in the journal
        """
        service = BusService(self, bus)
        try:
            service.go_on_after_restart()
            while True:
                service.receive(await bus.next())
        finally:
            await service.end()

    def stop(self, session_key: str) -> bool:
        """Cancel the turn, helpers and jobs of a session. Returns False if nothing was running."""
        running = self.subagents.of(session_key)
        for key, task in self.turns.tasks.items():
            if session_key in (key, self.turns.chats.get(key)):  # its own turn, or a job of it
                running.append(task)
        for task in running:
            task.cancel()
        return bool(running)

    async def close(self, seconds: float = 0.0):
        """Wait up to `seconds` for background memory work, then close MCP servers and provider."""
        await self.background.settled(seconds)
        await self.mcp.close()
        await self.provider.close()

    def turn(self, session_key: str = "cli:direct", folder: Path | str = "") -> Turn:
        """The chat, the working folder and the accessible files for a turn of this session."""
        cwd = Path(folder or self.program.folder)
        channel, _, chat_id = session_key.partition(":")
        settings_file = self.config.path.resolve()
        undo = settings_file.parent / "undo"
        secret = (settings_file, path_of(USUAL_SETTINGS), undo)
        has_fence = self.config.tools.restrict_to_workspace or bool(self.config.tools.exec.sandbox)
        # tools may use the whole working folder: it must not contain HOME or the keys
        if has_fence and any(
            path.is_relative_to(cwd.resolve()) for path in (path_of("~"), *secret)
        ):
            cwd = self.workspace
        return Turn(
            self.workspace,
            cwd,
            channel,
            chat_id,
            session_key,
            restrict=has_fence,
            readable=(DATA / "skills",),
            secret=secret,
            seen=self.files_seen[session_key],
            results=self.state_folder / "tool-results",
            undo=undo,
            max_result_chars=self.limits.max_tool_result_chars,
        )


# ======== Second reading: hooks, prompts, commands, settings and the command line ========

# ---- The function `run`, locks for turns, and background tasks ----


def run(text: str, session_key: str = "", config: Config | None = None) -> str:
    """Answer `text`. Tools use the current folder. To continue a conversation, give all its calls
    the same key, like "cli:lesson". Raises RuntimeError if there is no answer."""
    loop = AgentLoop(config or load_config())
    if lacks_model(loop):
        warnings.warn(template("no_model"), stacklevel=2)
    with channels.BackgroundLoop(loop.close) as background:
        result = background.complete(
            answer_with_helpers(loop, text, session_key or loop.sessions.new_key())
        )
        background.complete(loop.background.settled())
    if result.stop_reason in NOT_ANSWERED:
        raise RuntimeError(result.error or result.final_content)
    return result.final_content


async def answer_with_helpers(loop, text, key, on_event=None, later_lines=list):
    """Answer a message, then wait for all running helpers and answer their reports."""
    reports = []
    loop.subagents.report = reports.append
    try:
        while True:
            result = await loop.process_direct(text, key, on_event, later_lines=later_lines)
            helpers = loop.subagents.of(key)
            if helpers and on_event:
                await on_event(OutboundMessage("cli", key, "waiting for the helpers", "tool_hint"))
            await asyncio.gather(*helpers, return_exceptions=True)
            if not reports:
                return result
            text = reports.pop(0).content
    except CancelledError:
        loop.stop(key)
        raise


class RunningTurns:
    """Locks: each session runs one turn at a time, across all tasks and processes."""

    def __init__(self, sessions):
        self.sessions = sessions
        self.tasks = {}  # session key → running turn
        self.chats = {}  # a job's session key → chat for its report; /stop there stops the job
        self.locks = weakref.WeakValueDictionary()  # session key → lock in use

    @contextlib.asynccontextmanager
    async def hold(self, session_key):
        """Lock a session for one turn that AgentLoop.stop can cancel. Raises SessionBusy."""
        async with self.locks.setdefault(session_key, Lock()):
            with self.sessions.lock(session_key):
                self.tasks[session_key] = asyncio.current_task()
                try:
                    yield self.sessions.get(session_key)
                finally:
                    del self.tasks[session_key]


class Background:
    def __init__(self):
        self.tasks = set()

    def start(self, work, name="in the background"):
        task = create_task(logged(work, name))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def settled(self, seconds=60.0):
        """Wait up to `seconds`, then cancel the tasks. Returns the number of the cancelled ones;
        later turns redo their memory work."""
        if self.tasks:
            await wait(self.tasks, timeout=seconds)
        left = len(self.tasks)
        await end_all(self.tasks)
        return left


async def logged(work, name):
    """Await `work` and return its result. If `work` fails, log the error and return None."""
    try:
        return await work
    except Exception as problem:
        log.warning(  # for a bug with the traceback
            "%s: %s",
            name,
            problem,
            exc_info=not isinstance(problem, OSError | SessionBusy),
        )


# ---- Helpers of the runner ----

LIMIT_REACHED = "the limit of steps (maxToolIterations) is reached; ask the agent to go on"
NOT_ANSWERED = ("error", "tool_error", "empty")  # values of `stop_reason` if there is no answer


def add_up(total, usage):
    """Add the counts of a request; `total["estimated"]` becomes the number of estimated ones."""
    for name in total:
        total[name] += usage.get(name, 0)
    total["total_tokens"] = total["prompt_tokens"] + total["completion_tokens"]


def tool_message(call, text):
    return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}


def is_read_only(name, tools):
    return getattr(tools.get(name), "read_only", False)  # False for an unknown tool


# ---- Prompts are files, in templates/ and in the workspace ----
# If SOUL.md is a link to ~/.ssh/id_rsa, only the fence keeps this key out of the prompt.


def template(name, **values):
    """Fill in the `$variables` of a file in `templates/`. Raises KeyError if a value is missing."""
    text = (DATA / f"templates/{name}.md").read_text(encoding="utf-8")
    return string.Template(text).substitute(values).strip()


def prepare_workspace(workspace):
    """Create the workspace and its first files; existing files are never changed."""
    try:
        workspace.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in ("memory", ".nanobot"):
            (workspace / name).mkdir(exist_ok=True)
        for name in ("AGENTS.md", "SOUL.md", "USER.md", "TOOLS.md", "memory/MEMORY.md"):
            file = workspace / name
            if not file.exists():
                file.write_bytes((DATA / "templates" / file.name).read_bytes())
    except OSError as problem:
        raise ConfigError(
            f"Cannot write the workspace {workspace}: {problem.strerror}. "
            "Choose another folder with --workspace."
        ) from None
    return workspace


def identity(turn, who):
    """Fill in the template `identity`. `who`: the user's own first paragraph, or ""."""
    return template(
        "identity",
        who=who or template("who"),
        format=template("format_cli" if turn.channel == "cli" else "format_chat"),
        platform=sys.platform,
        **vars(turn),  # cwd, workspace
    )


def read_own(turn, path):
    """Read a file for the prompt, if `turn` allows the file. Raises OSError or ValueError."""
    path.stat()  # raises FileNotFoundError
    try:
        return tools.read_bytes(turn.path(str(path)), 10_000_000)
    except ToolError as problem:
        raise ValueError(problem) from None


def own_text(turn, path):
    """The text of a file for the prompt; "" if there is no file, or if it cannot be read, or if it
    is a USER.md or MEMORY.md that nobody has filled in: it still equals its template."""
    try:
        text = tools.plain_text(read_own(turn, path)).strip()
        if path.name in ("USER.md", "MEMORY.md") and text == template(path.stem):
            return ""
        return text
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as problem:
        log.warning("%s is left out of the prompt: %s", path.name, problem)
        return ""


NOT_FOLLOWED = "{} is not followed. To allow it: {}"


class Project:
    """The instructions in AGENTS.md of the working folder, or in the nearest one up to the root of
    its git repository; else in CLAUDE.md. They may be a stranger's text (`git clone`): they are a
    part of the prompt only if the user has allowed this version."""

    def __init__(self, loop):
        # tools may not open files whose name begins like that of the settings: `tools.is_secret`
        self.file = Path(f"{loop.config.path}.trust")
        self.path, self.text = self._find(loop.turn())
        self.version = f"{self.path} {hashlib.sha256(self.text.encode()).hexdigest()}"
        # True: follow this version, False: do not, None: the user was not asked about it
        self.answer = None
        for line in memory.read_records(self.file, partial(memory.has, version=str, follow=bool)):
            if line["version"] == self.version:
                self.answer = line["follow"]

    def _find(self, turn):
        """The path and the first 16,000 characters of the file; (working folder, "") if there is
        none. A link out of the project is not followed."""
        here = turn.cwd.resolve()
        folders = [here, *here.parents]  # the nearest one first
        root = next((folder for folder in folders if os.path.exists(folder / ".git")), here)
        fenced = replace(turn, workspace=root, cwd=root, restrict=True, readable=())
        for name in ("AGENTS.md", "CLAUDE.md"):
            for folder in folders:
                path = folder / name
                is_markdown = os.path.realpath(path).endswith(".md")  # not a link to .env
                # the AGENTS.md of the workspace is a part of the prompt anyway
                if is_markdown and folder.is_relative_to(root) and folder != turn.workspace:
                    text = own_text(fenced, path)
                    if text:
                        return path, tools.shorten(text, 16_000)
        return here, ""

    @property
    def is_unknown(self):
        """True if there is a file, and the user was not asked about this version of it."""
        return self.text and self.answer is None

    def keep(self, answer):
        """Remember the user's answer for this version of the file."""
        self.answer = answer
        memory.append_lines(self.file, [{"version": self.version, "follow": answer}])

    def part(self):
        """The part of the system prompt; "" if the user has not allowed this version."""
        if not self.answer:
            return ""
        return titled(f"## Instructions of the project: {self.path}", self.text)

    def __str__(self):
        return short_path(self.path)


def titled(title, text):
    return f"{title}\n\n{text}" if text else ""


def skill_parts(skills):
    """The full text of each skill with `always: true`, and one line for each other skill."""
    active = []
    listed = []
    for skill in skills:
        if skill.always and not skill.missing:
            active.append(f"## {skill.name}\n\n{skill.text}")
        else:
            needs = f" [unavailable: needs {', '.join(skill.missing)}]" if skill.missing else ""
            listed.append(f"- {skill.name}: {skill.description} ({skill.path}){needs}")
    return {
        "Active Skills": titled("# Active Skills", "\n\n".join(active)),
        "Skills": template("skills", skills="\n".join(listed)),
    }


def attachment(path):
    """Returns a line with the file's path, and an image block (None if the file is no image)."""
    try:
        image = tools.image_block(path.read_bytes())
    except OSError as problem:
        return f"[file: {path}, not readable: {problem.strerror}]", None
    return f"[{'image' if image else 'file'}: {path}]", image


def with_images(messages, images):
    """Add their images to messages of a request. `images`: message number → image blocks"""
    for message in messages:
        if blocks := images.get(message.get("n")):
            message["content"] = [*blocks, {"type": "text", "text": message["content"]}]
    return messages


# ---- Hooks ----


class CompositeHook(AgentHook):
    """Calls several hooks in order. An error in one hook is logged; the other hooks still run. If
    the failed hook might have denied calls (not `only_watches`), the calls of this step must not
    run."""

    def __init__(self, hooks):
        self.hooks = hooks
        self.wants_streaming = any(hook.wants_streaming for hook in hooks)

    async def before_iteration(self, context):
        await self._tell("before_iteration", context)

    async def before_request(self, messages, tools):
        await self._tell("before_request", messages, tools)

    async def on_stream(self, delta):
        await self._tell("on_stream", delta)

    async def on_stream_end(self, resuming):
        await self._tell("on_stream_end", resuming)

    async def on_retry(self, why):
        await self._tell("on_retry", why)

    async def after_tool(self, call, result, seconds):
        await self._tell("after_tool", call, result, seconds)

    async def after_iteration(self, context):
        await self._tell("after_iteration", context)

    async def after_response(self, response):
        await self._tell("after_response", response, calls=response.tool_calls)

    async def before_execute_tools(self, tool_calls):
        await self._tell("before_execute_tools", tool_calls, calls=tool_calls)

    async def finalize_content(self, content):
        for hook in self.hooks:
            try:
                content = await hook.finalize_content(content)
            except Exception as problem:
                log_failure(hook, "finalize_content", problem)
        return content

    async def _tell(self, event, *details, calls=()):
        """Call a method of all hooks. If a hook fails that may deny calls, deny these `calls`."""
        for hook in self.hooks:
            try:
                await getattr(hook, event)(*details)
            except Exception as problem:
                failure = log_failure(hook, event, problem)
                if not hook.only_watches:
                    for call in calls:
                        call.denied = f"{call.name} was not run: {failure}"


def log_failure(hook, event, problem):
    failure = f"{type(hook).__name__}.{event} failed: {problem}"
    log.warning(failure, exc_info=log.isEnabledFor(logging.INFO))
    return failure


class LoggingHook(AgentHook):
    async def after_tool(self, call, result, seconds):
        log.info("%s: %s in %.3f s", tool_hint(call), begin_of(result.shown, 300), seconds)


class CostTrackingHook(AgentHook):
    """Adds up requests and tokens, also those of helpers and of the memory. If the settings have a
    price for the model, `line` also shows the cost."""

    def __init__(self, prices, model):
        self.price = prices.get(model)
        self.total = {"requests": 0, **providers.token_counts(0, 0)}

    async def after_iteration(self, context):
        add_up(self.total, {"requests": 1, **context.response.usage})

    def line(self, usage):
        """Tokens and cost, such as "1,234 in (200 cached) · 56 out · 0.0012" (~ if estimated)."""
        cached = f" ({usage['cached_tokens']:,} cached)" if usage["cached_tokens"] else ""
        money = f" · {self.price.of(usage):.4f}" if self.price else ""
        return (
            f"{'~' if usage['estimated'] else ''}{usage['prompt_tokens']:,} in{cached} · "
            f"{usage['completion_tokens']:,} out{money}"
        )


def what_always_allows(call):
    """The answer "always" allows all calls of a tool, or all commands with the same first words:
    write_file → "write_file", `git status -s` → "$ git status". "" if "always" is not possible: the
    command has operators (`ls | sh`), is long, or has arguments besides `command`, like a folder.
    """
    if call.name != "exec":
        return call.name
    command = str(call.arguments.get("command"))
    if len(call.arguments) > 1 or not re.fullmatch(r"[^;&|<>`$(){}\n]{1,80}", command):
        return ""
    # `git status -s` → `git status`; any other command as a whole: `rm -f a.txt`
    words = re.match("(git|npm|cargo|go|pip|uv|docker) [a-z][a-z-]*(?= |$)|.+", command)
    return f"$ {words[0]}"


@dataclass
class ApprovalHook(AgentHook):
    """Asks the user before each call, except calls of known read-only tools."""

    tools: ToolRegistry
    ask: Callable | None  # `await ask(question)`. No `ask`, or None as an answer: nobody is there
    always: set = field(default_factory=set)  # tools and commands that were approved for good

    async def before_execute_tools(self, tool_calls):
        for call in tool_calls:
            is_free = is_read_only(call.name, self.tools) or what_always_allows(call) in self.always
            if not (is_free or call.error or call.denied):
                call.denied = await self._objection(call)  # if this fails, CompositeHook denies

    async def _objection(self, call):
        """Ask the user. Returns "" if the user approves, else the reason for the model."""
        kind = what_always_allows(call)
        answer = None
        if self.ask:
            answer = await self.ask(channels.approval_question(call.name, call.arguments, kind))
        if answer is None:
            return (
                "not approved: nobody can be asked here\nThis call did not run. Tell the user to "
                "ask for it at a terminal or in an open window of the page, or to start nanobot "
                "without --approve."
            )
        word = answer.strip().lower()
        if kind and word in ("a", "always"):
            self.always.add(kind)
        if word in ("y", "yes", "a", "always"):
            return ""
        reason = re.sub(r"(?i)\Ano?\b[ ,]*", "", answer.strip())  # "n it is used" → "it is used"
        return f"not approved\nThe user did not approve this call: {reason}".rstrip(": ")


@dataclass
class EventHook(AgentHook):
    """Sends what happens in a turn to its channel: deltas, the text before calls, each call with
    its outcome, retries, the answer."""

    emit: Callable | None  # awaited with each OutboundMessage
    turn: Turn
    wants_streaming: bool
    shows_deltas: bool = True  # does the user see an answer while the model writes it?
    only_watches = True

    async def send(self, kind, content):
        if self.emit:
            await self.emit(OutboundMessage(self.turn.channel, self.turn.chat_id, content, kind))

    async def after_response(self, response):
        self.response = response

    async def on_stream(self, delta):
        await self.send("delta", delta)

    async def on_retry(self, why):
        await self.send("retry", why)

    async def before_execute_tools(self, tool_calls):
        if text := self.response.content:
            await self.send("progress", text)

    async def after_tool(self, call, result, seconds):
        # paths below the working folder are shown relative to it, as in `result.shown`
        hint = tool_hint(call).replace(f"{self.turn.cwd}{os.sep}", "")
        await self.send("tool_hint", f"{hint} · {result.shown}")


@dataclass
class WaitingHook(AgentHook):
    """Shows in the terminal what the turn waits for: the model or the calls that are running."""

    bottom: channels.BottomLine
    only_watches = True

    async def before_iteration(self, context):
        self.bottom.begin("the model")

    async def before_execute_tools(self, tool_calls):
        # the calls that have not ended
        self.hints = {call.id: tool_hint(call) for call in tool_calls}
        self.bottom.begin(", ".join(self.hints.values()))

    async def after_tool(self, call, result, seconds):
        self.hints.pop(call.id, None)
        self.bottom.begin(", ".join(self.hints.values()))


def tool_hint(call):
    """A call in one line: `read_file("a.txt")`, `grep("TODO")`, `$ ls`."""
    command = call.arguments.get("command")
    if call.name == "exec" and command:
        return f"$ {begin_of(command, 96)}"
    for name in ("pattern", "path", "message", *call.arguments):  # the first one says most
        if value := call.arguments.get(name):
            return f'{call.name}("{begin_of(value, 300)}")'
    return f"{call.name}()"


def begin_of(value, most):
    """The first line of a text, but at most `most` characters: "cat <<E\nhi\nE" → "cat <<E …" """
    text = str(value).strip()
    line = text.partition("\n")[0][:most]
    return line if line == text else f"{line} …"


# ---- Many chats at once ----


class BusService:
    """Answers the chats of a bus. At most `maxConcurrent` turns run at once, one per chat."""

    def __init__(self, loop, bus):
        self.loop = loop
        self.bus = bus
        self.conversations = {}  # session key → Conversation
        self.slots = asyncio.Semaphore(loop.limits.max_concurrent)
        self.background = Background()
        loop.subagents.report = bus.publish
        loop.tools.register(tools.tool(self.message))

    def receive(self, message):
        """Queue a message in its chat. Commands run at once, except those of WAITING."""
        if message.channel == "system":  # a report: its `chat_id` is a session key
            self.background.start(self._conversation(message.chat_id).take_in(message, "report"))
            return
        conversation = self._conversation(message.session_key)
        command, _ = slash_command(message.content)
        if command and command not in WAITING:
            self.background.start(conversation.obey(command, message.content), conversation.key)
            message.confirm()  # a command is not stored: after a crash, it is not repeated
        else:
            self.background.start(conversation.take_in(message, "command" if command else "user"))

    def _conversation(self, key):
        return self.conversations.setdefault(key, Conversation(self, key))

    def _chats(self):
        """The session keys of the chats that the open channels can reach."""
        return [
            key
            for key in self.loop.sessions.list_keys()
            if key.partition(":")[0] in self.bus.channels
        ]

    async def message(
        self,
        content: str,
        channel: str = "",
        chat_id: str = "",
        media: Annotated[list[str], "Paths of files to send"] = (),
        *,
        turn: Turn,
    ):
        """Send a text or files to a chat (default: this chat). No other tool can send files."""
        key = f"{channel or turn.channel}:{chat_id or turn.chat_id}"
        chats = self._chats()
        if key not in chats:
            raise ToolError(
                f"There is no conversation in the chat {key}. "
                f"Known chats: {', '.join(chats) or 'none'}"
            )
        files = [turn.path(path) for path in media]
        for file in files:
            if not file.is_file():
                raise ToolError(f"There is no file {file}.")
        conversation = self._conversation(key)
        if content and key == turn.session_key:
            await conversation.say("final", content)
        elif content:  # a report, because the other chat's journal must get the text, too
            await self.bus.publish(InboundMessage("system", "message", key, content))
        for file in files:
            await conversation.say("file", "", str(file))
        return f"Sent to {key}."

    def go_on_after_restart(self):
        """Send all undelivered answers, resume open turns, and answer all waiting messages."""
        for key in self._chats():
            self.background.start(self._conversation(key).go_on_after_restart())

    async def end(self):
        """Cancel running turns. The next start of the gateway resumes the cancelled turns."""
        self.loop.is_ending = True
        await end_all([*self.background.tasks, *self.loop.subagents.running], 5.0)


class Conversation:
    """One chat. Each message starts a task that saves the message, then answers the whole inbox."""

    def __init__(self, service, key):
        self.service = service
        self.loop = service.loop
        self.bus = service.bus
        self.key = key
        self.chat = key.split(":", 1)  # channel and chat id
        self.inbox = self.loop.sessions.inbox(key)
        self.outbox = self.loop.sessions.outbox(key)  # what the tool `message` sends
        self.storing = Lock()  # held while a message is stored: the order stays
        self.answering = Lock()  # held while the inbox is answered
        self.is_due = False  # True: resume the turn that the previous gateway left open
        self.reply_to = ""  # id of the newest message in this turn
        self.said = []  # what the tool `message` has sent in this turn

    async def take_in(self, message, kind):
        """Append a message to the inbox file, then acknowledge the message to its channel. Until
        the file can be written, retry, and tell the chat once; other chats do not wait."""
        line = inbox_line(message, kind)
        warning = ""  # what the chat was told
        async with self.storing:
            while True:
                try:
                    await to_thread(self.inbox.append, line)
                    break
                except OSError as problem:  # for example, the disk is full
                    if not warning:
                        warning = f"A message cannot be stored yet, and is retried: {problem}"
                        GATEWAY_LOG.warning("%s: %s", self.key, warning)
                        self._send(warning)
                    await sleep(1.0)
        message.confirm()
        GATEWAY_LOG.info("%s: received %d characters", self.key, len(message.content))
        await self._answer_what_waits()

    async def say(self, kind, text, *files):
        """Send what the tool `message` says. It stays in the outbox file until it has arrived."""
        line = {"id": token_hex(16), "kind": kind, "content": text, "media": files}
        await to_thread(self.outbox.append, line)
        self._send_said(line)
        self.said.append(text.strip())

    def _send_said(self, line):
        self._send(
            line["content"],
            line["kind"],
            line["media"],
            on_delivered=partial(self.outbox.remove, {line["id"]}),
        )

    def _send(self, *text_kind_media, **more):
        """Queue an OutboundMessage with these fields in the bus."""
        self.bus.send(OutboundMessage(*self.chat, *text_kind_media, **more))

    async def obey(self, command, text):
        """Answer a command, also during a turn. If the command fails, the chat gets the error."""
        try:
            await self.loop.process_direct(text, self.key, self.emit)
        except Exception as problem:
            self._send(f"Sorry, /{command} failed: {problem}")
            raise

    async def go_on_after_restart(self):
        """Resume a recent open turn, but at most twice, because the turn may crash the gateway. If
        it is not resumed, a report tells the chat so."""
        session = self.loop.sessions.get(self.key)
        for line in self.outbox.read():
            self._send_said(line)
        self._send_answers(session.undelivered, session)
        if session.is_open:
            report_id = f"open@{session.last}"  # the same at each start, so the chat is told once
            is_recent = time.time() - session.path.stat().st_mtime < 86_400  # one day
            self.is_due = session.resumed < 2 and is_recent and report_id not in session.known_ids
            if not self.is_due:
                await self.take_in(
                    InboundMessage(
                        "system",
                        "",
                        self.key,
                        "Your last message was not answered: nanobot was interrupted. "
                        "/continue resumes the turn.",
                        message_id=report_id,
                    ),
                    "report",
                )
        await self._answer_what_waits()

    async def _answer_what_waits(self):
        """Answer until the inbox is empty. Skip a terminal's inbox: `Talk` shows its reports."""
        if self.chat[0] not in self.bus.channels:
            return
        async with self.answering:
            while self.is_due or self.inbox.path.exists():
                if not await logged(self._turn(), self.key):
                    await sleep(1.0)

    async def _turn(self):
        """Answer the next inbox messages, then remove journalled messages from the inbox. Returns
        True; if it fails, `logged` returns None instead."""
        async with self.service.slots, self.loop.turns.hold(self.key) as session:
            before = session.last
            lines = self._next_lines(session)
            try:
                if self.is_due or lines:
                    await self._answer(session, lines)
            except CancelledError:
                # the turn had journalled its answer when it was cancelled; older ones were sent
                self._send_answers(
                    [each for each in session.undelivered if each["n"] > before], session
                )
                if not self.loop.is_ending:  # after /stop, start a task for the waiting messages
                    self.service.background.start(self._answer_what_waits())
                raise
            except Exception as problem:
                # lines that are journalled leave the inbox, so they are not tried again
                if not lines or lines[0]["id"] in session.known_ids:
                    self._deliver(
                        session,
                        AgentRunResult(
                            stop_reason="error", error=f"{type(problem).__name__}: {problem}"
                        ),
                    )
                raise
            finally:
                await to_thread(self.inbox.remove, set(session.known_ids))
        return True

    def _next_lines(self, session):
        """Returns the next user messages (up to 100), or the next command, or the next report."""
        waiting = [line for line in self.inbox.read() if line["id"] not in session.known_ids]
        return (
            list(itertools.takewhile(lambda line: line["kind"] == "user", waiting[:100]))
            or waiting[:1]
        )

    async def _answer(self, session, lines):
        """Send the answer to these lines, or these lines themselves if they are a report."""
        self.reply_to = ""
        self.said = []
        if self.is_due:
            self.is_due = False
            session.mark("resumed")
            lines = []
        elif lines[0]["kind"] == "user":
            self.reply_to = lines[-1]["id"]
        elif lines[0]["kind"] == "report" and lines[0].get("sender") != "subagent":
            session.append(report_line(lines[0]))  # it belongs to no turn
            await session.synced()
            self._send_answers(session.undelivered[-1:], session)
            return
        events = EventHook(
            self.emit,
            self.loop.turn(self.key),
            self.loop.program.streaming,
            self.bus.channels[self.chat[0]].shows_deltas,
        )
        self._deliver(
            session,
            await self.loop.answer(session, events, lines, partial(self._arrived, session)),
        )

    def _arrived(self, session):
        """Up to three user messages that have arrived during the turn."""
        lines = [line for line in self._next_lines(session) if line["kind"] == "user"][:3]
        if lines:
            self.reply_to = lines[-1]["id"]
        return lines

    def _deliver(self, session, result):
        """Send a turn's result, even an empty one. The delivery writes the mark `delivered`."""
        GATEWAY_LOG.info("%s: %s", self.key, result.stop_reason)
        text = text_for_chat(result)
        if text in self.said:  # some models call `message`, then repeat its text as the answer
            text = ""
        self._send_answers([{"n": session.last, "content": text}], session)

    def _send_answers(self, answers, session):
        """Send messages of the journal. After a restart, undelivered ones are sent again."""
        for answer in answers:
            self._send(
                answer["content"],
                reply_to=self.reply_to,
                on_delivered=partial(session.mark, "delivered", upto=answer["n"]),
            )

    async def emit(self, event):
        if event.kind == "tool_hint":  # without the lines of a diff
            event.content = event.content.partition("\n")[0]
        if event.kind in ("final", "delta", *kinds_to_show(self.loop.config.channels)):
            self.bus.send(event)


def inbox_line(message, kind):
    """Convert a message of a channel to a line of the inbox."""
    return {
        "id": message.message_id or token_hex(16),
        "kind": kind,
        "sender": message.sender_id,
        "content": (f"{message.speaker}: " if message.speaker and kind == "user" else "")
        + message.content,
        "media": list(map(str, message.media)),
    }


def report_line(line):
    """Convert a report from the inbox to a journal line, which the user's next message quotes:

    {"role": "assistant", "report": "reminder", "id": "j1@1795443848", "content": "Stretch!", …}
    """
    return {
        "role": "assistant",
        "report": "reminder" if line.get("sender") == "job" else "message",
        "id": line["id"],
        "content": line["content"],
        "timestamp": line["timestamp"],
    }


def text_for_chat(result):
    text = result.final_content or ""
    if result.error and result.error not in text:
        text += f"\n\nSorry, that failed: {result.error}"
    if result.stop_reason == "max_iterations":
        text += f"\n\n({LIMIT_REACHED})"
    return text.strip()


# ---- The gateway: channels, cron and heartbeat ----
# A lock prevents a second gateway, because two gateways could answer the same message twice.

GATEWAY_LOG = logging.getLogger("nanobot.gateway")  # the gateway logs one line per event
SERVED = "A gateway or a page already serves {}. Stop that program, or use another --workspace."


def is_held(workspace, lock):
    """True if a program holds `lock`: a gateway or a page "gateway", whoever runs jobs "jobs"."""
    try:
        with locked(workspace / f".nanobot/{lock}.lock", "it is held"):
            return False
    except SessionBusy:
        return True


def run_gateway(loop, page=None):
    """Run the configured channels, the cron jobs, the heartbeat and, if given, the `page` until a
    signal arrives. Raises SessionBusy if this workspace has a gateway."""
    with locked(loop.state_folder / "gateway.lock", SERVED.format(loop.workspace)):
        asyncio.Runner().run(serve(loop, page))  # unlike `asyncio.run`, do not wait for stuck tasks


async def serve(loop, page):
    """Serve until a signal arrives or a task fails. Then cancel all tasks and return within 8 s,
    even if a tool ignores the cancellation."""
    stop = asyncio.Event()
    event_loop = asyncio.get_running_loop()
    channels.end_on_signals(lambda *_: event_loop.call_soon_threadsafe(stop.set))
    bus = channels.MessageBus()
    if page:
        bus.open(page)
    telegram = loop.config.channels.telegram
    if telegram.token:
        bus.open(channels.Telegram(**vars(telegram), media_folder=loop.state_folder / "media"))
    if not page and not (telegram.token and telegram.allow_from):
        log.warning("Nobody can reach the agent: set channels.telegram.token and allowFrom.")
    jobs = JobRunner(loop, bus.publish)
    jobs.add_system_jobs()
    work = [create_task(part) for part in (loop.run(bus), jobs.run(), stop.wait())]
    GATEWAY_LOG.info("serving %s", ", ".join([*bus.channels, "cron"]))
    try:
        ended, _ = await wait(work, return_when="FIRST_COMPLETED")
        for task in ended:
            task.result()  # raises the error of a failed task
    finally:
        ending = create_task(end_in_order(loop, bus, work))
        await wait([ending], timeout=8.0)
        session_keys = {*loop.turns.tasks, *loop.subagents.running.values()}
        if session_keys or not ending.done():
            log.warning(
                "still running at the end: %s; the journal has the finished steps",
                ", ".join(sorted(session_keys)) or "a task of the gateway",
            )
    GATEWAY_LOG.info("ended")


async def end_in_order(loop, bus, work):
    """End the work first, because the bus delivers its last texts. The limits are seconds."""
    await end_all(work, 6.0)
    await bus.close(2.0)
    await loop.close(1.0)


class JobRunner:
    """Runs each due job as its own turn. `tell(message)` sends the job's report to its chat.
    Without `tell`, only jobs of terminals run, if no gateway runs; reports wait in the inbox."""

    def __init__(self, loop, tell=None):
        self.loop = loop
        self.is_gateway = tell is not None
        self.tell = tell or self._into_inbox
        # channels.py does not import memory.py: it gets the functions that lock and write
        self.clock = channels.CronService(
            channels.JobStore(loop.workspace / "cron/jobs.json", locked, write_atomically),
            self.run_job,
            loop.context.zone,
            now=lambda: loop.program.now().timestamp(),
            is_wanted=lambda job: (
                self.is_gateway or (job.channel == "cli" and not loop.config.read_only)
            ),
        )

    async def run(self):
        """Run due jobs until cancelled, but only while no other program holds the lock `jobs`."""
        while True:
            try:
                with locked(self.loop.state_folder / "jobs.lock", "another program runs them"):
                    await self._work()
            except SessionBusy:
                if self.is_gateway:
                    channels.warn_once(
                        "The jobs wait for an open `nanobot`: if it is stopped, continue it (fg)."
                    )
            await self.loop.program.sleep(1.0)

    async def _work(self):
        """Start due jobs. A terminal ends that, and its running jobs, once a gateway starts."""
        try:
            while self.is_gateway or not is_held(self.loop.workspace, "gateway"):
                await self.clock.tick()
                await self.loop.program.sleep(1.0)
        finally:  # they are run again later, with the same names
            await end_all(self.clock.running.values())

    def add_system_jobs(self):
        hours = self.loop.limits.dream.interval_h
        heartbeat = self.loop.config.gateway.heartbeat
        self.clock.add_system("dream", (hours or 2) * 3_600, hours > 0)
        self.clock.add_system("heartbeat", heartbeat.interval_s, heartbeat.enabled)

    async def run_job(self, job, run):
        """Run a job and send its answer or error to its chat. The report gets the id `run`."""
        if job.channel == "system":
            # a gateway has no morning at which it begins: it remembers at each system job
            memory.remember_terminals(self.loop.sessions)
            if job.id == "dream":
                # who has just opened the page would have to wait for the dream
                await self.loop.program.sleep(600.0)
                await self.loop.dream.run()
                return
            tasks = channels.active_tasks(
                self.loop.memory.text_of(self.loop.workspace / "HEARTBEAT.md")
            )
            if tasks:  # the model reports with the tool `message`
                await self._answer("cron:heartbeat", template("heartbeat", tasks=tasks))
            return
        GATEWAY_LOG.info("cron %s: %s", job.id, job.message[:80])
        chat = f"{job.channel}:{job.chat_id}"
        told = ""
        try:
            told = await self._answer(
                f"cron:{job.id}", template("job", message=job.message), chat, job.folder
            )
        except Exception as failure:  # report each error, so that no reminder is lost silently
            told = f"The job {job.id} ({job.message[:80]}) failed. {failure}"
            raise
        finally:
            if told:
                await self.tell(InboundMessage("system", "job", chat, told, message_id=run))

    async def _answer(self, key, text, chat="", folder=""):
        """Answer in a new conversation, not saved to the memory. A failure raises RuntimeError."""
        self.loop.turns.chats[key] = chat  # /stop in this chat cancels the run
        async with self.loop.turns.hold(key) as session:
            session.mark("saved", upto=session.last)  # requests do not have the earlier runs
        result = await self.loop.process_direct(text, key, folder=folder)
        if result.stop_reason in NOT_ANSWERED:
            raise RuntimeError(text_for_chat(result))
        return text_for_chat(result)

    async def _into_inbox(self, report):
        await in_thread(
            self.loop.sessions.inbox(report.chat_id).append, inbox_line(report, "report")
        )

    def cron_tool(self):
        """The tool `cron`: `CronService.cron`, but with the errors of a tool, and with a type for
        its parameter `turn`: channels.py does not import tools.py."""

        @wraps(self.clock.cron)
        def cron(**arguments):
            try:
                text = self.clock.cron(**arguments)
            except channels.CronError as mistake:
                raise ToolError(mistake) from None
            if arguments["action"] == "add" and not is_held(self.loop.workspace, "jobs"):
                text += f"\n({template('no_gateway')} Tell the user.)"
            return text

        cron.__annotations__ = self.clock.cron.__annotations__ | {"turn": Turn}
        return tools.tool(cron)


# ---- The model for the memory ----


def memory_work(loop):
    """Connect the memory to the model, the tools and the limits from the settings. Returns the
    consolidator and the dream."""
    settings = loop.limits
    dreaming = RunEvents(loop.listeners, "dream")
    return (
        memory.Consolidator(
            loop.memory,
            loop.sessions,
            partial(ask_for_memory, loop, RunEvents(loop.listeners, "memory")),
            template("consolidate"),
            settings.budget,
            settings.memory_window,
        ),
        memory.Dream(
            loop.memory,
            partial(ask_for_memory, loop, dreaming),
            partial(edit_memory, loop, dreaming),
            template("dream_find"),
            template("dream_edit"),
            loop.skills,
            settings.budget,
            settings.dream.max_batch_size,
        ),
    )


async def ask_for_memory(loop, run, messages, definitions):
    """Ask for the call of one of these tools; ask again if the model wrote a text before a call."""
    for _ in range(2):
        response = await loop.provider.chat(
            messages, definitions, max_tokens=loop.limits.max_tokens, on_event=run
        )
        add_up(loop.cost.total, {"requests": 1, **response.usage})
        if response.unclear_at is None:
            break
        messages = [
            *messages,
            response.to_message(),
            {"role": "user", "content": template("only_the_call")},
        ]
    return response


async def edit_memory(loop, run, messages, refuse):
    """Phase 2 of Dream: the model edits MEMORY.md, USER.md, SOUL.md and the user's skills."""
    return await loop.runner.run(
        loop.limited(
            messages,
            tools=FencedTools([tools.read_file, tools.edit_file, tools.write_file], refuse),
            turn=replace(loop.turn("system:dream"), cwd=loop.workspace, restrict=True),
            hook=loop.cost,
            on_event=run,
            max_iterations=loop.limits.dream.max_iterations,
        )
    )


class FencedTools(ToolRegistry):
    """Tools for Dream. `refuse(name, arguments)` returns why a call is forbidden, or ""."""

    def __init__(self, tools, refuse):
        super().__init__(tools)
        self.refuse = refuse

    def prepare_call(self, name, params):
        tool, arguments, problem = super().prepare_call(name, params)
        return tool, arguments, problem or self.refuse(name, arguments)


# ---- Tools that need the loop, and subagents ----


def add_tools(loop):
    """Add `spawn` and `cron`. Returns the MCP servers, which add their tools when they connect."""
    loop.tools.register(tools.tool(loop.subagents.spawn))
    loop.tools.register(JobRunner(loop).cron_tool())
    return tools.MCPServers(loop.config.tools.mcp_servers, loop.tools)


@dataclass
class SubagentManager:
    """Runs helper agents. A helper has one task, no conversation and fewer tools than the agent."""

    work: Callable  # `await work(task, turn)` returns the answer, or raises ToolError
    running: dict = field(default_factory=dict)  # task → its session key
    report: Callable = lambda message: None  # gets an InboundMessage when a helper has ended

    def of(self, session_key):
        """The running helpers of a session, as tasks."""
        return [task for task, key in self.running.items() if key == session_key]

    async def spawn(self, task: str, label: str = "", wait: bool = False, *, turn: Turn):
        """Give a task to a helper that works in parallel and cannot ask questions. Put all needed
        facts into the task. The result comes as a message, or with `wait` as this call's result."""
        if len(self.running) >= 4:
            raise ToolError("4 helpers are at work. Wait, or do the task yourself.")
        name = label or task[:40]
        is_awaited = wait or turn.channel == "cron"  # a finished job gets no report
        helper = create_task(
            self.work(task, turn) if is_awaited else self._report(name, task, turn)
        )
        self.running[helper] = turn.session_key
        helper.add_done_callback(self.running.pop)
        if is_awaited:
            return await helper
        return f"Helper {name!r} is at work. Its result arrives as a message. Go on, or stop here."

    async def _report(self, name, task, turn):
        try:
            outcome = await self.work(task, turn)
        except Exception as problem:
            outcome = problem
        self.report(
            InboundMessage(
                "system",
                "subagent",
                turn.session_key,
                template("subagent_result", helper=name, result=outcome),
            )
        )


async def helper_answer(loop, task, turn):
    """Run a helper. Returns its answer, or raises ToolError if there is none."""
    registry = loop.tools.copy()
    for name in ("spawn", "message", "cron"):  # only the agent talks to people and plans
        registry.unregister(name)
    system = [
        template("subagent", **vars(turn)),
        loop.context.parts(turn).get("Memory", ""),
        *skill_parts(
            skill
            for skill in loop.skills.load()
            # these skills are for work that only the agent does
            if skill.name not in ("cron", "memory", "skill-creator")
        ).values(),
    ]
    message, _ = loop.context.user_message(task, turn)  # adds date and time to the task
    result = await loop.runner.run(
        loop.limited(
            [{"role": "system", "content": "\n\n".join(system)}, memory.as_sent(message)],
            tools=registry,
            turn=replace(turn, seen={}),
            hook=CompositeHook(loop.hooks_for(turn)),
            on_event=RunEvents(loop.listeners, "helper", turn.session_key),
            max_iterations=15,  # a helper's task is smaller than a turn's
        )
    )
    if result.stop_reason == "completed":
        return result.final_content
    raise ToolError(
        f"The helper did not finish ({result.stop_reason}): {result.error or result.final_content}"
    )


# ---- Slash commands ----

WAITING = ("new", "continue", "undo")  # these commands wait for the end of a running turn


def slash_command(text):
    """`/NEW ` → ("new", ""), `/dream-log 1f3a` → ("dream-log", "1f3a"), other text → ("", "")"""
    # Commands: "/status@my_bot", "/dream-log 1f3a9c". Not commands: "/etc/hosts?", "/new York?"
    match = re.fullmatch(r"(?i)/([a-z][a-z-]*)(?:@\w+)?(?:\s+(\S.*))?", text.strip())
    if not match:
        return "", ""
    command = match[1].lower()
    if match[2] and command not in ("model", "dream-log", "dream-restore"):
        return "", ""
    return command, match[2] or ""


async def begin_command(loop, command, session, line):
    """Run a command of WAITING. Returns its answer, or "" if a turn must be resumed."""
    origin = {"id": line["id"]} if "id" in line else {}  # of a chat's message
    session.mark(command, **origin)
    if command == "undo":
        return await in_thread(undo, loop, session)
    if command == "new":
        await session.synced()
        loop.files_seen[session.key].clear()
        loop.background.start(loop.after_turn(session))
        return "A new conversation begins; the journal keeps the old one."
    return "" if session.unfinished else "There is no interrupted turn to resume."


NOTHING_TO_UNDO = (
    "There is nothing to undo: no turn here has changed files, or everything is undone already."
)


def undo(loop, session):
    """Undo the last turn that changed files. The user's next message tells the model."""
    changes = tools.last_changes(loop.turn(session.key))
    if not changes:
        return NOTHING_TO_UNDO
    # an earlier version kept no words, and a turn that goes on after a restart has none
    asked = changes[0].get("asked") or "an earlier turn"
    files = "; ".join(f"{name}: {done}" for name, done in tools.take_back(changes).items())
    # its time is in nanoseconds
    told = f'Undo of "{asked}" ({ago(int(changes[0]["turn"]) / 1e9)}): {files}.'
    session.append({"role": "assistant", "report": "undo", "content": told})
    session.mark("delivered", upto=session.highest)  # it is no answer that must be sent
    return f"{told} What commands (exec) did cannot be undone."


async def answer_command(loop, command, argument, turn):
    """Run a command that does not wait for the end of a running turn. Returns its answer."""
    repository = memory.MemoryRepository(loop.workspace)
    match command:
        case "start" | "help":
            return template(command)
        case "status":
            return status_text(loop, turn)
        case "stop":
            has_stopped = loop.stop(turn.session_key)
            await sleep(0)  # first, the stopped turn sends its last text
            return "Stopped; resume with /continue." if has_stopped else "Nothing is running."
        case "model":
            if argument and loop.config.defaults.provider != "human":
                loop.provider = loop.runner.provider = make_provider(loop.config, argument)
                loop.cost.price = loop.config.prices.get(loop.provider.model)
            return f"The model is {loop.provider.model}."
        case "dream":
            return await loop.dream.run()
        case "dream-log":
            return await in_thread(repository.log, argument)
        case "dream-restore":
            return await in_thread(repository.restore, argument)
    return f"There is no /{command}. /help lists the commands."


def status_text(loop, turn):
    request = preview(loop, turn)
    return "\n".join(
        [
            f"nanobot {__version__}, model {loop.provider.model}, "
            f"session {turn.session_key}, "
            + counted(len(loop.sessions.get(turn.session_key).history()), "message"),
            f"folder {turn.cwd}, workspace {loop.workspace}",
            loop.limits.share(request.tokens),
            *request.notes,
            f"since the start, {ago(loop.started)}: {loop.cost.line(loop.cost.total)}",
        ]
    )


def preview(loop, turn, *later):
    """Build the next request, with the messages `later`. Nothing is sent, and nothing is saved."""
    spec = loop.run_spec(
        loop.sessions.get(turn.session_key).history(*later), EventHook(None, turn, False)
    )
    state = RunState(spec.messages, spec=spec)
    loop.runner.prepare(state)
    return loop.runner.govern(state)


# ---- The settings ----
# A wrong type or an unknown key is an error at the start, not in the middle of a turn.


class ConfigError(Exception):
    """The settings or arguments are wrong. The error text gives the cause and the remedy."""


USUAL_SETTINGS = "~/.nanobot/config.json"


@dataclass
class DreamSettings:
    interval_h: float = 2  # 0: no dreams except with /dream
    max_batch_size: int = 20  # maximum number of history entries per dream
    max_iterations: int = 10


@dataclass
class AgentDefaults:
    workspace: str = "~/.nanobot/workspace"
    model: str = ""
    provider: str = "auto"
    max_tokens: int = 8_192
    context_window_tokens: int = 65_536
    temperature: float | None = None  # if None, 0.1 at local servers, else the endpoint's default
    max_tool_iterations: int = 40
    max_tool_result_chars: int = 16_000
    timezone: str = ""  # if empty, the time zone of the machine
    memory_window: int = 100  # above this limit, a session's old messages move to the memory
    max_concurrent: int = 8  # maximum number of turns that a gateway runs at the same time
    dream: DreamSettings = field(default_factory=DreamSettings)

    @property
    def budget(self):
        """The maximum size of a request in tokens, including the tool definitions."""
        return self.context_window_tokens - self.max_tokens - 1_024

    def share(self, tokens):
        """How full the context window is: "context 1,234 of 65,536" """
        return f"context {tokens:,} of {self.context_window_tokens:,}"


@dataclass
class AgentSettings:
    defaults: AgentDefaults = field(default_factory=AgentDefaults)


@dataclass
class ProviderSettings:
    api_key: str = ""
    api_base: str = ""
    extra_headers: dict[str, str] = field(default_factory=dict)
    extra_body: dict = field(default_factory=dict)
    text_tool_calls: Literal["auto", "on", "off"] = "auto"


@dataclass
class ExecSettings:
    enable: bool = True
    timeout: int = 60  # seconds
    sandbox: Literal["", "bwrap"] = ""
    sandbox_network: bool = False
    path_append: str = ""
    allowed_env_keys: list[str] = field(default_factory=list)


@dataclass
class SearchSettings:
    provider: Literal[*tools.SEARCH_SERVICES] = "duckduckgo"
    api_key: str = ""
    base_url: str = ""  # the URL of your own search server
    max_results: int = 5


@dataclass
class WebSettings:
    enable: bool = True
    proxy: str = ""  # http://host:port; the proxy then decides which addresses are allowed
    search: SearchSettings = field(default_factory=SearchSettings)


@dataclass
class MCPSettings:
    command: str = ""  # starts a local server; a remote server needs `url` instead
    args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    url: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    type: str = ""  # stdio, sse or streamableHttp; if empty, found from `command` and `url`
    tool_timeout: int = 30  # seconds
    enabled_tools: list[str] = field(default_factory=lambda: ["*"])
    disabled: bool = False


@dataclass
class ToolSettings:
    restrict_to_workspace: bool = False
    exec: ExecSettings = field(default_factory=ExecSettings)
    web: WebSettings = field(default_factory=WebSettings)
    ssrf_whitelist: list[str] = field(default_factory=list)  # CIDRs
    mcp_servers: dict[str, MCPSettings] = field(default_factory=dict)


@dataclass
class Price:
    """Prices per million tokens, in any currency."""

    input: float = 0.0
    output: float = 0.0
    cached: float | None = None  # if None, the same price as `input`

    def of(self, usage):
        price = usage["prompt_tokens"] * self.input + usage["completion_tokens"] * self.output
        if self.cached is not None:
            price -= usage["cached_tokens"] * (self.input - self.cached)
        return price / 1e6


@dataclass
class TelegramSettings:
    token: str = ""
    allow_from: list[str | int] = field(default_factory=list)  # ids of allowed users; empty: nobody
    api_base: str = "https://api.telegram.org"
    group_policy: Literal["mention", "open"] = "mention"


@dataclass
class ChannelSettings:
    send_progress: bool = True
    send_tool_hints: bool = True
    telegram: TelegramSettings = field(default_factory=TelegramSettings)


@dataclass
class HeartbeatSettings:
    enabled: bool = True
    interval_s: int = 1_800


@dataclass
class GatewaySettings:
    heartbeat: HeartbeatSettings = field(default_factory=HeartbeatSettings)


@dataclass
class Config:
    """The user's settings, in the shape of config.json: `config.agents.defaults.max_tokens`."""

    agents: AgentSettings = field(default_factory=AgentSettings)
    providers: dict[str, ProviderSettings] = field(default_factory=dict)
    tools: ToolSettings = field(default_factory=ToolSettings)
    prices: dict[str, Price] = field(default_factory=dict)
    channels: ChannelSettings = field(default_factory=ChannelSettings)
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    mcp_servers: dict[str, MCPSettings] = field(default_factory=dict)  # copied from other programs

    # no keys of the file, because they have no annotation
    base_url = ""  # from a flag or the environment
    general_key = ""  # the variable OPENAI_API_KEY
    read_only = False  # from a flag

    def __post_init__(self):
        self.tools.mcp_servers = self.mcp_servers | self.tools.mcp_servers
        self.path = path_of(USUAL_SETTINGS)

    @property
    def defaults(self):
        return self.agents.defaults

    @property
    def workspace(self):
        return path_of(self.defaults.workspace or AgentDefaults.workspace)

    def check(self):
        """Raises ConfigError if a value cannot work; warns of settings that have no effect."""
        if max(self.defaults.max_tokens, 1_024) * 2 >= self.defaults.context_window_tokens:
            raise ConfigError(
                f"agents.defaults.maxTokens ({self.defaults.max_tokens}) must be under half of "
                f"contextWindowTokens ({self.defaults.context_window_tokens}), which is over 2,048."
            )
        search = self.tools.web.search
        if self.tools.exec.sandbox_network and not self.tools.exec.sandbox:
            log.warning("tools.exec.sandboxNetwork has no effect without a sandbox")
        if search.api_key and not tools.SEARCH_SERVICES[search.provider].headers:
            log.warning("tools.web.search.apiKey has no effect: %s takes no key", search.provider)


def working_folder():
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise ConfigError("The current folder does not exist: cd to another folder.") from None


@dataclass
class Program:
    """What a program, or a test, gives to the agent besides the settings."""

    folder: Path = field(default_factory=working_folder)  # exec runs here
    now: Callable = datetime.now
    sleep: Callable = sleep
    streaming: bool = True
    patience: float = 30.0  # seconds; a server that starts has 25, and a one-shot has no later turn


def path_of(text):
    return Path(os.path.expanduser(text)).resolve()  # `Path.expanduser` could raise RuntimeError


def load_config(path=None, environ=os.environ):
    """Read the settings file. Environment variables override it. If given, `path` must exist."""
    file = path or path_of(USUAL_SETTINGS)
    config = read_setting(Config, read_json(file, environ) if path or file.exists() else {})
    config.path = file
    for row in ROWS.values():
        if key := environ.get(row.env_key):
            config.providers.setdefault(row.name, ProviderSettings()).api_key = key
    defaults = config.defaults
    config.base_url = environ.get("OPENAI_BASE_URL", "")
    config.general_key = environ.get("OPENAI_API_KEY", "")
    if config.base_url and defaults.provider in ROWS:
        defaults.provider = "auto"  # environment variables override the settings file
    defaults.model = environ.get("NANOBOT_MODEL") or defaults.model
    defaults.workspace = environ.get("NANOBOT_WORKSPACE") or defaults.workspace
    return config


def read_json(file, environ):
    """Read a settings file. Each `${VAR}` is replaced by the environment variable VAR."""

    def value_of(variable):
        name = variable[1]
        if name not in environ:
            raise ConfigError(f"{file} needs the environment variable {name}, which is not set.")
        return json.dumps(environ[name])[1:-1]  # a quote in the value becomes \"

    try:
        return json.loads(re.sub(r"\$\{(\w+)\}", value_of, file.read_text(encoding="utf-8-sig")))
    except OSError as problem:
        fault = f"{file}: {problem.strerror}. `nanobot onboard --config {file}` creates it."
    except ValueError as problem:
        fault = (
            f"{file} is not JSON: {problem}. Write straight quotes, no comma before a closing "
            "bracket, and at least {}."
        )
    raise ConfigError(fault)


def read_setting(hint, value, place=""):
    """Convert a value of the file to the type `hint`. A ConfigError contains the setting's path.

    (Config, {"agents": {"defaults": {"maxTokens": 2048}}}) → Config(agents=AgentSettings(…))
    """
    schema = tools.as_schema(dict if is_dataclass(hint) else hint)
    # `dream.intervalH: 0` means off, but no integer setting (steps, tokens, seconds) may be 0
    schema["minimum"] = 1 if hint is int else 0
    if problems := tools.validate(value, schema, place or "the file"):
        raise ConfigError("; ".join(problems))
    if get_origin(hint) is dict:
        _, inner = get_args(hint)
        return {key: read_setting(inner, item, f"{place}.{key}") for key, item in value.items()}
    if not is_dataclass(hint):
        return tools.cast(value, schema)  # an integer setting: 100.0 → 100
    hints = get_type_hints(hint)
    names = {camel_case(name): name for name in hints}
    settings = {}
    for key, item in value.items():  # keys may be in camelCase or in snake_case
        path = f"{place}.{key}".lstrip(".")
        if name := names.get(camel_case(key)):
            settings[name] = read_setting(hints[name], item, path)
            continue
        problem = f"{path}: unknown key. Known keys: {', '.join(sorted(names))}"
        if hint is not MCPSettings:  # entries copied from other programs may have more keys
            raise ConfigError(problem)
        log.warning("ignored: %s", problem)
    return hint(**settings)


def camel_case(name):
    """max_tokens → maxTokens"""
    return re.sub("_([a-z])", lambda match: match[1].upper(), name)


def make_provider(config, model=""):
    """The provider that the settings choose for `model`, or else for the model of the settings.
    Without key, URL and model: OfflineProvider."""
    defaults = config.defaults
    model = model or defaults.model
    if unknown := config.providers.keys() - ROWS.keys():
        raise ConfigError(f"providers.{min(unknown)} is unknown. Known: {', '.join(ROWS)}")
    if defaults.provider == "offline":
        return OfflineProvider()
    if "human" in (defaults.provider, defaults.model):
        return HumanProvider()
    own = {
        name: providers.Endpoint(ROWS[name], **vars(row)) for name, row in config.providers.items()
    }
    try:
        endpoint = providers.choose_endpoint(
            own,
            model,
            "" if defaults.provider == "auto" else defaults.provider,
            config.base_url,
            config.general_key,
        )
    except ValueError as problem:
        raise ConfigError(problem) from None
    if endpoint:
        return providers.OpenAIProvider(endpoint)
    if model in ("", "offline"):
        return OfflineProvider()
    raise ConfigError(
        f"There is no key and no base URL for the model {model}. "
        "Set OPENAI_API_KEY or OPENAI_BASE_URL, or use --offline."
    )


def lacks_model(loop):
    """True if the offline model answers although nobody has asked for the offline model."""
    return isinstance(loop.provider, OfflineProvider) and loop.config.defaults.provider != "offline"


class ReadOnlyTools(ToolRegistry):
    """For --read-only: a tool that may change something is not added, also if it comes later."""

    missing = "nanobot is read-only: there is no tool"

    def register(self, tool):
        if tool.read_only:
            super().register(tool)


def make_tools(config):
    """The tools that the settings allow. MCP tools are added when their server connects."""
    settings = config.tools
    shell = settings.exec
    kind = ReadOnlyTools if config.read_only else ToolRegistry
    registry = kind(tools.FILE_TOOLS)
    if shell.enable:
        registry.register(
            tools.Exec(
                shell.timeout,
                shell.path_append,
                shell.allowed_env_keys,
                sandbox=shell.sandbox,
                network=shell.sandbox_network,
            )
        )
    if settings.web.enable:
        try:
            web = tools.Web(settings.ssrf_whitelist, proxy=settings.web.proxy)
        except ValueError as problem:
            raise ConfigError(f"tools.ssrfWhitelist or tools.web.proxy: {problem}") from None
        registry.register(tools.WebFetch(web))
        registry.register(tools.WebSearch(web, **vars(settings.web.search)))
    return registry


# ---- Watching a run: --step, the events, the page, `nanobot trace` and `nanobot replay` ----


@dataclass
class StepHook(AgentHook):
    """Asks the user before each request and each tool call. `ask(text, what, **details)` returns
    "" (continue), "skip", "stop", new arguments for the call as JSON, or None (nobody is there)."""

    ask: Callable

    async def before_request(self, messages, tools):
        await self._decide(  # the end of a long text is what the model reacts to
            f"{str(messages[-1]['content'])[-1_000:]}\n"
            f"---- {len(messages)} messages. Enter sends them; type stop to cancel: ",
            "request",
            messages=messages,
            tools=tools,
        )

    async def after_response(self, response):
        for call in response.tool_calls:
            answer = await self._decide(
                f"{call.name} {lines_of_json([call.arguments])}\n"
                "Enter runs it; or type skip, stop or new JSON arguments: ",
                "call",
                name=call.name,
                arguments=call.arguments,
            )
            if answer == "skip":
                call.denied = "The user skipped this call."
            elif answer:
                call.arguments, call.error = providers.parse_arguments(answer, repair=False)

    async def _decide(self, text, what, **details):
        answer = await self.ask(text, what, **details)
        if answer is None or answer.strip() == "stop":  # /continue resumes the turn
            raise CancelledError
        return answer.strip()


PART_END = "\n\n---\n\n"  # between the parts of the system prompt


class RunEvents:
    """Tells all listeners what happens in a run, as the events that providers.py describes. Each
    message of a request is told once; later requests only name its number. `key` is the session's,
    like "cli:work"."""

    def __init__(self, listeners, who, key="memory"):
        self.listeners = listeners  # functions that get each event as a dict
        self.about = {"run": token_hex(4), "who": who, "key": key}
        self.numbers = {}  # each message of the last request, as JSON → its number
        self.new_numbers = itertools.count(1)
        self.tools = []  # of the last request

    def __call__(self, kind, **fields):
        if not self.listeners:
            return
        if kind == "request":
            tools_before = self.tools
            self.tools = fields["tools"]
            fields |= self._numbered(fields["messages"])  # "messages": now only the new ones
            if self.tools == tools_before:
                del fields["tools"]
        event = {"time": time.time(), **self.about, "kind": kind, **fields}
        for listener in self.listeners:
            listener(event)

    def _numbered(self, messages):
        """The new messages, the numbers of all, and the estimated tokens of each message, of each
        part of the system prompt and, last, of the tools. The second of two requests:

        [system, question, answer] → {"sent": [1, 2, 3], "messages": [answer], "tokens": …}
        """
        texts = [lines_of_json([message]) for message in messages]
        new = []
        for text in texts:
            if text not in self.numbers:
                self.numbers[text] = next(self.new_numbers)
                new.append(json.loads(text))  # a copy: a hook may change the message later
        # forget messages that are no longer sent, so that the memory of a gateway does not grow
        self.numbers = {text: self.numbers[text] for text in texts}
        return {
            "sent": [self.numbers[text] for text in texts],
            "tokens": list(map(memory.message_tokens, messages)),
            "parts": [
                *map(memory.estimate, str(messages[0]["content"]).split(PART_END)),
                memory.estimate(lines_of_json(self.tools)),
            ],
            "messages": new,
        }


def record_events(loop, files):
    """Append each event to private files; 1 is stdout. Returns a function that writes an event as
    JSON without keys. Raises OSError."""
    as_json = providers.keyless_json([asdict(loop.config), dict(os.environ)])

    def write(file, event):
        file.write(f"{as_json(event)}\n".encode(errors="replace"))

    for name in files:
        # not "ab" on stdout: it seeks, which fails on some pipes of Windows
        file = open(name, "wb" if name == 1 else "ab", 0, opener=partial(os.open, mode=0o600))  # noqa: SIM115
        loop.listeners.append(partial(write, file))
    return as_json


def glass_html(**run):
    """The HTML of the page. With the `events` of a recorded run, or with the `runs` that are
    shipped, the page needs no server."""
    # the data cannot contain </script> or %NONCE%
    escaped = json.dumps(run).replace("<", "\\u003c").replace("%", "\\u0025")
    return (DATA / "templates/glass.html").read_text(encoding="utf-8").replace("%RUN%", escaped)


def recorded(file):
    """The events of a file, or of the run of this name in `templates/traces/`."""
    shipped = DATA / f"templates/traces/{file.name}.jsonl"
    events = []
    try:
        with open(file if file.exists() else shipped, encoding="utf-8") as lines:
            for line in lines:
                event = json.loads(line, parse_constant=str)  # NaN becomes "NaN"
                described(event)  # only to raise an exception here if a field is missing or odd
                events.append(event)
        return events
    except FileNotFoundError:
        fault = f"{file}: No such file"
    except Exception as problem:
        fault = f"{file}, line {len(events) + 1} is no event of a run of this version: {problem!r}"
    raise ConfigError(
        f"{fault}. Record a run with `nanobot agent --trace FILE`, or name a shipped run, like "
        "two-tools."
    )


def described(event):
    """An event for `nanobot trace`: `10:00:01 turn result: 1| hello`"""
    return (
        f"{datetime.fromtimestamp(event['time']):%H:%M:%S} {event['who']} {event['kind']}: "
        f"{text_of(event)} {event.get('arguments', '')}"
    )


def text_of(event):
    match event["kind"]:
        case "request":
            users = [each for each in event["messages"] if each["role"] == "user"]
            return "\n".join(
                [
                    f"{event['model']}, messages {event['sent']}, ~{sum(event['tokens']):,} tokens",
                    *map(memory.readable, users),
                ]
            )
        case "answer":
            return str(event["answer"]["content"] or "")
        case "call":
            return tool_hint(ToolCallRequest("", event["name"], event["arguments"]))
        case "journal":
            return json.dumps(dict(event["line"]))
    return str(event.get("text"))


async def play(events, terminal, pace):
    """Show a recorded run as it looked at the terminal. Returns 1 if a turn failed, else 0.
    `pace` multiplies the pauses, which have at most 3 seconds."""
    status = 0
    calls = {}  # id → the hint of a call whose result comes later
    before = sys.float_info.max  # so the first pause is negative: no pause
    for event in events:
        await sleep(pace * min(event["time"] - before, 3))
        before = event["time"]
        kind = event["kind"]  # if the terminal shows it: the kind of its OutboundMessage
        text = text_of(event)
        if kind == "journal" and event["line"].get("mark") == "ended":
            terminal.note(f"nanobot: {event['line'].get('why')}")
            status = 1
        elif kind == "answer":
            kind = "progress" if event["answer"]["tool_calls"] else "final"
        elif kind == "call":  # shown when it has ended
            calls[event["id"]] = text
        elif kind == "result":
            kind = "tool_hint"
            text = f"{calls.get(event['id'])} · {event['outcome']}"
        if text and event["who"] == "turn":  # the terminal ignores the other kinds
            await terminal.send(OutboundMessage("cli", "", text, kind))
    return status


# ---- The command line ----
# `nanobot agent` prints only answers on stdout. Ctrl-C prints no traceback.


def settings_of(arguments):
    """Load the settings. Flags override environment variables; these override the settings file."""
    config = load_config(arguments.config)
    defaults = config.defaults
    defaults.workspace = arguments.workspace or defaults.workspace
    defaults.model = arguments.model or defaults.model
    if arguments.provider or arguments.base_url:
        defaults.provider = arguments.provider or "auto"
        config.base_url = arguments.base_url or ""
    config.read_only = getattr(arguments, "read_only", False)
    return config


def command_with_flags(arguments, *words):
    """A command for the user: `nanobot -s work -m /continue --workspace /tmp/ws`"""
    command = ["nanobot", *words]
    for name in ("config", "workspace", "model", "base_url", "provider", "read_only", "approve"):
        if value := getattr(arguments, name, None):
            flag = "--" + name.replace("_", "-")
            command += [flag] if value is True else [flag, str(value)]
    return shlex.join(command)


def kinds_to_show(settings):
    """The events that a user sees in addition to the answer: ["retry", "progress", "tool_hint"]."""
    kinds = ["retry"]
    if settings.send_progress:
        kinds.append("progress")
    if settings.send_tool_hints:
        kinds.append("tool_hint")
    return kinds


def let_agent_ask(loop, ask, approve, step):
    """Let the agent ask the user: with --provider human, --approve and --step."""
    if isinstance(loop.provider, HumanProvider):
        loop.provider.ask = ask
    if approve:
        loop.hooks.append(ApprovalHook(loop.tools, ask))
    if step:
        loop.hooks.append(StepHook(ask))


class Talk:
    """Runs `nanobot agent`: answers one message, or holds a conversation with the user."""

    def __init__(self, arguments, background, held):
        """`background` runs the agent; `held` keeps the session's lock until the program ends."""
        config = settings_of(arguments)
        self.arguments = arguments
        self.words = arguments.text + arguments.message
        self.background = background
        err = open(os.devnull, "w") if arguments.quiet else sys.stderr  # noqa: SIM115
        self.terminal = channels.CLI(
            sys.stderr if 1 in arguments.record else sys.stdout,  # with --json, it has the events
            err,
            kinds_to_show(config.channels),
        )
        # who is there: a person who types, or only one who sees what is printed, or a script
        self.has_keyboard = sys.stdin.isatty()
        self.is_watched = err.isatty()
        self.is_conversation = self.has_keyboard and not self.words
        ask = background.ask if self.has_keyboard else None
        self.day = ""  # the day on which the memory was last put in order
        self.loop = loop = AgentLoop(config)
        self.folder = loop.state_folder
        self.key = self.open_session(arguments, held)
        record_events(loop, arguments.record)
        loop.program.streaming = not arguments.no_stream
        let_agent_ask(loop, ask, arguments.approve, arguments.step and ask)
        if (arguments.approve or arguments.step) and not ask:
            self.terminal.note(template("no_keyboard"))
        loop.hooks.append(WaitingHook(self.terminal.bottom))
        background.bottom = self.terminal.bottom
        background.close = loop.close

    def open_session(self, arguments, held):
        """Choose and lock the session, and return its key. The first line of a new journal has the
        folder and whether `-c` may continue the session."""
        sessions = self.loop.sessions
        folder = self.loop.program.folder
        key = named_session(sessions, arguments.session)
        if not key and (self.is_conversation or arguments.resume):
            key = sessions.latest(folder)
            if not key and arguments.resume:
                self.terminal.note(
                    "Nobody has typed a conversation in this folder yet: a new one begins."
                )
            elif not self.is_watched:  # a script may have meant its own last message
                self.terminal.note(f"Continuing {key}, the latest one that a person typed here.")
        key = key or sessions.new_key()
        try:
            held.enter_context(sessions.lock(key))
        except SessionBusy:
            if arguments.session or arguments.resume:
                raise
            self.terminal.note(f"Another program uses the latest one, {key}: a new one begins.")
            key = sessions.new_key()
            held.enter_context(sessions.lock(key))
        sessions.get(key).origin = {
            "folder": str(folder),
            "typed": self.is_conversation or self.is_watched or arguments.resume,
        }
        return key

    def run(self):
        """Answer one message, or hold a conversation. Returns the exit status."""
        self.begin_day()
        told = self.folder / "told-no-model"  # once a day in each folder: the answers say it, too
        known = self.loop.memory.text_of(told)
        now = f"{self.day} {self.loop.program.folder}\n"
        if lacks_model(self.loop) and now not in known:
            self.terminal.note(template("no_model"))
            write_atomically(told, known + now)
        status = self.converse() if self.is_conversation else self.answer_once()
        self.terminal.bottom.begin("the memory (Ctrl-C leaves it for next time)")
        with contextlib.suppress(KeyboardInterrupt):  # a later turn does the cancelled memory work
            if self.background.complete(  # a single message seldom has such work
                self.loop.background.settled(5.0 if self.is_conversation else 60.0)
            ):
                self.terminal.note("The work for the memory goes on next time.")
        return status

    def answer_once(self):
        """Answer one message, which may include piped input. Returns the exit status."""
        text = " ".join(self.words)
        if not self.has_keyboard:
            text += "\n\n" + self.terminal.read_piped(self.words, self.folder / "piped")
        text = text.strip()
        if not text:
            complain("there is no message: pass one with -m TEXT or on standard input")
            return 2
        try:
            return self.answer(text)
        except KeyboardInterrupt:
            self.terminal.note(
                "stopped; "
                f"`{command_with_flags(self.arguments, '-s', self.key, '-m', '/continue')}` "
                "resumes this turn"
            )
            raise

    def converse(self):
        channels.on_thread(self.loop.provider.warm_up)
        self.loop.tell = self.tell
        self.loop.program.patience = 5.0  # the tools of a slow MCP server come with a later turn
        history = self.folder / "prompt-history"
        if not history.exists():
            self.terminal.note(template("welcome", version=__version__))
        self.terminal.note(self.first_line())
        self.follow_project()
        for work in (
            JobRunner(self.loop).run(),
            self.watch_reports(),
        ):
            asyncio.run_coroutine_threadsafe(logged(work, "jobs"), self.background.loop)
        return self.terminal.converse(self.answer, history)

    def first_line(self):
        """~/kit · qwen3 · continuing: 72 messages, last 2 hours ago · /new starts afresh"""
        session = self.loop.sessions.get(self.key)
        count = len(session.conversation())
        state = "a new conversation · /help lists the commands"
        if count:
            state = (
                f"continuing: {counted(count, 'message')}, "
                f"last {ago(session.path.stat().st_mtime)} · /new starts afresh"
            )
        if session.unfinished:
            state += " · the last turn is unfinished: /continue resumes it"
        if self.loop.config.read_only:
            state = f"read-only · {state}"
        # a turn's working folder, because with a fence, nanobot does not work in HOME
        return f"{short_path(self.loop.turn(self.key).cwd)} · {self.loop.provider.model} · {state}"

    def answer(self, text):
        """Answer one message on the terminal. Returns the exit status."""
        self.begin_day()
        self.follow_project()
        loop = self.loop
        terminal = self.terminal
        terminal.bottom.begin("the model")
        before = dict(loop.cost.total)
        result = self.background.complete(
            answer_with_helpers(loop, text, self.key, terminal.send, terminal.take_queued),
            self.is_conversation,  # after a single message, the shell gets what was typed
        )
        usage = {name: count - before[name] for name, count in loop.cost.total.items()}
        if usage["requests"]:
            terminal.note(
                f"{counted(usage['requests'], 'request')} · {loop.cost.line(usage)} · "
                f"{loop.limits.share(result.context_tokens)}"
            )
        if result.stop_reason == "max_iterations":
            complain(LIMIT_REACHED)
        if result.stop_reason not in NOT_ANSWERED:
            return 0
        if result.error or not terminal.live:  # a terminal already shows `final_content`
            complain(result.error or result.final_content)
        if self.is_conversation:
            terminal.note("/continue resumes the turn")
        return 1

    def follow_project(self):
        """Use the project's instructions if the user has allowed this version of the file. A
        prompt asks once; a single message says how to allow them."""
        project = Project(self.loop)
        if project.is_unknown and self.is_conversation:
            try:
                answer = self.terminal.bottom.ask(
                    f"The project has instructions: {project}. Follow them? [y/N] "
                ).strip()
                if answer.lower() in ("y", "yes", "n", "no", ""):
                    project.keep(answer.lower() in ("y", "yes"))
                else:
                    self.terminal.bottom.draft = answer  # it was meant as a message
            except (EOFError, KeyboardInterrupt):  # not now
                self.terminal.note("")
        elif project.is_unknown:
            self.terminal.note(
                NOT_FOLLOWED.format(project, command_with_flags(self.arguments, "trust"))
            )
        self.loop.context.project = project.part()

    def begin_day(self):
        """At the start, and each morning in a prompt that stays open."""
        today = time.strftime("%Y-%m-%d")
        if self.day != today:
            self.day = today
            self.background.complete(logged(self.morning_work(), "the memory"))

    async def morning_work(self):
        """Show the reports. Write entries about earlier conversations, so that the next request has
        them. At most once a day, start a dream if an entry of an earlier day is unread; after a
        single message only if ten are unread, because the program ends only after the dream."""
        await self.show_reports()
        loop = self.loop
        await in_thread(memory.remember_terminals, loop.sessions)
        if loop.config.read_only or not self.is_watched or not loop.limits.dream.interval_h:
            return
        unread = loop.memory.unread()
        is_enough = len(unread) >= (1 if self.is_conversation else 10)
        day_file = self.folder / "last-dream"  # it has the day of the last dream
        if (
            is_enough
            and unread[0]["timestamp"] < self.day
            and loop.memory.text_of(day_file) < self.day
        ):
            loop.background.start(self.dream(day_file), "the dream")

    async def dream(self, day_file):
        told = await self.loop.dream.run()
        # only now: if the program ends in mid-dream, the next one dreams
        write_atomically(day_file, self.day)
        await self.tell(told)

    async def tell(self, text):
        async with self.loop.turns.hold(self.key):  # not in the middle of an answer
            self.terminal.report(text)

    async def watch_reports(self):
        """Show reports while the prompt is open. After an error, they wait for the next program."""
        while True:
            await self.show_reports()
            await self.loop.program.sleep(1.0)

    async def show_reports(self):
        """Show the reports that wait for a terminal, if a person sees this one; the user's next
        message quotes them. After a kill, a report may appear twice."""
        inbox = self.loop.sessions.inbox(self.key)
        if not self.is_watched or not inbox.path.exists():
            return
        with contextlib.suppress(SessionBusy):  # the reports stay until the next try
            async with self.loop.turns.hold(self.key) as session:
                with locked(self.folder / "reports.lock", "Another terminal shows the reports."):
                    for report in inbox.read():
                        line = report_line(report)
                        if report["id"] not in session.known_ids:
                            session.append(line)
                        self.terminal.report(memory.quoted(line, sys.maxsize))
                        inbox.remove({report["id"]})


def agent_command(arguments):
    """Answer one message, or hold a conversation."""
    with channels.BackgroundLoop() as background, contextlib.ExitStack() as held:
        return Talk(arguments, background, held).run()


def trust_command(arguments):
    """Follow the AGENTS.md of the project in this folder, or `no`."""
    project = Project(AgentLoop(settings_of(arguments)))
    if not project.text:
        raise ConfigError(
            f"{project.path} has no AGENTS.md or CLAUDE.md, and neither has its git repository."
        )
    project.keep(arguments.answer == "yes")
    show(f"{project}: {'followed' if project.answer else 'not followed'}")


def undo_command(arguments):
    """Take back the file changes of the last turn in this folder that changed files."""
    loop = AgentLoop(settings_of(arguments))
    turn = loop.turn()
    keys = [
        change["session"]
        for change in tools.kept_changes(turn)
        if change["folder"] == str(turn.cwd)
    ]
    if not keys:
        raise ConfigError(NOTHING_TO_UNDO)
    try:
        # the last one has the newest change
        show(asyncio.run(loop.process_direct("/undo", keys[-1])).final_content)
    except SessionBusy:
        raise ConfigError("A program has this conversation open: type /undo there.") from None


def onboard_command(arguments):
    """Create settings and workspace."""
    file = arguments.config or path_of(USUAL_SETTINGS)
    if not file.exists():  # only the owner may read it: there will be API keys in it
        write_atomically(file, template("config") + "\n")
    workspace = prepare_workspace(settings_of(arguments).workspace)
    print(
        f"Settings: {file}\nWorkspace: {workspace}\n"
        "Next: put a key into the settings, or export OPENAI_API_KEY; then try `nanobot status`."
    )


def status_command(arguments):
    """Check the settings, the model and other parts: `ok`, `--` (not needed) or `BAD`."""
    status = 0  # 1 if a part is broken; its line says how to fix the part
    for part, state, problem in status_rows(AgentLoop(settings_of(arguments))):
        mark = "--" if problem is None else "ok"
        if problem:
            mark = "BAD"
            state = f"{state}: {problem}"
            status = 1
        show(f"{mark:4}{part:22}{state}")
    return status


def status_rows(loop):
    """Yields (part, state, problem). Problem: a text, "" (ok) or None (missing, but not needed)."""
    file = loop.config.path
    problem = ""
    if not file.exists():
        file = "the defaults; `nanobot onboard` creates a settings file"
    elif os.name == "posix" and file.stat().st_mode & 0o077:
        problem = f"others can read the keys in it: chmod 600 {shlex.quote(str(file))}"
    yield "settings", file, problem
    yield "workspace", loop.workspace, ""
    yield "model", *asyncio.run(model_and_problem(loop.provider))
    sandbox = loop.config.tools.exec.sandbox
    yield (
        "sandbox",
        sandbox or "off: commands run with all your rights",
        sandbox and tools.sandbox_problem(),
    )
    telegram = loop.config.channels.telegram  # the token is never printed
    state = "off: put a token into channels.telegram.token"
    problem = None
    if telegram.token:
        allowed = ", ".join(map(str, telegram.allow_from))
        state = f"a token is set, allowed: {allowed or 'nobody'}"
        problem = "" if allowed else "put user ids into channels.telegram.allowFrom"
    yield "telegram", state, problem
    for name, fault in asyncio.run(loop.mcp.check()).items():
        yield f"mcp {name}", "connected", fault
    for skill in loop.skills.load():
        if skill.missing:
            yield f"skill {skill.name}", f"not used: {', '.join(skill.missing)}", None


async def model_and_problem(provider):
    """Check URL, key and model. Returns (description, problem); problem is "" if all is well."""
    if isinstance(provider, HumanProvider):
        return "human: you play the model", ""
    if isinstance(provider, OfflineProvider):
        return (
            "offline: fixed rules; set OPENAI_API_KEY or OPENAI_BASE_URL to use a real model",
            "; ".join(provider.rules.problems),
        )
    problem = await provider.check()
    await provider.close()
    endpoint = provider.endpoint
    return (
        f"{provider.model or 'no model name'} at {endpoint.without_secrets(endpoint.api_base)} "
        f"({endpoint.spec.name})",
        problem or "",
    )


def prompt_command(arguments):
    """Print the next request part by part, but do not send it."""
    loop = AgentLoop(settings_of(arguments))
    turn = loop.turn(
        named_session(loop.sessions, arguments.session)
        or loop.sessions.latest(loop.program.folder)
        or "cli:new"
    )
    loop.context.project = Project(loop).part()
    asyncio.run(loop.mcp.check())  # connects to MCP servers, so that their tools are printed
    message, _ = loop.context.user_message(arguments.text, turn)
    request = preview(loop, turn, message)
    _, *history, last = providers.legal(request.messages)
    parts = loop.context.parts(turn)
    parts |= {
        "Tools": lines_of_json(loop.tools.get_definitions()),
        "History": lines_of_json(history),
        "User": last["content"],
    }
    for name, text in parts.items():
        if text:
            show(f"==== {name} (~{memory.estimate(text):,} tokens) ====\n{text}\n")
    print(*request.notes, f"Total: {loop.limits.share(request.tokens)}", sep="\n")


def lines_of_json(records):
    return memory.as_lines(records).removesuffix("\n")


def sessions_command(arguments):
    """List the last twenty conversations, or `show NUMBER`."""
    sessions = memory.SessionManager(settings_of(arguments).workspace)
    if arguments.show:
        key = named_session(sessions, arguments.show)
        if key not in sessions.list_keys():
            raise ConfigError(
                f"There is no session {arguments.show!r}: "
                f"see `{command_with_flags(arguments, 'sessions')}`."
            )
        return show("\n".join(map(memory.readable, sessions.messages(key))))
    for number, (key, used) in enumerate(conversations(sessions), 1):
        if number > 20 and not arguments.all:
            return print("Older conversations: nanobot sessions --all")
        words = "(no message yet)"
        for message in reversed(sessions.messages(key)):  # back to the last /new
            if message["role"] == "/new":
                break
            if message["role"] == "user":
                words = begin_of(message["content"], 50)
        folder = sessions.first_line(key).get("folder")
        place = f"{short_path(Path(folder))}, {key}" if folder else key
        show(f"{number:>3}  {ago(used):>14}  {words}  ({place})")


def conversations(sessions):
    """(key, time of the last use) of all sessions except those of jobs, in which nobody talks."""
    return [row for row in sessions.by_last_use() if not row[0].startswith("cron:")]


def named_session(sessions, name):
    """`work` → `cli:work`; `telegram:7` → `telegram:7`; `3` → the third of `nanobot sessions` (the
    numbers change with each use)"""
    if not name.isdecimal():
        return name if ":" in name or not name else f"cli:{name}"
    rows = conversations(sessions)
    if not 0 < int(name) <= len(rows):
        raise ConfigError(f"There is no session number {name}: see `nanobot sessions --all`.")
    return rows[int(name) - 1][0]


def ago(moment):
    """The time since `moment`, which is in seconds: "2 hours ago" """
    seconds = int(time.time() - moment)
    for unit, length in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= length:
            return f"{counted(seconds // length, unit)} ago"
    return "a moment ago"


def short_path(path):
    """/home/ada/kit → ~/kit. A newline in a name must not look like a line of the program."""
    if path.is_relative_to(Path.home()):
        path = Path("~", path.relative_to(Path.home()))
    return str(path).replace("\n", "\\n")


def gateway_command(arguments):
    """Run the channels, the cron jobs and the heartbeat."""
    GATEWAY_LOG.setLevel(logging.INFO)
    config = settings_of(arguments)
    loop = AgentLoop(config, program=Program(config.workspace))
    if lacks_model(loop):
        raise ConfigError(
            "The gateway has no model: set a key, like OPENAI_API_KEY, or set OPENAI_BASE_URL. "
            "To answer with the rules of the offline model, add --offline."
        )
    run_gateway(loop)


def cron_command(arguments):
    """List the jobs, or `remove ID`."""
    loop = AgentLoop(settings_of(arguments))
    show(JobRunner(loop).clock.cron(arguments.action, job_id=arguments.job_id, turn=None))
    if not is_held(loop.workspace, "gateway"):
        print(template("no_gateway"))


def web_command(arguments):
    """Open a page that shows the agent at work; run what `gateway` runs, too."""
    config = settings_of(arguments)
    if is_held(config.workspace, "gateway"):
        raise ConfigError(SERVED.format(config.workspace))
    loop = AgentLoop(config)
    project = Project(loop)
    loop.context.project = project.part()
    if project.is_unknown:
        show(NOT_FOLLOWED.format(project, command_with_flags(arguments, "trust")))
    html = glass_html(model=loop.provider.model, window=config.defaults.context_window_tokens)
    runs = glass_html(
        runs={file.stem: recorded(file) for file in DATA.glob("templates/traces/*.jsonl")}
    )
    # a browser in a sandbox (snap) cannot open files in hidden folders, like ~/.nanobot
    file = path_of("~/nanobot-page.html")

    def tell(address):
        """Print a new address; the file has only the first one."""
        print(f"The page (each address works once): {address}", flush=True)
        file.unlink(missing_ok=True)

    as_json = record_events(loop, arguments.record)
    try:
        page = channels.WebPage(html, runs, loop.sessions.path, tell, as_json, arguments.port)
    except (OSError, OverflowError) as problem:
        raise ConfigError(f"Port {arguments.port}: {problem}. Change or omit --port.") from None
    connect_page(loop, page, arguments)
    try:
        print(f"Ctrl-C stops nanobot (process {os.getpid()}).", flush=True)
        if not arguments.no_open:  # each account can read command lines, but not this file
            write_atomically(file, f'<meta http-equiv="refresh" content="0; url={page.address}">')
            channels.on_thread(webbrowser.open, file.as_uri())
        run_gateway(loop, page)
    finally:
        file.unlink(missing_ok=True)
        print("\nstopped")  # the shell's prompt must not begin after the "^C" of the terminal


def connect_page(loop, page, arguments):
    """Let the page show the sessions and each turn, and ask the questions of a turn."""
    for key in loop.sessions.list_keys():
        if key.startswith("web:"):
            page.chats[key.removeprefix("web:")] = False  # it does not pause
    page.memory = lambda: loop.context.parts(loop.turn("web:page"))
    loop.listeners.append(page.show)
    let_agent_ask(loop, page.ask, arguments.approve, True)


def replay_command(arguments):
    """Show a recorded run as it looked at the terminal: no tool runs, and no model is asked."""
    return asyncio.run(play(recorded(arguments.file), channels.CLI(), 0 if arguments.fast else 1))


def trace_command(arguments):
    """Print a recorded run, or write it as an HTML page."""
    events = recorded(arguments.file)
    if arguments.html:
        arguments.html.write_text(glass_html(events=events), encoding="utf-8")
        complain(f"{arguments.html} contains the prompts and all tool results")
    else:
        show("\n".join(map(described, events)))


def lesson_command(arguments):
    """For courses: `walk` shows one turn, `exercises` lists the exercises or grades some."""
    file = HERE / f"tests/exercises/{arguments.command}.py"
    if not file.exists():
        raise ConfigError("This command needs a checkout of the source: run nanobot.py there.")
    return runpy.run_path(str(file))["main"](arguments, lambda: AgentLoop(settings_of(arguments)))


COMMAND_LINE = {  # `--help` shows the docstrings of these functions
    "agent": agent_command,
    "prompt": prompt_command,
    "sessions": sessions_command,
    "trust": trust_command,
    "undo": undo_command,
    "onboard": onboard_command,
    "status": status_command,
    "gateway": gateway_command,
    "cron": cron_command,
    "replay": replay_command,
    "trace": trace_command,
    "web": web_command,
    "walk": lesson_command,
    "exercises": lesson_command,
}


SWITCH = {"action": "store_true"}
FILE = {"metavar": "FILE", "type": path_of}

SESSION = {"metavar": "NUMBER|KEY", "default": ""}
OPTIONS = {  # "commands (none: all) | spellings | help": more settings of argparse
    "| --config | default: ~/.nanobot/config.json": FILE,
    "| --workspace | default: ~/.nanobot/workspace": {},
    "| --model |": {},
    "| --base-url | URL of the endpoint; usually ends in /v1": {},
    f"| --provider | {', '.join(ROWS)}, offline, human": {},
    "| --offline |": {"dest": "provider", "action": "store_const", "const": "offline"},
    "| --logs --verbose | write log messages to stderr": SWITCH,
    "agent | text | answer this text, then exit": {"metavar": "TEXT", "nargs": "*"},
    "agent | -m --message |": {"metavar": "TEXT", "action": "append", "default": []},
    "agent prompt | -s --session | a conversation's number or name": SESSION,
    "agent | -c --continue | continue this folder's latest conversation": (
        SWITCH | {"dest": "resume"}
    ),
    "agent | --no-stream | do not stream answers": SWITCH,
    "agent | --step | stop before each request and tool call": SWITCH,
    "agent | -q --quiet | print nothing but the answer and errors": SWITCH,
    "agent web | --approve | ask before a tool writes or executes": SWITCH,
    "agent prompt web | --read-only | only tools that change nothing": SWITCH,
    "agent web | --trace | append all events": (
        FILE | {"dest": "record", "action": "append", "default": []}
    ),
    "agent | --json | print all events on stdout, the answer on stderr": (
        {"dest": "record", "action": "append_const", "const": 1, "default": []}
    ),
    "prompt | text |": {"nargs": "?", "default": "Hello!"},
    "sessions | action |": {"nargs": "?", "choices": ["show"]},
    "sessions | show |": SESSION | {"nargs": "?"},
    "sessions | --all | list all sessions, not only the last twenty": SWITCH,
    "trust | answer |": {"nargs": "?", "choices": ["yes", "no"], "default": "yes"},
    "cron | action |": {"nargs": "?", "choices": ["list", "remove"], "default": "list"},
    "cron | job_id | job to remove": {"nargs": "?", "default": "", "metavar": "ID"},
    "replay trace | file |": FILE,
    "replay | --fast | without pauses": SWITCH,
    "trace | --html | write the run as an HTML page": FILE,
    "web | --port | default: any free port": {"type": int, "default": 0},
    "web | --no-open | do not open the browser": SWITCH,
    "walk | -m --message |": {"default": "read a.txt"},
    "walk | --all | also show functions of second readings": SWITCH,
    "walk | --short | only the data and the functions of AgentRunner": SWITCH,
    "exercises | numbers |": {"nargs": "*"},
    "exercises | --class | who solved what: a folder for each student": (FILE | {"dest": "folder"}),
}


def parser():
    main_parser = argparse.ArgumentParser("nanobot", description="A personal AI agent.")
    main_parser.add_argument("--version", action="version", version=f"nanobot {__version__}")
    commands = main_parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, run in COMMAND_LINE.items():  # allow_abbrev: reject `--app` for `--approve`
        command = commands.add_parser(name, help=run.__doc__, allow_abbrev=False)
        for row, more in OPTIONS.items():
            names, spellings, about = row.split("|")
            if name in (names.split() or COMMAND_LINE):
                command.add_argument(*spellings.split(), help=about.strip(), **more)
    return main_parser


def main(argv=None):
    """Returns the exit status: 0 success, 1 failure, 2 wrong usage, 130 interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    first = argv[0] if argv else ""
    known = [*COMMAND_LINE, "-h", "--help", "--version"]
    if first not in known:
        is_alone = first.isalpha() and (len(argv) == 1 or argv[1].startswith("-"))
        meant = difflib.get_close_matches(first, known)
        # `sesions -q` for `sessions`, `help` for `--help`; but `read a.txt` is a message
        if is_alone and meant:
            complain(
                f"unknown command {first!r}: did you mean `nanobot {meant[0]}`? Pass a message of "
                "one word with -m"
            )
            return 2
        argv = ["agent", *argv]
    channels.prepare_streams()
    arguments = parser().parse_args(argv)  # exits with status 2 for a wrong flag
    line = "%(levelname)s %(name)s: %(message)s"
    if arguments.command == "gateway":
        line = f"%(asctime)s {line}"
    handler = logging.StreamHandler()
    handler.setFormatter(channels.PrintableFormatter(line))
    level = logging.INFO if arguments.logs else logging.WARNING
    if getattr(arguments, "quiet", False):
        level = logging.ERROR
    logging.basicConfig(level=level, handlers=[handler])
    channels.end_on_signals()  # SIGTERM acts like Ctrl-C: the journal keeps all finished steps
    try:
        status = COMMAND_LINE[arguments.command](arguments) or 0
        sys.stdout.flush()  # if Python's own flush at exit fails, the exit status is 120
        return status
    except (ConfigError, channels.CronError, SessionBusy) as problem:
        complain(str(problem))
    except BrokenPipeError:  # `nanobot … | head`: the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as problem:
        complain(f"{problem}. Correct this and try again. Journalled messages are safe.")
    except KeyboardInterrupt:
        return 130
    except Exception:
        log.exception("this is a bug")
    return 1


def show(text):
    print(channels.printable(text))


def complain(text):
    print(f"nanobot: {channels.printable(text)}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
