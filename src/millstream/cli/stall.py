"""Shows why records wait, while a command retries.

A full disk is a retriable error to Kafka's clients (KAFKA_STORAGE_ERROR): librdkafka retries silently until
the records time out. So a command without progress for a second reads the reason from the broker's pages.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress

from millstream.admin import pages
from millstream.cli.connection import Connection
from millstream.core.errors import MillstreamError

ASK_SECONDS = 1.0
"""Without progress, before the pages are read."""
SILENT_SECONDS_MAX = 5.0
"""Without progress or a reason, before the warning."""


class Stall:
    """One warning for each stall."""

    def __init__(self, connection: Connection, topic: str) -> None:
        self._connection = connection
        self._topic = topic
        self._waiting = 0
        self._since = time.monotonic()
        self._asking: threading.Thread | None = None
        self._is_told = False
        self.reason = ""
        """The broker's last reason."""

    def look(self, waiting: int) -> None:
        """Called often, with the number of unacknowledged records."""
        now = time.monotonic()
        if waiting < self._waiting or not waiting:
            self._since, self._is_told = now, False
        self._waiting = waiting
        if self._is_told or now - self._since < ASK_SECONDS or (self._asking and self._asking.is_alive()):
            return
        self._asking = threading.Thread(target=self._ask, args=(now - self._since,), daemon=True)
        self._asking.start()

    def _ask(self, seconds: float) -> None:
        """In a thread: sending goes on during the request."""
        reasons: list[str] = []
        with suppress(MillstreamError):  # it is unreachable, which is reported elsewhere, or its pages are closed
            reasons = pages.reasons(self._connection)
        if reasons or seconds > SILENT_SECONDS_MAX:
            self._is_told = True
            self.reason = "; ".join(reasons)
            reason = self.reason or "the broker gave no reason; see its log"
            where = f"{self._topic}: {self._waiting:,} record{'s' * (self._waiting != 1)}"
            print(f"millstream: {where} not stored yet, retrying: {reason}", file=sys.stderr, flush=True)
