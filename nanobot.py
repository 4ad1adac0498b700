# /// script
# requires-python = ">=3.11"
# dependencies = ["openai>=3", "json-repair", "tiktoken"]
# ///
"""One message's life: what happens between a question and its answer.

A personal agent is a loop. The model is asked; if it wants tools, they run and it is asked again;
if it answers, the answer goes to the user. All the rest serves this loop:

    user: "What is in a.txt?"
      AgentLoop       finds the session, journals the message, builds the request (ContextBuilder)
        AgentRunner     govern (make it fit) → ask → act → again; hooks look on
          providers.py    "call read_file"             tools.py    "1| hello"
          providers.py    "It says hello."
      AgentLoop       journals every message as it appears (memory.py), sends events (channels.py)

    import nanobot
    print(nanobot.run("What is in a.txt?"))

Read this file first, then providers.py, memory.py, tools.py, channels.py; in each of them the part
above the line "Second reading" is the story. Not covered: how models differ, what a tool does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import logging
import math
import os
import re
import shutil
import string
import sys
import threading
import time
import traceback
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints
from weakref import WeakValueDictionary

from channels import (
    CLI, NOBODY_TO_ASK, BackgroundLoop, Channel, CronError, CronJob, CronService,
    InboundMessage, MessageBus, OutboundMessage, PrintableFormatter, Telegram, Waiting,
    active_tasks, approval_question, end_on_signals, machine_zone, prepare_streams, printable,
)  # fmt: skip
from memory import (
    Consolidator, Dream, Governed, MemoryRepository, MemoryStore, Session, SessionBusy,
    SessionManager, Skill, SkillsLoader, TokenCounter, as_sent, counted, estimate, locked,
)  # fmt: skip
from providers import (
    ROWS, Endpoint, HumanProvider, LLMProvider, LLMResponse, OfflineProvider, OpenAIProvider,
    RecordedTools, ReplayDiffers, ReplayProvider, ToolCallRequest, Trace, choose_endpoint,
)  # fmt: skip
from tools import (
    FILE_TOOLS, SEARCH_SERVICES, Exec, MCPServers, Tool, ToolError, ToolRegistry, ToolResult, Turn,
    Web, WebFetch, WebSearch, as_schema, fits, image_block, in_thread, kinds, plain_text,
    read_bytes, sandbox_problem, tool,
)  # fmt: skip

__version__ = "0.1.0"
log = logging.getLogger("nanobot")

HERE = Path(__file__).resolve().parent
DATA = HERE if (HERE / "templates").is_dir() else HERE / "nanobot_data"  # a checkout, or a wheel

# ---- What to run, and what comes of it ----


@dataclass
class AgentRunSpec:
    """What to run, and with which limits."""

    messages: list[dict]
    tools: ToolRegistry = field(default_factory=ToolRegistry)
    model: str | None = None
    max_iterations: int = 40  # requests to the model
    max_tokens: int = 8_192  # of one answer
    temperature: float | None = None
    context_window: int = 65_536  # tokens
    hook: AgentHook = field(default_factory=lambda: AgentHook())
    concurrent_tools: bool = True
    fail_on_tool_error: bool = False
    turn: Turn = field(default_factory=Turn)  # handed to each tool that asks for it
    counter: TokenCounter = field(default_factory=TokenCounter)  # measures a message once
    append: Callable[..., None] = lambda *messages: None  # is given new messages as they appear
    arrivals: Callable[[], list[dict]] = list  # what the user said meanwhile; journalled already
    make_room: MakeRoom | None = None  # called before each request
    keeps_half: bool = True  # of a stopped answer: did the user see its pieces?


@dataclass
class AgentRunResult:
    """What came of a run. Stop reasons: completed, max_iterations, error, tool_error, empty."""

    final_content: str | None = None
    messages: list[dict] = field(default_factory=list)
    tools_used: list[str] = field(default_factory=list)
    usage: dict = field(default_factory=lambda: dict(NO_USAGE))
    stop_reason: str = "completed"
    tool_events: list[dict] = field(default_factory=list)  # {"name", "arguments", "is_error", …}
    error: str | None = None
    requests: int = 0
    context_tokens: int = 0  # of the last request


@dataclass
class AgentHookContext:
    """The live record of a run. What a hook changes in it takes effect at once."""

    messages: list[dict]
    iteration: int = 0  # requests to the model so far
    response: LLMResponse = field(default_factory=LLMResponse)
    usage: dict = field(default_factory=lambda: dict(NO_USAGE))

    @property
    def tool_calls(self) -> list[ToolCallRequest]:
        return self.response.tool_calls


class AgentHook:
    """Looks on while a run goes on, and may have a say. Override what you need."""

    wants_streaming = False

    async def before_iteration(self, context: AgentHookContext) -> None: ...

    async def on_stream(self, delta: str) -> None: ...

    async def on_stream_end(self, resuming: bool) -> None: ...

    async def on_retry(self, why: str) -> None: ...

    async def before_execute_tools(self, tool_calls: list[ToolCallRequest]) -> None:
        """Set `call.denied = "reason"` to keep a call from running; the model is told why."""

    async def after_tool(
        self, call: ToolCallRequest, result: ToolResult, seconds: float
    ) -> None: ...

    async def after_iteration(self, context: AgentHookContext) -> None: ...

    async def finalize_content(self, content: str) -> str:
        return content


# ---- The runner: govern, ask, act, again ----


@dataclass
class RunState:
    """The runner's scratch paper for one run."""

    spec: AgentRunSpec
    context: AgentHookContext
    result: AgentRunResult = field(default_factory=lambda: AgentRunResult(stop_reason=""))
    tools: list[dict] = field(default_factory=list)  # what the model is offered in a request
    tools_end: str = ""  # if set: no more tools; the template that tells the model why
    nudge: str = ""  # another note to the model, for the next request only
    streamed: str = ""  # what came so far of the answer that streams
    segments: list[str] = field(default_factory=list)  # parts of an answer that was cut for length
    cuts: int = 0  # how often it was cut
    blanks: int = 0  # answers with nothing in them, in a row
    step: list[tuple] = field(default_factory=list)  # (name, arguments, outcome) of each call
    last_step: list[tuple] = field(default_factory=list)
    repetitions: int = 0  # of the last step, in a row
    failure: str = ""  # of the last call that failed
    room: float = math.inf  # tokens of a request; less after one that was too long for the model
    is_told: bool = False  # does the user know that something is left out?

    def add(self, *messages: dict) -> None:
        """New messages: the model gets them with the next request, the journal gets them now."""
        self.context.messages += messages
        self.spec.append(*messages)

    def join_segments(self, text: str | None) -> str:
        return "".join([*self.segments, text or ""])

    def begin_anew(self) -> None:
        """The next answer starts empty: what was said so far has become a message."""
        self.streamed = ""
        self.segments = []
        self.blanks = self.cuts = 0


class AgentRunner:
    """The engine. It knows no channel, no session and no file: whatever asks a model can use it."""

    def __init__(self, provider: LLMProvider):
        self.provider = provider

    async def run(self, spec: AgentRunSpec) -> AgentRunResult:
        """Ask until there is an answer. Raises cancellation, and what hooks and callbacks raise."""
        state = RunState(spec, AgentHookContext(list(spec.messages)))
        try:
            while not state.result.stop_reason:
                await spec.hook.before_iteration(state.context)
                await self._make_room(state)
                request = self.govern(state)
                response = await self._ask(state, request)
                match verdict(state, response):
                    case "calls":
                        await self._act(state, response)
                    case outcome:
                        await self._conclude(state, response, outcome)
                await spec.hook.after_iteration(state.context)
        except asyncio.CancelledError:
            if spec.keeps_half:
                self._keep_half_answer(state, "it was stopped")
            raise
        state.result.messages = state.context.messages
        state.result.usage = state.context.usage
        state.result.requests = state.context.iteration
        return state.result

    async def _make_room(self, state: RunState) -> None:
        """Whoever keeps the conversation may take old turns out before it is too long."""
        spec = state.spec
        if spec.make_room:
            tokens = spec.counter.total(state.context.messages)
            tokens += spec.counter.count(lines_of_json(spec.tools.get_definitions()))
            state.context.messages = await spec.make_room(state.context.messages, tokens)

    def govern(self, state: RunState) -> Governed:
        """A copy of the messages that fits, and at its end a note that only this request has.

        The window must hold tools and answer too, with 1,024 tokens to spare. Where it cannot:
        [system, old question, old answer, question] → [system, question].
        """
        spec = state.spec
        if state.context.iteration >= spec.max_iterations:
            state.tools_end = "out_of_iterations"
        state.tools = [] if state.tools_end else spec.tools.get_definitions()
        tools = spec.counter.count(lines_of_json(state.tools)) if state.tools else 0
        budget = min(spec.context_window - spec.max_tokens - 1_024, state.room)
        messages = state.context.messages
        request = Governed(messages, budget, spec.counter, task_of(spec), tools)
        if state.segments:  # an answer that its length limit cut
            request.messages.append({"role": "assistant", "content": state.join_segments("")})
        if note := note_to_model(state):
            request.messages.append({"role": "user", "content": note})
        return request

    async def _ask(self, state: RunState, request: Governed) -> LLMResponse:
        """One request; if it is too long for the model, one more without the oldest turns."""
        state.context.iteration += 1
        if request.notes and not state.is_told:
            await tell_what_is_left_out(state, "; ".join(request.notes))
        response = await self._chat(state, request)
        if response.is_overflow:
            state.room = request.tokens // 2  # for the rest of the run
            shorter = self.govern(state)
            if shorter.tokens < request.tokens:
                await tell_what_is_left_out(state, f"{TOO_LONG} ({'; '.join(shorter.notes)})")
                too_long, response = response, await self._chat(state, shorter)
                response.usage = dict(NO_USAGE) | response.usage
                add_up(response.usage, too_long.usage)  # the hooks see this response only
        state.nudge = ""
        return response

    async def _chat(self, state: RunState, request: Governed) -> LLMResponse:
        spec = state.spec
        state.streamed = ""
        response = await self.provider.chat(
            request.messages, state.tools, model=spec.model, max_tokens=spec.max_tokens,
            temperature=spec.temperature, on_delta=on_delta(state), on_retry=spec.hook.on_retry,
        )  # fmt: skip
        add_up(state.context.usage, response.usage)
        state.result.context_tokens = size_of_request(request, response)
        state.context.response = response
        return response

    async def _act(self, state: RunState, response: LLMResponse) -> None:
        """Keep the answer as a message and run its calls. The messages are then, in this order:
        the answer, a result for each call as they were asked for, what the user said meanwhile."""
        response.content = state.join_segments(response.content) or None  # with parts cut before
        state.add(response.to_message())
        state.begin_anew()
        await state.spec.hook.on_stream_end(resuming=True)
        await state.spec.hook.before_execute_tools(response.tool_calls)
        state.step = []
        for batch in batches(response.tool_calls, state.spec):
            await self._run_batch(state, batch)
            if state.result.error:  # `fail_on_tool_error`
                break
        count_repetitions(state)
        if state.result.error:
            await self._finish(state, "tool_error", f"I had to stop: {state.result.error}")
            return
        state.context.messages += state.spec.arrivals()  # no `add`: they are journalled already

    async def _run_batch(self, state: RunState, batch: list[ToolCallRequest]) -> None:
        """Run calls side by side. Whatever happens, none of them still runs when this returns.

        The journal gets each result as it comes; the model gets them in the order of the calls.
        """
        results: dict[int, ToolResult] = {}  # by the call's place in the batch

        async def run(place: int) -> None:
            results[place] = await self._call(state, batch[place])

        try:
            await side_by_side([run(place) for place in range(len(batch))])
        finally:  # also when the turn is stopped: what is finished stays
            in_order = sorted(results)
            state.context.messages += [tool_message(batch[n], results[n]) for n in in_order]
        if images := images_message([results[n] for n in in_order]):
            state.add(images)

    async def _call(self, state: RunState, call: ToolCallRequest) -> ToolResult:
        """Run one call. Its result is journalled at once, while other calls may still run."""
        began = time.monotonic()
        if problem := reason_not_to_run(call, state.spec.tools):
            result = ToolResult(problem, is_error=True)
        else:
            result = await state.spec.tools.execute(call.name, call.arguments, state.spec.turn)
        result = warn_of_repetition(state, call, result)
        note_call(state, call, result)  # in `state.result`, for the caller
        state.spec.append(tool_message(call, result))
        await state.spec.hook.after_tool(call, result, time.monotonic() - began)
        return result

    async def _conclude(self, state: RunState, response: LLMResponse, outcome: str) -> None:
        """What an answer without calls to run leads to: the end, or another request."""
        match outcome:
            case "cut":
                state.cuts += 1
                await keep_segment(state, response)
                state.nudge = nudge_for_cut(response)
            case "blank":
                state.blanks += 1
                if state.blanks == 2:
                    state.tools_end = "blank_answer"
            case "answered":
                await self._finish(state, "completed", response.content, reason_of_cut(response))
            case "limit":
                await self._finish(state, "max_iterations", summary_or_limit(state, response))
            case "withheld":
                end_without_answer(state, "the endpoint withheld it")
            case "silent":
                repeats = state.tools_end == "same_result_end"
                why = "the same call brought the same result five times" if repeats else NOTHING
                end_without_answer(state, why)
            case "failed":
                state.result.stop_reason = "error"
                state.result.error = response.error or "the endpoint ended its answer with an error"
                state.result.final_content = self._keep_half_answer(state, state.result.error)
        await state.spec.hook.on_stream_end(resuming=not state.result.stop_reason)

    async def _finish(self, state: RunState, reason: str, text: str | None, cut: str = "") -> None:
        """End the run with a text. `cut`, why the text is not whole, is journalled and shown."""
        response = state.context.response
        answer = await state.spec.hook.finalize_content(state.join_segments(text))
        extra = {} if response.has_tool_calls else response.extra  # sent with the calls already
        message = LLMResponse(answer, extra=extra).to_message()
        if cut:
            message["cut"] = cut
        state.add(message)
        state.begin_anew()
        state.result.stop_reason = reason
        state.result.final_content = f"{answer}\n\n({cut})" if cut else answer

    def _keep_half_answer(self, state: RunState, why: str) -> str | None:
        """Journal what the user was shown of an answer: then user and model know the same."""
        shown = state.join_segments(state.streamed)
        if not shown.strip():
            return None
        state.add({"role": "assistant", "content": shown, "cut": why})
        state.begin_anew()
        return shown


