-- name: setup_lock
SELECT pg_advisory_xact_lock(1835625580), set_config('idle_in_transaction_session_timeout', $1, true)

-- name: schema_exists
SELECT to_regnamespace('millstream') IS NOT NULL, to_regclass('millstream.schema_version') IS NOT NULL

-- name: schema_version
SELECT max(version) FROM millstream.schema_version

-- name: session
SELECT set_config('default_transaction_isolation', 'read committed', false),
       set_config('synchronous_commit', CASE current_setting('synchronous_commit') WHEN 'off' THEN 'on'
                                        ELSE current_setting('synchronous_commit') END, false),
       set_config('idle_in_transaction_session_timeout', '0', false)

-- name: at_work
-- What waits for a lock is at work as well.
SELECT array(SELECT pid FROM pg_stat_activity WHERE state = 'active' AND usename = current_user)

-- name: make_logs
INSERT INTO millstream.logs (topic_id, partition) SELECT $1, generate_series(0, $2::int - 1) ON CONFLICT DO NOTHING

-- name: logs_of_topic
SELECT id, version, start_offset, end_offset, size_bytes FROM millstream.logs
WHERE topic_id = $1 AND partition < $2 AND NOT closed ORDER BY partition

-- name: logs
SELECT id, version, start_offset, end_offset, size_bytes FROM millstream.logs
WHERE id = ANY ($1::bigint[]) AND NOT closed

-- name: append
SELECT codes, bases, states
FROM millstream.append($1::bigint[], $2::int[], $3::bigint[], $4::bigint[], $5::int[], $6::int[], $7::bytea[], $8::bigint)

-- name: append_and_hold
-- Within a transaction that goes on, and now has locks.
SELECT codes, bases, states, set_config('idle_in_transaction_session_timeout', $9, true)
FROM millstream.append($1::bigint[], $2::int[], $3::bigint[], $4::bigint[], $5::int[], $6::int[], $7::bytea[], $8::bigint)

-- name: read
SELECT last_offset, data FROM (
    SELECT last_offset, size, data, sum(size) OVER (ORDER BY last_offset ROWS UNBOUNDED PRECEDING) AS total
    FROM (
        SELECT last_offset, size, data FROM millstream.batches
        WHERE log_id = $1 AND last_offset >= $2 AND last_offset < $3 ORDER BY last_offset LIMIT $5
    ) AS next
) AS counted
WHERE total <= $4 OR total = size

-- name: rows
SELECT base_offset, last_offset, max_timestamp, size FROM millstream.batches
WHERE log_id = $1 AND last_offset >= $2 ORDER BY last_offset LIMIT $3

-- name: first_at
SELECT data FROM millstream.batches WHERE log_id = $1 AND last_offset = (
    SELECT last_offset FROM millstream.batches
    WHERE log_id = $1 AND last_offset >= $2 AND last_offset < $3 AND max_timestamp >= $4 ORDER BY last_offset LIMIT 1
)

-- name: newest_time
SELECT coalesce(max(max_timestamp), -1) FROM millstream.batches
WHERE log_id = $1 AND last_offset >= $2 AND last_offset < $3 AND base_offset >= $2

-- name: trim
SELECT millstream.trim($1::bigint, $2::bigint)

-- name: remove_below
SELECT millstream.remove_below($1::bigint, $2::bigint, $3::int)

-- name: truncate
SELECT millstream.truncate($1::bigint, $2::bigint)

-- name: producers
SELECT producer_id, epoch, seen_ms, firsts, lasts, bases FROM millstream.producers WHERE log_id = $1

-- name: forget_idle_producers
DELETE FROM millstream.producers WHERE seen_ms < $1

-- name: forget_surplus_producers
-- Not those that an append has used since they were ranked.
DELETE FROM millstream.producers WHERE (log_id, producer_id, seen_ms) IN (
    SELECT log_id, producer_id, seen_ms FROM (
        SELECT log_id, producer_id, seen_ms, row_number() OVER (PARTITION BY log_id ORDER BY seen_ms DESC) AS place
        FROM millstream.producers
    ) AS ranked WHERE place > $1
)

-- name: every_log_of_topic
SELECT id FROM millstream.logs WHERE topic_id = $1

-- name: close_log
UPDATE millstream.logs SET closed = true WHERE id = $1

-- name: delete_log
DELETE FROM millstream.logs WHERE id = $1

-- name: delete_producers
DELETE FROM millstream.producers WHERE log_id = $1

-- name: topic_ids
SELECT DISTINCT topic_id FROM millstream.logs

-- name: revision
SELECT revision FROM millstream.meta_revision

-- name: get
SELECT value, revision FROM millstream.meta WHERE key = $1 AND value IS NOT NULL

-- name: list
SELECT key, value, revision FROM millstream.meta WHERE key ^@ $1 AND value IS NOT NULL ORDER BY key

-- name: transact
SELECT revisions, present
FROM millstream.transact($1::int, $2::int[], $3::int[], $4::text[], $5::bytea[], $6::bigint[])

-- name: changes
SELECT last.revision AS last, last.floor, meta.key, meta.value, meta.revision
FROM millstream.meta_revision AS last
LEFT JOIN millstream.meta ON meta.revision > $1
    AND EXISTS (SELECT FROM unnest($2::text[]) AS prefix WHERE meta.key ^@ prefix)
ORDER BY meta.revision

-- name: forget_deleted
-- The lock of `transact` first, as there: else the two could wait for each other.
WITH last AS MATERIALIZED (SELECT revision FROM millstream.meta_revision FOR NO KEY UPDATE), gone AS (
    DELETE FROM millstream.meta USING last
    WHERE meta.value IS NULL AND meta.revision <= last.revision - $1::bigint RETURNING meta.revision
)
UPDATE millstream.meta_revision SET floor = greatest(floor, (SELECT max(revision) FROM gone))
WHERE EXISTS (SELECT FROM gone)
