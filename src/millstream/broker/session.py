"""A session: one client's way into the broker, and the place where its rights are checked.

A session knows who asks: the principal, the client id, the address and the door. It has one verb per thing that can be
asked. A verb checks the right to do it, then asks the broker; the broker itself checks no rights.

Rules
-----
1. A resource that the principal may not use is refused before the broker looks it up, so an error does not tell whether
   a named topic or group exists. An unknown topic id is reported as unknown: ids cannot be guessed.
2. Members of groups, share sessions and fetch sessions belong to the principal that created them.
3. Answers of the authorizer may be cached until its `changes` differ, and only for the same principal and host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING
from uuid import UUID

from millstream.broker.fetch import Fetch, Wanted
from millstream.broker.groups.described import ClassicView, ConsumerView, Listed
from millstream.broker.groups.groups import Beat, BeatAnswer, Fetched, Join, Joined, ShareBeat, Synced, TopicCommit
from millstream.broker.groups.queue.share import ShareGroup
from millstream.broker.partition import Partition
from millstream.broker.topics import Topic
from millstream.core.errors import Code, RequestError
from millstream.security.principal import ANONYMOUS, Principal
from millstream.security.rights import Kind, Operation

if TYPE_CHECKING:
    from millstream.broker.broker import Broker


class Session:
    __slots__ = ("_authorizer", "broker", "client_id", "door", "host", "principal")

    def __init__(
        self, broker: Broker, door: str, host: str, *, principal: Principal = ANONYMOUS, client_id: str = ""
    ) -> None:
        self.broker = broker
        self.door = door
        self.host = host
        self.principal = principal
        self.client_id = client_id
        self._authorizer = broker.authorizer

    # Rights

    def allows(self, operation: Operation, kind: Kind, name: str) -> bool:
        return self._authorizer.allows(self.principal, self.host, operation, kind, name)

    def check(self, operation: Operation, kind: Kind, name: str) -> None:
        if not self.allows(operation, kind, name):
            detail = f"{self.principal} may not {operation.name.lower().replace('_', ' ')} {kind.name.lower()} {name}"
            raise RequestError(kind.refusal, detail)

    def _group(self, operation: Operation, group_id: str) -> None:
        self.check(operation, Kind.GROUP, group_id)

    # Topics and records

    def topic(self, key: str | UUID, operation: Operation) -> Topic:
        """The topic with this name or id."""
        if isinstance(key, str):
            self.check(operation, Kind.TOPIC, key)
        topic = self.broker.topics.find(key)
        if topic is None:
            code = Code.UNKNOWN_TOPIC_OR_PARTITION if isinstance(key, str) else Code.UNKNOWN_TOPIC_ID
            raise RequestError(code, f"there is no topic {key}")
        if not isinstance(key, str):
            self.check(operation, Kind.TOPIC, topic.name)
        return topic

    def partition(self, key: str | UUID, index: int, operation: Operation) -> Partition:
        topic = self.topic(key, operation)
        if not 0 <= index < len(topic.partitions):
            raise RequestError(Code.UNKNOWN_TOPIC_OR_PARTITION, f"there is no partition {index} of topic {topic.name}")
        return topic.partitions[index]

    def fetch(self, wanted: list[Wanted], bytes_min: int, bytes_max: int, committed: bool = False) -> Fetch:
        denied: frozenset[str | UUID] = frozenset()
        if not self._authorizer.is_open:
            denied = frozenset(key for key in {one.topic for one in wanted} if not self._may_read(key))
        return Fetch(self.broker.topics, wanted, bytes_min, bytes_max, denied, committed)

    def _may_read(self, key: str | UUID) -> bool:
        if isinstance(key, str):
            return self.allows(Operation.READ, Kind.TOPIC, key)
        topic = self.broker.topics.by_id(key)
        return topic is None or self.allows(Operation.READ, Kind.TOPIC, topic.name)

    # Members of groups

    async def join(self, request: Join) -> Joined:
        self._group(Operation.READ, request.group_id)
        return await self.broker.groups.join(
            request._replace(principal=self.principal, client_id=self.client_id, client_host=self.host)
        )

    async def sync(
        self,
        group_id: str,
        member_id: str,
        instance_id: str | None,
        generation: int,
        protocol: tuple[str | None, str | None],
        assignments: Mapping[str, bytes],
    ) -> Synced:
        self._group(Operation.READ, group_id)
        return await self.broker.groups.sync(
            group_id, member_id, instance_id, generation, protocol, assignments, self.principal
        )

    def heartbeat(self, group_id: str, member_id: str, instance_id: str | None, generation: int) -> None:
        self._group(Operation.READ, group_id)
        self.broker.groups.heartbeat(group_id, member_id, instance_id, generation, self.principal)

    def leave(self, group_id: str, members: Iterable[tuple[str, str | None]]) -> list[Code]:
        self._group(Operation.READ, group_id)
        return self.broker.groups.leave(group_id, members)

    async def consumer_heartbeat(self, beat: Beat) -> BeatAnswer:
        self._group(Operation.READ, beat.group_id)
        beat = replace(beat, principal=self.principal, client_id=self.client_id, client_host=self.host)
        return await self.broker.groups.consumer_heartbeat(beat)

    async def share_heartbeat(self, beat: ShareBeat) -> BeatAnswer:
        self._group(Operation.READ, beat.group_id)
        beat = replace(beat, principal=self.principal, client_id=self.client_id, client_host=self.host)
        return await self.broker.groups.share_heartbeat(beat)

    def share_group(self, group_id: str, member_id: str) -> ShareGroup:
        """The group of a member's share session."""
        self._group(Operation.READ, group_id)
        return self.broker.groups.share_for(group_id, member_id, self.principal)

    # Offsets

    async def commit(
        self, group_id: str, member_id: str, instance_id: str | None, epoch: int, commits: Sequence[TopicCommit]
    ) -> list[list[Code]]:
        self._group(Operation.READ, group_id)
        return await self.broker.groups.commit(
            group_id, member_id, instance_id, epoch, commits, self.host, principal=self.principal
        )

    def committed(
        self,
        group_id: str,
        topics: Sequence[tuple[str | UUID, Sequence[int]]] | None,
        member_id: str | None = None,
        epoch: int = -1,
    ) -> list[Fetched]:
        self._group(Operation.DESCRIBE, group_id)
        return self.broker.groups.fetch(group_id, topics, member_id, epoch)

    async def delete_offsets(self, group_id: str, topics: Sequence[tuple[str, Sequence[int]]]) -> list[list[Code]]:
        self._group(Operation.DELETE, group_id)
        return await self.broker.groups.delete_offsets(group_id, topics)

    # Groups as a whole

    def describe_classic(self, group_id: str) -> ClassicView:
        self._group(Operation.DESCRIBE, group_id)
        return self.broker.groups.describe(group_id)

    def describe_consumer(self, group_id: str) -> ConsumerView:
        self._group(Operation.DESCRIBE, group_id)
        return self.broker.groups.consumer_describe(group_id)

    def describe_share(self, group_id: str) -> ShareGroup:
        self._group(Operation.DESCRIBE, group_id)
        return self.broker.groups.share(group_id)

    def list_groups(self, states: Iterable[str] = (), types: Iterable[str] = ()) -> list[Listed]:
        listed = self.broker.groups.list(states, types)
        return [each for each in listed if self.allows(Operation.DESCRIBE, Kind.GROUP, each.group_id)]

    async def delete_group(self, group_id: str) -> None:
        self._group(Operation.DELETE, group_id)
        await self.broker.groups.delete(group_id)
