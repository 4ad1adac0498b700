"""The model: a conversation goes in, an answer or tool calls come out.

The lingua franca is the Chat Completions message dict, so what you print is what the model saw:

    [{"role": "system", "content": "You are …"}, {"role": "user", "content": "What is in a.txt?"},
     {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1", "type": "function",
      "function": {"name": "read_file", "arguments": "{\\"path\\": \\"a.txt\\"}"}}]},
     {"role": "tool", "tool_call_id": "call_1", "content": "1| hello"}]

`provider.chat(messages, tools)` returns an `LLMResponse`, also where the endpoint fails: then its
`error` is the cause and what to do. The first reading follows one request. The second has how
endpoints differ (tables, PROVIDERS and HEALING, not code), how a stream becomes an answer, traces,
and models that need no network.

Read after nanobot.py, before memory.py. Not covered: which tools there are and how they run; other
protocols than Chat Completions.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import difflib
import gc
import itertools
import json
import logging
import operator
import os
import re
import shlex
import time
import warnings
import zlib
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

log = logging.getLogger("nanobot.providers")
# NaN is a ValueError: it is no JSON
to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
JSON = json.JSONDecoder(strict=False)  # takes line ends within a text
words = re.compile(r"\s*\S+|\s+\Z").findall  # "Hi you" → ["Hi", " you"]: together they are the text
OnDelta = Callable[[str], Awaitable[None]]


# ---- A question and its answer ----


@dataclass
class ToolCallRequest:
    """One call that the model asks for; `error` or `denied`, where set, say why it is not run."""

    id: str
    name: str
    arguments: dict = field(default_factory=dict)
    error: str = ""
    denied: str = ""
    extra: dict = field(default_factory=dict)  # further keys, sent back as they came
    approved: bool = False  # the user said yes to this very call
    must_only_read: bool = False  # nobody was asked: it runs only if its tool only reads

    def to_message(self) -> dict:
        function = {"name": self.name, "arguments": to_json(self.arguments)}
        return {"id": self.id, "type": "function", "function": function, **self.extra}


@dataclass
class LLMResponse:
    """An answer, or where `error` is set what went wrong; `content` is then what was shown so far.

    `usage` is `{"prompt_tokens", "completion_tokens", "cached_tokens", "estimated"}`, in tokens.
    """

    content: str | None = None
    tool_calls: list[ToolCallRequest] = field(default_factory=list)
    finish_reason: str | None = "stop"  # or tool_calls, length, content_filter, error
    usage: dict = field(default_factory=dict)
    reasoning_content: str | None = None
    error: str | None = None
    extra: dict = field(default_factory=dict)  # the reasoning fields as they came, to be sent back
    is_overflow: bool = False  # the error: more than the model's window holds

    @property
    def has_tool_calls(self) -> bool:
        return bool(self.tool_calls)

    def to_message(self) -> dict:
        message = {"role": "assistant", "content": self.content or None, **self.extra}
        if self.tool_calls:
            message["tool_calls"] = [call.to_message() for call in self.tool_calls]
        return message


def failed(cause: str, **fields: Any) -> LLMResponse:
    return LLMResponse(finish_reason="error", error=cause, **fields)


@dataclass
class LLMRequest:
    """One question. `options` are max_tokens, temperature, tool_choice: only what is wanted."""

    lawful: list[dict]  # shared with the next request: to be read only
    tools: list[dict]
    model: str
    options: dict
    on_delta: OnDelta | None = None
    on_retry: OnDelta | None = None
    sent: dict = field(default_factory=dict)  # the body of the HTTP attempt that is under way,
    began: float = field(default_factory=time.monotonic)  # and when that began

    @cached_property
    def messages(self) -> list[dict]:  # a copy of the provider's own, free to change
        return own_copy(self.lawful)

    async def show(self, *pieces: str) -> None:
        for piece in pieces:
            if piece and self.on_delta:
                await self.on_delta(piece)

    async def tell(self, line: str) -> None:
        """What the user should know before the answer: a wait, a change of the request."""
        log.info("%s", line)
        if self.on_retry:
            await self.on_retry(line)


class LLMProvider:
    """A model. `chat` is what callers use, `answer` what a subclass writes."""

    model = ""
    trace: Callable[[LLMRequest, LLMResponse | None, str], None] | None = None  # told of attempts

    async def chat(
        self, messages: list[dict], tools: list[dict] | None = None, *, model: str | None = None,
        on_delta: OnDelta | None = None, on_retry: OnDelta | None = None, **options: Any,
    ) -> LLMResponse:  # fmt: skip
        """Ask the model; with `on_delta` the answer streams, `on_retry` hears why it takes longer.

        Options: max_tokens, temperature, tool_choice. What an endpoint does wrong is a value
        (`finish_reason="error"`); raised are cancellation, and what the two callbacks raise.
        """
        lawful = legal_once(self, messages)
        wanted = {name: value for name, value in options.items() if value is not None}
        request = LLMRequest(lawful, tools or [], model or self.model, wanted, on_delta, on_retry)
        response, outcome = None, "cancelled"
        try:
            response = await self.answer(request)
            outcome = "failed" if response.error else "answered"
        finally:
            if self.trace:
                self.trace(request, response, outcome)
        return response

    async def answer(self, request: LLMRequest) -> LLMResponse:
        """The model's answer. `request.messages` is a copy, free to change, and all that there is:
        no provider keeps state, the messages say what was called and what came of it."""
        raise NotImplementedError

    def get_default_model(self) -> str:
        return self.model

    def warm_up(self) -> None:
        """Slow work (an import) that can be done before the first request, on a thread."""


# ---- A provider in twenty lines ----


class ScriptedProvider(LLMProvider):
    """Plays replies back: a text, a call, a list of calls, or an LLMResponse. Keeps `requests`."""

    model = "scripted"

    def __init__(self, replies: Iterable[Any]):
        self.replies = iter(replies)
        self.requests: list[LLMRequest] = []

    async def answer(self, request: LLMRequest) -> LLMResponse:
        self.requests.append(request)
        reply = next(self.replies, failed("The script has no further reply."))
        match reply:
            case str():
                reply = LLMResponse(reply)
            case ToolCallRequest():
                reply = LLMResponse(None, [reply], "tool_calls")
            case list():
                reply = LLMResponse(None, reply, "tool_calls")
        await request.show(*words(reply.content or ""))
        return reply


# ---- A lawful history ----


def legal(messages: list[dict], reply: bool = True, known: dict | None = None) -> list[dict]:
    """A copy of a conversation that every endpoint accepts; idempotent, `messages` stay the same.

    user: "List the files"                 user: "List the files"
    assistant: calls 1 and 2        →      assistant: calls 1 and 2
    tool 2: "a.txt"                        tool 1: "[interrupted before it finished]"
    user: "Well?"                          tool 2: "a.txt"
    user: "Go on"                          user: "Well?\\n\\nGo on"
    assistant: "I will"

    One system message, first; then a user message; neighbours of one role are one message; each
    call has one result, directly behind it; ids are unique, arguments a JSON object, texts not
    empty; only known keys. With `reply` the last is not the assistant's; `known` keeps the checks.
    """
    clean = cleaned(messages) if known is None else cleaned_once(messages, known)
    system = [message for message in clean if message["role"] == "system"]
    talk = [message for message in clean if message["role"] != "system"]
    lawful = with_neighbours_joined([*system, *with_results(talk)])
    while reply and lawful and lawful[-1]["role"] == "assistant":
        lawful.pop()
    first = 1 if system else 0
    if len(lawful) == first or lawful[first]["role"] != "user":
        lawful.insert(first, {"role": "user", "content": "(earlier messages are left out)"})
    return lawful


# ---- An endpoint: ask, heal, wait ----


class OpenAIProvider(LLMProvider):
    """An endpoint that speaks Chat Completions. Timeouts are in seconds, `pace` scales waits."""

    connect_timeout = 10.0

    def __init__(
        self, endpoint: Endpoint, request_timeout: float = 300, idle_timeout: float = 90,
        pace: float = 1,
    ):  # fmt: skip
        key = "".join(endpoint.api_key.split())  # a line end, pasted along, would break the header
        self.endpoint = replace(endpoint, api_key=key)
        self.model = endpoint.model
        self.request_timeout = request_timeout
        self.idle_timeout = idle_timeout
        self.pace = pace
        self._client: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.learnt: dict[str, list[Healed]] = {}  # by model: the changes it needs
        self.is_warned = False  # the user knows that the window is too small

    async def answer(self, request: LLMRequest) -> LLMResponse:
        """Ask; heal what is refused, wait where it is busy, until there is an answer or no hope.

        400 "'max_tokens' is not supported"  → changed (`heal`), asked again at once
        429 "try again in 20s", 503          → asked again in 20 s; in 1, 2 and 4 s
        401, or half an answer was shown     → an answer with `error`: cause and fix
        """
        healed = list(self.learnt.get(request.model, []))
        body = request_body(self.endpoint, request, healed)
        tries = 0
        while True:
            try:
                response = await self._ask(request, body)
                await keep_what_was_learnt(self, request, response, healed)
                return response
            except Failure as problem:
                failure = replace(problem, tries=tries)
            if remedy := find_remedy(failure, body, healed):
                healed.append((remedy, failure.text))
                body = heal(body, remedy, failure.text)
                self._note(request, failure, "healed")
                await request.tell(f"{self.endpoint.spec.name}, {request.model}: {remedy.notice}")
            elif (seconds := retry_after(failure)) is not None:
                tries += 1
                self._note(request, failure, "retried")
                await wait(request, failure, seconds, self.pace)
            else:
                why = await explain(self, failure, request.lawful)
                return failed(why, content=failure.shown or None, is_overflow=failure.is_overflow)

    def _note(self, request: LLMRequest, failure: Failure, outcome: str) -> None:
        """A failed attempt that another one follows goes into the trace, too."""
        if self.trace:
            self.trace(request, failed(failure.with_status, content=failure.shown or None), outcome)

    async def _ask(self, request: LLMRequest, body: dict) -> LLMResponse:
        """One HTTP attempt. Raises Failure where the endpoint fails, and what `on_delta` raises."""
        request.sent, request.began = body, time.monotonic()
        reader = AnswerReader(tools_in_text(self.endpoint, request, body))
        try:
            async with contextlib.aclosing(pieces_of(self, request, body, reader)) as pieces:
                async for text in pieces:
                    await request.show(text)
            return reader.response(request)
        except Failure as failure:
            _, calls = read_text_calls(failure.generation, parameters_by_name(request.tools))
            if calls:  # Groq refused what its model wrote; we can read the calls in it
                usage = estimate_usage(request, LLMResponse())
                return LLMResponse(None, calls, "tool_calls", usage)
            shown = reader.content[: reader.shown] if request.on_delta else ""
            cause = safe_text(self.endpoint, failure.cause)
            raise replace(failure, cause=cause, shown=shown) from failure

    def warm_up(self) -> None:
        if self._client is None:
            self._client = make_client(self.endpoint, self.request_timeout, self.connect_timeout)

    def _client_here(self) -> Any:
        """The client; a new one in a new event loop, as open connections belong to the old one."""
        here = asyncio.get_running_loop()
        if self._loop not in (None, here):
            self._client = None
        self._loop = here
        self.warm_up()
        return self._client

    async def list_models(self) -> list[str]:
        """What the endpoint offers; raises what the SDK raises."""
        return await models_of(self._client_here(), self.request_timeout)

    async def check(self) -> str | None:
        """What is wrong with the address, the key or the model; None where all is well."""
        return await problem_of(self)


# ======== Second reading: what real histories, endpoints and answers are like ========

# ---- How a history is made lawful ----
# Without this one killed program wedges its session for ever: 400 "An assistant message with
# 'tool_calls' must be followed by tool messages responding to each 'tool_call_id'".

REASONING = ("reasoning_content", "reasoning", "reasoning_details")  # sent back under the same name
KNOWN_KEYS = {"role", "content", "tool_calls", "tool_call_id", "name", *REASONING}
NO_RESULT = "[interrupted before it finished]"


def cleaned(messages: list[dict]) -> list[dict]:
    checked = [clean_message(with_whole_letters(message)) for message in messages]
    return [message for message in checked if message]


def clean_message(message: dict) -> dict | None:
    """Known keys and an acceptable content; None where nothing is left.

    {"role": "developer", "content": "Be brief.", "timestamp": "…"}
    → {"role": "system", "content": "Be brief."}
    """
    clean = {key: value for key, value in message.items() if key in KNOWN_KEYS and value}
    clean["role"] = "system" if message.get("role") == "developer" else message.get("role")
    calls = clean_calls(clean.pop("tool_calls", []))
    if clean["role"] == "assistant":  # nothing is put into its mouth: models repeat what they said
        clean["content"] = clean_content(clean.get("content"), filler="") or None
        if calls:
            clean["tool_calls"] = calls
        says_something = calls or clean["content"]
        return clean if says_something else None
    clean["content"] = clean_content(clean.get("content"), filler="(empty)") or "(empty)"
    return clean if clean["role"] in ("system", "user", "tool") else None


def with_whole_letters(value: Any) -> Any:
    """A deep copy that has UTF-8: "\\ud83d\\ude00 \\ud83d" → "😀 ?"; UTF-16 joins half letters."""
    if isinstance(value, dict):
        return {with_whole_letters(key): with_whole_letters(item) for key, item in value.items()}
    if isinstance(value, list):
        return [with_whole_letters(item) for item in value]
    if not isinstance(value, str) or value.isascii():
        return value
    joined = value.encode("utf-16", errors="surrogatepass").decode("utf-16", errors="surrogatepass")
    return joined.encode("utf-8", errors="replace").decode("utf-8")


def clean_content(content: Any, filler: str) -> str | list[dict]:
    """A text or blocks; empty where there is nothing to see. A blank text in a block is filled."""
    if isinstance(content, list):
        blocks = [as_block(item) for item in content]
        for block in blocks:
            if block.get("type") == "text":
                block["text"] = clean_content(block.get("text"), filler) or filler
        return [block for block in blocks if block.get("text") != ""]
    text = content or ""
    if not isinstance(text, str):
        text = to_json(text)
    return "" if text.isspace() else text


def as_block(item: Any) -> dict:
    return item if isinstance(item, dict) else {"type": "text", "text": item}


def clean_calls(calls: list[dict]) -> list[dict]:
    """Those that have a name, with arguments that are the text of a JSON object: None → "{}"."""
    clean = []
    for call in calls:
        function = call.get("function") or {}
        if function.get("name"):
            arguments, _ = parse_arguments(function.get("arguments"), repair=True)
            function = {"name": str(function["name"]), "arguments": to_json(arguments)}
            clean.append({**call, "type": "function", "function": function})
    return clean


def with_results(messages: list[dict]) -> list[dict]:
    """Each call has an id of its own and one result, directly behind it; other results are dropped.

    assistant: calls 1 and 2          assistant: calls 1 and 2
    tool 2: "b"                  →    tool 1: "[interrupted before it finished]"
    user: "go on"                     tool 2: "b"
    tool 9: nobody asked              user: "go on"

    Some endpoints number their calls anew in each answer. So a result belongs to the calls since
    the last user message, in their order, and only where none of these waits to an earlier one.
    """
    paired: list[dict] = []
    used_ids: set[str] = set()
    waiting: dict[Any, list[int]] = {}  # id → places in `paired` of results that are not there yet
    earlier: dict[Any, list[int]] = {}  # the same, from before the last user message
    for message in messages:
        if message["role"] == "tool":
            fill_in(paired, message, waiting, earlier)
            continue
        if message["role"] == "user":
            earlier, waiting = {**earlier, **waiting}, {}
        place = len(paired)
        paired.append(message)
        for number, call in enumerate(message.get("tool_calls", [])):
            id_ = unused_id(call.get("id"), used_ids)
            if id_ != call.get("id"):
                paired[place] = with_new_id(paired[place], number, id_)
            waiting.setdefault(call.get("id") or None, []).append(len(paired))
            paired.append({"role": "tool", "tool_call_id": id_, "content": NO_RESULT})
    return paired


def with_new_id(message: dict, number: int, id_: str) -> dict:
    calls = list(message["tool_calls"])
    calls[number] = {**calls[number], "id": id_}
    return {**message, "tool_calls": calls}


def fill_in(paired: list[dict], message: dict, *queues: dict[Any, list[int]]) -> None:
    """Put a result where a call waits for it; one that nobody waits for goes nowhere."""
    old_id = message.get("tool_call_id")
    for queue in queues:
        if old_id in queue:
            place = queue[old_id].pop(0)
            id_ = paired[place]["tool_call_id"]
            paired[place] = message if id_ == old_id else {**message, "tool_call_id": id_}
            if not queue[old_id]:
                del queue[old_id]
            return


def unused_id(id_: Any, used: set[str]) -> str:
    """The id, or where it is taken one with a number: "a", then "a_2"."""
    unused, number = str(id_ or "call"), 1
    while unused in used:
        number += 1
        unused = f"{id_ or 'call'}_{number}"
    used.add(unused)
    return unused


def new_id(old: str = "") -> str:
    """Nine digits, which every endpoint takes for an id; the same ones for the same old id."""
    number = zlib.crc32(old.encode()) if old else time.perf_counter_ns()
    return f"{number % 10**9:09d}"


def with_neighbours_joined(messages: list[dict]) -> list[dict]:
    joined: list[dict] = []
    for message in messages:
        if joined and joined[-1]["role"] == message["role"] != "tool":
            message = join(joined.pop(), message)
        joined.append(message)
    return joined


def join(first: dict, second: dict) -> dict:
    """No text and no image is lost, and the first one's thoughts stay.

    user "a", user [image] → user [{"type": "text", "text": "a"}, image]
    """
    contents = [message["content"] for message in (first, second) if message["content"]]
    if all(isinstance(content, str) for content in contents):
        return {**second, **first, "content": "\n\n".join(contents) or None}
    blocks: list[dict] = []
    for content in contents:
        blocks += content if isinstance(content, list) else [as_block(content)]
    return {**second, **first, "content": blocks}


# ---- Checked once ----
# A turn of 200 calls sends its first message 200 times. At 1,000 calls and results `legal` takes
# 8.6 ms, and 1.2 where they are the same as last time; at 5,000 46 and 8.

MOST_CHECKED = 5_000  # messages of all conversations: those that were asked for last


class Checked(NamedTuple):
    message: dict  # who holds it keeps its id its own
    before: dict  # what it was like when it was checked: a hook may change a message in place
    clean: dict | None


def legal_once(provider: LLMProvider, messages: list[dict]) -> list[dict]:
    known = vars(provider).setdefault("_checked", {})  # a subclass need not call our __init__
    return legal(messages, known=known)


def cleaned_once(messages: list[dict], known: dict[int, Checked]) -> list[dict]:
    """Like `cleaned`; the same object with the same values as last time is not checked again.

    What comes is what is kept: nobody may change it.
    """
    clean = []
    for message in messages:
        entry = known.pop(id(message), None)  # and put back: what was not asked for stands first
        if entry is None or entry.before != message:
            before = with_whole_letters(message)
            entry = Checked(message, before, clean_message(own_copy(before)))
        known[id(message)] = entry
        if entry.clean:
            clean.append(entry.clean)
    surplus = len(known) - max(MOST_CHECKED, len(messages))
    for key in list(itertools.islice(known, max(surplus, 0))):
        del known[key]
    return clean


def messages_of(request: LLMRequest) -> list[dict]:
    """The provider's own copy only where it asked for one: it takes 1.6 ms at 1,000 messages."""
    return vars(request).get("messages", request.lawful)


