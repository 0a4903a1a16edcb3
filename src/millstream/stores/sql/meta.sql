-- Metadata of one broker: topics, configurations, committed offsets, group generations.
CREATE TABLE IF NOT EXISTS meta (
    key      TEXT PRIMARY KEY,
    value    BLOB NOT NULL,
    revision INTEGER NOT NULL
) WITHOUT ROWID;

-- The revision of the last transaction, in one row: it must not go back when the newest keys are deleted ones.
CREATE TABLE IF NOT EXISTS last_revision (
    row      INTEGER PRIMARY KEY CHECK (row = 0),
    revision INTEGER NOT NULL
);
