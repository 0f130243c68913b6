"""Replays a trace through the production predictor: the core itself, in virtual time."""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedsvc._core import COMPLETED, GRANTED, InvariantError, Scheduler
from schedsvc_lab.workload import TraceRequest

__all__ = ["Columns", "Played", "columns", "play"]

_NS_PER_S = 1_000_000_000
_FAR = 1 << 59
_LARGE = 1 << 24
#: Requests between two calls of `watch`.
_WATCH_EVERY = 500


@dataclass(frozen=True)
class Columns:
    """Holds the requests of a trace in order of arrival: all arrays have one entry for each.

    `tenant` and `adapter` are indices into the names; adapter -1 is none.
    """

    arrival_ns: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    tenant: NDArray[np.int64]
    adapter: NDArray[np.int64]
    tenants: tuple[str, ...]
    adapters: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.arrival_ns)


def columns(trace: Iterable[TraceRequest]) -> Columns:
    """Take over a trace. An adapter is known only if the requests keep their records."""
    tenants: dict[str, int] = {}
    adapters: dict[str, int] = {}
    rows = []
    for request in trace:
        name = request.record.adapter if request.record is not None else None
        rows.append(
            (
                round(request.arrival_s * _NS_PER_S),
                request.output_tokens,
                tenants.setdefault(request.tenant, len(tenants)),
                -1 if name is None else adapters.setdefault(name, len(adapters)),
            )
        )
    arrival, output, tenant, adapter = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    return Columns(arrival, output, tenant, adapter, tuple(tenants), tuple(adapters))


@dataclass(frozen=True)
class Played:
    """Holds the result of a replay, one entry for each request.

    `promised` is the output reserved at the grant, in tokens; it was `predicted` if it is less than
    the most that the request might produce. `totals` is the core's own count.
    """

    promised: NDArray[np.int64]
    predicted: NDArray[np.bool_]
    output_tokens_max: int
    totals: dict[str, Any]


def play(
    requests: Columns,
    *,
    quantile_ppm: int,
    tokens_per_s: float = 30.0,
    samples_min: int = 10,
    output_tokens_max: int,
    one_flow: bool = False,
    watch: Callable[[int], None] | None = None,
) -> Played:
    """Grant every request when it arrives, and report its output to the core when it has ended.

    A request produces `tokens_per_s` from its arrival on, and its only report is its end. With
    `one_flow` all tenants and adapters are predicted as one. O(n log n).
    """
    core = _core(requests, quantile_ppm, samples_min, one_flow=one_flow)
    promised = np.zeros(len(requests), dtype=np.int64)
    running: list[tuple[int, int, int]] = []  # end, request, lease
    names = [name.encode() for name in requests.adapters]
    outputs = requests.output_tokens.tolist()
    tenants = [0] * len(requests) if one_flow else requests.tenant.tolist()
    adapters = [-1] * len(requests) if one_flow else requests.adapter.tolist()
    for at, now_ns in enumerate(requests.arrival_ns.tolist()):
        _end(core, running, outputs, now_ns)
        core.admit(
            now_ns,
            tenants[at],
            at.to_bytes(8, "little"),
            1,
            output_tokens_max,
            reports_progress=True,
            adapter=names[adapters[at]] if adapters[at] >= 0 else b"",
        )
        (decision,) = core.poll(now_ns)
        if decision.outcome != GRANTED:
            raise InvariantError(f"request {at + 1} was not granted: outcome {decision.outcome}")
        promised[at] = decision.reserved_tokens - 1
        end_ns = now_ns + round(outputs[at] / tokens_per_s * _NS_PER_S)
        heapq.heappush(running, (end_ns, at, decision.lease_id))
        if watch is not None and at % _WATCH_EVERY == 0:
            watch(at)
    last_ns = max((end_ns for end_ns, _, _ in running), default=0)
    _end(core, running, outputs, last_ns)
    core.check()
    totals = core.stats(last_ns, 0)["totals"]
    return Played(promised, promised < output_tokens_max, output_tokens_max, totals)


def _core(requests: Columns, quantile_ppm: int, samples_min: int, *, one_flow: bool) -> Scheduler:
    """Make a core in which nothing ever waits, so that each promise is the predictor's."""
    core = Scheduler(
        quantile_ppm=quantile_ppm,
        samples_min=samples_min,
        answers_max=0,
        leases_max=_LARGE,
        adapters_max=65_536,
        queue_ttl_ns=_FAR,
        lease_ttl_ns=_FAR,
    )
    for tenant in range(1 if one_flow else len(requests.tenants)):
        core.set_flow(b"%d" % tenant, 1_000)
    core.set_pool(0, b"all", 1, 1 << 40, 1)
    return core


def _end(
    core: Scheduler, running: list[tuple[int, int, int]], outputs: list[int], now_ns: int
) -> None:
    """Complete the requests that have ended by now."""
    while running and running[0][0] <= now_ns:
        end_ns, at, lease_id = heapq.heappop(running)
        core.complete(end_ns, lease_id, 1, COMPLETED, 1, 0, outputs[at])
