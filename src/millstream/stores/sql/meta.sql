-- Metadata of one broker: topics, configurations, committed offsets, group generations.
CREATE TABLE IF NOT EXISTS meta (
    key      TEXT PRIMARY KEY,
    value    BLOB NOT NULL,
    revision INTEGER NOT NULL
) WITHOUT ROWID;
