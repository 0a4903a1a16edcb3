"""Counts the groups, queues or cursors that the clients of one address created, so that one client cannot use up all.

Rules
-----
1. A group counts for its address while it exists, in use or not. A deleted name that is created again counts for the
   address that created it last.
2. The counts are not stored: after a restart, existing groups count for no address.
3. The embedded API has no address and no limit. Clients behind a local proxy, and tests, connect from loopback: they
   have no limit but the total, unless the operator sets one (as with connections, `doors/connections.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from millstream.core.errors import Code, RequestError
from millstream.core.logs import Damped
from millstream.core.peer import is_loopback, peer_of

refusals = Damped(__name__)

NAMES_MAX = 200_000
"""Names that are kept, including those of deleted groups."""
REMEDY = "delete some, or raise groups_per_peer_max"
N = TypeVar("N", bound=Hashable)


class Founders(Generic[N]):
    def __init__(self, what: str, limit: int, total: int, exists: Callable[[N], bool], remedy: str = REMEDY) -> None:
        """`what` is a plural for error texts. `limit` 0: half of `total`, and no limit for loopback."""
        self._what = what
        self._remedy = remedy
        self._limit = limit
        self._default = max(total // 2, 1)
        self._exists = exists
        self._names: dict[str, set[N]] = {}
        self._peers: dict[N, str] = {}

    def have_room(self, host: str) -> bool:
        """Whether this address may create one more."""
        limit, peer = self._limit_of(host), peer_of(host)
        if limit is None or len(self._names.get(peer, ())) < limit:
            return True
        self._forget_gone(peer)
        return len(self._names.get(peer, ())) < limit

    def check(self, host: str) -> None:
        if self.have_room(host):
            return
        detail = f"{host} has created {self._limit_of(host)} {self._what}, the limit per address; {self._remedy}"
        refusals.warning("%s", detail)
        raise RequestError(Code.POLICY_VIOLATION, detail)

    def add(self, name: N, host: str) -> None:
        self._forget(name)
        if self._limit_of(host) is None:
            return
        if len(self._peers) >= NAMES_MAX:
            for peer in list(self._names):
                self._forget_gone(peer)
        self._peers[name] = peer_of(host)
        self._names.setdefault(peer_of(host), set()).add(name)

    def made_by(self, host: str) -> list[N]:
        """Names that count for an address; some are deleted."""
        return list(self._names.get(peer_of(host), ()))

    def _limit_of(self, host: str) -> int | None:
        if not host:
            return None
        if self._limit:
            return self._limit
        return None if is_loopback(host) else self._default

    def _forget(self, name: N) -> None:
        peer = self._peers.pop(name, None)
        if peer is not None:
            self._names[peer].discard(name)
            if not self._names[peer]:
                del self._names[peer]

    def _forget_gone(self, peer: str) -> None:
        for name in [name for name in self._names.get(peer, ()) if not self._exists(name)]:
            self._forget(name)
