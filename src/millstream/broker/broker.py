"""The broker: topics, groups and producers over a store, with one clock. Clients reach it through a session."""

from __future__ import annotations

import asyncio
import logging
import struct
import uuid
from collections.abc import Awaitable, Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import chain

from millstream.broker.broker_settings import BrokerSettings
from millstream.broker.door_register import DoorRegister
from millstream.broker.groups.cursor import Cursors
from millstream.broker.groups.exclusive import ExclusiveMember, ExclusiveSettings, fall_back
from millstream.broker.groups.group_configs import GroupConfigs
from millstream.broker.groups.groups import Groups
from millstream.broker.groups.queue.queues import Queues
from millstream.broker.groups.settings import GroupSettings
from millstream.broker.groups.stream.polling import Polling
from millstream.broker.inlet import Inlet
from millstream.broker.outlet import Outlet
from millstream.broker.partition import Partition
from millstream.broker.producer_ids import ProducerIds
from millstream.broker.replication.replicas import Replicas
from millstream.broker.scrub import Scrub
from millstream.broker.topics import Topic, Topics
from millstream.broker.verification import Verification
from millstream.cluster.base import Cluster, Node, Owns, Solo
from millstream.config import Address, Config
from millstream.core.clock import Clock, Timer, wait
from millstream.core.errors import Code, RequestError, RevisionConflict
from millstream.core.metrics import Metrics
from millstream.log.damage import DamagedRange
from millstream.security.rights import AllowAll, Authorizer
from millstream.stores.base import LogStore, MetaStore, Put
from millstream.stores.pair import CLUSTER_KEY

logger = logging.getLogger(__name__)


