"""The names under which the pages are served.

A web page of a stranger can have its own name resolve to this machine (DNS rebinding): the browser then takes the
broker's pages for the stranger's, and lets the stranger read them. But the browser still sends that name as `Host`. So
a request is answered only if its `Host` is an IP address, which cannot be rebound, `localhost`, or a name that the
operator gave: those of the listener, of `advertise` and of `http_hosts`. A request without a `Host` (HTTP/1.0) does not
come from a browser, and is answered.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

ANY = "*"


class Hosts:
    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset({"localhost", *(_plain(name) for name in names)} - {""})

    def allow(self, host: str) -> bool:
        """Of a `Host` header, with or without a port."""
        name = _without_port(host.strip())
        return _is_address(name) or _plain(name) in self._names or ANY in self._names


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _plain(name: str) -> str:
    return name.strip().lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
