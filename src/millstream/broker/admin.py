"""The verbs of a session for administrators: topics, partitions and storage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple
from uuid import UUID

from millstream.broker.topics import Topic
from millstream.cluster.base import Leadership
from millstream.core.errors import Code, RequestError
from millstream.security.rights import CLUSTER_NAME, Kind, Operation

if TYPE_CHECKING:
    from millstream.broker.session import Session


class Storage(NamedTuple):
    """Where the logs are."""

    topics: list[Topic]
    location: str
    bytes: int
    bytes_free: int


class Admin:
    __slots__ = ("_broker", "_session")

    def __init__(self, session: Session) -> None:
        self._session = session
        self._broker = session._broker

    def check_create(self, name: str) -> None:
        """CREATE on the cluster is the right to create any topic."""
        if self._session.cluster_code(Operation.CREATE):
            self._session.check(Operation.CREATE, Kind.TOPIC, name)

    async def create_topic(
        self,
        name: str,
        partition_count: int,
        overrides: Mapping[str, str],
        validate_only: bool,
        replication_factor: int = 1,
    ) -> Topic:
        self.check_create(name)
        brokers = len(self._session.nodes("", 0))
        if replication_factor > brokers and self._broker.topics.get(name) is None:
            detail = f"replication factor {replication_factor} exceeds broker count {brokers}"
            raise RequestError(Code.INVALID_REPLICATION_FACTOR, detail)
        return await self._broker.topics.create(name, partition_count, overrides, validate_only)

    async def delete_topic(self, key: str | UUID) -> Topic:
        topic = self._session.topic(key, Operation.DELETE)
        await self._broker.delete_topic(topic.name)
        return topic

    async def grow_topic(self, name: str, partition_count: int, assignments: int | None, validate_only: bool) -> None:
        """`assignments`: how many new partitions the client assigned to brokers."""
        self._session.check(Operation.ALTER, Kind.TOPIC, name)
        async with self._broker.changing:
            topic = self._broker.topics.get(name)
            added = partition_count - (topic.partition_count if topic is not None else 0)
            if assignments is not None and assignments != added:
                detail = f"{assignments} assignments for {added} new partitions"
                raise RequestError(Code.INVALID_REPLICA_ASSIGNMENT, detail)
            await self._broker.topics.grow(name, partition_count, validate_only)

    def leadership(self, topic: str, index: int) -> Leadership | None:
        """Of a partition, to move or elect its leader; None: there is no such partition."""
        self._session.check(Operation.ALTER, Kind.CLUSTER, CLUSTER_NAME)
        found = self._broker.topics.get(topic)
        if found is None or not 0 <= index < found.partition_count:
            return None
        leaderships = self._broker.cluster.leaderships(found.id)
        return leaderships[index % len(leaderships)]

    def storage(self) -> Storage:
        self._session.check(Operation.DESCRIBE, Kind.CLUSTER, CLUSTER_NAME)
        return Storage(list(self._broker.topics), *self._broker.storage())
