"""One table of errors, and the exceptions that carry them.

Every error that a client can see is a row of `Code`. Its number comes from the Kafka protocol, and the other doors
translate it. No module invents codes. There are three kinds of exceptions, by the scope of the failure:

    RequestError     one request: the client gets the code and goes on
    ProtocolError    the connection: the bytes cannot be decoded, and so neither can the bytes after them
    StartupError     the process: the text names the problem and the remedy, and the command exits with 1
"""

from __future__ import annotations

import enum


class Code(enum.IntEnum):
    """Error codes, whether a client may retry, and a text for users."""

    retriable: bool
    text: str

    def __new__(cls, number: int, retriable: bool, text: str) -> Code:
        code = int.__new__(cls, number)
        code._value_ = number
        code.retriable = retriable
        code.text = text
        return code

    UNKNOWN_SERVER_ERROR = -1, False, "unexpected error in the broker; see its log"
    NONE = 0, False, "no error"
    OFFSET_OUT_OF_RANGE = 1, False, "the offset is outside the partition's range"
    CORRUPT_MESSAGE = 2, True, "the batch fails its checksum or is not a valid record batch"
    UNKNOWN_TOPIC_OR_PARTITION = 3, True, "there is no such topic or partition"
    LEADER_NOT_AVAILABLE = 5, True, "the partition has no leader right now"
    NOT_LEADER_OR_FOLLOWER = 6, True, "this broker does not lead the partition"
    REQUEST_TIMED_OUT = 7, True, "the request timed out"
    MESSAGE_TOO_LARGE = 10, False, "the batch is larger than max.message.bytes allows"
    OFFSET_METADATA_TOO_LARGE = 12, False, "the metadata string of the offset commit is too long"
    COORDINATOR_LOAD_IN_PROGRESS = 14, True, "the group's state is still being loaded"
    COORDINATOR_NOT_AVAILABLE = 15, True, "the group has no coordinator right now"
    NOT_COORDINATOR = 16, True, "this broker does not coordinate the group"
    INVALID_TOPIC_EXCEPTION = 17, False, "the topic name is not valid: use 1 to 249 letters, digits, '.', '_' and '-'"
    RECORD_LIST_TOO_LARGE = 18, False, "the batch is larger than a segment may be"
    INVALID_REQUIRED_ACKS = 21, False, "acks must be 0, 1 or -1 (all)"
    ILLEGAL_GENERATION = 22, False, "the generation is not the group's current one"
    INCONSISTENT_GROUP_PROTOCOL = 23, False, "the member shares no assignment protocol with the group"
    INVALID_GROUP_ID = 24, False, "the group id is empty or not valid"
    UNKNOWN_MEMBER_ID = 25, False, "the group does not know this member"
    INVALID_SESSION_TIMEOUT = 26, False, "the session timeout is outside the broker's limits"
    REBALANCE_IN_PROGRESS = 27, False, "the group is rebalancing; the member must rejoin"
    INVALID_TIMESTAMP = 32, False, "the record's timestamp is out of range"
    UNSUPPORTED_VERSION = 35, False, "the broker does not support this version of the API"
    TOPIC_ALREADY_EXISTS = 36, False, "the topic exists already"
    INVALID_PARTITIONS = 37, False, "the number of partitions is not valid"
    INVALID_REPLICATION_FACTOR = 38, False, "the replication factor is larger than the number of brokers"
    INVALID_REPLICA_ASSIGNMENT = 39, False, "the replica assignment is not valid"
    INVALID_CONFIG = 40, False, "the configuration is not valid"
    INVALID_REQUEST = 42, False, "the request is malformed or contradicts itself"
    UNSUPPORTED_FOR_MESSAGE_FORMAT = 43, False, "only record batches of format 2 are stored"
    POLICY_VIOLATION = 44, False, "the broker's policy forbids this"
    OUT_OF_ORDER_SEQUENCE_NUMBER = 45, False, "the producer skipped a sequence number"
    DUPLICATE_SEQUENCE_NUMBER = 46, False, "the batch is an old duplicate; the broker no longer knows its offset"
    INVALID_PRODUCER_EPOCH = 47, False, "the producer's epoch is stale: a newer producer uses the same id"
    KAFKA_STORAGE_ERROR = 56, True, "storage failed: read-only until a restart, or its database is unavailable"
    UNKNOWN_PRODUCER_ID = 59, False, "the broker does not know this producer id"
    SECURITY_DISABLED = 54, False, "security features are not enabled"
    OPERATION_NOT_ATTEMPTED = 55, False, "not attempted, because another part of the request failed"
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53, False, "transactions are not supported"
    LOG_DIR_NOT_FOUND = 57, False, "there is no such log directory"
    NON_EMPTY_GROUP = 68, False, "the group still has members"
    GROUP_ID_NOT_FOUND = 69, False, "there is no such group"
    FETCH_SESSION_ID_NOT_FOUND = 70, True, "the broker does not know the fetch session; open a new one"
    INVALID_FETCH_SESSION_EPOCH = 71, True, "the fetch session's epoch is not the next one"
    FENCED_LEADER_EPOCH = 74, True, "the leader epoch is older than the broker's"
    UNKNOWN_LEADER_EPOCH = 75, True, "the leader epoch is newer than the broker's"
    UNSUPPORTED_COMPRESSION_TYPE = 76, False, "the batch's compression is not supported"
    MEMBER_ID_REQUIRED = 79, False, "the member must join again with the id it was given"
    GROUP_MAX_SIZE_REACHED = 81, False, "the group has reached its limit of members"
    FENCED_INSTANCE_ID = 82, False, "another member with the same group.instance.id took over"
    ELECTION_NOT_NEEDED = 84, False, "no election is needed: the preferred leader leads the partition"
    NO_REASSIGNMENT_IN_PROGRESS = 85, False, "no reassignment of the partition is in progress"
    GROUP_SUBSCRIBED_TO_TOPIC = 86, False, "the group still subscribes to the topic"
    INVALID_RECORD = 87, False, "the broker's rules for this topic refuse the record"
    UNSTABLE_OFFSET_COMMIT = 88, True, "an open transaction has pending offset commits"
    RESOURCE_NOT_FOUND = 91, False, "there is no such resource"
    DUPLICATE_RESOURCE = 92, False, "the request names the same thing twice"
    UNKNOWN_TOPIC_ID = 100, True, "there is no topic with this id"
    TRANSACTIONAL_ID_NOT_FOUND = 105, False, "there is no such transactional id"
    INCONSISTENT_TOPIC_ID = 103, True, "the topic id does not belong to the topic"
    FETCH_SESSION_TOPIC_ID_ERROR = 106, True, "the fetch session mixes topic names and topic ids"
    FENCED_MEMBER_EPOCH = 110, False, "the member's epoch is not its current one; it must rejoin"
    UNRELEASED_INSTANCE_ID = 111, False, "another member still holds this group.instance.id"
    UNSUPPORTED_ASSIGNOR = 112, False, "the broker does not have the group's assignor"
    STALE_MEMBER_EPOCH = 113, False, "the member's epoch is stale; retry with the epoch of the next heartbeat"
    INVALID_RECORD_STATE = 121, False, "the record is not leased to this member now"
    SHARE_SESSION_NOT_FOUND = 122, True, "the broker does not know the share session; open a new one"
    INVALID_SHARE_SESSION_EPOCH = 123, True, "the share session's epoch is not the next one"
    INVALID_REGULAR_EXPRESSION = 128, False, "the topic pattern is not a valid regular expression"
    SHARE_SESSION_LIMIT_REACHED = 133, True, "the broker has reached its limit of share sessions"

    # Sent by Kafka clusters, never by this broker: for `connect`, and for tests (`fail_next`)
    NETWORK_EXCEPTION = 13, True, "the connection broke before the broker answered"
    NOT_ENOUGH_REPLICAS = 19, True, "fewer replicas are in sync than min.insync.replicas requires"
    NOT_ENOUGH_REPLICAS_AFTER_APPEND = 20, True, "written, but to fewer replicas than min.insync.replicas requires"
    TOPIC_AUTHORIZATION_FAILED = 29, False, "the client may not use this topic"
    GROUP_AUTHORIZATION_FAILED = 30, False, "the client may not use this group"
    CLUSTER_AUTHORIZATION_FAILED = 31, False, "the client may not do this on the cluster"
    NOT_CONTROLLER = 41, True, "this broker is not the cluster's controller"
    SASL_AUTHENTICATION_FAILED = 58, False, "the client's name or password is wrong"
    TOPIC_DELETION_DISABLED = 73, False, "the cluster does not delete topics"
    OFFSET_NOT_AVAILABLE = 78, True, "the partition's new leader does not know the high watermark yet"
    THROTTLING_QUOTA_EXCEEDED = 89, True, "the client exceeded its quota; try again later"
    PRODUCER_FENCED = 90, False, "the producer's epoch is stale: a newer producer uses the same transactional id"


