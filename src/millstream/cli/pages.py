"""The broker's HTTP pages, for what Kafka's protocol has no words for.

Where they are is the broker's own word: `http` among its settings, which any Kafka client can ask for. So there is no
second address to configure, and no way to be shown the figures of another cluster than the one that was named.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from millstream.cli.connection import Connection
from millstream.cli.failure import Failure

PAGE_SECONDS = 15.0
EVERYWHERE = ("0.0.0.0", "::")


def queues(connection: Connection) -> list[dict[str, Any]]:
    """Every queue and its figures; of those that one broker looks after as of one moment."""
    return [queue for node in sorted(connection.metadata().brokers) for queue in _queues_of(node, connection)]


def _queues_of(node: int, connection: Connection) -> list[dict[str, Any]]:
    address = _address(node, connection)
    try:
        # Straight there: a proxy for the web has no business between two programs.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://{address}/queues", timeout=PAGE_SECONDS) as answer:
            found = json.loads(answer.read())
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise Failure(
            f"the broker's pages at {address} cannot be read ({error}); are they open to this machine?"
        ) from None
    assert isinstance(found, list)
    return found


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
