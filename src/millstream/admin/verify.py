"""Lets the broker check its stored data now, and reports damage.

The broker reads, because only it can access its store; this polls its page `/verify`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from millstream.admin import pages
from millstream.admin.connection import Connection
from millstream.admin.failure import Failure

POLL_SECONDS = 0.2


def verify(
    connection: Connection, topic: str | None = None, *, on_progress: Callable[[dict[str, Any]], object] | None = None
) -> dict[str, Any]:
    """Checks every stored batch of a topic, or of all topics, against its checksum; returns the broker's report.

    `on_progress` gets the report so far, at the start and with each poll.
    """
    if topic is not None:
        connection.topic(topic)
    node = min(connection.metadata().brokers)
    report = _start(connection, node, topic)
    while True:
        if on_progress is not None:
            on_progress(report)
        if report["state"] != "running":
            return report
        time.sleep(POLL_SECONDS)
        report = pages.ask(node, "verify", connection)


def _start(connection: Connection, node: int, topic: str | None) -> dict[str, Any]:
    page = "verify" if topic is None else f"verify?topic={quote(topic)}"
    try:
        found = pages.ask(node, page, connection, method="POST")
    except pages.Refusal as refusal:
        if refusal.status != 409:
            raise
        raise Failure("the broker is verifying already; try again when it is done") from None
    assert isinstance(found, dict)
    return found
