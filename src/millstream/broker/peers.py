"""The verbs of a session for other brokers: those of the store relay requests of their clients, and a leader of another
system sends records with their offsets.

A peer that proves itself speaks for its client: the session takes over the client's principal and address, so the
coordinator checks the client's rights, not the relaying broker's.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from millstream.broker import replicated_records
from millstream.broker.replication.calls import CopyRequest
from millstream.broker.replication.serving import Serving
from millstream.cluster.base import Node
from millstream.core.errors import Code, RequestError
from millstream.records.record import Record
from millstream.security import peers
from millstream.security.peers import NONCE_BYTES, Peer
from millstream.security.rights import CLUSTER_NAME, Kind, Operation

if TYPE_CHECKING:
    from millstream.broker.session import Session


class Peers:
    __slots__ = ("_broker", "_cluster", "_session")

    def __init__(self, session: Session) -> None:
        self._session = session
        self._broker = session._broker
        self._cluster = session._broker.cluster

    def is_elsewhere(self, group_id: str) -> bool:
        """Whether another broker coordinates the group."""
        try:
            self._cluster.check(group_id)
        except RequestError as error:
            return error.code == Code.NOT_COORDINATOR
        return False

    async def coordinator(self, group_id: str) -> Node | None:
        """None: this broker."""
        return await self._cluster.find_coordinator(group_id)

    def copy(self, request: CopyRequest) -> Serving:
        """Answers a follower's fetch. Only for a session that proved to be a broker's."""
        replicas = self._session._broker.replicas
        if replicas is None:
            raise RequestError(Code.NOT_LEADER_OR_FOLLOWER, "this broker has no replicated partitions")
        return replicas.serve(request)

    def challenge(self) -> bytes:
        """A nonce for a client that says that it is a broker; empty if this broker has no peers."""
        return secrets.token_bytes(NONCE_BYTES) if self._cluster.secret else b""

    def introduce(self, nonce: bytes, target: int) -> str:
        """The answer to another broker's challenge."""
        session, cluster = self._session, self._cluster
        return peers.prove(cluster.secret, nonce, target, Peer(cluster.node_id, session.principal, session.host))

    def accept(self, nonce: bytes, proof: str) -> int | None:
        """Speaks for the peer's client from now on; the peer's node id. None: the proof is wrong."""
        cluster = self._cluster
        peer = peers.accept(cluster.secret, nonce, cluster.node_id, proof) if cluster.secret and nonce else None
        if peer is None:
            return None
        self._session.principal, self._session.host = peer.principal, peer.host
        return peer.node_id

    async def replicate(self, name: str, index: int, records: Sequence[Record], overrides: Mapping[str, str]) -> None:
        """Stores a leader's records at their offsets; a missing topic or partition is created
        (`replicated_records.py`).

        The right is Kafka's for requests between brokers: the records bypass the checks for producers.
        """
        self._session.check(Operation.CLUSTER_ACTION, Kind.CLUSTER, CLUSTER_NAME)
        await replicated_records.replicate(self._broker, name, index, records, overrides)
