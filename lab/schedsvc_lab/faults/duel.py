"""Runs one seed twice: with a principal that acts against the others, and with it honest.

Both runs have the same requests of the others at the same times, or with the same backlog, and the
same breaks of their stream. Nothing else goes wrong, and time is exact, so the hostile principal
causes each difference.
"""

from dataclasses import replace
from random import Random
from typing import NamedTuple

from schedsvc_lab.faults.auditor import (
    NO_TREE,
    Granted,
    Sizes,
    Tree,
    ViolationError,
    compare_runs,
)
from schedsvc_lab.faults.draws import draw_duel_tree
from schedsvc_lab.faults.event_queue import EventQueue
from schedsvc_lab.faults.hostile import TOKEN_NS, Hostile, alike
from schedsvc_lab.faults.hostile_options import HOSTILE_FAULTS, HOSTILE_TREES, TENANT
from schedsvc_lab.faults.options import Options, PoolOptions, knows
from schedsvc_lab.faults.phases import Outcome, described
from schedsvc_lab.faults.world import World

_S, _MS = 1_000_000_000, 1_000_000
_DELAY_NS = 100_000
_OUTAGE_NS = 101 * _MS
"""From a break until the stream is there again."""

_STEPS_MAX = 200_000
_EVENTS_EACH = 16
"""Of a run, for each request of the others."""

_QUEUE_MAX = 64
_RETRIES_PART, _SHARE_PPM = 5, 250_000
"""Of the queue: what the core keeps for retries, and what the hostile principal may take."""

_STRIKES = 100
"""In the time that the others' requests take."""


class SteadyQueue(EventQueue):
    """Runs virtual time in which whatever takes a while takes exactly its average."""

    __slots__ = ()

    def around(self, mean_ns: int) -> int:
        """Return the average."""
        return mean_ns

    def soon(self, mean_ns: int) -> int:
        """Return the average."""
        return mean_ns + 1


class Plan(NamedTuple):
    """Plans the traffic of the other clients."""

    requests: int
    interval_ns: int  # between two of them; 0: they keep a backlog
    backlog: int
    breaks_ns: tuple[int, ...]  # when their stream breaks


