"""Telegram's Bot API on loopback: a real HTTP server that keeps and forgets updates as the real one does.

An update stays until a getUpdates with a higher offset confirms it; of two getUpdates at once the older one
gets 409; HTML is parsed as Telegram parses it. What it was asked is kept for the test to look at.
"""

from __future__ import annotations

import email.parser
import email.policy
import html.parser
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fake_llm import QuietHandler, Server

Json = dict[str, Any]

LARGE = 5_000_000  # bytes: a larger upload is not looked at
PATIENCE = 30.0  # seconds until a test that waits for something gives up
TAGS = {"b", "strong", "i", "em", "u", "s", "code", "pre", "a", "blockquote", "tg-spoiler"}
NO_HTML = "Bad Request: can't parse entities: Unmatched or unsupported tag at byte offset 0"
CONFLICT = "Conflict: terminated by other getUpdates request; make sure that only one bot instance is running"
WEBHOOK = "Conflict: can't use getUpdates method while webhook is active; use deleteWebhook to delete it first"


@dataclass
class Request:
    """`files` are the parts of a form that had a file name: field → (name, content)."""

    method: str
    fields: Json
    files: dict[str, tuple[str, bytes]] = field(default_factory=dict)


@dataclass
class Refusal(Exception):
    """`status` 0: the connection is cut without a word; `stalls`: it is kept, and nothing comes."""

    status: int
    description: str = ""
    parameters: Json = field(default_factory=dict)
    body: bytes = b""  # instead of the API's JSON, as of a proxy
    stalls: bool = False
    after: bool = False  # the method is done first, and only its answer gets lost


class Parser(html.parser.HTMLParser):
    """Telegram's HTML: its own tags only, each closed, in order. The text is what a reader sees."""

    def __init__(self, text: str):
        super().__init__()
        self.text, self.opened = "", []
        self.feed(text)
        self.close()
        if self.opened:
            raise Refusal(400, NO_HTML)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        if tag not in TAGS:
            raise Refusal(400, NO_HTML)
        self.opened.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.opened or self.opened.pop() != tag:
            raise Refusal(400, NO_HTML)

    def handle_data(self, data: str) -> None:
        self.text += data


def units(text: str) -> int:
    return len(text.encode("utf-16-le")) // 2


