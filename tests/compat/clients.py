"""Four real clients behind one shape, so that a test is written once and shown with each of them.

A `Client` creates topics and produces; it opens `Reader`s (partitions chosen by hand, from some position) and `Member`s
(of a group). Both are polled; what they have seen stays in `seen`, in order. Calls block, with a deadline.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

DEADLINE_SECONDS = 60.0
SESSION_MS = 20_000
"""No test waits for its end, and a busy machine must not reach it."""
HEARTBEAT_MS = 150
REQUEST_MS = 20_000

Headers = list[tuple[str, bytes]]


class Sent(NamedTuple):
    """A record to produce. Without a partition the client's own partitioner decides."""

    value: bytes | None
    key: bytes | None = None
    headers: Headers | None = None
    partition: int | None = None
    timestamp_ms: int | None = None


class Seen(NamedTuple):
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp_ms: int


class Start(NamedTuple):
    """Where a reader begins; exactly one is set, or none for the end."""

    offset: int | None = None
    timestamp_ms: int | None = None


FROM_START = Start(offset=-2)
FROM_END = Start()


class Reader(abc.ABC):
    def __init__(self) -> None:
        self.seen: list[Seen] = []

    def poll(self, seconds: float = 0.2) -> list[Seen]:
        """What arrived, waiting no longer than this for the first."""
        arrived = self._poll(seconds)
        self.seen += arrived
        return arrived

    def read(self, count: int) -> list[Seen]:
        """Polls until so many have been seen, all in all."""
        wait_for(lambda: len(self.seen) >= count or (self.poll(), False)[1], f"{count} records, saw {len(self.seen)}")
        return self.seen

    @abc.abstractmethod
    def _poll(self, seconds: float) -> list[Seen]: ...

    @abc.abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Member(Reader):
    """A member of a group, that reads new partitions from the start and commits when told."""

    commits_by_itself: ClassVar[bool] = False
    """When it loses partitions and when it closes; `commit` only waits, and takes seconds."""

    survives_restart: ClassVar[bool] = True
    """Whether it waits for a broker that is gone, and goes on."""

    def give_up(self) -> None:
        """Ends without a word to the broker, which is gone."""
        raise NotImplementedError

    @property
    @abc.abstractmethod
    def assignment(self) -> set[int]:
        """The partitions it owns now, of the one topic that it subscribes to."""

    @abc.abstractmethod
    def commit(self) -> None:
        """Commits everything seen; returns when the broker has it."""


class Client(abc.ABC):
    name: ClassVar[str]
    codecs: ClassVar[Sequence[str]] = ("gzip", "snappy", "lz4", "zstd")
    assignors: ClassVar[Sequence[str]]
    static_members: ClassVar[bool] = True

    def __init__(self, address: str) -> None:
        self.address = address

    @abc.abstractmethod
    def create_topic(self, topic: str, partitions: int) -> None: ...

    @abc.abstractmethod
    def produce(
        self, topic: str, records: Iterable[Sent], *, codec: str | None = None, idempotent: bool = False
    ) -> None:
        """Returns when every record is acknowledged by all (acks=all)."""

    @abc.abstractmethod
    def reader(self, topic: str, partitions: Iterable[int], start: Start) -> Reader:
        """Its position is settled when this returns: what is produced from now on is seen."""

    @abc.abstractmethod
    def member(self, group: str, topic: str, *, assignor: str = "range", instance: str | None = None) -> Member: ...


def wait_for(
    condition: Callable[[], object], what: str, seconds: float = DEADLINE_SECONDS, *, pause: float = 0.0
) -> None:
    """Asks until the condition holds. A condition that does not wait itself, by polling, needs a `pause`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:.0f} s: {what}"
        time.sleep(pause)


def settle(members: Sequence[Member], shares: Callable[[list[set[int]]], bool]) -> None:
    """Polls all members until their assignments are as wanted."""

    def agreed() -> bool:
        for member in members:
            member.poll(0.05)
        return shares([member.assignment for member in members])

    wait_for(agreed, f"an agreement, have {[member.assignment for member in members]}")


def shared_evenly(partitions: int) -> Callable[[list[set[int]]], bool]:
    """Every partition has one owner, and the members' numbers of partitions differ by at most one."""

    def check(assignments: list[set[int]]) -> bool:
        sizes = [len(each) for each in assignments]
        return (
            sum(sizes) == partitions
            and set().union(*assignments) == set(range(partitions))
            and max(sizes) - min(sizes) <= 1
        )

    return check


def by_partition(seen: Iterable[Seen]) -> dict[int, list[Seen]]:
    found: dict[int, list[Seen]] = {}
    for record in seen:
        found.setdefault(record.partition, []).append(record)
    return found


def load(address: str) -> dict[str, Client]:
    from tests.compat.client_aiokafka import AioKafka
    from tests.compat.client_confluent import Confluent
    from tests.compat.client_kafka_python import KafkaPython
    from tests.compat.client_kcat import Kcat

    return {kind.name: kind(address) for kind in (Confluent, AioKafka, KafkaPython, Kcat)}


NAMES = ("confluent-kafka", "aiokafka", "kafka-python", "kcat")
