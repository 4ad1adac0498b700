"""Store the agent's data on disk (journal, inbox, memory, skills), and shorten long requests.

Each request is built from the journal of its session. A session has two files of JSON lines:

    sessions/telegram%3A7.jsonl           append-only: numbered messages, and marks for events
    {"n": 1, "role": "user", "content": "What is in a.txt?", "id": "501"}
    {"n": 2, "role": "assistant", "content": null, "tool_calls": [{"id": "c1", …}]}
    {"mark": "ended", "why": "it was stopped"}
    sessions/telegram%3A7.inbox           messages that wait for their turn; also JSON lines

A message keeps its number even if other lines are damaged. Consolidator turns old messages into
history entries; Dream turns history entries into facts and skills. memory.py can be used alone:

    from memory import Path, SessionManager
    session = SessionManager(Path("home")).get("cli:me")
    session.append({"role": "user", "content": "What is in a.txt?"})
    print(session.path.read_text(), session.history())
"""

import json
import logging
import os
import re
import shutil
import subprocess
import time
from asyncio import Lock, to_thread
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from itertools import takewhile
from pathlib import Path
from secrets import token_hex
from time import strftime
from urllib.parse import quote, unquote

log = logging.getLogger("nanobot.memory")
MOMENT = "%Y-%m-%dT%H:%M:%S%z"


# ---- Journal and inbox: a message is stored on disk before the agent uses it ----