_BY_NUMBER = {int(code): code for code in Code}


def code_of(number: int) -> Code | None:
    """The row for a number from the wire, if the table has it."""
    return _BY_NUMBER.get(number)


class MillstreamError(Exception):
    """Base class of Millstream's own exceptions."""


class RequestError(MillstreamError):
    """Fails the request. The response has `code`, and `detail` if the protocol has a field for it."""

    def __init__(self, code: Code, detail: str | None = None) -> None:
        super().__init__(detail or code.text)
        self.code = code
        self.detail = detail or code.text


class ProtocolError(MillstreamError):
    """Closes the connection: its bytes cannot be framed or decoded."""


class StartupError(MillstreamError):
    """Ends the process: the command prints one sentence and exits with 1."""


class StoreInUse(StartupError):
    """Another broker holds the directory's lock."""

    def __init__(self, directory: str, pid: str) -> None:
        super().__init__(
            f"{directory} is in use by another broker (process {pid}); "
            "stop it, or give this one another directory (serve --data)"
        )


class LogReadOnly(RequestError):
    """A log whose sync failed: acknowledged records stay readable, appends fail until a restart."""

    def __init__(self, log: str, cause: str) -> None:
        super().__init__(Code.KAFKA_STORAGE_ERROR, f"{log} is read-only because a sync failed: {cause}")


