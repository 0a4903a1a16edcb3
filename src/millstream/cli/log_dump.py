"""`millstream log dump`: the contents of a segment or index file, read straight from the file.

The words are those of `kafka-dump-log`: its users know them, and scripts that search for `isvalid: false` work. A
broker may have the file open meanwhile: nothing is written.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.admin.failure import Failure
from millstream.cli.output import Format, OutputOption

if TYPE_CHECKING:
    from millstream.log.inspection import Found
    from millstream.records.record import Record

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
_MORE_OPTIONS = "`millstream log dump --help` shows the options"


def dump(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Segments (.log) or indexes (.index).")],
    batches: Annotated[bool, typer.Option("--batches", help="Show only the batches, without their records.")] = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Print the batches and records of segment files, sound or not. Exits with 1 where something is damaged."""
    damaged = 0
    for path in files:
        damaged += _dump_index(path, output) if path.suffix == ".index" else _dump_log(path, not batches, output)
    if damaged:
        raise typer.Exit(1)


def _dump_log(path: Path, with_records: bool, output: Format) -> int:
    from millstream.log.inspection import inspect

    if output is Format.TABLE:
        print(f"Dumping {path}")
        if path.stem.isdigit():
            print(f"Log starting offset: {int(path.stem)}")
    damaged = 0
    try:
        for found, batch in inspect(str(path)):
            damaged += bool(found.problem)
            print(json.dumps(_as_json(found)) if output is Format.JSON else _line(found))
            if with_records and found.header is not None and not found.header.is_control:
                damaged += _show_records(found, batch, output)
    except OSError as error:
        raise Failure(f"{path} cannot be read ({error.strerror}); {_MORE_OPTIONS}") from None
    if damaged and output is Format.TABLE:
        print(f"{path}: {damaged} damaged place{'s' * (damaged != 1)}", file=sys.stderr)
    return damaged


def _show_records(found: Found, batch: memoryview, output: Format) -> int:
    from millstream.records import codec
    from millstream.records.batch import CorruptBatch

    assert found.header is not None
    try:
        records = codec.decode(batch, check_crc=False)
    except CorruptBatch as error:
        if not found.problem:  # else the batch is counted, and its line gives the reason
            print(f"| the records cannot be decoded: {error.detail}")
        return int(not found.problem)
    sequence = found.header.base_sequence
    for record in records:
        at = sequence + record.offset - found.header.base_offset if sequence >= 0 else -1
        if output is Format.JSON:
            print(json.dumps({"offset": record.offset, "sequence": at, **_record_as_json(record)}))
        else:
            print(_record_line(record, at))
    return 0


def _fields(found: Found) -> Iterator[tuple[str, object]]:
    header = found.header
    assert header is not None
    sequence = header.base_sequence
    yield "baseOffset", header.base_offset
    yield "lastOffset", header.last_offset
    yield "count", header.count
    yield "baseSequence", sequence
    yield "lastSequence", sequence + header.last_offset_delta if sequence >= 0 else -1
    yield "producerId", header.producer_id
    yield "producerEpoch", header.producer_epoch
    yield "partitionLeaderEpoch", header.leader_epoch
    yield "isTransactional", bool(header.attributes & 0x10)
    yield "isControl", header.is_control
    yield "position", found.position
    yield "LogAppendTime" if header.attributes & 0x08 else "CreateTime", header.max_timestamp
    yield "size", found.size
    yield "magic", header.magic
    yield "compresscodec", CODECS[header.codec] if header.codec < len(CODECS) else str(header.codec)
    yield "crc", header.crc
    yield "isvalid", not found.problem


def _line(found: Found) -> str:
    if found.header is None:
        return f"position: {found.position} size: {found.size} isvalid: false ({found.problem})"
    return " ".join(f"{name}: {_word(value)}" for name, value in _fields(found))


def _as_json(found: Found) -> dict[str, Any]:
    if found.header is None:
        return {"position": found.position, "size": found.size, "isvalid": False, "problem": found.problem}
    return dict(_fields(found)) | ({"problem": found.problem} if found.problem else {})


def _record_line(record: Record, sequence: int) -> str:
    headers = ",".join(_name(name) for name, _ in record.headers)
    parts = [
        f"| offset: {record.offset} CreateTime: {record.timestamp} keySize: {_size(record.key)}",
        f"valueSize: {_size(record.value)} sequence: {sequence} headerKeys: [{headers}]",
    ]
    if record.key is not None:
        parts.append(f"key: {_text(record.key)}")
    if record.value is not None:
        parts.append(f"payload: {_text(record.value)}")
    return " ".join(parts)


def _record_as_json(record: Record) -> dict[str, Any]:
    return {
        "timestamp": record.timestamp,
        "key": None if record.key is None else _text(record.key),
        "value": None if record.value is None else _text(record.value),
        "headers": [[_name(name), None if value is None else _text(value)] for name, value in record.headers],
    }


def _dump_index(path: Path, output: Format) -> int:
    from millstream.log.index import entries

    try:
        data = path.read_bytes()
    except OSError as error:
        raise Failure(f"{path} cannot be read ({error.strerror}); {_MORE_OPTIONS}") from None
    base = int(path.stem) if path.stem.isdigit() else 0
    if output is Format.TABLE:
        print(f"Dumping {path}")
    for relative, position, newest in entries(data):
        if output is Format.JSON:
            print(json.dumps({"offset": base + relative, "position": position, "max_timestamp_before": newest}))
        else:
            print(f"offset: {base + relative} position: {position} maxTimestampBefore: {newest}")
    return 0


def _size(value: bytes | None) -> int:
    return -1 if value is None else len(value)


def _text(value: bytes) -> str:
    return value.decode(errors="backslashreplace")


def _name(name: str) -> str:
    """Header names that are not UTF-8 hold their bytes as lone surrogates, which a terminal cannot print."""
    return _text(name.encode("utf-8", "surrogateescape"))


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
