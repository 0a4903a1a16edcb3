"""Comet's messages, built from `comet.proto` when this module is imported; and bounds on what a request may hold.

protobuf's runtime parses and serialises; it needs descriptors, not generated code (docs/decisions/0019). `_describe`
reads the part of the proto3 language that the IDL uses: messages of scalars and messages, and one service of unary
calls. It refuses anything else. The descriptors have a pool of their own, so a program that embeds the broker may load
generated code for the same package.

A message of two bytes per element grows fiftyfold when it is parsed. `check_elements` counts elements without parsing
them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from millstream.core.errors import ProtocolError

try:
    from millstream.wire import _comet as _kernel
except ImportError:
    _kernel = None  # type: ignore[assignment]
if os.environ.get("MILLSTREAM_PURE") == "1":
    _kernel = None  # type: ignore[assignment]

IDL = Path(__file__).with_name("comet.proto")
SERVICE = "comet.v1.BrokerService"

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bool": _Field.TYPE_BOOL,
    "bytes": _Field.TYPE_BYTES,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "string": _Field.TYPE_STRING,
}
_COMMENT = re.compile(r"//[^\n]*")
_STATEMENT = re.compile(
    r"""\s*(?:
        syntax\s*=\s*"proto3"\s*;
      | package\s+(?P<package>[\w.]+)\s*;
      | (?P<kind>message|service)\s+(?P<name>\w+)\s*\{(?P<body>[^{}]*)\}
    )\s*""",
    re.VERBOSE,
)
_FIELD = re.compile(r"\s*(?P<repeated>repeated\s+)?(?P<type>\w+)\s+(?P<name>\w+)\s*=\s*(?P<number>\d+)\s*;\s*")
_RPC = re.compile(r"\s*rpc\s+(?P<name>\w+)\s*\(\s*(?P<input>\w+)\s*\)\s*returns\s*\(\s*(?P<output>\w+)\s*\)\s*;\s*")


class Method(NamedTuple):
    request: Any
    """The message class."""
    response: Any


def _matches(pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
    found, position = [], 0
    while position < len(text):
        match = pattern.match(text, position)
        if match is None or match.end() == position:
            raise ValueError(f"{IDL.name} has a statement that is not understood: {text[position : position + 40]!r}")
        found.append(match)
        position = match.end()
    return found


def _describe(text: str) -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="comet/v1/broker.proto", syntax="proto3")
    for statement in _matches(_STATEMENT, _COMMENT.sub("", text).strip()):
        if statement["package"]:
            file.package = statement["package"]
        elif statement["kind"] == "message":
            message = file.message_type.add(name=statement["name"])
            for field in _matches(_FIELD, statement["body"].strip()):
                name = field["name"]
                added = message.field.add(name=name, number=int(field["number"]), json_name=_json(name))
                added.label = _Field.LABEL_REPEATED if field["repeated"] else _Field.LABEL_OPTIONAL
                if field["type"] in _SCALARS:
                    added.type = _SCALARS[field["type"]]
                else:
                    added.type, added.type_name = _Field.TYPE_MESSAGE, f".{file.package}.{field['type']}"
        elif statement["kind"] == "service":
            service = file.service.add(name=statement["name"])
            for rpc in _matches(_RPC, statement["body"].strip()):
                service.method.add(
                    name=rpc["name"],
                    input_type=f".{file.package}.{rpc['input']}",
                    output_type=f".{file.package}.{rpc['output']}",
                )
    return file


def _json(name: str) -> str:
    return re.sub(r"_(\w)", lambda match: match[1].upper(), name)


DESCRIPTION = _describe(IDL.read_text())
_pool = descriptor_pool.DescriptorPool()
_pool.AddSerializedFile(DESCRIPTION.SerializeToString())
_classes = message_factory.GetMessageClassesForFiles([DESCRIPTION.name], _pool)


def _class(name: str) -> Any:
    return _classes[name.removeprefix(".")]


METHODS = {
    method.name: Method(_class(method.input_type), _class(method.output_type))
    for method in DESCRIPTION.service[0].method
}
Message = _class("comet.v1.Message")
_REPEATED = {
    method.name: field.number
    for method in DESCRIPTION.service[0].method
    for message in DESCRIPTION.message_type
    for field in message.field
    if method.input_type.endswith(f".{message.name}") and field.label == _Field.LABEL_REPEATED
}
"""The field of the requests that have a repeated one."""


def check_elements(method: str, data: bytes, limit: int) -> None:
    """Raises `ProtocolError` for a request with more than `limit` elements, or if they cannot be counted."""
    field = _REPEATED.get(method)
    if field is None or len(data) <= 2 * limit:  # an element has a tag and a length
        return
    if count_elements(data, field, limit) > limit:
        raise ProtocolError(f"it has more than {limit} elements")


def count_elements(data: bytes, field: int, limit: int) -> int:
    """How often a length-delimited field occurs at the top of a message; stops above `limit`."""
    count, position, size = 0, 0, len(data)
    while position < size and count <= limit:
        tag, position = _varint(data, position)
        kind = tag & 7
        if kind == 2:
            length, position = _varint(data, position)
            position += length
            count += tag >> 3 == field
        elif kind == 0:
            _, position = _varint(data, position)
        elif kind in (1, 5):
            position += 8 if kind == 1 else 4
        else:
            raise ProtocolError(f"the message has a field of wire type {kind}")
    if position > size:
        raise ProtocolError("the message ends inside a field")
    return count


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    for byte in data[position : position + 10]:
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise ProtocolError("the message ends inside a number, or the number is too long")


# Produce has a message per record, in the request and in the answer. protobuf's objects for them would cost more than
# all other work of a call. So the answer is encoded by hand, and a kernel reads the request if it was compiled.


class Produce(NamedTuple):
    topic: str
    numbers: list[int]
    """The partition of each record, as sent."""
    rows: list[tuple[int, int, bytes | None, bytes, tuple[()]]]
    """The records as `codec.encode_own` takes them; an empty key is none."""
    size: int
    """Of keys and values."""
    is_one: bool
    """Whether all records name the same partition."""


def read_produce(data: bytes, now_ms: int, limit: int) -> Produce:
    """A ProduceRequest with at most `limit` records, which get the time `now_ms`. Raises `ProtocolError` or protobuf's
    `DecodeError`.

    The kernel reads requests with the known fields only. protobuf reads any other, and reports what is wrong.
    """
    if _kernel is not None:
        found = _kernel.read_produce(data, now_ms, limit)
        if found is not None:
            return Produce(*found)
    check_elements("Produce", data, limit)
    request = METHODS["Produce"].request.FromString(data)
    numbers = [each.partition for each in request.records]
    rows = [(0, now_ms, each.key or None, each.value, ()) for each in request.records]
    size = sum(len(row[3]) + len(row[2] or b"") for row in rows)
    return Produce(request.topic, numbers, rows, size, len(set(numbers)) <= 1)


_BYTES = [bytes([each]) for each in range(256)]


def encode_results(partition: int, base: int, count: int) -> list[bytes]:
    """Elements of the `results` of a ProduceResponse, field 1: one partition, and consecutive offsets."""
    head = b"\x08" + varint(partition) if partition else b""
    out = []
    end = base + count
    if base == 0 and count:  # proto3 does not send a zero
        out.append(b"\n" + _BYTES[len(head)] + head)
        base = 1
    while base < end:
        # 128 offsets at a time differ in the first byte of their varint only.
        high, low = base >> 7, base & 0x7F
        stop = min(end - base + low, 128)
        more = 0x80 if high else 0
        rest = varint(high) if high else b""
        before = b"\n" + _BYTES[len(head) + 2 + len(rest)] + head + b"\x10"
        out += [before + each + rest for each in _BYTES[more | low : more + stop]]
        base += stop - low
    return out


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
