"""The model receives a conversation, and returns an answer or tool calls.

A conversation is a list of Chat Completions messages. The model receives exactly such a list:

    [{"role": "system", "content": "You are …"}, {"role": "user", "content": "What is in a.txt?"},
     {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1", "type": "function",
      "function": {"name": "read_file", "arguments": "{\\"path\\": \\"a.txt\\"}"}}]},
     {"role": "tool", "tool_call_id": "call_1", "content": "1| hello"}]

`provider.chat(messages, tools)` returns an `LLMResponse`. If the endpoint fails, the response has
an `error` text with the cause and the remedy. The part "Second reading" handles different endpoints
(tables PROVIDERS and HEALING), streams, recordings, the offline model. You can use this file alone:

    import asyncio
    from providers import ROWS, Endpoint, OpenAIProvider, ScriptedProvider
    model = ScriptedProvider(["It says hello."])
    # model = OpenAIProvider(Endpoint(ROWS["openai"], "sk-…", model="gpt-5-mini"))
    answer = asyncio.run(model.chat([{"role": "user", "content": "What is in a.txt?"}]))
    print(answer.content or answer.error)
"""

from __future__ import annotations

import asyncio
import difflib
import gc
import json
import logging
import re
from asyncio import get_running_loop
from ast import literal_eval
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from json import JSONEncoder
from pathlib import Path
from shlex import quote
from time import monotonic, perf_counter_ns
from typing import NamedTuple
from urllib.parse import urlsplit
from warnings import catch_warnings
from zlib import crc32

log = logging.getLogger("nanobot.providers")
to_json = JSONEncoder(ensure_ascii=False, allow_nan=False).encode  # raises ValueError for NaN
JSON = json.JSONDecoder(strict=False)  # accepts line breaks inside a string
words = re.compile(r"\s*\S+|\s+\Z").findall  # "Hi you" → ["Hi", " you"]
OnDelta = Callable[[str], Awaitable[None]]  # called with each piece of a streamed answer


def no_event(kind: str, **fields):
    """Receives the events of a request if nobody wants them."""


# ---- A request to the model, and the answer ----


@dataclass
class ToolCallRequest:
    """A tool call that the model asks for. If `error` or `denied` is set, the call must not run."""

    id: str
    name: str
    arguments: dict = field(default_factory=dict)
    error: str = ""
    denied: str = ""
    extra: dict = field(default_factory=dict)  # Gemini's `extra_content`, for later requests

    @property
    def input(self) -> dict:
        return self.arguments  # its name in older hooks

    def to_message(self) -> dict:
        """The call as part of an assistant message. Raises ValueError if an argument is NaN."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": to_json(self.arguments)},
            **self.extra,
        }


@dataclass
class LLMResponse:
    """An answer. After a failure, `error` is set and `content` is the text that was shown."""

    content: str | None = None
    tool_calls: list[ToolCallRequest] = field(default_factory=list)
    # others: tool_calls, length, content_filter, refusal, error, ended (see REASONS)
    finish_reason: str | None = "stop"
    usage: dict = field(default_factory=dict)  # {"prompt_tokens": 9, …}, see `read_usage`
    reasoning_content: str | None = None
    error: str | None = None
    extra: dict = field(default_factory=dict)  # the reasoning fields, copied into later requests
    is_overflow: bool = False  # True: the request exceeds the model's context window
    unclear_at: int | None = None  # from here on, `content` is a call or only an example of one

    @property
    def has_tool_calls(self) -> bool:
        return bool(self.tool_calls)

    def to_message(self) -> dict:
        """The assistant message for the conversation. If there is no text, content is None."""
        message = {"role": "assistant", "content": self.content or None, **self.extra}
        if self.tool_calls:
            message["tool_calls"] = [call.to_message() for call in self.tool_calls]
        return message


def calling(tool: str, arguments: dict) -> LLMResponse:
    return LLMResponse(None, [ToolCallRequest(new_id(), tool, arguments)], "tool_calls")


def failed(cause: str, **fields) -> LLMResponse:
    return LLMResponse(finish_reason="error", error=cause, **fields)


@dataclass
class LLMRequest:
    """One request. `options` may have max_tokens, temperature and tool_choice."""

    messages: list[dict]  # the conversation, repaired by `legal`
    tools: list[dict]
    model: str
    options: dict
    on_delta: OnDelta | None
    on_retry: OnDelta | None
    read_only: Collection[str]  # names of the tools that change nothing
    on_event: Callable

    async def show(self, *pieces: str):
        for piece in pieces:
            if piece and self.on_delta:
                await self.on_delta(piece)

    async def tell(self, line: str, **fields):
        """Tell the user why the answer takes longer, for example because of a retry. The event also
        has `fields`: the endpoint's `error`, and the parameters that were `changed`."""
        log.info(line)
        self.on_event("retry", text=line, **fields)
        if self.on_retry:
            await self.on_retry(line)


class LLMProvider:
    """A model. Callers use `chat`; a subclass implements `answer`."""

    model = ""
    is_local = False  # True: a server on the user's own machine
    learnt = {}  # model name → the rows of HEALING that its requests need

    async def chat(
        self,
        messages: list[dict],
        tools: list[dict] | None = None,
        *,
        model: str | None = None,
        on_delta: OnDelta | None = None,
        on_retry: OnDelta | None = None,
        on_event: Callable = no_event,
        read_only: Collection[str] = (),
        **options,
    ) -> LLMResponse:
        """Ask the model. `on_delta` receives pieces of the answer; `on_retry` receives notices;
        `on_event` receives "request", "retry" and "answer", each with its fields.

        `read_only` names the tools whose calls may run although a model wrote them as text after
        other text. Options: max_tokens, temperature, tool_choice. If the endpoint fails, the
        response has `finish_reason="error"`. CancelledError and errors of callbacks are not caught.
        """
        lawful = legal(messages)
        tools = tools or []
        name = model or self.model
        request = LLMRequest(lawful, tools, name, options, on_delta, on_retry, read_only, on_event)
        on_event(
            "request",
            model=name,
            options=options,
            messages=lawful,
            tools=tools,
            healed=[remedy.notice for remedy in self.learnt.get(name, [])],
        )
        began = monotonic()
        response = failed("It was stopped.")  # for the event, if `answer` is cancelled
        try:
            response = await self.answer(request)
        finally:
            on_event("answer", seconds=round(monotonic() - began, 3), answer=response)
        return response

    async def answer(self, request: LLMRequest) -> LLMResponse:
        """Return the model's answer. The whole conversation is in `request.messages`."""
        raise NotImplementedError

    def warm_up(self):
        """Do slow work, like an import, before the first request. Called on another thread."""

    async def close(self):
        """Close open connections. A later `chat` opens new connections."""


# ---- A provider in twenty lines ----


class ScriptedProvider(LLMProvider):
    """Returns the given replies. A reply is a text, a call, a list of calls or an LLMResponse."""

    model = "scripted"

    def __init__(self, replies: Iterable):
        self.replies = iter(replies)
        self.requests = []  # of LLMRequest

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


# ---- A lawful history, which every endpoint accepts ----


def legal(messages: list[dict]) -> list[dict]:
    """Copy a conversation and repair the copy, so that every endpoint accepts the copy. Idempotent.

    user "List the files"                  user "List the files"
    assistant: calls 1 and 2        →      assistant: calls 1 and 2
    tool 2 "a.txt"                         tool 1 "[interrupted: its outcome is unknown. …]"
    user "Well?"                           tool 2 "a.txt"
    user "Go on"                           user "Well?\\n\\nGo on"
    assistant "I will"

    At most one system message comes first, then a user message. Adjacent messages of one role are
    joined. Each call has one result. Ids are unique, texts are not empty. Unknown keys are removed,
    and an assistant message at the end, because the model is to write it.
    """
    clean = [clean_message(message) for message in messages]
    system = [message for message in clean if message["role"] == "system"]
    talk = with_results([message for message in clean if message["role"] != "system"])
    if not talk or talk[0]["role"] != "user":
        talk.insert(0, {"role": "user", "content": "(earlier messages are left out)"})
    lawful = with_neighbours_joined(system + talk)
    if lawful[-1]["role"] == "assistant":
        lawful.pop()
    return without_surrogates(lawful)


# ---- An endpoint: ask, change a refused request, wait and retry ----


@dataclass
class Failure(Exception):
    """A request failed. The table TROUBLES has a row for each kind of failure: how often to retry,
    and what to tell the user. For example:

    "busy" (429, 5xx)    three retries          "key" (401)     no retry
    "loading" (503)      six retries            "unpaid" (402)  no retry
    "overflow"           no retry: the runner sends a shorter request
    """

    cause: str
    kind: str  # a key of TROUBLES
    text: str = ""  # the whole text of the endpoint's error
    status: int | None = None
    seconds: float = 0.0  # the delay that the endpoint asks for
    shown: str = ""  # the part of the answer that the user saw


class OpenAIProvider(LLMProvider):
    """A Chat Completions endpoint. Timeouts are in seconds; `pace` multiplies the retry delays."""

    is_warned = False  # True: the user was warned that the server cuts requests

    def __init__(
        self,
        endpoint: Endpoint,
        request_timeout: float = 300,
        idle_timeout: float = 90,
        pace: float = 1,
    ):
        self.endpoint = replace(
            endpoint,
            api_key=endpoint.api_key.strip(),  # no header may contain a line break
            api_base=endpoint.api_base or endpoint.spec.default_api_base,
        )
        self.model = endpoint.model
        self.pace = pace
        self.is_local = endpoint.spec.is_local
        self.connection = Connection(self.endpoint, request_timeout, idle_timeout)
        self.learnt = {}  # model name → remedies that the model needs

    async def answer(self, request: LLMRequest) -> LLMResponse:
        """Repeat the request until there is an answer, or until a further attempt cannot help.

        400 "'max_tokens' is not supported"  → change the body (`HEALING`) and retry at once
        429 "try again in 20s"               → retry after 20 s (if no time is given: 1, 2 and 4 s)
        401, 429 "exceeded your current quota", any error after shown text
                                             → return an answer with cause and fix in `error`
        """
        remedies = list(self.learnt.get(request.model, []))
        body = request_body(self.endpoint, request, remedies)
        retries = 0
        while True:
            try:
                response = await self._ask(request, body)
                self.learnt[request.model] = [each for each in remedies if each.is_remembered]
                await self._warn_if_cut(request, response)
                return response
            except Failure as failure:
                remedy = find_remedy(failure, body, remedies)
                if remedy:
                    remedies.append(remedy)
                    changed = remedy.change(body)
                    await request.tell(
                        f"{self.endpoint.spec.name}, {request.model}: {remedy.notice}",
                        error=failure.cause,
                        changed=difference(body, changed),
                    )
                    body = changed
                elif retries < TROUBLES[failure.kind].retries and not failure.shown:
                    seconds = min(failure.seconds or 2.0**retries, 60.0)
                    retries += 1
                    await request.tell(
                        f"{failure.cause}; asking again in {seconds:.0f} s", error=failure.cause
                    )
                    await asyncio.sleep(seconds * self.pace)
                else:
                    return await self._give_up(failure)

    async def _give_up(self, failure):
        """The answer with the cause and what to do; for a wrong model, with the offered models."""
        error = explanation(failure, self.endpoint)
        if failure.kind == "model":
            error += f" {await self.check() or 'Choose another with --model.'}"
        return failed(error, content=failure.shown or None, is_overflow=failure.kind == "overflow")

    async def _ask(self, request, body):
        """Make one HTTP attempt. Raises Failure. An exception in `on_delta` is not caught."""
        reads_text = self.endpoint.text_tool_calls == "on"
        if self.endpoint.text_tool_calls == "auto":
            # local models write calls as text, and so does a model that got the tools as text
            reads_text = self.is_local or "tools" not in body
        reader = AnswerReader(request, reads_text)
        try:
            async with aclosing(self.connection.chunks(body)) as chunks:
                async for chunk in chunks:
                    await request.show(reader.feed(chunk))
            await request.show(reader.close())
            return reader.whole()
        except Failure as failure:
            failure.cause = self.endpoint.without_secrets(failure.cause)
            if request.on_delta:
                failure.shown = reader.shown
            raise

    async def _warn_if_cut(self, request, answer):
        """Warn once if the server cut the request. Ollama does so silently, beyond its
        context window (4,096 tokens by default). `sent` is an estimate, hence the factor 2."""
        if self.is_warned or not self.is_local:
            return
        read = answer.usage["prompt_tokens"]
        sent = estimate_usage(request, answer)["prompt_tokens"]
        if 1_000 < read < 5_000 and sent > 2 * read:
            self.is_warned = True
            await request.tell(
                f"The server read {read:,} of about {sent:,} tokens. Set a larger context. "
                "For Ollama: OLLAMA_CONTEXT_LENGTH=64000 ollama serve"
            )

    def warm_up(self):
        with suppress(ImportError):  # the first request reports a missing package
            load_sdk()

    async def close(self):
        await self.connection.close()

    async def check(self) -> str | None:
        """Check address, key and model. Returns the problem in one line, or None."""
        try:
            offered = await self.connection.models()
        except Exception as problem:
            return explanation(as_failure(problem), self.endpoint)
        if not offered or self.model in offered:
            return None
        return f"Set --model or NANOBOT_MODEL to one of these models: {', '.join(offered[:20])}"


