from __future__ import annotations

from collections import Counter
from zlib import crc32

import pytest
from confluent_kafka import fnv1a as their_fnv1a
from confluent_kafka import murmur2 as their_murmur2
from hypothesis import given
from hypothesis import strategies as st

from millstream.client.partitioners import fnv1a_32, make, murmur2, place
from millstream.core.errors import MillstreamError


def test_hashes_are_those_of_their_inventors() -> None:
    assert [fnv1a_32(data) for data in (b"", b"a", b"foobar")] == [0x811C9DC5, 0xE40C292C, 0xBF9CF968]
    assert crc32(b"123456789") == 0xCBF43926
    assert murmur2(b"21") == -973932308 & 0x7FFFFFFF  # from the tests of Kafka's Java client
    assert murmur2(b"foobar") == -790332482 & 0x7FFFFFFF


@given(st.binary(max_size=64), st.integers(1, 50))
def test_keys_go_where_librdkafka_sends_them(key: bytes, partitions: int) -> None:
    assert make("murmur2")(key, partitions) == their_murmur2(key, partitions)


@given(st.binary(min_size=1, max_size=64), st.integers(1, 50))
def test_every_partitioner_stays_within_the_topic(key: bytes, partitions: int) -> None:
    for name in ("murmur2", "crc32", "fnv1a", "round_robin", "random"):
        partitioner = make(name)
        for each in (key, None):
            assert 0 <= place(partitioner, each, partitions) < partitions


@pytest.mark.parametrize("name", ["murmur2", "crc32", "fnv1a"])
def test_a_key_has_one_partition_and_records_without_one_go_round(name: str) -> None:
    partitioner = make(name)
    assert len({partitioner(b"user-1", 7) for _ in range(20)}) == 1
    assert Counter(partitioner(None, 7) for _ in range(21)) == dict.fromkeys(range(7), 3)


def test_round_robin_and_random_do_not_look_at_keys() -> None:
    turns = make("round_robin")
    assert [turns(b"same", 3) for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    anywhere = make("random")
    assert len({anywhere(b"same", 3) for _ in range(100)}) == 3


def test_fnv1a_is_not_the_signed_variant_of_librdkafka_but_the_plain_one() -> None:
    """Flume takes the hash as it is; librdkafka's partitioner of that name makes it positive first."""
    keys = [b"user-%d" % number for number in range(100)]
    plain = [fnv1a_32(key) % 3 for key in keys]
    assert [make("fnv1a")(key, 3) for key in keys] == plain
    assert [their_fnv1a(key, 3) for key in keys] != plain


@pytest.mark.parametrize("chosen", [3, -1, "0", None])
def test_a_choice_outside_the_topic_is_refused(chosen: object) -> None:
    with pytest.raises(MillstreamError, match="the topic has partitions 0 to 2"):
        place(lambda key, partitions: chosen, b"k", 3)  # type: ignore[arg-type, return-value]
