"""Runs of produce requests: what is taken from a buffer, where it stops, and that both kernels always agree."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.records import codec
from millstream.records.batch import CRC_START, LOG_APPEND_TIME, Buffer, read_header
from millstream.records.record import Record
from millstream.records.run import split
from millstream.wire.kafka import _runs, pure_runs
from millstream.wire.kafka.primitives import uvarint
from tests.batches import NOW, batch

FIXED, FLEXIBLE = 7, 9
MB = 1 << 20
MUTATIONS = 4000
CLIENTS = {b"a": "left", b"b": "right", b"a longer name": "left"}
"""By their ids, to which partition they send."""


@pytest.fixture(params=[_runs, pure_runs], ids=["compiled", "pure"])
def kernel(request: pytest.FixtureRequest) -> Any:
    return request.param


def prefix(client: bytes) -> bytes:
    return struct.pack(">h", len(client)) + client + b"acks, topic and partition"


def framed(body: bytes, number: int = 0, version: int = FIXED) -> bytes:
    return struct.pack(">ihhi", 8 + len(body), 0, version, number) + body


def frame(
    records: Buffer, number: int = 0, client: bytes = b"a", version: int = FIXED, tail: bytes | None = None
) -> bytes:
    if version >= FLEXIBLE:
        length, end = uvarint(len(records) + 1), b"\0\0\0"
    else:
        length, end = struct.pack(">i", len(records)), b""
    return framed(prefix(client) + length + records + (end if tail is None else tail), number, version)


class Taken:
    """What a kernel makes of a buffer, by the shapes of all clients in both versions."""

    def __init__(
        self, kernel: Any, data: bytes | bytearray, position: int = 0, *, batch_bytes_max: int = MB, bytes_max: int = MB
    ) -> None:
        self.kernel = kernel
        self.parts: dict[str, Any] = {}
        self.requests: list[Any] = []
        self.shapes = {
            (version, prefix(client)): kernel.Shape(
                prefix(client),
                version,
                b"head of " + client,
                b"tail",
                partition,
                is_flexible=version >= FLEXIBLE,
                has_log_start=version >= FLEXIBLE,
            )
            for version in (FIXED, FLEXIBLE)
            for client, partition in CLIENTS.items()
        }

        def part_of(partition: str) -> Any:
            assert partition not in self.parts, "asked once for each"
            self.parts[partition] = kernel.Part(batch_bytes_max, bytes_max)
            return self.parts[partition]

        self.lengths = {len(prefix(client)): None for client in CLIENTS}
        self.position = kernel.take(memoryview(data), position, self.shapes, self.lengths, part_of, self.requests)

    def found(self, frame: bytes) -> tuple[bytes, bytes] | None:
        """Prefix and batch of a whole frame, as one that comes alone is looked up."""
        version = int.from_bytes(frame[6:8], signed=True)
        found = self.kernel.find(memoryview(frame)[4:], 8, version, self.shapes, self.lengths)
        return (found[0].prefix, bytes(found[1])) if found is not None else None

    def stored(self, partition: str = "left", base_offset: int = 100) -> list[bytes]:
        part = self.parts[partition]
        part.place(base_offset, 0)
        return [bytes(each) for each, _ in split(part.data)]

    def everything(self) -> tuple[object, ...]:
        """All that a caller can see of it."""
        parts = {name: (part.count, part.offsets, part.max_timestamp) for name, part in self.parts.items()}
        stored = {name: self.stored(name) for name in self.parts}
        for part in self.parts.values():
            part.settle(7000, 3)
        return self.position, [each[1::2] + each[4:] for each in self.requests], parts, stored, self.answers()

    def answers(self) -> bytes:
        answers: bytes = self.kernel.answers(self.requests)
        return answers


def damaged(data: bytes | bytearray, position: int, new: bytes, *, renew_crc: bool = True) -> bytes:
    data = bytearray(data)
    data[position : position + len(new)] = new
    if renew_crc:
        data[17:21] = struct.pack(">I", crc32c(bytes(data[CRC_START:])))
    return bytes(data)


@pytest.mark.parametrize("at", [27, 35], ids=["base timestamp", "max timestamp"])
def test_a_batch_that_says_a_time_beyond_the_bound_is_not_taken(kernel: Any, at: int) -> None:
    parts: list[Any] = []
    shapes = Taken(kernel, b"").shapes

    def take(timestamp: int) -> int:
        data = frame(damaged(batch(b"x", at=NOW), at, struct.pack(">q", timestamp)), 1)
        parts.append(kernel.Part(1 << 20, 1 << 20, NOW + 5))
        requests: list[Any] = []
        kernel.take(memoryview(data), 0, shapes, [len(prefix(each)) for each in CLIENTS], lambda _: parts[-1], requests)
        return len(requests)

    assert [take(NOW + 5), take(NOW + 6)] == [1, 0]


# -- what is taken -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [FIXED, FLEXIBLE])
def test_batches_stand_behind_each_other_with_their_offsets(kernel: Any, version: int) -> None:
    batches = [bytes(batch(*[b"x" * 50] * count, at=NOW - count)) for count in (1, 3, 2)]
    data = b"".join(frame(each, number, version=version) for number, each in enumerate(batches))
    taken = Taken(kernel, data)
    assert taken.position == len(data)
    part = taken.parts["left"]
    assert (part.count, part.offsets, part.max_timestamp) == (3, 6, NOW - 1)
    assert [each[16:] for each in taken.stored()] == [each[16:] for each in batches]
    headers = [read_header(each) for each in taken.stored(base_offset=100)]
    assert [(header.base_offset, header.leader_epoch) for header in headers] == [(100, 0), (101, 0), (104, 0)]


def test_the_receive_buffer_is_only_read_and_is_let_go_of(kernel: Any) -> None:
    data = bytearray(frame(batch(b"x")) * 3)
    before = bytes(data)
    Taken(kernel, data).stored()
    assert data == before
    data.append(0)  # BufferError while a view exists


def test_partitions_in_turn_get_their_own_batches_and_two_clients_of_one_share_a_part(kernel: Any) -> None:
    clients = [b"a", b"b", b"a longer name", b"b", b"b", b"a"]
    data = b"".join(frame(batch(b"%d" % number), number, client) for number, client in enumerate(clients))
    taken = Taken(kernel, data)
    assert taken.position == len(data)
    values = {name: [codec.decode(each)[0].value for each in taken.stored(name)] for name in ("left", "right")}
    assert values == {"left": [b"0", b"2", b"5"], "right": [b"1", b"3", b"4"]}
    assert [request[3] for request in taken.requests] == [0, 0, 1, 1, 2, 2], "offsets before it in its part"


def test_versions_may_be_mixed(kernel: Any) -> None:
    data = b"".join(frame(batch(b"x"), version=version) for version in (FIXED, FLEXIBLE, FIXED, FLEXIBLE))
    assert Taken(kernel, data).parts["left"].count == 4


def test_it_begins_where_it_is_told_to(kernel: Any) -> None:
    one = frame(batch(b"x"))
    assert Taken(kernel, b"junk" + one * 2, 4).position == 4 + 2 * len(one)
    assert Taken(kernel, one, len(one)).position == len(one)
    assert Taken(kernel, one, len(one) + 5).position == len(one) + 5
    with pytest.raises(ValueError, match="before"):
        Taken(kernel, one, -1)


@pytest.mark.parametrize("version", [FIXED, FLEXIBLE])
def test_a_request_that_comes_alone_is_found_by_the_same_rules(kernel: Any, version: int) -> None:
    taken = Taken(kernel, b"")
    for client in CLIENTS:
        assert taken.found(frame(SOUND, client=client, version=version)) == (prefix(client), SOUND)
    assert taken.found(frame(SOUND, client=b"c", version=version)) is None
    assert taken.found(frame(SOUND, version=version, tail=b"\0")) is None
    assert taken.found(frame(SOUND, version=version)[:-1]) is None
    assert taken.found(b"") is None


# -- where it stops ----------------------------------------------------------------------------------------------------

SOUND = bytes(batch(b"value", at=NOW))
PRODUCER = bytes(batch(b"value", producer=5))
UNUSUAL = {
    "another api": frame(SOUND)[:4] + struct.pack(">h", 1) + frame(SOUND)[6:],
    "another version": frame(SOUND, version=FIXED - 1),
    "another client": frame(SOUND, client=b"c"),
    "a size that is negative": struct.pack(">i", -5) + frame(SOUND)[4:],
    "a size below that of a header": struct.pack(">ihhi", 8, 0, FIXED, 0),
    "a batch longer than its frame": damaged(
        frame(SOUND), 12 + len(prefix(b"a")), b"\x7f\xff\xff\xff", renew_crc=False
    ),
    "a batch of negative length": damaged(frame(SOUND), 12 + len(prefix(b"a")), b"\xff" * 4, renew_crc=False),
    "bytes behind the batch": frame(SOUND, tail=b"\0"),
    "tags behind the batch": frame(SOUND, version=FLEXIBLE, tail=b"\0\1\0\0"),
    "something else for the tags": frame(SOUND, version=FLEXIBLE, tail=b"\0\1\0"),
    "no tags": frame(SOUND, version=FLEXIBLE, tail=b""),
    "a length that does not end": framed(prefix(b"a") + b"\xff" * 100, version=FLEXIBLE),
    "nothing but the known bytes": framed(prefix(b"a")),
    "no batch": frame(b""),
    "a compact null": frame(b"", version=FLEXIBLE).replace(b"\1\0\0\0", b"\0\0\0\0"),
    "less than a header": frame(SOUND[:60]),
    "an old format": frame(damaged(SOUND, 16, b"\1")),
    "another length": frame(damaged(SOUND, 8, struct.pack(">i", len(SOUND) - 13))),
    "a broken checksum": frame(damaged(SOUND, len(SOUND) - 2, b"?", renew_crc=False)),
    "no records": frame(damaged(damaged(SOUND, 57, struct.pack(">i", 0)), 23, struct.pack(">i", -1))),
    "fewer records than offsets": frame(damaged(SOUND, 23, struct.pack(">i", 1))),
    "an unknown codec": frame(damaged(SOUND, 21, struct.pack(">h", 5))),
    "a transaction": frame(damaged(SOUND, 21, struct.pack(">h", 0x10))),
    "a control batch": frame(damaged(SOUND, 21, struct.pack(">h", 0x20))),
    "unknown attributes": frame(damaged(SOUND, 21, struct.pack(">h", -0x8000))),
    "an idempotent producer": frame(PRODUCER),
    "a negative producer": frame(damaged(SOUND, 43, struct.pack(">q", -2))),
}


@pytest.mark.parametrize("reason", UNUSUAL)
def test_it_stops_in_front_of(kernel: Any, reason: str) -> None:
    before = [frame(SOUND), frame(SOUND, version=FLEXIBLE)]
    data = b"".join([*before, UNUSUAL[reason], frame(SOUND)])
    taken = Taken(kernel, data)
    assert taken.position == len(b"".join(before))
    assert taken.parts["left"].count == len(taken.requests) == len(taken.stored()) == 2
    assert Taken(kernel, UNUSUAL[reason]).position == 0, "nor does it begin with it"


def test_every_size_around_the_small_checksum_is_taken_sound_and_refused_damaged(kernel: Any) -> None:
    source = random.Random(7)
    for size in [*range(40), *range(900, 1100)]:
        data = bytes(batch(source.randbytes(size)))
        assert Taken(kernel, frame(data)).position == len(frame(data)), size
        position = source.randrange(61, len(data))
        bad = damaged(data, position, bytes([data[position] ^ 1 << source.randrange(8)]), renew_crc=False)
        assert Taken(kernel, frame(bad)).position == 0, (size, position)


@pytest.mark.parametrize("version", [FIXED, FLEXIBLE])
def test_it_stops_in_front_of_a_frame_that_has_not_all_arrived(kernel: Any, version: int) -> None:
    one = frame(SOUND, version=version)
    for there in range(len(one)):
        assert Taken(kernel, one + one[:there]).position == len(one)


def test_it_stops_where_a_batch_is_too_large_or_the_part_is_full(kernel: Any) -> None:
    size = len(SOUND)
    data = frame(SOUND) * 5
    assert Taken(kernel, data, batch_bytes_max=size).parts["left"].count == 5
    assert Taken(kernel, data, batch_bytes_max=size - 1).parts["left"].count == 0
    assert Taken(kernel, data, bytes_max=3 * size).parts["left"].count == 3
    assert Taken(kernel, data, bytes_max=4 * size - 1).parts["left"].count == 3


def test_it_stops_before_its_offsets_would_not_fit_a_segments_index(kernel: Any) -> None:
    count = 2**30
    huge = damaged(damaged(SOUND, 57, struct.pack(">i", count)), 23, struct.pack(">i", count - 1))
    part = Taken(kernel, frame(huge) * 3).parts["left"]
    assert (part.count, part.offsets) == (1, count)
    most = damaged(damaged(SOUND, 57, struct.pack(">i", 2**31 - 1)), 23, struct.pack(">i", 2**31 - 2))
    assert Taken(kernel, frame(most)).parts["left"].offsets == 2**31 - 1


def test_it_stops_at_a_partition_that_takes_no_runs_and_passes_errors_on(kernel: Any) -> None:
    data = bytearray(frame(SOUND))
    shape = kernel.Shape(prefix(b"a"), FIXED, b"", b"", "left", is_flexible=False, has_log_start=False)

    def take(part_of: Callable[[object], Any]) -> int:
        requests: list[Any] = []
        position: int = kernel.take(
            memoryview(data), 0, {(FIXED, shape.prefix): shape}, [len(shape.prefix)], part_of, requests
        )
        assert not requests
        return position

    def failing(_: object) -> None:
        raise RuntimeError("no part")

    assert take(lambda _: None) == 0
    with pytest.raises(RuntimeError, match="no part"):
        take(failing)
    data.append(0)  # no view exists


# -- answers -----------------------------------------------------------------------------------------------------------


def test_answers_have_the_offsets_that_the_log_gave(kernel: Any) -> None:
    taken = Taken(kernel, frame(batch(b"x", b"y"), 11) + frame(batch(b"z"), -12, version=FLEXIBLE))
    taken.parts["left"].settle(2**40, 17)
    first = b"head of a" + struct.pack(">qq", 2**40, -1) + b"tail"
    second = b"head of a" + struct.pack(">qqq", 2**40 + 2, -1, 17) + b"tail"
    assert taken.answers() == (
        struct.pack(">ii", 4 + len(first), 11) + first + struct.pack(">ii", 4 + len(second), -12) + second
    )
    shape = taken.requests[1][0]
    assert kernel.answer(shape, -12, 2**40 + 2, -1, 17) == struct.pack(">ii", 4 + len(second), -12) + second
    assert kernel.answers([]) == b""


def test_the_time_of_a_batch_that_says_it_is_the_logs_goes_into_its_answer(kernel: Any) -> None:
    stamped = damaged(SOUND, 21, struct.pack(">h", LOG_APPEND_TIME))
    taken = Taken(kernel, frame(SOUND) + frame(stamped))
    assert [request[4] for request in taken.requests] == [-1, NOW]


def test_requests_with_too_few_fields_are_refused(kernel: Any) -> None:
    for request in ((), Taken(kernel, frame(batch(b"x"))).requests[0][:4]):
        with pytest.raises(ValueError):
            kernel.answers([request])


def test_requests_that_come_while_answers_are_made_get_none() -> None:
    taken = Taken(_runs, frame(batch(b"x")) * 2)
    (shape, _, part, *rest), other = taken.requests

    class Number:
        def __int__(self) -> int:
            requests.extend([other] * 100)
            return 0

    requests = [(shape, Number(), part, *rest)]
    assert _runs.answers(requests) == _runs.answers([(shape, 0, part, *rest)])


def test_shapes_that_change_while_answers_are_made_are_noticed() -> None:
    (shape, _, *rest), other = Taken(_runs, frame(batch(b"x")) * 2).requests

    class Number:
        def __init__(self, size: int) -> None:
            self.size = size

        def __int__(self) -> int:
            shape.__init__(b"", 0, bytes(self.size), b"", None, is_flexible=False, has_log_start=False)
            return 0

    for size in (0, 10_000):
        with pytest.raises(ValueError, match="changed"):
            _runs.answers([(shape, Number(size), *rest), other])


# -- the twins ---------------------------------------------------------------------------------------------------------


def assert_twins_agree(data: bytes, **limits: int) -> None:
    compiled, pure = Taken(_runs, data, **limits), Taken(pure_runs, data, **limits)
    assert compiled.everything() == pure.everything()
    assert compiled.found(data) == pure.found(data)


def random_frames(pick: random.Random) -> list[bytes]:
    def one() -> bytes:
        values = [Record(0, NOW + pick.randrange(-5, 5), None, pick.randbytes(pick.randrange(200)))]
        records = bytes(codec.encode(values * pick.randrange(1, 4)))
        if pick.random() < 0.1:
            records = damaged(records, pick.randrange(8, len(records)), pick.randbytes(1))
        version = pick.choice((FIXED, FLEXIBLE))
        return frame(records, pick.randrange(-(2**31), 2**31), pick.choice(list(CLIENTS)), version)

    return [one() for _ in range(pick.randrange(1, 8))]


def mutated(data: bytes, pick: random.Random) -> bytes:
    out = bytearray(data)
    kind = pick.randrange(5)
    if kind == 0:
        return bytes(out[: pick.randrange(len(out) + 1)])
    at = pick.randrange(len(out))
    if kind == 1:
        out[at] ^= 1 << pick.randrange(8)
    elif kind == 2:
        out[at : at + 4] = struct.pack(">i", pick.choice([0, -1, 1, 2**31 - 1, -(2**31), pick.randrange(-300, 300)]))
    elif kind == 3:
        del out[at : at + pick.randrange(1, 20)]
    else:
        out[at:at] = pick.choice([pick.randbytes(pick.randrange(1, 20)), b"\xff" * 8, b"\0" * 8])
    return bytes(out)


@pytest.mark.parametrize("seed", range(4))
def test_both_kernels_agree_on_valid_truncated_and_mutated_buffers(seed: int) -> None:
    pick = random.Random(seed)
    for _ in range(MUTATIONS // 4):
        data = b"".join(random_frames(pick))
        assert_twins_agree(data, batch_bytes_max=pick.choice((MB, 200)), bytes_max=pick.choice((MB, 500)))
        for _ in range(pick.randrange(4)):
            data = mutated(data, pick) or b"\0"
        assert_twins_agree(data)


@given(st.binary(max_size=120), st.sampled_from([FIXED, FLEXIBLE]))
@settings(max_examples=300)
def test_both_kernels_agree_on_any_bytes_behind_a_known_beginning(rest: bytes, version: int) -> None:
    assert_twins_agree(framed(prefix(b"a") + rest, version=version))


@given(st.binary(max_size=200))
@settings(max_examples=200)
def test_both_kernels_agree_on_any_bytes(data: bytes) -> None:
    assert_twins_agree(data)