def request_body(endpoint, request, remedies):
    """Return {"model": "m", "messages": […], …}, with the changes that this model needs."""
    body = {
        "model": request.model,
        "messages": request.messages,
        "tools": request.tools or None,
        **request.options,
    }
    if "max_tokens" in body:
        body[endpoint.spec.max_tokens_field] = body.pop("max_tokens")
    if request.on_delta:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    body = without_none(body | endpoint.extra_body)
    if endpoint.spec.supports_prompt_caching:
        body = with_cache_mark(body)
    for remedy in remedies:
        body = remedy.change(body)
    return body


# ---- A model without a network ----


class OfflineProvider(LLMProvider):
    """Rules in a file select the calls: "what's in a.txt?" → read_file("a.txt").

    The provider has no state, so it plans all calls of the turn again for each request. The answer
    is the first call that has no result yet, or a text if every call has a result.
    """

    model = "offline"

    def __init__(self, rules: str = ""):
        self.rules = Rules(rules or beside_this_file())

    async def answer(self, request: LLMRequest) -> LLMResponse:
        plan = Plan(request, self.rules)
        text = plan.answer()
        answer = calling(*plan.next_call) if plan.next_call else LLMResponse(text)
        answer.reasoning_content = f"rules and their words: {plan.matches}"  # visible in traces
        await request.show(*words(answer.content or ""))
        answer.usage = estimate_usage(request, answer)
        return answer


# ======== Second reading: how to cope with real histories, endpoints and answers ========

# ---- How a history is made lawful ----
# If a program is killed during a call, the call has no result. Endpoints then send the error
# "An assistant message with 'tool_calls' must be followed by tool messages responding to each …".

REASONING = ("reasoning_content", "reasoning", "reasoning_details")  # copied into later requests
KNOWN_KEYS = ("role", "content", "tool_calls", "tool_call_id", *REASONING)
NO_RESULT = "[interrupted: its outcome is unknown. Check before you repeat it]"


def clean_message(message):
    """Copy the known keys of a message, and fill in a blank text."""
    clean = {key: message[key] for key in KNOWN_KEYS if message.get(key)}
    if not str(clean.get("content", "")).strip():  # str(), because it may be a list of blocks
        # no filler in assistant messages, because models imitate their own messages
        clean["content"] = None if clean["role"] == "assistant" else "(empty)"
    return clean


def with_results(messages):
    """Give each call a unique id and exactly one result; drop results without a call, and messages
    with neither text nor calls.

    Some endpoints use the same ids again in each answer. Therefore each result is matched only with
    the calls of the nearest earlier message that has calls.
    """
    paired = []
    used_ids = set()
    open_results = defaultdict(list)  # old id → results in `paired` that still are NO_RESULT
    for message in messages:
        if message["role"] == "tool":
            fitting = open_results[message.get("tool_call_id")]
            if fitting:
                fitting.pop(0)["content"] = message["content"]
            continue
        calls = [dict(call) for call in message.get("tool_calls", [])]
        if calls:
            message["tool_calls"] = calls
            open_results.clear()
        if calls or message["content"]:
            paired.append(message)
        for call in calls:
            old_id = call["id"]
            if old_id in used_ids:
                call["id"] = nine_digits(len(used_ids))
            used_ids.add(call["id"])
            result = {
                "role": "tool",
                "tool_call_id": call["id"],
                "content": NO_RESULT,
                "name": call["function"]["name"],  # Gemini requires the name
            }
            open_results[old_id].append(result)
            paired.append(result)
    return paired


def new_id():
    """Make the id of a call that has none."""
    return nine_digits(perf_counter_ns())


def nine_digits(number):
    """7 → "000000007". As the id of a call, every endpoint accepts it; Mistral accepts no other."""
    return f"{number % 10**9:09d}"


def with_neighbours_joined(messages):
    """user "a", user [image] → user [text "a", image].  Of two reasonings the first is kept."""
    joined = messages[:1]
    for message in messages[1:]:
        above = joined[-1]
        if above["role"] == message["role"] != "tool":
            joined[-1] = {
                **message,
                **above,
                "content": joined_content(above["content"], message["content"]),
            }
        else:
            joined.append(message)
    return joined


def joined_content(above, below):
    """Join two texts or lists of blocks; `below` is None if its message has only calls."""
    if isinstance(above, list) or isinstance(below, list):
        return as_blocks(above) + as_blocks(below)
    return f"{above}\n\n{below}" if below else above


def as_blocks(content):
    """ "Hi" → [{"type": "text", "text": "Hi"}]"""
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def without_surrogates(value):
    """Repair surrogates, which UTF-8 cannot encode: "\\ud83d\\ude00 \\ud83d" → "😀 ?"."""
    try:
        to_json(value).encode()
    except UnicodeEncodeError:
        joined = json.loads(json.dumps(value))  # `json.loads` combines two surrogates
        return json.loads(to_json(joined).encode(errors="replace"))
    return value


# ---- Arguments of tool calls ----
# Small models write {'path': 'a.txt',}; the code repairs this. The code never repairs arguments
# that were cut off, because a part of a command, like '{"command":"rm -rf bui', must not run.

JSON_STRING = r"""(?s)"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'"""  # "a \" b" or 'a'


def parse_arguments(written, repair):
    """Return a call's arguments and an error: `({}, "its arguments are not valid JSON …")`."""
    try:
        text = written if isinstance(written, str) else to_json(written)
        value = without_surrogates(load_json(text.strip() or "{}", repair))  # raises for NaN
    except Exception as problem:  # ValueError, RecursionError, and whatever json-repair raises
        return {}, f"its arguments are not valid JSON ({problem})"
    if not isinstance(value, dict):
        return {}, f"its arguments must be one JSON object, not {text[:100]!r}"
    return value, ""


def load_json(text, repair):
    """Parse JSON, or raise ValueError. If `repair` is set, try a Python dict, then json-repair.
    Incomplete JSON is never repaired. A text of over 10,000 characters is not repaired either,
    because the time for a repair grows with the square of the length.
    """
    try:
        return JSON.decode(text)
    except ValueError:
        if not repair or len(text) > 10_000 or is_cut_off(text):
            raise
    # the text is complete, but no JSON
    try:
        with catch_warnings(action="ignore"):  # "\\d" causes a SyntaxWarning
            return literal_eval(text)  # {'path': 'a.txt', 'all': True}
    except Exception:
        import json_repair

        return json_repair.loads(text)


def is_cut_off(text):
    """Return True if the text ends inside a string or an object: `{"command":"rm -rf bui`."""
    rest = re.sub(JSON_STRING, "", text)
    return rest.count("{") > rest.count("}") or '"' in rest or "'" in rest


# ---- Which endpoint gets the request ----
# One table contains all endpoints. If the code picks a wrong row, another company gets the API key.


class ProviderSpec(NamedTuple):
    """A row of the table PROVIDERS: all facts about one endpoint."""

    name: str
    default_api_base: str = ""
    env_key: str = ""  # environment variable with the API key; if empty, it is the user's server
    keywords: str = ""  # regular expression for the start of model names: gpt|o1
    hosts: str = ""  # other ends of host and port, such as ".api.z.ai" or ":1234"
    key_prefix: str = ""  # keys begin with it, like gsk_
    default_model: str = ""
    is_gateway: bool = False  # True: it offers models of many makers, like openai/gpt-5
    is_local: bool = False  # True: the server needs no key and is asked without a proxy
    supports_prompt_caching: bool = False  # True: the endpoint caches only marked texts
    max_tokens_field: str = "max_tokens"


# The order counts for a model of an unknown maker: the user's own servers, gateways, makers
PROVIDERS = [  # name, default_api_base, env_key, keywords, hosts
    ProviderSpec("ollama", "http://localhost:11434/v1", hosts=":11434", is_local=True),
    ProviderSpec("lmstudio", "http://localhost:1234/v1", hosts=":1234", is_local=True),
    ProviderSpec("vllm", "http://localhost:8000/v1", is_local=True),
    ProviderSpec("llamacpp", "http://localhost:8080/v1", is_local=True),
    ProviderSpec("local", "http://localhost:8000/v1", is_local=True),
    ProviderSpec("custom"),
    ProviderSpec(
        "openrouter",
        "https://openrouter.ai/api/v1",
        "OPENROUTER_API_KEY",
        default_model="openrouter/auto",
        key_prefix="sk-or-",
        is_gateway=True,
        supports_prompt_caching=True,
    ),
    ProviderSpec(
        "siliconflow",
        "https://api.siliconflow.cn/v1",
        "SILICONFLOW_API_KEY",
        hosts=".api.siliconflow.com",
        is_gateway=True,
    ),
    ProviderSpec("aihubmix", "https://aihubmix.com/v1", "AIHUBMIX_API_KEY", is_gateway=True),
    ProviderSpec(
        "openai",
        "https://api.openai.com/v1",
        "OPENAI_API_KEY",
        "gpt|chatgpt|o1|o3|o4",
        default_model="gpt-5-mini",
        max_tokens_field="max_completion_tokens",
    ),
    ProviderSpec(
        "anthropic",
        "https://api.anthropic.com/v1",
        "ANTHROPIC_API_KEY",
        "claude",
        key_prefix="sk-ant-",
        default_model="claude-sonnet-4-5",
    ),
    ProviderSpec(
        "deepseek",
        "https://api.deepseek.com/v1",
        "DEEPSEEK_API_KEY",
        "deepseek",
        default_model="deepseek-chat",
    ),
    ProviderSpec(
        "gemini",
        "https://generativelanguage.googleapis.com/v1beta/openai",
        "GEMINI_API_KEY",
        "gemini|gemma",
        key_prefix="AIza",
        default_model="gemini-flash-latest",
    ),
    ProviderSpec("groq", "https://api.groq.com/openai/v1", "GROQ_API_KEY", key_prefix="gsk_"),
    ProviderSpec(
        "mistral",
        "https://api.mistral.ai/v1",
        "MISTRAL_API_KEY",
        "mistral|codestral",
        default_model="mistral-medium-latest",
    ),
    ProviderSpec(
        "moonshot",
        "https://api.moonshot.ai/v1",
        "MOONSHOT_API_KEY",
        "kimi|moonshot",
        ".api.moonshot.cn",
    ),
    ProviderSpec(
        "zhipu", "https://open.bigmodel.cn/api/paas/v4", "ZAI_API_KEY", "glm", ".api.z.ai"
    ),
    ProviderSpec(
        "minimax", "https://api.minimax.io/v1", "MINIMAX_API_KEY", "minimax", ".minimaxi.com"
    ),
    ProviderSpec(
        "dashscope",
        "https://dashscope.aliyuncs.com/compatible-mode/v1",
        "DASHSCOPE_API_KEY",
        "qwen",
        ".dashscope-intl.aliyuncs.com",
        default_model="qwen-plus",
    ),
    ProviderSpec("volcengine", "https://ark.cn-beijing.volces.com/api/v3", "ARK_API_KEY", "doubao"),
    ProviderSpec(
        "xai",
        "https://api.x.ai/v1",
        "XAI_API_KEY",
        "grok",
        key_prefix="xai-",
        default_model="grok-4",
    ),
    ProviderSpec(  # each customer has a host: kit.openai.azure.com
        "azure",
        env_key="AZURE_OPENAI_API_KEY",
        hosts=".openai.azure.com .services.ai.azure.com",
        max_tokens_field="max_completion_tokens",
    ),
]
ROWS = {row.name: row for row in PROVIDERS}


@dataclass
class Endpoint:
    """The target of requests: a row of PROVIDERS, the user's key and address, and the model."""

    spec: ProviderSpec
    api_key: str = ""
    api_base: str = ""
    model: str = ""
    extra_headers: dict = field(default_factory=dict)
    extra_body: dict = field(default_factory=dict)
    text_tool_calls: str = "auto"  # run calls written as text? on, off, auto (local models)

    def without_secrets(self, text):
        """Hide API keys and URL passwords, because error texts of servers may contain them."""
        for secret in [self.api_key, *self.extra_headers.values()]:
            if len(secret) > 7:  # but not "ollama"
                text = text.replace(secret, "[key]")
        return re.sub("//[^/@ ]*@", "//", text)


