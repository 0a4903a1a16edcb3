# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""Comet's ProduceRequest, compiled: `comet.read_produce` states the rules.

Memory safety: every length is compared with the bytes that are left before it is used; `data` is immutable, and held by
the caller.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int32_t, uint8_t, uint64_t

cdef enum:
    # A field's number and wire type.
    TOPIC = 1 << 3 | 2
    RECORD = 2 << 3 | 2
    PARTITION = 1 << 3
    KEY = 2 << 3 | 2
    VALUE = 3 << 3 | 2


cdef struct Input:
    const uint8_t *at
    const uint8_t *end


cdef inline int varint(Input *input, uint64_t *value) noexcept:
    """Whether there was a number."""
    cdef int shift = 0
    cdef uint8_t byte
    value[0] = 0
    while input.at < input.end and shift < 70:
        byte = input.at[0]
        input.at += 1
        value[0] |= <uint64_t>(byte & 0x7F) << shift if shift < 64 else 0
        if byte < 0x80:
            return 1
        shift += 7
    return 0


cdef inline int span(Input *input, Input *content) noexcept:
    """Whether there were a length and as many bytes."""
    cdef uint64_t length
    if not varint(input, &length) or length > <uint64_t>(input.end - input.at):
        return 0
    content.at = input.at
    input.at += length
    content.end = input.at
    return 1


def read_produce(bytes data not None, now_ms, Py_ssize_t limit):
    """None: the message is not exactly in order, or has too many records; the general path finds out."""
    cdef Input message, record, content
    cdef uint64_t number
    cdef int32_t partition, first = 0
    cdef Py_ssize_t size = 0
    cdef uint8_t tag
    cdef bint is_one = True, has_topic = False
    cdef bytes topic = b""
    cdef list numbers = [], rows = []
    cdef tuple no_headers = ()
    message.at = <const uint8_t *>PyBytes_AS_STRING(data)
    message.end = message.at + PyBytes_GET_SIZE(data)
    while message.at < message.end:
        tag = message.at[0]
        message.at += 1
        if tag == TOPIC:
            if has_topic or not span(&message, &content):
                return None
            has_topic = True
            topic = PyBytes_FromStringAndSize(<const char *>content.at, content.end - content.at)
        elif tag == RECORD:
            if len(rows) == limit or not span(&message, &record):
                return None
            partition, key, value = 0, None, b""
            while record.at < record.end:
                tag = record.at[0]
                record.at += 1
                if tag == PARTITION:
                    if not varint(&record, &number):
                        return None
                    partition = <int32_t>number
                elif tag == VALUE or tag == KEY:
                    if not span(&record, &content):
                        return None
                    if tag == VALUE:
                        value = PyBytes_FromStringAndSize(<const char *>content.at, content.end - content.at)
                    else:
                        key = PyBytes_FromStringAndSize(<const char *>content.at, content.end - content.at) or None
                else:
                    return None
            size += len(value) + (len(key) if key is not None else 0)
            if not rows:
                first = partition
            elif partition != first:
                is_one = False
            numbers.append(partition)
            rows.append((0, now_ms, key, value, no_headers))
        else:
            return None
    try:
        name = topic.decode()
    except UnicodeDecodeError:
        return None
    return name, numbers, rows, size, is_one
