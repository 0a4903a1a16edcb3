# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""Records out of a section's bytes and back, compiled. `pure.py` is the twin and holds the format and the rules.

How it stays within its bytes
-----------------------------
1. `step` is the only reader. It moves one pointer towards one end, and compares a length with what is left before it
   adds it to the pointer. A length is read once, into a local: bytes that someone else changes meanwhile can give
   wrong records, never a wrong address.
2. Columns are written where room was reserved before, and no pointer into one is kept across a `reserve`.
3. The section's buffer is held (`PyObject_GetBuffer`) while pointers into it live, so it can be neither freed nor
   resized, and the interpreter's lock can be let go while columns are filled.

How it is fast
--------------
Nearly all records look alike: short, no headers, numbers of one to three bytes. `quick_step` reads only those, with few
checks, and leaves everything else to `any_step`, which knows all shapes and all errors. Columns are filled in the same
pass, 32 bytes at a time where as many may be read and written beyond the end. A first pass that only measures would
walk the records twice, and the walk is half the time.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_FromStringAndSize, PyByteArray_Resize
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.list cimport PyList_New, PyList_SET_ITEM
from cpython.object cimport PyTypeObject
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE, PyTuple_SET_ITEM
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport INT32_MAX, INT64_MAX, INT64_MIN, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from millstream.records import columns as _columns
from millstream.records import pure as _pure
from millstream.records.columns import Binary, ColumnsTooLarge, Filled, HeaderLists
from millstream.records.record import Record

cdef extern from *:
    """
    static inline PyObject *tuple_of_type(PyTypeObject *type, Py_ssize_t size) { return type->tp_alloc(type, size); }
    """
    object tuple_of_type(PyTypeObject *type, Py_ssize_t size)
    void PyObject_GC_UnTrack(void *)
    char *PyByteArray_AS_STRING(object) nogil

cdef extern from *:
    """
    /* The hot loop, in C for its hints: Cython makes of the same lines what takes a quarter longer. */

    #define ALWAYS(condition) __builtin_expect(!!(condition), 1)
    #define NEVER(condition) __builtin_expect(!!(condition), 0)
    #define INLINED static inline __attribute__((always_inline))

    enum {
        OFFSET = 1, TIMESTAMP = 2, TIMESTAMP_TYPE = 4, KEY = 8, VALUE = 16, HEADERS = 32, ALL = 63,
        WIDE = 32,              /* bytes that are moved at once */
        QUICK_BYTES_MAX = 8191, /* of a quick record: what a number of two bytes can say */
        QUICK_SLACK = 64,       /* bytes after a quick record: 11 are read unasked up to its key, 31 moved too many */
        PREFETCH_BYTES = 512,   /* how far ahead of the values their memory is fetched; saves a fifth of the time */
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

    /* A number of up to two or three bytes that are known to be there, still zigzag; NULL if it has more. */
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
       Odd numbers are negative ones. Where the value ends one zero byte, the count of headers, before the record does,
       no field ends too late, so that is the only end to look at; only the key's is needed before. */
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
        walk->at = stop; /* known since the first bytes, so that the processor starts on the next record early */
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
        /* What is copied to a local can live in registers, and there are few: what can wait is done after the loop. */
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

    /* As many rows as are quick and have room; how many that were. Values always have room.
       Where all columns are wanted the loop need not ask for each of them. */
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
        # Where records stop being quick, for want of bytes that follow.
        const uint8_t *quick_end
        int64_t base_offset
        int64_t delta_min
        int64_t delta_max
        # Where the broker's time counts: that, and 0, which makes all deltas 0. Else the first record's, and all bits.
        int64_t base_timestamp
        int64_t time_mask
        # The record that was read last; sizes of -1 are nulls.
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

cdef enum:
    RECORD_BYTES_MIN = 7
    LENGTH_MIN = 6
    HEADER_BYTES_MIN = 2
    ROOM_MIN = 256
    # Shorter bodies are done before another thread would have woken up.
    UNLOCKED_BYTES_MIN = 65536

cdef int64_t BODY_BYTES_MAX = _pure.BODY_BYTES_MAX

# The twin numbers the same things; an import that fails makes `codec` use the twin, which is better than a kernel
# that was built from other sources.
if (_pure.BAD_TAIL, _columns.HEADERS) != (BAD_TAIL, HEADERS):
    raise ImportError("the kernel is older than its twin: build it anew")

cdef PyTypeObject *RECORD = <PyTypeObject *> Record
cdef tuple NO_HEADERS = ()


cdef const uint8_t *number(
    const uint8_t *at, const uint8_t *end, int last_shift, uint64_t last_max, int64_t *out
) noexcept nogil:
    """The position after a number, or NULL. Its last possible byte has few bits left and may not go on."""
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
    """What follows the value, up to the end of the record."""
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
    """Reads a record of any shape: 0, or the rule that it breaks. The order of checks is the twin's."""
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
    """A section whose buffer is held for as long as this object lives, and how far it has been read."""

    cdef Py_buffer view
    cdef Walk walk
    cdef int64_t count
    cdef int64_t done

    def __cinit__(self, section):
        cdef int64_t base_offset, span, base_timestamp, max_timestamp
        cdef bint is_append_time
        body, count, base_offset, span, base_timestamp, max_timestamp, is_append_time = section
        PyObject_GetBuffer(body, &self.view, PyBUF_SIMPLE)
        self.count = count
        if self.count < 0 or self.count > self.view.len // RECORD_BYTES_MIN:
            raise _pure.corrupt(BAD_COUNT, 0)
        if base_offset > INT64_MAX - (span if span > 0 else 0):
            raise _pure.corrupt(BAD_OFFSET, 0)
        self.walk.at = <const uint8_t *> self.view.buf
        self.walk.end = self.walk.at + self.view.len
        self.walk.quick_end = self.walk.at
        self.walk.base_offset = base_offset
        self.walk.delta_max = span
        self.walk.base_timestamp = max_timestamp if is_append_time else base_timestamp
        self.walk.time_mask = 0 if is_append_time else -1
        # A sum that is far from the ends of 64 bits needs no check.
        if self.view.len > QUICK_SLACK and INT64_MIN // 2 < self.walk.base_timestamp < INT64_MAX // 2:
            self.walk.quick_end = self.walk.end - QUICK_SLACK

    def __dealloc__(self):
        PyBuffer_Release(&self.view)

    cdef inline int next(self) except -1:
        cdef int failure = step(&self.walk)
        if failure:
            raise _pure.corrupt(failure, self.done)
        self.done += 1
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
    """Headers that `step` has checked; checked again where they are read, at no cost that matters."""
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
    return tuple(headers)


