"""The codecs written by hand against `kio`, for every version; and every API answered at every version it offers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import random
import struct
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from kio.index import load_request_schema
from kio.schema.index import api_key_map, schema_name_map

from millstream.config import Config
from millstream.core.errors import Code, ProtocolError
from millstream.doors.kafka.apis import APIS
from millstream.records import codec
from millstream.server import Server
from millstream.wire.kafka import api_versions, fetch, header, messages, metadata, primitives, produce, refusal
from millstream.wire.kafka.primitives import Reader
from tests.compat.random_messages import Maker, read_response, write

ROUNDS = 60
NO_ID = uuid.UUID(int=0)
MILLISECOND = messages._MILLISECOND
DECODERS: dict[int, Callable[[Reader, int], object]] = {0: produce.decode, 1: fetch.decode, 3: metadata.decode}


def versions(key: int) -> range:
    return range(APIS[key].low, APIS[key].high + 1)


def random_requests(key: int, version: int, seed: int = 1) -> list[tuple[Any, Reader]]:
    """Requests as `kio` has them, each with a reader over its bytes."""
    maker = Maker(random.Random(f"{key}.{version}.{seed}"))
    made = [maker.entity(load_request_schema(key, version)) for _ in range(ROUNDS)]
    return [(entity, Reader(memoryview(write(entity)))) for entity in made]


@pytest.mark.parametrize("version", versions(0))
def test_produce_requests_decode_as_kio_wrote_them(version: int) -> None:
    for expected, reader in random_requests(0, version):
        found = produce.decode(reader, version)
        assert found.transactional_id == expected.transactional_id
        assert found.acks == expected.acks
        assert found.timeout_ms == expected.timeout // MILLISECOND
        assert [(data.topic, data.partition, _bytes(data.records)) for data in found.data] == [
            (_topic(topic, version >= 13), partition.index, partition.records)
            for topic in expected.topic_data
            for partition in topic.partition_data
        ]


@pytest.mark.parametrize("version", versions(0))
def test_produce_answers_read_back_by_kio(version: int) -> None:
    pick = random.Random(version)
    for _ in range(ROUNDS):
        topics: list[str | uuid.UUID] = [uuid.uuid4() if version >= 13 else f"topic-{number}" for number in range(3)]
        answers = [
            produce.PartitionAnswer(
                topic,
                pick.randrange(1 << 31),
                pick.choice([0, 3, 87]),
                pick.randrange(1 << 63),
                -1,
                5,
                pick.choice([None, "why"]),
            )
            for topic in topics[: pick.randrange(4)]
            for _ in range(pick.randrange(1, 4))
        ]
        found = read_response(0, version, produce.encode(answers, version))
        assert [
            (
                _topic(topic, version >= 13),
                one.index,
                one.error_code,
                one.base_offset,
                one.log_append_time,
                one.log_start_offset if version >= 5 else 5,
                one.error_message if version >= 8 else None,
            )
            for topic in found.responses
            for one in topic.partition_responses
        ] == [
            (
                answer.topic,
                answer.partition,
                answer.error,
                answer.base_offset,
                None,
                5,
                answer.message if version >= 8 else None,
            )
            for answer in answers
        ]


@pytest.mark.parametrize("version", versions(1))
def test_fetch_requests_decode_as_kio_wrote_them(version: int) -> None:
    by_id = version >= fetch.TOPIC_IDS_FROM
    for expected, reader in random_requests(1, version):
        found = fetch.decode(reader, version)
        assert (found.wait_ms_max, found.bytes_min, found.bytes_max, found.isolation) == (
            expected.max_wait // MILLISECOND,
            expected.min_bytes,
            expected.max_bytes,
            expected.isolation_level,
        )
        assert (found.session_id, found.session_epoch) == (
            (expected.session_id, expected.session_epoch) if version >= 7 else (0, -1)
        )
        assert [(topic, [tuple(one) for one in partitions]) for topic, partitions in found.topics] == [
            (
                topic.topic_id or NO_ID if by_id else topic.topic,
                [
                    (
                        one.partition,
                        one.current_leader_epoch if version >= 9 else -1,
                        one.fetch_offset,
                        one.partition_max_bytes,
                    )
                    for one in topic.partitions
                ],
            )
            for topic in expected.topics
        ]
        assert found.forgotten == [
            (topic.topic_id or NO_ID if by_id else topic.topic, list(topic.partitions))
            for topic in (expected.forgotten_topics_data if version >= 7 else ())
        ]


@pytest.mark.parametrize("version", versions(1))
def test_fetch_answers_read_back_by_kio(version: int) -> None:
    pick = random.Random(version)
    for _ in range(ROUNDS):
        topics = [
            (
                uuid.uuid4() if version >= 13 else f"topic-{number}",
                [
                    (fetch.PartitionRead(index, pick.choice([0, 1]), 50, 40, 7, len(records)), records)
                    for index in range(pick.randrange(4))
                    for records in [pick.randbytes(pick.choice([0, 1, 126, 127, 128, 20_000]))]
                ],
            )
            for number in range(pick.randrange(4))
        ]
        error = pick.choice([0, 71]) if version >= 7 else 0
        end = fetch.end_of_structure(version)
        body = fetch.encode_head(version, error, 9, len(topics))
        for topic, partitions in topics:
            body += fetch.encode_topic(version, topic, len(partitions))
            for read, records in partitions:
                body += fetch.encode_partition(version, read) + records + end
            body += end
        found = read_response(1, version, body + end)
        if version >= 7:
            assert (found.error_code, found.session_id) == (error, 9)
        assert [
            (
                _topic(topic, version >= 13, name="topic"),
                [
                    (one.partition_index, one.error_code, one.high_watermark, one.records or b"")
                    for one in topic.partitions
                ],
            )
            for topic in found.responses
        ] == [
            (topic, [(read.partition, read.error, read.high_watermark, records) for read, records in partitions])
            for topic, partitions in topics
        ]
        for topic in found.responses:
            for one in topic.partitions:
                assert one.last_stable_offset == 40 and not one.aborted_transactions
                assert version < 5 or one.log_start_offset == 7
                assert version < 11 or one.preferred_read_replica == -1


@pytest.mark.parametrize("version", versions(3))
def test_metadata_requests_decode_as_kio_wrote_them(version: int) -> None:
    for expected, reader in random_requests(3, version):
        found = metadata.decode(reader, version)
        if (version == 0 and not expected.topics) or expected.topics is None:
            assert found.topics is None
        else:
            assert found.topics == [
                (topic.topic_id or NO_ID if version >= 10 else NO_ID, topic.name) for topic in expected.topics
            ]
        assert found.allow_auto_create is (expected.allow_auto_topic_creation if version >= 4 else True)
        assert found.topic_operations is (expected.include_topic_authorized_operations if version >= 8 else False)
        if 8 <= version <= 10:
            assert found.cluster_operations is expected.include_cluster_authorized_operations


@pytest.mark.parametrize("version", versions(3))
def test_metadata_answers_read_back_by_kio(version: int) -> None:
    pick = random.Random(version)
    for _ in range(ROUNDS):
        topics = [
            metadata.TopicEntry(
                pick.choice([0, 3]),
                pick.choice(["a", "__b", "__consumer_offsets", "ü" * 80]),
                uuid.uuid4(),
                pick.choice([0, 1, 200]),
                [metadata.Leads(7, 3, (7, 9), (7,)), metadata.Leads(9, 4, (9, 7), (9, 7))],
            )
            for _ in range(pick.randrange(4))
        ]
        if version >= 10:
            topics.append(metadata.TopicEntry(100, None, uuid.uuid4(), 0))
        brokers = [metadata.BrokerEntry(7, "127.0.0.1", 9092)]
        found = read_response(3, version, metadata.encode(version, brokers, "cluster", 7, topics))
        assert [(one.node_id, one.host, one.port) for one in found.brokers] == brokers
        assert version < 2 or found.cluster_id == "cluster"
        assert version < 1 or found.controller_id == 7
        unnamed = None if version >= 12 else ""
        assert [(topic.error_code, topic.name, len(topic.partitions)) for topic in found.topics] == [
            (topic.error, unnamed if topic.name is None else topic.name, topic.partition_count) for topic in topics
        ]
        for entry, topic in zip(topics, found.topics, strict=True):
            assert version < 10 or topic.topic_id == entry.topic_id
            assert version < 1 or topic.is_internal == (entry.name == "__consumer_offsets")
            assert [one.partition_index for one in topic.partitions] == list(range(entry.partition_count))
            for one in topic.partitions:
                leads = entry.leads[one.partition_index % 2]
                assert (one.leader_id, one.replica_nodes, one.isr_nodes) == (
                    leads.leader,
                    leads.replicas,
                    leads.in_sync,
                )
                assert version < 7 or one.leader_epoch == leads.epoch


@pytest.mark.parametrize("version", versions(18))
def test_api_versions_answers_read_back_by_kio(version: int) -> None:
    ranges = [(0, 3, 13), (1, 4, 18), (75, 0, 0)]
    found = read_response(18, version, api_versions.encode(version, 35, ranges))
    assert found.error_code == 35
    assert [(one.api_key, one.min_version, one.max_version) for one in found.api_keys] == ranges


@pytest.mark.parametrize("key", sorted(key for key, api in APIS.items() if api.handle is not None))
def test_every_other_request_decodes_as_kio_wrote_it(key: int) -> None:
    for version in versions(key):
        for expected, reader in random_requests(key, version)[:20]:
            assert plain(messages.decode_request(key, version, reader.buffer)) == plain(expected)


@pytest.mark.parametrize("key", sorted(set(api_key_map) - set(APIS)))
def test_every_request_that_is_not_served_can_be_refused(key: int) -> None:
    """A handler is not there to write the answer: it is made of the request and the schema."""
    for version in schema_name_map[api_key_map[key]]:
        for _, reader in random_requests(key, version)[:3]:
            request = messages.decode_request(key, version, reader.buffer)
            read_response(key, version, refusal.encode(key, version, request, Code.UNSUPPORTED_VERSION))


def plain(value: Any) -> Any:
    """A message of either kind as dictionaries, lists, integers and bytes."""
    if isinstance(value, messages.Message):
        return {name: plain(each) for name, each in value._values.items()}
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    if isinstance(value, datetime.timedelta):
        return value // MILLISECOND
    if isinstance(value, datetime.datetime):
        return (value - messages._EPOCH) // MILLISECOND
    return value


def test_an_array_that_claims_too_much_is_refused_in_every_api() -> None:
    """The parser that `kio` brings would ask for all the memory that the claim needs, and end the process."""
    pick = random.Random(9)
    for key, api in APIS.items():
        for version in versions(key) if api.handle is not None else ():
            for entity, reader in random_requests(key, version)[:10]:
                body = bytearray(reader.buffer)
                at = pick.randrange(len(body) or 1)
                body[at : at + 4] = b"\x7f\xff\xff\xff" if not entity.__flexible__ else b"\xff\xff\xff\xff\x0f"
                with contextlib.suppress(ProtocolError):
                    messages.decode_request(key, version, bytes(body))


@pytest.mark.parametrize("key", [0, 1, 3])
def test_a_request_cut_anywhere_is_a_protocol_error(key: int) -> None:
    decode = DECODERS[key]
    for version in versions(key):
        for _, reader in random_requests(key, version)[:10]:
            whole = bytes(reader.buffer)
            decode(Reader(memoryview(whole)), version)
            for size in range(0, len(whole), max(len(whole) // 50, 1)):
                # The tail of a flexible request (tags, a rack) is not looked at: a cut there may pass, none may crash.
                try:
                    decode(Reader(memoryview(whole[:size])), version)
                except ProtocolError:
                    continue


@pytest.mark.parametrize("compact", [False, True])
def test_an_array_that_cannot_fit_is_refused_before_it_is_read(compact: bool) -> None:
    claim = primitives.array_length(1 << 28, compact)
    with pytest.raises(ProtocolError, match="268435456 items"):
        Reader(memoryview(claim + bytes(100))).count(compact, 1)


def test_a_varint_of_more_than_five_bytes_is_refused() -> None:
    with pytest.raises(ProtocolError, match="longer than five bytes"):
        Reader(memoryview(b"\xff" * 20)).uvarint()


def test_a_string_longer_than_kafka_allows_is_refused() -> None:
    for compact in (False, True):
        text = "a" * 0x7FFF
        assert Reader(memoryview(primitives.string(text, compact))).string(compact) == text
    with pytest.raises(ProtocolError, match="32767"):
        Reader(memoryview(primitives.string("a" * 0x8000, True))).string(True)


def test_one_request_may_not_hold_more_items_than_any_client_sends() -> None:
    reader = Reader(
        memoryview(bytes(10) + primitives.array_length(primitives.ITEMS_MAX + 1, False) + bytes(1 << 20)), 10
    )
    with pytest.raises(ProtocolError, match="at most"):
        reader.count(False, 1)


def test_every_api_stays_within_the_versions_that_kio_knows() -> None:
    for key, api in APIS.items():
        known = schema_name_map[api_key_map[key]]
        assert set(versions(key)) <= set(known), api.name
        assert (api.answer is None) != (api.handle is None), api.name


# -- every API at every version, over a real door ----------------------------------------------------------------------


class Door:
    """A connection to a broker in memory, which sends bodies and reads answers."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.address = server.addresses["kafka"]
        self.topic_id = NO_ID

    async def connect(self) -> Wire:
        return Wire(*await asyncio.open_connection(self.address.host, self.address.port))


