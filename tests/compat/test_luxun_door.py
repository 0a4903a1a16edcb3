"""The Luxun door over real sockets, with a client that Apache Thrift generated: every call, every code, bad bytes."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from thrift.Thrift import TApplicationException

from millstream.records.compression import Codec, compress
from millstream.wire import luxun
from tests.compat.client_luxun import PASSWORD, Luxun, Open
from tests.compat.clients import wait_for
from tests.compat.hostile_frames import attack
from tests.compat.raw import create_topic
from tests.in_thread import BrokerInThread
from tests.serving import MILLSTREAM, ServedBroker

Unique = Callable[[str], str]


@pytest.fixture
def client(open_client: Open) -> Luxun:
    return open_client()


def code(client: Luxun, answer: Any) -> tuple[str, str | None]:
    """Names of the result and of the error."""
    result, types = answer.result, client.types
    error = None if result.errorCode is None else types.ErrorCode._VALUES_TO_NAMES[result.errorCode]
    assert (result.errorMessage is None) == (error is None)
    return types.ResultCode._VALUES_TO_NAMES[result.resultCode], error


SUCCESS = ("SUCCESS", None)


# -- items -------------------------------------------------------------------------------------------------------------


def test_an_item_gets_an_index_and_is_found_by_it(client: Luxun, unique: Unique) -> None:
    topic = unique("items")
    for number in range(5):
        produced = client.produce(topic, b"item %d" % number)
        assert code(client, produced) == SUCCESS and produced.index == number
    one = client.consume(topic, index=2)
    assert code(client, one) == SUCCESS
    assert one.itemList == [b"item 2"] and one.lastConsumedIndex == 2
    several = client.consume(topic, index=1, size=18)
    assert several.itemList == [b"item 1", b"item 2", b"item 3"] and several.lastConsumedIndex == 3
    everything = client.consume(topic, index=0, size=1 << 20)
    assert len(everything.itemList) == 5
    assert code(client, client.consume(topic, index=5, size=100)) == ("TRY_LATER", "ALL_MESSAGE_CONSUMED")
    for index in (6, -1, 1 << 50):
        assert code(client, client.consume(topic, index=index)) == ("FAILURE", "INDEX_OUT_OF_BOUNDS")


def test_an_item_larger_than_the_fetch_size_comes_alone(client: Luxun, unique: Unique) -> None:
    topic = unique("large")
    client.produce(topic, b"a" * 1000)
    client.produce(topic, b"b" * 10)
    assert client.consume(topic, index=0, size=1).itemList == [b"a" * 1000]
    assert client.consume(topic, fanout="f", size=1).itemList == [b"a" * 1000]


MEBIBYTE = 1_048_576


@pytest.mark.parametrize("first", ["produce", "asyncProduce"])
def test_an_item_of_exactly_one_mebibyte_is_accepted(open_client: Open, unique: Unique, first: str) -> None:
    """Whichever call creates the topic; Luxun's default limit, `ILog.DEFAULT_MESSAGE_SIZE`, is this number."""
    producer, consumer, topic = open_client(), open_client(), unique("mebibyte")
    items = [bytes([number]) * MEBIBYTE for number in range(4)]
    if first == "asyncProduce":
        producer.async_produce(topic, items[0])
    else:
        produced = producer.produce(topic, items[0])
        assert code(producer, produced) == SUCCESS and produced.index == 0
    assert producer.produce(topic, items[1]).index == 1
    for item in items[2:]:
        producer.async_produce(topic, item)
    assert consumer.size(topic).size == 4
    assert [consumer.consume(topic, index=number).itemList for number in range(4)] == [[item] for item in items]
    assert consumer.consume(topic, index=0, size=2 * MEBIBYTE).itemList == items[:2]
    assert consumer.consume(topic, "small", size=1).itemList == items[:1]
    assert consumer.consume(topic, "large", size=4 * MEBIBYTE).itemList == items


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.GZIP, Codec.SNAPPY])
def test_a_pack_of_one_mebibyte_is_accepted(open_client: Open, unique: Unique, codec: Codec) -> None:
    """As Luxun's `MessageList.toThriftBuffer` serialises it: no checksum, the messages compressed together."""
    producer, consumer, topic = open_client(), open_client(), unique("pack")
    item = _pack_of(MEBIBYTE, codec)
    assert len(item) == MEBIBYTE
    producer.async_produce(topic, item)
    assert consumer.consume(topic, "fanout", size=MEBIBYTE).itemList == [item]
    [fetched] = consumer.consume(topic, index=0, size=1).itemList
    assert len(luxun.unpack(fetched)) == 2