cdef inline void put_item(object record, Py_ssize_t index, object item) noexcept:
    Py_INCREF(item)
    PyTuple_SET_ITEM(record, index, item)


def decode(section):
    cdef Source source = Source(section)
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
        # What `Record(...)` does, without a call: a named tuple has no state beside its items.
        record = tuple_of_type(RECORD, 5)
        put_item(record, 0, offset)
        put_item(record, 1, timestamp)
        put_item(record, 2, key)
        put_item(record, 3, value)
        put_item(record, 4, headers)
        # Numbers, bytes and text refer to nothing, so no record is ever part of a cycle, and the collector need not
        # look at each of them again and again: that took 40 % of the time.
        PyObject_GC_UnTrack(<void *> record)
        Py_INCREF(record)
        PyList_SET_ITEM(records, index, record)
    source.finish()
    return records


def keys(section):
    cdef Source source = Source(section)
    cdef Walk *walk = &source.walk
    cdef list found = []
    while source.done < source.count:
        source.next()
        found.append((walk.offset, as_bytes(walk.key, walk.key_bytes), walk.value_bytes < 0))
    source.finish()
    return found


def find_time(section, timestamp):
    cdef Source source = Source(section)
    cdef int64_t wanted = timestamp
    while source.done < source.count:
        source.next()
        if source.walk.timestamp >= wanted:
            return source.walk.offset, source.walk.timestamp
    source.finish()
    return None


@cython.final
cdef class BinaryColumn:
    """A column that grows. `state` shows where it is and how far it is filled."""

    cdef bytearray validity
    cdef bytearray ends
    cdef bytearray data
    cdef Column state

    def __cinit__(self):
        self.validity = PyByteArray_FromStringAndSize(NULL, 0)
        self.ends = PyByteArray_FromStringAndSize("\0\0\0\0", 4)
        self.data = PyByteArray_FromStringAndSize(NULL, 0)

    cdef int reserve_rows(self, int64_t rows) except -1 with gil:
        """Room for so many in all. The new ones are not null until a writer says otherwise."""
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
        """Room for `more` bytes and one wide move."""
        cdef int64_t room
        if more + WIDE <= self.state.room - self.state.used:
            return 0
        if more > INT32_MAX - self.state.used:
            raise ColumnsTooLarge(INT32_MAX)
        # Ends cannot point beyond 31 bits, so neither does the room, and whoever stays within it need not ask.
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
        # Python makes a bytearray that grows larger than asked for, so many small sections are no worse than one.
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
            # Values are most of a body, and pages that stay untouched cost nothing.
            self.value.reserve_data(body_bytes)
        self.table.offsets = <int64_t *> PyByteArray_AS_STRING(self.offsets)
        self.table.timestamps = <int64_t *> PyByteArray_AS_STRING(self.timestamps)
        self.table.list_ends = <int32_t *> PyByteArray_AS_STRING(self.list_ends)
        return 0

    cdef int add_rows(self, Source source) except -1 nogil:
        cdef Walk *walk = &source.walk
        cdef int failure
        while True:
            # After a record with headers the next one has some too, more often than not.
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
        """Headers that `any_step` has checked; checked again where they are read, in case someone has changed them."""
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


def validate(section):
    # Filling no columns is walking the records.
    cdef Filler filler = Filler(0)
    filler.add(Source(section))


@cython.final
cdef class Grow:
    """A bytearray that is written at its end."""

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
        """The bytes; nothing may be written after it."""
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
    """What a key or a value takes: its length as a number, and itself."""
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
                name, held = name.encode(errors="surrogateescape"), bytes_or_none(held)
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
