"""A Flume client, written from the tables of its protocol document alone: plain `struct`, nothing of ours."""

from __future__ import annotations

import itertools
import socket
import struct
from typing import NamedTuple

PRODUCE, FETCH, JOIN_GROUP, LEAVE_GROUP, HEARTBEAT, OFFSET_COMMIT, OFFSET_FETCH = range(7)
NONE, UNKNOWN, TOPIC_NOT_FOUND, OFFSET_OUT_OF_RANGE, UNKNOWN_MEMBER, STALE_GENERATION, REBALANCE_NEEDED = range(7)


class Produced(NamedTuple):
    partition: int
    offset: int
    error: int


class Fetched(NamedTuple):
    error: int
    records: list[tuple[int, bytes]]


class Joined(NamedTuple):
    error: int
    generation: int
    leader: str
    member: str
    members: list[str]


def string(text: str) -> bytes:
    data = text.encode()
    return struct.pack(">H", len(data)) + data


def blob(data: bytes) -> bytes:
    return struct.pack(">i", len(data)) + data


def request(key: int, request_id: int, payload: bytes) -> bytes:
    body = struct.pack(">hi", key, request_id) + payload
    return struct.pack(">i", len(body)) + body


def produce_payload(topic: str, payload: bytes, key: bytes = b"", partition: int = -1) -> bytes:
    return string(topic) + struct.pack(">i", partition) + blob(key) + blob(payload)


def fetch_payload(topic: str, partition: int, offset: int, max_bytes: int = 65536) -> bytes:
    return string(topic) + struct.pack(">iqi", partition, offset, max_bytes)


class Flume:
    """One connection; a request at a time unless the caller pipelines with `send` and `receive`."""

    def __init__(self, address: str, timeout: float = 20.0) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=timeout)
        self._ids = itertools.count(1)

    def __enter__(self) -> Flume:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def send(self, key: int, payload: bytes) -> int:
        request_id = next(self._ids)
        self.socket.sendall(request(key, request_id, payload))
        return request_id

    def receive(self) -> tuple[int, bytes]:
        """Request id and payload of the next answer; raises EOFError when the broker closed."""
        (size,) = struct.unpack(">i", self._exactly(4))
        body = self._exactly(size)
        return struct.unpack_from(">i", body)[0], body[4:]

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            more = self.socket.recv(size - len(data))
            if not more:
                raise EOFError("the broker closed the connection")
            data += more
        return bytes(data)

    def ask(self, key: int, payload: bytes) -> bytes:
        request_id = self.send(key, payload)
        answered, body = self.receive()
        assert answered == request_id
        return body

    def produce(self, topic: str, payload: bytes, key: bytes = b"", partition: int = -1) -> Produced:
        return produced(self.ask(PRODUCE, produce_payload(topic, payload, key, partition)))

    def fetch(self, topic: str, partition: int, offset: int, max_bytes: int = 65536) -> Fetched:
        return fetched(self.ask(FETCH, fetch_payload(topic, partition, offset, max_bytes)))

    def join(self, group: str, topics: list[str], member: str = "", session_ms: int = 10_000) -> Joined:
        return joined(self.ask(JOIN_GROUP, join_payload(group, topics, member, session_ms)))

    def leave(self, group: str, member: str) -> int:
        return error(self.ask(LEAVE_GROUP, string(group) + string(member)))

    def heartbeat(self, group: str, generation: int, member: str) -> int:
        return error(self.ask(HEARTBEAT, string(group) + struct.pack(">i", generation) + string(member)))

    def commit(self, group: str, topic: str, partition: int, offset: int) -> int:
        return error(self.ask(OFFSET_COMMIT, string(group) + string(topic) + struct.pack(">iq", partition, offset)))

    def committed(self, group: str, topic: str, partition: int) -> tuple[int, int]:
        """Error and offset."""
        body = self.ask(OFFSET_FETCH, string(group) + string(topic) + struct.pack(">i", partition))
        assert len(body) == 10
        return struct.unpack(">hq", body)


def join_payload(group: str, topics: list[str], member: str = "", session_ms: int = 10_000) -> bytes:
    names = struct.pack(">H", len(topics)) + b"".join(map(string, topics))
    return string(group) + string(member) + struct.pack(">i", session_ms) + names


def produced(body: bytes) -> Produced:
    assert len(body) == 14
    return Produced._make(struct.unpack(">iqh", body))


def fetched(body: bytes) -> Fetched:
    code, count = struct.unpack_from(">hi", body)
    records, at = [], 6
    for _ in range(count):
        offset, size = struct.unpack_from(">qi", body, at)
        at += 12
        records.append((offset, body[at : at + size]))
        at += size
    assert at == len(body)
    return Fetched(code, records)


def joined(body: bytes) -> Joined:
    code, generation = struct.unpack_from(">hi", body)
    at = 6
    texts: list[str] = []

    def take() -> str:
        nonlocal at
        (size,) = struct.unpack_from(">H", body, at)
        at += 2 + size
        return body[at - size : at].decode()

    texts += [take(), take()]
    (count,) = struct.unpack_from(">H", body, at)
    at += 2
    members = [take() for _ in range(count)]
    assert at == len(body)
    return Joined(code, generation, texts[0], texts[1], members)


def error(body: bytes) -> int:
    assert len(body) == 2
    return int(struct.unpack(">h", body)[0])


def fnv1a(key: bytes) -> int:
    number = 2166136261
    for byte in key:
        number = ((number ^ byte) * 16777619) % (1 << 32)
    return number
