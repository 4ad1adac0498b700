"""A real MCP server, made with the official SDK: `mcp_server.py [stdio | sse | streamable-http PORT]`.

With PID_FILE in the environment it writes its process id there; WAITING_FILE is made when `wait` is called.
`mute` never answers.
"""

import asyncio
import base64
import os
import sys
from pathlib import Path

if "PID_FILE" in os.environ:
    Path(os.environ["PID_FILE"]).write_text(str(os.getpid()))
if sys.argv[1:] == ["mute"]:
    sys.stdin.read()
    sys.exit()

from mcp.server import MCPServer  # noqa: E402
from mcp_types import CallToolResult, ImageContent, ResourceLink, TextContent  # noqa: E402

server = MCPServer("test")
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(20)).decode()


@server.tool()
def echo(text: str, times: int = 1) -> str:
    """Say it again."""
    return text * times


@server.tool()
def pid() -> str:
    return str(os.getpid())


@server.tool()
def environment() -> str:
    return " ".join(sorted(os.environ))


@server.tool()
def boom() -> str:
    raise ValueError("boom")


@server.tool(structured_output=False)
def refuse() -> CallToolResult:
    return CallToolResult(content=[TextContent(text="no such city")], is_error=True)


@server.tool()
async def wait(seconds: float) -> str:
    if "WAITING_FILE" in os.environ:
        Path(os.environ["WAITING_FILE"]).touch()
    await asyncio.sleep(seconds)
    return "waited"


@server.tool(structured_output=False)
def big() -> str:
    return "x" * 3_000_000


@server.tool(structured_output=False)
def mixed() -> CallToolResult:
    image = ImageContent(data=PNG, mime_type="image/png")
    link = ResourceLink(name="log", uri="file:///log.txt", mime_type="text/plain")
    return CallToolResult(content=[TextContent(text="look:"), image, link])


@server.tool(structured_output=False)
def structured() -> CallToolResult:
    return CallToolResult(content=[], structured_content={"degrees": 21, "city": "Zürich"})


@server.tool(name="a.b")
def dotted() -> str:
    return "dotted"


@server.tool(name="ä" + "x" * 100)
def long() -> str:
    return "long"


@server.tool()
def die() -> str:
    print("no more memory\x1b[2J", file=sys.stderr, flush=True)
    os._exit(3)


@server.resource("note://today", name="today")
def today() -> str:
    """What is to do."""
    return "buy milk"


@server.prompt()
def review(code: str, style: str = "") -> str:
    """Review code."""
    return f"Review this: {code}"


if __name__ == "__main__":
    transport, *port = sys.argv[1:] or ["stdio"]
    print("a line that has no business on the terminal", file=sys.stderr)
    server.run(transport, **({"port": int(port[0])} if port else {}))
