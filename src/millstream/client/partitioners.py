"""Which partition a record goes to.

A partitioner is a callable: given the key and the number of partitions it answers with a partition. These are known by
name; `murmur2` is the default, and what Kafka's Java clients do.

    murmur2       by key, as Kafka's Java clients and our Spark sink
    crc32         by key, as librdkafka's `consistent` and Comet
    fnv1a         by key, as Flume (FNV-1a, 32 bits)
    round_robin   one after the other, whatever the key
    random        any, whatever the key

A record without a key has no place of its own: those by key then go round, a `send_many` as a whole.
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
    """Fowler, Noll and Vo's hash in its 1a form with 32 bits."""
    value = 0x811C9DC5
    for byte in data:
        value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return value


def murmur2(data: bytes) -> int:
    """As Kafka's Java clients use it: without its sign."""
    return _murmur2(data) & 0x7FFFFFFF


class ByKey:
    """A hash of the key; records without one go round."""

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
    """A named one, with turns of its own; or the callable that was given."""
    if callable(chosen):
        return chosen
    if chosen not in _NAMED:
        raise MillstreamError(f"there is no partitioner {chosen!r}: use one of {', '.join(_NAMED)}, or a callable")
    return _NAMED[chosen]()


def place(partitioner: Partitioner, key: bytes | None, partitions: int) -> int:
    """The partitioner's choice, which may be anybody's code and is not trusted."""
    chosen = partitioner(key, partitions)
    if not isinstance(chosen, int) or not 0 <= chosen < partitions:
        raise MillstreamError(f"the partitioner chose {chosen!r}; the topic has partitions 0 to {partitions - 1}")
    return chosen
