"""ShareFetch and ShareAcknowledge, written by hand, against `kio`."""

from __future__ import annotations

import random
import uuid
from typing import Any

import pytest
from kio.index import load_request_schema
from kio.serial import entity_reader

from millstream.core.errors import ProtocolError
from millstream.wire.kafka import messages, share
from millstream.wire.kafka.primitives import Reader
from millstream.wire.kafka.share import Acknowledged, PartitionAnswer, ShareAcknowledgeRequest, ShareFetchRequest
from tests.compat.random_messages import Maker, read_response, write

ROUNDS = 60
VERSIONS = (1, 2)


def random_requests(key: int, version: int) -> list[tuple[Any, Reader]]:
    maker = Maker(random.Random(f"{key}.{version}"))
    made = [maker.entity(load_request_schema(key, version)) for _ in range(ROUNDS)]
    return [(entity, Reader(memoryview(write(entity)))) for entity in made]


def acknowledged(topics: Any) -> dict[Any, list[Acknowledged]]:
    found: dict[Any, list[Acknowledged]] = {}
    for topic in topics:
        for partition in topic.partitions:
            place = (topic.topic_id or uuid.UUID(int=0), partition.partition_index)
            found.setdefault(place, []).extend(
                Acknowledged(
                    batch.first_offset, batch.last_offset, bytes(each & 0xFF for each in batch.acknowledge_types)
                )
                for batch in partition.acknowledgement_batches
            )
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_fetches_decode_as_kio_wrote_them(version: int) -> None:
    for expected, reader in random_requests(78, version):
        found = share.decode_fetch(reader, version)
        assert (found.group_id, found.member_id) == (expected.group_id, expected.member_id)
        assert found.session_epoch == expected.share_session_epoch
        assert found.wait_ms_max == expected.max_wait // messages._MILLISECOND
        assert (found.bytes_max, found.records_max) == (expected.max_bytes, expected.max_records)
        assert found.is_record_limit == (version >= 2 and expected.share_acquire_mode == 1)
        assert found.is_renewal == (version >= 2 and expected.is_renew_ack)
        assert found.acknowledged == acknowledged(expected.topics)
        assert found.forgotten == [
            (topic.topic_id or uuid.UUID(int=0), index)
            for topic in expected.forgotten_topics_data
            for index in topic.partitions
        ]


@pytest.mark.parametrize("version", VERSIONS)
def test_acknowledgements_decode_as_kio_wrote_them(version: int) -> None:
    for expected, reader in random_requests(79, version):
        found = share.decode_acknowledge(reader, version)
        assert (found.group_id, found.member_id) == (expected.group_id, expected.member_id)
        assert found.session_epoch == expected.share_session_epoch
        assert found.is_renewal == (version >= 2 and expected.is_renew_ack)
        assert found.acknowledged == acknowledged(expected.topics)


PLACES = {
    (uuid.UUID(int=7), 0): [Acknowledged(0, 4, b"\1"), Acknowledged(5, 6, b"\2\3")],
    (uuid.UUID(int=7), 9): [],
    (uuid.UUID(int=8), 1): [Acknowledged(1 << 40, 1 << 40, b"\2", 90_000, "zu groß")],
}


def test_what_the_client_writes_reads_back_as_it_was() -> None:
    forgotten = [(uuid.UUID(int=7), 1), (uuid.UUID(int=7), 2), (uuid.UUID(int=9), 0)]
    fetch = ShareFetchRequest("g", "m", 3, 500, 1 << 20, 10, True, False, PLACES, forgotten)
    assert share.decode_fetch(Reader(memoryview(share.encode_fetch_request(fetch))), 2) == fetch
    said = ShareAcknowledgeRequest("g", "m", -1, True, PLACES)
    assert share.decode_acknowledge(Reader(memoryview(share.encode_acknowledge_request(said))), 2) == said


def test_fields_of_our_own_are_only_written_where_there_is_something_to_say() -> None:
    plain = {place: [each._replace(delay_ms=0, reason="") for each in batches] for place, batches in PLACES.items()}
    body = share.encode_acknowledge_request(ShareAcknowledgeRequest("g", "m", 4, False, plain))
    read: Any
    read, size = entity_reader(load_request_schema(79, 2))(body, 0)  # which refuses tags that it does not know
    assert size == len(body) and acknowledged(read.topics) == plain


