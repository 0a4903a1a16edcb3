"""Logs and metadata in two stores: which of them belong together.

    DIR/pair      an id, in the data directory
    store/logs    the same id, in the metadata

Rules
-----
1. Every start compares the ids before it opens a log. With the metadata of other logs, recovery would set every log
   aside, and groups would resume at the positions of other records.
2. The first start writes the file, then the key. It requires a directory without logs and metadata that no broker has
   used. After a crash between the two, the next start writes the key.
3. Metadata belong to one directory, and one broker at a time locks it: metadata in a database are not shared then.
4. A store that holds both logs and metadata refuses a mark of a pair: the other half is elsewhere.
"""

from __future__ import annotations

import os
import uuid

from millstream.core.disk import Disk
from millstream.core.errors import RevisionConflict, StartupError
from millstream.stores.base import Check, MetaStore, Put

KEY = "store/logs"
FILE_NAME = "pair"
CLUSTER_KEY = "cluster/id"
"""Every broker's first write: metadata without it are unused."""


async def match(meta: MetaStore, directory: str, disk: Disk) -> None:
    """Raises `StartupError` unless logs in `directory` and metadata in another store are a pair, or become one now."""
    path = os.path.join(directory, FILE_NAME)
    try:
        mine = _read(path)
        theirs = await meta.get(KEY)
        if theirs is not None:
            if theirs.value.decode() != mine:
                raise StartupError(
                    f"the metadata belong to other logs than those in {directory}: start with the data directory that "
                    "was used with this --meta, or with another --meta"
                )
            return
        if await meta.get(CLUSTER_KEY) is not None:
            raise StartupError(
                f"the metadata belong to other logs than those in {directory}: they were used without --meta, as a "
                "--store of their own; give --meta an empty database"
            )
        if os.path.exists(os.path.join(directory, "meta.db")):
            raise StartupError(
                f"{directory} has metadata of its own, in meta.db: leave out --meta, or name another --data"
            )
        if os.listdir(os.path.join(directory, "logs")):
            raise StartupError(
                f"the logs in {directory} have their metadata in another store, and this --meta is empty: give --meta "
                "the database that was used with them, or restore it from a backup"
            )
        if mine is None:
            mine = uuid.uuid4().hex
            disk.replace(path, mine.encode())
    except OSError as error:
        raise StartupError(f"{path} cannot be read or written: {error}") from error
    try:
        await meta.transact(Put(KEY, mine.encode(), if_revision=0), Check(CLUSTER_KEY, if_revision=0))
    except RevisionConflict:
        raise StartupError(
            f"another broker has just taken the metadata for its logs: give {directory} another --meta"
        ) from None


async def refuse(meta: MetaStore, location: str) -> None:
    """Raises `StartupError` if the logs of these metadata are elsewhere."""
    if await meta.get(KEY) is not None:
        raise StartupError(
            f"{location} has the metadata of logs in a data directory: start with --data and that directory, and give "
            "this URL to --meta"
        )


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except FileNotFoundError:
        return None
