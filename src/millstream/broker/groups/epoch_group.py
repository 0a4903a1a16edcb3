"""The epoch of a consumer group (KIP-848) or a share group (KIP-932).

    a change --stale--> the next epoch is reserved --durable--> members may see it

Rules
-----
1. An epoch is durable before any member sees it: no member epoch is used twice.
2. Changes that wait for the same write share an epoch.
3. After a failed write the group is stale, and the next heartbeat retries.
4. A closed group (dropped, converted, or lost to another broker) reserves no epoch: another group may have its name,
   and its record.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable

from millstream.broker.groups.context import GroupContext
from millstream.broker.groups.journal import Entry
from millstream.broker.groups.record import GroupRecord
from millstream.core.errors import RequestError
from millstream.core.promise import Promise
from millstream.stores.base import Put


class EpochGroup(abc.ABC):
    type: str
    protocol_type: str

    def __init__(self, group_id: str, context: GroupContext, record: GroupRecord | None = None) -> None:
        self.id = group_id
        self.epoch = record.epoch if record else 0
        self.emptied_ms = record.emptied_ms if record else None
        self._stale = False
        self._closed: RequestError | None = None
        """Why the group was closed."""
        self._queued: Entry | None = None
        self._journal = context.journal
        self._clock = context.clock
        self._topics = context.topics
        self._settings = context.settings

    def _change(self) -> Promise[None]:
        """Starts a new epoch that no member waits for."""
        self._stale = True
        return self._advance()

    def _advance(self) -> Promise[None]:
        if self._queued is not None:
            return self._queued.promise
        entry = self._queued = Entry(self._reserve, self._reserved)
        self._journal.submit(entry).then(self._advanced)
        return entry.promise

    def _reserve(self) -> Iterable[Put]:
        self._queued = None
        if self._closed is not None:
            return []
        self._stale = False
        self.epoch += 1
        return [GroupRecord(self.type, self.epoch, self.protocol_type, self.emptied_ms).put(self.id)]

    @abc.abstractmethod
    def _reserved(self) -> None:
        """The epoch is durable."""

    def _advanced(self, done: Promise[None]) -> None:
        if done.error is not None:
            self._stale = True
            self._queued = None
