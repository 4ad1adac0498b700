"""The model: a conversation goes in, an answer or tool calls come out.

The lingua franca is the Chat Completions message dict, so what you print is what the model saw:

    [{"role": "system", "content": "You are …"}, {"role": "user", "content": "What is in a.txt?"},
     {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1", "type": "function",
      "function": {"name": "read_file", "arguments": "{\\"path\\": \\"a.txt\\"}"}}]},
     {"role": "tool", "tool_call_id": "call_1", "content": "1| hello"}]

`provider.chat(messages, tools)` gives an `LLMResponse`; a failure is a value too, with cause and fix.
Endpoints differ in data (PROVIDERS), not in code. This file works alone. Read after nanobot.py, before
tools.py. Not covered: which tools there are, and how they run.
"""

import asyncio
import gc
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

log = logging.getLogger("nanobot.providers")
REASONING = ("reasoning_content", "reasoning", "reasoning_details")  # sent back under the name they came with


# ---- A question and an answer ----


@dataclass
class ToolCallRequest:
    """One call that the model asks for. `error` or `denied`, where set, say why it is not to be run."""

    id: str
    name: str
    arguments: dict = field(default_factory=dict)
    error: str = ""
    denied: str = ""
    extra: dict = field(default_factory=dict)  # further keys, sent back as they came

    def to_message(self) -> dict:
        function = {"name": self.name, "arguments": json.dumps(self.arguments, ensure_ascii=False)}
        return {"id": self.id, "type": "function", "function": function, **self.extra}


@dataclass
class LLMResponse:
    """`usage` is `{"prompt_tokens", "completion_tokens", "cached_tokens", "estimated"}`, in tokens."""

    content: str | None = None
    tool_calls: list[ToolCallRequest] = field(default_factory=list)
    finish_reason: str | None = "stop"
    usage: dict = field(default_factory=dict)
    reasoning_content: str | None = None
    error: str | None = None
    extra: dict = field(default_factory=dict)  # the reasoning fields as they came, to be sent back

    @property
    def has_tool_calls(self) -> bool:
        return bool(self.tool_calls)

    def to_message(self) -> dict:
        calls = {"tool_calls": [call.to_message() for call in self.tool_calls]} if self.tool_calls else {}
        return {"role": "assistant", "content": self.content or None, **self.extra, **calls}


@dataclass
class LLMRequest:
    """One question. `options` are max_tokens, temperature, tool_choice: only those that were given."""

    messages: list[dict]
    tools: list[dict]
    model: str
    options: dict
    on_delta: Callable[[str], Awaitable[None]] | None = None

    async def show(self, text: str) -> None:
        if self.on_delta and text:
            await self.on_delta(text)


class LLMProvider:
    """A model. `chat` is what callers use, `answer` what a subclass writes."""

    model = ""

    async def chat(
        self,
        messages: list[dict],
        tools: list[dict] | None = None,
        *,
        model: str | None = None,
        on_delta: Callable[[str], Awaitable[None]] | None = None,
        **options: Any,
    ) -> LLMResponse:
        """Ask the model; with `on_delta` the answer streams. Options: max_tokens, temperature, tool_choice.

        What an endpoint does wrong is a value (`finish_reason="error"`); only cancellation is raised.
        """
        given = {name: value for name, value in options.items() if value is not None}
        request = LLMRequest(legal(messages), tools or [], model or self.model, given, on_delta)
        return await self.answer(request)

    async def answer(self, request: LLMRequest) -> LLMResponse:
        raise NotImplementedError

    def get_default_model(self) -> str:
        return self.model

    def warm_up(self) -> None:
        """Slow work (an import) that can be done before the first request, on a thread."""


# ---- A lawful history ----

KNOWN_KEYS = {"role", "content", "tool_calls", "tool_call_id", "name", *REASONING}
NO_RESULT = {"role": "tool", "content": "[interrupted before it finished]"}


