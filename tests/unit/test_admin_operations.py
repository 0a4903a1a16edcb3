"""Administration from Python, against a broker. What reads the broker's pages is in `tests/compat`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from millstream import sync
from millstream.admin.connection import Connection
from millstream.admin.failure import Failure
from millstream.admin.position import Position
from millstream.admin.queues import Begin, create
from millstream.admin.redrive import DEAD, Report, Selection, redrive
from millstream.admin.seek import Move, purge, seek_queue
from millstream.testing.broker_thread import BrokerThread

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def ms(millstream: BrokerThread) -> Iterator[sync.Millstream]:
    with sync.connect(millstream.bootstrap) as connected:
        yield connected


@pytest.fixture
def connection(millstream: BrokerThread, ms: sync.Millstream) -> Connection:
    """To a broker with a queue and three jobs."""
    ms.create_topic("jobs")
    for value in (b"a", b"b", b"c"):
        ms.send("jobs", value)
    connection = Connection(millstream.bootstrap)
    create(connection, "workers", Begin.START, {})
    with ms.queue("jobs", group="workers") as jobs:
        next(iter(jobs)).release()
    return connection


def test_a_queue_is_moved_and_purged(connection: Connection) -> None:
    assert seek_queue(connection, "workers", "jobs", Position.parse("2"), dry_run=True) == [Move("jobs", 0, 0, 2)]
    assert purge(connection, "workers", "jobs") == 3
    assert purge(connection, "workers", "jobs", dry_run=True) == 0
    with pytest.raises(Failure, match="there is no queue nobody"):
        purge(connection, "nobody", "jobs")


def test_progress_is_reported_and_every_letter_is_redriven_once(connection: Connection, ms: sync.Millstream) -> None:
    headers = ((DEAD + "topic", b"jobs"), (DEAD + "partition", b"0"), (DEAD + "reason", b"Lease expired"))
    ms.create_topic("__dlq__")
    for number in range(3):
        ms.send("__dlq__", b"%d" % number, headers=headers)
    sent: list[int] = []

    def on_progress(report: Report) -> None:
        sent.append(report.sent)

    assert redrive(connection, Selection(reason="lease"), limit=2, on_progress=on_progress).sent == 2
    assert redrive(connection, per_second=1000, on_progress=on_progress).skipped["already sent back"] == 2
    assert sent == [2, 1]
    assert redrive(connection).sent == 0