def choose_endpoint(settings, model="", provider="", base_url="", general_key=""):
    """Choose the row, the address and the key from `settings` (row name → endpoint).

    The first of these decides the row: a maker's base URL, `provider`, any other base URL, `model`.
    A row's key and headers never reach another row's host; the user's own server gets `general_key`
    (OPENAI_API_KEY). Returns None if no row is usable. Raises ValueError for a wrong setting."""
    if provider and provider not in ROWS:
        raise ValueError(
            f"There is no provider {provider!r}. There are: {', '.join(ROWS)}, offline, human."
        )
    known = {row.name: replace(settings.get(row.name, Endpoint(row))) for row in PROVIDERS}
    key = known["openai"].api_key
    for row in PROVIDERS:  # OPENAI_API_KEY=sk-or-… contains a key of OpenRouter
        if row.key_prefix and key.startswith(row.key_prefix):
            known[row.name].api_key = key
            known["openai"].api_key = ""
    spec = host = row_of_address(base_url)  # "custom" if there is no base URL
    if provider and not host.env_key:  # the address of a row with keys decides alone
        spec = ROWS[provider]
    elif not base_url:
        spec = row_of_model(known, model)
    if not spec:
        return None
    chosen = known[spec.name]
    address = base_url or chosen.api_base or spec.default_api_base
    if not re.match("https?://.", address):
        raise ValueError(
            f"Provider {spec.name} needs an address with http:// or https://, not {address!r}. "
            "Set its apiBase, or --base-url."
        )
    if spec.env_key and not chosen.api_key and not base_url:  # else the endpoint itself refuses
        raise ValueError(f"Provider {spec.name} has no key: set {spec.env_key}.")
    if base_url and not host.env_key:  # the user's own server
        if spec.env_key:  # `--provider openai`: openai's key and headers are for openai's host
            chosen = Endpoint(spec)
        chosen.api_key = chosen.api_key or general_key
    if spec.is_local and not urlsplit(address).path.strip("/"):
        address = address.rstrip("/") + "/v1"  # http://localhost:9000 → http://localhost:9000/v1
    # groq/llama-3 → llama-3, openrouter/openai/gpt-5 → openai/gpt-5; but openrouter/auto stays
    prefix, _, rest = model.partition("/")
    if prefix == spec.name and ("/" in rest or not spec.is_gateway):
        model = rest
    return replace(chosen, api_base=address, model=model or spec.default_model)


def row_of_address(base_url):
    """Find the row for a base URL: eu.api.openai.com → openai, other hosts → local or custom."""
    # .api.openai.com or .localhost:11434; with the dot, evil-api.openai.com does not fit
    host = "." + urlsplit(base_url).netloc.rpartition("@")[2]
    for row in PROVIDERS:
        if host.endswith(("." + urlsplit(row.default_api_base).netloc, *row.hosts.split())):
            return row
    # .localhost:9000, .127.0.0.1:9000, .192.168.0.7
    is_local = re.match(r"\.(localhost|0\.0\.0\.0|\[::1\])(:|$)|\.(127|10|192\.168)\.", host)
    return ROWS["local" if is_local else "custom"]


def row_of_model(known, model):
    """Choose among the rows that the user gave a key or an address: the row of the model's maker,
    or else the first one. If this is another maker, which would refuse the model, raise ValueError.
    """
    usable = [
        endpoint.spec
        for endpoint in known.values()
        if endpoint.api_base or (endpoint.api_key and endpoint.spec.default_api_base)
    ]
    maker = maker_of(model)
    if maker and (maker.is_local or maker in usable):
        return maker
    if not usable:
        return None
    first = usable[0]
    if maker and first.env_key and not first.is_gateway:
        raise ValueError(
            f"{model} is a model of {maker.name}: set {maker.env_key or 'its apiBase'}, "
            "or name a gateway with --provider"
        )
    return first


def maker_of(model):
    """`ollama/llama3` → ollama;  `gpt-5`, `hf.co/gpt-5` → openai;  `unheard-of` → None"""
    prefix = model.partition("/")[0]
    if prefix in ROWS:
        return ROWS[prefix]
    for row in PROVIDERS:
        if row.keywords and re.search(f"(?i)(?<![a-z0-9])({row.keywords})", model):
            return row
    return None


# ---- What went wrong ----
# The SDK's error text is often only "Connection error.". This part finds the cause of the error.


class Trouble(NamedTuple):  # a row of TROUBLES
    # a regular expression for what `kind_of` gets: the status and the text of an endpoint's error
    # (`429 {'error': 'Slow down'}`), or two names of exceptions (`APIConnectionError ConnectError`)
    pattern: str
    advice: str = "{where} failed: {cause}"  # for the user: the cause, then what to do
    retries: int = 0
    cause: str = ""  # if empty, the cause is the text of the endpoint or of the exception


STATUS = "(^|'code': )"  # it begins the text; after a "200 OK", only the body has a code
WAIT_FOR = r"(?:try again|retry)\w{0,9} (?:in|after) (?=\d)"  # as in "Please try again in 5.2s"
TROUBLES = {  # the first row whose pattern fits
    # llama.cpp "Loading model"; the six delays of 1 to 32 s take a minute
    "loading": Trouble("^503 .*(loading model|currently loading)", retries=6),
    # Anthropic "prompt is too long: 213462 tokens", OpenAI "exceeds the context window". Cerebras
    # sends 400 or 413 without text. More examples are in tests/data/provider_errors.json
    "overflow": Trouble(
        r"^413 |^400 \W*$|prompt (is )?too long|n_keep|input is too long|"
        "exceeds? the (context window|available context size)|token count.*exceeds the|"
        "maximum (prompt|context) length is|context_length_exceeded|request too large|"
        "reduce (the length of the|your) message|(than the|with) context length|"
        "context ?window ?exceed|exceeded model token limit|too large for model with|"
        "context size has been exceeded|range of input length|`?inputs`? (tokens|must have less)",
        "{where}: the conversation is too long for the model ({cause}). Begin a new "
        "conversation with /new. If a single message is too long, put its text into a file.",
    ),
    # "You exceeded your current quota", "Insufficient Balance", "余额不足". But "quota exceeded,
    # try again in 20s" is a rate limit, and a 401 with "insufficient permissions" is about the key
    "unpaid": Trouble(
        rf"^(?!401 |5\d\d |.*{WAIT_FOR})"
        "(402 |.*('code': 402|insufficient|exceeded.{0,20}quota|billing|credit|balance|payment|"
        "余额|欠费))",
        "{where} reports a billing problem ({cause}). Add credit, or use another --provider.",
    ),
    # "The engine is currently overloaded", "Rate limit reached", Groq 400 "tool_use_failed"
    "busy": Trouble(
        rf"{STATUS}(408|409|429|5\d\d)\b|{WAIT_FOR}|overloaded|rate.?limit|访问量过大|速率限制|"
        "tool_use_failed",
        retries=3,
    ),
    # xAI "Incorrect API key provided", Gemini "API key not valid", LiteLLM "No connected db"
    "key": Trouble(
        rf"{STATUS}40[13]\b|incorrect api key|api key not valid|no connected db",
        "{where} refuses the key ({cause}). Replace {variable}.",
    ),
    # "is not a valid model ID", DeepSeek "Model Not Exist", LiteLLM "Invalid model name passed in"
    "model": Trouble(
        "no model|not a valid model|model not exist|invalid model name|^404 .*model|"
        "provide a model|model is required",
        "{where} has no such model ({cause}).",
    ),
    "nonsense": Trouble(
        "^40[45] ",
        "{where} does not answer like a model ({cause}). Base URLs mostly end in /v1.",
    ),
    "closed": Trouble(
        "^(APIConnectionError )?(RemoteProtocol|Read|Write)Error",
        retries=3,
        cause="it closed the connection",
    ),
    "network": Trouble(
        "^APIConnectionError|^APITimeoutError ConnectTimeout",
        "Cannot reach {where} ({cause}). Is the address right, and is the server running?",
        retries=3,
    ),
    "timeout": Trouble(
        r"^\w*Timeout",
        "{where} gave no answer in time. Ask again, or try a smaller model.",
        retries=1,
        cause="no answer in time",
    ),
    # "No module named 'openai'", "DLL load failed while importing jiter"
    "package": Trouble(
        "^(ModuleNotFound|Import)Error",
        "The openai package cannot be loaded ({cause}). Install it: "
        "pip install --force-reinstall openai",
    ),
    "other": Trouble(""),  # fits every text
}


def explanation(failure, endpoint):
    """The text for the user: the cause, then what to do."""
    return endpoint.without_secrets(
        TROUBLES[failure.kind].advice.format(
            where=endpoint.api_base,
            cause=failure.cause,
            variable=endpoint.spec.env_key or "OPENAI_API_KEY",
        )
    )


def kind_of(text):
    """Find the row of TROUBLES: "429 {'error': 'Slow down'}" → "busy". The last row always fits."""
    for kind, row in TROUBLES.items():
        if re.search(f"(?is){row.pattern}", text):
            return kind


def as_failure(problem):
    """Convert an error of the SDK, the network or the server's data to Failure."""
    if isinstance(problem, Failure):
        return problem
    log.debug("the request failed", exc_info=problem)
    response = getattr(problem, "response", None)
    if response is not None:  # an HTTP error
        return refusal(problem.body, response.status_code, response.headers.get("retry-after", ""))
    source = problem.__cause__  # ConnectError("No route to host"), below "Connection error."
    kind = kind_of(f"{type(problem).__name__} {type(source).__name__}")
    return Failure(TROUBLES[kind].cause or str(source or problem), kind)


# in JSON: "message": "Unknown name \"x\""
ERROR_TEXT = r'"(?:message|error|raw)": ("(?:[^"\\]|\\.)*")'


def refusal(body, status=None, wait=""):
    """Find the error messages at any depth of an error's JSON, and the delay that it asks for;
    `wait` is the value of the header retry-after.

    [{"error":{"code":400,"message":"Unknown name"}}]  → Failure("Unknown name", …)
    """
    text = str(body or "")[:4_000]  # enough text for each pattern, and the search stays fast
    messages = map(JSON.decode, re.findall(ERROR_TEXT, json.dumps(body)))
    line = " ".join((": ".join(messages) or text).split())[:500]
    cause = f"HTTP {status}: {line}" if status else line
    # the header first, in the words of an error text: "retry after 20s"
    delay = re.search(
        rf"(?i){WAIT_FOR}(\d{{1,9}}(?:\.\d{{1,9}})?) ?s", f"retry after {wait}s, {text}"
    )
    seconds = float(delay[1]) if delay else 0.0
    return Failure(cause, kind_of(f"{status} {text}"), text, status, seconds)


# ---- What endpoints refuse, and what helps ----
# 400 "'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead." No table
# can list such rules for each model, but the endpoint's error text contains the necessary change.


class Remedy(NamedTuple):  # a row of HEALING
    complaint: str  # a regular expression for the endpoint's error text
    notice: str  # shown to the user
    change: Callable  # the body of a request → a changed copy
    is_remembered: bool = True  # True: all later requests to this model need the change, too


def find_remedy(failure, body, tried):
    """Find the first remedy that fits the error and changes the body, or else leave out the
    parameters that the error refuses."""
    # None: the error arrived in the stream, after a "200 OK"
    if failure.shown or failure.status not in (None, 400, 404, 405, 413, 415, 422, 500):
        return None
    for remedy in HEALING:
        if (
            re.search(f"(?is){remedy.complaint}", failure.text)
            and remedy not in tried
            and remedy.change(body) != body
        ):
            return remedy
    refused = [
        name
        for name in body
        if name not in ("model", "messages", "tools") and is_refused(name, failure.text)
    ]
    if not refused:
        return None
    return Remedy(
        "",
        f"{' and '.join(refused)} is left out: this model does not accept it",
        setting(**dict.fromkeys(refused)),
    )


# "Unsupported parameter", "Extra inputs are not permitted", "Only the default (1) is supported"
REFUSAL = (
    "(?i)support|unknown|unrecognized|unexpected|extra|forbidden|deprecated|incompatible|"
    "cannot|must|only|may not"
)


def is_refused(name, complaint):
    """True if an error refuses a parameter. A plain word must be in quotes or follow certain words.

    Groq "property 'store' is unsupported", xAI "Argument not supported on this model: stop", Ollama
    "does not support thinking", xAI "does not support parameter reasoningEffort"
    """
    if "_" in name:
        mention = r"\b" + name.replace("_", "_?") + r"\b"  # xAI writes reasoningEffort
    else:
        mention = rf"['\"`]{name}\\*['\"`]|(: |support |parameter |invalid ){name}\b"
    # without a word of refusal, the server may only have repeated the whole request in its error
    return re.search(REFUSAL, complaint) and re.search(f"(?i){mention}", complaint)


def difference(old, new):
    """The parameters that a remedy has changed: {"stop": None}. The long ones are left out."""
    return {
        name: new.get(name)
        for name in old | new
        if name not in ("messages", "tools") and old.get(name) != new.get(name)
    }


def setting(**values):
    """A change that sets the parameters in `values`; the value None removes a parameter."""
    return lambda body: without_none(body | values)


def without_none(body):
    return {name: value for name, value in body.items() if value is not None}


def in_messages(change):
    """Decorator: make a change of a request from the change of a message."""
    return lambda body: {**body, "messages": [change(each) for each in body["messages"]]}


def without_unwanted_keys(body):
    """Remove the keys in UNWANTED at every depth."""

    def kept(found):
        return {key: found[key] for key in found if not re.fullmatch(UNWANTED, key)}

    return json.loads(to_json(body), object_hook=kept)


