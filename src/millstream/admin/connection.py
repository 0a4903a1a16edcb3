"""A connection to a broker for administration: its clients are created at first use, and fail quickly.

librdkafka retries for ever. That is right for a service and wrong for an administrative operation: one plain connect
checks the address before librdkafka uses it.
"""

from __future__ import annotations

import concurrent.futures
import logging
import socket
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from millstream.admin.failure import Failure, explain, unreachable

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Producer
    from confluent_kafka.admin import AdminClient, ClusterMetadata, ConfigEntry, ConfigResource, TopicMetadata

    from millstream.client.link import Link

T = TypeVar("T")

CONNECT_SECONDS = 3.0
REQUEST_SECONDS = 15.0


class Connection:
    client_id: ClassVar = "millstream-admin"

    def __init__(self, address: str) -> None:
        self.address = address
        self._admin: AdminClient | None = None
        self._logger = logging.getLogger("librdkafka")
        self._reach()

    @property
    def admin(self) -> AdminClient:
        if self._admin is None:
            from confluent_kafka.admin import AdminClient

            self._admin = AdminClient(self._settings(), logger=self._logger)
        return self._admin

    def producer(self, settings: dict[str, Any]) -> Producer:
        kind, _ = self._clients()
        return kind(self._settings(error_cb=self._on_error) | settings, logger=self._logger)

    def consumer(self, settings: dict[str, Any]) -> Consumer:
        _, kind = self._clients()
        checked = {"check.crcs": True} | settings  # librdkafka's default is false
        return kind(self._settings(error_cb=self._on_error) | checked, logger=self._logger)

    def reader(self) -> Consumer:
        """A consumer of assigned partitions, without a group; it reports their ends."""
        return self.consumer(
            {
                "group.id": self.client_id,  # librdkafka wants one
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "earliest",
                "fetch.wait.max.ms": 20,  # the end of a partition is an empty response, which waits for this time
            }
        )

    def link(self) -> Link:
        """For requests that librdkafka lacks."""
        from millstream.client.link import Link

        return Link(*self._reach(), self.client_id, REQUEST_SECONDS)

    def coordinator_link(self, group: str) -> Link:
        """To the coordinator of a group; raises `LinkBroken` while there is none."""
        from millstream.client.link import Link, LinkBroken
        from millstream.wire.kafka import requests

        link = self.link()
        reader = link.call(requests.FIND_COORDINATOR, requests.encode_find_coordinator(group), version=0)
        error, node = requests.decode_find_coordinator(reader)
        link.close()
        if error:
            raise LinkBroken(f"group {group} has no coordinator now (error {error})")
        return Link(node.host, node.port, self.client_id, REQUEST_SECONDS)

    def settings(self, resource: ConfigResource) -> list[ConfigEntry]:
        """The settings of a topic, a group or a broker, by name."""
        entries = self.settle(self.admin.describe_configs([resource])[resource], resource.name)
        return sorted(entries.values(), key=lambda entry: entry.name)

    def metadata(self) -> ClusterMetadata:
        from confluent_kafka import KafkaException

        try:
            return self.admin.list_topics(timeout=REQUEST_SECONDS)
        except KafkaException as error:
            raise explain(error.args[0], self.address) from error

    def topic(self, name: str) -> TopicMetadata:
        """Searches all topics, because a request for one by name may create it."""
        topic = self.metadata().topics.get(name)
        if topic is None:
            raise Failure(f"there is no topic {name}; `millstream topic list` shows the topics")
        if topic.error is not None:
            raise explain(topic.error, self.address, name)
        return topic

    def partitions(self, topic: str, partition: int | None = None) -> list[int]:
        """The numbers of a topic's partitions, or the given one if the topic has it."""
        numbers = self.topic(topic).partitions
        if partition is not None and partition not in numbers:
            raise Failure(f"{topic} has no partition {partition}; it has {len(numbers)}, counted from 0")
        return sorted(numbers) if partition is None else [partition]

    def create_missing(self, topic: str, settings: dict[str, str]) -> None:
        """Creates a topic of one partition, unless there is a topic of that name."""
        if topic in self.metadata().topics:
            return
        from confluent_kafka.admin import NewTopic

        wanted = NewTopic(topic, num_partitions=1, replication_factor=-1, config=settings)
        future = self.admin.create_topics([wanted])[topic]
        try:
            self.settle(future, topic)
        except Failure:
            if topic not in self.metadata().topics:  # another client may have created it meanwhile
                raise

    def settle(self, future: concurrent.futures.Future[T], subject: str = "") -> T:
        """The result of an admin request; raises a sentence about its failure."""
        from confluent_kafka import KafkaException

        try:
            return future.result(timeout=REQUEST_SECONDS)
        except KafkaException as error:
            raise explain(error.args[0], self.address, subject) from error
        except concurrent.futures.TimeoutError as error:
            raise unreachable(self.address) from error

    def settle_each(self, futures: Mapping[str, concurrent.futures.Future[T]]) -> Iterator[str]:
        """Each name, when its request has succeeded."""
        for name, future in futures.items():
            self.settle(future, name)
            yield name

    def _clients(self) -> tuple[type[Producer], type[Consumer]]:
        from confluent_kafka import Consumer, Producer

        return Producer, Consumer

    def _settings(self, **more: Any) -> dict[str, Any]:
        return {"bootstrap.servers": self.address, "client.id": self.client_id, "error_cb": _ignore, **more}

    def _reach(self) -> tuple[str, int]:
        for part in self.address.split(","):
            host, _, port = part.strip().rpartition(":")
            if not host or not port.isdigit() or int(port) > 65535:
                raise Failure(f"--broker {part} is not HOST:PORT, as in 127.0.0.1:9092")
            try:
                socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
                return host.strip("[]"), int(port)
            except OSError:
                continue
        raise unreachable(self.address)

    def _on_error(self, error: KafkaError) -> None:
        """librdkafka retries after these errors."""


def _ignore(error: KafkaError) -> None:
    """librdkafka prints errors that have no callback."""
