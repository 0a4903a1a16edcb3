# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""Decodes and encodes the records of a section, compiled. The twin `pure.py` defines the format and the rules.

Memory safety
-------------
1. `step` is the only reader. It moves one pointer towards one end, and compares a length with the bytes left before it
   adds it to the pointer. It reads a length once, into a local: a concurrent change of the bytes can cause wrong
   records, never a wrong address.
2. Columns are written only to reserved room, and no pointer into one is kept across a `reserve`.
3. The section's buffer is held (`PyObject_GetBuffer`) while pointers into it live, so it can be neither freed nor
   resized, and columns can be filled without the GIL.

Speed
-----
Nearly all records look alike: short, no headers, numbers of one to three bytes. `quick_step` reads only those, with few
checks, and leaves all others to `any_step`, which handles all shapes and all errors. Columns are filled in the same
pass, 32 bytes at a time where that many may be read and written past the end. A separate pass to measure would walk
the records twice, and the walk is half the time.

In the other direction, `put_rows` turns rows of columns into records. It compares every end of a value with its
column's bytes, measures every record before it writes it, and writes exactly the measured bytes.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_FromStringAndSize, PyByteArray_Resize
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.list cimport PyList_New, PyList_SET_ITEM
from cpython.memoryview cimport PyMemoryView_FromMemory
from cpython.object cimport PyTypeObject
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE, PyTuple_SET_ITEM
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport INT32_MAX, INT64_MAX, INT64_MIN, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from crc32c import crc32c as _crc32c

from millstream.records import columns as _columns
from millstream.records import pure as _pure
from millstream.records import rows as _rows
from millstream.records.columns import Binary, ColumnsTooLarge, Filled, HeaderLists
from millstream.records.record import Record
from millstream.records.rows import RowRefused

cdef extern from *:
    """
    static inline PyObject *tuple_of_type(PyTypeObject *type, Py_ssize_t size) { return type->tp_alloc(type, size); }
    """
    object tuple_of_type(PyTypeObject *type, Py_ssize_t size)
    void PyObject_GC_UnTrack(void *)
    enum:
        PyBUF_READ
    char *PyByteArray_AS_STRING(object) nogil

cdef extern from *:
    """
    /* The hot loop, in C for its compiler hints: the same lines in Cython take a quarter longer. */

    #define ALWAYS(condition) __builtin_expect(!!(condition), 1)
    #define NEVER(condition) __builtin_expect(!!(condition), 0)
    #define INLINED static inline __attribute__((always_inline))

    enum {
        OFFSET = 1, TIMESTAMP = 2, TIMESTAMP_TYPE = 4, KEY = 8, VALUE = 16, HEADERS = 32, ALL = 63,
        WIDE = 32,              /* bytes moved at once */
        QUICK_BYTES_MAX = 8191, /* of a quick record: what a number of two bytes can say */
        QUICK_SLACK = 64,       /* bytes after a quick record: 11 read unchecked up to its key, 31 moved in excess */
        PREFETCH_BYTES = 512,   /* distance of the prefetch ahead of the values; saves a fifth of the time */
    };

    typedef struct {
        const uint8_t *at, *end, *quick_end;
        int64_t base_offset, delta_min, delta_max, base_timestamp, time_mask;
        int64_t offset, timestamp;
        const uint8_t *key, *value, *headers;
        int32_t key_bytes, value_bytes, header_count;
    } Walk;

    typedef struct {
        uint8_t *validity, *data;
        int32_t *ends;
        int64_t rows_max, used, room;
    } Column;

    typedef struct {
        int columns;
        int64_t rows, header_rows;
        int64_t *offsets, *timestamps;
        int32_t *list_ends;
    } Table;

    /* A number of up to two or three bytes, still zigzag; NULL if it has more. The bytes must exist. */
    INLINED const uint8_t *short_number(const uint8_t *at, uint32_t *out, int bytes_max) {
        uint32_t value = at[0];
        if (ALWAYS(value < 0x80)) {
            *out = value;
            return at + 1;
        }
        *out = value = (value & 0x7F) | (uint32_t) at[1] << 7;
        if (ALWAYS(value < 0x4000)) return at + 2;
        if (bytes_max == 2) return NULL;
        *out = value = (value & 0x3FFF) | (uint32_t) at[2] << 14;
        return ALWAYS(value < 0x200000) ? at + 3 : NULL;
    }

    /* Reads a record of the common shape, or returns 0 and leaves it, broken ones included, to any_step.
       Odd numbers are negative. If the value ends one zero byte (the header count) before the record ends, no field
       ends too late. So this is the only end to check, except for the key's before it. */
    INLINED int quick_step(Walk *walk) {
        const uint8_t *at = walk->at, *stop;
        uint32_t length, time_delta, delta, size;
        if (NEVER(at >= walk->quick_end)) return 0;
        at = short_number(at, &length, 2);
        if (NEVER(!at || length & 1 || length >> 1 > walk->quick_end - at)) return 0;
        stop = at + (length >> 1);
        at = short_number(at + 1, &time_delta, 3);
        if (NEVER(!at)) return 0;
        at = short_number(at, &delta, 3);
        if (NEVER(!at || delta & 1 || delta >> 1 < walk->delta_min || delta >> 1 > walk->delta_max)) return 0;
        at = short_number(at, &size, 2);
        if (NEVER(!at)) return 0;
        walk->key = at;
        if (size & 1) {
            if (NEVER(size != 1)) return 0;
            walk->key_bytes = -1;
        } else {
            walk->key_bytes = size >>= 1;
            if (NEVER(size > stop - at)) return 0;
            at += size;
        }
        at = short_number(at, &size, 2);
        if (NEVER(!at)) return 0;
        walk->value = at;
        if (NEVER(size & 1)) {
            if (size != 1) return 0;
            walk->value_bytes = -1;
            size = 0;
        } else {
            walk->value_bytes = size >>= 1;
        }
        if (NEVER(size + 1 != stop - at || at[size])) return 0;
        walk->header_count = 0;
        walk->delta_min = (int64_t) (delta >> 1) + 1;
        walk->offset = walk->base_offset + (delta >> 1);
        walk->timestamp = walk->base_timestamp + ((int32_t) (time_delta >> 1 ^ -(time_delta & 1)) & walk->time_mask);
        walk->at = stop; /* known early, so that the processor starts on the next record early */
        return 1;
    }

    INLINED void put_end(Column *column, int64_t row, int32_t size) {
        if (ALWAYS(size > 0)) {
            column->used += size;
        } else if (size < 0) {
            column->validity[row >> 3] &= ~(1 << (row & 7));
        }
        column->ends[row + 1] = (int32_t) column->used;
    }

    INLINED void quick_put(Column *column, int64_t row, const uint8_t *start, int32_t size) {
        uint8_t *to = column->data + column->used;
        const uint8_t *end = start + size;
        for (; start < end; start += WIDE, to += WIDE) memcpy(to, start, WIDE);
        put_end(column, row, size);
    }

    INLINED int64_t put_columns(
        int columns, Walk *from, int64_t count, Table *table, Column *to_key, Column *to_value
    ) {
        /* Locals can live in registers, and there are few: all work that can wait comes after the loop. */
        Walk walk = *from;
        Column key = *to_key, value = *to_value;
        int64_t *offsets = table->offsets, *timestamps = table->timestamps;
        int64_t row = table->rows, stop = row + count;
        int64_t key_used_max = columns & KEY ? key.room - QUICK_BYTES_MAX - WIDE : 0;
        for (; row < stop; row++) {
            if (NEVER(key.used > key_used_max || !quick_step(&walk))) break;
            if (columns & OFFSET) offsets[row] = walk.offset;
            if (columns & TIMESTAMP) timestamps[row] = walk.timestamp;
            if (columns & KEY) quick_put(&key, row, walk.key, walk.key_bytes);
            if (columns & VALUE) {
                __builtin_prefetch(value.data + value.used + PREFETCH_BYTES, 1);
                __builtin_prefetch(value.data + value.used + PREFETCH_BYTES + 64, 1);
                quick_put(&value, row, walk.value, walk.value_bytes);
            }
        }
        *from = walk, *to_key = key, *to_value = value;
        if (columns & HEADERS) {
            int32_t *list_ends = table->list_ends, header_rows = (int32_t) table->header_rows;
            for (int64_t done = table->rows; done < row; done++) list_ends[done + 1] = header_rows;
        }
        count = row - table->rows;
        table->rows = row;
        return count;
    }

    /* Adds rows while they are quick and have room; returns their number. Values always have room.
       If all columns are wanted, the loop need not test each of them. */
    static int64_t put_quick_rows(Walk *walk, int64_t count, Table *table, Column *key, Column *value) {
        return table->columns == ALL ? put_columns(ALL, walk, count, table, key, value)
                                     : put_columns(table->columns, walk, count, table, key, value);
    }
    """
    enum:
        OFFSET, TIMESTAMP, TIMESTAMP_TYPE, KEY, VALUE, HEADERS
        WIDE, QUICK_BYTES_MAX, QUICK_SLACK
    ctypedef struct Walk:
        const uint8_t *at
        const uint8_t *end
        # Records after this are not quick: too few bytes follow them.
        const uint8_t *quick_end
        int64_t base_offset
        int64_t delta_min
        int64_t delta_max
        # With log-append time: the broker's time, and 0, which clears all deltas. Else the first record's, and -1.
        int64_t base_timestamp
        int64_t time_mask
        # The last record read; a size of -1 means null.
        int64_t offset
        int64_t timestamp
        const uint8_t *key
        const uint8_t *value
        const uint8_t *headers
        int32_t key_bytes
        int32_t value_bytes
        int32_t header_count
    ctypedef struct Column:
        uint8_t *validity
        uint8_t *data
        int32_t *ends
        int64_t rows_max
        int64_t used
        int64_t room
    ctypedef struct Table:
        int columns
        int64_t rows
        int64_t header_rows
        int64_t *offsets
        int64_t *timestamps
        int32_t *list_ends
    bint quick_step(Walk *) noexcept nogil
    void put_end(Column *, int64_t row, int32_t size) noexcept nogil
    int64_t put_quick_rows(Walk *, int64_t count, Table *, Column *key, Column *value) noexcept nogil

