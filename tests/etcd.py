"""A private etcd on loopback: one member, or a cluster of three. It can be killed and started again.

etcd has no option to skip its syncs before 3.5, so the data directory is on a disk and its syncs are real.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream.testing.held_port import HeldPort

START_SECONDS_MAX = 30
SETTINGS = {
    "heartbeat-interval": "50",
    "election-timeout": "500",
    "log-level": "warn",
    "snapshot-count": "20000",
}


class PrivateEtcd:
    """One member. Runs between `with` and its end, with a data directory that survives `kill`."""

    def __init__(self, name: str = "one", scheme: str = "http", **settings: str) -> None:
        self._name = name
        self._scheme = scheme
        self._settings = {key.replace("_", "-"): value for key, value in settings.items()}
        self.home = Path(tempfile.mkdtemp(prefix="mill-etcd-"))
        self._held = HeldPort(), HeldPort()  # through kills and restarts
        self.address = self._held[0].address
        self.peer = f"{name}=http://{self._held[1].address}"
        self.peers = self.peer
        self._prefixes = itertools.count()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"etcd://{self.address}"

    def new_prefix(self) -> str:
        """The URL of a prefix without keys."""
        return f"{self.url}/test-{os.getpid()}-{next(self._prefixes)}"

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Begins to start; `wait` returns when it serves."""
        client, peer = f"{self._scheme}://{self.address}", self.peer.partition("=")[2]
        settings = {
            **SETTINGS,
            "name": self._name,
            "data-dir": str(self.home / "data"),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": self.peers,
            **({"log-level": "info"} if self._scheme == "https" else {}),
            **self._settings,
        }
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD")}
        with open(self.home / "log", "ab") as log:
            command = ["etcd", *(f"--{name}={value}" for name, value in settings.items())]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def wait(self) -> None:
        """Returns when it has a leader, or with TLS when it accepts connections."""
        assert self._process is not None
        deadline = time.monotonic() + START_SECONDS_MAX
        while not self._is_healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self.home / "log").read_text())
            time.sleep(0.02)

    def _is_healthy(self) -> bool:
        if self._scheme == "https":
            return "serving client requests" in (self.home / "log").read_text()
        try:
            with urllib.request.urlopen(f"http://{self.address}/health", timeout=5) as answer:
                return bool(json.load(answer)["health"] == "true")
        except OSError:
            return False

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """It accepts connections and does not answer."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        for state in Path(f"/proc/{self._process.pid}/task").glob("*/stat"):
            while state.read_text().rpartition(")")[2].split()[0] != "T":
                time.sleep(0.001)  # a running thread stops a moment later

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def restart(self) -> None:
        """After `kill`, on the same port with the same data."""
        self.start()
        self.wait()

    def lose_data(self) -> None:
        """After `kill`: the next start has no keys, and its revisions begin at 1."""
        shutil.rmtree(self.home / "data")

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """A call of etcd's HTTP gateway: `etcdctl` is in a package of its own."""
        request = urllib.request.Request(f"http://{self.address}/v3/{path}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def check_passwords(self, user: str, password: str, prefix: str) -> None:
        """From now on. The user may read and write keys under a prefix; the user `guest` has the password `guest`."""
        start, end = prefix.encode(), prefix[:-1].encode() + bytes([ord(prefix[-1]) + 1])
        right = {"permType": "READWRITE", "key": _base64(start), "range_end": _base64(end)}
        for role in ("root", "writer"):
            self.post("auth/role/add", name=role)
        self.post("auth/role/grant", name="writer", perm=right)
        for name, secret, role in (("root", password, "root"), (user, password, "writer"), ("guest", "guest", "")):
            self.post("auth/user/add", name=name, password=secret)
            if role:
                self.post("auth/user/grant", user=name, role=role)
        self.post("auth/enable")

    def bytes_in_use(self) -> int:
        return int(self.post("maintenance/status")["dbSizeInUse"])

    def __enter__(self) -> PrivateEtcd:
        try:
            self.start()
            self.wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_running:
            self.kill()
        for held in self._held:
            held.release()
        shutil.rmtree(self.home, ignore_errors=True)


class EtcdCluster:
    """Three members; `url` names them all."""

    def __init__(self) -> None:
        self.members = [PrivateEtcd(name) for name in ("one", "two", "three")]
        for member in self.members:
            member.peers = ",".join(each.peer for each in self.members)

    @property
    def url(self) -> str:
        return f"etcd://{','.join(member.address for member in self.members)}"

    def leader(self) -> PrivateEtcd:
        for member in self.members:
            status = member.post("maintenance/status")
            if status["leader"] == status["header"]["member_id"]:
                return member
        raise RuntimeError("the cluster has no leader")

    def __enter__(self) -> EtcdCluster:
        try:
            for member in self.members:
                member.start()
            for member in self.members:
                member.wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as ending:
            for member in self.members:
                ending.callback(member.__exit__)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.fixture(scope="session")
def etcd() -> Iterator[PrivateEtcd]:
    """One for all tests of a process that do not kill it; each uses a prefix of its own."""
    with PrivateEtcd() as server:
        yield server
