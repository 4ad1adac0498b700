"""★★ An MCP server in twenty lines

Goal: make this file an MCP server with one tool, `roll`: a throw of a die with so many sides (6 if none are given). A die with
      fewer than 2 sides is an error.
Read: README.md "MCP servers", tools.py:MCPServer, tests/mcp_server.py
Hint: the package `mcp` (pip install "mcp>=2.3") has `from mcp.server import MCPServer`; a function under @server.tool() is a
      tool; server.run("stdio") serves. An exception that the function raises becomes an error for the model.
"""

raise NotImplementedError("write the server in ex_09_mcp.py")