class Broker:
    def __init__(
        self,
        config: Config,
        logs: LogStore,
        meta: MetaStore,
        clock: Clock,
        metrics: Metrics,
        cluster: Cluster | None = None,
        authorizer: Authorizer | None = None,
    ) -> None:
        self.config = config
        self.authorizer = authorizer or AllowAll()
        self.cluster = cluster or Solo(config.node_id)
        self.clock = clock
        self.metrics = metrics
        self.node_id = config.node_id
        self.replicas: Replicas | None = None
        """Of a broker in a replicated cluster."""
        self.cluster_id = ""
        self._logs = logs
        self._meta = meta
        self._advertise = Address.parse(config.advertise) if config.advertise else None
        self._housekeeping: Timer | None = None
        self._is_closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.settings = BrokerSettings(config, meta)
        self.topics = Topics(
            meta,
            logs,
            clock,
            defaults=self.settings.topic_defaults(),
            partitions_max=config.partitions_max,
            default_partitions=config.default_partitions,
            auto_create=config.auto_create_topics,
        )
        self.group_configs = GroupConfigs(meta)
        settings = GroupSettings(
            group_configs=self.group_configs.by_group,
            groups_max=config.groups_max,
            groups_per_peer_max=config.groups_per_peer_max,
            session_timeout_min_ms=config.session_timeout_min_ms,
            session_timeout_max_ms=config.session_timeout_max_ms,
            initial_rebalance_delay_ms=config.initial_rebalance_delay_ms,
            consumer_migration_policy=config.group_consumer_migration_policy,
            offsets_retention_ms=config.offsets_retention_ms,
        )
        self.queues = Queues(
            meta,
            clock,
            self.topics,
            settings,
            self.in_background,
            lambda: chain(self.groups.committed(), self.cursors.positions()),
            self.cluster,
        )
        self.groups = Groups(meta, clock, self.topics, settings, queues=self.queues, cluster=self.cluster)
        self.queues.is_taken = self.groups.is_stream
        self.outlet = Outlet()
        self.polling = Polling(
            self.groups,
            self.outlet,
            lambda wanted: min(max(wanted, config.session_timeout_min_ms), config.session_timeout_max_ms),
        )
        self.cursors = Cursors(meta, clock, self.topics, self.outlet, self.cluster)
        self.cluster.serve_groups(self._adopt, self._release)
        self.producer_ids = ProducerIds(meta)
        self.door_register = DoorRegister(meta, self.node_id)
        self._scrub = Scrub(self.topics, meta, clock, self.cluster, metrics, config.scrub_bytes_per_second)
        self.verification: Verification | None = None
        """The last one. It continues after its client disconnects."""
        self.changing = asyncio.Lock()
        """Serialises changes of settings, from the read to the durable write, as Kafka's controller does. Otherwise one
        of two concurrent changes would be lost.
        """

    async def start(self) -> None:
        await self._logs.start()
        await self._meta.start()
        await self._logs.match(self._meta)
        try:
            await self._load()
        except (ValueError, TypeError, LookupError, AttributeError, struct.error) as error:
            raise self._meta.unreadable(error) from error
        self._schedule_housekeeping()
        self._scrub.start()

    async def _load(self) -> None:
        """Loads all metadata. Stored values may be damaged, so every one of them is decoded inside this method."""
        self.cluster_id = await self._load_cluster_id()
        await self.settings.start(self.topics.set_defaults)
        await self.topics.start()
        if isinstance(self.cluster, Solo):
            await fall_back(self._meta, self.topics)
        await self.group_configs.start()
        await self.door_register.start()
        await self.queues.start()
        await self.groups.start()

    async def _adopt(self, owns: Owns) -> None:
        if not isinstance(self.cluster, Solo):
            await self.topics.refresh()  # adopted state may name topics that this broker does not know
        await self.groups.adopt(owns)
        await self.cursors.adopt(owns)

    def _release(self) -> None:
        self.groups.release()
        self.cursors.release()

    async def _load_cluster_id(self) -> str:
        fresh = uuid.uuid4().hex[:22]
        try:
            await self._meta.transact(Put(CLUSTER_KEY, fresh.encode(), if_revision=0))
            return fresh
        except RevisionConflict:
            found = await self._meta.get(CLUSTER_KEY)
            assert found is not None
            return found.value.decode()

    def advertised(self, local_host: str, local_port: int) -> tuple[str, int]:
        """The address for clients to connect to: the configured one, else the one that this client used."""
        if self._advertise is not None:
            return self._advertise.host, self._advertise.port
        return local_host, local_port

    def nodes(self, local_host: str, local_port: int) -> list[Node]:
        """All live brokers by node id, this one with its advertised address."""
        return sorted([Node(self.node_id, *self.advertised(local_host, local_port)), *self.cluster.others()])

    def inlet(self, partition: Partition) -> Inlet:
        """Takes single records."""
        if partition.inlet is None:
            partition.inlet = Inlet(partition, self.clock, self.metrics, self.config.partition_unsynced_bytes_max)
        return partition.inlet

    @property
    def can_follow(self) -> bool:
        """Whether partitions can copy a leader's batches with their offsets."""
        return self._logs.can_follow

    @property
    def atomic(self) -> bool:
        """Whether appends made `together` are atomic across partitions."""
        return self._logs.atomic

    def together(self) -> AbstractContextManager[None]:
        return self._logs.together()

    def exclusive(self, group: str, topic: Topic, settings: ExclusiveSettings) -> ExclusiveMember:
        """A new member of an exclusive group, not yet open. Raises `RequestError` if the name is another group's."""
        if self.groups.is_stream(group) or self.queues.get(group) is not None:
            detail = f"group {group} is not exclusive; choose another name, or delete it"
            raise RequestError(Code.INCONSISTENT_GROUP_PROTOCOL, detail)
        return ExclusiveMember(self._meta, self.clock, self.topics, topic, group, uuid.uuid4().hex, settings)

    async def delete_topic(self, name: str) -> None:
        self.in_background(await self.topics.delete(name))

    def storage(self) -> tuple[str, int, int]:
        """Location of the logs, its size and its free bytes."""
        return (self._logs.location, *self._logs.room())

    def shortages(self) -> Iterator[str]:
        """Why the broker refuses records, or soon will: the disk has no room for the largest batch."""
        location, total, free = self.storage()
        if 0 <= free < self.config.message_bytes_max:
            yield (
                f"the disk is full: {location} has {free} of {total} bytes free; the broker refuses records; delete "
                "or trim topics, or other files"
            )

    def failures(self) -> Iterator[str]:
        """Why the broker is unhealthy: one sentence per read-only log, and one for read-only metadata."""
        if self._meta.failure is not None:
            yield f"the metadata store is read-only: {self._meta.failure}"
        for topic in self.topics:
            for partition in topic.partitions:
                if partition.log.failure is not None:
                    yield f"{topic.name}-{partition.index} is read-only: {partition.log.failure}"

    def damage(self) -> Iterator[tuple[str, int, DamagedRange]]:
        """All known damage: topic, partition and range of offsets."""
        for topic in self.topics:
            for partition in topic.partitions:
                for damaged in partition.log.damage.ranges:
                    yield topic.name, partition.index, damaged

    def verify(self, topics: Iterable[Topic]) -> Verification:
        self.verification = started = Verification(topics, self.metrics)
        self.in_background(started.run())
        return started

    def in_background(self, work: Awaitable[None]) -> None:
        """Runs work beside the requests. Errors are logged; `close` waits for the work."""

        async def run() -> None:
            try:
                await work
            except Exception:
                logger.exception("background task failed")

        task = asyncio.ensure_future(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _schedule_housekeeping(self) -> None:
        seconds = self.config.housekeeping_interval_ms / 1000
        self._housekeeping = self.clock.call_later(seconds, lambda: self.in_background(self._housekeep()))

    async def _housekeep(self) -> None:
        try:
            await self._logs.housekeep()
            await self._meta.housekeep()
        finally:
            if not self._is_closed:
                self._schedule_housekeeping()

    async def close(self) -> None:
        """A clean shutdown: everything is synced and checkpointed."""
        self._is_closed = True
        if self._housekeeping is not None:
            self._housekeeping.cancel()
        self.groups.close()
        try:
            await self._scrub.close()
            await self.queues.close()
            await self.cursors.close()
            if self._tasks:
                await wait(self.clock, self._tasks, seconds=10)
            if self._housekeeping is not None:
                self._housekeeping.cancel()
            await self.cluster.leave()
        finally:  # after any error, sync what was accepted and release the store
            self.settings.close()
            self.group_configs.close()
            self.door_register.close()
            self.topics.close()
            try:
                await self._logs.close()
            finally:
                await self._meta.close()