def as_text(message):
    """Join the blocks of a message into one text, and replace each image with a line of text."""
    if not isinstance(message["content"], list):
        return message
    return {
        **message,
        "content": "\n\n".join(
            block.get("text") or "[an image: this model cannot see it]"
            for block in message["content"]
        ),
    }


@in_messages
def with_some_reasoning(message):
    """Add an empty reasoning to an answer that has none."""
    return {"reasoning_content": "", **message} if message["role"] == "assistant" else message


@in_messages
def with_signature(message):
    """Add a dummy signature to the first call if the call has none, because Gemini requires one."""
    if "tool_calls" not in message:
        return message
    first, *rest = message["tool_calls"]
    signature = {"google": {"thought_signature": "skip_thought_signature_validator"}}
    return {**message, "tool_calls": [{"extra_content": signature, **first}, *rest]}


@in_messages
def without_extras(message):
    """Remove the reasoning, and from results the names of their tools."""
    return {key: message[key] for key in message if key not in (*REASONING, "name")}


@in_messages
def with_short_ids(message):
    """call_8bXe0aTzQmW2 → 588788278, in the call and in its result. The arguments of a call are a
    text, so an `id` in them stays."""

    def shortened(found):
        for key in ("id", "tool_call_id"):
            if key in found:
                found[key] = nine_digits(crc32(str(found[key]).encode()))
        return found

    return json.loads(to_json(message), object_hook=shortened)


def with_system_as_user(body):
    """system "You are …", user "Hi" → user "You are …\\n\\nHi"."""
    first, *rest = body["messages"]
    return {**body, "messages": legal([{**first, "role": "user"}, *rest])}


TOOLS_AS_TEXT = """You have tools. To call tools, answer only with one line like this for each call:
<tool_call>{"name": "the tool's name", "arguments": {"a parameter": "its value"}}</tool_call>
The result of a call comes back as <tool_result>. These are the tools:
"""


def tools_as_text(body):
    """Describe the tools in the system message, and write calls and results as text."""
    messages = [calls_as_text(message) for message in body["messages"]]
    if "tools" in body:
        lines = "\n".join(to_json(tool["function"]) for tool in body["tools"])
        messages.append({"role": "system", "content": TOOLS_AS_TEXT + lines})
    return without_none({**body, "messages": legal(messages), "tools": None, "tool_choice": None})


def calls_as_text(message):
    """A call becomes `<tool_call>{"name": "now", "arguments": {}}</tool_call>`."""
    text = as_text(message)["content"] or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_result>\n{text}\n</tool_result>"}
    if "tool_calls" not in message:
        return message
    for call in message["tool_calls"]:
        function = call["function"]  # its arguments are JSON already
        text += (
            f'\n<tool_call>{{"name": "{function["name"]}", '
            f'"arguments": {function["arguments"]}}}</tool_call>'
        )
    return {"role": "assistant", "content": text.lstrip("\n")}


# keys of requests and tools' schemas that some endpoints refuse, and that nobody needs
UNWANTED = (
    r"cache_control|additionalProperties|\$schema|\$id|const|default|propertyNames|not|oneOf|anyOf|"
    "allOf|patternProperties|exclusiveMinimum|exclusiveMaximum"
)
HEALING = [
    # "However, you requested 8500 tokens (308 in the messages, 8192 in the completion)"
    # "max_tokens is too large: 32000. This model supports at most 16384 completion tokens"
    # "'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
    Remedy(
        "max_completion_tokens|maximum context length.{1,200}(in the messages|input tokens)|"
        "max_(completion_)?tokens.{1,99}(too large|maximum|at most|less than|range|exceed)|"
        "(range of|input length and) .?max_tokens",
        "max_tokens is left out: the server sets it",
        setting(max_tokens=None, max_completion_tokens=None),
    ),
    # DashScope "This model only support stream mode, please enable the stream parameter", and
    # "parameter.enable_thinking must be set to false for non-streaming calls"
    Remedy(
        "only support stream|streaming is (strongly )?(required|recommended)|non-streaming",
        "this model only streams its answers",
        setting(stream=True),
    ),
    # "To use function tools, use /v1/responses or set reasoning_effort to 'none'."
    Remedy(
        "to 'none'",
        "reasoning is switched off: this model refuses it with tools",
        setting(reasoning_effort="none"),
    ),
    # Ollama "gemma3:4b does not support tools", a template "Conversation roles must alternate",
    # vLLM '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
    Remedy(
        "support (tool|function)|(tool|function) call\\w* (is )?not support|this model: tools|"
        "roles must alternate|requires --enable-auto-tool-choice",
        "tool calls are sent as text: this model or server supports no tools (vLLM needs the "
        "options --enable-auto-tool-choice --tool-call-parser)",
        tools_as_text,
    ),
    # DeepSeek "The reasoning_content in the thinking mode must be passed back to the API."
    Remedy(
        "reasoning_content.{0,50}(passed back|missing)|missing reasoning_content",
        "older answers are sent with empty reasoning",
        with_some_reasoning,
    ),
    # Groq "'messages.1' : … property 'reasoning_content' is unsupported", llama.cpp "Cannot pass
    # both content and thinking in an assistant message with tool calls!"
    # "messages.2.tool.name: Extra inputs are not permitted", "property 'name' is unsupported"
    Remedy(
        r"messages.{0,80}(reasoning|\bname\b.{0,80}(unsupported|not (permitted|supported)|"
        "unknown|unexpected))|both content and thinking",
        "older reasoning and the names of results are left out",
        without_extras,
    ),
    # llama.cpp "Only user, assistant and tool roles are supported, got system."
    Remedy(
        "(system|developer) (role|instruction|message).{0,20}not (supported|enabled)|got system|"
        "not support 'system'",
        "the system prompt becomes a user message",
        with_system_as_user,
    ),
    # Mistral "Tool call id was call_8bXe but must be a-z, A-Z, 0-9, with a length of 9."
    Remedy(
        "a-z, A-Z, 0-9, with a length of 9",
        "ids of calls are shortened",
        with_short_ids,
    ),
    # Gemini "Function call is missing a thought_signature in functionCall parts."
    Remedy(
        "thought_signature",
        "calls of other models get a signature",
        with_signature,
    ),
    # Gemini "Unknown name \"additionalProperties\" at 'tools[0].function_declarations[0]…'"
    # OpenRouter "messages.0.content.0.text.cache_control: Extra inputs are not permitted"
    Remedy(
        "unknown name.{0,200}(schema|parameters|function)|top level|cache_control",
        "some schema keywords and all cache marks are left out",
        without_unwanted_keys,
    ),
    # Anthropic "image exceeds 5 MB maximum: 6093312 bytes > 5242880 bytes"
    Remedy(
        "image.{0,40}(exceed|too large|too many|must be)|(process|decode|download) .{0,9}image|"
        "(invalid|unsupported|corrupt\\w*) image( data| file| format| type|\\.)",
        "images are left out of this request, because one image is refused",
        in_messages(as_text),
        is_remembered=False,
    ),
    # after the remedy for one bad image, because this pattern also fits its errors:
    # DeepSeek "unknown variant `image_url`, expected `text`", Groq "'messages.0.content' : value
    # must be a string"
    Remedy(
        "image|vision|multimodal|only .{0,9}text|content.type|content.{0,99}string|"
        "expected a string|untagged enum",
        "messages are sent as plain text: this model accepts no images or blocks",
        in_messages(as_text),
    ),
]


# ---- The HTTP request and the stream ----
# The request has few parameters, because endpoints refuse parameters that they do not know.

DONE = {"choices": [{}]}  # the chunk for `data: [DONE]`: a choice without `delta` ends the answer


@in_messages
def with_cache_mark(message):
    """Mark the system message, so that the endpoint caches the tools and the system message."""
    if message["role"] != "system":
        return message
    return {
        **message,
        "content": [
            {"type": "text", "text": message["content"], "cache_control": {"type": "ephemeral"}}
        ],
    }


@cache
def load_sdk():
    """Import the `openai` package, which takes 0.5 s."""
    gc.disable()  # with the garbage collector on, loading 800 modules takes 0.1 s more
    try:
        import openai
    finally:
        gc.enable()
    gc.freeze()  # the garbage collector skips these modules from now on
    return openai


@dataclass
class Connection:
    """Creates the SDK's client at the first request, and reads the answers as plain JSON."""

    endpoint: Endpoint
    request_timeout: float
    idle_timeout: float
    _client: object = None  # the SDK's client
    _loop: object = None  # the event loop of the client's connections, which no other can use

    def client(self):
        loop = get_running_loop()
        if self._loop is loop:
            return self._client
        openai = load_sdk()
        where = self.endpoint
        self._client = openai.AsyncOpenAI(
            api_key=where.api_key or "none",
            base_url=where.api_base,
            max_retries=0,
            timeout=openai.Timeout(self.request_timeout, connect=10.0),
            default_headers=where.extra_headers,
            http_client=openai.DefaultAsyncHttpxClient(
                verify=where.api_base.startswith("https://"),  # loading certificates takes 30 ms
                trust_env=not where.spec.is_local,  # a proxy does not reach the user's machine
                follow_redirects=False,
            ),
        )
        if row_of_address(where.api_base).name != "openai":  # only OpenAI may get OPENAI_ORG_ID
            self._client.organization = self._client.project = None
        self._loop = loop
        return self._client

    async def close(self):
        if self._loop is get_running_loop():
            self._loop = None
            await self._client.close()

    async def chunks(self, body):
        """Yield the chunks of an answer; one chunk if the server does not stream. Raises Failure.

        The first chunk must arrive within the request timeout (SSE comments do not count), each
        later chunk within the idle timeout. No timeout runs while the caller handles a chunk.
        """
        chunk = None
        try:
            async with asyncio.timeout(self.request_timeout) as clock:
                response = await self.client().post(
                    "/chat/completions",
                    cast_to=object,
                    body=body,
                    options={
                        "headers": {"X-Stainless-Raw-Response": "stream"},  # as it arrives
                        "security": {"bearer_auth": True},  # with the key
                    },
                )
                try:
                    async for chunk in chunks_of(response):
                        clock.reschedule(None)
                        yield chunk
                        # after [DONE], wait for the end, because only then the connection is reused
                        patience = 0.5 if chunk is DONE else self.idle_timeout
                        clock.reschedule(get_running_loop().time() + patience)
                finally:
                    await response.close()
        except Exception as problem:  # does not catch CancelledError
            if chunk is not DONE:  # after [DONE], a lost connection or a timeout is no error
                raise as_failure(problem) from problem

    async def models(self):
        """The ids of the models that the endpoint offers."""
        response = await self.client().models.with_raw_response.list(timeout=10.0)
        return [
            str(row["id"]).removeprefix("models/")  # Gemini's prefix
            for row in parse_answer(response.content).get("data") or []
        ]


async def chunks_of(response):
    """Yield a chunk for each line `data: {…}`; skip comments, event names and blank lines."""
    if "event-stream" not in response.headers.get("content-type", ""):
        yield parse_answer(await response.read())
        return
    rest = b""
    async for packet in response.iter_bytes():
        # split only at \n: other line separators, like U+2028, may be part of a text
        *lines, rest = (rest + packet).split(b"\n")
        for line in lines:
            name, _, data = line.strip().partition(b":")
            if name == b"data" and data:
                yield DONE if data.strip() == b"[DONE]" else parse_answer(data)


def parse_answer(data):
    """Parse a JSON object. For any other data, raises Failure with the beginning of the data."""
    with suppress(ValueError):
        answer = json.loads(data)
        if isinstance(answer, dict):
            return answer
    start = " ".join(data.decode(errors="replace").split())
    # nothing or `{"choices": [` broke off, but `<html>` is no answer of a model
    kind = "closed" if not start or start.startswith("{") else "nonsense"
    raise Failure(f"not a JSON object but: {start[:120] or 'nothing'}", kind)


# ---- An answer is put together from chunks ----
# Endpoints stream calls in different ways, and may send an error after a "200 OK".

REASONS = {  # the endpoint's finish reason → OpenAI's; any other (`eos`, `end_turn`) → `stop`
    "tool_calls": "tool_calls",
    "content_filter": "content_filter",
    "refusal": "refusal",
    "length": "length",
    "max_tokens": "length",  # Anthropic
    "model_length": "length",  # Mistral
    "error": "error",
    "abort": "error",  # vLLM
    "insufficient_system_resource": "error",  # DeepSeek
    "ended": "ended",  # our own: the server ended the answer without a reason
}


