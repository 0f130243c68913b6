"""Makes a scheduler, a grant and a number out of the books in a few words."""

from collections.abc import Iterable
from itertools import islice
from typing import Any

from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc import _core as core

SECOND = 10**9


def make(
    *flows: tuple[str, int],
    capacity: int = 1_000,
    block: int = 1,
    max_running: int = 0,
    max_model: int = 0,
    policy: str = "vtc",
    **limits: Any,
) -> core.Scheduler:
    """Return a scheduler with one pool `p` at epoch 1 and these flows; default: `f` of weight 1."""
    still = {"headroom_ppm": 0, "headroom_min_ppm": 0, "headroom_max_ppm": 0}
    given: dict[str, Any] = {"ledger": "sum", "dispatch": "strict"} | still | limits
    scheduler = core.Scheduler(policy=policy, **given)
    for name, weight in flows or (("f", 1000),):
        scheduler.set_flow(name.encode(), weight)
    scheduler.set_pool(0, b"p", 1, capacity, block, max_running, max_model)
    return scheduler


def admit(
    scheduler: core.Scheduler,
    now_ns: int,
    request_id: str,
    prompt: int = 10,
    output: int = 10,
    flow: int = 0,
    **more: Any,
) -> int:
    return scheduler.admit(now_ns, flow, request_id.encode(), prompt, output, **more)


def grant(
    scheduler: core.Scheduler,
    now_ns: int,
    request_id: str,
    prompt: int = 10,
    output: int = 10,
    flow: int = 0,
    **more: Any,
) -> core.Decision:
    """Admit one request that is granted at once."""
    handle = admit(scheduler, now_ns, request_id, prompt, output, flow, **more)
    decisions = [d for d in scheduler.poll(now_ns) if d.handle == handle]
    assert [d.outcome for d in decisions] == [core.GRANTED]
    return decisions[0]


def admit_message(
    request_id: str, prompts: Iterable[int] = (10,), **fields: Any
) -> pb.AdmitRequest:
    """Return an AdmitRequest of tenant `f` for 10 output tokens, unless `fields` overrides them."""
    given: dict[str, Any] = {"tenant": "f", "max_output_tokens": 10} | fields
    return pb.AdmitRequest(request_id=request_id, input_tokens=prompts, **given)


def outcomes(decisions: Iterable[core.Decision]) -> list[int]:
    return [d.outcome for d in decisions]


def pool(scheduler: core.Scheduler, now_ns: int, index: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = scheduler.stats(now_ns)["pools"][index]
    return found


def totals(scheduler: core.Scheduler, now_ns: int) -> dict[str, Any]:
    found: dict[str, Any] = scheduler.stats(now_ns)["totals"]
    return found


def vtc(scheduler: core.Scheduler, now_ns: int, flow: int = 0) -> int:
    found: int = scheduler.flow_stats(now_ns, flow)["vtc_micro"]
    return found


def gauges(scheduler: core.Scheduler, now_ns: int) -> dict[str, int]:
    """Return everything that is 0 in a drained scheduler."""
    stats = scheduler.stats(now_ns)
    found = {k: stats["totals"][k] for k in ("queued", "live_leases", "promised_tokens")}
    for rows, kind in ((stats["pools"], "pool"), (stats["flows"], "flow")):
        for key in ("promised_tokens", "posted_tokens", "live_leases", "queued"):
            found[f"{kind}.{key}"] = sum(row[key] for row in rows)
    found["pool.suspect_leases"] = sum(row["suspect_leases"] for row in stats["pools"])
    return found


def is_drained(scheduler: core.Scheduler, now_ns: int) -> bool:
    scheduler.check()
    return not any(gauges(scheduler, now_ns).values()) and scheduler.next_deadline() == -1


def meeting_keys(count: int, lower: int = 0) -> list[int]:
    """Keys, below 2^62, that have one place in a table of up to 2^21 places without a key.

    `lower`: the lower half of each.
    """
    inverse = pow(0x9E3779B97F4A7C15, -1, 1 << 64)
    keys = ((number << 44) * inverse % (1 << 64) ^ lower for number in range(1, 1 << 20))
    return list(islice((key << 3 for key in keys if key < 1 << 59), count))
