"""Makes the scope of a request for the engine: the caller's, with the headers that the gate sets.

A caller's own rank, priority and id never reach it.
"""

from __future__ import annotations

from schedsvc_vllm.asgi import Scope
from schedsvc_vllm.gated_request import GatedRequest
from schedsvc_vllm.request_sizing import Call
from schedsvc_vllm.router import WAY
from schedsvc_vllm.tracing import TRACEPARENT

# Set by the load balancer that spreads requests over ranks, never by a caller.
RANK_HEADER = b"x-data-parallel-rank"
PRIORITY_HEADER = b"x-vllm-priority"
ID_HEADER = b"x-request-id"
_DROPPED = frozenset((RANK_HEADER, PRIORITY_HEADER, ID_HEADER))


def scope_for_engine(scope: Scope, call: Call, gated: GatedRequest, priority: int | None) -> Scope:
    """Return the scope with the headers that go with the body; `state` stays the same object.

    `priority`: what the scheduler suggests; None if the engine would ignore it. The engine makes
    the id in its answer of the one that it gets here.
    """
    dropped = _DROPPED
    added = [(ID_HEADER, gated.engine_id.encode())]
    if gated.traceparent:
        added.append((TRACEPARENT, gated.traceparent))
    if priority is not None:
        added.append((PRIORITY_HEADER, str(priority).encode()))
    if call.reads_answer:
        dropped |= {b"accept-encoding"}  # a compressed answer cannot be read
    if call.rewritten:
        dropped |= {b"content-length", b"transfer-encoding"}
        added.append((b"content-length", str(len(call.body)).encode()))
    headers = [pair for pair in scope["headers"] if pair[0] not in dropped]
    made = {**scope, "headers": headers + added}
    if gated.way is not None:
        made[WAY] = gated.way
    return made
