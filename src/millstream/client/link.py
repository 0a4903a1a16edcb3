"""One blocking connection to one broker, for code that runs in a thread or a process of its own: Spark's tasks.

A call sends one request and waits for its response. Large responses are received straight into the buffer that they
are decoded from. Every connection error is a `LinkBroken`: the caller makes a new link and retries.
"""

from __future__ import annotations

import socket
from struct import Struct

from millstream.core.errors import MillstreamError, ProtocolError
from millstream.wire.kafka import messages, requests
from millstream.wire.kafka.primitives import Reader
from millstream.wire.kafka.requests import VERSIONS

ANSWER_BYTES_MAX = 512 << 20
_SIZE = Struct(">i")


class LinkBroken(MillstreamError):
    """The broker is unreachable, closed the connection, or does not speak Kafka's protocol."""


class Link:
    def __init__(self, host: str, port: int, client_id: str, timeout_seconds: float) -> None:
        self._client_id = client_id
        self._address = f"{host}:{port}"
        self._correlation_id = 0
        try:
            self._socket = socket.create_connection((host, port), timeout_seconds)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._served = requests.decode_api_versions(self.call(requests.API_VERSIONS, b"", version=0))
        except OSError as error:
            raise LinkBroken(f"no broker answers at {self._address}: {error}") from error

    def version(self, key: int) -> int:
        """The highest version of an API that both sides speak."""
        low, high = VERSIONS[key]
        served_low, served_high = self._served.get(key, (0, -1))
        version = min(high, served_high)
        if version < max(low, served_low):
            raise LinkBroken(
                f"the broker at {self._address} serves API {key} in versions {served_low} to {served_high}, "
                f"but {low} to {high} are supported here"
            )
        return version

    def call(self, key: int, body: bytes, *payload: bytes | bytearray | memoryview, version: int) -> Reader:
        """A reader at the start of the response's body."""
        self._correlation_id += 1
        head = requests.header(key, version, self._correlation_id, self._client_id) + body
        size = len(head) + sum(len(part) for part in payload)
        try:
            self._socket.sendall(_SIZE.pack(size) + head)
            for part in payload:
                self._socket.sendall(part)
            answer = self._receive()
        except OSError as error:
            self.close()
            raise LinkBroken(f"the connection to {self._address} broke: {error}") from error
        reader = Reader(answer)
        try:
            correlation_id = reader.i32()
        except ProtocolError as error:
            raise LinkBroken(f"{self._address} sent an invalid answer: {error}") from error
        if correlation_id != self._correlation_id:
            self.close()
            raise LinkBroken(f"{self._address} answered request {correlation_id}, not {self._correlation_id}")
        return reader

    def ask(self, key: int, low: int, high: int, fields: messages.Fields) -> messages.Message:
        """Calls any API in the broker's highest version from `low` to `high`: for infrequent requests."""
        served_low, served_high = self._served.get(key, (0, -1))
        version = min(high, served_high)
        if version < max(low, served_low):
            raise LinkBroken(f"the broker at {self._address} does not serve API {key}")
        return self.ask_encoded(key, version, messages.encode_request(key, version, fields))

    def ask_encoded(self, key: int, version: int, body: bytes) -> messages.Message:
        """The same, for a request that was encoded by hand."""
        tags = b"\0" if messages.is_flexible(key, version) else b""
        return messages.decode_response(key, version, self.call(key, tags + body, version=version))

    def serves(self, key: int, version: int) -> bool:
        low, high = self._served.get(key, (0, -1))
        return low <= version <= high

    def _receive(self) -> memoryview:
        (size,) = _SIZE.unpack(self._receive_exactly(bytearray(4)))
        if not 4 <= size <= ANSWER_BYTES_MAX:
            raise LinkBroken(f"{self._address} announced an answer of {size} bytes; is it a Kafka broker?")
        return self._receive_exactly(bytearray(size))

    def _receive_exactly(self, buffer: bytearray) -> memoryview:
        view = memoryview(buffer)
        filled = 0
        while filled < len(buffer):
            count = self._socket.recv_into(view[filled:])
            if count == 0:
                raise ConnectionResetError("the broker closed it")
            filled += count
        return view

    def close(self) -> None:
        self._socket.close()
