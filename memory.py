"""What survives the turn: the session's journal, long-term memory, skills; and what fits a request.

The journal is the truth, what is sent is a projection. A session is one append-only file of JSON
lines; each message is written once, at the moment it exists. Repair and trimming happen on the copy
that is sent:

    {"_type": "metadata", "key": "cli:direct", "start": 0, "last_consolidated": 0, …}
    {"role": "user", "content": "What is in a.txt?", "timestamp": "2026-04-03T10:00:00+0200"}
    {"role": "assistant", "content": null, "tool_calls": [{"id": "call_1", …}], …}
    {"role": "tool", "tool_call_id": "call_1", "content": "1| hello", …}

So a crash needs no checkpoint: whoever reads the journal completes what is missing. What is old
goes from the journal into the history (Consolidator), from there into facts and skills (Dream).
The model is handed in: `ask(messages, tools, tool_choice) -> response`, and `run_agent`.
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
import subprocess
import threading
import time
import zlib
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote
from weakref import WeakValueDictionary

log = logging.getLogger("nanobot.memory")
to_json = json.JSONEncoder(ensure_ascii=False).encode
Ask = Callable[[list[dict], list[dict], str | None], Awaitable[Any]]


# ---- The journal: each message is written once, when it exists ----


@dataclass
class Session:
    """One conversation. `lines` are the journal's messages; None stands for an unreadable one."""

    key: str
    path: Path
    lines: list[dict | None] = field(default_factory=list)
    metadata: dict = field(default_factory=dict)
    created_at: str = field(default_factory=lambda: now())
    start: int = 0  # `/new` dropped the lines before it
    last_consolidated: int = 0  # the lines before it went into the long-term memory
    summary: dict = field(default_factory=dict)  # {"text", "until"}: of the lines before `until`
    stamp: tuple[int, int] | None = None  # size and time of the file as we last read or wrote it
    unsynced: bool = False  # a power cut could still take the last lines
    is_new: bool = False  # a power cut could still take the whole file
    syncing: threading.Lock = field(default_factory=threading.Lock, init=False)
    projection: "Projection" = field(default_factory=lambda: Projection(), init=False)

    def append(self, *messages: dict, sync: bool = True) -> None:
        """Write messages in one go. With `sync=False` (0.1 ms) they survive a kill, but perhaps no
        power cut: then `await session.synced()` before the user sees an answer to them."""
        fresh = [as_journalled(message) for message in messages]
        write_records(self, fresh)
        self.lines += fresh
        if sync:
            sync_session(self)

    def restart(self, sync: bool = True, waiting: int = 0) -> None:
        """Start afresh: all lines stay in the file, only the last `waiting` questions are sent."""
        self.note(start=place_of_last(self.lines, waiting))
        if sync:
            sync_session(self)

    def note(self, **changes: Any) -> None:
        """A metadata line with what has changed: `start`, `last_consolidated`, `summary`."""
        vars(self).update(changes)
        write_records(self, [header(self, *changes)])

    async def synced(self) -> None:
        """All that was appended survives a power cut. Raises OSError where the disk refuses."""
        if self.unsynced or self.syncing.locked():
            await in_thread(sync_session, self)

    def get_history(self) -> list[dict]:
        """The messages to send; `LLMProvider.chat` makes them lawful."""
        begin = max(self.start, self.last_consolidated)  # older lines: dropped, or in the memory
        sent_from = max(begin, self.summary.get("until", 0))
        history = self.projection.of(self.lines, sent_from)
        if sent_from > begin:  # the summary stands for the lines between the two
            history.insert(0, summary_message(self.summary["text"]))
        return history + request_to_go_on(self)

    @property
    def unfinished(self) -> bool:
        """True where something waits for an answer: a question, calls, a cut, a late message."""
        line = last_line(self)
        if line.get("cut") or line.get("tool_calls") or line.get("unseen"):
            return True  # `unseen`: messages that came too late for this answer
        return line.get("role", "assistant") != "assistant"  # without a line nothing waits


# ---- The projection: what is sent of a journal ----


def project(lines: Iterable[dict | None], before: dict | None = None) -> list[dict]:
    """Journal lines → messages. Without a line `before` them they begin with a question.

    user "a", runtime "It is Monday"         user "It is Monday\\n\\na"
    assistant "Well", cut "no network"   →   assistant "Well"
    user "b"                                 user "[the answer above broke off: no network]\\n\\nb"
    """
    history = []
    for line in with_late_messages_moved(lines):
        if before is None and line["role"] != "user":
            continue  # the rest of a turn whose question is not sent
        if not is_blank_answer(line):
            history.append(as_sent(line, before))
        before = line
    return history


def gap_between(before: dict | None, line: dict) -> str:
    """A note on an answer that is missing or cut. The user's next message begins with it: in an
    assistant message it would do harm, as models repeat what they seem to have said."""
    if before is None:
        return ""
    if before.get("cut") and not is_blank_answer(before):
        return f"[the answer above broke off: {before['cut']}]"
    if line.get("beside") and not is_blank_answer(before):  # both wait for the same answer
        return ""
    was_not_answered = before["role"] == "user" or is_blank_answer(before)
    return "[the message above was not answered: interrupted]" if was_not_answered else ""


# ---- What fits the context window ----


@dataclass
class Governed:
    """The copy that is sent, and what was done: `8 of 11 turns, ~7,900 tokens, are left out`."""

    messages: list[dict]
    notes: list[str]
    tokens: int


