"""The choice of a record's partition.

A partitioner is a callable: it takes the key and the number of partitions and returns a partition. These have names;
`murmur2` is the default, as in Kafka's Java clients.

    murmur2       by key, as Kafka's Java clients and our Spark sink
    crc32         by key, as librdkafka's `consistent` and Comet
    fnv1a         by key, as Flume (FNV-1a, 32 bits)
    round_robin   one after the other, whatever the key
    random        any, whatever the key

For a record without a key, the partitioners by key use the next partition in turn; a `send_many` counts as one turn.
"""

from __future__ import annotations

import itertools
import random as _random
from collections.abc import Callable
from zlib import crc32 as _crc32

from millstream.core.errors import MillstreamError
from millstream.records.pure import murmur2 as _murmur2

Partitioner = Callable[[bytes | None, int], int]


def fnv1a_32(data: bytes) -> int:
    """The FNV-1a hash with 32 bits."""
    value = 0x811C9DC5
    for byte in data:
        value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return value


def murmur2(data: bytes) -> int:
    """Without its sign, as in Kafka's Java clients."""
    return _murmur2(data) & 0x7FFFFFFF


class ByKey:
    """A hash of the key; records without a key use partitions in turn."""

    def __init__(self, digest: Callable[[bytes], int]) -> None:
        self._digest = digest
        self._turns = itertools.count()

    def __call__(self, key: bytes | None, partitions: int) -> int:
        return (next(self._turns) if key is None else self._digest(key)) % partitions


class RoundRobin:
    def __init__(self) -> None:
        self._turns = itertools.count()

    def __call__(self, key: bytes | None, partitions: int) -> int:
        return next(self._turns) % partitions


class Random:
    def __call__(self, key: bytes | None, partitions: int) -> int:
        return _random.randrange(partitions)


_NAMED: dict[str, Callable[[], Partitioner]] = {
    "murmur2": lambda: ByKey(murmur2),
    "crc32": lambda: ByKey(_crc32),
    "fnv1a": lambda: ByKey(fnv1a_32),
    "round_robin": RoundRobin,
    "random": Random,
}


def make(chosen: str | Partitioner) -> Partitioner:
    """A new partitioner by name; or the given callable."""
    if callable(chosen):
        return chosen
    if chosen not in _NAMED:
        raise MillstreamError(f"there is no partitioner {chosen!r}: use one of {', '.join(_NAMED)}, or a callable")
    return _NAMED[chosen]()


def place(partitioner: Partitioner, key: bytes | None, partitions: int) -> int:
    """The partitioner's choice, checked: it may be user code."""
    chosen = partitioner(key, partitions)
    if not isinstance(chosen, int) or not 0 <= chosen < partitions:
        raise MillstreamError(f"the partitioner chose {chosen!r}; the topic has partitions 0 to {partitions - 1}")
    return chosen
