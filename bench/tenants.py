"""Lets tenants come and go: a million names in an hour of virtual time, 100,000 of them waiting.

    python -m bench.tenants own      names that nothing lists, with `flows_max` 200,000
    python -m bench.tenants fixed    the same load from 100,000 listed tenants

Prints the median and the 99th percentile of one Admit, and the peak of the process's memory. The
load is one request each 3.6 ms; once 100,000 wait or run, each arrival ends one that runs.
"""

import gc
import resource
import sys
import time
from collections import deque
from typing import Any

from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1 import tenants_pb2

from bench.machine import need_release_core
from schedsvc import _core as core

NAMES, LISTED, OPEN = 1_000_000, 100_000, 100_000
STEP_NS = 3_600 * 10**9 // NAMES
#: Before it the backlog and the flows are still filling.
MEASURED_FROM = 300_000
RENEWED_EVERY = 2_500  # requests, so 9 s: less than the lease TTL
LIMITS: dict[str, Any] = {
    "flows_max": 200_000,
    "queue_max": 1 << 24,
    "flow_queue_max": 1 << 20,
    "queue_ttl_ns": 10**15,
    "leases_max": 1 << 20,
}


def message(number: int, own: bool) -> bytes:
    """Return request of the next tenant."""
    tenant = f"tenant-{number if own else number % LISTED:07}"
    return pb.AdmitRequest(
        request_id=f"r{number}",
        tenant=tenant,
        input_tokens=[100],
        max_output_tokens=50,
        tenant_proof=tenants_pb2.TENANT_PROOF_TOKEN,
    ).SerializeToString()


def made(own: bool) -> core.Scheduler:
    """Make the scheduler, with one pool of four million tokens."""
    scheduler = core.Scheduler(**LIMITS)
    scheduler.set_unknown(scheduler.set_flow(b"unknown", 100), own=True)
    for number in range(0 if own else LISTED):
        scheduler.set_flow(f"tenant-{number:07}".encode(), 1_000)
    scheduler.set_pool(0, b"p", 1, 4_000_000, 16)
    return scheduler


def main(own: bool) -> None:
    """Run the load and print the figures."""
    need_release_core()
    scheduler = made(own)
    running: deque[tuple[int, int]] = deque()
    took_ns: list[int] = []
    ended = 0
    gc.disable()
    for number in range(NAMES):
        now_ns, data = number * STEP_NS, message(number, own)
        began_ns = time.perf_counter_ns()
        answer = scheduler.admit_wire(now_ns, 0, data)
        if number > MEASURED_FROM:
            took_ns.append(time.perf_counter_ns() - began_ns)
        if isinstance(answer, bytes):
            grant = pb.AdmitResponse.FromString(answer).grant
            if grant.lease_id:
                running.append((grant.lease_id, grant.pool_epoch))
        for decision in scheduler.poll(now_ns):
            if decision.outcome == core.GRANTED:
                running.append((decision.lease_id, decision.pool_epoch))
        if number - ended >= OPEN and running:
            scheduler.complete(now_ns, *running.popleft(), output_tokens=20)
            ended += 1
        if number % RENEWED_EVERY == 0:
            for lease in running:
                scheduler.progress(now_ns, *lease)
    took_ns.sort()
    totals, tenants = (scheduler.stats(now_ns, 0)[key] for key in ("totals", "tenants"))
    print(
        f"Admit: median {took_ns[len(took_ns) // 2] / 1e3:.2f} us,"
        f" 99 % {took_ns[len(took_ns) * 99 // 100] / 1e3:.2f} us;"
        f" peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB;"
        f" {totals['queued']:,} queued, {totals['live_leases']:,} running; {tenants}"
    )


if __name__ == "__main__":
    if sys.argv[1:] not in (["own"], ["fixed"]):
        sys.exit(__doc__)
    main(sys.argv[1] == "own")
