"""Records per second of the column decoder and of aiokafka's reader, on the same bytes in the same run.

The batch is uncompressed and holds 10,000 records of 100 bytes, all of it value. There are two references, both with
aiokafka's Cython reader:

    reader    iterate `MemoryRecords` and take offset, timestamp, key, value and headers of every record, keeping none
    columns   the same, but keep all six columns as lists: the work that `decode_columns` does

Both sides check every batch's CRC, which is the default of aiokafka's consumer (`check_crcs`) and of ours. aiokafka
computes it in software, a quarter of its time, so the names with `unchecked` in them say what is left where neither
side checks.

Sides take turns of a few milliseconds, and the best turn of each counts: noise only ever slows a turn down.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from millstream.records import codec
from millstream.records.record import Record

RECORDS = 10_000
VALUE_BYTES = 100
TURN_SECONDS = 0.02


def sample(records: int = RECORDS, value_bytes: int = VALUE_BYTES, *, with_keys: bool = False) -> bytes:
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


def _read_with_aiokafka(data: bytes, *, check_crc: bool = True) -> int:
    from aiokafka.record import MemoryRecords

    reader = MemoryRecords(data)
    count = 0
    while reader.has_next():
        batch = reader.next_batch()
        if check_crc and not batch.validate_crc():
            raise ValueError("aiokafka takes the batch for broken")
        for record in batch:
            _ = record.offset, record.timestamp, record.key, record.value, record.headers
            count += 1
    return count


def _collect_with_aiokafka(data: bytes) -> int:
    from aiokafka.record import MemoryRecords

    reader = MemoryRecords(data)
    offsets, timestamps, kinds, keys, values, headers = [], [], [], [], [], []
    while reader.has_next():
        batch = reader.next_batch()
        if not batch.validate_crc():
            raise ValueError("aiokafka takes the batch for broken")
        for record in batch:
            offsets.append(record.offset)
            timestamps.append(record.timestamp)
            kinds.append(record.timestamp_type)
            keys.append(record.key)
            values.append(record.value)
            headers.append(record.headers)
    return len(offsets)


def _read_columns(data: bytes, *, check_crc: bool = True) -> int:
    return codec.decode_columns(data, check_crc=check_crc).rows


def _read_records(data: bytes) -> int:
    return len(codec.decode(data))


def _validate(data: bytes) -> int:
    codec.validate(data, check_crc=False)
    return RECORDS


def _write_records(data: list[Record]) -> int:
    codec.encode(data)
    return len(data)


def _rate(read: Callable[[Any], int], data: Any) -> float:
    count = 0
    start = now = time.perf_counter()
    while now - start < TURN_SECONDS:
        count += read(data)
        now = time.perf_counter()
    return count / (now - start)


def measure(rounds: int = 5, seconds: float = 0.5, *, with_keys: bool = False) -> dict[str, float | str]:
    """Records per second, the references' and ours, and how many times faster ours is."""
    data = sample(with_keys=with_keys)
    records = codec.decode(data)
    sides: dict[str, tuple[Callable[[Any], int], Any]] = {
        "reference_reader": (_read_with_aiokafka, data),
        "reference_columns": (_collect_with_aiokafka, data),
        "columns": (_read_columns, data),
        "reference_reader_unchecked": (partial(_read_with_aiokafka, check_crc=False), data),
        "columns_unchecked": (partial(_read_columns, check_crc=False), data),
        "validate": (_validate, data),
        "decode": (_read_records, data),
        "encode": (_write_records, records),
    }
    best = dict.fromkeys(sides, 0.0)
    for _ in range(max(1, round(rounds * seconds / TURN_SECONDS))):
        for name, (run, argument) in sides.items():
            best[name] = max(best[name], _rate(run, argument))
    return {
        "kernel": codec.KERNEL,
        **{f"{name}_records_per_second": rate for name, rate in best.items()},
        "columns_to_reference_reader": best["columns"] / best["reference_reader"],
        "columns_to_reference_columns": best["columns"] / best["reference_columns"],
        "unchecked_columns_to_reference_reader": best["columns_unchecked"] / best["reference_reader_unchecked"],
    }


if __name__ == "__main__":
    for with_keys in (False, True):
        print("with keys of 8 bytes" if with_keys else "without keys")
        for name, number in measure(with_keys=with_keys).items():
            print(f"{name:>50}  {number if isinstance(number, str) else f'{number:,.1f}'}")