def verdict(state: RunState, response: LLMResponse) -> str:
    """What an answer means; the first line that fits counts:

    limit      it was the last request that is allowed      → the run ends with a summary
    failed     the endpoint gave an error                   → the run ends; what was shown is kept
    cut        its length limit ended it                    → it is asked to go on, three times
    calls      it wants tools                               → they run, and the model is asked again
    answered   there is a text                              → the run ends
    withheld   a content filter took it                     → the run ends and says so
    silent     nothing, and it gets no more tools           → the run ends and says so
    blank      nothing                                      → it is asked again, then without tools
    """
    reason = response.finish_reason
    is_withheld = reason in ("content_filter", "refusal")
    calls_may_be_cut = is_withheld and response.has_tool_calls  # in the middle of an argument
    is_cut = reason == "length" or calls_may_be_cut
    if state.tools_end == "out_of_iterations":
        return "limit"
    if reason == "error":
        return "failed"
    if is_cut and state.cuts < 3:
        return "cut"
    if response.has_tool_calls and not is_cut and not state.tools_end:
        return "calls"
    if state.join_segments(response.content).strip():
        return "answered"
    if is_withheld:
        return "withheld"
    return "silent" if state.tools_end else "blank"


# ---- What the model is told ----


class ContextBuilder:
    """Puts together what is sent. The system prompt stays the same to the byte: caches need it."""

    own_files = ("AGENTS.md", "SOUL.md", "USER.md", "TOOLS.md", "IDENTITY.md")

    def __init__(self, config: Config, memory: MemoryStore, skills: SkillsLoader):
        self.memory = memory
        self.skills = skills
        self.zone = time_zone(config.defaults.timezone)
        self.now = partial(now_in, config, self.zone)
        self.memory_tokens = config.defaults.budget // 4  # of a longer MEMORY.md the newest lines

    def request(self, turn: Turn, history: list[dict], images: list[dict]) -> list[dict]:
        """The messages of a request. Images go into its last message, never into the journal."""
        system = {"role": "system", "content": self.system_prompt(turn)}
        if not images:
            return [system, *history]
        text = {"type": "text", "text": history[-1]["content"]}
        return [system, *history[:-1], {"role": "user", "content": [*images, text]}]

    def system_prompt(self, turn: Turn) -> str:
        return "\n\n---\n\n".join(self.parts(turn).values())

    def parts(self, turn: Turn) -> dict[str, str]:
        """The system prompt by part, in order; parts with nothing in them are left out."""
        parts = {"identity": identity(turn)}
        for name in self.own_files:
            parts[name] = titled(f"## {name}", own_text(turn, turn.workspace / name))
        facts = newest_lines(own_text(turn, self.memory.facts), self.memory_tokens)
        recent = "\n".join(self.memory.recent_history())
        parts["Memory"] = titled("# Memory", facts)
        parts |= skill_parts(self.skills.load())
        parts["Recent History"] = titled("# Recent History", recent)
        return {name: text for name, text in parts.items() if text}

    def user_message(self, text: str, turn: Turn, media: Media = ()) -> tuple[dict, list[dict]]:
        """The user's message as it is journalled, and the images to be sent with it.

        {"role": "user", "content": "[image: cat.png]\\nWhat is it?", "runtime": "[Runtime …"}

        `runtime` (time, channel, chat) is a key of the journal; in what is sent it begins the text.
        """
        files = [attachment(Path(path)) for path in media]
        lines = [line for line, _ in files]
        images = [image for _, image in files if image]
        moment = f"{self.now():%Y-%m-%d %H:%M (%A), %Z}"
        runtime = template("runtime", time=moment, channel=turn.channel, chat_id=turn.chat_id)
        return {"role": "user", "content": "\n".join([*lines, text]), "runtime": runtime}, images


# ---- From a message to a reply ----


class AgentLoop:
    """Knows who asks, in which session, who gets the reply. A session has one turn at a time."""

    def __init__(
        self, config: Config, provider: LLMProvider | None = None,
        tools: ToolRegistry | None = None, hooks: Iterable[AgentHook] = (),
    ):  # fmt: skip
        config.check()
        self.config = config
        self.workspace = prepare_workspace(config.workspace)
        self.provider = provider or make_provider(config)
        self.model = self.provider.get_default_model()
        self.tools = make_tools(config) if tools is None else tools
        self.mcp = MCPServers(config.tools.mcp_servers, self.tools)
        self.files_seen: dict[str, dict] = {}  # by session
        read = partial(read_own, self.turn("cli:direct"))
        self.memory = MemoryStore(self.workspace, read)
        self.sessions = SessionManager(self.workspace, self.memory)
        self.skills = SkillsLoader(self.workspace / "skills", DATA / "skills", read=read)
        self.context = ContextBuilder(config, self.memory, self.skills)
        self.runner = AgentRunner(self.provider)
        self.counter = TokenCounter()
        memory_model = MemoryModel(self)
        self.consolidator = memory_model.consolidator
        self.dream = memory_model.dream
        self.cost = CostTrackingHook(config.prices, self.model)
        self.hooks = [self.cost, *hooks]
        self.subagents = SubagentManager(self)
        self.commands = Commands(self)
        self.tools.register(tool(self.subagents.spawn))
        self.tools.register(JobRunner(self).cron_tool())
        self.started = time.monotonic()
        self.turns = RunningTurns(self.sessions)
        self.background = Background()
        self.notes: dict[str, str] = {}  # by session: what the user is told in the next turn
        self.is_ending = False  # a gateway ends: its turns go on at the next start

    async def process_direct(
        self, text: str, session_key: str = "cli:direct", on_event: Emit | None = None,
        media: Media = (),
    ) -> AgentRunResult:  # fmt: skip
        """Answer one message. Raises SessionBusy; OSError where the journal cannot be written."""
        events = EventHook(on_event, self.turn(session_key), self.config.streaming)
        command, argument = slash_command(text)
        if command in ("", "new", "continue"):
            async with self.turns.hold(session_key) as session:
                result = await self._take_turn(session, text, command, events, media)
        else:  # other commands do not wait until a running turn ends
            result = await self.commands.answer(command, argument, events.turn)
        if result.final_content:
            await events.send("final", result.final_content)
        if command in ("", "new", "continue"):
            session = self.sessions.get(session_key)
            if session.undelivered:
                session.mark("delivered", upto=session.last)
        return result

    async def _take_turn(
        self, session: Session, text: str, command: str, events: EventHook, media: Media
    ) -> AgentRunResult:
        if command:
            result = await self.commands.begin(command, session)
            if result:
                return result
        if note := self.notes.pop(session.key, ""):
            await events.on_retry(note)
        images = []
        if not command:
            session.end_open_turn("interrupted")
            message, images = self.context.user_message(text, events.turn, media)
            session.append(message)  # a kill from here on loses nothing
        return await self.answer(session, events, images)

    async def answer(
        self, session: Session, events: EventHook, images: list[dict],
        arrivals: Callable[[], list[dict]] = list,
    ) -> AgentRunResult:  # fmt: skip
        """Answer what the journal ends with; `arrivals` gives what the user says meanwhile."""
        await self.mcp.connect(self.config.patience)
        spec = run_spec(self, session.history(), images, events)
        spec.append = session.append
        spec.arrivals = arrivals
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
                session.end_open_turn(why)
            await session.synced()  # before the user sees the answer
            self.background.start(self._after_turn(session))

    async def _make_room(
        self, session: Session, events: EventHook, messages: list[dict], tokens: int
    ) -> list[dict]:
        """Old turns go into the memory; gives the messages that are left, with a summary."""
        if events.turn.channel == "cron":
            return messages
        try:
            count = await self.consolidator.make_room(session, tokens)
        except OSError as problem:
            await events.on_retry(f"nothing went into the memory: {problem}")
            return messages
        if count and events.turn.channel == "cli":
            await events.on_retry(moved_note(count))
        return session.without_saved(messages) if count else messages

    async def _after_turn(self, session: Session) -> None:
        if session.key.startswith("cron:"):  # each run of a job begins afresh
            return
        count = await self.consolidator.after_turn(session)
        if count and session.key.startswith("cli:"):
            self.notes[session.key] = moved_note(count)

    async def run(self, bus: MessageBus) -> None:
        """Serve the bus until cancelled: messages are journalled at once, answered in order."""
        service = BusService(self, bus)
        try:
            await service.go_on_after_restart()
            while True:
                await service.receive(await bus.next())
        finally:
            await service.end()

    def stop(self, session_key: str) -> bool:
        """End what runs in a session, its subagents too; False where nothing runs."""
        return self.turns.stop(session_key, self.subagents.of(session_key))

    async def close(self, seconds: float = 0.0) -> None:
        """Wait up to `seconds` for background memory work, then close MCP servers and provider."""
        await self.background.settled(seconds)
        await self.mcp.close()
        await self.provider.close()

    def turn(self, session_key: str) -> Turn:
        return turn_of(self, session_key)


# ======== Second reading: hooks, prompts, commands, settings and the command line ========

# ---- One call for programs ----
# Without it a notebook, which has an event loop of its own, could not ask at all.


def run(text: str, session_key: str = "cli:direct", config: Config | None = None) -> str:
    """The answer, on the files of the current folder; works in a notebook, too. Where there is no
    answer it raises RuntimeError with cause and fix."""
    loop = AgentLoop(config or load_config())
    with BackgroundLoop(loop.close) as background:
        result = background.complete(loop.process_direct(text, session_key))
        background.complete(loop.background.settled())
    if result.stop_reason in NOT_ANSWERED:
        raise RuntimeError(result.error or result.final_content)
    return result.final_content


# ---- What a turn is made of ----
# Without one place for it `prompt` and `/status` would show another request than what is sent.


def run_spec(
    loop: AgentLoop, history: list[dict], images: list[dict], events: EventHook
) -> AgentRunSpec:
    """What the runner gets: the journal's projection, the tools, the limits of the settings."""
    limits, hooks = loop.config.defaults, loop.hooks
    if events.turn.channel == "cron":  # nobody sits there who could be asked
        is_asking = [isinstance(hook, ApprovalHook) for hook in hooks]
        silent = ApprovalHook(loop.tools, None)
        hooks = [silent if asks else hook for asks, hook in zip(is_asking, hooks, strict=True)]
    return AgentRunSpec(
        loop.context.request(events.turn, history, images), loop.tools,
        max_iterations=limits.max_tool_iterations, max_tokens=limits.max_tokens,
        temperature=limits.temperature, context_window=limits.context_window_tokens,
        hook=CompositeHook([events, *hooks]), turn=events.turn, counter=loop.counter,
        keeps_half=events.shows_deltas,
    )  # fmt: skip


def turn_of(loop: AgentLoop, session_key: str) -> Turn:
    """The circumstances of a turn: who asks, where it works, what it may touch."""
    channel, _, chat_id = session_key.partition(":")
    if len(loop.files_seen) > 1_000:  # a gateway runs for months
        del loop.files_seen[next(iter(loop.files_seen))]
    secret = (loop.config.path.resolve(), path_of(USUAL_SETTINGS))
    has_fence = is_fenced(loop.config)
    stays_at_home = has_fence and is_too_wide(loop.config)
    cwd = loop.workspace if stays_at_home else loop.config.cwd
    return Turn(
        loop.workspace, cwd, channel, chat_id, session_key, restrict=has_fence,
        readable=(DATA / "skills",), secret=secret,
        max_result_chars=loop.config.defaults.max_tool_result_chars,
        seen=loop.files_seen.setdefault(session_key, {}),
    )  # fmt: skip


def is_fenced(config: Config) -> bool:
    """The sandbox of exec implies the fence for the file tools."""
    return config.tools.restrict_to_workspace or bool(config.tools.exec.sandbox)


def is_too_wide(config: Config) -> bool:
    """Is the current folder one that the fence must not open: HOME, / or one with the settings?"""
    here = config.cwd.resolve()
    private = (Path.home().resolve(), config.path.resolve(), path_of(USUAL_SETTINGS))
    return any(path.is_relative_to(here) for path in private)


# ---- What the runner leaves to others ----
# Without this one model that calls `list_dir(".")` forty times uses up a turn, and a stopped turn
# leaves a command running that nobody waits for.

Emit = Callable[[OutboundMessage], Awaitable[None]]
Media = Iterable[Path]  # files that came with a message
NO_USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0, "estimated": False}
TOO_LONG = "too long for the model: asking again without the oldest turns"  # a 400, a 413
NOTHING = "the model sent nothing of use"
LIMIT_REACHED = "the limit of steps (maxToolIterations) is reached; ask it to go on"
NOT_ANSWERED = ("error", "tool_error", "empty")  # stop reasons of a run without an answer


MakeRoom = Callable[[list[dict], int], Awaitable[list[dict]]]  # (messages, tokens) -> messages


def moved_note(count: int) -> str:
    return f"{counted(count, 'older message')} went into the memory"


def task_of(spec: AgentRunSpec) -> dict | None:
    """The question that this run is about: it is never left out."""
    users = [message for message in spec.messages if message["role"] == "user"]
    return users[-1] if users else None


