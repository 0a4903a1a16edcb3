"""The context of a request, and the contract of a handler.

A handler is a module `api_NN_name.py` with a docstring (versions, behaviour, gaps; `docs/compatibility.md` is generated
from it), `KEY`, `VERSIONS` (lowest, highest) and one of two functions:

- `handle(request, context)`, plain or async: takes a `wire.kafka.messages.Message` and returns `Fields`. For every API
  that `kio` decodes. The connection handles no other request until the answer is ready.
- `answer(reader, context)`: reads the body itself and returns chunks to send, a promise of them, or None for no answer.
  For the hot path, with `FLEXIBLE_FROM` beside it. The body is invalid after it returns.

A plain `handle` that looks up single topics and changes nothing sets `IS_PURE = True`. It then runs in the decoding
thread for large requests.

Neither function raises for an expected error: the error goes into the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from millstream.doors.engine.unread import NO_LIMIT, Unread
from millstream.doors.kafka.share_sessions import Key, ShareSessions
from millstream.doors.memory import Budget

if TYPE_CHECKING:
    from millstream.broker.session import Session
    from millstream.cluster.base import Node
    from millstream.doors.engine.connection import Connection
    from millstream.doors.kafka.peer_connection import PeerConnection
    from millstream.doors.kafka.sessions import FetchSessions
    from millstream.wire.kafka.produce import PartitionData


def _nothing() -> None: ...


class Wait(NamedTuple):
    """A long poll, or a wait for other members, while the connection is parked."""

    cancel: Callable[[], None] = _nothing
    """Called if the connection closes before the answer is ready."""
    finish: Callable[[], None] | None = None
    """Called if the client hung up: answers at once, with the available records. None: the connection is closed."""


@dataclass(slots=True)
class Context:
    session: Session
    sessions: FetchSessions
    local_host: str
    """The address that the client connected to; advertised if the door listens on every address."""
    local_port: int
    version: int = 0
    """The request's API version."""
    wait: Wait | None = None
    """Set while a request is parked."""
    began: float = 0.0
    """When handling began or, after a long poll, when the records arrived. Latency counts from here."""
    slow_down: bool = False
    """Backpressure: set by a handler if a partition has too many unsynced bytes, to park the connection."""
    single: PartitionData | None = None
    """Set by an answered produce request for one partition, so that the door remembers its shape."""
    shares: ShareSessions = field(default_factory=ShareSessions)
    """The door's: all connections share it."""
    unread: Unread[Connection] = field(default_factory=Unread)
    """The door's, too."""
    budget: Budget = field(default_factory=partial(Budget, NO_LIMIT))
    """The door's memory for frames."""
    via: str = ""
    """The node id of the broker that relays a client's requests through this connection, or empty."""
    nonce: bytes = b""
    """Awaits the proof of a relay (`peer_connection.py`)."""
    relays: dict[Node, PeerConnection] = field(default_factory=dict)
    """Connections to other brokers that close with this one."""
    is_gone: bool = False
    """Whether the client's connection is closed."""
    share_keys: set[Key] = field(default_factory=set)
    """Share sessions that close with this connection."""
