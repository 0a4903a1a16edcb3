/* What the reference programs share: loopback sockets and a way to give up. */
#ifndef BENCH_NET_H
#define BENCH_NET_H

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static inline void die(const char *what) {
    perror(what);
    exit(1);
}

static inline double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* Binds a free loopback port, says "ready PORT" on standard output and gives the first connection. */
static inline int accept_one(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    if (listener < 0 || bind(listener, (struct sockaddr *)&address, length) || listen(listener, 1)) die("listen");
    getsockname(listener, (struct sockaddr *)&address, &length);
    printf("ready %d\n", ntohs(address.sin_port));
    fflush(stdout);
    int connection = accept(listener, NULL, NULL);
    if (connection < 0) die("accept");
    close(listener);
    return connection;
}

static inline int dial(int port) {
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons((uint16_t)port)};
    int one = 1, connection = socket(AF_INET, SOCK_STREAM, 0);
    if (connection < 0 || connect(connection, (struct sockaddr *)&address, sizeof address)) die("connect");
    setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return connection;
}

static inline void send_all(int connection, const uint8_t *bytes, size_t count) {
    while (count) {
        ssize_t sent = send(connection, bytes, count, MSG_NOSIGNAL);
        if (sent < 0) die("send");
        bytes += sent;
        count -= (size_t)sent;
    }
}

static inline void recv_all(int connection, uint8_t *bytes, size_t count) {
    while (count) {
        ssize_t got = recv(connection, bytes, count, 0);
        if (got < 0) die("recv");
        if (!got) fprintf(stderr, "the server closed the connection\n"), exit(1);
        bytes += got;
        count -= (size_t)got;
    }
}

static inline uint8_t *read_file(const char *path, size_t *size) {
    FILE *file = fopen(path, "rb");
    if (!file) die(path);
    fseek(file, 0, SEEK_END);
    *size = (size_t)ftell(file);
    rewind(file);
    uint8_t *bytes = malloc(*size);
    if (!bytes || fread(bytes, 1, *size, file) != *size) die(path);
    fclose(file);
    return bytes;
}

static inline uint32_t get_u32(const uint8_t *p) {
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

static inline uint64_t get_u64(const uint8_t *p) { return (uint64_t)get_u32(p) << 32 | get_u32(p + 4); }

static inline void put_u32(uint8_t *p, uint32_t v) {
    p[0] = (uint8_t)(v >> 24), p[1] = (uint8_t)(v >> 16), p[2] = (uint8_t)(v >> 8), p[3] = (uint8_t)v;
}

static inline void put_u64(uint8_t *p, uint64_t v) { put_u32(p, (uint32_t)(v >> 32)), put_u32(p + 4, (uint32_t)v); }

#endif
