"""`memory:`, where the contract suite does not reach."""

from __future__ import annotations

from millstream.log.config import LogConfig
from millstream.records import codec
from millstream.stores.memory import MemoryLogStore
from millstream.testing.clock import VirtualClock
from tests.batches import NOW, append


async def test_the_largest_time_is_of_what_was_not_trimmed_of_a_batch() -> None:
    log = MemoryLogStore(VirtualClock()).open("t", "0123456789abcdef", 0, LogConfig())
    append(log, codec.encode([(0, NOW + step, None, b"x") for step in (9, 4, 6)]))
    log.trim(1)
    assert await log.find_max_time() == (2, NOW + 6)
