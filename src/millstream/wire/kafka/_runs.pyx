# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""Produce requests that arrived together, compiled. `pure_runs.py` is the twin and states the rules.

Memory safety
-------------
1. `take` holds the buffer (`PyObject_GetBuffer`) while pointers into it live, so the callback can neither free nor
   resize it.
2. Only complete frames are read. `matches` leaves at least five bytes behind the known ones, `batch_behind` finds only
   a batch that ends inside its frame, and `Part.add` reads a batch only if it has a whole header.
3. Shapes and requests are the door's own objects. Their types are checked nevertheless.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE, PyByteArray_Resize
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.memoryview cimport PyMemoryView_FromMemory
from libc.stdint cimport INT32_MAX, INT64_MAX, int16_t, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

from crc32c import crc32c as _crc32c

from millstream.records import batch as _batch

cdef extern from "Python.h":
    enum:
        PyBUF_READ

cdef enum:
    # The head of a frame: size, API key, version, correlation id.
    HEAD_BYTES = 12
    PRODUCE = 0
    # A batch, as in the table in `records/batch.py`.
    LENGTH_AT = 8
    EPOCH_AT = 12
    MAGIC_AT = 16
    CRC_AT = 17
    ATTRIBUTES_AT = 21
    LAST_DELTA_AT = 23
    BASE_TIMESTAMP_AT = 27
    MAX_TIMESTAMP_AT = 35
    PRODUCER_AT = 43
    COUNT_AT = 57
    HEADER_BYTES = 61
    # Behind a batch in flexible versions: no tagged fields of partition, topic, request.
    TAGS_BYTES = 3

cdef int ORDINARY = _batch.ORDINARY
cdef int CODEC_MASK = _batch.CODEC_MASK
cdef int CODEC_MAX = _batch.CODEC_MAX
cdef int LOG_APPEND_TIME = _batch.LOG_APPEND_TIME


# -- big-endian numbers ------------------------------------------------------------------------------------------------


cdef inline uint64_t get(const uint8_t *at, int size) noexcept:
    cdef uint64_t value = 0
    cdef int position
    for position in range(size):
        value = value << 8 | at[position]
    return value


cdef inline int16_t get_i16(const uint8_t *at) noexcept:
    return <int16_t> get(at, 2)


cdef inline int32_t get_i32(const uint8_t *at) noexcept:
    return <int32_t> get(at, 4)


cdef inline int64_t get_i64(const uint8_t *at) noexcept:
    return <int64_t> get(at, 8)


cdef inline uint8_t *put(uint8_t *at, uint64_t value, int size) noexcept:
    cdef int position
    for position in range(size):
        at[position] = <uint8_t> (value >> 8 * (size - 1 - position))
    return at + size


cdef class Shape:
    cdef readonly bytes prefix, head, tail
    cdef readonly int version
    cdef readonly bint is_flexible, has_log_start
    cdef readonly object partition

    def __cinit__(self, *args, **kwargs):
        self.prefix = self.head = self.tail = b""

    def __init__(
        self,
        bytes prefix not None,
        int version,
        bytes head not None,
        bytes tail not None,
        partition,
        *,
        bint is_flexible,
        bint has_log_start,
    ):
        self.prefix = prefix
        self.version = version
        self.is_flexible = is_flexible
        self.head = head
        self.tail = tail
        self.has_log_start = has_log_start
        self.partition = partition


# -- batches -----------------------------------------------------------------------------------------------------------


