-- Logs and metadata in PostgreSQL, schema 1. Everything lives in the schema `millstream`.

CREATE TABLE millstream.schema_version (version int NOT NULL);
INSERT INTO millstream.schema_version VALUES (1);

-- One row per partition; whoever appends to it holds its lock until the commit, which is what keeps offsets dense.
-- A log that is being deleted is closed first and goes last, so that a crash in between leaves something to go on from.
-- Room is left in the pages: these rows change with every append, and in place that costs no index.
CREATE TABLE millstream.logs (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    topic_id     text   NOT NULL,
    partition    int    NOT NULL,
    start_offset bigint NOT NULL DEFAULT 0,
    end_offset   bigint NOT NULL DEFAULT 0,
    size_bytes   bigint NOT NULL DEFAULT 0,
    version      bigint NOT NULL DEFAULT 0,
    closed       boolean NOT NULL DEFAULT false,
    UNIQUE (topic_id, partition)
) WITH (fillfactor = 50);

-- One row per batch, found by the last offset that it reaches. The index alone answers questions about time and size.
-- Batches are compressed by their producers if at all: a second compression would only cost time.
CREATE TABLE millstream.batches (
    log_id        bigint NOT NULL,
    last_offset   bigint NOT NULL,
    base_offset   bigint NOT NULL,
    max_timestamp bigint NOT NULL,
    size          int    NOT NULL,
    data          bytea  NOT NULL,
    PRIMARY KEY (log_id, last_offset) INCLUDE (base_offset, max_timestamp, size)
);
ALTER TABLE millstream.batches ALTER COLUMN data SET STORAGE EXTERNAL;

-- The last five batches of each idempotent producer: the rules are those of log/producers.py.
CREATE TABLE millstream.producers (
    log_id      bigint   NOT NULL,
    producer_id bigint   NOT NULL,
    epoch       smallint NOT NULL,
    seen_ms     bigint   NOT NULL,
    firsts      int[]    NOT NULL,
    lasts       int[]    NOT NULL,
    bases       bigint[] NOT NULL,
    PRIMARY KEY (log_id, producer_id)
) WITH (fillfactor = 50);

-- Versioned keys. What was deleted stays for a while without a value, so that others can be told.
CREATE TABLE millstream.meta (
    key      text COLLATE "C" PRIMARY KEY,
    value    bytea,
    revision bigint NOT NULL
);
CREATE INDEX meta_by_revision ON millstream.meta (revision);

-- The last revision, and the one up to which deletions were forgotten. Its lock puts all transactions in one order.
CREATE TABLE millstream.meta_revision (
    single   boolean PRIMARY KEY DEFAULT true CHECK (single),
    revision bigint NOT NULL,
    floor    bigint NOT NULL
) WITH (fillfactor = 50);
INSERT INTO millstream.meta_revision (revision, floor) VALUES (0, 0);

