"""A Kafka cluster for our own readers and writers: partition leaders, and the calls that go to them.

After a retriable error or a broken link, a call refreshes the metadata and retries, until `timeout_seconds` are over.
Every other error, and the timeout, is a `ClusterError` that names the call.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn, TypeVar

from millstream.client.link import Dial, Link, LinkBroken, plain
from millstream.core.errors import Code, MillstreamError, code_of
from millstream.wire.kafka import requests
from millstream.wire.kafka.metadata import INTERNAL_TOPICS
from millstream.wire.kafka.requests import EARLIEST, LATEST, Fetched, Metadata, Node, TopicPartition

T = TypeVar("T")
LIST_GROUPS = 16
FIRST_PAUSE_SECONDS = 0.05
PAUSE_SECONDS_MAX = 1.0


class ClusterError(MillstreamError):
    """A call that failed. `code` is the broker's; None if no broker was reached."""

    def __init__(self, text: str, code: int | None = None) -> None:
        super().__init__(text)
        self.code = code


class _Retry(Exception):
    """A retry may help."""

    def __init__(self, text: str, code: int | None = None) -> None:
        super().__init__(text)
        self.code = code


class KafkaCluster:
    def __init__(
        self, bootstrap: str, client_id: str = "millstream", timeout_seconds: float = 30.0, dial: Dial = plain
    ) -> None:
        self._bootstrap = [_parse(address) for address in bootstrap.split(",") if address.strip()]
        if not self._bootstrap:
            raise ClusterError("bootstrap.servers names no broker; it takes HOST:PORT, several with commas")
        self._client_id = client_id
        self._timeout_seconds = timeout_seconds
        self._dial = dial
        self._links: dict[tuple[str, int], Link] = {}
        self._metadata: Metadata | None = None
        self._known: set[str] = set()
        self._coordinators: dict[str, Node] = {}

    # -- asking ------------------------------------------------------------------------------------------------------

    def topics(self) -> list[str]:
        """Every topic that is not internal."""
        metadata = self._persist("list the topics", lambda: self._fetch_metadata(None))
        return sorted(name for name in metadata.leaders if name not in INTERNAL_TOPICS)

    def partitions(self, topics: Iterable[str]) -> dict[str, list[int]]:
        """The partitions of each topic that exists; other topics are missing from the result."""
        wanted = sorted(set(topics))
        metadata = self._persist(f"find {', '.join(wanted)}", lambda: self._fetch_metadata(wanted))
        return {topic: sorted(leaders) for topic, leaders in metadata.leaders.items()}

    def offsets(self, times: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """The offset of the first record at or after each time; the end if there is none."""
        found: dict[TopicPartition, int] = {}

        def ask() -> dict[TopicPartition, int]:
            by_node: dict[Node, dict[TopicPartition, int]] = {}
            for place, timestamp in times.items():
                if place not in found:
                    by_node.setdefault(self._leader(place), {})[place] = timestamp
            for node, part in by_node.items():
                link = self._link(node)
                version = link.version(requests.LIST_OFFSETS)
                body = requests.encode_list_offsets(part, version)
                reader = link.call(requests.LIST_OFFSETS, body, version=version)
                for place, answer in requests.decode_list_offsets(reader, version).items():
                    self._check(answer.error, place)
                    found[place] = answer.offset
            return found

        self._persist("look up offsets", ask)
        beyond = {place: LATEST for place, offset in found.items() if offset < 0 and times[place] >= 0}
        if beyond:
            found.update(self.offsets(beyond))
        return found

    def earliest(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return self.offsets(dict.fromkeys(places, EARLIEST))

    def latest(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return self.offsets(dict.fromkeys(places, LATEST))

    def fetch(self, place: TopicPartition, offset: int, bytes_max: int, wait_ms_max: int) -> Fetched:
        """Batches from the one that holds `offset`. OFFSET_OUT_OF_RANGE is not raised: the caller decides."""

        def ask() -> Fetched:
            link = self._link(self._leader(place))
            version = link.version(requests.FETCH)
            body = requests.encode_fetch(*place, offset, bytes_max, wait_ms_max, version)
            fetched = requests.decode_fetch(link.call(requests.FETCH, body, version=version), version)
            if fetched.error != Code.OFFSET_OUT_OF_RANGE:
                self._check(fetched.error, place)
            return fetched

        return self._persist(f"read {_name(place)} from offset {offset}", ask)

    # -- writing -----------------------------------------------------------------------------------------------------

    def init_producer(self) -> tuple[int, int]:
        """A new producer id and epoch."""

        def ask() -> tuple[int, int]:
            link = self._any_link()
            reader = link.call(
                requests.INIT_PRODUCER_ID,
                requests.encode_init_producer_id(),
                version=link.version(requests.INIT_PRODUCER_ID),
            )
            error, producer_id, epoch = requests.decode_init_producer_id(reader)
            self._check(error, None)
            return producer_id, epoch

        return self._persist("get a producer id", ask)

    def produce(self, place: TopicPartition, batch: bytearray | memoryview) -> int:
        """Stores one batch, acknowledged by all replicas; returns its offset. Idempotent batches may be
        repeated.
        """

        def ask() -> int:
            link = self._link(self._leader(place))
            head = requests.encode_produce_head(*place, len(batch), int(self._timeout_seconds * 1000))
            reader = link.call(requests.PRODUCE, head, batch, version=link.version(requests.PRODUCE))
            error, base_offset = requests.decode_produce(reader)
            if error == Code.DUPLICATE_SEQUENCE_NUMBER:
                return base_offset
            self._check(error, place)
            return base_offset

        return self._persist(f"write to {_name(place)}", ask)

    def commit(self, group: str, offsets: Mapping[TopicPartition, int]) -> None:
        """Commits a group's offsets, without a member id."""

        def ask() -> None:
            node = self._coordinators.get(group) or self._find_coordinator(group)
            link = self._link(node)
            body = requests.encode_offset_commit(group, offsets)
            reader = link.call(requests.OFFSET_COMMIT, body, version=link.version(requests.OFFSET_COMMIT))
            for place, error in requests.decode_offset_commit(reader).items():
                self._check(error, place)

        self._persist(f"commit the offsets of group {group}", ask)

    def coordinator(self, group: str) -> Link:
        """A new link to the coordinator of a group; the caller closes it."""

        return self._persist(f"find the coordinator of {group}", lambda: self._open(self._find_coordinator(group)))

    def share_groups(self, group: str) -> set[str]:
        """The share groups that the coordinator of `group` lists."""

        def ask() -> set[str]:
            link = self._link(self._find_coordinator(group))
            answer = link.ask(LIST_GROUPS, 5, 5, {"states_filter": [], "types_filter": ["share"]})
            self._check(answer.error_code, None)
            return {each.group_id for each in answer.groups}

        return self._persist("list the share groups", ask)

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()

    # -- retrying ----------------------------------------------------------------------------------------------------

    def _persist(self, what: str, ask: Callable[[], T]) -> T:
        deadline = time.monotonic() + self._timeout_seconds
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                return ask()
            except (LinkBroken, _Retry) as error:
                self.close()
                self._metadata = None
                self._coordinators.clear()
                if time.monotonic() + pause > deadline:
                    code = error.code if isinstance(error, _Retry) else None
                    raise ClusterError(f"cannot {what} within {self._timeout_seconds:g} s: {error}", code) from error
            time.sleep(pause)
            pause = min(pause * 2, PAUSE_SECONDS_MAX)

    def _check(self, error: int, place: TopicPartition | None) -> None:
        if error == Code.NONE:
            return
        code = code_of(error)
        text = f"{code.name}: {code.text}" if code is not None else f"error {error}"
        where = f"{_name(place)}: " if place is not None else ""
        if code is not None and code.retriable:
            raise _Retry(where + text, error)
        self._fail(where + text, error)

    def _fail(self, text: str, code: int) -> NoReturn:
        raise ClusterError(text, code)

    # -- connections and leaders -------------------------------------------------------------------------------------

    def _fetch_metadata(self, topics: Sequence[str] | None) -> Metadata:
        link = self._any_link()
        version = link.version(requests.METADATA)
        body = requests.encode_metadata(topics, version)
        metadata = requests.decode_metadata(link.call(requests.METADATA, body, version=version), version)
        for topic, error in metadata.errors.items():
            if error != Code.UNKNOWN_TOPIC_OR_PARTITION:
                self._check(error, (topic, -1))
        if topics is not None:
            self._known.update(topics)
        return metadata

    def _leader(self, place: TopicPartition) -> Node:
        topic, partition = place
        if self._metadata is None or topic not in self._metadata.leaders:
            self._known.add(topic)
            self._metadata = self._fetch_metadata(sorted(self._known))
        leader = self._metadata.leaders.get(topic, {}).get(partition, -1)
        if leader not in self._metadata.nodes:
            raise _Retry(f"{_name(place)} has no leader, or does not exist", Code.UNKNOWN_TOPIC_OR_PARTITION)
        return self._metadata.nodes[leader]

    def _find_coordinator(self, group: str) -> Node:
        link = self._any_link()
        body = requests.encode_find_coordinator(group)
        reader = link.call(requests.FIND_COORDINATOR, body, version=link.version(requests.FIND_COORDINATOR))
        error, node = requests.decode_find_coordinator(reader)
        self._check(error, None)
        self._coordinators[group] = node
        return node

    def _any_link(self) -> Link:
        for link in self._links.values():
            return link
        failure: LinkBroken | None = None
        for host, port in self._bootstrap:
            try:
                return self._link(Node(-1, host, port))
            except LinkBroken as error:
                failure = error
        assert failure is not None
        raise failure

    def _link(self, node: Node) -> Link:
        address = (node.host, node.port)
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = self._open(node)
        return link

    def _open(self, node: Node) -> Link:
        return Link(node.host, node.port, self._client_id, self._timeout_seconds, self._dial)


def _name(place: TopicPartition) -> str:
    return f"{place[0]}-{place[1]}" if place[1] >= 0 else place[0]


def _parse(address: str) -> tuple[str, int]:
    match = re.fullmatch(r"(?:\w+://)?\[?([^\]]+?)\]?:(\d{1,5})", address.strip())
    if match is None:
        raise ClusterError(f"bootstrap.servers: {address.strip()!r} is not HOST:PORT")
    return match[1], int(match[2])
