/* The limit of a fetch: one file into one socket through sendfile, no protocol.
 *
 * sendfile FILE: says "ready PORT", takes one connection, waits for one byte (the caller reads the CPU clock first), sends
 * the whole file and waits to be stopped, so that its CPU clock can still be read.
 */
#include "net.h"
#include <fcntl.h>
#include <sys/sendfile.h>
#include <sys/stat.h>

int main(int argc, char **argv) {
    struct stat status;
    uint8_t go;
    if (argc != 2) return 2;
    int file = open(argv[1], O_RDONLY);
    if (file < 0 || fstat(file, &status)) die(argv[1]);
    int connection = accept_one();
    recv_all(connection, &go, 1);
    for (off_t at = 0; at < status.st_size;)
        if (sendfile(connection, file, &at, (size_t)(status.st_size - at)) < 0) die("sendfile");
    pause();
    return 0;
}