def own_copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: own_copy(item) for key, item in value.items()}
    return [own_copy(item) for item in value] if isinstance(value, list) else value


# ---- Arguments ----
# Small models write {path: 'a.txt',}; and an endpoint that cuts at its limit may say that all is
# well: a repaired '{"command": "rm -rf bui' would run.


def parse_arguments(written: Any, repair: bool) -> tuple[dict, str]:
    """A call's arguments, and what is wrong: `({}, "its arguments are not whole JSON …")`."""
    try:
        text = written or "{}"
        if not isinstance(text, str):
            text = to_json(text)
        value = load_json(text.strip() or "{}", repair)
        to_json(value)  # raises where a number is NaN or infinite
    except (TypeError, ValueError, RecursionError, ImportError) as problem:
        return {}, f"its arguments are not whole JSON ({problem})"
    if not isinstance(value, dict):
        return {}, f"its arguments must be one JSON object, not {text[:100]!r}"
    return with_whole_letters(value), ""


def load_json(text: str, repair: bool) -> Any:
    try:
        return JSON.decode(text)
    except ValueError:
        if not repair:
            raise
        import json_repair

        log.info("repairing the JSON of a call's arguments: %.200s", text)
        return json_repair.loads(text)


# "a \" b" and 'a'; without its closing mark where the text ends within it
JSON_TEXT = r"""(?s)(["'])(?:\\.|(?!\1)[^\\])*+(?P<end>\1?)"""


def ends_within(text: str) -> bool:
    """Does it end inside a string, an object or a list? Then nobody knows what would have come.

    {path: 'a.txt',}  → False        {"command": "rm -rf bui  → True
    """
    if any(not string["end"] for string in re.finditer(JSON_TEXT, text)):
        return True
    outside = re.sub(JSON_TEXT, "", text)
    opened = outside.count("{") + outside.count("[")
    return opened > outside.count("}") + outside.count("]")


# ---- Which endpoint ----
# One list of rows instead of a class an endpoint. A wrong choice sends a key to a stranger.


@dataclass(frozen=True)
class ProviderSpec:
    """What the rows say of an endpoint is all that the code knows of it."""

    name: str
    keywords: tuple[str, ...] = ()  # of model names
    env_key: str = ""
    default_api_base: str = ""
    detect_by_base_keyword: tuple[str, ...] = ()  # ends of `.host:port`, beside the address's own
    detect_by_key_prefix: str = "\0"  # no key begins with that
    default_model: str = ""
    is_gateway: bool = False  # serves any maker's models, as maker/model
    is_local: bool = False  # needs no key and no proxy
    strip_model_prefix: bool = False  # wants the model without its maker
    supports_prompt_caching: bool = False  # by marks in the request; others do it unasked
    max_tokens_field: str = "max_tokens"
    model_overrides: Mapping[str, dict] = field(default_factory=dict)  # by a part of a model's name

    def has_host(self, place: str) -> bool:
        """Is a place like `.api.openai.com` or `.localhost:11434` this row's?"""
        own = f".{urlsplit(self.default_api_base).netloc}" if self.default_api_base else "\0"
        return place.endswith((own, *self.detect_by_base_keyword))

    def makes(self, model: str) -> bool:
        return any(word in model.lower() for word in self.keywords)


ONE_HEAT = {"temperature": None}  # these models refuse all temperatures but one
PROVIDERS = [  # name, words in names of its models, its key's variable, address; what is special
    ProviderSpec("openai", ("gpt", "o1", "o3", "o4"), "OPENAI_API_KEY", "https://api.openai.com/v1",
                 default_model="gpt-5-mini", max_tokens_field="max_completion_tokens",
                 model_overrides={"gpt-5": ONE_HEAT}),
    ProviderSpec("openrouter", (), "OPENROUTER_API_KEY", "https://openrouter.ai/api/v1",
                 default_model="openrouter/auto", detect_by_key_prefix="sk-or-", is_gateway=True,
                 supports_prompt_caching=True),
    ProviderSpec("anthropic", ("claude",), "ANTHROPIC_API_KEY", "https://api.anthropic.com/v1",
                 detect_by_key_prefix="sk-ant-", supports_prompt_caching=True),
    ProviderSpec("deepseek", ("deepseek",), "DEEPSEEK_API_KEY", "https://api.deepseek.com/v1"),
    ProviderSpec("gemini", ("gemini", "gemma"), "GEMINI_API_KEY",
                 "https://generativelanguage.googleapis.com/v1beta/openai",
                 detect_by_key_prefix="AIza"),
    ProviderSpec("groq", (), "GROQ_API_KEY", "https://api.groq.com/openai/v1",
                 detect_by_key_prefix="gsk_"),
    ProviderSpec("mistral", ("mistral", "codestral"), "MISTRAL_API_KEY",
                 "https://api.mistral.ai/v1"),
    ProviderSpec("moonshot", ("kimi", "moonshot"), "MOONSHOT_API_KEY", "https://api.moonshot.ai/v1",
                 detect_by_base_keyword=(".api.moonshot.cn",),
                 model_overrides={"kimi-k2.": ONE_HEAT}),
    ProviderSpec("zhipu", ("glm",), "ZAI_API_KEY", "https://open.bigmodel.cn/api/paas/v4",
                 detect_by_base_keyword=(".api.z.ai",)),
    ProviderSpec("minimax", ("minimax",), "MINIMAX_API_KEY", "https://api.minimax.io/v1",
                 detect_by_base_keyword=(".minimaxi.com",)),
    ProviderSpec("dashscope", ("qwen",), "DASHSCOPE_API_KEY",
                 "https://dashscope.aliyuncs.com/compatible-mode/v1",
                 detect_by_base_keyword=(".dashscope-intl.aliyuncs.com",)),
    ProviderSpec("siliconflow", (), "SILICONFLOW_API_KEY", "https://api.siliconflow.cn/v1",
                 detect_by_base_keyword=(".api.siliconflow.com",), is_gateway=True),
    ProviderSpec("aihubmix", (), "AIHUBMIX_API_KEY", "https://aihubmix.com/v1",
                 is_gateway=True, strip_model_prefix=True),
    ProviderSpec("volcengine", ("doubao",), "ARK_API_KEY",
                 "https://ark.cn-beijing.volces.com/api/v3"),
    ProviderSpec("xai", ("grok",), "XAI_API_KEY", "https://api.x.ai/v1",
                 detect_by_key_prefix="xai-"),
    ProviderSpec("azure", (), "AZURE_OPENAI_API_KEY", max_tokens_field="max_completion_tokens",
                 detect_by_base_keyword=(".openai.azure.com", ".services.ai.azure.com")),
    ProviderSpec("ollama", (), "", "http://localhost:11434/v1", (":11434",), is_local=True),
    ProviderSpec("lmstudio", (), "", "http://localhost:1234/v1", (":1234",), is_local=True),
    ProviderSpec("vllm", (), "", "http://localhost:8000/v1", is_local=True),
    ProviderSpec("llamacpp", (), "", "http://localhost:8080/v1", is_local=True),
    ProviderSpec("local", (), "", "http://localhost:8000/v1", is_local=True),
    ProviderSpec("custom"),
]  # fmt: skip
ROWS = {row.name: row for row in PROVIDERS}