def on_delta(state: RunState) -> Callable[[str], Awaitable[None]] | None:
    """What a piece of the answer goes to, where anybody wants pieces."""

    async def stream(piece: str) -> None:
        state.streamed += piece
        await state.spec.hook.on_stream(piece)

    return stream if state.spec.hook.wants_streaming else None


async def tell_what_is_left_out(state: RunState, note: str) -> None:
    state.is_told = True
    await state.spec.hook.on_retry(note)


def note_to_model(state: RunState) -> str:
    """What the model is told behind the conversation, for this request only."""
    if state.tools_end:
        return template(state.tools_end, limit=state.spec.max_iterations)
    return state.nudge


def size_of_request(request: Governed, response: LLMResponse) -> int:
    """Tokens of a request: the endpoint's own count, else ours."""
    if response.usage.get("estimated") or not response.usage.get("prompt_tokens"):
        return request.tokens
    return response.usage["prompt_tokens"]


def add_up(total: dict, usage: dict) -> None:
    for name in NO_USAGE:
        total[name] += usage.get(name) or 0


def batches(calls: list[ToolCallRequest], spec: AgentRunSpec) -> Iterator[list[ToolCallRequest]]:
    """Neighbours that are safe side by side go together, every other call goes alone.

    read_file, grep, write_file, read_file → [read_file, grep], [write_file], [read_file]
    """

    def is_safe(call: ToolCallRequest) -> bool:
        tool = spec.tools.get(call.name)
        return spec.concurrent_tools and tool is not None and tool.concurrency_safe

    for together, neighbours in itertools.groupby(calls, is_safe):
        if together:
            yield list(neighbours)
        else:
            yield from ([call] for call in neighbours)


def reason_not_to_run(call: ToolCallRequest, tools: ToolRegistry) -> str:
    """Why a call must not run, in words for the model; empty where it may."""
    if call.denied:
        return call.denied
    if call.error:
        return f"{call.name} was not run: {call.error}. Send the call again, whole."
    if call.must_only_read and not is_read_only(call, tools):  # nobody was asked about it
        return f"{call.name} was not run: the tool has changed meanwhile. Send the call again."
    return ""


def is_read_only(call: ToolCallRequest, tools: ToolRegistry) -> bool:
    """Is it, at this moment, a known tool that only reads? An unknown one may come any second."""
    tool = tools.get(call.name)
    return tool is not None and tool.read_only


class RunningTurns:
    """One turn of a session at a time: against other tasks and other processes."""

    def __init__(self, sessions: SessionManager):
        self.sessions = sessions
        self.tasks: dict[str, asyncio.Task] = {}  # by session
        self.chats: dict[str, str] = {}  # by session of a job: the chat that it runs for
        self.locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @contextlib.asynccontextmanager
    async def hold(self, session_key: str) -> AsyncIterator[Session]:
        """The session for one turn, which `stop` can end. Raises SessionBusy."""
        async with self.locks.setdefault(session_key, asyncio.Lock()):
            with self.sessions.lock(session_key):
                self.tasks[session_key] = asyncio.current_task()
                try:
                    yield self.sessions.get(session_key)
                finally:
                    del self.tasks[session_key]

    def stop(self, session_key: str, helpers: list[asyncio.Task]) -> bool:
        """Cancel the turn of a session, its helpers and the jobs that run for it."""
        keys = [key for key in self.tasks if session_key in (key, self.chats.get(key))]
        running = [self.tasks[key] for key in keys]
        for task in running + helpers:
            task.cancel()
        return bool(running + helpers)


class Background:
    """Work that goes on beside the turns."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task] = set()

    def start(self, work: Coroutine) -> None:
        task = asyncio.create_task(logged(work))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def settled(self, seconds: float = 60.0) -> None:
        """It gets these seconds; what is not done then is taken up by a later turn."""
        try:
            if self.tasks:
                await asyncio.wait(self.tasks, timeout=seconds)
        finally:  # also when it is stopped
            await end_all(list(self.tasks))


async def logged(work: Coroutine) -> Any:
    """For work that nobody awaits: what goes wrong in it is told in the log."""
    try:
        return await work
    except Exception as problem:
        log.warning("in the background: %s", problem, exc_info=log.isEnabledFor(logging.INFO))
        return None


async def side_by_side(works: list[Coroutine]) -> None:
    """Until all have ended; where one fails or the caller is cancelled, the others are ended.

    One alone needs no task: 50 conversations in step spent a tenth of their time between tasks.
    """
    if len(works) == 1:
        await alone(works[0])
        return
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        await end_all(tasks)


async def alone(work: Coroutine) -> None:
    """A tool that catches its cancellation does not keep the turn from ending."""
    task = asyncio.current_task()
    before = task.cancelling()
    await work
    if task.cancelling() > before:
        raise asyncio.CancelledError


async def end_all(tasks: list[asyncio.Task], seconds: float | None = None) -> None:
    """Cancel what still runs, and wait until it has ended, or so many seconds."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        if not task.cancelling():  # a second time would break into its tidying up
            task.cancel()
    ended = asyncio.gather(*running, return_exceptions=True)
    if seconds is None:
        await ended
    else:
        await asyncio.wait([ended], timeout=seconds)


def warn_of_repetition(state: RunState, call: ToolCallRequest, result: ToolResult) -> ToolResult:
    """Note a call of this step; from the third equal step on its result says that it is known.

    A poll that returns something new is another outcome. All failures of a call are one outcome.
    """
    outcome = None if result.is_error else (result.text, result.images)
    this_call = (call.name, call.arguments, outcome)
    state.step.append(this_call)
    if result.is_error:
        state.failure = f"{call.name} failed: {result.text}"
    if result.is_error and state.spec.fail_on_tool_error:
        state.result.error = state.failure
    if state.repetitions < 2 or this_call not in state.last_step:
        return result
    kind = "same_failure" if result.is_error else "same_result"
    return replace(result, text=f"{result.text}\n{template(kind, count=state.repetitions + 1)}")


def count_repetitions(state: RunState) -> None:
    """After five equal steps a failing one ends the run, one that succeeds ends the tools."""
    is_same = len(state.step) == len(state.last_step)
    is_same = is_same and all(call in state.last_step for call in state.step)
    state.repetitions = state.repetitions + 1 if is_same else 1
    state.last_step = state.step
    if state.repetitions >= 5 and any(outcome is None for _, _, outcome in state.step):
        state.result.error = state.failure
    elif state.repetitions >= 5:
        state.tools_end = "same_result_end"


def note_call(state: RunState, call: ToolCallRequest, result: ToolResult) -> None:
    if call.name not in state.result.tools_used:
        state.result.tools_used.append(call.name)
    event = {"name": call.name, "arguments": call.arguments}
    state.result.tool_events.append(event | {"is_error": result.is_error, "result": result.text})


def tool_message(call: ToolCallRequest, result: ToolResult) -> dict:
    about = {"role": "tool", "tool_call_id": call.id, "name": call.name}
    return {**about, "content": result.text}


def images_message(results: list[ToolResult]) -> dict | None:
    """Images follow the results in a user message: a tool message may not hold them."""
    with_images = [result for result in results if result.images]
    if not with_images:
        return None
    names = "\n".join(result.text for result in with_images)
    images = itertools.chain.from_iterable(result.images for result in with_images)
    return {"role": "user", "content": [{"type": "text", "text": names}, *images]}


async def keep_segment(state: RunState, response: LLMResponse) -> None:
    """A part of an answer, to be joined with the rest: "a long ans", "wer" → "a long answer"."""
    state.streamed = ""
    if not response.content:
        return
    state.segments.append(response.content)
    if response.has_tool_calls:  # what follows is no continuation of this sentence
        state.segments.append("\n\n")
        if state.spec.hook.wants_streaming:
            await state.spec.hook.on_stream("\n\n")


def summary_or_limit(state: RunState, response: LLMResponse) -> str:
    """The model's summary at the end of its steps; without one the limit, and why there is none."""
    if response.finish_reason != "error" and response.content:
        return response.content
    limit = f"I stopped at the limit of {counted(state.spec.max_iterations, 'step')}."
    return f"{limit} {response.error}" if response.error else limit


def reason_of_cut(response: LLMResponse) -> str:
    """Why an answer that is taken as it is may not be whole; "" where it is."""
    if response.finish_reason == "length":
        return "cut: the answer reached its length limit again and again"
    return ""


def end_without_answer(state: RunState, why: str) -> None:
    """The user is told; the model is not: small models repeat what stands in their own mouth."""
    state.result.stop_reason = "empty"
    state.result.final_content = f"There is no answer: {why}. Ask in other words."


def nudge_for_cut(response: LLMResponse) -> str:
    """What the model is told after an answer that its length limit cut."""
    if response.tool_calls:
        return template("cut_calls")
    if (response.content or "").strip():
        return template("cut_answer")
    return template("cut_thinking")


# ---- Prompts are files ----
# Without the fence around them a planted link (SOUL.md → ~/.ssh/id_rsa) would carry keys into
# every request.


def template(name: str, **values: Any) -> str:
    """A prompt from `templates/`. A `$variable` in it that nobody gave is a KeyError."""
    text = (DATA / "templates" / f"{name}.md").read_text(encoding="utf-8")
    return string.Template(text).substitute(values).strip()


def prepare_workspace(workspace: Path) -> Path:
    """Make the agent's home and put its first files there; what is there is never touched."""
    try:
        workspace.mkdir(parents=True, exist_ok=True, mode=0o700)
        for source in (DATA / "templates").glob("[A-Z]*.md"):  # the others are prompts
            folder = workspace / "memory" if source.name == "MEMORY.md" else workspace
            folder.mkdir(exist_ok=True)
            if not (folder / source.name).exists():
                (folder / source.name).write_bytes(source.read_bytes())
    except OSError as problem:
        cause = f"Cannot write the workspace {workspace}: {problem.strerror}"
        raise ConfigError(f"{cause}. Choose another with --workspace.") from None
    return workspace


def identity(turn: Turn) -> str:
    """The first part of the system prompt: where whose files are, and how to work."""
    style = template("format_cli") if turn.channel == "cli" else template("format_chat")
    platform = f"{sys.platform}, Python {sys.version_info.major}.{sys.version_info.minor}"
    places = {"cwd": turn.cwd, "workspace": turn.workspace}
    return template("identity", platform=platform, format=style, **places)


MAX_PROMPT_FILE = 100_000  # bytes


def read_own(turn: Turn, path: Path) -> bytes:
    """A file that goes into a request. It may be a link, but not to keys or over the fence. Raises
    OSError; ValueError if it may not be read."""
    link, file = path.lstat(), path.stat()
    stamps = (link.st_ino, link.st_ctime_ns, file.st_ino, file.st_ctime_ns, file.st_size)
    fence = (turn.workspace, turn.cwd, turn.restrict, turn.readable, turn.secret)
    try:
        return read_unchanged(str(path), stamps, fence)
    except ToolError as problem:
        raise ValueError(str(problem)) from None


@functools.lru_cache(maxsize=64)
def read_unchanged(path: str, stamps: tuple, fence: tuple) -> bytes:
    """Not checked and read again while it is the same file: 12 files, twice a turn, are 6 ms."""
    workspace, cwd, restrict, readable, secret = fence
    turn = Turn(workspace, cwd, restrict=restrict, readable=readable, secret=secret)
    most = 10_000_000 if path.endswith("MEMORY.md") else MAX_PROMPT_FILE  # its newest part is sent
    return read_bytes(turn.path(path), most)


def own_text(turn: Turn, path: Path) -> str:
    """A file of the workspace as a part of the prompt; "" while it is still the kit's template."""
    if not path.exists():
        return ""
    try:
        text = plain_text(read_own(turn, path)).strip()
        turn.note_read(path.resolve())  # the model may change a file that stands in its prompt
    except (OSError, ValueError) as problem:
        log.warning("%s is left out of the prompt: %s", path.name, problem)
        return ""
    kit = DATA / "templates" / path.name
    # small models take "Who the user is goes here" for what it says about the user
    is_untouched = kit.exists() and text == kit.read_text(encoding="utf-8").strip()
    return "" if is_untouched else text


def newest_lines(facts: str, most: int) -> str:
    """The last lines in `most` tokens, and one before them that says where the rest is."""
    lines = facts.split("\n")
    kept = len(lines)
    while kept and estimate("\n".join(lines[-kept:])) > most:
        kept = kept * 9 // 10
    if kept == len(lines):
        return facts
    note = f"[{len(lines) - kept} older lines are in memory/MEMORY.md: grep it]"
    return "\n".join([note, *lines[len(lines) - kept :]])


def titled(title: str, text: str) -> str:
    return f"{title}\n\n{text}" if text else ""


def skill_parts(skills: list[Skill]) -> dict[str, str]:
    """Those that are `always` there in full, a line for each of the others."""
    sound = [skill for skill in skills if not skill.problem]
    always = [skill for skill in sound if skill.always and not skill.missing]
    active = [titled(f"## {skill.name}", skill.text) for skill in always]
    listed = [line_of_skill(skill) for skill in sound if skill not in always]
    return {
        "Active Skills": titled("# Active Skills", "\n\n".join(active)),
        "Skills": listed and template("skills", skills="\n".join(listed)),
    }


def line_of_skill(skill: Skill) -> str:
    """`- weather: Use when … (/skills/weather/SKILL.md) [unavailable: needs program curl]`"""
    line = f"- {skill.name}: {skill.description} ({skill.path})"
    if skill.missing:
        line += f" [unavailable: needs {', '.join(skill.missing)}]"
    return line


def attachment(path: Path) -> tuple[str, dict | None]:
    """The line that names a file which came with a message; if it is an image, its block."""
    try:
        image = image_block(path.read_bytes())
    except OSError as problem:
        return f"[file: {path}, not readable: {problem.strerror}]", None
    kind = "image" if image else "file"
    return f"[{kind}: {path}]", image


