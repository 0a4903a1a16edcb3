"""Logs on the standard library's logging: text on a terminal, otherwise one JSON object per line.

Every module logs the same way:

    logger = logging.getLogger(__name__)
    refusals = Damped(__name__)  # for lines that a client or a full disk can cause with every request

    logger.error("log %s is read-only: %s", name, error)

    14:02:11.093 ERROR   log orders-3 is read-only: [Errno 5] Input/output error
    {"time": "2025-11-04T14:02:11.093Z", "level": "error", "logger": "millstream.log", "event": "log orders-3 is ..."}

An unexpected error is logged with its traceback (`exc_info`). All lines go to standard error: standard output is for
the line `ready ...`. Libraries and asyncio write the same format. No structlog: it costs 4 MB and 50 ms at start.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TextIO

DAMPED_LINES = 10
DAMPED_SECONDS = 10.0
_COLOURS = {"DEBUG": "\x1b[2m", "WARNING": "\x1b[33m", "ERROR": "\x1b[31m", "CRITICAL": "\x1b[31m"}


class Damped:
    """A rate-limited plain logger, for errors that a client or a full disk can cause with every request.

    It writes at most ten lines per kind (the text before formatting) in ten seconds, and counts the others. The first
    line after that reports the count.
    """

    __slots__ = ("_kinds", "_logger")

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)
        self._kinds: dict[str, tuple[float, int]] = {}
        """Window start and count."""

    def warning(self, message: str, *arguments: object) -> None:
        self._log(logging.WARNING, message, arguments)

    def error(self, message: str, *arguments: object) -> None:
        self._log(logging.ERROR, message, arguments)

    def _log(self, level: int, message: str, arguments: tuple[object, ...]) -> None:
        now = time.monotonic()
        since, count = self._kinds.get(message, (now, 0))
        if now - since >= DAMPED_SECONDS:
            if count > DAMPED_LINES:
                self._logger.log(
                    level, "suppressed %d more like the next one in %d s", count - DAMPED_LINES, now - since
                )
            since, count = now, 0
        self._kinds[message] = (since, count + 1)
        if count < DAMPED_LINES - 1:
            self._logger.log(level, message, *arguments)
        elif count == DAMPED_LINES - 1:
            self._logger.log(level, message + " (further messages like this are suppressed for now)", *arguments)


def configure(level: str, form: str = "auto", stream: TextIO | None = None) -> None:
    """Sets up logging for this process; `form` is `text`, `json`, or `auto`: by whether `stream` is a terminal."""
    stream = stream if stream is not None else sys.stderr
    terminal = stream.isatty()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        TextFormatter(colour=terminal) if form == "text" or (form == "auto" and terminal) else JsonFormatter()
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


class TextFormatter(logging.Formatter):
    def __init__(self, colour: bool = False) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = f"{record.levelname:<7}"
        if self._colour and (code := _COLOURS.get(record.levelname)):
            level = f"{code}{level}\x1b[0m"
        line = f"{clock}.{int(record.msecs):03d} {level} {_one_line(record.getMessage())}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{clock}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def _one_line(text: str) -> str:
    """Client ids and topic names are untrusted: escapes what could break the line or drive the terminal."""
    return text if text.isprintable() else json.dumps(text)[1:-1]
