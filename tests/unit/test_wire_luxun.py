"""Luxun's service as bytes: against thriftpy2 with the same IDL, and against bytes that lie."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import thriftpy2
from hypothesis import given
from hypothesis import strategies as st
from thriftpy2.protocol.binary import TBinaryProtocol
from thriftpy2.thrift import TMessageType
from thriftpy2.transport import TMemoryBuffer

from millstream.core.errors import ProtocolError
from millstream.records.compression import Codec
from millstream.wire import luxun, thrift

THEIRS = thriftpy2.load(str(luxun.IDL), module_name="luxun_oracle_thrift")
NAMES = st.text(max_size=30)
I64 = st.integers(-(2**63), 2**63 - 1)


def written(name: str, request: Any, kind: int = TMessageType.CALL) -> thrift.Message:
    """A call as thriftpy2 writes it, as we begin to read it."""
    buffer = TMemoryBuffer()
    protocol = TBinaryProtocol(buffer)
    protocol.write_message_begin(name, kind, 7)
    arguments = getattr(THEIRS.QueueService, f"{name}_args")()
    setattr(arguments, arguments.thrift_spec[1][1], request)
    arguments.write(protocol)
    protocol.write_message_end()
    message = thrift.Reader(memoryview(buffer.getvalue())).message()
    assert message[:3] == (name, kind, 7)
    return message


def read(answer: bytes, name: str) -> Any:
    """What thriftpy2 reads from an answer of ours."""
    assert int.from_bytes(answer[:4], "big") == len(answer) - 4
    protocol = TBinaryProtocol(TMemoryBuffer(answer[4:]))
    assert protocol.read_message_begin() == (name, TMessageType.REPLY, 7)
    result = getattr(THEIRS.QueueService, f"{name}_result")()
    result.read(protocol)
    return result.success


@given(st.binary(max_size=200), NAMES)
def test_produce(item: bytes, topic: str) -> None:
    request = THEIRS.ProduceRequest(item=item, topic=topic)
    expected = luxun.Produce(memoryview(item), topic)
    assert luxun.decode_produce(written("produce", request).body) == expected
    assert luxun.decode_produce(written("asyncProduce", request, TMessageType.ONEWAY).body) == expected
    answer = read(luxun.encode_produced(7, 1 << 40), "produce")
    assert answer.index == 1 << 40 and answer.result == THEIRS.Result(resultCode=THEIRS.ResultCode.SUCCESS)


@given(NAMES, st.none() | NAMES, st.none() | I64, st.none() | st.integers(-(2**31), 2**31 - 1))
def test_consume(topic: str, fanout: str | None, index: int | None, size: int | None) -> None:
    request = THEIRS.ConsumeRequest(topic=topic, fanoutId=fanout, startIndex=index, maxFetchSize=size)
    assert luxun.decode_consume(written("consume", request).body) == (topic, fanout or "", index or 0, size or 0)


@given(st.lists(st.binary(max_size=100), max_size=30), I64)
def test_consumed_items(items: list[bytes], last: int) -> None:
    answer = read(luxun.encode_consumed(7, items, last), "consume")
    assert (answer.itemList, answer.lastConsumedIndex) == (items, last)


@given(NAMES, I64)
def test_the_other_calls(text: str, number: int) -> None:
    find = THEIRS.FindClosestIndexByTimeRequest(timestamp=number, topic=text)
    assert luxun.decode_find(written("findClosestIndexByTime", find).body) == (number, text)
    delete = THEIRS.DeleteTopicRequest(topic=text, password=text[::-1])
    assert luxun.decode_delete_topic(written("deleteTopic", delete).body) == (text, text[::-1])
    assert luxun.decode_get_size(written("getSize", THEIRS.GetSizeRequest(topic=text)).body) == (text, "")
    size = THEIRS.GetSizeRequest(topic="t", fanoutId=text)
    assert luxun.decode_get_size(written("getSize", size).body) == ("t", text)
    found = read(luxun.encode_found(7, number, None), "findClosestIndexByTime")
    assert (found.index, found.timestampOfIndex) == (number, None)
    assert read(luxun.encode_size(7, number), "getSize").size == number
    assert read(luxun.encode_deleted(7), "deleteTopic").result.resultCode == THEIRS.ResultCode.SUCCESS


@pytest.mark.parametrize("error", luxun.ErrorCode)
def test_codes_have_the_numbers_of_the_idl(error: luxun.ErrorCode) -> None:
    assert getattr(THEIRS.ErrorCode, error.name) == error
    failure = luxun.Failure(error, "what is wrong: ✗", luxun.ResultCode.TRY_LATER)
    result = read(luxun.encode_failure("getSize", 7, failure), "getSize").result
    assert (result.resultCode, result.errorCode, result.errorMessage) == (2, error, failure.text)
    assert {each.name: int(each) for each in luxun.ResultCode} == THEIRS.ResultCode._NAMES_TO_VALUES


def test_fields_of_later_versions_are_passed_over() -> None:
    inner = thrift.string(1, b"x") + thrift.field(thrift.MAP, 2) + b"\x0b\x08" + thrift.length(1)
    inner += thrift.length(1) + b"k" + bytes(4) + b"\0"
    more = thrift.field(thrift.STRUCT, 90) + inner + thrift.list_head(91, 1) + thrift.length(1) + b"y"
    more += thrift.field(thrift.BOOL, 92) + b"\1" + thrift.field(thrift.DOUBLE, 93) + bytes(8)
    body = thrift.field(thrift.STRUCT, 1) + more + thrift.string(1, b"topic") + more + b"\0" + more + b"\0"
    assert luxun.decode_get_size(thrift.Reader(memoryview(body))) == ("topic", "")


@given(st.binary(max_size=300))
def test_any_bytes_are_a_call_or_a_protocol_error(data: bytes) -> None:
    decoders = luxun.decode_produce, luxun.decode_consume, luxun.decode_find, luxun.decode_delete_topic
    for decode in (*decoders, luxun.decode_get_size, lambda reader: reader.message()):
        for start in (b"", thrift.field(thrift.STRUCT, 1), b"\x80\x01\x00\x01"):
            try:
                decode(thrift.Reader(memoryview(start + data)))
            except ProtocolError:
                continue


def test_nesting_and_counts_have_bounds() -> None:
    for body in (
        b"\x0c\x00\x09" * 1000,
        b"\x0f\x00\x09" + b"\x0f\x00\x00\x00\x01" * 1000,
        b"\x0f\x00\x07\x00\x7f\xff\xff\xff",
        b"\x0f\x00\x07\x02" + (50_000).to_bytes(4, "big") + bytes(50_000),
        b"\x0b\x00\x07\x7f\xff\xff\xff",
        b"\x0b\x00\x07\xff\xff\xff\xff",
        b"\x02\x00\x09\x01" * 1000,
    ):
        with pytest.raises(ProtocolError):
            thrift.Reader(memoryview(body)).struct({})


# -- packs -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=300), max_size=30), st.sampled_from([Codec.NONE, Codec.GZIP, Codec.SNAPPY]))
def test_packs_come_back_as_they_were(messages: list[bytes], codec: Codec) -> None:
    packed = luxun.pack(messages, codec)
    assert luxun.unpack(packed) == messages
    theirs = THEIRS.TMessagePack()
    theirs.read(TBinaryProtocol(TMemoryBuffer(packed)))
    assert (theirs.magic, theirs.attribute) == (1, codec)
    assert theirs.crc32 & 0xFFFFFFFF == zlib.crc32(theirs.messageList)


def test_a_damaged_pack_is_refused() -> None:
    packed = luxun.pack([b"one", b"two"] * 100, Codec.GZIP)
    for at in range(len(packed)):
        damaged = bytearray(packed)
        damaged[at] ^= 0x10
        try:
            assert luxun.unpack(bytes(damaged)) == [b"one", b"two"] * 100
        except luxun.BadPack:
            continue


def test_a_pack_without_a_checksum_is_read_as_luxuns_own_clients_write_it() -> None:
    packed = bytearray(luxun.pack([b"one"]))
    packed[11:15] = bytes(4)
    assert luxun.unpack(bytes(packed)) == [b"one"]
    packed[11:15] = b"\1\2\3\4"
    with pytest.raises(luxun.BadPack, match="CRC-32"):
        luxun.unpack(bytes(packed))


def test_a_pack_that_would_unpack_to_more_than_allowed_is_refused() -> None:
    bomb = luxun.pack([bytes(10_000_000)], Codec.GZIP)
    assert len(bomb) < 20_000
    with pytest.raises(luxun.BadPack, match="more than 1000000 bytes"):
        luxun.unpack(bomb, 1_000_000)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_pack_or_not(data: bytes) -> None:
    try:
        luxun.unpack(data)
    except luxun.BadPack:
        return


def test_other_compressions_are_not_for_packs() -> None:
    with pytest.raises(ValueError, match="zstd"):
        luxun.pack([b"x"], Codec.ZSTD)
