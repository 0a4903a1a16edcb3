"""Reads partitions from given offsets to their current ends."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from millstream.admin.connection import Connection
from millstream.admin.failure import Failure, explain
from millstream.admin.position import TopicPartition, spans

if TYPE_CHECKING:
    from confluent_kafka import Message

READ_SECONDS = 10.0


def read(connection: Connection, starts: Mapping[TopicPartition, int]) -> Iterator[Message]:
    """All current records from some offsets on."""
    import confluent_kafka

    held = spans(connection, starts)
    left = {where: held[where][1] for where, offset in starts.items() if max(offset, held[where][0]) < held[where][1]}
    if not left:
        return
    consumer = connection.reader()
    try:
        consumer.assign([confluent_kafka.TopicPartition(*where, max(starts[where], held[where][0])) for where in left])
        heard = time.monotonic()
        while left:
            first = consumer.poll(0.5)  # `consume` would wait this long for a full count
            for message in () if first is None else (first, *consumer.consume(500, 0)):
                heard = time.monotonic()
                where = (message.topic() or "", message.partition() or 0)
                error = message.error()
                if error is not None and error.code() == error._PARTITION_EOF:
                    left.pop(where, None)
                elif error is not None and not error.retriable():
                    raise explain(error, connection.address, where[0])
                elif error is None and where in left:
                    if (message.offset() or 0) < left[where]:
                        yield message
                    if (message.offset() or 0) >= left[where] - 1:
                        del left[where]
            if time.monotonic() - heard > READ_SECONDS:
                raise Failure(f"{connection.address} has stopped answering; try again")
    finally:
        consumer.close()


def headers_of(message: Message) -> list[tuple[str, bytes]]:
    headers: Any = message.headers() or []
    return [(name, value if value is not None else b"") for name, value in headers]