def _pack_of(size: int, codec: Codec) -> bytes:
    """A pack of exactly so many bytes: noise, which compresses to about its own length, and one byte more or less."""
    noise = random.Random(1).randbytes(size)
    low, high = 0, size
    while low < high:
        middle = (low + high + 1) // 2
        if len(_pack([b"head", noise[:middle]], codec)) <= size:
            low = middle
        else:
            high = middle - 1
    for more in range(low, low - 200, -1):  # what the compressor makes of one byte more is not always one byte more
        for head in range(200):
            item = _pack([bytes(head), noise[:more]], codec)
            if len(item) == size:
                return item
    raise AssertionError(f"no pack of {size} bytes")


def _pack(messages: list[bytes], codec: Codec) -> bytes:
    content = compress(codec, b"\x0f\0\1\x0b" + struct.pack(">i", len(messages)) + _strings(messages) + b"\0")
    return b"\x03\0\1\1\x03\0\2" + bytes([codec]) + b"\x0b\0\4" + struct.pack(">i", len(content)) + content + b"\0"


def _strings(messages: list[bytes]) -> bytes:
    return b"".join(struct.pack(">i", len(each)) + each for each in messages)


def test_asynchronous_items_need_no_answer_and_are_there_for_the_next_call(client: Luxun, unique: Unique) -> None:
    topic = unique("oneway")
    for number in range(200):
        client.async_produce(topic, b"%d" % number)
    assert client.size(topic).size == 200
    assert client.consume(topic, index=0, size=1 << 20).itemList == [b"%d" % number for number in range(200)]


def test_asynchronous_items_that_are_refused_cost_nobody(client: Luxun, unique: Unique) -> None:
    topic = unique("refused")
    client.async_produce("not a topic", b"x")
    client.async_produce(topic, b"x" * (2 << 20))
    assert client.produce(topic, b"fine").index == 0


def test_every_fanout_id_gets_every_item_once(client: Luxun, unique: Unique) -> None:
    topic = unique("fanout")
    for number in range(10):
        client.produce(topic, b"%d" % number)
    for fanout in ("one", "two", "an id / with ✓ anything"):
        assert client.consume(topic, fanout).itemList == [b"0"]
        assert client.size(topic, fanout).size == 9
        rest = client.consume(topic, fanout, size=1 << 20)
        assert rest.itemList == [b"%d" % number for number in range(1, 10)] and rest.lastConsumedIndex == 9
        assert code(client, client.consume(topic, fanout)) == ("TRY_LATER", "ALL_MESSAGE_CONSUMED")
        assert client.size(topic, fanout).size == 0
    assert client.size(topic).size == 10 and client.size(topic, "never read").size == 10
    client.produce(topic, b"10")
    assert client.consume(topic, "one", index=3, size=100).itemList == [b"10"], "the fanout id counts, not the index"


def test_time_finds_the_closest_index(luxun_broker: ServedBroker, client: Luxun, unique: Unique) -> None:
    topic = unique("times")
    now = int(time.time() * 1000)
    assert code(client, client.find(topic, now)) == ("FAILURE", "TOPIC_NOT_EXIST")
    create_topic(luxun_broker.address, topic, 1)
    assert code(client, client.find(topic, now)) == ("FAILURE", "TOPIC_IS_EMPTY")
    assert (client.find(topic, -1).index, client.find(topic, -2).index) == (0, 0)
    producer = Producer({"bootstrap.servers": luxun_broker.address})
    for number in range(10):
        producer.produce(topic, b"%d" % number, timestamp=now + 1000 * number)
    assert producer.flush(10) == 0
    for asked, index in ((now, 0), (now - 10**6, 0), (now + 2400, 2), (now + 2600, 3), (now + 10**7, 9)):
        found = client.find(topic, asked)
        assert code(client, found) == SUCCESS
        assert (found.index, found.timestampOfIndex) == (index, now + 1000 * index)
    earliest, latest = client.find(topic, -1), client.find(topic, -2)
    assert (earliest.index, earliest.timestampOfIndex) == (0, now)
    assert (latest.index, latest.timestampOfIndex) == (10, now + 9000)


