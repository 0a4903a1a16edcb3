"""Comet's messages: the loader of the IDL against protoc, and the count of elements against the parser."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as some

from millstream.core.errors import ProtocolError
from millstream.wire import comet
from tests.compat.client_comet import compile_idl

RECORDS = some.lists(some.binary(max_size=30), max_size=20)


def test_the_descriptors_are_those_that_protoc_makes(tmp_path: Path) -> None:
    path = tmp_path / "set"
    compile_idl(f"--descriptor_set_out={path}")
    [made] = FileDescriptorSet.FromString(path.read_bytes()).file
    made.name = comet.DESCRIPTION.name
    assert made == comet.DESCRIPTION


@pytest.mark.parametrize(
    "text",
    [
        "enum Colour { RED = 0; }",
        "message A { map<string, string> names = 1; }",
        "message A { string name = 1 }",
        "service S { rpc Watch(A) returns (stream B); }",
        'import "other.proto";',
        "message A { message B {} }",
    ],
)
def test_an_idl_beyond_the_loader_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not understood"):
        comet._describe(f'syntax = "proto3"; package p; {text}')


@given(RECORDS)
def test_elements_are_counted_as_the_parser_finds_them(values: list[bytes]) -> None:
    request = comet.METHODS["Produce"].request(topic="t", records=[{"value": each} for each in values])
    data = request.SerializeToString()
    assert comet.count_elements(data, 2, 20) == len(values)
    assert comet.count_elements(data, 2, 4) == min(len(values), 5)


def test_a_request_with_too_many_elements_is_refused_before_it_is_parsed() -> None:
    request = comet.METHODS["GetMetadata"].request
    comet.check_elements("GetMetadata", request(topics=[""] * 100).SerializeToString(), 100)
    with pytest.raises(ProtocolError, match="more than 100"):
        comet.check_elements("GetMetadata", request(topics=[""] * 101).SerializeToString(), 100)
    comet.check_elements("Poll", b"\xff" * 1000, 1)  # has no repeated field: the parser refuses it


@given(some.binary(min_size=3, max_size=200))
def test_any_bytes_are_counted_or_refused(data: bytes) -> None:
    try:
        comet.check_elements("Produce", data, 1)
    except ProtocolError:
        return
    assert len(data) <= 2 or comet.count_elements(data, 2, 1) <= 1


@given(
    some.integers(0, 1 << 31 - 1),
    some.one_of(some.integers(0, 300), some.integers(0, 1 << 40), some.sampled_from([127, 128, 16_383, 16_384])),
    some.integers(0, 400),
)
def test_results_are_encoded_as_protobuf_does(partition: int, base: int, count: int) -> None:
    results = [{"partition": partition, "offset": offset} for offset in range(base, base + count)]
    expected = comet.METHODS["Produce"].response(results=results).SerializeToString()
    assert b"".join(comet.encode_results(partition, base, count)) == expected


RECORD = some.fixed_dictionaries(
    {}, optional={"partition": some.integers(-(1 << 31), (1 << 31) - 1), "key": some.binary(), "value": some.binary()}
)


def read_both(data: bytes, limit: int = 100) -> tuple[object, object]:
    """What the kernel reads, and what protobuf reads."""
    kernel = vars(comet)["_kernel"]
    found: list[object] = []
    for each in (kernel, None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(comet, "_kernel", each)
            try:
                found.append(comet.read_produce(data, 5, limit))
            except (ProtocolError, DecodeError) as error:
                found.append(type(error))
    return found[0], found[1]


@given(some.text(), some.lists(RECORD, max_size=20))
def test_the_kernel_reads_a_produce_request_as_protobuf_does(topic: str, records: list[dict[str, object]]) -> None:
    data = comet.METHODS["Produce"].request(topic=topic, records=records).SerializeToString()
    kernel, twin = read_both(data)
    assert kernel == twin
    assert isinstance(kernel, comet.Produce) and kernel.topic == topic and len(kernel.rows) == len(records)


@given(some.binary(), some.lists(RECORD, min_size=1, max_size=5), some.integers(0), some.binary(max_size=3))
def test_the_kernel_reads_damaged_requests_as_protobuf_does(
    junk: bytes, records: list[dict[str, object]], at: int, patch: bytes
) -> None:
    data = comet.METHODS["Produce"].request(topic="t", records=records).SerializeToString()
    at %= len(data)
    for damaged in (junk, data + junk, data[:at], data[:at] + patch + data[at + len(patch) :]):
        kernel, twin = read_both(damaged)
        assert kernel == twin


def test_a_request_has_a_limit_of_records() -> None:
    data = comet.METHODS["Produce"].request(topic="t", records=[{}] * 11).SerializeToString()
    assert read_both(data, 11)[0] == read_both(data, 11)[1]
    with pytest.raises(ProtocolError, match="more than 10 elements"):
        comet.read_produce(data, 5, 10)
