"""Reserves a port while no server listens on it.

A server that is killed and started again must find its port free. In between, the kernel may give that port to a
parallel test that asks for any free one. A socket that is bound and never listens keeps it. The server may bind beside
it, because both set SO_REUSEADDR. Clients that connect meanwhile are refused, as by a dead server.
"""

from __future__ import annotations

import socket
from typing import Self


class HeldPort:
    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Raises `OSError` if a socket already listens."""
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._socket = socket.socket(family, kind, protocol)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(place)
        except BaseException:
            self._socket.close()
            raise
        self.host = host
        self.port: int = self._socket.getsockname()[1]

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def release(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()
