"""Runs millions of requests, after which nothing may stay reserved: the longest run.

One core, driven directly. A part of the requests is cancelled, while it waits or while it runs; of
another part the Complete is lost, so that only the expiry of its lease gives its tokens back.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from schedsvc._core import CANCELLED, EXPIRED, GRANTED, Scheduler

_S = 1_000_000_000
_FLOWS = 16
_CAPACITY_TOKENS = 400_000
_INTERVAL_NS = 1_000_000  # between two arrivals
_RUN_NS = 200_000_000  # running time of a request that is completed
_TTL_NS, _GRACE_NS = _S, _S
_WATCH = 50_000


@dataclass
class Marathon:
    """Counts the outcomes of the requests, and what is left of them."""

    requests: int = 0
    granted: int = 0
    completed: int = 0
    cancelled: int = 0  # running or waiting
    lost: int = 0  # Completes
    expired: int = 0
    refused: int = 0
    promised_tokens: int = 0  # at rest, like the following fields
    live_leases: int = 0
    queued: int = 0


def run_marathon(
    requests: int,
    *,
    seed: int = 0,
    cancelled_permille: int = 200,
    lost_permille: int = 50,
    watch: Callable[[int], None] | None = None,
) -> Marathon:
    """Run `requests` requests, then wait until every lease has run out. O(requests).

    `watch` is called at times with the number of requests so far. Raises InvariantError if the
    core's own books do not balance.
    """
    rnd = Random(seed)  # noqa: S311 - no secret: one seed is one run
    random, found = rnd.random, Marathon(requests)
    core = Scheduler(
        lease_ttl_ns=_TTL_NS, lease_grace_ns=_GRACE_NS, queue_ttl_ns=5 * _S, answers_max=10_000
    )
    for number in range(_FLOWS):
        core.set_flow(b"flow-%d" % number, 1_000)
    core.set_pool(0, b"pool", 1, _CAPACITY_TOKENS, 16)
    running: deque[tuple[int, int]] = deque()  # end, lease
    waiting: dict[int, bool] = {}  # handle: its caller leaves as soon as it runs
    now_ns = 0

    def decide() -> None:
        for decision in core.poll(now_ns):
            if decision.outcome == GRANTED:
                leaves = waiting.pop(decision.handle)
                if leaves:
                    core.complete(now_ns, decision.lease_id, 1, CANCELLED, 0, 0, 0)
                elif random() * 1_000 < lost_permille:
                    found.lost += 1
                else:
                    running.append((now_ns + _RUN_NS, decision.lease_id))
            elif decision.outcome != EXPIRED:
                waiting.pop(decision.handle, None)

    for number in range(requests):
        now_ns += _INTERVAL_NS
        while running and running[0][0] <= now_ns:
            core.complete(now_ns, running.popleft()[1], 1, 0, 64, 0, int(random() * 128))
        handle = core.admit(now_ns, int(random() * _FLOWS), b"%d" % number, 64, 128)
        if handle > 0:
            leaves = random() * 1_000 < cancelled_permille
            waiting[handle] = leaves
            if leaves and number % 2:
                core.cancel(now_ns, handle)
        decide()
        if watch is not None and number % _WATCH == 0:
            watch(number)
    for lease_id in [lease_id for _, lease_id in running]:
        core.complete(now_ns, lease_id, 1, 0, 64, 0, 1)
    while (deadline_ns := core.next_deadline()) >= 0:
        now_ns = max(now_ns, deadline_ns)
        decide()
    core.check()
    totals = core.stats(now_ns)["totals"]
    found.granted, found.completed = totals["granted"], totals["completed"]
    found.cancelled = totals["cancelled"] + totals["evicted"]
    found.expired, found.refused = totals["expired"], totals["rejected"]
    found.promised_tokens = totals["promised_tokens"]
    found.live_leases, found.queued = totals["live_leases"], totals["queued"]
    return found
