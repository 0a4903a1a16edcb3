"""How many groups, queues or cursors the clients of one address have made, so that one client cannot take them all.

Rules
-----
1. What an address made counts while it exists, whether its clients still use it or not. A name that is gone and made
   again counts for the address that made it last.
2. It is not stored: after a restart, what exists counts for all together.
3. The embedded API has no address and no share. Clients behind a local proxy come from loopback, and so does all of a
   test: they share what the broker has, unless the operator sets a share (as connections do, `doors/connections.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from millstream.core.errors import Code, RequestError
from millstream.core.logs import Damped
from millstream.core.peer import is_loopback, peer_of

refusals = Damped(__name__)

NAMES_MAX = 200_000
"""Names that are remembered although what they named may be gone."""
REMEDY = "delete some, or raise groups_per_peer_max"
N = TypeVar("N", bound=Hashable)


class Founders(Generic[N]):
    def __init__(self, what: str, limit: int, total: int, exists: Callable[[N], bool], remedy: str = REMEDY) -> None:
        """`what` is the plural of it, for sentences. `limit` 0: half of `total`, and all of it from loopback."""
        self._what = what
        self._remedy = remedy
        self._limit = limit
        self._default = max(total // 2, 1)
        self._exists = exists
        self._names: dict[str, set[N]] = {}
        self._peers: dict[N, str] = {}

    def have_room(self, host: str) -> bool:
        """Whether a client of this address may make one more."""
        limit, peer = self._limit_of(host), peer_of(host)
        if limit is None or len(self._names.get(peer, ())) < limit:
            return True
        self._forget_gone(peer)
        return len(self._names.get(peer, ())) < limit

    def check(self, host: str) -> None:
        if self.have_room(host):
            return
        detail = f"{host} has made {self._limit_of(host)} {self._what}, the share of one address; {self._remedy}"
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
        """Names that count for an address; some may be gone."""
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
