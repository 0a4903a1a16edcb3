"""What a handler knows besides its request, and what makes a module a handler.

A handler is a module `api_NN_name.py` with a docstring (versions, behaviour, gaps: `docs/compatibility.md` is made from
it), `KEY`, `VERSIONS` (lowest, highest) and `handle(request, context)`, plain or async. It is given a
`wire.kafka.messages.Message` and answers with `Fields`. It raises nothing on purpose: errors go into the answer, where
the protocol wants them. Produce, Fetch, Metadata and ApiVersions have codecs of their own and are dispatched by `door.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millstream.broker.broker import Broker


@dataclass(slots=True)
class Context:
    broker: Broker
    version: int
    """Of the API, as the client asked for it."""
    client_id: str
    client_host: str
    local_host: str
    """The address on which the client reached us: what is advertised when the door listens on every address."""
    local_port: int