cdef extern from *:
    """
    /* Encodes rows of columns. `rows.py` defines the columns, `pure.py` the valid values. */

    enum {
        BAD_COLUMN = 1, BAD_ROW, BAD_BYTES, BAD_TIME, BAD_HEADER, BAD_PARTITION, TOO_LARGE,
        IS_NULL = -1, IS_BAD = -2,
        AHEAD = 8, /* rows: about the latency of memory */
    };

    /* An input column. Bytes and lists have ends, one more than rows; numbers have only data. */
    typedef struct {
        int64_t rows, before, data_bytes;
        const uint8_t *validity, *ends, *data;
        int is_large;
    } Given;

    typedef struct {
        int64_t count, now_ms;
        int has_key, has_timestamp, has_partition, has_headers;
        Given value, key, timestamp, partition, headers, names, held;
    } GivenRows;

    typedef struct {
        uint8_t *data;
        int64_t used, room, bytes_max, body_bytes_max, count, base_timestamp, max_timestamp;
        int64_t wanted; /* room for a record that is larger than what was reserved */
        int failure;
        int64_t blamed;
    } Written;

    INLINED int is_there(const Given *column, int64_t row) {
        int64_t at = column->before + row;
        return ALWAYS(!column->validity) || column->validity[at >> 3] >> (at & 7) & 1;
    }

    INLINED int64_t given_i32(const uint8_t *numbers, int64_t at) {
        int32_t number;
        memcpy(&number, numbers + 4 * at, 4);
        return number;
    }

    INLINED int64_t given_i64(const uint8_t *numbers, int64_t at) {
        int64_t number;
        memcpy(&number, numbers + 8 * at, 8);
        return number;
    }

    /* The number of a row's bytes or list items, and their start; or IS_NULL or IS_BAD. */
    INLINED int64_t given(const Given *column, int64_t row, int64_t end_max, int64_t *start) {
        int64_t at = column->before + row, end;
        if (!is_there(column, row)) return IS_NULL;
        *start = column->is_large ? given_i64(column->ends, at) : given_i32(column->ends, at);
        end = column->is_large ? given_i64(column->ends, at + 1) : given_i32(column->ends, at + 1);
        return ALWAYS(*start >= 0 && *start <= end && end <= end_max) ? end - *start : IS_BAD;
    }

    INLINED int64_t given_bytes(const Given *column, int64_t row, const uint8_t **start) {
        int64_t first = 0, size = given(column, row, column->data_bytes, &first);
        *start = size > 0 ? column->data + first : column->data;
        return size;
    }

    INLINED uint64_t zigzag(int64_t number) {
        return (uint64_t) number << 1 ^ (uint64_t) (number >> 63);
    }

    INLINED int zigzag_bytes(uint64_t value) {
        return value < 0x80 ? 1 : value < 0x4000 ? 2 : (70 - __builtin_clzll(value)) / 7;
    }

    INLINED uint8_t *put_zigzag(uint8_t *at, uint64_t value) {
        if (ALWAYS(value < 0x80)) {
            *at = (uint8_t) value;
            return at + 1;
        }
        do {
            *at++ = (uint8_t) (value | 0x80);
            value >>= 7;
        } while (value > 0x7F);
        *at = (uint8_t) value;
        return at + 1;
    }

    INLINED int64_t sized_bytes(int64_t size) {
        return size < 0 ? 1 : size + zigzag_bytes((uint64_t) size << 1);
    }

    /* The output has WIDE bytes to spare, so only reads need a bound. */
    INLINED uint8_t *put_sized(uint8_t *at, const Given *column, const uint8_t *start, int64_t size) {
        const uint8_t *end;
        at = put_zigzag(at, zigzag(size < 0 ? -1 : size));
        if (NEVER(size <= 0)) return at;
        end = start + size;
        if (ALWAYS(column->data + column->data_bytes - end >= WIDE && size <= QUICK_BYTES_MAX)) {
            for (uint8_t *to = at; start < end; start += WIDE, to += WIDE) memcpy(to, start, WIDE);
        } else {
            memcpy(at, start, size);
        }
        return at + size;
    }

    /* The bytes that a row's headers take with their count, or a negative failure. */
    static int64_t measure_headers(const GivenRows *rows, int64_t row, int64_t *first, int64_t *count) {
        int64_t size = 0, pairs_max = rows->names.rows < rows->held.rows ? rows->names.rows : rows->held.rows;
        const uint8_t *start;
        *count = given(&rows->headers, row, pairs_max, first);
        if (*count == IS_BAD) return -BAD_BYTES;
        if (*count == IS_NULL) *count = 0;
        for (int64_t at = *first; at < *first + *count; at++) {
            int64_t name = given_bytes(&rows->names, at, &start), held = given_bytes(&rows->held, at, &start);
            if (name == IS_NULL) return -BAD_HEADER;
            if (name == IS_BAD || held == IS_BAD) return -BAD_BYTES;
            size += sized_bytes(name) + sized_bytes(held);
        }
        return size + zigzag_bytes(zigzag(*count));
    }

    /* As measured: columns that change concurrently fill the room or end early, and never overrun it. */
    static uint8_t *put_headers(uint8_t *at, uint8_t *end, const GivenRows *rows, int64_t first, int64_t count) {
        const uint8_t *name, *held;
        at = put_zigzag(at, zigzag(count));
        for (int64_t pair = first; pair < first + count; pair++) {
            int64_t name_bytes = given_bytes(&rows->names, pair, &name);
            int64_t held_bytes = given_bytes(&rows->held, pair, &held);
            if (name_bytes < 0 || held_bytes == IS_BAD) return NULL;
            if (sized_bytes(name_bytes) + sized_bytes(held_bytes) > end - at) return NULL;
            at = put_sized(at, &rows->names, name, name_bytes);
            at = put_sized(at, &rows->held, held, held_bytes);
        }
        return at;
    }

    /* Picked rows are scattered: cache misses would take half the time. */
    INLINED void fetch_ahead(const Given *column, const uint8_t *picked, int64_t at, int64_t rows) {
        int64_t row = given_i32(picked, at), start;
        if (NEVER(row < 0 || row >= rows || given(column, row, column->data_bytes, &start) < 0)) return;
        __builtin_prefetch(column->data + start);
        __builtin_prefetch(column->data + start + 64);
    }

    /* Adds rows, or picked rows, until one is refused, or the body is full or its room too small. */
    INLINED int64_t put_these_rows(
        int with_headers, const GivenRows *rows, const uint8_t *picked, int64_t at, int64_t stop, Written *to
    ) {
        Written out = *to;
        for (; at < stop; at++) {
            const uint8_t *key = NULL, *value;
            int64_t row = at, timestamp = rows->now_ms, key_bytes = IS_NULL, value_bytes, size, total;
            int64_t header_bytes = 1, first_header = 0, header_count = 0;
            uint64_t time_delta, delta = (uint64_t) out.count << 1;
            if (picked) {
                row = given_i32(picked, at);
                if (ALWAYS(stop - at > AHEAD)) fetch_ahead(&rows->value, picked, at + AHEAD, rows->count);
            }
            out.blamed = row;
            if (NEVER(row < 0 || row >= rows->count)) {
                out.failure = BAD_ROW;
                break;
            }
            if (rows->has_timestamp && is_there(&rows->timestamp, row)) {
                timestamp = given_i64(rows->timestamp.data, rows->timestamp.before + row);
                if (NEVER(timestamp < 0)) {
                    out.failure = BAD_TIME;
                    break;
                }
                timestamp /= 1000;
            }
            time_delta = out.count ? zigzag(timestamp - out.base_timestamp) : 0;
            if (rows->has_key) key_bytes = given_bytes(&rows->key, row, &key);
            value_bytes = given_bytes(&rows->value, row, &value);
            if (NEVER(key_bytes == IS_BAD || value_bytes == IS_BAD)) {
                out.failure = BAD_BYTES;
                break;
            }
            if (with_headers) {
                header_bytes = measure_headers(rows, row, &first_header, &header_count);
                if (NEVER(header_bytes < 0)) {
                    out.failure = (int) -header_bytes;
                    break;
                }
            }
            size = 1 + zigzag_bytes(time_delta) + zigzag_bytes(delta) + sized_bytes(key_bytes) +
                   sized_bytes(value_bytes) + header_bytes;
            if (NEVER(size > out.body_bytes_max - out.used)) {
                if (!out.count) out.failure = TOO_LARGE;
                break;
            }
            total = size + zigzag_bytes((uint64_t) size << 1);
            if (NEVER(total > out.bytes_max - out.used) && out.count) break;
            if (NEVER(total + WIDE > out.room - out.used)) {
                out.wanted = total + WIDE;
                break;
            }
            uint8_t *put = out.data + out.used;
            put = put_zigzag(put, (uint64_t) size << 1);
            *put++ = 0;
            put = put_zigzag(put, time_delta);
            put = put_zigzag(put, delta);
            put = put_sized(put, &rows->key, key, key_bytes);
            put = put_sized(put, &rows->value, value, value_bytes);
            if (!with_headers) {
                *put = 0;
            } else if (!put_headers(put, out.data + out.used + total, rows, first_header, header_count)) {
                out.failure = BAD_BYTES;
                break;
            }
            out.used += total;
            if (!out.count++) out.base_timestamp = out.max_timestamp = timestamp;
            if (timestamp > out.max_timestamp) out.max_timestamp = timestamp;
        }
        *to = out;
        return at;
    }

    static int64_t put_rows(const GivenRows *rows, const uint8_t *picked, int64_t at, int64_t stop, Written *to) {
        return rows->has_headers ? put_these_rows(1, rows, picked, at, stop, to)
                                 : put_these_rows(0, rows, picked, at, stop, to);
    }

    INLINED uint32_t murmur2(const uint8_t *at, int64_t size) {
        const uint32_t multiplier = 0x5BD1E995;
        uint32_t hashed = 0x9747B28C ^ (uint32_t) size, word;
        for (; size >= 4; at += 4, size -= 4) {
            memcpy(&word, at, 4);
            word *= multiplier;
            word = (word ^ word >> 24) * multiplier;
            hashed = hashed * multiplier ^ word;
        }
        if (size) {
            word = at[0];
            if (size > 1) word |= (uint32_t) at[1] << 8;
            if (size > 2) word |= (uint32_t) at[2] << 16;
            hashed = (hashed ^ word) * multiplier;
        }
        hashed = (hashed ^ hashed >> 13) * multiplier;
        return hashed ^ hashed >> 15;
    }

    /* Sets and counts the partition of each row; 0, or the failure of the row `blamed`. */
    static int choose_partitions(
        const GivenRows *rows, const uint8_t *picked, int64_t count, int32_t partitions, int32_t *chosen,
        int64_t *counts, int64_t *blamed
    ) {
        for (int64_t at = 0; at < count; at++) {
            int64_t row = picked ? given_i32(picked, at) : at, group = partitions, size;
            const uint8_t *key;
            *blamed = row;
            if (NEVER(row < 0 || row >= rows->count)) return BAD_ROW;
            if (rows->has_partition && is_there(&rows->partition, row)) {
                group = given_i32(rows->partition.data, rows->partition.before + row);
                if (group < 0 || group >= partitions) return BAD_PARTITION;
            } else if (rows->has_key) {
                size = given_bytes(&rows->key, row, &key);
                if (NEVER(size == IS_BAD)) return BAD_BYTES;
                if (size >= 0) group = (murmur2(key, size) & INT32_MAX) % (uint32_t) partitions;
            }
            chosen[at] = (int32_t) group;
            counts[group]++;
        }
        return 0;
    }
    """
    enum:
        BAD_COLUMN, BAD_ROW, TOO_LARGE
    ctypedef struct Given:
        int64_t rows
        int64_t before
        int64_t data_bytes
        const uint8_t *validity
        const uint8_t *ends
        const uint8_t *data
        bint is_large
    ctypedef struct GivenRows:
        int64_t count
        int64_t now_ms
        bint has_key
        bint has_timestamp
        bint has_partition
        bint has_headers
        Given value
        Given key
        Given timestamp
        Given partition
        Given headers
        Given names
        Given held
    ctypedef struct Written:
        uint8_t *data
        int64_t used
        int64_t room
        int64_t bytes_max
        int64_t body_bytes_max
        int64_t count
        int64_t base_timestamp
        int64_t max_timestamp
        int64_t wanted
        int failure
        int64_t blamed
    int32_t given_i32(const uint8_t *, int64_t at) noexcept nogil
    int64_t put_rows(GivenRows *, const uint8_t *picked, int64_t at, int64_t stop, Written *) noexcept nogil
    int choose_partitions(
        GivenRows *, const uint8_t *picked, int64_t count, int32_t partitions, int32_t *chosen, int64_t *counts,
        int64_t *blamed
    ) noexcept nogil

