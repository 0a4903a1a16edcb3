"""Share requests for a group that another broker looks after, passed on to that one.

Share consumers fetch from whoever leads a partition, but only the group's coordinator knows what is leased to whom.
Where brokers share a store the two may differ. Then the leader passes the request on as it came, and the answer back:

    member --ShareFetch--> leader --the same bytes--> coordinator

Rules
-----
1. A client's connection has one of its own to each coordinator of its groups. It ends with the client's, and with it
   end the session and the leases there.
2. It says in its ApiVersions request whose it is. So what a member fetches through this broker and what it fetches
   from the coordinator itself are two sessions, as the member believes, and its leases in one stand beside the other's.
3. Nothing is passed on twice: who gets a passed-on request for a group that is not its own refuses it.
4. While there is no coordinator, or it cannot be reached, the session is not found: clients open another, and the
   answer takes its time so that they do not ask a thousand times a second.
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
"""Behind the time that the request itself may wait."""
PAUSE_SECONDS = 0.1
_SIZE = Struct(">i")
_ANSWER_HEAD = Struct(">ib")
"""Correlation id, and no tags."""


class Relay:
    """One client's connection to one coordinator; one request at a time, since the client's waits for its answer."""

    def __init__(self, node: Node, own_id: int, answer_bytes_max: int) -> None:
        self._node = node
        self._own_id = own_id
        self._answer_bytes_max = answer_bytes_max
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.is_closed = False

    async def ask(self, frame: bytes, wait_ms: int) -> bytes:
        """The body of the answer; raises `OSError` if there is none, and is then of no more use."""
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
            raise ConnectionAbortedError("the client has gone")
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
    """The coordinator's answer to a request; None if there is nobody to ask but this broker."""
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
            raise RequestError(Code.NOT_COORDINATOR, "the group has just come to this broker")
        return [await _relay_to(node, context).ask(frame, wait_ms)]
    except (OSError, RequestError) as reason:
        await asyncio.sleep(PAUSE_SECONDS)
        detail = f"the broker that looks after the group does not answer ({reason}); open another session"
        raise RequestError(Code.SHARE_SESSION_NOT_FOUND, detail) from reason


def _relay_to(node: Node, context: Context) -> Relay:
    if context.is_gone:  # while the coordinator was looked for: nobody would close the connection to it
        raise ConnectionAbortedError("the client has gone")
    relay = context.relays.get(node)
    if relay is None or relay.is_closed:
        config = context.broker.config
        relay = context.relays[node] = Relay(node, config.node_id, config.frame_bytes_max)
    return relay


def recognise(reader: Reader, context: Context) -> None:
    """Notes from an ApiVersions request whether the client is another broker of the cluster, and which."""
    with suppress(ProtocolError):
        name, number = reader.string(compact=True), reader.string(compact=True)
        if name == api_versions.RELAY:
            context.via = number or ""