@dataclass
class Endpoint:
    """Where requests go: a row, the user's key and address for it, and the model."""

    spec: ProviderSpec
    api_key: str = ""
    api_base: str = ""
    model: str = ""
    extra_headers: dict = field(default_factory=dict)
    extra_body: dict = field(default_factory=dict)
    text_tool_calls: str = "auto"  # are calls in a text run? on, off, auto: those of local models


def choose_endpoint(
    settings: dict[str, Endpoint], model: str = "", provider: str = "", base_url: str = ""
) -> Endpoint | None:
    """Row, address and key to use, from the `settings` by row name; None where nothing is set.

    A base URL that was handed in always wins, and a key never goes to another row's host. Raises
    ValueError for a provider that does not exist or has no address.
    """
    if provider and provider not in ROWS:
        names = ", ".join(ROWS)
        raise ValueError(f"There is no provider {provider!r}. There are: {names}, offline.")
    host = row_of_host(base_url) if base_url else None
    spec = ROWS.get(provider) or host or row_by_clues(settings, model)
    if spec is None:
        return None
    own = replace(settings.get(spec.name) or Endpoint(spec), spec=spec)
    address = base_url or own.api_base or spec.default_api_base
    if not address:
        raise ValueError(f"Provider {spec.name} has no address: set its apiBase, or --base-url.")
    key = key_for(settings, own, host, address)
    maker, _, rest = model.partition("/")
    is_whole_name = spec.is_gateway and "/" not in rest  # openrouter/auto
    if maker == spec.name and not is_whole_name:
        model = rest
    if spec.strip_model_prefix:
        model = model.rpartition("/")[2]
    if spec.is_local and not urlsplit(address).path.strip("/"):
        address = address.rstrip("/") + "/v1"
    return replace(own, api_key=key, api_base=address, model=model or spec.default_model)


def row_of_host(base_url: str) -> ProviderSpec:
    place = f".{urlsplit(base_url).netloc.rpartition('@')[2]}"
    # ".localhost:9000", ".127.0.0.1:9000", ".192.168.0.7"
    is_local = re.match(r"\.(localhost|0\.0\.0\.0|\[::1\])(:|$)|\.(127|10|192\.168)\.", place)
    nobodys = ROWS["local"] if is_local else ROWS["custom"]
    return next((row for row in PROVIDERS if row.has_host(place)), nobodys)


def row_by_clues(settings: dict[str, Endpoint], model: str) -> ProviderSpec | None:
    """By key's prefix, maker/model, model's name, address, gateway, any key: in order."""
    keys = {row.name: own_key(settings, row) for row in PROVIDERS}
    keyed = [row for row in PROVIDERS if keys[row.name]]
    rows = [row for row in keyed if keys[row.name].startswith(row.detect_by_key_prefix)]
    makers = [row for row in PROVIDERS if row.name == model.partition("/")[0]]
    rows += [row for row in makers if row.is_local or keys[row.name]]
    rows += [row for row in keyed if row.makes(model)]
    rows += [row for row in PROVIDERS if row.name in settings and settings[row.name].api_base]
    rows += [row for row in keyed if row.is_gateway]
    return next(iter(rows + keyed), None)


def own_key(settings: dict[str, Endpoint], row: ProviderSpec) -> str:
    """The row's key. OPENAI_API_KEY is "the" key: with a row's prefix (sk-or-…) it is its."""
    keys = {name: endpoint.api_key for name, endpoint in settings.items()}
    if keys.get(row.name):
        return keys[row.name]
    general = keys.get("openai", "")
    return general if general.startswith(row.detect_by_key_prefix) else ""


def key_for(
    settings: dict[str, Endpoint], own: Endpoint, host: ProviderSpec | None, address: str
) -> str:
    """The key that may go to an address; `host` is whose it is, where the user named one.

    none named: openrouter.ai by itself   → OpenRouter's own key
    https://openrouter.ai/api/v1          → OpenRouter's own key, whatever provider was named
    http://127.0.0.1:9/v1                 → OpenAI's, as "the" key; a row's own key only where the
                                            row has this address, or none that is public
    """
    if host is None:
        return own_key(settings, own.spec)
    if host.default_api_base and not host.is_local:
        return own_key(settings, host)
    is_the_rows = address == own.api_base or not own.spec.default_api_base or own.spec.is_local
    key = own_key(settings, own.spec) if is_the_rows else ""
    return key or own_key(settings, ROWS["openai"])


# ---- What went wrong ----
# "Connection error." helps nobody: the cause is four objects deep, in other words on each server.

# Anthropic "prompt is too long: 213462 tokens", OpenAI "exceeds the context window", LiteLLM
# "ContextWindowExceededError", LM Studio "n_keep", … : each is in tests/data/provider_errors.json
OVERFLOW = (
    "(?is)prompt (is )?too long|exceeds? the (context window|available context size)|n_keep|"
    "input is too long|token count.*exceeds the|maximum (prompt|context) length is|"
    "context_length_exceeded|request too large|reduce (the length of the|your) message|"
    "(than the|with) context length|context ?window ?exceed|exceeded model token limit|"
    "too large for model with|context size has been exceeded|range of input length|"
    "`?inputs`? (tokens|must have less)"
)
# "You exceeded your current quota", "Insufficient Balance", "余额不足"
UNPAID = "(?i)insufficient|exceeded.{0,20}quota|billing|credit|balance|payment|余额|欠费"
# "The engine is currently overloaded", "Rate limit reached", "该模型当前访问量过大"; 400 of Groq
BUSY = "(?i)overloaded|rate.?limit|too many requests|访问量过大|速率限制|tool_use_failed"
LOADING = "(?i)loading model|currently loading"  # 503 of llama.cpp: "Loading model"
# "Please try again in 6m0s", "Please retry after 20 seconds"
SOON = r"(?i)(?:try again|retry)\w* (?:in|after) (\d+(?:\.\d+)?) ?(ms|milli|m|h|)"
SECONDS = {"ms": 0.001, "milli": 0.001, "m": 60.0, "h": 3600.0, "": 1.0}
# xAI, a 400: "Incorrect API key provided"; Gemini "API key not valid"; LiteLLM "No connected db."
WRONG_KEY = "(?i)incorrect api key|api key not valid|no connected db"
# "is not a valid model ID", DeepSeek "Model Not Exist", LiteLLM "Invalid model name passed in"
NO_MODEL = "(?i)no model|not a valid model|model not exist|invalid model name"


@dataclass(eq=False)
class Failure(Exception):
    """A request that failed: what people are told of it, and what the code goes by."""

    cause: str
    text: str = ""  # all that the endpoint wrote
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    kind: str = ""  # network, closed (before a byte), timeout, cut (in the middle), nonsense
    generation: str = ""  # a tool call that the endpoint could not read
    tries: int = 0  # how often the request was sent again before
    shown: str = ""  # the part of the answer that was: it cannot begin anew

    @property
    def with_status(self) -> str:
        return f"HTTP {self.status}: {self.cause}" if self.status else self.cause

    @property
    def is_unpaid(self) -> bool:
        if (self.status or 0) >= 500:  # "load balancer: insufficient capacity"
            return False
        return self.status == 402 or bool(re.search(UNPAID, self.text))

    @property
    def is_overflow(self) -> bool:
        is_wordless = self.status == 400 and not re.search(r"\w", self.text)  # Cerebras
        return is_wordless or self.status == 413 or bool(re.search(OVERFLOW, self.text))

    @property
    def is_loading(self) -> bool:
        return self.status == 503 and bool(re.search(LOADING, self.text))


def explanation(failure: Failure, endpoint: Endpoint, messages: list[dict]) -> str:
    """Cause, then what to do; `{offer}` stands where the list of models belongs."""
    where, cause, status = endpoint.api_base, failure.cause, failure.status
    if failure.kind == "timeout":
        return f"{where} gave no answer in time. Ask again, or try a smaller model."
    if failure.kind == "network":
        return f"Cannot reach {where} ({cause}). Is the address right, and is the server running?"
    if failure.kind in ("cut", "closed"):
        return f"{where} failed: {cause}. Ask again; where it stays so, look at the server's log."
    if failure.is_overflow:
        fix = "Begin a /new one."
        if is_mostly_one(messages):
            fix = "One message is most of it: send less at once, or name a file for its text."
        return f"{where}: the conversation is too long for {endpoint.model} ({cause}). {fix}"
    is_wrong_key = status == 401 or re.search(WRONG_KEY, failure.text)
    if failure.is_unpaid and not is_wrong_key:
        fix = "Look at your account there, or choose another --provider."
        return f"{where} wants money ({cause}). {fix}"
    if is_wrong_key or status == 403:
        variable = endpoint.spec.env_key or "OPENAI_API_KEY"
        return f"{where} refuses the key ({cause}). Set {variable}."
    names_a_model = status == 404 and "model" in cause.lower()
    if names_a_model or re.search(NO_MODEL, cause):
        return f"{where} has no such model ({cause}). {OFFER}"
    if status in (404, 405) or failure.kind == "nonsense":
        return f"{where} does not answer like a model ({cause}). A base URL mostly ends in /v1."
    return f"{where} failed: {failure.with_status}"


OFFER = "Choose with --model or NANOBOT_MODEL; the endpoint gives: "


def is_mostly_one(messages: list[dict]) -> bool:
    """Is one message more than half of all? A new conversation that begins with it is as long."""
    sizes = [len(to_json(message)) for message in messages if message["role"] != "system"]
    return max(sizes, default=0) * 2 > len(to_json(messages))


def as_failure(problem: Exception) -> Failure:
    """What the SDK raised, or the connection below it. Anything else is ours: raised as it is."""
    if isinstance(problem, Failure):
        return problem
    library = type(problem).__module__.partition(".")[0]
    is_of_the_world = isinstance(problem, OSError | UnicodeError | ImportError | RecursionError)
    if not is_of_the_world and library not in ("openai", "httpx", "httpx2"):
        raise problem
    response = getattr(problem, "response", None)
    if response is not None:
        failure = refusal(getattr(problem, "body", None), problem)
        return replace(failure, status=response.status_code, headers=response.headers)
    name, below = type(problem).__name__, type(problem.__cause__).__name__
    if below == "ConnectTimeout":
        return Failure("no connection in time", kind="network")
    if "Timeout" in name:
        return Failure("no answer in time", kind="timeout")
    if name == "APIConnectionError" and below in ("RemoteProtocolError", "ReadError", "WriteError"):
        return Failure("the connection was closed before an answer came", kind="closed")
    if library.startswith("httpx"):  # while the answer was read
        return Failure("the connection was closed in the middle of the answer", kind="cut")
    kind = "network" if name == "APIConnectionError" else ""
    return replace(refusal(None, problem), kind=kind)


def refusal(body: Any, problem: Exception | None = None) -> Failure:
    """An error in the endpoint's own words, wherever they stand; or the cause of no connection.

    [{"error": {"code": 400, "message": "Unknown name"}}]  → Failure("Unknown name", …)
    """
    fields = body if isinstance(body, dict) else {}
    inside = body or getattr(problem, "__cause__", None) or str(problem)
    while isinstance(inside, list | dict) and inside:
        inside = inner_words(inside)
    line = " ".join(str(inside)[:4_000].split())[:500]
    status = fields.get("code") if isinstance(fields.get("code"), int) else None
    text = str(body or "")[:4_000]  # the expressions that look at it are for a few lines
    return Failure(line, text, status, generation=str(fields.get("failed_generation") or ""))


def inner_words(value: list | dict) -> Any:
    if isinstance(value, list):
        return value[0]
    metadata = value.get("metadata")
    if isinstance(metadata, dict) and metadata.get("raw"):  # below "Provider returned error"
        return metadata["raw"]
    return value.get("message") or value.get("error") or json.dumps(value)


# ---- A busy endpoint is asked again ----
# Without this a turn of twenty steps dies in step nineteen of one "503: overloaded".

MOST_TRIES = 3
LOADING_TRIES, LOADING_PAUSE = 15, 4.0  # a minute in all


def retry_after(failure: Failure) -> float | None:
    """Seconds to wait before the same request goes out again; None where that is of no use.

    429 "Rate limit reached, try again in 20s" → 20.0;  503 → 1.0, then 2.0, then 4.0;  401 → None;
    a kept connection that the server had closed → 0.0, then as for any other
    """
    if failure.shown:  # the user has read a part: a second beginning would stand behind it
        return None
    if failure.is_loading:
        return LOADING_PAUSE if failure.tries < LOADING_TRIES else None
    if failure.tries >= MOST_TRIES or not is_passing(failure):
        return None
    if failure.kind == "closed" and failure.tries == 0:
        return 0.0
    return min(seconds_asked_for(failure) or 2.0**failure.tries, 60.0)


def is_passing(failure: Failure) -> bool:
    """Will it be over soon? A busy server: yes. Too long a prompt, a wrong key, no money: no."""
    if failure.is_overflow:
        return False
    if failure.is_unpaid:  # "quota exceeded, try again in 20s" is a rate limit in other words
        return bool(re.search(SOON, failure.text))
    if failure.kind == "timeout":  # five minutes have gone by
        return failure.tries == 0
    if failure.kind in ("network", "closed", "cut"):
        return True
    status = failure.status or 0
    return status in (408, 409, 429) or status >= 500 or bool(re.search(BUSY, failure.text))


