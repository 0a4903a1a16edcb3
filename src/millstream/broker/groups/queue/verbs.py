"""Members of a queue, leases and acknowledgements."""

from __future__ import annotations

import enum
from typing import NamedTuple

from millstream.records.record import Record


class Verb(enum.IntEnum):
    """Kafka's acknowledge types (KIP-932, KIP-1222)."""

    GAP = 0
    """The offset has no record: it counts as done."""
    ACCEPT = 1
    RELEASE = 2
    REJECT = 3
    RENEW = 4


class Answer(NamedTuple):
    """A member's acknowledgement of consecutive leased records."""

    first: int
    last: int
    verb: Verb
    delay_ms: int = 0
    """RELEASE: shortest backoff."""
    reason: str = ""
    """RELEASE and REJECT: for the dead letter."""


class Run(NamedTuple):
    """Consecutive records leased together."""

    first: int
    last: int
    attempt: int
    """The number of this delivery, from 1."""


class Taken(NamedTuple):
    data: bytes
    """Whole batches that hold the leased records, and perhaps more."""
    runs: list[Run]


class TakenRecord(NamedTuple):
    record: Record
    attempt: int


class Member:
    __slots__ = ("id", "leases", "name")

    def __init__(self, number: int, name: str) -> None:
        self.id = number
        self.name = name
        self.leases = 0
        """The number of records it leases now."""
