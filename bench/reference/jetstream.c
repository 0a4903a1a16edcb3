/* A bare NATS JetStream publisher, so that the peer is measured and not its Python client.
 *
 * jetstream PORT SUBJECT MESSAGES BYTES WINDOW
 *
 * Publishes MESSAGES payloads of BYTES, each with a reply subject, keeping at most WINDOW unacknowledged, as every
 * JetStream client's asynchronous publish does. Every acknowledgement is parsed; one that carries an error ends the run.
 * Prints "MESSAGES SECONDS".
 */
#include "net.h"
#include <poll.h>

enum { BURST = 256, BUFFER = 1 << 20 };

static uint8_t buffer[BUFFER + 1];
static size_t held;

/* Counts whole acknowledgements: "MSG <inbox> 1 <length>\r\n<json>\r\n". */
static unsigned long take_acks(int connection) {
    ssize_t got = recv(connection, buffer + held, BUFFER - held, 0);
    if (got <= 0) fprintf(stderr, "nats ended the connection\n"), exit(1);
    held += (size_t)got;
    unsigned long acks = 0;
    uint8_t *at = buffer, *end = buffer + held, *line;
    while ((line = memchr(at, '\n', (size_t)(end - at)))) {
        size_t skip = 0;
        if (!memcmp(at, "MSG ", 4)) {
            uint8_t *digits = line - 1;
            while (digits[-1] != ' ') digits--;
            skip = strtoul((char *)digits, NULL, 10) + 2;
            if ((size_t)(end - line - 1) < skip) break;
            if (memmem(line + 1, skip, "\"error\"", 7)) fprintf(stderr, "%.*s\n", (int)skip, line + 1), exit(1);
            acks++;
        } else if (!memcmp(at, "PING", 4)) {
            send_all(connection, (const uint8_t *)"PONG\r\n", 6);
        } else if (at[0] == '-') {
            fprintf(stderr, "%.*s\n", (int)(line - at), at), exit(1);
        }
        at = line + 1 + skip;
    }
    held = (size_t)(end - at);
    memmove(buffer, at, held);
    return acks;
}

int main(int argc, char **argv) {
    if (argc != 6) return 2;
    unsigned long messages = strtoul(argv[3], NULL, 10), bytes = strtoul(argv[4], NULL, 10);
    unsigned long window = strtoul(argv[5], NULL, 10), sent = 0, acked = 0;
    int connection = dial(atoi(argv[1]));
    const char *hello = "CONNECT {\"verbose\":false,\"pedantic\":false}\r\nSUB _bench.ack 1\r\n";
    send_all(connection, (const uint8_t *)hello, strlen(hello));

    char head[256];
    size_t head_size = (size_t)snprintf(head, sizeof head, "PUB %s _bench.ack %lu\r\n", argv[2], bytes);
    size_t size = head_size + bytes + 2;
    uint8_t *burst = malloc(size * BURST);
    srand(1);
    for (int i = 0; i < BURST; i++) {
        uint8_t *p = burst + (size_t)i * size;
        memcpy(p, head, head_size);
        for (unsigned long j = 0; j < bytes; j++) p[head_size + j] = (uint8_t)rand();
        memcpy(p + size - 2, "\r\n", 2);
    }
    double start = now_s();
    while (acked < messages) {
        unsigned long room = window - (sent - acked), left = messages - sent;
        unsigned long count = room < left ? room : left;
        if (count > BURST) count = BURST;
        if (count && (count == BURST || count == left || sent - acked < window / 2)) {
            send_all(connection, burst, count * size);
            sent += count;
        }
        int must_wait = sent == messages || window - (sent - acked) < BURST;
        struct pollfd readable = {.fd = connection, .events = POLLIN};
        int ready = poll(&readable, 1, must_wait ? 5000 : 0);
        if (ready < 0 || (must_wait && !ready)) fprintf(stderr, "no acknowledgement for 5 s\n"), exit(1);
        if (ready) acked += take_acks(connection);
    }
    printf("%lu %f\n", messages, now_s() - start);
    return 0;
}
