"""What tests of chats share: a model, a channel, a loop that serves it, a gate that holds up a tool."""

import asyncio
import itertools
import re
import time

import pytest

from channels import Channel, InboundMessage, MessageBus
from nanobot import AgentLoop
from providers import LLMProvider, LLMResponse, ToolCallRequest
from tools import Tool, tool

IDS = itertools.count(1)
DOWN = LLMResponse(finish_reason="error", error="the endpoint is down")


class Model(LLMProvider):
    """Answers by `talk(request)`, saves by `save(request)`: a reply or a function that gives one, which
    may be a coroutine. Keeps what it was asked."""

    model = "test"

    def __init__(self, talk="Fine.", save=DOWN):
        self.talk, self.save = talk, save
        self.asked, self.saves = [], []

    async def answer(self, request):
        is_save = any(each["function"]["name"] == "save_memory" for each in request.tools)
        (self.saves if is_save else self.asked).append(request)
        reply = self.save if is_save else self.talk
        reply = reply(request) if callable(reply) else reply
        reply = await reply if asyncio.iscoroutine(reply) else reply
        if isinstance(reply, ToolCallRequest):
            return LLMResponse(None, [reply], "tool_calls")
        if request.on_delta and isinstance(reply, LLMResponse) and reply.finish_reason == "error":
            await request.show(*(reply.content or "").split())
        return LLMResponse(reply) if isinstance(reply, str) else reply


def said(messages: list[dict]) -> list[str]:
    """The user's texts in a request, without what is told of time and place."""
    texts = [str(message["content"]) for message in messages if message["role"] == "user"]
    return [re.sub(r"(?s)\[Runtime Context.*?\[/Runtime Context\]\n\n", "", text) for text in texts]


class Desk(Channel):
    """A channel of the test: what was delivered is kept; while it is shut nothing arrives."""

    name = "desk"

    def __init__(self):
        super().__init__(["*"])
        self.sent, self.is_shut = [], False

    async def send(self, message):
        if self.is_shut:
            raise ConnectionError("shut")
        self.sent.append(message)


class Chats:
    """A loop that serves a bus with one channel, inside its `async with`: what a gateway does."""

    def __init__(self, loop: AgentLoop, desk: Desk | None = None):
        self.loop, self.model, self.desk = loop, loop.provider, desk or Desk()

    async def __aenter__(self):
        self.bus = MessageBus(
            lambda seconds: asyncio.sleep(seconds / 100)
        )  # nobody waits for pauses
        self.bus.open(self.desk)
        self.serving = asyncio.create_task(self.loop.run(self.bus))
        return self

    async def __aexit__(self, *_):
        self.serving.cancel()
        await asyncio.wait([self.serving])
        await self.bus.close(1.0)
        await self.loop.close(5.0)

    async def say(self, text: str, chat: str = "1", id_: str = "", speaker: str = "") -> None:
        id_ = id_ or f"m{next(IDS)}"
        await self.bus.publish(InboundMessage("desk", "7", chat, text, (), id_, speaker=speaker))

    def finals(self, chat: str = "1") -> list[str]:
        """The answers that arrived in a chat; an empty one only notes that a turn has ended."""
        finals = [
            event for event in self.desk.sent if event.kind == "final" and event.chat_id == chat
        ]
        return [event.content for event in finals if event.content]

    async def until(self, condition) -> None:
        patience = time.monotonic() + 20
        while not condition():
            await asyncio.sleep(0.001)
            if time.monotonic() > patience:
                pytest.fail(f"sent: {[event.content for event in self.desk.sent][-5:]}")

    async def answered(self, count: int = 1, chat: str = "1") -> None:
        await self.until(lambda: len(self.finals(chat)) >= count)

    async def at_rest(self, chat: str = "1") -> None:
        """Nothing waits, and all that was sent is noted."""
        session = self.session(chat)
        await self.until(lambda: not session.undelivered and not self.loop.turns.tasks)
        await self.loop.background.settled()

    def session(self, chat: str = "1"):
        return self.loop.sessions.get(f"desk:{chat}")

    def texts(self, chat: str = "1") -> list[str]:
        """What the journal of a chat holds."""
        return [line.get("content") for line in self.session(chat).messages]


def serve_chats(loop: AgentLoop, work) -> Chats:
    """Runs `work(chats)` while the bus is served, and ends as a gateway ends."""

    async def whole() -> Chats:
        async with Chats(loop) as chats:
            await work(chats)
            return chats

    return asyncio.run(whole())


class Gate:
    """A place in a script or a tool: the test learns that it was reached, and lets it go on."""

    def __init__(self):
        self.reached, self.open = asyncio.Event(), asyncio.Event()

    async def wait(self, reply: object = "done") -> object:
        self.reached.set()
        await self.open.wait()
        return reply


def waiting_tool(gate: Gate) -> Tool:
    async def slow() -> str:
        """Slow."""
        return await gate.wait()

    return tool(slow)
