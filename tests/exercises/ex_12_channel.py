"""★★★ A folder as a channel

Goal: a channel without a network: whoever puts in/ada.txt into a folder finds the answer in out/ada.txt. The question's file is
      removed when the agent has the message on disk, and not before: a kill must not lose it.
Read: channels.py:Channel, channels.py:MessageBus, channels.py:InboundMessage, channels.py:CLI
Hint: `start` looks into the folder now and then (asyncio.sleep), and `await bus.publish(message)` returns when the message is
      safe. The name of the file is the chat_id. A message with a message_id is not taken twice.
"""

from channels import Channel


class FolderChannel(Channel):
    name = "folder"

    def __init__(self, folder):
        super().__init__(["*"])
        self.folder = folder

    async def start(self, bus):
        raise NotImplementedError("write `start` in ex_12_channel.py")

    async def send(self, message):
        raise NotImplementedError("write `send` in ex_12_channel.py")