@cython.final
cdef class Part:
    cdef readonly bytearray data
    cdef readonly int64_t count, offsets, max_timestamp, base_offset, log_start
    cdef Py_ssize_t batch_bytes_max, room
    cdef int64_t timestamp_max

    def __cinit__(self, Py_ssize_t batch_bytes_max, Py_ssize_t bytes_max, int64_t timestamp_max=INT64_MAX):
        self.data = bytearray()
        self.count = self.offsets = 0
        self.max_timestamp = self.base_offset = self.log_start = -1
        self.batch_bytes_max = batch_bytes_max
        self.room = bytes_max
        self.timestamp_max = timestamp_max

    cdef bint add(self, const uint8_t *batch, Py_ssize_t size) except -1:
        """Adds a batch; False if it cannot be stored unchanged."""
        cdef int32_t count
        cdef int64_t max_timestamp
        cdef Py_ssize_t position
        if size > self.batch_bytes_max or size > self.room or size < HEADER_BYTES:
            return False
        if batch[MAGIC_AT] != 2 or get_i32(batch + LENGTH_AT) != size - EPOCH_AT or not is_ordinary(batch):
            return False
        count = get_i32(batch + COUNT_AT)
        if count < 1 or get_i32(batch + LAST_DELTA_AT) != count - 1:
            return False
        if get_i64(batch + PRODUCER_AT) != -1 or self.offsets + count > INT32_MAX:
            return False
        max_timestamp = get_i64(batch + MAX_TIMESTAMP_AT)
        if max_timestamp > self.timestamp_max or get_i64(batch + BASE_TIMESTAMP_AT) > self.timestamp_max:
            return False
        if not is_whole(batch, size):
            return False
        position = PyByteArray_GET_SIZE(self.data)
        PyByteArray_Resize(self.data, position + size)
        memcpy(PyByteArray_AS_STRING(self.data) + position, batch, size)
        self.count += 1
        self.offsets += count
        if max_timestamp > self.max_timestamp:
            self.max_timestamp = max_timestamp
        self.room -= size
        return True

    def place(self, int64_t base_offset, int32_t leader_epoch):
        cdef uint8_t *at = <uint8_t *> PyByteArray_AS_STRING(self.data)
        cdef Py_ssize_t size, left = PyByteArray_GET_SIZE(self.data)
        while left >= HEADER_BYTES:
            size = <Py_ssize_t> get_i32(at + LENGTH_AT) + EPOCH_AT
            if size < HEADER_BYTES or size > left:
                raise ValueError("the run was changed")
            put(at, <uint64_t> base_offset, 8)
            put(at + EPOCH_AT, <uint64_t> leader_epoch, 4)
            base_offset += get_i32(at + COUNT_AT)
            at += size
            left -= size

    def settle(self, int64_t base_offset, int64_t log_start):
        self.base_offset = base_offset
        self.log_start = log_start

    def let_go(self):
        self.data = bytearray()


cdef inline bint is_ordinary(const uint8_t *batch) noexcept:
    cdef int attributes = get_i16(batch + ATTRIBUTES_AT)
    return not attributes & ~ORDINARY and attributes & CODEC_MASK <= CODEC_MAX


# Up to this size the table beats the library: calling it costs some 2,000 instructions, the table 1.5 a byte.
cdef enum:
    SMALL_BYTES = 1024

cdef uint32_t[8][256] CRC_TABLE  # CRC-32C, slicing by eight


cdef void fill_crc_table() noexcept:
    cdef uint32_t crc
    cdef int byte, bit, table
    for byte in range(256):
        crc = byte
        for bit in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        CRC_TABLE[0][byte] = crc
    for table in range(1, 8):
        for byte in range(256):
            crc = CRC_TABLE[table - 1][byte]
            CRC_TABLE[table][byte] = crc >> 8 ^ CRC_TABLE[0][crc & 0xFF]


fill_crc_table()


cdef inline uint32_t get_little(const uint8_t *at) noexcept:
    return at[0] | <uint32_t> at[1] << 8 | <uint32_t> at[2] << 16 | <uint32_t> at[3] << 24


