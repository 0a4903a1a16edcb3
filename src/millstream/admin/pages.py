"""The broker's HTTP pages, for requests that Kafka's protocol lacks.

The broker gives their address itself: `http` among its settings, which any Kafka client can read. So there is no
second address to configure, and the figures always belong to the named cluster.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from http import HTTPStatus
from typing import Any

from millstream.admin.connection import Connection
from millstream.admin.failure import Failure

PAGE_SECONDS = 15.0
EVERYWHERE = ("0.0.0.0", "::")
MISSING_DIRECTORY = "missing directory"
"""The broker's cause of damage for a partition that is lost as a whole."""


class Refusal(Failure):
    """A page that returned an error."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


def queues(connection: Connection) -> list[dict[str, Any]]:
    """Every queue and its figures; those of one coordinator are of one moment."""
    return [queue for node in sorted(connection.metadata().brokers) for queue in _rows_of(node, "queues", connection)]


def reasons(connection: Connection) -> list[str]:
    """The reasons why brokers refuse records now, a sentence each."""
    nodes = sorted(connection.metadata().brokers)
    return [reason for node in nodes for reason in ask(node, "healthz", connection)["reasons"]]


def damage(connection: Connection, topic: str) -> list[dict[str, Any]] | None:
    """The damaged ranges of a topic by partition and offset; None if the broker's pages are closed."""
    places: dict[tuple[int, int], dict[str, Any]] = {}
    try:
        for node in sorted(connection.metadata().brokers):
            for row in _rows_of(node, "damage", connection):
                if row["topic"] == topic:
                    places[row["partition"], row["first"]] = row
    except Failure:
        return None
    return [places[key] for key in sorted(places)]


def lost_partitions(damaged: list[dict[str, Any]] | None) -> dict[int, str]:
    """The missing directories of partitions that are lost as a whole."""
    return {row["partition"]: row["where"] for row in damaged or () if row["cause"] == MISSING_DIRECTORY}


def _rows_of(node: int, page: str, connection: Connection) -> list[dict[str, Any]]:
    found = ask(node, page, connection)
    assert isinstance(found, list)
    return found


def ask(node: int, page: str, connection: Connection, *, method: str = "GET") -> Any:
    """The JSON of one broker's page; raises `Refusal` for an error status."""
    address = _address(node, connection)
    try:
        # Without a proxy: web proxies do not serve brokers.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        request = urllib.request.Request(f"http://{address}/{page}", method=method)
        with opener.open(request, timeout=PAGE_SECONDS) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        if error.code == HTTPStatus.SERVICE_UNAVAILABLE:  # the body holds the reasons
            return json.loads(error.read())
        raise Refusal(
            error.code, f"the broker's page {page} at {address} answered {error.code} {error.reason}"
        ) from None
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise Failure(
            f"the broker's pages at {address} cannot be read ({error}); are they open to this machine?"
        ) from None


def _address(node: int, connection: Connection) -> str:
    from confluent_kafka.admin import ConfigResource, ResourceType

    settings = {
        entry.name: entry.value for entry in connection.settings(ConfigResource(ResourceType.BROKER, str(node)))
    }
    address = settings.get("http")
    if address is None:
        raise Failure(f"{connection.address} is not a Millstream broker: it does not report its queues")
    if address in ("", "off"):
        raise Failure("the broker runs without its HTTP pages, which report the queues; `serve --http` opens them")
    host, _, port = address.rpartition(":")
    if host.strip("[]") not in EVERYWHERE:
        return address
    host = str(connection.metadata().brokers[node].host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
