"""What survives the turn: the session's journal, long-term memory, skills; and what fits a request.

The journal is the truth, what is sent is a projection. A session is one append-only file of JSON
lines; each message is written once, at the moment it exists. Repair and trimming happen on the copy
that is sent:

    {"_type": "metadata", "key": "cli:direct", "start": 0, "last_consolidated": 0, …}
    {"role": "user", "content": "What is in a.txt?", "timestamp": "2026-04-03T10:00:00+0200"}
    {"role": "assistant", "content": null, "tool_calls": [{"id": "call_1", …}], …}
    {"role": "tool", "tool_call_id": "call_1", "content": "1| hello", …}

So a crash needs no checkpoint: whoever reads the journal completes what is missing.
This file works alone; what it needs from other rooms is handed in.
Read after providers.py, before tools.py. Not covered: when a session is written to (AgentLoop).
"""

import asyncio
import contextlib
import json
import logging
import math
import os
import re
import shutil
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

log = logging.getLogger("nanobot.memory")


# ---- The journal: each message is written once, when it exists ----


@dataclass
class Session:
    """One conversation. `lines` are the journal's messages; None stands for an unreadable one."""

    key: str
    path: Path
    lines: list[dict | None] = field(default_factory=list)
    metadata: dict = field(default_factory=dict)
    created_at: str = field(default_factory=lambda: now())
    start: int = 0  # `/new` was said here: lines before it are not sent
    last_consolidated: int = 0  # lines before it are in memory, and not sent
    stamp: tuple[int, int] | None = None  # of the file when we last read or wrote it
    unsynced: bool = False  # a power cut could still take the last lines
    is_new: bool = False  # or the file's name
    projection: "Projection" = field(default_factory=lambda: Projection(), init=False)

    def append(self, *messages: dict, sync: bool = True) -> None:
        """Write messages in one go. With `sync=False` a kill costs nothing, a power cut may:

        session.append(message, sync=False)   # 0.1 ms
        await session.synced()                # 1 ms or more, on a thread: before it is shown
        """
        fresh = [as_journalled(message) for message in messages]
        write_records(self, fresh)
        self.lines += fresh
        if sync:
            self.sync()

    def restart(self, sync: bool = True) -> None:
        """Start afresh: the journal keeps every line, none of them is sent any more."""
        self.start = len(self.lines)
        write_records(self, [header(self)])
        if sync:
            self.sync()

    def get_history(self) -> list[dict]:
        """The copy that is sent, as far as it goes; `LLMProvider.chat` makes it lawful."""
        history = self.projection.of(self.lines, max(self.start, self.last_consolidated))
        if self.last_line.get("cut"):  # nobody has said anything since
            note = f"{gap_after(self.last_line)} Go on where it stops."
            history.append({"role": "user", "content": note})
        return history

    @property
    def last_line(self) -> dict:
        sent = self.lines[max(self.start, self.last_consolidated) :]
        return next(filter(None, reversed(sent)), {})

    @property
    def unfinished(self) -> bool:
        """True where the last turn has no whole answer: it ended at a question, a call, a cut."""
        line = self.last_line
        if line.get("cut") or line.get("tool_calls"):
            return True
        return line.get("role", "assistant") != "assistant"

    def sync(self) -> None:
        """Make what was appended survive a power cut. Raises OSError where the disk refuses."""
        self.unsynced = False
        try:
            sync_to_disk(self.path)
        except OSError:
            self.unsynced = True
            raise
        if self.is_new:
            sync_folder(self.path.parent)
        self.is_new = False

    async def synced(self) -> None:
        """`sync` on a thread, and only where there is something to do."""
        if self.unsynced:
            await in_thread(self.sync)


def as_journalled(message: dict) -> dict:
    """What the journal keeps: of images only the line that names them, never their bytes."""
    line = message | {"timestamp": message.get("timestamp") or now()}
    if isinstance(message.get("content"), list):
        texts = [block["text"] for block in message["content"] if block.get("type") == "text"]
        line["content"] = "\n".join(texts) or "[image]"
    return line


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


