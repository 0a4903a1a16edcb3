"""The Luxun door: `serve --luxun HOST:PORT`. `wire/luxun.py` has its protocol, `protocol.py` its requests."""

from __future__ import annotations

import logging
from functools import partial

from millstream.broker.session import Sessions
from millstream.config import Address
from millstream.doors.framed.door import FramedDoor
from millstream.doors.luxun.connection import LuxunConnection
from millstream.doors.luxun.password import Password
from millstream.doors.luxun.protocol import LuxunProtocol
from millstream.doors.luxun.read_barrier import ReadBarrier
from millstream.doors.transport import PlainTransport, Transport, TransportFactory

logger = logging.getLogger(__name__)


class LuxunDoor(FramedDoor):
    name = "luxun"

    def __init__(self, sessions: Sessions, transport: TransportFactory = PlainTransport) -> None:
        super().__init__(sessions, transport)
        self.password = Password(sessions.config.luxun_password)
        self.barrier = ReadBarrier(self.clock, self._listener)

    def start(self, address: Address) -> Address:
        bound = super().start(address)
        self.barrier.listen()
        if not self.password.is_set:
            logger.warning("luxun_password is not set: every Luxun client may delete topics with one partition")
        return bound

    def welcome(self, transport: Transport, peer: str) -> LuxunConnection:
        serve = partial(LuxunProtocol, self, self.password, self.barrier)
        return LuxunConnection(self, transport, peer, serve, self.barrier)

    async def close(self) -> None:
        await super().close()
        self.barrier.close()