class Wire:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._number = 0

    async def ask_raw(self, key: int, version: int, body: bytes, flexible: bool) -> bytes:
        """The answer's bytes behind the correlation id; b"" if the connection was closed instead."""
        self._number += 1
        head = struct.pack(">hhi", key, version, self._number) + primitives.string("test", False)
        frame = head + (b"\0" if flexible else b"") + body
        self._writer.write(struct.pack(">i", len(frame)) + frame)
        try:
            (size,) = struct.unpack(">i", await self._reader.readexactly(4))
            answer = await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionResetError):
            return b""
        assert struct.unpack_from(">i", answer) == (self._number,)
        return answer[4:]

    async def ask(self, key: int, version: int, body: bytes) -> Any:
        flexible = messages.is_flexible(key, version)
        answer = await asyncio.wait_for(self.ask_raw(key, version, body, flexible), 10)
        assert answer, f"API {key} version {version}: the connection was closed"
        return read_response(key, version, answer[1:] if flexible and key != 18 else answer)

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    server = Server(Config(store="memory:", kafka="127.0.0.1:0", http="off"))
    await server.start()
    try:
        topic = await server.broker.topics.create("orders", 3, {})
        made = Door(server)
        made.topic_id = topic.id
        yield made
    finally:
        await server.stop()


