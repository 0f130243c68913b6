"""Tests queued requests that move with their flow to a group without a queue, or from one."""

from collections.abc import Callable

import pytest

from schedsvc import _core as core

from .support import admit
from .test_tree import group, make, member

TARGETS = (-1, 0, 1)  # any pool, or the pool that the request names
QUEUES_MAX = 132  # beyond the first two sizes of the array of queues


def by_the_flow(s: core.Scheduler, flow: int, concurrency: int) -> None:
    """Put the flow into a group with a weight."""
    s.set_flow_quota(0, flow, group(s, "a", 1_000), concurrency=concurrency)


def by_the_group(s: core.Scheduler, flow: int, concurrency: int) -> None:
    """Give the flow's group a weight."""
    s.set_flow_quota(0, flow, group(s, "b", 0), concurrency=concurrency)
    group(s, "b", 1_000)


@pytest.mark.parametrize("move", [by_the_flow, by_the_group])
@pytest.mark.parametrize("state", ["waits for its turn", "waits for its quota", "is empty"])
def test_flow_moves_while_its_group_gets_the_next_queue(
    move: Callable[[core.Scheduler, int, int], None], state: str
) -> None:
    concurrency = int(state == "waits for its quota")
    for queues in range(1, QUEUES_MAX):
        target = TARGETS[queues % len(TARGETS)]
        s, wanted = make(queue_max=2 * QUEUES_MAX), set[int]()
        s.set_pool(0, b"q", 1, 20, 1)
        moved = member(s, "moved", -1)
        s.set_flow_quota(0, moved, -1, concurrency=concurrency)
        admit(s, 0, "first", 10, 10, moved, pool=target)
        (first,) = s.poll(0)
        if state != "is empty":
            wanted.add(admit(s, 0, "second", 10, 10, moved, pool=target))
        for k in range(1, queues):
            wanted.add(admit(s, 0, f"f{k}", 10, 10, member(s, f"f{k}", -1), pool=target))
        if state != "waits for its quota":
            s.complete(0, first.lease_id, 1)
        move(s, moved, concurrency)
        s.check()
        if state == "waits for its quota":
            s.complete(0, first.lease_id, 1)
        while granted := s.poll(0):
            for d in granted:
                s.complete(0, d.lease_id, 1)
                wanted.remove(d.handle)
        s.check()
        assert not wanted


@pytest.mark.parametrize("target", TARGETS)
def test_first_request_of_a_group_gets_it_the_next_queue(target: int) -> None:
    for queues in range(1, QUEUES_MAX):
        s = make(queue_max=2 * QUEUES_MAX)
        s.set_pool(0, b"q", 1, 20, 1)
        first = member(s, "first", group(s, "a", 1_000))
        s.poll(0)
        for k in range(1, queues):
            admit(s, 0, f"f{k}", 10, 10, member(s, f"f{k}", -1), pool=target)
        admit(s, 0, "r", 10, 10, first, pool=target)
        s.check()


def test_flows_leave_a_group_when_the_order_is_by_input() -> None:
    """The queue of a group has no request whose input could be its key."""
    s = make()
    node = group(s, "a", 1_000)
    flows = [member(s, name, node) for name in "uv"]
    wanted = {admit(s, 0, f"r{k}", 5 + k, 10, flows[k % 2]) for k in range(6)}
    (first,) = s.poll(0)  # the others are in the line of the group
    s.set_options(0, policy="sif")
    s.check()
    s.complete(0, first.lease_id, 1)
    granted = [first.handle]
    while found := s.poll(0):
        for d in found:
            s.complete(0, d.lease_id, 1)
            granted.append(d.handle)
    assert set(granted) == wanted
    assert granted[1:] == sorted(granted[1:])
