# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""Records out of a section's bytes and back, compiled. `pure.py` is the twin and holds the format and the rules.

How it stays within its bytes
-----------------------------
1. `step` is the only reader. It moves one pointer towards one end, and compares a length with what is left before it
   adds it to the pointer. A length is read once, into a local: bytes that someone else changes meanwhile can give
   wrong records, never a wrong address.
2. `Grow` is the only writer. `reserve` comes before the bytes, and no pointer into it is kept across a `reserve`.
3. The section's buffer is held (`PyObject_GetBuffer`) while pointers into it live, so it can be neither freed nor
   resized.

Columns are filled in one pass: fixed-width ones are sized by the count, which rule 1 of the twin has bounded by the
bytes; the others grow. A first pass that only measures would walk the records twice, and the walk is half the time.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_FromStringAndSize, PyByteArray_Resize
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
    OFFSET = 1
    TIMESTAMP = 2
    TIMESTAMP_TYPE = 4
    KEY = 8
    VALUE = 16
    HEADERS = 32

cdef enum:
    RECORD_BYTES_MIN = 7
    LENGTH_MIN = 6
    HEADER_BYTES_MIN = 2
    ROOM_MIN = 256

cdef int64_t BODY_BYTES_MAX = _pure.BODY_BYTES_MAX

# The twin numbers the same things; an import that fails makes `codec` use the twin, which is better than a kernel
# that was built from other sources.
if (_pure.BAD_TAIL, _columns.HEADERS) != (BAD_TAIL, HEADERS):
    raise ImportError("the kernel is older than its twin: build it anew")

cdef PyTypeObject *RECORD = <PyTypeObject *> Record
cdef tuple NO_HEADERS = ()


cdef struct Walk:
    const uint8_t *at
    const uint8_t *end
    int64_t base_offset
    int64_t base_timestamp
    int64_t max_timestamp
    int64_t delta_min
    int64_t delta_max
    bint is_append_time
    # The record that `step` has read; sizes of -1 are nulls.
    int64_t offset
    int64_t timestamp
    const uint8_t *key
    const uint8_t *value
    const uint8_t *headers
    int32_t key_bytes
    int32_t value_bytes
    int32_t header_count


cdef const uint8_t *long_varint(const uint8_t *at, const uint8_t *end, int32_t *out) noexcept nogil:
    cdef uint32_t value = 0, byte
    cdef int shift = 0
    while at < end:
        byte = at[0]
        at += 1
        if shift == 28 and byte > 0x0F:
            return NULL
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            out[0] = <int32_t> ((value >> 1) ^ (0 - (value & 1)))
            return at
        shift += 7
    return NULL


cdef inline const uint8_t *varint(const uint8_t *at, const uint8_t *end, int32_t *out) noexcept nogil:
    """The position after the number, or NULL. One byte is by far the most common length, two the next."""
    cdef uint32_t value
    if end - at >= 2:
        value = at[0]
        if value < 0x80:
            out[0] = <int32_t> ((value >> 1) ^ (0 - (value & 1)))
            return at + 1
        if at[1] < 0x80:
            value = (value & 0x7F) | (<uint32_t> at[1] << 7)
            out[0] = <int32_t> ((value >> 1) ^ (0 - (value & 1)))
            return at + 2
    return long_varint(at, end, out)


cdef inline const uint8_t *varlong(const uint8_t *at, const uint8_t *end, int64_t *out) noexcept nogil:
    cdef uint64_t value = 0, byte
    cdef int shift = 0
    while at < end:
        byte = at[0]
        at += 1
        if shift == 63 and byte > 0x01:
            return NULL
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            out[0] = <int64_t> ((value >> 1) ^ (0 - (value & 1)))
            return at
        shift += 7
    return NULL


cdef int check_headers(const uint8_t *at, const uint8_t *stop, int32_t count) noexcept nogil:
    cdef int32_t size, index
    for index in range(count):
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


cdef inline int step(Walk *walk) noexcept nogil:
    """Reads the next record into `walk`: 0, or the rule that it breaks. The order of checks is the twin's."""
    cdef const uint8_t *at = walk.at
    cdef const uint8_t *stop
    cdef int32_t length, delta, size
    cdef int64_t time_delta
    cdef int failure
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
    walk.delta_min = <int64_t> delta + 1
    walk.offset = walk.base_offset + delta
    if walk.is_append_time:
        walk.timestamp = walk.max_timestamp
    else:
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
    walk.key_bytes = size
    if size > 0:
        at += size
    at = varint(at, stop, &size)
    if at == NULL:
        return BAD_NUMBER
    if size < -1 or size > stop - at:
        return BAD_VALUE
    walk.value = at
    walk.value_bytes = size
    if size > 0:
        at += size
    at = varint(at, stop, &size)
    if at == NULL:
        return BAD_NUMBER
    walk.headers = at
    walk.header_count = size
    if size != 0:
        if size < 0 or size > (stop - at) // HEADER_BYTES_MIN:
            return BAD_HEADER_COUNT
        failure = check_headers(at, stop, size)
        if failure:
            return failure
    elif at != stop:
        return BAD_REST
    # The same as `at`, but known since the record's first bytes: the processor starts on the next record early.
    walk.at = stop
    return 0


