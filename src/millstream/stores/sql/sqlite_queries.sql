-- name: make_log
INSERT INTO logs (topic_id, partition) VALUES (?, ?) ON CONFLICT DO NOTHING

-- name: logs_of_topic
SELECT id, version, start_offset, end_offset, size_bytes FROM logs
WHERE topic_id = ? AND partition < ? AND NOT closed ORDER BY partition

-- name: log
SELECT id, version, start_offset, end_offset, size_bytes FROM logs WHERE id = ? AND NOT closed

-- name: logs
SELECT id, version, start_offset, end_offset, size_bytes FROM logs WHERE NOT closed

-- name: update_log
UPDATE logs SET version = ?, start_offset = ?, end_offset = ?, size_bytes = ? WHERE id = ?

-- name: touch
UPDATE touched SET times = times + 1

-- name: last_arrival
SELECT coalesce(max(rowid), 0) FROM arrivals

-- name: last_chapter
SELECT chapter FROM chapters WHERE log_id = ? ORDER BY base_offset DESC LIMIT 1

-- name: begin_chapter
INSERT INTO chapters (log_id, base_offset, chapter) VALUES (?, ?, ?)

-- name: insert_batch
INSERT INTO arrivals (rowid, chapter, log_id, last_offset, base_offset, max_timestamp, size, data)
VALUES (?, ?, ?, ?, ?, ?, ?, ?)

-- What follows and begins at an offset begins in the chapter that the offset lies in.

-- name: read
SELECT size, last_offset, data FROM batches
WHERE log_id = :log AND last_offset >= :offset AND last_offset < :below AND chapter_offset < :below
AND chapter_offset >= (SELECT coalesce(max(base_offset), 0) FROM chapters WHERE log_id = :log AND base_offset <= :offset)
ORDER BY chapter_offset, last_offset

-- name: rows
SELECT base_offset, last_offset, max_timestamp, size FROM batches
WHERE log_id = :log AND last_offset >= :offset
AND chapter_offset >= (SELECT coalesce(max(base_offset), 0) FROM chapters WHERE log_id = :log AND base_offset <= :offset)
ORDER BY chapter_offset, last_offset LIMIT :count

-- name: first_at
SELECT data FROM batches
WHERE log_id = :log AND last_offset >= :offset AND last_offset < :below AND chapter_offset < :below
AND chapter_offset >= (SELECT coalesce(max(base_offset), 0) FROM chapters WHERE log_id = :log AND base_offset <= :offset)
AND max_timestamp >= :timestamp
ORDER BY chapter_offset, last_offset LIMIT 1

-- name: newest_time
SELECT coalesce(max(max_timestamp), -1) FROM batches
WHERE log_id = :log AND last_offset >= :offset AND last_offset < :below AND chapter_offset < :below
AND chapter_offset >= (SELECT coalesce(max(base_offset), 0) FROM chapters WHERE log_id = :log AND base_offset <= :offset)
AND base_offset >= :offset

-- name: tail
SELECT coalesce(min(base_offset), :otherwise), coalesce(sum(size), 0) FROM batches
WHERE log_id = :log AND last_offset >= :offset
AND chapter_offset >= (SELECT coalesce(max(base_offset), 0) FROM chapters WHERE log_id = :log AND base_offset <= :offset)

-- name: delete_tail
DELETE FROM arrivals WHERE rowid IN (
    SELECT arrival FROM batches
    WHERE log_id = :log AND last_offset >= :offset
    AND chapter_offset >= (SELECT coalesce(max(base_offset), 0) FROM chapters WHERE log_id = :log AND base_offset <= :offset)
)

-- name: rows_below
SELECT last_offset, size FROM batches WHERE log_id = :log AND last_offset < :offset AND chapter_offset < :offset
ORDER BY chapter_offset, last_offset LIMIT :count

-- name: delete_up_to
DELETE FROM arrivals WHERE rowid IN (
    SELECT arrival FROM batches WHERE log_id = :log AND last_offset <= :offset AND chapter_offset <= :offset
)

-- name: end_chapters
DELETE FROM chapters WHERE log_id = ? AND base_offset <= ? AND NOT EXISTS (
    SELECT 1 FROM arrivals WHERE arrivals.chapter = chapters.chapter AND arrivals.log_id = chapters.log_id
)

-- name: producers
SELECT producer_id, epoch, seen_ms, batches FROM producers WHERE log_id = ?

-- name: put_producer
INSERT OR REPLACE INTO producers (log_id, producer_id, epoch, seen_ms, batches) VALUES (?, ?, ?, ?, ?)

-- name: delete_producers
DELETE FROM producers WHERE log_id = ?

-- name: forget_idle_producers
DELETE FROM producers WHERE seen_ms < ?

-- name: crowded_logs
SELECT log_id, count(*) - ? FROM producers GROUP BY log_id HAVING count(*) > ?

-- name: forget_oldest_producers
DELETE FROM producers WHERE (log_id, producer_id) IN (
    SELECT log_id, producer_id FROM producers WHERE log_id = ? ORDER BY seen_ms LIMIT ?
)

-- name: every_log_of_topic
SELECT id FROM logs WHERE topic_id = ?

-- name: close_log
UPDATE logs SET closed = 1 WHERE id = ?

-- name: delete_log
DELETE FROM logs WHERE id = ?

-- name: topic_ids
SELECT DISTINCT topic_id FROM logs

-- name: revision
SELECT revision, floor FROM meta_revision

-- name: set_revision
UPDATE meta_revision SET revision = ?

-- name: get
SELECT value, revision FROM meta WHERE key = ? AND value IS NOT NULL

-- name: list
SELECT key, value, revision FROM meta WHERE key >= ? AND substr(key, 1, ?) = ? AND value IS NOT NULL ORDER BY key

-- name: put
INSERT OR REPLACE INTO meta (key, value, revision) VALUES (?, ?, ?)

-- name: delete
UPDATE meta SET value = NULL, revision = ? WHERE key = ? AND value IS NOT NULL

-- name: changes
SELECT key, value, revision FROM meta WHERE revision > ? ORDER BY revision

-- name: forget_deleted
DELETE FROM meta WHERE value IS NULL AND revision <= ?

-- name: set_floor
UPDATE meta_revision SET floor = max(floor, ?)
