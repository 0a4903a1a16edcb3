"""A PostgreSQL of one's own: a throw-away cluster on a Unix socket and a free loopback port.

`initdb` refuses to run as root. There it runs as the user `postgres`, which Debian's package makes.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from millstream.testing.held_port import HeldPort

START_SECONDS_MAX = 30
SETTINGS = {
    "fsync": "off",  # no test here pulls the plug
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "shared_buffers": "64MB",
    "max_connections": "40",
    "listen_addresses": "127.0.0.1",
    "timezone": "Asia/Kolkata",  # far from UTC, so that nothing works by accident
}


DURABLE = {"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"}
"""For measuring. What only dies by a signal needs no fsync, but must have written what it acknowledged."""
KILLABLE = {"synchronous_commit": "on", "full_page_writes": "on"}


class PrivatePostgres:
    """Runs between `with` and its end; `url` has a password, and the server insists on it."""

    user = "mill"
    password = "s3cret/wörd"

    def __init__(self, **settings: str) -> None:
        self._settings = {**SETTINGS, **settings}
        self._databases = itertools.count()
        self._binaries = _find_binaries()
        self._as_user: list[str] = []
        # Not pytest's own directory: another user must be able to enter it, and a socket's path has 107 bytes.
        self._home = Path(tempfile.mkdtemp(prefix="mill-pg-"))
        self._held = HeldPort()  # through kills and restarts
        self.port = self._held.port
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return self.url_of("postgres")

    def url_of(self, database: str) -> str:
        return f"postgresql://{self.user}:s3cret%2Fw%C3%B6rd@127.0.0.1:{self.port}/{database}"

    def new_database(self) -> str:
        """The URL of an empty database."""
        import psycopg

        name = f"made_{next(self._databases)}"
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self.url_of(name)

    @property
    def socket_url(self) -> str:
        return f"postgresql://{self.user}:s3cret%2Fw%C3%B6rd@/postgres?host={self._home}&port={self.port}"

    def __enter__(self) -> PrivatePostgres:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        secret = self._home / "password"
        secret.write_text(self.password)
        if os.geteuid() == 0:
            entry = pwd.getpwnam("postgres")
            for path in (self._home, secret):
                os.chown(path, entry.pw_uid, entry.pw_gid)
            self._as_user = ["setpriv", f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", "--clear-groups"]
        data = self._home / "data"
        self._run(
            f"{self._binaries}/initdb",
            f"--pgdata={data}",
            f"--username={self.user}",
            f"--pwfile={secret}",
            "--auth=scram-sha-256",
            "--encoding=UTF8",
            "--locale=C.UTF-8",
            "--no-sync",
        )
        self._serve()

    def _serve(self) -> None:
        home = str(self._home)
        command = [f"{self._binaries}/postgres", "-D", f"{home}/data", "-p", str(self.port), "-k", home]
        settings = [f"--{name}={value}" for name, value in self._settings.items()]
        with open(self._home / "log", "ab") as log:
            self._process = subprocess.Popen([*self._as_user, *command, *settings], stdout=log, stderr=log, cwd="/")
        self._wait()

    def speak_tls(self) -> Path:
        """Serves TLS from now on, with a certificate for `localhost`; returns the path of its CA."""
        import psycopg

        data, trusted = self._home / "data", self._home / "trusted.crt"
        names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
        made = ["-keyout", data / "server.key", "-out", data / "server.crt"]
        self._run("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names, *map(str, made))
        (data / "server.key").chmod(0o600)
        shutil.copy(data / "server.crt", trusted)
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET ssl = on")
            connection.execute("SELECT pg_reload_conf()")
        return trusted

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """As by `kill -9` of all its processes: of the first, and of those that would notice and clean up."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)  # so that it has no more children than are seen
        children = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self._process.wait()
        psutil.wait_procs(children, START_SECONDS_MAX)

    def restart(self) -> None:
        """After `kill`, on the same port with the same data."""
        (self._home / "data" / "postmaster.pid").unlink(missing_ok=True)
        self._serve()

    def _run(self, *command: str) -> None:
        done = subprocess.run(
            [*self._as_user, *command], capture_output=True, text=True, timeout=START_SECONDS_MAX, cwd="/"
        )
        if done.returncode != 0:
            raise RuntimeError(f"{command[0]} failed: {done.stderr or done.stdout}")

    def _wait(self) -> None:
        import psycopg

        assert self._process is not None
        deadline = time.monotonic() + START_SECONDS_MAX
        while True:
            try:
                psycopg.connect(self.url, connect_timeout=2).close()
                return
            except psycopg.OperationalError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((self._home / "log").read_text()) from None
            time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)  # at once: the data is thrown away
            try:
                self._process.wait(START_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._held.release()
        shutil.rmtree(self._home, ignore_errors=True)


def _find_binaries() -> str:
    """The folder with initdb: behind a link in PATH, or where Debian puts it."""
    found = shutil.which("initdb")
    folders = [os.path.dirname(os.path.realpath(found))] if found else []
    folders += sorted(glob.glob("/usr/lib/postgresql/*/bin"), key=lambda folder: int(folder.split("/")[4]))[::-1]
    for folder in folders:
        if os.path.exists(f"{folder}/initdb") and os.path.exists(f"{folder}/postgres"):
            return folder
    raise RuntimeError("no PostgreSQL: initdb is neither in PATH nor in /usr/lib/postgresql; `make setup` installs it")


@pytest.fixture(scope="session")
def postgres() -> Iterator[PrivatePostgres]:
    with PrivatePostgres() as server:
        yield server
