"""The failure of an administrative operation, as one sentence with the next step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.core.errors import Code, MillstreamError

if TYPE_CHECKING:
    from confluent_kafka import KafkaError

    from millstream.client.share import ShareError

NEXT_STEPS = {
    Code.KAFKA_STORAGE_ERROR: "the broker's log says which; the broker reconnects to a database without a restart",
    Code.UNKNOWN_TOPIC_OR_PARTITION: "`millstream topic list` shows the topics, `millstream topic create` creates one",
    Code.TOPIC_ALREADY_EXISTS: "`millstream topic describe` shows it, `millstream topic alter` changes it",
    Code.GROUP_ID_NOT_FOUND: "`millstream group list` shows the groups",
    Code.NON_EMPTY_GROUP: "stop its consumers first",
    Code.UNKNOWN_MEMBER_ID: "its consumers are still running; stop them first",
    Code.REBALANCE_IN_PROGRESS: "its consumers are still running; stop them first",
    Code.MESSAGE_TOO_LARGE: "send less at once, or raise the topic's limit with `millstream topic alter`",
    Code.OFFSET_OUT_OF_RANGE: "`millstream topic describe` shows its offsets",
}

CODES = {int(code): code for code in Code if code > 0}


class Failure(MillstreamError):
    """Its text says what failed and what to do next. A command ends with it and exit code 1."""


def unreachable(address: str) -> Failure:
    return Failure(f"no broker answers at {address}; start one with `millstream serve` or name another with --broker")


def explain(error: KafkaError, address: str, subject: str = "") -> Failure:
    """The sentence for an error of librdkafka: the broker's text, or the meaning of its code, and the next step."""
    if error.code() in (
        error._TRANSPORT,
        error._ALL_BROKERS_DOWN,
        error._RESOLVE,
        error._TIMED_OUT,
    ):
        return unreachable(address)
    if error.code() == error._MSG_TIMED_OUT:  # it answered when the command began, and perhaps still does
        return Failure(f"the broker at {address} did not acknowledge them in time; check that it runs, and its log")
    text = error.str().removeprefix("Local: ")
    code = CODES.get(error.code())
    if error.code() in (error._UNKNOWN_TOPIC, error._UNKNOWN_PARTITION):
        code = Code.UNKNOWN_TOPIC_OR_PARTITION
    if code is not None and (error.code() < 0 or text.startswith("Broker: ")):
        text = code.text  # librdkafka's text for the code; the broker gave none
    step = NEXT_STEPS.get(code) if code is not None else None
    return Failure(f"{subject + ': ' if subject else ''}{text}{'; ' + step if step else ''}")


def refused(error: ShareError, subject: str) -> Failure:
    """The same for a broker's refusal to our own client."""
    code = CODES.get(error.code)
    step = NEXT_STEPS.get(code) if code is not None else None
    return Failure(f"{subject}: {error}{'; ' + step if step else ''}")
