"""Pipelined produce requests over real sockets: many at once are answered and stored as if each had come alone."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream.core.errors import Code
from millstream.records import codec
from tests.compat import raw
from tests.compat.random_messages import read_response
from tests.compat.raw import Raw
from tests.serving import ServedBroker

COUNT = 60


@pytest.fixture(scope="module", params=["compiled", "pure"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBroker]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MILLSTREAM_PURE", "1" if request.param == "pure" else "0")
        with ServedBroker(tmp_path_factory.mktemp("runs")) as broker:
            yield broker


@pytest.fixture
def wire(served: ServedBroker) -> Iterator[Raw]:
    with Raw(served.address) as connection:
        yield connection


def numbered(frame: bytes, number: int) -> bytes:
    return frame[:8] + struct.pack(">i", number) + frame[12:]


def exchange(wire: Raw, frames: list[bytes]) -> list[Any]:
    """Sends all at once; the answers, each checked to be the one to its request."""
    wire.send(b"".join(numbered(frame, number) for number, frame in enumerate(frames)))
    answers = []
    for number, frame in enumerate(frames):
        answer = wire.receive()
        (version,) = struct.unpack_from(">h", frame, 6)
        assert struct.unpack_from(">i", answer) == (number,)
        body = answer[5:] if version >= 9 else answer[4:]
        answers.append(read_response(0, version, body).responses[0].partition_responses[0])
    return answers


def stored(wire: Raw, topic: str, partition: int = 0) -> list[tuple[int, bytes | None]]:
    found: list[tuple[int, bytes | None]] = []
    while True:
        at = found[-1][0] + 1 if found else 0
        answer = wire.ask(raw.fetch(topic, at, partition=partition)).responses[0].partitions[0]
        assert answer.error_code == 0
        records = [record for record in codec.iterate(answer.records or b"") if record.offset >= at]
        if not records:
            return found
        found += [(record.offset, record.value) for record in records]


def test_several_partitions_and_versions_in_turn(served: ServedBroker, wire: Raw, unique: Callable[[str], str]) -> None:
    topic = unique("mixed")
    raw.create_topic(served.address, topic, 3)
    places = [(number % 3, 3 + number % 10) for number in range(COUNT)]
    frames = [
        raw.produce(topic, raw.batch(b"%d" % number), partition=partition, version=version)
        for number, (partition, version) in enumerate(places)
    ]
    for times in range(3):  # first learnt, then known
        answers = exchange(wire, frames)
        assert [answer.index for answer in answers] == [partition for partition, _ in places]
        assert [answer.error_code for answer in answers] == [0] * COUNT
        assert [answer.base_offset for answer in answers] == [times * COUNT // 3 + n // 3 for n in range(COUNT)]
    for partition in range(3):
        values = [b"%d" % number for number in range(partition, COUNT, 3)] * 3
        assert stored(wire, topic, partition) == list(enumerate(values))


def test_what_is_wrong_in_the_middle_costs_its_own_request(
    served: ServedBroker, wire: Raw, unique: Callable[[str], str]
) -> None:
    topic = unique("broken")
    raw.create_topic(served.address, topic, max_message_bytes="2000")
    good = [raw.produce(topic, raw.batch(b"%d" % number)) for number in range(10)]
    exchange(wire, good)
    torn = bytearray(raw.batch(b"torn"))
    torn[-1] ^= 1
    broken = {
        3: (raw.produce(topic, bytes(torn)), Code.CORRUPT_MESSAGE),
        5: (raw.produce(topic, raw.batch(bytes(3000))), Code.MESSAGE_TOO_LARGE),
        8: (raw.produce("no" + topic, raw.batch(b"x")), Code.UNKNOWN_TOPIC_OR_PARTITION),
    }
    answers = exchange(wire, [broken[at][0] if at in broken else frame for at, frame in enumerate(good)])
    assert {at: answer.error_code for at, answer in enumerate(answers) if answer.error_code} == {
        at: code for at, (_, code) in broken.items()
    }
    assert [answer.base_offset for answer in answers if not answer.error_code] == list(range(10, 17))
    assert [value for _, value in stored(wire, topic)][10:] == [b"0", b"1", b"2", b"4", b"6", b"7", b"9"]


def test_an_idempotent_producer_among_others_is_stored_once(
    served: ServedBroker, wire: Raw, unique: Callable[[str], str]
) -> None:
    topic = unique("once")
    raw.create_topic(served.address, topic)
    plain = raw.produce(topic, raw.batch(b"plain"))
    mine = raw.produce(topic, raw.batch(b"mine", producer_id=12345, producer_epoch=0, base_sequence=0))
    answers = exchange(wire, [plain, plain, mine, plain, mine, plain])
    assert [answer.base_offset for answer in answers] == [0, 1, 2, 3, 2, 4]
    assert [value for _, value in stored(wire, topic)].count(b"mine") == 1


def test_a_topic_that_the_broker_stamps_answers_with_its_time(
    served: ServedBroker, wire: Raw, unique: Callable[[str], str]
) -> None:
    topic = unique("stamped")
    raw.create_topic(served.address, topic, message_timestamp_type="LogAppendTime")
    for _ in range(2):
        answers = exchange(wire, [raw.produce(topic, raw.batch(b"x", timestamp_ms=1000))] * 5)
        assert all(answer.log_append_time.timestamp() > 1_700_000_000 for answer in answers)


def test_runs_go_on_in_the_next_segment_when_one_is_full(
    served: ServedBroker, wire: Raw, unique: Callable[[str], str]
) -> None:
    topic = unique("segments")
    raw.create_topic(served.address, topic, segment_bytes="2000", max_message_bytes="1500", index_interval_bytes="200")
    values = [b"%d" % number * 40 for number in range(COUNT)]
    for times in range(4):
        answers = exchange(wire, [raw.produce(topic, raw.batch(value)) for value in values])
        assert [answer.base_offset for answer in answers] == list(range(times * COUNT, (times + 1) * COUNT))
    segments = [path for path in Path(served.directory).rglob("*.log") if topic in str(path)]
    assert len(segments) > 10 and max(path.stat().st_size for path in segments) <= 2000
    assert stored(wire, topic) == list(enumerate(values * 4))


def test_hostile_bytes_behind_a_run_cost_the_connection_and_nothing_that_was_in_order(
    served: ServedBroker, unique: Callable[[str], str]
) -> None:
    topic = unique("hostile")
    raw.create_topic(served.address, topic)
    good = raw.produce(topic, raw.batch(b"good"))
    with Raw(served.address) as wire:
        exchange(wire, [good] * 5)
        wire.send(good * 5 + struct.pack(">ihhi", -1, 0, 9, 0))
        while wire.receive():
            pass
    with Raw(served.address) as wire:
        assert exchange(wire, [good])[0].base_offset == 10
        assert stored(wire, topic) == [(offset, b"good") for offset in range(11)]