def test_every_error_code_says_what_is_wrong(luxun_broker: ServedBroker, client: Luxun, unique: Unique) -> None:
    topic, missing = unique("errors"), unique("missing")
    not_there = ("FAILURE", "TOPIC_NOT_EXIST")
    assert code(client, client.consume(missing, "f")) == not_there
    assert code(client, client.consume(missing, index=0)) == not_there
    assert code(client, client.size(missing)) == not_there
    invalid = ("FAILURE", "INVALID_TOPIC")
    for name in ("", "no spaces", "x" * 300):
        assert code(client, client.produce(name, b"x")) == invalid
        assert code(client, client.consume(name, "f")) == invalid
    create_topic(luxun_broker.address, topic, 1)
    assert code(client, client.consume(topic, "f")) == ("TRY_LATER", "TOPIC_IS_EMPTY")
    assert code(client, client.consume(topic, index=0)) == ("TRY_LATER", "TOPIC_IS_EMPTY")
    assert code(client, client.produce(topic, b"x" * (2 << 20))) == ("FAILURE", "MESSAGE_SIZE_TOO_LARGE")
    assert code(client, client.produce(topic, b"x")) == SUCCESS
    assert code(client, client.consume(topic, "f" * 1000)) == ("FAILURE", "INTERNAL_ERROR")
    assert code(client, client.delete(topic, "wrong")) == ("FAILURE", "AUTHENTICATION_FAILURE")
    assert client.size(topic).size == 1


def test_topics_with_more_partitions_are_refused_with_a_clear_message(
    luxun_broker: ServedBroker, client: Luxun, unique: Unique
) -> None:
    topic = unique("wide")
    create_topic(luxun_broker.address, topic, 3)
    for answer in (client.produce(topic, b"x"), client.consume(topic, "f"), client.size(topic), client.find(topic, -1)):
        assert code(client, answer) == ("FAILURE", "INVALID_TOPIC")
        assert "3 partitions" in answer.result.errorMessage


def test_a_deleted_topic_takes_its_cursors_along(client: Luxun, unique: Unique) -> None:
    topic = unique("deleted")
    client.produce(topic, b"old")
    assert client.consume(topic, "f").itemList == [b"old"]
    assert code(client, client.delete(topic, PASSWORD)) == SUCCESS
    assert code(client, client.size(topic)) == ("FAILURE", "TOPIC_NOT_EXIST")
    assert client.produce(topic, b"new").index == 0
    assert client.consume(topic, "f").itemList == [b"new"]


@pytest.mark.parametrize("name", ["missing", "no spaces", "", "x" * 300], ids=["missing", "invalid", "empty", "long"])
def test_deleting_a_topic_that_does_not_exist_succeeds(client: Luxun, name: str) -> None:
    """As Luxun's `LogManager.deleteLog` does it, which finds nothing to remove and answers that it is done."""
    assert code(client, client.delete(name, PASSWORD)) == SUCCESS
    assert code(client, client.delete(name, "wrong")) == ("FAILURE", "AUTHENTICATION_FAILURE")


def test_two_clients_that_delete_a_topic_at_once_both_succeed(open_client: Open, unique: Unique) -> None:
    clients, topic = [open_client() for _ in range(4)], unique("twice")
    for _ in range(10):
        clients[0].produce(topic, b"x")
        for client in clients:
            client.calls.send_deleteTopic(client.types.DeleteTopicRequest(topic=topic, password=PASSWORD))
        assert [code(client, client.calls.recv_deleteTopic()) for client in clients] == [SUCCESS] * 4


def test_old_clients_without_the_strict_header_are_understood(open_client: Open, unique: Unique) -> None:
    old, topic = open_client(strict=False), unique("old")
    assert old.produce(topic, b"x").index == 0
    assert old.consume(topic, "f").itemList == [b"x"]