cdef enum:
    BAD_COUNT = 1
    BAD_NUMBER
    BAD_LENGTH
    BAD_OFFSET
    BAD_TIMESTAMP
    BAD_KEY
    BAD_VALUE
    BAD_HEADER_COUNT
    BAD_HEADER_NAME
    BAD_HEADER_VALUE
    BAD_REST
    BAD_TAIL
    TOO_MUCH

cdef enum:
    RECORD_BYTES_MIN = 7
    LENGTH_MIN = 6
    HEADER_BYTES_MIN = 2
    BATCH_HEADER_BYTES = 61
    ROOM_MIN = 256
    # Shorter bodies are done before another thread could wake up.
    UNLOCKED_BYTES_MIN = 65536
    # Objects made before the GIL is released: the event loop waits for it too.
    OBJECTS_AT_ONCE = 4096

cdef int64_t BODY_BYTES_MAX = _pure.BODY_BYTES_MAX
cdef int64_t RECORD_COST = _pure.RECORD_COST
cdef int64_t HEADER_COST = _pure.HEADER_COST

# The twin uses the same numbers. A failed import makes `codec` use the twin, which is better than a kernel built
# from other sources.
if (_pure.TOO_MUCH, _columns.HEADERS, _rows.TOO_LARGE) != (TOO_MUCH, HEADERS, TOO_LARGE):
    raise ImportError("the kernel is older than its Python twin: rebuild it with `make setup`")

