import asyncio

from channels import Channel, InboundMessage


class FolderChannel(Channel):
    name = "folder"

    def __init__(self, folder):
        super().__init__(["*"])
        self.folder = folder

    async def start(self, bus):
        while True:
            for file in sorted((self.folder / "in").glob("*.txt")):
                message = InboundMessage(
                    "folder", file.stem, file.stem, file.read_text(encoding="utf-8")
                )
                message.message_id = f"{file.stem}-{file.stat().st_mtime_ns}"
                file.unlink()
                await bus.publish(message)
            await asyncio.sleep(0.05)

    async def send(self, message):
        if message.kind == "final":
            (self.folder / "out" / f"{message.chat_id}.txt").write_text(
                message.content, encoding="utf-8"
            )
