"""A request to an HTTP page."""

from __future__ import annotations

from dataclasses import dataclass

import h11


@dataclass(frozen=True, slots=True)
class Request:
    head: h11.Request
    body: bytes
    peer: str
    """The client's address."""

    @property
    def method(self) -> str:
        return self.head.method.decode("ascii")

    @property
    def path(self) -> str:
        """As sent: percent-encoded."""
        return self.head.target.partition(b"?")[0].decode("latin-1")

    @property
    def query(self) -> str:
        return self.head.target.partition(b"?")[2].decode("latin-1")

    def header(self, name: bytes) -> str | None:
        """The header's first value. `name` is in lower case."""
        return next((value.decode("latin-1") for each, value in self.head.headers if each == name), None)
