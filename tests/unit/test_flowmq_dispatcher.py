"""Messages of a group, from a queue to FlowMQ's subscribers, when the store is away for a moment."""

from __future__ import annotations

import pytest

from millstream.broker.session import Session, Sessions
from millstream.core.errors import Code, RequestError
from millstream.core.promise import Promise
from millstream.doors.flowmq.door import FlowmqDoor
from millstream.stores.base import Delete, Put
from tests.unit.queue_kit import settle
from tests.unit.share_kit import Kit


async def test_new_partitions_that_could_not_be_opened_are_opened_later(
    shares: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = shares.broker.topics.get("jobs")
    assert topic is not None
    door = FlowmqDoor(Sessions(shares.broker))
    session = Session(shares.broker, "flowmq", "127.0.0.1")
    dispatcher = await door.join(topic, "g", session)
    transact = shares.meta.transact

    def without_queues(*operations: Put | Delete) -> Promise[int]:
        if any(each.key.startswith("queues/") for each in operations):
            return Promise.failed(RequestError(Code.KAFKA_STORAGE_ERROR, "the store cannot be reached"))
        return transact(*operations)

    with monkeypatch.context() as patched:
        patched.setattr(shares.meta, "transact", without_queues)
        await shares.broker.topics.grow("jobs", 3)
        await settle()
    assert len(dispatcher._lanes) == 2
    shares.clock.advance(5)
    await settle()
    assert len(dispatcher._lanes) == 3
    assert await door.join(topic, "g", session) is dispatcher
