"""What a client acknowledges, as the queue understands it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from millstream.broker.groups.queue.share_fetch import Place
from millstream.broker.groups.queue.verbs import Answer, Verb
from millstream.core.errors import Code, RequestError
from millstream.wire.kafka.share import Acknowledged

Refusals = dict[Place, RequestError | None]


def read(
    acknowledged: Mapping[Place, Sequence[Acknowledged]], is_renewal: bool
) -> tuple[dict[Place, list[Answer]], Refusals]:
    """The answers for each partition, and the partitions whose acknowledgements make no sense."""
    answers: dict[Place, list[Answer]] = {}
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
            raise _invalid(f"offsets {first} to {last} are not behind those before them")
        if len(types) not in (1, last - first + 1):
            raise _invalid(f"{len(types)} acknowledge types for offsets {first} to {last}: one, or one for each")
        if max(types) > verb_max:
            raise _invalid(f"there is no acknowledge type {max(types)} here")
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
