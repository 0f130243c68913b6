"""Makes the VTC paper artifact's synthetic workloads (arXiv 2401.00588); holds its figures.

Two clients each; times in seconds, rates in requests per second. The figures were measured on an
A10G with Llama-2-7b and a KV cache of 10,000 tokens.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from schedsvc_lab.sim.requests import Requests

_NS = 1e9
CLIENTS = ("client-0", "client-1")
OFF_S = 60.0
"""A client that goes on and off is on for this time, then off for the same time."""

Arrivals = Callable[[Random, float], Iterator[float]]
"""Yields the times of one client's arrivals, up to a duration."""


def steady(rate: float, first_s: float, *, on_off: bool = False) -> Arrivals:
    """Ask every 1/rate seconds; with `on_off`, none in every second minute."""

    def arrivals(_draws: Random, duration_s: float) -> Iterator[float]:
        for number in range(1, round(duration_s * rate) + 1):
            if not (on_off and number / rate // OFF_S % 2):
                yield first_s + (number - 1) / rate

    return arrivals


def late(rate: float, from_s: float) -> Arrivals:
    """Ask every 1/rate seconds from some time on."""

    def arrivals(_draws: Random, duration_s: float) -> Iterator[float]:
        for number in range(round((duration_s - from_s) * rate)):
            yield from_s + number / rate

    return arrivals


def poisson(rate: float) -> Arrivals:
    """Draw exponential gaps."""

    def arrivals(draws: Random, duration_s: float) -> Iterator[float]:
        at_s = draws.expovariate(rate)
        while at_s < duration_s:
            yield at_s
            at_s += draws.expovariate(rate)

    return arrivals


def rising(from_rate: float, to_rate: float) -> Arrivals:
    """Ask at a rate that rises in a straight line over the duration."""

    def arrivals(_draws: Random, duration_s: float) -> Iterator[float]:
        at_s = 1 / from_rate
        while at_s <= duration_s + 1:
            yield at_s
            at_s += 1 / (from_rate + (to_rate - from_rate) * at_s / duration_s)

    return arrivals


@dataclass(frozen=True, slots=True)
class PaperWorkload:
    """Describes two clients: when each asks, and for how many tokens of input and of output."""

    name: str
    arrivals: tuple[Arrivals, Arrivals]
    tokens: tuple[int, int] = (256, 256)
    duration_s: float = 600.0

    def requests(self, seed: int) -> Requests:
        """Draw the workload; only the Poisson one depends on the seed. O(n log n)."""
        draws = Random(seed)  # noqa: S311 - a simulation, no secret
        rows = [
            (round(at_s * _NS), client, self.tokens[client], self.tokens[client])
            for client, arrivals in enumerate(self.arrivals)
            for at_s in arrivals(draws, self.duration_s)
        ]
        return Requests(CLIENTS, sorted(rows))


_OVERLOAD = (steady(1.5, 0.9164), steady(3.0, 0.6502))

WORKLOADS = {
    workload.name: workload
    for workload in (
        PaperWorkload("overload", _OVERLOAD),
        PaperWorkload("overload-360s", _OVERLOAD, duration_s=360.0),
        PaperWorkload("overload-1h", _OVERLOAD, duration_s=3_600.0),
        PaperWorkload("short-long", (poisson(8.0), poisson(1.5)), tokens=(64, 256)),
        PaperWorkload("on-off-less", (steady(0.5, 2.7491, on_off=True), steady(2.0, 0.9754))),
        PaperWorkload("on-off-overload", (steady(2.0, 0.6873, on_off=True), steady(3.0, 0.6502))),
        # This one was not measured: one client is away for half of the time.
        PaperWorkload("newcomer", (late(3.0, 300.0), steady(3.0, 0.6502))),
        PaperWorkload("increase", (steady(0.5, 2.0), rising(0.2, 2.0))),
    )
}
