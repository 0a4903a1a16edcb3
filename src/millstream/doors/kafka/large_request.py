"""Requests with more partitions than the event loop has time for, of the APIs that are otherwise handled at once.

Produce, Fetch and the share requests are decoded where they lie in the receive buffer and answered without a task. That
is right for up to a thousand partitions. A request with more is copied, because the buffer is reused; it is decoded and
its answer encoded in the thread of `turns.py`; in between its partitions are handled in slices. The connection is
parked meanwhile, so the order of its requests holds.

The copy counts against the door's memory for frames. If there is none left, the connection is closed, as for any other
frame that does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from millstream.core.errors import ProtocolError
from millstream.core.promise import Promise, promised
from millstream.doors.kafka.context import Context
from millstream.doors.outbox import Chunk
from millstream.wire.kafka import header
from millstream.wire.kafka.primitives import Reader

PARTITIONS_LIGHT = 1_000
"""Of a request that is handled at once, on the event loop: 10 to 50 ms."""
BYTES_LIGHT = 32 * 1024
"""The same for requests that carry no records: 16 to 33 bytes for each partition, less where there is little to do."""

Answering = Coroutine[Any, Any, list[Chunk] | None]


def answer(
    reader: Reader, flexible: bool, context: Context, work: Callable[[Reader], Answering]
) -> Promise[list[Chunk] | None]:
    """What `work` answers, given a reader of the copy that stands at the body."""
    size = len(reader.buffer)
    if not context.budget.take(size):
        raise ProtocolError(f"no memory for a copy of a request of {size} bytes while others use it")
    # Writable: batches are stamped in place.
    _, owned = header.skip_client(memoryview(bytearray(reader.buffer)), flexible)
    return promised(_run(work(owned), size, context))


async def _run(work: Answering, size: int, context: Context) -> list[Chunk] | None:
    try:
        return await work
    finally:
        context.budget.give(size)