def time_zone(name: str) -> Any:
    """A zone like `Europe/Berlin`, or None for the machine's own."""
    if not name:
        return None
    import zoneinfo

    try:
        return zoneinfo.ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise ConfigError(f"agents.defaults.timezone: there is no zone {name!r}.") from None


def now_in(config: Config, zone: Any) -> datetime:
    return config.now().astimezone(zone)


# ---- Hooks that come with it ----
# Without CompositeHook a mistake in somebody's logging would end the user's turn; without
# ApprovalHook the first wrong `rm` is also the last.


class CompositeHook(AgentHook):
    """Several hooks as one, in order. One that fails is logged, the others still run."""

    def __init__(self, hooks: Iterable[AgentHook]):
        self.hooks = list(hooks)
        self.wants_streaming = any(hook.wants_streaming for hook in self.hooks)

    async def before_iteration(self, context: AgentHookContext) -> None:
        await self._tell_all("before_iteration", context)

    async def on_stream(self, delta: str) -> None:
        await self._tell_all("on_stream", delta)

    async def on_stream_end(self, resuming: bool) -> None:
        await self._tell_all("on_stream_end", resuming)

    async def on_retry(self, why: str) -> None:
        await self._tell_all("on_retry", why)

    async def before_execute_tools(self, tool_calls: list[ToolCallRequest]) -> None:
        await self._tell_all("before_execute_tools", tool_calls)

    async def after_tool(self, call: ToolCallRequest, result: ToolResult, seconds: float) -> None:
        await self._tell_all("after_tool", call, result, seconds)

    async def after_iteration(self, context: AgentHookContext) -> None:
        await self._tell_all("after_iteration", context)

    async def finalize_content(self, content: str) -> str:
        for hook in self.hooks:
            changed = await self._tell(hook, "finalize_content", content)
            content = content if changed is None else changed
        return content

    async def _tell_all(self, event: str, *details: Any) -> None:
        for hook in self.hooks:
            await self._tell(hook, event, *details)

    async def _tell(self, hook: AgentHook, event: str, *details: Any) -> Any:
        try:
            return await getattr(hook, event)(*details)
        except Exception as problem:  # a hook is a guest: it must not end the turn
            with_traceback = log.isEnabledFor(logging.INFO)  # --logs
            hook_name = type(hook).__name__
            log.warning("%s.%s failed: %s", hook_name, event, problem, exc_info=with_traceback)
            return None


class LoggingHook(AgentHook):
    async def before_iteration(self, context: AgentHookContext) -> None:
        log.info("iteration %d, %d messages", context.iteration + 1, len(context.messages))

    async def after_tool(self, call: ToolCallRequest, result: ToolResult, seconds: float) -> None:
        outcome = "failed" if result.is_error else f"{len(result.text):,} characters"
        log.info("%s: %s in %.3f s", tool_hint(call), outcome, seconds)

    async def after_iteration(self, context: AgentHookContext) -> None:
        reason = context.response.finish_reason
        log.info("iteration %d: %s %s", context.iteration, reason, context.usage)


class CostTrackingHook(AgentHook):
    """Tokens, and money where the price of the model is configured."""

    def __init__(self, prices: dict[str, Price], model: str):
        self.price = prices.get(model)
        self.total = dict(NO_USAGE)

    async def after_iteration(self, context: AgentHookContext) -> None:
        add_up(self.total, context.response.usage)

    def line(self, usage: dict) -> str:
        """`1,234 in (200 cached) · 56 out · 0.0012`; `~` marks an estimate, `≤` an upper bound."""
        mark = "~" if usage["estimated"] else ""
        line = f"{mark}{usage['prompt_tokens']:,} in"
        if usage["cached_tokens"]:
            line += f" ({usage['cached_tokens']:,} cached)"
        line += f" · {mark}{usage['completion_tokens']:,} out"
        if self.price:
            line += f" · {mark}{self.price.of(usage)}"
        return line


class ApprovalHook(AgentHook):
    """Asks before every call that is not, at that moment, one of a known tool that only reads.

    `always` holds for that tool until the program ends. `ask(question)` gives a line from the user;
    without it the answer is no.
    """

    def __init__(self, tools: ToolRegistry, ask: Callable[[str], Awaitable[str]] | None):
        self.tools = tools
        self.ask = ask
        self.always: set[str] = set()

    async def before_execute_tools(self, tool_calls: list[ToolCallRequest]) -> None:
        asked = []
        for call in tool_calls:
            if is_read_only(call, self.tools):
                call.must_only_read = True
            elif not (call.error or call.denied):
                call.denied = "The user did not approve this call."
                asked.append(call)
        for call in asked:  # all are denied before the first question: if that fails, none runs
            await self._decide(call)

    async def _decide(self, call: ToolCallRequest) -> None:
        if call.name in self.always:
            call.denied = ""
            return
        if self.ask is None:
            return
        question = approval_question(call.name, call.arguments)
        answer = (await self.ask(question)).strip().lower()
        if answer in ("a", "always"):
            self.always.add(call.name)
        elif answer not in ("y", "yes"):
            return
        call.denied = ""


class EventHook(AgentHook):
    """Tells a channel what is going on: deltas, text beside tool calls, tool hints, the answer."""

    def __init__(self, emit: Emit | None, turn: Turn, streaming: bool):
        self.emit = emit
        self.turn = turn
        self.wants_streaming = streaming
        self.shows_deltas = True  # in its channel

    async def send(self, kind: str, content: str) -> None:
        if self.emit:
            await self.emit(OutboundMessage(self.turn.channel, self.turn.chat_id, content, kind))

    async def before_iteration(self, context: AgentHookContext) -> None:
        self.context = context

    async def on_stream(self, delta: str) -> None:
        await self.send("delta", delta)

    async def on_retry(self, why: str) -> None:
        await self.send("retry", why)

    async def before_execute_tools(self, tool_calls: list[ToolCallRequest]) -> None:
        if text := self.context.response.content:
            await self.send("progress", text)
        hints = [tool_hint(call) for call in tool_calls]
        for hint, count in Counter(hints).items():
            text = f"{hint} × {count}" if count > 1 else hint
            await self.send("tool_hint", text)


class WaitingHook(AgentHook):
    """Tells the terminal what is waited for: the model, a tool, a busy endpoint."""

    def __init__(self, waiting: Waiting):
        self.waiting = waiting

    async def before_iteration(self, context: AgentHookContext) -> None:
        self.waiting.begin("the model")

    async def on_stream(self, delta: str) -> None:
        self.waiting.end()

    async def on_retry(self, why: str) -> None:
        self.waiting.begin(why)

    async def before_execute_tools(self, tool_calls: list[ToolCallRequest]) -> None:
        self.waiting.begin(", ".join(tool_hint(call) for call in tool_calls))

    async def after_iteration(self, context: AgentHookContext) -> None:
        self.waiting.end()


def tool_hint(call: ToolCallRequest) -> str:
    """A call in one line: `read_file("a.txt")`, `$ ls`."""
    if call.name == "exec":
        command = " ".join(str(call.arguments.get("command", "")).split())
        return f"$ {command[:100]}"
    if not call.arguments:
        return f"{call.name}()"
    telling = "path" if "path" in call.arguments else next(iter(call.arguments))
    value = json.dumps(call.arguments[telling], ensure_ascii=False, default=str)
    if len(value) > 80:
        value = value[:79] + "…"
    return f"{call.name}({value})"


# ---- Many chats at once ----
# Without this the second message of a user waits for the answer to the first, one chat's long job
# holds up all others, and what came in before a crash is never answered.


class BusService:
    """Answers the chats of a bus: each in order, at most `maxConcurrent` turns at once."""

    def __init__(self, loop: AgentLoop, bus: MessageBus):
        self.loop = loop
        self.bus = bus
        self.conversations: dict[str, Conversation] = {}
        self.slots = asyncio.Semaphore(loop.config.defaults.max_concurrent or sys.maxsize)
        self.work = Background()
        self.work.start(self._hear_helpers())
        loop.tools.register(tool(self.message))

    async def receive(self, message: InboundMessage) -> None:
        """Commands are answered at once, but /new and /continue after what came before them."""
        is_report = message.channel == "system"  # of a job or a helper; its chat is a session's key
        key = message.chat_id if is_report else message.session_key
        conversation = self.conversations.setdefault(key, Conversation(self, key))
        command = "" if is_report else slash_command(message.content)[0]
        if command in ("", "new", "continue"):
            kind = "report" if is_report else "command" if command else "user"
            self.work.start(conversation.take_in(message, kind))
        else:
            self.work.start(self.loop.process_direct(message.content, key, conversation.emit))
            message.confirm()

    async def _hear_helpers(self) -> None:
        while True:
            await self.receive(await self.loop.subagents.results.get())

    async def message(
        self, content: str, channel: str = "", chat_id: str = "",
        media: Annotated[list[str], "Paths of files to send along"] = (), *, turn: Turn,
    ) -> str:  # fmt: skip
        """Write to a chat, this one if you name none. The only way to send files."""
        key = f"{channel or turn.channel}:{chat_id or turn.chat_id}"
        keys = self.loop.sessions.list_keys()
        chats = [chat for chat in keys if chat.partition(":")[0] in self.bus.channels]
        if key not in chats:
            known = ", ".join(chats[:20]) or "none"
            raise ToolError(f"There is no chat {key} that you have talked with. There are: {known}")
        files = [turn.path(path) for path in media]
        missing = [str(path) for path in files if not path.is_file()]
        if missing:
            raise ToolError(f"There is no file {', '.join(missing)}.")
        if key != turn.session_key and content:  # it stands in the journal there, too
            report = InboundMessage("system", "job", key, content)
            self.work.start(self.bus.publish(report))
            content = ""
        if content or files:
            self.bus.send(OutboundMessage(*key.split(":", 1), content, media=files))
        return f"Sent to {key}."

    async def go_on_after_restart(self) -> None:
        """Send what was not delivered, answer what was not answered."""
        for key in self.loop.sessions.list_keys():
            if key.partition(":")[0] in self.bus.channels:
                self.conversations[key] = Conversation(self, key)
                self.work.start(self.conversations[key].go_on_after_restart())

    async def end(self) -> None:
        """Stop what runs; each turn is journalled so far, and the next start goes on with it."""
        self.loop.is_ending = True
        await end_all([*self.work.tasks, *self.loop.subagents.running], 5.0)


class Conversation:
    """One chat. Each message has a task, which keeps it and then, if no other does, answers."""

    def __init__(self, service: BusService, key: str):
        self.service = service
        self.loop = service.loop
        self.key = key
        self.inbox = service.loop.sessions.inbox(key)
        self.order = asyncio.Lock()  # of what comes in
        self.answering = asyncio.Lock()
        self.is_due = False  # a turn that the last program did not end
        self.reply_to = ""  # the newest message that the turn answers

    async def take_in(self, message: InboundMessage, kind: str) -> None:
        """The channel is told when the message survives a power cut."""
        said = f"{message.speaker}: " if message.speaker and kind == "user" else ""
        line = {
            "id": message.message_id or uuid.uuid4().hex, "kind": kind, "sender": message.sender_id,
            "content": said + message.content, "media": [str(path) for path in message.media],
        }  # fmt: skip
        async with self.order:
            while True:
                try:
                    await asyncio.to_thread(self.inbox.append, line)
                    break
                except OSError as problem:  # its channel is not told, so it has the message still
                    GATEWAY_LOG.warning("%s: %s", self.key, problem)
                    await asyncio.sleep(1.0)
        message.confirm()
        GATEWAY_LOG.info("%s: %d characters came in", self.key, len(message.content))
        await self._answer_what_waits()

    async def go_on_after_restart(self) -> None:
        """A turn under a day old is resumed, at most twice: it may be what kills the program."""
        session = self.loop.sessions.get(self.key)
        self._send_answers(session)
        if session.is_open and session.resumed < 2:
            self.is_due = time.time() - session.path.stat().st_mtime < 86_400
        await self._answer_what_waits()

    async def _answer_what_waits(self) -> None:
        """What is for a terminal stays in the inbox: a prompt shows it."""
        if self.key.partition(":")[0] not in self.service.bus.channels:
            GATEWAY_LOG.info("%s: its messages wait, its channel is not open here", self.key)
            return
        async with self.answering:
            while self.is_due or self.inbox.path.exists():
                try:
                    await self._turn()
                except Exception as problem:
                    is_bug = not isinstance(problem, SessionBusy | OSError)
                    GATEWAY_LOG.warning("%s: %s", self.key, problem, exc_info=is_bug)
                    await asyncio.sleep(1.0)

    async def _turn(self) -> None:
        """What is in the journal at its end leaves the inbox; the rest is tried again."""
        async with self.service.slots, self.loop.turns.hold(self.key) as session:
            before = session.last
            lines = self._next_lines(session)
            try:
                if self.is_due or lines:
                    self._deliver(session, await self._answer(session, lines))
            except asyncio.CancelledError:
                self._send_answers(session, before)  # that are whole already
                if not self.loop.is_ending:  # /stop ends this task; others may wait
                    self.service.work.start(self._answer_what_waits())
                raise
            except Exception as problem:
                if not lines or lines[0]["id"] in session.known_ids:  # it is not tried again
                    error = f"{type(problem).__name__}: {problem}"
                    self._deliver(session, AgentRunResult(stop_reason="error", error=error))
                raise
            finally:
                await asyncio.to_thread(self.inbox.remove, set(session.known_ids))

    def _next_lines(self, session: Session) -> list[dict]:
        """A command, a report, or the user's messages up to one of these; at most 100."""
        waiting = [line for line in self.inbox.read() if line["id"] not in session.known_ids]
        messages = itertools.takewhile(lambda line: line["kind"] == "user", waiting[:100])
        return list(messages) or waiting[:1]

    async def _answer(self, session: Session, lines: list[dict]) -> AgentRunResult:
        turn = self.loop.turn(self.key)
        images = []
        self.reply_to = ""
        if self.is_due:
            self.is_due = False
            session.mark("resumed")
        elif lines[0]["kind"] == "command":
            command, _ = slash_command(lines[0]["content"])
            result = await self.loop.commands.begin(command, session, id=lines[0]["id"])
            if result:
                return result
        elif lines[0]["kind"] == "report" and lines[0].get("sender") != "subagent":
            session.end_open_turn("interrupted")
            text = lines[0]["content"]  # as said by the agent: the user may answer it
            session.append({"role": "assistant", "content": text, "id": lines[0]["id"]})
            await session.synced()
            return AgentRunResult(text)
        else:
            session.end_open_turn("interrupted")
            images = self._enter(session, turn, lines)
        events = EventHook(self.emit, turn, self.loop.config.streaming)
        events.shows_deltas = self.service.bus.shows_deltas(turn.channel)
        arrivals = partial(self._arrivals, session, turn)
        return await self.loop.answer(session, events, images, arrivals)

    def _enter(self, session: Session, turn: Turn, lines: list[dict]) -> list[dict]:
        """From now on the model sees these messages. Gives their images."""
        images = []
        for line in lines:
            message, more = self.loop.context.user_message(line["content"], turn, line["media"])
            session.append(message | {"id": line["id"]})
            self.reply_to = line["id"]
            images += more
        return images

    def _arrivals(self, session: Session, turn: Turn) -> list[dict]:
        """For a turn that runs, behind its last batch of calls: three messages at a time."""
        lines = [line for line in self._next_lines(session) if line["kind"] == "user"][:3]
        before = session.last
        images = self._enter(session, turn, lines)
        sent = [as_sent(message, "") for message in session.messages if message["n"] > before]
        if images:
            sent[-1]["content"] = [*images, {"type": "text", "text": sent[-1]["content"]}]
        return sent

    def _deliver(self, session: Session, result: AgentRunResult) -> None:
        """Every turn sends something, if only its end: so `delivered` moves in order."""
        requests = counted(result.requests, "request")
        GATEWAY_LOG.info("%s: %s, %s", self.key, result.stop_reason, requests)
        self._send(session, text_for_chat(result, self.key), session.last)

    def _send_answers(self, session: Session, behind: int = 0) -> None:
        for answer in session.undelivered:
            if answer["n"] > behind:
                self._send(session, answer["content"], answer["n"])

    def _send(self, session: Session, text: str, n: int) -> None:
        """The answer with this number in the journal: sent again until `delivered` names it."""
        answer = OutboundMessage(*self.key.split(":", 1), text, reply_to=self.reply_to)
        answer.on_delivered = partial(session.mark, "delivered", upto=n)
        self.service.bus.send(answer)

    async def emit(self, event: OutboundMessage) -> None:
        if event.kind in ("final", "delta", *kinds_to_show(self.loop.config.channels)):
            self.service.bus.send(event)


