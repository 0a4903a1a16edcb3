"""How a broker proves to another broker of its store that it is one, and names the client that it asks for.

Only members of the cluster can read the cluster's secret (`Cluster.secret`). The broker that is asked sends a nonce.
The other answers with an HMAC (RFC 2104) of the nonce, of the node id that it means to reach, and of its claim. So a
proof holds for one connection to one broker, and a copy of it is worthless.
"""

from __future__ import annotations

import hmac
import json
from typing import NamedTuple

from millstream.security.principal import Principal

NONCE_BYTES = 16
_MAC_CHARS = 64


class Peer(NamedTuple):
    """A broker that relays a client's requests."""

    node_id: int
    principal: Principal
    """The client's."""
    host: str
    """The client's address."""


def prove(secret: bytes, nonce: bytes, target: int, peer: Peer) -> str:
    claim = json.dumps([peer.node_id, *peer.principal, peer.host])
    return _mac(secret, nonce, target, claim) + claim


def accept(secret: bytes, nonce: bytes, target: int, proof: str) -> Peer | None:
    """None: the proof is wrong."""
    mac, claim = proof[:_MAC_CHARS], proof[_MAC_CHARS:]
    if not hmac.compare_digest(mac.encode(), _mac(secret, nonce, target, claim).encode()):
        return None
    node_id, kind, name, host = json.loads(claim)
    return Peer(node_id, Principal(kind, name), host)


def _mac(secret: bytes, nonce: bytes, target: int, claim: str) -> str:
    return hmac.digest(secret, nonce + target.to_bytes(8, "big") + claim.encode(), "sha256").hex()
