"""Batches decoded without holding up the event loop.

A small batch is decoded where it is asked for: a thread would cost more than the work. But a kilobyte can decompress to
gigabytes, and what a batch says about its size may be a lie. So the first attempt has a small bound on records, headers
and bytes together (`LIGHT_BYTES`). A batch that exceeds it is decoded in a thread, with the bound of `codec`. There is
one such thread, so that any number of readers hold about one large batch in memory between them.

Decompression and the kernel's searches let go of the interpreter's lock; a kernel that makes objects does so now and
then. A reader of many small batches lets the event loop run after every `TURN_BYTES`.
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
"""What a batch may take that is decoded on the event loop: some milliseconds of work."""
TURN_BYTES = 512 << 10
"""What a reader decodes before the event loop runs again, by the size of its batches."""
COMPRESSED_BYTES = 128 << 10
"""What a compressed batch counts for beside its size: it may be a hundred bytes, and as much work as a large one."""
_CODEC_AT = 22


class Aside:
    """One per reader."""

    __slots__ = ("_spent",)

    def __init__(self) -> None:
        self._spent = 0

    async def run(self, work: Callable[..., T], batch: Buffer, *args: Any, **options: Any) -> T:
        """What a function of `codec` makes of a batch."""
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
