"""Flume's protocol as bytes, against an independent client and against bytes that make no sense."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.core.errors import ProtocolError
from millstream.wire import flume
from tests.compat import client_flume as theirs

NAMES = st.text(max_size=50)


@given(NAMES, st.integers(-1, 100), st.binary(max_size=50), st.binary(max_size=500), st.integers(0, 2**31 - 1))
def test_produce_says_what_the_client_said(topic: str, partition: int, key: bytes, payload: bytes, number: int) -> None:
    frame = memoryview(theirs.request(0, number, theirs.produce_payload(topic, payload, key, partition)))
    assert flume.peek(frame) == (flume.PRODUCE, number)
    assert flume.decode(0, frame) == flume.decode_produce(frame) == (topic, partition, key, payload)
    assert flume.ProduceTo(topic).decode(frame) == (number, partition, key or None, payload)
    assert flume.ProduceTo(topic + "x").decode(frame) is None


@given(st.sampled_from(["", "t", "topic"]), st.binary(max_size=60), st.integers(0, 60), st.integers(0, 3))
def test_the_short_way_to_decode_produce_never_says_other_than_the_long_one(
    topic: str, noise: bytes, at: int, key: int
) -> None:
    sound = bytearray(theirs.request(key, 1, theirs.produce_payload(topic, b"payload", b"key", 0)))
    sound[at : at + len(noise)] = noise
    frame = memoryview(bytes(sound))
    short = flume.ProduceTo(topic).decode(frame)
    if short is not None:
        assert flume.peek(frame) == (flume.PRODUCE, short[0])
        assert flume.decode_produce(frame) == (topic, short[1], short[2] or b"", short[3])


@given(NAMES, NAMES, st.integers(-(2**31), 2**31 - 1), st.lists(NAMES, max_size=20))
def test_join_group_says_what_the_client_said(group: str, member: str, session_ms: int, topics: list[str]) -> None:
    frame = memoryview(theirs.request(2, 1, theirs.join_payload(group, topics, member, session_ms)))
    assert flume.decode(2, frame) == (group, member, session_ms, tuple(topics))


@given(st.lists(st.tuples(st.integers(0, 2**62), st.binary(max_size=100))), st.integers(0, 6))
def test_the_client_reads_what_was_fetched(records: list[tuple[int, bytes]], error: int) -> None:
    answer = flume.encode_fetched(5, error, records)
    assert int.from_bytes(answer[:4], "big") == len(answer) - 4 and answer[4:8] == b"\0\0\0\5"
    assert theirs.fetched(answer[8:]) == (error, records)


@given(st.integers(0, 6), st.integers(0, 2**31 - 1), NAMES, NAMES, st.lists(NAMES, max_size=20))
def test_the_client_reads_who_joined(error: int, generation: int, leader: str, member: str, members: list[str]) -> None:
    answer = flume.encode_joined(1, error, generation, leader, member, members)
    assert int.from_bytes(answer[:4], "big") == len(answer) - 4
    assert theirs.joined(answer[8:]) == (error, generation, leader, member, members)


def test_the_client_reads_the_small_answers() -> None:
    assert theirs.produced(flume.encode_produced(1, 2, 1 << 40, 3)[8:]) == (2, 1 << 40, 3)
    assert theirs.error(flume.encode_error(1, 6)[8:]) == 6
    assert flume.encode_offset(1, 0)[8:] == b"\0\0" + b"\xff" * 8


@given(st.integers(0, 6), st.binary(max_size=200))
def test_any_bytes_are_a_request_or_a_protocol_error(key: int, payload: bytes) -> None:
    frame = memoryview(theirs.request(key, 1, payload))
    try:
        request = flume.decode(key, frame)
    except ProtocolError:
        return
    assert all(isinstance(field, str | bytes | int | tuple) for field in request)


@pytest.mark.parametrize("key", range(7))
def test_a_request_cut_anywhere_or_with_more_behind_it_is_refused(key: int) -> None:
    payloads = {
        0: theirs.produce_payload("topic", b"payload", b"key"),
        1: theirs.fetch_payload("topic", 0, 1),
        2: theirs.join_payload("group", ["a", "b"]),
        3: theirs.string("group") + theirs.string("member"),
        4: theirs.string("group") + bytes(4) + theirs.string("member"),
        5: theirs.string("group") + theirs.string("topic") + bytes(12),
        6: theirs.string("group") + theirs.string("topic") + bytes(4),
    }
    payload = payloads[key]
    assert flume.decode(key, memoryview(theirs.request(key, 1, payload)))
    for cut in range(len(payload)):
        with pytest.raises(ProtocolError):
            flume.decode(key, memoryview(theirs.request(key, 1, payload[:cut])))
    with pytest.raises(ProtocolError):
        flume.decode(key, memoryview(theirs.request(key, 1, payload + b"\0")))


@pytest.mark.parametrize(
    ("key", "hashed"), [(b"a", 0xE40C292C), (b"foobar", 0xBF9CF968), (b"b", 0xE70C2DE5), (b"user-123", None)]
)
def test_keys_are_hashed_with_fnv_1a(key: bytes, hashed: int | None) -> None:
    hashed = theirs.fnv1a(key) if hashed is None else hashed
    for partitions in (1, 3, 7, 1000):
        assert flume.partition_of(key, partitions) == hashed % partitions
    assert flume.partition_of(b"", 3) == 0