class LogLost(RequestError):
    """A log whose directory is missing. The records may be in a backup, so no other record gets their offsets."""

    def __init__(self, log: str, directory: str) -> None:
        detail = (
            f"{log} is lost: its directory {directory} is missing; restore it and restart the broker, "
            "or delete the topic"
        )
        super().__init__(Code.KAFKA_STORAGE_ERROR, detail)


class Diverged(RequestError):
    """A follower's log has another batch than its leader, and must be truncated to where both agree (KIP-101)."""

    def __init__(self, detail: str) -> None:
        super().__init__(Code.INVALID_REQUEST, detail)


class RevisionConflict(MillstreamError):
    """A metadata transaction with a stale revision; no part of it was applied."""

    def __init__(self, key: str, expected: int, found: int) -> None:
        super().__init__(f"{key} is at revision {found}, not {expected}")
        self.key = key


# Exceptions of the Python API. A broker's errors keep their code, whether it is embedded or remote.


class UnknownTopic(RequestError):
    """There is no such topic or partition."""


class TopicExists(RequestError):
    """A topic of that name exists already."""


class OutOfRange(RequestError):
    """The partition does not hold the offset."""


class TooLarge(RequestError):
    """A record or batch exceeds the topic's limit."""


class LeaseLost(RequestError):
    """The worker no longer holds the job's lease: it expired, or the job was acknowledged."""


class NotActive(MillstreamError):
    """A commit by a member of an exclusive group that is not, or no longer, active."""

    def __init__(self, group: str, topic: str) -> None:
        super().__init__(f"this member of {group} is a standby for {topic}: only the active member may commit")


class NotMember(MillstreamError):
    """A stale commit: the stream's member lost the partition. The new owner resumes from the last commit."""


class BufferFull(MillstreamError):
    """A buffered sender is full and is set to raise instead of waiting."""


class SendFailed(MillstreamError):
    """A buffered sender could not send some records; `failures` has them with their reasons."""

    def __init__(self, failures: list[tuple[object, BaseException]], count: int) -> None:
        first = failures[0][1]
        super().__init__(f"{count} record{'s' if count != 1 else ''} could not be sent: {first}")
        self.failures = failures
        self.count = count


class Undecodable(MillstreamError):
    """The decoder refused a record's value; `record` has the raw bytes."""

    def __init__(self, record: object, text: str) -> None:
        super().__init__(text)
        self.record = record


class Closed(MillstreamError):
    """The object was closed, or never opened: use it inside `async with`."""


class Unreachable(MillstreamError):
    """No broker answered in time."""


class Unsupported(MillstreamError):
    """Kafka's protocol or the broker lacks this feature."""


_REFUSALS: dict[Code, type[RequestError]] = {
    Code.UNKNOWN_TOPIC_OR_PARTITION: UnknownTopic,
    Code.UNKNOWN_TOPIC_ID: UnknownTopic,
    Code.TOPIC_ALREADY_EXISTS: TopicExists,
    Code.OFFSET_OUT_OF_RANGE: OutOfRange,
    Code.MESSAGE_TOO_LARGE: TooLarge,
    Code.RECORD_LIST_TOO_LARGE: TooLarge,
    Code.INVALID_RECORD_STATE: LeaseLost,
}


def refusal(code: Code, detail: str | None = None) -> RequestError:
    """The exception for a code, of its own class if there is one."""
    return _REFUSALS.get(code, RequestError)(code, detail)
