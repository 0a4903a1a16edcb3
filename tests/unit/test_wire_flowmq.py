"""FlowMQ's frames: any split of the input gives the same ones, and every length has a bound."""

from __future__ import annotations

import itertools
import struct
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.core.errors import ProtocolError, RequestError
from millstream.doors.flowmq import message_id
from millstream.wire import flowmq
from millstream.wire.flowmq import HEAD_BYTES, SMALL_BYTES_MAX, Command, Frame

PUBLISH_MAX = 1 << 20


class FrameReader:
    """Keeps an incomplete frame between two pieces, as a connection does."""

    def __init__(self, publish_bytes_max: int) -> None:
        self._publish_bytes_max = publish_bytes_max
        self.held = bytearray()
        self.broken: str | None = None

    @property
    def missing(self) -> int:
        """How many bytes the incomplete frame still needs, as far as known."""
        if len(self.held) < HEAD_BYTES:
            return HEAD_BYTES - len(self.held) if self.held else 0
        return flowmq.frame_size(self.held, 0, self._publish_bytes_max) - len(self.held)

    def feed(self, data: bytes | memoryview) -> list[Frame]:
        if self.broken is not None:
            return []
        frames, at, view = [], 0, memoryview(bytes(self.held) + bytes(data))
        try:
            while (found := flowmq.next_frame(view, at, self._publish_bytes_max)) is not None:
                frame, at = found
                frames.append(frame)
            self.held = bytearray(view[at:])
        except ProtocolError as error:
            self.broken, self.held = str(error), bytearray()
        return frames


frames = st.lists(
    st.tuples(st.integers(0, 255), st.binary(max_size=300)) | st.tuples(st.just(4), st.binary(max_size=70_000)),
    max_size=8,
)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:stop] for start, stop in itertools.pairwise(places)]


@given(frames, st.lists(st.integers(0, 1 << 20), max_size=12))
def test_any_split_of_the_input_gives_the_same_frames(expected: list[Frame], cuts: list[int]) -> None:
    data = b"".join(flowmq.frame(command, payload) for command, payload in expected)
    reader = FrameReader(PUBLISH_MAX)
    found = [frame for piece in pieces(data, cuts) for frame in reader.feed(memoryview(bytearray(piece)))]
    assert found == expected
    assert (len(reader.held), reader.missing, reader.broken) == (0, 0, None)


@given(st.binary(max_size=2000), st.lists(st.integers(0, 1 << 20), max_size=12))
def test_random_bytes_are_frames_or_broken_in_the_same_place_however_they_are_split(
    data: bytes, cuts: list[int]
) -> None:
    whole, split = FrameReader(PUBLISH_MAX), FrameReader(PUBLISH_MAX)
    at_once = whole.feed(data)
    assert [frame for piece in pieces(data, cuts) for frame in split.feed(piece)] == at_once
    assert (split.broken, split.held) == (whole.broken, whole.held)
    assert len(whole.held) <= len(data)


def test_a_frame_says_what_it_still_needs() -> None:
    reader = FrameReader(PUBLISH_MAX)
    assert reader.feed(b"\x04\0\0") == []
    assert (len(reader.held), reader.missing) == (3, 2)
    assert reader.feed(struct.pack(">I", 1000)[2:] + b"x" * 10) == []
    assert (len(reader.held), reader.missing) == (15, 990)
    assert reader.feed(b"y" * 990 + b"\x01") == [(4, b"x" * 10 + b"y" * 990)]
    assert (len(reader.held), reader.missing) == (1, 4)


@pytest.mark.parametrize(
    ("command", "bound"),
    [(Command.PUBLISH, PUBLISH_MAX), (Command.SUBSCRIBE, SMALL_BYTES_MAX), (Command.ACK, SMALL_BYTES_MAX)],
)
def test_a_length_above_its_bound_breaks_the_stream_behind_the_frames_before_it(command: int, bound: int) -> None:
    good = flowmq.frame(Command.PING)
    reader = FrameReader(PUBLISH_MAX)
    assert reader.feed(good + struct.pack(">BI", command, bound)) == [(1, b"")]
    assert reader.broken is None
    reader = FrameReader(PUBLISH_MAX)
    assert reader.feed(good + struct.pack(">BI", command, bound + 1) + good) == [(1, b"")]
    assert reader.broken is not None and str(bound + 1) in reader.broken and Command(command).name in reader.broken
    assert reader.feed(good) == [] and not reader.held


def test_an_unknown_command_is_a_frame_while_it_is_small() -> None:
    assert FrameReader(PUBLISH_MAX).feed(flowmq.frame(0x77, b"abc")) == [(0x77, b"abc")]
    assert flowmq.name_of(0x77) == "the unknown command 0x77"


def test_only_the_first_nul_of_a_publish_separates() -> None:
    assert flowmq.split_publish(b"orders\0a\0b\0") == (b"orders", b"a\0b\0")
    assert flowmq.split_publish(b"orders\0") == (b"orders", b"")


@pytest.mark.parametrize("payload", [b"", b"orders", b"\0message"])
def test_a_publish_without_topic_or_separator_is_refused(payload: bytes) -> None:
    with pytest.raises(RequestError, match="PUBLISH needs a topic"):
        flowmq.split_publish(payload)


def test_a_subscription_may_name_a_group() -> None:
    assert flowmq.split_subscribe(b"orders") == ("orders", "")
    assert flowmq.split_subscribe(b"orders\0") == ("orders", "")
    assert flowmq.split_subscribe("orders\0größte".encode()) == ("orders", "größte")


@pytest.mark.parametrize("payload", [b"", b"\0group", b"\xff\xfe", b"orders\0\xff"])
def test_a_name_that_is_empty_or_no_text_is_refused(payload: bytes) -> None:
    with pytest.raises(RequestError, match=r"has no name|is not UTF-8"):
        flowmq.split_subscribe(payload)


def test_a_message_is_its_id_a_nul_and_its_payload() -> None:
    payload = b"a\0b"
    assert flowmq.message_head(b"id", len(payload)) + payload == b"\x07\0\0\0\x06id\0a\0b"


def test_an_error_says_its_reason_in_a_length_that_clients_can_take() -> None:
    assert flowmq.error("no") == b"\xff\0\0\0\x02no"
    assert len(flowmq.error("é" * 100_000)) <= 5 + flowmq.ERROR_BYTES_MAX


@given(st.uuids(), st.integers(0, 20_000), st.integers(0, 2**63 - 1))
def test_a_message_id_leads_back_to_its_record(topic_id: uuid.UUID, partition: int, offset: int) -> None:
    name = message_id.prefix(topic_id, partition) + b"%d" % offset
    assert message_id.parse(name) == (topic_id, partition, offset)
    assert name[: message_id.TOPIC_BYTES] == message_id.topic_part(topic_id)
    assert b"\0" not in name and b"," not in name


def test_an_id_is_as_short_as_a_uuid_in_any_usual_partition() -> None:
    assert len(message_id.prefix(uuid.uuid4(), 0) + b"%d" % (10**11 - 1)) <= len(str(uuid.uuid4()))


@pytest.mark.parametrize("name", [b"", b"::", b"x:0:0", b"A" * 22 + b":0:" + b"9" * 5000, b"!" * 22 + b":0:0"])
def test_these_are_no_message_ids(name: bytes) -> None:
    assert message_id.parse(name) is None
