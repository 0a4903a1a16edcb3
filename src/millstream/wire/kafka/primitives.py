"""Kafka's primitive types, for the few messages that are decoded and encoded by hand.

A `Reader` decodes, and checks every length against the remaining bytes before it uses it. Compact types belong to
flexible versions (KIP-482): a length is an unsigned varint of the length plus one (0 is null), and every structure ends
with tagged fields.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from uuid import UUID

from millstream.core.errors import ProtocolError
from millstream.wire.reader import BoundedReader

STRING_BYTES_MAX = 0x7FFF
"""Compact strings could be longer. Kafka's readers refuse that too, so that any version can carry any string."""
ITEMS_MAX = 100_000
"""Per request, over all arrays. An item has a few bytes on the wire, some hundred in memory, and as many to answer."""
ERROR_TEXT_CHARS_MAX = 1000

_I8 = Struct(">b")
_I16 = Struct(">h")
_I32 = Struct(">i")
_I64 = Struct(">q")
_U16 = Struct(">H")
_F64 = Struct(">d")


class ManyItems(Exception):
    """A request has more items than its caller decodes at once. It is valid so far."""


class Reader(BoundedReader):
    __slots__ = ("items",)

    def __init__(self, buffer: memoryview, position: int = 0) -> None:
        self.buffer = buffer  # without `super`, whose call each request would pay
        self.position = position
        self.end = len(buffer)
        self.items = 0
        """The number of items of all arrays so far."""

    def i8(self) -> int:
        value: int = _I8.unpack_from(self.buffer, self._advance(1))[0]
        return value

    def i16(self) -> int:
        value: int = _I16.unpack_from(self.buffer, self._advance(2))[0]
        return value

    def i32(self) -> int:
        value: int = _I32.unpack_from(self.buffer, self._advance(4))[0]
        return value

    def i64(self) -> int:
        value: int = _I64.unpack_from(self.buffer, self._advance(8))[0]
        return value

    def u16(self) -> int:
        value: int = _U16.unpack_from(self.buffer, self._advance(2))[0]
        return value

    def f64(self) -> float:
        value: float = _F64.unpack_from(self.buffer, self._advance(8))[0]
        return value

    def boolean(self) -> bool:
        return self.i8() != 0

    def uvarint(self) -> int:
        value = shift = 0
        while True:
            byte = self.buffer[self._advance(1)]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
            if shift > 28:
                raise ProtocolError("a varint is longer than five bytes")

    def raw(self, size: int) -> memoryview:
        position = self._advance(size)
        return self.buffer[position : position + size]

    def uuid(self) -> UUID:
        return UUID(bytes=bytes(self.raw(16)))

    def string(self, compact: bool) -> str | None:
        size = self.uvarint() - 1 if compact else self.i16()
        if size < 0:
            return None
        if size > STRING_BYTES_MAX:
            raise ProtocolError(f"a string of {size} bytes: at most {STRING_BYTES_MAX} are allowed")
        try:
            return str(self.raw(size), "utf-8")
        except UnicodeDecodeError as error:
            raise ProtocolError(f"a string is not UTF-8: {error}") from error

    def text(self, compact: bool) -> str:
        """A string that is not nullable."""
        value = self.string(compact)
        if value is None:
            raise ProtocolError("a string is null, which its field does not allow")
        return value

    def blob(self, compact: bool) -> memoryview | None:
        size = self.uvarint() - 1 if compact else self.i32()
        return None if size < 0 else self.raw(size)

    def count(self, compact: bool, item_bytes_min: int) -> int:
        """The length of an array, -1 for null. Raises if the remaining bytes cannot hold so many items."""
        count = self.uvarint() - 1 if compact else self.i32()
        if count * item_bytes_min > self.end - self.position:
            raise ProtocolError(f"an array claims {count} items, which do not fit into the message")
        if count > 0:
            self.items += count
            if self.items > ITEMS_MAX:
                raise ProtocolError(f"a request with {self.items} items: at most {ITEMS_MAX} are allowed")
        return count

    def tags(self) -> Iterator[tuple[int, int]]:
        """Tag and end of each tagged field. The caller may read the field, then skips to its end."""
        for _ in range(self.uvarint()):
            tag, size = self.uvarint(), self.uvarint()
            end = self._advance(size) + size
            self.position = end - size
            yield tag, end

    def skip_to(self, end: int) -> None:
        if self.position > end:
            raise ProtocolError(f"a tagged field is {self.position - end} bytes longer than it says")
        self.position = end

    def skip_tags(self) -> None:
        for _ in range(self.uvarint()):
            self.uvarint()
            self._advance(self.uvarint())


def uvarint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    encoded = bytearray()
    while value >= 0x80:
        encoded.append((value & 0x7F) | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def string(value: str | None, compact: bool) -> bytes:
    if value is None:
        return b"\0" if compact else b"\xff\xff"
    encoded = value.encode()
    return (uvarint(len(encoded) + 1) if compact else _I16.pack(len(encoded))) + encoded


def error_text(text: str | None) -> str | None:
    """Truncates an error message, which may quote a long string of the client's."""
    return text if text is None or len(text) <= ERROR_TEXT_CHARS_MAX else text[: ERROR_TEXT_CHARS_MAX - 1] + "…"


def array_length(count: int, compact: bool) -> bytes:
    return uvarint(count + 1) if compact else _I32.pack(count)


def i32_array(values: list[int] | tuple[int, ...], compact: bool) -> bytes:
    return array_length(len(values), compact) + Struct(f">{len(values)}i").pack(*values)