def hints(topic_id: uuid.UUID) -> dict[str, list[Any]]:
    """Values that exist, under the field names that want them."""
    soon = [0 * MILLISECOND, 1 * MILLISECOND]
    batch = bytes(codec.encode([(0, 1_700_000_000_000, b"key", b"value")]))
    return {
        "name": ["orders"],
        "topic": ["orders"],
        "topic_name": ["orders"],
        "topic_names": ["orders"],
        "topic_id": [topic_id],
        "resource_name": ["orders"],
        "resource_type": [2],
        "config_operation": [0, 1],
        "group_id": ["readers"],
        "groups": ["readers"],
        "group_ids": ["readers"],
        "groups_names": ["readers"],
        "member_id": ["", "me"],
        "group_instance_id": [None],
        "protocol_type": ["consumer"],
        "partition": [0, 1],
        "partition_index": [0, 1],
        "partitions": [0, 1],
        "partition_indexes": [0, 1],
        "index": [0, 1],
        "num_partitions": [1, 2],
        "count": [4],
        "max_wait": soon,
        "timeout": soon,
        "session_timeout": [6000 * MILLISECOND],
        "rebalance_timeout": [6000 * MILLISECOND],
        "records": [batch],
        "acks": [-1, 1],
    }


# A join waits for its sync; transactional ids are refused: both have their own tests.
WAITING = {11, 14}


