"""★ A tool from a function

Goal: make `convert` a tool that the model can call: kilometres to miles and back. The model must see from the schema alone
      that `to` is "mi" or "km", that both arguments are needed, and what the tool is for.
Read: tools.py:tool, tools.py:signature_schema, tools.py:ToolRegistry.execute
Hint: the docstring becomes the description. Literal["mi", "km"] becomes an enum. One mile is 1.609344 km. A tool that only
      reads may run beside others: @tool(read_only=True).
"""


def convert(distance, to):
    raise NotImplementedError("make `convert` a tool in ex_02_tool.py")