def govern(
    messages: list[dict], budget: int, counter: "TokenCounter", task: dict | None = None
) -> Governed:
    """Fit a copy into `budget` tokens. Each step takes away more, and only if it must.

    The system prompt, the task (default: the last question) and the last results stay.
    """
    draft = draft_of(messages, budget, counter, task)  # .past: earlier turns; .turn: this one
    cut_results(draft, draft.past + draft.turn, budget // 4)  # none keeps more than a quarter
    if draft.is_over(0.8):
        reduce_old_results_to_lines(draft)
    if draft.is_over(1):
        leave_out_oldest_turns(draft)
    if draft.is_over(1):  # this turn alone is too long
        seen = draft.turn[: last_step(draft.turn)]  # by the model: all but the last results
        reduce_to_lines(draft, seen, draft.tokens - budget)
    if draft.is_over(1):
        leave_out_oldest_steps(draft)
    if draft.is_over(1):
        share_room_among_last_results(draft)
    return Governed(draft.messages, draft.notes, draft.tokens)


# ---- Long-term memory: facts that are true, and the history of what was ----


class MemoryStore:
    """MEMORY.md, which people edit too, and the history, which only grows: memory/history.jsonl

    {"cursor": 42, "timestamp": "2026-04-03 00:02", "content": "The user planned a trip to Rome."}
    """

    def __init__(self, workspace: Path):
        self.workspace, self.folder = workspace, workspace / "memory"
        self.facts, self.history = self.folder / "MEMORY.md", self.folder / "history.jsonl"

    def read_facts(self) -> str:
        return read_text(self.facts)

    def write_facts(self, text: str, instead_of: str) -> bool:
        """False where somebody else changed the file meanwhile: then it stays as it is."""
        with locked(self.folder / ".lock"):
            return replace_facts(self, text, instead_of)

    def append_history(self, text: str, **origin: Any) -> None:
        """An entry with the next cursor. It may begin with its time: `[2026-04-03 00:02] …`"""
        with locked(self.folder / ".lock"):
            add_entry(self, next_entry(self, text) | origin)

    @property
    def dream_cursor(self) -> int:
        return read_number(self.folder / ".dream_cursor")

    def unread(self) -> list[dict]:
        """The entries that Dream has not read, the oldest first."""
        dreamt = self.dream_cursor
        return [entry for entry in known_entries(self.history) if entry["cursor"] > dreamt]

    def recent_history(self) -> list[str]:
        """`[2026-04-03 00:02] text` of what is unread: the last 50, ≤ 32,000 characters."""
        return latest_lines(self.unread()[-50:], 32_000)


# ---- The Consolidator: from the journal into the history ----


@dataclass
class Consolidator:
    """Moves the oldest lines of a session into memory, a round of about 60 at a time:

    lines 0 … 59  →  history.jsonl  {"cursor": 7, "content": "The user planned a trip to Rome …"}
                     MEMORY.md      - Travels to Rome in May
                     the journal    {"_type": "metadata", "last_consolidated": 60, …}
    """

    store: MemoryStore
    ask: Ask
    prompt: str  # how to save
    summary_prompt: str  # how to sum up what this session still needs
    budget: int = 56_320  # tokens
    window: int = 100  # messages that are not in memory
    counter: "TokenCounter" = field(default_factory=lambda: TokenCounter())
    one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def before_turn(self, session: Session, overhead: int) -> str:
        """Make room for a turn beside `overhead`, the tokens of system prompt and tools.
        Returns what the user is told of it; "" where nothing had to move."""
        before = session.last_consolidated
        await move(self, session, over_budget(self, session, overhead))
        if await sum_up(self, session, overhead):
            return "the older part of this conversation is summed up"
        return "" if session.last_consolidated == before else "older messages went into the memory"

    async def after_turn(self, session: Session, overhead: int) -> None:
        """Move, in the background, what `/new` dropped and what is over budget or window."""
        await self.archive(session)
        await move(self, session, over_budget(self, session, overhead))
        await move(self, session, over_window(self, session))

    async def archive(self, session: Session) -> None:
        """Move all that `/new` dropped. After a round that fails the rest is saved as raw text."""
        await move(self, session, session.start, to_end=True)

    async def round(self, session: Session, until: int, model_helps: bool) -> bool:
        """Save some lines, then move the cursor behind them. Returns: does the model still help?"""
        end = end_of_round(session, until)
        begin = begin_of_round(self.store, session, end)
        for part in transcripts(session, begin, end, room_of(self)):
            model_helps = model_helps and await save(self, session, part)
            if not model_helps:
                await done_in_thread(save_raw, self.store, session, begin, part.until)
            begin = part.until
        session.note(last_consolidated=end)
        await session.synced()
        return model_helps


# ---- Dream: from the history into facts and skills ----


@dataclass
class Dream:
    """Reads what happened, notes what it means, and edits facts and skills accordingly:

    [2026-04-03 00:02] The user likes blue best now, not green.        what happened
    [MEMORY-REMOVE] favourite colour: green                            findings, phase 1
    [MEMORY] favourite colour: blue
    edit_file("memory/MEMORY.md", "colour: green", "colour: blue")     calls of tools, phase 2
    """

    store: MemoryStore
    ask: Ask
    run_agent: Callable[..., Awaitable[Any]]  # (messages, refuse) -> result with stop_reason
    find_prompt: str
    edit_prompt: str
    skills: "SkillsLoader"
    budget: int = 56_320  # tokens
    max_batch: int = 20  # entries
    failures: int = field(default=0, init=False)  # in a row

    async def run(self) -> str:
        """One dream. Returns what to tell the user; raises SessionBusy while another goes on."""
        with locked(self.store.workspace / ".nanobot" / "dream.lock", "Another dream is going on."):
            batch = next_batch(self)
            if not batch:
                return "There is nothing new to dream about."
            repository = MemoryRepository(self.store.workspace)
            await done_in_thread(repository.commit, "changes outside of dreams")
            outcome = await self._dream(batch)
            if must_be_repeated(self, outcome):
                return f"The dream {outcome}. Nothing is lost: the next one tries again."
            cursor = self.store.folder / ".dream_cursor"
            await done_in_thread(write_atomically, cursor, str(batch[-1]["cursor"]))
            await done_in_thread(compact, self.store)
            changes = await done_in_thread(repository.commit, "dream")
            dreamt = f"Dreamt about {counted(len(batch), 'entry', 'entries')}"
            return f"{dreamt}: {counted(changes, 'change')}. /dream-log shows them."

    async def _dream(self, batch: list[dict]) -> str:
        """Both phases, to an outcome: completed, failed, or did not reach the model."""
        response = await self.ask(what_happened(self, batch), [], None)
        if response.finish_reason == "error":
            return "failed" if response.is_overflow else UNREACHABLE
        findings = findings_in(response.content or "")
        if not findings:
            return "failed" if findings is None else "completed"
        refuse = partial(reason_to_refuse, self)  # nobody watches it: its own files only
        result = await self.run_agent(what_to_edit(self, findings), refuse)
        outcomes = {"completed": "completed", "error": UNREACHABLE}
        return outcomes.get(result.stop_reason, "failed")


# ======== Second reading: damage, locks, sizes, boundaries, git, skills ========

# ---- Reading what is left of a journal ----
# Without this one bad byte costs a conversation. Seen: 4,096 zero bytes at the end after a power
# cut, half a line after a full disk, a `NaN` that made every later request invalid.


def load_session(key: str, path: Path) -> Session:
    """Read a journal, whatever happened to it: no damaged or foreign line hides the others."""
    session = Session(key, path, stamp=file_stamp(path))
    data = path.read_bytes()
    *raw_lines, rest = data.split(b"\n")  # not splitlines(): U+2028 and \x85 are ordinary text here
    raw_lines += [rest] if parse(rest) else []  # it lacks only its newline; a torn one is not read
    records = [parse_line(raw) for raw in raw_lines]
    if data.strip() and not any(records):
        aside = path.with_name(f"{path.name}.corrupt-{time.time_ns()}")
        os.replace(path, aside)
        log.warning("%s is not readable: moved to %s, the session starts anew", path, aside)
        return Session(key, path)
    damaged = []
    for number, (raw, record) in enumerate(zip(raw_lines, records, strict=True)):
        is_header = record is not None and record.get("_type") == "metadata"
        # an older version's metadata has no checksum: it is taken at its word
        if is_header and record.get("crc", checksum(record)) == checksum(record):
            take_header(session, record)
        elif is_header or not record:
            damaged += [raw] if raw else []
        was_header = number == 0 and record is None
        if not is_header and not was_header:
            session.lines.append(record)
    if damaged:
        keep_damaged(path, damaged)
    return session


def parse_line(raw: bytes) -> dict | None:
    """Metadata, or a message of the shape that a request takes; None for anything else."""
    record = parse(raw) or {}
    if record.get("_type") == "metadata":
        return record
    content, calls = record.get("content"), record.get("tool_calls")
    names = [record.get("role"), record.get("tool_call_id", "")]
    is_content = content is None or isinstance(content, str) or are_dicts(content)
    are_calls = calls is None or are_dicts(calls)
    is_empty = "content" not in record and not calls
    is_named = all(isinstance(name, str) for name in names)
    is_message = is_content and are_calls and is_named and not is_empty
    return record if is_message else None


def are_dicts(values: Any) -> bool:
    """Blocks, or calls: each with a function, if any, that is a dict, too."""
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        return False
    return all(isinstance(value.get("function") or {}, dict) for value in values)


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


def keep_damaged(path: Path, damaged: list[bytes]) -> None:
    """Unreadable lines are skipped, never lost: they are collected in a file beside, each once."""
    aside = path.with_name(f"{path.name}.corrupt")
    skipped = counted(len(damaged), "unreadable line")
    log.warning("%s: %s skipped, kept in %s", path, skipped, aside.name)
    with open_private(aside) as file:
        file.seek(0)
        known = file.read().split(b"\n")
        lines = [line + b"\n" for line in damaged if line not in known]
        write_whole(file, b"".join(lines))


# ---- Where a conversation begins ----
# Counts of lines are only right as long as no line is damaged: a flipped newline makes one line of
# two, and all counts behind it point one message too far. So a metadata line says how many lines it
# stood behind, and has a checksum.

HEADER_KEYS = ("created_at", "metadata", "start", "last_consolidated", "summary")


def header(session: Session, *names: str) -> dict:
    """A metadata line with `names`, or all. It replaces what earlier ones say of these only: so a
    consolidation in the background does not take back what `/new` wrote meanwhile."""
    record = {"_type": "metadata", "key": session.key, "updated_at": now()}
    record |= {name: getattr(session, name) for name in names or HEADER_KEYS}
    record["lines"] = len(session.lines)
    return record | {"crc": checksum(record)}


def checksum(record: dict) -> int:
    signed = {key: value for key, value in record.items() if key != "crc"}
    text = to_json(signed)
    return zlib.crc32(text.encode("utf-8", errors="replace"))  # as it is written


def take_header(session: Session, record: dict) -> None:
    session.created_at = str(record.get("created_at") or session.created_at)
    if isinstance(record.get("metadata"), dict):
        session.metadata = record["metadata"]
    lines_then = record.get("lines", len(session.lines))
    for name in ("start", "last_consolidated"):
        place = place_now(record.get(name), lines_then, len(session.lines))
        if place is not None:
            setattr(session, name, place)
    if record.get("start") == lines_then:  # `/new`: it begins here, whatever happened above
        session.start = len(session.lines)
    match record.get("summary"):
        case {"text": str(text), "until": count}:
            until = place_now(count, lines_then, len(session.lines))
            session.summary = {"text": text, "until": until or 0}


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


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def as_journalled(message: dict) -> dict:
    """What the journal keeps: of images only the line that names them, never their bytes."""
    line = message | {"timestamp": message.get("timestamp") or now()}
    if isinstance(message.get("content"), list):
        texts = [block["text"] for block in message["content"] if block.get("type") == "text"]
        line["content"] = "\n".join(texts) or "[image]"
    return line


def write_records(session: Session, records: list[dict]) -> None:
    before = file_stamp(session.path)
    if not before or not before[0]:
        session.is_new = True
        records = [header(session), *(record for record in records if "_type" not in record)]
    append_lines(session.path, records)
    knows_all = session.stamp == before  # or another program wrote: then it is read again
    session.stamp = file_stamp(session.path) if knows_all else None
    session.unsynced = True


def append_lines(path: Path, records: list[dict]) -> None:
    """In one write; where it fails nothing of them stays. Raises OSError with the file's name."""
    texts = [to_json(record) + "\n" for record in records]
    data = "".join(texts).encode("utf-8", errors="replace")  # a lone surrogate becomes `?`
    with open_private(path) as file:
        write_whole(file, end_last_line(file, path) + data)


def open_private(path: Path) -> Any:
    """Open a file to read and append to, without a buffer; only its owner may."""
    private = partial(os.open, mode=0o600)
    try:
        return open(path, "a+b", buffering=0, opener=private)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        return open(path, "a+b", buffering=0, opener=private)


def write_whole(file: Any, data: bytes) -> None:
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


def write_atomically(path: Path, text: str | bytes) -> None:
    """The old text or the new one, never half of it. A link stays a link."""
    path = path.resolve()
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    data = text if isinstance(text, bytes) else text.encode("utf-8", errors="replace")
    try:
        with open_private(draft) as file:
            file.truncate(0)  # in a container one that was killed had the same process id
            write_whole(file, data)
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, draft)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        fsync(path.parent, os.O_RDONLY)


