"""What members of a queue say and are given."""

from __future__ import annotations

import enum
from typing import NamedTuple

from millstream.records.record import Record


class Verb(enum.IntEnum):
    """With Kafka's numbers."""

    GAP = 0
    """There is no such record: it counts as done."""
    ACCEPT = 1
    RELEASE = 2
    REJECT = 3
    RENEW = 4


class Answer(NamedTuple):
    """What a member says about neighbouring records that it has leased."""

    first: int
    last: int
    verb: Verb
    delay_ms: int = 0
    """RELEASE: not again before that."""
    reason: str = ""
    """RELEASE and REJECT: for the dead letter."""


class Run(NamedTuple):
    """Neighbouring records leased together."""

    first: int
    last: int
    attempt: int
    """Which delivery this is, from 1."""


class Taken(NamedTuple):
    data: bytes
    """Whole batches that hold them, and perhaps others."""
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
        """How many records it has leased now."""