def text_for_chat(result: AgentRunResult, key: str = "") -> str:
    """What came of a run; "" if the `message` tool said the same in this chat already."""
    text = (result.final_content or "").strip()
    if result.stop_reason in ("error", "tool_error") and str(result.error) not in text:
        text += f"\n\nSorry, that failed: {result.error}"
    if result.stop_reason == "max_iterations":
        text += f"\n\n({LIMIT_REACHED})"
    here = [call for call in result.tool_events if call["result"].startswith(f"Sent to {key}.")]
    said = [str(call["arguments"].get("content")).strip() for call in here]
    return "" if text.strip() in said else text.strip()


# ---- The gateway: channels, and the clock as one more ----
# Without a lock two gateways would answer each message twice and run each job twice.

GATEWAY_LOG = logging.getLogger("nanobot.gateway")  # one line an event
NOBODY_RUNS_JOBS = (
    "No gateway runs: a job happens only while `nanobot gateway` runs; one of the terminal also "
    "while a prompt is open."
)


def one_gateway(workspace: Path) -> contextlib.AbstractContextManager:
    """Raises SessionBusy if another gateway serves this workspace."""
    busy = f"A gateway serves {workspace} already. End it first, or name another --workspace."
    return locked(workspace / ".nanobot" / "gateway.lock", busy)


def gateway_runs(workspace: Path, lock: str = "gateway") -> bool:
    """Is this lock of the workspace held? `jobs` is, too, where a prompt runs jobs."""
    try:
        with locked(workspace / ".nanobot" / f"{lock}.lock", "it is held"):
            return False
    except SessionBusy:
        return True


class Gateway:
    """Serves all channels of the settings, cron and heartbeat."""

    def __init__(self, loop: AgentLoop):
        self.loop = loop
        self.bus = MessageBus()

    async def serve(self) -> None:
        """Until a signal, or until a part of it fails; it takes at most 10 s to end."""
        stop = asyncio.Event()
        here = asyncio.get_running_loop()
        end_on_signals(lambda *_: here.call_soon_threadsafe(stop.set))
        for channel in self.channels():
            self.bus.open(channel)
        jobs = JobRunner(self.loop, self.bus.publish)
        await in_thread(jobs.add_system_jobs)
        parts = [self.loop.run(self.bus), jobs.run(), stop.wait()]
        work = [asyncio.create_task(part) for part in parts]
        GATEWAY_LOG.info("serving %s", ", ".join([*self.bus.channels, "cron"]))
        try:
            ended, _ = await asyncio.wait(work, return_when="FIRST_COMPLETED")
            for task in ended:
                task.result()  # raises what a part of it failed with
        finally:
            await self.end(work)
        GATEWAY_LOG.info("ended")

    def channels(self) -> list[Channel]:
        telegram = self.loop.config.channels.telegram
        if not (telegram.token and telegram.allow_from):
            log.warning("Nobody can write: channels.telegram needs a token and allowFrom.")
        folder = self.loop.workspace / ".nanobot" / "media"
        return [Telegram(
            telegram.token, telegram.allow_from, api_base=telegram.api_base,
            group_policy=telegram.group_policy, media_folder=folder,
        )] if telegram.token else []  # fmt: skip

    async def end(self, work: list[asyncio.Task]) -> None:
        """At most 8 s: nobody waits longer for a tool that catches each of its cancellations."""
        ending = asyncio.create_task(self._end_in_order(work))
        await asyncio.wait([ending], timeout=8.0)
        sessions = {*self.loop.turns.tasks, *self.loop.subagents.running.values()}
        if sessions or not all(task.done() for task in (*work, ending)):
            what = ", ".join(sorted(sessions)) or "a part of the gateway"
            log.warning("left behind, as it does not end: %s; the journal keeps what it has", what)

    async def _end_in_order(self, work: list[asyncio.Task]) -> None:
        await end_all(work, 6.0)
        await self.bus.close(2.0)
        await self.loop.close(1.0)


class JobRunner:
    """What is due runs as a turn of its own; `tell(message)` brings what it says to its chat."""

    def __init__(self, loop: AgentLoop, tell: Callable[[InboundMessage], Awaitable] | None = None):
        self.loop = loop
        self.tell = tell or self._into_inbox
        zone = loop.context.zone or machine_zone()
        self.clock = CronService(
            loop.workspace / "cron" / "jobs.json", self.run_job, zone=zone, lock=locked,
            now=partial(now_in, loop.config, zone), sleep=loop.config.sleep,
        )  # fmt: skip

    async def run(self, may_go_on: Callable[[], bool] = lambda: True) -> None:
        """Until cancelled, while no other program of the workspace holds the lock of the jobs."""
        lock = self.loop.workspace / ".nanobot" / "jobs.lock"
        while True:
            try:
                if may_go_on():
                    with locked(lock, "another program runs the jobs"):
                        await self.clock.run(may_go_on)
            except SessionBusy as busy:
                log.info("cron: %s", busy)
            await self.loop.config.sleep(1.0)

    async def run_for_terminal(self) -> None:
        self.clock.is_wanted = lambda job: job.channel == "cli"
        await self.run(lambda: not gateway_runs(self.loop.workspace))

    def add_system_jobs(self) -> None:
        hours = self.loop.config.defaults.dream.interval_h
        self.clock.add_system("dream", hours * 3_600, self.loop.dream.run)
        heartbeat = self.loop.config.gateway.heartbeat
        if heartbeat.enabled:
            self.clock.add_system("heartbeat", heartbeat.interval_s, self._beat)

    async def _beat(self) -> None:
        """A turn for what stands in HEARTBEAT.md; it tells people with the `message` tool."""
        tasks = active_tasks(self.loop.memory.text_of(self.loop.workspace / "HEARTBEAT.md"))
        if tasks:
            GATEWAY_LOG.info("heartbeat")
            await self._answer("cron:heartbeat", template("heartbeat", tasks=tasks))

    async def run_job(self, job: CronJob, run: str) -> None:
        """Its answer goes to its chat, a failure too; once, however often it was killed."""
        GATEWAY_LOG.info("cron %s: %s", job.id, job.message[:80])
        chat, task = f"{job.channel}:{job.chat_id}", template("job", message=job.message)
        report = InboundMessage("system", "job", chat, "", message_id=run)
        try:
            report.content = await self._answer(f"cron:{job.id}", task, chat)
        except RuntimeError as failure:
            report.content = f"The job {job.id} ({job.message[:80]}) failed. {failure}"
            raise
        finally:
            if report.content:
                await self.tell(report)

    async def _answer(self, key: str, text: str, chat: str = "") -> str:
        """Each run begins afresh and is in no long-term memory. Raises RuntimeError on failure."""
        self.loop.turns.chats[key] = chat  # /stop there ends the run
        async with self.loop.turns.hold(key) as session:
            session.mark("new")
            session.mark("saved", upto=session.last)
        result = await self.loop.process_direct(text, key)
        if result.stop_reason in NOT_ANSWERED:
            raise RuntimeError(text_for_chat(result))
        return text_for_chat(result)

    async def _into_inbox(self, report: InboundMessage) -> None:
        line = {"id": report.message_id, "kind": "report", "content": report.content}
        await in_thread(self.loop.sessions.inbox(report.chat_id).append, line)

    def cron_tool(self) -> Tool:
        @functools.wraps(self.clock.cron)
        def cron(action: str, *, turn: Turn, **arguments: Any) -> str:
            try:
                text = self.clock.cron(action, turn=turn, **arguments)
            except CronError as mistake:
                raise ToolError(str(mistake)) from None
            lock = "jobs" if turn.channel == "cli" else "gateway"  # a prompt may run jobs, too
            if action == "add" and not gateway_runs(turn.workspace, lock):
                text += f"\n({NOBODY_RUNS_JOBS} Tell the user.)"
            return text

        return tool(cron)


# ---- Memory: what the loop hands in ----
# memory.py knows no model, no tools and no templates.

Rule = Callable[[str, dict], str]  # why a call of a tool, with these arguments, must not run; or ""


class MemoryModel:
    """The model as the memory uses it: `ask` for an answer, `edit` for a run that edits files."""

    def __init__(self, loop: AgentLoop):
        self.loop = loop
        settings = loop.config.defaults
        self.consolidator = Consolidator(
            loop.memory, loop.sessions, self.ask, template("consolidate"), settings.budget,
            settings.memory_window, loop.counter,
        )  # fmt: skip
        self.dream = Dream(
            loop.memory, self.ask, self.edit, template("dream_find"), template("dream_edit"),
            loop.skills, settings.budget, settings.dream.max_batch_size,
        )  # fmt: skip

    async def ask(self, messages: list[dict], tools: list[dict]) -> LLMResponse:
        most = self.loop.config.defaults.max_tokens
        response = await self.loop.provider.chat(messages, tools, max_tokens=most)
        add_up(self.loop.cost.total, response.usage)
        return response

    async def edit(self, messages: list[dict], reason_to_refuse: Rule) -> AgentRunResult:
        """Dream's second phase, which may edit three files and its skills."""
        names = ("read_file", "edit_file", "write_file")
        editing = [tool for tool in FILE_TOOLS if tool.name in names]
        turn = replace(self.loop.turn("system:dream"), cwd=self.loop.workspace)
        for name in ("memory/MEMORY.md", "USER.md", "SOUL.md"):  # their texts are in the messages
            if (turn.cwd / name).is_file():
                turn.note_read((turn.cwd / name).resolve())
        return await self.loop.subagents.run(
            messages, tools=FencedTools(editing, reason_to_refuse), turn=turn, hook=self.loop.cost,
            max_iterations=self.loop.config.defaults.dream.max_iterations,
        )  # fmt: skip


class FencedTools(ToolRegistry):
    """Refuses calls that a rule has a reason against. It is asked about what would really run."""

    def __init__(self, tools: Iterable[Tool], reason_to_refuse: Rule):
        super().__init__(tools)
        self.reason_to_refuse = reason_to_refuse

    def prepare_call(self, name: str, params: Any) -> tuple[Tool | None, dict, str | None]:
        tool, arguments, problem = super().prepare_call(name, params)
        return tool, arguments, problem or self.reason_to_refuse(name, arguments)


# ---- Subagents ----