# ---- The projection: what is sent of a journal ----

OWN_KEYS = ("timestamp", "runtime", "cut")


def project(lines: Iterable[dict | None], before: dict | None = None) -> list[dict]:
    """Journal lines → messages, from the first question on. `before` is the line before them.

    user "a", runtime "It is Monday"         user "It is Monday\\n\\na"
    assistant "Well", cut "no network"   →   assistant "Well"
    user "b"                                 user "[the answer above broke off: no network]\\n\\nb"
    """
    history = []
    for line in filter(None, lines):
        if before is None and line["role"] != "user":
            continue
        history.append(as_sent(line, before))
        before = line
    return history


def as_sent(line: dict, before: dict | None) -> dict:
    message = {key: value for key, value in line.items() if key not in OWN_KEYS}
    if line["role"] == "user":
        notes = [gap_after(before), line.get("runtime")]
        message["content"] = with_notes(notes, line.get("content"))
    return message


def gap_after(line: dict | None) -> str:
    """What the next question says of an answer that is missing.

    No assistant's message says it: models repeat what stands in their own mouth.
    """
    if line and line.get("cut"):
        return f"[the answer above broke off: {line['cut']}]"
    if line and line["role"] == "user":
        return "[the message above was not answered: interrupted]"
    return ""


def with_notes(notes: list[str | None], content: Any) -> Any:
    """Notes before a question, each with an empty line behind it."""
    notes = [note for note in notes if note]
    if isinstance(content, list):  # of another program: ours has texts only
        return [{"type": "text", "text": note} for note in notes] + content
    return "\n\n".join([*notes, content or ""])


# ---- What fits a request ----


