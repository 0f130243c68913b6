"""Does to a cluster what its options allow, and undoes it."""

from collections.abc import Callable
from typing import Any

from schedsvc_lab.faults.cluster.refused_writes import RefusedWrites
from schedsvc_lab.faults.cluster.world import World
from schedsvc_lab.faults.cluster_options import CLUSTER_FAULTS

__all__ = ["ClusterFaults"]

_S, _MS = 1_000_000_000, 1_000_000


class ClusterFaults:
    """Chooses and does the faults of one run."""

    def __init__(self, world: World) -> None:
        self._world, self._queue, self._rnd = world, world.queue, world.queue.rnd
        names = sorted(world.options.faults)
        self._names = names
        self._weights = [CLUSTER_FAULTS[name][0] for name in names]
        self._refused = RefusedWrites(world)
        self.counts = dict.fromkeys(CLUSTER_FAULTS, 0)
        self._acts: dict[str, Callable[[], Any]] = {
            "store-killed": self._kill_store,
            "store-flushed": self._flush,
            "store-stopped": self._stop_store,
            "store-black-hole": self._black_hole,
            "store-fails-over": self._fail_over,
            "store-refuses-writes": self._refuse,
            "store-clock-step": self._step_clock,
            "store-link-cut": self._cut,
            "store-link-slow": self._slow,
            "member-killed": self._kill_member,
            "member-paused": self._pause,
            "member-ended": self._end_member,
            "member-burst": self._burst,
            "other-set-led": world.lead_other_set,
            "peer-links-cut": self._cut_peers,
        }

    def strike(self) -> None:
        """Let one fault happen."""
        if self._names:
            [name] = self._rnd.choices(self._names, self._weights)
            self.counts[name] += 1
            self._acts[name]()

    def _until_ns(self) -> int:
        seconds = self._rnd.choice((0.2, 1, 1.5, 3, 8))
        return self._queue.now_ns + self._queue.around(int(seconds * _S))

    def _place(self) -> int:
        return self._rnd.randrange(len(self._world.processes))

    def _kill_store(self) -> None:
        store = self._world.store
        if not store.is_up:
            return
        store.kill()
        if self._rnd.random() < 0.5:
            self._lose_last()
        self._queue.at(self._until_ns(), lambda _: store.start())

    def _lose_last(self) -> None:
        self._world.store.store.fail_over()
        self._world.store_lost()

    def _flush(self) -> None:
        self._world.store.store.flush()
        self._world.store_lost()

    def _stop_store(self) -> None:
        store = self._world.store
        store.stopped_until_ns = max(store.stopped_until_ns, self._until_ns())

    def _black_hole(self) -> None:
        store = self._world.store
        store.hole_until_ns = max(store.hole_until_ns, self._until_ns())

    def _refuse(self) -> None:
        if self._world.store.store.refusal is None:
            self._refused.begin(self._until_ns())

    def _fail_over(self) -> None:
        store = self._world.store
        if store.is_up:
            store.kill()
            self._lose_last()
            store.start()

    def _step_clock(self) -> None:
        size_ns = int(self._rnd.choice((0.3, 4, 10, 90, 3_600)) * _S * self._rnd.random())
        step_ns = size_ns if self._rnd.random() < 0.5 else -size_ns
        self._world.store.step_ns += step_ns
        self._world.store_stepped(step_ns)

    def _cut(self) -> None:
        process = self._world.processes[self._place()]
        process.cut_until_ns = max(process.cut_until_ns, self._until_ns())

    def _cut_peers(self) -> None:
        process = self._world.processes[self._place()]
        process.peers_cut_until_ns = max(process.peers_cut_until_ns, self._until_ns())
        if self._rnd.random() < 0.5:  # nor the store
            process.cut_until_ns = max(process.cut_until_ns, process.peers_cut_until_ns)

    def _slow(self) -> None:
        process = self._world.processes[self._place()]
        process.slow_until_ns = max(process.slow_until_ns, self._until_ns())

    def _kill_member(self) -> None:
        place = self._place()
        self._world.kill(place)
        self._queue.at(self._until_ns(), lambda _: self._world.restart(place))

    def _end_member(self) -> None:
        leaders = [k for k, each in enumerate(self._world.processes) if each.leads]
        place = self._rnd.choice(leaders) if leaders else self._place()
        self._world.end(place, self._until_ns() - self._queue.now_ns)

    def _pause(self) -> None:
        process = self._world.processes[self._place()]
        process.pause(self._until_ns() - self._queue.now_ns)

    def _burst(self) -> None:
        place = self._place()
        tenant = self._rnd.choice(self._world.options.tenants)
        for _ in range(min(30, tenant.requests or 30)):
            self._world.ask(place, tenant)

    def end(self) -> None:
        """End all faults, and start each process that does not run."""
        world, now_ns = self._world, self._queue.now_ns
        store = world.store
        store.start()
        store.stopped_until_ns = store.hole_until_ns = now_ns
        self._refused.end()
        for place, process in enumerate(world.processes):
            if process.is_dead:
                world.restart(place)
                continue
            process.cut_until_ns = process.slow_until_ns = process.paused_until_ns = now_ns
            process.peers_cut_until_ns = now_ns
            process.run()
