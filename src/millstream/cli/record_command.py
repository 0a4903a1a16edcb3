"""One record, passed to a command: the value on standard input, the rest in the environment.

    MILLSTREAM_RECORD_TOPIC, _PARTITION, _OFFSET, _TIMESTAMP      its position, and its time (milliseconds)
    MILLSTREAM_RECORD_GROUP, _ATTEMPT                             the queue, and the number of the attempt (from 1)
    MILLSTREAM_RECORD_KEY                                         not set if there is no key
    MILLSTREAM_RECORD_HEADERS                                     all headers, as JSON: [[name, value], ...]
    MILLSTREAM_RECORD_HEADER_<NAME>                               each: the name in capitals, with _ for all but A-Z 0-9

A variable cannot hold a zero byte: a header with one is only in the JSON, a key only in `MILLSTREAM_RECORD_KEY_BASE64`.

The command's exit code is the acknowledgement: 0 accepts the record, 2 rejects it, anything else releases it. It is
also the reason in the record's dead letter.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence

from millstream.cli.consume import text_of
from millstream.client.share import ACCEPT, REJECT, RELEASE, Delivery, Reply
from millstream.config import RECORD_PREFIX

ANSWERS = {0: ACCEPT, 1: RELEASE, 2: REJECT}
KILL_SECONDS = 5.0
"""Between the request to end and the kill."""


def variables(delivery: Delivery, topic: str, group: str) -> dict[bytes, bytes]:
    record = delivery.record
    found: dict[str, bytes | None] = {
        "TOPIC": topic.encode(),
        "PARTITION": b"%d" % delivery.partition,
        "OFFSET": b"%d" % record.offset,
        "TIMESTAMP": b"%d" % record.timestamp,
        "GROUP": group.encode(),
        "ATTEMPT": b"%d" % delivery.attempt,
        "KEY": record.key,
        "HEADERS": json.dumps([[name, text_of(value)] for name, value in record.headers]).encode(),
    }
    if record.key is not None and b"\0" in record.key:
        found["KEY_BASE64"] = base64.b64encode(record.key)
    for name, value in record.headers:
        found["HEADER_" + re.sub("[^A-Z0-9]", "_", name.upper())] = value
    return {
        (RECORD_PREFIX + name).encode(): value
        for name, value in found.items()
        if value is not None and b"\0" not in value
    }


class RecordCommand:
    """A command that processes one record. Runs in a thread of its own."""

    def __init__(self, command: Sequence[str], delivery: Delivery, topic: str, group: str) -> None:
        self.delivery = delivery
        self.has_lease = True
        """Until another worker may get the record."""
        self._command = command
        self._topic = topic
        self._group = group
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, timeout_seconds: float | None) -> Reply:
        """The acknowledgement of the record."""
        where = f"{self._topic} partition {self.delivery.partition} offset {self.delivery.record.offset}"
        inherited = {name: value for name, value in os.environb.items() if not name.startswith(RECORD_PREFIX.encode())}
        try:
            # In a process group of its own: Ctrl-C asks us to finish, and running commands need time for that.
            process = self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                env=inherited | variables(self.delivery, self._topic, self._group),
                process_group=0,
            )
        except OSError as error:
            print(f"millstream: {where}: {self._command[0]} cannot be run: {error.strerror}", file=sys.stderr)
            return Reply(RELEASE, reason=f"released: {self._command[0]} cannot be run: {error.strerror}")
        try:
            process.communicate(self.delivery.record.value or b"", timeout_seconds)
        except subprocess.TimeoutExpired:
            print(f"millstream: {where}: took longer than {timeout_seconds:g} s and is stopped", file=sys.stderr)
            self._end(process)
            return Reply(RELEASE, reason=f"released: {self._command[0]} took longer than {timeout_seconds:g} s")
        code = process.returncode
        verb = ANSWERS.get(code, RELEASE)
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        done = "rejected" if verb == REJECT else "released"
        return Reply(verb, reason="" if verb == ACCEPT else f"{done} by {self._command[0]} ({how})")

    def stop(self) -> None:
        """Asks it to end, with all its child processes."""
        if self._process is not None:
            self._signal(self._process, signal.SIGTERM)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        self._signal(process, signal.SIGTERM)
        try:
            process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self._signal(process, signal.SIGKILL)
            process.wait()
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()

    def _signal(self, process: subprocess.Popen[bytes], number: int) -> None:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
