"""Tracks the notices that the scheduler still owes its streams: wrong events, lease states."""

from schedsvc_lab.faults.auditor.records import require


class Dues:
    """Counts the notices that are due, and removes those that were sent."""

    def __init__(self) -> None:
        self._faults: dict[int, int] = {}  # stream -> wrong events
        self._owed: dict[tuple[int, int, int], int] = {}  # stream, lease, state

    def restart(self) -> None:
        """Begin another process, which owes nothing."""
        self._faults.clear()
        self._owed.clear()

    def blame(self, *conns: int) -> None:
        """Count an event of each of these streams that was wrong."""
        for conn in conns:
            self._faults[conn] = self._faults.get(conn, 0) + 1

    def fault(self, conn: int) -> bool:
        """Check off a reported fault. Returns whether it was due."""
        left = self._faults.pop(conn, 0)
        if left > 1:
            self._faults[conn] = left - 1
        return left > 0

    def owe(self, conn: int, lease_id: int, state: int) -> None:
        """Add a lease whose state a stream has to learn."""
        place = (conn, lease_id, state)
        self._owed[place] = self._owed.get(place, 0) + 1

    def notice(self, place: tuple[int, int, int]) -> bool:
        """Check off a notice (stream, lease, state). Returns whether it was due."""
        left = self._owed.pop(place, 0)
        if left > 1:
            self._owed[place] = left - 1
        return left > 0

    def forget(self, conn: int) -> None:
        """Take note that a stream has ended."""
        self._faults.pop(conn, None)
        self._owed = {place: n for place, n in self._owed.items() if place[0] != conn}

    def settled(self, waiting: set[int]) -> None:
        """Require that all notices were sent, except on streams that wait for their Welcome."""
        faults = {conn: n for conn, n in self._faults.items() if conn not in waiting}
        owed = {place: n for place, n in self._owed.items() if place[0] not in waiting}
        require(not faults, "a wrong event was not reported", faults)
        require(not owed, "a lease's state was not reported", owed)
