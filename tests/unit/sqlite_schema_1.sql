-- Logs and metadata in one SQLite file, schema 1.

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

-- One row per batch, in the order in which they came, so that a transaction over many logs writes neighbouring pages.
-- The index finds a batch by the last offset that it reaches, and answers questions about time and size alone.
CREATE TABLE batches (
    log_id        INTEGER NOT NULL,
    last_offset   INTEGER NOT NULL,
    base_offset   INTEGER NOT NULL,
    max_timestamp INTEGER NOT NULL,
    size          INTEGER NOT NULL,
    data          BLOB    NOT NULL
);
CREATE UNIQUE INDEX batches_by_offset ON batches (log_id, last_offset, base_offset, max_timestamp, size);

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
