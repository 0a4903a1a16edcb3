"""The Flume door: `serve --flume HOST:PORT`. Its protocol is in `wire/flume.py`, what it does in `connection.py`."""

from __future__ import annotations

import socket

from millstream.doors.flume.connection import FlumeConnection
from millstream.doors.framed.door import FramedDoor


class FlumeDoor(FramedDoor):
    name = "flume"

    def welcome(self, connected: socket.socket, peer: str) -> FlumeConnection:
        return FlumeConnection(self, connected, peer)
