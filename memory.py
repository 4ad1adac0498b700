"""What survives the turn: the session's journal, long-term memory, skills; and how much of it fits a request.

The journal is the truth, what is sent is a projection. A session is one append-only file of JSON lines; each
message is written once, at the moment it exists. Repair and trimming happen on the copy that is sent:

    {"_type": "metadata", "key": "cli:direct", "created_at": "…", "metadata": {}, "last_consolidated": 0}
    {"role": "user", "content": "What is in a.txt?", "timestamp": "2026-04-03T10:00:00+0200"}
    {"role": "assistant", "content": null, "tool_calls": [{"id": "call_1", …}], "timestamp": "…"}
    {"role": "tool", "tool_call_id": "call_1", "content": "1| hello", "timestamp": "…"}

So a crash needs no checkpoint: whoever reads the journal completes what is missing.
This file works alone; what it needs from other rooms is handed in: `legal`, the rule for a lawful history.
Read after tools.py, before channels.py. Not covered: when a session is loaded and written to (AgentLoop).
"""

import contextlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

log = logging.getLogger("nanobot.memory")


# ---- The journal ----


class SessionBusy(Exception):
    """Another process is in a turn of this session."""


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def open_private(path: Path) -> Any:
    """Open a file to read and append to; only its owner may."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return open(path, "a+b", opener=lambda name, flags: os.open(name, flags, 0o600))


def sync_folder(folder: Path) -> None:
    """Make a new name in a folder survive a power cut; not every system has this."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def without_images(message: dict) -> dict:
    """What the journal keeps: of images only the line that names them, never their bytes."""
    if not isinstance(message.get("content"), list):
        return message
    texts = [block["text"] for block in message["content"] if block.get("type") == "text"]
    return {**message, "content": "\n".join(texts) or "[image]"}


def said(line: dict) -> str:
    """A journal line to be read by people, whatever another program or an editor made of it."""
    content, calls = line.get("content") or "", line.get("tool_calls")
    parts = [content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)]
    for call in calls if isinstance(calls, list) else []:
        match call:
            case {"function": {"name": name, "arguments": arguments}}:
                parts.append(f"calls {name}({arguments})")
    return f"[{line.get('timestamp')}] {line['role']}: " + "\n".join(filter(None, parts))


@dataclass
class Session:
    """One conversation. `lines` are the journal's message lines; None stands for an unreadable one."""

    key: str
    path: Path
    lines: list[dict | None] = field(default_factory=list)
    metadata: dict = field(default_factory=dict)
    created_at: str = field(default_factory=now)
    last_consolidated: int = 0  # this many lines are no longer sent
    stamp: tuple[int, int] | None = None  # of the file when we last read or wrote it

    def append(self, *messages: dict, sync: bool = True) -> None:
        """Write messages in one go; `sync=False` leaves the fsync (for power cuts) to the next append."""
        fresh = [without_images(each) | {"timestamp": each.get("timestamp") or now()} for each in messages]
        self._write(fresh, sync)
        self.lines += fresh

    def restart(self) -> None:
        """Start afresh: the journal keeps every line, none of them is sent any more."""
        self.last_consolidated = len(self.lines)
        self._write([self._header()], sync=True)

    def _header(self) -> dict:
        return {"_type": "metadata", "key": self.key, "created_at": self.created_at, "updated_at": now(),
                "metadata": self.metadata, "last_consolidated": self.last_consolidated}  # fmt: skip

    def _write(self, records: list[dict], sync: bool) -> None:
        with open_private(self.path) as file:
            newline = _end_last_line(file)
            is_new = file.tell() == 0
            if is_new and "_type" not in records[0]:
                records = [self._header(), *records]
            text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
            file.write(newline + text.encode("utf-8", errors="replace"))  # a lone surrogate becomes `?`
            file.flush()
            if sync:
                os.fsync(file.fileno())
        self.stamp = file_stamp(self.path)
        if is_new:
            sync_folder(self.path.parent)

    def get_history(self, legal: Callable[[list[dict]], list[dict]]) -> list[dict]:
        """The lawful copy that is sent; it begins with a user message. Only here is a cut turn completed."""
        history: list[dict] = []
        for line in filter(None, self.lines[self.last_consolidated :]):
            message = {key: value for key, value in line.items() if key not in ("timestamp", "runtime")}
            if line.get("runtime"):
                message["content"] = f"{line['runtime']}\n\n{line.get('content')}"
            if history and history[-1]["role"] == message["role"] == "user":
                history.append({"role": "assistant", "content": "[interrupted before an answer]"})
            if history or message["role"] == "user":
                history.append(message)
        return legal(history)

    @property
    def unfinished(self) -> bool:
        """True where the last turn has no answer: it ended at a user message, a tool result or a call."""
        last = next(filter(None, reversed(self.lines[self.last_consolidated :])), {"role": "assistant"})
        return last["role"] != "assistant" or bool(last.get("tool_calls"))


def file_stamp(path: Path) -> tuple[int, int] | None:
    return (path.stat().st_size, path.stat().st_mtime_ns) if path.exists() else None