cdef int64_t NO_TIMESTAMP = -1
cdef PyTypeObject *RECORD = <PyTypeObject *> Record
cdef tuple NO_HEADERS = ()


cdef const uint8_t *number(
    const uint8_t *at, const uint8_t *end, int last_shift, uint64_t last_max, int64_t *out
) noexcept nogil:
    """The position after a number, or NULL. The last possible byte has few bits and must end it."""
    cdef uint64_t value = 0, byte
    cdef int shift = 0
    while at < end:
        byte = at[0]
        at += 1
        if shift == last_shift and byte > last_max:
            return NULL
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            out[0] = <int64_t> ((value >> 1) ^ (0 - (value & 1)))
            return at
        shift += 7
    return NULL


cdef inline const uint8_t *varint(const uint8_t *at, const uint8_t *end, int64_t *out) noexcept nogil:
    cdef int64_t byte = at[0] if at < end else 0x80
    if byte < 0x80:
        out[0] = (byte >> 1) ^ -(byte & 1)
        return at + 1
    return number(at, end, 28, 0x0F, out)


cdef inline const uint8_t *varlong(const uint8_t *at, const uint8_t *end, int64_t *out) noexcept nogil:
    return number(at, end, 63, 0x01, out)


cdef int read_headers(Walk *walk, const uint8_t *at, const uint8_t *stop) noexcept nogil:
    """Reads the headers, up to the end of the record."""
    cdef int64_t size, index
    at = varint(at, stop, &size)
    if at == NULL:
        return BAD_NUMBER
    if size < 0 or size > (stop - at) // HEADER_BYTES_MIN:
        return BAD_HEADER_COUNT
    walk.headers = at
    walk.header_count = <int32_t> size
    for index in range(walk.header_count):
        at = varint(at, stop, &size)
        if at == NULL:
            return BAD_NUMBER
        if size < 0 or size > stop - at:
            return BAD_HEADER_NAME
        at = varint(at + size, stop, &size)
        if at == NULL:
            return BAD_NUMBER
        if size < -1 or size > stop - at:
            return BAD_HEADER_VALUE
        if size > 0:
            at += size
    return 0 if at == stop else BAD_REST


cdef int any_step(Walk *walk) noexcept nogil:
    """Reads a record of any shape: 0, or the broken rule. The checks have the twin's order."""
    cdef const uint8_t *at = walk.at
    cdef const uint8_t *stop
    cdef int64_t length, time_delta, delta, size
    at = varint(at, walk.end, &length)
    if at == NULL:
        return BAD_NUMBER
    if length < LENGTH_MIN or length > walk.end - at:
        return BAD_LENGTH
    stop = at + length
    at = varlong(at + 1, stop, &time_delta)
    if at == NULL:
        return BAD_NUMBER
    at = varint(at, stop, &delta)
    if at == NULL:
        return BAD_NUMBER
    if delta < walk.delta_min or delta > walk.delta_max:
        return BAD_OFFSET
    walk.delta_min = delta + 1
    walk.offset = walk.base_offset + delta
    time_delta &= walk.time_mask
    if time_delta >= 0:
        if walk.base_timestamp > INT64_MAX - time_delta:
            return BAD_TIMESTAMP
    elif walk.base_timestamp < INT64_MIN - time_delta:
        return BAD_TIMESTAMP
    walk.timestamp = walk.base_timestamp + time_delta
    at = varint(at, stop, &size)
    if at == NULL:
        return BAD_NUMBER
    if size < -1 or size > stop - at:
        return BAD_KEY
    walk.key = at
    walk.key_bytes = <int32_t> size
    if size > 0:
        at += size
    at = varint(at, stop, &size)
    if at == NULL:
        return BAD_NUMBER
    if size < -1 or size > stop - at:
        return BAD_VALUE
    walk.value = at
    walk.value_bytes = <int32_t> size
    if size > 0:
        at += size
    walk.at = stop
    return read_headers(walk, at, stop)


cdef inline int step(Walk *walk) noexcept nogil:
    return 0 if quick_step(walk) else any_step(walk)


