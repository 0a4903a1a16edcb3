"""SQL from the files in `sql/`: a file is a list of statements, each after a line `-- name: NAME`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).parent / "sql"
_MARK = "-- name: "


def text(file: str) -> str:
    return (_FOLDER / file).read_text()


@cache
def named(file: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in text(file).split(_MARK)[1:]:
        name, _, statement = part.partition("\n")
        found[name.strip()] = statement.strip()
    return found