def file_stamp(path: Path) -> tuple[int, int] | None:
    try:
        state = os.stat(path)
    except OSError:
        return None
    return state.st_size, state.st_mtime_ns


def last_line(session: Session) -> dict:
    sent = session.lines[max(session.start, session.last_consolidated) :]
    return next(filter(None, reversed(sent)), {})


def sync_session(session: Session) -> None:
    """Raises OSError where the disk refuses; then it is tried again the next time."""
    with session.syncing:  # who comes second waits until what the first one syncs is on the disk
        if not session.unsynced:
            return
        session.unsynced = False
        try:
            fsync(session.path, os.O_RDWR)  # Windows syncs nothing that is open to read only
        except OSError:
            session.unsynced = True
            raise
        if session.is_new:
            with contextlib.suppress(OSError):  # not every system can sync a folder
                fsync(session.path.parent, os.O_RDONLY)
        session.is_new = False


def fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


async def in_thread(function: Callable, *arguments: Any) -> Any:
    """Run what blocks on a daemon thread: one of asyncio's own pool would hold the exit."""
    done: Future = Future()
    done.set_running_or_notify_cancel()

    def work() -> None:
        try:
            done.set_result(function(*arguments))
        except BaseException as problem:  # it is raised where it is awaited
            done.set_exception(problem)

    threading.Thread(target=work, daemon=True).start()
    return await asyncio.wrap_future(done)


async def done_in_thread(function: Callable, *arguments: Any) -> Any:
    """As `in_thread`, and a cancellation waits for its end: half a save would be made twice."""
    work = asyncio.ensure_future(in_thread(function, *arguments))
    try:
        return await asyncio.shield(work)
    finally:
        await asyncio.wait([work])


class Syncer:
    """Syncs what was written to 0.5 s ago, all sessions on one thread.

    A thread for each step of 50 conversations took a fifth of their time, a pause of 0.1 s a tenth.
    """

    pause = 0.5

    def __init__(self) -> None:
        self._due: dict[int, Session] = {}
        self._lock = threading.Lock()

    def sync_soon(self, session: Session) -> None:
        """Nobody waits for it: of a step, whose result only the model has seen."""
        with self._lock:
            is_first = not self._due
            self._due[id(session)] = session
        if is_first:
            threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        time.sleep(self.pause)
        with self._lock:
            sessions = list(self._due.values())
            self._due.clear()
        for session in sessions:
            with contextlib.suppress(OSError):  # the next `session.synced()` raises it
                sync_session(session)


class SessionBusy(Exception):
    """Another process holds what only one may hold."""


@contextlib.contextmanager
def locked(path: Path, busy: str = "") -> Iterator[None]:
    """Hold a lock against other programs: wait for it, or raise SessionBusy where `busy` says why.

    It is released on close and on death. Windows has none: there it is up to the user.
    """
    with open_private(path) as file:
        with contextlib.suppress(ImportError):
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB * bool(busy))
            except BlockingIOError:
                raise SessionBusy(busy) from None
        yield


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
        end = settled(lines, self.end)
        if new := project(lines[self.end : end], self.last):
            self.messages += new
            self.last = next(filter(None, reversed(lines[self.end : end])))
        self.end = end
        return self.messages + project(lines[end:], self.last)


# ---- Messages that came while the model worked ----
# Without this a message that is journalled during a turn stands before an answer that does not know
# it, seems answered, and never is: user "a", user "b", assistant "This is for a".


def is_known(session: Session, message_id: str) -> bool:
    """Is a message with this id of its channel in the journal already?"""
    return any(line and line.get("id") == message_id for line in session.lines[-1_000:])


OWN_KEYS = ("timestamp", "runtime", "cut", "id", "beside", "unseen")


def as_sent(line: dict, before: dict | None) -> dict:
    message = {key: value for key, value in line.items() if key not in OWN_KEYS}
    notes = [note for note in (gap_between(before, line), line.get("runtime")) if note]
    if notes and line["role"] == "user":
        message["content"] = "\n\n".join([*notes, as_text(line.get("content"))])
    return message


def request_to_go_on(session: Session) -> list[dict]:
    """What `/continue` asks of the model where its own half answer stands last."""
    last = last_line(session)
    is_last_met = not last.get("unseen")  # nobody has said anything since
    if last.get("cut") and is_last_met and not is_blank_answer(last):
        note = f"{gap_between(last, {})} Go on where it stops."
        return [{"role": "user", "content": note}]
    return []


def is_blank_answer(line: dict) -> bool:
    """A turn was stopped before a word of its answer: {"content": "", "cut": "it was stopped"}"""
    return bool(line.get("cut")) and not line.get("content")


