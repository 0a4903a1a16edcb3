"""Locks for one process at a time: on a checkpoint, whose batches two processes could not tell apart, and on
files that several drivers of one lake change.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from millstream.core.errors import MillstreamError

FILE = ".lock"


class PipelineRunning(MillstreamError):
    """Another process holds the checkpoint's lock."""

    def __init__(self, name: str, checkpoint: Path, pid: str) -> None:
        super().__init__(
            f"the pipeline {name} is running already (process {pid}, checkpoint {checkpoint}); stop that one first, "
            "or give this one a checkpoint and sinks of its own"
        )


class CheckpointUnusable(MillstreamError):
    """The checkpoint's folder cannot be created or written."""


@contextmanager
def locked(path: str) -> Iterator[None]:
    """Waits for the lock. The kernel releases it when its process ends, however that ends."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


class CheckpointLock:
    """Held inside `with`; the kernel releases it when the process ends, however it ends."""

    def __init__(self, name: str, checkpoint: Path) -> None:
        self._name = name
        self._checkpoint = checkpoint
        self._fd = -1

    def __enter__(self) -> Self:
        try:
            self._checkpoint.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._checkpoint / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise CheckpointUnusable(
                f"the checkpoint {self._checkpoint} cannot be used ({error.strerror}); name another folder with "
                'checkpoint = "..." in the pipeline\'s file'
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._fd, 32).decode(errors="replace").strip() or "unknown"
            os.close(self._fd)
            raise PipelineRunning(self._name, self._checkpoint, holder) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, b"%d\n" % os.getpid(), 0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)
