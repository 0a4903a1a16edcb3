"""Reads a segment file without its log: every batch, sound or not.

`log dump` shows a file in any state. A log with a broken header uses `next_batch` to find the batch after it. So this
module trusts nothing: not the index, not the checkpoint, not the length in a header. After bytes that are no batch, the
next batch begins at the first position that holds a whole batch with a matching CRC-32C.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from typing import NamedTuple

from crc32c import crc32c

from millstream.records.batch import CRC_START, HEADER_BYTES, BatchHeader, is_sound, read_header

MAGIC = b"\2"
MAGIC_POSITION = 16
_CHUNK_BYTES = 1 << 20


class Found(NamedTuple):
    """A batch, or bytes that are none: then `header` is None and `problem` names them."""

    position: int
    size: int
    header: BatchHeader | None
    crc: int
    """Computed from the bytes; the header holds the CRC of the write."""
    problem: str


def inspect(path: str, position: int = 0) -> Iterator[tuple[Found, memoryview]]:
    """All batches and gaps of a segment file from a position on, in order. Each view lasts for one step."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            return
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as data:
            while position < size:
                found = _at(data, position)
                if found is None:
                    found = _gap(mapped, data, position)
                with data[position : position + found.size] as batch:
                    yield found, batch
                position += found.size


def next_batch(fd: int, position: int, limit: int, first: int, behind: int) -> tuple[int, BatchHeader] | None:
    """The first sound batch that starts at or after a position and ends at or before a limit, with offsets from `first`
    to below `behind`.

    Reads in pieces and maps nothing: an unreadable page then raises an error instead of SIGBUS.
    """
    while limit - position >= HEADER_BYTES:
        data = os.pread(fd, min(_CHUNK_BYTES, limit - position), position)
        if len(data) < HEADER_BYTES:
            return None
        for start, header in _headers(data):
            size = header.size
            if first <= header.base_offset < header.next_offset <= behind and size <= limit - position - start:
                batch = os.pread(fd, size, position + start)
                if is_sound(memoryview(batch), header):
                    return position + start, header
        position += len(data) - HEADER_BYTES + 1
    return None


def _headers(data: bytes) -> Iterator[tuple[int, BatchHeader]]:
    """Every position where a header may begin."""
    at = data.find(MAGIC, MAGIC_POSITION)
    while 0 <= at <= len(data) - HEADER_BYTES + MAGIC_POSITION:
        header = read_header(data, at - MAGIC_POSITION)
        if header.size >= HEADER_BYTES:
            yield at - MAGIC_POSITION, header
        at = data.find(MAGIC, at + 1)


def _at(data: memoryview, position: int) -> Found | None:
    """The batch at a position if its header is plausible; its checksum may not match."""
    if len(data) - position < HEADER_BYTES:
        return None
    header = read_header(data, position)
    if header.magic != 2 or header.size < HEADER_BYTES or header.base_offset < 0 or header.last_offset_delta < 0:
        return None
    if header.size > len(data) - position:
        return None
    with data[position + CRC_START : position + header.size] as body:
        crc = crc32c(body)
    problem = "" if crc == header.crc else "the CRC-32C does not match the bytes"
    return Found(position, header.size, header, crc, problem)


def _gap(mapped: mmap.mmap, data: memoryview, position: int) -> Found:
    """Bytes that are no batch, up to the next sound one or the end."""
    end = len(data)
    at = mapped.find(MAGIC, position + 1 + MAGIC_POSITION)
    while at >= 0:
        start = at - MAGIC_POSITION
        if len(data) - start >= HEADER_BYTES:
            header = read_header(data, start)
            if HEADER_BYTES <= header.size <= len(data) - start and header.base_offset >= 0:
                with data[start : start + header.size] as batch:
                    if is_sound(batch, header):
                        end = start
                        break
        at = mapped.find(MAGIC, at + 1)
    blank = _is_blank(data, position, end)
    return Found(position, end - position, None, 0, "zeros" if blank else "no batch header")


def _is_blank(data: memoryview, start: int, end: int) -> bool:
    for at in range(start, end, _CHUNK_BYTES):
        with data[at : min(at + _CHUNK_BYTES, end)] as chunk:
            if bytes(chunk).strip(b"\0"):
                return False
    return True