def leave_out_oldest(
    messages: list[dict], budget: int, counter: "TokenCounter", task: int
) -> list[dict]:
    """The last resort for a request over its budget (tokens): the oldest turns are not sent.

    A turn goes from a user message to the next. The system message stays, and all from `task` on.
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


# ---- Long-term memory: facts, history ----


class MemoryStore:
    """Facts in memory/MEMORY.md, which people edit too, and the history, which only grows."""

    def __init__(self, workspace: Path):
        self.folder = workspace / "memory"
        self.facts, self.history = self.folder / "MEMORY.md", self.folder / "history.jsonl"

    def read_facts(self) -> str:
        if not self.facts.exists():
            return ""
        return self.facts.read_text(encoding="utf-8", errors="replace")

    def recent_history(self) -> list[str]:
        """`[2026-04-03 00:02] text` of what Dream has not read: the last 50, ≤ 32,000 letters."""
        dreamt = 0  # nothing is read yet, or the file is damaged
        with contextlib.suppress(FileNotFoundError, ValueError):
            dreamt = max(int((self.folder / ".dream_cursor").read_bytes()), 0)
        raw = self.history.read_bytes() if self.history.exists() else b""
        lines = []
        for record in map(parse, raw.split(b"\n")):
            match record:
                case {"cursor": int(cursor), "timestamp": str(when), "content": str(text)}:
                    if type(cursor) is int and cursor > dreamt:  # True is an int, too
                        lines.append(f"[{when}] {text}")
        while len(lines) > 50 or len("\n".join(lines)) > 32_000:
            lines.pop(0)
        return lines


# ======== Second reading: damage, other programs, power cuts, sizes, skills ========

# ---- Reading what is left of a journal ----
# Without this one bad byte costs a conversation. Seen: 4,096 zero bytes at the end after a power
# cut, half a line after a full disk, a `NaN` that made every later request invalid.


def load_session(key: str, path: Path) -> Session:
    """Read a journal, whatever happened to it: no damaged or foreign line hides the others."""
    session = Session(key, path, stamp=file_stamp(path))
    data = path.read_bytes()
    raw_lines = whole_lines(data)
    records = [parse_line(raw) for raw in raw_lines]
    if data.strip() and not any(records):
        aside = path.with_name(f"{path.name}.corrupt-{time.time_ns()}")
        os.replace(path, aside)
        log.warning("%s is not readable: moved to %s, the session starts anew", path, aside)
        return Session(key, path)
    damaged = []
    for number, (raw, record) in enumerate(zip(raw_lines, records, strict=True)):
        is_header = record is not None and record.get("_type") == "metadata"
        if is_header and is_undamaged(record):
            take_header(session, record)
        elif is_header or not record:
            damaged += [raw] if raw else []
        if number == 0 and record is None:  # it was the metadata
            continue
        if not is_header:
            session.lines.append(record)
    if damaged:
        keep_damaged(path, damaged)
    return session


def whole_lines(data: bytes) -> list[bytes]:
    """Lines with their end, and a last one that lacks only its newline; a torn one is not read."""
    *lines, rest = data.split(b"\n")  # not splitlines(): U+2028 and \x85 are ordinary text here
    return [*lines, rest] if parse(rest) else lines


def parse_line(raw: bytes) -> dict | None:
    """Metadata, or a message of the shape that a request takes; None for anything else."""
    record = parse(raw)
    if record is None or record.get("_type") == "metadata":
        return record
    return record if is_message(record) else None


def parse(raw: bytes) -> dict | None:
    try:
        record = STRICT_JSON.decode(raw.decode("utf-8", errors="surrogatepass"))
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def finite(number: str) -> float:
    """`NaN`, `Infinity` and `1e999` are JSON for Python only: a request with them is refused."""
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is no number in JSON")
    return value


STRICT_JSON = json.JSONDecoder(parse_float=finite, parse_constant=finite)


def is_message(record: dict) -> bool:
    content, calls = record.get("content"), record.get("tool_calls")
    names = [record.get("role"), record.get("tool_call_id", "")]
    if not all(isinstance(name, str) for name in names):
        return False
    if "content" not in record and not calls:
        return False
    is_content = content is None or isinstance(content, str) or are_dicts(content)
    are_calls = calls is None or are_named(calls)
    return is_content and are_calls


def are_dicts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, dict) for value in values)


def are_named(calls: Any) -> bool:
    return are_dicts(calls) and all(isinstance(call.get("function") or {}, dict) for call in calls)


def keep_damaged(path: Path, damaged: list[bytes]) -> None:
    """Unreadable lines are skipped, never lost: they are collected in a file beside, each once."""
    aside = path.with_name(f"{path.name}.corrupt")
    log.warning("%s: %d unreadable lines skipped, kept in %s", path, len(damaged), aside.name)
    with open_private(aside) as file:
        file.seek(0)
        known = file.read().split(b"\n")
        lines = [line + b"\n" for line in damaged if line not in known]
        write_whole(file, b"".join(lines))


# ---- Where a conversation begins ----
# Counts of lines are only right as long as no line is damaged: a flipped newline makes one line of
# two, and all counts behind it point one message too far. So a metadata line says how many lines it
# stood behind, and has a checksum.


def header(session: Session, **changes: Any) -> dict:
    """A metadata line. A later one replaces what it names of the earlier ones."""
    record = {
        "_type": "metadata",
        "key": session.key,
        "created_at": session.created_at,
        "updated_at": now(),
        "metadata": session.metadata,
        "start": session.start,
        "last_consolidated": session.last_consolidated,
        "lines": len(session.lines),
    }
    return record | {"crc": checksum(record)}


def checksum(record: dict) -> int:
    signed = {key: value for key, value in record.items() if key != "crc"}
    text = json.dumps(signed, ensure_ascii=False)
    return zlib.crc32(text.encode("utf-8", errors="replace"))


def is_undamaged(record: dict) -> bool:
    """An older version's line has no checksum: it is taken at its word."""
    return record.get("crc", checksum(record)) == checksum(record)


