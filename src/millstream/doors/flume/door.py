"""The Flume door: `serve --flume HOST:PORT`. `wire/flume.py` has its protocol, `protocol.py` its requests."""

from __future__ import annotations

from functools import partial

from millstream.doors.engine.connection import Connection
from millstream.doors.flume.protocol import FlumeProtocol
from millstream.doors.framed.door import FramedDoor
from millstream.doors.transport import Transport


class FlumeDoor(FramedDoor):
    name = "flume"

    def welcome(self, transport: Transport, peer: str) -> Connection:
        return Connection(self, transport, peer, partial(FlumeProtocol, self))
