"""Says whether an input led the core to a new place, if the core was built to report it."""

import ctypes

from schedsvc import _core

_SIZE = 1 << 16


class Guide:
    """Counts the core's coverage in steps of how often: 1, 2, 3, 4, 8, 16, 32 or 128 times.

    Without a core that counts (see coverage.c), no input is ever new.
    """

    def __init__(self) -> None:
        self._seen = bytearray(_SIZE)
        self._map: ctypes.Array[ctypes.c_char] | None = None
        try:
            told = ctypes.CDLL(_core.__file__).schedsvc_coverage
        except AttributeError:
            return
        told.restype = ctypes.c_void_p
        self._address = told
        self._map = (ctypes.c_char * _SIZE).from_address(told())

    @property
    def counts(self) -> bool:
        """Return whether the core reports the places where it was."""
        return self._map is not None

    def begin(self) -> None:
        """Forget the core's coverage."""
        if self._map is not None:
            ctypes.memset(self._address(), 0, _SIZE)

    def is_new(self) -> bool:
        """Return whether the core was somewhere new since `begin()`. O(map)."""
        if self._map is None:
            return False
        now = self._map.raw.translate(_STEPS)
        merged = int.from_bytes(self._seen, "little") | int.from_bytes(now, "little")
        whole = merged.to_bytes(_SIZE, "little")
        found = whole != self._seen
        self._seen[:] = whole
        return found

    def places(self) -> int:
        """How many places were seen."""
        return _SIZE - self._seen.count(0)


def _step(count: int) -> int:
    for bit, most in enumerate((1, 2, 3, 7, 15, 31, 127)):
        if count <= most:
            return 1 << bit
    return 128


_STEPS = bytes([0, *(_step(count) for count in range(1, 256))])