async def wait(request: LLMRequest, failure: Failure, seconds: float, pace: float) -> None:
    if line := wait_line(failure, seconds):
        await request.tell(line)
    jitter = os.urandom(1)[0] / 1280  # or all who wait would come back at once
    await asyncio.sleep(seconds * pace * (1 + jitter))


def wait_line(failure: Failure, seconds: float) -> str:
    """What the user is told: nothing of a second try at once, of a loading model only once."""
    if failure.is_loading:
        minute = f"waiting up to {LOADING_TRIES * LOADING_PAUSE:.0f} s for it"
        return "" if failure.tries else f"{failure.with_status}; {minute}"
    return f"{failure.with_status}; asking again in {seconds:.0f} s" if seconds else ""


def seconds_asked_for(failure: Failure) -> float:
    """In a header, a number or a date (RFC 9110, 10.2.3), or in the text; 0 where nothing is."""
    headers, soon = failure.headers, re.search(SOON, failure.text)
    seconds = float(soon[1]) * SECONDS[soon[2].lower()] if soon else 0.0
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        with contextlib.suppress(KeyError, ValueError):
            return max(0.0, float(headers[name]) * unit) or seconds  # so nan, too, becomes 0
    from email.utils import parsedate_to_datetime

    with contextlib.suppress(KeyError, ValueError):
        date = headers.get("date")  # the server's clock may differ from ours
        now = parsedate_to_datetime(date).timestamp() if date else time.time()
        return max(0.0, parsedate_to_datetime(headers["retry-after"]).timestamp() - now)
    return seconds


# ---- What endpoints refuse, and what helps ----
# 400 "'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead." Nobody
# can know that of each model; the complaint says what to change.


class Remedy(NamedTuple):
    """What a complaint means, and the columns of what to do: any of `put_in` … `in_body`.

    What is in a body is shared with other requests: it is replaced, never changed.
    """

    complaint: str  # a regular expression
    notice: str  # to the user
    put_in: Mapping[str, Any] = {}  # parameters; None leaves one out
    leave_out_keys: tuple[str, ...] = ()  # of messages and tools, however deep
    in_message: Callable[[dict], dict] | None = None  # for each message
    in_body: Callable[[dict, str], dict] | None = None  # is given the complaint, too
    is_remembered: bool = True  # it holds for all requests to the model, not for this one only


Healed = tuple[Remedy, str]  # with the complaint


def heal(body: dict, remedy: Remedy, complaint: str) -> dict:
    """A new body, as the remedy says."""
    body = {**body, **remedy.put_in}
    body = {name: value for name, value in body.items() if value is not None}
    if remedy.leave_out_keys:
        body = without_keys_in(body, remedy.leave_out_keys)
    if remedy.in_message:
        body["messages"] = [remedy.in_message(message) for message in body["messages"]]
    return remedy.in_body(body, complaint) if remedy.in_body else body


def find_remedy(failure: Failure, body: dict, healed: list[Healed]) -> Remedy | None:
    """The first row that fits the complaint and changes something; once each, nine in all."""
    is_refusal = (failure.status or 400) in (400, 404, 405, 413, 415, 422, 500) and not failure.kind
    if failure.shown or not is_refusal or len(healed) >= 9:
        return None
    for remedy in HEALING:
        fits = re.search(remedy.complaint, failure.text, re.IGNORECASE | re.DOTALL)
        is_new = fits and (remedy, failure.text) not in healed
        if is_new and heal(body, remedy, failure.text) != body:
            return remedy
    return None


def with_other_limit(body: dict, complaint: str) -> dict:
    names = {"max_tokens": "max_completion_tokens", "max_completion_tokens": "max_tokens"}
    return {names.get(name, name): value for name, value in body.items()}


def without_the_named(body: dict, complaint: str) -> dict:
    """ "Unknown parameter: 'store'." → without store; reasoningEffort means reasoning_effort."""
    kept = ("model", "messages", "tools", "stream")
    names = {name: re.escape(name).replace("_", "_?") for name in body if name not in kept}
    named = [name for name in names if re.search(rf"(?i)\b{names[name]}\b", complaint)]
    return {name: value for name, value in body.items() if name not in named}


def as_text(message: dict) -> dict:
    """Content as one text; an image becomes a line."""
    if not isinstance(message["content"], list):
        return message
    blank = "[an image: this model cannot see it]"
    texts = [block.get("text") or blank for block in message["content"]]
    return {**message, "content": "\n\n".join(texts)}


def with_some_reasoning(message: dict) -> dict:
    return {"reasoning_content": "", **message} if message["role"] == "assistant" else message


def without_name(message: dict) -> dict:
    return {key: value for key, value in message.items() if key != "name"}


def with_signature(message: dict) -> dict:
    """Gemini wants its signature on a step's first call; this one stands for calls of others."""
    if "tool_calls" not in message:
        return message
    first, *rest = message["tool_calls"]
    foreign = {"google": {"thought_signature": "skip_thought_signature_validator"}}
    return {**message, "tool_calls": [{"extra_content": foreign, **first}, *rest]}


def with_short_ids(message: dict) -> dict:
    """call_8bXe0aTzQmW2 → 588788278, in the call and in its result."""
    if message["role"] == "tool":
        return {**message, "tool_call_id": new_id(message["tool_call_id"])}
    if "tool_calls" not in message:
        return message
    calls = [{**call, "id": new_id(call["id"])} for call in message["tool_calls"]]
    return {**message, "tool_calls": calls}


def with_system_as_user(body: dict, complaint: str) -> dict:
    first, *rest = body["messages"]
    return {**body, "messages": legal([{**first, "role": "user"}, *rest])}


def without_keys_in(value: Any, unwanted: tuple[str, ...], are_names: bool = False) -> Any:
    """Without the unwanted keys, however deep; in "properties" keys are names, and stay."""
    if isinstance(value, list):
        return [without_keys_in(item, unwanted) for item in value]
    if not isinstance(value, dict):
        return value
    kept = [key for key in value if are_names or key not in unwanted]
    return {key: without_keys_in(value[key], unwanted, key == "properties") for key in kept}


TOOLS_AS_TEXT = """You have tools. To use some, answer with nothing but a line like this for each:
<tool_call>{"name": "the tool's name", "arguments": {"a parameter": "its value"}}</tool_call>
What a tool returned comes back as <tool_result>. These are the tools:
"""


def tools_as_text(body: dict, complaint: str) -> dict:
    """The tools stand in the system message, calls and results in the texts."""
    messages = [calls_as_text(message) for message in body["messages"]]
    if "tools" in body:
        lines = "\n".join(to_json(tool["function"]) for tool in body["tools"])
        messages.append({"role": "system", "content": TOOLS_AS_TEXT + lines})
    body = {name: value for name, value in body.items() if name not in ("tools", "tool_choice")}
    return {**body, "messages": legal(messages)}


def calls_as_text(message: dict) -> dict:
    """A call becomes `<tool_call>{"name": "now", "arguments": {}}</tool_call>`."""
    text = as_text(message)["content"]
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_result>\n{text}\n</tool_result>"}
    if "tool_calls" not in message:
        return message
    lines = [text] if text else []
    for call in message["tool_calls"]:
        name, arguments = to_json(call["function"]["name"]), call["function"]["arguments"]
        lines.append(f'<tool_call>{{"name": {name}, "arguments": {arguments}}}</tool_call>')
    return {"role": "assistant", "content": "\n".join(lines)}


SCHEMA_WORDS = (
    "additionalProperties", "$schema", "$id", "const", "default", "propertyNames", "not", "oneOf",
    "anyOf", "allOf", "patternProperties", "exclusiveMinimum", "exclusiveMaximum",
)  # fmt: skip
NO_LIMIT = {"max_tokens": None, "max_completion_tokens": None}
NO_TOOLS = "tool calls go as text, as this model or server knows no others"
HEALING = [
    # "However, you requested 8500 tokens (308 in the messages, 8192 in the completion)"
    Remedy("maximum context length.{1,200}(in the messages|input tokens)|"
           "input length and .max_tokens. exceed",
           "this answer may be as long as there is room", put_in=NO_LIMIT, is_remembered=False),
    # "max_tokens is too large: 32000. This model supports at most 16384 completion tokens"
    Remedy("max_(completion_)?tokens.{1,99}(too large|maximum|at most|less than|range|exceed)|"
           "range of max_tokens", "it limits its answers itself", put_in=NO_LIMIT),
    # "'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
    Remedy("max_completion_tokens", "max_tokens has another name there", in_body=with_other_limit),
    # DashScope: "This model only support stream mode, please enable the stream parameter", and
    # "parameter.enable_thinking must be set to false for non-streaming calls"
    Remedy("only support stream|streaming is (strongly )?(required|recommended)|non-streaming",
           "it answers in streams only", put_in={"stream": True}),
    # "'stream' does not support true with this model."
    Remedy("stream\\b.{1,30}not support", "it does not stream",
           put_in={"stream": None, "stream_options": None}),
    # "To use function tools, use /v1/responses or set reasoning_effort to 'none'."
    Remedy("to 'none'", "with tools it does not reason", put_in={"reasoning_effort": "none"}),
    # vLLM: "auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set
    Remedy("requires --enable-auto-tool-choice",
           f"{NO_TOOLS}; better start it with --enable-auto-tool-choice --tool-call-parser",
           in_body=tools_as_text),
    # Ollama: "gemma3:4b does not support tools"; a template: "Conversation roles must alternate"
    Remedy("support (tool|function)|(tool|function) call\\w* (is )?not support|"
           "roles must alternate", NO_TOOLS, in_body=tools_as_text),
    # DeepSeek: "The reasoning_content in the thinking mode must be passed back to the API."
    Remedy("reasoning_content.{0,50}(passed back|missing)|missing reasoning_content",
           "older answers are sent with empty thoughts", in_message=with_some_reasoning),
    # Groq: "'messages.1' : … property 'reasoning_content' is unsupported"; llama.cpp: "Cannot pass
    # both content and thinking in an assistant message with tool calls!"
    Remedy("messages.{0,80}reasoning|both content and thinking", "older thoughts are left out",
           leave_out_keys=REASONING),
    # Groq: "'messages.3' : for 'role:tool' … property 'name' is unsupported"
    Remedy("property 'name'", "names of messages are left out", in_message=without_name),
    # OpenRouter: "messages.0.content.0.text.cache_control: Extra inputs are not permitted"
    Remedy("cache_control", "the prompt is not marked for its cache",
           leave_out_keys=("cache_control",)),
    # llama.cpp: "Only user, assistant and tool roles are supported, got system."
    Remedy("(system|developer) (role|instruction|message).{0,20}not (supported|enabled)|got system|"
           "not support 'system'", "it takes the system prompt from the user only",
           in_body=with_system_as_user),
    # Mistral: "Tool call id was call_8bXe but must be a-z, A-Z, 0-9, with a length of 9."
    Remedy("a-z, A-Z, 0-9, with a length of 9", "ids of calls are shortened",
           in_message=with_short_ids),
    # Gemini: "Function call is missing a thought_signature in functionCall parts."
    Remedy("thought_signature", "calls of other models get a signature", in_message=with_signature),
    # Gemini: "Unknown name \"additionalProperties\" at 'tools[0].function_declarations[0]…'"
    Remedy("unknown name.{0,200}(schema|parameters|function)|top level",
           "tools are described in fewer words", leave_out_keys=SCHEMA_WORDS),
    # Anthropic: "image exceeds 5 MB maximum: 6093312 bytes > 5242880 bytes"
    Remedy("image.{0,40}(exceed|too large|too many|must be)|(process|decode|download) .{0,9}image|"
           "(invalid|unsupported|corrupt\\w*) image( data| file| format| type|\\.)",
           "images are left out of this request: one of them is refused",
           in_message=as_text, is_remembered=False),
    # DeepSeek: "unknown variant `image_url`, expected `text`"
    Remedy("image|vision|multimodal|only .{0,9}text|content.type",
           "images are left out: this model takes text only", in_message=as_text),
    # Groq: "'messages.0.content' : value must be a string"
    Remedy("content.{0,99}string|expected a string|untagged enum",
           "contents go as plain text", in_message=as_text),
    # "'temperature' does not support 0.16 with this model."; xAI: "does not support parameter
    # reasoningEffort"; DeepSeek: "Thinking mode does not support this tool_choice"
    Remedy("temperature|top_[pk]\\b|tool_choice|thinking|effort|not support|unsupported|unknown|"
           "unrecognized|unexpected|extra|forbidden|cannot",
           "a parameter that it does not take is left out", in_body=without_the_named),
]  # fmt: skip


# ---- What goes over the wire ----
# The fewest parameters, as any other one is refused somewhere; and by the SDK's fastest way.


def request_body(endpoint: Endpoint, request: LLMRequest, healed: list[Healed]) -> dict:
    """{"messages": […], "tools": […], "max_tokens": 8192, …}, as this model takes it."""
    spec = endpoint.spec
    body = {"messages": messages_of(request), "tools": request.tools or None, **request.options}
    if not request.tools:
        body["tool_choice"] = None
    if "max_tokens" in body:
        body[spec.max_tokens_field] = body.pop("max_tokens")
    if request.on_delta:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    for part, values in spec.model_overrides.items():
        if part in request.model:
            body |= values
    body |= endpoint.extra_body
    body = {name: value for name, value in body.items() if value is not None}
    if spec.supports_prompt_caching:
        body = cache_marks(body)
    for remedy, complaint in healed:
        body = heal(body, remedy, complaint)
    return body