def load_session(key: str, path: Path) -> Session:
    """Read a journal, whatever happened to it: torn, damaged and foreign lines never hide the others."""
    session = Session(key, path, stamp=file_stamp(path))
    data = path.read_bytes()
    *whole, rest = data.split(b"\n")  # not splitlines(): U+2028 and \x85 are ordinary text here
    whole += [rest] if _parse(rest) else []  # it lacks only its newline; a torn line is not read
    records = [_parse_record(line) for line in whole]
    if data.strip() and not any(records):
        aside = path.with_name(f"{path.name}.corrupt-{time.time_ns()}")
        os.replace(path, aside)
        log.warning("%s is not readable: moved to %s, the session starts anew", path, aside)
        return Session(key, path)
    header: dict = {}
    for number, record in enumerate(records):
        if record and record.get("_type") == "metadata":
            header |= record
        elif number or record:  # an unreadable first line was the metadata
            session.lines.append(record)
    session.created_at = str(header.get("created_at") or session.created_at)
    session.metadata = header["metadata"] if isinstance(header.get("metadata"), dict) else {}
    count = header.get("last_consolidated")
    if type(count) is int and 0 <= count <= len(session.lines):  # not isinstance: True is no count
        session.last_consolidated = count
    if damaged := [line for line, record in zip(whole, records, strict=True) if line and not record]:
        _keep_damaged(path, damaged)
    return session


def _end_last_line(file: Any) -> bytes:
    """Go to where the next line may begin: a torn last line is cut off, a whole one gets its newline."""
    file.seek(max(file.seek(0, os.SEEK_END) - 1, 0))
    if file.read() in (b"", b"\n"):
        return b""
    file.seek(0)
    last = file.read().rpartition(b"\n")[2]
    if _parse(last):
        return b"\n"
    file.truncate(file.seek(-len(last), os.SEEK_END))
    return b""


def _parse_record(line: bytes) -> dict | None:
    """Metadata, or a message of the shape that a request takes; None for anything else."""
    record = _parse(line) or {}
    content, calls = record.get("content") or "", record.get("tool_calls") or []
    parts = [*(content if isinstance(content, list) else []), *(calls if isinstance(calls, list) else [0])]
    parts += [part["function"] for part in parts if isinstance(part, dict) and part.get("function")]
    shaped = isinstance(content, str | list) and all(isinstance(part, dict) for part in parts)
    named = isinstance(record.get("tool_call_id", ""), str) and isinstance(record.get("role"), str)
    return record if record.get("_type") == "metadata" or (shaped and named) else None


def _parse(line: bytes) -> dict | None:
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(line)
        return record if isinstance(record, dict) else None
    return None


def _keep_damaged(path: Path, damaged: list[bytes]) -> None:
    """Unreadable lines are skipped, never lost: they are collected beside the journal, each once."""
    aside = path.with_name(f"{path.name}.corrupt")
    log.warning("%s: %d unreadable lines skipped, kept in %s", path, len(damaged), aside.name)
    with open_private(aside) as file:
        file.seek(0)
        known = file.read().split(b"\n")
        file.writelines(line + b"\n" for line in damaged if line not in known)


