"""A follower's Fetch, on a connection that proved to be a broker's: answered from the ends of the logs.

Records leave as file ranges, as they do for consumers. A request that waits is answered at its timeout, or when the
follower hangs up.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from millstream.broker.replication.calls import CopyRequest, CopyWanted, Served
from millstream.cluster.base import PartitionKey
from millstream.core.promise import Promise
from millstream.doors.kafka.context import Context, Wait
from millstream.doors.outbox import Chunk, pieces
from millstream.wire.kafka import replica_fetch
from millstream.wire.kafka.primitives import Reader


def answer(reader: Reader, context: Context) -> Promise[list[Chunk]]:
    request = replica_fetch.decode_request(reader)
    wanted = [
        CopyWanted(PartitionKey(topic_id, partition), epoch, offset, last_epoch, bytes_max)
        for topic_id, partition, epoch, offset, last_epoch, bytes_max in request.wanted
    ]
    serving = context.session.peers.copy(
        CopyRequest(request.node_id, request.registration, wanted, request.wait_ms_max, request.bytes_max)
    )
    context.wait = Wait(serving.finish, serving.finish)
    answered: Promise[list[Chunk]] = Promise()
    serving.answer.then(lambda done: answered.settle(encode(done.value())))
    return answered


def encode(served: Sequence[Served]) -> list[Chunk]:
    by_topic: dict[UUID, list[Served]] = {}
    for one in served:
        by_topic.setdefault(one.key.topic_id, []).append(one)
    chunks: list[Chunk] = []
    run = [replica_fetch.encode_head(len(by_topic))]
    for topic_id, partitions in by_topic.items():
        run.append(replica_fetch.encode_topic(topic_id, len(partitions)))
        for one in partitions:
            size = one.slice.size
            run.append(
                replica_fetch.encode_partition(one.key.partition, one.code, one.high_watermark, one.log_start, size)
            )
            if size:
                records = pieces(one.slice)
                if isinstance(records, bytes):
                    run.append(records)
                else:
                    chunks += [b"".join(run), records]
                    run = []
            run.append(replica_fetch.encode_end(one.divergence))
        run.append(b"\0")
    run.append(b"\0")
    chunks.append(b"".join(run))
    return chunks
