"""Runs histories of full pools as they are, and with all pools looked at in each event.

    python -m tests.core.rest_walk --count 2000 --seed 7

Pools that wait rest between events. `set_options()` without any option makes the core look at all
of them, and changes nothing else. So a scheduler that gets it before each event shows what a
resting pool may not change: decisions, deadlines, reasons of waits, and the levels of load.
"""

import random
from typing import Any

import click

from schedsvc import _core as core

from .support import SECOND

__all__ = ["RestWalk", "main"]

MS = SECOND // 1_000
_SIZES = ((10, 10), (40, 20), (100, 100), (300, 200), (700, 50))
_CLASSES = ((b"low", 5, SECOND, False), (b"high", -5, SECOND, False), (b"probe", 0, 1, True))


class RestWalk:
    """Gives two schedulers the same events, all drawn from one seed."""

    def __init__(self, seed: int, pools: int = 0) -> None:
        self.random = rnd = random.Random(seed)
        self.pools = pools or rnd.choice((2, 3, 5, 12, 70))
        self.flows = rnd.choice((2, 5, 30))
        self.names_pool = rnd.choice((0.0, 0.2, 0.9))
        self.sizes = [rnd.choice(_SIZES) for _ in range(rnd.choice((1, 2, 4)))]
        self.hashed = rnd.random() < 0.3
        self.adapters = rnd.choice((0, 0, 3))
        self.classes = _CLASSES[: rnd.choice((0, 0, 2, 3))]
        self.sessions = rnd.choice((0, 0, 4))
        self.deadlines = rnd.random() < 0.2
        # A stream of its own, so that walks without sets stay as they are.
        self.set_draws = random.Random(seed ^ 0x5E7)
        self.names_set = self.set_draws.choice((0.0, 0.2, 0.7))
        self.draws = rnd.randrange(1 << 60)  # draws of the configuration, the same for both
        self.calm, self.woken = self._core(), self._core()
        self.both = self.calm, self.woken
        self.now_ns = self.asked = self.granted = 0
        self.waiting: list[int] = []
        self.leases: list[core.Decision] = []
        self.epochs = [1] * self.pools

    def _core(self) -> core.Scheduler:
        rnd = random.Random(self.draws)
        given: dict[str, Any] = {
            "policy": rnd.choice(("vtc", "vtc", "vtc-predict", "dlpm", "fcfs", "sif")),
            "ledger": rnd.choice(("peak", "sum")),
            "dispatch": rnd.choice(("backfill", "backfill", "strict")),
            "queue_ttl_ns": rnd.choice((300 * MS, 5 * SECOND)),
            "queue_target_ns": rnd.choice((50 * MS, SECOND)),
            "overload_hold_ns": rnd.choice((100 * MS, 2 * SECOND)),
            "leases_max": rnd.choice((20, 1_000, 1_000)),
            "backfill_surplus_ppm": rnd.choice((0, 300_000)),
            "prefix_affinity_ppm": rnd.choice((0, 200_000)),
            "adapter_affinity_ppm": rnd.choice((0, 200_000)),
            "early_refusal": int(self.deadlines),
            "delay_factor_milli": rnd.choice((0, 0, 500)),
            "headroom_ppm": rnd.choice((0, 50_000)),
            "quantum_tokens": 200,
            "samples_min": 4,
            "lease_ttl_ns": 2 * SECOND,
            "lease_grace_ns": SECOND // 2,
            "pools_max": 128,
        }
        scheduler = core.Scheduler(**given)
        for name, *figures in self.classes:
            scheduler.set_class(name, *figures)
        groups = [
            scheduler.set_quota(
                0, b"group:%d" % k,
                requests=rnd.choice((0, 0, 600)), weight_milli=rnd.choice((0, 1_000)),
            )
            for k in range(rnd.choice((0, 2)) if self.pools < 65 else 0)
        ]  # fmt: skip
        for k in range(self.flows):
            flow = scheduler.set_flow(b"flow%d" % k, rnd.choice((500, 1_000, 3_000)))
            scheduler.set_flow_class(flow, 0, tuple(range(len(self.classes) + 1)))
            if groups and rnd.random() < 0.7:
                scheduler.set_flow_quota(0, flow, rnd.choice(groups))
        for k in range(self.pools):
            capacity, running = rnd.choice((200, 400, 1_600)), rnd.choice((0, 0, 3))
            self._offer(scheduler, k, 1, capacity, rnd.choice((1, 16)), running)
            self._figures(k, capacity, running)
        if rnd.random() < 0.2:
            scheduler.set_pool_limits(0, batch_max_tokens=150)
        return scheduler

    def _offer(
        self, scheduler: core.Scheduler, pool: int, epoch: int, capacity: int, block: int,
        running: int,
    ) -> None:  # fmt: skip
        now_ns = getattr(self, "now_ns", 0)
        scheduler.set_pool(now_ns, b"p%d" % pool, epoch, capacity, block, running, 0)

    def _figures(self, pool: int, capacity: int, running: int) -> None:
        self.figures = getattr(self, "figures", {}) | {pool: (capacity, running)}

    def _ask_both(self, method: str, *args: Any, **more: Any) -> Any:
        self.woken.set_options(self.now_ns)
        found = [getattr(each, method)(self.now_ns, *args, **more) for each in self.both]
        assert found[0] == found[1], f"{method}{args} {more}"
        return found[0]

    def run(self, events: int, compare_each: int = 20) -> None:
        """Take both through events, each with a poll; at times compare all figures."""
        weights = (40, 25, 20, 4, 6, 1, 1, 3)
        kinds = (
            self._admit, self._progress, self._complete, self._cancel, self._telemetry,
            self._resize, self._drain, self._pause,
        )  # fmt: skip
        for n in range(events):
            self.random.choices(kinds, weights)[0]()
            self.now_ns += self.random.choice((0, 1, MS, 20 * MS))
            self._poll()
            if n % compare_each == 0:
                self._compare()
        self._compare()

    def _poll(self) -> None:
        for d in self._ask_both("poll"):
            if d.handle in self.waiting:
                self.waiting.remove(d.handle)
            if d.outcome == core.GRANTED:
                self.granted += 1
                self.leases.append(d)
            else:
                self.leases = [each for each in self.leases if each.lease_id != d.lease_id]
        assert self.calm.next_deadline() == self.woken.next_deadline()
        assert self.calm.digest() == self.woken.digest()

    def _compare(self) -> None:
        for each in self.both:
            each.check()
        assert self.calm.stats(self.now_ns) == self.woken.stats(self.now_ns)
        for number in range(max(1, self.asked - 5), self.asked + 1):
            self._ask_both("explain", b"r%d" % number)

    def _admit(self) -> None:
        rnd = self.random
        for _ in range(rnd.choice((1, 1, 1, 12))):
            self.asked += 1
            prompt, output = rnd.choice(self.sizes)
            first = rnd.randrange(20)
            handle = self._ask_both(
                "admit",
                rnd.randrange(self.flows),
                b"r%d" % self.asked,
                prompt,
                output,
                pool=rnd.randrange(self.pools) if rnd.random() < self.names_pool else -1,
                pools=self._set(),
                reports_progress=rnd.random() < 0.8,
                deadline_ns=SECOND if self.deadlines and rnd.random() < 0.5 else 0,
                adapter=b"a%d" % rnd.randrange(self.adapters) if self.adapters else b"",
                request_class=rnd.choice((b"", *(name for name, *_ in self.classes))),
                prefix_block_hashes=tuple(range(first, first + 5)) if self.hashed else (),
                session=b"s%d" % rnd.randrange(self.sessions) if self.sessions else b"",
            )
            if handle > 0:
                self.waiting.append(handle)

    def _set(self) -> tuple[int, ...]:
        """Draw the pools that a request names instead of one or none; (): it does not."""
        if self.set_draws.random() >= self.names_set:
            return ()
        count = min(self.pools, self.set_draws.choice((1, 1, 2)))
        few = self.set_draws.sample(range(min(self.pools, 5)), count)
        return (*few, self.set_draws.randrange(self.pools))

    def _lease(self) -> core.Decision | None:
        return self.random.choice(self.leases) if self.leases else None

    def _progress(self) -> None:
        d = self._lease()
        if d:
            told = self.random.choice((0, 1, 5, 30, 150))
            self._ask_both("progress", d.lease_id, d.pool_epoch, 10, 0, told)

    def _complete(self) -> None:
        d = self._lease()
        if d:
            self.leases.remove(d)
            used = self.random.choice((1, 8, 10, 10, 60))
            self._ask_both("complete", d.lease_id, d.pool_epoch, output_tokens=used)

    def _cancel(self) -> None:
        if self.waiting:
            handle = self.waiting.pop(self.random.randrange(len(self.waiting)))
            self._ask_both("cancel", handle)

    def _telemetry(self) -> None:
        pool = self.random.randrange(self.pools)
        used, preempted = self.random.choice((0, 100, 2_000)), self.random.choice((0, 0, 1))
        self._ask_both("telemetry", pool, self.epochs[pool], 1, 0, used, preempted)

    def _resize(self) -> None:
        pool = self.random.randrange(self.pools)
        capacity, running = self.figures[pool]
        self.epochs[pool] += 1
        capacity = capacity * self.random.choice((50, 100, 150)) // 100
        for each in self.both:
            self._offer(each, pool, self.epochs[pool], max(20, capacity), 1, running)

    def _drain(self) -> None:
        name = b"p%d" % self.random.randrange(self.pools)
        self._ask_both("set_draining", name, self.random.random() < 0.4)

    def _pause(self) -> None:
        self.now_ns += self.random.choice((100 * MS, 600 * MS, 6 * SECOND))


@click.command()
@click.option("--count", type=click.IntRange(1), default=200, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--events", type=click.IntRange(1), default=400, show_default=True)
def main(count: int, seed: int, events: int) -> None:
    """Take random histories through full pools, once with all pools looked at in each event."""
    granted = 0
    for number in range(seed, seed + count):
        walk = RestWalk(number)
        try:
            walk.run(events)
        except AssertionError as e:
            raise click.ClickException(f"seed {number} differs: {str(e)[:2000]}") from e
        granted += walk.granted
    click.echo(f"{count} histories, {granted} grants: no look would have changed anything")


if __name__ == "__main__":
    main()
