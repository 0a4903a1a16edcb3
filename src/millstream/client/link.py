"""One blocking connection to one broker, for code that runs in a thread or a process of its own: Spark's tasks.

A call sends one request and waits for its response. Large responses are received straight into the buffer that they
are decoded from. Every connection error is a `LinkBroken`: the caller makes a new link and retries.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from millstream.core.errors import MillstreamError, ProtocolError
from millstream.wire.kafka import messages
from millstream.wire.kafka.conversation import SIZE_BYTES, Conversation, Handshake, Request, answer_size
from millstream.wire.kafka.primitives import Reader
from millstream.wire.kafka.requests import VERSIONS

ANSWER_BYTES_MAX = 512 << 20
Dial = Callable[[str, int, float], socket.socket]
"""Opens the transport to a host and port, in so many seconds. One with TLS wraps what `plain` returns."""


class LinkBroken(MillstreamError):
    """The broker is unreachable, closed the connection, or does not speak Kafka's protocol."""


def plain(host: str, port: int, timeout_seconds: float) -> socket.socket:
    opened = socket.create_connection((host, port), timeout_seconds)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return opened


class Link:
    def __init__(self, host: str, port: int, client_id: str, timeout_seconds: float, dial: Dial = plain) -> None:
        self._address = f"{host}:{port}"
        self._conversation = Conversation(client_id)
        try:
            self._socket = dial(host, port, timeout_seconds)
        except OSError as error:
            raise LinkBroken(f"no broker answers at {self._address}: {error}") from error
        with self._checked():
            self._run(self._conversation.greet())

    def _run(self, handshake: Handshake) -> None:
        request = next(handshake, None)
        with suppress(StopIteration):
            while request is not None:
                request = handshake.send(self._exchange(request))

    def version(self, key: int) -> int:
        """The highest version of an API that both sides speak."""
        return self._version(key, *VERSIONS[key])

    def _version(self, key: int, low: int, high: int) -> int:
        try:
            return self._conversation.version(key, low, high)
        except ProtocolError as error:
            raise LinkBroken(f"the broker at {self._address} cannot be asked: {error}") from None

    def serves(self, key: int, version: int) -> bool:
        return self._conversation.serves(key, version)

    def call(self, key: int, body: bytes, *payload: bytes | bytearray | memoryview, version: int) -> Reader:
        """A reader at the start of the response's body."""
        return self._exchange(Request(key, version, body), *payload)

    def ask(self, key: int, low: int, high: int, fields: messages.Fields) -> messages.Message:
        """Calls any API in the broker's highest version from `low` to `high`: for infrequent requests."""
        version = self._version(key, low, high)
        return self.ask_encoded(key, version, messages.encode_request(key, version, fields))

    def ask_encoded(self, key: int, version: int, body: bytes) -> messages.Message:
        """The same, for a request that was encoded by hand."""
        tags = b"\0" if messages.is_flexible(key, version) else b""
        return messages.decode_response(key, version, self.call(key, tags + body, version=version))

    def _exchange(self, request: Request, *payload: bytes | bytearray | memoryview) -> Reader:
        with self._checked():
            self._socket.sendall(self._conversation.request(request, sum(map(len, payload))))
            for part in payload:
                self._socket.sendall(part)
            size = answer_size(self._receive(SIZE_BYTES), ANSWER_BYTES_MAX)
            return self._conversation.answer(self._receive(size))

    @contextmanager
    def _checked(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.close()
            raise LinkBroken(f"the connection to {self._address} broke: {error}") from error
        except ProtocolError as error:
            self.close()
            raise LinkBroken(f"{self._address} sent an invalid answer: {error}") from error

    def _receive(self, size: int) -> memoryview:
        view = memoryview(bytearray(size))
        filled = 0
        while filled < size:
            count = self._socket.recv_into(view[filled:])
            if count == 0:
                raise ConnectionResetError("the broker closed it")
            filled += count
        return view

    def close(self) -> None:
        self._socket.close()
