"""The connections over which this broker copies partitions from the others: Fetch requests on proven connections.

Each lane to each leader is a connection of its own, because a fetch that waits at the leader holds up the requests
behind it. A connection is dialled with the first request after a failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from millstream.broker.replication.calls import Copied, CopyRequest, Divergence
from millstream.cluster.base import Node, PartitionKey
from millstream.core.errors import Code, ProtocolError, code_of
from millstream.core.promise import Promise, promised
from millstream.doors.kafka.peer_connection import Dial, PeerConnection
from millstream.wire.kafka import replica_fetch, requests
from millstream.wire.kafka.primitives import Reader
from millstream.wire.kafka.replica_fetch import ReplicaAnswer, ReplicaRequest, ReplicaWanted

CLIENT_ID = "millstream-replica"
ANSWER_BYTES_MAX = 256 << 20
"""The first batch of an answer may exceed the fetch's limit."""
NO_TAGS = b"\0"
Prove = Callable[[bytes, int], str]


class ReplicaLinks:
    """Implements `broker.replication.calls.PeerCalls`."""

    def __init__(self, prove: Prove, dial: Dial = asyncio.open_connection) -> None:
        """`prove` answers a nonce of the broker with that node id (`security/peers.py`)."""
        self._prove = prove
        self._dial = dial
        self._connections: dict[tuple[int, int], tuple[Node, PeerConnection]] = {}

    def fetch(self, leader: Node, request: CopyRequest, lane: int) -> Promise[Sequence[Copied]]:
        return promised(self._fetch(leader, request, lane))

    async def _fetch(self, leader: Node, request: CopyRequest, lane: int) -> Sequence[Copied]:
        wanted = [ReplicaWanted(*each.key, *each[1:]) for each in request.wanted]
        body = replica_fetch.encode_request(
            ReplicaRequest(request.node_id, request.registration, request.wait_ms_max, request.bytes_max, wanted)
        )
        head = requests.header(replica_fetch.KEY, replica_fetch.VERSION, 1, CLIENT_ID)
        answer = await self._connection(leader, lane).ask(head + NO_TAGS + body, request.wait_ms_max)
        try:
            return [_copied(each) for each in replica_fetch.decode_answer(Reader(answer))]
        except ProtocolError as error:
            raise ConnectionError(f"broker {leader.node_id} sent an invalid answer: {error}") from error

    def _connection(self, leader: Node, lane: int) -> PeerConnection:
        known = self._connections.get((leader.node_id, lane))
        if known is not None and known[0] == leader and not known[1].is_closed:
            return known[1]
        if known is not None:
            known[1].close()
        prove = partial(self._prove_to, leader.node_id)
        connection = PeerConnection(leader, prove, ANSWER_BYTES_MAX, self._dial)
        self._connections[leader.node_id, lane] = leader, connection
        return connection

    def _prove_to(self, node_id: int, nonce: bytes) -> str:
        return self._prove(nonce, node_id)

    def disconnect(self, node_id: int) -> None:
        for key in [key for key in self._connections if key[0] == node_id]:
            self._connections.pop(key)[1].close()

    def close(self) -> None:
        for _, connection in self._connections.values():
            connection.close()
        self._connections.clear()


def _copied(answer: ReplicaAnswer) -> Copied:
    code = code_of(answer.error)
    if code is None:
        code = Code.UNKNOWN_SERVER_ERROR
    divergence = Divergence(*answer.divergence) if answer.divergence is not None else None
    key = PartitionKey(answer.topic_id, answer.partition)
    return Copied(key, code, answer.high_watermark, answer.log_start, divergence, answer.records)
