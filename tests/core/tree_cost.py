"""Runs requests through a tree of shares; test_tree_cost.py counts the instructions of its calls.

    python -m tests.core.tree_cost DEPTH ROUNDS

64 tenants stand below DEPTH - 1 levels of weighted groups, all with a backlog, in one pool. Each
round reports on a lease, completes it, admits another request, and polls.
"""

import sys

from schedsvc import _core as core

TENANTS = 64
NEVER_NS = 1 << 55


def make(depth: int) -> tuple[core.Scheduler, list[int]]:
    """A scheduler whose groups have four children each, and its tenants' flows."""
    scheduler = core.Scheduler(
        queue_max=1 << 20, flow_queue_max=1 << 16, queue_ttl_ns=NEVER_NS, lease_ttl_ns=NEVER_NS
    )
    flows = []
    for tenant in range(TENANTS):
        parent = -1
        for level in range(1, depth):
            name = b"group:%d.%d" % (level, tenant * 4**level // TENANTS)
            parent = scheduler.set_quota(0, name, parent, weight_milli=1000)
        flow = scheduler.set_flow(b"tenant%d" % tenant, 1000)
        scheduler.set_flow_quota(0, flow, parent)
        flows.append(flow)
    scheduler.set_pool(0, b"pool", 1, 3200, 16)
    return scheduler, flows


def run(depth: int, rounds: int) -> None:
    """Fill the queues, and take `rounds` requests through them."""
    scheduler, flows = make(depth)
    asked = 0

    def ask(now_ns: int) -> None:
        nonlocal asked
        asked += 1
        flow = flows[asked * 7 % TENANTS]
        scheduler.admit(now_ns, flow, b"r%d" % asked, 50, 50, -1, reports_progress=True)

    def granted(now_ns: int) -> list[core.Decision]:
        return [d for d in scheduler.poll(now_ns) if d.outcome == core.GRANTED]

    for _ in range(8 * TENANTS):
        ask(1)
    live = granted(1)
    for now_ns in range(2, 2 + rounds):
        lease = live.pop(0).lease_id
        scheduler.progress(now_ns, lease, 1, 50, 0, 10)
        scheduler.complete(now_ns, lease, 1, core.COMPLETED, 50, 0, 20)
        ask(now_ns)
        live += granted(now_ns)


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]))
