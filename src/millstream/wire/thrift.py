"""The part of Thrift's binary protocol that a small service needs, without sockets, for untrusted input.

    message   [0x8001 2][0 1][type 1][name: length 4, bytes][sequence id 4][a struct: the arguments or the result]
              or, from old clients, [name: length 4, bytes][type 1][sequence id 4][a struct]
    struct    fields, each [type 1][id 2][value], then a type of 0

The reader checks every length and count against the remaining bytes before it allocates, and limits nesting. The
generated and compiled decoders that we tried do neither (`docs/decisions/0011`).
"""

from __future__ import annotations

from collections.abc import Mapping
from struct import Struct
from typing import Any, NamedTuple

from millstream.core.errors import ProtocolError
from millstream.wire.reader import BoundedReader

STOP, BOOL, BYTE, DOUBLE, I16, I32, I64, STRING, STRUCT, MAP, SET, LIST = 0, 2, 3, 4, 6, 8, 10, 11, 12, 13, 14, 15
VIEW = STRING | 0x100
"""Not on the wire: asks for a byte string without a copy."""
CALL, REPLY, EXCEPTION, ONEWAY = 1, 2, 3, 4
UNKNOWN_METHOD, INVALID_MESSAGE_TYPE, PROTOCOL_ERROR = 1, 2, 7
"""Types of TApplicationException."""

NAME_BYTES_MAX = 256
DEPTH_MAX = 16
FIELDS_MAX = 100
"""Per struct: ours have four, later versions may have more."""
SKIPPED_MAX = 10_000
"""Unknown values per message."""

_STRICT = 0x80010000
_VERSION_MASK = 0xFFFF0000
_BYTE = Struct(">b")
_I16 = Struct(">h")
_I32 = Struct(">i")
_I64 = Struct(">q")
_FIELD = Struct(">bh")
_LIST_HEAD = Struct(">bi")
_MAP_HEAD = Struct(">bbi")
_FIXED_BYTES = {BOOL: 1, BYTE: 1, DOUBLE: 8, I16: 2, I32: 4, I64: 8}
_BYTES_MIN = {**_FIXED_BYTES, STRING: 4, STRUCT: 1, MAP: 6, SET: 5, LIST: 5}


class Message(NamedTuple):
    name: str
    type: int
    sequence_id: int
    body: Reader


