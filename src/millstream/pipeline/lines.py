"""The line of each key, table and string in a TOML file.

`tomllib` keeps no positions, and neither do the libraries that write TOML, so this module walks the file once more.
The walk relies on `tomllib` having accepted the text: it finds where things begin and end and validates
nothing. Places are paths: `("step", 1, "sql")` is the key `sql` of the second `[[step]]`.
"""

from __future__ import annotations

import bisect
import re
import tomllib

KeyPath = tuple[str | int, ...]

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_STRING = re.compile(
    r'"""(?:\\.|[^\\])*?"""(?!")' r"|'''.*?'''(?!')" r'|"(?:\\.|[^"\\\n])*"' r"|'[^'\n]*'",
    re.DOTALL,
)
_SCALAR = re.compile(r"[^,\]}#\n]*")
_DOT = re.compile(r"[ \t]*\.[ \t]*")
_PIECE = re.compile(r"(\\[ \t]*\n\s*)|\\u.{4}|\\U.{8}|\\.|.", re.DOTALL)
"""The source of one character of a multi-line string; the group is the source of none."""


class Lines:
    def __init__(self, text: str = "") -> None:
        self._text = text.replace("\r\n", "\n")  # as tomllib does
        self._starts = [0, *(match.end() for match in re.finditer("\n", self._text))]
        self._found: dict[KeyPath, int] = {}
        self._strings: dict[KeyPath, tuple[int, str]] = {}
        self._tables: dict[KeyPath, int] = {}
        """The number of elements so far in each array of tables."""
        self._at = 0
        self._walk()

    def line(self, *place: str | int) -> int:
        """The line of a key or table; for a missing one, that of its table."""
        for length in range(len(place), 0, -1):
            if place[:length] in self._found:
                return self._line_of(self._found[place[:length]])
        return 1

    def line_within(self, place: KeyPath, offset: int) -> int:
        """The line of a character of a string's value."""
        if place not in self._strings:
            return self.line(*place)
        start, raw = self._strings[place]
        if not raw.startswith(('"""', "'''")):
            return self._line_of(start)
        at = 4 if raw[3:4] == "\n" else 3
        if raw[0] == "'":
            return self._line_of(start + at + offset)
        for piece in _PIECE.finditer(raw, at, len(raw) - 3):
            if piece[1] is None:
                if offset <= 0:
                    return self._line_of(start + piece.start())
                offset -= 1
        return self._line_of(start + len(raw))

    # -- walking -----------------------------------------------------------------------------------------------------

    def _walk(self) -> None:
        table: KeyPath = ()
        while self._skip() < len(self._text):
            if self._text.startswith("[", self._at):
                table = self._header()
            else:
                self._pair(table)

    def _header(self) -> KeyPath:
        start = self._at
        is_array = self._text.startswith("[[", start)
        self._at += 2 if is_array else 1
        *outer, last = self._key()
        place: KeyPath = ()
        for part in outer:
            place = (*place, part)
            self._found.setdefault(place, start)
            if place in self._tables:
                place = (*place, self._tables[place] - 1)
        place = (*place, last)
        if is_array:
            self._found.setdefault(place, start)
            self._tables[place] = self._tables.get(place, 0) + 1
            place = (*place, self._tables[place] - 1)
        self._found[place] = start
        self._skip()
        self._at += 2 if is_array else 1
        return place

    def _pair(self, table: KeyPath) -> None:
        start = self._at
        place = table
        for part in self._key():
            place = (*place, part)
            self._found.setdefault(place, start)
        self._skip()
        self._at += 1  # the equals sign
        self._value(place)

    def _value(self, place: KeyPath) -> None:
        self._skip()
        self._found.setdefault(place, self._at)
        opening = self._text[self._at : self._at + 1]
        if opening in ('"', "'"):
            self._strings[place] = self._at, self._string()
        elif opening in ("[", "{"):
            self._at += 1
            index = 0
            while self._text[self._skip() : self._at + 1] not in ("]", "}", ""):
                if opening == "[":
                    self._value((*place, index))
                else:
                    self._pair(place)
                index += 1
                if self._text[self._skip() : self._at + 1] == ",":
                    self._at += 1
            self._at += 1
        else:
            self._at = self._match(_SCALAR).end()

    def _key(self) -> list[str]:
        parts = []
        while True:
            self._skip()
            if self._text[self._at] in "\"'":
                parts.append(str(tomllib.loads(f"key = {self._string()}")["key"]))
            else:
                bare = self._match(_BARE_KEY)
                self._at = bare.end()
                parts.append(bare[0])
            dot = _DOT.match(self._text, self._at)
            if dot is None:
                return parts
            self._at = dot.end()

    def _string(self) -> str:
        found = self._match(_STRING)
        self._at = found.end()
        return found[0]

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str]:
        found = pattern.match(self._text, self._at)
        assert found is not None, "tomllib would have refused this"
        return found

    def _skip(self) -> int:
        self._at = self._match(_BLANK).end()
        return self._at

    def _line_of(self, offset: int) -> int:
        return bisect.bisect_right(self._starts, offset)