class AnswerReader:
    """Joins the chunks of an answer; an answer that is not streamed consists of one chunk.

    If `reads_text` is set, the request's tools may be called as text.
    """

    text = ""  # the answer so far, without thoughts
    end = 0  # `text` is shown up to here; the rest may begin a thought or a call
    index = 0  # of the latest piece of a call

    def __init__(self, request, reads_text):
        self.request = request
        self.tools = parameters_by_name(request.tools) if reads_text else {}
        self.answer = LLMResponse(finish_reason=None)
        self.open_calls = {}  # index → the last call with this index, which a piece continues

    @property
    def shown(self):
        return self.text[: self.end]

    @property
    def is_in_fence(self):
        return self.shown.count("```") % 2 == 1

    def feed(self, chunk):
        """Add a chunk. Returns the text that may be shown now. Raises Failure for an error."""
        choices = chunk.get("choices") or []
        for part in (chunk, *choices):
            if part.get("error"):
                raise refusal(part["error"])
            if part.get("usage"):
                self.answer.usage = read_usage(part["usage"])
        for choice in choices:
            self._add(choice)
        return self._ready()

    def _add(self, choice):
        answer = self.answer
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        if "delta" not in choice:  # DONE, or an answer that is not streamed: it has ended
            answer.finish_reason = answer.finish_reason or "ended"
        message = choice.get("delta") or choice.get("message") or {}
        for piece in message.get("tool_calls") or []:
            self._add_call(piece)
        for name in REASONING:
            new = message.get(name)  # a text, or a list of details
            if new and name in answer.extra:
                answer.extra[name] += new
            elif new:
                answer.extra[name] = new
        for block in as_blocks(message.get("content") or ""):
            self.text += block.get("text") or ""

    def _add_call(self, piece):
        """Begin a call, or continue an earlier call. Examples with read_file({…}) and now({}):

        by index       0 read_file {"pa    1 now {}            0 th":"a"}
        by id          a read_file {"pa        th":"a"}        b now {}
        all are 0      0 a read_file {"path":"a"}              0 b now {}
        without ids    0 read_file {"pa    0 th":"a"}          0 now {}

        So a name begins a call, and a piece without a name continues the last call with its index.
        No index means the index of the piece before.
        """
        index = self.index = piece.get("index", self.index)
        function = piece.get("function") or {}
        name = function.get("name")
        if name or index not in self.open_calls:
            # until the answer is whole, `arguments` is the JSON that has arrived
            call = ToolCallRequest(piece.get("id") or new_id(), name or "unnamed", "")
            self.open_calls[index] = call
            self.answer.tool_calls.append(call)
        call = self.open_calls[index]
        arguments = function.get("arguments") or ""
        call.arguments += arguments if isinstance(arguments, str) else to_json(arguments)
        if "extra_content" in piece:  # Gemini's signature of a thought
            call.extra["extra_content"] = piece["extra_content"]

    def _ready(self):
        """Remove whole thoughts from the new text, and return the text that may be shown now.
        The beginnings of thoughts and of possible calls are held back."""
        begin = self.end
        line_start = LINE_START if self.tools else THOUGHT_START
        while True:
            if not self.end:
                self.text = self.text.lstrip("\n")  # also after a thought
            self.end = line_start.search(self.text, self.end).start()
            thought = THOUGHT.match(self.text, self.end)
            if not thought or self.is_in_fence:
                return self.text[begin : self.end]
            self.text = self.shown + self.text[thought.end() :]

    def close(self):
        """Finish the answer. Returns the text that is not shown yet."""
        held = self.text[self.end :]
        if not self.shown and re.match(THOUGHT_TAG, held.lstrip()):
            self.text = ""  # a thought that does not end
            return ""
        try:
            calls, rest = read_calls(held, self.tools)
        except Exception:
            calls = []  # no call, or a broken one
        if not calls or self.open_calls or self.is_in_fence:
            self.end = len(self.text)
            return held
        if self._may_run(calls, held, rest):
            self.answer.tool_calls = calls
            self.text = self.shown.rstrip()
        else:
            self.answer.unclear_at = self.end
        return ""

    def _may_run(self, calls, held, rest):
        """Decide about calls that were written as text, by the rules 1 to 3 below."""
        if not self.shown.strip():
            return True
        has_own_tag = re.match(TAG, held) and re.match(END_TOKENS, rest)
        if not has_own_tag or re.search(THOUGHT_TAG, self.shown):
            return False
        return all(call.name in self.request.read_only for call in calls)

    def whole(self):
        """Return the answer, even if it reached max_tokens. Raises Failure if it broke off."""
        answer = self.answer
        # without a reason the stream broke off
        reason = REASONS.get(str(answer.finish_reason or "error").lower(), "stop")
        if reason == "error":
            raise Failure("the answer broke off: the connection was closed", "closed")
        answer.finish_reason = reason
        for call in answer.tool_calls:
            call.arguments, call.error = parse_arguments(
                call.arguments, repair=reason in ("stop", "tool_calls")
            )
        text = self.text
        if reason != "length":  # the model continues a cut answer, also after a line break
            text = text.rstrip("\n")
        answer.content = without_surrogates(text) if text.strip() else None
        answer.reasoning_content = answer.extra.get("reasoning_content") or answer.extra.get(
            "reasoning"
        )
        answer.usage = answer.usage or estimate_usage(self.request, answer)
        return answer


class Usage(dict):
    """Token counts: `usage.total_tokens` is the same as `usage["total_tokens"]`."""

    def __getattr__(self, name):
        if name not in self:
            raise AttributeError(name)
        return self[name]


def read_usage(usage):
    """Return the endpoint's token counts, or {}. Endpoints use three names for cached tokens."""
    sent = usage.get("prompt_tokens")
    if not sent:
        return {}
    cached = (
        (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        or usage.get("cached_tokens")  # Moonshot
        or usage.get("prompt_cache_hit_tokens")  # DeepSeek
        or 0
    )
    return token_counts(sent, usage.get("completion_tokens") or 0, cached)


def estimate_usage(request, answer):
    """Estimate the token counts: an English token has about four characters."""
    return token_counts(
        len(to_json([request.messages, request.tools])) // 4,
        len(to_json(answer.to_message())) // 4,
        estimated=True,
    )


def token_counts(sent, received, cached=0, estimated=False):
    return Usage(
        prompt_tokens=sent,
        completion_tokens=received,
        cached_tokens=cached,
        total_tokens=sent + received,
        estimated=estimated,
    )


# ---- Calls that a weak model wrote as text ----
# In one of three answers, Qwen2.5-Coder-1.5B writes "I will use the `read_file` function." and then
# the call as JSON in a code fence. But an answer may also show, quote or describe a call:
#
# 1. The answer begins with a call, and only calls or an invented result follow: the call runs.
# 2. It ends with a template's own tag, such as <tool_call>, after some text: the call runs if its
#    tool only reads.
# 3. It ends with any other call after some text: nothing runs (`LLMResponse.unclear_at`).
# 4. A quote, an example in a sentence or in a code fence that is open, a schema, a log entry, a
#    broken call: nothing runs.

# Repetitions have an upper limit, like {0,99}, so that no text takes long.
# how a call begins: <tool_call>, <function=now>, [TOOL_CALLS]
TAG = r"<(?:tool_calls?|tools)>|<function=|\[TOOL_CALLS\]|<\|python_tag\|>"
BARE = r'[\[{]\s{0,99}{?\s{0,99}"(?:name|type|id|function|arguments|parameters)"'  # [{"name"
FENCE = rf"```(?:json|tool_call)?[ \t\r]{{0,9}}\n\s{{0,80}}(?={TAG}|{BARE})"  # ```json\n
FENCE_OR_END = re.compile(f"{FENCE}|```")
# the text so far ends in `<tool_c`, `[TOOL_`, `{"na` or "```js": the next piece decides
PARTIAL = r'(?:</?\|?\w{0,12}\|?|\[[A-Z_]{1,11}|[\[{]\s{0,99}(?:{?\s{0,99}(?:"\w{0,10})?)?)?\Z'
PARTIAL_LINE = rf"(?: {{0,3}}(?:`{{1,9}}|~{{1,9}})\w{{0,20}}\s{{0,99}})?{PARTIAL}"
# Some models write <think>…</think> before lines. If a chat template contains <think>, only
# </think> arrives. The text so far may end in `<th`.
THOUGHT_LINE = r"(?m)(?:\A\s{0,200}|^)</?(?:(?:think|thinking|thought)>|\w{0,8}\Z)|\Z"
# what is held back from here on: a possible thought, and for LINE_START also a possible call; if
# there is neither, they match the end of the text
THOUGHT_START = re.compile(THOUGHT_LINE)
LINE_START = re.compile(
    rf"{THOUGHT_LINE}|(?:\A\s{{0,200}}|^)(?:{TAG}|{FENCE}|{BARE}|{PARTIAL_LINE})"
)
THOUGHT_TAG = "</?(?:think|thinking|thought)>"
THOUGHT = re.compile(  # <think>Hm, <b>.</think>
    r"\s{0,200}(?:<(?:think|thinking|thought)>(?:[^<]++|<)*?)?</(?:think|thinking|thought)>"
)
# what may stand before, between and after calls: "</tool_call>\n<tool_call>\n"
AROUND = re.compile(
    r"(?:\s|</?(?:tool_calls?|tools)>|</function>|<\|python_tag\|>|"
    r"\[TOOL_CALLS\](?=\s{0,99}[\[{]))*"
)
END_TOKENS = r"(?:\s|<\|\w{1,30}\|>|</s>|<end_of_turn>)*\Z"  # <|im_end|>
# after a call: an end token, or a result that the model has invented
INVENTED = re.compile(r"<\||</s>|<end_of_turn>|<tool_res(?:ponse|ult)>|```(?!json|tool_call)")
# <parameter=path>\na.txt\n</parameter>
PARAMETER = r"<parameter=(\w+)>\n?((?:(?!<parameter=).)*?)\n?</parameter>"
# <function=now>, Mistral's [TOOL_CALLS]now{} and [TOOL_CALLS]now[ARGS]{}, Groq's <function=now{}:
# group 1 is the name, group 2 has the PARAMETERs; arguments as JSON follow
NAMED = re.compile(
    rf"(?s)(?:<function=|\[TOOL_CALLS\])([\w-]+)(?:>|"
    rf"(?:\[CALL_ID\]\w{{1,40}})?(?:\[ARGS\])?(?=\s{{0,9}}{{))((?:\s*{PARAMETER})*)\s*"
)
CALL_KEYS = {"name", "arguments", "parameters", "type", "id"}


def parameters_by_name(tools):
    return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}


def read_calls(text, tools):
    """Read the calls at the start of a text. Returns the calls and the rest of the text.

    '```json\n{"name": "ls", "arguments": {}}\n```'  → [ls({})], ""
    '{"name": "ls", "arguments": {}}<|im_end|>'      → [ls({})], "<|im_end|>"
    '{"name": "ls", "arg'                            → ValueError

    Raises an exception for an invalid call, and for any other text between the calls. A JSON
    parser reads JSON calls, so a code fence or a tag inside a string stays in the string."""
    calls = []
    is_fenced = False  # True: a code fence is open at `place`
    place = 0
    while True:
        place = AROUND.match(text, place).end()
        fence = FENCE_OR_END.match(text, place)
        named = NAMED.match(text, place)
        if fence and (is_fenced or fence[0] != "```"):
            is_fenced = not is_fenced
            place = fence.end()
        elif place == len(text) or (calls and INVENTED.match(text, place)):
            # '{"name": "ls", "arguments": {}}\n```\na.txt\n```\nThe folder has a.txt.'
            return calls, text[place:]
        elif named:
            place = named.end()
            arguments = dict(re.findall(f"(?s){PARAMETER}", named[2]))
            if text.startswith("{", place):
                arguments, place = JSON.raw_decode(text, place)
            calls.append(text_call({"name": named[1], "arguments": arguments}, tools))
        else:
            found, place = JSON.raw_decode(text, place)
            for each in found if isinstance(found, list) else [found]:
                calls.append(text_call(each, tools))


def text_call(found, tools):
    """{"name": "ls", "arguments": {"path": "."}} → ls({"path": "."})

    Raises an exception for JSON that is no call: an unknown tool, arguments that are no object, a
    log entry, or the description of a tool. Whether the arguments fit the tool is checked later,
    when the call runs."""
    # {"type": "function", "function": {…}}
    call = found["function"] if found.keys() <= {"type", "id", "function"} else found
    is_log_entry = found.get("type", "function") != "function" or call.keys() - CALL_KEYS
    is_description = "properties" in call.get("parameters", {})
    written = call.get("arguments", call.get("parameters"))
    arguments, error = parse_arguments(written, repair=False)
    if error or is_log_entry or is_description or call["name"] not in tools:
        raise ValueError("not a call")
    return ToolCallRequest(new_id(), call["name"], arguments)


# ---- Recorded events: without keys, and read again ----
# An event is a dict of the run's data, and its `kind` says which. Some kinds of one turn:
#
# {"time": 1795430000.1, "run": "5f0c2a9e", "who": "turn", "key": "cli:direct", "kind": "request",
#  "model": "m", "options": {…}, "sent": [1, 2], "tokens": [812, 41], "messages": [{…}, {…}]}
# {…, "kind": "retry", "text": "local, m: …", "error": "HTTP 400: …", "changed": {"stop": null}}
# {…, "kind": "answer", "seconds": 0.8, "answer": {"tool_calls": [{"id": "c1", …}], …}}
# {…, "kind": "call", "id": "c1", "name": "exec", "arguments": {"command": "ls"}}
# {…, "kind": "result", "id": "c1", "text": "a.txt", "is_error": false, "outcome": "done"}
# {…, "kind": "journal", "who": "session", "line": {"n": 3, "role": "tool"}}

