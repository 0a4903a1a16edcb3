"""`file:DIR`: segment files, with metadata in SQLite beside them.

DIR/lock                        held by the broker that has the directory open
DIR/meta.db                     topics, configurations, committed offsets (see `sqlite_meta.py`)
DIR/pair                        instead of meta.db, if the metadata are in another store (see `pair.py`)
DIR/logs/TOPIC-ID/PARTITION/    the segments of one partition (see `log/`)
DIR/reserve                     space reserved for a full disk (see `log/reserve.py`)
DIR/trash/                      logs of deleted topics until they are removed; emptied at every start
DIR/set-aside/                  files that recovery did not recognise; never touched again

A partition's directory is durable before the topic's key in `meta.db` lists the partition, and is removed only after
the key is. So a directory that is missing at start was lost with its records, and the partition refuses reads and
appends (`log/lost.py`). A kill between the two steps of a creation leaves empty directories without a key; the next
start removes them.

Directories have mode 0700, files 0600. The start restricts files that an earlier version created with wider modes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import shutil
from functools import partial

from millstream.core.clock import Clock
from millstream.core.disk import DIRECTORY_MODE, FILE_MODE, Disk, restrict, restrict_tree
from millstream.core.errors import Code, RequestError, StartupError, StoreInUse
from millstream.core.logs import Damped
from millstream.core.promise import Promise
from millstream.log.compaction import compact
from millstream.log.config import LogConfig
from millstream.log.flusher import Flusher
from millstream.log.lost import LostLog
from millstream.log.recovery import Recovery
from millstream.log.replica import ReplicaLog
from millstream.log.retention import expire
from millstream.log.segment import BrokenSegment
from millstream.stores import pair
from millstream.stores.base import MetaStore

logger = logging.getLogger(__name__)

OWN_DIRECTORIES = ("logs", "trash", "set-aside")
OWN_FILES = ("lock", "meta.db", "meta.db-wal", "meta.db-shm", "reserve", pair.FILE_NAME)
TOPIC_LETTERS_MAX = 246
ASIDE_LETTERS_MAX = 230
"""File systems limit a name to 255 bytes."""


class DirectoryLock:
    """An exclusive lock, which the kernel releases however the process ends."""

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, "lock")
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(OSError):  # a full disk: the lock holds; the pid is only informative
                os.ftruncate(self._fd, 0)
                os.pwrite(self._fd, b"%d\n" % os.getpid(), 0)
        except BlockingIOError:
            holder = os.read(self._fd, 32).decode(errors="replace").strip() or "unknown"
            os.close(self._fd)
            raise StoreInUse(directory, holder) from None
        except OSError:
            os.close(self._fd)
            raise

    def release(self) -> None:
        os.close(self._fd)


class LocalLogStore:
    atomic = False
    tells_loss = True
    can_follow = True

    def __init__(
        self, directory: str, clock: Clock, flusher: Flusher, disk: Disk | None = None, has_meta: bool = True
    ) -> None:
        """`has_meta`: the metadata are in the same directory."""
        self._has_meta = has_meta
        self.location = self.directory = os.path.abspath(directory)
        self._clock = clock
        self._flusher = flusher
        self._disk = disk or Disk()
        self._logs: dict[tuple[str, str], dict[int, ReplicaLog | LostLog]] = {}
        self._lock: DirectoryLock | None = None
        self._creating = asyncio.Lock()
        """One creation at a time: a rollback must not remove directories that another call relies on."""
        self._damped = Damped(__name__)
        self.scanned_logs = self.scanned_bytes = 0
        self.cut_logs = self.cut_bytes = 0

    async def start(self) -> None:
        return None

    async def match(self, meta: MetaStore) -> None:
        if not self._has_meta:
            await pair.match(meta, self.directory, self._disk)

    def prepare(self, topic_id: str, partitions: int) -> Promise[None]:
        return Promise.of(None)

    def lock(self) -> None:
        if self._has_meta and os.path.exists(self._path(pair.FILE_NAME)):
            raise StartupError(
                f"the logs in {self.directory} have their metadata in another store: give its URL to --meta"
            )
        try:
            self._disk.make_directory(self.directory)
            self._lock = DirectoryLock(self.directory)
            self._close_to_others()
            self._disk.make_room_if_full()
            self._disk.make_directory(self._path("logs"))
            # A killed process may have created them without a sync.
            self._disk.sync_directory(self.directory)
            with contextlib.suppress(PermissionError):  # not ours: then this process has created nothing in it
                self._disk.sync_directory(os.path.dirname(self.directory))
        except OSError as error:
            self.unlock()
            raise StartupError(f"{self.directory} cannot be used as a data directory: {error}") from error
        if os.path.isdir(self._path("trash")):
            self._disk.remove_tree(self._path("trash"))

    def _close_to_others(self) -> None:
        """Restricts the modes of an earlier version. The directory itself may be the user's, with other files."""
        for name in OWN_DIRECTORIES:
            restrict_tree(self._path(name))
        for name in OWN_FILES:
            restrict(self._path(name), FILE_MODE)
        if set(os.listdir(self.directory)) <= {*OWN_DIRECTORIES, *OWN_FILES}:
            restrict(self.directory, DIRECTORY_MODE)

    def _path(self, *parts: str) -> str:
        return os.path.join(self.directory, *parts)

    def _topic_path(self, topic: str, topic_id: str) -> str:
        """A topic's name has up to 249 characters. A directory's has room for 246 and part of the id."""
        return self._path("logs", f"{topic[:TOPIC_LETTERS_MAX]}-{topic_id[:8]}")

    async def create(self, topic: str, topic_id: str, partitions: range) -> None:
        work = partial(self._make_directories, self._topic_path(topic, topic_id), partitions)
        try:
            async with self._creating:
                await asyncio.get_running_loop().run_in_executor(None, work)
        except OSError as error:
            detail = f"the directories of topic {topic} cannot be created: {error}"
            raise RequestError(Code.KAFKA_STORAGE_ERROR, detail) from error

    def _make_directories(self, topic: str, partitions: range) -> None:
        """Runs in a thread. Two syncs for any number of partitions; if one fails, removes the new directories."""
        made = []
        try:
            for path in (topic, *(os.path.join(topic, str(partition)) for partition in partitions)):
                if not os.path.isdir(path):
                    self._disk.make_unsynced_directory(path)
                    made.append(path)
            self._disk.sync_directory(topic)
            self._disk.sync_directory(self._path("logs"))
        except OSError:
            for path in reversed(made):
                self._disk.unmake_directory(path)
            raise

    def open(
        self, topic: str, topic_id: str, partition: int, config: LogConfig, created: bool = False
    ) -> ReplicaLog | LostLog:
        logs = self._logs.setdefault((topic, topic_id), {})
        if partition in logs:
            return logs[partition]
        directory = os.path.join(self._topic_path(topic, topic_id), str(partition))
        if created and not os.path.isdir(directory):
            logs[partition] = lost = LostLog(f"{topic}-{partition}", directory, config)
            return lost
        log = ReplicaLog(f"{topic}-{partition}", directory, config, self._disk, self._clock, self._flusher)
        recovery = Recovery(log, self._disk, self._path("set-aside"))
        try:
            recovery.run()
        except OSError as error:
            raise StartupError(f"the log of {log.name} in {directory} cannot be recovered: {error}") from error
        if recovery.scanned_bytes:
            logger.info(
                "recovered %s: scanned %d bytes, cut %d, ends at %d",
                log.name, recovery.scanned_bytes, recovery.cut_bytes, log.end,
            )  # fmt: skip
        self.scanned_logs += recovery.scanned_bytes > 0
        self.scanned_bytes += recovery.scanned_bytes
        self.cut_logs += recovery.cut_bytes > 0
        self.cut_bytes += recovery.cut_bytes
        logs[partition] = log
        return log

    def room(self) -> tuple[int, int]:
        try:
            usage = shutil.disk_usage(self.directory)
        except OSError:
            return -1, -1
        return usage.total, usage.free

    def together(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def opened_all(self) -> None:
        known = {os.path.basename(self._topic_path(*key)) for key in self._logs}
        try:
            strangers = sorted(set(os.listdir(self._path("logs"))) - known)
        except OSError as error:
            raise StartupError(f"{self.directory} cannot be used as a data directory: {error}") from error
        for name in strangers:
            if _is_hollow(self._path("logs", name)):
                self._disk.remove_tree(self._path("logs", name))
                logger.info("removed %s: it is empty, and no topic of that name and id is known", name)
                continue
            target = self._path("set-aside", f"{name[-ASIDE_LETTERS_MAX:]}.{self._clock.now_ms()}")
            try:
                self._disk.make_directory(self._path("set-aside"))
                self._disk.rename(self._path("logs", name), target)
            except OSError as error:
                raise StartupError(f"{self._path('logs', name)} cannot be set aside: {error}") from error
            logger.warning("set %s aside as %s: no topic of that name and id is known", name, target)
        self._disk.hold_back()

    async def discard(self, topic: str, topic_id: str) -> None:
        for log in self._logs.pop((topic, topic_id), {}).values():
            if isinstance(log, ReplicaLog):
                log.abandon()
        source = self._topic_path(topic, topic_id)
        if not os.path.isdir(source):
            return
        target = self._path("trash", os.path.basename(source))
        try:
            self._disk.make_directory(self._path("trash"))
            self._disk.rename(source, target)
        except OSError:
            target = source  # a full disk has no room for another directory, and this deletion frees space
        await asyncio.get_running_loop().run_in_executor(None, self._disk.remove_tree, target)
        self._disk.hold_back()

    async def housekeep(self) -> None:
        for log in self._every_log():
            try:
                await self._housekeep(log)
            except Exception as error:
                if log.is_abandoned:
                    continue
                if isinstance(error, OSError) and error.errno == errno.EIO and log.failure is None:
                    log.fail(error)
                if isinstance(error, OSError):  # a full disk causes one per log and round
                    self._damped.error("housekeeping of %s failed; retrying in the next round: %s", log.name, error)
                else:
                    logger.exception("housekeeping of %s failed; retrying in the next round", log.name)
            await asyncio.sleep(0)
        self._disk.hold_back()

    async def _housekeep(self, log: ReplicaLog) -> None:
        if log.failure is not None or log.closed:
            return
        try:
            expire(log)
            if log.config.compact:
                await compact(log, self._disk)
        except BrokenSegment as error:  # the next round skips it
            await log.note_broken(error)
        log.keep_checkpoint()
        log.let_go_of_idle_segments()

    def _every_log(self) -> list[ReplicaLog]:
        return [log for logs in self._logs.values() for log in logs.values() if isinstance(log, ReplicaLog)]

    async def close(self) -> None:
        for log in self._every_log():
            log.prepare_to_close()
        # Repeats for appends that arrive meanwhile: each before the close is answered.
        while busy := [log for log in self._every_log() if log.unsynced_bytes and not (log.failure or log.closed)]:
            await asyncio.gather(*(log.flush() for log in busy), return_exceptions=True)
        for log in self._every_log():
            log.close()
        self._flusher.close()
        self.unlock()

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def _is_hollow(path: str) -> bool:
    """Whether a directory holds only directories: no file, and no symbolic link."""
    if os.path.islink(path) or not os.path.isdir(path):
        return False
    return not any(
        files or any(os.path.islink(os.path.join(parent, name)) for name in directories)
        for parent, directories, files in os.walk(path)
    )
