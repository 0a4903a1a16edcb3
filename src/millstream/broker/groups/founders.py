"""How many groups, queues or cursors the clients of one address have made, so that one client cannot take them all.

What an address made counts while it exists, whether its clients still use it or not. It is not stored: after a restart,
what exists counts for all together. The embedded API has no address and no share.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from millstream.errors import Code, RequestError
from millstream.logs import Damped
from millstream.peer import peer_of

refusals = Damped(__name__)

NAMES_MAX = 200_000
"""Names that are remembered although what they named may be gone."""
REMEDY = "delete some, or raise groups_per_peer_max"
N = TypeVar("N", bound=Hashable)


class Founders(Generic[N]):
    def __init__(self, what: str, limit: int, exists: Callable[[N], bool], remedy: str = REMEDY) -> None:
        """`what` is the plural of it, for sentences."""
        self._what = what
        self._remedy = remedy
        self._limit = limit
        self._exists = exists
        self._names: dict[str, set[N]] = {}
        self._count = 0

    def have_room(self, host: str) -> bool:
        """Whether a client of this address may make one more."""
        peer = peer_of(host)
        if not host or len(self._names.get(peer, ())) < self._limit:
            return True
        self._forget_gone(peer)
        return len(self._names.get(peer, ())) < self._limit

    def check(self, host: str) -> None:
        if self.have_room(host):
            return
        detail = f"{host} has made {self._limit} {self._what}, the share of one address; {self._remedy}"
        refusals.warning("%s", detail)
        raise RequestError(Code.POLICY_VIOLATION, detail)

    def add(self, name: N, host: str) -> None:
        if not host:
            return
        if self._count >= NAMES_MAX:
            for peer in list(self._names):
                self._forget_gone(peer)
        names = self._names.setdefault(peer_of(host), set())
        self._count += name not in names
        names.add(name)

    def _forget_gone(self, peer: str) -> None:
        names = self._names.pop(peer, set())
        left = {name for name in names if self._exists(name)}
        self._count -= len(names) - len(left)
        if left:
            self._names[peer] = left