-- Tells whoever listens about logs that changed: "l", then for each its id, version, start, end and size. What a
-- notification may carry is bounded, so a long list goes in several.
CREATE FUNCTION millstream.tell(states text[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    step CONSTANT int := 60;
    at int := 1;
BEGIN
    WHILE at <= coalesce(array_length(states, 1), 0) LOOP
        PERFORM pg_notify('millstream', 'l ' || array_to_string(states[at : at + step - 1], ' '));
        at := at + step;
    END LOOP;
END $$;

-- Stores batches, those of one log behind each other; the caller has sorted them by log, so that everybody takes locks
-- in the same order. Answers for each batch with 0 and its offset, with 1 and the offset that it got the first time,
-- or with a code of errors.py; and with the states of the logs that changed.
CREATE FUNCTION millstream.append(
    in_logs bigint[], in_counts int[], in_times bigint[], in_producers bigint[], in_epochs int[], in_sequences int[],
    in_data bytea[], in_now_ms bigint, OUT codes int[], OUT bases bigint[], OUT states bigint[]
) LANGUAGE plpgsql AS $$
DECLARE
    sequences CONSTANT bigint := 2147483648;
    current bigint := -1;
    known boolean := false;
    changed boolean := false;
    log_version bigint; log_start bigint; log_end bigint; log_size bigint;
    told text[] := '{}';
    producer millstream.producers%ROWTYPE;
    first_sequence bigint; last_sequence bigint; newest bigint;
    code int; base bigint; here int;
BEGIN
    codes := '{}'; bases := '{}'; states := '{}';
    FOR i IN 1 .. array_length(in_logs, 1) + 1 LOOP
        IF i > array_length(in_logs, 1) OR in_logs[i] <> current THEN
            IF changed THEN
                log_version := log_version + 1;
                UPDATE millstream.logs SET version = log_version, end_offset = log_end, size_bytes = log_size
                WHERE id = current;
                states := states || ARRAY[current, log_version, log_start, log_end, log_size];
                told := told || concat_ws(' ', current, log_version, log_start, log_end, log_size);
            END IF;
            EXIT WHEN i > array_length(in_logs, 1);
            current := in_logs[i];
            changed := false;
            SELECT version, start_offset, end_offset, size_bytes INTO log_version, log_start, log_end, log_size
            FROM millstream.logs WHERE id = current AND NOT closed FOR NO KEY UPDATE;
            known := FOUND;
        END IF;
        code := 0;
        base := log_end;
        IF NOT known THEN
            code := 3;
        ELSIF in_producers[i] >= 0 THEN
            first_sequence := in_sequences[i];
            last_sequence := (first_sequence + in_counts[i] - 1) % sequences;
            SELECT * INTO producer FROM millstream.producers WHERE log_id = current AND producer_id = in_producers[i];
            IF NOT FOUND OR (in_epochs[i] > producer.epoch AND first_sequence = 0) THEN
                INSERT INTO millstream.producers VALUES (
                    current, in_producers[i], in_epochs[i], in_now_ms,
                    ARRAY[first_sequence::int], ARRAY[last_sequence::int], ARRAY[base]
                ) ON CONFLICT (log_id, producer_id) DO UPDATE SET
                    epoch = excluded.epoch, seen_ms = excluded.seen_ms,
                    firsts = excluded.firsts, lasts = excluded.lasts, bases = excluded.bases;
            ELSIF in_epochs[i] < producer.epoch THEN
                code := 47;
            ELSIF in_epochs[i] > producer.epoch THEN
                code := 45;
            ELSE
                newest := producer.lasts[array_length(producer.lasts, 1)];
                IF first_sequence = (newest + 1) % sequences THEN
                    here := greatest(array_length(producer.lasts, 1) - 3, 1);
                    UPDATE millstream.producers SET
                        seen_ms = in_now_ms,
                        firsts = firsts[here :] || first_sequence::int,
                        lasts = lasts[here :] || last_sequence::int,
                        bases = producers.bases[here :] || base
                    WHERE log_id = current AND producer_id = in_producers[i];
                ELSE
                    -- Older by less than half of all sequences: a repeat that is no longer remembered. Else a gap.
                    code := CASE WHEN (newest - first_sequence + sequences) % sequences < sequences / 2
                        THEN 46 ELSE 45 END;
                    FOR at IN 1 .. array_length(producer.lasts, 1) LOOP
                        IF producer.firsts[at] = first_sequence AND producer.lasts[at] = last_sequence THEN
                            code := 1;
                            base := producer.bases[at];
                        END IF;
                    END LOOP;
                END IF;
            END IF;
        END IF;
        IF code = 0 THEN
            INSERT INTO millstream.batches VALUES (
                current, base + in_counts[i] - 1, base, in_times[i], octet_length(in_data[i]),
                overlay(in_data[i] PLACING int8send(base) FROM 1 FOR 8)
            );
            log_end := base + in_counts[i];
            log_size := log_size + octet_length(in_data[i]);
            changed := true;
        END IF;
        codes := codes || code;
        bases := bases || base;
    END LOOP;
    PERFORM millstream.tell(told);
END $$;

-- Moves the start of a log.
CREATE FUNCTION millstream.trim(in_log bigint, in_offset bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    state text;
BEGIN
    UPDATE millstream.logs SET version = version + 1, start_offset = in_offset
    WHERE id = in_log AND start_offset < in_offset AND end_offset >= in_offset
    RETURNING concat_ws(' ', id, version, start_offset, end_offset, size_bytes) INTO state;
    IF FOUND THEN
        PERFORM millstream.tell(ARRAY[state]);
    END IF;
END $$;

-- Removes some of the batches below an offset, or below the start of the log; answers with how many.
CREATE FUNCTION millstream.remove_below(in_log bigint, in_offset bigint, in_rows int) RETURNS int
LANGUAGE plpgsql AS $$
DECLARE
    log_start bigint;
    state text;
    removed int;
    freed bigint;
BEGIN
    SELECT start_offset INTO log_start FROM millstream.logs WHERE id = in_log FOR NO KEY UPDATE;
    WITH gone AS (
        DELETE FROM millstream.batches WHERE log_id = in_log AND last_offset <= (
            SELECT max(last_offset) FROM (
                SELECT last_offset FROM millstream.batches
                WHERE log_id = in_log AND last_offset < coalesce(in_offset, log_start)
                ORDER BY last_offset LIMIT in_rows
            ) AS nearest
        ) RETURNING size
    )
    SELECT count(*), coalesce(sum(size), 0) INTO removed, freed FROM gone;
    IF removed > 0 THEN
        UPDATE millstream.logs SET version = version + 1, size_bytes = size_bytes - freed WHERE id = in_log
        RETURNING concat_ws(' ', id, version, start_offset, end_offset, size_bytes) INTO state;
        IF FOUND THEN
            PERFORM millstream.tell(ARRAY[state]);
        END IF;
    END IF;
    RETURN removed;
END $$;

-- Drops what lies at or above an offset, whole batches.
CREATE FUNCTION millstream.truncate(in_log bigint, in_offset bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    new_end bigint;
    freed bigint;
    state text;
BEGIN
    PERFORM 1 FROM millstream.logs WHERE id = in_log AND end_offset > in_offset FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    WITH gone AS (
        DELETE FROM millstream.batches WHERE log_id = in_log AND last_offset >= in_offset RETURNING base_offset, size
    )
    SELECT min(base_offset), coalesce(sum(size), 0) INTO new_end, freed FROM gone;
    UPDATE millstream.logs SET
        version = version + 1, size_bytes = size_bytes - freed,
        end_offset = coalesce(new_end, greatest(in_offset, start_offset)),
        start_offset = least(start_offset, coalesce(new_end, greatest(in_offset, start_offset)))
    WHERE id = in_log
    RETURNING end_offset, concat_ws(' ', id, version, start_offset, end_offset, size_bytes) INTO new_end, state;
    PERFORM millstream.tell(ARRAY[state]);
    UPDATE millstream.producers AS p SET firsts = kept.firsts, lasts = kept.lasts, bases = kept.bases
    FROM (
        SELECT o.producer_id, array_agg(u.f ORDER BY u.n) AS firsts, array_agg(u.l ORDER BY u.n) AS lasts,
               array_agg(u.b ORDER BY u.n) AS bases
        FROM millstream.producers AS o, unnest(o.firsts, o.lasts, o.bases) WITH ORDINALITY AS u (f, l, b, n)
        WHERE o.log_id = in_log AND u.b < new_end GROUP BY o.producer_id
    ) AS kept
    WHERE p.log_id = in_log AND p.producer_id = kept.producer_id;
    DELETE FROM millstream.producers WHERE log_id = in_log AND bases[array_length(bases, 1)] >= new_end;
END $$;

-- Metadata transactions, one after the other, each all or nothing. Operation i belongs to transaction in_owners[i]
-- (from 1); kinds are 0 put, 1 delete, 2 check. Answers for each with its revision; a negative one means that the
-- operation of that number found another revision than it wanted, and `present` says which.
CREATE FUNCTION millstream.transact(
    in_count int, in_owners int[], in_kinds int[], in_keys text[], in_values bytea[], in_revisions bigint[],
    OUT revisions bigint[], OUT present bigint[]
) LANGUAGE plpgsql AS $$
DECLARE
    last bigint;
    before bigint;
    at int := 1;
    stop int;
    there bigint;
    verdict bigint;
BEGIN
    revisions := '{}'; present := '{}';
    SELECT revision INTO last FROM millstream.meta_revision FOR NO KEY UPDATE;
    before := last;
    FOR owner IN 1 .. in_count LOOP
        stop := at;
        verdict := last + 1;
        there := 0;
        WHILE stop <= coalesce(array_length(in_owners, 1), 0) AND in_owners[stop] = owner LOOP
            IF verdict > 0 AND in_revisions[stop] IS NOT NULL THEN
                there := coalesce(
                    (SELECT revision FROM millstream.meta WHERE key = in_keys[stop] AND value IS NOT NULL), 0
                );
                IF there <> in_revisions[stop] THEN
                    verdict := -stop;
                END IF;
            END IF;
            stop := stop + 1;
        END LOOP;
        IF verdict > 0 THEN
            last := verdict;
            WHILE at < stop LOOP
                IF in_kinds[at] = 0 THEN
                    INSERT INTO millstream.meta VALUES (in_keys[at], in_values[at], last)
                    ON CONFLICT (key) DO UPDATE SET value = excluded.value, revision = excluded.revision;
                ELSIF in_kinds[at] = 1 THEN
                    UPDATE millstream.meta SET value = NULL, revision = last
                    WHERE key = in_keys[at] AND value IS NOT NULL;
                END IF;
                at := at + 1;
            END LOOP;
        END IF;
        at := stop;
        revisions := revisions || verdict;
        present := present || there;
    END LOOP;
    IF last > before THEN
        UPDATE millstream.meta_revision SET revision = last;
        PERFORM pg_notify('millstream', 'm ' || last);
    END IF;
END $$;
