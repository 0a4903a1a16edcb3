"""A member of a share group (KIP-932): leases records, acknowledges them, renews its leases.

librdkafka's share consumer leases whole batches, cannot renew a lease, delay a release or give a reason for a
rejection, and delivers nothing new before every earlier record is acknowledged. A worker that takes minutes per record
needs the opposite: as many records as it has threads, each with its own acknowledgement and a lease renewed during
the work. That is ShareFetch and ShareAcknowledge in version 2, with two fields of Millstream's own
(`wire/kafka/share.py`).

Rules
-----
1. One request at a time: a session counts its requests, so acknowledgements wait for a fetch to return. A worker that
   acknowledges soon uses short fetch waits.
2. A session ends with its connection, and its leases with it. `LinkBroken` means that all leases are lost: make a new
   member with the same id, on a new link.
3. A refused acknowledgement was late: the record has been, or will be, delivered again.
4. A partition that cannot be fetched does not affect the results of others. Its error is raised as a
   `PartitionRefused` only if there is nothing else to return, neither records nor acknowledgement results. The session
   and its leases go on.

Gap: it talks to one broker, the group's coordinator. Millstream's takes fetches of every partition; others must lead
them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from uuid import UUID

from millstream.client.link import Link, LinkBroken
from millstream.core.errors import Code, MillstreamError, code_of
from millstream.records import codec
from millstream.records.record import Record as StoredRecord
from millstream.wire.kafka import share
from millstream.wire.kafka.messages import Message
from millstream.wire.kafka.share import Acknowledged, ShareAcknowledgeRequest, ShareFetchRequest, TopicIdPartition

METADATA, HEARTBEAT, FETCH, ACKNOWLEDGE = 3, 76, 78, 79
VERSION = 2
"""Of the last two."""
GAP, ACCEPT, RELEASE, REJECT, RENEW = range(5)
"""Acknowledgement types for a leased record, in Kafka's numbers."""
FETCH_BYTES_MAX = 4 << 20
FINAL_EPOCH = -1
_GONE = frozenset({Code.UNKNOWN_TOPIC_ID, Code.UNKNOWN_TOPIC_OR_PARTITION})
"""The topic is deleted: no worker gets the record again."""

_UNSTORED = frozenset({Code.COORDINATOR_NOT_AVAILABLE, Code.KAFKA_STORAGE_ERROR})
"""The broker's store accepts no writes now."""


class Lease(NamedTuple):
    topic: str
    partition: int
    offset: int
    topic_id: UUID
    """A recreated topic has another id: no acknowledgement of the old topic applies to its records."""


class Reply(NamedTuple):
    verb: int
    delay_ms: int = 0
    """RELEASE: the wait before redelivery."""
    reason: str = ""
    """RELEASE and REJECT: for the dead letter."""