class SubagentManager:
    """Helpers with one task each: a fresh run with fewer tools; the result comes as a message."""

    most = 4
    steps = 15
    kept_from_them = ("spawn", "message", "cron")

    def __init__(self, loop: AgentLoop):
        self.loop = loop
        self.running: dict[asyncio.Task, str] = {}  # the session that each works for
        self.results: asyncio.Queue[InboundMessage] = asyncio.Queue()

    def of(self, session_key: str) -> list[asyncio.Task]:
        return [task for task, key in self.running.items() if key == session_key]

    async def spawn(self, task: str, label: str = "", wait: bool = False, *, turn: Turn) -> str:
        """Hand a task to a helper that works beside you and cannot ask back. Say in the task all
        that it needs to know. Its result comes later as a message, or here if you wait for it."""
        if len(self.running) >= self.most:
            raise ToolError(f"{self.most} helpers are at work. Wait for one, or do it yourself.")
        name = label or task[:40]
        work = asyncio.create_task(self._work(task, turn))
        self.running[work] = turn.session_key
        work.add_done_callback(self.running.pop)
        if wait or turn.channel == "cron":  # when a job has ended, nobody hears what comes later
            return await work
        work.add_done_callback(partial(self._announce, name, turn.session_key))
        return f"Helper {name!r} is at work. Its result comes as a message: go on, or end here."

    async def _work(self, task: str, turn: Turn) -> str:
        """The helper's answer. Raises ToolError if it has none."""
        names = [tool["function"]["name"] for tool in self.loop.tools.get_definitions()]
        tools = [self.loop.tools.get(name) for name in names if name not in self.kept_from_them]
        prompt = template("subagent", cwd=turn.cwd, workspace=turn.workspace)
        parts = [prompt, *skill_parts(self.loop.skills.load()).values()]
        message, _ = self.loop.context.user_message(task, turn)  # with the date
        messages = [{"role": "system", "content": "\n\n".join(parts)}, as_sent(message, "")]
        result = await self.run(
            messages, tools=ToolRegistry(tools), turn=replace(turn, depth=turn.depth + 1, seen={}),
            hook=CompositeHook(self.loop.hooks), max_iterations=self.steps,
        )  # fmt: skip
        if result.stop_reason == "completed":
            return result.final_content
        cause = result.error or result.final_content
        raise ToolError(f"The helper did not finish ({result.stop_reason}): {cause}")

    async def run(self, messages: list[dict], **own: Any) -> AgentRunResult:
        """A run beside the conversations, with the limits of the settings."""
        limits = self.loop.config.defaults
        return await self.loop.runner.run(AgentRunSpec(
            messages, max_tokens=limits.max_tokens, temperature=limits.temperature,
            context_window=limits.context_window_tokens, counter=self.loop.counter, **own,
        ))  # fmt: skip

    def _announce(self, name: str, session_key: str, work: asyncio.Task) -> None:
        if work.cancelled():
            return
        outcome = str(work.exception()) if work.exception() else work.result()
        text = template("subagent_result", helper=name, result=outcome)
        self.results.put_nowait(InboundMessage("system", "subagent", session_key, text))

    async def answer_with_helpers(self, text: str, key: str, on_event: Emit) -> AgentRunResult:
        """A message, its answer, and what the helpers found: on a terminal nothing comes later."""
        try:
            while True:
                result = await self.loop.process_direct(text, key, on_event)
                await asyncio.gather(*self.of(key), return_exceptions=True)
                if self.results.empty():
                    return result
                text = self.results.get_nowait().content
        except asyncio.CancelledError:
            self.loop.stop(key)
            raise


# ---- Slash commands ----

COMMANDS = {
    "start": "what this is",
    "new": "start afresh; the old conversation stays in its journal",
    "stop": "end the turn that runs, and its subagents; at a prompt press Ctrl-C instead",
    "continue": "go on with a turn that was interrupted",
    "status": "version, model, tokens, context, uptime",
    "dream": "go through what happened lately; keep what matters in memory",
    "dream-log": "what dreams changed; with a commit: what that one changed",
    "dream-restore": "undo the last dream, or the commit that you name",
    "help": "this list",
}


def slash_command(text: str) -> tuple[str, str]:
    """`/NEW ` → ("new", ""), `/dream-log 1f3a` → ("dream-log", "1f3a"); "" for no command."""
    # "/status@my_bot", "/dream-log 1f3a9c", but not "/etc/hosts?" nor "/new York is where?"
    match = re.fullmatch(r"/([a-z][a-z-]*)(?:@\w+)?(?:\s+(.+))?", text.strip().lower())
    if match is None or (match[2] and match[1] not in ("dream-log", "dream-restore")):
        return "", ""
    return match[1], match[2] or ""