@cython.final
cdef class Source:
    """A section whose buffer is held for as long as this object lives."""

    cdef Py_buffer view
    cdef bint is_held
    cdef Walk walk
    cdef int64_t count

    def __cinit__(self, section):
        cdef int64_t base_offset, span, base_timestamp, max_timestamp
        body, count, base_offset, span, base_timestamp, max_timestamp, is_append_time = section
        PyObject_GetBuffer(body, &self.view, PyBUF_SIMPLE)
        self.is_held = True
        self.count = count
        if self.count < 0 or self.count > self.view.len // RECORD_BYTES_MIN:
            raise _pure.corrupt(BAD_COUNT, 0)
        if base_offset > INT64_MAX - (span if span > 0 else 0):
            raise _pure.corrupt(BAD_OFFSET, 0)
        self.walk.at = <const uint8_t *> self.view.buf
        self.walk.end = self.walk.at + self.view.len
        self.walk.base_offset = base_offset
        self.walk.base_timestamp = base_timestamp
        self.walk.max_timestamp = max_timestamp
        self.walk.delta_min = 0
        self.walk.delta_max = span
        self.walk.is_append_time = is_append_time

    def __dealloc__(self):
        if self.is_held:
            PyBuffer_Release(&self.view)

    cdef int finish(self) except -1:
        if self.walk.at != self.walk.end:
            raise _pure.corrupt(BAD_TAIL, self.count)
        return 0


cdef inline object as_bytes(const uint8_t *start, int32_t size):
    if size < 0:
        return None
    return PyBytes_FromStringAndSize(<const char *> start, size)


cdef tuple as_headers(const uint8_t *at, const uint8_t *end, int32_t count):
    """Headers that `step` has checked; checked again where they are read, at no cost that matters."""
    cdef int32_t size, index
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
    cdef int failure
    cdef object offset, timestamp, key, value, headers, record
    for index in range(source.count):
        failure = step(walk)
        if failure:
            raise _pure.corrupt(failure, index)
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
    cdef int64_t index
    cdef int failure
    for index in range(source.count):
        failure = step(walk)
        if failure:
            raise _pure.corrupt(failure, index)
        found.append((walk.offset, as_bytes(walk.key, walk.key_bytes), walk.value_bytes < 0))
    source.finish()
    return found


def find_time(section, timestamp):
    cdef Source source = Source(section)
    cdef Walk *walk = &source.walk
    cdef int64_t index
    cdef int64_t wanted = timestamp
    cdef int failure
    for index in range(source.count):
        failure = step(walk)
        if failure:
            raise _pure.corrupt(failure, index)
        if walk.timestamp >= wanted:
            return walk.offset, walk.timestamp
    source.finish()
    return None


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


@cython.final
cdef class BinaryColumn:
    cdef Grow validity
    cdef Grow ends
    cdef Grow data
    cdef int64_t count
    cdef int64_t null_count

    def __cinit__(self):
        self.validity, self.ends, self.data = Grow(), Grow(), Grow()
        self.ends.reserve(4)
        (<int32_t *> self.ends.data)[0] = 0
        self.ends.used = 4

    cdef int reserve(self, int64_t rows) except -1:
        """Room for more rows, all of them not null until `add` says otherwise."""
        cdef int64_t more = (self.count + rows + 7) // 8 - self.validity.used
        self.ends.reserve(4 * rows)
        if more > 0:
            self.validity.reserve(more)
            memset(self.validity.data + self.validity.used, 0xFF, more)
            self.validity.used += more
        return 0

    cdef inline int add(self, const uint8_t *start, int32_t size) except -1:
        if size > 0:
            if size > INT32_MAX - self.data.used:
                raise ColumnsTooLarge(INT32_MAX)
            self.data.reserve(size)
            memcpy(self.data.data + self.data.used, start, size)
            self.data.used += size
        elif size < 0:
            self.validity.data[self.count >> 3] &= ~(1 << (self.count & 7))
            self.null_count += 1
        (<int32_t *> (self.ends.data + self.ends.used))[0] = <int32_t> self.data.used
        self.ends.used += 4
        self.count += 1
        return 0

    cdef object finish(self):
        if self.count & 7:
            self.validity.data[self.count >> 3] &= (1 << (self.count & 7)) - 1
        return Binary(self.null_count, self.validity.finish(), self.ends.finish(), self.data.finish())


