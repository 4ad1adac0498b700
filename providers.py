"""The model: a conversation goes in, an answer or tool calls come out.

The lingua franca is the Chat Completions message dict, so what you print is what the model saw:

    [{"role": "system", "content": "You are …"}, {"role": "user", "content": "What is in a.txt?"},
     {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1", "type": "function",
      "function": {"name": "read_file", "arguments": "{\\"path\\": \\"a.txt\\"}"}}]},
     {"role": "tool", "tool_call_id": "call_1", "content": "1| hello"}]

`provider.chat(messages, tools)` gives an `LLMResponse`; a failure is a value too, with cause and fix. On the
way there a history is made lawful (`legal`), a refused request is changed and sent again (HEALING), a busy
endpoint is waited for, chunks become text and calls (`AnswerReader`), thoughts are taken out, and calls that
a weak model wrote as text are read. Endpoints differ in data (PROVIDERS, HEALING), not in code. The last part
has models that need no network: offline rules, a script, a recorded trace, and you.

This file works alone. Read after nanobot.py, before tools.py. Not covered: which tools there are, and how
they run; other protocols than Chat Completions.
"""

import ast
import asyncio
import contextlib
import gc
import itertools
import json
import logging
import operator
import os
import re
import time
import zlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

log = logging.getLogger("nanobot.providers")
to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode  # NaN is a ValueError: it is no JSON
words = re.compile(r"\s*\S+|\s+\Z").findall  # with the space before each: together they are the text
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
    is_overflow: bool = False  # the error: more than the model's window holds

    @property
    def has_tool_calls(self) -> bool:
        return bool(self.tool_calls)

    def to_message(self) -> dict:
        calls = {"tool_calls": [call.to_message() for call in self.tool_calls]} if self.tool_calls else {}
        return {"role": "assistant", "content": self.content or None, **self.extra, **calls}


def failed(cause: str, **more: Any) -> LLMResponse:
    return LLMResponse(finish_reason="error", error=cause, **more)


@dataclass
class LLMRequest:
    """One question. `options` are max_tokens, temperature, tool_choice: only those that were given."""

    messages: list[dict]
    tools: list[dict]
    model: str
    options: dict
    on_delta: OnDelta | None = None
    on_retry: OnDelta | None = None

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
    trace: Callable[[LLMRequest, LLMResponse | None, float], None] | None = None  # is given seconds, too

    async def chat(
        self, messages: list[dict], tools: list[dict] | None = None, *, model: str | None = None,
        on_delta: OnDelta | None = None, on_retry: OnDelta | None = None, **options: Any,
    ) -> LLMResponse:  # fmt: skip
        """Ask the model; with `on_delta` the answer streams, `on_retry` is told why it takes longer.

        Options: max_tokens, temperature, tool_choice. What an endpoint does wrong is a value
        (`finish_reason="error"`); only cancellation is raised.
        """
        given = {name: value for name, value in options.items() if value is not None}
        checked = vars(self).setdefault("_checked", {})  # a subclass need not call our __init__
        lawful = legal(messages, known=checked)
        request = LLMRequest(lawful, tools or [], model or self.model, given, on_delta, on_retry)
        began, answer = time.monotonic(), None
        try:
            answer = await self.answer(request)
        finally:  # also where it was cancelled
            if self.trace:
                self.trace(request, answer, time.monotonic() - began)
        return answer

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
            copy = _utf8(message)
            entry = (message, copy, _clean(copy))  # who holds the message keeps its id its own
        entries.append(entry)
    known.clear()
    known.update({id(entry[0]): entry for entry in entries})
    return [clean for _, _, clean in entries if clean]


def _clean(message: dict) -> dict | None:
    """A message with known keys and an acceptable content; None where nothing is left of it."""
    kept = {key: value for key, value in message.items() if key in KNOWN_KEYS and value}
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
    name, arguments = call["function"]["name"], call["function"].get("arguments")
    function = {"name": str(name), "arguments": to_json(parse_arguments(arguments, repair=True)[0])}
    return {**call, "type": "function", "function": function}


def parse_arguments(written: Any, repair: bool) -> tuple[dict, str]:
    """A call's arguments, and what is wrong with them. Only what a finished answer got wrong is repaired."""
    try:
        text = written if isinstance(written, str) else to_json(written or {})
        value = _loads(text.strip() or "{}", repair)
        to_json(value)  # raises where a number is NaN or infinite
    except (TypeError, ValueError, RecursionError, ImportError) as problem:
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


def _paired(messages: list[dict]) -> list[dict]:
    """The messages with one result directly behind each call; results that nobody asked for are dropped."""
    paired: list[dict] = []
    waiting: dict[Any, list[dict]] = {}  # id → the results of its calls, to be filled in
    used: set[str] = set()
    for message in messages:
        if message["role"] == "tool":
            if results := waiting.get(message.get("tool_call_id")):
                result = results.pop(0)
                result.update(message, tool_call_id=result["tool_call_id"])
            continue
        calls = [{**call, "id": _unused(call.get("id"), used)} for call in message.get("tool_calls", ())]
        results = [{**NO_RESULT, "tool_call_id": call["id"]} for call in calls]
        paired += [{**message, "tool_calls": calls} if calls else message, *results]
        ids = [call.get("id") or None for call in message.get("tool_calls", ())]
        waiting |= {each: [] for each in ids}  # an id that comes again means the later call
        for each, result in zip(ids, results, strict=True):
            waiting[each].append(result)
    return paired


def _unused(id_: Any, used: set[str]) -> str:
    unused, number = str(id_ or "call"), 1
    while unused in used:
        number += 1
        unused = f"{id_ or 'call'}_{number}"
    used.add(unused)
    return unused


def new_id(old: str = "") -> str:
    """Nine digits, the only form of an id that every endpoint takes; the same ones for the same old id."""
    number = zlib.crc32(old.encode()) if old else time.perf_counter_ns()
    return f"{number % 10**9:09d}"


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
    detect_by_base_keyword: str | tuple[str, ...] = ()  # ends of `.host:port`, beside the address's own
    detect_by_key_prefix: str = "\0"  # no key begins with that
    default_model: str = ""
    is_gateway: bool = False  # serves any maker's models, as maker/model
    is_local: bool = False  # needs no key and no proxy
    strip_model_prefix: bool = False  # wants the model without its maker
    supports_prompt_caching: bool = False  # by marks in the request; others do it unasked
    max_tokens_field: str = "max_tokens"
    model_overrides: Mapping[str, dict] = field(default_factory=dict)  # by a part of the model's name

    def has_host(self, place: str) -> bool:
        own = urlsplit(self.default_api_base).netloc
        return place.endswith(self.detect_by_base_keyword or "\0") or bool(own) and place.endswith(f".{own}")