cdef uint32_t small_crc32c(const uint8_t *at, Py_ssize_t size) noexcept:
    cdef uint32_t low, high, crc = 0xFFFFFFFF
    while size >= 8:
        low = crc ^ get_little(at)
        high = get_little(at + 4)
        crc = (
            CRC_TABLE[7][low & 0xFF] ^ CRC_TABLE[6][low >> 8 & 0xFF]
            ^ CRC_TABLE[5][low >> 16 & 0xFF] ^ CRC_TABLE[4][low >> 24]
            ^ CRC_TABLE[3][high & 0xFF] ^ CRC_TABLE[2][high >> 8 & 0xFF]
            ^ CRC_TABLE[1][high >> 16 & 0xFF] ^ CRC_TABLE[0][high >> 24]
        )
        at += 8
        size -= 8
    while size > 0:
        crc = crc >> 8 ^ CRC_TABLE[0][(crc ^ at[0]) & 0xFF]
        at += 1
        size -= 1
    return ~crc


cdef bint is_whole(const uint8_t *batch, Py_ssize_t size) except -1:
    cdef uint32_t crc
    if size <= SMALL_BYTES:
        crc = small_crc32c(batch + ATTRIBUTES_AT, size - ATTRIBUTES_AT)
    else:
        crc = _crc32c(PyMemoryView_FromMemory(<char *> batch + ATTRIBUTES_AT, size - ATTRIBUTES_AT, PyBUF_READ))
    return crc == <uint32_t> get(batch + CRC_AT, 4)


# -- requests ----------------------------------------------------------------------------------------------------------


cdef struct Batch:
    const uint8_t *at
    Py_ssize_t size


cdef bint batch_behind(Shape shape, const uint8_t *at, Py_ssize_t left, Batch *batch) noexcept:
    """Finds the batch of a request that begins with the known bytes; False if anything unusual surrounds it."""
    cdef uint64_t size = 0
    cdef int shift = 0
    cdef uint8_t byte
    at += PyBytes_GET_SIZE(shape.prefix)
    left -= PyBytes_GET_SIZE(shape.prefix)
    if not shape.is_flexible:
        if left < 4 or get_i32(at) != left - 4:
            return False
        batch.at = at + 4
        batch.size = left - 4
        return True
    while left > 0 and shift < 35:
        byte = at[0]
        at += 1
        left -= 1
        size |= <uint64_t> (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            if size == 0 or size - 1 + TAGS_BYTES != <uint64_t> left or get(at + size - 1, TAGS_BYTES) != 0:
                return False
            batch.at = at
            batch.size = left - TAGS_BYTES
            return True
    return False


cdef inline bint matches(Shape shape, const uint8_t *at, Py_ssize_t left, int version) noexcept:
    cdef Py_ssize_t length = PyBytes_GET_SIZE(shape.prefix)
    return shape.version == version and left > length + 4 and memcmp(at, PyBytes_AS_STRING(shape.prefix), length) == 0


cdef Shape shape_of(const uint8_t *at, Py_ssize_t left, int version, dict shapes, lengths):
    cdef Shape shape
    cdef Py_ssize_t length
    for length in lengths:
        if 0 <= length < left - 4:
            shape = shapes.get((version, PyBytes_FromStringAndSize(<char *> at, length)))
            if shape is not None and matches(shape, at, left, version):
                return shape
    return None


def take(data, Py_ssize_t position, dict shapes not None, lengths, part_of, list requests not None):
    cdef Py_buffer view
    if position < 0:
        raise ValueError("a position before the first byte")
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        return walk(<const uint8_t *> view.buf, position, view.len, shapes, lengths, part_of, requests)
    finally:
        PyBuffer_Release(&view)


cdef Py_ssize_t walk(
    const uint8_t *data, Py_ssize_t position, Py_ssize_t end, dict shapes, lengths, part_of, list requests
) except -1:
    cdef dict parts = {}
    cdef Shape shape = None
    cdef Part part = None
    cdef Batch batch
    cdef const uint8_t *at
    cdef Py_ssize_t left
    cdef int32_t size, correlation_id
    cdef int version
    cdef int64_t behind, append_time
    while end - position >= HEAD_BYTES:
        at = data + position
        size = get_i32(at)
        version = get_i16(at + 6)
        if get_i16(at + 4) != PRODUCE or size < HEAD_BYTES or size > end - position - 4:
            break
        correlation_id = get_i32(at + 8)
        at += HEAD_BYTES
        left = size + 4 - HEAD_BYTES
        if shape is None or not matches(shape, at, left, version):
            shape = shape_of(at, left, version, shapes, lengths)
            if shape is None:
                break
            part = parts.get(shape.partition)
        if not batch_behind(shape, at, left, &batch):
            break
        if part is None:
            part = part_of(shape.partition)
            if part is None:
                break
            parts[shape.partition] = part
        behind = part.offsets
        if not part.add(batch.at, batch.size):
            break
        append_time = -1
        if get_i16(batch.at + ATTRIBUTES_AT) & LOG_APPEND_TIME:
            append_time = get_i64(batch.at + MAX_TIMESTAMP_AT)
        requests.append((shape, correlation_id, part, behind, append_time))
        position += 4 + size
    return position


def find(frame, Py_ssize_t position, int version, dict shapes not None, lengths):
    cdef Py_buffer view
    cdef Batch batch
    cdef Py_ssize_t start
    cdef const uint8_t *at
    cdef Shape shape
    PyObject_GetBuffer(frame, &view, PyBUF_SIMPLE)
    try:
        if position < 0 or position > view.len:
            return None
        at = <const uint8_t *> view.buf + position
        shape = shape_of(at, view.len - position, version, shapes, lengths)
        if shape is None or not batch_behind(shape, at, view.len - position, &batch):
            return None
        start = batch.at - <const uint8_t *> view.buf
    finally:
        PyBuffer_Release(&view)
    return shape, frame[start : start + batch.size]


# -- answers -----------------------------------------------------------------------------------------------------------


cdef inline Py_ssize_t answer_bytes(Shape shape) noexcept:
    """The bytes of a whole frame: size, correlation id, head, two or three numbers, tail."""
    return 8 + PyBytes_GET_SIZE(shape.head) + (24 if shape.has_log_start else 16) + PyBytes_GET_SIZE(shape.tail)


cdef inline uint8_t *put_bytes(uint8_t *at, bytes data) noexcept:
    memcpy(at, PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))
    return at + PyBytes_GET_SIZE(data)


