"""A member of a share group (KIP-932) that works on one topic: leases records, answers for them, keeps its leases.

librdkafka's share consumer leases whole batches, cannot renew a lease, and gives out nothing new before everything old
is answered. Whoever runs commands that take minutes needs the opposite: as many records as there are hands, each
answered on its own, each lease renewed while it is worked on. That is ShareFetch and ShareAcknowledge in version 2.

Rules
-----
1. One request at a time: a session counts its requests, so acknowledgements wait for a fetch to come back. Whoever has
   something to say soon lets fetches wait only for a short time.
2. A session ends with its connection, and its leases with it. `LinkBroken` means that all leases are gone: make a new
   member with the same id, on a new link.
3. An answer that is refused was too late: the record has been, or will be, delivered to somebody again.

Gap: it talks to one broker, the group's coordinator. Millstream's takes fetches of every partition; others must lead
them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from uuid import UUID

from millstream.client.link import Link
from millstream.errors import Code, MillstreamError, code_of
from millstream.records import codec
from millstream.records.record import Record
from millstream.wire.kafka.messages import Message

HEARTBEAT, FETCH, ACKNOWLEDGE = 76, 78, 79
GAP, ACCEPT, RELEASE, REJECT, RENEW = range(5)
"""What can be said of a leased record, in Kafka's numbers."""
FETCH_BYTES_MAX = 4 << 20
_RECORD_LIMIT = 1

Lease = tuple[int, int]
"""Partition and offset."""


