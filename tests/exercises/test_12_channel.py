"""★★★ A folder as a channel

Goal: a channel without a network: whoever puts in/ada.txt into a folder finds the answer in out/ada.txt. The question's file is
      removed when the agent has the message on disk, and not before: a kill must not lose it.
Read: channels.py:Channel, channels.py:MessageBus, channels.py:InboundMessage, channels.py:CLI
Hint: `start` looks into the folder now and then (asyncio.sleep), and `await bus.publish(message)` returns when the message is
      safe. The name of the file is the chat_id. A message with a message_id is not taken twice.
"""

import asyncio
import contextlib

from grading import check, exercise, settings

from channels import InboundMessage, MessageBus, OutboundMessage
from nanobot import AgentLoop
from providers import LLMProvider, LLMResponse

LOOK = "channels.py:Channel"


class Echo(LLMProvider):
    model = "echo"

    async def answer(self, request):
        return LLMResponse(
            "You said: " + request.messages[-1]["content"].split("[/Runtime Context]")[-1].strip()
        )


class SlowBus(MessageBus):
    """Notes whether a question's file was still there while the message was not yet safe."""

    def __init__(self, folder):
        super().__init__()
        self.folder, self.was_there = folder, {}

    async def publish(self, message: InboundMessage):
        await asyncio.sleep(0.05)
        self.was_there[message.chat_id] = (self.folder / "in" / f"{message.chat_id}.txt").exists()
        await super().publish(message)


async def until(condition, seconds=3.0):
    for _ in range(int(seconds / 0.02)):
        if condition():
            return True
        await asyncio.sleep(0.02)
    return False


async def talk(folder, channel):
    loop, bus = AgentLoop(settings(folder), Echo()), SlowBus(folder)
    bus.open(channel)
    serving = asyncio.create_task(loop.run(bus))
    try:
        for name in ("ada", "bob"):
            (folder / "in" / f"{name}.txt").write_text(f"I am {name}", encoding="utf-8")
        answers = [folder / "out" / f"{name}.txt" for name in ("ada", "bob")]
        await until(
            lambda: all(file.exists() and file.read_text(encoding="utf-8") for file in answers)
        )
        gone = await until(lambda: not list((folder / "in").glob("*.txt")), 1.0)
        return bus.was_there, gone
    finally:
        await bus.close(0.1)
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        await loop.close()


def test_the_channel(folder):
    make = exercise("12_channel", "FolderChannel")
    for name in ("in", "out"):
        (folder / name).mkdir()
    channel = make(folder)
    asyncio.run(channel.send(OutboundMessage("folder", "test", "hello")))
    text = (
        (folder / "out" / "test.txt").read_text(encoding="utf-8")
        if (folder / "out" / "test.txt").exists()
        else "no file"
    )
    check(
        text.strip() == "hello", "`send` writes out/test.txt", text, "channels.py:OutboundMessage"
    )
    was_there, gone = asyncio.run(talk(folder, channel))
    check(
        set(was_there) == {"ada", "bob"},
        "`start` publishes both files; the chat_id is the file's name",
        was_there,
        LOOK,
    )
    for name in ("ada", "bob"):
        file = folder / "out" / f"{name}.txt"
        answer = file.read_text(encoding="utf-8") if file.exists() else "no file"
        check(
            f"You said: I am {name}" in answer,
            f"out/{name}.txt has the answer to {name}",
            answer,
            LOOK,
        )
    check(
        all(was_there.values()),
        "in/ada.txt stays until `publish` has returned",
        "it was removed before",
        "channels.py:MessageBus.publish",
    )
    check(gone, "files that were taken are removed", "they are still there", LOOK)