def duel_options(options: Options) -> tuple[Options, Sizes, Plan]:
    """Return a run in which only the hostile principal does harm, and what the others do."""
    rnd = Random(options.seed ^ 0xD0E1)  # noqa: S311 - no secret: one seed is one run
    prompt, output = rnd.choice((16, 48, 112)), rnd.choice((16, 48, 80))
    at_once, block = rnd.choice((2, 4, 8)), rnd.choice((1, 16))
    run_ns = output * TOKEN_NS
    tenants = ("ada", "bob")[: rnd.choice((1, 1, 2))]
    core = {
        "policy": "vtc", "credit_max_micro": rnd.choice((-1, 0)),
        "ledger": "sum", "dispatch": "backfill", "headroom_ppm": 0, "headroom_min_ppm": 0,
        "headroom_max_ppm": 0, "queue_ttl_ns": 600 * _S, "lease_ttl_ns": 5 * _S,
        "lease_grace_ns": 2 * _S, "answer_ttl_ns": 60 * _S,
        "answers_max": rnd.choice((20, 100_000)),
        "queue_max": rnd.choice((_QUEUE_MAX, 10_000)), "flow_queue_max": 1_000,
        "samples_min": 1_000_000, "cached_price_ppm": 1_000_000,
        "sessions_max": 64, "leases_max": 2_000, "adapters_max": 16,
    }  # fmt: skip
    pool = PoolOptions("gpu-0", at_once * (prompt + output), block, 0, 0, 1, TOKEN_NS)
    if options.hostile is None:
        raise ValueError("a duel needs a hostile principal")
    count = options.events // _EVENTS_EACH
    tree = NO_TREE
    if options.seed >= HOSTILE_TREES:
        tree = draw_duel_tree(options.seed, tenants, TENANT)
    # The load of the others beside one flow with a backlog.
    parts = max(parts_of(tree, (*tenants, TENANT), name) for name in tenants)
    load, share = rnd.choice((0.2, 0.5, 0.8, 0.0)), at_once * len(tenants) / parts
    interval_ns = round(run_ns / (share * load)) if load else 0
    span_ns = round(count / (share * (load or 1)) * run_ns)
    hostile = replace(
        options.hostile, size=(prompt, output), waiting_max=8, strikes_ns=span_ns // _STRIKES
    )
    breaks = tuple(span_ns * at // 4 for at in range(1, rnd.choice((1, 2, 4))))
    levels = 1 + max(tree.heights().values(), default=0)
    sizes = Sizes(
        prompt,
        output,
        at_once,
        run_ns + 6 * _DELAY_NS,
        breaks,
        _OUTAGE_NS,
        levels=levels,
        in_order=options.sessions is None,
    )
    plan = Plan(count, interval_ns, rnd.choice((2, 6)), breaks)
    waiting = waiting_max(plan, sizes, len(tenants))
    core["queue_max"] = max(core["queue_max"], queue_for(waiting))
    options = replace(
        options,
        core={name: value for name, value in core.items() if knows(name, value)},
        tenants=dict.fromkeys(tenants, 1_000),
        shares_unknown=False,
        pools=(pool,),
        callers=0,
        delay_ns=_DELAY_NS,
        gather_ns=0,
        lost_permille=0,
        faults=options.faults & frozenset(HOSTILE_FAULTS),
        quotas=None,
        hostile=hostile,
        tree=tree,
    )
    return options, sizes, plan


def parts_of(tree: Tree, flows: tuple[str, ...], name: str) -> int:
    """Return n if a flow gets 1/n of the service while all have a backlog. O(names * levels).

    All weights are equal.
    """
    parts = 1
    for child in tree.path(name):
        above = tree.parent(child)
        parts *= sum(tree.parent(other) == above for other in (*tree.weights, *flows))
    return parts


def waiting_max(plan: Plan, sizes: Sizes, tenants: int) -> int:
    """Return how many requests of the others wait at most, in either run. O(1).

    With a backlog it is the backlog. Otherwise each flow asks for less than its part of the pool.
    So the waiting requests are those of outages, and those that a flow may lack of its part. While
    a flow waits on one stream it lacks at most the bound. After an outage it is lifted to the
    others, and can then lack as much again.
    """
    if plan.interval_ns == 0:
        return plan.backlog * tenants
    breaks = len(plan.breaks_ns)
    in_outages = breaks * -(-sizes.outage_ns // plan.interval_ns)
    return min(plan.requests, in_outages + (breaks + 1) * tenants * sizes.lag_max)


def places_of_others(queue_max: int) -> int:
    """Return how many places the hostile principal leaves to first tries of the others. O(1)."""
    return queue_max - queue_max // _RETRIES_PART - queue_max * _SHARE_PPM // 1_000_000


def queue_for(waiting: int) -> int:
    """Return the smallest queue, of 64 places at least, in which others have `waiting`. O(result).

    Beyond their part QUEUE_FULL is right: the places of retries are promised to no caller.
    """
    queue_max = _QUEUE_MAX
    while places_of_others(queue_max) < waiting:
        queue_max += 1
    return queue_max


class _Side:
    """Runs one of the two sides."""

    def __init__(self, options: Options, plan: Plan) -> None:
        rnd = Random(options.seed ^ 0x5EED)  # noqa: S311 - no secret: one seed is one run
        self.world = World(options, SteadyQueue(rnd))
        hostile = options.hostile
        self.hostile = None if hostile is None else Hostile(self.world, hostile)
        self._options = options
        self._plan = plan
        self._asked = 0
        self._asked_ns: dict[str, int] = {}
        self._ask(None)
        for at_ns in plan.breaks_ns:
            self.world.event_queue.at(at_ns, self._break)

    @property
    def granted(self) -> list[Granted]:
        """Grants to the other clients, with the times at which they first asked."""
        first_ns = self._asked_ns
        granted = self.world.auditor.books.shares.granted
        return [g._replace(asked_ns=first_ns[g.request_id]) for g in granted]

    def _ask(self, _: object) -> None:
        """Let the others ask for what is due."""
        plan, shim = self._plan, self.world.shims[0]
        tenants = list(self._options.tenants)
        wanted = plan.backlog * len(tenants) - len(shim.jobs) if plan.interval_ns == 0 else 1
        for _each in range(min(wanted, plan.requests - self._asked)):
            job = self.world.maker.job("gpu-0", tenants[self._asked % len(tenants)])
            hostile = self._options.hostile
            if hostile is not None and hostile.size is not None:
                alike(job, hostile.size)
            self._asked_ns[job.request.request_id] = self.world.event_queue.now_ns
            shim.ask(job)
            self._asked += 1
        if self._asked < plan.requests:
            self.world.event_queue.after(plan.interval_ns or _MS, self._ask)

    @property
    def _is_over(self) -> bool:
        shim = self.world.shims[0]
        return self._asked == self._plan.requests and not shim.jobs

    def _break(self, _: object) -> None:
        conn = self.world.shims[0].conn
        if conn is not None:
            conn.cut()

    def run(self, until_ns: int) -> None:
        """Run until the others have their verdicts, or the time is over."""
        queue = self.world.event_queue
        for _ in range(_STEPS_MAX):
            if self._is_over or queue.now_ns > until_ns:
                return
            queue.step()
        raise ViolationError("a run with a hostile caller does not come to its end")


class Duel:
    """Runs both runs of a seed."""

    def __init__(self, options: Options) -> None:
        self._options, self._sizes, self._plan = duel_options(options)

    def play(self) -> Outcome:
        """Run both, and compare what the others were granted."""
        violation, sides = "", []
        try:
            honest = _Side(replace(self._options, faults=frozenset()), self._plan)
            sides.append(honest)
            honest.run(1 << 62)
            end_ns = honest.world.event_queue.now_ns
            other = _Side(self._options, self._plan)
            sides.append(other)
            other.run(end_ns + 2 * self._sizes.wait_more_ns + self._sizes.outage_ns)
            other.world.server.check()
            compare_runs(honest.granted, other.granted, self._sizes)
        except Exception as error:
            violation = described(error)
        last, hostile = sides[-1].world, sides[-1].hostile
        counts = {} if hostile is None else dict(hostile.counts)
        events = sum(side.world.events for side in sides)
        return Outcome(events, violation, counts, last.server.core.digest())