@cython.final
cdef class Source:
    """A section and the read position in it. Holds the buffer while this object lives."""

    cdef Py_buffer view
    cdef Walk walk
    cdef int64_t count
    cdef int64_t done
    # The rest of the memory bound for records and headers as objects.
    cdef int64_t left

    def __cinit__(self, section, int64_t bytes_max=INT64_MAX):
        cdef int64_t base_offset, span, base_timestamp, max_timestamp
        cdef bint is_append_time
        body, count, base_offset, span, base_timestamp, max_timestamp, is_append_time = section
        PyObject_GetBuffer(body, &self.view, PyBUF_SIMPLE)
        self.count = count
        if self.count < 0 or self.count > self.view.len // RECORD_BYTES_MIN:
            raise _pure.corrupt(BAD_COUNT, 0)
        if base_offset > INT64_MAX - (span if span > 0 else 0):
            raise _pure.corrupt(BAD_OFFSET, 0)
        self.left = bytes_max - self.view.len - self.count * RECORD_COST
        if self.left < 0:
            raise _pure.corrupt(TOO_MUCH, 0)
        self.walk.at = <const uint8_t *> self.view.buf
        self.walk.end = self.walk.at + self.view.len
        self.walk.quick_end = self.walk.at
        self.walk.base_offset = base_offset
        self.walk.delta_max = span
        self.walk.base_timestamp = max_timestamp if is_append_time else base_timestamp
        self.walk.time_mask = 0 if is_append_time else -1
        # Sums far from the 64-bit limits need no check.
        if self.view.len > QUICK_SLACK and INT64_MIN // 2 < self.walk.base_timestamp < INT64_MAX // 2:
            self.walk.quick_end = self.walk.end - QUICK_SLACK

    def __dealloc__(self):
        PyBuffer_Release(&self.view)

    cdef inline int advance(self) noexcept nogil:
        """Reads the next record: 0, or the broken rule."""
        cdef int failure = step(&self.walk)
        if failure:
            return failure
        if self.walk.header_count:
            self.left -= self.walk.header_count * HEADER_COST
            if self.left < 0:
                return TOO_MUCH
        self.done += 1
        return 0

    cdef inline int next(self) except -1:
        cdef int failure = self.advance()
        if failure:
            raise _pure.corrupt(failure, self.done)
        if self.done % OBJECTS_AT_ONCE == 0:
            with nogil:
                pass
        return 0

    cdef bint seek(self, int64_t earliest, int64_t latest, bint is_inside, bint needs_key) except -1:
        """Reads up to a record: with `is_inside`, one whose timestamp is within the bounds; else one whose timestamp is
        out of bounds, or that lacks a required key. False at the end.
        """
        cdef int failure
        cdef bint found = False
        if self.view.len < UNLOCKED_BYTES_MIN:
            failure = self.seek_unlocked(earliest, latest, is_inside, needs_key, &found)
        else:
            with nogil:
                failure = self.seek_unlocked(earliest, latest, is_inside, needs_key, &found)
        if failure:
            raise _pure.corrupt(failure, self.done)
        if not found:
            self.finish()
        return found

    cdef int seek_unlocked(
        self, int64_t earliest, int64_t latest, bint is_inside, bint needs_key, bint *found
    ) noexcept nogil:
        cdef int failure
        cdef int64_t timestamp
        while self.done < self.count:
            failure = self.advance()
            if failure:
                return failure
            timestamp = self.walk.timestamp
            if earliest <= timestamp <= latest:
                found[0] = is_inside or (needs_key and self.walk.key_bytes < 0)
            else:
                found[0] = not is_inside and (timestamp != NO_TIMESTAMP or (needs_key and self.walk.key_bytes < 0))
            if found[0]:
                return 0
        return 0

    cdef int finish(self) except -1:
        if self.walk.at != self.walk.end:
            raise _pure.corrupt(BAD_TAIL, self.count)
        return 0


cdef inline object as_bytes(const uint8_t *start, int64_t size):
    if size < 0:
        return None
    return PyBytes_FromStringAndSize(<const char *> start, size)


cdef tuple as_headers(const uint8_t *at, const uint8_t *end, int32_t count):
    """Headers that `step` has checked. The second check costs little."""
    cdef int64_t size, index
    cdef object name, value
    cdef list headers = []
    for index in range(count):
        at = varint(at, end, &size)
        if at == NULL or size < 0 or size > end - at:
            raise _pure.corrupt(BAD_HEADER_NAME, 0)
        name = PyUnicode_DecodeUTF8(<const char *> at, size, "surrogateescape")
        at = varint(at + size, end, &size)
        if at == NULL or size < -1 or size > end - at:
            raise _pure.corrupt(BAD_HEADER_VALUE, 0)
        value = as_bytes(at, size)
        if size > 0:
            at += size
        headers.append((name, value))
        if (index + 1) % OBJECTS_AT_ONCE == 0:
            with nogil:
                pass
    return tuple(headers)


cdef inline void put_item(object record, Py_ssize_t index, object item) noexcept:
    Py_INCREF(item)
    PyTuple_SET_ITEM(record, index, item)


def decode(section, bytes_max=INT64_MAX):
    cdef Source source = Source(section, bytes_max)
    cdef Walk *walk = &source.walk
    cdef list records = PyList_New(source.count)
    cdef int64_t index
    cdef object offset, timestamp, key, value, headers, record
    for index in range(source.count):
        source.next()
        offset, timestamp = walk.offset, walk.timestamp
        key = as_bytes(walk.key, walk.key_bytes)
        value = as_bytes(walk.value, walk.value_bytes)
        headers = as_headers(walk.headers, walk.at, walk.header_count) if walk.header_count else NO_HEADERS
        # `Record(...)` without a call: a named tuple has no state besides its items.
        record = tuple_of_type(RECORD, 5)
        put_item(record, 0, offset)
        put_item(record, 1, timestamp)
        put_item(record, 2, key)
        put_item(record, 3, value)
        put_item(record, 4, headers)
        # Numbers, bytes and text refer to no object, so no record is part of a cycle. Untracking it saves the
        # garbage collector's repeated visits, which took 40 % of the time.
        PyObject_GC_UnTrack(<void *> record)
        Py_INCREF(record)
        PyList_SET_ITEM(records, index, record)
    source.finish()
    return records


def keys(section, bytes_max=INT64_MAX):
    cdef Source source = Source(section, bytes_max)
    cdef Walk *walk = &source.walk
    cdef list found = []
    while source.done < source.count:
        source.next()
        found.append((walk.offset, as_bytes(walk.key, walk.key_bytes), walk.value_bytes < 0))
    source.finish()
    return found


def find_time(section, int64_t timestamp, int64_t first=0):
    cdef Source source = Source(section)
    while source.seek(timestamp, INT64_MAX, True, False):
        if source.walk.offset >= first:
            return source.walk.offset, source.walk.timestamp
    return None


def newest_time(section, int64_t first):
    cdef Source source = Source(section)
    cdef int64_t newest = NO_TIMESTAMP
    while source.seek(newest, INT64_MAX, True, False):
        if source.walk.offset >= first:
            newest = source.walk.timestamp
    return newest


def judge(section, int64_t earliest, int64_t latest, bint needs_key, int64_t count_max, bytes_max=INT64_MAX):
    cdef Source source = Source(section, bytes_max)
    cdef list bad = []
    while source.seek(earliest, latest, False, needs_key):
        if len(bad) < count_max:
            bad.append((source.done - 1, source.walk.timestamp, source.walk.key_bytes >= 0))
    return bad


