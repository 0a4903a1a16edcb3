"""The command line's connection to a broker: its clients are created at first use, quiet, and fail quickly.

librdkafka retries for ever and logs its errors to standard error. That is right for a service and wrong for a
command: here its log is discarded (with MILLSTREAM_DEBUG=1, it goes to standard error), and one plain connect checks
the address before librdkafka uses it.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import socket
import sys
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from millstream.cli.failure import Failure, explain, unreachable

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Producer
    from confluent_kafka.admin import AdminClient, ClusterMetadata, ConfigEntry, ConfigResource, TopicMetadata

    from millstream.client.link import Link

T = TypeVar("T")

CONNECT_SECONDS = 3.0
REQUEST_SECONDS = 15.0

INT32_MAX = 0x7FFF_FFFF
"""The largest partition count or partition number on the wire."""
BrokerOption = Annotated[
    str,
    typer.Option(
        "--broker", "-b", metavar="HOST:PORT", envvar="MILLSTREAM_BROKER", help="The broker; several with commas."
    ),
]
DEFAULT_BROKER = "127.0.0.1:9092"


class Connection:
    def __init__(self, address: str) -> None:
        self.address = address
        self._admin: AdminClient | None = None
        self._announced = False
        self._logger = logging.getLogger("librdkafka")
        self._logger.propagate = False
        debug = os.environ.get("MILLSTREAM_DEBUG", "") not in ("", "0")
        self._logger.handlers[:] = [logging.StreamHandler() if debug else logging.NullHandler()]
        self._reach()

    @property
    def admin(self) -> AdminClient:
        if self._admin is None:
            from confluent_kafka.admin import AdminClient

            self._admin = AdminClient(self._settings(), logger=self._logger)
        return self._admin

    def producer(self, settings: dict[str, Any]) -> Producer:
        from millstream.cli.interrupt import InterruptibleProducer

        return InterruptibleProducer(self._settings(error_cb=self._on_error) | settings, logger=self._logger)

    def consumer(self, settings: dict[str, Any]) -> Consumer:
        from millstream.cli.interrupt import InterruptibleConsumer

        checked = {"check.crcs": True} | settings  # librdkafka's default is false
        return InterruptibleConsumer(self._settings(error_cb=self._on_error) | checked, logger=self._logger)

    def link(self) -> Link:
        """For requests that librdkafka lacks."""
        from millstream.client.link import Link

        return Link(*self._reach(), "millstream-cli", REQUEST_SECONDS)

    def coordinator_link(self, group: str) -> Link:
        """To the coordinator of a group; raises `LinkBroken` while there is none."""
        from millstream.client.link import Link, LinkBroken
        from millstream.wire.kafka import requests

        link = self.link()
        reader = link.call(requests.FIND_COORDINATOR, requests.encode_find_coordinator(group), version=0)
        error, node = requests.decode_find_coordinator(reader)
        link.close()
        if error:
            raise LinkBroken(f"no broker looks after {group} now (error {error})")
        return Link(node.host, node.port, "millstream-cli", REQUEST_SECONDS)

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
            raise Failure(f"there is no topic {name}; `millstream topic list` shows the topics there are")
        if topic.error is not None:
            raise explain(topic.error, self.address, name)
        return topic

    def settle(self, future: concurrent.futures.Future[T], subject: str = "") -> T:
        """The result of an admin request; raises a sentence about its failure."""
        from confluent_kafka import KafkaException

        try:
            return future.result(timeout=REQUEST_SECONDS)
        except KafkaException as error:
            raise explain(error.args[0], self.address, subject) from error
        except concurrent.futures.TimeoutError as error:
            raise unreachable(self.address) from error

    def _settings(self, **more: Any) -> dict[str, Any]:
        return {"bootstrap.servers": self.address, "client.id": "millstream-cli", "error_cb": _ignore, **more}

    def _reach(self) -> tuple[str, int]:
        for part in self.address.split(","):
            host, _, port = part.strip().rpartition(":")
            if not host or not port.isdigit() or int(port) > 65535:
                raise Failure(f"--broker {part} is not HOST:PORT, as in {DEFAULT_BROKER}")
            try:
                socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
                return host.strip("[]"), int(port)
            except OSError:
                continue
        raise unreachable(self.address)

    def _on_error(self, error: KafkaError) -> None:
        if error.code() == error._ALL_BROKERS_DOWN and not self._announced:
            self._announced = True
            print(f"millstream: lost the broker at {self.address}; trying until it is back", file=sys.stderr)


def _ignore(error: KafkaError) -> None:
    """librdkafka prints errors that have no callback."""
