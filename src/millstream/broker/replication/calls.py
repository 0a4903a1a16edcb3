"""What replicas say to each other: a fetch of one or more partitions, and its answer. `doors/` carries it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from millstream.cluster.base import Node, PartitionKey
from millstream.core.errors import Code
from millstream.core.promise import Promise
from millstream.log.slice import Slice
from millstream.records.batch import Buffer

NO_RECORDS = Slice(0, 0)


class CopyWanted(NamedTuple):
    """One partition of a follower's fetch."""

    key: PartitionKey
    leader_epoch: int
    offset: int
    """The follower holds, and has synced, everything below it."""
    last_epoch: int
    """The epoch of the follower's last batch, or -1: the leader finds a divergence by it (KIP-595)."""
    bytes_max: int


class CopyRequest(NamedTuple):
    node_id: int
    registration: int
    """The follower's (KIP-903)."""
    wanted: Sequence[CopyWanted]
    wait_ms_max: int
    bytes_max: int


class Divergence(NamedTuple):
    """The leader's last epoch that is not above the follower's, and where it ends."""

    epoch: int
    end: int


class Served(NamedTuple):
    """The leader's answer for one partition."""

    key: PartitionKey
    code: Code
    high_watermark: int = -1
    log_start: int = -1
    divergence: Divergence | None = None
    slice: Slice = NO_RECORDS


class Copied(NamedTuple):
    """The same, as it arrives at the follower."""

    key: PartitionKey
    code: Code
    high_watermark: int = -1
    log_start: int = -1
    divergence: Divergence | None = None
    records: Buffer = b""


class PeerCalls(Protocol):
    def fetch(self, leader: Node, request: CopyRequest, lane: int) -> Promise[Sequence[Copied]]:
        """Asks a leader. A request waits for the one before it in its lane. Fails with any exception."""

    def disconnect(self, node_id: int) -> None:
        """The broker is no longer fetched from."""
