"""The client's side of a connection to a broker, without a socket: frames, correlation ids, versions, the handshake.

A request is one frame, and its answer another: `SIZE_BYTES` that `answer_size` reads, then that many bytes. One request
is in flight at a time. A handshake is a generator that yields requests and is sent their answers. Both transports run
the same handshakes: the blocking one of `client/link.py`, and the connections between brokers on the event loop
(`doors/kafka/peer_connection.py`). A login (SASL) is one more handshake.
"""

from __future__ import annotations

from collections.abc import Generator
from struct import Struct
from typing import NamedTuple

from millstream.core.errors import ProtocolError
from millstream.records.batch import Buffer
from millstream.wire.kafka import requests
from millstream.wire.kafka.primitives import Reader

_SIZE = Struct(">i")
SIZE_BYTES = _SIZE.size


class Request(NamedTuple):
    key: int
    version: int
    body: bytes
    """In flexible versions, with the tagged fields of the header before it."""


Handshake = Generator[Request, Reader, None]


class Conversation:
    def __init__(self, client_id: str) -> None:
        self._client_id = client_id
        self._correlation_id = 0
        self._served: dict[int, tuple[int, int]] = {}

    def greet(self) -> Handshake:
        """Asks for the APIs that the broker serves."""
        self._served = requests.decode_api_versions((yield Request(requests.API_VERSIONS, 0, b"")))

    def serves(self, key: int, version: int) -> bool:
        low, high = self._served.get(key, (0, -1))
        return low <= version <= high

    def version(self, key: int, low: int, high: int) -> int:
        """The broker's highest version of an API from `low` to `high`."""
        served_low, served_high = self._served.get(key, (0, -1))
        version = min(high, served_high)
        if version < max(low, served_low):
            served = f"in versions {served_low} to {served_high}" if served_high >= 0 else "not"
            raise ProtocolError(f"it serves API {key} {served}, but {low} to {high} are supported here")
        return version

    def request(self, request: Request, payload_bytes: int = 0) -> bytes:
        """The frame, up to the payload that is sent behind it."""
        key, version, body = request
        self._correlation_id += 1
        head = requests.header(key, version, self._correlation_id, self._client_id)
        return framed(head + body, payload_bytes)

    def answer(self, frame: memoryview) -> Reader:
        """A reader behind the correlation id."""
        return answer(frame, self._correlation_id)


def framed(frame: bytes, payload_bytes: int = 0) -> bytes:
    return _SIZE.pack(len(frame) + payload_bytes) + frame


def answer_size(size: Buffer, bytes_max: int) -> int:
    (announced,) = _SIZE.unpack(size)
    if not _SIZE.size <= announced <= bytes_max:
        raise ProtocolError(f"announced an answer of {announced} bytes; is it a Kafka broker?")
    return int(announced)


def answer(frame: memoryview, correlation_id: int) -> Reader:
    reader = Reader(frame)
    if (answered := reader.i32()) != correlation_id:
        raise ProtocolError(f"answered request {answered}, not {correlation_id}")
    return reader
