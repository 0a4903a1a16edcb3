"""Decodes batches without blocking the event loop.

A small batch is decoded in place: a thread would cost more than the work. But a kilobyte can decompress to gigabytes,
and a batch may lie about its size. So the first attempt has a small bound on records, headers and bytes together
(`LIGHT_BYTES`). A batch that exceeds it is decoded in a thread, with the bound of `codec`. There is one such thread, so
that all readers together hold about one large batch in memory.

Decompression and the kernel's searches release the GIL; a kernel that makes objects releases it periodically. A reader
of many small batches yields to the event loop after every `TURN_BYTES`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, TypeVar

from millstream.records.batch import CODEC_MASK, BatchTooLarge, Buffer
from millstream.records.codec import BYTES_MAX

T = TypeVar("T")

LIGHT_BYTES = 4 << 20
"""Bound of a batch that is decoded on the event loop: some milliseconds of work."""
TURN_BYTES = 512 << 10
"""Batch bytes that a reader decodes before it yields to the event loop."""
COMPRESSED_BYTES = 128 << 10
"""Added to the size of a compressed batch: a hundred bytes may be as much work as a large batch."""
_CODEC_AT = 22


class Aside:
    """One per reader."""

    __slots__ = ("_spent",)

    def __init__(self) -> None:
        self._spent = 0

    async def run(self, work: Callable[..., T], batch: Buffer, *args: Any, **options: Any) -> T:
        """Applies a function of `codec` to a batch."""
        if len(batch) <= LIGHT_BYTES:
            try:
                done = work(batch, *args, bytes_max=LIGHT_BYTES, **options)
            except BatchTooLarge:
                pass
            else:
                self._spent += len(batch) + (COMPRESSED_BYTES if batch[_CODEC_AT] & CODEC_MASK else 0)
                if self._spent > TURN_BYTES:
                    self._spent = 0
                    await asyncio.sleep(0)
                return done
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(_thread(), partial(work, batch, *args, bytes_max=BYTES_MAX, **options))


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "millstream-decode")
