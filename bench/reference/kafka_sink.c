/* The limit of a produce with the client that the broker has: what librdkafka sends, from its socket into one file.
 *
 * kafka_sink FILE ANSWERS: says "ready PORT" and serves any number of connections, a thread each. A request is read, the
 * rest of a Produce (key 0) is written to FILE, the rest of any other is dropped, and the answer is the file
 * ANSWERS/KEY.VERSION with the request's correlation id in it. Nothing is decoded, checked or indexed.
 */
#include "net.h"
#include <fcntl.h>
#include <pthread.h>

static int file;
static const char *answers;

static void answer(int connection, int key, int version, uint32_t correlation_id) {
    char path[512];
    size_t size;
    snprintf(path, sizeof path, "%s/%d.%d", answers, key, version);
    uint8_t *bytes = read_file(path, &size);
    put_u32(bytes + 4, correlation_id);
    send_all(connection, bytes, size);
    free(bytes);
}

static void *serve(void *argument) {
    int connection = (int)(intptr_t)argument;
    uint8_t *buffer = malloc(256 * 1024), head[12];
    for (;;) {
        size_t have = 0;
        while (have < sizeof head) {
            ssize_t got = recv(connection, head + have, sizeof head - have, 0);
            if (got <= 0) return close(connection), NULL;
            have += (size_t)got;
        }
        int key = head[4] << 8 | head[5], version = head[6] << 8 | head[7];
        for (size_t rest = get_u32(head) - 8; rest;) {
            ssize_t got = recv(connection, buffer, rest < 256 * 1024 ? rest : 256 * 1024, 0);
            if (got <= 0) return close(connection), NULL;
            for (ssize_t done = 0, put; key == 0 && done < got; done += put)
                if ((put = write(file, buffer + done, (size_t)(got - done))) < 0) die("write");
            rest -= (size_t)got;
        }
        answer(connection, key, version, get_u32(head + 8));
    }
}

int main(int argc, char **argv) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0);
    if (argc != 3) return 2;
    answers = argv[2];
    file = open(argv[1], O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (file < 0) die(argv[1]);
    if (listener < 0 || bind(listener, (struct sockaddr *)&address, length) || listen(listener, 16)) die("listen");
    getsockname(listener, (struct sockaddr *)&address, &length);
    printf("ready %d\n", ntohs(address.sin_port));
    fflush(stdout);
    for (;;) {
        pthread_t thread;
        int connection = accept(listener, NULL, NULL);
        if (connection < 0) die("accept");
        setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        if (pthread_create(&thread, NULL, serve, (void *)(intptr_t)connection)) die("pthread_create");
        pthread_detach(thread);
    }
}