cdef int add_headers(
    const uint8_t *at, const uint8_t *end, int32_t count, BinaryColumn names, BinaryColumn values
) except -1:
    cdef int32_t size, index
    names.reserve(count)
    values.reserve(count)
    for index in range(count):
        at = varint(at, end, &size)
        if at == NULL or size < 0 or size > end - at:
            raise _pure.corrupt(BAD_HEADER_NAME, 0)
        names.add(at, size)
        at = varint(at + size, end, &size)
        if at == NULL or size < -1 or size > end - at:
            raise _pure.corrupt(BAD_HEADER_VALUE, 0)
        values.add(at, size)
        if size > 0:
            at += size
    return 0


@cython.final
cdef class Filler:
    cdef int columns
    cdef int64_t count
    cdef Grow offsets
    cdef Grow timestamps
    cdef Grow kinds
    cdef Grow list_ends
    cdef BinaryColumn key
    cdef BinaryColumn value
    cdef BinaryColumn names
    cdef BinaryColumn held

    def __cinit__(self, int columns):
        self.columns = columns
        self.offsets, self.timestamps, self.kinds, self.list_ends = Grow(), Grow(), Grow(), Grow()
        self.key, self.value, self.names, self.held = BinaryColumn(), BinaryColumn(), BinaryColumn(), BinaryColumn()
        self.list_ends.reserve(4)
        (<int32_t *> self.list_ends.data)[0] = 0
        self.list_ends.used = 4

    cdef int reserve(self, int64_t rows, int64_t body_bytes) except -1:
        self.kinds.reserve(rows)
        if self.columns & OFFSET:
            self.offsets.reserve(8 * rows)
        if self.columns & TIMESTAMP:
            self.timestamps.reserve(8 * rows)
        if self.columns & KEY:
            self.key.reserve(rows)
        if self.columns & VALUE:
            self.value.reserve(rows)
            # Values are most of a body, and pages that stay untouched cost nothing.
            self.value.data.reserve(body_bytes)
        if self.columns & HEADERS:
            self.list_ends.reserve(4 * rows)
        return 0

    cdef int add(self, Source source) except -1:
        # A copy, so that its fields can live in registers.
        cdef Walk walk = source.walk
        cdef BinaryColumn key = self.key, value = self.value
        cdef int columns = self.columns
        cdef int64_t index, rows = source.count
        cdef int64_t *offset
        cdef int64_t *timestamp
        cdef int failure
        self.reserve(rows, source.view.len)
        # Nothing reserves these two again before the loop is over.
        offset = <int64_t *> (self.offsets.data + self.offsets.used)
        timestamp = <int64_t *> (self.timestamps.data + self.timestamps.used)
        for index in range(rows):
            failure = step(&walk)
            if failure:
                raise _pure.corrupt(failure, index)
            if columns & OFFSET:
                offset[index] = walk.offset
            if columns & TIMESTAMP:
                timestamp[index] = walk.timestamp
            if columns & KEY:
                key.add(walk.key, walk.key_bytes)
            if columns & VALUE:
                value.add(walk.value, walk.value_bytes)
            if columns & HEADERS:
                if walk.header_count:
                    add_headers(walk.headers, walk.at, walk.header_count, self.names, self.held)
                (<int32_t *> (self.list_ends.data + self.list_ends.used))[0] = <int32_t> self.names.count
                self.list_ends.used += 4
        source.walk = walk
        source.finish()
        if rows:
            memset(self.kinds.data + self.kinds.used, walk.is_append_time, rows)
        self.kinds.used += rows
        if columns & OFFSET:
            self.offsets.used += 8 * rows
        if columns & TIMESTAMP:
            self.timestamps.used += 8 * rows
        self.count += rows
        return 0


def fill(sections, int columns):
    cdef Filler filler = Filler(columns)
    for section in sections:
        filler.add(Source(section))
    return Filled(
        filler.count,
        filler.offsets.finish() if columns & OFFSET else None,
        filler.timestamps.finish() if columns & TIMESTAMP else None,
        filler.kinds.finish() if columns & TIMESTAMP_TYPE else None,
        filler.key.finish() if columns & KEY else None,
        filler.value.finish() if columns & VALUE else None,
        HeaderLists(filler.list_ends.finish(), filler.names.finish(), filler.held.finish())
        if columns & HEADERS
        else None,
    )


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