def legal(messages: list[dict], reply: bool = True) -> list[dict]:
    """A copy of a conversation that every endpoint accepts; idempotent, and `messages` stay as they are.

    One system message, first; then a user message; neighbours of one role are one message; each call has one
    result, directly behind it; ids are unique, arguments a JSON object, texts not empty; only known keys.
    With `reply` the last message is not the assistant's.
    """
    clean = [cleaned for message in messages if (cleaned := _clean(message))]
    systems = [message for message in clean if message["role"] == "system"]
    merged: list[dict] = []
    for message in [*systems, *_paired([each for each in clean if each["role"] != "system"])]:
        if merged and merged[-1]["role"] == message["role"] != "tool":
            message = _join(merged.pop(), message)
        merged.append(message)
    while reply and merged and merged[-1]["role"] == "assistant":
        merged.pop()
    first = 1 if systems else 0
    if merged[first:] == [] or merged[first]["role"] != "user":
        merged.insert(first, {"role": "user", "content": "(earlier messages are left out)"})
    return merged


def _clean(message: dict) -> dict | None:
    """A message with known keys and an acceptable content; None where nothing is left of it."""
    role, content = message.get("role"), message.get("content")
    role = "system" if role == "developer" else role
    named = [call for call in message.get("tool_calls") or [] if call.get("function", {}).get("name")]
    calls = [_clean_call(call) for call in named]
    content = [_clean_block(each) for each in content] if isinstance(content, list) else _clean_text(content)
    nothing = role == "assistant" and not content and not calls
    if nothing or role not in ("system", "user", "assistant", "tool"):
        return None
    kept = {key: value for key, value in message.items() if key in KNOWN_KEYS and key != "tool_calls"}
    kept |= {"role": role, "content": content or (None if calls else "(empty)")}
    return {**kept, "tool_calls": calls} if calls else kept


