"""The Luxun door: `serve --luxun HOST:PORT`. `wire/luxun.py` has its protocol, `connection.py` its requests."""

from __future__ import annotations

import logging
import socket

from millstream.broker.broker import Broker
from millstream.config import Address
from millstream.doors.framed.door import FramedDoor
from millstream.doors.luxun.connection import LuxunConnection
from millstream.doors.luxun.password import Password
from millstream.doors.luxun.read_barrier import ReadBarrier

logger = logging.getLogger(__name__)


class LuxunDoor(FramedDoor):
    name = "luxun"

    def __init__(self, broker: Broker) -> None:
        super().__init__(broker)
        self.password = Password(broker.config.luxun_password)
        self.barrier = ReadBarrier(self.clock, self._listener)

    def start(self, address: Address) -> Address:
        bound = super().start(address)
        self.barrier.listen()
        if not self.password.is_set:
            logger.warning("luxun_password is not set: every Luxun client may delete topics with one partition")
        return bound

    def welcome(self, connected: socket.socket, peer: str) -> LuxunConnection:
        return LuxunConnection(self, connected, peer, self.password, self.barrier)

    async def close(self) -> None:
        await super().close()
        self.barrier.close()
