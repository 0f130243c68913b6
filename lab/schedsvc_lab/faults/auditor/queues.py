"""Divides the places in a tenant's queue between the principals that vouch for the tenant."""

from schedsvc_lab.faults.auditor.implied_state import ImpliedState
from schedsvc_lab.faults.auditor.records import Request, require

_KEPT_PART = 5
"""One in so many places is for clients whose Retry-After has passed."""


def places(books: ImpliedState, flow: str) -> int:
    """Return how many of a flow may wait. O(queued).

    A principal finds a place in a full queue while it has less than its part there. So with the
    principals in the order in which they found their last places, the k-th has a k-th part at most.
    """
    most = books.terms.flow_queue_max
    return sum(max(1, most // k) for k in range(1, 1 + max(1, len(_principals(books, flow)))))


def check_full(books: ImpliedState, r: Request) -> None:
    """Hold a refusal to a full queue, of which the principal has its part. O(queued)."""
    whose = _principals(books, r.flow)
    most = books.terms.flow_queue_max
    open_places = most - most // _KEPT_PART
    # The request is in the books, and so is each request that left its queue in this round.
    count, own = sum(whose.values()) - 1, whose[r.principal] - 1
    require(count >= open_places, "refused by a queue with places", *r.key, count, open_places)
    part = max(1, open_places // len(whose))
    require(own >= part, "refused within its part of a queue", *r.key, own, part)


def check_early(books: ImpliedState, r: Request) -> None:
    """Hold a refusal for an expected wait to a flow that has something queued. O(queued)."""
    count = sum(_principals(books, r.flow).values()) - 1  # the request is in the books itself
    require(r.has_deadline or count > 0, "refused for what others have queued", *r.key)


def _principals(books: ImpliedState, flow: str) -> dict[int, int]:
    """Count each principal's queued requests of a flow, with those that left in this round."""
    whose: dict[int, int] = {}
    for (name, _), queue in books.queues.items():
        for r in queue.values() if name == flow else ():
            whose[r.principal] = whose.get(r.principal, 0) + 1
    for r in (*books.fresh, *books.dropped):
        if r.flow == flow:
            whose[r.principal] = whose.get(r.principal, 0) + 1
    return whose