class Reader(BoundedReader):
    __slots__ = ("_skipped",)

    def __init__(self, data: memoryview, position: int = 0) -> None:
        super().__init__(data, position)
        self._skipped = 0

    def message(self) -> Message:
        first = self._number(_I32)
        if first < 0:
            if first & _VERSION_MASK != _STRICT:
                raise ProtocolError("this is not Thrift's binary protocol; clients must use it with framed transport")
            kind = first & 0xFF
            name = self._name(self._number(_I32))
        else:
            name = self._name(first)
            kind = self._number(_BYTE)
        return Message(name, kind, self._number(_I32), self)

    def struct(self, wanted: Mapping[int, int], depth: int = 0) -> dict[int, Any]:
        """The wanted fields by id. Fields with another id or type are skipped."""
        found: dict[int, Any] = {}
        for _ in range(FIELDS_MAX):
            kind = self._number(_BYTE)
            if kind == STOP:
                return found
            number = self._number(_I16)
            asked = wanted.get(number, 0)
            if asked & 0xFF == kind:
                found[number] = self.view() if asked == VIEW else self.value(kind)
            else:
                self.skip(kind, depth + 1)
        raise ProtocolError(f"a struct has more than {FIELDS_MAX} fields")

    def arguments(self, wanted: Mapping[int, int]) -> dict[int, Any]:
        """The fields of the struct in field 1: the argument of a call that takes one struct."""
        found: dict[int, Any] = {}
        for _ in range(FIELDS_MAX):
            kind = self._number(_BYTE)
            if kind == STOP:
                return found
            if self._number(_I16) == 1 and kind == STRUCT:
                found = self.struct(wanted, 1)
            else:
                self.skip(kind, 1)
        raise ProtocolError(f"a struct has more than {FIELDS_MAX} fields")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.binary()
        if kind == LIST:
            return self._binaries()
        layout = {BYTE: _BYTE, I16: _I16, I32: _I32, I64: _I64}.get(kind)
        if layout is None:
            raise ProtocolError(f"a field of type {kind} is not supported")
        return self._number(layout)

    def binary(self) -> bytes:
        return bytes(self.view())

    def view(self) -> memoryview:
        size = self._number(_I32)
        position = self._advance(size)
        return self.buffer[position : position + size]

    def _binaries(self) -> list[bytes]:
        kind, count = _LIST_HEAD.unpack_from(self.buffer, self._advance(_LIST_HEAD.size))
        self._check_count(count, _BYTES_MIN[STRING])
        if kind != STRING and count:
            raise ProtocolError(f"a list of type {kind} where byte strings were expected")
        return [self.binary() for _ in range(count)]

    def skip(self, kind: int, depth: int = 0) -> None:
        if depth > DEPTH_MAX:
            raise ProtocolError(f"structures are nested deeper than {DEPTH_MAX}")
        self._skipped += 1
        if self._skipped > SKIPPED_MAX:
            raise ProtocolError(f"a message with more than {SKIPPED_MAX} unknown values")
        if kind in _FIXED_BYTES:
            self._advance(_FIXED_BYTES[kind])
        elif kind == STRING:
            self._advance(self._number(_I32))
        elif kind == STRUCT:
            while inner := self._number(_BYTE):
                self._advance(_I16.size)
                self.skip(inner, depth + 1)
        elif kind in (LIST, SET):
            inner, count = _LIST_HEAD.unpack_from(self.buffer, self._advance(_LIST_HEAD.size))
            self._skip_many(count, (inner,), depth)
        elif kind == MAP:
            key, inner, count = _MAP_HEAD.unpack_from(self.buffer, self._advance(_MAP_HEAD.size))
            self._skip_many(count, (key, inner), depth)
        else:
            raise ProtocolError(f"there is no type {kind}")

    def _skip_many(self, count: int, kinds: tuple[int, ...], depth: int) -> None:
        self._check_count(count, sum(_BYTES_MIN.get(kind, 1) for kind in kinds))
        for _ in range(count):
            for kind in kinds:
                self.skip(kind, depth + 1)

    def _check_count(self, count: int, bytes_min: int) -> None:
        if not 0 <= count <= (self.end - self.position) // bytes_min:
            raise ProtocolError(f"{count} items do not fit into the {self.end - self.position} bytes that are left")

    def _name(self, size: int) -> str:
        if not 0 <= size <= NAME_BYTES_MAX:
            raise ProtocolError(f"a name of {size} bytes: is this Thrift's binary protocol?")
        position = self._advance(size)
        try:
            return str(self.buffer[position : position + size], "utf-8")
        except UnicodeDecodeError:
            raise ProtocolError("a name is not UTF-8") from None

    def _number(self, layout: Struct) -> int:
        number: int = layout.unpack_from(self.buffer, self._advance(layout.size))[0]
        return number


# -- writing ---------------------------------------------------------------------------------------------------------


def head(name: str, kind: int, sequence_id: int) -> bytes:
    text = name.encode()
    return _I32.pack((_STRICT | kind) - (1 << 32)) + _I32.pack(len(text)) + text + _I32.pack(sequence_id)


def field(kind: int, number: int) -> bytes:
    return _FIELD.pack(kind, number)


def byte(number: int, value: int) -> bytes:
    return field(BYTE, number) + _BYTE.pack(value)


def i32(number: int, value: int) -> bytes:
    return field(I32, number) + _I32.pack(value)


def i64(number: int, value: int) -> bytes:
    return field(I64, number) + _I64.pack(value)


def string(number: int, value: bytes) -> bytes:
    return field(STRING, number) + _I32.pack(len(value)) + value


def list_head(number: int, count: int) -> bytes:
    """The head of a list of byte strings, each with its `length`."""
    return field(LIST, number) + _LIST_HEAD.pack(STRING, count)


length = _I32.pack


def exception(name: str, sequence_id: int, kind: int, text: str) -> bytes:
    """A TApplicationException: the server cannot make the call."""
    body = string(1, text.encode()) + i32(2, kind) + b"\0"
    return framed(head(name, EXCEPTION, sequence_id) + body)


def framed(*parts: bytes) -> bytes:
    return b"".join((_I32.pack(sum(map(len, parts))), *parts))