def _clean_text(value: Any) -> str:
    """Text that has UTF-8 (a lone surrogate has none); empty where there is nothing to see in it."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) if value else ""
    if not text.isascii():
        text = text.encode("utf-16", errors="surrogatepass").decode("utf-16", errors="replace")
    return text if text.strip() else ""


def _clean_block(block: Any) -> dict:
    if isinstance(block, dict) and block.get("type") != "text":
        return block
    text = block.get("text") if isinstance(block, dict) else block
    return {"type": "text", "text": _clean_text(text) or "(empty)"}


def _clean_call(call: dict) -> dict:
    name, written = call["function"]["name"], call["function"].get("arguments") or ""
    arguments = written if isinstance(written, dict) else parse_arguments(written, repair=True)[0]
    text = _clean_text(json.dumps(arguments, ensure_ascii=False))
    return {**call, "type": "function", "function": {"name": name, "arguments": text}}


def _paired(messages: list[dict]) -> Iterator[dict]:
    """The messages with one result directly behind each call; results that nobody asked for are dropped."""
    waiting: dict[Any, list[tuple[int, int]]] = {}  # id → places (message, call) that have no result yet
    results: dict[tuple[int, int], dict] = {}
    for at, message in enumerate(messages):
        ids = [call.get("id") for call in message.get("tool_calls", [])]
        waiting |= {id_: [(at, n) for n, other in enumerate(ids) if other == id_] for id_ in ids}
        if message["role"] == "tool" and waiting.get(message.get("tool_call_id")):
            results[waiting[message["tool_call_id"]].pop(0)] = message
    used: set[str] = set()
    for at, message in enumerate(messages):
        calls = [{**call, "id": _unused(call.get("id"), used)} for call in message.get("tool_calls", [])]
        if message["role"] != "tool":
            yield {**message, "tool_calls": calls} if calls else message
        for n, call in enumerate(calls):
            yield {**results.get((at, n), NO_RESULT), "tool_call_id": call["id"]}


def _unused(id_: Any, used: set[str]) -> str:
    unused, number = str(id_ or "call"), 1
    while unused in used:
        number += 1
        unused = f"{id_ or 'call'}_{number}"
    used.add(unused)
    return unused


def _join(first: dict, second: dict) -> dict:
    """Two neighbours of one role as one message; no text and no image is lost."""
    contents = [message["content"] for message in (first, second) if message["content"]]
    if all(isinstance(content, str) for content in contents):
        return {**first, **second, "content": "\n\n".join(contents) or None}
    blocks = [each if isinstance(each, list) else [{"type": "text", "text": each}] for each in contents]
    return {**first, **second, "content": sum(blocks, [])}


# ---- Which endpoint ----


@dataclass(frozen=True)
class ProviderSpec:
    """One row of data about an endpoint; what the rows say is all that the code knows of it."""

    name: str
    keywords: tuple[str, ...] = ()  # of model names
    env_key: str = ""
    default_api_base: str = ""
    default_model: str = ""
    detect_by_key_prefix: str = "\0"  # no key begins so
    detect_by_base_keyword: str = "\0"
    is_gateway: bool = False  # serves any maker's models, as maker/model
    is_local: bool = False  # needs no key and no proxy
    max_tokens_field: str = "max_tokens"


PROVIDERS = [
    ProviderSpec("openai", ("gpt", "o1", "o3", "o4"), "OPENAI_API_KEY", "https://api.openai.com/v1",
                 "gpt-5-mini", detect_by_base_keyword="api.openai.com",
                 max_tokens_field="max_completion_tokens"),
    ProviderSpec("openrouter", (), "OPENROUTER_API_KEY", "https://openrouter.ai/api/v1", "openrouter/auto",
                 detect_by_key_prefix="sk-or-", detect_by_base_keyword="openrouter.ai", is_gateway=True),
    ProviderSpec("ollama", default_api_base="http://localhost:11434/v1", detect_by_base_keyword=":11434",
                 is_local=True),
    ProviderSpec("local", default_api_base="http://localhost:8000/v1", is_local=True),
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


def choose_endpoint(
    settings: dict[str, Endpoint], model: str = "", provider: str = "", base_url: str = ""
) -> Endpoint | None:
    """Which row, address and key to use, of the user's `settings` by row name; None where there is nothing.

    A base URL that was given always wins, and a key never goes to another row's host. Raises ValueError for a
    provider that does not exist or has no address.
    """
    if provider and provider not in ROWS:
        raise ValueError(f"There is no provider {provider!r}. There are: {', '.join(ROWS)}, offline.")
    spec = ROWS.get(provider) or (_row_of_base(base_url) if base_url else _row_by_clues(settings, model))
    if spec is None:
        return None
    own = settings.get(spec.name) or Endpoint(spec)
    general = settings["openai"].api_key if "openai" in settings else ""  # what many set for any endpoint
    homeless = spec.is_local or not spec.default_api_base
    key = own.api_key or (general if homeless or general.startswith(spec.detect_by_key_prefix) else "")
    base = base_url or own.api_base or spec.default_api_base
    if not base:
        raise ValueError(f"Provider {spec.name} has no address: set its apiBase, or --base-url.")
    maker, _, rest = model.partition("/")
    if maker == spec.name and (not spec.is_gateway or "/" in rest):  # openrouter/auto is a whole name
        model = rest
    return replace(own, spec=spec, api_key=key, api_base=base, model=model or spec.default_model)


def _row_of_base(base_url: str) -> ProviderSpec:
    local = re.match(r"localhost$|127\.|0\.0\.0\.0$|::1$|10\.|192\.168\.", urlsplit(base_url).hostname or "")
    keyed = [row for row in PROVIDERS if row.detect_by_base_keyword in base_url]
    return keyed[0] if keyed else ROWS["local" if local else "custom"]


def _row_by_clues(settings: dict[str, Endpoint], model: str) -> ProviderSpec | None:
    """In this order: a key's prefix, an address, maker/model, the model's name, a gateway, any key."""
    keys = {name: each.api_key for name, each in settings.items() if each.api_key}
    clues: list[Callable[[ProviderSpec], Any]] = [
        lambda row: any(key.startswith(row.detect_by_key_prefix) for key in keys.values()),
        lambda row: row.name in settings and settings[row.name].api_base,
        lambda row: row.name == model.partition("/")[0] and (row.is_local or row.name in keys),
        lambda row: row.name in keys and any(word in model.lower() for word in row.keywords),
        lambda row: row.name in keys and row.is_gateway,
        lambda row: row.name in keys,
    ]
    return next((row for clue in clues for row in PROVIDERS if clue(row)), None)


# ---- An OpenAI-compatible endpoint ----


class EndpointError(Exception):
    """The endpoint said that something is wrong."""


class NotAnAnswer(EndpointError):
    """What came is not the JSON of an answer: mostly a wrong address."""


def import_openai() -> Any:
    """The SDK, imported at the first request: 0.3 s over 800 modules, less with the collector off."""
    gc.disable()
    import openai

    gc.freeze()  # an import's objects live for ever: the collector need never look at them
    gc.enable()
    return openai


class OpenAIProvider(LLMProvider):
    """Any endpoint that speaks Chat Completions, through the official SDK. Timeouts are in seconds."""

    def __init__(self, endpoint: Endpoint, request_timeout: float = 300.0, idle_timeout: float = 90.0):
        self.endpoint, self.model = endpoint, endpoint.model
        self.request_timeout, self.idle_timeout = request_timeout, idle_timeout
        self._made: Any = None

    def warm_up(self) -> None:
        import_openai()

    @property
    def _client(self) -> Any:
        if self._made is None:
            openai, end = import_openai(), self.endpoint
            plain = end.api_base.startswith("http://")  # needs no certificates, which take 30 ms to load
            http = openai.DefaultAsyncHttpxClient(
                trust_env=not end.spec.is_local, verify=not plain, follow_redirects=False
            )
            self._made = openai.AsyncOpenAI(
                api_key=end.api_key or "none", base_url=end.api_base, default_headers=end.extra_headers,
                max_retries=0, timeout=self.request_timeout, http_client=http,
            )  # fmt: skip
        return self._made

    async def answer(self, request: LLMRequest) -> LLMResponse:
        reader = AnswerReader()
        try:
            if not request.model:
                raise EndpointError(f"no model is named. {await self._offer()}")
            await self._post(request, reader)
        except Exception as problem:  # whatever an endpoint does; cancellation is no Exception and goes on
            return LLMResponse(finish_reason="error", error=await self._explain(problem))
        return reader.response(request)

    async def _post(self, request: LLMRequest, reader: "AnswerReader") -> None:
        # messages=… would make the SDK type each message anew: 0.12 ms a message, 122 ms at 1,000. In
        # extra_body the same bytes go out at once. A stream's lines cost 10 µs each, the SDK's chunks 77.
        create = self._client.chat.completions.with_streaming_response.create
        body = {"messages": request.messages, **request.options}  # others are refused by somebody
        if "max_tokens" in body:
            body[self.endpoint.spec.max_tokens_field] = body.pop("max_tokens")
        if request.tools:
            body["tools"] = request.tools
        if request.on_delta:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        body |= self.endpoint.extra_body
        async with (
            asyncio.timeout(self.request_timeout) as deadline,
            create(model=request.model, messages=[], extra_body=body) as response,
        ):
            if "event-stream" not in response.headers.get("content-type", ""):
                reader.feed(parse_answer(await response.read()))  # also from a server that ignores `stream`
                return
            async for line in response.iter_lines():
                deadline.reschedule(asyncio.get_running_loop().time() + self.idle_timeout)
                await request.show(reader.feed_line(line))

    async def list_models(self) -> list[str]:
        """What the endpoint offers; raises what the SDK raises."""
        response = await self._client.models.with_raw_response.list()
        return [str(each.get("id")) for each in parse_answer(response.content).get("data") or []]

    async def check(self) -> str | None:
        """What is wrong with the address, the key or the model; None where all is well."""
        try:
            offered = await self.list_models()
        except Exception as problem:  # whatever the endpoint does is just what is asked for
            return await self._explain(problem)
        return None if self.model in offered or not offered else f"no such model there. {await self._offer()}"

    async def _explain(self, problem: Exception) -> str:
        """Cause, then what to do."""
        where, status, said = self.endpoint.api_base, getattr(problem, "status_code", None), _said(problem)
        kind = type(problem).__name__
        if kind in ("TimeoutError", "APITimeoutError"):
            return f"{where} gave no answer in time. Ask again, or try a smaller model."
        if kind == "APIConnectionError":
            cause = problem.__cause__ or said
            return f"Cannot reach {where} ({cause}). Is the address right, and is the server running?"
        if status in (401, 403):
            return f"{where} refuses the key ({said}). Set {self.endpoint.spec.env_key or 'OPENAI_API_KEY'}."
        if status == 404 and "model" in said.lower():
            return f"{where} has no model {self.model!r} ({said}). {await self._offer()}"
        if status in (404, 405) or kind == "NotAnAnswer":
            return f"{where} does not answer like a model ({said}). A base URL mostly ends in /v1."
        return f"{where} failed: {f'HTTP {status}: ' if status else ''}{said}"

    async def _offer(self) -> str:
        try:
            models = ", ".join((await self.list_models())[:20]) or "no models"
        except Exception as problem:  # a kindness within an error message: it may fail in any way
            models = f"an error instead of a list ({type(problem).__name__})"
        return f"Choose with --model or NANOBOT_MODEL; the endpoint gives: {models}"


def _said(problem: Any) -> str:
    """The endpoint's own words, wherever it put them, in one line."""
    body = getattr(problem, "body", problem) or str(problem)
    while isinstance(body, list | dict) and body:
        first = body[0] if isinstance(body, list) else body.get("message") or body.get("error")
        body = first or json.dumps(body)
    return " ".join(str(body).split())[:500]


