"""The checkpoint of one log: from where recovery has to look, and what it cannot find by looking.

A JSON object and its CRC-32 on one line, in a file that is replaced as a whole. Everything that it speaks of is synced
before it is written. It holds the first readable offset, the segment and the position up to which the log is known
to be sound, the offset that comes next there, and the table of idempotent producers as of that offset.

Crash policy: replaced atomically. If it is missing or damaged, the log is scanned from its beginning instead.
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

    def write(self, disk: Disk, directory: str) -> None:
        text = json.dumps(
            [self.start, self.segment, self.position, self.next_offset, self.producers], separators=(",", ":")
        ).encode()
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
