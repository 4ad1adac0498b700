"""A language model that says what the test wrote: a real HTTP server on loopback that plays back a script.

It speaks the OpenAI Chat Completions protocol, so a test exercises the real SDK, real sockets and real
Server-Sent Events; only the model is made up. Whatever it was sent is kept for the test to look at.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

Json = dict[str, Any]

in_pieces = re.compile(
    r".{1,5}", re.DOTALL
).findall  # cuts a text as a model streams it: a little at a time


@dataclass
class Reply:
    """A proper answer of the model. Without `usage` a plausible one is made up; `{}` leaves it out."""

    content: str | None = None
    tool_calls: list[Json] = field(default_factory=list)
    finish_reason: str | None = "stop"
    usage: Json | None = None
    extra: Json = field(
        default_factory=dict
    )  # further keys of the message, such as reasoning_content
    delay: float = 0.0
    pause: float = 0.0  # seconds between two pieces of a stream


@dataclass
class Raw:
    """Bytes sent exactly as given, at the pace asked for: a stream in any shape seen in the wild."""

    body: bytes = b""
    content_type: str = "text/event-stream"
    chunks: list[bytes] | None = None  # instead of the body
    pause: float = 0.0  # seconds between two chunks
    hang: float = 0.0  # seconds of silence after the last one
    cut: bool = False  # close the connection without HTTP's mark of the end, as a dying proxy does
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


class Failure(Raw):
    """An HTTP error, or any odd body: with status 200 it can be a page of HTML or `choices: null`."""

    def __init__(
        self,
        status: int,
        body: Any,
        headers: Json | None = None,
        content_type: str = "application/json",
    ):
        text = body if isinstance(body, str) else json.dumps(body)
        super().__init__(text.encode(), content_type, status=status, headers=headers or {})


@dataclass
class Hang:
    """Accept the request, say nothing for so many seconds, then close the connection."""

    seconds: float


@dataclass
class Recorded:
    """One request as it arrived. `headers` has lower-case keys; a GET has no `body`."""

    path: str
    headers: dict[str, str]
    body: Json | None
    raw: bytes


Line = Reply | Raw | Hang | str | Json | list[Json]  # a dict is one call(), a list is several
Script = (
    Iterable[Line] | Callable[[Json], Line]
)  # lines, said one after the other, or a function of the request's body


def call(name: str, /, **arguments: Any) -> Json:
    """One tool call. It has no id yet: the server adds one, so that a line can be played more than once."""
    return {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def error(status: int, message: str, code: str | None = None) -> Failure:
    """A failure in the shape of OpenAI's error bodies."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return Failure(
        status, {"error": {"message": message, "type": kind, "param": None, "code": code}}
    )


def as_raw(reply: Reply, request: Recorded, numbers: Iterator[int]) -> Raw:
    """A reply as the bytes that were asked for: a stream of events, or one JSON object."""
    asked = request.body or {}
    tool_calls = [{"id": f"call_{next(numbers)}", **each} for each in reply.tool_calls]
    tokens = len(request.raw) // 4  # as in English
    estimated = {"prompt_tokens": tokens, "completion_tokens": 9, "total_tokens": tokens + 9}
    usage = estimated if reply.usage is None else reply.usage
    head = {"id": "chatcmpl-fake", "created": 1700000000, "model": asked.get("model")}
    if not asked.get("stream"):
        message = {"role": "assistant", "content": reply.content, **reply.extra}
        if tool_calls:
            message["tool_calls"] = tool_calls
        head["choices"] = [{"index": 0, "message": message, "finish_reason": reply.finish_reason}]
        head |= {"object": "chat.completion"} | ({"usage": usage} if usage else {})
        return Raw(json.dumps(head).encode(), "application/json")
    choices = [{"delta": delta, "finish_reason": None} for delta in deltas(reply, tool_calls)]
    choices.append({"delta": {}, "finish_reason": reply.finish_reason})
    chunks = [{"choices": [{"index": 0, **choice}]} for choice in choices]
    if usage and (asked.get("stream_options") or {}).get("include_usage"):
        chunks.append({"choices": [], "usage": usage})
    events = [json.dumps({**head, "object": "chat.completion.chunk", **chunk}) for chunk in chunks]
    lines = [f"data: {event}\n\n".encode() for event in (*events, "[DONE]")]
    return Raw(chunks=lines, pause=reply.pause)