class ShareError(MillstreamError):
    """A permanent refusal by the broker."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class PartitionRefused(ShareError):
    """A fetch without records or acknowledgement results: one of its partitions has an error. All leases are
    unchanged.
    """


class AnswersRefused(ShareError):
    """Acknowledgements that the broker could not store, as on a full disk. Their leases are unchanged: retry."""

    def __init__(self, text: str, code: int, refused: list[Lease], late: list[Lease]) -> None:
        super().__init__(text, code)
        self.refused = refused
        self.late = late
        """Late ones of the same request."""


class Delivery(NamedTuple):
    topic: str
    partition: int
    record: StoredRecord
    attempt: int
    """From 1."""
    topic_id: UUID

    @property
    def lease(self) -> Lease:
        return Lease(self.topic, self.partition, self.record.offset, self.topic_id)


class ShareMember:
    def __init__(self, link: Link, group: str, topics: Sequence[str], member_id: str) -> None:
        if not (link.serves(FETCH, VERSION) and link.serves(ACKNOWLEDGE, VERSION)):
            raise LinkBroken(f"the broker does not serve ShareFetch and ShareAcknowledge in version {VERSION}")
        self._link = link
        self._group = group
        self._topics = list(topics)
        self._member_id = member_id
        self._epoch = 0
        self._session_epoch = 0
        self._next_beat = 0.0
        self._names: dict[UUID, str] = {}
        self._places: list[TopicIdPartition] = []
        self._named: set[TopicIdPartition] = set()
        """Partitions that the session knows."""
        self._gaps: dict[Lease, Reply] = {}
        """Leased, but missing from the log: the next request reports it."""
        self.lease_ms = 30_000
        """How long a lease lasts."""

    @property
    def has_places(self) -> bool:
        """Whether there is a partition to fetch from."""
        return bool(self._places)

    def beat(self) -> None:
        """Sends a heartbeat if it is due; joins the group at first, or after the group removed this member."""
        if time.monotonic() < self._next_beat:
            return
        answer = self._heartbeat(self._epoch)
        if answer.error_code in (Code.UNKNOWN_MEMBER_ID, Code.FENCED_MEMBER_EPOCH) and self._epoch:
            answer = self._heartbeat(0)
        _check(answer.error_code, answer.error_message)
        self._epoch = answer.member_epoch
        self._next_beat = time.monotonic() + answer.heartbeat_interval / 1000
        if answer.assignment is not None:
            parts = answer.assignment.topic_partitions
            self._learn_names([topic.topic_id for topic in parts if topic.topic_id not in self._names])
            self._places = [
                (topic.topic_id, index)
                for topic in parts
                if topic.topic_id in self._names
                for index in topic.partitions
            ]

    def _learn_names(self, ids: Sequence[UUID]) -> None:
        """Assignments contain topic ids only."""
        if not ids:
            return
        fields = {
            "topics": [{"topic_id": each, "name": None} for each in ids],
            "allow_auto_topic_creation": False,
            "include_topic_authorized_operations": False,
        }
        for topic in self._link.ask(METADATA, 12, 12, fields).topics:
            if not topic.error_code and topic.name is not None:
                self._names[topic.topic_id] = topic.name

    def fetch(self, count: int, wait_ms: int, answers: Mapping[Lease, Reply]) -> tuple[list[Delivery], list[Lease]]:
        """At most `count` records, and the late ones of the acknowledgements."""
        if not self._places:
            return [], list(answers)
        late: list[Lease] = []
        if not self._session_epoch:  # a new session has nothing to acknowledge
            late, answers = list(answers), {}
        acknowledged = self._acknowledged(answers)
        for place in self._places:
            if place not in self._named:
                acknowledged.setdefault(place, [])
        forgotten = sorted((self._named | acknowledged.keys()) - set(self._places))
        request = ShareFetchRequest(
            self._group, self._member_id, self._session_epoch, wait_ms, FETCH_BYTES_MAX, count, True,
            any(reply.verb == RENEW for reply in answers.values()), acknowledged, forgotten,
        )  # fmt: skip
        answer = self._ask(FETCH, share.encode_fetch_request(request))
        if answer is None:
            return [], [*late, *answers]
        self._named = set(self._places)
        self.lease_ms = answer.acquisition_lock_timeout or self.lease_ms
        taken: list[Delivery] = []
        refused: PartitionRefused | None = None
        for topic in answer.responses:
            for each in topic.partitions:
                if each.error_code:
                    refused = PartitionRefused(_text(each.error_code, each.error_message), each.error_code)
                else:
                    taken += self._deliveries(topic.topic_id, each)
        if refused is not None and not (taken or answers or late):
            raise refused
        return taken, late + self._late(answer, answers, "acknowledge_error_code")

    def answer(self, answers: Mapping[Lease, Reply]) -> list[Lease]:
        """Acknowledges records; returns the late ones. Durable when it returns."""
        if not answers or not self._session_epoch:
            return list(answers)
        is_renewal = any(reply.verb == RENEW for reply in answers.values())
        answer = self._acknowledge(is_renewal, self._acknowledged(answers))
        return list(answers) if answer is None else self._late(answer, answers, "error_code")

    def renew(self, leases: Sequence[Lease]) -> list[Lease]:
        return self.answer(dict.fromkeys(leases, Reply(RENEW)))

    def leave(self, answers: Mapping[Lease, Reply] | None = None) -> None:
        """Unacknowledged records go to other workers at once, and do not count as delivered."""
        if self._session_epoch:
            self._session_epoch = FINAL_EPOCH
            self._acknowledge(False, self._acknowledged(answers or {}))
        if self._epoch:
            self._heartbeat(-1)
            self._epoch = 0

    def _heartbeat(self, epoch: int) -> Message:
        fields: dict[str, Any] = {"group_id": self._group, "member_id": self._member_id, "member_epoch": epoch}
        if epoch == 0:
            fields["subscribed_topic_names"] = self._topics
        return self._link.ask(HEARTBEAT, 1, 1, fields)

    def _acknowledged(self, answers: Mapping[Lease, Reply]) -> dict[TopicIdPartition, list[Acknowledged]]:
        """The acknowledgements, and a gap for each leased record that is missing from the log."""
        gaps, self._gaps = self._gaps, {}
        said: dict[TopicIdPartition, list[Acknowledged]] = {}
        for (_, partition, offset, topic_id), (verb, delay_ms, reason) in sorted({**gaps, **answers}.items()):
            batch = Acknowledged(offset, offset, bytes((verb,)), delay_ms, reason)
            said.setdefault((topic_id, partition), []).append(batch)
        return said

    def _acknowledge(
        self, is_renewal: bool, acknowledged: dict[TopicIdPartition, list[Acknowledged]]
    ) -> Message | None:
        request = ShareAcknowledgeRequest(self._group, self._member_id, self._session_epoch, is_renewal, acknowledged)
        return self._ask(ACKNOWLEDGE, share.encode_acknowledge_request(request))

    def _ask(self, key: int, body: bytes) -> Message | None:
        """None: the session is gone, and with it every lease. The next fetch opens another."""
        answer = self._link.ask_encoded(key, VERSION, body)
        if answer.error_code in (Code.SHARE_SESSION_NOT_FOUND, Code.INVALID_SHARE_SESSION_EPOCH):
            self._session_epoch = 0
            self._named = set()
            return None
        _check(answer.error_code, answer.error_message)
        if self._session_epoch != FINAL_EPOCH:
            self._session_epoch = self._session_epoch % 0x7FFF_FFFF + 1
        return answer

    def _late(self, answer: Message, answers: Mapping[Lease, Reply], field: str) -> list[Lease]:
        """A partition's acknowledgements share one error code: if one is late, the others are sent again one by one.

        Raises `AnswersRefused` if the broker could not store some.
        """
        late: list[Lease] = []
        refused: dict[Lease, Message] = {}
        for topic in answer.responses:
            for each in topic.partitions:
                code, place = getattr(each, field), (topic.topic_id, each.partition_index)
                said = {lease: reply for lease, reply in answers.items() if (lease.topic_id, lease.partition) == place}
                if not code or not said:
                    continue
                if code in _GONE:
                    late += said
                elif code in _UNSTORED:
                    refused.update(dict.fromkeys(said, each))
                elif code != Code.INVALID_RECORD_STATE:
                    _check(code, None)
                elif len(said) == 1:
                    late += said
                else:
                    for lease, reply in said.items():
                        late += self.answer({lease: reply})
        for each in refused.values():
            code, message = getattr(each, field), getattr(each, field.replace("code", "message"))
            raise AnswersRefused(_text(code, message), code, list(refused), late)
        return late

    def _deliveries(self, topic_id: UUID, partition: Message) -> Iterator[Delivery]:
        topic, index = self._names[topic_id], partition.partition_index
        attempts = {
            offset: run.delivery_count
            for run in partition.acquired_records
            for offset in range(run.first_offset, run.last_offset + 1)
        }
        for record in codec.iterate(partition.records or b"") if attempts else ():
            attempt = attempts.pop(record.offset, None)
            if attempt is not None:
                yield Delivery(topic, index, record, attempt, topic_id)
        self._gaps.update((Lease(topic, index, offset, topic_id), Reply(GAP)) for offset in attempts)


def _check(error: int, message: str | None) -> None:
    if error:
        raise ShareError(_text(error, message), error)


def _text(error: int, message: str | None) -> str:
    code = code_of(error)
    return message or (code.text if code is not None else f"error {error}")