class Commands:
    """Answers slash commands: /new and /continue as a turn, all others at once."""

    def __init__(self, loop: AgentLoop):
        self.loop = loop

    async def begin(self, command: str, session: Session, **origin: str) -> AgentRunResult | None:
        """/new, /continue; None: there is a turn to go on with. `origin` is the message's id."""
        session.mark(command, **origin)
        if command == "new":
            await session.synced()
            self.loop.turn(session.key).seen.clear()
            self.loop.background.start(self.loop.consolidator.after_turn(session))
            return AgentRunResult("A new session begins. The old one stays in its journal.")
        if not session.unfinished:
            return AgentRunResult("There is no interrupted turn to go on with.")
        return None

    async def answer(self, command: str, argument: str, turn: Turn) -> AgentRunResult:
        repository = MemoryRepository(self.loop.workspace)
        match command:
            case "start":
                text = template("start", commands=", ".join(f"/{name}" for name in COMMANDS))
            case "help":
                text = "\n".join(f"/{name}: {meaning}" for name, meaning in COMMANDS.items())
            case "status":
                text = self._status(turn)
            case "stop":
                has_stopped = self.loop.stop(turn.session_key)
                await asyncio.sleep(0)  # what the turn has said already is sent before this
                text = "Stopped; /continue goes on." if has_stopped else "Nothing runs here."
            case "dream":
                text = await self.loop.dream.run()
            case "dream-log":
                text = await in_thread(repository.log, argument)
            case "dream-restore":
                text = await in_thread(repository.restore, argument)
            case _:
                text = f"There is no /{command}. /help lists what there is."
        return AgentRunResult(text)

    def _status(self, turn: Turn) -> str:
        request = self.preview(turn)
        window = self.loop.config.defaults.context_window_tokens
        messages = counted(len(self.loop.sessions.get(turn.session_key).history()), "message")
        helpers = counted(len(self.loop.subagents.of(turn.session_key)), "helper")
        hours, minutes = divmod(int(time.monotonic() - self.loop.started) // 60, 60)
        session = f"session {turn.session_key}, {messages}"
        version = f"nanobot {__version__}, model {self.loop.model}, {session}"
        context = [f"context {request.tokens:,} of {window:,}", *request.notes]
        cost = f"{self.loop.cost.line(self.loop.cost.total)}, {hours} h {minutes} min"
        return "\n".join([version, f"{helpers} at work", *context, f"since the start: {cost}"])

    def preview(self, turn: Turn, message: dict | None = None) -> Governed:
        """The request that would be sent now, for a message that is not journalled."""
        later = [{"n": sys.maxsize} | message] if message else []
        history = self.loop.sessions.get(turn.session_key).history(*later)
        spec = run_spec(self.loop, history, [], EventHook(None, turn, self.loop.config.streaming))
        return self.loop.runner.govern(RunState(spec, AgentHookContext(spec.messages)))


# ---- What can be set ----
# Without these checks a wrong type would fail deep in a turn, and an unknown key never be noticed.


class ConfigError(Exception):
    """What the user set up cannot work: the cause, then what to do."""


USUAL_SETTINGS = "~/.nanobot/config.json"
hints_of = cache(get_type_hints)  # of a section: {"model": str, …}


class Section(SimpleNamespace):
    """An object of the settings file. Its attributes have a type and a default; one that has none
    begins empty: `args: list[str]` as []. No dataclass: 15 of them take 6 ms at each start."""

    def __init__(self, *values: Any, **named: Any):
        hints = hints_of(type(self))
        settings = dict(zip(hints, values, strict=False)) | named
        if unknown := settings.keys() - hints.keys():
            raise TypeError(f"{type(self).__name__} has no {', '.join(unknown)}")
        for name, hint in hints.items():
            if name not in settings:
                settings[name] = copy(getattr(self, name)) if hasattr(self, name) else hint()
        super().__init__(**settings)


class DreamSettings(Section):
    interval_h: int = 2
    max_batch_size: int = 20  # entries of the history
    max_iterations: int = 10


class AgentDefaults(Section):
    workspace: str = "~/.nanobot/workspace"
    model: str = ""
    provider: str = "auto"
    max_tokens: int = 8_192
    context_window_tokens: int = 65_536
    temperature: float | None = None
    max_tool_iterations: int = 40
    max_tool_result_chars: int = 16_000
    timezone: str = ""  # of the machine
    memory_window: int = 100  # messages of a session that are not in memory yet
    max_concurrent: int = 8  # turns that came over the bus
    dream: DreamSettings

    @property
    def budget(self) -> int:
        """Tokens that a request may have."""
        return self.context_window_tokens - self.max_tokens - 1_024


class AgentSettings(Section):
    defaults: AgentDefaults


class ProviderSettings(Section):
    api_key: str = ""
    api_base: str = ""
    extra_headers: dict
    extra_body: dict
    text_tool_calls: Literal["auto", "on", "off"] = "auto"


class ExecSettings(Section):
    enable: bool = True
    timeout: int = 60  # seconds
    sandbox: Literal["", "bwrap"] = ""
    sandbox_network: bool = False
    path_append: str = ""
    allowed_env_keys: list[str]


class SearchSettings(Section):
    provider: Literal[*SEARCH_SERVICES] = "duckduckgo"
    api_key: str = ""
    base_url: str = ""  # of a server of your own
    max_results: int = 5


class WebSettings(Section):
    enable: bool = True
    proxy: str = ""  # http://host:port; it decides on addresses then
    search: SearchSettings


class MCPSettings(Section):
    command: str = ""  # of a server that is a program; any other has a url
    args: list[str]
    env: dict[str, str]
    url: str = ""
    headers: dict[str, str]
    type: str = ""  # stdio, sse, streamableHttp; empty: by command and url
    tool_timeout: int = 30  # seconds
    enabled_tools: list[str] = ["*"]
    disabled: bool = False


class ToolSettings(Section):
    restrict_to_workspace: bool = False
    exec: ExecSettings
    web: WebSettings
    ssrf_whitelist: list[str]  # CIDRs
    mcp_servers: dict[str, MCPSettings]


class Price(Section):
    """Money per million tokens; without a price for cached ones a sum is an upper bound."""

    input: float = 0.0
    output: float = 0.0
    cached: float | None = None

    def of(self, usage: dict) -> str:
        """`0.0123`, or `≤ 0.0123`."""
        cached_price = self.input if self.cached is None else self.cached
        fresh = usage["prompt_tokens"] - usage["cached_tokens"]
        money = fresh * self.input + usage["cached_tokens"] * cached_price
        money += usage["completion_tokens"] * self.output
        is_upper_bound = usage["cached_tokens"] and self.cached is None
        mark = "≤ " if is_upper_bound else ""
        return f"{mark}{money / 1e6:.4f}"


class TelegramSettings(Section):
    token: str = ""
    allow_from: list[str | int]  # user ids; empty: nobody
    api_base: str = "https://api.telegram.org"
    group_policy: Literal["mention", "open"] = "mention"


class ChannelSettings(Section):
    send_progress: bool = True
    send_tool_hints: bool = True
    telegram: TelegramSettings


class HeartbeatSettings(Section):
    enabled: bool = True
    interval_s: int = 1_800


class GatewaySettings(Section):
    heartbeat: HeartbeatSettings


class Config(Section):
    """The user's settings, in the shape of config.json: `config.agents.defaults.max_tokens`."""

    agents: AgentSettings
    providers: dict[str, ProviderSettings]
    tools: ToolSettings
    prices: dict[str, Price]
    channels: ChannelSettings
    gateway: GatewaySettings

    def __init__(self, **sections: Any):
        super().__init__(**sections)
        # not of the file, but of the program that uses it:
        self.path: Path = path_of(USUAL_SETTINGS)
        self.base_url: str = ""  # of a flag or the environment: it wins
        self.cwd: Path = Path.cwd()  # where relative paths and exec start
        self.streaming: bool = True
        self.patience: float = 15.0  # seconds, for MCP servers that are starting
        self.now: Callable[[], datetime] = datetime.now
        self.sleep: Callable[[float], Awaitable] = asyncio.sleep

    @property
    def defaults(self) -> AgentDefaults:
        return self.agents.defaults

    @property
    def workspace(self) -> Path:
        return path_of(self.defaults.workspace)

    def check(self) -> None:
        """What would only fail later, deep in a turn, is said at once."""
        if not self.defaults.workspace.strip() or "\0" in self.defaults.workspace:
            raise ConfigError("agents.defaults.workspace: expected a folder, got nothing usable")
        answer, window = self.defaults.max_tokens, self.defaults.context_window_tokens
        if answer * 2 >= window:
            limit = f"must be under half of contextWindowTokens ({window})"
            reason = "the answer needs room beside the conversation"
            raise ConfigError(f"agents.defaults.maxTokens ({answer}) {limit}: {reason}.")
        try:
            Web(self.tools.ssrf_whitelist)
        except ValueError as problem:
            fix = "Write it like 10.0.0.0/8."
            raise ConfigError(f"tools.ssrfWhitelist: {problem}. {fix}") from None
        try:
            Web(proxy=self.tools.web.proxy)
        except ValueError as problem:
            raise ConfigError(f"tools.web.proxy: {problem}") from None


def path_of(text: str) -> Path:
    return Path(os.path.expanduser(text)).resolve()  # unlike Path's, this expanduser never raises


def load_config(path: Path | None = None, environ: Mapping[str, str] = os.environ) -> Config:
    """The file, and the environment over it. A file that is named must be there."""
    file = path or path_of(USUAL_SETTINGS)
    config = Config()
    if path or file.exists():
        config = read_setting(Config, pasted_servers_in_place(read_json(file, environ)), "")
    config.path = file
    for spec in ROWS.values():
        if key := environ.get(spec.env_key):
            config.providers.setdefault(spec.name, ProviderSettings()).api_key = key
    config.base_url = environ.get("OPENAI_BASE_URL", "")
    own = config.providers.get(config.defaults.provider) or ProviderSettings()
    if config.base_url not in ("", own.api_base) and config.defaults.provider in ROWS:
        config.defaults.provider = "auto"  # the environment wins over the file
    config.defaults.model = environ.get("NANOBOT_MODEL") or config.defaults.model
    config.defaults.workspace = environ.get("NANOBOT_WORKSPACE") or config.defaults.workspace
    return config


def read_json(file: Path, environ: Mapping[str, str]) -> Any:
    """A settings file with each `${VAR}` from the environment; raises ConfigError."""

    def variable(match: re.Match) -> str:
        if match[1] not in environ:
            raise ConfigError(f"{file} wants the environment variable {match[1]}: it is not set.")
        return json.dumps(environ[match[1]])[1:-1]

    try:
        text = file.read_text(encoding="utf-8-sig")
        return json.loads(re.sub(r"\$\{(\w+)\}", variable, text))
    except OSError as problem:
        cause = f"Cannot read {file}: {problem.strerror}"
        raise ConfigError(f"{cause}. Try `nanobot onboard`.") from None
    except (ValueError, RecursionError) as problem:
        raise ConfigError(f"{file} is not JSON: {problem}. Correct it there.") from None


def pasted_servers_in_place(settings: Any) -> Any:
    """As other programs have it: {"mcpServers": …} → {"tools": {"mcpServers": …}}."""
    if not isinstance(settings, dict) or "mcpServers" not in settings:
        return settings
    log.warning("mcpServers stands at the top of the settings; its place here is tools.mcpServers")
    pasted = settings.pop("mcpServers")
    tools = settings.setdefault("tools", {})
    if isinstance(tools, dict):
        placed = tools.setdefault("mcpServers", {})
        if not isinstance(pasted, dict):
            tools["mcpServers"] = pasted  # what is wrong with it is told of its place
        elif isinstance(placed, dict):
            tools["mcpServers"] = pasted | placed
    return settings


def read_setting(hint: Any, value: Any, place: str) -> Any:
    """A value as its type hint wants it; raises ConfigError: `agents.defaults.maxTokens: …`."""
    check_type(hint, value, place)
    if is_section(hint):
        return read_section(hint, value, place)
    inner = get_args(hint)
    if get_origin(hint) is list:
        return [read_setting(inner[0], item, f"{place}[{n}]") for n, item in enumerate(value)]
    if get_origin(hint) is dict:
        return {key: read_setting(inner[1], item, f"{place}.{key}") for key, item in value.items()}
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    least = 1 if hint is int else 0
    if not least <= value < 1e15:  # NaN is not, either
        raise ConfigError(f"{place}: expected a number from {least} up, got {str(value)[:80]}")
    return int(value) if hint is int else value  # 100.0 is an integer, too


def check_type(hint: Any, value: Any, place: str) -> None:
    schema = {"type": "object"} if is_section(hint) else as_schema(hint)
    choices = schema.get("enum", [value])
    if fits(value, kinds(schema)) and value in choices:
        return
    wanted = [choice or '""' for choice in schema.get("enum", [])] or kinds(schema)
    shown = json.dumps(value, ensure_ascii=False)[:80]
    raise ConfigError(f"{place or 'the file'}: expected {' or '.join(wanted)}, got {shown}")


def read_section(section_type: type, section: dict, place: str) -> Any:
    """An object of the file as its Section; keys in camelCase and in snake_case mean the same."""
    hints = hints_of(section_type)
    known = {camel_case(name): name for name in hints}
    values = {}
    for key, value in section.items():
        path = f"{place}.{key}".lstrip(".")
        if name := known.get(camel_case(key)):
            values[name] = read_setting(hints[name], value, path)
        elif path.startswith("tools.mcpServers."):  # people paste them, with keys of other programs
            log.warning("%s: unknown key, it does nothing. There are: %s", path, ", ".join(known))
        else:
            raise ConfigError(f"{path}: unknown key. There are: {', '.join(sorted(known))}")
    return section_type(**values)


def is_section(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Section)


def camel_case(name: str) -> str:
    """max_tokens → maxTokens"""
    return re.sub("_([a-z])", lambda match: match[1].upper(), name)


def make_provider(config: Config, human: HumanProvider | None = None) -> LLMProvider:
    """The model that the settings mean: the offline one where no key and no address is set."""
    defaults = config.defaults
    for name in config.providers:
        if name not in ROWS:
            raise ConfigError(f"providers.{name}: no such provider. There are: {', '.join(ROWS)}")
    if defaults.provider == "offline":
        return OfflineProvider()
    if defaults.provider == "human":
        return human or HumanProvider()
    settings = {
        name: Endpoint(ROWS[name], **vars(provider)) for name, provider in config.providers.items()
    }
    chosen = "" if defaults.provider == "auto" else defaults.provider
    try:
        endpoint = choose_endpoint(settings, defaults.model, chosen, config.base_url)
    except ValueError as problem:
        raise ConfigError(str(problem)) from None
    if endpoint:
        return OpenAIProvider(endpoint)
    if defaults.model not in ("", "offline"):
        cause = f"There is no key and no base URL for the model {defaults.model}"
        raise ConfigError(f"{cause}. Set OPENAI_API_KEY or OPENAI_BASE_URL, or use --offline.")
    return OfflineProvider()


def make_tools(config: Config) -> ToolRegistry:
    """The tools that the settings allow; those of MCP servers come when they are connected."""
    tools = ToolRegistry(FILE_TOOLS)
    shell = config.tools.exec
    if shell.enable:
        tools.register(Exec(
            shell.timeout, shell.path_append, shell.allowed_env_keys,
            sandbox=shell.sandbox, network=shell.sandbox_network,
        ))  # fmt: skip
    if config.tools.web.enable:
        web = Web(config.tools.ssrf_whitelist, proxy=config.tools.web.proxy)
        tools.register(WebFetch(web))
        tools.register(WebSearch(web, **vars(config.tools.web.search)))
    return tools


# ---- The command line ----
# Without its care an answer in a pipe would have tool hints in it, and Ctrl-C show a traceback.


def settings_of(arguments: argparse.Namespace) -> Config:
    """The configuration. A flag wins over the variable that it stands for."""
    flags = {
        "NANOBOT_WORKSPACE": arguments.workspace,
        "NANOBOT_MODEL": arguments.model,
        "OPENAI_BASE_URL": arguments.base_url,
    }
    set_flags = {name: value for name, value in flags.items() if value}
    config = load_config(arguments.config, os.environ | set_flags)
    if arguments.provider:
        config.defaults.provider = arguments.provider
        config.base_url = arguments.base_url or ""  # the flag wins over OPENAI_BASE_URL
    elif arguments.base_url:
        config.defaults.provider = "auto"
    return config


def session_key(name: str) -> str:
    """`work` → `cli:work`; `telegram:123` is one already."""
    return name if ":" in name else f"cli:{name}"


def agent_command(arguments: argparse.Namespace) -> int:
    config = settings_of(arguments)
    config.streaming = not arguments.no_stream
    terminal = CLI(kinds=kinds_to_show(config.channels))
    keyboard = sys.stdin is not None and sys.stdin.isatty()
    with BackgroundLoop(waiting=terminal.waiting) as background:
        ask = background.ask if keyboard else None
        loop = loop_for_terminal(config, arguments, ask)
        loop.hooks.append(WaitingHook(terminal.waiting))
        background.close = loop.close
        warn_before_start(arguments, loop, terminal, keyboard)
        talk = partial(one_turn, loop, terminal, background, session_key(arguments.session))
        message = arguments.text or arguments.message
        folder = loop.workspace / ".nanobot" / "piped"
        piped = "" if keyboard else terminal.read_piped(message is not None, folder)
        text = join_message(message, piped)
        reminders = Reminders(loop, terminal, session_key(arguments.session))
        if terminal.live:
            background.complete(logged(reminders.show("While you were away:")))
        if text or not keyboard or message is not None:
            status = ask_once(talk, terminal, text)
        else:
            threading.Thread(target=loop.provider.warm_up, daemon=True).start()
            config.patience = 5.0  # a server that comes later serves the next message
            greet(terminal, loop)
            asyncio.run_coroutine_threadsafe(reminders.watch(), background.loop)
            status = terminal.converse(talk, prompt_history(loop))
        terminal.waiting.begin("the memory")
        with contextlib.suppress(KeyboardInterrupt):  # the next turn goes on with it
            background.complete(loop.background.settled())
        return status


class Reminders:
    """At a prompt: runs the jobs of terminals while no gateway does, and shows what they say."""

    def __init__(self, loop: AgentLoop, terminal: CLI, key: str):
        self.loop = loop
        self.terminal = terminal
        self.key = key
        self.inbox = loop.sessions.inbox(key)

    async def watch(self) -> None:
        await asyncio.gather(logged(JobRunner(self.loop).run_for_terminal()), self._look())

    async def _look(self) -> None:
        while True:
            await self.loop.config.sleep(1.0)
            await logged(self.show())

    async def show(self, title: str = "") -> None:
        """What waits in the inbox. It leaves it when it was shown: a kill before shows it again."""
        if not self.inbox.path.exists():
            return
        try:
            async with self.loop.turns.hold(self.key) as session:
                lines = [line for line in self.inbox.read() if line["kind"] == "report"]
                for line in lines:
                    if line["id"] not in session.known_ids:
                        said = {"role": "assistant", "content": line["content"], "id": line["id"]}
                        session.append(said)
                if lines:
                    texts = [line["content"] for line in lines]
                    self.terminal.report("\n\n".join([*filter(None, [title]), *texts]))
                self.inbox.remove({line["id"] for line in lines})
        except SessionBusy as busy:  # the program that holds it shows them
            log.info("%s", busy)


def prompt_history(loop: AgentLoop) -> Path:
    return loop.workspace / ".nanobot" / "prompt-history"


def kinds_to_show(settings: ChannelSettings) -> tuple[str, ...]:
    """Which events stand beside the answer: `("retry", "progress", "tool_hint")`."""
    wanted = {"progress": settings.send_progress, "tool_hint": settings.send_tool_hints}
    return ("retry", *(kind for kind, is_shown in wanted.items() if is_shown))


def loop_for_terminal(
    config: Config, arguments: argparse.Namespace, ask: Callable[..., Awaitable[str]] | None
) -> AgentLoop:
    """The loop with what the flags add; `ask` is None where nobody can be asked."""
    tools = make_tools(config)
    provider = make_provider(config, HumanProvider(ask))
    if arguments.trace:
        provider.trace = Trace(arguments.trace)
    hooks: list[AgentHook] = []
    if arguments.approve:
        hooks.append(ApprovalHook(tools, ask))
    if arguments.logs:
        hooks.append(LoggingHook())
    return AgentLoop(config, provider, tools, hooks)


def warn_before_start(
    arguments: argparse.Namespace, loop: AgentLoop, terminal: CLI, keyboard: bool
) -> None:
    """What the user would only find out later, or never."""
    if isinstance(loop.provider, OfflineProvider) and loop.config.defaults.provider != "offline":
        terminal.note(template("no_model"))
    if is_fenced(loop.config) and is_too_wide(loop.config):
        place = f"work starts in {loop.workspace}"
        terminal.note(f"The fence does not open {loop.config.cwd}: {place}.")
    if arguments.approve and not keyboard:
        terminal.note(NOBODY_TO_ASK)
    trace = arguments.trace
    if trace and trace.stat().st_size:
        terminal.note(f"nanobot: {trace} holds a trace already: this one goes behind it")
    if trace and trace.is_file() and trace.stat().st_mode & 0o044:  # a new one is 0600
        terminal.note(f"nanobot: others may read {trace}. To be the only one: chmod 600 {trace}")


def join_message(message: str | None, piped: str) -> str:
    written = os.fsencode(message or "").decode("utf-8", errors="replace")  # whatever the locale
    return "\n\n".join(part for part in (written.strip(), piped) if part)


def greet(terminal: CLI, loop: AgentLoop) -> None:
    is_first_time = not prompt_history(loop).exists()
    name = "welcome" if is_first_time else "welcome_back"
    terminal.note(template(name, version=__version__, model=loop.model, workspace=loop.workspace))


def ask_once(talk: Callable[[str], int], terminal: CLI, text: str) -> int:
    try:
        return talk(text)
    except KeyboardInterrupt:
        terminal.note("stopped; `nanobot -m /continue` goes on with this turn")
        raise


def one_turn(
    loop: AgentLoop, terminal: CLI, background: BackgroundLoop, key: str, text: str
) -> int:
    """One message to its answer on the terminal; gives the exit status."""
    if not text:
        complain("there is no message: give one with -m TEXT, or on standard input")
        return 2
    if loop.mcp.servers:
        terminal.waiting.begin("MCP servers")
    work = loop.subagents.answer_with_helpers(text, key, terminal.send)
    result = background.complete(work)
    if result.requests:
        terminal.note(token_line(loop, result))
    if result.stop_reason == "max_iterations":
        terminal.note(f"nanobot: {LIMIT_REACHED}")
    failed = result.stop_reason in NOT_ANSWERED
    cause = result.error or result.final_content or ""
    was_shown = terminal.live and cause in (result.final_content or "")
    if failed and not was_shown:
        terminal.note(f"nanobot: {cause}")
    return int(failed)


def token_line(loop: AgentLoop, result: AgentRunResult) -> str:
    """`3 requests · 3,750 in (200 cached) · 210 out · context 1,412 of 65,536`"""
    window = loop.config.defaults.context_window_tokens
    context = f"context {result.context_tokens:,} of {window:,}"
    return f"{counted(result.requests, 'request')} · {loop.cost.line(result.usage)} · {context}"


def onboard_command(arguments: argparse.Namespace) -> None:
    file = arguments.config or path_of(USUAL_SETTINGS)
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.touch(0o600)  # keys will be in it
        file.write_text(template("config") + "\n", encoding="utf-8")
    workspace = prepare_workspace(settings_of(arguments).workspace)
    print(f"Settings: {file}\nWorkspace: {workspace}")
    print("Next: put a key into the settings, or export OPENAI_API_KEY; then try `nanobot status`.")


def status_command(arguments: argparse.Namespace) -> int:
    """Checks each part and says how to mend it; the exit status is 1 where one is broken."""
    loop = AgentLoop(settings_of(arguments))
    report = StatusReport()
    file, sandbox = loop.config.path, loop.config.tools.exec.sandbox
    settings = file if file.exists() else "the defaults; `nanobot onboard` writes a file"
    report.line("settings", str(settings))
    report.line("workspace", str(loop.workspace), problem_of_workspace(loop.workspace))
    problem = asyncio.run(problem_of_model(loop.provider))
    report.line("model", describe_model(loop.provider), problem)
    bash = shutil.which("bash") or shutil.which("sh")
    report.line("bash", bash or "exec cannot run; install bash", is_missing=not bash)
    problem = sandbox_problem() if sandbox else ""
    report.line("sandbox", sandbox or "off: a command can do what you can", problem)
    report_gateway(loop, report)
    for name, problem in asyncio.run(loop.mcp.check()).items():
        report.line(f"mcp {name}", "connected", problem)
    for skill in loop.skills.load():
        state = f"needs {', '.join(skill.missing)}" if skill.missing else "ready"
        state = f"broken, left out: {skill.problem}" if skill.problem else state
        report.line(f"skill {skill.name}", state, is_missing=state != "ready")
    return report.exit_status


class StatusReport:
    """Prints a part a line: `ok` in order, `--` missing and not needed, `BAD` broken."""

    exit_status = 0

    def line(self, part: str, state: str, problem: str = "", is_missing: bool = False) -> None:
        mark = "--" if is_missing else "ok"
        if problem:
            mark, state = "BAD", f"{state}: {problem}"
            self.exit_status = 1
        print(printable(f"{mark:4}{part:22}{state}"))


def report_gateway(loop: AgentLoop, report: StatusReport) -> None:
    """Who may write to its bot, and what its clock will do; the token is shown nowhere."""
    telegram, heartbeat = loop.config.channels.telegram, loop.config.gateway.heartbeat
    if telegram.token:
        allowed = ", ".join(map(str, telegram.allow_from)) or "nobody"
        problem = "" if telegram.allow_from else "put user ids into channels.telegram.allowFrom"
        report.line("telegram", f"a token is set, allowed: {allowed}", problem)
    else:
        report.line("telegram", "off: put a token into channels.telegram.token", is_missing=True)
    beat = f"heartbeat every {heartbeat.interval_s:,} s" if heartbeat.enabled else "heartbeat off"
    jobs, problem = [], ""
    try:
        jobs = JobRunner(loop).clock.store.read()
    except (OSError, ValueError) as damage:
        problem = f"jobs.json cannot be read ({damage}). Mend it, or delete it."
    report.line("cron", f"{counted(len(jobs), 'job')}, {beat}", problem)


def problem_of_workspace(workspace: Path) -> str:
    probe = workspace / f".probe-{os.getpid()}"
    try:
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as problem:
        return f"it cannot be written ({problem.strerror}). Choose another with --workspace."
    return ""


async def problem_of_model(provider: LLMProvider) -> str:
    """What is wrong with the address, the key or the model, or with the offline model's rules."""
    if isinstance(provider, OfflineProvider):
        return "; ".join(provider.rules.problems)
    problem = await provider.check() if isinstance(provider, OpenAIProvider) else None
    await provider.close()
    return problem or ""


def describe_model(provider: LLMProvider) -> str:
    if isinstance(provider, HumanProvider):
        return "human: it is you"
    if not isinstance(provider, OpenAIProvider):
        return "offline: fixed rules; set OPENAI_API_KEY or OPENAI_BASE_URL for a real one"
    endpoint = provider.endpoint
    model = provider.model or "no model named"
    return f"{model} at {endpoint.without_secrets(endpoint.api_base)} ({endpoint.spec.name})"


def prompt_command(arguments: argparse.Namespace) -> None:
    """Prints the governed request, part by part: what is shown is what is sent."""
    loop = AgentLoop(settings_of(arguments))
    turn = loop.turn(session_key(arguments.session))
    asyncio.run(loop.mcp.check())  # so that their tools are in what is printed
    message, _ = loop.context.user_message(arguments.text, turn)
    request = loop.commands.preview(turn, message)
    tools = loop.tools.get_definitions()
    for name, text in parts_of_request(loop.context.parts(turn), tools, request).items():
        tokens = TokenCounter().total([{"content": text}])
        print(f"==== {name} (~{tokens:,} tokens) ====\n{printable(text)}\n")
    window = loop.config.defaults.context_window_tokens
    print("\n".join([*request.notes, f"In all: context {request.tokens:,} of {window:,}"]))


def parts_of_request(
    system: dict[str, str], tools: list[dict], request: Governed
) -> dict[str, str]:
    """{"identity": …, "Memory": …, "Tools": …, "History": …, "User": …}, without empty ones."""
    *history, last = request.messages[1:]
    parts = dict(system)
    parts["Tools"] = lines_of_json(tools)
    parts["History"] = lines_of_json(history)
    parts["User"] = last["content"]
    return {name: text for name, text in parts.items() if text}


def lines_of_json(records: list[dict]) -> str:
    return "\n".join(json.dumps(record, ensure_ascii=False) for record in records)


def sessions_command(arguments: argparse.Namespace) -> None:
    sessions = SessionManager(settings_of(arguments).workspace)
    keys = sessions.list_keys()
    if arguments.show is None:
        for key in keys:
            print(printable(f"{key}  {counted(len(sessions.transcript(key)), 'message')}"))
        return
    key = arguments.show if arguments.show in keys else session_key(arguments.show)
    if key not in keys:
        raise ConfigError(f"There is no session {key!r}. `nanobot sessions` lists them.")
    for line in sessions.transcript(key):
        print(printable(line))


def gateway_command(arguments: argparse.Namespace) -> None:
    """Channels, cron and heartbeat, until a signal."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    GATEWAY_LOG.setLevel(logging.INFO)
    if arguments.verbose:
        log.setLevel(logging.INFO)
    config = settings_of(arguments)
    config.cwd = config.workspace
    hooks = [LoggingHook()] if arguments.verbose else []
    loop = AgentLoop(config, hooks=hooks)
    with one_gateway(loop.workspace):
        work = Gateway(loop).serve()
        asyncio.Runner().run(work)  # `asyncio.run` waits for all tasks, whatever they do


def cron_command(arguments: argparse.Namespace) -> None:
    loop = AgentLoop(settings_of(arguments))
    turn = loop.turn("cli:direct")
    clock = JobRunner(loop).clock
    try:
        print(printable(clock.cron(arguments.action, job_id=arguments.job_id, turn=turn)))
    except CronError as mistake:
        raise ConfigError(str(mistake)) from None
    if not gateway_runs(loop.workspace):
        print(NOBODY_RUNS_JOBS)


def replay_command(arguments: argparse.Namespace) -> int:
    """Plays a trace again, turn after turn. Nothing is executed and nobody is asked."""
    terminal, status = CLI(), 0
    try:
        model = ReplayProvider(arguments.file)
    except (OSError, ValueError) as problem:
        raise ConfigError(f"{problem}. Make a trace with: nanobot agent --trace FILE") from None
    while model.rest:
        hook = EventHook(terminal.send, Turn(), streaming=True)
        spec = recorded_spec(model.rest, settings_of(arguments).defaults, hook)
        try:
            result = asyncio.run(AgentRunner(model).run(spec))
        except ReplayDiffers as difference:
            terminal.note(f"nanobot: {difference}")
            return 1
        if result.final_content:
            asyncio.run(hook.send("final", result.final_content))
        if result.error:
            terminal.note(f"nanobot: {result.error}")
            status = 1
    return status


def recorded_spec(records: list[dict], limits: AgentDefaults, hook: AgentHook) -> AgentRunSpec:
    """The turn that begins with the first record; its tools give what they gave then."""
    first = records[0]
    spec = AgentRunSpec(first["messages"], RecordedTools(records, ToolResult), hook=hook)
    spec.max_iterations = limits.max_tool_iterations
    spec.context_window = sys.maxsize  # what did not fit was left out when it was recorded
    spec.max_tokens = first["options"].get("max_tokens", spec.max_tokens)
    spec.temperature = first["options"].get("temperature")
    return spec


def parser() -> argparse.ArgumentParser:
    about = "A personal AI agent. No command: agent."
    main_parser = argparse.ArgumentParser("nanobot", description=about)
    main_parser.add_argument("--version", action="version", version=f"nanobot {__version__}")
    common = common_flags()
    strict = partial(argparse.ArgumentParser, allow_abbrev=False)  # `--app` is not `--approve`
    commands = main_parser.add_subparsers(metavar="COMMAND", parser_class=strict)
    agent = commands.add_parser("agent", parents=[common], help="ask, or talk at a prompt")
    message = agent.add_mutually_exclusive_group()
    message.add_argument("text", nargs="?", metavar="TEXT", help="ask this and leave")
    message.add_argument("-m", "--message", metavar="TEXT", help="the same")
    agent.add_argument("--approve", action="store_true", help="ask before tools write or execute")
    agent.add_argument("--no-stream", action="store_true", help="do not stream requests")
    agent.add_argument("--trace", metavar="FILE", type=path_of, help="write down each request")
    replay = commands.add_parser("replay", parents=[common], help="run a trace again: no network")
    replay.add_argument("file", metavar="FILE", type=path_of)
    prompt = commands.add_parser("prompt", parents=[common], help="print what would be sent")
    prompt.add_argument("text", nargs="?", default="Hello!")
    for command in (agent, prompt):
        command.add_argument("-s", "--session", metavar="NAME", default="direct")
    sessions = commands.add_parser("sessions", parents=[common], help="list, or `show KEY`")
    sessions.add_argument("action", nargs="?", choices=["show"])
    sessions.add_argument("show", nargs="?", metavar="KEY")
    gateway = commands.add_parser("gateway", parents=[common], help="serve channels and cron")
    gateway.add_argument("--verbose", action="store_true", help="log more than events")
    cron = commands.add_parser("cron", parents=[common], help="list what is planned; remove ID")
    cron.add_argument("action", nargs="?", choices=["list", "remove"], default="list")
    cron.add_argument("job_id", nargs="?", default="", metavar="ID", help="of the job to remove")
    commands.add_parser("onboard", parents=[common], help="write settings and workspace")
    commands.add_parser("status", parents=[common], help="check each part")
    return main_parser


def common_flags() -> argparse.ArgumentParser:
    """The flags of the settings, which each command takes."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--config", metavar="FILE", type=path_of, help="~/.nanobot/config.json")
    common.add_argument("--workspace", metavar="DIR", help="its home; ~/.nanobot/workspace")
    common.add_argument("--model", metavar="NAME")
    common.add_argument("--base-url", metavar="URL", help="an endpoint; mostly ends in /v1")
    choice = common.add_mutually_exclusive_group()
    names = ", ".join([*ROWS, "offline", "human (you)"])
    choice.add_argument("--provider", metavar="NAME", help=names)
    choice.add_argument("--offline", dest="provider", action="store_const", const="offline")
    common.add_argument("--logs", action="store_true", help="show what happens inside, on stderr")
    return common


