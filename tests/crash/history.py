"""Random histories of a store on a forgetful disk, and what must be true after each crash.

A history is several lives of one directory. In each life a few partitions take batches, are synced, trimmed, read,
compacted, expired and cleanly restarted in an order that a seed decides, until the power fails: between two steps, or
in the middle of any disk operation, recovery's included. Then the directory is put into a state that the disk's model
allows, opened again, and compared with what clients were told and what readers saw.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from functools import partial
from random import Random

from millstream.core.promise import Promise
from millstream.log.answers import Appended
from millstream.log.config import FlushPolicy, LogConfig
from millstream.log.replica import ReplicaLog
from millstream.records import codec
from millstream.records.batch import PREFIX_BYTES, BatchHeader, patch_offset, read_header
from millstream.records.record import Record
from millstream.stores.local import LocalLogStore
from millstream.testing.clock import VirtualClock
from millstream.testing.disk import ForgetfulDisk, PowerLoss
from tests.crash.machine import HandFlusher
from tests.crash.store_directory import open_log

TOPIC, TOPIC_ID = "history", "0123456789abcdef"
IN_FLIGHT_MAX = 5
DELETE_RETENTION_MS = 60_000

ALWAYS = FlushPolicy.parse("always")
CONFIGS = {
    "plain": LogConfig(segment_bytes=4000, index_interval_bytes=256, retention_ms=-1),
    "large segments": LogConfig(segment_bytes=1 << 20, index_interval_bytes=1024, retention_ms=-1),
    "expiring": LogConfig(segment_bytes=3000, index_interval_bytes=256, retention_ms=300_000, retention_bytes=9000),
    "compacted": LogConfig(
        segment_bytes=2500, index_interval_bytes=256, delete=False, compact=True, min_cleanable_dirty_ratio=0.1,
        delete_retention_ms=DELETE_RETENTION_MS,
    ),
    "os": LogConfig(segment_bytes=4000, index_interval_bytes=256, retention_ms=-1, flush=FlushPolicy.parse("os")),
    "os expiring": LogConfig(
        segment_bytes=3000, index_interval_bytes=256, retention_bytes=9000, flush=FlushPolicy.parse("os")
    ),
}  # fmt: skip


@dataclass
class Report:
    attempted: int = 0
    acknowledged: int = 0
    lost: int = 0
    duplicated: int = 0
    crashes: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{name} {number:,}" for name, number in vars(self).items())


@dataclass
class Sent:
    """One batch of an idempotent producer, as the client would send it again."""

    batch: bytes
    promise: Promise[Appended]
    base_offset: int | None = None


@dataclass
class Producer:
    number: int
    sequence: int = 0
    recent: list[Sent] = field(default_factory=list)

    def unanswered(self) -> int:
        return sum(not sent.promise.done for sent in self.recent)


class Expected:
    """One partition as clients and readers know it."""

    def __init__(self, index: int, kind: str, random: Random) -> None:
        self.index = index
        self.kind = kind
        self.config = CONFIGS[kind]
        self.producers = [Producer(100 + 10 * index + n, random.choice((0, 2**31 - 12))) for n in range(2)]
        self.content: dict[int, bytes] = {}
        """Everything appended in this life or found after the last crash, by base offset."""
        self.acknowledged: set[int] = set()
        self.seen: dict[int, bytes] = {}
        self.seen_to = 0
        self.trimmed = 0
        self.start_max = 0
        """Where the log may start at most: retention and trims in flight included."""
        self.newest: dict[bytes, int] = {}
        """Compacted: the largest durable offset of each key."""

    @property
    def is_weak(self) -> bool:
        """`flush=os`: an answer promises nothing about a power loss, a flush does."""
        return self.config.flush != ALWAYS

    def settle(self, base: int) -> None:
        self.acknowledged.add(base)
        if self.config.compact:
            for record in codec.decode(self.content[base]):
                assert record.key is not None
                self.newest[record.key] = max(self.newest.get(record.key, -1), record.offset)


class History:
    def __init__(self, directory: str, seed: int, loop: asyncio.AbstractEventLoop, report: Report) -> None:
        self.random = Random(seed)
        self.loop = loop
        self.report = report
        self.directory = directory
        self.clock = VirtualClock()
        self.disk = ForgetfulDisk(directory)
        self.next_id = 0
        kinds = self.random.sample(list(CONFIGS), 2)
        self.partitions = [Expected(index, kind, self.random) for index, kind in enumerate(kinds)]
        self._open()

    def run(self, lives: int) -> None:
        for _ in range(lives):
            if self.random.random() < 0.7:
                self.disk.lose_power_at(self.random.randint(1, 150), self.random)
            try:
                for _ in range(self.random.randint(5, 60)):
                    self._step()
            except PowerLoss:
                pass
            self._crash_and_recover()

    # -- one life ------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self.flusher = HandFlusher()
        self.store = LocalLogStore(os.path.join(self.directory, "data"), self.clock, self.flusher, self.disk)
        self.logs = [open_log(self.store, TOPIC, TOPIC_ID, each.index, each.config) for each in self.partitions]
        for expected, log in zip(self.partitions, self.logs, strict=True):
            log.wake(partial(self._read_on, expected, log))

    def _step(self) -> None:
        random = self.random
        at = random.randrange(len(self.partitions))
        expected, log = self.partitions[at], self.logs[at]
        dice = random.random()
        if dice < 0.45:
            self._append(expected, log)
        elif dice < 0.60:
            self.flusher.begin(log)
        elif dice < 0.75:
            self.flusher.end(log)
        elif dice < 0.85:
            self.flusher.run_all()
        elif dice < 0.88:
            self._trim(expected, log)
        elif dice < 0.92:
            self._housekeep()
        elif dice < 0.94:
            log.write_checkpoint()
        elif dice < 0.97:
            self._flush(expected, log)
        else:
            self._restart()

    def _append(self, expected: Expected, log: ReplicaLog) -> None:
        producer = self.random.choice([*expected.producers, None])
        if producer is None or expected.is_weak or producer.unanswered() >= IN_FLIGHT_MAX:
            self._send(expected, log, self._batch(expected))
            return
        batch = self._batch(expected, producer)
        producer.sequence = (producer.sequence + read_header(batch).count) % 2**31
        sent = Sent(bytes(batch), Promise())
        producer.recent = [*producer.recent[1 - IN_FLIGHT_MAX :], sent]
        sent.promise = self._send(expected, log, batch, sent)

    def _batch(self, expected: Expected, producer: Producer | None = None) -> bytearray:
        random = self.random
        records = []
        for _ in range(random.randint(1, 5)):
            self.next_id += 1
            filler = random.randbytes(random.choice((0, 20, 200, 900)))
            key = b"key-%d" % random.randrange(6) if expected.config.compact else None
            value = b"%d " % self.next_id + filler if key is None or random.random() < 0.8 else None
            records.append(Record(0, self.clock.now_ms(), key, value))
        if producer is None:
            return codec.encode(records)
        return codec.encode(records, producer_id=producer.number, producer_epoch=0, base_sequence=producer.sequence)

    def _send(
        self, expected: Expected, log: ReplicaLog, batch: bytearray, sent: Sent | None = None
    ) -> Promise[Appended]:
        header = read_header(batch)
        self.report.attempted += header.count
        end = log.end
        promise = self._hand_over(expected, log, batch)
        if log.end > end and sent is not None:
            sent.base_offset = end
        promise.then(lambda done: self._answered(expected, header, done))
        return promise

    def _hand_over(self, expected: Expected, log: ReplicaLog, batch: bytearray) -> Promise[Appended]:
        """Appends. Readers may be woken, or the power may fail, within the call: the batch is expected before it."""
        end = log.end
        placed = bytearray(batch)
        patch_offset(placed, end, read_header(batch).length, 0)
        expected.content[end] = bytes(placed)
        promise = log.append(memoryview(batch), read_header(batch))
        if log.end == end:
            del expected.content[end]
        return promise

    def _answered(self, expected: Expected, header: BatchHeader, promise: Promise[Appended]) -> None:
        answer = promise.value()
        if answer.base_offset not in expected.acknowledged:
            self.report.acknowledged += header.count
        if not expected.is_weak:
            expected.settle(answer.base_offset)

    def _trim(self, expected: Expected, log: ReplicaLog) -> None:
        offset = self.random.randint(log.start, log.high_watermark)
        expected.start_max = max(expected.start_max, offset)
        expected.trimmed = max(expected.trimmed, log.trim(offset).value())

    def _flush(self, expected: Expected, log: ReplicaLog) -> None:
        self.flusher.is_willing = True
        log.flush().value()
        self.flusher.is_willing = False
        for base in expected.content:
            expected.settle(base)

    def _housekeep(self) -> None:
        self.clock.advance(self.random.choice((1, 60, 200)))
        self.flusher.is_willing = True
        self.loop.run_until_complete(self.store.housekeep())
        self.flusher.is_willing = False

    def _restart(self) -> None:
        self.flusher.run_all()
        self.flusher.is_willing = True
        before = [(log.start, log.end) for log in self.logs]
        self.loop.run_until_complete(self.store.close())
        self._open()
        assert self.store.scanned_bytes == 0, "a clean restart has nothing to scan"
        assert [(log.start, log.end) for log in self.logs] == before
        for expected in self.partitions:
            for base in expected.content:
                expected.settle(base)

    def _read_on(self, expected: Expected, log: ReplicaLog) -> None:
        """A consumer that reads whatever is published, and never forgets."""
        offset = max(expected.seen_to, log.start)
        while offset < log.high_watermark:
            piece = log.read(offset, self.random.choice((1, 500, 5000))).value()
            assert piece.size, f"nothing to read at {offset}, below {log.high_watermark}"
            for base, batch in _split(piece.to_bytes()):
                assert read_header(batch).last_offset >= offset
                assert expected.config.compact or batch == expected.content[base]
                expected.seen[base] = batch
            assert piece.next_offset > offset
            offset = piece.next_offset
        expected.seen_to = offset

    # -- after a crash -------------------------------------------------------------------------------------------------

    def _crash_and_recover(self) -> None:
        for expected, log in zip(self.partitions, self.logs, strict=True):
            expected.start_max = max(expected.start_max, log.start)
        while True:
            self.disk = self.disk.crash(self.random)
            self.report.crashes += 1
            found = self._snapshot()
            if self.random.random() < 0.3:
                self.disk.lose_power_at(self.random.randint(1, 25), self.random)
            try:
                self._open()
                break
            except PowerLoss:
                continue
        try:
            for expected, log in zip(self.partitions, self.logs, strict=True):
                self._check(expected, log)
                self._check_set_aside(log, found)
            for expected, log in zip(self.partitions, self.logs, strict=True):
                self._repeat(expected, log)
        except PowerLoss:
            # The power failed once more before the clients were back: the next life begins with what this one left.
            self._crash_and_recover()

    def _snapshot(self) -> dict[str, bytes]:
        found = {}
        for parent, _, names in os.walk(os.path.join(self.directory, "data", "logs")):
            for name in names:
                if name.endswith(".log"):
                    with open(os.path.join(parent, name), "rb") as file:
                        found[os.path.join(parent, name)] = file.read()
        return found

    def _check(self, expected: Expected, log: ReplicaLog) -> None:
        where = f"{expected.kind}: {log.start} to {log.end}"
        assert log.high_watermark == log.end and log.start <= log.end, where
        assert not log.damage.ranges, f"{where}: a crash is no damage: {log.damage.ranges}"
        assert log.start >= (min(expected.trimmed, log.end) if expected.is_weak else expected.trimmed), where
        for segment in log.segments:
            assert os.stat(segment.path).st_size == segment.size, f"{segment.path} was not cut"
        found = self._read_all(log)
        if expected.config.compact:
            self._check_compacted(expected, log, found)
        else:
            self._check_dense(expected, log, found)
        if expected.is_weak:
            expected.seen = {}
        expected.content = found
        expected.seen.update(found)
        expected.seen_to = log.end
        expected.acknowledged = set()
        expected.trimmed = expected.start_max = log.start
        for base in found:
            expected.settle(base)

    def _read_all(self, log: ReplicaLog) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        offset = log.start
        while offset < log.end:
            piece = log.read(offset, self.random.choice((1, 3000, 1 << 20))).value()
            if not piece.size:
                break
            for base, batch in _split(piece.to_bytes()):
                if base in found:
                    self.report.duplicated += read_header(batch).count
                found[base] = batch
            offset = piece.next_offset
        return found

    def _check_dense(self, expected: Expected, log: ReplicaLog, found: dict[int, bytes]) -> None:
        if found:
            assert min(found) <= log.start
        next_offset = min(found, default=log.end)
        for base, batch in found.items():
            assert base == next_offset, f"{expected.kind}: a hole from {next_offset} to {base}"
            assert batch == expected.content.get(base), f"{expected.kind}: {base} holds other bytes than were sent"
            next_offset = read_header(batch).next_offset
        assert next_offset == log.end
        for base in expected.acknowledged:
            header = read_header(expected.content[base])
            if header.last_offset >= expected.start_max and base not in found:
                self.report.lost += header.count
                raise AssertionError(f"{expected.kind}: {base} was acknowledged; {log.start} to {log.end} is there")
        if not expected.is_weak:
            for base, batch in expected.seen.items():
                if read_header(batch).last_offset >= expected.start_max:
                    assert found.get(base) == batch, f"{expected.kind}: a reader saw {base} before"

    def _check_compacted(self, expected: Expected, log: ReplicaLog, found: dict[int, bytes]) -> None:
        records = {record.offset: record for batch in found.values() for record in codec.decode(batch)}
        assert list(records) == sorted(records)
        sent = {record.offset: record for batch in expected.content.values() for record in codec.decode(batch)}
        for offset, record in records.items():
            assert record == sent.get(offset), f"{offset} holds another record than was sent"
        horizon = self.clock.now_ms() - DELETE_RETENTION_MS
        for base in expected.acknowledged:
            for record in codec.decode(expected.content[base]):
                if record.offset < expected.start_max or record.offset in records:
                    continue
                assert record.key is not None
                is_replaced = expected.newest[record.key] > record.offset
                is_forgotten = record.value is None and record.timestamp < horizon
                if not is_replaced and not is_forgotten:
                    self.report.lost += 1
                    raise AssertionError(f"{record.offset} was the newest record of {record.key!r}, and is gone")

    def _check_set_aside(self, log: ReplicaLog, before: dict[str, bytes]) -> None:
        """What recovery took out of the log is kept, unless it lies below the start or is nothing but zeros."""
        directory = os.path.join(self.directory, "data", "set-aside")
        kept = set()
        for name in os.listdir(directory) if os.path.isdir(directory) else ():
            with open(os.path.join(directory, name), "rb") as file:
                kept.add(file.read())
        own = sorted(path for path in before if os.path.dirname(path) == log.directory)
        for at, path in enumerate(own):
            old, size = before[path], os.stat(path).st_size if os.path.exists(path) else None
            if size is None:
                behind = int(os.path.basename(own[at + 1])[:20]) if at + 1 < len(own) else None
                is_trimmed = behind is not None and behind <= log.start
                assert is_trimmed or old in kept or not old, f"{path} is gone and was not set aside"
                continue
            with open(path, "rb") as file:
                assert file.read() == old[:size]
            assert not old[size:].strip(b"\0") or old[size:] in kept, f"what was cut from {path} was not set aside"

    def _repeat(self, expected: Expected, log: ReplicaLog) -> None:
        """Clients come back and send again what they had no answer for, and perhaps some that they had."""
        if expected.is_weak:
            return
        self.flusher.is_willing = True
        for producer in expected.producers:
            count = self.random.randint(producer.unanswered(), len(producer.recent))
            for sent in producer.recent[len(producer.recent) - count :]:
                self._send_again(expected, log, sent)
        self.flusher.is_willing = False

    def _send_again(self, expected: Expected, log: ReplicaLog, sent: Sent) -> None:
        was_answered = sent.promise.done
        batch = bytearray(sent.batch)
        header = read_header(batch)
        end = log.end
        answer = self._hand_over(expected, log, batch).value()
        if was_answered:
            assert answer.duplicate and answer.base_offset == sent.base_offset, "an answered batch was stored twice"
            return
        if answer.duplicate:
            stored = expected.content.get(answer.base_offset)
            if stored is not None and not expected.config.compact:
                assert stored[PREFIX_BYTES + 4 :] == sent.batch[PREFIX_BYTES + 4 :]
        else:
            assert answer.base_offset == end
            expected.settle(end)
        self.report.acknowledged += header.count
        sent.base_offset = answer.base_offset
        sent.promise = Promise.of(answer)


def _split(data: bytes) -> list[tuple[int, bytes]]:
    batches, position = [], 0
    while position < len(data):
        header = read_header(data, position)
        batches.append((header.base_offset, data[position : position + header.size]))
        position += header.size
    return batches