def test_records_of_kafka_clients_come_out_and_items_go_in(
    luxun_broker: ServedBroker, client: Luxun, unique: Unique
) -> None:
    topic = unique("both")
    client.produce(topic, b"from luxun")
    producer = Producer({"bootstrap.servers": luxun_broker.address, "compression.type": "zstd", "linger.ms": 50})
    for number in range(50):
        producer.produce(topic, b"%d" % number, key=b"k")
    assert producer.flush(10) == 0
    expected = [b"from luxun", *(b"%d" % number for number in range(50))]
    assert client.consume(topic, "f", size=1 << 20).itemList == expected
    assert [client.consume(topic, "one by one").itemList for _ in range(51)] == [[item] for item in expected]
    consumer = Consumer({"bootstrap.servers": luxun_broker.address, "group.id": topic})
    consumer.assign([TopicPartition(topic, 0, 0)])
    assert consumer.consume(1, 10)[0].value() == b"from luxun"
    consumer.close()


# -- cursors -----------------------------------------------------------------------------------------------------------


def test_eight_readers_of_one_fanout_id_share_100_000_items_and_each_goes_to_one(
    luxun_broker: ServedBroker, open_client: Open, unique: Unique
) -> None:
    topic, count = unique("shared"), 100_000
    create_topic(luxun_broker.address, topic, 1)
    producer = Producer(
        {"bootstrap.servers": luxun_broker.address, "queue.buffering.max.messages": count, "linger.ms": 20}
    )
    for number in range(count):
        producer.produce(topic, b"%d" % number)
    assert producer.flush(30) == 0

    def read(reader: Luxun, size: int) -> list[bytes]:
        got: list[bytes] = []
        while code(reader, answer := reader.consume(topic, "shared", size=size)) == SUCCESS:
            assert answer.itemList
            got += answer.itemList
        return got

    sizes = [0, 0, 0, 1, 50, 100, 200, 400]
    with ThreadPoolExecutor(len(sizes)) as pool:
        shares = list(pool.map(read, [open_client() for _ in sizes], sizes))
    assert all(shares), "every reader got some"
    together = [item for share in shares for item in share]
    assert len(together) == count and set(together) == {b"%d" % number for number in range(count)}
    for share in shares:
        numbers = [int(item) for item in share]
        assert numbers == sorted(numbers), "each reader sees its items in order"


def test_retention_by_size_works_for_topics_far_smaller_than_a_segment(
    tmp_path: Path, generated: tuple[Any, Any]
) -> None:
    config = tmp_path / "millstream.toml"
    config.write_text("log.retention.size = 1000000\nhousekeeping_interval_ms = 50\n")
    with (
        ServedBroker(tmp_path / "data", "--luxun", "127.0.0.1:0", "--config", str(config)) as broker,
        Luxun(broker.doors["luxun"], generated) as client,
    ):
        for _ in range(60):
            client.produce("t", bytes(100_000))
        # A segment of such a topic has ten items, and the last but one of them goes as soon as the last is full.
        wait_for(lambda: client.size("t").size == 10, "what the limit allows", 30)
        assert client.consume("t", "f").lastConsumedIndex == 50, "a new reader begins there"


def test_cursors_survive_a_restart(tmp_path: Path, generated: tuple[Any, Any]) -> None:
    with ServedBroker(tmp_path / "data", "--luxun", "127.0.0.1:0") as broker:
        with Luxun(broker.doors["luxun"], generated) as client:
            for number in range(10):
                client.produce("t", b"%d" % number)
            assert client.consume("t", "f", size=3).itemList == [b"0", b"1", b"2"]
        broker.stop()
        broker.start()
        with Luxun(broker.doors["luxun"], generated) as client:
            assert client.consume("t", "f").itemList == [b"3"]


def test_a_hashed_password_admits_who_knows_it(tmp_path: Path, generated: tuple[Any, Any]) -> None:
    hashed = subprocess.run(
        [MILLSTREAM, "doors", "luxun", "--hash-password"], input=f"{PASSWORD}\n", capture_output=True, text=True
    ).stdout.strip()
    assert PASSWORD not in hashed and hashed.startswith("scrypt$")
    config = tmp_path / "millstream.toml"
    config.write_text(f'luxun_password = "{hashed}"\n')
    with (
        ServedBroker(tmp_path / "data", "--luxun", "127.0.0.1:0", "--config", str(config)) as broker,
        Luxun(broker.doors["luxun"], generated) as client,
    ):
        client.produce("t", b"x")
        assert code(client, client.delete("t", hashed)) == ("FAILURE", "AUTHENTICATION_FAILURE")
        assert code(client, client.delete("t", PASSWORD)) == SUCCESS


