"""Converts a client's acknowledgements for the queue.

A request may acknowledge 20,000 partitions and many more batches. A thread converts these, and the queue gets them in
slices. A request of usual size is converted and applied in one step, without a turn of the event loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from millstream.broker.groups.queue import share_fetch
from millstream.broker.groups.queue.share_fetch import TopicIdPartition
from millstream.broker.groups.queue.verbs import Answer, Verb
from millstream.core.errors import Code, RequestError
from millstream.core.promise import Promise
from millstream.doors.kafka.turns import ITEMS_A_STEP, aside, in_turns
from millstream.wire.kafka.share import Acknowledged

if TYPE_CHECKING:
    from millstream.broker.session import Session
    from millstream.doors.kafka.share_sessions import ShareSession

Refusals = dict[TopicIdPartition, RequestError | None]


async def read(
    acknowledged: Mapping[TopicIdPartition, Sequence[Acknowledged]], is_renewal: bool
) -> tuple[dict[TopicIdPartition, list[Answer]], Refusals]:
    """The acknowledgements of each partition, and the partitions whose acknowledgements are invalid."""
    if len(acknowledged) + sum(map(len, acknowledged.values())) <= ITEMS_A_STEP:
        return _read(acknowledged, is_renewal)
    return await aside(_read, acknowledged, is_renewal)


async def acknowledge(
    session: ShareSession, answers: Mapping[TopicIdPartition, Sequence[Answer]], client: Session
) -> dict[TopicIdPartition, Promise[None]]:
    """Like `Session.acknowledge`, for any number of partitions."""
    if len(answers) <= ITEMS_A_STEP:
        return client.acknowledge(session.queue, session.seat, answers)
    promises: dict[TopicIdPartition, Promise[None]] = {}
    async for place, said in in_turns(answers.items()):
        promises.update(client.acknowledge(session.queue, session.seat, {place: said}))
    return promises


async def settle(promises: Mapping[TopicIdPartition, Promise[None]]) -> Refusals:
    """Like `share_fetch.settle`, for any number of partitions."""
    if len(promises) <= ITEMS_A_STEP:
        return await share_fetch.settle(promises)
    errors: Refusals = {}
    async for place, promise in in_turns(promises.items()):
        errors.update(await share_fetch.settle({place: promise}))
    return errors


def _read(
    acknowledged: Mapping[TopicIdPartition, Sequence[Acknowledged]], is_renewal: bool
) -> tuple[dict[TopicIdPartition, list[Answer]], Refusals]:
    answers: dict[TopicIdPartition, list[Answer]] = {}
    refused: Refusals = {}
    for place, batches in acknowledged.items():
        if batches:
            try:
                answers[place] = list(_answers(batches, is_renewal))
            except RequestError as error:
                refused[place] = error
    return answers, refused


def _answers(batches: Sequence[Acknowledged], is_renewal: bool) -> Iterator[Answer]:
    verb_max = Verb.RENEW if is_renewal else Verb.REJECT
    after = 0
    for first, last, types, delay_ms, reason in batches:
        if first < after or last < first:
            raise _invalid(f"offsets {first} to {last} do not follow the ones before them")
        if len(types) not in (1, last - first + 1):
            raise _invalid(f"{len(types)} acknowledge types for offsets {first} to {last}: one, or one for each")
        if max(types) > verb_max:
            raise _invalid(f"acknowledge type {max(types)} is not valid here")
        after = last + 1
        if len(types) == 1:
            yield Answer(first, last, Verb(types[0]), delay_ms, reason)
            continue
        for number, run in groupby(types):
            count = len(list(run))
            yield Answer(first, first + count - 1, Verb(number), delay_ms, reason)
            first += count


def _invalid(detail: str) -> RequestError:
    return RequestError(Code.INVALID_REQUEST, detail)
