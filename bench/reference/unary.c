/* The load generator for gRPC: the same unary call, many times, over several connections with one in flight each.
 *
 * unary PORT METHOD MESSAGE CONNECTIONS SECONDS
 *
 * METHOD is the path, MESSAGE a file with the request's bytes. As much HTTP/2 (RFC 9113) as that takes: the headers are
 * literals without a table (RFC 7541), so a request's bytes differ in their stream id only; the server's settings and pings
 * are acknowledged, and its windows are kept. Every answer must have a message whose first field is not an error: it
 * begins with field 1. The first tenth of SECONDS warms up and does not count. Prints "CALLS SECONDS".
 */
#include "net.h"
#include <poll.h>

enum { CONNECTIONS_MAX = 128, INPUT = 256 * 1024, FRAME = 16384 };
enum { DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH, PING, GOAWAY, WINDOW_UPDATE };

struct connection {
    uint8_t input[INPUT];
    size_t held;
    uint32_t stream;
    int64_t window; /* what the server takes over this connection */
    int is_answered, waits_for_window;
};

static struct connection connections[CONNECTIONS_MAX];
static struct pollfd polled[CONNECTIONS_MAX];
static uint8_t *request;
static size_t request_size, message_size;

static uint8_t *put_head(uint8_t *p, size_t size, int kind, int flags, uint32_t stream) {
    p[0] = (uint8_t)(size >> 16), p[1] = (uint8_t)(size >> 8), p[2] = (uint8_t)size;
    p[3] = (uint8_t)kind, p[4] = (uint8_t)flags;
    put_u32(p + 5, stream);
    return p + 9;
}

static uint8_t *put_field(uint8_t *p, const char *name, const char *value) {
    *p++ = 0, *p++ = (uint8_t)strlen(name);
    p = (uint8_t *)memcpy(p, name, strlen(name)) + strlen(name);
    *p++ = (uint8_t)strlen(value);
    return (uint8_t *)memcpy(p, value, strlen(value)) + strlen(value);
}

static void build(const char *method, const uint8_t *message, size_t size) {
    uint8_t fields[1024], *p = fields;
    p = put_field(p, ":method", "POST");
    p = put_field(p, ":scheme", "http");
    p = put_field(p, ":path", method);
    p = put_field(p, ":authority", "localhost");
    p = put_field(p, "te", "trailers");
    p = put_field(p, "content-type", "application/grpc");
    size_t fields_size = (size_t)(p - fields);
    message_size = size + 5;
    uint8_t *body = malloc(message_size);
    body[0] = 0;
    put_u32(body + 1, (uint32_t)size);
    memcpy(body + 5, message, size);
    request = malloc(fields_size + message_size + 9 * (message_size / FRAME + 3));
    p = put_head(request, fields_size, HEADERS, 4, 0);
    p = (uint8_t *)memcpy(p, fields, fields_size) + fields_size;
    for (size_t at = 0; at < message_size;) {
        size_t part = message_size - at < FRAME ? message_size - at : FRAME;
        p = put_head(p, part, DATA, at + part == message_size, 0);
        p = (uint8_t *)memcpy(p, body + at, part) + part;
        at += part;
    }
    request_size = (size_t)(p - request);
    free(body);
}

static void call(int index) {
    struct connection *c = &connections[index];
    c->waits_for_window = c->window < (int64_t)message_size;
    if (c->waits_for_window) return;
    c->window -= (int64_t)message_size;
    c->is_answered = 0;
    for (size_t at = 0; at < request_size;) {
        size_t size = (size_t)request[at] << 16 | (size_t)request[at + 1] << 8 | request[at + 2];
        put_u32(request + at + 5, c->stream);
        at += 9 + size;
    }
    send_all(polled[index].fd, request, request_size);
}