class SessionManager:
    """The sessions of a workspace, `sessions/<percent-encoded key>.jsonl`; the last 64 stay in memory."""

    def __init__(self, workspace: Path):
        self.folder = workspace / "sessions"
        self._cache: dict[str, Session] = {}  # the one used last stands last

    def path(self, key: str) -> Path:
        """A file name that decodes to the key: `telegram:a_b` and `telegram:a:b` never meet in one file."""
        return self.folder / f"{quote(key, ' @+,=', errors='surrogatepass').replace('.', '%2E')}.jsonl"

    def get(self, key: str) -> Session:
        """The session, read again where another process wrote to it. Raises OSError if it cannot be read."""
        path = self.path(key)
        session = self._cache.pop(key, None)
        if session is None or session.stamp != file_stamp(path):
            session = load_session(key, path) if path.exists() else Session(key, path)
        self._cache[key] = session
        if len(self._cache) > 64:
            self._cache.pop(next(iter(self._cache)))
        return session

    def list_keys(self) -> list[str]:
        """All session keys, the one used last first."""
        paths = sorted(self.folder.glob("*.jsonl"), key=lambda path: -path.stat().st_mtime)
        keys = []
        for path in paths:
            with contextlib.suppress(UnicodeDecodeError):  # not a name of ours
                keys.append(unquote(path.name.removesuffix(".jsonl"), errors="surrogatepass"))
        return keys

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Hold a session for one turn; raises SessionBusy while another process does."""
        with open_private(self.path(key).with_suffix(".lock")) as file:  # released on close and on death
            with contextlib.suppress(ImportError):  # on Windows, one program a session is up to the user
                import fcntl

                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    busy = f"Session {key} is in use by another program. Wait, or name another: -s."
                    raise SessionBusy(busy) from None
            yield


# ---- How much fits a request ----


class TokenCounter:
    """Sizes of messages in tokens, each message measured once."""

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[int, dict]] = {}  # by id(message), which is kept alive

    def size(self, message: dict) -> int:
        if id(message) not in self._sizes:
            self._sizes[id(message)] = (measure(message)[1], message)
        return self._sizes[id(message)][0]

    def total(self, messages: Iterable[dict]) -> int:
        return sum(map(self.size, messages))


def measure(message: dict) -> tuple[int, int]:
    """(bytes, tokens) of a dict that is sent as JSON. Bytes are an upper bound; an image is 1,000 of both.

    A token is taken as 4 bytes (3 in mostly non-ASCII text): nothing may wait for tiktoken's vocabulary.
    """
    blocks = message["content"] if isinstance(message.get("content"), list) else []
    texts = [block for block in blocks if block.get("type") != "image_url"]
    images = 1_000 * (len(blocks) - len(texts))
    text = json.dumps({**message, "content": texts} if images else message, ensure_ascii=False)
    size = len(text.encode("utf-8", errors="replace"))
    return size + images, size // (3 if size > 1.5 * len(text) else 4) + 1 + images


def leave_out_oldest(messages: list[dict], budget: int, counter: TokenCounter, task: int) -> list[dict]:
    """The last resort for a request over its budget (tokens): the oldest whole turns are not sent.

    A turn goes from a user message to the next. The system message stays, and all from index `task` on.
    """
    if counter.total(messages) <= budget:
        return messages
    head = [message for message in messages[:1] if message["role"] == "system"]
    start, used = task, counter.total(head + messages[task:])
    for n in range(task - 1, len(head), -1):
        used += counter.size(messages[n])
        if used > budget:
            break
        if messages[n]["role"] == "user":
            start = n
    return head + messages[start:]


# ---- Long-term memory: facts, history, skills ----


class MemoryStore:
    """Facts in memory/MEMORY.md, which people edit too, and the history of what was, which only grows."""

    def __init__(self, workspace: Path):
        self.folder = workspace / "memory"
        self.facts, self.history = self.folder / "MEMORY.md", self.folder / "history.jsonl"

    def read_facts(self) -> str:
        return self.facts.read_text(encoding="utf-8", errors="replace") if self.facts.exists() else ""

    def recent_history(self) -> list[str]:
        """`[2026-04-03 00:02] text` of what Dream has not read: the last 50 entries, ≤ 32,000 characters."""
        dreamt = 0  # nothing is read yet, or the file is damaged
        with contextlib.suppress(FileNotFoundError, ValueError):
            dreamt = max(int((self.folder / ".dream_cursor").read_bytes()), 0)
        raw = self.history.read_bytes() if self.history.exists() else b""
        lines = []
        for record in map(_parse, raw.split(b"\n")):
            match record:
                case {"cursor": cursor, "timestamp": str(when), "content": str(text)}:
                    lines += [f"[{when}] {text}"] if type(cursor) is int and cursor > dreamt else []
        while len(lines) > 50 or len("\n".join(lines)) > 32_000:
            lines.pop(0)
        return lines


@dataclass
class Skill:
    """A way of working, written down: `skills/<name>/SKILL.md`, front matter and text."""

    name: str
    path: Path
    description: str = ""
    text: str = ""  # without the front matter
    always: bool = False  # in every system prompt in full
    missing: list[str] = field(default_factory=list)  # what it requires and this machine lacks


class SkillsLoader:
    """Skills of the workspace and of the kit; one of the workspace shadows the kit's of the same name."""

    def __init__(self, *folders: Path):
        self.folders = folders  # the first wins

    def load(self) -> list[Skill]:
        folders = self.folders[::-1]
        found = [each for folder in folders for each in folder.glob("*/SKILL.md") if each.is_file()]
        paths = {path.parent.name: path for path in found}
        return [read_skill(paths[name]) for name in sorted(paths)]


def read_skill(path: Path) -> Skill:
    """Front matter is `key: value` lines between two `---`; any part of it may be missing."""
    text = path.read_text(encoding="utf-8-sig", errors="replace").replace("\r\n", "\n")
    front = re.match(r"(?:---[ \t]*\n(.*?)^---[ \t]*$)?", text, re.DOTALL | re.MULTILINE)
    pairs = re.findall(r"^([\w-]+):[ \t]*([\"']?)(.*?)\2[ \t]*$", front[1] or "", re.MULTILINE)
    fields = {key: value for key, _, value in pairs}
    skill = Skill(fields.get("name") or path.parent.name, path, fields.get("description", ""))
    skill.text = text[front.end() :].strip()
    skill.always = fields.get("always", "").lower() in ("true", "yes")
    skill.missing = _missing(fields.get("metadata", ""), path)
    return skill


def _missing(metadata: str, path: Path) -> list[str]:
    """What of `{"nanobot": {"requires": {"bins": ["gh"], "env": ["KEY"]}}}` this machine lacks."""
    try:
        requires = json.loads(metadata or "{}").get("nanobot", {}).get("requires") or {}
        bins = [f"program {each}" for each in requires.get("bins") or [] if not shutil.which(each)]
        keys = [f"environment variable {each}" for each in requires.get("env") or [] if not os.getenv(each)]
    except (ValueError, AttributeError, TypeError):
        log.warning("%s: metadata is not the JSON that is expected", path)
        return []
    return bins + keys