def with_late_messages_moved(lines: Iterable[dict | None]) -> Iterator[dict]:
    """Lines in the order in which the model met them; `unseen` says how many it had not yet.

    user "a"                               user "a"
    assistant: call 1                      assistant: call 1
    user "b"                           →   tool 1
    tool 1, unseen 1                       assistant "This is for a"
    assistant "This is for a", unseen 1    user "b"
    """
    waiting: list[dict] = []
    for line in filter(None, lines):
        if waits(line):
            waiting.append(line)
            continue
        met = max(len(waiting) - unseen_by(line), 0)
        yield from waiting[:met]
        yield line
        del waiting[:met]
    yield from waiting


def waits(line: dict) -> bool:
    """Is it the user's? Pictures that a tool gave are a user message of the turn itself."""
    return line["role"] == "user" and not unseen_by(line)


def unseen_by(line: dict) -> int:
    count = line.get("unseen")
    return count if type(count) is int else 0


def settled(lines: list[dict | None], begin: int) -> int:
    """The place, from `begin` on, before which no line can move any more."""
    place = begin
    for number, line in enumerate(lines[begin:], begin + 1):
        if line and not waits(line) and not unseen_by(line):
            place = number
    return place


def place_of_last(lines: list[dict | None], count: int) -> int:
    """Where so many waiting messages begin: [user, assistant, user, user], 2 → 2"""
    places = [n for n, line in enumerate(lines) if line and waits(line)]
    return places[-count] if count else len(lines)


def count_waiting(lines: list[dict | None]) -> int:
    """How many messages at the end nobody has answered; a line that is put behind them says so."""
    count = 0
    for line in filter(None, reversed(lines)):
        if not waits(line):
            return count + unseen_by(line)
        count += 1
    return count


# ---- The sessions of a workspace ----
# Without the lock two programs in one session answer each other's questions; without the encoding
# of the key `telegram:a_b` and `telegram:a:b` met in one file.


class SessionManager:
    """The sessions of a workspace, `sessions/<encoded key>.jsonl`; the last 64 stay in memory."""

    def __init__(self, workspace: Path):
        self.folder = workspace / "sessions"
        self._cache: dict[str, Session] = {}  # the one used last stands last
        self._in_use: WeakValueDictionary[str, Session] = WeakValueDictionary()  # by turns, too
        self.syncer = Syncer()

    def path(self, key: str) -> Path:
        """A file name that decodes to the key: `telegram:a_b` → `telegram%3Aa_b.jsonl`."""
        name = quote(key, " @+,=", errors="surrogatepass").replace(".", "%2E")
        return self.folder / f"{name}.jsonl"

    def get(self, key: str) -> Session:
        """The session, read again where another process wrote to it. Raises OSError."""
        path = self.path(key)
        session = self._cache.pop(key, None) or self._in_use.get(key)
        if session is None or session.stamp != file_stamp(path):
            session = load_session(key, path) if path.exists() else Session(key, path)
        self._cache[key] = self._in_use[key] = session
        if len(self._cache) > 64:
            self._cache.pop(next(iter(self._cache)))
        return session

    def list_keys(self) -> list[str]:
        """All session keys, the one used last first."""
        keys = []
        paths = filter(Path.exists, self.folder.glob("*.jsonl"))  # Emacs leaves links to nowhere
        for path in sorted(paths, key=lambda path: -path.stat().st_mtime):
            with contextlib.suppress(UnicodeDecodeError):  # not a name of ours
                keys.append(unquote(path.name.removesuffix(".jsonl"), errors="surrogatepass"))
        return keys

    def lock(self, key: str) -> contextlib.AbstractContextManager:
        """Hold a session for one turn; raises SessionBusy while another process does."""
        busy = f"Session {key} is in use by another program. Wait, or name another: -s."
        return locked(self.path(key).with_suffix(".lock"), busy)


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
    stamp = f"[{line['timestamp']}] " if line.get("timestamp") else ""
    cut = f" [broke off: {line['cut']}]" if line.get("cut") else ""
    return f"{stamp}{line['role']}: {text}{cut}"


def as_text(content: Any) -> str:
    """Blocks, which only other programs write into a journal, as JSON."""
    if content is None or isinstance(content, str):
        return content or ""
    return to_json(content)


# ---- The steps that make a request fit ----
# Without this turn 40 ends in "maximum context length is 65536 tokens", and so does `/continue`.

REPEATABLE = ("read_file", "exec", "grep", "glob", "list_dir", "web_search", "web_fetch")


@dataclass
class Draft:
    """A request in parts: system prompt and summary, earlier turns, this turn."""

    head: list[dict]
    past: list[dict]
    turn: list[dict]
    budget: int
    counter: "TokenCounter"
    notes: list[str] = field(default_factory=list)
    tokens: int = 0

    @property
    def messages(self) -> list[dict]:
        return self.head + self.past + self.turn

    def is_over(self, share: float) -> bool:
        return self.tokens > share * self.budget

    def exchange(self, new: dict[int, dict | None]) -> None:
        """Put messages in the place of others, named by their id(); None takes one out."""
        if not new:
            return
        for part in (self.head, self.past, self.turn):
            part[:] = filter(None, [new.get(id(message), message) for message in part])
        self.tokens = self.counter.total(self.messages)


def draft_of(
    messages: list[dict], budget: int, counter: "TokenCounter", task: dict | None
) -> Draft:
    questions = [n for n, message in enumerate(messages) if message["role"] == "user"]
    tasks = [n for n in questions if messages[n] is task]  # a hook may have taken it out
    begin = (tasks or questions or [0])[-1]
    first = next((n for n in range(begin) if not is_head(messages[n])), begin)
    draft = Draft(messages[:first], messages[first:begin], messages[begin:], budget, counter)
    draft.tokens = counter.total(messages)
    if 4 * draft.tokens > budget:  # its bytes, the upper bound, do not fit
        counter.count_exactly_from_now_on()
    return draft


def is_head(message: dict) -> bool:
    return message["role"] == "system" or "summary" in message


def last_step(turn: list[dict]) -> int:
    """Where the last answer with calls stands: the model has not seen their results yet."""
    places = [n for n, message in enumerate(turn) if message.get("tool_calls")]
    return places[-1] if places else len(turn)


def cut_results(draft: Draft, messages: list[dict], most: int) -> None:
    """No result takes more than `most` tokens."""
    results = [message for message in messages if message["role"] == "tool"]
    large = [result for result in results if draft.counter.size(result) > most]
    draft.exchange({id(result): shortened(result, most) for result in large})
    if large:
        draft.notes.append(f"{counted(len(large), 'tool result')} cut to ~{most:,} tokens")


def shortened(result: dict, most: int) -> dict:
    content = as_text(result.get("content"))
    kept = len(content)
    while True:
        kept = kept * 4 // 5
        note = f"[{len(content) - kept:,} more characters are left out: ask for a part of it]"
        cut = {**result, "content": f"{content[:kept]}\n{note}"}
        if kept < 50 or measure(cut)[1] <= most:
            return cut


def reduce_old_results_to_lines(draft: Draft) -> None:
    """All but the 10 newest of the tools that can be called again."""
    results = [m for m in draft.past + draft.turn if m.get("name") in REPEATABLE]
    unseen = {id(message) for message in draft.turn[last_step(draft.turn) :]}
    old = [message for message in results[:-10] if id(message) not in unseen]
    reduce_to_lines(draft, old, math.inf)


def reduce_to_lines(draft: Draft, results: list[dict], too_much: float) -> None:
    """The oldest first, until so many tokens are saved; short ones are not worth it."""
    functions, lines = functions_of(draft.messages), {}
    for result in results:
        function, size = functions.get(id(result)), len(as_text(result.get("content")))
        if too_much <= 0 or function is None or size < 500:
            continue
        # what was there, and how to get it again; worded so that nobody takes it for an answer
        call = f"{function.get('name', 'the tool')}({str(function.get('arguments', ''))[:200]})"
        text = f"[{size:,} characters of {call} are left out. Call it again if you need them.]"
        lines[id(result)] = {**result, "content": text}
        too_much -= draft.counter.size(result) - draft.counter.size(lines[id(result)])
    draft.exchange(lines)
    if lines:
        draft.notes.append(f"{counted(len(lines), 'old tool result')} sent as one line each")


