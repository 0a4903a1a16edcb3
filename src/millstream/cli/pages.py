"""The broker's HTTP pages, for what Kafka's protocol has no words for.

Where they are is the broker's own word: `http` among its settings, which any Kafka client can ask for. So there is no
second address to configure, and no way to be shown the figures of another cluster than the one that was named.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from http import HTTPStatus
from typing import Any

from millstream.cli.connection import Connection
from millstream.cli.failure import Failure

PAGE_SECONDS = 15.0
EVERYWHERE = ("0.0.0.0", "::")


class Refusal(Failure):
    """A page that answered with an error."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


def queues(connection: Connection) -> list[dict[str, Any]]:
    """Every queue and its figures; of those that one broker looks after as of one moment."""
    return [queue for node in sorted(connection.metadata().brokers) for queue in _rows_of(node, "queues", connection)]


def reasons(connection: Connection) -> list[str]:
    """Why brokers do not take records now, a sentence each."""
    nodes = sorted(connection.metadata().brokers)
    return [reason for node in nodes for reason in ask(node, "healthz", connection)["reasons"]]


def damage(connection: Connection, topic: str) -> list[dict[str, Any]] | None:
    """The damaged ranges of a topic by partition and offset; None where the broker has no open pages to say so."""
    places: dict[tuple[int, int], dict[str, Any]] = {}
    try:
        for node in sorted(connection.metadata().brokers):
            for row in _rows_of(node, "damage", connection):
                if row["topic"] == topic:
                    places[row["partition"], row["first"]] = row
    except Failure:
        return None
    return [places[key] for key in sorted(places)]


def _rows_of(node: int, page: str, connection: Connection) -> list[dict[str, Any]]:
    found = ask(node, page, connection)
    assert isinstance(found, list)
    return found


def ask(node: int, page: str, connection: Connection, *, method: str = "GET") -> Any:
    """What a page of one broker answers, as JSON; raises `Refusal` where that is an error."""
    address = _address(node, connection)
    try:
        # Straight there: a proxy for the web has no business between two programs.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        request = urllib.request.Request(f"http://{address}/{page}", method=method)
        with opener.open(request, timeout=PAGE_SECONDS) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        if error.code == HTTPStatus.SERVICE_UNAVAILABLE:  # it has something to say all the same
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
        raise Failure(f"{connection.address} is not a Millstream broker: it does not say what its queues hold")
    if address in ("", "off"):
        raise Failure(
            "the broker's pages are closed, and with them the figures of its queues; `serve --http` opens them"
        )
    host, _, port = address.rpartition(":")
    if host.strip("[]") not in EVERYWHERE:
        return address
    host = str(connection.metadata().brokers[node].host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
