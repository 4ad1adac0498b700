"""What survives the turn: the session's journal, its inbox, long-term memory, skills; what fits a request.

The journal is the truth; what is sent is derived from it. A session is two files of JSON lines:

    sessions/telegram%3A7.jsonl           append-only: numbered messages, and marks between them
    {"n": 1, "role": "user", "content": "What is in a.txt?", "id": "501"}
    {"n": 2, "role": "assistant", "content": null, "tool_calls": [{"id": "c1", …}]}
    {"n": 3, "role": "tool", "tool_call_id": "c1", "content": "1| hello"}
    {"mark": "ended", "why": "it was stopped"}

    sessions/telegram%3A7.inbox           messages that wait for their turn
    {"id": "502", "kind": "user", "content": "And in b.txt?"}

Numbers never change, so a damaged line moves nothing. A crash needs no checkpoint: whoever reads
the journal sees how far it came. Old messages move from the journal into the history
(Consolidator), from there into facts and skills (Dream). The model is passed in:
`ask(messages, tools, tool_choice) -> response`. Not covered: when a session is written to (AgentLoop).
"""

import asyncio
import contextlib
import json
import logging
import os
import re
import shutil
import stat
import string
import subprocess
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

log = logging.getLogger("nanobot.memory")
to_json = json.JSONEncoder(ensure_ascii=False).encode
Ask = Callable[[list[dict], list[dict], str | None], Awaitable[Any]]
Read = Callable[[Path], bytes]  # reads a file for a request; raises OSError or ValueError


# ---- The journal: each message is written once, when it exists ----


class Session:
    """One conversation. Only the holder of the session's lock appends messages and the marks `new`,
    `ended`, `resumed` and `saved`; whoever delivers an answer appends `delivered`."""

    def __init__(self, key: str, path: Path):
        self.key = key
        self.path = path
        self.created_at = now()
        self.messages: list[dict] = []  # without those that the long-term memory has
        self.last = 0  # the number of the last message
        self.highest = 0  # of all numbers seen: the next message gets the one above
        self.start = 0  # `/new`: the conversation begins behind this number
        self.saved = 0  # the messages up to this number are in the long-term memory
        self.summary = ""  # what stands for the saved messages
        self.ended: dict[int, str] = {}  # why the turn with this last message has no answer
        self.resumed = 0  # how often the open turn was resumed after a restart
        self.undelivered: list[dict] = []  # answers
        self.known_ids: deque[str] = deque(maxlen=1_000)  # of chat messages
        self.size = 0  # bytes of the file, as we know it; -1: another program wrote to it
        self.synced_size = 0

    def append(self, *messages: dict) -> None:
        """Write messages in one go, numbered. They survive a kill; a power cut only after
        `synced()`. Raises OSError; then none of them is written."""
        first = self.highest + 1
        lines = [
            stamped({"n": n} | as_journalled(message)) for n, message in enumerate(messages, first)
        ]
        self._write(lines)
        for line in lines:
            self.take(line)

    def mark(self, name: str, **details: Any) -> None:
        """Append a mark: new, ended (why), resumed, saved (upto, summary), delivered (upto)."""
        line = stamped({"mark": name, **details})
        self._write([line])
        self.take(line)

    def _write(self, lines: list[dict]) -> None:
        size = file_size(self.path)
        if not size:
            begin = {"mark": "session", "key": self.key, "created_at": self.created_at}
            lines = [stamped(begin), *lines]
        append_lines(self.path, lines)
        self.size = file_size(self.path) if size == self.size else -1

    def take(self, line: dict) -> None:
        """Apply a line of the journal, in the order of the file. `upto` is clamped to the numbers
        that exist: a mark that was damaged hides nothing that comes later."""
        match line:
            case {"mark": "saved", "upto": int(upto)}:
                self.highest = max(self.highest, upto)
                self.saved = max(self.saved, min(upto, self.last))
                self.summary = str(line.get("summary") or "")
                self.messages = [message for message in self.messages if message["n"] > self.saved]
            case {"mark": "delivered", "upto": int(upto)}:
                self.highest = max(self.highest, upto)
                self.undelivered = [answer for answer in self.undelivered if answer["n"] > upto]
            case {"mark": "new"}:
                self.start = min(line.get("upto", self.last), self.last)
            case {"mark": "ended"}:
                self.ended[self.last] = str(line.get("why") or "interrupted")
            case {"mark": "resumed"}:
                self.resumed += 1
            case {"mark": "session"}:
                self.created_at = str(line.get("created_at") or self.created_at)
            case {"n": int(), "role": str()}:
                self._take_message(line)

    def _take_message(self, message: dict) -> None:
        if not self.is_open:
            self.resumed = 0
        self.last = message["n"]
        self.highest = max(self.highest, self.last)
        self.messages.append(message)
        if "id" in message:
            self.known_ids.append(message["id"])
        if is_answer(message) and "cut" not in message:
            self.undelivered.append(message)

    async def synced(self) -> None:
        """Return when all that was appended survives a power cut. Raises OSError."""
        size = self.size
        if size != self.synced_size:
            await asyncio.to_thread(fsync, self.path)
            self.synced_size = size

    def conversation(self) -> list[dict]:
        """The messages since `/new` that are not in the long-term memory."""
        return [message for message in self.messages if message["n"] > self.start]

    def history(self, *later: dict) -> list[dict]:
        """The conversation as it is sent, with `later` messages that are not journalled.

        user "a", runtime "It is Monday"           user "It is Monday\\n\\na"
        assistant "Well", cut "it was stopped"  →  assistant "Well"
        user "b"                                   user "[the answer above broke off: …]\\n\\nb"
        """
        sent = self.summary_messages()
        before: dict = {}
        for message in [*self.conversation(), *later]:
            if not before and message["role"] != "user":
                continue  # the rest of a turn whose question cannot be read
            sent.append(as_sent(message, self.gap_behind(before)))
            before = message
        if before.get("cut"):  # `/continue`
            request = f"{self.gap_behind(before)} Go on where it stops."
            sent.append({"role": "user", "content": request})
        return sent

    def summary_messages(self) -> list[dict]:
        """The message that stands for the saved part of the conversation, if there is one."""
        if not self.summary or self.saved <= self.start:
            return []
        content = f"[Summary of the earlier part of this conversation]\n\n{self.summary}"
        return [{"role": "user", "content": content, "is_summary": True}]

    def without_saved(self, messages: list[dict]) -> list[dict]:
        """A request after a part of its messages went into the memory."""
        kept = [m for m in messages if "is_summary" not in m]
        kept = [m for m in kept if m.get("n", self.saved + 1) > self.saved]
        system = [m for m in kept[:1] if m["role"] == "system"]
        return [*system, *self.summary_messages(), *kept[len(system) :]]

    def gap_behind(self, message: dict) -> str:
        """A note if an answer is missing or broke off. The next user message begins with it: models
        repeat what seems to be their own words, so it is in no assistant message."""
        if message.get("cut"):
            return f"[the answer above broke off: {message['cut']}]"
        if why := self.ended.get(message.get("n", 0)):
            return f"[the message above was not answered: {why}]"
        return ""

    @property
    def unfinished(self) -> bool:
        """Is there anything that `/continue` could go on with?"""
        last = self.messages[-1] if self.messages else {"n": 0}
        return last["n"] > self.start and (not is_answer(last) or "cut" in last)

    @property
    def is_open(self) -> bool:
        """Was a turn begun that did not end? Then it runs now, or the program was killed in it."""
        return self.unfinished and self.last not in self.ended

    def end_open_turn(self, why: str) -> None:
        """After this no restart resumes the turn; `/continue` still goes on with it."""
        if self.is_open:
            self.mark("ended", why=why)

    def turn_ends(self) -> list[int]:
        """The numbers of the last messages of all turns but the newest. A conversation may be cut
        there and nowhere else: a call without its result makes a request invalid."""
        ends = []
        before: dict | None = None
        for message in self.messages:
            if before and message["role"] == "user":
                is_behind_new = before["n"] <= self.start < message["n"]
                if is_answer(before) or before["n"] in self.ended or is_behind_new:
                    ends.append(before["n"])
            before = message
        if before and before["n"] <= self.start:
            ends.append(before["n"])
        return ends


