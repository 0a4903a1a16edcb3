-- Logs and metadata in one SQLite file, schema 2.

-- One row per partition. `version` grows with every change of a log: of two states the larger is the newer. An id is
-- never given twice, or the batches of a deleted topic, removed step by step, would be taken for those of a new one. A
-- log that is being deleted is closed first and goes last, so that a crash in between leaves something to go on from.
CREATE TABLE logs (
    id           INTEGER PRIMARY KEY AUTOINCREMENT,
    topic_id     TEXT    NOT NULL,
    partition    INTEGER NOT NULL,
    start_offset INTEGER NOT NULL DEFAULT 0,
    end_offset   INTEGER NOT NULL DEFAULT 0,
    size_bytes   INTEGER NOT NULL DEFAULT 0,
    version      INTEGER NOT NULL DEFAULT 0,
    closed       INTEGER NOT NULL DEFAULT 0,
    UNIQUE (topic_id, partition)
);

-- One row per batch, in the order in which they came, so that a transaction over many logs writes neighbouring pages. So
-- does the index: it is cut into chapters, which are runs of rows, and sorted by log only inside of each. Sorted by log
-- throughout, it would have a page to write for every log of a transaction.
CREATE TABLE arrivals (
    chapter       INTEGER NOT NULL,
    log_id        INTEGER NOT NULL,
    last_offset   INTEGER NOT NULL,
    base_offset   INTEGER NOT NULL,
    max_timestamp INTEGER NOT NULL,
    size          INTEGER NOT NULL,
    data          BLOB    NOT NULL
);
CREATE UNIQUE INDEX arrivals_by_chapter
    ON arrivals (chapter, log_id, last_offset, base_offset, max_timestamp, size);

-- In which chapters a log has batches, and where its part of each begins. There is a row here if and only if there is a
-- batch, so that a chapter whose number comes again belongs to nobody.
CREATE TABLE chapters (
    log_id      INTEGER NOT NULL,
    base_offset INTEGER NOT NULL,
    chapter     INTEGER NOT NULL,
    PRIMARY KEY (log_id, base_offset)
) WITHOUT ROWID;

-- The batches of a log, found by the offset at which their chapter begins and the last offset that they reach.
CREATE VIEW batches AS
    SELECT chapters.log_id, chapters.base_offset AS chapter_offset, arrivals.rowid AS arrival, arrivals.last_offset,
        arrivals.base_offset, arrivals.max_timestamp, arrivals.size, arrivals.data
    FROM chapters CROSS JOIN arrivals ON arrivals.chapter = chapters.chapter AND arrivals.log_id = chapters.log_id;

-- The last batches of each idempotent producer, as log/producers.py keeps them: [[first, last, offset], ...].
CREATE TABLE producers (
    log_id      INTEGER NOT NULL,
    producer_id INTEGER NOT NULL,
    epoch       INTEGER NOT NULL,
    seen_ms     INTEGER NOT NULL,
    batches     TEXT    NOT NULL,
    PRIMARY KEY (log_id, producer_id)
) WITHOUT ROWID;

-- Versioned keys. What was deleted stays for a while without a value, so that others can be told.
CREATE TABLE meta (
    key      TEXT PRIMARY KEY,
    value    BLOB,
    revision INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX meta_by_revision ON meta (revision);

-- The last revision, and the one up to which deletions were forgotten.
CREATE TABLE meta_revision (
    row      INTEGER PRIMARY KEY CHECK (row = 0),
    revision INTEGER NOT NULL,
    floor    INTEGER NOT NULL
);
INSERT INTO meta_revision VALUES (0, 0, 0);

-- What is changed where a commit is wanted, and nothing else: a row with the same values as before would not be written.
CREATE TABLE touched (times INTEGER NOT NULL);
INSERT INTO touched VALUES (0);