@pytest.mark.parametrize("setting", ["plain:luxun", "md5: 3a8cb419bf0d34f5fa091ce416627f82", "crc32: 1688323579"])
def test_passwords_are_configured_as_luxuns_server_has_them(
    tmp_path: Path, generated: tuple[Any, Any], setting: str
) -> None:
    with (
        BrokerInThread(tmp_path, luxun="127.0.0.1:0", luxun_password=setting) as broker,
        Luxun(broker.address("luxun"), generated) as client,
    ):
        client.produce("t", b"x")
        for wrong in ("", "hello", setting):
            assert code(client, client.delete("t", wrong)) == ("FAILURE", "AUTHENTICATION_FAILURE")
        assert client.size("t").size == 1
        assert code(client, client.delete("t", "luxun")) == SUCCESS
        assert code(client, client.size("t")) == ("FAILURE", "TOPIC_NOT_EXIST")


def test_without_a_password_every_client_may_delete(tmp_path: Path, generated: tuple[Any, Any]) -> None:
    with (
        BrokerInThread(tmp_path, luxun="127.0.0.1:0") as broker,
        Luxun(broker.address("luxun"), generated) as client,
    ):
        for password in ("", "anything"):
            client.produce("t", b"x")
            assert code(client, client.delete("t", password)) == SUCCESS
            assert code(client, client.size("t")) == ("FAILURE", "TOPIC_NOT_EXIST")


def test_a_password_of_an_unknown_form_stops_the_start(tmp_path: Path) -> None:
    config = tmp_path / "millstream.toml"
    config.write_text('luxun_password = "sha256:abc"\n')
    command = [MILLSTREAM, "serve", "--data", str(tmp_path / "data"), "--kafka", "127.0.0.1:0"]
    flags = ["--luxun", "127.0.0.1:0", "--http", "off", "--config", str(config)]
    refused = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1 and "luxun_password" in refused.stderr and "write plain: before it" in refused.stderr
    assert "Traceback" not in refused.stderr


# -- packs and the command line ----------------------------------------------------------------------------------------


def test_the_printed_idl_is_what_the_document_has_and_compiles(tmp_path: Path) -> None:
    shown = subprocess.run([MILLSTREAM, "doors", "luxun", "--idl"], capture_output=True, text=True, timeout=30)
    path = Path(shown.stdout.strip())
    assert shown.returncode == 0 and path.is_file()
    for language in ("java", "cpp", "py"):
        subprocess.run(["thrift", "--gen", language, "-out", str(tmp_path), str(path)], check=True, capture_output=True)
    document = (Path(__file__).with_name("luxun_document.thrift")).read_text()
    ours = path.read_text()
    structs = [part.split("{")[0].strip() for part in document.split("struct ")[1:]]
    assert len(structs) == 11
    for block in document.replace("\r", "").split("\n\n"):
        assert " ".join(block.split()) in " ".join(ours.split()), block


def test_packs_are_shown_message_by_message(luxun_broker: ServedBroker, client: Luxun, unique: Unique) -> None:
    topic = unique("packs")
    for codec in (Codec.NONE, Codec.GZIP, Codec.SNAPPY):
        client.produce(topic, luxun.pack([f"{codec.name} {number}".encode() for number in range(3)], codec))
    command = [MILLSTREAM, "consume", topic, "--format", "luxun-pack", "--until-end", "--broker", luxun_broker.address]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert shown.stdout.split("\n")[:-1] == [f"{name} {n}" for name in ("NONE", "GZIP", "SNAPPY") for n in range(3)]
    client.produce(topic, b"not a pack")
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert shown.returncode == 1 and "offset 3" in shown.stderr and "not a pack" in shown.stderr


def test_packs_of_generated_clients_are_understood(
    client: Luxun, generated: tuple[Any, Any], tmp_path: Path, unique: Unique
) -> None:
    """What Apache Thrift makes of the structures of a pack is what we read, and the other way round."""
    import thriftpy2
    from thriftpy2.protocol import TBinaryProtocolFactory
    from thriftpy2.utils import deserialize, serialize

    types = thriftpy2.load(str(luxun.IDL), module_name="luxun_idl_thrift")
    factory = TBinaryProtocolFactory()
    content = serialize(types.TMessageList(messages=[b"one", b"two"]), factory)
    theirs = serialize(types.TMessagePack(magic=1, attribute=0, crc32=0, messageList=content), factory)
    assert luxun.unpack(theirs) == [b"one", b"two"]
    ours = deserialize(types.TMessagePack(), luxun.pack([b"one", b"two"]), factory)
    assert (ours.magic, ours.attribute, ours.messageList) == (1, 0, content)