def take_header(session: Session, record: dict) -> None:
    session.created_at = str(record.get("created_at") or session.created_at)
    if isinstance(record.get("metadata"), dict):
        session.metadata = record["metadata"]
    lines_now = len(session.lines)
    lines_then = record.get("lines", lines_now)
    for name in ("start", "last_consolidated"):
        place = place_now(record.get(name), lines_then, lines_now)
        if place is not None:
            setattr(session, name, place)
    if record.get("start") == lines_then:  # `/new`: it begins here, whatever happened above
        session.start = lines_now


def place_now(count: Any, lines_then: Any, lines_now: int) -> int | None:
    """A count of lines as it was written → the same place among the lines that are left.

    7 of 12 lines, 11 are left because two became one → 6     99 of 12, -1, True, "2" → None
    """
    are_counts = type(count) is int and type(lines_then) is int  # not isinstance: True is no count
    if not are_counts or not 0 <= count <= lines_then:
        return None
    return max(count - max(lines_then - lines_now, 0), 0)


# ---- Writing that survives a full disk, a kill and a power cut ----
# Without this a turn that ends in "no space left on device" leaves half a line, and the next one is
# glued to it.


def open_private(path: Path) -> Any:
    """Open a file to read and append to, without a buffer; only its owner may."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return open(path, "a+b", buffering=0, opener=lambda name, flags: os.open(name, flags, 0o600))


def write_records(session: Session, records: list[dict]) -> None:
    """Lines at the end of the journal, in one write; where it fails nothing of them stays."""
    with open_private(session.path) as file:
        newline = end_last_line(file, session.path)
        if file.tell() == 0:
            session.is_new = True
            records = [header(session), *(record for record in records if "_type" not in record)]
        texts = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
        data = "".join(texts).encode("utf-8", errors="replace")  # a lone surrogate becomes `?`
        write_whole(file, newline + data)
    session.stamp = file_stamp(session.path)
    session.unsynced = True


def write_whole(file: Any, data: bytes) -> None:
    """All of it or nothing. Raises OSError with the file's name."""
    end = file.seek(0, os.SEEK_END)
    try:
        while data:
            data = data[file.write(data) :]  # more than once only where the disk is full
    except OSError as problem:
        file.truncate(end)
        raise OSError(problem.errno, problem.strerror, str(file.name)) from None


def end_last_line(file: Any, path: Path) -> bytes:
    """Go to where a line may begin: a torn last line is put aside, a whole one gets its newline."""
    file.seek(max(file.seek(0, os.SEEK_END) - 1, 0))
    if file.read() in (b"", b"\n"):
        return b""
    file.seek(0)
    last = file.read().rpartition(b"\n")[2]
    if parse(last):
        return b"\n"
    if last.strip(b"\0"):  # a message whose newline alone is damaged looks like a torn one
        keep_damaged(path, [last])
    file.truncate(file.seek(-len(last), os.SEEK_END))
    return b""


def file_stamp(path: Path) -> tuple[int, int] | None:
    return (path.stat().st_size, path.stat().st_mtime_ns) if path.exists() else None


def sync_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR)  # Windows syncs nothing that is open to read only
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Make a new name in a folder survive a power cut; not every system has this."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


