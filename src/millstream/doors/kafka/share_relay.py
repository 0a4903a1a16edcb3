"""Relays share requests to the group's coordinator on another broker.

Share consumers fetch from the partition's leader (KIP-932), but only the group's coordinator holds the leases. If
brokers share a store, the two may differ. Then the leader relays the request unchanged, and returns the answer:

    member --ShareFetch--> leader --the same bytes--> coordinator

Rules
-----
1. Each client connection has its own relay connection per coordinator. The relay closes with the client's connection;
   that ends the session and its leases on the coordinator.
2. A relay proves that it belongs to a broker of the cluster, and names its broker and its client:

       leader                                       coordinator
       ApiVersions(RELAY, "")             ------>
                                          <------   a nonce
       ApiVersions(RELAY, proof), request ------>   checks the proof; the session is the client's from now on

   The proof is an HMAC with the cluster's secret (`security/peers.py`). A wrong proof costs the connection, before the
   request behind it is handled. Without a proof, a connection is an ordinary client's, whatever it says.
3. The coordinator checks the rights of the client, by its principal and address. The leader checks none.
4. A member's fetches through this broker and its fetches from the coordinator are two sessions, as the member expects,
   with separate leases: the proven node id is part of a session's key.
5. A request is relayed once: a broker refuses a relayed request for a group that it does not coordinate.
6. Without a reachable coordinator the answer is SHARE_SESSION_NOT_FOUND, and clients open a new session. The answer is
   delayed, so that clients do not retry a thousand times a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from millstream.cluster.base import Node
from millstream.core.errors import Code, ProtocolError, RequestError
from millstream.core.promise import Promise
from millstream.doors.kafka.context import Wait
from millstream.security.peers import NONCE_BYTES
from millstream.wire.kafka import api_versions, header
from millstream.wire.kafka.conversation import SIZE_BYTES, Conversation, Handshake, answer, answer_size, framed
from millstream.wire.kafka.primitives import Reader

if TYPE_CHECKING:
    from millstream.broker.session import Session
    from millstream.doors.kafka.context import Context
    from millstream.doors.outbox import Chunk

CONNECT_SECONDS_MAX = 5.0
ANSWER_SECONDS_MAX = 10.0
"""In addition to the request's own wait."""
PAUSE_SECONDS = 0.1
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Dial = Callable[[str, int], Awaitable[Streams]]
"""Opens the transport to a host and port. One with TLS passes its context to `asyncio.open_connection`."""


class Relay:
    """One client's connection to one coordinator; one request in flight, because the client's connection is parked."""

    def __init__(self, node: Node, client: Session, dial: Dial = asyncio.open_connection) -> None:
        self._node = node
        self._client = client
        self._dial = dial
        self._conversation = Conversation(api_versions.RELAY)
        self._streams: Streams | None = None
        self._proof = b""
        """Leaves with the first request."""
        self.is_closed = False

    async def ask(self, frame: bytes, wait_ms: int) -> bytes:
        """The body of the answer to a request of a flexible version. Without an answer it closes itself and raises
        `OSError`.
        """
        try:
            if self._streams is None:
                async with asyncio.timeout(CONNECT_SECONDS_MAX):
                    self._streams = await self._dial(self._node.host, self._node.port)
                    await self._run(self._introduce())
            async with asyncio.timeout(wait_ms / 1000 + ANSWER_SECONDS_MAX):
                return await self._forward(frame)
        except (asyncio.IncompleteReadError, TimeoutError, ProtocolError) as reason:
            self.close()
            raise ConnectionAbortedError(str(reason) or "no answer in time") from reason
        except BaseException:
            self.close()
            raise

    def _introduce(self) -> Handshake:
        nonce = _rest((yield api_versions.introduce(api_versions.RELAY, "")))
        if len(nonce) != NONCE_BYTES:
            raise ProtocolError("it is not a broker of this cluster")
        proof = self._client.peers.introduce(nonce, self._node.node_id)
        self._proof = self._conversation.request(api_versions.introduce(api_versions.RELAY, proof))

    async def _run(self, handshake: Handshake) -> None:
        request = next(handshake, None)
        with suppress(StopIteration):
            while request is not None:
                await self._send(self._conversation.request(request))
                request = handshake.send(self._conversation.answer(await self._receive()))

    async def _forward(self, frame: bytes) -> bytes:
        proof, self._proof = self._proof, b""
        await self._send(proof + framed(frame))
        if proof:
            self._conversation.answer(await self._receive())
        reader = answer(await self._receive(), header.peek(memoryview(frame))[2])
        reader.skip_tags()
        return _rest(reader)

    async def _send(self, frames: bytes) -> None:
        assert self._streams is not None
        if self.is_closed:
            raise ConnectionAbortedError("the client disconnected")
        self._streams[1].write(frames)
        await self._streams[1].drain()

    async def _receive(self) -> memoryview:
        assert self._streams is not None
        reader = self._streams[0]
        size = answer_size(await reader.readexactly(SIZE_BYTES), self._client.config.frame_bytes_max)
        return memoryview(await reader.readexactly(size))

    def close(self) -> None:
        self.is_closed = True
        if self._streams is not None:
            self._streams[1].close()


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
        return [await _relay_to(node, context).ask(frame, wait_ms)]
    except (OSError, RequestError) as reason:
        await asyncio.sleep(PAUSE_SECONDS)
        detail = f"the coordinator of group {group_id} does not answer ({reason}); open a new session"
        raise RequestError(Code.SHARE_SESSION_NOT_FOUND, detail) from reason


def _relay_to(node: Node, context: Context) -> Relay:
    if context.is_gone:  # disconnected during the lookup: the relay would be orphaned
        raise ConnectionAbortedError("the client disconnected")
    relay = context.relays.get(node)
    if relay is None or relay.is_closed:
        relay = context.relays[node] = Relay(node, context.session)
    return relay


def _rest(reader: Reader) -> bytes:
    return bytes(reader.buffer[reader.position :])


def recognise(reader: Reader, context: Context) -> bytes:
    """Takes an ApiVersions request that may come from another broker's relay; the nonce, if it asks for one."""
    try:
        name, proof = reader.string(compact=True), reader.string(compact=True)
    except ProtocolError:
        return b""
    if name != api_versions.RELAY:
        return b""
    nonce, context.nonce = context.nonce, b""
    peers = context.session.peers
    if not proof:
        context.nonce = peers.challenge()
    elif nonce:
        node_id = peers.accept(nonce, proof)
        if node_id is None:
            raise ProtocolError("peer authentication failed: the proof does not match the cluster's secret")
        context.via = str(node_id)
    return context.nonce
