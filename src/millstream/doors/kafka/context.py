"""What a handler knows besides its request, and what makes a module a handler.

A handler is a module `api_NN_name.py` with a docstring (versions, behaviour, gaps: `docs/compatibility.md` is made from
it), `KEY`, `VERSIONS` (lowest, highest) and one of two functions:

- `handle(request, context)`, plain or async: is given a `wire.kafka.messages.Message`, answers with `Fields`. For every
  API that `kio` decodes. The connection handles nothing else until the answer is there.
- `answer(reader, context)`: reads the body itself and gives chunks to send, a promise of them, or None for no answer.
  For the hot path, with `FLEXIBLE_FROM` beside it. The body is gone when it returns.

A plain `handle` that looks up single topics and changes nothing says `IS_PURE = True`: large requests are handled in
the thread that decodes them.

Neither raises on purpose: errors go into the answer, where the protocol wants them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from millstream.doors.kafka.share_sessions import Key, ShareSessions
from millstream.doors.kafka.unread import NO_LIMIT, Unread
from millstream.doors.memory import Budget

if TYPE_CHECKING:
    from millstream.broker.broker import Broker
    from millstream.cluster.base import Node
    from millstream.doors.kafka.sessions import FetchSessions
    from millstream.doors.kafka.share_relay import Relay
    from millstream.wire.kafka.produce import PartitionData


def _nothing() -> None: ...


class Wait(NamedTuple):
    """An answer that waits for records or for other clients, while its connection is parked."""

    cancel: Callable[[], None] = _nothing
    """Called if the connection is closed before the answer is there."""
    finish: Callable[[], None] | None = None
    """Called if the client hung up: answers now, with what is there. Where it is None, the connection is closed."""


@dataclass(slots=True)
class Context:
    broker: Broker
    sessions: FetchSessions
    client_host: str
    local_host: str
    """The address on which the client reached us: what is advertised when the door listens on every address."""
    local_port: int
    version: int = 0
    """Of the API, as the client asked for it."""
    client_id: str = ""
    wait: Wait | None = None
    """Set while an answer is parked."""
    began: float = 0.0
    """When the request was taken up, or had its records if it waited for some: its latency counts from here."""
    slow_down: bool = False
    """Set by a handler when what it wrote to has too much waiting: the connection is not read until it is answered."""
    single: PartitionData | None = None
    """Set by a produce request for a single partition that is answered: its shape is worth remembering."""
    shares: ShareSessions = field(default_factory=ShareSessions)
    """Of the door: all connections have the same."""
    unread: Unread = field(default_factory=Unread)
    """Of the door, too."""
    budget: Budget = field(default_factory=partial(Budget, NO_LIMIT))
    """Of the door: the memory for frames."""
    via: str = ""
    """The number of the broker that passes a client's share requests on through this connection, if one does."""
    relays: dict[Node, Relay] = field(default_factory=dict)
    """The connections to other brokers that go when this one goes."""
    is_gone: bool = False
    """Whether the client's connection is closed."""
    share_keys: set[Key] = field(default_factory=set)
    """The share sessions that go when this connection goes."""
