"""★★ An MCP server in twenty lines

Goal: make this file an MCP server with one tool, `roll`: a throw of a die with so many sides (6 if none are given). A die with
      fewer than 2 sides is an error.
Read: README.md "MCP servers", tools.py:MCPServer, tests/mcp_server.py
Hint: the package `mcp` (pip install "mcp>=2.3") has `from mcp.server import MCPServer`; a function under @server.tool() is a
      tool; server.run("stdio") serves. An exception that the function raises becomes an error for the model.
"""

import asyncio
import importlib.util
import sys

from grading import check, check_begun, file_of, settings

from nanobot import AgentLoop

LOOK = "tools.py:MCPServer"


async def use(folder, file):
    """What the agent gets of the server: schemas, and the results of three calls."""
    config = settings(
        folder, tools={"mcpServers": {"mine": {"command": sys.executable, "args": [str(file)]}}}
    )
    loop = AgentLoop(config)
    try:
        await loop.mcp.connect(15)
        names = {
            tool["function"]["name"]: tool["function"] for tool in loop.tools.get_definitions()
        }
        name = next((name for name in names if name.endswith("roll")), "")
        rolls = (
            [await loop.tools.execute(name, each) for each in ({}, {"sides": 20}, {"sides": 0})]
            if name
            else []
        )
        return names.get(name), rolls
    finally:
        await loop.close()


def test_the_server(folder):
    file = file_of("09_mcp")
    check_begun(file)
    check(
        bool(importlib.util.find_spec("mcp")),
        'the package mcp: pip install "mcp>=2.3"',
        "it is not installed",
    )
    schema, rolls = asyncio.run(use(folder, file))
    check(
        schema is not None,
        "a server that starts and offers a tool named roll",
        f"try: python {file.name}",
        LOOK,
    )
    field = schema["parameters"]["properties"].get("sides", {})
    check(field.get("type") == "integer", "a parameter `sides: int`", field, "tests/mcp_server.py")
    numbers = [int("".join(filter(str.isdigit, roll.text)) or 0) for roll in rolls[:2]]
    check(1 <= numbers[0] <= 6, "roll() gives a number from 1 to 6", rolls[0].text, LOOK)
    check(1 <= numbers[1] <= 20, "roll(sides=20) gives a number from 1 to 20", rolls[1].text, LOOK)
    check(
        rolls[2].is_error,
        "roll(sides=0) is an error",
        rolls[2].text,
        "raise ValueError in the function",
    )
