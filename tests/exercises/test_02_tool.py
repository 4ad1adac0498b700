"""★ A tool from a function

Goal: make `convert` a tool that the model can call: kilometres to miles and back. The model must see from the schema alone
      that `to` is "mi" or "km", that both arguments are needed, and what the tool is for.
Read: tools.py:tool, tools.py:signature_schema, tools.py:ToolRegistry.execute
Hint: the docstring becomes the description. Literal["mi", "km"] becomes an enum. One mile is 1.609344 km. A tool that only
      reads may run beside others: @tool(read_only=True).
"""

import asyncio

from grading import check, exercise

from tools import Tool, ToolRegistry


def test_the_tool():
    convert = exercise("02_tool", "convert")
    check(isinstance(convert, Tool), "`convert` under @tool", convert, "tools.py:tool")
    schema = convert.to_schema()["function"]
    fields, look = schema["parameters"]["properties"], "tools.py:signature_schema"
    check(
        len(schema["description"]) > 15,
        "a docstring that says what the tool is for",
        schema["description"],
        look,
    )
    check(
        fields["distance"].get("type") == "number",
        "`distance: float` in the signature",
        fields["distance"],
        look,
    )
    check(
        sorted(fields["to"].get("enum", [])) == ["km", "mi"],
        'to: Literal["mi", "km"]',
        fields["to"],
        look,
    )
    check(
        sorted(schema["parameters"].get("required", [])) == ["distance", "to"],
        "both arguments required",
        schema,
        look,
    )
    check(
        convert.read_only,
        "@tool(read_only=True): it changes nothing",
        "read_only=False",
        "tools.py:Tool",
    )

    def run(**arguments):
        return asyncio.run(ToolRegistry([convert]).execute("convert", arguments))

    for arguments, right in [
        ({"distance": "26.2", "to": "km"}, 42.16),
        ({"distance": 10, "to": "mi"}, 6.21),
    ]:
        text = run(**arguments).text
        numbers = [
            word for word in text.replace(",", "").split() if word.replace(".", "", 1).isdigit()
        ]
        close = any(abs(float(number) - right) < 0.01 for number in numbers)
        check(close, f"{arguments} → about {right}", text, "the formula: miles × 1.609344 = km")
    check(
        run(distance=1, to="yards").is_error,
        "a call with to=yards is refused before it runs",
        "it ran",
        look,
    )
