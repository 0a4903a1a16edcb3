-- What was stored by schema 1 becomes one chapter, in the order of its old index. A process of the old version that still
-- has the file open can store no batches any more, for `batches` is a view now.
ALTER TABLE batches RENAME TO arrivals;
ALTER TABLE arrivals ADD COLUMN chapter INTEGER NOT NULL DEFAULT 0;
DROP INDEX batches_by_offset;
CREATE UNIQUE INDEX arrivals_by_chapter
    ON arrivals (chapter, log_id, last_offset, base_offset, max_timestamp, size);
CREATE TABLE chapters (
    log_id      INTEGER NOT NULL,
    base_offset INTEGER NOT NULL,
    chapter     INTEGER NOT NULL,
    PRIMARY KEY (log_id, base_offset)
) WITHOUT ROWID;
INSERT INTO chapters SELECT log_id, min(base_offset), 0 FROM arrivals GROUP BY log_id;
CREATE VIEW batches AS
    SELECT chapters.log_id, chapters.base_offset AS chapter_offset, arrivals.rowid AS arrival, arrivals.last_offset,
        arrivals.base_offset, arrivals.max_timestamp, arrivals.size, arrivals.data
    FROM chapters CROSS JOIN arrivals ON arrivals.chapter = chapters.chapter AND arrivals.log_id = chapters.log_id;
CREATE TABLE touched (times INTEGER NOT NULL);
INSERT INTO touched VALUES (0);
