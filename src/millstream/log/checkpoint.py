"""The checkpoint of one log: the recovery point, and the state that a scan of the log cannot restore.

One line: a CRC-32 and a JSON array. The log syncs all data that a checkpoint covers before it writes the checkpoint.
The fields are the first readable offset, the segment and the position up to which the log is sound (the recovery
point), the next offset there, the table of idempotent producers at that offset, base offset and size of each closed
segment, and the history of leader epochs (omitted while there is only one).

The sizes tell a hole from a gap. Recovery compares them with the files. A listed segment that is missing or too short
is a hole: retention moves the start before it removes a segment, and compaction removes a segment from the list before
it replaces it. A segment that is known to be missing stays listed, so that later starts report it too.

Crash policy: replaced atomically. If the checkpoint is missing or damaged, recovery scans the whole log. Earlier
versions wrote no sizes. They set a checkpoint with sizes aside, and scan the log.
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import dataclass, field

from millstream.core.disk import Disk

FILE_NAME = "checkpoint"


@dataclass(slots=True)
class Checkpoint:
    start: int = 0
    segment: int = 0
    position: int = 0
    next_offset: int = 0
    producers: list[list[object]] = field(default_factory=list)
    closed: list[list[int]] | None = None
    """Base offset and size of each closed segment; None if an earlier version wrote the checkpoint."""
    epochs: list[list[int]] = field(default_factory=list)
    """From `Epochs.to_state`."""

    def write(self, disk: Disk, directory: str) -> None:
        fields = [self.start, self.segment, self.position, self.next_offset, self.producers]
        if self.closed is not None:
            fields.append(self.closed)
            if self.epochs:
                fields.append(self.epochs)
        text = json.dumps(fields, separators=(",", ":")).encode()
        disk.replace(os.path.join(directory, FILE_NAME), b"%08x %s\n" % (zlib.crc32(text), text))

    @classmethod
    def read(cls, directory: str) -> Checkpoint | None:
        """None if there is no checkpoint; raises ValueError if it is damaged."""
        try:
            with open(os.path.join(directory, FILE_NAME), "rb") as file:
                line = file.read()
        except FileNotFoundError:
            return None
        crc, _, text = line.rstrip(b"\n").partition(b" ")
        if int(crc, 16) != zlib.crc32(text):
            raise ValueError("its checksum does not match")
        return cls(*json.loads(text))