def parse_answer(data: bytes) -> dict:
    """A JSON object; raises NotAnAnswer that shows what came instead."""
    try:
        answer = json.loads(data)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        start = " ".join(re.sub(rb"<[^>]*>", b" ", data[:2_000]).decode("utf-8", errors="replace").split())
        raise NotAnAnswer(f"not JSON but: {start[:120] or 'nothing'}")
    return answer


class AnswerReader:
    """Puts an answer together from the chunks of a stream; an answer in one piece counts as one chunk."""

    def __init__(self) -> None:
        self.content, self.calls, self.extra, self.usage = "", [], {}, {}
        self.finish_reason: str | None = None
        self.think = ThinkFilter()

    def feed_line(self, line: str) -> str:
        """One line of Server-Sent Events; returns the text to show."""
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":  # comments, event names, blank lines
            return ""
        return self.feed(parse_answer(data.encode()))

    def feed(self, chunk: dict) -> str:
        if chunk.get("error"):
            raise EndpointError(_said(chunk))
        self.usage, shown = chunk.get("usage") or self.usage, ""
        for choice in chunk.get("choices") or []:
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            part = choice.get("delta") or choice.get("message") or {}
            for call in part.get("tool_calls") or []:
                self._add_call(call)
            for name in (name for name in REASONING if part.get(name)):
                self.extra[name] = self.extra[name] + part[name] if name in self.extra else part[name]
            text = part.get("content") or ""
            if isinstance(text, list):
                text = "".join(each.get("text", "") for each in text)
            shown += self.think.feed(text)
        self.content += shown
        return shown

    def _add_call(self, piece: dict) -> None:
        """A piece belongs to the call of its index; without one, or under a new id, it begins another."""
        index, id_, function = piece.get("index"), piece.get("id"), piece.get("function") or {}
        same = [call for call in self.calls if index is None or call["index"] == index]
        if not same or (id_ and same[-1]["id"] and id_ != same[-1]["id"]):
            same = [{"index": index, "id": None, "name": "", "arguments": "", "extra": {}}]
            self.calls += same
        call, arguments = same[-1], function.get("arguments") or ""
        call["id"] = call["id"] or id_
        call["name"] += function.get("name") or ""
        call["arguments"] += arguments if isinstance(arguments, str) else json.dumps(arguments)
        call["extra"] |= {key: piece[key] for key in piece if key not in ("index", "id", "type", "function")}

    def response(self, request: LLMRequest) -> LLMResponse:
        """The whole answer; what is wrong with it is said in it."""
        self.content += self.think.close()
        calls, used = [], set()
        for call in self.calls:
            arguments, error = parse_arguments(call["arguments"], repair=self.finish_reason is not None)
            id_ = _unused(call["id"] or new_id(), used)
            calls.append(ToolCallRequest(id_, call["name"], arguments, error, extra=call["extra"]))
        reasoning = next((self.extra[name] for name in REASONING[:2] if name in self.extra), None)
        answer = LLMResponse(self.content.strip() or None, calls, self.finish_reason, {}, reasoning)
        answer.extra = self.extra
        answer.usage = read_usage(self.usage) or estimate_usage(request, answer)
        if self.finish_reason is None and (not calls or any(call.error for call in calls)):
            answer.finish_reason, answer.error = "error", "The answer broke off before its end. Ask again."
        return answer


