"""A worker of a queue on a server.

A Millstream server gets our own member of a share group, which has every verb of the embedded broker
(`remote_jobs.py`). Any other cluster, and one with TLS, gets librdkafka's share consumer, which is limited to
Kafka's protocol (`remote_share.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

from confluent_kafka import KafkaException
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ConfigSource, ResourceType

from millstream.client.cluster import ClusterError, KafkaCluster
from millstream.client.iterators import Queue, QueueOptions
from millstream.client.link import LinkBroken
from millstream.client.records import Job
from millstream.client.remote_jobs import LeasedJobs
from millstream.client.remote_reading import PASSING
from millstream.client.remote_share import SharedJobs
from millstream.core.errors import Unreachable, code_of

if TYPE_CHECKING:
    from millstream.client.remote import Remote

V = TypeVar("V")
OUR_SETTING = "http"
"""Only Millstream brokers have this setting."""


class Jobs(Protocol[V]):
    async def start(self) -> None: ...

    async def next(self, timeout: float | None) -> Job[V] | None:
        """The next job; None after the timeout, or after `shut`."""

    async def shut(self) -> None:
        """Unacknowledged jobs go to other workers at once."""


class RemoteQueue(Queue[V]):
    _owner: Remote

    def __init__(self, owner: Remote, options: QueueOptions) -> None:
        super().__init__(owner, options)
        self._options = options
        self._jobs: Jobs[V] | None = None

    async def _start(self) -> None:
        self._owner.check_open()
        for topic in self._topics:
            await self._owner.partition_count(topic)
        is_ours = not self._owner.is_secured and await self._owner.worker.call(self._is_ours)
        await self._owner.worker.call(self._configure, is_ours)
        kind: type[LeasedJobs[V]] | type[SharedJobs[V]] = SharedJobs
        if is_ours:
            kind = LeasedJobs
        self._jobs = kind(self._owner, self._options)
        await self._jobs.start()

    def _configure(self, is_ours: bool) -> None:
        """Settings apply to a new group only; an existing group keeps its own."""
        admin, timeout = self._owner.admin, self._owner.timeout
        listed = admin.list_consumer_groups(request_timeout=timeout).result()
        if any(group.group_id == self._group for group in listed.valid):
            return
        if self._is_listed() if is_ours else self._has_settings():  # librdkafka does not list share groups
            return
        entries = [
            ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
            for name, value in self._settings.items()
        ]
        resource = ConfigResource(ResourceType.GROUP, self._group, incremental_configs=entries)
        for future in admin.incremental_alter_configs([resource], request_timeout=timeout).values():
            future.result()

    def _is_listed(self) -> bool:
        cluster = KafkaCluster(self._owner.bootstrap, "millstream", self._owner.timeout)
        try:
            return self._group in cluster.share_groups(self._group)
        except (LinkBroken, ClusterError) as error:
            raise Unreachable(str(error)) from error
        finally:
            cluster.close()

    def _has_settings(self) -> bool:
        admin, timeout = self._owner.admin, self._owner.timeout
        resource = ConfigResource(ResourceType.GROUP, self._group)
        entries = admin.describe_configs([resource], request_timeout=timeout)[resource].result()
        return any(entry.source == ConfigSource.GROUP_CONFIG.value for entry in entries.values())

    def _is_ours(self) -> bool:
        """Whether the server is a Millstream server."""
        admin, timeout = self._owner.admin, self._owner.timeout
        node = admin.list_topics(timeout=timeout).orig_broker_id
        resource = ConfigResource(ResourceType.BROKER, str(node))
        try:
            return OUR_SETTING in admin.describe_configs([resource], request_timeout=timeout)[resource].result()
        except KafkaException as error:
            number = error.args[0].code()
            code = code_of(number)
            if number in PASSING or (code is not None and code.retriable):  # a retry may find a Millstream server
                raise
            return False  # a refusal: not Millstream

    async def _next(self, timeout: float | None) -> Job[V] | None:
        assert self._jobs is not None
        return await self._jobs.next(timeout)

    async def _shut(self, clean: bool) -> None:
        if self._jobs is not None:
            await self._jobs.shut()