def functions_of(messages: list[dict]) -> dict[int, dict]:
    """The call that each result is of, by id(result): {140…: {"name": "grep", "arguments": "…"}}"""
    calls, functions = {}, {}
    for message in messages:
        for call in message.get("tool_calls") or []:
            calls[call.get("id")] = call.get("function") or {}
        if message["role"] == "tool":
            functions[id(message)] = calls.get(message.get("tool_call_id"), {})
    return functions


def leave_out_oldest_turns(draft: Draft) -> None:
    """A turn goes from a question to the next. The summary goes last."""
    room = draft.budget - draft.counter.total(draft.head + draft.turn)
    start = len(draft.past)
    for n in range(len(draft.past) - 1, -1, -1):
        room -= draft.counter.size(draft.past[n])
        if room < 0:
            break
        if draft.past[n]["role"] == "user":
            start = n
    left_out = draft.past[:start]
    if left_out:
        turns = len([message for message in left_out if message["role"] == "user"])
        kept = len([message for message in draft.past[start:] if message["role"] == "user"])
        size = f"~{draft.counter.total(left_out):,} tokens"
        draft.notes.append(f"{turns} of {turns + kept + 1} turns, {size}, are left out")
        draft.exchange({id(message): None for message in left_out})
    if draft.is_over(1):
        draft.exchange({id(message): None for message in draft.head if "summary" in message})


def leave_out_oldest_steps(draft: Draft) -> None:
    """Answers with calls, their results and pictures. What the user said meanwhile stays."""
    end, too_much, count = last_step(draft.turn), draft.tokens - draft.budget, 0
    begins = [n for n in range(1, end) if draft.turn[n]["role"] == "assistant"]
    gone: set[int] = set()
    for begin, after in pairwise([*begins, end]):
        if too_much <= -50:  # the line below needs some
            break
        step = [message for message in draft.turn[begin:after] if not is_question(message)]
        too_much -= draft.counter.total(step)
        gone |= {id(message) for message in step}
        count += 1
    if count:
        draft.exchange(dict.fromkeys(gone))
        note = f"[{count} earlier steps of this turn are left out; what they did is done]"
        draft.turn.insert(1, {"role": "user", "content": note})
        draft.tokens = draft.counter.total(draft.messages)
        draft.notes.append(f"{counted(count, 'step')} of this turn left out")