def cache_marks(body: dict) -> dict:
    """Marks up to where the prompt stays the same: its system message and its tools."""
    mark = {"cache_control": {"type": "ephemeral"}}
    first, *rest = body["messages"]
    if first["role"] == "system":
        first = {**first, "content": [{"type": "text", "text": as_text(first)["content"], **mark}]}
    marked = {**body, "messages": [first, *rest]}
    if "tools" in body:
        marked["tools"] = [*body["tools"][:-1], {**body["tools"][-1], **mark}]
    return marked


async def pieces_of(
    provider: OpenAIProvider, request: LLMRequest, body: dict, reader: AnswerReader
) -> AsyncIterator[str]:
    """What there is to show, as it comes. For the first piece there is the request's time limit,
    between two the idle limit; while the caller shows one (at the `yield`), no clock runs."""
    now = asyncio.get_running_loop().time
    try:
        if not request.model:
            raise Failure("no model is named")
        async with (
            asyncio.timeout(provider.request_timeout) as clock,
            post(provider._client_here(), {"model": request.model, **body}) as response,
        ):
            async for data in answer_data(response):
                reader.feed(data)
                clock.reschedule(None)
                yield reader.to_show()
                clock.reschedule(now() + provider.idle_timeout)
        reader.close()
    except Exception as problem:  # cancellation is no Exception and goes on
        raise as_failure(problem) from problem
    yield reader.to_show()


def safe_text(endpoint: Endpoint, text: str) -> str:
    """Some servers repeat the key in what they say of it."""
    key = endpoint.api_key
    return text.replace(key, "[key]") if len(key) > 7 else text  # "ollama" is no secret


async def keep_what_was_learnt(
    provider: OpenAIProvider, request: LLMRequest, response: LLMResponse, healed: list[Healed]
) -> None:
    provider.learnt[request.model] = [entry for entry in healed if entry[0].is_remembered]
    warning = "" if provider.is_warned else window_warning(provider.endpoint, request, response)
    if warning:
        provider.is_warned = True
        await request.tell(warning)


async def models_of(client: Any, seconds: float) -> list[str]:
    response = await client.models.with_raw_response.list(timeout=min(seconds, 10.0))
    rows = parse_answer(response.content).get("data") or []
    return [str(row.get("id")).removeprefix("models/") for row in rows]  # Gemini has the prefix


async def problem_of(provider: OpenAIProvider) -> str | None:
    try:
        offered = await provider.list_models()
    except Exception as problem:  # what goes wrong is the answer here
        failure = as_failure(problem)
        safe = replace(failure, cause=safe_text(provider.endpoint, failure.cause))
        return await explain(provider, safe, [])
    is_known = not offered or provider.model in offered
    return None if is_known else f"no such model. {OFFER}{', '.join(offered[:20])}"


async def explain(provider: OpenAIProvider, failure: Failure, messages: list[dict]) -> str:
    text = explanation(failure, provider.endpoint, messages)
    if not text.endswith(OFFER):
        return text
    try:
        return text + (", ".join((await provider.list_models())[:20]) or "no models")
    except Exception as problem:  # an error message in the making: nothing may break it
        return f"{text}an error instead of a list ({type(problem).__name__})"


def make_client(endpoint: Endpoint, request_timeout: float, connect_timeout: float) -> Any:
    """Load the SDK (0.3 s, 890 modules; less with the garbage collector off), make its client."""
    gc.disable()
    try:
        import openai

        is_secure = not endpoint.api_base.startswith("http://")  # loading certificates takes 30 ms
        http = openai.DefaultAsyncHttpxClient(  # loads more
            verify=is_secure, trust_env=not endpoint.spec.is_local, follow_redirects=False
        )
        gc.freeze()  # an import's objects live for ever: the collector need never look at them
    finally:
        gc.enable()
    timeout = openai.Timeout(request_timeout, connect=min(connect_timeout, request_timeout))
    client = openai.AsyncOpenAI(
        api_key=endpoint.api_key or "none", base_url=endpoint.api_base, max_retries=0,
        timeout=timeout, default_headers=endpoint.extra_headers, http_client=http,
    )  # fmt: skip
    if endpoint.spec.name != "openai":  # else the SDK tells what the environment has to any host
        client.organization = client.project = None
    return client


@contextlib.asynccontextmanager
async def post(client: Any, body: dict) -> AsyncIterator[Any]:
    """The response, unread. `client.chat.completions.create` would type each message of the body
    anew, 122 ms at 1,000 messages, and load more (15 ms); its chunks cost 77 µs each, lines 10."""
    options = {"headers": {"X-Stainless-Raw-Response": "stream"}, "security": {"bearer_auth": True}}
    response = await client.post("/chat/completions", cast_to=object, body=body, options=options)
    try:
        yield response
    finally:
        await response.close()


async def answer_data(response: Any) -> AsyncIterator[bytes | dict]:
    """The parts of a stream; from a server that does not stream, the whole answer."""
    if "event-stream" in response.headers.get("content-type", ""):
        async for data in response.iter_bytes():
            yield data
    else:
        yield parse_answer(await response.read())


def parse_answer(data: bytes) -> dict:
    """A JSON object; raises Failure that shows what came instead."""
    with contextlib.suppress(ValueError):
        answer = json.loads(data)
        if isinstance(answer, dict):
            return answer
    without_tags = re.sub(rb"<[^>]*>", b" ", data[:2_000])  # <title>Sign in</title>
    start = " ".join(without_tags.decode("utf-8", errors="replace").split())
    is_half = not start or data.lstrip().startswith(b"{")
    kind = "cut" if is_half else "nonsense"
    raise Failure(f"not JSON but: {start[:120] or 'nothing'}", kind=kind)


def window_warning(endpoint: Endpoint, request: LLMRequest, answer: LLMResponse) -> str:
    """Ollama cuts what is over its window, 4,096 tokens where nobody chose one, without a word."""
    seen = answer.usage["prompt_tokens"]
    if not endpoint.spec.is_local or not 1_000 < seen < 5_000:
        return ""
    sent = estimate_usage(request, answer)["prompt_tokens"]
    fix = "Widen its window, for Ollama: OLLAMA_CONTEXT_LENGTH=64000 ollama serve"
    return f"The server saw {seen:,} of about {sent:,} tokens. {fix}" if sent > 2 * seen else ""


# ---- An answer is put together ----
# A stream brings half letters, calls in eleven orders, and errors after a "200 OK".

MAX_ANSWER_BYTES = 32_000_000  # no honest answer is so large
MAX_CALLS = 128
REASONS = {  # in OpenAI's words; any other (`eos`, `tool_use`, `end_turn`) is an end like `stop`
    "none": None, "tool_calls": "tool_calls", "function_call": "tool_calls",
    "content_filter": "content_filter", "refusal": "refusal",
    "length": "length", "max_tokens": "length", "model_length": "length",  # Anthropic, Mistral
    "error": "error", "abort": "error", "insufficient_system_resource": "error",  # vLLM, DeepSeek
}  # fmt: skip


@dataclass
class CallParts:
    """A call as it grows."""

    index: int | None
    id: str | None
    name: str = ""
    arguments: str = ""
    extra: dict = field(default_factory=dict)


class AnswerReader:
    """Puts an answer together from the chunks of a stream; an answer in one piece is one chunk.

    `tools` are those that a model may also call in its text: `{"read_file": {…its parameters…}}`.
    """

    def __init__(self, tools: dict[str, dict] | None = None) -> None:
        self.tools = tools or {}
        self.content, self.shown = "", 0  # characters of the content
        self.calls: list[CallParts] = []
        self.text_calls: list[ToolCallRequest] = []
        self.extra: dict = {}
        self.usage: dict = {}
        self.rest, self.event = b"", b""  # of a line, of an event that is not whole yet
        self.received = 0  # bytes
        self.ended = False  # the server said that this is all
        self.closed = False  # it came to an end, said or not
        self.finish_reason: str | None = None
        self.think = ThinkFilter()

    def feed(self, data: bytes | dict) -> None:
        """A whole answer, or a part of a stream of Server-Sent Events."""
        if isinstance(data, bytes):
            self.feed_bytes(data)
            return
        try:
            self._feed_chunk(data)
        except (AttributeError, TypeError, KeyError) as problem:
            cause = "its answer has a strange form"
            raise Failure(cause, str(problem), kind="nonsense") from problem

    def feed_bytes(self, data: bytes) -> None:
        """Lines end in LF, CR LF or CR."""
        self.received += len(data)
        if self.received > MAX_ANSWER_BYTES:
            raise Failure(f"its answer is over {MAX_ANSWER_BYTES:,} bytes", kind="nonsense")
        lines = (self.rest + data).splitlines(keepends=True)
        self.rest = b""
        if lines and not lines[-1].endswith(b"\n"):  # a CR, too, may be the half of a line's end
            self.rest = lines.pop()
        for line in lines:
            self._feed_line(line.strip())

    def _feed_line(self, line: bytes) -> None:
        """`data: {…}`, mostly. An event may have several such lines: they are one JSON then."""
        name, _, value = line.removeprefix(b"\xef\xbb\xbf").partition(b":")
        if not line and self.event:  # the event ends, and is none
            parse_answer(self.event)
        if name != b"data" or self.ended:  # others: comments, event names, signs of life
            return
        self.ended = value.strip() == b"[DONE]"
        if not self.ended:
            self.event += value.strip()
        if self.event.endswith(b"}"):
            try:
                chunk = json.loads(self.event)
            except ValueError:  # more of it is to come
                return
            self.event = b""
            self.feed(chunk)

    def _feed_chunk(self, chunk: dict) -> None:
        choices = chunk.get("choices") or []
        for part in (chunk, *choices):
            if part.get("error"):
                raise refusal(part["error"])
            self.usage = part.get("usage") or self.usage
        for choice in choices:
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            if "delta" in choice:
                self._add(choice["delta"] or {})
            else:  # the whole message
                self.ended = True
                message = choice.get("message") or {}
                calls = enumerate(message.get("tool_calls") or [])
                numbered = [{**call, "index": number} for number, call in calls]
                self._add({**message, "tool_calls": numbered})

    def _add(self, part: dict) -> None:
        for call in part.get("tool_calls") or []:
            self._add_call(call)
        for name in REASONING:
            if part.get(name):
                before = self.extra.get(name)
                self.extra[name] = before + part[name] if before else part[name]
        text = part.get("content") or part.get("refusal") or ""
        if not isinstance(text, str):
            text = "".join([block.get("text") or "" for block in text])
        self._add_text(self.think.feed(text))

    def _add_text(self, text: str) -> None:
        self.content += text if self.content else text.lstrip("\n")  # left over behind thoughts

    def _add_call(self, piece: dict) -> None:
        """A piece begins a call or goes on with one. How endpoints send read_file({…}) and now({}):

        by index     0 read_file {"pa    1 now {}            0 th": "a"}
        by id        a read_file {"pa        th": "a"}       b now {}
        all are 0    0 a read_file {"path": "a"}             0 b now {}
        """
        function, index = piece.get("function") or {}, piece.get("index")
        name, arguments = function.get("name") or "", function.get("arguments") or ""
        fitting = [call for call in self.calls if index in (None, call.index)]
        call = fitting[-1] if fitting else None
        if call is None or begins_another(piece, call):
            if len(self.calls) >= MAX_CALLS:
                raise Failure(f"its answer has over {MAX_CALLS} tool calls", kind="nonsense")
            call = CallParts(index, piece.get("id"))
            self.calls.append(call)
        call.id = call.id or piece.get("id")
        call.name += name if name != call.name else ""  # some repeat it in every piece
        call.arguments += arguments if isinstance(arguments, str) else to_json(arguments)
        known = ("index", "id", "type", "function")
        call.extra |= {key: value for key, value in piece.items() if key not in known}

    def close(self) -> None:
        self.feed_bytes(b"\n\n")
        self._add_text(self.think.close())
        self.closed = True
        if self.tools and not self.calls:
            self.content, self.text_calls = read_text_calls(self.content, self.tools)

    def to_show(self) -> str:
        """The text that was not shown yet; of what may be a call none until it is clear."""
        end = len(self.content)
        if self.tools and not self.closed:
            is_bare = self.content.lstrip().startswith(("[", "{"))
            block = BLOCK.search(self.content, self.shown)
            end = block.start() if block else end
            end = self.shown if is_bare else end
        text = self.content[self.shown : end]
        self.shown += len(text)
        return text

    def response(self, request: LLMRequest) -> LLMResponse:
        """The whole answer; raises Failure where it broke off."""
        reason = REASONS.get(str(self.finish_reason).lower(), "stop")
        calls = self._calls(reason) or self.text_calls
        # one that was cut is continued: the space at the seam belongs to it
        text = self.content if reason == "length" else self.content.rstrip("\n")
        text = with_whole_letters(text) if text.strip() else None
        is_cut = any(call.error for call in calls) if calls else not self.ended
        if reason is None and is_cut:
            reason = "error"
        if reason == "error":
            something = text or calls
            cause = "the answer broke off" if something else "it sent no answer"
            raise Failure(cause, kind="cut")
        thoughts = self.extra.get("reasoning_content") or self.extra.get("reasoning")
        answer = LLMResponse(text, calls, reason, {}, thoughts, extra=self.extra)
        answer.usage = read_usage(self.usage) or estimate_usage(request, answer)
        return answer

    def _calls(self, reason: str | None) -> list[ToolCallRequest]:
        calls: list[ToolCallRequest] = []
        used_ids: set[str] = set()
        for call in self.calls:
            is_finished = reason in ("stop", "tool_calls")
            repair = is_finished and not ends_within(call.arguments)
            arguments, error = parse_arguments(call.arguments, repair)
            id_ = unused_id(call.id or new_id(), used_ids)
            calls.append(ToolCallRequest(id_, call.name, arguments, error, extra=call.extra))
        return calls