@pytest.mark.parametrize("key", sorted(set(APIS) - WAITING))
async def test_every_version_of_an_api_answers_realistic_requests(key: int, door: Door) -> None:
    maker = Maker(random.Random(key), hints(door.topic_id))
    for version in versions(key):
        wire = await door.connect()
        for _ in range(8):
            await wire.ask(key, version, maker.request(key, version))
        await wire.close()


@pytest.mark.parametrize("version", versions(11))
async def test_every_version_of_join_and_sync_answers_a_member(version: int, door: Door) -> None:
    wire = await door.connect()
    join = load_request_schema(11, version)
    body: dict[str, Any] = {
        "group_id": f"readers-{version}",
        "session_timeout": 6000,
        "rebalance_timeout": 6000,
        "member_id": "",
        "group_instance_id": None,
        "protocol_type": "consumer",
        "protocols": [{"name": "range", "metadata": b"meta"}],
        "reason": None,
    }
    joined = await wire.ask(11, version, write(messages._build(join, body)))
    if joined.error_code == Code.MEMBER_ID_REQUIRED:
        joined = await wire.ask(11, version, write(messages._build(join, {**body, "member_id": joined.member_id})))
    assert joined.error_code == Code.NONE and joined.leader == joined.member_id
    sync_version = min(version, APIS[14].high)
    plan = {
        "group_id": f"readers-{version}",
        "generation_id": joined.generation_id,
        "member_id": joined.member_id,
        "group_instance_id": None,
        "protocol_type": "consumer",
        "protocol_name": "range",
        "assignments": [{"member_id": joined.member_id, "assignment": b"all of it"}],
    }
    synced = await wire.ask(14, sync_version, write(messages._build(load_request_schema(14, sync_version), plan)))
    assert (synced.error_code, synced.assignment) == (Code.NONE, b"all of it")
    await wire.close()


