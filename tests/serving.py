"""A real broker in a process of its own, for tests that speak to it through sockets or kill it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

from millstream.testing.held_port import HeldPort

MILLSTREAM = str(Path(sys.executable).with_name("millstream"))


class ServedBroker:
    """`millstream serve` over a directory, or another store, that outlives the process: start, kill, start again."""

    def __init__(
        self, directory: str | Path, *flags: str, kafka: str = "127.0.0.1:0", store: str | None = None
    ) -> None:
        self.directory = str(directory)
        self.store = store or f"file:{directory}"
        self._held: list[HeldPort] = []
        """Every port that is the kernel's choice: it stays the same, and this broker's, through kills and starts."""
        self.flags = [self._hold(flag) for flag in flags]
        self.address = self._hold(kafka)
        self.http = self._hold("127.0.0.1:0")
        self.doors: dict[str, str] = {}
        """The address of every open door, by name."""
        self.process: subprocess.Popen[str] | None = None
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed in __exit__)

    def start(self) -> ServedBroker:
        """Returns when the broker accepts connections."""
        command = [MILLSTREAM, "serve", "--store", self.store, "--kafka", self.address, "--http", self.http]
        self.process = subprocess.Popen(
            [*command, *self.flags],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "MILLSTREAM_LOG_FORMAT": "text", "MILLSTREAM_LOOP_WATCH_MS": "20"},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.startswith("ready "):
            self.process.wait(10)
            raise AssertionError(f"the broker did not start: {line!r}\n{self.errors()}")
        self.doors = dict(part.split("=", 1) for part in line.split()[1:])
        self.address, self.http = self.doors["kafka"], self.doors["http"]
        return self

    def _hold(self, address: str) -> str:
        host, _, port = address.rpartition(":")
        if port != "0":
            return address
        self._held.append(HeldPort(host))
        return self._held[-1].address

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def kill(self) -> None:
        """Sends SIGKILL: the broker flushes nothing and tells no client."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """A clean shutdown; answers with the exit code."""
        return self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        code = self.process.wait(30)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def busy_seconds_max(self) -> float:
        """The longest that something held the broker's event loop, in CPU time: other processes do not count."""
        with urllib.request.urlopen(f"http://{self.http}/metrics", timeout=20) as answer:
            text = answer.read().decode()
        (value,) = re.findall(r"^millstream_event_loop_busy_seconds_max (\S+)$", text, re.MULTILINE)
        return float(value)

    def errors(self) -> str:
        """What the broker has logged so far."""
        file = self._errors.fileno()
        # Without moving to the start: the broker writes where the file stands, for it is the same open file.
        return os.pread(file, os.fstat(file).st_size, 0).decode()

    def __enter__(self) -> ServedBroker:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        if self.is_running:
            self.stop()
        for held in self._held:
            held.release()
        self._errors.close()
