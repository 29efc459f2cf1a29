/* The wall clock of one process, ahead by as many seconds as the file $BKO_CLOCK says. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t id, struct timespec *now)
{
    long result = syscall(SYS_clock_gettime, id, now);
    int before = errno;
    const char *path = getenv("BKO_CLOCK");
    if (result == 0 && id == CLOCK_REALTIME && path != NULL) {
        char text[32] = "";
        int file = open(path, O_RDONLY | O_CLOEXEC);
        if (file >= 0) {
            ssize_t length = read(file, text, sizeof text - 1);
            close(file);
            if (length > 0)
                now->tv_sec += strtol(text, NULL, 10);
        }
    }
    errno = before;
    return (int)result;
}
