/* FlowMQ from publish to deliver: how long a message takes through a broker, one at a time.
 *
 * deliver PORT TOPIC MESSAGE_BYTES SECONDS
 *
 * Two connections of one thread: one publishes, the other is subscribed. The clock runs from before the PUBLISH is sent
 * until the MESSAGE is there in full. Then the message is acknowledged and both answers are awaited, outside the clock.
 * Every message is checked byte for byte. The first tenth of SECONDS warms up and does not count. Prints
 * "MESSAGES SECONDS MEDIAN_US".
 */
#include "net.h"

enum { PUBLISH = 4, SUBSCRIBE = 5, ACK = 6, MESSAGE = 7, SUCCESS = 16, FRAME_MAX = 1 << 20, SAMPLES_MAX = 4 << 20 };

static uint8_t sent[FRAME_MAX], got[FRAME_MAX];
static float samples[SAMPLES_MAX];

static size_t head(uint8_t *frame, uint8_t command, size_t size) {
    frame[0] = command;
    put_u32(frame + 1, (uint32_t)size);
    return 5 + size;
}

/* The payload of the next frame, which must be of one kind. */
static size_t expect(int connection, uint8_t command) {
    uint8_t start[5];
    recv_all(connection, start, sizeof start);
    size_t size = get_u32(start + 1);
    if (size > FRAME_MAX) fprintf(stderr, "a frame of %zu bytes\n", size), exit(1);
    recv_all(connection, got, size);
    if (start[0] != command)
        fprintf(stderr, "frame %d instead of %d: %.*s\n", start[0], command, (int)size, got), exit(1);
    return size;
}

static int by_value(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    if (argc != 5) return 2;
    const char *topic = argv[2];
    size_t named = strlen(topic), bytes = (size_t)atol(argv[3]);
    double seconds = atof(argv[4]);
    if (bytes < 1 || named + bytes + 64 > FRAME_MAX) return 2;
    int publisher = dial(atoi(argv[1])), subscriber = dial(atoi(argv[1]));

    memcpy(sent + 5, topic, named);
    send_all(subscriber, sent, head(sent, SUBSCRIBE, named));
    expect(subscriber, SUCCESS);

    size_t frame = head(sent, PUBLISH, named + 1 + bytes), sampled = 0;
    uint8_t *message = sent + 5 + named + 1, answer[256];
    sent[5 + named] = 0;
    for (size_t i = 0; i < bytes; i++) message[i] = (uint8_t)(i * 131);
    unsigned long count = 0;
    double start = now_s(), warm = start + seconds / 10, end = start + seconds, now = start;
    while (now < end) {
        message[0] = (uint8_t)count++;
        double before = now_s();
        send_all(publisher, sent, frame);
        size_t size = expect(subscriber, MESSAGE);
        now = now_s();
        if (now >= warm && sampled < SAMPLES_MAX) samples[sampled++] = (float)((now - before) * 1e6);
        const uint8_t *nul = memchr(got, 0, size);
        if (!nul || size - (size_t)(nul + 1 - got) != bytes || memcmp(nul + 1, message, bytes))
            fprintf(stderr, "not the message that was published\n"), exit(1);
        size_t id = (size_t)(nul - got);
        if (id > sizeof answer - 5) return 1;
        memcpy(answer + 5, got, id);
        send_all(subscriber, answer, head(answer, ACK, id));
        expect(subscriber, SUCCESS);
        expect(publisher, SUCCESS);
    }
    qsort(samples, sampled, sizeof *samples, by_value);
    printf("%lu %f %f\n", (unsigned long)sampled, now - warm, sampled ? (double)samples[sampled / 2] : 0.0);
    return 0;
}
