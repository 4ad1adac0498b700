# /// script
# requires-python = ">=3.11"
# dependencies = ["openai>=3", "json-repair", "tiktoken"]
# ///
"""One message's life: what happens between a question and its answer.

A personal agent is a loop. The model is asked; if it wants tools, they run and it is asked again; if it
answers, the answer goes to the user. All the rest serves this loop:

    user: "What is in a.txt?"
      AgentLoop       finds the session, journals the message, builds the request (ContextBuilder)
        AgentRunner     govern → ask → act → again; hooks look on
          providers.py    "call read_file"             tools.py    "1| hello"
          providers.py    "It says hello."
      AgentLoop       journals every new message as it appears (memory.py), sends events (channels.py)

    import nanobot
    print(nanobot.run("What is in a.txt?"))

Read this file first, then providers.py, tools.py, memory.py, channels.py.
Not covered: how one model differs from another, what a tool does, what a journal line looks like.
"""

import argparse
import asyncio
import itertools
import json
import logging
import math
import os
import re
import shutil
import signal
import string
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints
from weakref import WeakValueDictionary

from channels import CLI, BackgroundLoop, OutboundMessage, PrintableFormatter, printable, terminate
from memory import (
    Consolidator, Dream, MemoryStore, SessionBusy, SessionManager, SkillsLoader, TokenCounter, govern,
    readable,
)  # fmt: skip
from providers import (
    ROWS, Endpoint, HumanProvider, LLMProvider, LLMResponse, OfflineProvider, OpenAIProvider, ReplayDiffers,
    ReplayProvider, ToolCallRequest, Trace, choose_endpoint,
)  # fmt: skip
from tools import (
    FILE_TOOLS, SEARCH_SERVICES, Exec, MCPServers, ToolRegistry, ToolResult, Turn, Web, WebFetch, WebSearch,
    ToolError, as_schema, fits, image_block, kinds, plain_text, read_bytes, sandbox_problem,
)  # fmt: skip

__version__ = "0.1.0"
log = logging.getLogger("nanobot")

HERE = Path(__file__).resolve().parent
DATA = HERE if (HERE / "templates").is_dir() else HERE / "nanobot_data"  # a checkout, or an installed wheel


# ---- What can be set ----


class ConfigError(Exception):
    """What the user set up cannot work: the cause, then what to do."""


@dataclass
class AgentDefaults:
    workspace: str = "~/.nanobot/workspace"
    model: str = ""
    provider: str = "auto"
    max_tokens: int = 8_192
    context_window_tokens: int = 65_536
    temperature: float | None = None
    max_tool_iterations: int = 40
    max_tool_result_chars: int = 16_000
    timezone: str = ""  # of the machine


@dataclass
class AgentSettings:
    defaults: AgentDefaults = field(default_factory=AgentDefaults)


@dataclass
class ProviderSettings:
    api_key: str = ""
    api_base: str = ""
    extra_headers: dict = field(default_factory=dict)
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
    provider: Literal[*SEARCH_SERVICES] = "duckduckgo"
    api_key: str = ""
    base_url: str = ""  # of a server of your own
    max_results: int = 5


@dataclass
class WebSettings:
    enable: bool = True
    search: SearchSettings = field(default_factory=SearchSettings)


@dataclass
class MCPSettings:
    command: str = ""  # of a server that is a program; any other has a url
    args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    url: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    type: str = ""  # stdio, sse, streamableHttp; empty: by command and url
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
    """Money per million tokens."""

    input: float = 0.0
    output: float = 0.0


@dataclass
class ChannelSettings:
    send_progress: bool = True
    send_tool_hints: bool = True


@dataclass
class Config:
    """The user's settings, in the shape of config.json: `config.agents.defaults.max_tokens`."""

    agents: AgentSettings = field(default_factory=AgentSettings)
    providers: dict[str, ProviderSettings] = field(default_factory=dict)
    tools: ToolSettings = field(default_factory=ToolSettings)
    prices: dict[str, Price] = field(default_factory=dict)
    channels: ChannelSettings = field(default_factory=ChannelSettings)
    path: Path = field(default_factory=lambda: path_of("~/.nanobot/config.json"), init=False)
    base_url: str = field(default="", init=False)  # given by a flag or the environment: it wins

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
            why = "the answer needs room beside the conversation"
            raise ConfigError(f"agents.defaults.maxTokens ({answer}) {limit}: {why}.")
        try:
            Web(self.tools.ssrf_whitelist)
        except ValueError as problem:
            raise ConfigError(f"tools.ssrfWhitelist: {problem}. Write it like 10.0.0.0/8.") from None


def path_of(text: str) -> Path:
    return Path(os.path.expanduser(text)).resolve()  # unlike Path's, this expanduser never raises


# ---- What the model is told ----


def template(name: str, **values: Any) -> str:
    """A prompt from `templates/`. Rendering is strict: a `$variable` that nobody gave is a KeyError."""
    text = (DATA / "templates" / f"{name}.md").read_text(encoding="utf-8")
    return string.Template(text).substitute(values).strip()


def prepare_workspace(workspace: Path) -> None:
    """Make the agent's home and put its first files there; what is there already is never touched."""
    try:
        workspace.mkdir(parents=True, exist_ok=True, mode=0o700)
        for source in (DATA / "templates").glob("[A-Z]*.md"):  # the others are prompts
            target = workspace / ("memory" if source.name == "MEMORY.md" else "") / source.name
            if not target.exists():
                target.parent.mkdir(exist_ok=True)
                target.write_bytes(source.read_bytes())
    except OSError as problem:
        why = f"Cannot write the workspace {workspace}: {problem.strerror}"
        raise ConfigError(f"{why}. Choose another with --workspace.") from None