async def in_thread(function: Callable, *arguments: Any) -> Any:
    """Run what blocks on a daemon thread: one of asyncio's own pool would hold the exit."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def finish(outcome: Any, problem: BaseException | None) -> None:
        if done.done():  # it was cancelled meanwhile
            return
        if problem:
            done.set_exception(problem)
        else:
            done.set_result(outcome)

    def work() -> None:
        outcome = problem = None
        try:
            outcome = function(*arguments)
        except BaseException as raised:  # it is raised where it is awaited
            problem = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(finish, outcome, problem)

    threading.Thread(target=work, daemon=True).start()
    return await done


# ---- A projection grows by what is new ----
# Without this a turn late in a session of 2,000 turns took 22 times an early one: all of it was
# projected anew.


@dataclass
class Projection:
    """What `project` gives for the lines of a session, kept between turns."""

    begin: int = 0
    end: int = 0  # lines before it are in `messages`
    messages: list[dict] = field(default_factory=list)
    last: dict | None = None  # the last line that was sent

    def of(self, lines: list[dict | None], begin: int) -> list[dict]:
        if begin != self.begin or self.end > len(lines):
            self.begin = self.end = begin
            self.messages, self.last = [], None
        new = project(lines[max(self.end, begin) :], self.last)
        self.messages += new
        self.last = self.last if not new else next(filter(None, reversed(lines)))
        self.end = len(lines)
        return list(self.messages)


# ---- The sessions of a workspace ----
# Without the lock two programs in one session answer each other's questions; without the encoding
# of the key `telegram:a_b` and `telegram:a:b` met in one file.


class SessionBusy(Exception):
    """Another process is in a turn of this session."""


class SessionManager:
    """The sessions of a workspace, `sessions/<encoded key>.jsonl`; the last 64 stay in memory."""

    def __init__(self, workspace: Path):
        self.folder = workspace / "sessions"
        self._cache: dict[str, Session] = {}  # the one used last stands last

    def path(self, key: str) -> Path:
        """A file name that decodes to the key: `telegram:a_b` → `telegram%3Aa_b.jsonl`."""
        name = quote(key, " @+,=", errors="surrogatepass").replace(".", "%2E")
        return self.folder / f"{name}.jsonl"

    def get(self, key: str) -> Session:
        """The session, read again where another process wrote to it. Raises OSError."""
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
        # the lock is released on close and on death
        with open_private(self.path(key).with_suffix(".lock")) as file:
            with contextlib.suppress(ImportError):  # on Windows it is up to the user
                import fcntl

                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    busy = f"Session {key} is in use by another program. Wait, or name another: -s."
                    raise SessionBusy(busy) from None
            yield


def readable(line: dict) -> str:
    """A journal line for people, whatever another program or an editor made of it:

    [2026-04-03T10:00:00+0200] assistant: calls read_file({"path": "a.txt"})
    """
    parts = [as_text(line.get("content"))]
    for call in line.get("tool_calls") or []:
        match call:
            case {"function": {"name": name, "arguments": arguments}}:
                parts.append(f"calls {name}({arguments})")
    text = "\n".join(filter(None, parts))
    cut = f" [broke off: {line['cut']}]" if line.get("cut") else ""
    return f"[{line.get('timestamp')}] {line['role']}: {text}{cut}"


def as_text(content: Any) -> str:
    """Blocks, which only other programs write into a journal, as JSON."""
    if content is None or isinstance(content, str):
        return content or ""
    return json.dumps(content, ensure_ascii=False)


# ---- Sizes ----
# Without this a long conversation ends in "maximum context length exceeded".


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
    """(bytes, tokens) of a dict that is sent as JSON. Bytes are an upper bound; an image is 1,000.

    A token is taken as 4 bytes (3 in mostly non-ASCII text): nothing waits for a vocabulary.
    """
    blocks = message["content"] if isinstance(message.get("content"), list) else []
    texts = [block for block in blocks if block.get("type") != "image_url"]
    images = 1_000 * (len(blocks) - len(texts))
    if images:
        message = {**message, "content": texts}
    text = json.dumps(message, ensure_ascii=False)
    size = len(text.encode("utf-8", errors="replace"))
    bytes_a_token = 3 if size > 1.5 * len(text) else 4
    return size + images, size // bytes_a_token + 1 + images


# ---- Skills ----
# They are files that anybody may have put there. One that is a FIFO, a link to /proc/self/mem or
# 100 MB long ended every turn; now it is left out, with a line that names it.


@dataclass
class Skill:
    """A way of working, written down: `skills/<name>/SKILL.md`, front matter and text."""

    name: str
    path: Path
    description: str = ""
    text: str = ""  # without the front matter
    always: bool = False  # in every system prompt in full
    missing: list[str] = field(default_factory=list)  # what it requires and this machine lacks
    problem: str = ""  # why it cannot be read: such a skill is in no prompt


def read_regular_file(path: Path) -> bytes:
    """A regular file of at most 100,000 bytes; raises ValueError or OSError."""
    without_waiting = getattr(os, "O_NONBLOCK", 0)  # for who writes into a FIFO
    descriptor = os.open(path, os.O_RDONLY | without_waiting)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no regular file but a directory, FIFO or device")
        data = os.read(descriptor, MAX_SKILL_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) > MAX_SKILL_BYTES:
        raise ValueError(f"it has more than {MAX_SKILL_BYTES:,} bytes")
    return data


MAX_SKILL_BYTES = 100_000


class SkillsLoader:
    """Skills of the workspace and of the kit; one of the workspace shadows the kit's of its name.

    `read(path) -> bytes` is how files for the prompt are read; it raises what it likes.
    """

    def __init__(self, *folders: Path, read: Callable[[Path], bytes] = read_regular_file):
        self.folders, self.read = folders, read  # the first folder wins
        self._warned: set[tuple[Path, str]] = set()

    def load(self) -> list[Skill]:
        """All of them, by name, the broken ones too: look at `problem`."""
        paths: dict[str, Path] = {}
        for folder in reversed(self.folders):
            paths |= {path.parent.name: path for path in folder.glob("*/SKILL.md")}
        skills = [read_skill(paths[name], self.read) for name in sorted(paths)]
        for skill in skills:
            if skill.problem and (skill.path, skill.problem) not in self._warned:
                self._warned.add((skill.path, skill.problem))
                log.warning("%s is left out: %s", skill.path, skill.problem)
        return skills


def read_skill(path: Path, read: Callable[[Path], bytes] = read_regular_file) -> Skill:
    """Front matter is `key: value` lines between two `---`; any part of it may be missing."""
    try:
        data = read(path)
    except Exception as problem:  # whatever it is: one bad skill must not end every turn
        return Skill(path.parent.name, path, problem=str(problem) or type(problem).__name__)
    text = data.decode("utf-8-sig", errors="replace").replace("\r\n", "\n")
    front = FRONT_MATTER.match(text)
    fields = {key: value for key, _, value in FIELD.findall(front[1] or "")}
    skill = Skill(fields.get("name") or path.parent.name, path, fields.get("description", ""))
    skill.text = text[front.end() :].strip()
    skill.always = fields.get("always", "").lower() in ("true", "yes")
    skill.missing = missing(fields.get("metadata", ""), path)
    return skill


# "---\nname: weather\n---\n"
FRONT_MATTER = re.compile(r"(?:---[ \t]*\n(.*?)^---[ \t]*$)?", re.DOTALL | re.MULTILINE)
# `description: "Use for the weather."`
FIELD = re.compile(r"^([\w-]+):[ \t]*([\"']?)(.*?)\2[ \t]*$", re.MULTILINE)


def missing(metadata: str, path: Path) -> list[str]:
    """What of `{"nanobot": {"requires": {"bins": ["gh"], "env": ["KEY"]}}}` this machine lacks."""
    try:
        requires = json.loads(metadata or "{}").get("nanobot", {}).get("requires") or {}
        programs = [name for name in requires.get("bins") or [] if not shutil.which(name)]
        variables = [name for name in requires.get("env") or [] if not os.getenv(name)]
    except (ValueError, AttributeError, TypeError, RecursionError):
        log.warning("%s: metadata is not the JSON that is expected", path)
        return []
    lacks = [f"program {name}" for name in programs]
    lacks += [f"environment variable {name}" for name in variables]
    return lacks
