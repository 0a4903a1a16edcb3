"""Kafka's protocol without a client: frames over a plain socket, for what no client would send."""

from __future__ import annotations

import socket
import struct
from typing import Any

from kio.index import load_request_schema

from millstream.records import codec
from millstream.wire.kafka import messages
from tests.compat.random_messages import read_response, write

TIMEOUT_SECONDS = 20.0


def frame(key: int, version: int, body: bytes, number: int = 0, client: str = "raw") -> bytes:
    """A whole request, its length in front."""
    name = client.encode()
    tags = b"\0" if messages.is_flexible(key, version) else b""
    request = struct.pack(">hhih", key, version, number, len(name)) + name + tags + body
    return struct.pack(">i", len(request)) + request


def request(key: int, version: int, fields: dict[str, Any], number: int = 0) -> bytes:
    """A request from the names of its fields; durations are milliseconds."""
    return frame(key, version, write(messages._build(load_request_schema(key, version), fields)), number)


def batch(*values: bytes, key: bytes | None = None, timestamp_ms: int = 1_700_000_000_000, **more: Any) -> bytes:
    return bytes(codec.encode([(0, timestamp_ms, key, value) for value in values], **more))


def produce(topic: str, records: bytes | None, *, partition: int = 0, acks: int = -1, version: int = 9) -> bytes:
    data = {"index": partition, "records": records}
    fields = {
        "transactional_id": None,
        "acks": acks,
        "timeout": 5000,
        "topic_data": [{"name": topic, "partition_data": [data]}],
    }
    return request(0, version, fields)


def fetch(
    topic: str,
    offset: int,
    *,
    partition: int = 0,
    wait_ms: int = 0,
    bytes_min: int = 1,
    bytes_max: int = 1 << 20,
    session: tuple[int, int] = (0, -1),
    forgotten: list[dict[str, Any]] | None = None,
    is_named: bool = True,
    isolation: int = 0,
) -> bytes:
    """Version 11: topics by name. An incremental fetch need not name the partition again."""
    one = {
        "partition": partition,
        "current_leader_epoch": -1,
        "fetch_offset": offset,
        "log_start_offset": -1,
        "partition_max_bytes": bytes_max,
    }
    fields = {
        "replica_id": -1,
        "max_wait": wait_ms,
        "min_bytes": bytes_min,
        "max_bytes": bytes_max,
        "isolation_level": isolation,
        "session_id": session[0],
        "session_epoch": session[1],
        "topics": [{"topic": topic, "partitions": [one]}] if is_named else [],
        "forgotten_topics_data": forgotten or [],
        "rack_id": "",
    }
    return request(1, 11, fields)


class Raw:
    """One connection. `send` and `receive` apart, so that requests can be pipelined."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=TIMEOUT_SECONDS)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def receive(self) -> bytes:
        """The next answer from its correlation id on; b"" if the connection was closed."""
        head = self._exactly(4)
        return self._exactly(struct.unpack(">i", head)[0]) if head else b""

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                more = self.socket.recv(size - len(data))
            except ConnectionResetError:
                return b""
            if not more:
                return b""
            data += more
        return bytes(data)

    def answer(self, key: int, version: int) -> Any:
        """The next answer, decoded; None if the connection was closed."""
        data = self.receive()
        if not data:
            return None
        tags = 1 if messages.is_flexible(key, version) and key != 18 else 0
        return read_response(key, version, data[4 + tags :])

    def ask(self, data: bytes) -> Any:
        """Sends one request and waits for its answer."""
        self.send(data)
        key, version = struct.unpack_from(">hh", data, 4)
        return self.answer(key, version)

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def create_topic(address: str, topic: str, partitions: int = 1, /, **settings: str) -> None:
    """Setting names with underscores for dots."""
    configs = [{"name": name.replace("_", "."), "value": value} for name, value in settings.items()]
    wanted = {
        "name": topic,
        "num_partitions": partitions,
        "replication_factor": 1,
        "assignments": [],
        "configs": configs,
    }
    with Raw(address) as raw:
        answer = raw.ask(request(19, 5, {"topics": [wanted], "timeout": 10_000, "validate_only": False}))
        assert answer.topics[0].error_code == 0, answer
