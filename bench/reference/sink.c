/* The limit of a produce: everything from one socket into one file, no protocol.
 *
 * sink FILE: says "ready PORT", takes one connection, and when the sender has finished answers one byte and then waits
 * to be stopped, so that its CPU clock can still be read.
 */
#include "net.h"
#include <fcntl.h>

int main(int argc, char **argv) {
    static uint8_t buffer[256 * 1024];
    if (argc != 2) return 2;
    int file = open(argv[1], O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (file < 0) die(argv[1]);
    int connection = accept_one();
    for (ssize_t got; (got = recv(connection, buffer, sizeof buffer, 0)) != 0;) {
        if (got < 0) die("recv");
        for (ssize_t done = 0, put; done < got; done += put)
            if ((put = write(file, buffer + done, (size_t)(got - done))) < 0) die("write");
    }
    send_all(connection, (const uint8_t *)"k", 1);
    pause();
    return 0;
}
