"""A connection to another broker of the cluster, which proves that it comes from one.

       broker                                       broker
       ApiVersions(RELAY, "")             ------>
                                          <------   a nonce
       ApiVersions(RELAY, proof), request ------>   checks the proof; the session is the client's from now on

The proof is an HMAC with the cluster's secret (`security/peers.py`). It names the broker, and the client for whom it
asks. A wrong proof costs the connection, before the request behind it is handled. Without a proof, a connection is an
ordinary client's, whatever it says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from millstream.cluster.base import Node
from millstream.core.errors import ProtocolError
from millstream.security.peers import NONCE_BYTES
from millstream.wire.kafka import api_versions, header
from millstream.wire.kafka.conversation import SIZE_BYTES, Conversation, Handshake, answer, answer_size, framed
from millstream.wire.kafka.primitives import Reader

if TYPE_CHECKING:
    from millstream.broker.session import Session
    from millstream.doors.kafka.context import Context

CONNECT_SECONDS_MAX = 5.0
ANSWER_SECONDS_MAX = 10.0
"""In addition to the request's own wait."""
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Dial = Callable[[str, int], Awaitable[Streams]]
"""Opens the transport to a host and port. One with TLS passes its context to `asyncio.open_connection`."""


class PeerConnection:
    """One connection to another broker, with one request in flight."""

    def __init__(
        self, node: Node, prove: Callable[[bytes], str], frame_bytes_max: int, dial: Dial = asyncio.open_connection
    ) -> None:
        """`prove` answers the other broker's nonce."""
        self._node = node
        self._prove = prove
        self._frame_bytes_max = frame_bytes_max
        self._dial = dial
        self._conversation = Conversation(api_versions.RELAY)
        self._streams: Streams | None = None
        self._proof = b""
        """Leaves with the first request."""
        self.is_closed = False

    async def ask(self, frame: bytes, wait_ms: int) -> memoryview:
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
        hello = yield api_versions.introduce(api_versions.RELAY, "")
        nonce = bytes(hello.buffer[hello.position :])
        if len(nonce) != NONCE_BYTES:
            raise ProtocolError("it is not a broker of this cluster")
        proof = self._prove(nonce)
        self._proof = self._conversation.request(api_versions.introduce(api_versions.RELAY, proof))

    async def _run(self, handshake: Handshake) -> None:
        request = next(handshake, None)
        with suppress(StopIteration):
            while request is not None:
                await self._send(self._conversation.request(request))
                request = handshake.send(self._conversation.answer(await self._receive()))

    async def _forward(self, frame: bytes) -> memoryview:
        proof, self._proof = self._proof, b""
        await self._send(proof + framed(frame))
        if proof:
            self._conversation.answer(await self._receive())
        reader = answer(await self._receive(), header.peek(memoryview(frame))[2])
        reader.skip_tags()
        return reader.buffer[reader.position :]

    async def _send(self, frames: bytes) -> None:
        assert self._streams is not None
        if self.is_closed:
            raise ConnectionAbortedError("the client disconnected")
        self._streams[1].write(frames)
        await self._streams[1].drain()

    async def _receive(self) -> memoryview:
        assert self._streams is not None
        reader = self._streams[0]
        size = answer_size(await reader.readexactly(SIZE_BYTES), self._frame_bytes_max)
        return memoryview(await reader.readexactly(size))

    def close(self) -> None:
        self.is_closed = True
        if self._streams is not None:
            self._streams[1].close()


def for_client(node: Node, client: Session) -> PeerConnection:
    """A connection for the requests of one client of this broker."""
    return PeerConnection(node, partial(client.peers.introduce, target=node.node_id), client.config.frame_bytes_max)


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
