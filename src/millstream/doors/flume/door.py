"""The Flume door: `serve --flume HOST:PORT`. `wire/flume.py` has its protocol, `connection.py` its requests."""

from __future__ import annotations

import socket

from millstream.doors.flume.connection import FlumeConnection
from millstream.doors.framed.door import FramedDoor


class FlumeDoor(FramedDoor):
    name = "flume"

    def welcome(self, connected: socket.socket, peer: str) -> FlumeConnection:
        return FlumeConnection(self, connected, peer)
