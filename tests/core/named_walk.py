"""Runs random histories in which pools begin and cease to take requests that name none.

Every pool is offered by a stream, and the grants of a principal that may ask decide which of them
take only requests that name them. As in rest_walk.py a second scheduler gets the same events, and
looks at all pools in each.
"""

from typing import Any

from schedsvc_client.v1 import pool_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc import _core as core

from .rest_walk import RestWalk
from .stream import HELLO

__all__ = ["STRANGER", "NamedWalk", "bar", "offer"]

STRANGER = 7  # a principal that may ask


class _Offering:
    """Offers pools on a stream."""

    def __init__(self, scheduler: core.Scheduler, now_ns: int) -> None:
        self.session = scheduler.open_session(0)
        self.seq = 0
        self.send(now_ns, HELLO)

    def send(self, now_ns: int, *events: pb.SessionEvent) -> None:
        self.seq += 1
        message = pb.SessionRequest(seq=self.seq, events=events)
        self.session.receive(now_ns, message.SerializeToString())
        while (answer := self.session.take(now_ns)) is not None:
            assert not pb.SessionResponse.FromString(answer).faults


def offer(
    scheduler: core.Scheduler, streams: dict[Any, _Offering], now_ns: int, name: str, **figures: int
) -> None:
    """Offer a pool on a separate stream, or new figures of it on that stream."""
    key = scheduler, name
    if key not in streams:
        streams[key] = _Offering(scheduler, now_ns)
    told = {"epoch": 1, "capacity_tokens": 100, "block_size_tokens": 1} | figures
    event = pb.SessionEvent(pool=pool_pb2.PoolRegistration(pool=name, **told))
    streams[key].send(now_ns, event)


def bar(scheduler: core.Scheduler, now_ns: int, *open_pools: int) -> None:
    """Let only pools with these numbers take requests that name none."""
    names = [b"p%d" % number for number in open_pools]
    scheduler.set_principal(now_ns, STRANGER, b"stranger", pools=names)


class NamedWalk(RestWalk):
    """Gives two schedulers the same events, in some of which pools close or open."""

    def __init__(self, seed: int, pools: int = 0) -> None:
        self.streams: dict[Any, _Offering] = {}
        super().__init__(seed, pools)
        self.names_set = 0.0  # the walk holds what runs for requests of one pool or of none
        self.open = set(range(self.pools))
        self.unnamed: set[int] = set()
        self.flips = self.granted_unnamed = 0

    def _core(self) -> core.Scheduler:
        scheduler = super()._core()
        if self.sessions:
            scheduler.set_pool_limits(0, sessions_max_tokens=120)
        return scheduler

    def _offer(
        self, scheduler: core.Scheduler, pool: int, epoch: int, capacity: int, block: int,
        running: int,
    ) -> None:  # fmt: skip
        figures = {"capacity_tokens": capacity, "block_size_tokens": block, "max_running": running}
        now_ns = getattr(self, "now_ns", 0)
        offer(scheduler, self.streams, now_ns, f"p{pool}", epoch=epoch, **figures)

    def _poll(self) -> None:
        if self.random.random() < 0.1:
            self._flip()
        before = set(self.waiting)
        super()._poll()
        for d in self.leases:
            if d.handle in before & self.unnamed and d.handle not in self.waiting:
                self.unnamed.discard(d.handle)
                self.granted_unnamed += 1
                assert d.pool in self.open, "a request ran in a pool that it does not name"

    def _flip(self) -> None:
        """Close or open one pool, some, or all."""
        rnd, everything = self.random, set(range(self.pools))
        kind = rnd.random()
        if kind < 0.6:
            self.open ^= {rnd.randrange(self.pools)}
        elif kind < 0.8:
            self.open = {number for number in everything if rnd.random() < 0.5}
        else:
            self.open = rnd.choice((set(), everything))
        self.flips += 1
        self.woken.set_options(self.now_ns)
        for each in self.both:
            bar(each, self.now_ns, *sorted(self.open))
            each.check()

    def _admit(self) -> None:
        asked = len(self.waiting)
        super()._admit()
        for handle in self.waiting[asked:]:
            number = self.named.pop(0)
            if number == -1:
                self.unnamed.add(handle)

    def _ask_both(self, method: str, *args: Any, **more: Any) -> Any:
        found = super()._ask_both(method, *args, **more)
        if method == "admit" and found > 0:
            self.named = [*getattr(self, "named", []), more["pool"]]
        return found