class Session:
    """One conversation. A program must hold the session's lock to append to the journal. Only
    the marks `delivered` and `remembered`, which may be anywhere in the file, need no lock."""

    summary = ""  # requests have this text instead of the saved messages
    is_answered = True  # does the last message end its turn?
    # numbers of messages
    last = 0  # the last message; reports do not count
    highest = 0  # highest number so far: the next message gets `highest + 1`
    start = 0  # `last` at `/new`: the conversation begins after this message
    saved = 0  # messages up to this one are in the long-term memory, and not sent
    remembered = 0  # up to this one, `remember_terminals` has written history entries
    # restarts, and the file
    resumed = 0  # number of restarts that resumed the open turn
    size = 0  # expected file size; another size means that another program wrote to it

    def __init__(self, key: str, path: Path, on_event):
        self.key = key
        self.path = path
        self.on_event = on_event  # called with "journal" and each new line, or None
        self.created_at = strftime(MOMENT)
        self.origin = {}  # for the first line: {"folder": "/home/ada/plan", "typed": True}
        self.messages = []  # messages that are not in the long-term memory
        self.turn_ends = set()  # the last message of each turn but the newest
        self.ended = {}  # the last message of each unanswered turn → the reason
        self.undelivered = []  # answers that have no mark `delivered` yet
        self.known_ids = deque(maxlen=1_000)  # ids of inbox lines

    def append(self, *messages: dict):
        """Append all messages or none. Until `synced` returns, a power cut may lose messages."""
        self._write(
            [
                {"n": n} | without_images(message)
                for n, message in enumerate(messages, self.highest + 1)
            ]
        )

    def mark(self, name, **details):
        """`name`: new, continue, resumed, ended (why), saved (upto, summary), delivered or
        remembered (upto)."""
        self._write([{"mark": name, **details}])

    def _write(self, lines):
        if not self.size:
            lines.insert(
                0,
                {
                    "mark": "session",
                    "key": self.key,
                    "created_at": self.created_at,
                    **self.origin,
                },
            )
        for line in lines:
            line.setdefault("timestamp", strftime(MOMENT))  # a report has its own time
        self.size += append_lines(self.path, lines)
        for line in lines:
            self.take(line)
            if self.on_event:
                # without the texts, which are in the events of requests and answers
                names = ("n", "role", "cut", "report", "mark", "why", "upto")
                told = {name: line[name] for name in names if name in line}
                self.on_event("journal", who="session", line=told)

    def take(self, line: dict):
        """Update the state with one journal line."""
        if "id" in line:
            self.known_ids.append(line["id"])
        match line:
            case {"mark": "saved", "upto": int(upto)}:
                # `upto` may be too high if it is damaged, or if the journal has lost its end
                self.highest = max(self.highest, upto)
                self.saved = min(upto, self.last)
                self.summary = line.get("summary", "")
                self.messages = [message for message in self.messages if message["n"] > self.saved]
            case {"mark": "remembered", "upto": int(upto)}:
                self.remembered = upto
            case {"mark": "delivered", "upto": int(upto)}:
                self.undelivered = [answer for answer in self.undelivered if answer["n"] > upto]
            case {"mark": "new"}:
                self.start = self.last
                self.turn_ends.add(self.start)
            case {"mark": "ended", "why": why}:
                self.ended[self.last] = why
            case {"mark": "resumed"}:
                self.resumed += 1
            case {"mark": "session", "created_at": str(created_at)}:
                self.created_at = created_at
            case {"n": int()}:
                self._take_message(line)

    def _take_message(self, message):
        self.highest = max(self.highest, message["n"])
        self.messages.append(message)
        ends_turn = (
            message["role"] == "assistant"
            and not message.get("tool_calls")
            and "cut" not in message
        )
        if ends_turn and message.get("content"):
            self.undelivered.append(message)
        if "report" in message:
            return  # it belongs to no turn
        if not self.is_open:
            self.resumed = 0
            if message["role"] == "user":  # a new turn begins
                self.turn_ends.add(self.last)
        self.is_answered = ends_turn
        self.last = message["n"]

    async def synced(self):
        await to_thread(fsync, self.path)

    def conversation(self) -> list[dict]:
        return [message for message in self.messages if message["n"] > self.start]

    def history(self, *later: dict):
        """Returns the messages for a request: summary, conversation, `later` (not in the journal).

        user "a", runtime "It is Monday"           user "It is Monday\\n\\na"
        assistant "Well", cut "it was stopped"  →  assistant "Well"
        report "stretch!"
        user "b"                                   user "[the answer above broke off: …]\\n\\n
                                                   [2026-11-23 10:00, reminder: stretch!]\\n\\nb"
        """
        sent = self.summary_messages()
        previous = {}
        reports = deque(maxlen=50)  # the last ones since the previous user message
        for message in [*self.conversation(), *later]:
            if "report" in message:
                reports.append(message)
                continue
            notes = []
            if message["role"] == "user":
                notes = [
                    self.gap_after(previous),
                    *(quoted(report, 2_500 // len(reports)) for report in reports),
                ]
                reports.clear()
            sent.append(as_sent(message, *notes))
            previous = message
        if "cut" in previous:  # `/continue`
            sent.append(
                {
                    "role": "user",
                    "content": f"{self.gap_after(previous)} Go on where the answer stops.",
                }
            )
        return sent

    def gap_after(self, message):
        """A note for the next user message; in an assistant message, models would imitate it."""
        if "cut" in message:
            return f"[the answer above broke off: {message['cut']}]"
        why = self.ended.get(message.get("n"))
        return f"[the message above was not answered: {why}]" if why else ""

    def summary_messages(self) -> list[dict]:
        if not self.summary or self.saved <= self.start:  # after `/new` it is not sent
            return []
        return [
            {
                "n": self.saved,
                "role": "user",
                "content": f"[Summary of the earlier part of this conversation]\n\n{self.summary}",
                "is_summary": True,
            }
        ]

    def without_saved(self, messages: list[dict]):
        """Remove messages from a request if they are now in the long-term memory."""
        system, *rest = messages
        # in a request, the answers and results of this turn have no number
        unsaved = [m for m in rest if "n" not in m or m["n"] > self.saved]
        return [system, *self.summary_messages(), *unsaved]

    @property
    def unfinished(self):
        """Can `/continue` resume the last turn?"""
        return self.last > max(self.start, self.saved) and not self.is_answered

    @property
    def is_open(self):
        """True while the last turn runs, and after a kill has interrupted the last turn."""
        return self.unfinished and self.last not in self.ended

    def end_open_turn(self, why):
        """Mark an open turn as ended, so that only `/continue`, not a restart, resumes it."""
        if self.is_open:
            self.mark("ended", why=why)

    def end_of_oldest(self, excess):
        """The number of the message that ends the oldest turns: of as few turns as have `excess`
        tokens together, or of all but the newest. 0 if there is only one turn."""
        end = 0
        tokens = 0
        for message in self.conversation():
            tokens += message_tokens(message)
            if message["n"] in self.turn_ends:
                end = message["n"]
                if tokens >= excess:
                    break
        return end


def quoted(report: dict, most):
    """A report as the user's next message quotes it, with `most` tokens of its text. All lines
    after the first are indented, so that they cannot pass for the user's.

    [2026-11-23 10:00, reminder: stretch!]
    """
    moment = report.get("timestamp", "")[:16].replace("T", " ")
    text = fitted(report["content"], most).replace("\n", "\n    ")
    return f"[{moment}, {report['report']}: {text}]"


def as_sent(message: dict, *notes):
    """Convert a journal message for a request. In a user message, the `notes` precede the text.
    `LLMProvider.chat` removes the key `n` later."""
    sent = {
        key: value
        for key, value in message.items()
        if key not in ("timestamp", "runtime", "cut", "id")  # these keys are not sent
    }
    texts = [text for text in (*notes, message.get("runtime")) if text]
    if texts:  # only a user message has some
        sent["content"] = "\n\n".join([*texts, str(message.get("content") or "")])
    return sent


class Inbox:
    """The messages that wait for their turn: user messages, `/new`, `/continue`, reports of jobs
    and helpers. All programs may append; only the holder of the session's lock removes messages."""

    def __init__(self, path):
        self.path = path
        self.lock = path.with_suffix(".inbox.lock")

    def append(self, line: dict):
        """Append and fsync a line, unless the inbox already has a line with the same id."""
        with locked(self.lock):
            if line["id"] not in [known["id"] for known in self.read()]:
                append_lines(self.path, [line | {"timestamp": strftime(MOMENT)}])
                fsync(self.path)

    def read(self) -> list[dict]:
        return read_records(self.path, partial(has, id=str, kind=str, content=str))

    def remove(self, ids: set[str]):
        with locked(self.lock):
            rest = [line for line in self.read() if line["id"] not in ids]
            if rest:
                write_atomically(self.path, as_lines(rest))
            else:
                self.path.unlink(missing_ok=True)


# ---- Long-term memory: facts, and a history of past conversations ----


class MemoryStore:
    """Stores facts in MEMORY.md, which people may edit, and entries in history.jsonl. Entries
    about a session also have the keys session, created_at, upto and summary.

    {"cursor": 42, "timestamp": "2026-04-03 00:02", "content": "The user planned a trip to Rome."}
    """

    def __init__(self, workspace: Path, read=Path.read_bytes):
        self.workspace = workspace
        self.read = read  # a path → its bytes; raises OSError, or ValueError for a path outside
        self.folder = workspace / "memory"
        self.facts = self.folder / "MEMORY.md"
        self.history = self.folder / "history.jsonl"
        self.lock = self.folder / ".lock"

    def text_of(self, path):
        """Read a text file; a missing file gives "". Raises OSError if the file cannot be read."""
        try:
            return self.read(path).decode("utf-8-sig", "replace")
        except FileNotFoundError:
            return ""

    def read_facts(self):
        return self.text_of(self.facts)

    def write_facts(self, text, instead_of):
        """Write MEMORY.md, but never empty or halve it. Returns False if somebody has changed the
        file: its text is no longer `instead_of`."""
        with locked(self.lock):
            if self.read_facts() != instead_of:
                return False
            text = text.strip()
            is_far_too_short = len(instead_of) > 100 and len(text) < len(instead_of) // 2
            if not text or is_far_too_short:
                log.warning("MEMORY.md is not changed: the new text is empty or far too short")
            else:
                write_atomically(self.facts, text + "\n")
            return True

    def entries(self):
        """All history entries. Reading 1,000 of them takes 5 ms."""
        return read_records(self.history, partial(has, cursor=int, timestamp=str, content=str))

    def append_history(self, text, **more):
        """Append an entry with `more` keys. The text may begin with its time, such as
        `[2026-04-03 00:02]`."""
        with locked(self.lock):
            # if lines are lost, `dream_cursor` may be higher: Dream must not skip the new entry
            last = max([self.dream_cursor, *(entry["cursor"] for entry in self.entries())])
            # "[2026-04-03 00:02] A trip." → ("2026-04-03 00:02", "A trip.");  "A trip." → (None, …)
            stamp, content = re.match(STAMP, text).groups()
            entry = {
                "cursor": last + 1,
                "timestamp": stamp or strftime("%Y-%m-%d %H:%M"),
                "content": content,
            }
            append_lines(self.history, [entry | more])
            fsync(self.history)

    @property
    def dream_cursor(self):
        """The number of the last entry that Dream has read."""
        number = self.text_of(self.folder / ".dream_cursor")
        return int(number) if re.fullmatch(r"\d{1,18}", number) else 0

    def unread(self) -> list[dict]:
        dreamt = self.dream_cursor
        return [entry for entry in self.entries() if entry["cursor"] > dreamt]

    def recent_history(self) -> list[str]:
        """The entries that Dream has not read yet, and the last five anyway. They share 1,800
        tokens: what an entry does not need is left for the newer ones."""
        recent = self.unread()[-50:]  # more would get too few tokens each
        if len(recent) < 5:
            recent = self.entries()[-5:]
        texts = []
        tokens_left = 1_800
        for entry in recent:
            text = dated(entry, tokens_left // (len(recent) - len(texts)))
            texts.append(text)
            tokens_left -= estimate(text)
        return texts

    def archive_old(self, keep=1_000):
        """Move entries to the archive if Dream has read them, except the newest `keep` entries."""
        with locked(self.lock):
            entries = self.entries()
            old = [entry for entry in entries[:-keep] if entry["cursor"] <= self.dream_cursor]
            if old:
                append_lines(self.folder / "history-archive.jsonl", old)
                write_atomically(self.history, as_lines(entries[len(old) :]))


# ---- The Consolidator: old turns move from the journal into the history ----

SAVE_MEMORY = {
    "type": "function",
    "function": {
        "name": "save_memory",
        "description": "Save the lasting parts of a conversation.",
        "parameters": {
            "type": "object",
            "properties": dict.fromkeys(  # the prompt, templates/consolidate.md, describes them
                ("history_entry", "memory_update", "summary"), {"type": "string"}
            ),
            "required": ["history_entry", "memory_update"],
        },
    },
}


@dataclass
class Consolidator:
    """Moves the oldest whole turns of a session into the long-term memory. One round writes:

    messages 1 … 60  →  history.jsonl  {"cursor": 7, "content": "The user planned …", "upto": 60}
                        MEMORY.md      - Travels to Rome in May
                        the journal    {"mark": "saved", "upto": 60, "summary": "…"}
    """

    store: MemoryStore
    sessions: "SessionManager"
    ask: Callable  # awaited with (messages, tools) → the answer, as from LLMProvider.chat
    prompt: str
    budget: int  # maximum number of tokens in a request
    window: int  # maximum number of messages that are not in the long-term memory
    one_at_a_time: Lock = field(default_factory=Lock)

    async def make_room(self, session, tokens):
        """Runs before each request. If `tokens` is over 80 % of the budget, move turns until about
        half of the budget is used. Returns a line for the user, or ""."""
        if tokens <= 0.8 * self.budget:
            return ""
        return await self._move(session, session.end_of_oldest(tokens - self.budget // 2))

    async def after_turn(self, session):
        """Runs in the background. Move all turns older than `/new`. If more than `window` messages
        remain, move turns until about `window / 2` remain. Returns a line for the user, or ""."""
        upto = session.start
        if session.saved < upto <= session.remembered:  # history entries have all of it already
            with self.sessions.lock(session.key):
                session.mark("saved", upto=upto)
        conversation = session.conversation()
        if len(conversation) > self.window:
            upto = conversation[-self.window // 2]["n"]  # a window of 100: the newest 50 remain
        return await self._move(session, upto)

    async def _move(self, session, upto):
        """Move turns up to message `upto` in at most five rounds, because a user may be waiting.
        Returns `12 older messages moved to the memory; memory: 1 file changed, 2 insertions(+)`.
        Raises SessionBusy."""
        told = ""
        count = 0
        async with self.one_at_a_time:
            for _ in range(5):
                end, text = self._next_part(session, upto)
                if not end:
                    break
                earlier = [message["content"] for message in session.summary_messages()]
                outcome = await self._update_memory(earlier, text)
                if not outcome or session.size != file_size(session.path):
                    break  # the model cannot be reached, or another program changed the file
                entry, summary, changes = outcome
                summary = str(summary or "\n\n".join([*earlier, entry]))[-4_000:]
                if changes:
                    told += f"; memory: {changes}"
                count += end - session.saved
                with self.sessions.lock(session.key):  # no `await`, so no cancellation here
                    if end > session.remembered:
                        self.store.append_history(
                            entry,
                            session=session.key,
                            created_at=session.created_at,
                            upto=end,
                            summary=summary,
                        )
                    session.mark("saved", upto=end, summary=summary)
        return f"{counted(count, 'older message')} moved to the memory{told}" if count else ""

    def _next_part(self, session, upto):
        """Choose whole turns for the next round. Returns the number of their last message, or 0,
        and their text, with `runtime` (time, chat and folder) before each question."""
        room = self.budget // 4  # the request also holds MEMORY.md and the summary
        end = 0
        text = ""
        longer = ""
        for message in session.messages:
            longer += f"{message.get('runtime', '')}\n{fitted(readable(message), 500)}\n"
            n = message["n"]
            if n in session.turn_ends and n <= upto:
                if end and estimate(longer) > room:
                    break
                end = n
                text = longer
                if n == session.start:  # a summary must not be about both sides of `/new`
                    break
        return end, fitted(text, room)  # even a single turn may be too long

    async def _update_memory(self, earlier, text):
        """Let the model read a conversation, and write MEMORY.md. `earlier` has its summary so far,
        if there is one. Returns (history entry, summary or "", "1 file changed, 2 insertions(+)" or
        ""), or None if the model cannot be reached. Without a valid call, the entry is a short
        piece of the text."""
        repository = MemoryRepository(self.store.workspace)
        for _ in range(3):
            facts = self.store.read_facts()
            messages = request(self.prompt, "# MEMORY.md", facts, "# Conversation", *earlier, text)
            response = await self.ask(messages, [SAVE_MEMORY])
            if response.finish_reason == "error" and not response.is_overflow:
                return None
            if response.finish_reason in ("length", "content_filter"):
                continue  # the answer was cut off: ask again
            if not response.tool_calls:  # small models may give no valid call, or an empty entry
                break
            answer = response.tool_calls[0].arguments
            if not has(answer, history_entry=str, memory_update=str):
                break
            entry = re.sub(THOUGHTS, "", answer["history_entry"]).strip()
            if not entry:
                break
            await to_thread(repository.record, OUTSIDE)
            if not self.store.write_facts(answer["memory_update"], facts):
                continue  # somebody has changed MEMORY.md meanwhile: ask again
            changes = await to_thread(repository.record, "saved from a conversation")
            return entry, answer.get("summary"), changes
        return f"[RAW] {fitted(text, 400)}", "", ""


# ---- Shorten a request until it fits the context window ----


class Governed:
    """Shortens a copy of a conversation to `budget` tokens. The result is in `messages`, `tokens`
    and `notes`. First a list of calls replaces the oldest turns and steps, then pictures go, at
    last parts of results. The system prompt, the summary and this turn's user messages stay. This
    turn begins with the message `task`; `beside` is the number of tokens of the tools' schemas.

    user "Find the bug"                 user "Find the bug"
    assistant calls read_file({…})   →  user "[2 messages left out. The calls, and …:]\\n
    tool "1| import os\\n2| import re"        assistant: calls read_file({…})\\n
    assistant calls grep({…})                 tool read_file: 1| import os"
    tool "a.py:7: …"                    assistant calls grep({…}) …
    """

    def __init__(self, messages: list[dict], budget: int, task: dict | None, beside=0):
        self.messages = list(messages)
        self.notes = []  # `8 messages left out (~7,900 tokens)`
        self.tokens = total_tokens(messages) + beside
        self.task = task
        self.list_size = min(2_000, budget // 8)  # tokens for the list of what is left out
        for make_shorter in (self._leave_out, self._remove_pictures, self._cut_results):
            if self.tokens > budget:
                make_shorter(self.tokens - budget)
                self.tokens = total_tokens(self.messages) + beside

    def _leave_out(self, excess):
        """Leave out the oldest turns, then this turn's oldest steps: `excess` tokens or more. The
        last step stays, because the model has not read its results yet."""
        begin = 0  # the place of this turn's first message
        last_step = 0
        for n, message in enumerate(self.messages):
            if message == self.task:
                begin = n
            if message.get("tool_calls"):
                last_step = n
        kept = []
        left_out = []
        freed = 0
        for n, message in enumerate(self.messages[: max(begin, last_step)]):
            role = message["role"]
            # earlier turns go as a whole, this turn goes step by step
            begins_part = role == "user" if n <= begin else role != "tool"
            if begins_part and freed >= excess + self.list_size:
                break
            is_own = role == "user" and n >= begin
            if is_own or role == "system" or "is_summary" in message:
                kept.append(message)
            else:
                left_out.append(message)
                freed += message_tokens(message)
        if left_out:
            told = f"{counted(len(left_out), 'message')} left out"
            spare = max(freed - excess - 10, 50)  # 10 tokens for the list's message itself
            text = list_of(left_out, told, min(spare, self.list_size))
            replaced = len(kept) + len(left_out)
            self.messages[:replaced] = [*kept, {"role": "user", "content": text}]
            self.notes.append(f"{told} (~{freed:,} tokens)")

    def _remove_pictures(self, _):
        shorter = [without_images(message) for message in self.messages]
        if shorter != self.messages:
            self.messages = shorter
            self.notes.append("pictures left out")

    def _cut_results(self, excess):
        """Last resort: cut each tool result to an equal share of the remaining tokens."""
        results = [message for message in self.messages if message["role"] == "tool"]
        room = total_tokens(results) - excess
        for n, message in enumerate(self.messages):
            if message["role"] == "tool":
                # 20 tokens for the line below
                cut = fitted(message["content"], max(room // len(results) - 20, 10))
                if cut != message["content"]:
                    cut += "\n[not all of it: ask for a part]"
                    self.messages[n] = {**message, "content": cut}
        if results:
            self.notes.append("tool results cut")


# ======== Second reading: terminals, damage, files and locks, sizes, Dream, skills ========

# ---- What people said at terminals ----


def remember_terminals(sessions):
    """Write a history entry, without a model, about each conversation that a person typed at a
    terminal, except in the last hour: it may go on. Requests still have its messages.

    {"cursor": 8, "timestamp": "2026-11-22 18:03",
     "content": "In /home/ada/plan:\nuser: Add the costs.\nassistant: calls edit_file({…})\n…"}
    """
    store = sessions.store
    lock = store.folder / ".terminals"  # its time tells when this function ran last
    with locked(lock):  # two programs may start at the same time
        # older sessions need not be opened; a day earlier, because a clock may have been set back
        first_use = lock.stat().st_mtime - 86_400
        last_use = time.time() - 3_600
        for key, used in reversed(sessions.by_last_use()):
            if not first_use < used < last_use:
                continue
            first = sessions.first_line(key)
            if not first.get("typed"):
                continue
            session = sessions.load(key)
            said = [message for message in session.messages if message["n"] > session.remembered]
            if said:
                text = f"In {first['folder']}:\n{in_short(said)}"
                if session.is_open:
                    text += "\n(not answered: the program ended)"
                store.append_history(
                    text, timestamp=strftime("%Y-%m-%d %H:%M", time.localtime(used))
                )
                session.mark("remembered", upto=session.highest)
                os.utime(session.path, (used, used))  # the mark is no use of the conversation
        os.utime(lock)


def in_short(messages):
    """What the user said, the start and the end of each answer, and the calls, without results."""
    lines = []
    for message in messages:
        if message["role"] != "tool":
            most = 500 if message["role"] == "user" else 100  # tokens
            lines.append(fitted(readable(message | {"timestamp": ""}), most))
    return fitted("\n".join(lines), 6_000)


# ---- Reading a damaged file of JSON lines ----
# Real examples: 4,096 zero bytes after a power cut, half a line on a full disk, a `NaN`.


def read_records(path, is_valid):
    """The valid records of a file, in order. An invalid line is copied once to `*.corrupt`."""
    aside = path.with_name(f"{path.name}.corrupt")
    known = raw_lines(aside)  # the invalid lines that are there already
    records = []
    damaged = []
    for line in raw_lines(path):
        try:
            record = json.loads(line, parse_constant=int)  # int("NaN") raises ValueError
        except (ValueError, RecursionError):
            record = None
        if is_valid(record):
            records.append(record)
        elif line.strip(b"\0 \t\r") and line not in known:  # zeros alone are no lost message
            damaged.append(line)
    if damaged:
        log.warning(
            "%s: %s skipped, and copied to %s",
            path,
            counted(len(damaged), "unreadable line"),
            aside.name,
        )
        with open_private(aside) as file:
            file.write(b"\n".join(damaged) + b"\n")
    return records


def raw_lines(path):
    """b'{"n": 1}\\n{"n": 2}\\n' → [b'{"n": 1}', b'{"n": 2}', b""]; [] if there is no file."""
    # str.splitlines() would also split at U+2028 and \x85, which a message may contain
    return patiently(path.read_bytes).split(b"\n") if path.exists() else []


def has(record, **kinds):
    """True if `record` is a dict, and each named key has a value of this type.

    has({"id": "7", "n": 1}, id=str, n=int | None) → True; a missing key has the value None
    """
    return isinstance(record, dict) and all(
        isinstance(record.get(name), kinds[name]) for name in kinds
    )


def journal_lines(path):
    """The valid lines of a journal. A file without a valid line is renamed."""
    lines = read_records(path, is_journal_line)
    if not lines and file_size(path):
        aside = path.with_name(f"{path.name}.corrupt-{time.time_ns()}")
        os.replace(path, aside)
        log.warning("%s has no valid line: file moved to %s, the session starts anew", path, aside)
    # lines of the system that this kit re-creates; the kit's own lines follow them
    old = list(takewhile(lambda line: "n" not in line and "mark" not in line, lines))
    if old:
        return numbered(old) + lines[len(old) :]
    return lines


def is_journal_line(line):
    """True for a mark, and for a message that a request can have: each call has an id, a name and
    arguments as text, and a tool's result has the id of its call."""
    if not has(line, n=int | None, content=str | list | None, tool_calls=list | None):
        return False
    if "mark" in line or "_type" in line:  # `_type`: see `numbered`
        return True
    if line.get("role") not in ("user", "assistant", "tool", "system"):
        return False
    if line["role"] == "tool":
        return has(line, tool_call_id=str, content=str)
    calls = line.get("tool_calls") or []
    for call in calls:
        if not (has(call, id=str) and has(call.get("function"), name=str, arguments=str)):
            return False
    return "content" in line or calls  # a message has a text or calls


def numbered(lines):
    """Convert old lines. The marks say that all turns have ended, that nothing is to be delivered
    again, and what is in the long-term memory.

    {"_type": "metadata", "last_consolidated": 0, …}     {"n": 1, "role": "user", "content": "Hi"}
    {"role": "user", "content": "Hi"}                 →  {"mark": "ended", "why": "interrupted"}
                                                         {"mark": "delivered", "upto": 1}
                                                         {"mark": "saved", "upto": 0}
    """
    messages = [line for line in lines if "_type" not in line]
    return [
        *({"n": n} | message for n, message in enumerate(messages, 1)),
        {"mark": "ended", "why": "interrupted"},
        {"mark": "delivered", "upto": len(messages)},
        {"mark": "saved", "upto": lines[0].get("last_consolidated", 0)},
    ]


# ---- Files: safe writes (full disk, kill, power cut), and locks ----


def as_lines(records):
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def append_lines(path, records):
    """Append all records or none. Returns the number of written bytes. Raises OSError."""
    data = as_lines(records).encode(errors="replace")  # `?` replaces a lone surrogate
    size = file_size(path)
    try:
        with open_private(path) as file:
            file.seek(max(size - 1, 0))
            if file.read(1) not in (b"\n", b""):  # the last byte, or b"" of an empty file
                data = b"\n" + data  # start a new line after an incomplete line
            file.write(data)
    except OSError as problem:
        if file_size(path) > size:
            os.truncate(path, size)  # remove a partial line (the disk may be full)
        problem.filename = str(path)
        raise
    return len(data)


def open_private(path, mode="a+b"):
    """Open a file, by default to read and append. A new file is readable by its owner only."""
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    return open(path, mode, opener=partial(os.open, mode=0o600))


def write_atomically(path, content):
    """Replace a file's content. A crash leaves the old or the new text. Keeps links and modes.
    (tools.py has `write_atomic`, whose errors are for the model: it does not import this file.)"""
    path = path.resolve()
    draft = path.with_name(f".{path.name}.tmp")  # the next write overwrites it
    try:
        with open_private(draft, "wb") as file:
            file.write(content.encode(errors="replace"))
        fsync(draft)
        if path.exists():
            shutil.copymode(path, draft)
        patiently(os.replace, draft, path)
    finally:
        draft.unlink(missing_ok=True)  # it is there only if something has failed
    fsync(path)  # for the folder, which has changed


def patiently(work, *arguments):
    """Windows refuses to replace, and sometimes to read, a file that a program has open: retry for
    a second."""
    for _ in range(50):
        try:
            return work(*arguments)
        except PermissionError:
            if os.name != "nt":
                raise
        time.sleep(0.02)
    return work(*arguments)


def fsync(path):
    with open(path, "r+b") as file:  # Windows cannot sync a file that is open for reading only
        os.fsync(file.fileno())
    with suppress(OSError):  # some systems cannot sync a folder
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def file_size(path):
    return path.stat().st_size if path.exists() else 0


class SessionBusy(Exception):
    """Another program holds the lock."""


@contextmanager
def locked(path, busy=""):
    """Lock `path`. If another program holds the lock, wait, or raise SessionBusy if `busy` is set.
    A kill unlocks `path`. Open protected files inside the `with` block."""
    with open_private(path) as file, ExitStack() as unlock:
        while True:  # try until it is locked
            try:
                if os.name == "nt":
                    import msvcrt

                    msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
                else:
                    import fcntl

                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    unlock.callback(fcntl.flock, file, fcntl.LOCK_UN)  # a child may hold it open
                break
            except (BlockingIOError, PermissionError):
                if busy:
                    raise SessionBusy(busy) from None
                time.sleep(0.02)
        yield


class SessionManager:
    """Finds, loads and locks sessions. The 64 most recently used sessions are cached."""

    def __init__(self, workspace, store=None, events_of=lambda key: None):
        self.folder = workspace / "sessions"
        self.events_of = events_of  # the session's key → its `on_event`
        self.store = store or MemoryStore(workspace)
        self._cache = {}  # the least recently used session first
        self._held = set()

    def path(self, key):
        """`cli:direct` → `cli%3Adirect.jsonl`, or `cli_direct.jsonl` if this older name exists."""
        name = quote(key, " @+,=", errors="replace").replace(".", "%2E")
        # for Windows, cli%3AWork and cli%3Awork are one file: `W` → `%57`, but not the A of `%3A`
        if os.name == "nt":
            name = re.sub("(?<!%)(?<!%.)[A-Z]", lambda letter: f"%{ord(letter[0]):X}", name)
        path = self.folder / f"{name}.jsonl"
        older = self.folder / f"{name.replace('%3A', '_')}.jsonl"
        return older if older.exists() and not path.exists() else path

    def inbox(self, key):
        """All terminals have the same inbox: whichever comes first shows the reports."""
        if key.startswith("cli:"):
            return Inbox(self.folder.parent / ".nanobot" / "terminal.inbox")
        return Inbox(self.path(key).with_suffix(".inbox"))

    def outbox(self, key):
        """What the tool `message` has sent to this chat, until it has arrived."""
        return Inbox(self.path(key).with_suffix(".outbox"))

    def new_key(self):
        """A new key for a conversation at a terminal, from the time: `cli:2026-11-23-0120-ab3f91`.
        It has a random part, because programs may start at the same time."""
        return f"cli:{strftime('%Y-%m-%d-%H%M')}-{token_hex(3)}"

    def first_line(self, key):
        """The first line of the journal. Terminals write their `folder`, and `typed: true` for what
        `-c` may continue. {} if there is no journal, or the line is damaged."""
        with suppress(OSError, ValueError), open(self.path(key), "rb") as file:
            first = json.loads(file.readline(100_000))
            if has(first):
                return first
        return {}

    def latest(self, folder):
        """The key of the newest `typed` conversation at a terminal in `folder`, or "". One that a
        failure or Ctrl-C ended before the model said or did anything does not count."""
        for key in self.list_keys():
            first = self.first_line(key)
            if first.get("typed") and first.get("folder") == str(folder):
                session = self.get(key)
                if session.saved or session.is_open or len(session.messages) > 1:
                    return key
        return ""

    def get(self, key):
        """Returns a session, reloaded if another program has changed its file. Raises OSError."""
        session = self._cache.pop(key, None)
        if not session or session.size != file_size(session.path):
            session = self.load(key)
        self._cache[key] = session
        if len(self._cache) > 64:
            del self._cache[next(iter(self._cache))]
        return session

    def load(self, key):
        """Load a session. The mark `saved` of its newest history entry may be missing, because of a
        kill between the two writes, or damaged: then the entry is used as the mark."""
        session = Session(key, self.path(key), self.events_of(key))
        size = file_size(session.path)
        lines = journal_lines(session.path)
        for line in lines:
            session.take(line)
        for entry in self.store.entries():
            origin = (entry.get("session"), entry.get("created_at"))
            if origin == (key, session.created_at) and entry.get("upto", 0) > session.saved:
                session.take(entry | {"mark": "saved"})
        session.size = size if lines else 0
        return session

    def messages(self, key):
        """All messages of a session, and as messages without a text, of the role "/new", the places
        where a new conversation begins."""
        return [
            {"role": "/new"} | line
            for line in journal_lines(self.path(key))
            if "role" in line or line.get("mark") == "new"
        ]

    def by_last_use(self):
        """(key, time of its last use) of all sessions, the most recently used first. Some sessions
        have only an inbox."""
        used = {}
        for path in self.folder.glob("*"):
            if path.suffix in (".jsonl", ".inbox") and path.exists():  # Emacs leaves broken links
                key = unquote(path.stem)  # "cli%3Adirect" → "cli:direct"
                if ":" not in key:
                    key = key.replace("_", ":", 1)  # "cli_direct" → "cli:direct"
                used[key] = max(path.stat().st_mtime, used.get(key, 0.0))
        return sorted(used.items(), key=lambda row: row[1], reverse=True)

    def list_keys(self):
        return [key for key, _ in self.by_last_use()]

    @contextmanager
    def lock(self, key):
        """Lock a session, so that no other program writes to it. Calls may be nested."""
        if key in self._held:
            yield
            return
        with locked(
            self.path(key).with_suffix(".lock"),
            f"Session {key} is in use by another program. Go on there, or use another: "
            "nanobot -s NAME",
        ):
            self._held.add(key)
            try:
                yield
            finally:
                self._held.discard(key)


# ---- Texts and sizes ----


def readable(message):
    """`[2026-04-03T10:00:00+0200] assistant: calls read_file({"path": "a.txt"})`; the result is
    `[2026-04-03T10:00:01+0200] tool read_file: 1| hello`."""
    parts = [str(message.get("content") or "")]
    for call in message.get("tool_calls") or []:
        function = call["function"]
        parts.append(f"calls {function['name']}({function['arguments']})")
    if "cut" in message:
        parts.append(f"[broke off: {message['cut']}]")
    who = message.get("report") or message["role"]
    who = f"{who} {message.get('name', '')}".strip()  # a result has its tool's name
    if message.get("timestamp"):
        who = f"[{message['timestamp']}] {who}"
    return f"{who}: " + "\n".join(parts).strip()


def dated(entry, most):
    """`[2026-04-03 00:02] The user planned a trip to Rome.`, with at most `most` tokens."""
    return fitted(f"[{entry['timestamp']}] {entry['content']}", most)


def list_of(left_out, told, most):
    """The list in the example of Governed, with at most `most` tokens."""
    lines = [f"[{told}. The calls, and the first line of each message:]"]
    for message in left_out:
        text = str(without_images(message).get("content") or "").strip()
        lines.append(fitted(readable(message | {"content": text.partition("\n")[0]}), 100))
    return fitted("\n".join(lines), most)


def without_images(message):
    """Remove the image bytes from a message. The text line with the image's name stays."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = [block["text"] for block in content if block.get("text")]
    return {**message, "content": "\n".join(texts) or "[image]"}


def request(system, *parts):
    text = "\n\n".join(parts)
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


# tools.py has `counted` and `shorten` (in characters), too: these files do not import each other.


def counted(count, one, several=""):
    """Returns "0 steps", "1 step", "2,000 steps", "2 entries"."""
    return f"{count:,} {one if count == 1 else several or one + 's'}"


def fitted(text, most):
    """Remove characters from the middle of a text until it has at most `most` tokens."""
    size = len(text)
    cut = text
    while (tokens := estimate(cut)) > most and size > 50:  # do not cut very short texts
        size = min(size * most // tokens, size * 9 // 10)
        cut = f"{text[: size * 2 // 3]} […] {text[len(text) - size // 3 :]}"
    return cut


THOUGHTS = r"(?s)\s{0,100}<think>.*?(</think>|\Z)"  # "<think>The user wants …</think>"
# "[2026-04-03 00:02] The user planned a trip."
STAMP = r"(?s)\s{0,100}(?:\[(\d{4}-\d\d-\d\d \d\d:\d\d)\]\s{0,100})?(.{0,64000})"


def estimate(text):
    """Estimate the tokens from the kinds of characters: 0.6 to 2.4 times the true number. Five
    lower-case letters count as a token, and so on; the factors fit the samples in `tests/data`."""
    data = text.encode(errors="replace")
    rest = data.translate(None, b"abcdefghijklmnopqrstuvwxyz \n")
    foreign = rest.translate(None, bytes(range(128)))
    letters = len(data) - len(rest)
    marks = len(rest) - len(foreign)
    # models know few words of rare scripts (Khmer, emoji): here each byte is a token
    rare = 3 * data.count(b"\xe1") + 4 * data.count(b"\xf0")
    return int(letters / 5 + marks / 1.5 + (len(foreign) - rare) / 4.5 + rare) + 1


cached_estimate = lru_cache(1_000)(estimate)  # each request repeats most messages


def message_tokens(message):
    """The estimated tokens of a message. An image counts as 1,000 tokens."""
    content = message.get("content")
    tokens = 4
    blocks = content if isinstance(content, list) else [{"text": content}]
    for block in blocks:
        if block.get("type") == "image_url":
            tokens += 1_000
        elif block.get("text"):
            tokens += cached_estimate(block["text"])
    for call in message.get("tool_calls") or []:
        tokens += cached_estimate(str(call))
    return tokens


def total_tokens(messages):
    return sum(map(message_tokens, messages))


# ---- Dream: turn history entries into facts and skills ----

DREAM_FILES = ("memory/MEMORY.md", "SOUL.md", "USER.md")
# "- [MEMORY] Favourite colour: blue"
FINDING = r"(?m)^[\s*-]{0,20}(\[(?:USER|SOUL|MEMORY|SKILL)(?:-REMOVE)?\] {0,20}\S.*)$"
UNREACHABLE = "did not reach the model"


@dataclass
class Dream:
    """Reads history entries, lists findings, and then edits facts and skills:

    [2026-04-03 00:02] The user likes blue best now, not green.        a history entry
    [MEMORY-REMOVE] favourite colour: green                            phase 1: findings
    [MEMORY] favourite colour: blue
    edit_file("memory/MEMORY.md", "colour: green", "colour: blue")     phase 2: tool calls
    """

    store: MemoryStore
    ask: Callable  # as in Consolidator
    run_agent: Callable  # awaited with (messages, refuse) → an object with `stop_reason`
    find_prompt: str
    edit_prompt: str
    skills: "SkillsLoader"
    budget: int  # maximum number of tokens in a request
    max_batch: int  # maximum number of history entries per dream
    failures: int = 0  # number of failed dreams about the same entries

    async def run(self):
        """Run one dream. Returns a text for the user. Raises SessionBusy if another dream runs."""
        repository = MemoryRepository(self.store.workspace)
        with repository.lock():
            batch = self.store.unread()[: self.max_batch]
            if not batch:
                return "There is nothing new to dream about."
            outcome = await self._dream(batch, repository)
            if outcome == "failed":
                self.failures += 1
            if outcome != "completed" and self.failures < 3:
                return f"The dream {outcome}. Nothing is lost: the next dream tries again."
            if self.failures == 3:
                log.warning("three dreams about the same entries failed: these entries are skipped")
            self.failures = 0
            write_atomically(self.store.folder / ".dream_cursor", str(batch[-1]["cursor"]))
            self.store.archive_old()
            told = f"Dreamt about {counted(len(batch), 'entry', 'entries')}"
            try:
                changes = await to_thread(repository.commit, "dream")
            except OSError as problem:
                return f"{told}. The changes cannot be shown or undone: {problem}"
            return f"{told}: {changes or 'no change'}. /dream-log shows the changes."

    async def _dream(self, batch, repository):
        """Run both phases. Returns "completed", "failed" or UNREACHABLE."""
        most = self.budget // 2 // len(batch)
        lines = [dated(entry, most) for entry in batch]
        files = []
        for name in DREAM_FILES:
            path = self.store.workspace / name
            files.append(f"# {path}\n\n{fitted(self.store.text_of(path), self.budget // 8)}")
        today = strftime("Today: %Y-%m-%d, %A")
        response = await self.ask(request(self.find_prompt, today, *files, "# History", *lines), [])
        # what others have changed until now is no part of the dream
        with suppress(OSError):  # if it fails, the second commit fails, too
            await to_thread(repository.commit, OUTSIDE)
        if response.finish_reason == "error":
            return "failed" if response.is_overflow else UNREACHABLE
        answer = re.sub(THOUGHTS, "", response.content or "")
        findings = re.findall(FINDING, answer)
        if not findings:
            return "completed" if "[SKIP]" in answer else "failed"
        skills = [
            f"- {skill.name}: {skill.description} ({skill.path})" for skill in self.skills.load()
        ]
        task = request(self.edit_prompt, "# Findings", *findings, *files, "# Skills", *skills)
        result = await self.run_agent(task, self.refuse)
        if result.stop_reason == "error":
            return UNREACHABLE
        return "completed" if result.stop_reason == "completed" else "failed"

    def refuse(self, name, arguments):
        """Returns why a call is refused, or "". Without this check, the text of a web page could
        mislead Dream into writing elsewhere. The tool gets exactly these `arguments`. Raises
        ValueError, for example for a path with a NUL."""
        if name == "read_file":
            return ""  # the turn's fence decides
        home = self.store.workspace.resolve()
        own = self.skills.folders[0].resolve()
        path = (home / os.path.expanduser(str(arguments.get("path", "")))).resolve()
        if own in path.parent.parents:  # in the folder of a skill, not directly in `skills`
            return ""
        if name == "edit_file" and path in [(home / file).resolve() for file in DREAM_FILES]:
            return ""
        return f"Edit only {', '.join(DREAM_FILES)}, and write skills, like {own}/NAME/SKILL.md."


# ---- Git commits of dreams and consolidations: show the changes, or undo them ----

OUTSIDE = "edited by you or the agent"
COMMITTED = (*DREAM_FILES, "skills")  # an older version's repositories have the history, too
LAST_DREAM = "HEAD^{/^dream:}"
UNKNOWN = "there is no such commit, or no dream yet. /dream-log lists the commits."


class MemoryRepository:
    """A git repository. It is not named `.git`, so that the workspace is not a submodule."""

    def __init__(self, workspace):
        self.workspace = workspace
        self.folder = workspace / ".nanobot" / "memory.git"

    def lock(self):
        """Lock the files for a dream or a restore. Raises SessionBusy."""
        return locked(self.folder.with_name("dream.lock"), "Another dream is running.")

    def git(self, *arguments, why=""):
        """Run git. If git fails, raises OSError with the text `why`, or else with git's message."""
        if not shutil.which("git"):
            raise OSError("git is not installed.")
        done = subprocess.run(
            ["git", "-c", "user.name=nanobot", "-c", "user.email=nanobot@localhost", *arguments],
            cwd=self.workspace,
            env=os.environ
            | {
                "GIT_DIR": ".nanobot/memory.git",
                "GIT_INDEX_FILE": ".nanobot/memory.git/index",
                "GIT_WORK_TREE": ".",
                "GIT_CONFIG_NOSYSTEM": "1",
                "GIT_CONFIG_GLOBAL": os.devnull,
            },
            capture_output=True,
            encoding="utf-8",
            errors="replace",
        )
        if done.returncode:
            raise OSError(
                why
                or f"{done.stderr.strip()}. If {self.folder} is damaged, remove it: the next dream "
                "begins a new one."
            )
        return done.stdout

    def commit(self, subject):
        """Commit the files. Returns `1 file changed, 2 insertions(+)`, or "". Raises OSError."""
        if not (self.folder / "HEAD").exists():
            self.git("init", "-q")
            write_atomically(  # instead of the user's attributes
                self.folder / "info/attributes",
                "* !text !eol !diff !filter !ident !working-tree-encoding\n",
            )
        (self.folder / "index.lock").unlink(missing_ok=True)  # a killed git has left it
        self.git("add", "-u")  # changed and deleted files
        names = [name for name in COMMITTED if (self.workspace / name).exists()]
        self.git("add", "-f", "--", *names)
        told = self.git("diff", "--cached", "--shortstat", "--", *COMMITTED).strip()
        if told:
            self.git("commit", "-q", "-m", f"{subject}: {told}")
        return told

    def record(self, subject):
        """Commit if git works, and unless a dream is running, whose commit then contains these
        changes, too. Returns `1 file changed, 2 insertions(+)`, or ""."""
        try:
            with self.lock():
                return self.commit(subject)
        except (OSError, SessionBusy) as problem:
            log.info("MEMORY.md is not committed: %s", problem)
            return ""

    def log(self, sha=""):
        """List the last commits, one per line. With `sha`, show the changes of that commit."""
        try:
            what = ["show", f"{sha}^0"] if sha else ["log", "-50"]  # `--help^0` is no option
            return self.git(*what, "--format=%h %ci %s", why=UNKNOWN).strip()[:16_000]
        except OSError as problem:
            return f"There is no log: {problem}"

    def restore(self, sha=""):
        """Undo one commit (default: the last dream) with a new commit. Returns a message."""
        why = "the commit is undone already, or its lines have changed since then."
        try:
            with self.lock():
                self.commit(OUTSIDE)
                patch = ".nanobot/undo.patch"  # not read here: its bytes must stay as they are
                self.git(
                    "diff-tree",
                    "--binary",
                    f"--output={patch}",
                    f"{sha or LAST_DREAM}^0",
                    "--",
                    *COMMITTED,
                    why=UNKNOWN,
                )
                files = [self.workspace / name for name in self.git("ls-files", "-z").split("\0")]
                modes = {path: path.stat().st_mode for path in files if path.is_file()}
                try:
                    self.git("apply", "--check", patch)
                except OSError:
                    pass
                else:  # it could be made once more, so it is undone already
                    raise OSError(why)
                # -C0: the lines around a change may have changed since
                self.git("apply", "-R", "-C0", "--whitespace=nowarn", patch, why=why)
                for path, mode in modes.items():  # git has given new files the usual mode
                    if path.exists():
                        path.chmod(mode)
                told = self.commit(f"restore of {sha or 'the last dream'}")
                return f"Undone: {told}."
        except (OSError, SessionBusy) as problem:
            return f"Nothing is changed: {problem}"


# ---- Skills ----


@dataclass
class Skill:
    """Instructions for one kind of task, from a file `skills/<name>/SKILL.md`."""

    name: str
    path: Path
    description: str
    text: str  # without the front matter
    always: bool  # if True, the whole text is in every system prompt
    missing: list  # missing programs and variables


class SkillsLoader:
    """Loads the skills of the workspace and the built-in skills."""

    def __init__(self, *folders, read=Path.read_bytes):
        self.folders = folders  # if two folders have the same skill, the first folder wins
        self.read = read

    def load(self):
        """All skills whose file can be read; a warning names each other file once."""
        paths = {}
        for folder in reversed(self.folders):
            paths |= {path.parent.name: path for path in folder.glob("*/SKILL.md")}
        skills = []
        for _, path in sorted(paths.items()):
            try:
                skills.append(skill_of(path, self.read(path)))
            except (OSError, ValueError) as problem:
                warn_once(f"{path} is left out: {problem}")
        return skills


warn_once = cache(log.warning)  # channels.py has one, too: these files do not import each other


# "---\nname: weather\n---\n"
FRONT_MATTER = r"(?s)(?:---[ \t]{0,20}\n(.*?\n|)---[ \t]{0,20}(?:\n|\Z))?"
# `"bins": ["gh", "jq"]`, `bins: [gh, jq]`, "bins:\n  - gh\n  - jq"
NEEDS = r"\b{}[\"']?:\s{{0,100}}(\[[^\]]{{0,2000}}\]|(?:-[^\n]{{0,200}}\s{{0,100}}){{1,50}})"
NAME = r"[^\s,\[\]\"'-][^\s,\[\]\"']{0,200}"


def skill_of(path, data):
    """Parse the bytes of a file SKILL.md. All parts of the file are optional."""
    text = data.decode("utf-8-sig", "replace").replace("\r\n", "\n")
    match = re.match(FRONT_MATTER, text)
    front = match[1] or ""
    fields = fields_of(front)
    missing = []
    for key, find, kind in (
        ("bins", shutil.which, "program"),
        ("env", os.getenv, "environment variable"),
    ):
        if needs := re.search(NEEDS.format(key), front):
            # '["gh", "jq"]' → ["gh", "jq"]
            missing += [f"{kind} {name}" for name in re.findall(NAME, needs[1]) if not find(name)]
    return Skill(
        fields.get("name") or path.parent.name,
        path,
        fields.get("description", ""),
        text[match.end() :].strip(),
        fields.get("always", "").lower() in ("true", "yes"),
        missing,
    )


QUOTED = r"""(["'])((?:\\.|''|(?!\1).)*)"""  # 'it''s late'   "say \\"hi\\" # twice"


def fields_of(front):
    """Parse YAML lines `key: value`. A value may have quotes, or continue on indented lines."""
    fields = {}
    front = re.sub(r"\n\n+", "\n", front)  # one regex for both steps would take quadratic time
    for line in re.sub(r"\n[ \t]+", " ", front).split("\n"):
        key, _, value = line.partition(":")
        value = value.strip()
        if quoted := re.match(QUOTED, value):
            value = quoted[2].replace("''", "'").replace('\\"', '"')
        else:
            value = value.lstrip(">|+-").partition(" #")[0]
        fields[key] = value.strip()
    return fields