@cython.final
cdef class BinaryColumn:
    """A growing column. `state` holds its pointers and its fill level."""

    cdef bytearray validity
    cdef bytearray ends
    cdef bytearray data
    cdef Column state

    def __cinit__(self):
        self.validity = PyByteArray_FromStringAndSize(NULL, 0)
        self.ends = PyByteArray_FromStringAndSize("\0\0\0\0", 4)
        self.data = PyByteArray_FromStringAndSize(NULL, 0)

    cdef int reserve_rows(self, int64_t rows) except -1 with gil:
        """Makes room for `rows` in all. New rows are not null until a writer marks them."""
        cdef int64_t had = (self.state.rows_max + 7) // 8
        cdef int64_t have
        if rows <= self.state.rows_max:
            return 0
        rows = max(rows, 2 * self.state.rows_max)
        have = (rows + 7) // 8
        PyByteArray_Resize(self.ends, 4 * (rows + 1))
        PyByteArray_Resize(self.validity, have)
        self.state.rows_max = rows
        self.state.ends = <int32_t *> PyByteArray_AS_STRING(self.ends)
        self.state.validity = <uint8_t *> PyByteArray_AS_STRING(self.validity)
        memset(self.state.validity + had, 0xFF, have - had)
        return 0

    cdef int reserve_data(self, int64_t more) except -1 with gil:
        """Makes room for `more` bytes and a wide move."""
        cdef int64_t room
        if more + WIDE <= self.state.room - self.state.used:
            return 0
        if more > INT32_MAX - self.state.used:
            raise ColumnsTooLarge(INT32_MAX)
        # Ends have 31 bits, so the room is bounded too, and writers within it need no check.
        room = min(max(self.state.used + more, 2 * self.state.room), INT32_MAX) + WIDE
        PyByteArray_Resize(self.data, room)
        self.state.room = room
        self.state.data = <uint8_t *> PyByteArray_AS_STRING(self.data)
        return 0

    cdef int put(self, int64_t row, const uint8_t *start, int64_t size) except -1 nogil:
        if size > 0:
            if size + WIDE > self.state.room - self.state.used:
                self.reserve_data(size)
            memcpy(self.state.data + self.state.used, start, size)
        put_end(&self.state, row, <int32_t> size)
        return 0

    cdef object finish(self, int64_t rows):
        PyByteArray_Resize(self.validity, (rows + 7) // 8)
        PyByteArray_Resize(self.ends, 4 * (rows + 1))
        PyByteArray_Resize(self.data, self.state.used)
        if rows & 7:
            PyByteArray_AS_STRING(self.validity)[rows >> 3] &= (1 << (rows & 7)) - 1
        null_count = rows - int.from_bytes(self.validity, "little").bit_count()
        return Binary(null_count, self.validity, self.ends, self.data)


@cython.final
cdef class Filler:
    cdef Table table
    cdef bytearray offsets
    cdef bytearray timestamps
    cdef bytearray kinds
    cdef bytearray list_ends
    cdef BinaryColumn key
    cdef BinaryColumn value
    cdef BinaryColumn names
    cdef BinaryColumn held

    def __cinit__(self, int columns):
        self.table.columns = columns
        self.offsets = PyByteArray_FromStringAndSize(NULL, 0)
        self.timestamps = PyByteArray_FromStringAndSize(NULL, 0)
        self.kinds = PyByteArray_FromStringAndSize(NULL, 0)
        self.list_ends = PyByteArray_FromStringAndSize("\0\0\0\0", 4)
        self.key, self.value, self.names, self.held = BinaryColumn(), BinaryColumn(), BinaryColumn(), BinaryColumn()

    cdef int add(self, Source source) except -1:
        cdef int failure
        self.reserve(self.table.rows + source.count, source.view.len)
        if self.table.columns & TIMESTAMP_TYPE:
            memset(PyByteArray_AS_STRING(self.kinds) + self.table.rows, source.walk.time_mask == 0, source.count)
        if source.view.len < UNLOCKED_BYTES_MIN:
            failure = self.add_rows(source)
        else:
            with nogil:
                failure = self.add_rows(source)
        if failure:
            raise _pure.corrupt(failure, source.done)
        source.finish()
        return 0

    cdef int reserve(self, int64_t rows, int64_t body_bytes) except -1:
        # Python over-allocates a growing bytearray, so many small sections cost no more than one.
        if self.table.columns & OFFSET:
            PyByteArray_Resize(self.offsets, 8 * rows)
        if self.table.columns & TIMESTAMP:
            PyByteArray_Resize(self.timestamps, 8 * rows)
        if self.table.columns & TIMESTAMP_TYPE:
            PyByteArray_Resize(self.kinds, rows)
        if self.table.columns & HEADERS:
            PyByteArray_Resize(self.list_ends, 4 * (rows + 1))
        if self.table.columns & KEY:
            self.key.reserve_rows(rows)
        if self.table.columns & VALUE:
            self.value.reserve_rows(rows)
            # Values are most of a body, and untouched pages cost nothing.
            self.value.reserve_data(body_bytes)
        self.table.offsets = <int64_t *> PyByteArray_AS_STRING(self.offsets)
        self.table.timestamps = <int64_t *> PyByteArray_AS_STRING(self.timestamps)
        self.table.list_ends = <int32_t *> PyByteArray_AS_STRING(self.list_ends)
        return 0

    cdef int add_rows(self, Source source) except -1 nogil:
        cdef Walk *walk = &source.walk
        cdef int failure
        while True:
            # The record after one with headers usually has headers too.
            if not walk.header_count:
                self.add_quick_rows(source)
            if source.done == source.count:
                return 0
            failure = any_step(walk)
            if not failure:
                failure = self.add_row(walk)
            if failure:
                return failure
            self.table.rows += 1
            source.done += 1

    cdef int add_quick_rows(self, Source source) except -1 nogil:
        cdef Column *key = &self.key.state
        cdef int64_t left = source.count - source.done
        if self.table.columns & KEY and key.room - key.used < QUICK_BYTES_MAX + WIDE:
            self.key.reserve_data(min(<int64_t> QUICK_BYTES_MAX, INT32_MAX - key.used))
        source.done += put_quick_rows(&source.walk, left, &self.table, key, &self.value.state)
        return 0

    cdef int add_row(self, Walk *walk) except -1 nogil:
        if self.table.columns & OFFSET:
            self.table.offsets[self.table.rows] = walk.offset
        if self.table.columns & TIMESTAMP:
            self.table.timestamps[self.table.rows] = walk.timestamp
        if self.table.columns & KEY:
            self.key.put(self.table.rows, walk.key, walk.key_bytes)
        if self.table.columns & VALUE:
            self.value.put(self.table.rows, walk.value, walk.value_bytes)
        if self.table.columns & HEADERS:
            if walk.header_count and self.add_headers(walk):
                return BAD_HEADER_COUNT
            self.table.list_ends[self.table.rows + 1] = <int32_t> self.table.header_rows
        return 0

    cdef int add_headers(self, Walk *walk) except -1 nogil:
        """Headers that `any_step` has checked. The second check catches a concurrent change of the bytes."""
        cdef const uint8_t *at = walk.headers
        cdef int64_t size, stop = self.table.header_rows + walk.header_count
        if stop > self.names.state.rows_max:
            self.names.reserve_rows(stop)
            self.held.reserve_rows(stop)
        while self.table.header_rows < stop:
            at = varint(at, walk.at, &size)
            if at == NULL or size < 0 or size > walk.at - at:
                return BAD_HEADER_NAME
            self.names.put(self.table.header_rows, at, size)
            at = varint(at + size, walk.at, &size)
            if at == NULL or size < -1 or size > walk.at - at:
                return BAD_HEADER_VALUE
            self.held.put(self.table.header_rows, at, size)
            if size > 0:
                at += size
            self.table.header_rows += 1
        return 0

    cdef object finish_headers(self):
        cdef int64_t rows = self.table.header_rows
        return HeaderLists(self.list_ends, self.names.finish(rows), self.held.finish(rows))


def fill(sections, int columns):
    cdef Filler filler = Filler(columns)
    for section in sections:
        filler.add(Source(section))
    return Filled(
        filler.table.rows,
        filler.offsets if columns & OFFSET else None,
        filler.timestamps if columns & TIMESTAMP else None,
        filler.kinds if columns & TIMESTAMP_TYPE else None,
        filler.key.finish(filler.table.rows) if columns & KEY else None,
        filler.value.finish(filler.table.rows) if columns & VALUE else None,
        filler.finish_headers() if columns & HEADERS else None,
    )


cdef inline int64_t big_endian(const uint8_t *at, int size) noexcept:
    cdef uint64_t value = 0
    cdef int position
    for position in range(size):
        value = value << 8 | at[position]
    return <int64_t> value


def sound_bytes(data, int64_t first, int64_t behind, int64_t asked, bint dense):
    """Walks batch headers, as `batch.sound_batches` does; `batch.py` has the layout."""
    cdef Py_buffer view
    cdef const uint8_t *at
    cdef Py_ssize_t position = 0, size
    cdef int64_t base, delta, expected = -1
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        while view.len - position >= BATCH_HEADER_BYTES:
            at = <const uint8_t *> view.buf + position
            size = <Py_ssize_t> <int32_t> big_endian(at + 8, 4) + 12
            if at[16] != 2 or size < BATCH_HEADER_BYTES or size > view.len - position:
                break
            base = big_endian(at, 8)
            delta = <int32_t> big_endian(at + 23, 4)
            # This order avoids overflow: 0 <= base < behind.
            if base < 0 or base < first or base >= behind or delta < 0 or delta >= behind - base:
                break
            if base + delta < asked or (dense and (base > asked if expected < 0 else base != expected)):
                break
            covered = PyMemoryView_FromMemory(<char *> at + 21, size - 21, PyBUF_READ)
            if <uint32_t> _crc32c(covered) != <uint32_t> big_endian(at + 17, 4):
                break
            position += size
            first = expected = base + delta + 1
        return position
    finally:
        PyBuffer_Release(&view)


def validate(section):
    # Filling no columns is walking the records.
    cdef Filler filler = Filler(0)
    filler.add(Source(section))


@cython.final
cdef class Grow:
    """A bytearray with appends at its end."""

    cdef bytearray array
    cdef uint8_t *data
    cdef int64_t used
    cdef int64_t room

    def __cinit__(self):
        self.array = PyByteArray_FromStringAndSize(NULL, 0)

    cdef int grow(self, int64_t more) except -1:
        cdef int64_t room = max(self.used + more, 2 * self.room, ROOM_MIN)
        PyByteArray_Resize(self.array, room)
        self.data = <uint8_t *> PyByteArray_AS_STRING(self.array)
        self.room = room
        return 0

    cdef inline int reserve(self, int64_t more) except -1:
        if more > self.room - self.used:
            self.grow(more)
        return 0

    cdef bytearray finish(self):
        """The bytes; write nothing after it."""
        PyByteArray_Resize(self.array, self.used)
        self.data = NULL
        self.room = 0
        return self.array


cdef inline int number_bytes(int64_t number) noexcept nogil:
    cdef uint64_t value = (<uint64_t> number << 1) ^ <uint64_t> (number >> 63)
    cdef int size = 1
    while value > 0x7F:
        value >>= 7
        size += 1
    return size


cdef inline uint8_t *put(uint8_t *at, int64_t number) noexcept nogil:
    cdef uint64_t value = (<uint64_t> number << 1) ^ <uint64_t> (number >> 63)
    while value > 0x7F:
        at[0] = <uint8_t> (value & 0x7F | 0x80)
        at += 1
        value >>= 7
    at[0] = <uint8_t> value
    return at + 1


cdef inline object bytes_or_none(object value):
    # Through a memoryview, because bytes(5) is not an error and bytes("x") would ask for an encoding.
    return value if value is None or type(value) is bytes else bytes(memoryview(value))


cdef inline int64_t field_bytes(object value):
    """The size of a key or a value with its length prefix."""
    return 1 if value is None else number_bytes(PyBytes_GET_SIZE(value)) + PyBytes_GET_SIZE(value)


cdef inline uint8_t *put_field(uint8_t *at, object value):
    if value is None:
        return put(at, -1)
    at = put(at, PyBytes_GET_SIZE(value))
    memcpy(at, PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value))
    return at + PyBytes_GET_SIZE(value)


