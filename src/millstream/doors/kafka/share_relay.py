"""Relays share requests to the group's coordinator on another broker.

Share consumers fetch from the partition's leader (KIP-932), but only the group's coordinator holds the leases. If
brokers share a store, the two may differ. Then the leader relays the request unchanged, and returns the answer:

    member --ShareFetch--> leader --the same bytes--> coordinator

Rules
-----
1. Each client connection has its own relay connection per coordinator. The relay closes with the client's connection;
   that ends the session and its leases on the coordinator.
2. The relay sends its broker's node id in its ApiVersions request. So a member's fetches through this broker and its
   fetches from the coordinator are two sessions, as the member expects, with separate leases.
3. A request is relayed once: a broker refuses a relayed request for a group that it does not coordinate.
4. Without a reachable coordinator the answer is SHARE_SESSION_NOT_FOUND, and clients open a new session. The answer is
   delayed, so that clients do not retry a thousand times a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from struct import Struct, error
from typing import TYPE_CHECKING

from millstream.cluster.base import Node
from millstream.core.errors import Code, ProtocolError, RequestError
from millstream.core.promise import Promise
from millstream.doors.kafka.context import Wait
from millstream.wire.kafka import api_versions, header
from millstream.wire.kafka.primitives import Reader

if TYPE_CHECKING:
    from millstream.doors.kafka.context import Context
    from millstream.doors.outbox import Chunk

CONNECT_SECONDS_MAX = 5.0
ANSWER_SECONDS_MAX = 10.0
"""In addition to the request's own wait."""
PAUSE_SECONDS = 0.1
_SIZE = Struct(">i")
_ANSWER_HEAD = Struct(">ib")
"""Correlation id, no tagged fields."""


class Relay:
    """One client's connection to one coordinator; one request in flight, because the client's connection is parked."""

    def __init__(self, node: Node, own_id: int, answer_bytes_max: int) -> None:
        self._node = node
        self._own_id = own_id
        self._answer_bytes_max = answer_bytes_max
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.is_closed = False

    async def ask(self, frame: bytes, wait_ms: int) -> bytes:
        """The body of the answer. Without an answer it closes itself and raises `OSError`."""
        try:
            if self._streams is None:
                async with asyncio.timeout(CONNECT_SECONDS_MAX):
                    self._streams = await asyncio.open_connection(self._node.host, self._node.port)
                    await self._exchange(api_versions.introduce(api_versions.RELAY, str(self._own_id)))
            async with asyncio.timeout(wait_ms / 1000 + ANSWER_SECONDS_MAX):
                answer = await self._exchange(frame)
            correlation_id, tags = _ANSWER_HEAD.unpack_from(answer)
            if correlation_id != header.peek(memoryview(frame))[2] or tags:
                raise ConnectionAbortedError("answered another request")
            return answer[_ANSWER_HEAD.size :]
        except (asyncio.IncompleteReadError, TimeoutError, error) as reason:
            self.close()
            raise ConnectionAbortedError(str(reason) or "no answer in time") from reason
        except BaseException:
            self.close()
            raise

    async def _exchange(self, frame: bytes) -> bytes:
        assert self._streams is not None
        reader, writer = self._streams
        if self.is_closed:
            raise ConnectionAbortedError("the client disconnected")
        writer.write(_SIZE.pack(len(frame)) + frame)
        await writer.drain()
        (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
        if not _ANSWER_HEAD.size <= size <= self._answer_bytes_max:
            raise ConnectionAbortedError(f"announced an answer of {size} bytes")
        return await reader.readexactly(size)

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
    try:
        context.broker.cluster.check(group_id)
    except RequestError as other:
        if other.code != Code.NOT_COORDINATOR:
            return None
        context.wait = Wait()
        return context.shares.answer(_asked(group_id, bytes(reader.buffer), wait_ms, context), refuse)
    return None


async def _asked(group_id: str, frame: bytes, wait_ms: int, context: Context) -> list[Chunk]:
    try:
        node = await context.broker.cluster.find_coordinator(group_id)
        if node is None:
            raise RequestError(Code.NOT_COORDINATOR, "this broker has just become the group's coordinator")
        return [await _relay_to(node, context).ask(frame, wait_ms)]
    except (OSError, RequestError) as reason:
        await asyncio.sleep(PAUSE_SECONDS)
        detail = f"the group's coordinator does not answer ({reason}); open a new session"
        raise RequestError(Code.SHARE_SESSION_NOT_FOUND, detail) from reason


def _relay_to(node: Node, context: Context) -> Relay:
    if context.is_gone:  # disconnected during the lookup: the relay would be orphaned
        raise ConnectionAbortedError("the client disconnected")
    relay = context.relays.get(node)
    if relay is None or relay.is_closed:
        config = context.broker.config
        relay = context.relays[node] = Relay(node, config.node_id, config.frame_bytes_max)
    return relay


def recognise(reader: Reader, context: Context) -> None:
    """Notes the node id if an ApiVersions request comes from another broker's relay."""
    with suppress(ProtocolError):
        name, number = reader.string(compact=True), reader.string(compact=True)
        if name == api_versions.RELAY:
            context.via = number or ""
