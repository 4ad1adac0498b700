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
import contextlib
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
to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode  # NaN is a ValueError: it is no JSON
OnDelta = Callable[[str], Awaitable[None]]
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
        function = {"name": self.name, "arguments": to_json(self.arguments)}
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
    on_delta: OnDelta | None = None

    async def show(self, *pieces: str) -> None:
        for piece in pieces:
            if piece and self.on_delta:
                await self.on_delta(piece)


class LLMProvider:
    """A model. `chat` is what callers use, `answer` what a subclass writes."""

    model = ""

    async def chat(
        self, messages: list[dict], tools: list[dict] | None = None, *, model: str | None = None,
        on_delta: OnDelta | None = None, **options: Any,
    ) -> LLMResponse:  # fmt: skip
        """Ask the model; with `on_delta` the answer streams. Options: max_tokens, temperature, tool_choice.

        What an endpoint does wrong is a value (`finish_reason="error"`); only cancellation is raised.
        """
        given = {name: value for name, value in options.items() if value is not None}
        checked = vars(self).setdefault("_checked", {})  # a subclass need not call our __init__
        lawful = legal(messages, known=checked)
        return await self.answer(LLMRequest(lawful, tools or [], model or self.model, given, on_delta))

    async def answer(self, request: LLMRequest) -> LLMResponse:
        raise NotImplementedError

    def get_default_model(self) -> str:
        return self.model

    def warm_up(self) -> None:
        """Slow work (an import) that can be done before the first request, on a thread."""


# ---- A lawful history ----

KNOWN_KEYS = {"role", "content", "tool_calls", "tool_call_id", "name", *REASONING}
NO_RESULT = {"role": "tool", "content": "[interrupted before it finished]"}


def legal(messages: list[dict], reply: bool = True, known: dict | None = None) -> list[dict]:
    """A copy of a conversation that every endpoint accepts; idempotent, and `messages` stay as they are.

    One system message, first; then a user message; neighbours of one role are one message; each call has
    one result, directly behind it; ids are unique, arguments a JSON object, texts not empty; only known keys.
    With `reply` the last message is not the assistant's. `known` is a dict of the caller's that remembers
    what the last call has checked, so that in a long turn only the new messages cost.
    """
    clean = _clean_new(messages, {} if known is None else known)
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


def _clean_new(messages: list[dict], known: dict) -> list[dict]:
    """All messages cleaned; one that is the same object with the same values as last time is done already."""
    entries = []
    for message in messages:
        entry = known.get(id(message))
        if entry is None or entry[1] != message:
            entry = (message, dict(message), _clean(message))  # who holds the message keeps its id its own
        entries.append(entry)
    known.clear()
    known.update({id(entry[0]): entry for entry in entries})
    return [clean for _, _, clean in entries if clean]


def _clean(message: dict) -> dict | None:
    """A message with known keys and an acceptable content; None where nothing is left of it."""
    kept = {key: _utf8(value) for key, value in message.items() if key in KNOWN_KEYS and value}
    role, content = kept.get("role"), _clean_content(kept.get("content"))
    role = "system" if role == "developer" else role
    named = [call for call in kept.pop("tool_calls", []) if (call.get("function") or {}).get("name")]
    calls = [_clean_call(call) for call in named] if role == "assistant" else []
    nothing = role == "assistant" and not content and not calls
    if nothing or role not in ("system", "user", "assistant", "tool"):
        return None
    kept |= {"role": role, "content": content or (None if calls else "(empty)")}
    return {**kept, "tool_calls": calls} if calls else kept


