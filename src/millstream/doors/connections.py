"""The connections of a door: the limits per peer and in total, and the eviction at the limit.

    limit                                            a new connection at the limit
    `connections_per_peer_max`, of its address       is closed
    `connections_max`, or the descriptor limit       evicts another, as in Kafka (KIP-402), or is closed

The peer with the most connections loses the least recently used one; connections that hung up go first. A connection
that waits for the response to a write is never evicted. If all connections of a peer wait so, the next largest peer
loses one. A response that its client does not read does not count. So thousands of idle, waiting or unread connections
of one client cost other clients nothing.

Three quarters of the process's descriptors are for clients, in equal shares for the open doors: a client cannot take
the descriptors of another door or of the logs.

A connection waits for one response at a time, so a limit of connections also limits waiting requests.

A peer is an IPv4 address, or the /64 of an IPv6 address: one host usually has a whole /64.
"""

from __future__ import annotations

import heapq
import resource
from collections import deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from millstream.config import DOOR_PORTS, Config
from millstream.core.clock import Clock
from millstream.core.logs import Damped
from millstream.core.metrics import Metrics
from millstream.core.peer import is_loopback, peer_of

refusals = Damped(__name__)

CHOSEN_AT_ONCE = 64
"""Connections chosen for eviction in one scan: a flood of new connections must not cause a scan each."""
LOOK_SECONDS = 1.0
"""Pause after a scan that found no connection to evict."""


class Client(Protocol):
    """A connection of a door. It is hashable, and its `close` calls `discard`."""

    last_used: float
    hung_up: bool

    @property
    def is_owed(self) -> bool: ...

    def close(self) -> None: ...


C = TypeVar("C", bound=Client)


class Connections(Generic[C]):
    def __init__(self, config: Config, metrics: Metrics, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock
        self._limit = min(config.connections_max, _descriptors(config))
        self._peer_limit = config.connections_per_peer_max
        self._peers: dict[C, str] = {}
        self._by_peer: dict[str, dict[C, None]] = {}
        self._chosen: deque[tuple[C, float]] = deque()
        self._look_again = 0.0

    def __iter__(self) -> Iterator[C]:
        return iter(self._peers)

    def __len__(self) -> int:
        return len(self._peers)

    def have_room(self, host: str) -> bool:
        """Whether a connection from this address may open; at the door's limit it may evict another."""
        of_peer = len(self._by_peer.get(peer_of(host), ()))
        if of_peer >= self._limit_of(host):
            refusals.warning("refusing a connection from %s: it has %d open (connections_per_peer_max)", host, of_peer)
        elif len(self._peers) < self._limit or self.make_room():
            return True
        else:
            refusals.warning("refusing a connection from %s: %d are open (connections_max)", host, len(self._peers))
        self._metrics.connections_refused += 1
        return False

    def _limit_of(self, host: str) -> int:
        """Loopback has the door's whole limit: proxies and tests connect from there."""
        if self._peer_limit:
            return self._peer_limit
        return self._limit + 1 if is_loopback(host) else max(self._limit // 2, 1)

    def add(self, connection: C, host: str) -> None:
        peer = peer_of(host)
        self._peers[connection] = peer
        self._by_peer.setdefault(peer, {})[connection] = None
        self._metrics.connections_opened += 1
        self._metrics.connections_active += 1

    def discard(self, connection: C) -> None:
        peer = self._peers.pop(connection, None)
        if peer is None:
            return
        del self._by_peer[peer][connection]
        if not self._by_peer[peer]:
            del self._by_peer[peer]
        self._metrics.connections_closed += 1
        self._metrics.connections_active -= 1

    def make_room(self) -> bool:
        """Evicts a connection as described above; returns whether it could."""
        connection = self._next_chosen()
        if connection is None and self._clock.monotonic() >= self._look_again:
            self._choose()
            connection = self._next_chosen()
            if connection is None:
                self._look_again = self._clock.monotonic() + LOOK_SECONDS
        if connection is None:
            return False
        peer = self._peers[connection]
        refusals.warning("closing an idle connection from %s for a new one: %d are open", peer, len(self._peers))
        self._metrics.connections_evicted += 1
        connection.close()
        return True

    def _choose(self) -> None:
        peers = self._by_peer.values()
        found = _quietest(max(peers, key=len), CHOSEN_AT_ONCE) if peers else []
        if not found:
            for of_peer in sorted(peers, key=len, reverse=True):
                found += _quietest(of_peer, CHOSEN_AT_ONCE - len(found))
                if len(found) == CHOSEN_AT_ONCE:
                    break
        self._chosen.extend((each, each.last_used) for each in found)

    def _next_chosen(self) -> C | None:
        while self._chosen:
            connection, last_used = self._chosen.popleft()
            if connection in self._peers and connection.last_used == last_used and not connection.is_owed:
                return connection
        return None


def _quietest(of_peer: dict[C, None], count: int) -> list[C]:
    quiet = (each for each in of_peer if not each.is_owed)
    return heapq.nsmallest(count, quiet, key=lambda each: (not each.hung_up, each.last_used))


def _descriptors(config: Config) -> int:
    """One door's share of the process's descriptor limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 1 << 31
    others = [*map(config.door_address, DOOR_PORTS), config.http_address]
    return max(soft * 3 // 4 // (1 + sum(each is not None for each in others)), 1)