def new_id() -> str:
    """Nine digits: the one form of an id that every endpoint takes."""
    return f"{time.perf_counter_ns() % 10**9:09d}"


def parse_arguments(text: str, repair: bool) -> tuple[dict, str]:
    """A call's arguments, and what is wrong with them. Only what a finished answer got wrong is repaired."""
    try:
        value = json.loads(text or "{}", strict=False)
    except ValueError as problem:
        if not repair:
            return {}, f"its arguments are not whole JSON ({problem})"
        import json_repair

        value = json_repair.loads(text)
        log.info("repaired the JSON of a call's arguments: %.200s", text)
    if not isinstance(value, dict) or (not value and "{" not in text and text.strip()):
        return {}, f"its arguments must be one JSON object, not {text[:100]!r}"
    return value, ""


def read_usage(usage: dict) -> dict:
    """The endpoint's own count in our words, cached tokens under any of their three names; {} without one."""
    if not usage.get("prompt_tokens"):
        return {}
    details = usage.get("prompt_tokens_details") or {}
    places = (details.get("cached_tokens"), usage.get("cached_tokens"), usage.get("prompt_cache_hit_tokens"))
    counts = {name: usage.get(name) or 0 for name in ("prompt_tokens", "completion_tokens")}
    return {**counts, "cached_tokens": next(filter(None, places), 0), "estimated": False}


