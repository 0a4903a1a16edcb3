"""A FlowMQ client, written from the protocol table of FlowMQ's document and from nothing else: a blocking socket.

Messages are pushed at any time, so they are put aside while an answer is waited for.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from typing import NamedTuple

PING, PONG, CREATE_TOPIC, PUBLISH, SUBSCRIBE, ACK, MESSAGE = 0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x07
LIST_TOPICS, DELETE_TOPIC, NACK, SUCCESS, ERROR = 0x08, 0x09, 0x0A, 0x10, 0xFF
TIMEOUT_SECONDS = 20.0


class FlowmqError(Exception):
    """The broker answered ERROR; the text is its reason."""


class Message(NamedTuple):
    id: str
    payload: bytes


class FlowmqClient:
    def __init__(self, address: str, timeout: float = TIMEOUT_SECONDS) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=timeout)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.messages: deque[Message] = deque()

    # -- the table ---------------------------------------------------------------------------------------------------

    def ping(self, payload: bytes = b"") -> bytes:
        return self.ask(PING, payload, PONG)

    def create_topic(self, name: str) -> None:
        self.ask(CREATE_TOPIC, name.encode())

    def publish(self, topic: str, message: bytes) -> str:
        """Answers with the message's id."""
        return self.ask(PUBLISH, topic.encode() + b"\0" + message).decode()

    def subscribe(self, topic: str, group: str | None = None) -> None:
        self.ask(SUBSCRIBE, topic.encode() + (b"" if group is None else b"\0" + group.encode()))

    def ack(self, message: Message | str) -> None:
        self.ask(ACK, (message.id if isinstance(message, Message) else message).encode())

    def nack(self, message: Message | str) -> None:
        self.ask(NACK, (message.id if isinstance(message, Message) else message).encode())

    def list_topics(self) -> list[str]:
        names = self.ask(LIST_TOPICS).decode()
        return names.split(",") if names else []

    def delete_topic(self, name: str) -> None:
        self.ask(DELETE_TOPIC, name.encode())

    # -- frames ------------------------------------------------------------------------------------------------------

    def send(self, command: int, payload: bytes = b"") -> None:
        self.socket.sendall(struct.pack(">BI", command, len(payload)) + payload)

    def receive(self) -> tuple[int, bytes]:
        """The next frame; raises ConnectionError when the broker closed the connection."""
        command, size = struct.unpack(">BI", self._exactly(5))
        return command, self._exactly(size)

    def answer(self, wanted: int = SUCCESS) -> bytes:
        """The next frame that is no message."""
        while True:
            command, payload = self.receive()
            if command == MESSAGE:
                self.messages.append(_message(payload))
            elif command == ERROR:
                raise FlowmqError(payload.decode())
            else:
                assert command == wanted, f"{command:#04x} instead of {wanted:#04x}: {payload[:100]!r}"
                return payload

    def ask(self, command: int, payload: bytes = b"", wanted: int = SUCCESS) -> bytes:
        self.send(command, payload)
        return self.answer(wanted)

    def next(self, timeout: float | None = None) -> Message:
        """The next message; raises TimeoutError when none comes in time."""
        if self.messages:
            return self.messages.popleft()
        before = self.socket.gettimeout()
        self.socket.settimeout(before if timeout is None else timeout)
        try:
            command, payload = self.receive()
        finally:
            self.socket.settimeout(before)
        assert command == MESSAGE, f"{command:#04x} instead of a message: {payload[:100]!r}"
        return _message(payload)

    def take(self, count: int) -> list[Message]:
        return [self.next() for _ in range(count)]

    def has_nothing(self) -> bool:
        """Whether nothing was pushed before the answer to a PING, which the broker sends last."""
        self.ping()
        return not self.messages

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            more = self.socket.recv(min(size - len(data), 1 << 20))
            if not more:
                raise ConnectionError("the broker closed the connection")
            data += more
        return bytes(data)

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> FlowmqClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _message(payload: bytes) -> Message:
    name, separator, body = payload.partition(b"\0")
    assert separator, payload[:100]
    return Message(name.decode(), body)