cdef uint8_t *put_answer(
    uint8_t *at, Shape shape, int32_t correlation_id, int64_t base_offset, int64_t append_time, int64_t log_start
) noexcept:
    at = put(at, <uint64_t> (answer_bytes(shape) - 4), 4)
    at = put(at, <uint64_t> correlation_id, 4)
    at = put_bytes(at, shape.head)
    at = put(at, <uint64_t> base_offset, 8)
    at = put(at, <uint64_t> append_time, 8)
    if shape.has_log_start:
        at = put(at, <uint64_t> log_start, 8)
    return put_bytes(at, shape.tail)


def answer(Shape shape not None, int32_t correlation_id, int64_t base_offset, int64_t append_time, int64_t log_start):
    frame = PyBytes_FromStringAndSize(NULL, answer_bytes(shape))
    put_answer(<uint8_t *> PyBytes_AS_STRING(frame), shape, correlation_id, base_offset, append_time, log_start)
    return frame


def answers(list requests not None):
    cdef Py_ssize_t size = 0
    cdef tuple request
    cdef Shape shape
    cdef Part part
    cdef int64_t behind
    cdef int32_t correlation_id
    cdef int64_t append_time
    cdef uint8_t *at
    # A conversion to a number below may run Python code that changes the list, so this measures a copy.
    cdef tuple measured = tuple(requests)
    for request in measured:
        if len(request) != 5:
            raise ValueError("a request has five fields")
        size += answer_bytes(<Shape?> request[0])
    frames = PyBytes_FromStringAndSize(NULL, size)
    at = <uint8_t *> PyBytes_AS_STRING(frames)
    for request in measured:
        shape, part = <Shape?> request[0], <Part?> request[2]
        correlation_id, behind, append_time = request[1], request[3], request[4]
        size -= answer_bytes(shape)
        if size < 0:
            break
        at = put_answer(at, shape, correlation_id, part.base_offset + behind, append_time, part.log_start)
    if size:
        raise ValueError("the shapes were changed")
    return frames
