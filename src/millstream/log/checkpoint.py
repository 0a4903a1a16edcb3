"""The checkpoint of one log: from where recovery has to look, and what it cannot find by looking.

A JSON object and its CRC-32 on one line, in a file that is replaced as a whole. Everything that it speaks of is synced
before it is written. It holds the first readable offset, the segment and the position up to which the log is known
to be sound, the offset that comes next there, the table of idempotent producers as of that offset, base offset and size
of each closed segment, and the history of leader epochs (left out while there was only one).

The sizes tell a hole from a gap. Recovery compares them with the files: a segment that is missing or too short was
neither removed by retention, which first moves the start, nor by compaction, which first takes the segments that it
replaces out of the list. A segment that is known to be missing stays in the list, so that every later start knows it.

Crash policy: replaced atomically. If it is missing or damaged, the log is scanned from its beginning instead. Earlier
versions wrote no sizes. They set a checkpoint with sizes aside, and scan the log.
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import dataclass, field

from millstream.log.disk import Disk

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
    """As `Epochs.to_state` gives them."""

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
        """None if there is none; raises ValueError if there is one that cannot be trusted."""
        try:
            with open(os.path.join(directory, FILE_NAME), "rb") as file:
                line = file.read()
        except FileNotFoundError:
            return None
        crc, _, text = line.rstrip(b"\n").partition(b" ")
        if int(crc, 16) != zlib.crc32(text):
            raise ValueError("its checksum does not match")
        return cls(*json.loads(text))
