"""Intended differences from Kafka, with reasons: rows of `docs/compatibility.md`."""

from __future__ import annotations

DIFFERENCES: list[tuple[str, str, str]] = [
    (
        "`compression.type` and levels",
        "accepted and described; batches are never compressed again",
        "the log holds the bytes that the producer sent",
    ),
    (
        "`min.insync.replicas`, `unclean.leader.election.enable`, `*.throttled.replicas`",
        "accepted and described; no effect",
        "each partition has one copy",
    ),
    (
        "`local.retention.*`, `remote.*`",
        "accepted and described; no effect; `remote.storage.enable=true` is refused",
        "there is no tiered storage",
    ),
    (
        "`file.delete.delay.ms`, `preallocate`, `segment.index.bytes`, `segment.jitter.ms`",
        "accepted and described; no effect",
        "segment files do not need them",
    ),
    (
        "`flush.messages`, `flush.ms`",
        "can only ask for more syncs than `flush` does",
        "an answer with `flush=always` means that the record is synced",
    ),
    (
        "`message.timestamp.after.max.ms`, `message.timestamp.before.max.ms`",
        "the broker checks the base and the largest timestamp in a batch's header. It checks every record if the topic "
        "is compacted or sets `before`, and if a door takes records one by one. Otherwise a record's timestamp may lie "
        "outside the range that its batch's header gives. Kafka checks every record",
        "the broker does not decode batches on the produce path. Lookups by time and retention use the header, so such "
        "a record affects neither",
    ),
    (
        "`segment.ms`",
        "one day by default; Kafka: seven",
        "retention removes whole segments",
    ),
    (
        "`group.*`, `millstream.*` and `flush` of a topic",
        "not in Kafka; described if they are set or requested by name",
        "tools copy every setting that is described",
    ),
    (
        "broker settings",
        "defaults of topic settings can be altered for one broker or for all, and are durable; the broker refuses "
        "unknown names, Kafka stores them",
        "a misspelt name must not appear to take effect",
    ),
    (
        "`share.*` settings of a group",
        "the first one creates the share group under that name; `consumer.*` settings do not",
        "`millstream queue create` and Kafka's tools create queues in the same way",
    ),
    (
        "names of group settings",
        "`streams.*` are unknown; dead-letter, delivery and lock settings are described even if they are not set",
        "there are no streams groups (KIP-1071); the other settings are those that tune a queue",
    ),
    (
        "`segment.bytes`",
        "at least 1,024 bytes; Kafka: 1 MiB",
        "small segments make retention and compaction visible in tests",
    ),
    (
        "DescribeProducers",
        "`last_timestamp` is when the broker took the last batch, not the batch's own time",
        "the broker forgets a producer by the time since its last batch",
    ),
    (
        "`group.initial.rebalance.delay.ms`",
        "0 by default; Kafka: 3000 (`initial_rebalance_delay_ms` in the configuration)",
        "a single consumer starts at once, and a rebalance costs no disk; set 3000 where large groups start together",
    ),
    (
        "internal topics",
        "Kafka's three names only; `__dlq__` is a topic like any other",
        "patterns and listings must not skip users' topics",
    ),
    (
        "`__consumer_offsets`",
        "not there: a tool that reads it finds no topic; ask with OffsetFetch, `kafka-consumer-groups` or `/metrics`",
        "offsets are keys of the metadata store, which stay small and need no compaction",
    ),
    (
        "AlterShareGroupOffsets",
        "GROUP_ID_NOT_FOUND for a group that does not exist, NON_EMPTY_GROUP for one with members; Kafka "
        "4.1.1 answers without an error and does nothing",
        "a reset without effect must not look successful",
    ),
    (
        "`share.auto.offset.reset`",
        "`latest` and `earliest`; `by_duration` is refused",
        "not implemented",
    ),
    (
        "transactions",
        "TRANSACTIONAL_ID_AUTHORIZATION_FAILED; `transaction.version` is not announced",
        "not implemented",
    ),
]
