"""Tests several streams of several principals at one core: messages of one end no other's.

An input is a row of steps. Each has a byte that says which stream acts and how, and a message also
has its size in two bytes and its bytes. A stream that the core ended is opened again.
"""

from collections.abc import Iterator

from schedsvc import _core
from tests.fuzz.wire import session_corpus

_S = 1_000_000_000
_STREAMS = 4
_SEND, _CLOSE, _WAIT = range(3)
_WAITS_NS = (1, _S // 10, 2 * _S, 40 * _S)


def corpus() -> list[bytes]:
    """Return streams that say everything, in turns; and some that end in the middle."""
    streams = [list(_frames(data)) for data in session_corpus()]
    turns = [
        bytes([stream]) + frame
        for at in range(9)
        for stream, frames in enumerate([*streams, streams[0]])
        for frame in frames[at : at + 1]
    ]
    ends = bytes([1 | _CLOSE << 2, 0 | _WAIT << 2, 3 | _WAIT << 2])
    return [b"".join(turns), b"".join([*turns[:8], ends, *turns]), b"".join(turns[::2]) + ends]


def _frames(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        end = at + 2 + int.from_bytes(data[at : at + 2], "little")
        yield data[at:end]
        at = end


def _core_of() -> _core.Scheduler:
    core = _core.Scheduler(
        hash_key=b"k" * 16, leases_max=32, queue_max=32, answers_max=16, flows_max=8, pools_max=4
    )
    core.set_flow(b"f", 1_000)
    core.set_unknown(core.set_flow(b"unknown", 100), own=True)
    core.set_pool(0, b"q", 1, 600, 16, 4)
    core.set_principal(0, 2, b"half", share_ppm=500_000)
    core.set_principal(0, 3, b"few", pools=[b"p*"], tenants=[b"f"], share_ppm=100_000)
    return core


class _Crowd:
    """Holds a core, and each place's open stream; places 0 and 1 are of one principal."""

    def __init__(self) -> None:
        self.core = _core_of()
        self.now_ns = 0
        self.streams = [self._open(place) for place in range(_STREAMS)]

    def _open(self, place: int) -> _core.Session:
        return self.core.open_session(max(1, place))

    def _renew(self, place: int) -> None:
        self.streams[place].close(self.now_ns)
        self.streams[place] = self._open(place)

    def send(self, place: int, data: bytes) -> None:
        before = self._running(place)
        try:
            self.streams[place].receive(self.now_ns, data)
        except _core.CallerError:
            self._renew(place)
        # Before anything is dispatched: no message ends a lease of another caller.
        assert before <= self._running(place), "a message ended a lease of another principal"

    def _running(self, place: int) -> set[int]:
        _, rows = self.core.list_leases(self.now_ns, 0, 1 << 12, 1 << 12)
        own = max(1, place)
        return {row["lease_id"] for row in rows if row["principal"] != own}

    def close(self, place: int) -> None:
        self._renew(place)

    def settle(self) -> None:
        """Poll, and read the messages of each stream; a superseded stream ends."""
        self.core.poll(self.now_ns)
        for place in range(_STREAMS):
            try:
                while self.streams[place].take(self.now_ns) is not None:
                    pass
            except _core.CallerError:
                self._renew(place)
        self.core.check()


def crowd(data: bytes) -> None:
    """Let streams act as the bytes determine: the books balance, and nothing is left."""
    world, at = _Crowd(), 0
    while at < len(data):
        place, kind = data[at] % _STREAMS, data[at] >> 2 & 3
        at += 1
        if kind == _CLOSE:
            world.close(place)
        elif kind == _WAIT:
            world.now_ns += _WAITS_NS[place]
        else:
            size = int.from_bytes(data[at : at + 2], "little")
            world.send(place, data[at + 2 : at + 2 + size])
            at += 2 + size
        world.now_ns += 1_000
        world.settle()
    for place in range(_STREAMS):
        world.close(place)
    while (deadline_ns := world.core.next_deadline()) >= 0:
        world.now_ns = max(world.now_ns, deadline_ns)
        world.core.poll(world.now_ns)
    world.core.check()
    totals = world.core.stats(world.now_ns)["totals"]
    assert (totals["queued"], totals["live_leases"], totals["promised_tokens"]) == (0, 0, 0)
