"""A progress bar on standard error, if that is a terminal; nothing otherwise."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any


class Progress:
    def __init__(self, title: str, bytes_total: int | None, *, wanted: bool = True, unit: str = "records") -> None:
        self._bar: Any = None
        if not wanted or not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn(f"{{task.fields[records]:,}} {unit}, {{task.fields[rate]:,.0f}}/s"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task(title, total=bytes_total, records=0, rate=0.0)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, records: int, size_bytes: int, seconds: float, total: int | None = None) -> None:
        """Cheap enough for each chunk of input: Rich draws only ten times a second."""
        if self._bar is not None:
            rate = records / max(seconds, 1e-9)
            self._bar.update(self._task, total=total, completed=size_bytes, records=records, rate=rate)
