"""Floods: requests of tenants that wait all the time, and the service that these get."""

from collections.abc import Iterable

from .audited import SECOND, Audited

__all__ = ["PACES", "Row", "Size", "flood", "need_queue", "service"]

Size = tuple[int, int]
Row = tuple[int, int, int, int]
#: More service than an engine's in a second. A queue takes 800,000 requests of one tenant.
PACES = {"a10g-llama2-7b": 3_000, "tiny-cpu": 20_000, "cpu-tiny-llama": 40_000}


def flood(profile: str, tenant: int, size: Size, seconds: float, from_s: int = 0) -> list[Row]:
    """Make requests of one tenant that wait all the time, even if it is served alone."""
    count = round(PACES[profile] * seconds / (size[0] + 2 * size[1]))
    return [(from_s * SECOND, tenant, *size)] * count


def need_queue(run: Audited, tenants: Iterable[int]) -> None:
    """Raise RuntimeError if a flood's queue is empty."""
    waiting = {
        who
        for who, at_ns in zip(run.requests.client, run.outcomes.decided_ns, strict=True)
        if at_ns < 0
    }
    if missing := set(tenants) - waiting:
        raise RuntimeError(f"nothing of the tenants {missing} waits any more; PACES is too low")


def service(run: Audited, tenant: int, from_s: float, to_s: float) -> float:
    """Sum up the service of a tenant in some seconds, twice the output and the input."""
    served, out = 0.0, run.outcomes
    for at, its in enumerate(run.requests.client):
        first_s = out.first_ns[at] / SECOND
        if its != tenant or first_s < 0:
            continue
        # A request that still runs has made at least the output that the time allows.
        end_s = out.end_ns[at] / SECOND if out.end_ns[at] >= 0 else run.now_ns / SECOND
        inside = max(0.0, min(end_s, to_s) - max(first_s, from_s))
        served += run.requests.prompt_tokens[at] * (from_s <= first_s < to_s)
        served += 2 * run.requests.output_tokens[at] * inside / max(1e-9, end_s - first_s)
    return served