def is_answer(message: dict) -> bool:
    """Something for the user, which ends a turn: an assistant message without calls."""
    return message["role"] == "assistant" and not message.get("tool_calls")


OWN_KEYS = ("timestamp", "runtime", "cut", "id", "sender")  # of the journal, for no model


def as_sent(message: dict, gap: str) -> dict:
    """Keeps `n`, which tells what may leave a request; `LLMProvider.chat` sends no such key."""
    sent = {key: value for key, value in message.items() if key not in OWN_KEYS}
    notes = [note for note in (gap, message.get("runtime")) if note]
    if notes and message["role"] == "user":
        sent["content"] = "\n\n".join([*notes, as_text(message.get("content"))])
    return sent


# ---- The inbox: what waits for its turn ----


class Inbox:
    """Messages that wait for a session, in a file that is removed when it is empty. Anybody may
    write to it; the holder of the session's lock moves its lines into the journal.

    {"id": "502", "kind": "user", "sender": "Ada", "content": "And in b.txt?", "media": []}

    Kinds: user; command (`/new`, `/continue`); report (of a job or a helper, between turns).
    """

    def __init__(self, path: Path):
        self.path = path

    def append(self, line: dict) -> None:
        """Returns when the line survives a power cut; a line with a known id is left out."""
        with locked(self.path.with_suffix(".inbox.lock")):
            if line["id"] not in [known["id"] for known in self.read()]:
                append_lines(self.path, [line | {"timestamp": now()}])
                fsync(self.path)

    def read(self) -> list[dict]:
        return read_records(self.path, is_waiting)

    def remove(self, ids: set[str]) -> None:
        with locked(self.path.with_suffix(".inbox.lock")):
            rest = [to_json(line) + "\n" for line in self.read() if line["id"] not in ids]
            if rest:
                write_atomically(self.path, "".join(rest))
            else:
                self.path.unlink(missing_ok=True)


# ---- What fits the context window ----


