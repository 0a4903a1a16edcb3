"""Large requests of the APIs on the hot path, handled without blocking the event loop.

Produce, Fetch and the share requests are decoded in place in the receive buffer and answered without a task. That works
for up to a thousand partitions. A larger request is copied, because the buffer is reused. The thread of `turns.py`
decodes it and encodes its answer; in between, the event loop handles its partitions in slices. The connection is parked
meanwhile, which keeps the order of its requests.

The copy counts against the door's memory for frames. If there is none left, the connection is closed, as for any frame
that does not fit.
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
"""The most partitions that the event loop handles at once: 10 to 50 ms."""
BYTES_LIGHT = 32 * 1024
"""The same for requests without records: 16 to 33 bytes per partition, less for a partition with little to do."""

Answering = Coroutine[Any, Any, list[Chunk] | None]


def answer(
    reader: Reader, flexible: bool, context: Context, work: Callable[[Reader], Answering]
) -> Promise[list[Chunk] | None]:
    """The result of `work`, which gets a reader of the copy, at the body."""
    size = len(reader.buffer)
    if not context.budget.take(size):
        raise ProtocolError(f"no memory to copy a request of {size} bytes: other connections use it")
    # Writable: append stamps batches in place.
    _, owned = header.skip_client(memoryview(bytearray(reader.buffer)), flexible)
    return promised(_run(work(owned), size, context))


async def _run(work: Answering, size: int, context: Context) -> list[Chunk] | None:
    try:
        return await work
    finally:
        context.budget.give(size)
