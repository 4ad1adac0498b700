"""The test of the project: it takes part in the class's agent if this passes."""

import asyncio

from tool import roll
from tools import ToolRegistry


def call(**arguments):
    return asyncio.run(ToolRegistry([roll]).execute("roll", arguments))


def test_a_die_has_the_sides_that_were_asked_for():
    assert {call(sides=2).text for _ in range(50)} == {"1", "2"}


def test_a_die_with_one_side_is_an_error():
    assert call(sides=1).is_error
