"""Spark's DDL, `user STRING, tags ARRAY<STRING>`, parsed without Spark: columns, types, and mistakes.

Spark has a parser for it inside the JVM, which takes seconds to start. Types are returned as Spark prints them in SQL,
in capitals and with one name each: LONG is BIGINT, `tags array<string>` is `ARRAY<STRING>`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from millstream.core.errors import MillstreamError
from millstream.pipeline.mistakes import closest

PLAIN = {
    "BOOLEAN": "BOOLEAN",
    "TINYINT": "TINYINT",
    "BYTE": "TINYINT",
    "SMALLINT": "SMALLINT",
    "SHORT": "SMALLINT",
    "INT": "INT",
    "INTEGER": "INT",
    "BIGINT": "BIGINT",
    "LONG": "BIGINT",
    "FLOAT": "FLOAT",
    "REAL": "FLOAT",
    "DOUBLE": "DOUBLE",
    "DATE": "DATE",
    "TIMESTAMP": "TIMESTAMP",
    "TIMESTAMP_LTZ": "TIMESTAMP",
    "TIMESTAMP_NTZ": "TIMESTAMP_NTZ",
    "STRING": "STRING",
    "BINARY": "BINARY",
    "VARIANT": "VARIANT",
    "VOID": "VOID",
}
DECIMALS = ("DECIMAL", "DEC", "NUMERIC")
SIZED = ("CHAR", "CHARACTER", "VARCHAR")
"""Spark decodes and processes them like STRING."""
NESTED = ("ARRAY", "MAP", "STRUCT")
USUAL = ("STRING", "INT", "LONG", "DOUBLE", "BOOLEAN", "TIMESTAMP", "DATE", "DECIMAL", "BINARY", *NESTED)
DEPTH_MAX = 50

_BLANK = r"(?:\s|--[^\n]*|/\*.*?\*/)*"
_TOKEN = re.compile(
    _BLANK + r"(?:(?P<quoted>`(?:[^`]|``)*`)|(?P<name>\w+)"
    r"|(?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|(?P<sign>\S)|(?P<end>\Z))",
    re.DOTALL,
)
_INTERVAL = ("YEAR", "MONTH", "DAY", "HOUR", "MINUTE", "SECOND")


class BadDDL(MillstreamError):
    """A schema that Spark would refuse; `offset` is the position in it."""

    def __init__(self, text: str, offset: int) -> None:
        super().__init__(text)
        self.offset = offset


class _Token(NamedTuple):
    kind: str
    text: str
    start: int

    @property
    def is_name(self) -> bool:
        """Spark's plain names are ASCII and not only digits; others need backticks."""
        return self.kind == "quoted" or (self.kind == "name" and self.text.isascii() and not self.text.isdigit())


def columns(text: str) -> list[tuple[str, str]]:
    """Names and types. Raises BadDDL."""
    reader = _Reader(text)
    fields = reader.fields("")
    reader.end()
    return fields


