"""A member of an exclusive group over an embedded broker.

The store records the active member (`broker/groups/exclusive.py`). Each time this member becomes active, it reads from
the committed offsets. It can no longer commit events of an earlier term as the active member.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from millstream.broker.groups.exclusive import ExclusiveMember, ExclusiveSettings
from millstream.client.api import HEARTBEAT_SECONDS, TAKEOVER_SECONDS
from millstream.client.embedded_reading import Cursor, Rotation
from millstream.client.iterators import Exclusive, ExclusiveOptions
from millstream.client.records import Event, fields_of, user_record
from millstream.client.signal import Signal
from millstream.core.errors import Closed, Code, NotActive, OutOfRange, RequestError, UnknownTopic, refusal
from millstream.security.rights import Operation

if TYPE_CHECKING:
    from millstream.client.embedded import Embedded

V = TypeVar("V")


class EmbeddedExclusive(Exclusive[V]):
    _owner: Embedded

    def __init__(self, owner: Embedded, options: ExclusiveOptions) -> None:
        super().__init__(owner, options)
        self._settings = ExclusiveSettings(
            round((HEARTBEAT_SECONDS if options.heartbeat is None else options.heartbeat) * 1000),
            round((TAKEOVER_SECONDS if options.takeover is None else options.takeover) * 1000),
            options.start == "latest",
        )
        self._settings.check()
        self._member: ExclusiveMember | None = None
        self._cursors: list[Cursor[V]] = []
        self._rotation: Rotation[V] = Rotation(self._may_take, self._skip)
        self._terms = 0
        """How often this member has become active."""
        self._signal = Signal(owner.clock)
        self._wakes: list[Callable[[], None]] = []

    @property
    def is_active(self) -> bool:
        return self._member is not None and self._member.is_active

    async def _start(self) -> None:
        topic = await self._owner.topic(self._topic, Operation.READ)
        try:
            member = self._owner.session.exclusive(self._group, topic, self._settings)
        except RequestError as error:
            raise refusal(error.code, error.detail) from None
        member.watch(self._changed)
        self._member = member
        await member.open()

    def _changed(self) -> None:
        member = self._member
        assert member is not None
        for unwake in self._wakes:
            unwake()
        self._cursors, self._wakes = [], []
        if member.is_active:
            self._terms += 1
            self._read_on()
        self._signal.set()
        self._look()

    def _read_on(self) -> None:
        """Opens every partition that exists now."""
        member = self._member
        assert member is not None
        for partition in member.topic.partitions[len(self._cursors) :]:
            self._cursors.append(
                Cursor(self._owner.session, member.topic, partition.index, member.position(partition.index))
            )
            self._wakes.append(partition.log.wake(self._signal.set))

    async def _next(self, timeout: float | None) -> Event[V] | None:
        member = self._member
        assert member is not None
        while not self.is_closed:
            if member.is_gone:
                raise UnknownTopic(Code.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {self._topic} any more")
            event = await self._event()
            if event is not None:
                return event
            if not await self._signal.wait(timeout):
                return None
        return None

    async def _event(self) -> Event[V] | None:
        """None: no event, or this member is a standby."""
        member = self._member
        assert member is not None
        term = self._terms
        if member.is_active and len(self._cursors) < member.topic.partition_count:
            self._read_on()
        taken = await self._rotation.take(self._cursors)
        if taken is None:
            return None if term == self._terms else await self._event()  # the term changed during the read
        cursor, found = taken

        async def commit(event: Event[V]) -> None:
            await self._commit(event, term)

        return Event(*fields_of(user_record(*cursor.place, found, self._decode)), commit)

    def _may_take(self, cursor: Cursor[V]) -> bool:
        """Each term has cursors of its own."""
        index = cursor.place[1]
        return self.is_active and index < len(self._cursors) and self._cursors[index] is cursor

    def _skip(self, cursor: Cursor[V], error: OutOfRange) -> None:
        if cursor.next >= cursor.log.start:
            raise error
        cursor.seek(cursor.log.start)  # retention deleted the records
        self._signal.set()

    async def _commit(self, event: Event[V], term: int) -> None:
        member = self._member
        assert member is not None
        if self.is_closed:
            raise Closed("this member has left its group")
        if term != self._terms:
            raise NotActive(self._group, self._topic)
        await member.commit({event.partition: event.offset + 1})

    async def _shut(self, clean: bool) -> None:
        for unwake in self._wakes:
            unwake()
        self._wakes = []
        try:
            if self._member is not None:
                await self._member.leave()
        finally:
            self._signal.set()
            self._change.set()