# `"password": "…"` and `API_KEY=…`, but not the number of {"token": 12345678}
IS = r"""(?!": [^"])["'\\]{0,4}\s{0,3}[=:]\s{0,3}["'\\]{0,4}"""
VALUE = r"[\w+/~=.-]{8,999}(?![\w+/~=.(\[-])"  # not `token = request.headers.get("token")`
KEYS = (
    rf"((?i:passw(?:or)?d){IS}|(?i:api[_-]?key|access[_-]?key|secret|token){IS}(?=\S{{0,99}}\d))"
    rf"{VALUE}|"
    r"((?i:\b(?:bearer|basic) ))[\w.~+/=-]{16,}|"  # Authorization: Basic QWRhOnNlY3JldA==
    r"""(://[^\s/@:"\\]{0,99}:)[^\s/@"\\]{1,99}(?=@)|"""  # https://ada:secret@example.org
    # a form begins a word, or follows the line break of a JSON string: "\nsk-proj-abc…"
    r"(?:(?<![\w-])|(?<=\\[nrt]))(?:(?:sk-|gsk_|xai-|AIza|glpat-|xox[a-z]-|xapp-)[\w-]{16,}|"
    r"(?:hf_|npm_|gh[a-z]_|github_pat_\w{22}_|[prs]k_live_|[prs]k_test_)[A-Za-z0-9]{16,}|"
    r"(?:SG|ya29)\.[\w.-]{16,}|(?:AKIA|ASIA)[0-9A-Z]{16}|"
    r"(?:bot)?\d{8,10}:[\w-]{35}|"  # Telegram's 123456789:AAF…
    r"eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,})|"  # a JWT
    r'-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----(?:[^"\\-]|\\[^"]|-(?!----))*'
)
# "telegram": {"token": "123456789:AAF…"}
NAMED_SECRET = r'(?i)"[^"]*(?:key|token|secret|password)[^"]*": "((?:[^"\\]|\\.){7,})"'


def keyless_json(named):
    """Returns a function that writes an event as JSON, with `[key]` instead of each key: what has
    the form of a key, and each value in `named` whose name says key, token, secret or password."""
    secrets = re.findall(NAMED_SECRET, json.dumps(named, ensure_ascii=False))
    secrets.sort(key=len, reverse=True)  # the longest first: one may be the start of another
    keys = re.compile("|".join([KEYS, *map(re.escape, secrets)]))
    write = JSONEncoder(ensure_ascii=False, default=vars).encode  # vars: of an LLMResponse
    # the groups of KEYS are what stays, like `password=`
    return lambda event: keys.sub(r"\1\2\3[key]", write(event))


# ---- You are the model ----
# With `--provider human`, you type the model's answers, and can learn how calls fail.


@dataclass
class HumanProvider(LLMProvider):
    """Shows each request to a person, who types the answer or a tool call. `ask(question, what,
    **details)` returns the typed line, or None if nobody can answer. Typed calls are checked like
    the calls of a model. A line that only looks like a call is asked about, and never answers."""

    ask: Callable | None = None
    model = "human"

    async def answer(self, request):
        question = request_text(request)
        line = None
        while self.ask:
            line = await self.ask(
                f"{question}\n{HOW_TO_ANSWER}\nmodel> ",
                "model",
                messages=request.messages,
                tools=request.tools,
                refused=line,  # None at first
            )
            if line is None:
                break
            answer = typed(line.strip(), parameters_by_name(request.tools))
            if answer:
                answer.usage = estimate_usage(request, answer)
                return answer
            question = (
                "This line looks like a call, but is no call of a tool above.\n"
                'Texts need quotes, and ")" comes last: read_file("a.txt")'
            )
        return failed("`--provider human` needs a terminal. On the page, open a window.")


HOW_TO_ANSWER = """
You are the model. Answer in words, or call a tool: read_file("a.txt")
or read_file {"path": "a.txt"}. `nanobot prompt` prints the whole prompt and all parameters."""


def request_text(request):
    """What a person reads of a request: the messages since the model's last one, of the prompt only
    the headings, and at the beginning of a turn the tools with their parameters."""
    lines = []
    for message in request.messages:
        text = as_text(message)["content"]
        if message["role"] == "system":
            text = "\n".join(re.findall(r"(?m)\A.*|^#.*", text))
        lines.append(f"---- {message['role']} ----\n{text}")
        if message["role"] == "assistant":
            lines = ["(all earlier messages are sent again)"]
    if request.messages[-1]["role"] == "user":
        signatures = [
            f"{name}({', '.join(schema.get('properties', []))})"
            for name, schema in parameters_by_name(request.tools).items()
        ]
        lines = signatures + lines
    return "\n".join(lines)


def typed(line, tools):
    """Return the answer that a person has typed, or None for a call that cannot be read.

    'read_file("a.txt")', 'read_file {"path": "a.txt"}' → a call;  'read_file("a.txt' → None
    """
    name, written = re.match(r"(?s)([\w-]*)\s*(.*)", line).groups()
    # `raed_file("a.txt")`, `<tool_call>`, `raed_file {"path": "a.txt"}`
    if name not in tools and not re.match(r"[\w-]*[({<$]|[\w-]+ {", line):
        return LLMResponse(line)
    try:
        parameters = tools[name]
        values = re.fullmatch(r"(?s)\((.*)\)", written)
        if values:  # in the order of the parameters
            values = literal_eval(f"[{values[1]}]")
            return calling(name, dict(zip(parameters["properties"], values, strict=False)))
        return calling(name, dict(JSON.decode(written or "{}")))
    except (ValueError, SyntaxError, KeyError, TypeError):
        return None


# ---- The offline model ----
# The offline model needs no key and no network. Users can edit its rules in a file. Each sentence
# of a rule becomes a regular expression. Mistakes are reported with their line numbers.

OFFLINE_RULES = "templates/offline/rules.md"  # nanobot_data/templates/… after pip install
# the fields of a rule; others are arguments of its tool
FIELDS = re.findall(r"\w+", "answer offer can calculate say old new tool reads line none title own")
BUILT_IN = re.findall(
    r"\w+", "result formula Time memory file count last question words row columns text"
)
WORD = r"<(\.?\w+)>"
QUOTED = "(?s)^[\"'`“‘](.+)[\"'`”’]$"
# While rules are compared, a name or a quoted text is one letter: `read a.txt` → `read \uec00`
LETTERS = dict(url=0xE000, text_file=0xEC00, settings=0xF000, a_folder=0xE800, quoted=0xE400)
A_FILE = "[\uec00-\uf3ff]"
NAME = "[\ue800-\uf3ff]"
MIXED = rf"{A_FILE}|^[\ue400-\ue7ff]."  # a text with a name, or with more behind a quoted one
SETTINGS = (".json", ".toml", ".ini", ".py")  # dogs = 4
SPACE = "\0"  # in a regex: between words, where words like `the` can be
ENDING = "(?:ings|ies|ing|ed|es|ys|e|s|y)"  # of a word: grades, grade, graded
# the first line of a table, no sentence: name,price (euro)
HEAD = r"|^[^\d,:!?;=]{1,30}(?:,[^\s\d,:!?;=][^\d,:!?;=]{0,30})+$"
compiled = cache(re.compile)  # the cache of `re` itself is too small for the sentences


def reads(rule):
    """Does the rule write, delete and run nothing?"""
    return "reads" in rule or "tool" not in rule


class Rules:
    """The parsed rules file. A <word> in a sentence or a field is a placeholder, like <files>.

    A rule: {"title": "read files", "own": ["show", "files"], "tool": "read_file", "path": "<file>"}
    """

    def __init__(self, text):
        self.kinds = defaultdict(lambda: "(?!)")  # the regex of a <word>
        for kind, first in LETTERS.items():
            self.kinds[kind] = f"[{chr(first)}-{chr(first + 0x3FF)}]"
        self.sentences = []  # (sets of words, of which a text has one each; a regex; its rule)
        self.problems = []
        self.otherwise = {}  # the rule for sentences that no other rule has
        self.rule = {}  # of the current line
        for number, line in enumerate(text.splitlines(), 1):
            try:
                self._read(line.rstrip())
            except (ValueError, re.error) as problem:
                self.problems.append(f"templates/offline/rules.md, line {number}: {problem}")
                log.warning(self.problems[-1])
                self.rule.clear()  # it is left out
        self.otherwise.setdefault("offer", "I know no rule for that.")
        self.vocabulary = set(re.findall(r"(?<![\\a-z])[a-z]{4,}(?![a-z])", str(self.sentences)))
        self.matches = cache(self.matches)

    def _read(self, line):
        """Read one line. Raises ValueError or re.error with a text that describes the mistake."""
        kind = re.fullmatch(r"<(\w+)>(?: \([^()]*\))?: (.+)", line)  # <number> (5): …
        latest = ["", *self.rule][-1]  # the field that can go on in this line
        if line.startswith("## "):
            self.rule = {"title": line[3:], "own": []}
            if line == "## anything else":
                self.otherwise = self.rule
        elif kind:
            for word in set(re.findall(WORD, kind[2])) - self.kinds.keys():
                raise ValueError(f"<{word}> is not defined above")
            regex = re.sub(WORD, lambda name: self.kinds[name[1]], kind[2])
            re.compile(regex)
            self.kinds[kind[1]] = f"(?:{self.kinds[kind[1]]}|{regex})"  # of one line or more
        elif line.startswith("- ") and self.rule:
            for sentence in line[2:].lower().split(" | "):
                self._add_sentence(sentence)
        elif re.match(r"\w+: ?", line) and self.rule:
            # a call can stand in one line: pattern: TODO | path: <file>
            for name, value in re.findall(r"(\w+): ?(.*?)(?: ?\| (?=\w+:)|$)", line):
                self._check_field(name, value)
                self.rule[name] = value
        elif latest not in ("", "title", "own") and line[:1] not in ("#", "-"):
            self.rule[latest] += f"\n{line}"
        elif line and self.rule:
            raise ValueError("this is neither a sentence (- read <file>) nor a field (answer: Hi)")

    def _check_field(self, key, value):
        if key not in FIELDS and "tool" not in self.rule:
            raise ValueError(f"unknown key {key}: use tool, answer, offer, line or calculate")
        if key == "tool" and not re.fullmatch(self.kinds["tool"], value):
            raise ValueError(f"there is no tool {value}: if it is your own, add it to <tool>")
        if key == "old" and not re.compile(re.sub(WORD, "x", value)).groups:
            raise ValueError("it needs a group for what stays, like ()")
        if key == "reads":
            if value != "yes":
                raise ValueError("write reads: yes, or leave it out")
            said = " ".join(regex for _, regex, rule in self.sentences if rule is self.rule)
            for word in re.findall(rf"{SPACE}({self.kinds['noise']})\(", said):
                raise ValueError(f"`{word}` is a word of <noise>: leave it out of the sentences")
        for word in re.findall(WORD, value):
            if word not in BUILT_IN + self.rule["own"] and word[0] != ".":
                raise ValueError(f"<{word}> is in no sentence of this rule: add it to one")

    def _add_sentence(self, sentence):
        """`<show> [me] <files>` → the regex ` (?P<show>…)(?: me)?(?P<files>…)`"""
        brackets = re.sub(r"[^][()<>]", "", sentence)
        for _ in brackets:
            brackets = re.sub(r"\[\]|\(\)|<>", "", brackets)
        if brackets:
            raise ValueError(f"`{sentence}`: a bracket is not closed")
        if re.search(r"<(\w+)>.*<\1>", sentence):
            raise ValueError(f"`{sentence}`: the same <word> occurs twice")
        regex = "".join(map(self._regex, re.findall(r"[\[\]()|]|[^\s()\[\]|]+", sentence)))
        # for each part that must be there, its words: only if a text has one of each is the
        # regex compiled
        keys = []
        for part in re.findall(r"\([^)]*\)|[^\s()]+", re.sub(r"\[[^\]]*\]", "", sentence)):
            said = re.sub(WORD, lambda word: self.kinds[word[1].rstrip("2")], part)
            if re.fullmatch("[a-z$'’ |()?:!-]+", said):  # a list of words
                keys.append(set(re.findall(r"[a-z$]+", said)))
        self.sentences.append((keys, regex, self.rule))

    def _regex(self, part):
        """The regex for a bracket or a word of a sentence"""
        if part in "[](|)":
            return {"[": "(?:", "]": ")?", "(": "(?:"}.get(part, part)
        if part == "...":
            return r"(?:[\s,;:]++[^\s,;:]++){0,30}?"
        kind = self.kinds.get(part[1:-1].rstrip("2"), "")  # <number2> is a second <number>
        if part[0] != "<":
            return rf"{SPACE}{re.escape(part)}(?![\w'’-])"
        if not kind:
            raise ValueError(f"{part} is not defined above: write <files> or <text>")
        self.rule["own"].append(part[1:-1])
        # in a text, all of it was meant: `the sea`
        space = r"[\s,:]++" if re.fullmatch(kind, "the x") else SPACE
        return rf"{space}(?P{part}{kind})(?![\w'’-])"

    def matches(self, text):
        """Return the rules with a sentence that fits, and its <words>: [(rule, {"text": "tea"})]"""
        gap = r"[\s,:;.!?]++"
        start = rf"(?i)^(?:\s*{self.kinds['before']}(?!\w)[ ,:.!]*(?=\S))+"
        # `(?>…)++` never tries another way: "wow!!!!!!!! why" would take for ever
        after = (
            rf"(?i)(?>(?<![\s,.!?])[\s,.!?]++{self.kinds['after']}(?!\w)"
            r"|(?<=[^\s.])[,.!?]+\s*|(?<!\s)\s*=\s*)++$"
        )
        noise = rf"(?i)(?<![\w'’-]){self.kinds['noise']}(?:['’]\w+)?(?![\w'’-])"
        names = rf"{NAME}(?:(?:[\s,&]|and)+(?={NAME}))?"
        skipped = rf"{gap}(?:{self.kinds['skipped']}{gap}){{0,4}}"
        small = rf"{gap}(?:{self.kinds['small']}(?:['’]s)?{gap}){{0,3}}"
        end = rf"(?:{gap}{self.kinds['small']}(?!\w))*+[\s,:;.!?]*"
        if ": " not in text:  # to a.txt: Thank you! → all of it is meant
            text = re.sub(after, "", text.strip())
        fits = []
        for each in dict.fromkeys([re.sub(start, "", text), text.strip()]):
            words = set(re.findall(r"\w+", each.lower()))
            # in a.txt, how many words are there? → , how many words there? a.txt
            moved = re.sub(noise, "", re.sub(names, "", each)).strip()
            moved = " ".join([moved, *re.findall(NAME, each)])
            for keys, regex, rule in self.sentences:
                if not rule or any(key.isdisjoint(words) for key in keys):
                    continue
                whole, said = regex.replace(SPACE, skipped), each
                if "reads" in rule:
                    whole, said = regex.replace(SPACE, small) + end, moved
                found = compiled(f"(?is){whole}").fullmatch(f" {said}")
                if found:
                    fits.append((rule, found.groupdict("")))
        return sorted(fits, key=lambda fit: "offer" in fit[0])

    def has(self, kind, text):
        """Is a word or phrase of this kind in the text?"""
        return compiled(rf"(?i)(?<![\w'’-]){self.kinds[kind]}(?![\w'’-])").search(text)

    def stems(self, text):
        """`the grades of my class` → {"grad", "class"}: what is meant, without endings"""
        words = re.findall(r"\d+(?:[.:]\d+)+|[^\W\d_]{3,}(?=\d)|[^\W_]+", text.lower())
        small = compiled(f"and|{self.kinds['small']}|{self.kinds['noise']}").fullmatch
        return {re.sub(rf"(?<=\w\w\w){ENDING}$", "", word) for word in words if not small(word)}


