"""One setting: its type, default, valid values and purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

INT_MAX = (1 << 31) - 1
LONG_MAX = (1 << 63) - 1

BOOLEAN, STRING, INT, LONG, DOUBLE, LIST = 1, 2, 3, 5, 6, 7
"""Kafka's numbers for the types of settings."""

Check = Callable[[str], Any]
"""Parses a text, or raises ValueError that says what a value must be."""


@dataclass(frozen=True, slots=True)
class Setting:
    default: str
    type: int
    check: Check
    text: str


def integer(low: int, high: int) -> Check:
    def check(text: str) -> int:
        try:
            value = int(text.replace("_", "x"))  # int() takes 1_000
        except ValueError:
            raise ValueError("must be a whole number") from None
        if not low <= value <= high:
            raise ValueError(f"must be between {low} and {high}")
        return value

    return check


def ratio(text: str) -> float:
    try:
        value = float(text.replace("_", "x"))
    except ValueError:
        raise ValueError("must be a number between 0 and 1") from None
    if not 0 <= value <= 1:
        raise ValueError("must be between 0 and 1")
    return value


def choice(*choices: str) -> Check:
    def check(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return text

    return check


def boolean(text: str) -> bool:
    """Ignores case, as Kafka does."""
    if text.strip().lower() not in ("true", "false"):
        raise ValueError("must be true or false")
    return text.strip().lower() == "true"
