/* The load generator: the same few frames, many times, over several connections with several in flight.
 *
 * load PORT FRAME CONNECTIONS IN_FLIGHT SECONDS ERROR_AT [ID_AT]
 *
 * FRAME is a file with length-prefixed requests of one size, sent in turn on each connection; the correlation id stands at
 * byte ID_AT, 8 as in Kafka unless said. Answers are length-prefixed too. With ERROR_AT >= 0 they are like Kafka's: the correlation id leads and must be the oldest one in flight,
 * and the two bytes at ERROR_AT (from the end of the prefix) must be 0. With -1 (the echo server) only frames are counted.
 * The first tenth of SECONDS warms up and does not count. Prints "REQUESTS SECONDS MEDIAN_ROUND_TRIP_US"; the round trip
 * is taken only where one request is in flight in all, elsewhere it would measure the queue.
 */
#include "net.h"
#include <poll.h>

enum { CONNECTIONS_MAX = 128, IN_FLIGHT_MAX = 64, ANSWER_BUFFER = 256 * 1024, SAMPLES_MAX = 4 << 20 };

struct connection {
    uint8_t answers[ANSWER_BUFFER];
    size_t held; /* bytes in `answers` */
    uint32_t sent, answered;
};

static struct connection connections[CONNECTIONS_MAX];
static struct pollfd polled[CONNECTIONS_MAX];
static float samples[SAMPLES_MAX];
static uint8_t *frame, *burst;
static size_t frame_size, frame_count, id_at = 8;

static void send_frames(int index, unsigned count) {
    for (unsigned i = 0; i < count; i++) {
        uint8_t *next = burst + i * frame_size;
        if (frame_count > 1) memcpy(next, frame + connections[index].sent % frame_count * frame_size, frame_size);
        put_u32(next + id_at, connections[index].sent++);
    }
    send_all(polled[index].fd, burst, count * frame_size);
}

/* Reads what is there and gives the number of whole answers in it. */
static unsigned take_answers(int index, long error_at) {
    struct connection *c = &connections[index];
    ssize_t got = recv(polled[index].fd, c->answers + c->held, ANSWER_BUFFER - c->held, 0);
    if (got <= 0) fprintf(stderr, "connection %d ended\n", index), exit(1);
    c->held += (size_t)got;
    unsigned count = 0;
    size_t at = 0;
    while (c->held - at >= 4) {
        size_t length = get_u32(c->answers + at);
        if (length > ANSWER_BUFFER - 4) fprintf(stderr, "answer of %zu bytes\n", length), exit(1);
        if (c->held - at < 4 + length) break;
        const uint8_t *answer = c->answers + at + 4;
        if (error_at >= 0) {
            if ((size_t)error_at + 2 > length || get_u32(answer) != c->answered || answer[error_at] || answer[error_at + 1])
                fprintf(stderr, "refused, or answered out of order (%zu bytes)\n", length), exit(1);
        }
        c->answered++;
        count++;
        at += 4 + length;
    }
    memmove(c->answers, c->answers + at, c->held - at);
    c->held -= at;
    return count;
}

static int by_value(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    if (argc != 7 && argc != 8) return 2;
    if (argc == 8) id_at = (size_t)atol(argv[7]);
    int port = atoi(argv[1]), count = atoi(argv[3]), in_flight = atoi(argv[4]);
    double seconds = atof(argv[5]);
    long error_at = atol(argv[6]);
    if (count < 1 || count > CONNECTIONS_MAX || in_flight < 1 || in_flight > IN_FLIGHT_MAX) return 2;
    size_t file_size;
    frame = read_file(argv[2], &file_size);
    frame_size = 4 + get_u32(frame);
    frame_count = file_size / frame_size;
    if (!frame_count || file_size % frame_size) fprintf(stderr, "frames of different sizes\n"), exit(2);
    burst = malloc(frame_size * (size_t)in_flight);
    for (int i = 0; i < in_flight; i++) memcpy(burst + (size_t)i * frame_size, frame, frame_size);
    for (int i = 0; i < count; i++) polled[i] = (struct pollfd){.fd = dial(port), .events = POLLIN};

    int timed = count == 1 && in_flight == 1;
    size_t sampled = 0;
    uint64_t answers = 0, answers_before = 0;
    double start = now_s(), warm = start + seconds / 10, end = start + seconds, counted_from = 0, sent_at = start, now = start;
    for (int i = 0; i < count; i++) send_frames(i, (unsigned)in_flight);
    while (now < end) {
        if (poll(polled, (nfds_t)count, 1000) <= 0) fprintf(stderr, "no answer for a second\n"), exit(1);
        for (int i = 0; i < count; i++) {
            if (!polled[i].revents) continue;
            unsigned answered = take_answers(i, error_at);
            answers += answered;
            if (timed && answered) {
                now = now_s();
                if (counted_from > 0 && sampled < SAMPLES_MAX) samples[sampled++] = (float)((now - sent_at) * 1e6);
                sent_at = now;
            }
            if (answered) send_frames(i, answered);
        }
        if (!timed) now = now_s();
        if (counted_from == 0 && now >= warm) counted_from = now, answers_before = answers;
    }
    qsort(samples, sampled, sizeof *samples, by_value);
    printf("%lu %f %f\n", (unsigned long)(answers - answers_before), now - counted_from,
           sampled ? (double)samples[sampled / 2] : 0.0);
    return 0;
}
