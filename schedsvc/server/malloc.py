"""Makes the C library return freed memory to the system."""

import ctypes

__all__ = ["return_freed_memory"]

#: Parameters of glibc's mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_THRESHOLD_BYTES = 128 << 10


def return_freed_memory() -> None:
    """Use one arena, and give large blocks back at once. Call it before threads begin.

    Without this, glibc keeps an arena for each of gRPC's threads, and after one large block is
    freed it keeps blocks of that size. So a process stays as large as an attack once made it. Other
    C libraries are left as they are.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return  # musl has none
    mallopt(_ARENA_MAX, 1)
    # Either value also ends the automatic growth of both thresholds.
    mallopt(_MMAP_THRESHOLD, _THRESHOLD_BYTES)
    mallopt(_TRIM_THRESHOLD, _THRESHOLD_BYTES)