def test_a_client_that_thriftpy2_makes_from_the_idl_works(luxun_broker: ServedBroker, unique: Unique) -> None:
    import thriftpy2
    from thriftpy2.rpc import make_client
    from thriftpy2.transport import TFramedTransportFactory

    types = thriftpy2.load(str(luxun.IDL), module_name="luxun_idl_thrift")
    host, _, port = luxun_broker.doors["luxun"].rpartition(":")
    client = make_client(types.QueueService, host, int(port), trans_factory=TFramedTransportFactory())
    topic = unique("thriftpy2")
    for number in range(3):
        assert client.produce(types.ProduceRequest(item=b"%d" % number, topic=topic)).index == number
    client.asyncProduce(types.ProduceRequest(item=b"3", topic=topic))
    answer = client.consume(types.ConsumeRequest(topic=topic, fanoutId="f", maxFetchSize=1 << 20))
    assert answer.itemList == [b"0", b"1", b"2", b"3"]
    client.close()


# -- bad bytes ---------------------------------------------------------------------------------------------------------


def call(name: bytes, body: bytes, kind: int = 1) -> bytes:
    message = b"\x80\x01\x00" + bytes([kind]) + struct.pack(">i", len(name)) + name + struct.pack(">i", 9) + body
    return struct.pack(">i", len(message)) + message


def raw(luxun_broker: ServedBroker) -> socket.socket:
    host, _, port = luxun_broker.doors["luxun"].rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def test_a_method_that_does_not_exist_is_thrifts_own_exception(client: Luxun, unique: Unique) -> None:
    from thrift.Thrift import TMessageType

    def ask(name: str) -> None:
        protocol = client.calls._oprot
        protocol.writeMessageBegin(name, TMessageType.CALL, 1)
        protocol.writeStructBegin("args")
        protocol.writeFieldStop()
        protocol.writeMessageEnd()
        protocol.trans.flush()

    ask("noSuchMethod")
    with pytest.raises(TApplicationException, match="noSuchMethod"):
        client.calls.recv_getSize()
    ask("getSize")
    with pytest.raises(TApplicationException, match="has no topic"):
        client.calls.recv_getSize()
    assert client.produce(unique("after"), b"x").index == 0


HUGE = struct.pack(">i", 0x7FFFFFFF)
OPEN = b"\x0c\x00\x01"
HOSTILE = {
    "a string of two gigabytes": call(b"getSize", OPEN + b"\x0b\x00\x01" + HUGE + b"abc"),
    "a string of negative length": call(b"getSize", OPEN + b"\x0b\x00\x01\xff\xff\xff\xff"),
    "two thousand million items": call(b"getSize", b"\x0f\x00\x07\x02" + HUGE),
    "two thousand million lists": call(b"getSize", b"\x0f\x00\x07\x0f" + HUGE + bytes(1000)),
    "a list of nothing": call(b"getSize", b"\x0f\x00\x07\x00" + HUGE + bytes(1000)),
    "a map of nothing": call(b"getSize", b"\x0d\x00\x07\x00\x00" + HUGE + bytes(1000)),
    "100,000 structs inside each other": call(b"getSize", b"\x0c\x00\x09" * 100_000),
    "100,000 lists inside each other": call(b"getSize", b"\x0f\x00\x09" + b"\x0f\x00\x00\x00\x01" * 100_000),
    "a million fields": call(b"getSize", b"\x02\x00\x09\x01" * 1_000_000),
    "a list of a million": call(b"getSize", b"\x0f\x00\x09\x02" + struct.pack(">i", 1_000_000) + bytes(1_000_001)),
    "a type that does not exist": call(b"getSize", b"\x63\x00\x09"),
    "no end": call(b"getSize", b""),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_arguments_that_lie_are_refused_at_once_and_cost_no_memory(luxun_broker: ServedBroker, data: bytes) -> None:
    process = psutil.Process(luxun_broker.pid)
    before, started = process.memory_info().rss, sum(process.cpu_times()[:2])
    with raw(luxun_broker) as connection:
        connection.sendall(data)
        answer = connection.recv(1 << 16)
        assert answer[4:8] == b"\x80\x01\x00\x03" and b"getSize" in answer, "an exception, not silence"
    assert sum(process.cpu_times()[:2]) - started < 2, "the broker's own time, whatever else the machine does"
    assert process.memory_info().rss - before < 16 << 20


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="HTTP"),
        pytest.param(HUGE + bytes(100), id="a frame of two gigabytes"),
        pytest.param(struct.pack(">i", -5) + bytes(100), id="a negative frame"),
        pytest.param(struct.pack(">i", 4) + b"\x82\x21\x01\x00", id="the compact protocol"),
        pytest.param(call(b"x" * 300, b"\0"), id="a long name"),
        pytest.param(call(b"\xff\xfe", b"\0"), id="a name that is not UTF-8"),
        pytest.param(call(b"asyncProduce", b"\0", kind=4), id="a oneway call without arguments"),
    ],
)
def test_what_is_no_message_costs_its_connection(luxun_broker: ServedBroker, data: bytes) -> None:
    with raw(luxun_broker) as connection:
        connection.sendall(data)
        assert connection.recv(100) == b""


