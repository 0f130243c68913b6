"""Random histories of one pool, or of several, and what bounded credit promises in each.

    python -m tests.core.credit_histories --count 1000000 --seed 7
    python -m tests.core.credit_histories --count 1000000 --pools

In any interval in which flow g waits all the time, another flow f is served, by weight, at most
the bound of VTC and the credit more than g: bound = 2 * max(input price * longest prompt, output
price * pool) / least weight. That holds for every f, also for one that comes and goes. Every
request reports its output token by token, so that the engine's service is what is charged.

With several pools the same holds in each: while g waits all the time in a pool, f is served there
at most the bound, the credit and the lead more than g is served in all pools.
"""

import random
import sys
from itertools import product

import click

from schedsvc import _core as core

INPUT, OUTPUT = 1_000_000, 2_000_000
PROMPT_MAX, OUTPUT_MAX, CAPACITY = 2, 4, 30
PHASES, EVENTS = 3, 50
HELD = (0, 1, 1, 3, 30)  # requests that a flow keeps open in a phase: it trickles, or floods
ANY = -1
CREDITS = (-1, 0, 3 * INPUT, 200 * INPUT)


class BrokenError(Exception):
    """A history in which a flow that waited was served too little."""


class History:
    """One scheduler with a few flows, and what each was served as the engine saw it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.weights = [self.random.choice((500, 1_000, 1_000, 3_000)) for _ in range(3)]
        self.credit = self.random.choice(CREDITS)
        self.core = self._begin()
        self.now_ns = self.serial = 0
        self.served = [0] * 3
        self.served_in: dict[tuple[int, int], int] = {}  # by flow and pool
        self.queued: dict[int, tuple[int, int, int]] = {}  # handle: flow, prompt, output
        self.targets: dict[int, int] = {}
        #: By lease id: flow, prompt, output, charged, produced, pool.
        self.live: dict[int, list[int]] = {}
        self.least: dict[tuple[int, int], int] = {}  # lead of one since the other waits
        self.longest = self.most = 0

    def _begin(self) -> core.Scheduler:
        made = core.Scheduler(
            ledger="sum", dispatch="strict", headroom_ppm=0, headroom_min_ppm=0,
            headroom_max_ppm=0, credit_max_micro=self.credit,
        )  # fmt: skip
        for flow, weight in enumerate(self.weights):
            made.set_flow(b"f%d" % flow, weight)
        made.set_pool(0, b"p", 1, CAPACITY, 1)
        return made

    def play(self) -> None:
        """Play the history. Raises BrokenError."""
        for at in range(PHASES * EVENTS):
            if at % EVENTS == 0:
                held = [self.random.choice(HELD) for _ in range(3)]
            self.now_ns += 1
            dice = self.random.random()
            for flow in range(3):
                if self._open(flow) < held[flow] or (held[flow] and dice < 0.05):
                    self._ask(flow, self.random.choice((1, 1, 2)) if held[flow] > 1 else 1)
            if dice > 0.3:
                self._step()
            elif dice > 0.28 and self.queued:
                handle = self.random.choice(list(self.queued))
                self.core.cancel(self.now_ns, handle)
                del self.queued[handle]
            self._poll()
            self._hold()

    def _open(self, flow: int) -> int:
        running = sum(lease[0] == flow for lease in self.live.values())
        return running + sum(queued[0] == flow for queued in self.queued.values())

    def _ask(self, flow: int, count: int, target: int = 0) -> None:
        for _ in range(count):
            self.serial += 1
            prompt, output = self.random.randint(1, PROMPT_MAX), self.random.randint(1, OUTPUT_MAX)
            handle = self.core.admit(
                self.now_ns, flow, b"%d" % self.serial, prompt, output, target,
                reports_progress=True,
            )  # fmt: skip
            self.queued[handle] = flow, prompt, output
            self.targets[handle] = target
            self.longest = max(self.longest, prompt)
            self.most = max(self.most, prompt * INPUT + output * OUTPUT)

    def _poll(self) -> None:
        for decision in self.core.poll(self.now_ns):
            if decision.handle not in self.queued:
                continue
            flow, prompt, output = self.queued.pop(decision.handle)
            lease = [flow, prompt, self.random.randint(1, output), 0, 0, decision.pool]
            self.live[decision.lease_id] = lease
            self._charge(lease)

    def _step(self, pool: int = 0) -> None:
        """Produce a token of every running request of a pool; those that are done end."""
        for lease_id, lease in [entry for entry in self.live.items() if entry[1][5] == pool]:
            lease[4] += 1
            self._charge(lease)
            if lease[4] < lease[2]:
                self.core.progress(self.now_ns, lease_id, 1, lease[1], 0, lease[4])
            else:
                del self.live[lease_id]
                self.core.complete(self.now_ns, lease_id, 1, core.COMPLETED, lease[1], 0, lease[4])

    def _charge(self, lease: list[int]) -> None:
        flow, prompt, _, before, produced, pool = lease
        lease[3] = (prompt * INPUT + produced * OUTPUT) * 1_000 // self.weights[flow]
        self.served[flow] += lease[3] - before
        here = self.served_in.get((flow, pool), 0)
        self.served_in[flow, pool] = here + lease[3] - before

    def _allowed(self) -> int:
        least = min(self.weights)
        bound = 2 * max(INPUT * self.longest, OUTPUT * CAPACITY) * 1_000 // least
        return bound + (self.most * 1_000 // least if self.credit < 0 else self.credit)

    def _hold(self) -> None:
        waiting = {flow for flow, *_ in self.queued.values()}
        allowed = self._allowed()
        for g in range(3):
            for f in range(3):
                lead = self.served[f] - self.served[g]
                if g not in waiting:
                    self.least.pop((f, g), None)
                    continue
                self.least[f, g] = min(lead, self.least.get((f, g), lead))
                if lead - self.least[f, g] > allowed:
                    raise BrokenError(
                        f"f{f} got {lead - self.least[f, g]} micro-tokens more than f{g}, which"
                        f" waited: allowed {allowed}"
                    )


class PoolHistory(History):
    """The same with three pools of different pace; each phase lets flows ask for other pools."""

    def _begin(self) -> core.Scheduler:
        self.weights = [self.random.choice((1_000, 1_000, 2_000)) for _ in range(3)]
        self.lead = self.random.choice((0, 20 * INPUT, 100 * INPUT))
        self.leads: dict[tuple[int, int, int], int] = {}
        self.wishes: list[set[int]] = []
        made = super()._begin()
        made.set_options(0, lead_max_micro=self.lead)
        for pool in (1, 2):
            made.set_pool(0, b"p%d" % pool, 1, CAPACITY, 1)
        return made

    def play(self) -> None:
        """Play the history. Raises BrokenError."""
        for _ in range(4):
            self.wishes = [set(self.random.choices((ANY, 0, 1, 2), k=2)) for _ in range(3)]
            idle = self.random.choice((-1, -1, 0, 1, 2))
            for handle in list(self.queued):
                if self.targets[handle] not in self.wishes[self.queued[handle][0]]:
                    self.core.cancel(self.now_ns, handle)
                    del self.queued[handle]
            for _ in range(120):
                self.now_ns += 1
                for flow in range(3):
                    for target in sorted(self.wishes[flow]) if flow != idle else ():
                        self._fill(flow, target)
                self._poll()
                self._hold_pools()
                self._step(self.random.choices((0, 1, 2), (10, 3, 1))[0])

    def _fill(self, flow: int, target: int) -> None:
        waiting = sum(
            (q[0], self.targets[handle]) == (flow, target) for handle, q in self.queued.items()
        )
        if waiting < CAPACITY // 2:
            self._ask(flow, 2, target)

    def _hold_pools(self) -> None:
        allowed = self._allowed() + self.lead
        waiting = {
            (self.queued[handle][0], pool)
            for handle in self.queued
            for pool in range(3)
            if self.targets[handle] in (ANY, pool)
        }
        for f, g, pool in product(range(3), repeat=3):
            if (g, pool) not in waiting:
                self.leads.pop((f, g, pool), None)
                continue
            lead = self.served_in.get((f, pool), 0) - self.served[g]
            least = min(lead, self.leads.get((f, g, pool), lead))
            self.leads[f, g, pool] = least
            if f != g and lead - least > allowed:
                raise BrokenError(
                    f"f{f} got {lead - least} micro-tokens more in pool {pool} than f{g}, which"
                    f" waited there, in all: allowed {allowed}"
                )


@click.command()
@click.option(
    "--count", default=10_000, show_default=True, type=click.IntRange(min=1), help="Histories."
)
@click.option(
    "--seed",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    help="First seed.",
)
@click.option("--pools", is_flag=True, help="Let each have three pools.")
def main(count: int, seed: int, pools: bool) -> None:
    """Play random histories; exit with status 1 and the seed if one breaks the promise."""
    for number in range(seed, seed + count):
        try:
            (PoolHistory if pools else History)(number).play()
        except BrokenError as broken:
            sys.exit(f"seed {number}: {broken}")
        if number % 10_000 == 9_999:
            click.echo(f"{number + 1 - seed:,} of {count:,} histories hold", err=True)
    click.echo(f"{count:,} histories hold")


if __name__ == "__main__":
    main()