def begins_another(piece: dict, call: CallParts) -> bool:
    """A piece of the same index, or of none: does it begin another call than the last one?"""
    function = piece.get("function") or {}
    if not function.get("name"):
        return False
    if piece.get("id") and call.id:
        return piece["id"] != call.id
    if not function.get("arguments") or not call.arguments:
        return False
    _, error = parse_arguments(call.arguments, repair=False)
    return not error  # the last one is whole


NO_TOKENS = {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0}


def read_usage(usage: dict) -> dict:
    """The endpoint's own count; cached tokens have three names. {} where it did not count.

    {"prompt_tokens": 9, "completion_tokens": 2, "prompt_cache_hit_tokens": 3}
    → {"prompt_tokens": 9, "completion_tokens": 2, "cached_tokens": 3, "estimated": False}
    """
    with contextlib.suppress(AttributeError, TypeError, ValueError, OverflowError):  # no number
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        cached = cached or usage.get("cached_tokens") or usage.get("prompt_cache_hit_tokens")
        counts = {name: int(usage.get(name) or 0) for name in NO_TOKENS}
        counts |= {"cached_tokens": int(cached or 0), "estimated": False}
        return counts if counts["prompt_tokens"] else {}
    return {}


def estimate_usage(request: LLMRequest, answer: LLMResponse) -> dict:
    """A token of English is about four bytes."""
    sent = len(to_json([messages_of(request), request.tools])) // 4
    received = len(to_json(answer.to_message())) // 4
    return NO_TOKENS | {"prompt_tokens": sent, "completion_tokens": received, "estimated": True}


# ---- Calls that a weak model wrote as text ----
# Qwen2.5-Coder-1.5B behind llama.cpp writes "I will use the `read_file` function." and then its
# call as JSON in a fence, each third time. Only of local models, for known tools, at the end.

# <tool_call>, </minimax:tool_call>, ```json
WRAPPERS = r"(?m)</?(?:\w+:)?(?:tool_calls?|function_calls?)>|^```\w*$"
# <function=now>{}</function>, <invoke name="now"></invoke>
TAGGED = r"(?s)<(?:function=|invoke name=\")([\w-]+)\"?>(.*?)</(?:function|invoke)>"
# <parameter=path>a.txt</parameter>
PARAMETER = r"(?s)<parameter(?:=| name=\")(\w+)\"?>\n?(.*?)\n?</parameter>"
# <tool_call>, <function=now>, ```json and a brace; what may yet become it: "<tool_c" or "``"
BLOCK = re.compile(r"(?m)<(?:\w+:)?(?:tool_call|function|invoke)|^```\w*\s*(?:[{\[<]|\Z)|"
                   r"^`{1,2}\Z|<[\w:]{0,24}\Z")  # fmt: skip


def tools_in_text(endpoint: Endpoint, request: LLMRequest, body: dict) -> dict[str, dict]:
    """The tools that may be called in the answer's text."""
    is_weak = endpoint.spec.is_local or "tools" not in body
    switch = {"auto": is_weak, "on": True}.get(endpoint.text_tool_calls)
    return parameters_by_name(request.tools) if switch else {}


def parameters_by_name(tools: list[dict]) -> dict[str, dict]:
    return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}


def read_text_calls(text: str, tools: dict[str, dict]) -> tuple[str, list[ToolCallRequest]]:
    """The prose, and the calls behind it; or the whole text, and none.

    'I look.\\n```json\\n{"name": "ls", "arguments": {}}\\n```'  → ("I look.", [ls({})])
    """
    blocks = [block.start() for block in itertools.islice(BLOCK.finditer(text), 20)]
    for start in (0, *blocks):
        calls = calls_in(text[start:])
        if calls and all(could_run(call, tools) for call in calls):
            return text[:start].rstrip(), calls
    return text, []


def calls_in(text: str) -> list[ToolCallRequest]:
    """The calls that a text is made of; none where there is anything else in it."""
    pairs = re.findall(TAGGED, text)
    if pairs and not re.sub(WRAPPERS, "", re.sub(TAGGED, "", text)).strip():
        written = [(name, dict(re.findall(PARAMETER, body)) or body) for name, body in pairs]
    else:
        bare = re.sub(WRAPPERS, " ", text).strip()
        written = calls_in_json(bare) or calls_in_python(bare)
    calls: list[ToolCallRequest] = []
    for name, arguments in written:
        is_cut = isinstance(arguments, str) and ends_within(arguments)
        arguments, error = parse_arguments(arguments, repair=not is_cut)
        calls.append(ToolCallRequest(new_id(), name, arguments, error))
    return calls


def calls_in_json(text: str) -> list[tuple[str, Any]]:
    """`{"name": "now", "arguments": {}}`, one or several, also as a list."""
    calls = []
    rest = text.removeprefix("[").removesuffix("]")
    try:
        while rest:
            call, end = JSON.raw_decode(rest)
            arguments = call.get("arguments", call.get("parameters"))
            if not isinstance(arguments, dict | str):
                return []
            calls.append((str(call["name"]), arguments))
            rest = rest[end:].lstrip(" ,;\n")
    except (ValueError, RecursionError, AttributeError, KeyError):
        return []  # it is something else
    return calls


def calls_in_python(text: str) -> list[tuple[str, Any]]:
    """`[read_file(path="a.txt"), now()]`, as Llama models write it: each argument has a name."""
    if not (text.startswith("[") and text.endswith(")]")):
        return []
    try:
        with warnings.catch_warnings(action="ignore"):  # of a "\\d" in a text
            written = ast.parse(text, mode="eval").body.elts
        calls = []
        for call in written:
            arguments = {part.arg: ast.literal_eval(part.value) for part in call.keywords}
            if call.args or None in arguments:  # None: `**more`
                return []
            calls.append((call.func.id, arguments))
    except (SyntaxError, ValueError, TypeError, AttributeError, RecursionError, MemoryError):
        return []  # it is something else
    return calls


def could_run(call: ToolCallRequest, tools: dict[str, dict]) -> bool:
    """Is there such a tool, with no name missing, none too many, and no object in a text's place?
    Else the text only looks like a call."""
    if call.name not in tools or call.error:
        return call.name in tools
    schema = tools[call.name]
    properties = schema.get("properties") or {}
    is_free = schema.get("additionalProperties") or not properties
    missing = set(schema.get("required", [])) - set(call.arguments)
    strange = set() if is_free else set(call.arguments) - set(properties)
    typed = {name: kind for name, kind in properties.items() if isinstance(kind, dict)}
    nested = [name for name, value in call.arguments.items() if isinstance(value, dict | list)]
    kinds = {name: typed.get(name, {}).get("type") for name in nested}
    misplaced = set(map(str, kinds.values())) & {"string", "integer", "number", "boolean"}
    return not (missing or strange or misplaced)


# ---- Thoughts are taken out ----
# Models that think aloud write <think>…</think> before the answer; others are asked about that tag.


class ThinkFilter:
    """Takes `<think>…</think>` out of a text that comes in pieces, except within back-quotes.

    A block that is never closed hides all that follows if it began a line; in mid-line it was only
    a mention. So is one that no thought follows at once: "Wrap it in <think> and </think> tags."
    """

    mark = re.compile(r"(`+|\n|</?(?:think|thinking|thought)>)")  # "```", "<think>", "</thought>"
    unclear = re.compile(r"(?:(?<!`)`+|<[/a-z]{0,9}>?)\Z")  # "``", "<thi", "<think>": and now?
    thought = re.compile(r"\w|\n")  # of "Well <think>hm</think>done"

    def __init__(self) -> None:
        self.pending = ""  # not clear yet
        self.hidden = ""  # what was taken out since a tag, with the tag
        self.line = ""  # what was shown of the last line
        self.code = ""  # the back-quotes that began the code that we are in

    def feed(self, piece: str, last: bool = False) -> str:
        text = self.pending + piece
        unclear = None if last else self.unclear.search(text)
        self.pending = unclear[0] if unclear else ""
        tokens = [token for token in self.mark.split(text.removesuffix(self.pending)) if token]
        following = [*tokens[1:], ""]
        pairs = zip(tokens, following, strict=False)
        return "".join([token for token, after in pairs if self._is_shown(token, after)])

    def close(self) -> str:
        text = self.feed("", last=True)
        return text + self.hidden if self.line.strip() else text

    def _is_shown(self, token: str, after: str) -> bool:
        """For a mark, or a text between two; `after` is what comes next."""
        is_tag = token[0] == "<" and not self.code and self.mark.fullmatch(token) is not None
        is_end = is_tag and token[1] == "/"
        if self.hidden:
            self.hidden = "" if is_end else self.hidden + token
            return False
        is_thought = not is_end and self.thought.match(after)
        is_in_place = is_thought or not self.line.strip()
        if is_tag and is_in_place:
            self.hidden = "" if is_end else token
            return False
        self.line = "" if token == "\n" else self.line + token
        if token[0] == "`" and self.code in ("", token):
            self.code = "" if self.code else token
        elif token == "\n" and len(self.code) < 3:
            self.code = ""  # code within a line ends with it
        return True


# ---- Traces and replays ----
# "It worked yesterday": a trace says what was sent, and a replay runs that very turn again.

# "Bearer abcdefgh…", "api_key = …", "sk-…"
KEYS = (
    r"(?i)(bearer |authorization\W+|api[_-]?key\W+)[\w.~+/-]{8,}|\b(sk-|gsk_|xai-|AIza)[\w-]{16,}"
)


def without_keys(value: Any, name: str = "") -> Any:
    """A deep copy with `[key]` for what looks like one, by its form or by the name before it."""
    if isinstance(value, dict):
        return {key: without_keys(inside, key) for key, inside in value.items()}
    if isinstance(value, list):
        return [without_keys(item, name) for item in value]
    if not isinstance(value, str):
        return value
    return re.sub(KEYS, r"\1[key]", f"{name}={value}")[len(name) + 1 :]


class Trace:
    """Writes each HTTP attempt and what came of it to a file, a JSON object a line, without keys.

    `sent` is what the body of the attempt had otherwise than the request, or beside it. Outcomes:
    answered, failed, cancelled; healed and retried are followed by another attempt.
    """

    def __init__(self, path: Path):
        private = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.file = open(private, "a", encoding="utf-8", errors="replace")  # noqa: SIM115

    def __call__(self, request: LLMRequest, answer: LLMResponse | None, outcome: str) -> None:
        asked = {"tools": request.tools, "messages": messages_of(request)}
        parts = {"model": request.model, "options": request.options, **asked}
        known = {**request.options, **asked}
        sent = {name: value for name, value in request.sent.items() if known.get(name) != value}
        got = asdict(answer) if answer else None
        seconds = round(time.monotonic() - request.began, 3)
        record = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "outcome": outcome, **parts,
                  "sent": sent, "answer": got, "seconds": seconds}  # fmt: skip
        print(to_json(without_keys(record)), file=self.file, flush=True)


class ReplayDiffers(Exception):
    """A request is not the recorded one; shows the first 40 lines in which they differ."""

    def __init__(self, recorded: dict, now: dict):
        old = json.dumps(recorded, ensure_ascii=False, indent=1).split("\n")
        new = json.dumps(now, ensure_ascii=False, indent=1).split("\n")
        changes = difflib.unified_diff(old, new, "recorded", "now", lineterm="", n=2)
        shown = "\n".join(line[:300] for line in itertools.islice(changes, 40))
        super().__init__(f"This request is not the recorded one:\n{shown}")


class ReplayProvider(LLMProvider):
    """Plays a trace back; raises ReplayDiffers where a request is not the recorded one."""

    model = "replay"

    def __init__(self, trace: Path):
        """Raises OSError, or ValueError that names the line which is no record."""
        self.rest: list[dict] = []  # what was not played yet; each `answer` is an LLMResponse
        text = trace.read_text(encoding="utf-8", errors="replace")
        for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
            try:
                record = read_record(line)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise ValueError(f"{trace}, line {number}: this is no record of a trace") from None
            if record["outcome"] not in ("healed", "retried"):
                self.rest.append(record)

    async def answer(self, request: LLMRequest) -> LLMResponse:
        if not self.rest:
            return failed("The trace has no further step.")
        now = without_keys({"messages": request.lawful, "tools": request.tools})
        recorded = {name: self.rest[0][name] for name in now}
        if recorded != now:
            raise ReplayDiffers(recorded, now)
        answer = self.rest.pop(0)["answer"]
        await request.show(*words(answer.content or ""))
        return answer


