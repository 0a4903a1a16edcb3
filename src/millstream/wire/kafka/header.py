"""The request header."""

from __future__ import annotations

from struct import Struct, error

from millstream.core.errors import ProtocolError
from millstream.wire.kafka.primitives import Reader

_FIXED = Struct(">hhi")
FIXED_BYTES = _FIXED.size


def peek(frame: memoryview) -> tuple[int, int, int]:
    """API key, version and correlation id."""
    try:
        return _FIXED.unpack_from(frame)
    except error:
        raise ProtocolError(f"a request of {len(frame)} bytes has no header") from None


def fixed(key: int, version: int, correlation_id: int) -> bytes:
    """The first fields of every request."""
    return _FIXED.pack(key, version, correlation_id)


def skip_client(frame: memoryview, flexible: bool) -> tuple[str, Reader]:
    """The client id, and a reader at the request's body."""
    reader = Reader(frame, FIXED_BYTES)
    # Even in flexible versions the client id is not compact, so that any broker can read any header.
    client_id = reader.string(compact=False) or ""
    if flexible:
        reader.skip_tags()
    return client_id, reader
