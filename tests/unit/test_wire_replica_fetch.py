"""A replica's Fetch, written by hand, against `kio`."""

from __future__ import annotations

import random
import uuid
from typing import Any

from kio.index import load_request_schema

from millstream.wire.kafka import replica_fetch
from millstream.wire.kafka.primitives import Reader
from millstream.wire.kafka.replica_fetch import KEY, VERSION, ReplicaRequest, ReplicaWanted
from tests.compat.random_messages import Maker, read_response, write

ROUNDS = 60
ONE, TWO = uuid.UUID(int=1), uuid.UUID(int=2)


def test_requests_decode_as_kio_wrote_them() -> None:
    maker = Maker(random.Random(15))
    for _ in range(ROUNDS):
        expected: Any = maker.entity(load_request_schema(KEY, VERSION))
        found = replica_fetch.decode_request(Reader(memoryview(write(expected))))
        assert found.bytes_max == expected.max_bytes
        assert (found.node_id, found.registration) == (
            expected.replica_state.replica_id,
            expected.replica_state.replica_epoch,
        )
        assert found.wanted == [
            ReplicaWanted(
                topic.topic_id or uuid.UUID(int=0), each.partition, each.current_leader_epoch, each.fetch_offset,
                each.last_fetched_epoch, each.partition_max_bytes,
            )
            for topic in expected.topics
            for each in topic.partitions
        ]  # fmt: skip


def test_a_request_comes_back_as_it_was() -> None:
    wanted = [
        ReplicaWanted(ONE, 0, 5, 100, 4, 1 << 20),
        ReplicaWanted(ONE, 3, 6, 0, -1, 1 << 20),
        ReplicaWanted(TWO, 0, 7, 1 << 40, 7, 10),
    ]
    request = ReplicaRequest(3, 77, 500, 8 << 20, wanted)
    assert replica_fetch.decode_request(Reader(memoryview(replica_fetch.encode_request(request)))) == request


def answer() -> bytes:
    return b"".join(
        (
            replica_fetch.encode_head(2),
            replica_fetch.encode_topic(ONE, 2),
            replica_fetch.encode_partition(0, 0, 9, 2, 4),
            b"data",
            replica_fetch.encode_end(None),
            replica_fetch.encode_partition(3, 0, 9, 2, 0),
            replica_fetch.encode_end((4, 7)),
            b"\0",
            replica_fetch.encode_topic(TWO, 1),
            replica_fetch.encode_partition(1, 74, -1, -1, 0),
            replica_fetch.encode_end(None),
            b"\0\0",
        )
    )


def test_kio_reads_an_answer_as_it_was_written() -> None:
    found: Any = read_response(KEY, VERSION, answer())
    first, second = found.responses[0].partitions
    assert (first.high_watermark, first.log_start_offset, first.diverging_epoch.epoch) == (9, 2, -1)
    assert (second.diverging_epoch.epoch, second.diverging_epoch.end_offset) == (4, 7)
    assert found.responses[1].partitions[0].error_code.value == 74


def test_an_answer_comes_back_as_it_was() -> None:
    one, two, three = replica_fetch.decode_answer(Reader(memoryview(answer())))
    assert (one.topic_id, one.partition, one.high_watermark, one.log_start, bytes(one.records)) == (
        ONE,
        0,
        9,
        2,
        b"data",
    )
    assert (two.partition, two.divergence) == (3, (4, 7))
    assert (three.topic_id, three.partition, three.error, three.divergence) == (TWO, 1, 74, None)
