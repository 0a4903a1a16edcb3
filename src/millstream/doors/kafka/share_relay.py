"""Relays share requests to the group's coordinator on another broker.

Share consumers fetch from the partition's leader (KIP-932), but only the group's coordinator holds the leases. If
brokers share a store, the two may differ. Then the leader relays the request unchanged, and returns the answer:

    member --ShareFetch--> leader --the same bytes--> coordinator

Rules
-----
1. Each client connection has its own relay connection per coordinator. The relay closes with the client's connection;
   that ends the session and its leases on the coordinator.
2. A relay proves that it belongs to a broker of the cluster, and names its client (`peer_connection.py`). The session
   on the coordinator is the client's from then on.
3. The coordinator checks the rights of the client, by its principal and address. The leader checks none.
4. A member's fetches through this broker and its fetches from the coordinator are two sessions, as the member expects,
   with separate leases: the proven node id is part of a session's key.
5. A request is relayed once: a broker refuses a relayed request for a group that it does not coordinate.
6. Without a reachable coordinator the answer is SHARE_SESSION_NOT_FOUND, and clients open a new session. The answer is
   delayed, so that clients do not retry a thousand times a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from millstream.cluster.base import Node
from millstream.core.errors import Code, RequestError
from millstream.core.promise import Promise
from millstream.doors.kafka import peer_connection
from millstream.doors.kafka.context import Wait
from millstream.doors.kafka.peer_connection import PeerConnection
from millstream.wire.kafka.primitives import Reader

if TYPE_CHECKING:
    from millstream.doors.kafka.context import Context
    from millstream.doors.outbox import Chunk

PAUSE_SECONDS = 0.1


def pass_on(
    group_id: str | None, reader: Reader, wait_ms: int, context: Context, refuse: Callable[[RequestError], list[Chunk]]
) -> Promise[list[Chunk]] | None:
    """The coordinator's answer to a request; None if this broker answers itself."""
    if context.via or not group_id:
        return None
    if not context.session.peers.is_elsewhere(group_id):
        return None
    context.wait = Wait()
    return context.shares.answer(_asked(group_id, bytes(reader.buffer), wait_ms, context), refuse)


async def _asked(group_id: str, frame: bytes, wait_ms: int, context: Context) -> list[Chunk]:
    try:
        node = await context.session.peers.coordinator(group_id)
        if node is None:
            raise RequestError(Code.NOT_COORDINATOR, "this broker has just become the group's coordinator")
        return [bytes(await _relay_to(node, context).ask(frame, wait_ms))]
    except (OSError, RequestError) as reason:
        await asyncio.sleep(PAUSE_SECONDS)
        detail = f"the coordinator of group {group_id} does not answer ({reason}); open a new session"
        raise RequestError(Code.SHARE_SESSION_NOT_FOUND, detail) from reason


def _relay_to(node: Node, context: Context) -> PeerConnection:
    if context.is_gone:  # disconnected during the lookup: the relay would be orphaned
        raise ConnectionAbortedError("the client disconnected")
    relay = context.relays.get(node)
    if relay is None or relay.is_closed:
        relay = context.relays[node] = peer_connection.for_client(node, context.session)
    return relay