async def test_an_unknown_version_of_api_versions_is_answered_in_version_0(door: Door) -> None:
    wire = await door.connect()
    for version in (5, 99, 0x7FFF, -1):
        found = read_response(18, 0, await wire.ask_raw(18, version, b"", flexible=True))
        assert found.error_code == Code.UNSUPPORTED_VERSION
        assert {one.api_key: (one.min_version, one.max_version) for one in found.api_keys} == {
            api.key: (api.low, api.high) for api in APIS.values()
        }
    await wire.close()


async def test_an_api_that_is_not_served_is_refused_in_its_own_form_where_it_has_one(door: Door) -> None:
    wire = await door.connect()
    for key, version in ((17, 1), (36, 2), (24, 4), (26, 3), (41, 3), (57, 1)):
        flexible = messages.is_flexible(key, version)
        answer = await wire.ask_raw(key, version, b"", flexible)
        entity = read_response(key, version, answer[1:] if flexible else answer)
        assert entity.error_code == Code.UNSUPPORTED_VERSION, (key, version)
    await wire.close()


async def test_where_the_protocol_has_no_room_for_an_error_the_connection_is_closed(door: Door) -> None:
    for key, version in ((0, 2), (0, 99), (1, 3), (3, 99), (999, 0), (-5, 0), (29, 99), (49, 1)):
        wire = await door.connect()
        assert await wire.ask_raw(key, version, b"", flexible=False) == b"", (key, version)
        await wire.close()


async def test_answers_keep_the_order_of_pipelined_requests(door: Door) -> None:
    """Requests of every kind in one write; fast ones do not overtake slow ones."""
    maker = Maker(random.Random(5), hints(door.topic_id))
    pick = random.Random(6)
    apis = [(key, pick.choice(list(versions(key)))) for key in sorted(set(APIS) - WAITING) * 20]
    pick.shuffle(apis)
    sent = b""
    for number, (key, version) in enumerate(apis):
        tags = b"\0" if messages.is_flexible(key, version) else b""
        frame = struct.pack(">hhi", key, version, number) + b"\0\0" + tags + maker.request(key, version)
        sent += struct.pack(">i", len(frame)) + frame
    reader, writer = await asyncio.open_connection(door.address.host, door.address.port)
    writer.write(sent)
    for number, (key, version) in enumerate(apis):
        (size,) = struct.unpack(">i", await asyncio.wait_for(reader.readexactly(4), 10))
        answer = await reader.readexactly(size)
        assert struct.unpack_from(">i", answer) == (number,)
        tagged = 1 if messages.is_flexible(key, version) and key != 18 else 0
        read_response(key, version, answer[4 + tagged :])
    writer.close()


def test_a_header_without_its_fixed_part_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError):
        header.peek(memoryview(b"\0\3\0"))


@pytest.mark.parametrize("key", [0, 1, 3])
def test_unknown_tagged_fields_are_skipped(key: int) -> None:
    """A newer client may send unknown tagged fields; the message means the same without them."""
    decode = DECODERS[key]
    unknown = b"\2" + b"\x63" + b"\3abc" + b"\x64" + b"\0"
    version = APIS[key].high
    bodies = {
        0: (b"\0" + b"\0\1" + bytes(4) + b"\2" + bytes(16) + b"\2" + bytes(4) + b"\0", 3),
        1: (bytes(13) + bytes(8) + b"\2" + bytes(16) + b"\2" + bytes(32), 2),
        3: (b"\2" + bytes(16) + b"\2a", 1),
    }
    begin, structures = bodies[key]
    end = {0: b"", 1: b"\1\1\0", 3: b"\1\0\0"}[key]
    known = decode(Reader(memoryview(begin + b"\0" * structures + end)), version)
    assert decode(Reader(memoryview(begin + unknown * structures + end)), version) == known


@pytest.mark.parametrize(("key", "version"), [(12, 4), (10, 6), (22, 6), (68, 1)])
def test_unknown_tagged_fields_are_skipped_in_every_other_api(key: int, version: int) -> None:
    body = write(Maker(random.Random(3)).entity(load_request_schema(key, version)))
    assert body.endswith(b"\0")
    found = messages.decode_request(key, version, body[:-1] + b"\2" + b"\x63" + b"\3abc" + b"\x64" + b"\0")
    assert plain(found) == plain(messages.decode_request(key, version, body))


def _bytes(view: memoryview | None) -> bytes | None:
    return None if view is None else bytes(view)


def _topic(topic: Any, by_id: bool, name: str = "name") -> Any:
    return (topic.topic_id or NO_ID) if by_id else getattr(topic, name)