def read_record(line: str) -> dict:
    """A line of a trace, its answer as an LLMResponse; raises what a line that is none leads to."""
    record = json.loads(line)
    answer = record["answer"] or asdict(failed("This request was cancelled."))
    answer["tool_calls"] = [ToolCallRequest(**call) for call in answer["tool_calls"]]
    legal(record["messages"])  # raises where a message has not the form of one
    fields = {name: record[name] for name in ("messages", "tools", "options")}
    return {**fields, "outcome": record.get("outcome"), "answer": LLMResponse(**answer)}


class RecordedTools:
    """The tools of a trace. Nothing is executed: each call returns what it returned then.

    `make_result(text)` makes what a ToolRegistry would return.
    """

    def __init__(self, records: list[dict], make_result: Callable[[str], Any]):
        self.make_result = make_result
        self.definitions = records[0]["tools"]
        self.results: dict[str, list[str]] = defaultdict(list)
        # those of earlier turns, and what the runner itself says to a call that could not be read
        known = {message.get("tool_call_id") for message in records[0]["messages"]}
        for record in records:
            known |= {call.id for call in record["answer"].tool_calls if call.error}
        keys: dict[str, str] = {}
        for message in itertools.chain.from_iterable(record["messages"] for record in records):
            for call in message.get("tool_calls", []):
                arguments = json.loads(call["function"]["arguments"])
                keys.setdefault(call["id"], to_json([call["function"]["name"], arguments]))
            if message["role"] == "tool" and message["tool_call_id"] not in known:
                known.add(message["tool_call_id"])
                self.results[keys[message["tool_call_id"]]].append(message["content"])

    def get(self, name: str) -> None:
        """Nothing is known of a tool but its results: its calls run one after another."""

    def get_definitions(self) -> list[dict]:
        return self.definitions

    async def execute(self, name: str, params: dict, turn: Any = None) -> Any:
        results = self.results[to_json([name, params])]
        text = results.pop(0) if results else "(the trace ends before this call's result)"
        return self.make_result(text)


# ---- You are the model ----
# Nothing shows faster what a model gets to see, and how a call fails: `--provider human`.


class HumanProvider(LLMProvider):
    """You are the model: it shows what a model would see and takes your answer or tool calls.

    `ask(question)` gives a line from the person.
    `check(name, arguments)` says what is wrong with a call, None where nothing is.
    """

    model = "human"

    def __init__(
        self, ask: Callable[[str], Awaitable[str]] | None = None,
        check: Callable[[str, dict], str | None] | None = None,
    ):  # fmt: skip
        self.ask = ask
        self.check = check
        self.seen = LLMRequest([], [], "", {})

    async def answer(self, request: LLMRequest) -> LLMResponse:
        if not self.ask:
            return failed("To be the model you need a terminal.")
        names = [tool["function"]["name"] for tool in request.tools]
        shown, line, answer = self.news(request), "", None
        while not answer:
            line_before = line
            line = (await self.ask("\n".join([*shown, "model> "]))).strip()
            try:
                answer = self.read(line, names)
            except ValueError as problem:
                shown = [str(problem), "To answer with these very words send them once more."]
                answer = LLMResponse(line) if line == line_before else None
        answer.usage = estimate_usage(request, answer)
        return answer

    def news(self, request: LLMRequest) -> list[str]:
        """What the last request did not have: messages, and the tools where they are others."""
        before, self.seen = self.seen, request
        lines = []
        for number, message in enumerate(request.messages):
            if before.messages[number : number + 1] != [message]:
                text = as_text(calls_as_text(message))["content"]
                lines.append(f"---- {message['role']} ----\n{text}")
        if request.tools != before.tools:
            tools = [to_json(tool["function"]) for tool in request.tools]
            how = 'You are the model. Answer in a line, or call tools: NAME {"path": "a"}'
            lines += ["---- tools ----", *tools, how]
        return lines

    def read(self, line: str, names: list[str]) -> LLMResponse:
        """`list_dir {} read_file {"path": "a"}` → two calls; a ValueError if one is not whole."""
        calls, rest = [], line
        while rest:
            name = re.match(r"[\w-]*", rest)[0]
            if name not in names:
                break
            written = rest[len(name) :].lstrip()
            try:
                value, end = JSON.raw_decode(written)
            except (ValueError, RecursionError) as problem:
                example = f'Is this a call? Then say {name} {{"argument": "value"}}'
                raise ValueError(f"{example} (this is not whole JSON: {problem}).") from None
            arguments, complaint = parse_arguments(value, repair=False)
            if self.check and not complaint:
                complaint = self.check(name, arguments)
            if complaint:
                raise ValueError(complaint)
            calls.append(ToolCallRequest(new_id(name + rest), name, arguments))
            rest = written[end:].lstrip(" \t\r\n,;")
        if calls and rest:
            raise ValueError(f"Behind the call stands what is none: {rest[:100]}")
        return LLMResponse(None, calls, "tool_calls") if calls else LLMResponse(line)


# ---- The offline model: rules choose the tools ----
# Without it nothing runs before there is a key. It decides as any model does, by the conversation:
# "what's in a.txt?" → read_file("a.txt"); with the result behind it → "a.txt says: …".

OFFLINE_RULES = "templates/offline/rules.md"  # beside this file, or in nanobot_data/ of a wheel
NO_RULES = f"## anything else\nanswer: I know no rule for that: there is no {OFFLINE_RULES}."


class Rule(NamedTuple):
    """One rule of the file. In its fields <words> stand for what the user says there."""

    title: str
    sentences: dict[str, str]  # as it is written → as a regular expression
    fields: dict[str, str]  # {"tool": "read_file", "path": "<file>", "answer": "<file> says: …"}


class Step(NamedTuple):
    """What a rule does: a call, or none where `tool` is empty; and what is said of it."""

    rule: Rule
    answer: str = ""
    tool: str = ""
    arguments: dict = {}
    known: dict = {}  # what its <words> are


class OfflineProvider(LLMProvider):
    """It keeps no state. Each request holds the question and the results so far: all steps are
    planned anew, and the first one that has no result yet is the next call."""

    model = "offline"
    intro = "[offline model: a few fixed rules, no language model]"

    def __init__(self, rules: str = ""):
        text = rules or rules_beside_this_file()
        self.kinds = read_kinds(text)
        self.rules = read_rules(text, self.kinds)

    async def answer(self, request: LLMRequest) -> LLMResponse:
        talk = Talk(request)
        answer = self.keep_memory(talk) or self.next_step(talk)
        await request.show(*words(answer.content or ""))
        answer.usage = estimate_usage(request, answer)
        return answer

    def next_step(self, talk: Talk) -> LLMResponse:
        steps = self.plan(talk)
        calls = [step for step in steps if step.tool]
        not_called = calls[len(talk.results) :]
        if not_called and talk.tools:
            return calling(not_called[0].tool, not_called[0].arguments)
        results = iter(talk.results)
        reports = [report(step, results, self.kinds) for step in steps]
        titles = dict.fromkeys(f'"{step.rule.title}"' for step in steps)
        source = f"[offline rule {', '.join(titles)}, {OFFLINE_RULES}]"
        return LLMResponse("\n\n".join(filter(None, [self.intro, *reports, source])))

    def plan(self, talk: Talk) -> list[Step]:
        """All that the message asks for, in order. Results that are there go into later steps."""
        if "# Findings\n" in talk.text:
            return dreamt_lines(talk)
        steps: list[Step] = []
        it = talk.last_file
        for rule, spoken in self.understand(talk.question):
            calls = [step for step in steps if step.tool]
            files = self.files_in(spoken, it)
            steps += steps_of(rule, spoken, files, talk, talk.results[len(calls) :])
            it = steps[-1].known.get("file") or it
        return steps

    def understand(self, text: str) -> list[tuple[Rule, dict]]:
        """`read a.txt and what is 2+2?` → "read files", {"files": "a.txt"}; "calculate", {…}."""
        requests: list[tuple[Rule, dict]] = []
        no_rule = self.rules[-1]
        while text and len(requests) < 20:
            first, text = self.first_request(text)
            head = first.partition("\n\n")[0]  # piped text stands behind it
            requests.append(self.match(first) or self.match(head) or (no_rule, {}))
        return requests or [(no_rule, {})]

    def first_request(self, text: str) -> tuple[str, str]:
        """`read a.txt and list docs` → ("read a.txt", "list docs"); `a.txt and b.txt` stay."""
        for first, rest in self.halves(text):
            starts = [rest, *(start for start, _ in self.halves(rest))]
            begins_another = any(self.match(start) for start in starts)
            if begins_another and self.match(first):
                return first, rest
        return text, ""

    def halves(self, text: str) -> list[tuple[str, str]]:
        """`hi, you and me` → ("hi", "you and me"), ("hi, you", "me"); not in quotes."""
        plain = text.translate(STRAIGHT).partition("\n\n")[0]
        without_quoted = re.sub(self.kinds["quoted"], lambda part: "-" * len(part[0]), plain)
        ends = itertools.islice(re.finditer(self.kinds["between"], without_quoted), 20)
        return [(text[: end.start()], text[end.end() :]) for end in ends]

    def match(self, text: str) -> tuple[Rule, dict] | None:
        """The first rule with this sentence, also without "could you please"; and its <words>."""
        request = re.sub(self.kinds["after"], "", text.strip(), flags=re.IGNORECASE)
        without = re.sub(self.kinds["before"], "", request, flags=re.IGNORECASE)
        for spoken, rule in itertools.product((request, without), self.rules):
            found_words = words_in(spoken, rule)
            if found_words is not None:
                return rule, found_words
        return None

    def files_in(self, spoken: dict, it: str | None) -> list[str]:
        """`a.txt, "my notes" and b.txt` → all three; `it` → the file that was spoken of last."""
        text = spoken.get("files") or spoken.get("file") or spoken.get("name") or ""
        if re.fullmatch(self.kinds["it"], text, re.IGNORECASE):
            return [it] if it else []
        names = [text]
        if "files" in spoken:  # their names are straight: ‘a.txt’
            names = re.findall(self.kinds["a_file"], text.translate(STRAIGHT), re.IGNORECASE)
        return [unquoted(name) for name in names if name]

    def facts_in(self, text: str) -> list[str]:
        """`Hi! My name is Maria.` → ["The user's name is Maria"]"""
        requests = self.understand(text)
        lines = [fill(rule.fields.get("line", ""), spoken) for rule, spoken in requests]
        return [line.removeprefix("- ") for line in lines if line.startswith("- ")]

    def keep_memory(self, talk: Talk) -> LLMResponse | None:
        """What Consolidator and Dream ask for: save a conversation, sum it up, find facts."""
        memory, _, conversation = talk.text.partition("\n# Conversation\n")
        spoken = re.findall(USER_LINE, conversation or talk.text)
        facts: list[str] = []
        for _, text in spoken:
            facts += self.facts_in(text)
        if "save_memory" in talk.tools:
            update = memory.partition("# MEMORY.md\n")[2].strip()
            for fact in facts:
                update = with_line(update, f"- {fact}")
            entry = history_entry(spoken, facts)
            return calling("save_memory", {"history_entry": entry, "memory_update": update})
        if "[SKIP]" in talk.prompt and "[MEMORY]" in talk.prompt:
            files, _, history = talk.text.rpartition("# History\n")
            about_user = files.rpartition("USER.md\n")[2]
            facts += re.findall(OWN_FACT, history)
            new = [f"[USER] {fact}" for fact in dict.fromkeys(facts) if fact not in about_user]
            return LLMResponse("\n".join(new) or "[SKIP]")
        is_transcript = spoken and not talk.tools and RUNTIME_END not in talk.text
        return LLMResponse(history_entry(spoken, facts)) if is_transcript else None


def steps_of(
    rule: Rule, spoken: dict, files: list[str], talk: Talk, results: list[str]
) -> list[Step]:
    fields, answer, tool = rule.fields, rule.fields.get("answer", ""), rule.fields.get("tool")
    known = talk.known | {name: unquoted(text) for name, text in spoken.items()}
    if tool and talk.tools and tool not in talk.tools:
        return [Step(rule, f"For that I need the tool {tool}, which is not here.")]
    if "<file>" in str(fields) and not files:
        return [Step(rule, "Which file do you mean? Name it, like: read a.txt")]
    if "sum" in known:
        known["total"] = total(known["sum"])
    if not tool:
        return [Step(rule, fill(answer, known))]
    if "line" in fields:
        return add_line(rule, {**known, "file": "".join(files[:1])}, results)
    steps = []
    for file in files or [None]:
        known = {**known, "file": file}
        if tool in ("edit_file", "notebook_edit"):  # these want a file that was read
            steps.append(Step(rule, "", "read_file", {"path": file}, known))
        steps.append(Step(rule, answer, tool, arguments_of(fields, known), known))
    return steps


def calling(tool: str, arguments: dict) -> LLMResponse:
    return LLMResponse(None, [ToolCallRequest(new_id(), tool, arguments)], "tool_calls")