def _utf8(value: Any) -> Any:
    """A deep copy that has UTF-8: UTF-16 joins the halves of a surrogate pair, a single half becomes `?`."""
    if isinstance(value, dict):
        return {_utf8(key): _utf8(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_utf8(each) for each in value]
    if not isinstance(value, str) or value.isascii():
        return value
    whole = value.encode("utf-16", errors="surrogatepass").decode("utf-16", errors="surrogatepass")
    return whole.encode("utf-8", errors="replace").decode("utf-8")


def _clean_content(content: Any) -> str | list[dict]:
    """A text or blocks; empty where there is nothing to see."""
    if isinstance(content, list):
        blocks = [each if isinstance(each, dict) else {"type": "text", "text": each} for each in content]
        return [b | {"text": _clean_content(b.get("text")) or "(empty)"} if b.get("type") == "text" else b
                for b in blocks]  # fmt: skip
    text = content if isinstance(content, str) else to_json(content) if content else ""
    return "" if text.isspace() else text


def _clean_call(call: dict) -> dict:
    arguments, _ = parse_arguments(call["function"].get("arguments"), repair=True)
    function = {"name": str(call["function"]["name"]), "arguments": to_json(arguments)}
    return {**call, "type": "function", "function": function}


def _paired(messages: list[dict]) -> Iterator[dict]:
    """The messages with one result directly behind each call; results that nobody asked for are dropped."""
    waiting: dict[Any, list[tuple[int, int]]] = {}  # id → places (message, call) that have no result yet
    results: dict[tuple[int, int], dict] = {}
    for at, message in enumerate(messages):
        if message["role"] == "tool" and (places := waiting.get(message.get("tool_call_id"))):
            results[places.pop(0)] = message
        ids = [call.get("id") or None for call in message.get("tool_calls", ())]
        waiting |= {each: [] for each in ids}  # an id that comes again means the later call
        for n, each in enumerate(ids):
            waiting[each].append((at, n))
    used: set[str] = set()
    for at, message in enumerate(messages):
        if message["role"] == "tool":
            continue
        calls = [{**call, "id": _unused(call.get("id"), used)} for call in message.get("tool_calls", ())]
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
    detect_by_key_prefix: str = "\0"  # no key begins with that
    detect_by_base_keyword: str = "\0"  # the end of `.host:port`
    is_gateway: bool = False  # serves any maker's models, as maker/model
    is_local: bool = False  # needs no key and no proxy
    max_tokens_field: str = "max_tokens"


PROVIDERS = [
    ProviderSpec("openai", ("gpt", "o1", "o3", "o4"), "OPENAI_API_KEY", "https://api.openai.com/v1",
                 "gpt-5-mini", detect_by_base_keyword=".api.openai.com",
                 max_tokens_field="max_completion_tokens"),
    ProviderSpec("openrouter", (), "OPENROUTER_API_KEY", "https://openrouter.ai/api/v1", "openrouter/auto",
                 detect_by_key_prefix="sk-or-", detect_by_base_keyword=".openrouter.ai", is_gateway=True),
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
    """Row, address and key to use, from the user's `settings` by row name; None where nothing is set.

    A base URL that is given always wins, and a key never goes to another row's host. Raises ValueError for a
    provider that does not exist or has no address.
    """
    if provider and provider not in ROWS:
        raise ValueError(f"There is no provider {provider!r}. There are: {', '.join(ROWS)}, offline.")
    host = _row_of_host(base_url) if base_url else None
    spec = ROWS.get(provider) or host or _row_by_clues(settings, model)
    if spec is None:
        return None
    own = settings.get(spec.name) or Endpoint(spec)
    base = base_url or own.api_base or spec.default_api_base
    if not base:
        raise ValueError(f"Provider {spec.name} has no address: set its apiBase, or --base-url.")
    own_server = host is not None and (host.is_local or not host.default_api_base)
    # to a server of the user's own a row's key goes only where the row has that address or no host at all
    owns = base == own.api_base or not spec.default_api_base or spec.is_local
    owner = spec if owns else ROWS["openai"]
    key = _key(settings, owner, anywhere=True) if own_server else _key(settings, host or spec)
    maker, _, rest = model.partition("/")
    if maker == spec.name and (not spec.is_gateway or "/" in rest):  # openrouter/auto is a whole name
        model = rest
    return replace(own, spec=spec, api_key=key, api_base=base, model=model or spec.default_model)


def _row_of_host(base_url: str) -> ProviderSpec:
    place = f".{urlsplit(base_url).netloc.rpartition('@')[2]}"
    local = re.match(r"\.(localhost|0\.0\.0\.0|\[::1\])(:|$)|\.(127|10|192\.168)\.", place)
    known = [row for row in PROVIDERS if place.endswith(row.detect_by_base_keyword)]
    return known[0] if known else ROWS["local" if local else "custom"]


def _key(settings: dict[str, Endpoint], row: ProviderSpec, anywhere: bool = False) -> str:
    """The row's own key, or OpenAI's where that has the row's prefix or may go anywhere."""
    keys = {name: each.api_key for name, each in settings.items()}
    own, general = keys.get(row.name, ""), keys.get("openai", "")
    return own or (general if anywhere or general.startswith(row.detect_by_key_prefix) else "")


def _row_by_clues(settings: dict[str, Endpoint], model: str) -> ProviderSpec | None:
    """In this order: a key's prefix, maker/model, the model's name, an address, a gateway, any key."""
    keys = {row.name: key for row in PROVIDERS if (key := _key(settings, row))}
    clues: list[Callable[[ProviderSpec], Any]] = [
        lambda row: keys.get(row.name, "").startswith(row.detect_by_key_prefix),
        lambda row: row.name == model.partition("/")[0] and (row.is_local or row.name in keys),
        lambda row: row.name in keys and any(word in model.lower() for word in row.keywords),
        lambda row: row.name in settings and settings[row.name].api_base,
        lambda row: row.name in keys and row.is_gateway,
        lambda row: row.name in keys,
    ]
    return next((row for clue in clues for row in PROVIDERS if clue(row)), None)


# ---- An OpenAI-compatible endpoint ----


class OpenAIProvider(LLMProvider):
    """Any endpoint that speaks Chat Completions, through the official SDK. Timeouts are in seconds."""

    def __init__(self, endpoint: Endpoint, request_timeout: float = 300.0, idle_timeout: float = 90.0):
        key = "".join(endpoint.api_key.split())  # a line end, pasted along, would break the header
        self.endpoint, self.model = replace(endpoint, api_key=key), endpoint.model
        self.request_timeout, self.idle_timeout = request_timeout, idle_timeout
        self._client: Any = None

    def warm_up(self) -> None:
        """Load the SDK, 0.3 s over 800 modules, less with the garbage collector off; make the client."""
        if self._client is not None:
            return
        gc.disable()
        import openai

        gc.freeze()  # an import's objects live for ever: the collector need never look at them
        gc.enable()
        end = self.endpoint
        secure = not end.api_base.startswith("http://")  # loading the certificates takes 30 ms
        proxied = not end.spec.is_local
        http = openai.DefaultAsyncHttpxClient(verify=secure, trust_env=proxied, follow_redirects=False)
        self._client = openai.AsyncOpenAI(
            api_key=end.api_key or "none", base_url=end.api_base, default_headers=end.extra_headers,
            max_retries=0, timeout=self.request_timeout, http_client=http,
        )  # fmt: skip

    async def answer(self, request: LLMRequest) -> LLMResponse:
        reader = AnswerReader()
        try:
            if not request.model:
                raise RuntimeError(f"no model is named. {await self._offer()}")
            await self._post(request, reader)
            return reader.response(request)
        except Exception as problem:  # whatever an endpoint does; cancellation is no Exception and goes on
            return LLMResponse(finish_reason="error", error=await self._explain(problem))

    async def _post(self, request: LLMRequest, reader: "AnswerReader") -> None:
        self.warm_up()
        # messages=… would make the SDK type each message anew: 0.12 ms a message, 122 ms at 1,000. In
        # extra_body the same bytes go out at once. A stream's lines cost 10 µs each, the SDK's chunks 77.
        create = self._client.chat.completions.with_streaming_response.create
        body = {"messages": request.messages, **request.options}  # any other option, some endpoint refuses
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
            if "event-stream" in response.headers.get("content-type", ""):
                async for data in response.iter_bytes():
                    deadline.reschedule(asyncio.get_running_loop().time() + self.idle_timeout)
                    await request.show(reader.feed_bytes(data))
            else:  # also from a server that ignores `stream`
                await request.show(reader.feed(parse_answer(await response.read())))
            await request.show(reader.close())

    async def list_models(self) -> list[str]:
        """What the endpoint offers; raises what the SDK raises."""
        self.warm_up()
        response = await self._client.models.with_raw_response.list(timeout=min(self.request_timeout, 10.0))
        return [str(each.get("id")) for each in parse_answer(response.content).get("data") or []]

    async def check(self) -> str | None:
        """What is wrong with the address, the key or the model; None where all is well."""
        try:
            offered = await self.list_models()
        except Exception as problem:  # what goes wrong is the answer here
            return await self._explain(problem)
        return None if self.model in offered or not offered else f"no such model. {await self._offer()}"

    async def _explain(self, problem: Exception) -> str:
        """Cause, then what to do; never the key, which some servers repeat."""
        where, key, said = self.endpoint.api_base, self.endpoint.api_key, _said(problem)
        status, kind = getattr(problem, "status_code", None), type(problem).__name__
        if len(key) > 7:  # shorter ones are no secret: "ollama"
            said = said.replace(key, "[key]")
        if "Timeout" in kind:
            return f"{where} gave no answer in time. Ask again, or try a smaller model."
        if kind == "APIConnectionError":
            return f"Cannot reach {where} ({said}). Is the address right, and is the server running?"
        if status in (401, 403):
            return f"{where} refuses the key ({said}). Set {self.endpoint.spec.env_key or 'OPENAI_API_KEY'}."
        if (status == 404 and "model" in said.lower()) or "not a valid model" in said:
            return f"{where} has no such model ({said}). {await self._offer()}"
        if status in (404, 405) or kind in ("ValueError", "AttributeError", "TypeError"):
            return f"{where} does not answer like a model ({said}). A base URL mostly ends in /v1."
        return f"{where} failed: {f'HTTP {status}: ' if status else ''}{said}"

    async def _offer(self) -> str:
        try:
            models = ", ".join((await self.list_models())[:20]) or "no models"
        except Exception as problem:  # an error message in the making: nothing may break it
            models = f"an error instead of a list ({type(problem).__name__})"
        return f"Choose with --model or NANOBOT_MODEL; the endpoint gives: {models}"


def _said(problem: Any) -> str:
    """The endpoint's own words, or the cause of no connection, wherever they stand, in one line."""
    body = getattr(problem, "body", problem) or getattr(problem, "__cause__", None) or str(problem)
    while isinstance(body, list | dict) and body:
        first = body[0] if isinstance(body, list) else body.get("message") or body.get("error")
        body = first or json.dumps(body)
    return " ".join(str(body).split())[:500]


def parse_answer(data: bytes) -> dict:
    """A JSON object; raises ValueError that shows what came instead."""
    with contextlib.suppress(ValueError):
        answer = json.loads(data)
        if isinstance(answer, dict):
            return answer
    start = " ".join(re.sub(rb"<[^>]*>", b" ", data[:2_000]).decode("utf-8", errors="replace").split())
    raise ValueError(f"not JSON but: {start[:120] or 'nothing'}")


class AnswerReader:
    """Puts an answer together from the chunks of a stream; an answer in one piece counts as one chunk."""

    def __init__(self) -> None:
        self.content, self.calls, self.extra, self.usage = "", [], {}, {}
        self.rest = b""  # of a line that is not whole yet
        self.ended = False  # the server said that this is all
        self.finish_reason: str | None = None
        self.think = ThinkFilter()

    def feed_bytes(self, data: bytes) -> str:
        """A part of a stream of Server-Sent Events; returns the text to show."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        shown = ""
        for line in lines:
            name, _, value = line.partition(b":")
            self.ended = self.ended or value.strip() == b"[DONE]"
            if name == b"data" and not self.ended:  # other lines are comments, event names or blank
                shown += self.feed(parse_answer(value))
        return shown

    def feed(self, chunk: dict) -> str:
        if chunk.get("error"):
            raise RuntimeError(_said(chunk))
        self.usage, shown = chunk.get("usage") or self.usage, ""
        for choice in chunk.get("choices") or []:
            self.usage = choice.get("usage") or self.usage
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            shown += self._add(choice.get("delta", choice.get("message")) or {}, "delta" not in choice)
        return self._show(shown)

    def _add(self, part: dict, whole: bool) -> str:
        self.ended = self.ended or whole
        for n, call in enumerate(part.get("tool_calls") or []):
            self._add_call({**call, "index": n} if whole else call)
        for name in (name for name in REASONING if part.get(name)):
            self.extra[name] = self.extra[name] + part[name] if name in self.extra else part[name]
        text = part.get("content") or ""
        return self.think.feed(text if isinstance(text, str) else "".join(b.get("text") or "" for b in text))

    def close(self) -> str:
        return self.feed_bytes(b"\n") + self._show(self.think.close())

    def _show(self, text: str) -> str:
        text = text if self.content else text.lstrip("\n")  # left over between thoughts and answer
        self.content += text
        return text

    def _add_call(self, piece: dict) -> None:
        """A piece belongs to the last call of its index; without an index, to the last call of all.

        Some endpoints number every call 0: a name begins another if its id is new or the last one is whole.
        """
        index, id_, function = piece.get("index"), piece.get("id"), piece.get("function") or {}
        name, arguments = function.get("name") or "", function.get("arguments") or ""
        last = next((call for call in reversed(self.calls) if index in (None, call["index"])), None)
        written = last["arguments"] if last else ""
        whole = name and arguments and written and not parse_arguments(written, repair=False)[1]
        if not last or (name and (id_ != last["id"] if id_ and last["id"] else whole)):
            last = {"index": index, "id": id_, "name": "", "arguments": "", "extra": {}}
            self.calls.append(last)
        last["id"] = last["id"] or id_
        last["name"] += name if name != last["name"] else ""  # some repeat it in every piece
        last["arguments"] += arguments if isinstance(arguments, str) else to_json(arguments)
        last["extra"] |= {key: piece[key] for key in piece if key not in ("index", "id", "type", "function")}

    def response(self, request: LLMRequest) -> LLMResponse:
        """The whole answer; it says itself what is wrong with it."""
        calls, used = [], set()
        finished = self.finish_reason in ("stop", "tool_calls", "function_call")
        for call in self.calls:
            arguments, error = parse_arguments(call["arguments"], repair=finished)
            id_ = _unused(call["id"] or new_id(), used)
            calls.append(ToolCallRequest(id_, call["name"], arguments, error, extra=call["extra"]))
        # an answer that was cut will be continued: the space at the seam belongs to it
        text = _utf8(self.content if self.finish_reason == "length" else self.content.rstrip("\n"))
        text = text if text.strip() else None
        reasoning = next((self.extra[name] for name in REASONING[:2] if name in self.extra), None)
        answer = LLMResponse(text, calls, self.finish_reason, {}, reasoning, extra=self.extra)
        with contextlib.suppress(AttributeError, TypeError, ValueError):  # a count that is none
            answer.usage = read_usage(self.usage)
        answer.usage = answer.usage or estimate_usage(request, answer)
        if self.finish_reason is None and (any(call.error for call in calls) or not (calls or self.ended)):
            cause = "The answer broke off before its end" if text or calls else "The endpoint sent no answer"
            answer.finish_reason, answer.error = "error", f"{cause}. Ask again."
        return answer


def new_id() -> str:
    """Nine digits: the only form of an id that every endpoint takes."""
    return f"{time.perf_counter_ns() % 10**9:09d}"


def parse_arguments(written: Any, repair: bool) -> tuple[dict, str]:
    """A call's arguments, and what is wrong with them. Only what a finished answer got wrong is repaired."""
    text = written if isinstance(written, str) else json.dumps(written or {})
    try:
        value = _loads(text.strip() or "{}", repair)
        to_json(value)  # raises where a number is NaN or infinite
    except (ValueError, RecursionError, ImportError) as problem:
        return {}, f"its arguments are not whole JSON ({problem})"
    if not isinstance(value, dict):
        return {}, f"its arguments must be one JSON object, not {text[:100]!r}"
    return _utf8(value), ""


def _loads(text: str, repair: bool) -> Any:
    try:
        return json.loads(text, strict=False)  # takes line ends within a text
    except ValueError:
        if not repair:
            raise
        import json_repair

        log.info("repairing the JSON of a call's arguments: %.200s", text)
        return json_repair.loads(text)


def read_usage(usage: dict) -> dict:
    """The endpoint's own count in our words, cached tokens under any of their three names; {} without one."""
    if not usage.get("prompt_tokens"):
        return {}
    details = usage.get("prompt_tokens_details") or {}
    places = (details.get("cached_tokens"), usage.get("cached_tokens"), usage.get("prompt_cache_hit_tokens"))
    counts = {name: int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")}
    return {**counts, "cached_tokens": int(next(filter(None, places), 0)), "estimated": False}


def estimate_usage(request: LLMRequest, answer: LLMResponse) -> dict:
    asked = len(to_json([request.messages, request.tools])) // 4  # a token of English is about four bytes
    said = len(to_json(answer.to_message())) // 4
    return {"prompt_tokens": asked, "completion_tokens": said, "cached_tokens": 0, "estimated": True}


class ThinkFilter:
    """Takes `<think>…</think>` out of a text that comes in pieces, except within back-quotes.

    A block that is never closed hides all that follows if it began a line; in mid-line it was only a mention.
    """

    mark = re.compile(r"(`+|\n|</?(?:think|thinking|thought)>)")
    unclear = re.compile(r"(?:`+|<[/a-z]{0,9})\Z")  # may be the first half of a mark

    def __init__(self) -> None:
        self.pending, self.hidden, self.line, self.code = "", "", "", ""

    def feed(self, piece: str, last: bool = False) -> str:
        text = self.pending + piece
        unclear = None if last else self.unclear.search(text)
        self.pending = unclear[0] if unclear else ""
        tokens = self.mark.split(text.removesuffix(self.pending))
        return "".join(token for token in tokens if self._is_shown(token))

    def close(self) -> str:
        return self.feed("", last=True) + (self.hidden if self.line.strip() else "")

    def _is_shown(self, token: str) -> bool:
        """For a mark, or a text between two; remembers what the line holds and whether it is code."""
        tag = not self.code and token[:1] == "<" and self.mark.fullmatch(token)
        closing = token[:2] == "</"
        if self.hidden:
            self.hidden = "" if tag and closing else self.hidden + token
            return False
        if tag and not (closing and self.line.strip()):
            self.hidden = "" if closing else token
            return False
        self.line = "" if token == "\n" else self.line + token
        if token[:1] == "`":
            self.code = "" if self.code == token else self.code or token
        elif token == "\n" and len(self.code) < 3:
            self.code = ""  # code within a line ends with it
        return True


def strip_think(text: str) -> str:
    thinking = ThinkFilter()
    return (thinking.feed(text) + thinking.close()).strip()


# ---- Models that need no network ----

words = re.compile(r"\s*\S+|\s+\Z").findall


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
        await request.show(*words(reply.content or ""))
        return reply


# A rule: what the user says, with a tool's arguments as <name>; the tool; the answer; further arguments.
FOUND = {"output_mode": "content", "fixed_strings": True, "case_insensitive": True, "head_limit": 20}
OFFLINE_RULES: list[tuple[str, str, str, dict]] = [
    ("(change|replace) <old_text> (to|with) <new_text> in <path>", "edit_file", "Changed:\n\n{result}", {}),
    ("(write|save|put) <content> (in)?to (the file )?<path>", "write_file", "{result}", {}),
    ("(run|execute) (the command )?<command>", "exec", "$ {command}\n\n{result}", {}),
    ("remember (that )?<fact>", "remember", "", {}),
    ("(recall|what do you (know|remember))( about)?( me| us| <pattern>)?", "grep", "I remember:\n\n{result}",
     {"pattern": "", "path": "MEMORY.md", **FOUND}),
    (r"(count|how many)( the)? lines( \w+)*? <path>( have| has| contain)?", "grep", "Lines in {result}",
     {"pattern": "", "output_mode": "count"}),
    (r"(count|how many)( the| all)*( <pattern>)? files?\b.*", "glob",
     "Files like {pattern}: {count}, the newest first:\n\n{result}", {"pattern": "*", "head_limit": 100_000}),
    ("find (the |all )?files? (named |called |like )?<pattern>", "glob", "I found:\n\n{result}", {}),
    ("(find|search for|search|grep|where is|count) <pattern>( in <path>)?", "grep",
     "Lines with {pattern}: {count}\n\n{result}", FOUND),
    (r"(list|show|what|which)\b.*\b(files|folder)\b.*?( in (?!the |this |here)<path>)?", "list_dir",
     "{result}", {}),
    ("(read|show|open|print|summari[sz]e|what is in|what does)( me)?( the file)? <path>( say| contain)?",
     "read_file", "{path} says:\n\n{result}", {}),
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
        steps = self.plan(talk[asked]["content"], results)
        if request.tools and len(results) < len(steps):
            tool, arguments, _ = steps[len(results)]
            if arguments.get("path") == "MEMORY.md":  # the system prompt says where it is
                places = re.findall(r"\S*MEMORY\.md", str(talk[0]["content"]))
                arguments = {**arguments, "path": [*places, "MEMORY.md"][0]}
            answer = LLMResponse(None, [ToolCallRequest(new_id(), tool, arguments)], "tool_calls")
        else:
            parts = [self.report(*step, result) for step, result in zip(steps, results, strict=False)]
            answer = LLMResponse("\n\n".join(filter(None, [self.intro, *(parts or [OFFLINE_HELP])])))
            await request.show(*words(answer.content))
        answer.usage = estimate_usage(request, answer)
        return answer

    def plan(self, content: str | list[dict], results: list[str]) -> list[tuple[str, dict, str]]:
        """The calls that a request means, and what to say of each: `[("read_file", {"path": …}, "…")]`."""
        text = content if isinstance(content, str) else " ".join(block.get("text", "") for block in content)
        question = " ".join(re.sub(r"(?s)^\[Runtime Context.*?\[/Runtime Context\]", "", text).split())
        steps: list[tuple[str, dict, str]] = []
        verbs = "change|replace|write|save|put|run|remember|recall|count|find|search|list|show|read|what|how"
        for clause in re.split(rf"[,;]?\s+(?:and |then )+(?=(?:{verbs})\b)", question, flags=re.IGNORECASE):
            clause = re.sub(r"(?i)^(?:please|can you|could you)\s+", "", clause).strip(" ?!.")
            for said, tool, answer, more in OFFLINE_RULES:
                said = re.sub("(?<!P)(<.*?>)", r"(?P\1.+?)", said.replace("<path>", r"(?P<path>\S+?)"))
                if match := re.fullmatch(said, clause, re.IGNORECASE):
                    named = {name: each.strip("\"'`") for name, each in match.groupdict().items() if each}
                    fact, rest = named.get("fact"), results[len(steps) :]
                    steps += remember(fact, rest) if fact else [(tool, more | named, answer)]
                    break
        return steps

    def report(self, tool: str, arguments: dict, answer: str, result: str) -> str:
        """What is said of a tool's result; nothing of a step that only serves the next one."""
        failed = r"Cannot |There is no |No file below|No match for|Refused|old_text|\S+ was not run"
        if answer and re.match(failed, result):
            return f"{tool} did not work: {result}"
        lines = [re.sub(r"^(\d+\||MEMORY\.md:\d+:) ", "", line) for line in result.split("\n")]
        more = [f"… ({len(lines)} lines)"] if len(lines) > 20 else []
        values = arguments | {"result": "\n".join(lines[:20] + more), "count": len(lines)}
        return re.sub(r"\{(\w+)\}", lambda name: str(values.get(name[1], name[0])), answer)


def remember(fact: str, pages: list[str]) -> list[tuple[str, dict, str]]:
    """Memory is a file: to remember is to read it and to put a line behind the page that was read."""
    known = "\n".join(re.findall(r"^\d+\| (.*)$", "".join(pages[:1]), re.MULTILINE))
    edit = {"path": "MEMORY.md", "old_text": known, "new_text": f"{known}\n- {fact}".lstrip("\n")}
    return [("read_file", {"path": "MEMORY.md"}, ""), ("edit_file", edit, f"I will remember: {fact}")]