def encode(records, base_offset, int64_t lead):
    cdef Grow out = Grow()
    cdef int64_t timestamp, base_timestamp = -1, max_timestamp = -1
    cdef int64_t index = -1, delta, last_delta = -1, time_delta, size
    cdef bint is_relative = base_offset is None
    cdef list fields
    cdef uint8_t *at
    cdef object record, key, value, name, held
    if lead < 0:
        raise ValueError("negative count")
    out.grow(lead)
    memset(out.data, 0, lead)
    out.used = lead
    for record in records:
        index += 1
        if not isinstance(record, tuple):
            raise TypeError(f"record {index} is not a tuple but a {type(record).__name__}")
        if not 4 <= PyTuple_GET_SIZE(record) <= 5:
            raise ValueError(f"record {index} has {PyTuple_GET_SIZE(record)} fields, not 4 or 5")
        timestamp = <object> PyTuple_GET_ITEM(record, 1)
        if index == 0:
            base_timestamp = max_timestamp = timestamp
        if base_timestamp >= 0:
            if timestamp < INT64_MIN + base_timestamp:
                raise ValueError(f"record {index}: its timestamp is too far from the first one's")
        elif timestamp > INT64_MAX + base_timestamp:
            raise ValueError(f"record {index}: its timestamp is too far from the first one's")
        time_delta = timestamp - base_timestamp
        max_timestamp = max(max_timestamp, timestamp)
        if is_relative:
            delta = index
        else:
            delta = <object> PyTuple_GET_ITEM(record, 0) - base_offset
        if delta <= last_delta or delta > INT32_MAX:
            raise ValueError(f"record {index}: its offset is not after the one before, or too far from the first")
        last_delta = delta
        key = bytes_or_none(<object> PyTuple_GET_ITEM(record, 2))
        value = bytes_or_none(<object> PyTuple_GET_ITEM(record, 3))
        size = 1 + number_bytes(time_delta) + number_bytes(delta) + field_bytes(key) + field_bytes(value)
        fields = None
        if PyTuple_GET_SIZE(record) == 5 and <object> PyTuple_GET_ITEM(record, 4):
            fields = []
            for name, held in <object> PyTuple_GET_ITEM(record, 4):
                # A subclass of str may return any object.
                name, held = bytes_or_none(name.encode(errors="surrogateescape")), bytes_or_none(held)
                fields += (name, held)
                size += field_bytes(name) + field_bytes(held)
            size += number_bytes(len(fields) // 2)
        else:
            size += 1
        if size > BODY_BYTES_MAX - out.used:
            raise ValueError(f"record {index}: the batch would be larger than 2 GiB")
        out.reserve(size + number_bytes(size))
        at = put(out.data + out.used, size)
        at[0] = 0
        at = put(at + 1, time_delta)
        at = put(at, delta)
        at = put_field(at, key)
        at = put_field(at, value)
        if fields is None:
            at = put(at, 0)
        else:
            at = put(at, len(fields) // 2)
            for name in fields:
                at = put_field(at, name)
        out.used = at - out.data
    return out.finish(), base_timestamp, max_timestamp, last_delta, index + 1


@cython.final
cdef class Held:
    """Holds a buffer, which can then be neither freed nor resized."""

    cdef Py_buffer view
    cdef const uint8_t *data
    cdef int64_t size

    def __cinit__(self, buffer):
        PyObject_GetBuffer(buffer, &self.view, PyBUF_SIMPLE)
        self.data = <const uint8_t *> self.view.buf
        self.size = self.view.len

    def __dealloc__(self):
        PyBuffer_Release(&self.view)


@cython.final
cdef class Rows:
    """Columns open for reading: their buffers are held, and long enough for their rows."""

    cdef GivenRows given
    cdef list held

    def __cinit__(self, columns):
        self.held = []
        self.given.count, self.given.now_ms, value, key, timestamp, partition, headers = columns
        self.open_bytes(&self.given.value, value)
        self.check(self.given.value.rows)
        if key is not None:
            self.given.has_key = True
            self.open_bytes(&self.given.key, key)
            self.check(self.given.key.rows)
        if timestamp is not None:
            self.given.has_timestamp = True
            self.open_numbers(&self.given.timestamp, timestamp, 8)
            self.check(self.given.timestamp.rows)
        if partition is not None:
            self.given.has_partition = True
            self.open_numbers(&self.given.partition, partition, 4)
            self.check(self.given.partition.rows)
        if headers is not None:
            rows, before, validity, ends, is_large, names, values = headers
            self.given.has_headers = True
            self.open_rows(&self.given.headers, rows, before, validity)
            self.open_ends(&self.given.headers, ends, is_large)
            self.open_bytes(&self.given.names, names)
            self.open_bytes(&self.given.held, values)
            self.check(self.given.headers.rows)

    cdef int check(self, int64_t rows) except -1:
        if not 0 <= self.given.count <= rows:
            raise RowRefused(BAD_COLUMN, 0)
        return 0

    cdef const uint8_t *hold(self, buffer, int64_t count, int64_t width) except? NULL:
        """The address of a buffer that must have `count` items; NULL, without a look at it, for 0."""
        cdef Held held
        if not count:
            return NULL
        held = Held(buffer)
        if count > held.size // width:
            raise RowRefused(BAD_COLUMN, 0)
        self.held.append(held)
        return held.data

    cdef int open_rows(self, Given *column, int64_t rows, int64_t before, validity) except -1:
        # Sums of two of these cannot overflow, and no buffer is that large.
        if not (0 <= rows < INT64_MAX // 4 and 0 <= before < INT64_MAX // 4):
            raise RowRefused(BAD_COLUMN, 0)
        column.rows, column.before = rows, before
        if validity is not None:
            column.validity = self.hold(validity, (before + rows + 7) // 8 if rows else 0, 1)
        return 0

    cdef int open_ends(self, Given *column, ends, bint is_large) except -1:
        column.is_large = is_large
        column.ends = self.hold(ends, column.before + column.rows + 1 if column.rows else 0, 8 if is_large else 4)
        return 0

    cdef int open_bytes(self, Given *column, given) except -1:
        cdef Held data
        rows, before, validity, ends, buffer, is_large = given
        self.open_rows(column, rows, before, validity)
        self.open_ends(column, ends, is_large)
        data = Held(buffer)
        column.data, column.data_bytes = data.data, data.size
        self.held.append(data)
        return 0

    cdef int open_numbers(self, Given *column, given, int64_t width) except -1:
        rows, before, validity, data = given
        self.open_rows(column, rows, before, validity)
        column.data = self.hold(data, column.before + column.rows if column.rows else 0, width)
        return 0


def open_rows(columns):
    return Rows(columns)


cdef int64_t count_picked(Rows rows, Held picked) except -1:
    return rows.given.count if picked is None else picked.size // 4


@cython.final
cdef class Body:
    cdef bytearray array
    cdef Written state

    def __cinit__(self, int64_t lead, int64_t bytes_max):
        if lead < 0:
            raise ValueError("negative count")
        self.array = PyByteArray_FromStringAndSize(NULL, 0)
        self.state.bytes_max = min(bytes_max, BODY_BYTES_MAX)
        self.state.body_bytes_max = BODY_BYTES_MAX
        self.state.base_timestamp = self.state.max_timestamp = -1
        # Allocates all at once: untouched pages cost nothing, a later move would.
        self.grow(max(lead, self.state.bytes_max) + WIDE)
        memset(self.state.data, 0, lead)
        self.state.used = lead

    cdef int grow(self, int64_t more) except -1:
        cdef int64_t room = self.state.used + more
        # Set after the resize: a caller that catches MemoryError may add smaller rows.
        PyByteArray_Resize(self.array, room)
        self.state.room = room
        self.state.data = <uint8_t *> PyByteArray_AS_STRING(self.array)
        return 0

    @property
    def count(self):
        return self.state.count

    @property
    def size(self):
        return self.state.used

    def add(self, Rows rows not None, picked, int64_t first, int64_t stop):
        cdef Held held = None
        cdef const uint8_t *order = NULL
        if picked is not None:
            held = Held(picked)
            order = held.data
        if self.state.data == NULL:
            raise ValueError("the body is finished")
        if not 0 <= first <= stop <= count_picked(rows, held):
            raise RowRefused(BAD_ROW, first)
        while True:
            self.state.wanted = 0
            with nogil:
                first = put_rows(&rows.given, order, first, stop, &self.state)
            if self.state.failure:
                failure, self.state.failure = self.state.failure, 0
                raise RowRefused(failure, self.state.blamed)
            if not self.state.wanted:
                return first
            self.grow(self.state.wanted)

    def finish(self):
        PyByteArray_Resize(self.array, self.state.used)
        self.state.data = NULL
        return (
            self.array, self.state.base_timestamp, self.state.max_timestamp, self.state.count - 1, self.state.count
        )


def begin(lead, bytes_max):
    return Body(lead, bytes_max)


def pick(Rows rows not None, partitions, picked):
    cdef Held held = None
    cdef const uint8_t *given_order = NULL
    cdef int64_t count, at, blamed = 0
    cdef int32_t groups = partitions, group
    cdef bytearray chosen_array, counts_array, order_array
    cdef int32_t *chosen
    cdef int32_t *order
    cdef int64_t *ends
    cdef int failure
    if groups < 1 or groups == INT32_MAX:
        raise ValueError("a topic has at least one partition")
    if picked is not None:
        held = Held(picked)
        given_order = held.data
    count = count_picked(rows, held)
    chosen_array = PyByteArray_FromStringAndSize(NULL, 4 * count)
    order_array = PyByteArray_FromStringAndSize(NULL, 4 * count)
    counts_array = bytearray(8 * (<int64_t> groups + 2))
    chosen = <int32_t *> PyByteArray_AS_STRING(chosen_array)
    order = <int32_t *> PyByteArray_AS_STRING(order_array)
    ends = <int64_t *> PyByteArray_AS_STRING(counts_array)
    with nogil:
        # Counted one place further on, so that the sums become each group's start, and its end once it is full.
        failure = choose_partitions(&rows.given, given_order, count, groups, chosen, ends + 1, &blamed)
        if not failure:
            for group in range(groups + 1):
                ends[group + 1] += ends[group]
            for at in range(count):
                group = chosen[at]
                order[ends[group]] = given_i32(given_order, at) if given_order != NULL else <int32_t> at
                ends[group] += 1
    if failure:
        raise RowRefused(failure, blamed)
    return order_array, [ends[group] for group in range(groups + 1)]