NO_HEAT = {"temperature": None}  # these refuse all but one
PROVIDERS = [
    ProviderSpec("openai", ("gpt", "o1", "o3", "o4"), "OPENAI_API_KEY", "https://api.openai.com/v1",
                 default_model="gpt-5-mini", max_tokens_field="max_completion_tokens",
                 model_overrides={"gpt-5": NO_HEAT}),
    ProviderSpec("openrouter", (), "OPENROUTER_API_KEY", "https://openrouter.ai/api/v1", (), "sk-or-",
                 "openrouter/auto", is_gateway=True, supports_prompt_caching=True),
    ProviderSpec("anthropic", ("claude",), "ANTHROPIC_API_KEY", "https://api.anthropic.com/v1", (), "sk-ant-",
                 supports_prompt_caching=True),
    ProviderSpec("deepseek", ("deepseek",), "DEEPSEEK_API_KEY", "https://api.deepseek.com/v1"),
    ProviderSpec("gemini", ("gemini", "gemma"), "GEMINI_API_KEY",
                 "https://generativelanguage.googleapis.com/v1beta/openai", (), "AIza"),
    ProviderSpec("groq", (), "GROQ_API_KEY", "https://api.groq.com/openai/v1", (), "gsk_"),
    ProviderSpec("mistral", ("mistral", "codestral"), "MISTRAL_API_KEY", "https://api.mistral.ai/v1"),
    ProviderSpec("moonshot", ("kimi", "moonshot"), "MOONSHOT_API_KEY", "https://api.moonshot.ai/v1",
                 ".api.moonshot.cn", model_overrides={"kimi-k2.": NO_HEAT}),
    ProviderSpec("zhipu", ("glm",), "ZAI_API_KEY", "https://open.bigmodel.cn/api/paas/v4", ".api.z.ai"),
    ProviderSpec("minimax", ("minimax",), "MINIMAX_API_KEY", "https://api.minimax.io/v1", ".minimaxi.com"),
    ProviderSpec("dashscope", ("qwen",), "DASHSCOPE_API_KEY",
                 "https://dashscope.aliyuncs.com/compatible-mode/v1", ".dashscope-intl.aliyuncs.com"),
    ProviderSpec("siliconflow", (), "SILICONFLOW_API_KEY", "https://api.siliconflow.cn/v1",
                 ".api.siliconflow.com", is_gateway=True),
    ProviderSpec("aihubmix", (), "AIHUBMIX_API_KEY", "https://aihubmix.com/v1", is_gateway=True,
                 strip_model_prefix=True),
    ProviderSpec("volcengine", ("doubao",), "ARK_API_KEY", "https://ark.cn-beijing.volces.com/api/v3"),
    ProviderSpec("xai", ("grok",), "XAI_API_KEY", "https://api.x.ai/v1", (), "xai-"),
    ProviderSpec("azure", (), "AZURE_OPENAI_API_KEY", "", (".openai.azure.com", ".services.ai.azure.com"),
                 max_tokens_field="max_completion_tokens"),
    ProviderSpec("ollama", (), "", "http://localhost:11434/v1", ":11434", is_local=True),
    ProviderSpec("lmstudio", (), "", "http://localhost:1234/v1", ":1234", is_local=True),
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
    text_tool_calls: str = "auto"  # are calls that a model wrote as text run? on, off, auto: of local models


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
    if host is not None and (host.is_local or not host.default_api_base):
        # to a server of the user's own a row's key goes only where the row has that address, or none
        owns = base == own.api_base or not spec.default_api_base or spec.is_local
        key = _key(settings, spec if owns else ROWS["openai"], anywhere=True)
    else:
        key = _key(settings, host or spec)
    maker, _, rest = model.partition("/")
    if maker == spec.name and (not spec.is_gateway or "/" in rest):  # openrouter/auto is a whole name
        model = rest
    model = model.rpartition("/")[2] if spec.strip_model_prefix else model
    if spec.is_local and not urlsplit(base).path.strip("/"):
        base = base.rstrip("/") + "/v1"
    return replace(own, spec=spec, api_key=key, api_base=base, model=model or spec.default_model)


def _row_of_host(base_url: str) -> ProviderSpec:
    place = f".{urlsplit(base_url).netloc.rpartition('@')[2]}"
    local = re.match(r"\.(localhost|0\.0\.0\.0|\[::1\])(:|$)|\.(127|10|192\.168)\.", place)
    known = [row for row in PROVIDERS if row.has_host(place)]
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


# ---- What endpoints refuse, and what helps ----

OVERFLOW = re.compile(
    "(?is)prompt (is )?too long|exceeds? the (context window|available context size)|input is too long|"
    "token count.*exceeds the|maximum (prompt|context) length is|context_length_exceeded|request too large|"
    "reduce (the length of the|your) message|(than the|with) context length|context window exceeds|n_keep|"
    "exceeded model token limit|too large for model with|context size has been exceeded|"
    "range of input length|`?inputs`? (tokens|must have less)"
)
UNPAID = re.compile("(?i)insufficient|exceeded.{0,20}quota|billing|credit|balance|payment|余额|欠费")
BUSY = re.compile("(?i)overloaded|rate.?limit|too many requests|访问量过大|速率限制|tool_use_failed")
SOON = re.compile(r"(?i)(?:try again|retry)\w* (?:in|after) (\d+(?:\.\d+)?) ?(ms|milli|m|h|)")


@dataclass
class Failure(Exception):
    """A request that failed: what people are told of it, and what the code goes by."""

    said: str
    text: str = ""  # all that the endpoint wrote
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    kind: str = ""  # network, timeout, cut (half an answer came), nonsense (nothing like one did)
    generation: str = ""  # a tool call that the endpoint could not read
    tries: int = 0  # how often the request was sent again before
    shown: bool = False  # a part of the answer was: it cannot begin anew

    @property
    def is_unpaid(self) -> bool:
        return self.status == 402 or ((self.status or 0) < 500 and bool(UNPAID.search(self.text)))

    @property
    def is_overflow(self) -> bool:
        wordless = self.status == 400 and not re.search(r"\w", self.text)
        return wordless or self.status == 413 or bool(OVERFLOW.search(self.text))


def retry_after(failure: Failure) -> float | None:
    """Seconds to wait before the same request goes out again; None where that is of no use."""
    soon, status = SOON.search(failure.text), failure.status or 0
    passing = failure.kind in ("network", "timeout", "cut") or status in (408, 409, 429) or status >= 500
    patience = 1 if failure.kind == "timeout" else 3
    lasting = failure.is_overflow or (failure.is_unpaid and not soon)
    if lasting or failure.shown or failure.tries >= patience or not (passing or BUSY.search(failure.text)):
        return None
    unit = {"ms": 0.001, "milli": 0.001, "m": 60.0, "h": 3600.0}.get(soon[2].lower(), 1.0) if soon else 0.0
    wanted = _wanted_wait(failure.headers) or (float(soon[1]) * unit if soon else 0.0)
    return min(wanted or 2.0**failure.tries, 60.0)


def _wanted_wait(headers: Mapping[str, str]) -> float:
    """Seconds in `retry-after-ms`, or in `retry-after`: a number or a date (RFC 9110, 10.2.3). 0: none."""
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        with contextlib.suppress(KeyError, ValueError):
            return max(0.0, float(headers[name]) * unit)  # in this order nan, too, becomes 0
    from email.utils import parsedate_to_datetime

    with contextlib.suppress(KeyError, ValueError):
        now = headers.get("date")  # the server's clock may differ from ours
        moment = parsedate_to_datetime(now).timestamp() if now else time.time()
        return max(parsedate_to_datetime(headers["retry-after"]).timestamp() - moment, 0.0)
    return 0.0


# What is put into a request's body, None: is not sent; or a function that gives it for the body and what the
# endpoint wrote. Messages and tools are shared with later requests: they are replaced, not changed.
Change = dict | Callable[[dict, str], dict]


def rename(old: str, new: str) -> Change:
    return lambda body, said: {old: None, new: body.get(old, body.get(new))}


def without_the_named(body: dict, said: str) -> dict:
    others = body.keys() - {"model", "messages", "tools", "stream"}
    return {name: None for name in others if re.search(rf"\b{re.escape(name)}\b", said)}


def in_messages(change: Callable[[dict], dict]) -> Change:
    return lambda body, said: {"messages": [change(each) for each in body["messages"]]}


def bare(*names: str) -> Change:
    return in_messages(lambda each: {key: value for key, value in each.items() if key not in names})


def as_text(message: dict) -> dict:
    """Content as one text; an image becomes a line."""
    blocks = message["content"] if isinstance(message["content"], list) else []
    text = "\n\n".join(each.get("text") or "[an image: this model cannot see it]" for each in blocks)
    return {**message, "content": text} if blocks else message


def with_signature(message: dict) -> dict:
    """Gemini wants its signature on a step's first call; this one stands for calls of other models."""
    first, *rest = message.get("tool_calls") or [{}]
    foreign = {"google": {"thought_signature": "skip_thought_signature_validator"}}
    return {**message, "tool_calls": [{"extra_content": foreign, **first}, *rest]} if first else message


def with_short_ids(message: dict) -> dict:
    if message["role"] == "tool":
        return {**message, "tool_call_id": new_id(message["tool_call_id"])}
    calls = [{**call, "id": new_id(call["id"])} for call in message.get("tool_calls", ())]
    return {**message, "tool_calls": calls} if calls else message


SCHEMA_WORDS = {"additionalProperties", "$schema", "$id", "const", "default", "propertyNames", "not", "oneOf",
                "anyOf", "allOf", "patternProperties", "exclusiveMinimum", "exclusiveMaximum"}  # fmt: skip


def without_words(value: Any, words: set[str], are_names: bool = False) -> Any:
    """Without the keys that are in `words`, however deep; in "properties" keys are names, and stay."""
    if isinstance(value, list):
        return [without_words(each, words) for each in value]
    if not isinstance(value, dict):
        return value
    return {key: without_words(each, words, key == "properties")
            for key, each in value.items() if are_names or key not in words}  # fmt: skip


def cache_marks(body: dict) -> dict:
    """Marks up to where the prompt stays the same: its system message and its tools."""
    mark, (first, *rest) = {"cache_control": {"type": "ephemeral"}}, body["messages"]
    tools = body.get("tools")
    if first["role"] == "system":
        first = {**first, "content": [{"type": "text", "text": as_text(first)["content"], **mark}]}
    return {"messages": [first, *rest], "tools": [*tools[:-1], {**tools[-1], **mark}] if tools else None}


def tools_as_text(body: dict, said: str) -> dict:
    """The tools stand in the system message, calls and results in the texts."""
    messages = [calls_as_text(each) for each in body["messages"]]
    if tools := body.get("tools"):
        told = TOOLS_AS_TEXT + "\n".join(to_json(each["function"]) for each in tools)
        messages.append({"role": "system", "content": told})
    return {"messages": legal(messages), "tools": None, "tool_choice": None}


def calls_as_text(message: dict) -> dict:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_result>\n{message['content']}\n</tool_result>"}
    calls = [call["function"] for call in message.get("tool_calls", ())]
    written = [f'{{"name": {to_json(each["name"])}, "arguments": {each["arguments"]}}}' for each in calls]
    lines = [message["content"] or "", *(f"<tool_call>{each}</tool_call>" for each in written)]
    return {"role": "assistant", "content": "\n".join(filter(None, lines))} if calls else message


TOOLS_AS_TEXT = """You have tools. To use some, answer with nothing but a line like this for each call:
<tool_call>{"name": "the tool's name", "arguments": {"a parameter": "its value"}}</tool_call>
What a tool returned comes back as <tool_result>. These are the tools:
"""
MAX_TOKENS = ("max_tokens", "max_completion_tokens")
NO_TOOLS = "tool calls go as text, as this model or server knows no others"


class Remedy(NamedTuple):
    complaint: str  # a regular expression
    change: Change
    told: str = ""  # to the user


HEALING = [Remedy(*row) for row in (
    ("max_tokens.{1,99}max_completion_tokens. instead", rename(*MAX_TOKENS)),
    ("max_(completion_)?tokens.{1,99}(too large|maximum|at most|less than|range|exceed)|range of max_tokens|"
     "maximum context length.{1,200}(in the messages|input tokens)", dict.fromkeys(MAX_TOKENS)),
    ("max_completion_tokens", rename(*MAX_TOKENS[::-1])),
    ("stream_options", {"stream_options": None}),
    ("only support stream|streaming is (strongly )?(required|recommended)", {"stream": True}),
    ("stream\\b.{1,30}not support", {"stream": None, "stream_options": None}),
    ("enable_thinking must be set to false", {"enable_thinking": False}),
    ("to 'none'", {"reasoning_effort": "none"}, "with tools it does not reason"),
    ("thinking.{1,9}and .?reasoning_effort", {"reasoning_effort": None}),
    ("support thinking", {"thinking": None, "think": None, "reasoning_effort": None}, "it does not think"),
    ("temperature|top_[pk]\\b", {"temperature": None, "top_p": None, "top_k": None}),
    ("parallel_tool_calls", {"parallel_tool_calls": None}),
    ("invalid tool_choice type",
     lambda body, said: {"tool_choice": "required"} if "tool_choice" in body else {}),
    ("requires --enable-auto-tool-choice", tools_as_text,
     f"{NO_TOOLS}; better start it with --enable-auto-tool-choice --tool-call-parser"),
    ("support (tool|function)|(tool|function) call\\w* (is )?not support|roles must alternate", tools_as_text,
     NO_TOOLS),
    ("tool_choice", {"tool_choice": None}),
    ("reasoning_content.{0,50}(passed back|missing)|missing reasoning_content", in_messages(
        lambda each: {"reasoning_content": "", **each} if each["role"] == "assistant" else each)),
    ("both content and thinking", in_messages(
        lambda each: {**each, "content": None} if "tool_calls" in each else each)),
    ("'?reasoning", bare(*REASONING)),
    ("property 'name'", bare("name")),
    ("cache_control", lambda body, said: without_words(body, {"cache_control"})),
    ("(system|developer) (role|instruction|message).{0,20}not (supported|enabled)|got system|"
     "not support 'system'",
     lambda body, said: {"messages": legal([body["messages"][0] | {"role": "user"}, *body["messages"][1:]])}),
    ("a-z, A-Z, 0-9, with a length of 9", in_messages(with_short_ids)),
    ("thought_signature", in_messages(with_signature)),
    ("unknown name.{0,200}(schema|parameters|function)|top level",
     lambda body, said: {"tools": without_words(body.get("tools"), SCHEMA_WORDS)}),
    ("image|vision|multimodal|only .{0,9}text|content.type", in_messages(as_text),
     "images are left out: this model takes text only"),
    ("content.{0,99}string|expected a string|untagged enum", in_messages(as_text)),
    ("not support|unsupported|unrecognized|unknown|unexpected|extra|forbidden", without_the_named),
)]  # fmt: skip
REFUSALS = (400, 404, 405, 413, 415, 422, 500)


def find_remedy(failure: Failure, body: dict, used: list[tuple[Remedy, str]]) -> Remedy | None:
    """The first row that fits the complaint and changes something; once a complaint, and nine in all."""
    if failure.shown or failure.kind or (failure.status or 400) not in REFUSALS or len(used) >= 9:
        return None
    said = failure.text
    fitting = (row for row in HEALING if re.search(row.complaint, said, re.IGNORECASE | re.DOTALL))
    return next((row for row in fitting if (row, said) not in used and heal(body, row, said) != body), None)


def heal(body: dict, remedy: Remedy, said: str) -> dict:
    new = remedy.change if isinstance(remedy.change, dict) else remedy.change(body, said)
    return {key: value for key, value in (body | new).items() if value is not None}


# ---- An OpenAI-compatible endpoint ----


class OpenAIProvider(LLMProvider):
    """Any endpoint that speaks Chat Completions, by the SDK; timeouts in seconds, `pace`: × the waits."""

    def __init__(
        self, endpoint: Endpoint, request_timeout: float = 300, idle_timeout: float = 90, pace: float = 1
    ):
        key = "".join(endpoint.api_key.split())  # a line end, pasted along, would break the header
        self.endpoint, self.model = replace(endpoint, api_key=key), endpoint.model
        self.request_timeout, self.idle_timeout, self.pace = request_timeout, idle_timeout, pace
        self._client: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._learnt: dict[str, list[tuple[Remedy, str]]] = {}  # by model: what it takes to be understood
        self._is_warned = False

    def warm_up(self) -> None:
        """Load the SDK, 0.3 s over 800 modules, less with the garbage collector off; make the client."""
        if self._client is not None:
            return
        gc.disable()
        try:
            import openai

            gc.freeze()  # an import's objects live for ever: the collector need never look at them
        finally:
            gc.enable()
        end = self.endpoint
        secure = not end.api_base.startswith("http://")  # loading the certificates takes 30 ms
        local = end.spec.is_local  # such a server may close without a word a connection that was kept open
        http = openai.DefaultAsyncHttpxClient(verify=secure, trust_env=not local, follow_redirects=False)
        self._client = openai.AsyncOpenAI(
            api_key=end.api_key or "none", base_url=end.api_base, max_retries=0, timeout=self.request_timeout,
            default_headers=({"Connection": "close"} if local else {}) | end.extra_headers, http_client=http,
        )  # fmt: skip
        if end.spec.name != "openai":  # the SDK finds these in the environment and tells them to any host
            self._client.organization = self._client.project = None

    def _client_here(self) -> Any:
        """The client; a new one in a new event loop, as open connections belong to the old one."""
        here = asyncio.get_running_loop()
        if self._loop not in (None, here):
            self._client = None
        self._loop = here
        self.warm_up()
        return self._client

    async def answer(self, request: LLMRequest) -> LLMResponse:
        """Ask; change what is refused, wait where it is busy, until there is an answer or no hope."""
        body, used, tries = self._body(request), list(self._learnt.get(request.model, ())), 0
        for remedy, said in used:
            body = heal(body, remedy, said)
        while True:
            try:
                answer = await self._attempt(request, body)
                break
            except Failure as caught:
                failure = replace(caught, tries=tries)
            wait = retry_after(failure)
            if remedy := find_remedy(failure, body, used):
                body = heal(body, remedy, failure.text)
                used.append((remedy, failure.text))
                if remedy.told:
                    await request.tell(f"{self.endpoint.spec.name}, {request.model}: {remedy.told}")
            elif wait is not None:
                tries += 1
                await request.tell(f"{self._safe(failure.said)}; asking again in {wait:.0f} s")
                import random

                await asyncio.sleep(wait * random.uniform(1.0, 1.2) * self.pace)
            else:
                return failed(await self._explain(failure), is_overflow=failure.is_overflow)
        self._learnt[request.model] = used
        await self._warn_of_window(request, answer)
        return answer

    def _body(self, request: LLMRequest) -> dict:
        """What is sent: the fewest parameters, as any other one is refused somewhere."""
        spec, tools = self.endpoint.spec, request.tools
        body = {"messages": request.messages, **request.options}
        body |= {"tools": tools} if tools else {"tool_choice": None}
        if "max_tokens" in body:
            body[spec.max_tokens_field] = body.pop("max_tokens")
        if request.on_delta:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if spec.supports_prompt_caching:
            body |= cache_marks(body)
        for part, values in spec.model_overrides.items():
            body |= values if part in request.model else {}
        body |= self.endpoint.extra_body
        return {key: value for key, value in body.items() if value is not None}

    async def _attempt(self, request: LLMRequest, body: dict) -> LLMResponse:
        """One request; raises Failure."""
        how, local = self.endpoint.text_tool_calls, self.endpoint.spec.is_local
        names = [tool["function"]["name"] for tool in request.tools]
        as_text = how == "on" or (how == "auto" and (local or "tools" not in body))
        reader = AnswerReader(names if as_text else [])
        try:
            if not request.model:
                raise Failure("no model is named")
            await self._post(request, body, reader)
            return reader.response(request)
        except Exception as problem:  # whatever an endpoint does; cancellation is no Exception and goes on
            failure = as_failure(problem)
            if calls := read_text_calls(failure.generation, names):
                return LLMResponse(None, calls, "tool_calls", estimate_usage(request, LLMResponse()))
            raise replace(failure, shown=reader.shown > 0) from problem

    async def _post(self, request: LLMRequest, body: dict, reader: "AnswerReader") -> None:
        # messages=… would make the SDK type each message anew: 0.12 ms a message, 122 ms at 1,000. In
        # extra_body the same bytes go out at once. A stream's lines cost 10 µs each, the SDK's chunks 77.
        create = self._client_here().chat.completions.with_streaming_response.create
        async with (
            asyncio.timeout(self.request_timeout) as deadline,
            create(model=request.model, messages=[], extra_body=body) as response,
        ):
            if "event-stream" in response.headers.get("content-type", ""):
                async for data in response.iter_bytes():
                    deadline.reschedule(asyncio.get_running_loop().time() + self.idle_timeout)
                    reader.feed_bytes(data)
                    await request.show(reader.to_show())
            else:  # also from a server that ignores `stream`
                reader.feed(parse_answer(await response.read()))
            reader.close()
            await request.show(reader.to_show())

    async def _warn_of_window(self, request: LLMRequest, answer: LLMResponse) -> None:
        """Ollama cuts what is over its window, 4,096 tokens where nobody chose one, and does not say so."""
        seen = answer.usage["prompt_tokens"]
        if self.endpoint.spec.is_local and not self._is_warned and 1_000 < seen < 5_000:
            sent = estimate_usage(request, answer)["prompt_tokens"]
            self._is_warned = sent > 2 * seen
            if self._is_warned:
                fix = "Widen its window, for Ollama: OLLAMA_CONTEXT_LENGTH=64000 ollama serve"
                await request.tell(f"The server saw {seen:,} of about {sent:,} tokens. {fix}")

    async def list_models(self) -> list[str]:
        """What the endpoint offers; raises what the SDK raises."""
        models, timeout = self._client_here().models.with_raw_response, min(self.request_timeout, 10.0)
        response = await models.list(timeout=timeout)
        found = parse_answer(response.content).get("data") or []
        return [str(each.get("id")).removeprefix("models/") for each in found]  # Gemini has the prefix

    async def check(self) -> str | None:
        """What is wrong with the address, the key or the model; None where all is well."""
        try:
            offered = await self.list_models()
        except Exception as problem:  # what goes wrong is the answer here
            return await self._explain(as_failure(problem))
        return None if self.model in offered or not offered else f"no such model. {await self._offer()}"

    async def _explain(self, failure: Failure) -> str:
        """Cause, then what to do; never the key, which some servers repeat."""
        where, said, status = self.endpoint.api_base, self._safe(failure.said), failure.status
        if failure.kind == "timeout":
            return f"{where} gave no answer in time. Ask again, or try a smaller model."
        if failure.kind == "network":
            return f"Cannot reach {where} ({said}). Is the address right, and is the server running?"
        if failure.is_overflow:
            return f"{where}: the conversation is too long for {self.model} ({said}). Begin a /new one."
        if status in (401, 403):
            return f"{where} refuses the key ({said}). Set {self.endpoint.spec.env_key or 'OPENAI_API_KEY'}."
        if (status == 404 and "model" in said.lower()) or re.search("no model|not a valid model", said):
            return f"{where} has no such model ({said}). {await self._offer()}"
        if status in (404, 405) or failure.kind == "nonsense":
            return f"{where} does not answer like a model ({said}). A base URL mostly ends in /v1."
        if failure.is_unpaid:
            return f"{where} wants money ({said}). Look at your account there, or choose another --provider."
        return f"{where} failed: {f'HTTP {status}: ' if status else ''}{said}"

    def _safe(self, said: str) -> str:
        key = self.endpoint.api_key
        return said.replace(key, "[key]") if len(key) > 7 else said  # shorter ones are no secret: "ollama"

    async def _offer(self) -> str:
        try:
            models = ", ".join((await self.list_models())[:20]) or "no models"
        except Exception as problem:  # an error message in the making: nothing may break it
            models = f"an error instead of a list ({type(problem).__name__})"
        return f"Choose with --model or NANOBOT_MODEL; the endpoint gives: {models}"


def as_failure(problem: Exception) -> Failure:
    """What the SDK, or the connection below it, raised."""
    if isinstance(problem, Failure):
        return problem
    name, response = type(problem).__name__, getattr(problem, "response", None)
    kind = "timeout" if "Timeout" in name else "network" if name == "APIConnectionError" else ""
    if type(problem).__module__.startswith("httpx"):  # from below the SDK, while the answer was read
        kind = "cut"
    if isinstance(problem, AttributeError | TypeError | KeyError):
        return Failure("its answer has a strange form", str(problem), kind="nonsense")
    failure = refusal(getattr(problem, "body", None), problem)
    status, headers = (failure.status, {}) if response is None else (response.status_code, response.headers)
    return replace(failure, kind=kind, status=status, headers=headers)


def refusal(body: Any, problem: Exception | None = None) -> Failure:
    """An error in the endpoint's own words, wherever they stand; or the cause of no connection."""
    inside = body if isinstance(body, dict) else {}
    code, generation = inside.get("code"), inside.get("failed_generation")
    said = body or getattr(problem, "__cause__", None) or str(problem)
    while isinstance(said, list | dict) and said:
        first = said[0] if isinstance(said, list) else said.get("message") or said.get("error")
        if isinstance(said, dict) and isinstance(said.get("metadata"), dict):
            first = said["metadata"].get("raw") or first  # behind OpenRouter's "Provider returned error"
        said = first or json.dumps(said)
    line, status = " ".join(str(said)[:4_000].split())[:500], code if isinstance(code, int) else None
    text = str(body or "")[:4_000]  # the expressions that look at it are for a few lines
    return Failure(line, text, status, generation=str(generation or ""))


def parse_answer(data: bytes) -> dict:
    """A JSON object; raises Failure that shows what came instead."""
    with contextlib.suppress(ValueError):
        answer = json.loads(data)
        if isinstance(answer, dict):
            return answer
    start = " ".join(re.sub(rb"<[^>]*>", b" ", data[:2_000]).decode("utf-8", errors="replace").split())
    kind = "nonsense" if start and not data.lstrip().startswith(b"{") else "cut"
    raise Failure(f"not JSON but: {start[:120] or 'nothing'}", kind=kind)


MAX_ANSWER_BYTES = 32_000_000  # no honest answer is so large
MAX_CALLS = 128


class AnswerReader:
    """Puts an answer together from the chunks of a stream; an answer in one piece counts as one chunk.

    `tools` are the names of those that a model may also call in its text.
    """

    def __init__(self, tools: Iterable[str] = ()) -> None:
        self.tools, self.shown = list(tools), 0  # characters
        self.content, self.calls, self.extra, self.usage = "", [], {}, {}
        self.rest, self.received = b"", 0  # of a line that is not whole yet; bytes in all
        self.ended = self.closed = False  # the server said that this is all; it came to an end, said or not
        self.finish_reason: str | None = None
        self.think = ThinkFilter()

    def feed_bytes(self, data: bytes) -> None:
        """A part of a stream of Server-Sent Events."""
        self.received += len(data)
        if self.received > MAX_ANSWER_BYTES:
            raise Failure(f"its answer is over {MAX_ANSWER_BYTES:,} bytes", kind="nonsense")
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            name, _, value = line.partition(b":")
            value = value.strip()
            self.ended = self.ended or value == b"[DONE]"
            if name == b"data" and value and not self.ended:  # others: comments, event names, signs of life
                self.feed(parse_answer(value))

    def feed(self, chunk: dict) -> None:
        choices = chunk.get("choices") or []
        for part in (chunk, *choices):
            if part.get("error"):
                raise refusal(part["error"])
            self.usage = part.get("usage") or self.usage
        for choice in choices:
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            self._add(choice.get("delta", choice.get("message")) or {}, "delta" not in choice)

    def close(self) -> None:
        self.feed_bytes(b"\n")
        self._add_text(self.think.close())
        self.closed = True

    def to_show(self) -> str:
        """The text that was not shown yet; none while it may be a call, and none of a call."""
        like_a_call = self.tools and self.content.lstrip()[:1] in tuple("<[{`")
        if like_a_call and (self.calls or not self.closed or self.text_calls()):
            return ""
        text, self.shown = self.content[self.shown :], len(self.content)
        return text

    def text_calls(self) -> list[ToolCallRequest]:
        return read_text_calls(self.content, self.tools) if self.tools and not self.calls else []

    def _add(self, part: dict, whole: bool) -> None:
        self.ended = self.ended or whole
        for n, call in enumerate(part.get("tool_calls") or []):
            self._add_call({**call, "index": n} if whole else call)
        for name in (name for name in REASONING if part.get(name)):
            self.extra[name] = self.extra[name] + part[name] if name in self.extra else part[name]
        text = part.get("content") or ""
        text = text if isinstance(text, str) else "".join(block.get("text") or "" for block in text)
        self._add_text(self.think.feed(text))

    def _add_text(self, text: str) -> None:
        self.content += text if self.content else text.lstrip("\n")  # left over between thoughts and answer

    def _add_call(self, piece: dict) -> None:
        """A piece belongs to the last call of its index; without an index, to the last call of all.

        Some endpoints number every call 0: a name begins another if its id is new or the last one is whole.
        """
        index, id_, function = piece.get("index"), piece.get("id"), piece.get("function") or {}
        name, arguments = function.get("name") or "", function.get("arguments") or ""
        last = next((call for call in reversed(self.calls) if index in (None, call["index"])), None)
        written = last["arguments"] if last else ""
        whole = name and arguments and written and not parse_arguments(written, repair=False)[1]
        if len(self.calls) >= MAX_CALLS:
            raise Failure(f"its answer has over {MAX_CALLS} tool calls", kind="nonsense")
        if not last or (name and (id_ != last["id"] if id_ and last["id"] else whole)):
            last = {"index": index, "id": id_, "name": "", "arguments": "", "extra": {}}
            self.calls.append(last)
        last["id"] = last["id"] or id_
        last["name"] += name if name != last["name"] else ""  # some repeat it in every piece
        last["arguments"] += arguments if isinstance(arguments, str) else to_json(arguments)
        last["extra"] |= {key: piece[key] for key in piece if key not in ("index", "id", "type", "function")}

    def response(self, request: LLMRequest) -> LLMResponse:
        """The whole answer; raises Failure where it broke off."""
        calls, used = self.text_calls(), set()
        self.content = "" if calls else self.content
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
        answer.usage = read_usage(self.usage) or estimate_usage(request, answer)
        cut = any(call.error for call in calls) or not (calls or self.ended)
        if self.finish_reason == "error" or (self.finish_reason is None and cut):
            raise Failure("the answer broke off" if text or calls else "it sent no answer", kind="cut")
        return answer


WRAPPERS = re.compile(r"</?(?:\w+:)?(?:tool_calls?|function_calls?)>|^```\w*$", re.MULTILINE)
TAGGED = re.compile(r"<(?:function=|invoke name=\")([\w-]+)\"?>(.*?)</(?:function|invoke)>", re.DOTALL)
PARAMETER = re.compile(r"<parameter(?:=| name=\")(\w+)\"?>\n?(.*?)\n?</parameter>", re.DOTALL)


def read_text_calls(text: str, names: Iterable[str]) -> list[ToolCallRequest]:
    """Calls that a weak model wrote as text: only where they are all of it, and only of the tools named."""
    inside = WRAPPERS.sub(" ", text).strip()
    if TAGGED.sub("", inside).strip():
        found = _calls_in_json(inside) or _calls_in_python(inside)
    else:
        found = [(name, dict(PARAMETER.findall(body)) or body) for name, body in TAGGED.findall(inside)]
    calls = [ToolCallRequest(new_id(), name, *parse_arguments(said, True)) for name, said in found]
    return calls if all(call.name in names for call in calls) else []


def _calls_in_json(text: str) -> list[tuple[str, Any]]:
    """`{"name": "now", "arguments": {}}`, one or several, also as a list."""
    found: list[Any] = []
    while text:
        try:
            value, end = json.JSONDecoder(strict=False).raw_decode(text)
        except (ValueError, RecursionError):
            return []
        found += value if isinstance(value, list) else [value]
        text = text[end:].lstrip(" ,;\n")
    if not all(isinstance(each, dict) for each in found):
        return []
    calls = [(each.get("name"), each.get("arguments", each.get("parameters"))) for each in found]
    return calls if all(isinstance(said, dict | str) for _, said in calls) else []


def _calls_in_python(text: str) -> list[tuple[str, Any]]:
    """`[now(), read_file(path="a.txt")]`."""
    if not text.startswith("["):
        return []
    import ast

    try:
        calls = ast.parse(text, mode="eval").body.elts
        named = [(each.func.id, {k.arg: ast.literal_eval(k.value) for k in each.keywords}) for each in calls]
        return [] if any(each.args for each in calls) else named
    except (SyntaxError, ValueError, AttributeError, RecursionError, MemoryError):
        return []  # it is something else


def read_usage(usage: dict) -> dict:
    """The endpoint's own count in our words, cached tokens under any of their three names; {} without one."""
    with contextlib.suppress(AttributeError, TypeError, ValueError, OverflowError):  # a count that is none
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        cached = cached or usage.get("cached_tokens") or usage.get("prompt_cache_hit_tokens")
        counts = {name: int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")}
        counts |= {"cached_tokens": int(cached or 0), "estimated": False}
        return counts if counts["prompt_tokens"] else {}
    return {}


def estimate_usage(request: LLMRequest, answer: LLMResponse) -> dict:
    asked = len(to_json([request.messages, request.tools])) // 4  # a token of English is about four bytes
    said = len(to_json(answer.to_message())) // 4
    return {"prompt_tokens": asked, "completion_tokens": said, "cached_tokens": 0, "estimated": True}


class ThinkFilter:
    """Takes `<think>…</think>` out of a text that comes in pieces, except within back-quotes.

    A block that is never closed hides all that follows if it began a line; in mid-line it was only a mention.
    """

    mark = re.compile(r"(`+|\n|</?(?:think|thinking|thought)>)")
    unclear = re.compile(r"(?:(?<!`)`+|<[/a-z]{0,9})\Z")  # may be the first half of a mark

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

KEYS = re.compile(
    r"(?i)(bearer |authorization\W+|api[_-]?key\W+)[\w.~+/-]{8,}|\b(sk-|gsk_|xai-|AIza)[\w-]{16,}"
)


def without_keys(value: Any, name: str = "") -> Any:
    """A deep copy with `[key]` for what looks like one, by its form or by the name that it stands under."""
    if isinstance(value, dict):
        return {each: without_keys(inside, each) for each, inside in value.items()}
    if isinstance(value, list):
        return [without_keys(each, name) for each in value]
    return KEYS.sub(r"\1[key]", f"{name}={value}")[len(name) + 1 :] if isinstance(value, str) else value


class Trace:
    """Writes each request and its answer to a file, one JSON object a line; keys are left out."""

    def __init__(self, path: Path):
        private = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.file = open(private, "a", encoding="utf-8", errors="replace")  # noqa: SIM115

    def __call__(self, request: LLMRequest, answer: LLMResponse | None, seconds: float) -> None:
        asked = {name: getattr(request, name) for name in ("model", "options", "tools", "messages")}
        got = {"answer": asdict(answer) if answer else None, "seconds": round(seconds, 3)}  # None: cancelled
        record = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **asked, **got}
        print(to_json(without_keys(record)), file=self.file, flush=True)


class ReplayDiffers(Exception):
    """A request is not the recorded one; shows the first 40 lines in which they differ."""

    def __init__(self, recorded: dict, now: dict):
        from difflib import unified_diff

        old, new = (json.dumps(each, ensure_ascii=False, indent=1).split("\n") for each in (recorded, now))
        changes = itertools.islice(unified_diff(old, new, "recorded", "now", lineterm="", n=2), 40)
        shown = "\n".join(line[:300] for line in changes)
        super().__init__(f"This request is not the recorded one:\n{shown}")


class ReplayProvider(LLMProvider):
    """Plays a trace back, step by step; raises ReplayDiffers where a request is not the recorded one."""

    model = "replay"

    def __init__(self, trace: Path):
        """Raises OSError, or ValueError that names the line which is no record."""
        if trace.exists() and not trace.is_file():
            raise ValueError(f"{trace} is not a file")
        self.rest: list[dict] = []  # what was not played yet; each `answer` is an LLMResponse
        text = trace.read_text(encoding="utf-8", errors="replace")
        for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
            try:
                record = json.loads(line)
                asked = {name: record[name] for name in ("messages", "tools", "options")}
                said = record["answer"] or asdict(failed("This request was cancelled."))
                calls = [ToolCallRequest(**call) for call in said["tool_calls"]]
                self.rest.append({**asked, "answer": LLMResponse(**said | {"tool_calls": calls})})
                legal(asked["messages"])  # raises where a message has not the form of one
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise ValueError(f"{trace}, line {number}: this is no record of a trace") from None

    async def answer(self, request: LLMRequest) -> LLMResponse:
        if not self.rest:
            return failed("The trace has no further step.")
        now = without_keys({"messages": request.messages, "tools": request.tools})
        recorded = {name: self.rest[0][name] for name in now}
        if recorded != now:
            raise ReplayDiffers(recorded, now)
        answer = self.rest.pop(0)["answer"]
        await request.show(*words(answer.content or ""))
        return answer


# ---- You are the model ----
# Nothing shows faster what a model gets to see, and how a call fails: `nanobot agent --provider human`.


class HumanProvider(LLMProvider):
    """You are the model: it shows what a model would see and takes your answer or tool calls.

    `ask(question, words)` gives a line from the person; the words can be completed.
    `check(name, arguments)` says what is wrong with a call, None where nothing is.
    """

    model = "human"
    ask: Callable[[str, list[str]], Awaitable[str]] | None = None
    check: Callable[[str, dict], str | None] | None = None
    seen = LLMRequest([], [], "", {})

    async def answer(self, request: LLMRequest) -> LLMResponse:
        if not self.ask:
            return failed("To be the model you need a terminal.")
        names = [tool["function"]["name"] for tool in request.tools]
        shown, line, answer = self.news(request), "", None
        while not answer:
            line_before = line
            line = (await self.ask("\n".join([*shown, "model> "]), names)).strip()
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
            lines += ["---- tools ----", *map(tool_line, request.tools)]
            lines.append('You are the model. Answer in a line, or call tools: NAME {"path": "a"}')
        return lines

    def read(self, line: str, names: list[str]) -> LLMResponse:
        """`list_dir {} read_file {"path": "a"}` → two calls; a ValueError if one is not whole."""
        calls, rest = [], line
        while rest:
            name = re.match(r"[\w-]*", rest)[0]
            written = rest[len(name) :].lstrip()
            if name not in names:
                break
            if not written.startswith("{"):
                example = f'Is this a call? Then say {name} {{"argument": "value"}}.'
                raise ValueError(f"{example} {self.complaint(name, {})}")
            end = end_of_object(written)
            arguments, problem = parse_arguments(written[:end], repair=False)
            problem = problem or self.complaint(name, arguments)
            if problem:
                raise ValueError(problem)
            calls.append(ToolCallRequest(new_id(name + rest), name, arguments))
            rest = written[end:].lstrip(" \t\r\n,;")
        if calls and rest:
            raise ValueError(f"Behind the call stands what is none: {rest[:100]}")
        return LLMResponse(None, calls, "tool_calls") if calls else LLMResponse(line)

    def complaint(self, name: str, arguments: dict) -> str:
        problem = self.check and self.check(name, arguments)
        return problem or ""


def tool_line(tool: dict) -> str:
    """`read_file (path: string, [offset: integer]): Read …`; [what may be left out]."""
    function = tool["function"]
    schema = function.get("parameters") or {}
    parameters = []
    for name, kind in (schema.get("properties") or {}).items():
        choices = kind if isinstance(kind, dict) else {}  # MCP allows `true`
        kinds = choices.get("enum") or choices.get("type") or "any"
        kinds = [kinds] if isinstance(kinds, str) else kinds
        parameter = f"{name}: {'|'.join(map(str, kinds))}"
        is_required = name in schema.get("required", ())
        parameter = parameter if is_required else f"[{parameter}]"
        parameters.append(parameter)
    return f"{function['name']} ({', '.join(parameters)}): {function.get('description', '')}"


def end_of_object(text: str) -> int:
    """Where the JSON object ends with which a text begins: `{"a": 1} more` → 8; else its end."""
    try:
        return json.JSONDecoder(strict=False).raw_decode(text)[1]
    except (ValueError, RecursionError):
        return len(text)


class ScriptedProvider(LLMProvider):
    """Plays replies back: a text, a ToolCallRequest, a list of these, or an LLMResponse. Keeps `requests`."""

    model = "scripted"

    def __init__(self, replies: Iterable[Any]):
        self.replies = iter(replies)
        self.requests: list[LLMRequest] = []

    async def answer(self, request: LLMRequest) -> LLMResponse:
        self.requests.append(request)
        reply = next(self.replies, failed("The script has no further reply."))
        if isinstance(reply, ToolCallRequest | list):
            reply = LLMResponse(None, reply if isinstance(reply, list) else [reply], "tool_calls")
        reply = LLMResponse(reply) if isinstance(reply, str) else reply
        await request.show(*words(reply.content or ""))
        return reply


# ---- The offline model: rules choose the tools ----
# Without it nothing runs before there is a key. It decides as any model does, by the conversation:
# "what's in a.txt?" → read_file("a.txt"); with the result behind it → "a.txt says: …".

OFFLINE_RULES = "templates/offline/rules.md"  # beside this file, or in nanobot_data/ of a wheel
NO_RULES = f"## anything else\nanswer: I know no rule for that: there is no {OFFLINE_RULES}."
NOT_KNOWN = "I find nothing about that in my memory. Tell me, like: my favourite colour is green"


@dataclass
class Rule:
    """One rule of the file. In its fields <words> stand for what the user says there."""

    title: str
    sentences: dict[str, str]  # as it is written → as a regular expression
    fields: dict[str, str]  # {"tool": "read_file", "path": "<file>", "answer": "<file> says: …"}


@dataclass
class Step:
    """What a rule does: a call, or none where `tool` is empty; and what is said of it."""

    rule: Rule
    answer: str = ""
    tool: str = ""
    arguments: dict = field(default_factory=dict)
    known: dict = field(default_factory=dict)  # what its <words> are


class OfflineProvider(LLMProvider):
    """A stand-in that needs no network: rules choose tools, and what these return makes the answer.

    It keeps no state. Each request holds the question and the results so far: all steps are planned
    anew, and the first one that has no result yet is the next call.
    """

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

    def next_step(self, talk: "Talk") -> LLMResponse:
        steps = self.plan(talk)
        calls = [step for step in steps if step.tool]
        not_called = calls[len(talk.results) :]
        if not_called and talk.tools:
            return calling(not_called[0].tool, not_called[0].arguments)
        results = iter(talk.results)
        reports = []
        for step in steps:
            text = report(step, next(results, "")) if step.tool else step.answer
            reports.append(text)
        titles = dict.fromkeys(f'"{step.rule.title}"' for step in steps)
        source = f"[offline rule {', '.join(titles)}, {OFFLINE_RULES}]"
        return LLMResponse("\n\n".join(filter(None, [self.intro, *reports, source])))

    def plan(self, talk: "Talk") -> list[Step]:
        """All that the message asks for, in order. Results that are there go into later steps."""
        if "# Findings\n" in talk.text:
            return dreamt_lines(talk)
        steps: list[Step] = []
        it = talk.last_file
        for rule, spoken in self.understand(talk.question):
            calls = [step for step in steps if step.tool]
            files = self.files_in(spoken, it)
            steps += self.steps_of(rule, spoken, files, talk, talk.results[len(calls) :])
            it = steps[-1].known.get("file") or it
        return steps

    def steps_of(
        self, rule: Rule, spoken: dict, files: list[str], talk: "Talk", results: list[str]
    ) -> list[Step]:
        fields, answer = rule.fields, rule.fields.get("answer", "")
        known = talk.known | {name: unquoted(text) for name, text in spoken.items()}
        tools = ["read_file", "edit_file"] if {"remember", "append"} & {*fields} else []
        tools += [fields["tool"]] if "tool" in fields else []
        missing = [tool for tool in tools if talk.tools and tool not in talk.tools]
        if missing:
            return [Step(rule, f"For that I need the tool {missing[0]}, which is not here.")]
        if "<file>" in str(fields) and not files:
            return [Step(rule, "Which file do you mean? Name it, like: read a.txt")]
        if "remember" in fields:
            return add_line(rule, {**known, "file": talk.known["memory"]}, results)
        if "append" in fields:
            return add_line(rule, {**known, "file": files[0]}, results)
        if "recall" in fields:
            known["facts"] = self.recall(fill(fields["recall"], known), talk)
            answer = answer if known["facts"] else NOT_KNOWN
        if "sum" in known:
            known["total"] = total(known["sum"])
        if not tools:
            return [Step(rule, fill(answer, known))]
        steps = []
        for file in files or [None]:
            known = {**known, "file": file}
            steps.append(Step(rule, answer, tools[0], arguments_of(fields, known), known))
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
        if "files" in spoken:
            places = re.finditer(self.kinds["a_file"], text.translate(STRAIGHT), re.IGNORECASE)
            names = [text[place.start() : place.end()] for place in places]
        return [unquoted(name) for name in names if name]

    def recall(self, subject: str, talk: "Talk") -> str:
        """What memory and this conversation, or else the history, say of `favourite colour`."""
        facts = section(talk.prompt, "Memory").split("\n")
        for text in talk.earlier:
            facts += self.facts_in(text)
        history = re.split(r"(?<=[.!?])\s|\n", section(talk.prompt, "Recent History"))
        for lines in (facts, history):
            about_it = [line for line in lines if plain_words(subject) <= plain_words(line)]
            if about_it:
                return "\n".join(dict.fromkeys(line.strip("-* ") for line in about_it[-3:]))
        return ""

    def facts_in(self, text: str) -> list[str]:
        """`Hi! My name is Maria.` → ["The user's name is Maria"]"""
        requests = self.understand(text)
        facts = [fill(rule.fields.get("remember", ""), spoken) for rule, spoken in requests]
        return list(filter(None, facts))

    def keep_memory(self, talk: "Talk") -> LLMResponse | None:
        """What Consolidator and Dream ask for: save a conversation, sum it up, find facts."""
        memory, _, conversation = talk.text.partition("\n# Conversation\n")
        spoken = USER_LINE.findall(conversation or talk.text)
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
            facts += OWN_FACT.findall(history)
            new_facts = [f"[MEMORY] {fact}" for fact in dict.fromkeys(facts) if fact not in files]
            return LLMResponse("\n".join(new_facts) or "[SKIP]")
        is_transcript = spoken and not talk.tools and RUNTIME_END not in talk.text
        return LLMResponse(history_entry(spoken, facts)) if is_transcript else None


def calling(tool: str, arguments: dict) -> LLMResponse:
    return LLMResponse(None, [ToolCallRequest(new_id(), tool, arguments)], "tool_calls")


WORKED = {  # how a result begins if the tool did its work; of other tools: not as DID_NOT_WORK
    "read_file": r"\d+\| |\[image: |\(.* is empty\)",
    "write_file": "Wrote ",
    "edit_file": r"--- a/|\(the text is the same|Wrote ",
    "list_dir": r".*: [\d,]+ entr",
    "exec": r"(?s).*Exit code: 0\b",
}
DID_NOT_WORK = r"Cannot |There is no |No (file|match|answer)|Refused|The user|\S+ (was not|failed)"


def report(step: Step, result: str) -> str:
    """What is said of a call. What did not work is told as that, never as a file's content."""
    if not step.answer:
        return ""
    in_a_file = r"\[[\d,]+ characters, too long"  # a long result is put aside
    worked = WORKED.get(step.tool, rf"(?!{DID_NOT_WORK})")
    if not result:
        return f"{step.tool} did not work: the turn has no steps left"
    if not re.match(f"{worked}|{in_a_file}", result):
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
USER_LINE = re.compile(r"(?m)^(?:\[[^\]\n]+\] )*?(?:\[([^\]\n]{16})[^\]\n]*\] )?user: (.+)$")
OWN_FACT = re.compile(r"The user(?:'s .+? is | lives | likes | is from | does not like )[^.;\n]+")
FINDING = re.compile(r"(?m)^\[(MEMORY|USER|SOUL)\] (.+)$")


def add_line(rule: Rule, known: dict, results: list[str]) -> list[Step]:
    """To remember or append is two calls: read the file, and put a line behind what was read."""
    line = fill(rule.fields.get("append") or "- " + rule.fields["remember"], known)
    path, result = known["file"], "".join(results[:1])
    page = "\n".join(re.findall(r"(?m)^\d+\| (.*)$", result))
    known = {**known, "fact": line.removeprefix("- ")}
    reading = Step(rule, "", "read_file", {"path": path}, known)
    longer = with_line(page, line)
    if "append" in rule.fields:
        longer = f"{page}\n{line}" if page else line
        if "go on with offset=" in result:  # not so in memory: a fact may stand anywhere there
            return [reading, Step(rule, f"{path} is too long for me: I read one page.")]
    if longer == page:
        return [reading, Step(rule, f"I know that already: {known['fact']}")]
    edit = {"path": path, "old_text": page, "new_text": longer}
    answer = rule.fields.get("answer", "I will remember: <fact>")
    return [reading, Step(rule, answer, "edit_file", edit, known)]


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


def dreamt_lines(talk: "Talk") -> list[Step]:
    """`[MEMORY] The user's name is Bob` below `# Findings` → the calls that write it there."""
    findings = talk.text.partition("# Findings\n")[2]
    paths = {name: path for path, name in re.findall(r"(?m)^# (.*?(\w+)\.md)$", findings)}
    steps: list[Step] = []
    for name, fact in FINDING.findall(findings):
        calls = [step for step in steps if step.tool]
        known = {"file": paths.get(name, f"{name}.md")}
        steps += add_line(Rule("dream", {}, {"remember": fact}), known, talk.results[len(calls) :])
    return steps


# ---- The offline model: what it sees of a conversation ----
# Without this it would answer the loop's own messages, and "read it again" would mean no file.

RUNTIME_END = "[/Runtime Context]"
# [image: /tmp/a.png]
OF_THE_LOOP = re.compile(r"(?m)^\[(?:image|file|an image|the message|the answer)\b.*\]$")
# - Long-term facts: /home/a b/memory/MEMORY.md
MEMORY_PATH = re.compile(r"(?m)^.*?[:`] ?((?:/|~|\w:\\).*?MEMORY\.md)")


class Talk:
    """A request, as the rules see it: the user's words since the last answer, and what was done."""

    def __init__(self, request: LLMRequest):
        messages = [as_text(message) for message in request.messages]
        begin = 0
        for number, message in enumerate(messages):
            if message["role"] == "assistant" and not message.get("tool_calls"):
                begin = number + 1  # behind the last answer
        before, turn = messages[:begin], messages[begin:]
        asked = texts_of("user", turn)
        added = [text for text in asked[1:] if RUNTIME_END in text]  # the others are the loop's own
        typed = asked[:1] + added
        self.prompt = "".join(texts_of("system", messages))
        self.text = "\n".join(asked)
        self.question = "\n".join(map(words_typed, typed))[:5_000]  # no rule is for more
        self.earlier = list(map(words_typed, texts_of("user", before)))
        self.results = texts_of("tool", turn)
        self.tools = [tool["function"]["name"] for tool in request.tools]
        self.last_file = last_path(before)
        # Time: 2026-04-03 10:02 (Friday), CEST
        times = re.findall(r"(?m)^Time: (.*)", "\n".join(typed)) or ["a time that nobody told me"]
        memory = [*MEMORY_PATH.findall(self.prompt), "MEMORY.md"][0]
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
    return OF_THE_LOOP.sub("", text.rpartition(RUNTIME_END)[2]).strip()


def section(prompt: str, title: str) -> str:
    """What stands below `# Memory` in a system prompt; "" where there is no such part."""
    part = re.search(rf"(?ms)(?:\A|---\n\n)# {title}\n\n(.*?)(?=\n\n---\n\n|\Z)", prompt)
    return part[1] if part else ""


def plain_words(text: str) -> set[str]:
    """`My favorite Color` → {"my", "favourite", "colour"}"""
    return set(re.findall(r"\w+", re.sub(r"(fav|col)or", r"\1our", text.lower())))


# ---- The offline model: how rules are read and filled in ----
# The file is for people: here a sentence becomes a regular expression, and <words> what was said.

STRAIGHT = str.maketrans("“”„‘’\u00a0−–", "\"\"\"'' --")
SHORT = {  # "what's", "whats", "don't"
    "is": r"(?:\s+is|'?s)", "are": r"(?:\s+are|'?re)",
    "am": r"(?:\s+am|'?m)", "not": r"(?:\s+not|n'?t)",
}  # fmt: skip
THE = r"(?:\s+(?:the|an?|my|your|our|all|any|both|this|that|these|those|some|of)\b)*"


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
        elif token == "the":
            regex += THE
        else:
            regex += SHORT.get(token) or rf"\s+{re.escape(token)}"
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
    import shlex

    arguments: dict[str, Any] = {}
    for name, template in fields.items():
        is_said = all(known.get(word) is not None for word in re.findall(r"<(\w+)>", template))
        if name in ("tool", "answer", "schedule") or not is_said:
            continue
        is_put_together = name == "command" and template != "<command>"
        change = shlex.quote if is_put_together else str
        arguments[name] = fill(template, known, change)
        if re.fullmatch(r"\d+|true|false", template):
            arguments[name] = json.loads(template)
    if "schedule" in fields:
        arguments |= schedule(known["when"].lower(), known["time"])
    return arguments


SIGNS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip
IN_PYTHON = {"plus": "+", "minus": "-", "times": "*", "divided by": "/", "x": "*", "×": "*",
             "÷": "/", "% of": "/100*", ",": ""}  # fmt: skip


def total(text: str) -> str:
    """`12*7 plus 3` → `87`"""
    text = text.lower().translate(STRAIGHT).strip()
    for sign_in_words, sign in IN_PYTHON.items():
        text = text.replace(sign_in_words, sign)
    try:
        value = worked_out(ast.parse(text[:200], mode="eval").body)
        return str(value) if isinstance(value, int) else f"{value:.12g}"
    except ZeroDivisionError:
        return "nothing, as nobody can divide by zero"
    except (SyntaxError, KeyError, ValueError, OverflowError, RecursionError, MemoryError):
        return "more than I can work out: I know + - * / and brackets"


def worked_out(node: ast.expr) -> float:
    """Numbers and the four signs; whatever else is in a text is a KeyError or a ValueError."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -worked_out(operand)
        case ast.BinOp(left=left, op=sign, right=right):
            return SIGNS[type(sign)](worked_out(left), worked_out(right))
    raise ValueError("it is no sum of numbers")


SECONDS = {"sec": 1, "min": 60, "hour": 3_600, "hr": 3_600, "day": 86_400, "week": 604_800}
DAYS = {  # as cron names them
    "sunday": "0", "monday": "1", "tuesday": "2", "wednesday": "3", "thursday": "4", "friday": "5",
    "saturday": "6", "weekday": "1-5", "day": "*", "daily": "*", "morning": "*", "week": "1",
}  # fmt: skip


def schedule(when: str, moment: str) -> dict:
    """`in 5 minutes` → {"at": "2026-04-03T10:07"}; `every day at 9` → {"cron_expr": "0 9 * * *"}"""
    from datetime import datetime, timedelta

    span, _, clock = when.partition("at ")
    hour, minute = hour_and_minute(clock or "9")
    number = re.search(r"\d+", span)
    unit = re.search("|".join([*DAYS, *SECONDS, "$"]), when)[0]
    count = int(number[0]) if number else 1
    counts_days = unit in DAYS and not number
    is_of_days = clock or counts_days
    again_and_again = "every" in when or "daily" in when
    if again_and_again and is_of_days:
        return {"cron_expr": f"{minute} {hour} * * {DAYS.get(unit, '*')}"}
    seconds = count * SECONDS.get(unit, 0)
    if again_and_again:
        return {"every_seconds": seconds}
    date = re.match(r"[\d-]+ [\d:]+", moment)  # 2026-04-03 10:02 (Friday), CEST
    now = datetime.fromisoformat(date[0]) if date else datetime.now().replace(microsecond=0)
    if seconds:
        return {"at": (now + timedelta(seconds=seconds)).isoformat()}
    due = now.replace(hour=hour, minute=minute, second=0)
    is_tomorrow = "tomorrow" in when or due <= now
    return {"at": (due + timedelta(days=is_tomorrow)).isoformat()}


def hour_and_minute(clock: str) -> tuple[int, int]:
    """`9:30 pm` → (21, 30)"""
    hour, minute, half = re.match(r"(\d+):?(\d\d)? ?([ap]m)?", clock).groups()
    hours = int(hour) % 24
    if half:
        hours = hours % 12 + 12 * (half == "pm")
    return hours, int(minute or 0)
