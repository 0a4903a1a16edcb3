"""Producer ids: every idempotent producer gets a unique one (KIP-98).

The broker reserves ids from the metadata store in blocks, so that most requests cost no write. A crash loses the rest
of a block; there are 2^63 ids.
"""

from __future__ import annotations

from millstream.core.errors import RevisionConflict
from millstream.stores.base import MetaStore, Put

KEY = "producers/next"
BLOCK = 1000


class ProducerIds:
    def __init__(self, meta: MetaStore) -> None:
        self._meta = meta
        self._next = 0
        self._limit = 0

    async def take(self) -> int:
        while self._next >= self._limit:
            await self._reserve()
        taken = self._next
        self._next += 1
        return taken

    async def _reserve(self) -> None:
        found = await self._meta.get(KEY)
        first = int(found.value) if found is not None else 0
        revision = found.revision if found is not None else 0
        try:
            await self._meta.transact(Put(KEY, str(first + BLOCK).encode(), revision))
        except RevisionConflict:
            return  # another request reserved a block; the loop retries
        self._next, self._limit = first, first + BLOCK