def estimate_usage(request: LLMRequest, answer: LLMResponse) -> dict:
    asked, said = ([request.messages, request.tools], answer.to_message())
    sizes = [len(json.dumps(each, ensure_ascii=False, default=str)) // 4 for each in (asked, said)]
    return {"prompt_tokens": sizes[0], "completion_tokens": sizes[1], "cached_tokens": 0, "estimated": True}


class ThinkFilter:
    """Takes `<think>…</think>` out of a text that comes in pieces; what stands in back-quotes stays.

    A block that is never closed hides all that follows if it began a line; in mid-line it was only a mention.
    """

    mark = re.compile(r"`+|\n|<(/?)(?:think|thinking|thought)>")
    unclear = re.compile(r"(?:`+|<[/a-z]{0,9})\Z")  # may be the first half of a mark

    def __init__(self) -> None:
        self.pending, self.hidden, self.line, self.code = "", "", "", ""

    def feed(self, piece: str, last: bool = False) -> str:
        text, shown = self.pending + piece, ""
        unclear = None if last else self.unclear.search(text)
        end = unclear.start() if unclear else len(text)
        text, self.pending, start = text[:end], text[end:], 0
        for match in [*self.mark.finditer(text), None]:
            plain, mark = text[start : match.start() if match else None], match[0] if match else ""
            start = match.end() if match else start
            tag = mark[:1] == "<" and not self.code
            if self.hidden:
                self.hidden = "" if mark[:2] == "</" else self.hidden + plain + mark
            elif tag and (mark[1] != "/" or not (self.line + plain).strip()):
                self.hidden = "" if mark[1] == "/" else mark
                shown, self.line = shown + plain, self.line + plain
            else:
                shown += plain + mark
                self._note(plain, mark)
        return shown

    def _note(self, plain: str, mark: str) -> None:
        """Keep in mind what the line holds so far, and whether it is code."""
        self.line = "" if mark == "\n" else self.line + plain + mark
        if mark[:1] == "`":
            self.code = "" if self.code == mark else self.code or mark
        elif mark == "\n" and len(self.code) < 3:
            self.code = ""  # code within a line ends with it

    def close(self) -> str:
        shown = self.feed("", last=True)
        return shown + (self.hidden if self.line.strip() else "")


def strip_think(text: str) -> str:
    thinking = ThinkFilter()
    return (thinking.feed(text) + thinking.close()).strip()


# ---- Models that need no network ----


class ScriptedProvider(LLMProvider):
    """Plays replies back: a text, a ToolCallRequest, a list of these, or an LLMResponse. Keeps `requests`."""

    model = "scripted"

    def __init__(self, replies: Iterable[Any]):
        self.replies = iter(replies)
        self.requests: list[LLMRequest] = []

    async def answer(self, request: LLMRequest) -> LLMResponse:
        self.requests.append(request)
        reply = next(self.replies, LLMResponse(None, [], "error", error="The script has no further reply."))
        if isinstance(reply, ToolCallRequest | list):
            reply = LLMResponse(None, reply if isinstance(reply, list) else [reply], "tool_calls")
        reply = LLMResponse(reply) if isinstance(reply, str) else reply
        for word in re.findall(r"\s*\S+|\s+\Z", reply.content or ""):
            await request.show(word)
        return reply


# A rule: a tool, what the user says (the named groups are the tool's arguments), further arguments.
OFFLINE_RULES: list[tuple[str, str, dict]] = [
    ("edit_file", r"(?:change|replace) (?P<old_text>.+?) (?:to|with) (?P<new_text>.+?) in (?P<path>\S+)", {}),
    ("write_file", r"(?:write|save|put) (?P<content>.+?) (?:in)?to (?:the file )?(?P<path>\S+)", {}),
    ("exec", r"(?:run|execute) (?:the command )?(?P<command>.+)", {}),
    ("remember", r"remember (?:that )?(?P<fact>.+)", {}),
    ("recall", r"(?:recall|what do you (?:know|remember))(?: about)? ?(?P<topic>.*)", {}),
    ("grep", r"(?:count|how many)(?: the)? lines.*? (?P<path>\S+)", {"pattern": "", "output_mode": "count"}),
    ("glob", r"(?:count|how many)(?: the)?(?: \w+)? files.*", {"pattern": "*"}),
    ("glob", r"find (?:the |all )?files? (?:named |called |like )?(?P<pattern>\S+)", {}),
    ("grep", r"(?:find|search for|search|grep|where is|count) (?P<pattern>.+?)(?: in (?P<path>\S+))?",
     {"output_mode": "content", "fixed_strings": True, "head_limit": 20}),
    ("list_dir", r"(?:list|show|what|which)\b.*?\b(?:files|folder)\b.*?(?: in (?P<path>\S*/\S*))?", {}),
    ("read_file", r"(?:read|show|open|print|summari[sz]e|look at|what is in|what does)(?: the file)?"
                  r" (?P<path>\S+)(?: say| contain)?", {}),
]  # fmt: skip
OFFLINE_HELP = """I know no rule for that. Ask me to read, list, find, count, write, change or run a thing, \
or to remember or recall a fact, like: list the files here and read README.md"""


class OfflineProvider(LLMProvider):
    """A stand-in that needs no network: rules choose the tools, and what the tools return makes the answer.

    It keeps no state: like any model it reads the conversation and says what comes next.
    """

    model = "offline"
    intro = "[offline model: a few fixed rules, no language model]"

    async def answer(self, request: LLMRequest) -> LLMResponse:
        talk = request.messages
        asked = max(n for n, message in enumerate(talk) if message["role"] == "user")
        results = [message["content"] for message in talk[asked:] if message["role"] == "tool"]
        home = re.search(r"\S*MEMORY\.md", str(talk[0]["content"]))
        steps = self.plan(self.question(talk[asked]["content"]), home[0] if home else "MEMORY.md", results)
        if request.tools and len(results) < len(steps):
            call = ToolCallRequest(new_id(), *steps[len(results)])
            answer = LLMResponse(None, [call], "tool_calls")
        else:
            parts = [self.report(*step, result) for step, result in zip(steps, results, strict=False)]
            answer = LLMResponse("\n\n".join([self.intro, *(parts or [OFFLINE_HELP])]))
        for word in re.findall(r"\s*\S+", answer.content or ""):
            await request.show(word)
        answer.usage = estimate_usage(request, answer)
        return answer

    def question(self, content: str | list[dict]) -> str:
        """What the user says, without the block of metadata and without images."""
        text = content if isinstance(content, str) else " ".join(block.get("text", "") for block in content)
        text = re.sub(r"^\[Runtime Context.*?\[/Runtime Context\]", "", text, flags=re.DOTALL)
        return " ".join(text.split())

    def plan(self, question: str, memory: str, results: list[str]) -> list[tuple[str, dict]]:
        """The calls that a request means, in order: `[("read_file", {"path": "a.txt"})]`."""
        steps: list[tuple[str, dict]] = []
        verbs = "change|replace|write|save|put|run|remember|recall|count|find|search|list|show|read|what|how"
        for clause in re.split(rf"[,;]?\s+(?:and |then )+(?=(?:{verbs})\b)", question, flags=re.IGNORECASE):
            clause = re.sub(r"(?i)^(?:please|can you|could you)\s+", "", clause).strip(" ?!.")
            for tool, said, more in OFFLINE_RULES:
                if match := re.fullmatch(said, clause, re.IGNORECASE):
                    named = {name: each.strip("\"'`") for name, each in match.groupdict().items() if each}
                    memorial = tool in ("remember", "recall")
                    steps += self.remember(named, memory, results) if memorial else [(tool, named | more)]
                    break
        return steps

    def remember(self, named: dict, memory: str, results: list[str]) -> list[tuple[str, dict]]:
        """Memory is a file: to recall is to read it, to remember is to read it and write one line more."""
        lines = re.findall(r"^\d+\| (.*)$", results[0] if results else "", re.MULTILINE)
        content = "\n".join([*lines, f"- {named.get('fact')}", ""])
        write = [("write_file", {"path": memory, "content": content})] if "fact" in named else []
        return [("read_file", {"path": memory}), *write]

    def report(self, tool: str, arguments: dict, result: str) -> str:
        """A tool's result as a part of the answer."""
        lines = result.split("\n")
        about = arguments.get("path") or arguments.get("pattern") or arguments.get("command") or "here"
        if re.match(r"Cannot |There is no |Refused|old_text|\S+ was not run", result):
            return f"{tool} did not work: {result}"
        if tool == "read_file":
            text = [re.sub(r"^\d+\| ", "", line) for line in lines]
            rest = [f"… ({len(text)} lines)"] if len(text) > 20 else []
            return "\n".join([f"{about} says:", "", *text[:20], *rest])
        if tool == "glob" and arguments["pattern"] == "*":
            return f"There are {len(lines)} files, the newest are {', '.join(lines[:5])}."
        return f"{tool} {about}:\n\n{result}"