class ContextBuilder:
    """Puts together what is sent. The system prompt stays the same to the byte: prompt caches live on it."""

    own_files = ("AGENTS.md", "SOUL.md", "USER.md", "TOOLS.md", "IDENTITY.md")

    def __init__(self, config: Config, memory: MemoryStore, skills: SkillsLoader):
        self.memory, self.skills, self.zone = memory, skills, time_zone(config.defaults.timezone)

    def request(self, turn: Turn, history: list[dict], images: list[dict]) -> list[dict]:
        """The messages of a request. Images are only in what is sent, in the last message before its text."""
        system = {"role": "system", "content": self.system_prompt(turn)}
        if not images:
            return [system, *history]
        blocks = [*images, {"type": "text", "text": history[-1]["content"]}]
        return [system, *history[:-1], {"role": "user", "content": blocks}]

    def system_prompt(self, turn: Turn) -> str:
        return "\n\n---\n\n".join(self.parts(turn).values())

    def parts(self, turn: Turn) -> dict[str, str]:
        """The system prompt by part, in order; parts with nothing in them are left out."""
        skills = [skill for skill in self.skills.load() if not skill.problem]
        facts = own_text(turn, self.memory.facts)
        active = [titled(f"## {each.name}", each.text) for each in skills if each.always and not each.missing]
        listed = []
        for each in (skill for skill in skills if not skill.always):
            lack = f" [unavailable: needs {', '.join(each.missing)}]" if each.missing else ""
            listed.append(f"- {each.name}: {each.description} ({each.path}){lack}")
        style = template("format_cli") if turn.channel == "cli" else template("format_chat")
        platform = f"{sys.platform}, Python {sys.version_info[0]}.{sys.version_info[1]}"
        home = {"workspace": turn.workspace, "cwd": turn.cwd}
        parts = {"identity": template("identity", platform=platform, format=style, **home)}
        for path in (turn.workspace / name for name in self.own_files):
            parts[path.name] = titled(f"## {path.name}", own_text(turn, path))
        parts["Memory"] = titled("# Memory", "" if facts == template("MEMORY") else facts)
        parts["Active Skills"] = titled("# Active Skills", "\n\n".join(active))
        parts["Skills"] = template("skills", skills="\n".join(listed)) if listed else ""
        parts["Recent History"] = titled("# Recent History", "\n".join(self.memory.recent_history()))
        return {name: text for name, text in parts.items() if text}

    def user_message(self, text: str, turn: Turn, media: Iterable[Path] = ()) -> tuple[dict, list[dict]]:
        """The user's message, and the images to be sent with it.

        `runtime` is a key of ours: apart in the journal, before the text in what is sent.
        """
        images, lines = [], []
        for path in map(Path, media):
            try:
                block = image_block(path.read_bytes())
                images += [block] if block else []
                lines.append(f"[image: {path}]" if block else f"[file: {path}]")
            except OSError as problem:
                lines.append(f"[file: {path}, not readable: {problem.strerror}]")
        from datetime import datetime

        now = datetime.now().astimezone(self.zone)
        moment = f"{now:%Y-%m-%d %H:%M} ({now:%A}), {now:%Z}"
        runtime = template("runtime", time=moment, channel=turn.channel, chat_id=turn.chat_id)
        return {"role": "user", "content": "\n".join([*lines, text]), "runtime": runtime}, images


def own_text(turn: Turn, path: Path) -> str:
    """A file that goes into the prompt. It may be a link, but not to keys and not over the fence."""
    try:
        return plain_text(read_bytes(turn.path(str(path)))).strip() if path.exists() else ""
    except ToolError as problem:
        log.warning("%s is left out of the prompt: %s", path.name, problem)
        return ""


def titled(title: str, text: str) -> str:
    return f"{title}\n\n{text}" if text else ""


def time_zone(name: str) -> Any:
    """A zone like `Europe/Berlin`, or None for the machine's own."""
    if not name:
        return None
    import zoneinfo

    try:
        return zoneinfo.ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise ConfigError(f"agents.defaults.timezone: there is no zone {name!r}.") from None


# ---- Hooks: looking on, and having a say ----


NO_USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0, "estimated": False}


def add_up(total: dict, usage: dict) -> None:
    for name in NO_USAGE:
        total[name] += usage.get(name) or 0


@dataclass
class AgentRunResult:
    """A run: while it goes on hooks may change it, at its end it is the result."""

    final_content: str | None = None
    messages: list[dict] = field(default_factory=list)
    tools_used: list[str] = field(default_factory=list)
    usage: dict = field(default_factory=lambda: dict(NO_USAGE))
    stop_reason: str | None = None  # completed, max_iterations, error, tool_error, empty, cancelled
    tool_events: list[dict] = field(default_factory=list)  # [{"name", "arguments", "is_error", "result"}]
    error: str | None = None
    spec: "AgentRunSpec" = None
    iteration: int = 0  # model calls so far
    response: LLMResponse | None = None
    segments: list[str] = field(default_factory=list)  # of an answer that was cut by its length
    nudge: str = ""  # a note to the model for the next request only
    room: float = math.inf  # tokens of messages that the model has shown to take
    blanks: int = 0  # blank answers in a row
    cuts: int = 0  # answers that were cut or held back
    failures: int = 0  # in a row, of one and the same call:
    failed_call: tuple[str, dict] | None = None
    counter: TokenCounter = field(default_factory=TokenCounter)

    @property
    def tool_calls(self) -> list[ToolCallRequest]:
        return self.response.tool_calls if self.response else []

    @property
    def out_of_steps(self) -> bool:
        return self.iteration > self.spec.max_iterations


AgentHookContext = AgentRunResult  # what it is called while the run goes on


class AgentHook:
    """What happens in a run, as it happens. Override what you need."""

    wants_streaming = False

    async def before_iteration(self, context: AgentHookContext) -> None: ...

    async def on_stream(self, delta: str) -> None: ...

    async def on_stream_end(self, resuming: bool) -> None: ...

    async def on_retry(self, why: str) -> None: ...

    async def before_execute_tools(self, tool_calls: list[ToolCallRequest]) -> None:
        """Set `call.denied = "reason"` to keep a call from running; the model is told the reason."""

    async def after_iteration(self, context: AgentHookContext) -> None: ...

    async def finalize_content(self, content: str) -> str:
        return content