def test_what_was_produced_before_nonsense_is_answered(
    luxun_broker: ServedBroker, client: Luxun, unique: Unique
) -> None:
    topic = unique("nonsense")
    client.produce(topic, b"first")
    name = topic.encode()
    text = struct.pack(">i", len(name)) + name
    sound = call(b"produce", OPEN + b"\x0b\x00\x01\x00\x00\x00\x03abc\x0b\x00\x02" + text + b"\0\0")
    with raw(luxun_broker) as connection:
        connection.sendall(sound * 20 + struct.pack(">i", -5))
        answer = b""
        while more := connection.recv(1 << 16):
            answer += more
    assert answer.count(b"produce") == 20 and client.size(topic).size == 21


def test_hostile_frames_harm_nobody(luxun_broker: ServedBroker, open_client: Open, unique: Unique) -> None:
    topic = unique("hostile")
    name = topic.encode()
    text = struct.pack(">i", len(name)) + name
    sound = [
        call(b"produce", OPEN + b"\x0b\x00\x01\x00\x00\x00\x03abc\x0b\x00\x02" + text + b"\0\0"),
        call(b"asyncProduce", OPEN + b"\x0b\x00\x01\x00\x00\x00\x03abc\x0b\x00\x02" + text + b"\0\0", kind=4),
        call(b"consume", OPEN + b"\x0b\x00\x01" + text + b"\x0b\x00\x02\x00\x00\x00\x01f\x08\x00\x04\0\0\1\0\0\0"),
        call(b"consume", OPEN + b"\x0b\x00\x01" + text + b"\x0a\x00\x03" + bytes(8) + b"\0\0"),
        call(b"findClosestIndexByTime", OPEN + b"\x0a\x00\x01" + bytes(8) + b"\x0b\x00\x02" + text + b"\0\0"),
        call(b"getSize", OPEN + b"\x0b\x00\x01" + text + b"\0\0"),
        call(b"deleteTopic", OPEN + b"\x0b\x00\x01" + text + b"\x0b\x00\x02\x00\x00\x00\x01x\0\0"),
    ]
    process = psutil.Process(luxun_broker.pid)
    bystander = open_client()
    bystander.produce(topic, b"first")
    before = peak = process.memory_info().rss
    stopping = threading.Event()
    seen: list[int] = []

    def produce() -> None:
        nonlocal peak
        while not stopping.is_set():
            seen.append(bystander.produce(f"{topic}-calm", b"%d" % len(seen)).index)
            peak = max(peak, process.memory_info().rss)

    steady = threading.Thread(target=produce)
    with contextlib.ExitStack() as stack:
        for number in range(100):  # connections that stop in the middle of a frame, or claim a large one
            stack.enter_context(raw(luxun_broker)).sendall(struct.pack(">i", 1 << (10 + number % 16)) + bytes(number))
        steady.start()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda seed: attack(luxun_broker.doors["luxun"], sound, seed, header=8, body=24), range(40)))
        stopping.set()
        steady.join(20)
    assert len(seen) > 5 and seen == list(range(len(seen)))
    assert luxun_broker.is_running and "Traceback" not in luxun_broker.errors(), luxun_broker.errors()[-3000:]
    assert peak - before < 64 << 20, "while they are connected, not only afterwards"
