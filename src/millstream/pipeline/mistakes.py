"""Mistakes in a pipeline's file: collected, never raised one by one, so that one edit can fix them all."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from millstream.core.errors import MillstreamError


@dataclass(frozen=True, order=True)
class Mistake:
    line: int
    """From 1; 0 is the file as a whole."""
    text: str


class BadPipeline(MillstreamError):
    """A pipeline that cannot run; its text has every mistake of the file, a line each."""

    def __init__(self, path: Path, mistakes: Iterable[Mistake]) -> None:
        self.mistakes = list(mistakes)
        super().__init__("\n".join(format_mistakes(path, self.mistakes)))


def format_mistakes(path: Path | str, mistakes: Iterable[Mistake]) -> list[str]:
    """`clicks.toml:12: ...`, in the order of the file, each once."""
    return [f"{path}:{each.line}: {each.text}" if each.line else f"{path}: {each.text}" for each in sorted({*mistakes})]


def closest(name: str, known: Iterable[str]) -> str:
    """The text after "x is not known": the most similar name, else all known names."""
    names = list(known)
    folded = {each.lower(): each for each in names}
    close = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {folded[close[0]]}?"
    return f"; there are {', '.join(names)}" if len(names) > 1 else f"; there is {names[0]}" if names else ""