def any_of(words):
    """The regex for one of the words, with any ending; Fiskefar72 has the words fiskefar and 72"""
    return (
        rf"(?i:(?:\b|_|(?<=[^\W\d])(?=\d))(?:{'|'.join(map(re.escape, sorted(words)))}){ENDING}?"
        r"(?:\b|_|(?<=\D)(?=\d)))"
    )


def nearest(word, known):
    """`opne` → `open`, `avrage` → `average`: the known word that is nearest, or the same word"""
    if word in known:
        return word
    alike = [each for each in known if each[0] == word[0]]
    swapped = [each for each in alike if sorted(each) == sorted(word)]
    # prints is not printer
    return [*swapped, *difflib.get_close_matches(word, alike, 1, 0.85), word][0]


def filled(template, known, change=str):
    """`<file> says:` → `a.txt says:`; a line with a <word> that is not known is left out"""
    return "\n".join(
        re.sub(WORD, lambda word: change(str(known[word[1]])), line)
        for line in template.split("\n")
        if all(map(known.get, re.findall(WORD, line)))
    )


def beside_this_file(name=OFFLINE_RULES):
    here = Path(__file__).resolve().parent
    for path in (here / name, here / "nanobot_data" / name):
        if path.is_file():
            # table.awk is beside the rules
            return path.read_text("utf-8-sig", "replace").replace("HERE/", f"{path.parent}/")
    return "## anything else\noffer: templates/offline/rules.md is missing."


RUNTIME_END = "[/Runtime Context]"
# tool → pattern for a successful result; any other result is an error
SUCCESS = {"read_file": r"\d+\| ", "exec": r"(?s).*Exit code: 0$"}
SUCCESS |= dict.fromkeys(("edit_file", "write_file"), "--- |Wrote ")
# renamed 'a.txt' -> 'b.txt', b.txt:3: milk, --- a/b.txt, or Wrote 4 characters to /home/b.txt.
NEW_NAME = (
    r"(?m)(?:^(?:renamed )?'[^'\n]+' -> '|^(?:--- a/)?|^Wrote .*[/\\])"
    r"([^'\s:,/]+\.\w+|[^'\s]+/\S+\.\w+)(?:[':,.]|$)"
)
NOTHING = "Exit code: 1$|No match for |No file below |There is no folder"
OTHER_SUCCESS = rf"(?!{NOTHING}|Cannot |Error\b|\w+ failed: )"  # also of a project's own tools
NOT_CLEAR = "I change, delete and run only what is said clearly."
NO_LINE = "I find no line with all of these words."
NOISE = (  # not shown to the user
    r"(?m)^\S*MEMORY\.md:\d+: (?:- )?|^Exit code: 0\Z|\nExit code: \d+\Z| Tell the user\.|"
    r"(?<=') in [\d,]+ files of .*\Z"  # No match for 'x' in 3 files of /home/a.
)


