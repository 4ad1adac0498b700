from typing import Literal

from tools import tool


@tool(read_only=True)
def convert(distance: float, to: Literal["mi", "km"]) -> str:
    """Convert a distance between kilometres and miles."""
    return f"{distance * 1.609344:.2f} mi" if to == "mi" else f"{distance / 1.609344:.2f} km"
