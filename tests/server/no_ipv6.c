/* Preloaded into a process, it makes its host one without IPv6: no socket of that family exists. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sys/socket.h>

int socket(int domain, int type, int protocol) {
    static int (*next)(int, int, int);
    if (domain == AF_INET6) {
        errno = EAFNOSUPPORT;
        return -1;
    }
    if (next == 0) {
        next = (int (*)(int, int, int))dlsym(RTLD_NEXT, "socket");
    }
    return next(domain, type, protocol);
}