def test_who_does_not_know_our_fields_skips_them() -> None:
    said = ShareAcknowledgeRequest("g", "m", 4, False, PLACES)
    read = messages.decode_request(79, 2, share.encode_acknowledge_request(said))
    [[batch]] = [each.acknowledgement_batches for each in read.topics[1].partitions]
    assert (batch.first_offset, list(batch.acknowledge_types)) == (1 << 40, [2])


def test_a_reason_is_cut_and_a_delay_is_bounded() -> None:
    batch = Acknowledged(0, 0, b"\2", 1 << 60, "x" * 5000)
    said = ShareAcknowledgeRequest("g", "m", 1, False, {(uuid.UUID(int=1), 0): [batch]})
    found = share.decode_acknowledge(Reader(memoryview(share.encode_acknowledge_request(said))), 2)
    [[read]] = found.acknowledged.values()
    assert read.delay_ms == share.DELAY_MS_MAX and read.reason == "x" * share.REASON_BYTES_MAX


@pytest.mark.parametrize(("key", "decode"), [(78, share.decode_fetch), (79, share.decode_acknowledge)])
def test_a_request_that_is_cut_short_is_refused(key: int, decode: Any) -> None:
    for expected, _ in random_requests(key, 2)[:20]:
        data = write(expected)
        for size in range(len(data) - 1):  # the last byte only says that no tags follow
            with pytest.raises(ProtocolError):
                decode(Reader(memoryview(data)[:size]), 2)


@pytest.mark.parametrize("version", VERSIONS)
def test_answers_to_fetches_read_back_by_kio(version: int) -> None:
    topic = uuid.uuid4()
    runs = [(0, 1, 1), (2, 4, 1), (7, 7, 3), (9, 1 << 40, 40_000)]
    first = PartitionAnswer(3, 0, None, 121, "not yours", 5)
    second = PartitionAnswer(4, 100, "gone", 0, None, 0)
    data = b"".join(
        (
            share.encode_fetch_head(0, None, 30_000, 1),
            share.encode_topic(topic, 2),
            share.encode_fetched(first, 1),
            b"bytes",
            share.encode_acquired(runs),
            share.encode_fetched(second, 1),
            share.encode_acquired([]),
            share.END,
            share.END_OF_ANSWER,
        )
    )
    found = read_response(78, version, data)
    assert found.error_code == 0 and found.acquisition_lock_timeout == 30_000 * messages._MILLISECOND
    [answer] = found.responses
    assert answer.topic_id == topic
    one, other = answer.partitions
    assert (one.partition_index, one.error_code, one.acknowledge_error_code) == (3, 0, 121)
    assert one.acknowledge_error_message == "not yours" and one.records == b"bytes"
    assert (one.current_leader.leader_id, one.current_leader.leader_epoch) == (1, 0)
    told = [(each.first_offset, each.last_offset, each.delivery_count) for each in one.acquired_records]
    assert told == [(0, 4, 1), (7, 7, 3), (9, 1 << 40, 0x7FFF)]
    assert (other.partition_index, other.error_code, other.error_message) == (4, 100, "gone")
    assert other.records == b"" and not other.acquired_records


@pytest.mark.parametrize("version", VERSIONS)
def test_answers_to_acknowledgements_read_back_by_kio(version: int) -> None:
    topic = uuid.uuid4()
    data = b"".join(
        (
            share.encode_acknowledge_head(version, 122, "begin anew", 1000, 1),
            share.encode_topic(topic, 1),
            share.encode_acknowledged(2, 121, "late", 1),
            share.END,
            share.END_OF_ANSWER,
        )
    )
    found = read_response(79, version, data)
    assert (found.error_code, found.error_message) == (122, "begin anew")
    assert version < 2 or found.acquisition_lock_timeout == 1000 * messages._MILLISECOND
    [answer] = found.responses
    [one] = answer.partitions
    assert (answer.topic_id, one.partition_index, one.error_code, one.error_message) == (topic, 2, 121, "late")
