"""Records per second of the column decoder and of aiokafka's reader, on the same bytes in the same run.

There are two references, both with aiokafka's Cython reader and without checking CRCs; ours builds all columns and does
check them.

    reader    iterate `MemoryRecords` and look at offset, timestamp, key and value of every record, keeping none
    columns   the same, but keep all six columns as lists: the work that `decode_columns` does

Rounds alternate, and the best of each side counts: noise only ever slows a run down.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from millstream.records import codec
from millstream.records.record import Record

RECORDS = 10_000
VALUE_BYTES = 100


def sample(records: int = RECORDS, value_bytes: int = VALUE_BYTES, *, with_keys: bool = True) -> bytes:
    """One uncompressed batch."""
    value = bytes(range(256)) * (value_bytes // 256 + 1)
    return bytes(
        codec.encode(
            [
                Record(i, 1_700_000_000_000 + i // 10, b"%08d" % i if with_keys else None, value[:value_bytes])
                for i in range(records)
            ]
        )
    )


def _read_with_aiokafka(data: bytes) -> int:
    from aiokafka.record import MemoryRecords

    reader = MemoryRecords(data)
    count = 0
    while reader.has_next():
        for record in reader.next_batch():
            _ = record.offset, record.timestamp, record.key, record.value
            count += 1
    return count


def _collect_with_aiokafka(data: bytes) -> int:
    from aiokafka.record import MemoryRecords

    reader = MemoryRecords(data)
    offsets, timestamps, kinds, keys, values, headers = [], [], [], [], [], []
    while reader.has_next():
        for record in reader.next_batch():
            offsets.append(record.offset)
            timestamps.append(record.timestamp)
            kinds.append(record.timestamp_type)
            keys.append(record.key)
            values.append(record.value)
            headers.append(record.headers)
    return len(offsets)


def _read_columns(data: bytes) -> int:
    return codec.decode_columns(data).rows


def _read_records(data: bytes) -> int:
    return len(codec.decode(data))


def _write_records(data: list[Record]) -> int:
    codec.encode(data)
    return len(data)


def _rate(read: Callable[[Any], int], data: Any, seconds: float) -> float:
    count = 0
    start = now = time.perf_counter()
    while now - start < seconds:
        count += read(data)
        now = time.perf_counter()
    return count / (now - start)


def measure(rounds: int = 5, seconds: float = 0.5) -> dict[str, float | str]:
    """Records per second, the reference's and ours, and how many times faster ours is."""
    data = sample()
    records = codec.decode(data)
    sides: dict[str, tuple[Callable[[Any], int], Any]] = {
        "reference_reader": (_read_with_aiokafka, data),
        "reference_columns": (_collect_with_aiokafka, data),
        "columns": (_read_columns, data),
        "decode": (_read_records, data),
        "encode": (_write_records, records),
    }
    best = dict.fromkeys(sides, 0.0)
    for _ in range(rounds):
        for name, (run, argument) in sides.items():
            best[name] = max(best[name], _rate(run, argument, seconds))
    return {
        "kernel": codec.KERNEL,
        **{f"{name}_records_per_second": rate for name, rate in best.items()},
        "columns_to_reference_reader": best["columns"] / best["reference_reader"],
        "columns_to_reference_columns": best["columns"] / best["reference_columns"],
    }


if __name__ == "__main__":
    for name, number in measure().items():
        print(f"{name:>32}  {number if isinstance(number, str) else f'{number:,.1f}'}")
