"""A real MCP server, made with the official SDK: `mcp_server.py [stdio | sse | streamable-http PORT]`.

With PID_FILE in the environment it writes its id there, and WAITING_FILE when `wait` is called; `mute` is silent.
"""

import asyncio
import os
import sys
from pathlib import Path

if "PID_FILE" in os.environ:
    Path(os.environ["PID_FILE"]).write_text(str(os.getpid()))
if sys.argv[1:] == ["mute"]:
    sys.stdin.read()
    sys.exit()

from mcp.server import MCPServer  # noqa: E402

server = MCPServer("test")


@server.tool()
def echo(text: str, times: int = 1) -> str:
    """Say it again."""
    return text * times


@server.tool()
def pid() -> str:
    return str(os.getpid())


@server.tool()
async def wait(seconds: float) -> str:
    if "WAITING_FILE" in os.environ:
        Path(os.environ["WAITING_FILE"]).touch()
    await asyncio.sleep(seconds)
    return "waited"


def dotted() -> str:
    return "dotted"


for name in ("a.b", "ä" + "x" * 100):
    server.tool(name=name)(dotted)


@server.resource("note://today", name="today")
def today() -> str:
    """What is to do."""
    return "buy milk"


@server.prompt()
def review(code: str, style: str = "") -> str:
    """Review code."""
    return f"Review this: {code}"


transport, *port = sys.argv[1:] or ["stdio"]
print("a line that has no business on the terminal", file=sys.stderr)
server.run(transport, **({"port": int(port[0])} if port else {}))
