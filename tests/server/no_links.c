/* Preloaded into a process, it makes all file systems ones without hard links. */
#include <errno.h>
#include <unistd.h>

int link(const char *from, const char *to) {
    errno = EPERM;
    return -1;
}

int linkat(int from_folder, const char *from, int to_folder, const char *to, int flags) {
    errno = EPERM;
    return -1;
}
