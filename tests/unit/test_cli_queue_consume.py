"""`millstream queue consume` where a partition cannot be read. All else is in `tests/compat/test_queue_cli.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millstream import sync
from millstream.admin.failure import Failure
from millstream.admin.queues import Begin, ensure
from millstream.broker.groups.queue.partition import QueuePartition
from millstream.cli.connection import Connection
from millstream.cli.queue_consume import Work
from millstream.core.errors import Code, RequestError
from millstream.testing.broker_thread import BrokerThread

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def work(millstream: BrokerThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Work:
    """Of a queue whose second partition is refused."""
    acquire = QueuePartition.acquire

    async def refuse_some(self: QueuePartition, *arguments: Any, **keywords: Any) -> Any:
        if self.index == 1:
            raise RequestError(Code.KAFKA_STORAGE_ERROR)
        return await acquire(self, *arguments, **keywords)

    monkeypatch.setattr(QueuePartition, "acquire", refuse_some)
    with sync.connect(millstream.bootstrap) as ms:
        ms.create_topic("jobs", partitions=2)
        for partition in (0, 0, 1):
            ms.send("jobs", b"x", partition=partition)
    connection = Connection(millstream.bootstrap)
    ensure(connection, "workers", Begin.START)
    command = ["sh", "-c", f"sleep 1; echo done >> {tmp_path}/done"]
    return Work(connection, "jobs", "workers", command, 3, None, True, None)


def test_a_partition_that_cannot_be_read_ends_no_command_for_a_record_of_another(work: Work, tmp_path: Path) -> None:
    with pytest.raises(Failure, match="storage failed"):
        work.run()
    assert (tmp_path / "done").read_text() == "done\n" * 2
    assert work.tally == {"accepted": 2}
