"""One table of a pipeline's file during parsing: each key is requested by its type.

A mistake goes onto the list, with its line, and the result is the default, so that parsing goes on and finds the other
mistakes of the file as well. Mistakes show values only if they are not secret.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from millstream.pipeline.lines import KeyPath, Lines
from millstream.pipeline.mistakes import Mistake, closest

_UNITS = {
    "microsecond": 1e-6,
    "millisecond": 1e-3,
    "second": 1.0,
    "minute": 60.0,
    "hour": 3600.0,
    "day": 86_400.0,
    "week": 604_800.0,
}
Default = TypeVar("Default")
_DURATION = re.compile(rf"\s*(\d{{1,9}})\s+({'|'.join(_UNITS)})s?\b", re.IGNORECASE)


def seconds(text: str) -> float | None:
    """A duration in Spark's notation, `10 minutes` or `1 hour 30 minutes`; None if it is not one."""
    total, at = 0.0, 0
    while match := _DURATION.match(text, at):
        total += int(match[1]) * _UNITS[match[2].lower()]
        at = match.end()
    return total if at and not text[at:].strip() else None


class Keys:
    def __init__(
        self, table: Mapping[str, Any], place: KeyPath, title: str, lines: Lines, found: list[Mistake]
    ) -> None:
        self.place = place
        self.title = title
        self._table = table
        self._lines = lines
        self._found = found

    def __contains__(self, key: str) -> bool:
        return key in self._table

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def wrong(self, text: str, key: str | None = None) -> None:
        place = self.place if key is None else (*self.place, key)
        self._found.append(Mistake(self._lines.line(*place), text))

    def add(self, mistake: Mistake) -> None:
        self._found.append(mistake)

    def only(self, known: Sequence[str]) -> None:
        """Every other key is a mistake."""
        for key in self._table:
            if key not in known:
                self.wrong(f"{self._name(key)} is not known{closest(key, known)}", key)

    def missing(self, key: str, example: str) -> None:
        self.wrong(f"{self.title or 'the file'} has no {key}; add one, as in {example}")

    def text(self, key: str, example: str | None = None) -> str | None:
        """A string that is not empty. With an example it is required."""
        if key not in self._table:
            if example is not None:
                self.missing(key, example)
            return None
        value = self._table[key]
        if not isinstance(value, str):
            self.wrong(f"{self._name(key)} must be a string, not {kind(value)}", key)
        elif not value.strip():
            self.wrong(f"{self._name(key)} is empty; fill it in, or leave it out", key)
        else:
            return value
        return None

    def named(self, key: str, pattern: re.Pattern[str], what: str, example: str | None = None) -> str | None:
        """A string that matches a pattern."""
        value = self.text(key, example)
        if value is not None and not pattern.fullmatch(value):
            self.wrong(f"{self._name(key)} = {shown(value)} is not valid: {what}", key)
            return None
        return value

    def choice(self, key: str, choices: Sequence[str], default: str) -> str:
        value = self.text(key)
        if value is None:
            return default
        if value not in choices:
            self.wrong(f"{self._name(key)} = {shown(value)} is not known{closest(value, choices)}", key)
            return default
        return value

    def number(self, key: str, default: Default, low: int, high: int) -> int | Default:
        if key not in self._table:
            return default
        value = self._table[key]
        if not isinstance(value, int) or isinstance(value, bool):
            self.wrong(f"{self._name(key)} must be a whole number, not {kind(value)}", key)
        elif not low <= value <= high:
            self.wrong(f"{self._name(key)} must be between {low:,} and {high:,}, not {value:,}", key)
        else:
            return value
        return default

    def flag(self, key: str, default: bool) -> bool:
        value = self._table.get(key, default)
        if not isinstance(value, bool):
            self.wrong(f"{self._name(key)} must be true or false, not {kind(value)}", key)
            return default
        return value

    def duration(self, key: str, default: str | None, example: str) -> str | None:
        value = self.text(key)
        if value is not None and seconds(value) is None:
            self.wrong(f"{self._name(key)} = {shown(value)} is not a duration; write it as in {example}", key)
            return default
        return value or default

    def texts(self, key: str, example: str) -> tuple[str, ...]:
        """A list of strings; one string is a list of one."""
        value = self._table.get(key, [])
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(each, str) and each for each in values):
            self.wrong(f"{self._name(key)} must be a list of names, as in {example}", key)
            return ()
        if not values:
            self.missing(key, example)
        return tuple(values)

    def table(self, key: str, example: str, must: bool = False) -> Keys | None:
        if key not in self._table:
            if must:
                self.missing(key, example)
            return None
        value = self._table[key]
        if not isinstance(value, dict):
            self.wrong(f"{self._name(key)} must be a table, as in {example}, not {kind(value)}", key)
            return None
        return self._inner(value, (*self.place, key), self._name(key))

    def tables(self, key: str) -> list[Keys]:
        """The elements of an array of tables."""
        value = self._table.get(key, [])
        if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
            self.wrong(f"{key} must be tables, each begun with [[{key}]]", key)
            return []
        return [self._inner(each, (*self.place, key, at), f"this {key}") for at, each in enumerate(value)]

    def plain(self) -> dict[str, str]:
        """The table as options: numbers and booleans as text."""
        options = {}
        for key, value in self._table.items():
            if isinstance(value, str):
                options[key] = value
            elif isinstance(value, bool | int | float):
                options[key] = str(value).lower()
            else:
                self.wrong(f"{self._name(key)} must be a string, a number or true or false, not {kind(value)}", key)
        return options

    def _inner(self, table: Mapping[str, Any], place: KeyPath, title: str) -> Keys:
        return Keys(table, place, title, self._lines, self._found)

    def _name(self, key: str) -> str:
        return f"{self.title}.{shown(key, '')}" if self.title and " " not in self.title else shown(key, "")


def kind(value: object) -> str:
    """The kind of a value of the file, for a sentence."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "an array"
    if isinstance(value, datetime.date | datetime.time):
        return "a date or time"
    if isinstance(value, int | float):
        return "a number" if isinstance(value, int) and abs(value) > 10**18 else str(value)
    return "a string"


def shown(value: str, quote: str = '"') -> str:
    """Text of the file for a sentence, on one line and shortened."""
    plain = value.encode("unicode_escape").decode() if not value.isprintable() else value
    return f"{quote}{plain if len(plain) <= 60 else plain[:57] + '...'}{quote}"