def report(step: Step, results: Iterator[str], kinds: dict[str, str]) -> str:
    """What is said of a call. What did not work is told as that, never as a file's content."""
    result = next(results, "") if step.tool else ""
    if not step.tool or not step.answer:
        return step.answer
    worked = kinds[f"worked_{step.tool}"] or f"(?!{kinds['did_not_work']})"
    if "nothing" in step.rule.fields and re.match("No match|There is no", result):
        return step.rule.fields["nothing"]
    if not result:
        return f"{step.tool} did not work: the turn has no steps left"
    if not re.match(f"{worked}|{kinds['put_aside']}", result):
        return f"{step.tool} did not work: {result}"
    if result.startswith("[image: "):
        return f"{result}\nThat is an image: the offline model cannot see it."
    lines = [re.sub(r"^(\d+\||.*MEMORY\.md:\d+:) ", "", line) for line in result.split("\n")]
    known = {**step.known, "result": "\n".join(lines), "count": len(lines)}
    if len(lines) > 20:
        known["result"] = "\n".join([*lines[:20], f"… ({len(lines)} lines)"])
    return fill(step.answer, known)


# ---- The offline model: what it writes into memory ----
# Without this nobody without a key would see how a conversation becomes history, and history facts.

# [2026-04-03T10:00:00+0200] user: hello; in a history [2026-04-03 10:00] [RAW] stands before it
USER_LINE = r"(?m)^(?:\[[^\]\n]+\] )*?(?:\[([^\]\n]{16})[^\]\n]*\] )?user: (.+)$"
OWN_FACT = r"The user(?:'s .+? is | lives | likes | is from | does not like )[^.;\n]+"
FINDING = r"(?m)^\[(MEMORY|USER|SOUL)\] (.+)$"


def add_line(rule: Rule, known: dict, results: list[str]) -> list[Step]:
    """Two calls: read the file, and put a line behind what was read."""
    path, line = fill(rule.fields["path"], known), fill(rule.fields["line"], known)
    result = "".join(results[:1])
    page = "\n".join(re.findall(r"(?m)^\d+\| (.*)$", result))
    reading = Step(rule, "", "read_file", {"path": path}, known)
    longer = f"{page}\n{line}" if page else line
    if path == known["memory"]:  # there a fact may stand anywhere, and once
        longer = with_line(page, line)
    elif "go on with offset=" in result:
        return [reading, Step(rule, f"{path} is too long for me: I read one page.")]
    if longer == page:
        return [reading, Step(rule, f"I know that already: {line.removeprefix('- ')}")]
    edit = {"path": path, "old_text": page, "new_text": longer}
    return [reading, Step(rule, rule.fields["answer"], "edit_file", edit, known)]


def with_line(page: str, line: str) -> str:
    """One line more; `- The user's name is Maria` takes the place of `- The user's name is Bob`."""
    lines = page.split("\n") if page else []
    if line in lines:
        return page
    if subject := re.match(r"- The user's .+? is ", line):
        lines = [old for old in lines if not old.startswith(subject[0])]
    return "\n".join([*lines, line])


def history_entry(spoken: list[tuple[str, str]], facts: list[str]) -> str:
    """`[2026-04-03 10:00] The user sent 2 messages. The first was "hi" … They live in Rome.`"""
    stamp, first = spoken[0] if spoken else ("", "")
    last = spoken[-1][1] if spoken else ""
    stamp = stamp.replace("T", " ") or time.strftime("%Y-%m-%d %H:%M")
    learnt = "; ".join(dict.fromkeys(facts)) or "They told nothing about themselves"
    messages = f'The first was "{first[:200]}", the last "{last[:200]}".'
    return f"[{stamp}] The user sent {len(spoken)} messages. {messages} {learnt}."


def dreamt_lines(talk: Talk) -> list[Step]:
    """`[MEMORY] The user's name is Bob` below `# Findings` → the calls that write it there."""
    findings = talk.text.partition("# Findings\n")[2]
    paths = {name: path for path, name in re.findall(r"(?m)^# (.*?(\w+)\.md)$", findings)}
    steps: list[Step] = []
    for name, fact in re.findall(FINDING, findings):
        calls = [step for step in steps if step.tool]
        path = paths.get(name, f"{name}.md")
        fields = {"path": path, "line": f"- {fact}", "answer": f"I will remember: {fact}"}
        known = {"memory": path}
        steps += add_line(Rule("dream", {}, fields), known, talk.results[len(calls) :])
    return steps


# ---- The offline model: what it sees of a conversation ----
# Without this it would answer the loop's own messages, and "read it again" would mean no file.

RUNTIME_END = "[/Runtime Context]"
# [image: /tmp/a.png]
OF_THE_LOOP = r"(?m)^\[(?:image|file|an image|the message|the answer)\b.*\]$"
# - Long-term facts: /home/a b/memory/MEMORY.md
MEMORY_PATH = r"(?m)^.*?[:`] ?((?:/|~|\w:\\).*?MEMORY\.md)"


class Talk:
    """A request, as the rules see it: the user's words since the last answer, and what was done."""

    def __init__(self, request: LLMRequest):
        messages = [as_text(message) for message in request.messages]
        begin = 0
        for number, message in enumerate(messages):
            if message["role"] == "assistant" and not message.get("tool_calls"):
                begin = number + 1  # behind the last answer
        turn = messages[begin:]
        asked = texts_of("user", turn)
        added = [text for text in asked[1:] if RUNTIME_END in text]  # the others are the loop's own
        typed = asked[:1] + added
        self.prompt = "".join(texts_of("system", messages))
        self.text = "\n".join(asked)
        self.question = "\n".join(map(words_typed, typed))[:5_000]  # no rule is for more
        self.results = texts_of("tool", turn)
        self.tools = [tool["function"]["name"] for tool in request.tools]
        self.last_file = last_path(messages[:begin])
        # Time: 2026-04-03 10:02 (Friday), CEST
        times = re.findall(r"(?m)^Time: (.*)", "\n".join(typed)) or ["a time that nobody told me"]
        memory = [*re.findall(MEMORY_PATH, self.prompt), "MEMORY.md"][0]
        self.known = {"time": times[-1], "tools": ", ".join(self.tools), "memory": memory}


def texts_of(role: str, messages: list[dict]) -> list[str]:
    return [message["content"] for message in messages if message["role"] == role]


def last_path(messages: list[dict]) -> str | None:
    """The file that `it` means: of the last call with a path, but for MEMORY.md."""
    last = None
    for message in messages:
        for call in message.get("tool_calls", ()):
            path = str(json.loads(call["function"]["arguments"]).get("path") or "MEMORY.md")
            last = last if path.endswith("MEMORY.md") else path
    return last


def words_typed(text: str) -> str:
    """`[Runtime Context …] … [/Runtime Context]`, an empty line, `read a.txt` → `read a.txt`"""
    return re.sub(OF_THE_LOOP, "", text.rpartition(RUNTIME_END)[2]).strip()


# ---- The offline model: how rules are read and filled in ----
# The file is for people: here a sentence becomes a regular expression, and <words> what was said.

STRAIGHT = str.maketrans("“”„‘’\u00a0−–", "\"\"\"'' --")


def rules_beside_this_file() -> str:
    here = Path(__file__).resolve().parent
    for path in (here / OFFLINE_RULES, here / "nanobot_data" / OFFLINE_RULES):
        if path.is_file():
            return path.read_text(encoding="utf-8")
    return NO_RULES


def read_kinds(text: str) -> dict[str, str]:
    r"""What <words> can be: `<url>: https?://\S+`. One kind may be made of others above it."""
    kinds: dict[str, str] = defaultdict(str)
    for name, regex in re.findall(r"(?m)^<(\w+)>: (.+)$", text):
        kinds[name] = re.sub(r"<(\w+)>", lambda kind: kinds[kind[1]], f"(?:{regex})")
    return kinds


def read_rules(text: str, kinds: dict[str, str]) -> list[Rule]:
    """The last one, which has no sentences, is for anything else."""
    rules = []
    for block in re.split(r"(?m)^## ", text)[1:]:
        title, _, body = block.partition("\n# ")[0].partition("\n")
        fields = re.findall(r"(?ms)^(\w+):(.*?)(?=^\w+:|\Z)", body)
        lines = re.findall(r"(?m)^- (.+)$", body)
        sentences = {line: sentence_regex(line, kinds) for line in lines}
        rules.append(Rule(title, sentences, {name: value.strip() for name, value in fields}))
    return rules


def sentence_regex(sentence: str, kinds: dict[str, str]) -> str:
    """`show [me] <file>` → an expression for ` show a.txt` and ` show me "my notes"`."""
    regex = ""
    for token in re.findall(r"\[[^]]*\]|\([^)]*\)|<\w+>|[^\s<>()\[\]]+", sentence):
        name = token[1:-1]
        if token[0] in "[(":
            alternatives = [sentence_regex(part, kinds) for part in name.split("|")]
            regex += f"(?:{'|'.join(alternatives)})"
            if token[0] == "[":
                regex += "?"
        elif token[0] == "<":
            regex += rf"\s+(?P<{name}>{kinds[name] or '.+?'})"
        else:
            regex += kinds[f"said_{token}"] or rf"\s+{re.escape(token)}"
    return regex


def words_in(text: str, rule: Rule) -> dict[str, str] | None:
    """`read a.txt` → {"files": "a.txt"}, where `read <files>` is a sentence of it; else None."""
    plain = text.translate(STRAIGHT)
    for sentence, regex in rule.sentences.items():
        if not may_begin(sentence, plain.lower()):
            continue
        try:
            match = re.fullmatch(regex, f" {plain}", re.IGNORECASE | re.DOTALL)
        except re.error as problem:
            log.warning("%s: `%s` is left out: %s", OFFLINE_RULES, sentence, problem)
            continue
        if match:
            spans = {name: match.span(name) for name in match.groupdict() if match[name]}
            return {name: text[start - 1 : end - 1] for name, (start, end) in spans.items()}
    return None


def may_begin(sentence: str, text: str) -> bool:
    """Not if the text's first letters are nowhere in it: compiling all sentences takes 100 ms."""
    if sentence.startswith(("<", "[", "(<", "the ")):
        return True
    return re.match(r"\w{0,2}", text)[0] in sentence.lower()


def unquoted(text: str) -> str:
    plain = text.translate(STRAIGHT)
    is_quoted = len(plain) > 1 and plain[0] == plain[-1] and plain[0] in "\"'`"
    return text[1:-1] if is_quoted else text


def fill(template: str, known: dict, change: Callable[[str], str] = str) -> str:
    """`<file> says:` → `a.txt says:`"""
    return re.sub(r"<(\w+)>", lambda word: change(str(known.get(word[1]) or "")), template)


def arguments_of(fields: dict[str, str], known: dict) -> dict:
    """The tool's arguments; one is left out where its <words> were not said. `20` is a number."""
    arguments: dict[str, Any] = {}
    for name, template in fields.items():
        is_said = all(known.get(word) is not None for word in re.findall(r"<(\w+)>", template))
        if name in ("tool", "answer", "nothing", "schedule") or not is_said:
            continue
        is_put_together = name == "command" and template != "<command>"
        change = shlex.quote if is_put_together else str
        arguments[name] = fill(template, known, change)
        if re.fullmatch(r"\d+|true|false", template):
            arguments[name] = json.loads(template)
    if "schedule" in fields:
        arguments |= schedule(known["when"].lower(), known["time"])
    return arguments


IN_PYTHON = {"plus": "+", "minus": "-", "times": "*", "divided by": "/", "x": "*", "×": "*",
             "÷": "/", "% of": "/100*", ",": ""}  # fmt: skip
SIGNS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
         ast.Div: operator.truediv}  # fmt: skip


def total(text: str) -> str:
    """`12*7 plus 3` → `87`"""
    text = text.lower().translate(STRAIGHT).strip()
    for sign_in_words, sign in IN_PYTHON.items():
        text = text.replace(sign_in_words, sign)
    try:
        value = value_of(ast.parse(text[:200], mode="eval").body)
        return str(value) if isinstance(value, int) else f"{value:.12g}"
    except ZeroDivisionError:
        return "nothing, as nobody can divide by zero"
    except (ValueError, SyntaxError, OverflowError, MemoryError):
        return "more than I can work out: I know + - * / and brackets"


def value_of(node: ast.expr) -> float:
    """Numbers and four signs; raises ValueError for all else that Python would work out."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -value_of(operand)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in SIGNS:
            return SIGNS[type(sign)](value_of(left), value_of(right))
    raise ValueError("no sum")


SECONDS_OF = {"sec": 1, "min": 60, "hour": 3_600, "hr": 3_600, "day": 86_400, "week": 604_800}


def schedule(when: str, moment: str) -> dict:
    """`in 5 minutes` → {"at": "2026-04-03T10:07:00"}; `every hour` → {"every_seconds": 3600}"""
    date = re.match(r"[\d-]+ [\d:]+", moment)  # 2026-04-03 10:02 (Friday), CEST
    now = datetime.fromisoformat(date[0]) if date else datetime.now().replace(microsecond=0)
    if span := re.search(rf"(\d*) ?({'|'.join(SECONDS_OF)})", when):
        seconds = int(span[1] or 1) * SECONDS_OF[span[2]]
        due = (now + timedelta(seconds=seconds)).isoformat()
        return {"every_seconds": seconds} if when.startswith("every") else {"at": due}
    hour, minute, half = re.search(r"(\d+):?(\d\d)? ?([ap]m)?|$", when).groups()  # at 5:30 pm
    hours = int(hour or 9) % 24
    if half:
        hours = hours % 12 + 12 * (half == "pm")
    due = now.replace(hour=hours, minute=int(minute or 0), second=0)
    is_tomorrow = "tomorrow" in when or due <= now
    return {"at": (due + timedelta(days=is_tomorrow)).isoformat()}