/* Handles one frame; whether it ends the call in flight. */
static int take_frame(int index, int kind, int flags, uint32_t stream, const uint8_t *body, size_t size) {
    struct connection *c = &connections[index];
    uint8_t answer[64];
    if (kind == SETTINGS && !(flags & 1)) {
        put_head(answer, 0, SETTINGS, 1, 0);
        send_all(polled[index].fd, answer, 9);
    } else if (kind == PING && !(flags & 1)) {
        memcpy(put_head(answer, 8, PING, 1, 0), body, 8);
        send_all(polled[index].fd, answer, 17);
    } else if (kind == WINDOW_UPDATE && stream == 0) {
        c->window += get_u32(body) & 0x7fffffff;
        if (c->waits_for_window) call(index);
    } else if (kind == GOAWAY || kind == RST_STREAM) {
        fprintf(stderr, "the server ended a call (frame type %d)\n", kind), exit(1);
    } else if (kind == DATA && !c->is_answered) {
        if (size < 6 || body[5] != 0x0a) fprintf(stderr, "refused (%zu bytes)\n", size), exit(1);
        c->is_answered = 1;
    } else if (kind == HEADERS && (flags & 1)) {
        if (!c->is_answered) fprintf(stderr, "an answer without a message\n"), exit(1);
        c->stream += 2;
        return 1;
    }
    return 0;
}

static unsigned take(int index) {
    struct connection *c = &connections[index];
    ssize_t got = recv(polled[index].fd, c->input + c->held, INPUT - c->held, 0);
    if (got <= 0) fprintf(stderr, "connection %d ended\n", index), exit(1);
    c->held += (size_t)got;
    unsigned ended = 0;
    size_t at = 0;
    while (c->held - at >= 9) {
        const uint8_t *p = c->input + at;
        size_t size = (size_t)p[0] << 16 | (size_t)p[1] << 8 | p[2];
        if (size > INPUT - 9) fprintf(stderr, "frame of %zu bytes\n", size), exit(1);
        if (c->held - at < 9 + size) break;
        ended += (unsigned)take_frame(index, p[3], p[4], get_u32(p + 5) & 0x7fffffff, p + 9, size);
        at += 9 + size;
    }
    memmove(c->input, c->input + at, c->held - at);
    c->held -= at;
    return ended;
}

int main(int argc, char **argv) {
    if (argc != 6) return 2;
    int port = atoi(argv[1]), count = atoi(argv[4]);
    double seconds = atof(argv[5]);
    if (count < 1 || count > CONNECTIONS_MAX) return 2;
    size_t size;
    uint8_t *message = read_file(argv[3], &size);
    build(argv[2], message, size);
    static const char preface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    uint8_t hello[64], *p = (uint8_t *)memcpy(hello, preface, 24) + 24;
    p = put_head(p, 0, SETTINGS, 0, 0);
    p = put_head(p, 4, WINDOW_UPDATE, 0, 0);
    put_u32(p, 0x7fffffff - 65535);
    for (int i = 0; i < count; i++) {
        polled[i] = (struct pollfd){.fd = dial(port), .events = POLLIN};
        connections[i].stream = 1;
        connections[i].window = 65535;
        send_all(polled[i].fd, hello, (size_t)(p + 4 - hello));
        call(i);
    }
    uint64_t calls = 0, calls_before = 0;
    double start = now_s(), end = start + seconds, now = start, counted_from = 0;
    while (now < end) {
        if (poll(polled, (nfds_t)count, 5000) <= 0) fprintf(stderr, "no answer for five seconds\n"), exit(1);
        for (int i = 0; i < count; i++) {
            if (!polled[i].revents) continue;
            unsigned ended = take(i);
            calls += ended;
            if (ended) call(i);
        }
        now = now_s();
        if (counted_from == 0 && now >= start + seconds / 10) counted_from = now, calls_before = calls;
    }
    printf("%lu %f\n", (unsigned long)(calls - calls_before), now - counted_from);
    return 0;
}