def share_room_among_last_results(draft: Draft) -> None:
    """The last resort: pictures go, and the last results share the room."""
    pictures = [message for message in draft.turn[1:] if isinstance(message.get("content"), list)]
    draft.exchange({id(message): as_journalled(message) for message in pictures})
    results = [message for message in draft.turn if message["role"] == "tool"]
    room = draft.budget - draft.tokens + draft.counter.total(results)
    cut_results(draft, results, room // max(len(results), 1))


# ---- Sizes ----
# An exact count needs a vocabulary that comes over the network: 30 s where there is none.


class TokenCounter:
    """Sizes in tokens, each message measured once; estimated until `load() -> count` is there."""

    def __init__(self, load: Callable[[], Callable[[str], int]] | None = None):
        self._load: Callable | None = load or load_vocabulary
        self._count: Callable[[str], int] | None = None
        self._sizes: dict[int, tuple[int, dict]] = {}  # by id(message), which is kept alive
        self._tools: tuple[list[dict], int] = ([], 0)  # the definitions measured last

    def size(self, message: dict) -> int:
        if id(message) not in self._sizes:
            self._sizes[id(message)] = (measure(message, self._count)[1], message)
        return self._sizes[id(message)][0]

    def total(self, messages: list[dict]) -> int:
        if len(self._sizes) > max(10_000, 2 * len(messages)):  # those of all sessions grow and grow
            self._sizes.clear()
        return sum(map(self.size, messages))

    def size_of_tools(self, definitions: list[dict]) -> int:
        """They are made anew for each request, and are the same: 0.02 ms instead of 0.5."""
        if definitions != self._tools[0]:
            sizes = [measure(definition, self._count)[1] for definition in definitions]
            self._tools = (definitions, sum(sizes))
        return self._tools[1]

    def count_exactly_from_now_on(self) -> None:
        """As soon as the vocabulary is there: it comes in the background, however long it takes."""
        if self._load:
            threading.Thread(target=self._fetch, args=(self._load,), daemon=True).start()
        self._load = None

    def _fetch(self, load: Callable) -> None:
        try:
            self._count = load()
        except Exception as problem:  # no network, no tiktoken: the estimate is good enough
            log.info("tokens are estimated: %s", problem)


def load_vocabulary() -> Callable[[str], int]:
    import tiktoken

    encode = tiktoken.get_encoding("o200k_base").encode_ordinary
    # in pieces: a long one of equal letters takes very long
    return lambda text: sum(len(encode(text[n : n + 2_000])) for n in range(0, len(text), 2_000))


def measure(message: dict, count: Callable[[str], int] | None = None) -> tuple[int, int]:
    """(bytes, tokens) of a dict that is sent as JSON. Bytes are an upper bound; an image is 1,000.

    Without `count` a token is taken as 4 bytes, 3 in mostly non-ASCII text.
    """
    blocks = message["content"] if isinstance(message.get("content"), list) else []
    texts = [block for block in blocks if block.get("type") != "image_url"]
    images = 1_000 * (len(blocks) - len(texts))
    if images:
        message = {**message, "content": texts}
    text = to_json(message)
    size = len(text) if text.isascii() else len(text.encode("utf-8", errors="replace"))
    bytes_a_token = 3 if size > 1.5 * len(text) else 4
    tokens = count(text) if count else size // bytes_a_token + 1
    return size + images, tokens + images


def tokens_of(content: Any) -> int:
    return measure({"content": content})[1]


def counted(count: int, one: str, several: str = "") -> str:
    """0 steps, 1 step, 2 steps; 2 entries"""
    several = several or f"{one}s"
    return f"{count:,} {one}" if count == 1 else f"{count:,} {several}"


def newest(lines: list[str], most: int, file: str) -> list[str]:
    """The last lines in `most` tokens, and one before them that says where the rest is."""
    kept = len(lines)
    while kept and tokens_of("\n".join(lines[-kept:])) > most:
        kept = kept * 9 // 10
    note = f"[{len(lines) - kept} older lines are in {file}: grep it]"
    return lines if kept == len(lines) else [note, *lines[len(lines) - kept :]]


# ---- The files of the history ----
# Two programs that append at once must not give two entries one number: Dream would skip one.


def entries(path: Path) -> list[dict]:
    """The entries of a history file; lines and cursors that are none are skipped."""
    raw = path.read_bytes() if path.exists() else b""
    known = []
    for record in map(parse, raw.split(b"\n")):
        match record:
            case {"cursor": int(cursor), "timestamp": str(), "content": str()}:
                is_number = type(cursor) is int and cursor > 0  # True is an int, too
                known += [record] if is_number else []
    return known


def known_entries(path: Path) -> list[dict]:
    """Read again only where the file has changed: 1,000 entries take 5 ms, each turn."""
    return entries_as_of(path, file_stamp(path))


@lru_cache(maxsize=2)
def entries_as_of(path: Path, stamp: tuple[int, int] | None) -> list[dict]:
    return entries(path)


def read_number(path: Path) -> int:
    """0 where the file is missing or damaged: then nothing counts as read."""
    try:
        return max(int(path.read_bytes()), 0)
    except (FileNotFoundError, ValueError):
        return 0


def read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


# "<think>The user wants …</think>"
THOUGHTS = r"(?s)\s*<think>.*?(</think>|\Z)"
# "[2026-04-03 00:02] The user planned a trip."
STAMP = r"(?:\[(\d{4}-\d\d-\d\d \d\d:\d\d)\]\s*)?"


def latest_lines(entries: list[dict], most: int) -> list[str]:
    lines = [f"[{entry['timestamp']}] {entry['content']}" for entry in entries]
    while len("\n".join(lines)) > most:
        lines.pop(0)
    return lines


def replace_facts(store: MemoryStore, text: str, instead_of: str) -> bool:
    if store.read_facts() != instead_of:
        return False
    text = text.replace("\0", "")  # git and the file tools would take the file for binary
    if text.strip() != instead_of.strip() and keeps_enough(text, instead_of):
        write_atomically(store.facts, text.strip() + "\n")
    return True


def add_entry(store: MemoryStore, entry: dict) -> None:
    known = known_entries(store.history)
    if entry["content"]:
        append_lines(store.history, [entry])
        write_atomically(store.folder / ".cursor", str(entry["cursor"]))
        add_for_people(store, known[-1:], entry)


def next_entry(store: MemoryStore, text: str) -> dict:
    """`[2026-04-03 00:02] The user …` → its number, its time, at most 64,000 letters of text."""
    known = [entry["cursor"] for entry in known_entries(store.history)]
    last = max([*known, read_number(store.folder / ".cursor"), store.dream_cursor])
    text = re.sub(THOUGHTS, "", text).strip()
    stamp = re.match(STAMP, text)
    timestamp = stamp[1] or time.strftime("%Y-%m-%d %H:%M")
    text = text[stamp.end() :]
    content = text if len(text) <= 64_000 else f"{text[:63_990]} [cut]"
    return {"cursor": last + 1, "timestamp": timestamp, "content": content}


def add_for_people(store: MemoryStore, last: list[dict], entry: dict) -> None:
    """HISTORY.md is made of the other files: it is written anew where it is missing.

    A program that was killed has perhaps not added the `last` entry: then that is done, too.
    """
    path, archive = store.folder / "HISTORY.md", store.folder / "history-archive.jsonl"
    if not path.exists():
        new = [*entries(archive), *entries(store.history)]
    elif for_people(last) in path.read_bytes():
        new = [entry]
    else:
        new = [*last, entry]
    with open_private(path) as file:
        write_whole(file, for_people(new))


def for_people(entries: list[dict]) -> bytes:
    texts = [f"[{entry['timestamp']}] {entry['content']}\n\n" for entry in entries]
    return "".join(texts).encode("utf-8", errors="replace")


def compact(store: MemoryStore, keep: int = 1_000) -> None:
    """The oldest entries that Dream has read move to the archive; what is unread stays."""
    archive = store.folder / "history-archive.jsonl"
    with locked(store.folder / ".lock"):
        known = entries(store.history)
        read = [entry for entry in known if entry["cursor"] <= store.dream_cursor]
        old = {to_json(entry): entry for entry in read[: max(len(known) - keep, 0)]}
        if not old:
            return
        there = set(map(to_json, entries(archive)))  # of a compaction that was killed
        append_lines(archive, [entry for text, entry in old.items() if text not in there])
        lines = store.history.read_bytes().split(b"\n")
        rest = [line for line in lines if to_json(parse(line)) not in old]  # what is no entry, too
        write_atomically(store.history, b"\n".join(rest))


def keeps_enough(text: str, before: str) -> bool:
    """No single answer of a model may empty MEMORY.md, or leave less than half of a longer one."""
    shrinks = len(before) > 300 and len(text.strip()) < len(before.strip()) // 2
    if shrinks or not text.strip():
        log.warning("MEMORY.md stays as it is: the new text is empty, or too short to be all of it")
    return not shrinks and bool(text.strip())


# ---- Where a conversation may be cut, and what the model reads of it ----
# A cut between a call and its result makes the next request invalid.


def is_question(line: dict | None) -> bool:
    return line is not None and line["role"] == "user" and isinstance(line.get("content"), str)


def begins_turn(lines: list[dict | None], number: int) -> bool:
    """No question does that came between the calls of a turn and their results, or beside one."""
    if not is_question(lines[number]):
        return False
    is_beside = bool(lines[number].get("beside")) and is_question(lines[max(number - 1, 0)])
    behind = (lines[n] for n in range(number + 1, len(lines)))
    answer = next((line for line in behind if line and not waits(line)), {})
    return not is_beside and not unseen_by(answer)


def over_budget(consolidator: Consolidator, session: Session, overhead: int) -> int:
    """Up to where lines must go so that half the budget is left; 0 where all fits."""
    if overhead + size_as_sent(consolidator, session) <= consolidator.budget:
        return 0
    room = consolidator.budget // 2 - overhead
    for count, line in enumerate(reversed(session.lines)):
        room -= tokens_of(line)
        if room < 0:
            return boundary(session, count)
    return boundary(session, len(session.lines))


def over_window(consolidator: Consolidator, session: Session) -> int:
    begin = max(session.start, session.last_consolidated)
    count = len([line for line in session.lines[begin:] if line])
    return boundary(session, consolidator.window // 2) if count >= consolidator.window else 0


def boundary(session: Session, most: int) -> int:
    """The first question from which on there are at most so many lines; else the last question."""
    begin = max(session.start, session.last_consolidated)
    questions = [n for n in range(begin, len(session.lines)) if begins_turn(session.lines, n)]
    enough = [n for n in questions if len(session.lines) - n <= most]
    return [begin, *questions[-1:], *enough[:1]][-1]


def end_of_round(session: Session, until: int) -> int:
    """About 60 lines, but at least one whole turn."""
    begin, lines = session.last_consolidated, session.lines
    inside = range(begin + 1, until)
    places = [n for n in inside if n == session.start or begins_turn(lines, n)] + [until]
    near = [n for n in places if n <= begin + 60]
    return near[-1] if near else places[0]


def room_of(consolidator: Consolidator) -> int:
    """Tokens of conversation in one request: it takes half the budget, with MEMORY.md in it."""
    taken = tokens_of(consolidator.prompt + consolidator.store.read_facts()) + 500
    return max(consolidator.budget // 2 - taken, consolidator.budget // 8)


@dataclass
class Transcript:
    """A part of a conversation as a model reads it; `until` counts the lines up to its end."""

    text: str
    until: int
    tokens: int = 0


def transcripts(session: Session, begin: int, end: int, room: int) -> list[Transcript]:
    """Journal lines as texts of about `room` tokens at most each. Long messages are shortened; a
    call and its results stand in one text."""
    parts: list[Transcript] = []
    for step in steps_of(session, begin, end, min(room // 4, 2_000)):
        step.text = fitted(step.text, room)
        step.tokens = tokens_of(step.text)
        if parts and parts[-1].tokens + step.tokens <= room:
            step.text = f"{parts[-1].text}\n{step.text}"
            step.tokens += parts.pop().tokens
        parts.append(step)
    return parts


def steps_of(session: Session, begin: int, end: int, most: int) -> Iterator[Transcript]:
    """Each line of at most `most` characters, results together with their call."""
    texts: list[str] = []
    for n in range(begin, end):
        line = session.lines[n]
        if texts and line and line["role"] != "tool":
            yield Transcript("\n".join(texts), n)
            texts = []
        if line:
            texts.append(middle_out(readable(line), max(most, 100)))
    if texts:
        yield Transcript("\n".join(texts), end)


def fitted(text: str, most: int) -> str:
    while tokens_of(text) > most and len(text) > 50:  # characters, or it shrinks no more
        text = middle_out(text, len(text) * 3 // 4)
    return text


def middle_out(text: str, most: int) -> str:
    """The beginning and the end, about `most` characters."""
    if len(text) <= most:
        return text
    return f"{text[: most * 2 // 3]} […] {text[-most // 3 :]}"


def request(system: str, text: str) -> list[dict]:
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


TEXT = {"type": "string"}
SAVED = {
    "history_entry": TEXT | {"description": "2 to 5 sentences that begin [YYYY-MM-DD HH:MM]"},
    "memory_update": TEXT | {"description": "The whole new MEMORY.md, all lines, old and new"},
}
PARAMETERS = {"type": "object", "properties": SAVED, "required": list(SAVED)}
SAVE = {"name": "save_memory", "description": "Save what is worth keeping of a conversation."}
SAVE_MEMORY = {"type": "function", "function": SAVE | {"parameters": PARAMETERS}}


def begin_of_round(store: MemoryStore, session: Session, end: int) -> int:
    """Where a round begins. A program that was killed in it may have saved the first lines."""
    begin, own = session.last_consolidated, origin_of(session).items()
    places = [entry.get("until") for entry in known_entries(store.history) if entry.items() >= own]
    inside = [place for place in places if type(place) is int and begin < place <= end]
    return max([begin, *inside])


def origin_of(session: Session) -> dict:
    """One that was deleted and began anew is another session."""
    return {"session": session.key, "created_at": session.created_at}


def save_raw(store: MemoryStore, session: Session, begin: int, end: int) -> None:
    """Nothing is lost where no model helps: the text as it is, some 10,000 characters an entry."""
    for part in transcripts(session, begin, end, 4_000):
        store.append_history(f"[RAW] {part.text[:16_000]}", until=part.until, **origin_of(session))


async def move(
    consolidator: Consolidator, session: Session, until: int, to_end: bool = False
) -> None:
    before = session.last_consolidated
    if before >= until:  # a turn that fits waits for nobody
        return
    path = session.path.with_suffix(".memory.lock")  # what two programs save is there twice
    async with consolidator.one_at_a_time:
        if to_end or session.last_consolidated == before:  # else it was moved while we waited
            with contextlib.suppress(SessionBusy), locked(path, "Another program saves it."):
                await rounds(consolidator, session, until, to_end)


async def rounds(consolidator: Consolidator, session: Session, until: int, to_end: bool) -> None:
    """Until the cursor is there, five are done, the model is of no help or others wrote to it."""
    model_helps, count = True, 0
    while session.last_consolidated < until and session.stamp == file_stamp(session.path):
        model_helps = await consolidator.round(session, until, model_helps)
        count += 1
        enough = count == 5 or not model_helps
        if enough and not to_end:
            break


async def save(consolidator: Consolidator, session: Session, part: Transcript) -> bool:
    """False where the model is of no help: it does not call the tool, or cannot be reached."""
    store = consolidator.store
    for _ in range(3):  # MEMORY.md may change while the model thinks
        facts = store.read_facts()
        question = f"# MEMORY.md\n\n{facts}\n\n# Conversation\n\n{part.text}"
        saved = await ask_to_save(consolidator, request(consolidator.prompt, question))
        if saved is None:
            return False
        if await done_in_thread(store.write_facts, saved["memory_update"], facts):
            origin = origin_of(session) | {"until": part.until}
            append = partial(store.append_history, saved["history_entry"], **origin)
            await done_in_thread(append)
            return True
    return False


async def ask_to_save(consolidator: Consolidator, messages: list[dict]) -> dict | None:
    """The arguments of save_memory; None where the model does not call it, even if it must."""
    for choice in (None, "required"):
        response = await consolidator.ask(messages, [SAVE_MEMORY], choice)
        if response.finish_reason == "error":  # nobody is there to be forced
            return None
        if response.finish_reason in ("length", "content_filter"):  # its end may be missing
            continue
        for call in response.tool_calls:
            match call.name, call.arguments:
                case "save_memory", {"history_entry": str(entry), "memory_update": str()}:
                    if re.sub(THOUGHTS, "", entry).strip():
                        return call.arguments
    return None


async def sum_up(consolidator: Consolidator, session: Session, overhead: int) -> bool:
    """A summary in place of all but the 20 newest, kept with the session: none is made twice."""
    if overhead + size_as_sent(consolidator, session) <= 0.8 * consolidator.budget:
        return False
    begin = max(session.start, session.last_consolidated, session.summary.get("until", 0))
    text = session.summary.get("text", "") if begin == session.summary.get("until") else ""
    last = len(session.lines) - 20
    until = max([n for n in range(begin, last + 1) if begins_turn(session.lines, n)], default=begin)
    parts = transcripts(session, begin, until, room_of(consolidator))
    if not 0 < len(parts) <= 5:  # nobody waits longer for an answer
        return False
    for part in parts:
        question = request(consolidator.summary_prompt, f"{text}\n\n{part.text}".strip())
        response = await consolidator.ask(question, [], None)
        summary = re.sub(THOUGHTS, "", response.content or "").strip()
        is_cut = response.finish_reason in ("error", "length", "content_filter")
        if is_cut or response.tool_calls or not summary:
            return False  # the oldest turns are left out
        text = middle_out(summary, consolidator.budget // 4)
    session.note(summary={"text": text, "until": until})
    return True


def summary_message(text: str) -> dict:
    content = f"[Summary of the conversation so far, which is not sent any more]\n\n{text}"
    return {"role": "user", "content": content, "summary": True}


def size_as_sent(consolidator: Consolidator, session: Session) -> int:
    draft = draft_of(session.get_history(), consolidator.budget, consolidator.counter, None)
    if draft.is_over(0.8):
        reduce_old_results_to_lines(draft)
    return draft.tokens


# ---- What Dream reads, and what it may do ----
# What it reads may come from a stranger's page, and nobody watches what it does.

# "- [MEMORY] Favourite colour: blue"
FINDING = r"(?m)^[\s*-]*(\[(?:USER|SOUL|MEMORY|SKILL)(?:-REMOVE)?\] *\S.*)$"
DREAM_FILES = ("memory/MEMORY.md", "SOUL.md", "USER.md")


def next_batch(dream: Dream) -> list[dict]:
    """The oldest unread entries, as many as one request takes, at least one."""
    batch = dream.store.unread()[: dream.max_batch]
    while len(batch) > 1 and tokens_of(str(batch)) > dream.budget // 2:
        batch.pop()
    return batch


def what_happened(dream: Dream, batch: list[dict]) -> list[dict]:
    most = dream.budget // 2
    lines = [f"[{entry['timestamp']}] {fitted(entry['content'], most)}" for entry in batch]
    today = time.strftime("Today is %Y-%m-%d, %A.")
    return request(dream.find_prompt, "\n\n".join([today, *files_of(dream), "# History", *lines]))


def what_to_edit(dream: Dream, findings: list[str]) -> list[dict]:
    skills = [skill for skill in dream.skills.load() if not skill.problem]
    known = [f"- {skill.name}: {skill.description} ({skill.path})" for skill in skills]
    parts = ["# Findings", *findings, *files_of(dream), "# Skills", *known]
    return request(dream.edit_prompt, "\n\n".join(parts))


def files_of(dream: Dream) -> list[str]:
    paths = [dream.store.workspace / name for name in DREAM_FILES]  # they and a batch must fit
    return [f"# {path}\n\n{fitted(read_text(path), dream.budget // 8)}" for path in paths]


def findings_in(text: str) -> list[str] | None:
    """[] where there is nothing to remember; None where it is no answer to the question."""
    answer = re.sub(THOUGHTS, "", text)
    findings = re.findall(FINDING, answer)
    is_answer = findings or "[SKIP]" in answer
    return findings if is_answer else None


UNREACHABLE = "did not reach the model"


def must_be_repeated(dream: Dream, outcome: str) -> bool:
    """Unless it is completed, or failed for the third time."""
    dream.failures = dream.failures + 1 if outcome == "failed" else 0
    if dream.failures >= 3:
        log.warning("three dreams about the same entries failed: these are skipped")
        dream.failures = 0
        return False
    return outcome != "completed"


def reason_to_refuse(dream: Dream, name: str, arguments: dict) -> str:
    home = dream.store.workspace.resolve()
    own, *kits = [folder.resolve() for folder in dream.skills.folders]
    try:
        path = (home / os.path.expanduser(str(arguments.get("path", "")))).resolve()
    except (OSError, ValueError, RuntimeError) as problem:  # a NUL, a loop of links
        return f"That is no usable path: {problem}"
    match name:
        case "read_file":
            is_inside = any(path.is_relative_to(root) for root in (home, *kits))
            return "" if is_inside else f"Read files below {home} only."
        case "edit_file":
            is_one = path in [(home / file).resolve() for file in DREAM_FILES]
            return "" if is_one else f"Edit {', '.join(DREAM_FILES)} only."
        case "write_file" if path.is_relative_to(own) and path.parent != own:
            skill = skill_of(path, str(arguments.get("content", "")))
            names = {skill.name, path.relative_to(own).parts[0]}
            known = [kit / name for kit, name in product(kits, names)]
            is_fine = not skill.always and not any(map(Path.exists, known))
            return "" if is_fine else "A skill may not be `always`, nor have the name of the kit's."
    return f"Write only skills, like {own}/NAME/SKILL.md."


# ---- What was dreamt can be looked at and undone ----
# A repository of its own, and not named `.git`: one of the user's around the workspace would take
# it for a submodule, and the user's settings (hooks, signatures) are not meant for it.


class MemoryRepository:
    """Facts, history and skills under git, in `.nanobot/memory.git`; without git no commits."""

    facts = (*DREAM_FILES, "skills")
    history = ("memory/history.jsonl", "memory/history-archive.jsonl")
    attributes = "* !text !eol !diff !filter !ident !working-tree-encoding\n"  # none of the user's

    def __init__(self, workspace: Path):
        self.workspace, self.folder = workspace, workspace / ".nanobot" / "memory.git"

    def git(self, *arguments: str, text: str = "", why: str = "") -> str:
        """Raises OSError with what git says, or what it means for the user."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        own |= {"GIT_DIR": ".nanobot/memory.git", "GIT_WORK_TREE": ".", "LC_ALL": "C"}
        own |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}
        me = ["-c", "user.name=nanobot", "-c", "user.email=nanobot@localhost"]
        command = ["git", *me, "-c", "gc.autoDetach=false", *arguments]
        options = {"cwd": self.workspace, "env": own, "capture_output": True}
        done = subprocess.run(command, input=text.encode(errors="surrogateescape"), **options)
        if done.returncode:
            problem = done.stderr.decode(errors="replace").strip()
            log.info("git %s: %s", arguments[0], problem)
            raise OSError(why or problem)
        return done.stdout.decode(errors="surrogateescape")  # a patch comes back byte for byte

    def commit(self, subject: str) -> int:
        """What has changed since the last commit: how many lines. Nothing changed: no commit."""
        try:
            return self._commit(subject) if shutil.which("git") else 0
        except OSError as problem:  # a dream is no less true for it
            log.warning("memory is not under git: %s", problem)
            return 0

    def _commit(self, subject: str) -> int:
        attributes = self.folder / "info" / "attributes"
        if not attributes.exists():  # the last thing that is made
            self.folder.parent.mkdir(exist_ok=True)
            self.git("init", "-q")
            write_atomically(attributes, self.attributes)
        for lock in self.folder.glob("**/*.lock"):  # of a git that was killed
            lock.unlink()
        there = [name for name in self.facts + self.history if (self.workspace / name).exists()]
        for name in (".", *there):
            option = "-u" if name == "." else "-f"
            try:
                self.git("add", option, "--ignore-errors", "--", name)
            except OSError as problem:  # it cannot be read, lies behind a link, or is a repository
                log.warning("not under git: %s", problem)
        diff = self.git("diff", "--cached", "-U0", "--no-renames", "--", *self.facts)
        hunks = re.findall(r"(?m)^@@ .*\n((?:[-+\\].*\n)+)", diff)  # a `--- a` may be a line, too
        lines = [line for line in "".join(hunks).split("\n") if line[:1] in ("-", "+")]
        if not lines:
            return 0
        title = f"{subject}: {time.strftime('%Y-%m-%d %H:%M')}, {len(lines)} change(s)"
        self.git("commit", "-q", "-F", "-", text="\n".join([title, "", *lines[:100]]))
        return len(lines)

    def log(self, sha: str = "") -> str:
        """All commits, one a line, or what one of them changed."""
        try:
            self._check()
            if not sha:
                return self.git("log", "--format=%h %s").strip()
            commit = self._known(sha)
            shown = self.git("show", "--format=%h %s", commit, "--", *self.facts)[:16_000]
            return shown.encode(errors="surrogateescape").decode(errors="replace")
        except OSError as problem:
            return f"There is no log: {problem}"

    def restore(self, sha: str = "") -> str:
        """Undo one commit (default: the last dream) as a new one, or change nothing."""
        why = "what it did is undone already, or these lines have changed since."
        try:
            self._check()
            with locked(self.folder.with_name("dream.lock"), "Another dream is going on."):
                commit = self._known(sha) if sha else self._last_dream()
                parent = self._known(f"{commit}^")
                self._commit("changes outside of dreams")
                patch = self.git("diff-tree", "-p", "--binary", parent, commit, "--", *self.facts)
                self.git("apply", "-R", "--whitespace=nowarn", text=patch, why=why)
                return f"Undone: {counted(self._commit(f'restore of {commit[:7]}'), 'change')}."
        except (OSError, SessionBusy) as problem:
            return f"Nothing is changed: {problem}"

    def _check(self) -> None:
        if not (self.folder / "HEAD").exists():
            raise OSError("there has been no dream yet, or git is not installed.")

    def _last_dream(self) -> str:
        why = "no dream has changed anything yet. /dream-log lists all commits."
        return self.git("rev-parse", "--verify", ":/^dream:", why=why).strip()

    def _known(self, sha: str) -> str:
        why = "there is no such commit, or none before it. /dream-log lists them."
        if not re.fullmatch(r"[0-9a-f]{4,40}\^?", sha):
            raise OSError(why)
        return self.git("rev-parse", "--verify", f"{sha}^{{commit}}", why=why).strip()


# ---- Skills ----
# They are files that anybody may have put there. One that is a FIFO, a link to /proc/self/mem or
# 100 MB long ended every turn; now it is left out, with a line that names it.

MAX_SKILL_BYTES = 100_000


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
    """At most 100,000 bytes; raises ValueError or OSError."""
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
    try:
        data = read(path)
    except Exception as problem:  # whatever it is: one bad skill must not end every turn
        return Skill(path.parent.name, path, problem=str(problem) or type(problem).__name__)
    return skill_of(path, data.decode("utf-8-sig", errors="replace").replace("\r\n", "\n"))


# "---\nname: weather\n---\n"
FRONT_MATTER = r"(?ms)(?:---[ \t]*\n(.*?)^---[ \t]*$)?"
# "description: >-\n  Use for\n  the weather." is one line, "metadata:\n  author: me" is two
FOLD = r"(?<=:)[ \t]*[>|][+-]?\n[ \t]+|\n(?![ \t]+[\w-]+:\s)[ \t]+"
# `description: "Use for the weather."`
FIELD = r"(?m)^([\w-]+):[ \t]*([\"']?)(.*?)\2[ \t]*$"


def skill_of(path: Path, text: str) -> Skill:
    """Front matter is `key: value` lines between two `---`; any part of it may be missing."""
    front = re.match(FRONT_MATTER, text)
    lines = re.sub(FOLD, " ", front[1] or "")
    fields = {key: value for key, _, value in re.findall(FIELD, lines)}
    skill = Skill(fields.get("name") or path.parent.name, path, fields.get("description", ""))
    skill.text = text[front.end() :].strip()
    skill.always = fields.get("always", "").lower() in ("true", "yes")
    skill.missing = missing(fields.get("metadata", ""), path)
    return skill


def missing(metadata: str, path: Path) -> list[str]:
    """What of `{"nanobot": {"requires": {"bins": ["gh"], "env": ["KEY"]}}}` this machine lacks."""
    try:
        requires = json.loads(metadata or "{}").get("nanobot", {}).get("requires") or {}
        lacks = [f"program {name}" for name in requires.get("bins") or [] if not shutil.which(name)]
        variables = [name for name in requires.get("env") or [] if not os.getenv(name)]
    except (ValueError, AttributeError, TypeError, RecursionError):
        log.warning("%s: metadata is not the JSON that is expected", path)
        return []
    return lacks + [f"environment variable {name}" for name in variables]