COMMAND_LINE = {
    "agent": agent_command,
    "prompt": prompt_command,
    "sessions": sessions_command,
    "onboard": onboard_command,
    "status": status_command,
    "gateway": gateway_command,
    "cron": cron_command,
    "replay": replay_command,
}


def main(argv: list[str] | None = None) -> int:
    """The program: gives the exit status. 0 answered, 1 failed, 2 wrong usage, 130 interrupted."""
    argv = sys.argv[1:] if argv is None else list(argv)
    first = argv[0] if argv else "agent"
    if not first.startswith("-") and first not in (*COMMAND_LINE, "agent"):
        names = ", ".join(COMMAND_LINE)
        complain(f"no command {first!r}, there are {names}; a message goes behind -m")
        return 2
    if not argv or first not in (*COMMAND_LINE, "-h", "--help", "--version"):
        argv.insert(0, "agent")
    prepare_streams()
    arguments = parser().parse_args(argv)
    prepare_process(arguments.logs)
    try:
        status = COMMAND_LINE[argv[0]](arguments) or 0
        sys.stdout.flush()  # here, and not at exit, where Python reports a closed pipe with 120
        return status
    except (ConfigError, SessionBusy) as problem:
        complain(str(problem))
    except BrokenPipeError:  # `nanobot … | head`: nobody wants the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as problem:
        complain(f"{problem}. Mend it and ask again; the journal keeps what it has.")
    except KeyboardInterrupt:
        return 130
    return 1


def prepare_process(logs: bool) -> None:
    """Logs and tracebacks harmless to the terminal, signals that end a turn in order."""
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter("%(levelname)s %(name)s: %(message)s"))
    level = logging.INFO if logs else logging.WARNING
    logging.basicConfig(level=level, handlers=[handler])
    sys.excepthook = show_bug
    end_on_signals()  # as after Ctrl-C: what runs is stopped, the journal is in order


def complain(text: str) -> None:
    print(f"nanobot: {printable(text)}", file=sys.stderr)


def show_bug(*raised: Any) -> None:
    """A traceback, harmless to the terminal: what it quotes may come from a model."""
    print(printable("".join(traceback.format_exception(*raised))), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
