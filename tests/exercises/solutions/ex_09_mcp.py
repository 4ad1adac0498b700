import random

from mcp.server import MCPServer

server = MCPServer("dice")


@server.tool()
def roll(sides: int = 6) -> int:
    """Throw a die."""
    if sides < 2:
        raise ValueError("a die has at least 2 sides")
    return random.randint(1, sides)


if __name__ == "__main__":
    server.run("stdio")