def deltas(reply: Reply, tool_calls: list[Json]) -> Iterator[Json]:
    """The fragments of a message that the client has to put together, in OpenAI's order."""
    yield {"role": "assistant", "content": None if reply.content is None else ""}
    for key, value in [*reply.extra.items(), ("content", reply.content or "")]:
        for piece in in_pieces(value) if isinstance(value, str) else [value]:
            yield {key: piece}
    for index, tool_call in enumerate(tool_calls):
        name, arguments = tool_call["function"]["name"], tool_call["function"]["arguments"]
        yield {
            "tool_calls": [
                {"index": index, **tool_call, "function": {"name": name, "arguments": ""}}
            ]
        }
        for piece in in_pieces(arguments):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


class Server(ThreadingHTTPServer):
    """It listens on loopback as soon as it is made, and answers inside its `with` block."""

    daemon_threads = True
    request_queue_size = (
        128  # the default of 5 waiting connections is too few for clients in parallel
    )

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)

    def __enter__(self) -> Self:
        # Stopping takes up to one poll interval; the usual half second would add up over many tests.
        threading.Thread(target=self.serve_forever, args=(0.002,), daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()
        self.server_close()


class QuietHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keeps connections open, as the real servers do

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the log of requests out of the output of the tests."""


class FakeLLM(Server):
    def __init__(self, script: Script, *, required_key: str = "") -> None:
        super().__init__(Handler)
        self.base_url = f"http://127.0.0.1:{self.server_port}/v1"
        self.requests: list[Recorded] = []
        self.models = ["test-model"]
        self.required_key = required_key
        self.numbers = itertools.count(1)
        rest = (
            None if callable(script) else iter(script)
        )  # next() on it is atomic: no line is said twice
        empty = error(500, "fake_llm: the script is empty")
        self._script = script if callable(script) else lambda body: next(rest, empty)
        self._stopped = threading.Event()

    @property
    def bodies(self) -> list[Json | None]:
        """What was asked of the model, in order of arrival."""
        return [request.body for request in self.requests if request.path == "/v1/chat/completions"]

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        super().__exit__(*exception)

    def wait(self, seconds: float) -> None:
        """Sleep, but drop the connection as soon as the server is stopped, so that no test waits for it."""
        if self._stopped.wait(seconds):
            raise ConnectionAbortedError

    def answer(self, method: str, request: Recorded) -> Reply | Raw | Hang:
        """Choose what to say: a refusal, the list of models, or what comes next in the script."""
        key = request.headers.get("authorization", "")
        if self.required_key and key != f"Bearer {self.required_key}":
            return error(401, "Incorrect API key provided.", "invalid_api_key")
        if (method, request.path) == ("GET", "/v1/models"):
            models = [{"id": model, "object": "model"} for model in self.models]
            return Failure(200, {"object": "list", "data": models})
        if (method, request.path) != ("POST", "/v1/chat/completions"):
            return error(404, f"Invalid URL ({method} {request.path})")
        line = self._script(request.body)
        if isinstance(line, str):
            return Reply(line)
        line = [line] if isinstance(line, dict) else line
        return Reply(None, line, "tool_calls") if isinstance(line, list) else line


class Handler(QuietHandler):
    """One connection: reads the requests of a client and sends what the server chooses to say."""

    server: FakeLLM
    disable_nagle_algorithm = True  # or small pieces would wait for one another

    def do_POST(self) -> None:
        """Record a request, then answer it."""
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.wait(0)  # a connection that is kept open may outlive the server
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = json.loads(raw) if raw else None
        request = Recorded(self.path, headers, body, raw)
        self.server.requests.append(request)
        match self.server.answer(self.command, request):
            case Reply(delay=delay) as reply:
                self.server.wait(delay)
                self._send(as_raw(reply, request, self.server.numbers))
            case Raw() as raw:
                self._send(raw)
            case Hang(seconds):
                self.close_connection = True
                self.server.wait(seconds)

    do_GET = do_POST

    def _send(self, raw: Raw) -> None:
        self.close_connection |= raw.cut
        self.send_response(raw.status)
        usual = {"Content-Type": raw.content_type, "Transfer-Encoding": "chunked"}
        for name, value in (usual | raw.headers).items():
            self.send_header(name, value)
        self.end_headers()
        # An empty chunk is HTTP's mark of the end, so none may slip in before it.
        for number, chunk in enumerate(filter(None, raw.chunks or [raw.body])):
            self.server.wait(raw.pause if number else 0)
            self.wfile.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        self.server.wait(raw.hang)
        if not raw.cut:
            self.wfile.write(b"0\r\n\r\n")
