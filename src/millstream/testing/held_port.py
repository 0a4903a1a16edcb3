"""A port that nobody else is given while nobody listens on it.

A server that is killed and started again must find its port free. In between, whoever asks the kernel for any free
port, as every test beside it does, may be given that one. A socket that is bound and never listens keeps it: the server
may bind beside it, for both say SO_REUSEADDR, and whoever connects meanwhile is refused, as by a dead server.
"""

from __future__ import annotations

import socket
from typing import Self


class HeldPort:
    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Raises `OSError` where somebody listens already."""
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