class Governed:
    """The copy of a conversation that is sent, fitted into `budget` tokens. Each step takes away
    more, and only if it must. System prompt, task and whatever the user said stay.

    `notes` say what was left out: `8 of 11 turns, ~7,900 tokens, are left out`
    """

    def __init__(
        self, messages: list[dict], budget: float, counter: "TokenCounter",
        task: dict | None = None, beside: int = 0,
    ):  # fmt: skip
        self.messages = list(messages)
        self.budget = budget
        self.counter = counter
        self.task = task  # the message that this turn is about; default: the user's last one
        self.beside = beside  # tokens of the tools, which are a part of the request
        self.notes: list[str] = []
        if 4 * self.tokens > budget:  # near enough for an exact count
            counter.count_exactly_from_now_on()
        steps = [
            self.reduce_old_results, self.leave_out_oldest_turns,
            self.leave_out_oldest_steps, self.cut_last_results,
        ]  # fmt: skip
        for step in steps:
            if self.excess > 0:
                step(self.excess)

    @property
    def tokens(self) -> int:
        return self.counter.total(self.messages) + self.beside

    @property
    def excess(self) -> float:
        return self.tokens - self.budget

    def begin_of_turn(self) -> int:
        """The place of the task; the end of the messages if there is none."""
        users = [n for n, message in enumerate(self.messages) if message["role"] == "user"]
        tasks = [n for n in users if self.messages[n] is self.task]  # a hook may have taken it out
        return [len(self.messages), *users[-1:], *tasks][-1]

    def last_step(self) -> int:
        """The place of the last answer with calls: the model has not seen their results yet."""
        steps = [n for n, message in enumerate(self.messages) if message.get("tool_calls")]
        return [len(self.messages), *steps][-1]

    def reduce_old_results(self, excess: float) -> None:
        """Results that the model has seen become one line each, the oldest first."""
        count = 0
        for place, result in enumerate(self.messages[: self.last_step()]):
            size = len(as_text(result.get("content")))
            if excess <= 0 or result["role"] != "tool" or size < 500:
                continue  # a short one is not worth it
            text = f"[{size:,} characters that {result.get('name')} returned are left out here]"
            self.messages[place] = {**result, "content": text}
            excess -= self.counter.size(result) - self.counter.size(self.messages[place])
            count += 1
        if count:
            self.notes.append(f"{counted(count, 'old tool result')} sent as one line each")

    def leave_out_oldest_turns(self, excess: float) -> None:
        """A turn goes from a question to the next one. The summary goes last."""
        begin = self.begin_of_turn()
        heads = [n for n in range(begin) if is_head(self.messages[n])]
        first = heads[-1] + 1 if heads else 0
        questions = [n for n in range(first, begin) if self.messages[n]["role"] == "user"]
        end = first
        tokens = 0
        for following in [*questions[1:], begin]:
            if tokens < excess:
                tokens += self.counter.total(self.messages[end:following])
                end = following
        if tokens:
            gone = len([n for n in questions if n < end])
            turns = f"{gone} of {len(questions) + 1} turns"
            self.notes.append(f"{turns}, ~{tokens:,} tokens, are left out")
            del self.messages[first:end]
        if tokens < excess:
            self.messages = [message for message in self.messages if "is_summary" not in message]

    def leave_out_oldest_steps(self, excess: float) -> None:
        """Of this turn: answers with calls, their results and pictures."""
        begin, end = self.begin_of_turn(), self.last_step()
        steps = [n for n in range(begin + 1, end) if self.messages[n]["role"] == "assistant"]
        gone: set[int] = set()
        count = 0
        for step, following in pairwise([*steps, end]):
            if excess + 50 > 0:  # the note needs some room
                parts = [n for n in range(step, following) if not is_said(self.messages[n])]
                excess -= self.counter.total([self.messages[n] for n in parts])
                gone.update(parts)
                count += 1
        if count:
            kept = [message for n, message in enumerate(self.messages) if n not in gone]
            text = f"[{count} earlier steps of this turn are left out; what they did is done]"
            kept.insert(begin + 1, {"role": "user", "content": text})
            self.messages = kept
            self.notes.append(f"{counted(count, 'step')} of this turn left out")

    def cut_last_results(self, excess: float) -> None:
        """The last resort: pictures go, and the results share the room that is left."""
        begin = self.begin_of_turn()
        for n in range(begin + 1, len(self.messages)):
            self.messages[n] = without_images(self.messages[n])
        results = [n for n, message in enumerate(self.messages) if message["role"] == "tool"]
        room = self.counter.total([self.messages[n] for n in results]) - self.excess
        share = max(int(room) // max(len(results), 1) - 20, 0)  # 20 tokens for the note
        large = [n for n in results if self.counter.size(self.messages[n]) > share]
        for n in large:
            result = self.messages[n]
            kept = len(result["content"]) * share // (self.counter.size(result) + 1)
            note = f"[{len(result['content']) - kept:,} more characters are left out]"
            self.messages[n] = {**result, "content": f"{result['content'][:kept]}\n{note}"}
        if large:
            self.notes.append(f"{counted(len(large), 'tool result')} cut to ~{share:,} tokens")


# ---- Long-term memory: facts that are true, and the history of what was ----


class MemoryStore:
    """MEMORY.md, which people edit too, and the history, which only grows: memory/history.jsonl

    {"cursor": 42, "timestamp": "2026-04-03 00:02", "content": "The user planned a trip to Rome."}

    An entry of a conversation also says what it stands for: session, created_at, upto, summary.
    """

    def __init__(self, workspace: Path, read: Read | None = None):
        self.workspace = workspace
        self.read = read or read_regular_file
        self.folder = workspace / "memory"
        self.facts = self.folder / "MEMORY.md"
        self.history = self.folder / "history.jsonl"
        self.archive = self.folder / "history-archive.jsonl"
        self._entries: tuple[tuple, list[dict]] = ((), [])  # as of a size and time of the file

    def text_of(self, path: Path) -> str:
        """A file's text; "" if it is not there. Raises OSError if it may not be read."""
        try:
            return self.read(path).decode("utf-8-sig", errors="replace")
        except FileNotFoundError:
            return ""
        except ValueError as problem:
            raise OSError(f"{path} cannot be read: {problem}") from None

    def read_facts(self) -> str:
        return self.text_of(self.facts)

    def write_facts(self, text: str, instead_of: str) -> bool:
        """False if somebody else changed the file meanwhile: then it stays as it is. No answer of a
        model may empty MEMORY.md, or leave less than half of a long one."""
        with locked(self.folder / ".lock"):
            if self.read_facts() != instead_of:
                return False
            text = text.replace("\0", "").strip()  # git would take the file for binary
            before = instead_of.strip()
            if not text or (len(before) > 300 and len(text) < len(before) // 2):
                log.warning("MEMORY.md stays as it is: the new text is empty, or not half of it")
            elif text != before:
                write_atomically(self.facts, text + "\n")
            return True

    def entries(self) -> list[dict]:
        """All entries of the history, the oldest first. 1,000 take 5 ms: read again if changed."""
        stamp = self._stamp()
        if stamp != self._entries[0]:
            self._entries = (stamp, read_records(self.history, is_entry))
        return self._entries[1]

    def _stamp(self) -> tuple:
        there = self.history.exists()
        return (self.history.stat().st_size, self.history.stat().st_mtime_ns) if there else ()

    def append_history(self, *texts: str, **origin: Any) -> None:
        """Entries with the next cursors, in one write. A text may begin `[2026-04-03 00:02]`."""
        with locked(self.folder / ".lock"):
            known = self.entries()
            cursor = max([self.dream_cursor, *[entry["cursor"] for entry in known]])
            entries = []
            for number, text in enumerate(texts, cursor + 1):
                stamp = re.match(STAMP, text)
                moment = stamp[1] if stamp else time.strftime("%Y-%m-%d %H:%M")
                content = text[stamp.end() :] if stamp else text
                entry = {"cursor": number, "timestamp": moment, "content": content[:64_000]}
                entries.append(entry | origin)
            append_lines(self.history, entries)
            fsync(self.history)
            self._entries = (self._stamp(), [*known, *entries])  # not read again after each round

    def rounds(self, key: str, created_at: str) -> dict[int, str]:
        """What the history has of a session: the number up to which → the summary."""
        own = {"session": key, "created_at": created_at}.items()
        entries = [entry for entry in self.entries() if entry.items() >= own]
        uptos = [(entry.get("upto", entry.get("until")), entry) for entry in entries]
        return {
            upto: str(entry.get("summary") or entry["content"])
            for upto, entry in uptos
            if isinstance(upto, int)
        }

    @property
    def dream_cursor(self) -> int:
        """0 if the file is missing or damaged: then nothing counts as read by Dream."""
        path = self.folder / ".dream_cursor"
        digits = path.read_bytes().strip() if path.exists() else b""
        return int(digits) if re.fullmatch(rb"\d{1,18}", digits) else 0

    def unread(self) -> list[dict]:
        """The entries that Dream has not read, the oldest first."""
        dreamt = self.dream_cursor
        return [entry for entry in self.entries() if entry["cursor"] > dreamt]

    def recent_history(self, most: int = 4_000) -> list[str]:
        """`[2026-04-03 00:02] text` of the newest unread entries, at most so many characters."""
        lines: list[str] = []
        for entry in reversed(self.unread()[-50:]):
            line = f"[{entry['timestamp']}] {middle_out(entry['content'], most // 4)}"
            most -= len(line) + 1
            if most < 0:
                break
            lines.insert(0, line)
        return lines

    def archive_old(self, keep: int = 1_000) -> None:
        """Move the oldest entries that Dream has read to the archive, so that `keep` are left."""
        with locked(self.folder / ".lock"):
            entries = self.entries()
            dreamt = self.dream_cursor
            oldest = entries[: max(len(entries) - keep, 0)]
            old = [entry for entry in oldest if entry["cursor"] <= dreamt]
            if old:
                archived = read_records(self.archive, is_entry)  # a program may have been killed here
                append_lines(self.archive, [entry for entry in old if entry not in archived])
                rest = [to_json(entry) + "\n" for entry in entries if entry not in old]
                write_atomically(self.history, "".join(rest))


# ---- The Consolidator: from the journal into the history ----

TEXT = {"type": "string"}
SAVED = {
    "history_entry": TEXT | {"description": "2 to 5 sentences that begin [YYYY-MM-DD HH:MM]"},
    "memory_update": TEXT | {"description": "The whole new MEMORY.md, all lines, old and new"},
    "summary": TEXT | {"description": "What the conversation still needs, at most 400 words"},
}
PARAMETERS = {"type": "object", "properties": SAVED, "required": ["history_entry", "memory_update"]}
SAVE = {"name": "save_memory", "description": "Save what is worth keeping of a conversation."}
SAVE_MEMORY = {"type": "function", "function": SAVE | {"parameters": PARAMETERS}}


@dataclass
class Consolidator:
    """Moves the oldest whole turns of a session into the memory. One request is a round:

    messages 1 … 60  →  history.jsonl  {"cursor": 7, "content": "The user planned …", "upto": 60}
                        MEMORY.md      - Travels to Rome in May
                        the journal    {"mark": "saved", "upto": 60, "summary": "…"}
    """

    store: MemoryStore
    sessions: "SessionManager"
    ask: Ask
    prompt: str
    budget: int = 56_320  # tokens of a request
    window: int = 100  # messages of a session that may be unsaved
    counter: "TokenCounter" = field(default_factory=lambda: TokenCounter())
    one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def make_room(self, session: Session, tokens: int) -> int:
        """Before each request of a turn, which has so many tokens: if it would pass 80 % of the
        budget, move turns until half of it is used. Returns how many messages have moved."""
        if tokens <= 0.8 * self.budget:
            return 0
        excess = tokens - self.budget // 2
        ends = set(session.turn_ends())
        upto = 0
        for message in session.conversation():
            excess -= self.counter.size(message)
            if message["n"] in ends:
                upto = message["n"]
                if excess <= 0:
                    break
        return await self.move(session, upto)

    async def after_turn(self, session: Session) -> int:
        """In the background: move what `/new` dropped; if more messages than the window are
        unsaved, move turns until half the window is left. Returns how many have moved."""
        count = await self.move(session, session.start)
        unsaved = [message["n"] for message in session.conversation()]
        if len(unsaved) <= self.window:
            return count
        first = unsaved[-self.window // 2 :][0]
        ends = [end for end in session.turn_ends() if end < first] or session.turn_ends()[:1]
        return count + await self.move(session, max(ends, default=0))

    async def move(self, session: Session, upto: int) -> int:
        """Five rounds at most, as somebody may wait for the answer; the next turn goes on."""
        numbers = [message["n"] for message in session.messages]
        try:
            async with self.one_at_a_time:
                with locked(self.store.folder / ".round.lock", "Another program saves its memory."):
                    for _ in range(5):
                        if session.saved >= upto or not await self._round(session, upto):
                            break
        except SessionBusy as problem:
            log.info("%s", problem)
        return len([n for n in numbers if n <= session.saved])

    async def _round(self, session: Session, upto: int) -> bool:
        """Save as many turns as one request takes. False if the model cannot be reached: nothing
        is lost, the round waits. False, too, if another program wrote to the journal."""
        end, text = self._next_part(session, upto)
        saved = await self._save(session, text)
        if saved is None or session.size != file_size(session.path):
            return False
        entries, summary = saved
        with self.sessions.lock(session.key):  # no `await`: a cancellation cannot come in between
            # A kill can: then the session finds the entry, and marks it, when it is loaded.
            origin = {"session": session.key, "created_at": session.created_at}
            self.store.append_history(*entries, **origin, upto=end, summary=summary)
            session.mark("saved", upto=end, summary=summary)
        return True

    def _next_part(self, session: Session, upto: int) -> tuple[int, str]:
        """The number up to which the next round goes, and its conversation as text."""
        taken = estimate(self.prompt + self.store.read_facts() + session.summary) + 500
        room = max(self.budget // 2 - taken, self.budget // 8)
        if session.saved < session.start:
            upto = min(upto, session.start)  # what `/new` dropped is in no summary
        end, text = 0, ""
        for turn_end in session.turn_ends():
            part = [m for m in session.messages if m["n"] <= turn_end]
            longer = transcript(part, 2_000)
            if turn_end > upto or (end and estimate(longer) > room):
                break
            end, text = turn_end, longer
        part = [message for message in session.messages if message["n"] <= end]
        for most in (1_000, 300, 100):  # one turn alone may be longer than the room
            if estimate(text) > room:
                text = transcript(part, most)
        return end, fitted(text, room)

    async def _save(self, session: Session, text: str) -> tuple[list[str], str] | None:
        """The history entries and the summary that stand for a text; MEMORY.md is written. None if
        the model cannot be reached. If it is of no help, the text is kept as it is."""
        earlier = "\n\n".join(message["content"] for message in session.summary_messages())
        for _ in range(3):  # MEMORY.md may change while the model thinks, an answer may be cut
            facts = self.store.read_facts()
            question = f"# MEMORY.md\n\n{facts}\n\n# Conversation\n\n{earlier}\n\n{text}"
            response = await self.ask(request(self.prompt, question), [SAVE_MEMORY], None)
            if response.finish_reason == "error" and not response.is_overflow:
                return None
            if response.finish_reason in ("length", "content_filter"):
                continue
            saved = saved_by(response)
            if saved is None:
                break
            if self.store.write_facts(saved["memory_update"], facts):
                summary = saved.get("summary") or f"{session.summary}\n\n{saved['history_entry']}"
                return [saved["history_entry"]], str(summary).strip()[-4_000:]
        raw = [f"[RAW] {text[n : n + 16_000]}" for n in range(0, len(text), 16_000)]
        return raw, f"{earlier}\n\n{middle_out(text, 2_000)}".strip()[-4_000:]


def saved_by(response: Any) -> dict | None:
    """The arguments of a valid call of save_memory."""
    for call in response.tool_calls:
        match call.name, call.arguments:
            case "save_memory", {"history_entry": str(entry), "memory_update": str()}:
                entry = re.sub(THOUGHTS, "", entry).strip()
                if entry:
                    return call.arguments | {"history_entry": entry}
    return None


# ---- Dream: from the history into facts and skills ----

DREAM_FILES = ("memory/MEMORY.md", "SOUL.md", "USER.md")
# "- [MEMORY] Favourite colour: blue"
FINDING = r"(?m)^[\s*-]{0,20}(\[(?:USER|SOUL|MEMORY|SKILL)(?:-REMOVE)?\] {0,20}\S.*)$"
UNREACHABLE = "did not reach the model"


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
            batch = self._next_batch()
            if not batch:
                return "There is nothing new to dream about."
            repository = MemoryRepository(self.store.workspace)
            warning, _ = await asyncio.to_thread(repository.commit, "changes outside of dreams")
            outcome = await self._dream(batch)
            self.failures = self.failures + 1 if outcome == "failed" else 0
            if outcome != "completed" and self.failures < 3:
                return f"The dream {outcome}. Nothing is lost: the next one tries again."
            if self.failures:
                log.warning("three dreams about the same entries failed: these are skipped")
                self.failures = 0
            write_atomically(self.store.folder / ".dream_cursor", str(batch[-1]["cursor"]))
            self.store.archive_old()
            problem, changes = await asyncio.to_thread(repository.commit, "dream")
            dreamt = f"Dreamt about {counted(len(batch), 'entry', 'entries')}"
            note = problem or warning or f"{counted(changes, 'change')}. /dream-log shows them."
            return f"{dreamt}: {note}"

    async def _dream(self, batch: list[dict]) -> str:
        """Both phases, to an outcome: completed, failed, or did not reach the model."""
        response = await self.ask(self._what_happened(batch), [], None)
        if response.finish_reason == "error":
            return "failed" if response.is_overflow else UNREACHABLE
        answer = re.sub(THOUGHTS, "", response.content or "")
        findings = re.findall(FINDING, answer)
        if not findings:
            return "completed" if "[SKIP]" in answer else "failed"
        result = await self.run_agent(self._what_to_edit(findings), self.refuse)
        outcomes = {"completed": "completed", "error": UNREACHABLE}
        return outcomes.get(result.stop_reason, "failed")

    def _next_batch(self) -> list[dict]:
        """The oldest unread entries, as many as one request takes, at least one."""
        batch = self.store.unread()[: self.max_batch]
        while len(batch) > 1 and estimate(str(batch)) > self.budget // 2:
            batch.pop()
        return batch

    def _what_happened(self, batch: list[dict]) -> list[dict]:
        most = self.budget // 2
        lines = [f"[{entry['timestamp']}] {fitted(entry['content'], most)}" for entry in batch]
        today = time.strftime("Today is %Y-%m-%d, %A.")
        parts = [today, *self._files(), "# History", *lines]
        return request(self.find_prompt, "\n\n".join(parts))

    def _what_to_edit(self, findings: list[str]) -> list[dict]:
        skills = [skill for skill in self.skills.load() if not skill.problem]
        known = [f"- {skill.name}: {skill.description} ({skill.path})" for skill in skills]
        parts = ["# Findings", *findings, *self._files(), "# Skills", *known]
        return request(self.edit_prompt, "\n\n".join(parts))

    def _files(self) -> list[str]:
        """Path and text of the files that a dream may edit; those and a batch must fit."""
        paths = [self.store.workspace / name for name in DREAM_FILES]
        most = self.budget // 8
        return [f"# {path}\n\n{fitted(self.store.text_of(path), most)}" for path in paths]

    def refuse(self, name: str, arguments: dict) -> str:
        """Why a call must not run; "" if it may. What a dream reads may come from a stranger's page,
        and nobody watches it. `arguments` are those that the tool will get."""
        home = self.store.workspace.resolve()
        own, *kits = [folder.resolve() for folder in self.skills.folders]
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
                content = str(arguments.get("content", "")).encode(errors="replace")
                skill = skill_of(path, content)  # as it is loaded later
                names = {skill.name, path.relative_to(own).parts[0]}
                is_known = any((kit / name).exists() for kit in kits for name in names)
                if skill.always or is_known:
                    return "A skill may not be `always`, nor have the name of one of the kit's."
                return ""
        return f"Write only skills, like {own}/NAME/SKILL.md."


# ======== Second reading: damage, files and locks, sizes, git, skills ========

# ---- Reading what is left of a file of JSON lines ----
# Seen: 4,096 zero bytes at the end after a power cut, half a line after a full disk, a `NaN` that
# made every later request invalid. Such a line is skipped, and kept in a file beside.


def read_records(path: Path, is_valid: Callable[[dict], bool]) -> list[dict]:
    """The valid records of a file, in order; the other lines are put into `*.corrupt`, each once."""
    raw = path.read_bytes() if path.exists() else b""
    records, damaged = [], []
    for line in raw.split(b"\n"):  # not splitlines(): U+2028 and \x85 are ordinary text here
        record = parse(line)
        if record is not None and is_valid(record):
            records.append(record)
        elif line.strip(b"\0 \t\r"):
            damaged.append(line)
    if damaged:
        keep_damaged(path, damaged)
    return records


def parse(line: bytes) -> dict | None:
    try:
        text = line.decode("utf-8", errors="surrogatepass")
        record = json.loads(text, parse_constant=int)  # no NaN: int("NaN") is a ValueError
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def keep_damaged(path: Path, damaged: list[bytes]) -> None:
    aside = path.with_name(f"{path.name}.corrupt")
    known = aside.read_bytes().split(b"\n") if aside.exists() else []
    lines = [line + b"\n" for line in damaged if line not in known]
    if lines:
        skipped = counted(len(lines), "unreadable line")
        log.warning("%s: %s skipped, kept in %s", path, skipped, aside.name)
        with open_private(aside) as file:
            file.write(b"".join(lines))


def is_entry(record: dict) -> bool:
    """Of the history."""
    texts = (record.get("timestamp"), record.get("content"))
    cursor = record.get("cursor")
    return all(isinstance(text, str) for text in texts) and type(cursor) is int and cursor > 0


def is_waiting(record: dict) -> bool:
    """Of an inbox."""
    return all(isinstance(record.get(key), str) for key in ("id", "kind", "content"))


def is_journal_line(record: dict) -> bool:
    """A mark, or a message of the shape that a request takes."""
    if "mark" in record or record.get("_type") == "metadata":
        return True
    content, calls = record.get("content"), record.get("tool_calls", [])
    texts = [record.get(key, "") for key in ("tool_call_id", "id", "runtime", "cut", "timestamp")]
    functions = [call.get("function", {}) for call in calls] if are_dicts(calls) else [None]
    return (
        isinstance(record.get("role"), str)
        and all(isinstance(text, str) for text in texts)
        and isinstance(record.get("n", 1), int)
        and (content is None or isinstance(content, str) or are_dicts(content))
        and (calls is None or are_dicts(functions))
        and ("content" in record or bool(calls))
    )


def are_dicts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, dict) for value in values)


def journal_lines(path: Path) -> list[dict]:
    """The lines of a journal, in today's format whatever wrote it. A file in which nothing can be
    read is moved aside."""
    lines = read_records(path, is_journal_line)
    if not lines and path.exists() and path.read_bytes().strip():
        aside = path.with_name(f"{path.name}.corrupt-{time.time_ns()}")
        os.replace(path, aside)
        log.warning("%s is not readable: moved to %s, the session starts anew", path, aside)
    firsts = [place for place, line in enumerate(lines) if "mark" in line or "n" in line]
    begin = firsts[0] if firsts else len(lines)  # today's lines are behind those of older versions
    return in_order([*numbered(lines[:begin]), *lines[begin:]])


def in_order(lines: list[dict]) -> list[dict]:
    """A number that is not between those of its neighbours is damaged: it becomes the next one.
    Else `/new` behind it would hide what comes later."""
    messages = [line for line in lines if "role" in line]
    before = 0
    for message, following in pairwise([*messages, {"n": 10**18}]):
        if not before < message.get("n", 0) < max(following.get("n", 0), before + 2):
            message["n"] = before + 1
        before = message["n"]
    return lines


def numbered(lines: list[dict]) -> list[dict]:
    """A journal of an older version as marks and numbered messages: counts of lines become numbers.
    Where it does not say what was delivered, everything was; nothing of it is resumed.

    {"_type": "metadata", "start": 2, "last_consolidated": 1, "metadata": {"delivered": 4}}, messages
    →  messages 1 … 4, {"mark": "new", "upto": 2}, {"mark": "saved", "upto": 1}, …
    """
    if not lines:
        return []
    state: dict = {}
    messages: list[dict] = []
    for line in lines:
        if line.get("_type") == "metadata":
            state |= line
        elif line.get("cut") and not line.get("content"):  # a turn without a word of its answer
            messages.append({"mark": "ended", "why": line["cut"]})
        else:
            messages.append({"n": len(messages) + 1} | line)
    details = state.get("metadata")
    details = details if isinstance(details, dict) else {}
    return [
        {"mark": "session", "created_at": state.get("created_at")},
        *messages,
        {"mark": "delivered", "upto": details.get("delivered", len(messages))},
        {"mark": "ended", "why": "interrupted"},
        {"mark": "new", "upto": as_count(state.get("start"))},
        {"mark": "saved", "upto": as_count(state.get("last_consolidated"))},
    ]


def as_count(value: Any) -> int:
    return max(value, 0) if isinstance(value, int) else 0


# ---- Files: writing that survives a full disk, a kill and a power cut; locks ----


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def stamped(line: dict) -> dict:
    return line | {"timestamp": line.get("timestamp") or now()}


def as_journalled(message: dict) -> dict:
    """What the journal keeps: of images only the line that names them, never their bytes."""
    return message if isinstance(message.get("content"), str) else without_images(message)


def without_images(message: dict) -> dict:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = [block.get("text", "") for block in content if block.get("type") == "text"]
    return {**message, "content": "\n".join(texts) or "[image]"}


def append_lines(path: Path, records: list[dict]) -> None:
    """In one write; if it fails, nothing of them stays. Raises OSError with the file's name."""
    texts = [to_json(record) + "\n" for record in records]
    data = "".join(texts).encode("utf-8", errors="replace")  # a lone surrogate becomes `?`
    with open_private(path) as file:
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(end - 1)
            data = data if file.read(1) == b"\n" else b"\n" + data  # behind a torn line
        try:
            while data:
                data = data[file.write(data) :]  # more than once only if the disk is full
        except OSError as problem:
            file.truncate(end)
            raise OSError(problem.errno, problem.strerror, str(path)) from None


def open_private(path: Path) -> Any:
    """Open a file to read and append to, without a buffer; only its owner may."""
    private = partial(os.open, mode=0o600)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return open(path, "a+b", buffering=0, opener=private)


def write_atomically(path: Path, text: str) -> None:
    """The old text or the new one, never half of it. A link stays a link, a mode stays."""
    path = path.resolve()
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.unlink(missing_ok=True)  # in a container a killed program had the same process id
        append_text(draft, text)
        if path.exists():
            shutil.copymode(path, draft)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    fsync(path)


def append_text(path: Path, text: str) -> None:
    with open_private(path) as file:
        data = text.encode("utf-8", errors="replace")
        while data:
            data = data[file.write(data) :]
        os.fsync(file.fileno())


def fsync(path: Path) -> None:
    """Bring a file and its name to the disk."""
    with open(path, "r+b") as file:  # Windows syncs nothing that is open to read only
        os.fsync(file.fileno())
    with contextlib.suppress(OSError):  # not every system can sync a folder
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def file_size(path: Path) -> int:
    """0 if there is no such file."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def read_regular_file(path: Path, most: int = 100_000) -> bytes:
    """At most so many bytes. Raises OSError; ValueError if it is too large, a FIFO or a device."""
    without_waiting = getattr(os, "O_NONBLOCK", 0)  # for somebody who writes into a FIFO
    descriptor = os.open(path, os.O_RDONLY | without_waiting)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("it is no regular file but a directory, FIFO or device")
    with open(descriptor, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return data


class SessionBusy(Exception):
    """Another program holds what only one may hold."""


@contextlib.contextmanager
def locked(path: Path, busy: str = "") -> Iterator[None]:
    """Hold a lock against other programs: wait for it, or raise SessionBusy with the text `busy`.
    The system releases it when the program dies. The files to protect are opened behind it."""
    with open_private(path) as file:
        try:
            lock_file(file, wait=not busy)
        except BlockingIOError:
            raise SessionBusy(busy) from None
        yield  # closing the file releases the lock


def lock_file(file: Any, *, wait: bool) -> None:
    try:
        import fcntl
    except ImportError:
        lock_on_windows(file, wait=wait)
        return
    fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


def lock_on_windows(file: Any, *, wait: bool) -> None:
    import msvcrt

    while True:
        try:
            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            return
        except OSError:
            if not wait:
                raise BlockingIOError from None
            time.sleep(0.05)


# ---- The sessions of a workspace ----


class SessionManager:
    """`sessions/<encoded key>.jsonl` and `.inbox`; the 64 sessions used last stay in memory.

    `rounds(key, created_at)` is what the history has of a session (`MemoryStore.rounds`).
    """

    def __init__(
        self, workspace: Path, rounds: Callable[[str, str], dict[int, str]] = lambda *_: {}
    ):
        self.folder = workspace / "sessions"
        self.rounds = rounds
        self._cache: dict[str, Session] = {}  # the one used last stands last
        self._held: set[str] = set()

    def path(self, key: str) -> Path:
        """A file name that decodes to the key: `telegram:a_b` → `telegram%3Aa_b.jsonl`. A journal of
        the first format goes on under its name: `cli:direct` → `cli_direct.jsonl`."""
        name = quote(key, " @+,=", errors="surrogatepass").replace(".", "%2E")
        path = self.folder / f"{name}.jsonl"
        first = self.folder / f"{key.replace(':', '_')}.jsonl"
        is_plain = re.fullmatch(r"[\w-]{1,80}", first.stem)
        if is_plain and not path.exists() and first.exists() and key_of(first) == key:
            return first
        return path

    def inbox(self, key: str) -> Inbox:
        return Inbox(self.path(key).with_suffix(".inbox"))

    def get(self, key: str) -> Session:
        """The session, read again if another program wrote to it. Raises OSError."""
        path = self.path(key)
        session = self._cache.pop(key, None)
        if session is None or session.size != file_size(path):
            session = self._load(key, path)
        self._cache[key] = session
        if len(self._cache) > 64:
            del self._cache[next(iter(self._cache))]
        return session

    def _load(self, key: str, path: Path) -> Session:
        """Read a journal. The history knows better than a damaged `saved` mark, or one that a
        killed program did not write."""
        session = Session(key, path)
        size = file_size(path)
        lines = journal_lines(path)
        starts = [line for line in lines if line.get("mark") == "session"]
        rounds = self.rounds(key, str(starts[0].get("created_at"))) if starts else {}
        for line in lines:
            if line.get("mark") != "saved" or not rounds or line.get("upto") in rounds:
                session.take(line)
        upto = max([n for n in rounds if n <= session.last], default=0)
        if upto > session.saved:
            session.take({"mark": "saved", "upto": upto, "summary": rounds[upto]})
        session.highest = max([session.highest, *rounds])
        session.size = session.synced_size = size if lines else 0
        return session

    def transcript(self, key: str) -> list[str]:
        """All messages of a journal, for people."""
        return [readable(line) for line in journal_lines(self.path(key)) if "role" in line]

    def list_keys(self) -> list[str]:
        """All session keys, also of those in which a message waits; the one used last first."""
        times: dict[str, float] = {}
        for path in [*self.folder.glob("*.jsonl"), *self.folder.glob("*.inbox")]:
            key = key_of(path)
            if key and path.exists():  # Emacs leaves links to nowhere
                times[key] = max(times.get(key, 0.0), path.stat().st_mtime)
        return sorted(times, key=times.__getitem__, reverse=True)

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Hold a session against other programs. Raises SessionBusy. A block without `await` may
        lie inside a turn of this program that holds it."""
        if key in self._held:
            yield
            return
        busy = f"Session {key} is in use by another program. Wait, or name another: -s."
        with locked(self.path(key).with_suffix(".lock"), busy):
            self._held.add(key)
            try:
                yield
            finally:
                self._held.discard(key)


def key_of(path: Path) -> str:
    """The session of a file: by its name, or what a journal of the first format says."""
    try:
        name = unquote(path.stem, errors="strict")
    except UnicodeDecodeError:
        return ""  # no name of ours
    if ":" in name or path.suffix != ".jsonl":
        return name
    with path.open("rb") as file:
        first = parse(file.readline()) or {}
    return str(first.get("key") or name.replace("_", ":", 1))


def readable(message: dict) -> str:
    """A message for people, whatever another program or an editor made of it:

    [2026-04-03T10:00:00+0200] assistant: calls read_file({"path": "a.txt"})
    """
    parts = [as_text(message.get("content"))]
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {}
        parts.append(f"calls {function.get('name')}({function.get('arguments')})")
    text = "\n".join(part for part in parts if part)
    stamp = f"[{message['timestamp']}] " if message.get("timestamp") else ""
    cut = f" [broke off: {message['cut']}]" if message.get("cut") else ""
    return f"{stamp}{message['role']}: {text}{cut}"


def as_text(content: Any) -> str:
    """Blocks, which only other programs write into a journal, as JSON."""
    if content is None or isinstance(content, str):
        return content or ""
    return to_json(content)


# ---- Sizes ----
# An exact count needs a vocabulary that comes over the network: 30 s if there is none.

LETTERS = string.ascii_lowercase.encode() + b" \n"
CAPITALS = string.ascii_uppercase.encode()
DIGITS = string.digits.encode()
ASCII = bytes(range(128))


def estimate(text: str) -> int:
    """Tokens, 0.6 to 2.4 times the true number: of prose, where a token is five letters, as of data,
    where it is one or two characters."""
    data = text.encode("utf-8", errors="replace")

    def count(characters: bytes) -> int:
        return len(data) - len(data.translate(None, characters))

    letters, capitals, digits = count(LETTERS), count(CAPITALS), count(DIGITS)
    foreign = len(data) - count(ASCII)  # bytes of letters that are not ASCII
    rest = len(data) - letters - capitals - digits - foreign
    return int(letters / 5 + capitals / 1.3 + digits / 1.8 + rest / 1.7 + foreign / 4.5) + 1


class TokenCounter:
    """Sizes in tokens: estimated until `load() -> count` is there, each text measured once."""

    def __init__(self, load: Callable[[], Callable[[str], int]] | None = None):
        self._load: Callable | None = load or load_vocabulary
        self._count = lru_cache(maxsize=1_000)(estimate)

    def size(self, message: dict) -> int:
        """Of a message or a tool's definition, as it is sent. An image counts as 1,000."""
        images = 0
        texts = [as_text(message.get("role", ""))]
        content = message.get("content")
        blocks = content if isinstance(content, list) else [{"text": as_text(content)}]
        for block in blocks:
            is_image = block.get("type") == "image_url"
            images += 1_000 if is_image else 0
            texts.append("" if is_image else as_text(block.get("text", "")))
        for call in message.get("tool_calls") or []:
            texts.append(to_json(call))
        return images + 4 + sum(self._count(text) for text in texts if text)

    def total(self, messages: list[dict]) -> int:
        return sum(map(self.size, messages))

    def size_of_tools(self, definitions: list[dict]) -> int:
        return self._count(to_json(definitions)) if definitions else 0

    def count_exactly_from_now_on(self) -> None:
        """As soon as the vocabulary is there: it comes in the background, however long it takes."""
        if self._load:
            threading.Thread(target=self._fetch, args=(self._load,), daemon=True).start()
        self._load = None

    def _fetch(self, load: Callable) -> None:
        try:
            self._count = lru_cache(maxsize=1_000)(load())
        except Exception as problem:  # no network, no tiktoken: the estimate is good enough
            log.info("tokens are estimated: %s", problem)


def load_vocabulary() -> Callable[[str], int]:
    import tiktoken

    encode = tiktoken.get_encoding("o200k_base").encode_ordinary
    # in pieces: a long one of equal letters takes very long
    return lambda text: sum(len(encode(text[n : n + 2_000])) for n in range(0, len(text), 2_000))


def counted(count: int, one: str, several: str = "") -> str:
    """0 steps, 1 step, 2 steps; 2 entries"""
    return f"{count:,} {one}" if count == 1 else f"{count:,} {several or one + 's'}"


def newest(lines: list[str], most: int, file: str) -> list[str]:
    """The last lines in `most` tokens, and one before them that says where the rest is."""
    kept = len(lines)
    while kept and estimate("\n".join(lines[-kept:])) > most:
        kept = kept * 9 // 10
    note = f"[{len(lines) - kept} older lines are in {file}: grep it]"
    return lines if kept == len(lines) else [note, *lines[len(lines) - kept :]]


def fitted(text: str, most: int) -> str:
    """Shortened in its middle until it has at most so many tokens."""
    while estimate(text) > most and len(text) > 50:  # characters, or it shrinks no more
        text = middle_out(text, len(text) * 3 // 4)
    return text


def middle_out(text: str, most: int) -> str:
    """The beginning and the end, about `most` characters."""
    if len(text) <= most:
        return text
    return f"{text[: most * 2 // 3]} […] {text[-most // 3 :]}"


def is_head(message: dict) -> bool:
    return message["role"] == "system" or "is_summary" in message


def is_said(message: dict) -> bool:
    """By the user; pictures that a tool gave are a user message of blocks, too."""
    is_text = isinstance(message.get("content"), str)
    return message["role"] == "user" and (is_text or "is_said" in message)


def transcript(messages: list[dict], most: int) -> str:
    """A conversation as a model reads it, each message of at most so many characters."""
    return "\n".join(middle_out(readable(message), most) for message in messages)


def request(system: str, text: str) -> list[dict]:
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


# "<think>The user wants …</think>"
THOUGHTS = r"(?s)\s{0,100}<think>.*?(</think>|\Z)"
# "[2026-04-03 00:02] The user planned a trip."
STAMP = r"\s{0,100}\[(\d{4}-\d\d-\d\d \d\d:\d\d)\]\s{0,100}"


# ---- What was dreamt can be looked at and undone ----
# A repository of its own, and not named `.git`: one of the user's around the workspace would take
# it for a submodule, and the user's settings (hooks, signatures) are not meant for it.


class MemoryRepository:
    """Facts, history and skills under git, in `.nanobot/memory.git`; without git no commits."""

    facts = (*DREAM_FILES, "skills")
    history = ("memory/history.jsonl", "memory/history-archive.jsonl")
    attributes = "* !text !eol !diff !filter !ident !working-tree-encoding\n"  # none of the user's

    def __init__(self, workspace: Path):
        self.workspace = workspace
        self.folder = workspace / ".nanobot" / "memory.git"

    def git(self, *arguments: str, text: str = "", why: str = "") -> str:
        """Raises OSError with what git says, or with `why`."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        own |= {"GIT_DIR": ".nanobot/memory.git", "GIT_WORK_TREE": ".", "LC_ALL": "C"}
        own |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}
        me = ["-c", "user.name=nanobot", "-c", "user.email=nanobot@localhost"]
        done = subprocess.run(
            ["git", *me, "-c", "gc.autoDetach=false", *arguments],
            input=text.encode(errors="surrogateescape"), capture_output=True,
            cwd=self.workspace, env=own,
        )  # fmt: skip
        if done.returncode:
            problem = done.stderr.decode(errors="replace").strip()
            log.info("git %s: %s", arguments[0], problem)
            raise OSError(why or problem)
        return done.stdout.decode(errors="surrogateescape")  # a patch comes back byte for byte

    def commit(self, subject: str) -> tuple[str, int]:
        """A problem to tell the user ("" if all is well), and how many lines have changed since the
        last commit. A broken repository is put aside and a new one begun."""
        if not shutil.which("git"):
            return "there is no git, so it cannot be looked at or undone.", 0
        try:
            return "", self._commit(subject)
        except OSError as first:
            aside = self.folder.with_name(f"memory.git.broken-{time.time_ns()}")
            problem = f"the memory's repository is broken ({str(first)[:200]}), a new one begins"
            try:
                if self.folder.exists():
                    os.replace(self.folder, aside)
                    problem += f"; the old one is {aside}"
                self._commit("a new beginning")
            except OSError as second:
                problem = f"the memory is not under git: {second}"
            log.warning("%s", problem)
            return f"{problem}.", 0

    def _commit(self, subject: str) -> int:
        attributes = self.folder / "info" / "attributes"
        if not attributes.exists():  # the last thing that is made
            self.folder.parent.mkdir(exist_ok=True)
            self.git("init", "-q")
            write_atomically(attributes, self.attributes)
        for lock in self.folder.glob("**/*.lock"):  # of a git that was killed
            lock.unlink()
        there = [name for name in self.facts + self.history if (self.workspace / name).exists()]
        for option, name in [("-u", "."), *(("-f", name) for name in there)]:
            try:
                self.git("add", option, "--ignore-errors", "--", name)
            except OSError as problem:  # it cannot be read, lies behind a link, or is a repository
                log.warning("not under git: %s", problem)
        diff = self.git("diff", "--cached", "-U0", "--no-renames", "--", *self.facts)
        hunks = re.findall(r"(?m)^@@ .*\n((?:[-+\\].*\n)+)", diff)  # a `--- a` may be a line, too
        lines = [line for line in "".join(hunks).split("\n") if line[:1] in ("-", "+")]
        if lines:
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
                with self._modes_kept():
                    self.git("apply", "-R", "--whitespace=nowarn", text=patch, why=why)
                return f"Undone: {counted(self._commit(f'restore of {commit[:7]}'), 'change')}."
        except (OSError, SessionBusy) as problem:
            return f"Nothing is changed: {problem}"

    @contextlib.contextmanager
    def _modes_kept(self) -> Iterator[None]:
        """git writes each file anew, readable for all."""
        files = [self.workspace / name for name in DREAM_FILES]
        files += (self.workspace / "skills").glob("*/*")
        modes = {path: path.stat().st_mode for path in files if path.is_file()}
        yield
        for path, mode in modes.items():
            if path.exists():
                path.chmod(stat.S_IMODE(mode))

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
# They are files that anybody may have put there: one that is a FIFO, a link to a device or 100 MB
# long is left out, with a line that names it.


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


class SkillsLoader:
    """Skills of the workspace and of the kit; one of the workspace shadows the kit's of its name."""

    def __init__(self, *folders: Path, read: Read = read_regular_file):
        self.folders = folders  # the first one wins
        self.read = read
        self._warned: set[tuple[Path, str]] = set()

    def load(self) -> list[Skill]:
        """All of them, by name, the broken ones too: look at `problem`."""
        paths: dict[str, Path] = {}
        for folder in reversed(self.folders):
            paths |= {path.parent.name: path for path in folder.glob("*/SKILL.md")}
        skills = [self._read(paths[name]) for name in sorted(paths)]
        for skill in skills:
            if skill.problem and (skill.path, skill.problem) not in self._warned:
                self._warned.add((skill.path, skill.problem))
                log.warning("%s is left out: %s", skill.path, skill.problem)
        return skills

    def _read(self, path: Path) -> Skill:
        try:
            return skill_of(path, self.read(path))
        except Exception as problem:  # whatever it is: one bad skill must not end every turn
            return Skill(path.parent.name, path, problem=str(problem) or type(problem).__name__)


# "---\nname: weather\n---\n"
FRONT_MATTER = r"(?s)---[ \t]{0,20}\n(.*?)(?<=\n)---[ \t]{0,20}(?:\n|\Z)"


def skill_of(path: Path, data: bytes) -> Skill:
    """The skill in a file's bytes. Front matter is YAML between two `---`; any part may be missing."""
    text = data.decode("utf-8-sig", errors="replace").replace("\r\n", "\n")
    front = re.match(FRONT_MATTER, text)
    fields = parse_yaml(front[1].split("\n")) if front else {}
    fields = fields if isinstance(fields, dict) else {}
    skill = Skill(str(fields.get("name") or path.parent.name), path)
    skill.description = str(fields.get("description") or "")
    skill.text = text[front.end() if front else 0 :].strip()
    skill.always = str(fields.get("always", "")).lower() in ("true", "yes")
    requires = requirements_of(fields, path)
    skill.missing = [f"program {name}" for name in requires.get("bins", []) if not shutil.which(name)]
    variables = [name for name in requires.get("env", []) if not os.getenv(name)]
    skill.missing += [f"environment variable {name}" for name in variables]
    return skill


def requirements_of(fields: dict, path: Path) -> dict[str, list[str]]:
    """{"bins": ["gh"], "env": ["KEY"]}, of `metadata: {"nanobot": {"requires": …}}` or `requires:`"""
    match fields.get("metadata"):
        case {"nanobot": {"requires": requires}}:
            pass
        case None | dict():
            requires = fields.get("requires")
        case _:
            requires = "not JSON"
    if not requires:
        return {}
    match requires:
        case {"bins": [*_]} | {"env": [*_]}:
            return {name: [str(item) for item in items or []] for name, items in requires.items()}
    log.warning("%s: metadata is not the JSON or YAML that is expected", path)
    return {}


KEY = r"\s{0,200}([\w-]{1,100}):(?:\s|$)"  # "description: Use for …"


def parse_yaml(lines: list[str]) -> Any:
    """The part of YAML that skills use: keys, nested by indentation; lists; texts in quotes, behind
    `>` or `|`, or over several lines; JSON. What it does not know is a text."""
    lines = [line for line in lines if line.strip()]
    if lines and lines[0].lstrip().startswith("- "):
        return [scalar(line.strip().removeprefix("- ")) for line in lines]
    if not lines or not re.match(KEY, lines[0]):
        return scalar(" ".join(line.strip() for line in lines))
    fields: dict[str, Any] = {}
    keys = [n for n, line in enumerate(lines) if depth(line) == depth(lines[0])]
    keys = [n for n in keys if re.match(KEY, lines[n])]
    for n, following in pairwise([*keys, len(lines)]):
        key = re.match(KEY, lines[n])
        value = lines[n][key.end() :].strip()
        block = lines[n + 1 : following]
        if value.rstrip("+-") in (">", "|"):
            fields[key[1]] = " ".join(line.strip() for line in block)
        elif value:
            fields[key[1]] = scalar(" ".join([value, *(line.strip() for line in block)]))
        else:
            fields[key[1]] = parse_yaml(block)
    return fields


def depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def scalar(text: str) -> Any:
    """`{"a": 1}` → a dict, `[gh, "curl"]` → a list, `"Use: now"` and `yes  # note` → texts"""
    if text.startswith(("{", "[")):
        try:
            return json.JSONDecoder().raw_decode(text)[0]
        except (ValueError, RecursionError):
            items = re.sub(r"\s#.*", "", text).strip().strip("[]").split(",")
            return [item.strip(" \"'") for item in items] if text.startswith("[") else text
    if quoted := re.match(r"([\"'])(.*)\1", text):
        return quoted[2]
    return re.sub(r"\s#.*", "", text).strip()