class _Reader:
    def __init__(self, text: str) -> None:
        self._tokens = [_token(match) for match in _TOKEN.finditer(text) if match["end"] is None]
        self._end = _Token("", "", len(text.rstrip()))
        self._at = 0
        self._depth = 0

    def fields(self, closing: str) -> list[tuple[str, str]]:
        """`name TYPE, ...` up to the closing sign; a struct may have a colon between."""
        found: dict[str, tuple[str, str]] = {}
        if closing and self._take(closing):
            return []
        while True:
            name = self._next()
            if not name.is_name:
                raise BadDDL(f"a column's name is missing before {_sign(name)}; write NAME TYPE, NAME TYPE", name.start)
            self._take(":")
            kind = self._type(name.text)
            if name.text.lower() in found:
                raise BadDDL(f"the column {name.text} occurs twice; Spark ignores case", name.start)
            found[name.text.lower()] = name.text, kind
            self._attributes()
            if not self._take(","):
                break
        if closing and not self._take(closing):
            after = self._peek()
            raise BadDDL(f"{closing} or a comma is missing before {_sign(after)}", after.start)
        return list(found.values())

    def end(self) -> None:
        left = self._peek()
        if left.text:
            raise BadDDL(f"a comma is missing before {_sign(left)}; write NAME TYPE, NAME TYPE", left.start)

    def _type(self, column: str) -> str:
        token = self._next()
        name = token.text.upper()
        if not token.is_name:
            raise BadDDL(f"the column {column} has no type; write NAME TYPE, NAME TYPE", token.start)
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise BadDDL(f"the column {column} is nested more than {DEPTH_MAX} deep", token.start)
        made = self._made(name, column, token)
        self._depth -= 1
        return made

    def _made(self, name: str, column: str, token: _Token) -> str:
        if name in PLAIN:
            if name == "STRING" and self._take("COLLATE"):
                self._expect("name", "a collation")
            return PLAIN[name]
        if name == "INTERVAL":
            return self._interval()
        if name == "TIME":
            return f"TIME({(*self._sizes(token), 6)[0]})"
        if name in DECIMALS:
            sizes = self._sizes(token) or [10]
            precision, scale = (*sizes, 0)[:2]
            if not scale <= precision <= 38 or len(sizes) > 2:
                raise BadDDL(
                    f"the column {column} must be DECIMAL(PRECISION, SCALE) with at most 38 digits", token.start
                )
            return f"DECIMAL({precision},{scale})"
        if name in SIZED:
            sizes = self._sizes(token)
            if len(sizes) != 1:
                raise BadDDL(f"the column {column} needs a length, as in {name}(20); or make it STRING", token.start)
            return "STRING"
        if name in NESTED:
            return self._nested(name, column)
        raise BadDDL(
            f"the column {column} has a type that Spark does not know, {token.text}{closest(name, USUAL)}", token.start
        )

    def _nested(self, name: str, column: str) -> str:
        opening = self._next()
        if opening.text != "<":
            example = {"ARRAY": "ARRAY<STRING>", "MAP": "MAP<STRING, INT>", "STRUCT": "STRUCT<x: INT>"}[name]
            raise BadDDL(f"the column {column} needs its inner type, as in {example}", opening.start)
        if name == "STRUCT":
            fields = self.fields(">")
            return f"STRUCT<{', '.join(f'{quoted(field)}: {kind}' for field, kind in fields)}>"
        inner = self._type(column)
        if name == "MAP":
            self._want(",", column)
            inner = f"{inner}, {self._type(column)}"
        self._want(">", column)
        return f"{name}<{inner}>"

    def _sizes(self, token: _Token) -> list[int]:
        sizes: list[int] = []
        if self._take("("):
            while True:
                number = self._next()
                if not (number.text.isascii() and number.text.isdigit() and len(number.text) < 10):
                    raise BadDDL(f"{token.text} takes whole numbers, not {_sign(number)}", number.start)
                sizes.append(int(number.text))
                if not self._take(","):
                    break
            self._want(")", token.text)
        return sizes

    def _attributes(self) -> None:
        """NOT NULL, a comment: unused by pipelines."""
        if self._take("NOT") and not self._take("NULL"):
            after = self._peek()
            raise BadDDL(f"NULL is missing before {_sign(after)}", after.start)
        if self._take("COMMENT"):
            self._expect("text", "the text of the comment")

    def _interval(self) -> str:
        """`INTERVAL`, `INTERVAL DAY` or `INTERVAL DAY TO SECOND`."""
        words = ["INTERVAL"]
        while self._peek().text.upper() in (*_INTERVAL, "TO") and len(words) < 4:
            words.append(self._next().text.upper())
        return " ".join(words)

    def _expect(self, kind: str, what: str) -> None:
        token = self._next()
        if token.kind != kind:
            raise BadDDL(f"{what} is missing before {_sign(token)}", token.start)

    def _want(self, text: str, where: str) -> None:
        if not self._take(text):
            after = self._peek()
            raise BadDDL(f"{text} is missing before {_sign(after)} in {where}", after.start)

    def _take(self, text: str) -> bool:
        if self._peek().text.upper() == text:
            self._at += 1
            return True
        return False

    def _next(self) -> _Token:
        token = self._peek()
        self._at += 1
        return token

    def _peek(self) -> _Token:
        return self._tokens[self._at] if self._at < len(self._tokens) else self._end


def _token(match: re.Match[str]) -> _Token:
    kind = match.lastgroup or "sign"
    text = match[kind][1:-1].replace("``", "`") if kind == "quoted" else match[kind]
    return _Token(kind, text, match.start(kind))


def quoted(name: str) -> str:
    """A name for SQL: in backticks unless it is plain."""
    return name if re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) else f"`{name.replace('`', '``')}`"


def _sign(token: _Token) -> str:
    return f"{token.text[:40]!r}" if token.text else "the end"
