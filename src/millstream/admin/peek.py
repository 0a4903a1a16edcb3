"""The records that a queue delivers next, without leasing them.

The broker lists those records (its page `/queues`); they are read from the log like any records.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from millstream.admin.connection import Connection
from millstream.admin.failure import explain
from millstream.admin.queues import figures

if TYPE_CHECKING:
    from confluent_kafka import Message

READ_SECONDS = 5.0
DELIVER_AT = "millstream-deliver-at"


def peek(connection: Connection, group: str, topic: str, count: int) -> Iterator[Message]:
    """At most `count` records, by partition and offset. Workers may lease them at any time."""
    connection.topic(topic)
    for partition in figures(connection, group)["partitions"]:
        if partition["topic"] != topic:
            continue
        for message in _read(connection, topic, partition, count):
            yield message
            count -= 1


def _read(connection: Connection, topic: str, partition: dict[str, Any], count: int) -> Iterator[Message]:
    """Records of the next runs, in order of offset."""
    from confluent_kafka import TopicPartition

    runs = partition["ahead"]
    if not runs or count <= 0:
        return
    consumer = connection.reader()
    try:
        for first, last in runs:
            consumer.assign([TopicPartition(topic, partition["partition"], first)])
            while count > 0:
                message = consumer.poll(READ_SECONDS)
                if message is None:
                    return
                error = message.error()
                if error is not None and error.code() == error._PARTITION_EOF:
                    break
                if error is not None:
                    raise explain(error, connection.address)
                if (message.offset() or 0) > last:
                    break
                if not _is_delayed(message):
                    yield message
                    count -= 1
                if message.offset() == last:
                    break
    finally:
        consumer.close()


def _is_delayed(message: Message) -> bool:
    """The queue has not read it yet and does not know its delay."""
    headers: Any = message.headers() or []
    due: bytes = dict(headers).get(DELIVER_AT) or b""
    return due.isdigit() and int(due) > time.time() * 1000
