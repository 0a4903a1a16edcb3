"""`millstream serve` as the demo runs it: a separate process, to kill and restart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

START_SECONDS_MAX = 15.0
COMMAND_SECONDS_MAX = 60.0


class Broker:
    """`millstream serve` as a separate process, which keeps its ports across restarts."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process: subprocess.Popen[str] | None = None
        self._log: IO[str] = (directory / "broker.log").open("a")
        self.kafka = self.http = "127.0.0.1:0"

    def start(self) -> float:
        """Seconds until it is ready."""
        started = time.monotonic()
        command = [sys.executable, "-m", "millstream", "serve", "--data", str(self._directory / "data")]
        command += ["--kafka", self.kafka, "--http", self.http]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("MILLSTREAM_")}
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._log, text=True, cwd=self._directory, env=environ
        )
        assert self._process.stdout is not None
        killer = threading.Timer(START_SECONDS_MAX, self._process.kill)
        killer.start()
        line = self._process.stdout.readline()
        killer.cancel()
        if not line.startswith("ready "):
            raise RuntimeError(f"the broker did not start; its log:\n{(self._directory / 'broker.log').read_text()}")
        addresses = dict(part.split("=", 1) for part in line.split()[1:])
        self.kafka, self.http = addresses["kafka"], addresses["http"]
        return time.monotonic() - started

    def end(self, number: signal.Signals) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        return self._process.wait(20)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def command(self, *arguments: str, stdin: str | None = None, seconds_max: float = COMMAND_SECONDS_MAX) -> str:
        """Runs our own command line against this broker."""
        command = [sys.executable, "-m", "millstream", *arguments, "--broker", self.kafka]
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, errors="replace", timeout=seconds_max
        )
        if done.returncode != 0:
            raise RuntimeError(f"millstream {' '.join(arguments)} failed: {done.stderr.strip()}")
        return done.stdout
