"""Lets a store answer and refuse writes for a while, and checks what its members do then."""

from schedsvc_lab.faults.auditor.records import require
from schedsvc_lab.faults.cluster.process import Process
from schedsvc_lab.faults.cluster.store import REFUSALS
from schedsvc_lab.faults.cluster.world import World

__all__ = ["RefusedWrites"]

_MS = 1_000_000
#: A member that needs nothing writes to the store once a second. From the first write that is
#: refused it goes on within another second. The rest is for messages.
_NOTICED_NS, _GOES_ON_NS, _MESSAGES_NS = 1_000 * _MS, 1_000 * _MS, 300 * _MS
#: Between two tries of a member that misses the store.
_INTERVAL_NS = 250 * _MS
#: For a call that an earlier fault has left without an answer.
_SETTLED_NS = 2_000 * _MS


class RefusedWrites:
    """Lets the store refuse writes, and holds members to docs/operate/cluster.md."""

    def __init__(self, world: World) -> None:
        self._world, self._queue = world, world.queue
        #: Grows with each beginning and each end.
        self._turns = 0

    def begin(self, until_ns: int) -> None:
        """Let the store refuse writes until then."""
        store = self._world.store.store
        store.refusal = self._queue.rnd.choice(REFUSALS)
        self._turns += 1
        turn = self._turns

        def end(_: object) -> None:
            if self._turns == turn:
                self.end()

        self._queue.at(until_ns, end)
        self._expect(_NOTICED_NS + _GOES_ON_NS, is_away=True)

    def end(self) -> None:
        """Let the store take writes, if it refuses them."""
        if self._world.store.store.refusal is None:
            return
        self._world.store.store.refusal = None
        self._turns += 1
        self._expect(_INTERVAL_NS, is_away=False)

    def _expect(self, within_ns: int, *, is_away: bool) -> None:
        """Require that members spend their parts, or chunks again, after a while without faults."""
        turn, life = self._turns, self._world.store.life
        since_ns = self._queue.now_ns - _SETTLED_NS
        if self._world.options.outage != "share" or self._world.options.is_set:
            return
        watched = [each for each in self._world.processes if self._is_well(each, since_ns)]

        def check(_: object) -> None:
            store = self._world.store
            is_hidden = max(store.stopped_until_ns, store.hole_until_ns) > since_ns
            if self._turns != turn or store.life != life or not store.is_up or is_hidden:
                return
            for process in watched:
                # A member that was refused twice waits until the store has answered for a while.
                holds = not is_away and process.member.escrow.outage.wait_ns
                if self._is_well(process, since_ns) and not holds:
                    share = self._world.quotas.share_of(process.number)
                    require(
                        bool(share) == is_away,
                        "a member takes a store for back that refuses writes"
                        if is_away
                        else "a member does not take a store for back that takes writes",
                        f"{process.name} {within_ns / 1e9} s later: limits divided by {share}",
                    )

        self._queue.after(within_ns + _MESSAGES_NS, check)

    def _is_well(self, process: Process, since_ns: int) -> bool:
        """Return whether a process runs and relies on the store, and has reached it since then."""
        hindered_ns = max(process.cut_until_ns, process.slow_until_ns, process.paused_until_ns)
        if not process.is_ready or process.is_dead or hindered_ns > since_ns:
            return False
        return not process.member.escrow.distrusts
