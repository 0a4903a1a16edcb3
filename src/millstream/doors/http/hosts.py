"""The host names under which the pages are served.

A hostile web page can make its own name resolve to this machine (DNS rebinding). The browser then treats the broker's
pages as part of that site, and lets its scripts read them. But the browser still sends the hostile name as `Host`. So
the door serves a request only if its `Host` is an IP address, which cannot be rebound, `localhost`, or a name from the
operator: the listener's, or one from `advertise` or `http_hosts`. A request without `Host` (HTTP/1.0) does not come
from a browser, and is served.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

ANY = "*"


class Hosts:
    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset({"localhost", *(_plain(name) for name in names)} - {""})

    def allow(self, host: str) -> bool:
        """Checks a `Host` header, with or without a port."""
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
