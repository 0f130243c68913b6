/* Preloaded into vLLM's CPU build, whose workers spin on sched_yield() between steps. On a machine
 * with few cores that starves every other process for seconds at a time, so that no latency means
 * anything. Here it sleeps for a moment instead. */
#include <time.h>

enum { NAP_NS = 30 * 1000 };

int sched_yield(void) {
    const struct timespec nap = {.tv_sec = 0, .tv_nsec = NAP_NS};
    nanosleep(&nap, 0);
    return 0;
}
