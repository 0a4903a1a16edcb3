/* The client of the fetch measure: takes bytes and throws them away, because only the server's CPU counts.
 *
 * drain raw PORT BYTES                       from sendfile.c: one byte out, BYTES in
 * drain kafka PORT BYTES REQUEST             from a broker: REQUEST is a file with one Fetch v11 frame for one partition,
 *                                            sent again and again with the next offset patched in, one in flight
 * drain luxun PORT BYTES REQUEST             from the Luxun door: REQUEST is a file with one framed `consume` call by index,
 *                                            sent again and again with the next index patched in, one in flight
 *
 * The fetch offset is found from the back of the frame (see frames.py): it stands OFFSET_FROM_END bytes before the end.
 * Prints "BYTES SECONDS RESPONSES".
 */
#include "net.h"

enum {
    RESPONSE_BYTES_MAX = 128 << 20,
    OFFSET_FROM_END = 8 + 8 + 4 + 4 + 2, /* offset, log start offset, partition bytes max, no forgotten topics, no rack */
    BATCH_HEADER = 61,
    INDEX_FROM_END = 8 + 3 + 4 + 2,    /* index; a field's head and i32; the ends of two structs */
    LAST_INDEX_FROM_END = 8 + 2,       /* the last consumed index, and the ends of two structs */
    RESULT_CODE_AT = 4 + 4 + 7 + 4 + 3 + 3 + 3, /* version, name "consume", sequence id, heads of three fields */
};

/* Calls `consume` from index to index until so many bytes came. */
static uint64_t drain_luxun(int connection, const char *path, uint64_t wanted, uint64_t *responses) {
    size_t size;
    uint8_t *request = read_file(path, &size), *frame = malloc(RESPONSE_BYTES_MAX), prefix[4];
    uint64_t index = 0, got = 0;
    while (got < wanted) {
        put_u64(request + size - INDEX_FROM_END, index);
        send_all(connection, request, size);
        recv_all(connection, prefix, 4);
        size_t length = get_u32(prefix);
        if (!frame || length > RESPONSE_BYTES_MAX) fprintf(stderr, "frame of %zu bytes\n", length), exit(1);
        recv_all(connection, frame, length);
        if (length < 60 || get_u32(frame + RESULT_CODE_AT)) fprintf(stderr, "refused at %lu\n", (unsigned long)index), exit(1);
        index = get_u64(frame + length - LAST_INDEX_FROM_END) + 1;
        got += length;
        (*responses)++;
    }
    return got;
}

/* The records field is last in a one-partition response: batches up to the end of the frame. */
static uint64_t offset_after(const uint8_t *frame, size_t size, size_t topic_length, uint64_t offset, size_t *records) {
    size_t at = 4 + 4 + 2 + 4 + 4 + 2 + topic_length + 4; /* correlation, throttle, error, session, topics, name, count */
    if (size < at + 34) fprintf(stderr, "short fetch response (%zu bytes)\n", size), exit(1);
    int error = (int16_t)(frame[at + 4] << 8 | frame[at + 5]);
    if (error) fprintf(stderr, "fetch error %d\n", error), exit(1);
    at += 4 + 2 + 8 + 8 + 8; /* partition, error, high watermark, last stable offset, log start offset */
    int32_t aborted = (int32_t)get_u32(frame + at);
    at += 4 + (aborted > 0 ? (size_t)aborted * 16 : 0) + 4; /* aborted transactions, preferred replica */
    size_t end = at + 4 + get_u32(frame + at);
    at += 4;
    *records = end - at;
    if (end > size) fprintf(stderr, "bad fetch response\n"), exit(1);
    while (at + BATCH_HEADER <= end) {
        size_t batch = 12 + get_u32(frame + at + 8);
        if (at + batch > end) break;
        offset = get_u64(frame + at) + get_u32(frame + at + 23) + 1;
        at += batch;
    }
    return offset;
}

int main(int argc, char **argv) {
    if (argc < 4) return 2;
    int connection = dial(atoi(argv[2]));
    uint64_t wanted = strtoull(argv[3], NULL, 10), got = 0, responses = 0;
    double start = now_s();
    if (!strcmp(argv[1], "raw")) {
        static uint8_t buffer[256 * 1024];
        send_all(connection, (const uint8_t *)"g", 1);
        while (got < wanted) {
            ssize_t part = recv(connection, buffer, sizeof buffer, 0);
            if (part <= 0) die("recv");
            got += (uint64_t)part;
        }
    } else if (!strcmp(argv[1], "luxun")) {
        got = drain_luxun(connection, argv[4], wanted, &responses);
    } else {
        size_t size, records;
        uint8_t *request = read_file(argv[4], &size), *frame = malloc(RESPONSE_BYTES_MAX), prefix[4];
        /* the topic's length: its name is followed by a count, a partition, an epoch and the rest from OFFSET_FROM_END */
        size_t client = (size_t)(request[12] << 8 | request[13]);
        size_t topic = 14 + client + 4 + 4 + 4 + 4 + 1 + 4 + 4 + 4;
        size_t topic_length = (size_t)(request[topic] << 8 | request[topic + 1]);
        uint64_t offset = 0;
        while (got < wanted) {
            put_u64(request + size - OFFSET_FROM_END, offset);
            send_all(connection, request, size);
            recv_all(connection, prefix, 4);
            size_t length = get_u32(prefix);
            if (!frame || length > RESPONSE_BYTES_MAX) fprintf(stderr, "frame of %zu bytes\n", length), exit(1);
            recv_all(connection, frame, length);
            uint64_t next = offset_after(frame, length, topic_length, offset, &records);
            if (next == offset) fprintf(stderr, "nothing at offset %lu\n", (unsigned long)offset), exit(1);
            offset = next;
            got += records;
            responses++;
        }
    }
    printf("%lu %f %lu\n", (unsigned long)got, now_s() - start, (unsigned long)responses);
    return 0;
}