class ShareError(MillstreamError):
    """What the broker refused, for good."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class Delivery(NamedTuple):
    partition: int
    record: Record
    attempt: int
    """From 1."""

    @property
    def lease(self) -> Lease:
        return self.partition, self.record.offset


class ShareMember:
    def __init__(self, link: Link, group: str, topic: str, member_id: str) -> None:
        self._link = link
        self._group = group
        self._topic = topic
        self._member_id = member_id
        self._epoch = 0
        self._session_epoch = 0
        self._next_beat = 0.0
        self._topic_id: UUID | None = None
        self._partitions: list[int] = []
        self._is_named = False
        """Whether the session knows the partitions."""
        self._gaps: dict[Lease, int] = {}
        """Leased, but not in the log: the next request says so."""
        self.lease_ms = 30_000
        """How long a lease lasts."""

    def beat(self) -> None:
        """Says that it lives, if that is due; joins the group at first, or when the group has forgotten it."""
        if time.monotonic() < self._next_beat:
            return
        answer = self._heartbeat(self._epoch)
        if answer.error_code in (Code.UNKNOWN_MEMBER_ID, Code.FENCED_MEMBER_EPOCH) and self._epoch:
            answer = self._heartbeat(0)
        _check(answer.error_code, answer.error_message)
        self._epoch = answer.member_epoch
        self._next_beat = time.monotonic() + answer.heartbeat_interval / 1000
        if answer.assignment is not None:
            for topic in answer.assignment.topic_partitions:
                self._topic_id, self._partitions = topic.topic_id, list(topic.partitions)
            self._is_named = False

    def fetch(self, count: int, wait_ms: int, answers: Mapping[Lease, int]) -> tuple[list[Delivery], list[Lease]]:
        """At most `count` records, and which of the answers came too late."""
        if self._topic_id is None:
            return [], list(answers)
        named = {} if self._is_named else dict.fromkeys(self._partitions)
        fields = {
            "max_wait": wait_ms,
            "min_bytes": 1,
            "max_bytes": FETCH_BYTES_MAX,
            "max_records": count,
            "batch_size": count,
            "share_acquire_mode": _RECORD_LIMIT,
            "is_renew_ack": False,
            "forgotten_topics_data": [],
        }
        if not self._session_epoch:  # a new session has nothing to acknowledge
            late, answers = list(answers), {}
        else:
            late = []
        answer = self._ask(FETCH, fields, answers, named)
        if answer is None:
            return [], [*late, *answers]
        self._is_named = True
        self.lease_ms = answer.acquisition_lock_timeout or self.lease_ms
        taken: list[Delivery] = []
        for topic in answer.responses:
            for each in topic.partitions:
                if each.error_code:
                    _check(each.error_code, each.error_message)
                taken += self._deliveries(each)
        return taken, late + self._late(answer, answers, "acknowledge_error_code")

    def answer(self, answers: Mapping[Lease, int]) -> list[Lease]:
        """Says what became of records; answers with those for which it was too late. Durable when it returns."""
        if not answers or not self._session_epoch:
            return list(answers)
        is_renewal = RENEW in answers.values()
        answer = self._ask(ACKNOWLEDGE, {"is_renew_ack": is_renewal}, answers)
        return list(answers) if answer is None else self._late(answer, answers, "error_code")

    def renew(self, leases: Sequence[Lease]) -> list[Lease]:
        return self.answer(dict.fromkeys(leases, RENEW))

    def leave(self) -> None:
        """What is leased and not answered goes to others at once."""
        if self._session_epoch:
            self._session_epoch = -1
            self._ask(ACKNOWLEDGE, {"is_renew_ack": False}, {})
        if self._epoch:
            self._heartbeat(-1)
            self._epoch = 0

    def _heartbeat(self, epoch: int) -> Message:
        fields: dict[str, Any] = {"group_id": self._group, "member_id": self._member_id, "member_epoch": epoch}
        if epoch == 0:
            fields["subscribed_topic_names"] = [self._topic]
        return self._link.ask(HEARTBEAT, 1, 1, fields)

    def _ask(
        self, key: int, fields: dict[str, Any], answers: Mapping[Lease, int], named: Mapping[int, None] | None = None
    ) -> Message | None:
        """None: the session is gone, and with it every lease. The next fetch opens another."""
        gaps, self._gaps = self._gaps, {}
        partitions: dict[int, list[dict[str, Any]]] = {partition: [] for partition in named or ()}
        for (partition, offset), verb in sorted({**gaps, **answers}.items()):
            batch = {"first_offset": offset, "last_offset": offset, "acknowledge_types": [verb]}
            partitions.setdefault(partition, []).append(batch)
        listed = [
            {"partition_index": partition, "acknowledgement_batches": batches}
            for partition, batches in partitions.items()
        ]
        answer = self._link.ask(
            key,
            2,
            2,
            {
                "group_id": self._group,
                "member_id": self._member_id,
                "share_session_epoch": self._session_epoch,
                "topics": [{"topic_id": self._topic_id, "partitions": listed}] if listed else [],
                **fields,
            },
        )
        if answer.error_code in (Code.SHARE_SESSION_NOT_FOUND, Code.INVALID_SHARE_SESSION_EPOCH):
            self._session_epoch = 0
            self._is_named = False
            return None
        _check(answer.error_code, answer.error_message)
        if self._session_epoch >= 0:
            self._session_epoch = self._session_epoch % 0x7FFF_FFFF + 1
        return answer

    def _late(self, answer: Message, answers: Mapping[Lease, int], field: str) -> list[Lease]:
        """Answers for one partition stand together: where one was too late, the others are given one by one."""
        late: list[Lease] = []
        for topic in answer.responses:
            for each in topic.partitions:
                code = getattr(each, field)
                said = {lease: verb for lease, verb in answers.items() if lease[0] == each.partition_index}
                if not code or not said:
                    continue
                if code != Code.INVALID_RECORD_STATE:
                    _check(code, None)
                elif len(said) == 1:
                    late += said
                else:
                    for lease, verb in said.items():
                        late += self.answer({lease: verb})
        return late

    def _deliveries(self, partition: Message) -> Iterator[Delivery]:
        attempts = {
            offset: run.delivery_count
            for run in partition.acquired_records
            for offset in range(run.first_offset, run.last_offset + 1)
        }
        for record in codec.iterate(partition.records or b"") if attempts else ():
            attempt = attempts.pop(record.offset, None)
            if attempt is not None:
                yield Delivery(partition.partition_index, record, attempt)
        self._gaps.update(((partition.partition_index, offset), GAP) for offset in attempts)


def _check(error: int, message: str | None) -> None:
    if error:
        code = code_of(error)
        raise ShareError(message or (code.text if code is not None else f"error {error}"), error)