class FakeTelegram(Server):
    def __init__(self, token: str = "123456:AAE-secret_token") -> None:
        super().__init__(Handler)
        self.token, self.base_url = token, f"http://127.0.0.1:{self.server_port}"
        self.bot = {"id": 99, "is_bot": True, "first_name": "Kit", "username": "kit_bot"}
        self.updates: list[Json] = []  # that are not confirmed
        self.requests: list[Request] = []
        self.files: dict[str, tuple[str, bytes]] = {}  # file_id → path and content
        self.webhook = ""
        self.cuts_uploads_after = 0  # so many bytes; 0: never
        self.refusals: dict[str, list[Refusal]] = {}
        self.chats: dict[str, Refusal] = {}  # by chat: whatever goes there fails so
        self.changed = threading.Condition()
        self.stopped = False
        self._polls, self._next_update, self._next_message = 0, 1_000, 1

    def __exit__(self, *exception: object) -> None:
        with self.changed:
            self.stopped = True
            self.changed.notify_all()
        super().__exit__(*exception)

    # what a test does and sees

    def update(self, **content: Any) -> int:
        """Any update: `update(edited_message={…})`; returns its id."""
        with self.changed:
            self._next_update += 1
            self.updates.append({"update_id": self._next_update, **content})
            self.changed.notify_all()
        return self._next_update

    def say(self, text: str = "", sender: int = 7, chat: Json | None = None, **parts: Any) -> int:
        """A message; without `chat` in the sender's private one."""
        self._next_message += 1
        people = {
            "chat": chat or {"id": sender, "type": "private"},
            "from": {"id": sender, "is_bot": False, "first_name": "Ann"},
        }
        parts |= {"text": text} if text else {}
        return self.update(
            message={"message_id": self._next_message, "date": 1_700_000_000, **people, **parts}
        )

    def file(self, path: str, content: bytes, **more: Any) -> Json:
        """A file on the server, as a message names it."""
        file_id = f"ID{len(self.files)}"
        self.files[file_id] = (path, content)
        return {
            "file_id": file_id,
            "file_unique_id": f"U{len(self.files)}",
            "file_size": len(content),
            **more,
        }

    def refuse(self, method: str, *refusals: Refusal) -> None:
        """The next calls of a method fail so, one after the other."""
        self.refusals.setdefault(method, []).extend(refusals)

    def calls(self, method: str) -> list[Json]:
        return [request.fields for request in self.requests if request.method == method]

    def texts(self, chat: Any = None) -> list[str]:
        """What was sent, to one chat or to all; refused or not."""
        calls = self.calls("sendMessage")
        return [each["text"] for each in calls if chat is None or each["chat_id"] == str(chat)]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE), "it did not come to that"

    # what a bot asks for

    def answer(self, request: Request) -> Any:
        with self.changed:
            self.requests.append(request)
            self.changed.notify_all()
            refusals = self.refusals.get(request.method)
            refusal = (
                refusals.pop(0) if refusals else self.chats.get(str(request.fields.get("chat_id")))
            )
        if refusal and not refusal.after:
            raise refusal
        result = getattr(self, f"do_{request.method}", lambda **fields: True)(**request.fields)
        if refusal:
            raise refusal
        return result

    def do_getMe(self) -> Json:
        return self.bot

    def do_deleteWebhook(self) -> bool:
        self.webhook = ""
        return True

    def do_getUpdates(
        self, offset: int = 0, timeout: float = 0, limit: int = 100, **fields: Any
    ) -> Any:
        with self.changed:
            if self.webhook:
                raise Refusal(409, WEBHOOK)
            self.updates = [update for update in self.updates if update["update_id"] >= offset]
            self._polls += 1
            number = self._polls
            self.changed.notify_all()
            self.changed.wait_for(
                lambda: self.updates or self.stopped or number != self._polls, timeout
            )
            if self.stopped:
                raise ConnectionAbortedError
            if number != self._polls:
                raise Refusal(409, CONFLICT)
            return self.updates[:limit]

    def do_sendMessage(self, chat_id: Any, text: str, parse_mode: str = "", **fields: Any) -> None:
        shown = Parser(text).text if parse_mode == "HTML" else text
        if not shown.strip():
            raise Refusal(400, "Bad Request: message text is empty")
        if units(shown) > 4_096:
            raise Refusal(400, "Bad Request: message is too long")

    def do_getFile(self, file_id: str) -> Json:
        return {"file_id": file_id, "file_path": self.files[file_id][0]}


class Handler(QuietHandler):
    server: FakeTelegram

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        is_large = size > LARGE
        cut = is_large and self.server.cuts_uploads_after
        raw = self.rfile.read(cut or size)
        token, _, method = self.path.removeprefix("/bot").partition("/")
        if token != self.server.token:
            status, text = (401, "Unauthorized") if ":" in token else (404, "Not Found")
            return self._send(status, {"ok": False, "error_code": status, "description": text})
        request = self._request(method, b"" if is_large else raw)
        if cut:
            self.server.refuse(method, Refusal(0))
        try:
            self._send(200, {"ok": True, "result": self.server.answer(request)})
        except Refusal as refusal:
            self._refuse(refusal)

    def do_GET(self) -> None:
        """A file: /file/bot<token>/<path>"""
        path = self.path.removeprefix(f"/file/bot{self.server.token}/")
        content = dict(self.server.files.values()).get(path)
        if content is None:
            return self._send(404, {"ok": False, "error_code": 404})
        self._send(200, content)

    def _request(self, method: str, raw: bytes) -> Request:
        kind = self.headers.get("Content-Type", "")
        if kind == "application/json":
            return Request(method, json.loads(raw))
        head = f"Content-Type: {kind}\r\n\r\n".encode()
        form = email.parser.BytesParser(policy=email.policy.HTTP).parsebytes(head + raw)
        request = Request(method, {})
        for part in form.iter_parts():
            name = part.get_param("name", header="Content-Disposition")
            content = part.get_payload(decode=True)
            if part.get_filename():
                request.files[name] = (part.get_filename(), content)
            else:
                request.fields[name] = content.decode()
        return request

    def _refuse(self, refusal: Refusal) -> None:
        if refusal.stalls:
            with self.server.changed:
                self.server.changed.wait_for(lambda: self.server.stopped, PATIENCE)
        if not refusal.status:
            self.close_connection = True
            return self.connection.close()
        content = {
            "ok": False,
            "error_code": refusal.status,
            "description": refusal.description,
            "parameters": refusal.parameters,
        }
        self._send(refusal.status, refusal.body or content)

    def _send(self, status: int, content: Json | bytes) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