class Plan:
    """Plans the calls of a turn, based on the user's text and the results received so far.

    The earlier turns are planned again, too, because they say which file "it" is.
    """

    def __init__(self, request, rules):
        self.request = request
        self.rules = rules
        self.known = {"file": "", "last": "(no number)", "question": ""}  # `file` is "it"
        self.masks = {}  # a letter → the name or the quoted text that it stands for
        self.results = []  # of the calls in this turn that have a result

    def answer(self):
        """Return the text of the answer. The text is used only if `next_call` stays None."""
        messages = [as_text(message) for message in self.request.messages]
        prompt = messages[0]["content"]
        self.next_call = None  # the first call that has no result yet
        self.matches = {}  # title of a rule → the values of its <words>
        if "save_memory" in parameters_by_name(self.request.tools):
            return ""  # rules can sum up nothing: the history gets the text as it is
        if "[SKIP] if there is nothing to change" in prompt:
            return "[SKIP]"  # tells Dream that there is nothing to save
        # - Facts: /home/a b/memory/MEMORY.md
        paths = r"[:`] ?((?:/|~|\w:\\)[^\n:`]*MEMORY\.md)|\Z"
        self.known["memory"] = re.search(paths, prompt)[1] or "MEMORY.md"
        question = ""
        for message in [*messages[-40:], {"role": "assistant", "content": ""}]:
            text = message["content"]
            if message["role"] == "tool":
                self.results.append(text)
            elif message["role"] == "user" and (RUNTIME_END in text or not question):
                runtime, _, typed = text.rpartition(RUNTIME_END)
                question = f"{question}\n{typed.strip()}".strip()
                self.known |= dict(re.findall("(?m)^(Time): (.*)", runtime))
            elif message["role"] == "assistant" and "tool_calls" not in message:
                text = self._answer(question)
                self.results.clear()
                question = ""
        return text

    def _answer(self, question):
        """Follow the first reading of a question that finds something."""
        self.known["before"] = self.known["question"]
        # without API keys, because its words are looked for
        self.known["question"] = re.sub(KEYS, "", question)[:1_000]
        self.next_call = None
        self.done = {}  # the calls of this question and their results
        self.paths = {}  # the files here, once they are needed, and the words of their names
        self.missed = ""  # why nothing was found
        self.wishes = []  # what would write, delete or run: rules and their <words>
        for steps in self._readings(question):
            known = self.known.copy()
            self.matches = {rule["title"]: self._values(said) for rule, said in steps}
            reports = []
            changed = False
            for rule, said in steps:
                if not reads(rule) and reports and reports[-1] in ("", self.missed):
                    break
                for file in self._files(said):
                    reports.append(self._follow(rule, said, file))
                    changed |= not reads(rule) and reports[-1] != ""
            if self.next_call or all(reports) or changed:
                return "\n\n".join(dict.fromkeys(report or self.missed for report in reports))
            self.known = known  # nothing was found: what else can it mean?
        self.matches = {}
        return self._advise(self.missed)

    def _readings(self, question):
        """Yield what a question can mean, best first, each as its steps: [(rule, its <words>)].

        What only reads may be nearly said. Anything else is a wish then, to be offered.
        """
        head, _, piped = question.partition("\n\n")
        if len(head) > 1_000:
            return
        text = self.masked(head)
        is_clear = not piped and not self.rules.has("unsure", text)
        refusals = []
        for version, kind in self._versions(text):
            allowed = kind if is_clear else "none"
            for cut in (self.rules.kinds["then"], "(?!)", self.rules.kinds["between"]):
                fits = []  # for each part the rules that may be followed
                parts = re.split(cut, version, maxsplit=5)
                for part in parts:
                    found = self.rules.matches(part)
                    self.wishes += [fit for fit in found if not reads(fit[0])]
                    fits.append([fit for fit in found if self._may_follow(*fit, allowed)])
                ways = [[fit] for fit in fits[0]]
                if len(fits) > 1:
                    steps = [each[0] for each in fits if each]
                    ways = [steps] if all(fits) and not self._is_cut(parts, steps) else []
                for steps in ways:
                    if not any("offer" in rule for rule, _ in steps):
                        yield steps
                    elif len(steps) == 1:
                        refusals.append(steps)
        yield from refusals

    def _is_cut(self, parts, steps):
        """Does a part end with a free text that may go on? `remind me to eat, then delete a.txt`

        Only what reads can follow; a fact can also follow a fact.
        """
        path = ""  # of the rule with such a text
        for part, (rule, said) in zip(parts, steps, strict=True):
            is_fact = path == "<memory>" and (reads(rule) or rule.get("path") == path)
            if path and "reads" not in rule and not is_fact:
                return True
            names = ("note", "does", "being", "content2", "content")
            text = next(filter(None, map(said.get, names)), "no text")
            if part.rstrip(" .,;!?").endswith(text) and not re.match("[\ue400-\ue7ff]", text):
                path = rule.get("path", "no path")
        return False

    def _may_follow(self, rule, said, allowed):
        """Does the rule only read? Or is each file said that it needs, and each text a text?"""
        if reads(rule):
            return True
        files = {"files", "settings", "text_file"}.intersection(rule["own"])
        is_it = self.known["file"] and ("old" in rule or said.get("it"))
        is_named = is_it or not files or any(map(said.get, [*files, "a_file"]))
        can_undo = rule["tool"] == "edit_file" or "line" in rule
        may = allowed == "all" or allowed != "none" and can_undo
        return may and is_named and not self._has_text(said, "doubtful")

    def _has_text(self, said, kind):
        """Is a text that is to be written of this kind, or has it a name in it?"""
        texts = [said.get(name, "") for name in ("content", "content2", "old")]
        return any(re.search(MIXED, text) or self.rules.has(kind, text) for text in texts)

    def _versions(self, text):
        """Yield the text, with names for described files, and with known words for misspelt ones;
        and which rules may be followed then, besides those that only read
        """
        yield text, "all"
        yield self._named(text, is_exact=True), "what /undo takes back"
        typed = r"(?<![\w'’-])[a-z]{4,20}(?![\w'’-])"
        spelled = re.sub(typed, lambda word: nearest(word[0], self.rules.vocabulary), text)
        yield self._named(spelled), "none"

    def masked(self, text):
        """`read "a b.txt"` → `read \uec00`, one letter for what no rule looks into"""
        text = re.sub(r"(?i)\bto[ -]do(?= list)", "todo", re.sub("[\ue000-\uf8ff]", "?", text))
        kinds = [f"(?P<{kind}>{self.rules.kinds[f'typed_{kind}']})" for kind in LETTERS]
        mask = compiled(f"(?i){'|'.join(kinds)}")
        return mask.sub(lambda found: self._letter(found.lastgroup, found[0]), text)

    def _letter(self, kind, text):
        if kind == "text_file":
            text = text.replace("\\", "/")
            if text.endswith(SETTINGS):
                kind = "settings"
        letter = chr(LETTERS[kind] + len(self.masks) % 0x3FF)
        self.masks[letter] = text
        return letter

    def _named(self, text, is_exact=False):
        """`how long is my essay` → `how long is my \uec00`, which stands for essay.md"""
        words = text.split(" ")
        for size in (4, 3, 2, 1):
            for start in range(len(words)):
                phrase = words[start : start + size]
                path = self._look_up(phrase, is_exact)
                if path:
                    mark = re.search("[,;:.!?]*$", phrase[-1])[0]
                    kind = "a_folder" if path.endswith("/") else "text_file"
                    words[start : start + size] = [self._letter(kind, path) + mark]
        return " ".join(words)

    def _look_up(self, phrase, is_exact):
        """["old", "essay"] → `My Old Essay.md`, if only one name has all words; or "".

        `is_exact`: and if the phrase has all words of the name
        """
        text = " ".join(phrase)
        said = self.rules.stems(text)
        # in "to my todo list", it is `todo list`; "show it" is not about the folder shows
        edges = [self.rules.has("kinds", word) or self.rules.stems(word) for word in phrase]
        if not said or not (edges[0] and edges[-1]) or self.rules.has("no_name", text):
            return ""
        fits = [path for path in self._files_here() if said <= self.paths[path]]
        fits = [path for path in fits if said <= self.rules.stems(Path(path).name)] or fits
        # letters/sponsors.txt rather than letters/sponsor_letter.txt
        best = [path for path in fits if self.rules.stems(Path(path).stem) <= said]
        best = best if best or is_exact else fits
        return best[0] if len(best) == 1 else ""

    def _files_here(self):
        """The files and folders, and the words of their names: {"docs/My Essay.md": {"my", …}}"""
        if not self.paths:
            found = re.sub(r"(?m)^(No file|\(there).*", "", self._result("glob", {"pattern": "*"}))
            for path in re.findall("(?m)^.+", found) + re.findall("(?m)^.+/", found):
                self.paths[path] = self.rules.stems(path)
        return self.paths

    def _place(self, name):
        """`b.md` → docs/b.md, if there is one such file"""
        same = [path for path in self._files_here() if path.endswith(f"/{name}")]
        return same[0] if name not in self.paths and len(same) == 1 else name

    def _files(self, said):
        """The names in `a.txt and b.txt`; or the file named last, also for `it`"""
        names = said.get("files") or said.get("listed") or said.get("a_file", "")
        return list(map(self._value, re.findall(A_FILE, names))) or [self.known["file"]]

    def _value(self, text):
        """What the user typed, without quotes around it"""
        text = re.sub("[\ue000-\uf8ff]", lambda letter: self.masks[letter[0]], text)
        return re.sub(QUOTED, r"\1", text)

    def _values(self, said):
        return {name: self._value(text) for name, text in said.items() if text}

    def _follow(self, rule, said, file):
        """Apply one rule to one file. Returns the rule's answer, or the error text of a tool.

        Returns "" if nothing was found.
        """
        if "offer" in rule and "tool" not in rule:
            return self._advise(rule["offer"], rule.get("say", ""), said)
        # what was meant: no `the`, and for `it` the file
        text = " ".join(filter(self.rules.stems, self._value(said.get("text", "")).split()))
        self.known |= {
            "file": file,
            "settings": file,
            "text_file": "" if file.endswith(SETTINGS) else file,
            "words": "".join(f"(?=.*{any_of([word])})" for word in sorted(self.rules.stems(text))),
        }
        known = self.known | self._values(said) | {"text": text}
        known |= {"files": file} if said.get("files") else {}
        needed = re.findall(r"<(file|settings|text_file|text|words)>", str(rule | {"say": ""}))
        if not all(map(known.get, needed)):
            self.missed = "Which file or words do you mean?"
            return ""
        is_quoted = not rule.get("command", "<command>").startswith("<command>")
        if is_quoted and "Windows PowerShell" in str(self.request.tools):
            return "That needs bash, a part of Git for Windows: install Git (git-scm.com)."
        result = self._outcome(rule, known, quote if is_quoted else str)
        shown = re.sub(NOISE, "", result).strip()
        if "No such file" in result:
            if self._is_in_folder(said):
                return self._follow(rule, said, self._place(file))
            if file not in self.paths:
                return self._advise(f"There is no {file} here.", "", said)
        if re.match(SUCCESS.get(rule.get("tool"), OTHER_SUCCESS), result):
            if not reads(rule):
                self.done.clear()  # what was read before is old
            # a program can print any name, but awk prints those of tables
            can_name = rule.get("tool") != "exec" or "awk " in rule["command"]
            is_name = "target" in rule["own"] or can_name and rule.get("path") != "<memory>"
            named = re.search(NEW_NAME, shown) if is_name else None
            self.known |= {"result": shown, "file": named[1] if named else file}
            known |= {"result": shown or "(nothing to show)", "count": shown.count("\n") + 1}
            return filled(rule.get("answer", "<result>"), known).strip()
        if re.match(NOTHING if reads(rule) else "old_text is not in the file", result):
            self.missed = NO_LINE
            return filled(rule.get("none", ""), known)
        return shown

    def _is_in_folder(self, said):
        """Is a file that was named only in a folder? Then its name means that file from now on."""
        before = self.masks.copy()
        for letter in re.findall(A_FILE, "".join(said.values())):
            self.masks[letter] = self._place(self.masks[letter])
        return self.masks != before

    def _outcome(self, rule, known, change):
        """Return what the tool of a rule returned, or the sum of a rule without a tool."""
        if "calculate" in rule:
            known["formula"] = filled(rule["calculate"], known)
            known["result"] = self.known["last"] = calculate(known["formula"])
        if "line" in rule or "old" in rule:
            return self._edit(rule, known)
        if "tool" not in rule:
            return known["result"] if "calculate" in rule else ""
        # an argument whose <words> were not said is left out
        arguments = {name: filled(rule[name], known, change) for name in rule.keys() - FIELDS}
        return self._result(rule["tool"], {name: text for name, text in arguments.items() if text})

    def _result(self, tool, arguments):
        """Return a call's result. If the call has no result yet, set `next_call` and return ""."""
        if tool in ("glob", "grep") and tool not in self.request.read_only:
            return ""  # this agent cannot search
        call = str((tool, sorted(arguments.items())))
        if call not in self.done and self.results:
            self.done[call] = self.results.pop(0)
        if call not in self.done:
            self.next_call = self.next_call or (tool, arguments)
        return self.done.get(call, "")

    def _advise(self, text, says="", said=None):
        """Return `text` and three sentences that work. The lines with all words of a question
        replace a text that refuses; lines with some of them one that only says that nothing fits.

        `says`: sentences of the rule that refuses; sentences of wishes come before them.
        """
        typed = self.masked(self.known["question"])
        it = self.known["file"]
        names = re.findall(A_FILE, typed + self._named(typed))
        files = [self._place(self._value(name)) for name in names]
        rows, is_answer = self._rows(typed, [*files, it])
        near = [row[0] for row in rows]
        if self.wishes or self.rules.has("pronouns", typed):  # add milk; explain it
            near.insert(0, it)
        about = next(filter(self._files_here().__contains__, [*files, *near, it]), "")
        wishes = [
            offer
            for wish, words in self.wishes
            if not self._has_text(words, "places")
            for offer in self._offers(wish.get("say", ""), words, about, rows)[:1]
        ]
        offers = sorted(wishes, key=len)[:1] + self._offers(says, said or {}, about, rows)
        offers += self._offers(self.rules.otherwise.get("can", ""), {}, about, rows)
        lines = [f"{file}: {shown}" for file, _, shown, _ in rows[:6]]
        if is_answer and "…" not in says and not self.wishes:
            text = "\n".join(["Lines with these words:", *lines])
        elif text in ("", NO_LINE):
            text = text or self.rules.otherwise["offer"]
            if lines:
                text = "\n  ".join(["I only searched. Lines with some of these words:", *lines])
            if wishes:
                text = NOT_CLEAR
        self.known["file"] = files[0] if files and files[0] in self.paths else it
        new = [offer for offer in dict.fromkeys(offers) if offer != self.known["question"]]
        return "\n  ".join([f"{text}\nI can:", *new[:3]])

    def _rows(self, typed, files):
        """Return the lines that have most of the words of a question, the best first, and whether
        they have all: [("a.csv", "Bo,3", "name Bo, grade 3", {"bo", "grad"})]

        Words that are in few lines count more, and lines of the files that it names.
        """
        known = rf"\b(?:{self.rules.kinds['verb']}|{self.rules.kinds['seek']})\b|[\ue000-\ue3ff]"
        own = self.rules.stems(self._value(re.sub(f"(?i){known}", " ", typed)))
        words = own
        if not self.wishes and (not own or self.rules.has("pronouns", typed)):
            words = own | self.rules.stems(self.known["before"])  # how old is she?
        pattern = any_of(words or "-") + HEAD
        found = self._result("grep", {"pattern": pattern, "output_mode": "content"})
        self.heads = dict(re.findall(r"(?m)^(.+?\.csv):1: (.+)", found))
        rows = []
        # no heading, no question
        for file, line in re.findall(r"(?m)^(.+?):\d+: [ \t*-]*(?!#|.*[\[{?]$)(.{1,300})", found):
            head = self.heads.get(file, "").split(",")
            cells = line.split(",")
            shown = line
            if len(cells) == len(head) > 1:  # of a table
                shown = ", ".join(map(" ".join, zip(head, cells, strict=True)))
            has = self.rules.stems(f"{file} {shown}") & words
            if has and cells != head:
                rows.append((file, line, shown, has))
        often = Counter(word for *_, has in rows for word in has)
        named = Counter(files)  # a file that was typed occurs twice, one that was described once

        def rank(row):
            of_file = named[row[0]] ** 3 + 0.2 * (row[0] in self.heads)
            return sum(often[word] ** -0.5 for word in row[-1]) + of_file

        rows.sort(key=rank, reverse=True)
        best = [row for row in rows if own <= row[-1] and not row[0].endswith(".py")]
        if own and best and self.rules.has("seek", typed):
            return best, True
        return [row for row in rows if rank(row) >= rank(rows[0]) / 2], False

    def _offers(self, says, said, about, rows):
        """`delete <file> | read <file>` → two sentences, without those with <words> nobody said.

        `about`: the file, if nobody said one; <.py> is a file that ends in .py
        """
        is_named = said.get("files") or said.get("listed")
        if is_named:
            about = self._place(self._files(said)[0])
            rows = [row for row in rows if row[0] == about]
        offers = []
        for say in says.split(" | "):
            for file, row, *_ in rows[:2] if "<row>" in say else [(about, "")]:
                known = self.known | self._values(said) | {"columns": self.heads.get(file)}
                known["file"] = known[Path(file).suffix] = file and quote(file)
                known["files"] = known["file"] if is_named else ""
                known["row"] = f"'{row}'" if '"' in row else f'"{row}"'
                offers.append(filled(say, known))
        return [offer for offer in offers if offer and '""' not in offer]

    def _edit(self, rule, known):
        """Put `line` behind the text of a file. Or change the one place that matches the regex
        `old`: its first group stays, and `new` comes after it.
        """
        path, line, new = (filled(rule.get(name, ""), known) for name in ("path", "line", "new"))
        old = filled(rule.get("old", ""), known, re.escape) or "()(?!)"
        if "line" in rule and not line:
            self.missed = "There is nothing to save yet."
            return ""
        text = self._result("read_file", {"path": path})
        page = "\n".join(re.findall(r"(?m)^\d+\| (.*)$", text))
        line = re.sub(r"(?m)^\d+\| ", "", line)  # of a file that was read
        is_new = rule["tool"] == "write_file" and "No such file" in text
        if is_new and self._place(path) == path or line and re.search(r"^[^|]* is empty\)$", text):
            return self._result("write_file", {"path": path, "content": line})
        if "go on with offset=" in text:
            return "That file is too long for me: I can only read one page."
        if not page:
            return text
        if line and path.endswith(".csv"):  # its rows have no blanks at their commas
            line = re.sub(r'[ \t]*,[ \t]*(?=[^"]*\Z)', ",", line)
            head = page.split("\n")[0]
            if line.count(",") != head.count(","):
                return (
                    f"A row of {path} needs commas between its values, like its first line:\n{head}"
                )
        kept, count = re.subn(f"(?im){old}", lambda found: found[1] + new, page)
        if count != 1 and not line:
            self.missed = f"I find {count or 'no'} such lines in {path}: say one."
            return self.missed if count else ""
        items = list(re.finditer(r"(?m)^((?:[-*] |\[.\] )+).*", kept))
        end = len(kept)
        if line[:1].isalnum() and 2 * len(items) > kept.count("\n"):  # a list: - [ ] milk
            line = re.sub(r"\[.\]", "[ ]", items[-1][1]) + line
            end = items[-1].end()
        new = f"{kept[:end]}\n{line}{kept[end:]}".strip("\n")
        return self._result("edit_file", {"path": path, "old_text": page, "new_text": new})


def calculate(text):
    """`15% of 240` → `36`; a text that is no sum, or has no result → `(no number: …)`"""
    table = beside_this_file("templates/offline/signs.txt")
    for said, sign in re.findall("(.+) →(?: (.*))?", table):
        text = re.sub(said, sign, text.lower())  # plus|add → +
    try:
        # without integers: 9**9**9 would take for ever
        text = re.fullmatch(r"(?>[\s+*/%()-]|\d+\.\d*|\.\d+)++", text)[0]
        return f"{eval(text, {'__builtins__': {}}):.15g}"
    except Exception:  # no sum, 1/0, 9.**9.**9., 1.+(), or thousands of brackets
        return "(no number: I know sums like 28 * 4.50, sqrt(81), (3 + 4) / 2)"