class CompositeHook(AgentHook):
    """Several hooks as one, in order of registration. One that fails is logged, the others still run."""

    def __init__(self, hooks: Iterable[AgentHook]):
        self.hooks = list(hooks)
        self.wants_streaming = any(hook.wants_streaming for hook in self.hooks)

    async def _each(self, method: str, *args: Any, **kwargs: Any) -> None:
        for hook in self.hooks:
            await self._safely(hook, method, *args, **kwargs)

    async def _safely(self, hook: AgentHook, method: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return await getattr(hook, method)(*args, **kwargs)
        except Exception as problem:  # a hook is a guest: it must not end the turn
            inside = log.isEnabledFor(logging.INFO)  # --logs
            log.warning("%s.%s failed: %s", type(hook).__name__, method, problem, exc_info=inside)
            return None

    before_iteration = partialmethod(_each, "before_iteration")
    on_stream = partialmethod(_each, "on_stream")
    on_stream_end = partialmethod(_each, "on_stream_end")
    on_retry = partialmethod(_each, "on_retry")
    before_execute_tools = partialmethod(_each, "before_execute_tools")
    after_iteration = partialmethod(_each, "after_iteration")

    async def finalize_content(self, content: str) -> str:
        for hook in self.hooks:
            changed = await self._safely(hook, "finalize_content", content)
            content = content if changed is None else changed
        return content


class LoggingHook(AgentHook):
    async def before_iteration(self, context: AgentHookContext) -> None:
        log.info("iteration %d, %d messages", context.iteration, len(context.messages))

    async def after_iteration(self, context: AgentHookContext) -> None:
        log.info("iteration %d: %s %s", context.iteration, context.response.finish_reason, context.usage)


class CostTrackingHook(AgentHook):
    """Tokens, and money where the price of the model is configured."""

    def __init__(self, prices: dict[str, Price], model: str):
        self.price, self.total = prices.get(model), dict(NO_USAGE)

    async def after_iteration(self, context: AgentHookContext) -> None:
        add_up(self.total, context.response.usage)

    def line(self, usage: dict) -> str:
        """`1,234 in (200 cached) · 56 out · 0.0012`; `~` marks an estimate."""
        mark = "~" if usage["estimated"] else ""
        asked, said = usage["prompt_tokens"], usage["completion_tokens"]
        cached = f" ({usage['cached_tokens']:,} cached)" if usage["cached_tokens"] else ""
        line = f"{mark}{asked:,} in{cached} · {mark}{said:,} out"
        if not self.price:
            return line
        return f"{line} · {mark}{(asked * self.price.input + said * self.price.output) / 1e6:.4f}"


class ApprovalHook(AgentHook):
    """Asks before a tool that writes or executes. `always` holds for that tool until the program ends."""

    def __init__(self, tools: ToolRegistry, ask: Callable[[str], Awaitable[str]] | None):
        self.tools, self.ask = tools, ask
        self.always: set[str] = set()

    async def before_execute_tools(self, tool_calls: list[ToolCallRequest]) -> None:
        open_calls = [call for call in tool_calls if not (call.error or call.denied)]
        asked = [call for call in open_calls if (tool := self.tools.get(call.name)) and not tool.read_only]
        for call in asked:  # all of them before the first question: should one fail, none goes through
            call.denied = "The user did not approve this call."
        for call in asked:
            if call.name in self.always:
                call.denied = ""
                continue
            # JSON keeps all of it on one line: nothing in it can look like a question of ours
            shown = printable(f"{call.name} {json.dumps(call.arguments, ensure_ascii=False)}")
            # many blanks could scroll the rest away
            shown = re.sub(r"\s{4,}", lambda blank: f"[{len(blank[0])} blanks]", shown)
            long = f"{call.name}, {len(shown):,} characters. " if len(shown) > 500 else ""
            question = f"{shown}\n{long}Run it? [y/n/always] "
            answer = (await self.ask(question)).strip().lower() if self.ask else "n"
            if answer in ("a", "always"):
                self.always.add(call.name)
            if answer in ("a", "always", "y", "yes"):
                call.denied = ""


# ---- The runner: think, act, think again ----


@dataclass
class AgentRunSpec:
    """What to run. `on_messages(messages, whole)` gets new messages as they appear; tools get `turn`."""

    messages: list[dict]
    tools: ToolRegistry = field(default_factory=ToolRegistry)
    model: str | None = None
    max_iterations: int = 40
    max_tokens: int = 8_192
    temperature: float | None = None
    context_window: int = 65_536
    hook: AgentHook = field(default_factory=AgentHook)
    concurrent_tools: bool = True
    fail_on_tool_error: bool = False
    turn: Turn = field(default_factory=Turn)
    on_messages: Callable[[list[dict], bool], None] | None = None  # whole: no results are due behind them


class AgentRunner:
    """The engine. It knows no channel, no session and no file, so everything that asks a model can use it."""

    runnable = ("tool_calls", "function_call", "stop", None)  # with any other reason the arguments may be cut
    continuations = 3  # of an answer that its length limit cut

    def __init__(self, provider: LLMProvider):
        self.provider = provider

    async def run(self, spec: AgentRunSpec) -> AgentRunResult:
        run = AgentHookContext(messages=list(spec.messages), spec=spec)
        try:
            while not run.stop_reason:
                await self._ask(run)
                is_whole = run.response.finish_reason in self.runnable
                if run.tool_calls and is_whole and not run.out_of_steps:
                    await self._act(run)
                else:
                    await self._conclude(run)
                if run.final_content:
                    run.final_content = await spec.hook.finalize_content(run.final_content)
                    extra = {} if run.tool_calls else run.response.extra  # the calls have it already
                    self._add(run, LLMResponse(run.final_content, extra=extra).to_message())
                await spec.hook.after_iteration(run)
        except asyncio.CancelledError:
            run.stop_reason = "cancelled"
            raise
        return run

    async def _ask(self, run: AgentHookContext) -> None:
        """One request: with tools, unless it is the last that the steps or the patience allow."""
        spec, hook = run.spec, run.spec.hook
        run.iteration += 1
        if run.out_of_steps:
            run.nudge = template("out_of_iterations", limit=spec.max_iterations)
        await hook.before_iteration(run)
        tools = [] if run.out_of_steps or run.blanks == 2 else spec.tools.get_definitions()
        request = self._govern(run, tools)
        run.response = await self._chat(run, request, tools)
        if run.response.is_overflow:  # the window is smaller than the settings say
            run.room = run.counter.total(request) // 2
            shorter = self._govern(run, tools)
            if len(shorter) < len(request):
                await hook.on_retry("too long for the model: asking again without the oldest turns")
                run.response = await self._chat(run, shorter, tools)
        run.nudge = ""
        add_up(run.usage, run.response.usage)

    async def _chat(self, run: AgentHookContext, request: list[dict], tools: list[dict]) -> LLMResponse:
        spec, hook = run.spec, run.spec.hook
        return await self.provider.chat(
            request, tools, model=spec.model, max_tokens=spec.max_tokens, temperature=spec.temperature,
            on_delta=hook.on_stream if hook.wants_streaming else None, on_retry=hook.on_retry,
        )  # fmt: skip

    def _govern(self, run: AgentHookContext, tools: list[dict]) -> list[dict]:
        """The copy that is sent: it fits the context window, and what is for this request only follows."""
        spec, counter = run.spec, run.counter
        budget = min(spec.context_window - spec.max_tokens - 1_024 - counter.total(tools), run.room)
        task = next((each for each in reversed(spec.messages) if each["role"] == "user"), None)
        request = govern(run.messages, int(budget), counter, task).messages
        request += [{"role": "assistant", "content": "".join(run.segments)}] if run.segments else []
        return request + ([{"role": "user", "content": run.nudge}] if run.nudge else [])

    async def _act(self, run: AgentHookContext) -> None:
        """Run the calls of one answer; the results stand behind it in the order of the calls."""
        run.blanks = 0
        run.response.content = "".join([*run.segments, run.response.content or ""]) or None  # cut before
        run.segments = []
        await run.spec.hook.on_stream_end(resuming=True)
        self._add(run, run.response.to_message(), more=True)
        await run.spec.hook.before_execute_tools(run.tool_calls)
        for batch in self._batches(run):
            await self._run_batch(run, batch)
            if run.stop_reason:
                break

    def _batches(self, run: AgentHookContext) -> Iterator[list[ToolCallRequest]]:
        """Neighbouring calls of tools that are safe side by side go together, every other call goes alone."""

        def is_safe(call: ToolCallRequest) -> bool:
            tool = run.spec.tools.get(call.name)
            return run.spec.concurrent_tools and tool is not None and tool.concurrency_safe

        for together, neighbours in itertools.groupby(run.tool_calls, is_safe):
            calls = list(neighbours)
            yield from [calls] if together else ([call] for call in calls)

    async def _run_batch(self, run: AgentHookContext, batch: list[ToolCallRequest]) -> None:
        results: dict[int, ToolResult] = {}

        async def work(n: int) -> None:
            results[n] = await self._call(run, batch[n])

        try:
            await asyncio.gather(*map(work, range(len(batch))))
        finally:  # also when the turn is stopped: what is finished stays
            done = [(batch[n], results[n]) for n in sorted(results)]
            self._add(run, *(
                {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result.text}
                for call, result in done
            ))  # fmt: skip
        if images := [block for _, result in done for block in result.images]:
            names = "\n".join(result.text for _, result in done if result.images)
            self._add(run, {"role": "user", "content": [{"type": "text", "text": names}, *images]})

    async def _call(self, run: AgentHookContext, call: ToolCallRequest) -> ToolResult:
        if call.denied or call.error:
            why = call.denied or f"{call.name} was not run: {call.error}. Send the call again, whole."
            result = ToolResult(why, is_error=True)
        else:
            result = await run.spec.tools.execute(call.name, call.arguments, run.spec.turn)
        run.tools_used += [call.name] if call.name not in run.tools_used else []
        run.tool_events.append({"name": call.name, "arguments": call.arguments,
                                "is_error": result.is_error, "result": result.text})  # fmt: skip
        if result.is_error:
            self._count_failure(run, call, result)
        else:
            run.failures = 0
        return result

    def _count_failure(self, run: AgentHookContext, call: ToolCallRequest, result: ToolResult) -> None:
        """Where the same call fails again and again the model is told at 3 times, and the run ends at 5."""
        before, run.failed_call = run.failed_call, (call.name, call.arguments)
        run.failures = run.failures + 1 if run.failed_call == before else 1
        if run.failures >= 5 or run.spec.fail_on_tool_error:
            run.stop_reason, run.error = "tool_error", f"{call.name} failed: {result.text}"
            run.final_content = f"I had to stop: {run.error}"
        if run.failures >= 3:
            result.text += "\n" + template("same_failure", count=run.failures)

    async def _conclude(self, run: AgentHookContext) -> None:
        """What an answer without calls to run means: the end, or another request."""
        response, text = run.response, run.response.content or ""
        if run.out_of_steps:
            whole = text if response.finish_reason != "error" else ""
            text = whole or f"I stopped at the limit of {run.spec.max_iterations} steps."
            run.stop_reason, run.final_content = "max_iterations", "".join([*run.segments, text])
        elif response.finish_reason == "error":
            run.stop_reason, run.error = "error", response.error
            run.final_content = "".join(run.segments) or None  # what was received whole
        elif (response.finish_reason == "length" or run.tool_calls) and run.cuts < self.continuations:
            run.cuts += 1
            run.segments += [f"{text}\n\n" if run.tool_calls else text] if text else []
            said = "answer" if text.strip() else "thinking"
            run.nudge = template("cut_calls" if run.tool_calls else f"cut_{said}")
        elif text.strip() or run.segments:
            run.stop_reason, run.final_content = "completed", "".join([*run.segments, text])
        elif run.blanks == 2 or response.finish_reason in ("content_filter", "refusal"):
            why = "the endpoint withheld it" if run.blanks < 2 else "the model sent nothing of use"
            run.stop_reason, run.final_content = "empty", f"There is no answer: {why}. Ask in other words."
        else:
            run.blanks += 1
            run.nudge = template("blank_answer") if run.blanks == 2 else ""
        await run.spec.hook.on_stream_end(resuming=not run.stop_reason)

    def _add(self, run: AgentHookContext, *messages: dict, more: bool = False) -> None:
        """New messages exist from here on, in the run and in the journal."""
        run.messages += messages
        if run.spec.on_messages and messages:
            run.spec.on_messages(list(messages), not more)


# ---- The loop: from a message to a reply ----

Emit = Callable[[OutboundMessage], Awaitable[None]]
Media = Iterable[Path]  # files that came with a message


class EventHook(AgentHook):
    """Tells a channel what is going on: deltas, text beside tool calls, tool hints, the answer."""

    def __init__(self, emit: Emit | None, turn: Turn, streaming: bool):
        self.emit, self.turn, self.wants_streaming = emit, turn, streaming
        self.context: AgentHookContext | None = None

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
        for hint in dict.fromkeys(hints):
            count = hints.count(hint)
            await self.send("tool_hint", f"{hint} × {count}" if count > 1 else hint)


def tool_hint(call: ToolCallRequest) -> str:
    """A call in one line: `read_file("a.txt")`, `$ ls`."""
    if call.name == "exec":
        return f"$ {' '.join(str(call.arguments.get('command', '')).split())[:100]}"
    telling = [call.arguments[name] for name in ("path", *call.arguments) if name in call.arguments]
    shown = json.dumps(telling[0], ensure_ascii=False, default=str) if telling else ""
    return f"{call.name}({shown if len(shown) <= 80 else shown[:79] + '…'})"


class AgentLoop:
    """Who asks, which session, which reply. One turn of a session at a time, whoever it comes from."""

    def __init__(self, config: Config, provider: LLMProvider | None = None, hooks: Iterable[AgentHook] = ()):
        self.config, self.workspace = config, config.workspace
        config.check()
        prepare_workspace(self.workspace)
        self.provider = provider or make_provider(config)
        self.model = self.provider.get_default_model()
        self.sessions = SessionManager(self.workspace)
        self.memory = MemoryStore(self.workspace)
        self.skills = SkillsLoader(self.workspace / "skills", DATA / "skills", read=self._prompt_file)
        self.context = ContextBuilder(config, self.memory, self.skills)
        self.tools = ToolRegistry(FILE_TOOLS)
        if (shell := config.tools.exec).enable:
            confinement = (shell.sandbox, shell.sandbox_network)
            self.tools.register(Exec(shell.timeout, shell.path_append, shell.allowed_env_keys, *confinement))
        if config.tools.web.enable:
            web = Web(config.tools.ssrf_whitelist)
            self.tools.register(WebFetch(web))
            self.tools.register(WebSearch(web, **vars(config.tools.web.search)))
        saving, summing_up = template("consolidate"), template("summarise")
        finding, editing = template("dream_find"), template("dream_edit")
        self.consolidator = Consolidator(self.memory, self._ask, saving, summing_up)
        self.dream = Dream(self.memory, self._ask, self._dream_agent, finding, editing, self.skills)
        self.mcp = MCPServers(config.tools.mcp_servers, self.tools)
        self.runner = AgentRunner(self.provider)
        self.cost = CostTrackingHook(config.prices, self.model)
        self.hooks = [self.cost, *hooks]
        self.cwd = self.workspace  # the command line sets the folder that it was started in
        self.streaming = True
        self.started = time.monotonic()
        self._seen: dict[str, dict] = {}  # by session: the files that it knows
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def turn(self, session_key: str) -> Turn:
        channel, _, chat_id = session_key.partition(":")
        return Turn(
            self.workspace, self.cwd, channel, chat_id, session_key,
            restrict=self.config.tools.restrict_to_workspace, readable=(DATA / "skills",),
            secret=(self.config.path.resolve(), Config().path),
            max_result_chars=self.config.defaults.max_tool_result_chars,
            seen=self._seen.setdefault(session_key, {}),
        )  # fmt: skip

    async def _ask(self, messages: list[dict], tools: list[dict], choice: str | None) -> LLMResponse:
        return await self.provider.chat(messages, tools, tool_choice=choice)

    async def _dream_agent(self, messages: list[dict], refuse: Callable[[str, dict], str]) -> AgentRunResult:
        class Fence(AgentHook):
            async def before_execute_tools(self, tool_calls: list[ToolCallRequest]) -> None:
                for call in tool_calls:
                    call.denied = call.denied or refuse(call.name, call.arguments)

        tools = ToolRegistry(self.tools.get(name) for name in ("read_file", "edit_file", "write_file"))
        turn = replace(self.turn("system:dream"), cwd=self.workspace)
        spec = AgentRunSpec(messages, tools, max_iterations=10, hook=Fence(), turn=turn)
        return await self.runner.run(spec)

    def _prompt_file(self, path: Path) -> bytes:
        return read_bytes(self.turn("cli:direct").path(str(path)), 100_000)

    async def process_direct(
        self, text: str, session_key: str = "cli:direct", on_event: Emit | None = None, media: Media = ()
    ) -> AgentRunResult:
        """One message, to its answer. Raises SessionBusy, or OSError where the journal cannot be written."""
        events = EventHook(on_event, self.turn(session_key), self.streaming)
        slash = SLASH.fullmatch(text.strip().lower())
        command = slash[1] if slash else ""
        if command and command not in ("new", "continue"):  # the others need not wait for a turn to end
            result = AgentRunResult(self._command(command, events.turn))
        else:
            async with self._locks.setdefault(session_key, asyncio.Lock()):
                with self.sessions.lock(session_key):
                    result = await self._take_turn(text, command, events, media)
        if result.final_content:
            await events.send("final", result.final_content)
        return result

    async def _take_turn(self, text: str, command: str, events: EventHook, media: Media) -> AgentRunResult:
        session, images = self.sessions.get(events.turn.session_key), []
        if command == "new":
            session.restart()
            events.turn.seen.clear()
            return AgentRunResult("A new session begins. The old one stays in its journal.")
        if command == "continue" and not session.unfinished:
            return AgentRunResult("There is no interrupted turn to go on with.")
        if not command:
            message, images = self.context.user_message(text, events.turn, media)
            session.append(message)  # before the model is asked
        await self.mcp.connect()
        defaults = self.config.defaults
        spec = AgentRunSpec(
            self.context.request(events.turn, session.get_history(), images), self.tools,
            max_iterations=defaults.max_tool_iterations, max_tokens=defaults.max_tokens,
            temperature=defaults.temperature, context_window=defaults.context_window_tokens,
            hook=CompositeHook([events, *self.hooks]), turn=events.turn,
            on_messages=lambda new, whole: session.append(*new, sync=whole),
        )  # fmt: skip
        return await self.runner.run(spec)

    def _command(self, name: str, turn: Turn) -> str:
        if name == "help":
            return "\n".join(f"/{each}: {what}" for each, what in COMMANDS.items())
        if name == "status":
            return self._status(turn)
        from difflib import get_close_matches

        close = get_close_matches(name, COMMANDS, n=1, cutoff=0.0)[0]
        return f"There is no /{name}. The closest is /{close}: {COMMANDS[close]}"

    def _status(self, turn: Turn) -> str:
        history = self.sessions.get(turn.session_key).get_history()
        sent = [*self.context.request(turn, history, []), *self.tools.get_definitions()]
        used, window = TokenCounter().total(sent), self.config.defaults.context_window_tokens
        hours, minutes = divmod(int(time.monotonic() - self.started) // 60, 60)
        return (
            f"nanobot {__version__}, model {self.model}, session {turn.session_key}, "
            f"{len(history)} messages\ncontext: ~{used:,} of {window:,} tokens\n"
            f"since the start: {self.cost.line(self.cost.total)}, {hours} h {minutes} min"
        )


SLASH = re.compile(r"/([a-z][a-z-]*)(?:@\w+)?")  # also "/status@bot", but not "/etc/hosts?"
COMMANDS = {
    "new": "start afresh; the old conversation stays in its journal",
    "continue": "go on with a turn that was interrupted",
    "status": "version, model, tokens, context, uptime",
    "help": "this list",
}


def run(text: str, session_key: str = "cli:direct", config: Config | None = None) -> str:
    """The answer, also in a notebook; raises RuntimeError with cause and fix where there is none."""
    loop = AgentLoop(config or load_config())
    loop.cwd = Path.cwd()
    with BackgroundLoop(loop.mcp.close) as background:
        result = background.complete(loop.process_direct(text, session_key))
    if result.stop_reason == "error":
        raise RuntimeError(result.error)
    return result.final_content


# ---- From outside: settings, and the command line ----

# Keys of parts that this version does not have yet: a line says so, so that nobody waits for their effect.
NOT_YET = {
    "agents.defaults.memoryWindow", "agents.defaults.dream", "agents.defaults.maxConcurrent",
    "channels.telegram", "gateway",
}  # fmt: skip


def load_config(path: Path | None = None, environ: Mapping[str, str] = os.environ) -> Config:
    """The file, and the environment over it. A file that is named must be there, the default one need not."""
    file = path or Config().path
    config = read_setting(Config, read_json(file, environ), "") if path or file.exists() else Config()
    config.path = file
    for spec in ROWS.values():
        if key := environ.get(spec.env_key):
            config.providers.setdefault(spec.name, ProviderSettings()).api_key = key
    config.base_url = environ.get("OPENAI_BASE_URL", "")
    config.defaults.model = environ.get("NANOBOT_MODEL") or config.defaults.model
    config.defaults.workspace = environ.get("NANOBOT_WORKSPACE") or config.defaults.workspace
    return config


def read_json(file: Path, environ: Mapping[str, str]) -> Any:
    """A settings file with each `${VAR}` from the environment; raises ConfigError with cause and fix."""

    def variable(match: re.Match) -> str:
        if match[1] not in environ:
            raise ConfigError(f"{file} wants the environment variable {match[1]}, which is not set.")
        return json.dumps(environ[match[1]])[1:-1]

    try:
        return json.loads(re.sub(r"\$\{(\w+)\}", variable, file.read_text(encoding="utf-8-sig")))
    except OSError as problem:
        raise ConfigError(f"Cannot read {file}: {problem.strerror}. Try `nanobot onboard`.") from None
    except (ValueError, RecursionError) as problem:
        raise ConfigError(f"{file} is not JSON: {problem}. Correct it there.") from None


def read_setting(hint: Any, value: Any, where: str) -> Any:
    """A value as its type hint wants it; raises ConfigError with its path: `agents.defaults.maxTokens: …`."""
    schema = as_schema(dict if is_dataclass(hint) else hint)
    wanted = [each or '""' for each in schema.get("enum", [])] or kinds(schema)
    if not fits(value, kinds(schema)) or value not in schema.get("enum", [value]):
        shown = json.dumps(value, ensure_ascii=False)[:80]
        raise ConfigError(f"{where or 'the file'}: expected {' or '.join(wanted)}, got {shown}")
    if is_dataclass(hint):
        return read_section(hint, value, where)
    inner = get_args(hint)
    if get_origin(hint) is list:
        return [read_setting(inner[0], each, f"{where}[{n}]") for n, each in enumerate(value)]
    if get_origin(hint) is dict:
        return {name: read_setting(inner[1], each, f"{where}.{name}") for name, each in value.items()}
    least = 1 if hint is int else 0
    if isinstance(value, int | float) and not least <= value < 1e15:  # NaN is not, either
        raise ConfigError(f"{where}: expected a number from {least} up, got {str(value)[:80]}")
    return int(value) if hint is int else value  # 100.0 is an integer, too


def read_section(cls: type, section: dict, where: str) -> Any:
    hints, values = get_type_hints(cls), {}
    known = {camel_case(each.name): each.name for each in fields(cls) if each.init}
    for key, value in section.items():
        path = f"{where}.{key}".lstrip(".")
        if name := known.get(camel_case(key)):
            values[name] = read_setting(hints[name], value, path)
        elif camel_case(path) in NOT_YET:
            log.warning("%s: this version has no such part yet, the setting does nothing", path)
        elif path.startswith("tools.mcpServers."):  # people paste them, with keys of other programs
            log.warning("%s: unknown key, it does nothing. There are: %s", path, ", ".join(known))
        else:
            raise ConfigError(f"{path}: unknown key. There are: {', '.join(sorted(known))}")
    return cls(**values)


def camel_case(name: str) -> str:
    return re.sub("_([a-z])", lambda match: match[1].upper(), name)


def make_provider(config: Config) -> LLMProvider:
    """The model that the settings mean: the offline one where no key and no address is configured."""
    defaults = config.defaults
    if strange := [name for name in config.providers if name not in ROWS]:
        raise ConfigError(f"providers.{strange[0]}: no such provider. There are: {', '.join(ROWS)}")
    if defaults.provider in ("offline", "human"):
        return OfflineProvider() if defaults.provider == "offline" else HumanProvider()
    settings = {name: Endpoint(ROWS[name], **vars(each)) for name, each in config.providers.items()}
    try:
        chosen = "" if defaults.provider == "auto" else defaults.provider
        endpoint = choose_endpoint(settings, defaults.model, chosen, config.base_url)
    except ValueError as problem:
        raise ConfigError(str(problem)) from None
    if not endpoint and defaults.model not in ("", "offline"):
        why = f"There is no key and no base URL for the model {defaults.model}"
        raise ConfigError(f"{why}. Set OPENAI_API_KEY or OPENAI_BASE_URL, or use --offline.")
    return OpenAIProvider(endpoint) if endpoint else OfflineProvider()


def settings_of(arguments: argparse.Namespace) -> Config:
    """The configuration. A flag wins over the variable that it stands for."""
    flags = {"NANOBOT_WORKSPACE": arguments.workspace, "NANOBOT_MODEL": arguments.model,
             "OPENAI_BASE_URL": arguments.base_url}  # fmt: skip
    config = load_config(arguments.config, os.environ | {name: each for name, each in flags.items() if each})
    config.defaults.provider = arguments.provider or config.defaults.provider
    return config


def agent_command(arguments: argparse.Namespace) -> int:
    loop = AgentLoop(settings_of(arguments))
    loop.cwd, loop.streaming = Path.cwd(), not arguments.no_stream
    wanted = loop.config.channels
    shown = {"retry": True, "progress": wanted.send_progress, "tool_hint": wanted.send_tool_hints}
    terminal = CLI(kinds=tuple(kind for kind, on in shown.items() if on))
    if isinstance(loop.provider, OfflineProvider) and loop.config.defaults.provider != "offline":
        terminal.note(template("no_model"))
    if arguments.trace:
        loop.provider.trace = Trace(arguments.trace)
    with BackgroundLoop(loop.mcp.close) as background:
        keyboard = sys.stdin is not None and sys.stdin.isatty()
        if isinstance(loop.provider, HumanProvider) and keyboard:
            loop.provider.ask = background.ask
            loop.provider.check = lambda name, arguments: loop.tools.prepare_call(name, arguments)[2]
        if arguments.approve:
            loop.hooks.append(ApprovalHook(loop.tools, background.ask if keyboard else None))
        if arguments.logs:
            loop.hooks.append(LoggingHook())
        ask = partial(one_turn, loop, terminal, background, session_key(arguments.session))
        piped = "" if keyboard else terminal.read_piped(arguments.message is not None)
        given = os.fsencode(arguments.message or "").decode("utf-8", errors="replace")  # whatever the locale
        text = "\n\n".join(filter(None, [given.strip(), piped]))
        if text or not keyboard or arguments.message is not None:
            return ask(text)
        threading.Thread(target=loop.provider.warm_up, daemon=True).start()
        terminal.note(f"nanobot {__version__}, model {loop.model}. /help lists commands, Ctrl-D leaves.")
        return terminal.converse(ask, loop.workspace / ".nanobot" / "prompt-history")


def session_key(name: str) -> str:
    return name if ":" in name else f"cli:{name}"


def one_turn(loop: AgentLoop, terminal: CLI, background: BackgroundLoop, key: str, text: str) -> int:
    if not text:
        print("nanobot: there is no message: give one with -m TEXT, or on standard input", file=sys.stderr)
        return 2
    result = background.complete(loop.process_direct(text, key, terminal.send))
    if result.usage["prompt_tokens"]:
        terminal.note(f"tokens: {loop.cost.line(result.usage)}")
    failed = result.stop_reason in ("error", "tool_error", "empty")
    cause = result.error or result.final_content or ""
    if failed and not (terminal.live and cause in (result.final_content or "")):  # seen already
        terminal.note(f"nanobot: {cause}")
    return int(failed)


def onboard_command(arguments: argparse.Namespace) -> None:
    file = arguments.config or Config().path
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.touch(0o600)  # keys will be in it
        file.write_text(template("config") + "\n", encoding="utf-8")
    workspace = settings_of(arguments).workspace
    prepare_workspace(workspace)
    print(f"Settings: {file}\nWorkspace: {workspace}")
    print("Next: put a key into the settings, or export OPENAI_API_KEY; then look at `nanobot status`.")


def status_command(arguments: argparse.Namespace) -> int:
    """Checks each part and says how to mend it; the exit status is 1 where something needed is broken."""
    loop = AgentLoop(settings_of(arguments))
    file, provider, bash = loop.config.path, loop.provider, shutil.which("bash")
    model, problem = "offline: fixed rules; set OPENAI_API_KEY or OPENAI_BASE_URL for a real one", None
    if isinstance(provider, OpenAIProvider):
        end, problem = provider.endpoint, asyncio.run(provider.check())
        model = f"{provider.model or 'no model named'} at {end.api_base} ({end.spec.name})"
    elif isinstance(provider, HumanProvider):
        model = "human: it is you"
    sandbox = loop.config.tools.exec.sandbox
    unsafe = sandbox_problem() if sandbox else ""
    rows = [
        ("ok", "settings", str(file) if file.exists() else "the defaults; `nanobot onboard` writes a file"),
        ("ok", "workspace", str(loop.workspace)),
        ("BAD" if problem else "ok", "model", f"{model}: {problem}" if problem else model),
        ("ok" if bash else "--", "bash", bash or "missing: exec cannot run; install bash"),
        ("BAD" if unsafe else "ok", "sandbox", unsafe or sandbox or "off: a command can do what you can"),
    ]
    for name, problem in asyncio.run(loop.mcp.check()).items():
        rows.append(("BAD" if problem else "ok", f"mcp {name}", problem or "connected"))
    for skill in loop.skills.load():
        lack = f"needs {', '.join(skill.missing)}" if skill.missing else "ready"
        if skill.problem:
            rows.append(("--", f"skill {skill.name}", f"broken, left out: {skill.problem}"))
            continue
        rows.append(("--" if skill.missing else "ok", f"skill {skill.name}", lack))
    for mark, name, what in rows:
        print(printable(f"{mark:4}{name:22}{what}"))
    return int(any(mark == "BAD" for mark, *_ in rows))


def prompt_command(arguments: argparse.Namespace) -> None:
    loop = AgentLoop(settings_of(arguments))
    loop.cwd = Path.cwd()
    turn = loop.turn(session_key(arguments.session))
    parts = loop.context.parts(turn)
    asyncio.run(loop.mcp.check())  # so that their tools are in what is printed
    parts["Tools"] = "\n".join(json.dumps(each, ensure_ascii=False) for each in loop.tools.get_definitions())
    message, _ = loop.context.user_message(arguments.text, turn)
    stored = loop.sessions.get(turn.session_key)
    if history := replace(stored, lines=[*stored.lines, message]).get_history()[:-1]:
        parts["History"] = "\n".join(json.dumps(each, ensure_ascii=False) for each in history)
    parts["User"] = f"{message['runtime']}\n\n{message['content']}"
    for name, text in parts.items():
        tokens = TokenCounter().total([{"content": text}])
        print(f"==== {name} (~{tokens:,} tokens) ====\n{printable(text)}\n")


def sessions_command(arguments: argparse.Namespace) -> None:
    sessions, key = SessionManager(settings_of(arguments).workspace), arguments.show
    if key and key not in sessions.list_keys():
        raise ConfigError(f"There is no session {key!r}. `nanobot sessions` lists them.")
    if key:
        lines = map(readable, filter(None, sessions.get(key).lines))
    else:
        counts = {each: len(list(filter(None, sessions.get(each).lines))) for each in sessions.list_keys()}
        lines = (f"{each}  {count} messages" for each, count in counts.items())
    for line in lines:
        print(printable(line))


class RecordedTools(ToolRegistry):
    """The tools of a trace. Nothing is executed: each call returns what it returned then."""

    def __init__(self, records: list[dict]):
        super().__init__()
        self.definitions, self.results = records[0]["tools"], defaultdict(list)
        # those of earlier turns, and what the runner itself answers to a call that could not be read
        known = {message.get("tool_call_id") for message in records[0]["messages"]}
        known |= {call.id for record in records for call in record["answer"].tool_calls if call.error}
        keys: dict[str, str] = {}
        for message in (message for record in records for message in record["messages"]):
            for call in message.get("tool_calls", ()):
                function = call["function"]
                keys.setdefault(call["id"], self.key(function["name"], json.loads(function["arguments"])))
            if message["role"] == "tool" and message["tool_call_id"] not in known:
                known.add(message["tool_call_id"])
                self.results[keys[message["tool_call_id"]]].append(message["content"])

    @staticmethod
    def key(name: str, arguments: dict) -> str:
        return f"{name} {json.dumps(arguments)}"

    def get_definitions(self) -> list[dict]:
        return self.definitions

    async def execute(self, name: str, params: dict, turn: Turn | None = None) -> ToolResult:
        results = self.results[self.key(name, params)]
        return ToolResult(results.pop(0) if results else "(the trace ends before this call's result)")


def replay_command(arguments: argparse.Namespace) -> int:
    defaults, terminal, status = settings_of(arguments).defaults, CLI(), 0
    try:
        model = ReplayProvider(arguments.file)
    except (OSError, ValueError) as problem:
        raise ConfigError(f"{problem}. Make a trace with: nanobot agent --trace FILE") from None
    while model.rest:
        first, hook = model.rest[0], EventHook(terminal.send, Turn(), streaming=True)
        known = [name for name in ("max_tokens", "temperature") if name in first["options"]]
        options = {name: first["options"][name] for name in known}
        spec = AgentRunSpec(first["messages"], RecordedTools(model.rest), hook=hook, **options)
        spec.max_iterations = defaults.max_tool_iterations
        spec.context_window = sys.maxsize  # what did not fit was left out when it was recorded
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


def parser() -> argparse.ArgumentParser:
    main_parser = argparse.ArgumentParser("nanobot", description="A personal AI agent. No command: agent.")
    main_parser.add_argument("--version", action="version", version=f"nanobot {__version__}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--config", metavar="FILE", type=path_of, help="default: ~/.nanobot/config.json")
    common.add_argument("--workspace", metavar="DIR", help="the agent's home; default: ~/.nanobot/workspace")
    common.add_argument("--model", metavar="NAME")
    common.add_argument("--base-url", metavar="URL", help="an OpenAI-compatible endpoint, mostly with /v1")
    choice = common.add_mutually_exclusive_group()
    choice.add_argument("--provider", metavar="NAME", help=", ".join([*ROWS, "offline", "human (you)"]))
    choice.add_argument("--offline", dest="provider", action="store_const", const="offline")
    common.add_argument("--logs", action="store_true", help="show what happens inside, on stderr")
    commands = main_parser.add_subparsers(metavar="COMMAND")
    agent = commands.add_parser("agent", parents=[common], help="ask, or talk at a prompt")
    agent.add_argument("-m", "--message", metavar="TEXT", help="ask this and leave; else a prompt")
    agent.add_argument("--approve", action="store_true", help="ask before a tool writes or executes")
    agent.add_argument("--no-stream", action="store_true", help="do not stream requests")
    agent.add_argument("--trace", metavar="FILE", type=path_of, help="write down requests and answers")
    replay = commands.add_parser("replay", parents=[common], help="run a trace again: no network")
    replay.add_argument("file", metavar="FILE", type=path_of)
    prompt = commands.add_parser("prompt", parents=[common], help="print what would be sent")
    prompt.add_argument("text", nargs="?", default="Hello!")
    for command in (agent, prompt):
        command.add_argument("-s", "--session", metavar="NAME", default="direct", help="a conversation apart")
    sessions = commands.add_parser("sessions", parents=[common], help="list conversations, or `show KEY`")
    sessions.add_argument("action", nargs="?", choices=["show"])
    sessions.add_argument("show", nargs="?", metavar="KEY")
    commands.add_parser("onboard", parents=[common], help="write settings and workspace")
    commands.add_parser("status", parents=[common], help="check each part")
    return main_parser


def show_bug(*raised: Any) -> None:
    """A traceback, harmless to the terminal: what it quotes may come from a model."""
    print(printable("".join(traceback.format_exception(*raised))), file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    commands = {"agent": agent_command, "prompt": prompt_command, "sessions": sessions_command,
                "onboard": onboard_command, "status": status_command, "replay": replay_command}  # fmt: skip
    if argv and not argv[0].startswith("-") and argv[0] not in commands:
        print(f"nanobot: no command {argv[0]!r}, there are {', '.join(commands)}; a message goes behind -m",
              file=sys.stderr)  # fmt: skip
        return 2
    if not argv or argv[0] not in (*commands, "-h", "--help", "--version"):
        argv.insert(0, "agent")
    arguments = parser().parse_args(argv)
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO if arguments.logs else logging.WARNING, handlers=[handler])
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.reconfigure(errors="replace")  # letters that its encoding has not
    sys.excepthook = show_bug
    for name in ("SIGTERM", "SIGHUP"):  # end as after Ctrl-C: what runs is stopped, the journal in order
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), terminate)
    try:
        return commands[argv[0]](arguments) or 0
    except (ConfigError, SessionBusy) as problem:
        print(f"nanobot: {printable(str(problem))}", file=sys.stderr)
    except BrokenPipeError:  # `nanobot … | head`: nobody wants the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as problem:
        cause = printable(str(problem))
        print(f"nanobot: {cause}. Mend it and ask again; the journal keeps what it has.", file=sys.stderr)
    except KeyboardInterrupt:
        return 130
    return 1


if __name__ == "__main__":
    sys.exit(main())
