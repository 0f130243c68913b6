"""Repeats the VTC paper's experiments: each figure beside the published one, with a verdict.

Every row is the production core's, configured like the paper's server. The memory test uses the
peak of the joint future (`ledger: peak`). No request overtakes a head that waits for memory
(`dispatch: strict`). No part of the memory is spared, no round is limited, and the scheduler
considers new work every ten decode steps.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal

from schedsvc.config import Config
from schedsvc_lab.engine import Profile, load_profile
from schedsvc_lab.sim.metrics import accumulated
from schedsvc_lab.sim.paper import CLIENTS, WORKLOADS
from schedsvc_lab.sim.report import service_of, summarise
from schedsvc_lab.sim.scenario import Run, Scenario, simulate
from schedsvc_lab.sim.world import Settings

PROFILE = "a10g-llama2-7b"
SEEDS = 5
JITTER_NS = 50_000_000
ROUND_STEPS = 10
# 2 * wq * M (theorem 4.8 of the paper), with a price of 2 for output and 10,000 tokens of memory.
GAP_MAX = 40_000
THROUGHPUT_PART_MIN = 0.97
# Poisson arrivals make a mean of five seeds uncertain by 0.2 %, the whole margin to the bound.
PART_SEEDS = {"short-long": 5}
# At any time one flow is up to 8,000 ahead of the other: 2 % of each flow's service in 360 s, and
# less than 1 % in an hour.
WEIGHTED = "overload-1h"
SWEEP_PPM = (950_000, 1_050_000)

Keys = tuple[str, ...]
THROUGHPUT: Keys = ("throughput_tokens_per_s",)
DIFFERENCE_MAX: Keys = ("service_difference", "max")
DIFFERENCE_MEAN: Keys = ("service_difference", "mean")
GAP: Keys = ("cumulative_gap",)
FIRST_0: Keys = ("first_token_s", CLIENTS[0])
FIRST_1: Keys = ("first_token_s", CLIENTS[1])

_NAMES = {
    THROUGHPUT: "tokens/s",
    DIFFERENCE_MAX: "service difference, max",
    DIFFERENCE_MEAN: "service difference, mean",
    GAP: "accumulated gap",
    FIRST_0: f"first token of {CLIENTS[0]} (s)",
    FIRST_1: f"first token of {CLIENTS[1]} (s)",
}

# Workload, policy, figure, published or measured by the authors, tolerance in percent.
PUBLISHED: tuple[tuple[str, str, Keys, float, int], ...] = (
    ("overload", "fcfs", THROUGHPUT, 876, 5),
    ("overload", "fcfs", DIFFERENCE_MAX, 447, 5),
    ("overload", "fcfs", DIFFERENCE_MEAN, 439, 5),
    ("overload", "fcfs", GAP, 237_738, 5),
    ("overload", "fcfs", FIRST_0, 484.9, 10),
    ("overload", "fcfs", FIRST_1, 485.0, 10),
    ("short-long", "fcfs", THROUGHPUT, 1_475, 5),
    ("on-off-less", "fcfs", THROUGHPUT, 875, 5),
    ("on-off-less", "fcfs", FIRST_0, 85.3, 10),
    ("on-off-less", "fcfs", FIRST_1, 93.2, 10),
    ("on-off-overload", "fcfs", THROUGHPUT, 876, 5),
    ("increase", "fcfs", THROUGHPUT, 743, 5),
    ("overload-360s", "vtc", THROUGHPUT, 893, 5),
    ("overload-360s", "vtc", FIRST_0, 124.5, 10),
    ("overload-360s", "vtc", FIRST_1, 353.4, 10),
    ("short-long", "vtc", THROUGHPUT, 1_445, 5),
    ("on-off-less", "vtc", FIRST_1, 102.4, 10),
)
# Published figures that a change of the step cost by 5 % has to reach on both sides.
SWEEPS: tuple[tuple[str, str, Keys, float], ...] = (
    ("increase", "fcfs", FIRST_0, 7.2),
    ("increase", "fcfs", FIRST_1, 11.7),
)
# Published figures of single picks: small changes of timing alter them, so they are not held.
SHOWN: tuple[tuple[str, str, Keys, float], ...] = (
    ("overload-360s", "vtc", DIFFERENCE_MAX, 193),
    ("overload-360s", "vtc", DIFFERENCE_MEAN, 104),
    ("short-long", "vtc", DIFFERENCE_MAX, 133),
    ("short-long", "vtc", DIFFERENCE_MEAN, 34),
    ("short-long", "vtc", GAP, 5_235),
    ("on-off-less", "vtc", FIRST_0, 3.5),
    ("increase", "vtc", FIRST_0, 0.3),
    ("increase", "vtc", FIRST_1, 14.6),
)
BACKLOGGED = ("overload-360s", "short-long")
VTC_WORKLOADS = ("overload-360s", "short-long", "on-off-less", "on-off-overload", "increase")

Verdict = Literal["holds", "misses", "shown"]


@dataclass(frozen=True, slots=True)
class Row:
    """Holds one figure: what came out, what was published (or None), the rule, the verdict."""

    workload: str
    policy: str
    figure: str
    value: float
    published: float | None
    rule: str
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Variant:
    """Describes a policy of the suite: the core's, and how its configuration differs."""

    policy: str
    weights: tuple[int, int] = (1, 1)
    oracle_error_ppm: int = 0
    requests_per_minute: int = 0  # limit of each client, the excess refused; 0: without end


VARIANTS: dict[str, Variant] = {
    "fcfs": Variant("fcfs"),
    "vtc": Variant("vtc"),
    "vtc, weights 1:2": Variant("vtc", weights=(1, 2)),
    "oracle": Variant("vtc-oracle"),
    "oracle +-50 %": Variant("vtc-oracle", oracle_error_ppm=500_000),
    "prediction": Variant("vtc-predict"),
    "lcf": Variant("lcf"),
    "rpm 30": Variant("fcfs", requests_per_minute=30),
    "rpm 120": Variant("fcfs", requests_per_minute=120),
}

# Means over the seeds that may not fall from one policy to the next.
ORDERS: tuple[tuple[str, Keys, tuple[str, ...]], ...] = (
    ("overload-360s", GAP, ("oracle", "oracle +-50 %", "vtc")),
    ("short-long", GAP, ("oracle", "oracle +-50 %", "vtc")),
    ("on-off-overload", GAP, ("oracle", "oracle +-50 %", "vtc")),
    ("overload-360s", GAP, ("prediction", "vtc")),
    ("short-long", GAP, ("prediction", "vtc")),
    # Without lift a client that was away stays owed, and the other waits for it.
    ("newcomer", DIFFERENCE_MAX, ("vtc", "lcf")),
    ("newcomer", FIRST_1, ("vtc", "lcf")),
    # A limit of requests a minute leaves the engine idle if it is low, and is unfair if it is high
    # (section 5.3 of the paper): a hundred a minute of both clients together fill the engine.
    ("overload-360s", THROUGHPUT, ("rpm 30", "vtc")),
    ("overload-360s", GAP, ("vtc", "rpm 120")),
)


def run_count(seeds: int) -> int:
    """How many runs the suite makes."""
    pairs = {(workload, policy) for workload, policy, *_ in (*PUBLISHED, *SHOWN, *SWEEPS)}
    pairs |= {(workload, policy) for workload in VTC_WORKLOADS for policy in ("vtc", "fcfs")}
    more = sum(2 * (PART_SEEDS[name] - 1) for name in VTC_WORKLOADS if name in PART_SEEDS)
    pairs |= {(workload, policy) for workload, _, policies in ORDERS for policy in policies}
    sweeps = {(workload, policy) for workload, policy, *_ in SWEEPS}
    return seeds * (len(pairs) + 1 + more) + len(SWEEP_PPM) * len(sweeps)


class VtcPaper:
    """Makes the rows of the suite; each run is made once. Some 35 s of CPU for five seeds."""

    def __init__(self, seeds: int = SEEDS, watch: Callable[[int], None] | None = None) -> None:
        """Run nothing yet; `watch` hears after each run how many have ended."""
        self._seeds = seeds
        self._watch = watch
        self._runs = 0
        self._entry = lru_cache(maxsize=None)(self._simulate_entry)

    def rows(self) -> Iterator[Row]:
        """Yield every row, in the order of the published table."""
        for workload, policy, keys, published, percent in PUBLISHED:
            value = _mean(self._figures(workload, policy, keys))
            holds = abs(value - published) <= published * percent / 100
            rule = f"within {percent} %"
            yield _row(workload, policy, _name(keys), value, published, rule, holds)
        yield from self._sweeps()
        yield from self._bounds()
        yield from self._orders()
        yield self._weighted()
        for workload, policy, keys, published in SHOWN:
            value = _mean(self._figures(workload, policy, keys))
            yield Row(workload, policy, _name(keys), value, published, "", "shown")

    def _sweeps(self) -> Iterator[Row]:
        for workload, policy, keys, published in SWEEPS:
            value = _mean(self._figures(workload, policy, keys))
            low, high = (_figure(self._entry(workload, policy, 0, ppm), keys) for ppm in SWEEP_PPM)
            rule = f"step cost +-5 %: {low:,.1f} to {high:,.1f}"
            holds = low <= published <= high
            yield _row(workload, policy, _name(keys), value, published, rule, holds)

    def _bounds(self) -> Iterator[Row]:
        """Yield bounds of VTC beside FCFS; but for throughput each for the worst of the seeds."""
        for workload in VTC_WORKLOADS:
            seeds = self._seeds * PART_SEEDS.get(workload, 1)
            part = _mean(self._ratios(workload, THROUGHPUT, seeds))
            rule = f">= {THROUGHPUT_PART_MIN}, mean"
            holds = part >= THROUGHPUT_PART_MIN
            yield _row(workload, "vtc", "tokens/s, part of fcfs", part, None, rule, holds)
            if workload in BACKLOGGED:
                gap = max(self._figures(workload, "vtc", GAP))
                rule, holds = f"<= {GAP_MAX:,}", gap <= GAP_MAX
                yield _row(workload, "vtc", _name(GAP), gap, None, rule, holds)
            # If one client stays below its share, it must not wait for the other.
            gaps = "overload" in workload or workload in BACKLOGGED
            keys, most = (GAP, 0.1) if gaps else (FIRST_0, 0.25)
            part = max(self._ratios(workload, keys))
            figure = f"{_name(keys)}, part of fcfs"
            yield _row(workload, "vtc", figure, part, None, f"<= {most}", part <= most)

    def _orders(self) -> Iterator[Row]:
        """Yield orders between policies, each policy beside the one that it may not undercut."""
        for workload, keys, policies in ORDERS:
            for policy, above in pairwise(policies):
                value = _mean(self._figures(workload, policy, keys))
                limit = _mean(self._figures(workload, above, keys))
                rule = f"<= {above}: {_text(limit)}"
                yield _row(workload, policy, _name(keys), value, None, rule, value <= limit)

    def _weighted(self) -> Row:
        """Return weights 1 and 2, both backlogged: the service of each beside its weight."""
        worst = 2.0
        for seed in range(self._seeds):
            run = self._run(WEIGHTED, "vtc, weights 1:2", seed)
            light, heavy = accumulated(service_of(run), WORKLOADS[WEIGHTED].duration_s)[-1]
            worst = max(worst, heavy / light, key=lambda ratio: abs(ratio - 2.0))
        holds = abs(worst / 2.0 - 1.0) <= 0.01
        return _row(WEIGHTED, "vtc, weights 1:2", "service ratio", worst, 2.0, "within 1 %", holds)

    def _ratios(self, workload: str, keys: Keys, seeds: int = 0) -> list[float]:
        fair = self._figures(workload, "vtc", keys, seeds)
        plain = self._figures(workload, "fcfs", keys, seeds)
        return [a / b for a, b in zip(fair, plain, strict=True)]

    def _figures(self, workload: str, policy: str, keys: Keys, seeds: int = 0) -> list[float]:
        entries = (self._entry(workload, policy, seed) for seed in range(seeds or self._seeds))
        return [_figure(entry, keys) for entry in entries]

    def _simulate_entry(
        self, workload: str, policy: str, seed: int, cost_ppm: int = 1_000_000
    ) -> dict[str, Any]:
        run = self._run(workload, policy, seed, cost_ppm)
        return summarise(run, 1.0, WORKLOADS[workload].duration_s)

    def _run(self, workload: str, policy: str, seed: int, cost_ppm: int = 1_000_000) -> Run:
        variant = VARIANTS[policy]
        scenario = Scenario(
            profile=scaled(load_profile(PROFILE), cost_ppm),
            config=_config(variant),
            settings=Settings(round_steps=ROUND_STEPS),
            jitter_ns=JITTER_NS,
            oracle_error_ppm=variant.oracle_error_ppm,
        )
        run = simulate(scenario, WORKLOADS[workload].requests(seed), variant.policy, seed)
        self._runs += 1
        if self._watch is not None:
            self._watch(self._runs)
        return run


def scaled(profile: Profile, ppm: int) -> Profile:
    """Return the profile with every part of its step cost scaled."""
    cost = profile.cost

    def part(value: int) -> int:
        return value * ppm // 1_000_000

    return profile.model_copy(
        update={
            "cost": cost.model_copy(
                update={
                    "step_ns": part(cost.step_ns),
                    "prefill_ns": part(cost.prefill_ns),
                    "prefill_token_ns": part(cost.prefill_token_ns),
                    "decode_kv_token_ns": part(cost.decode_kv_token_ns),
                    "decode_ns": [[count, part(value)] for count, value in cost.decode_ns],
                }
            )
        }
    )


def _config(variant: Variant) -> Config:
    """Configure the core like that server: no part of the memory is spared.

    It refuses only requests that exceed a limit of requests a minute.
    """
    limit: dict[str, Any] = {}
    if variant.requests_per_minute:
        quota = {"requests_per_minute": variant.requests_per_minute, "over": "refuse"}
        limit = {"quota": quota}
    return Config.model_validate(
        {
            "listeners": [{"tcp": "127.0.0.1:0"}],
            "scheduler": {
                "queue_ttl_ms": 3_600_000,
                "flow_queue_max": 1_000_000,
                "queue_max": 1_000_000,
                "headroom": 0,
                "expert": {
                    "headroom_min": 0,
                    "headroom_max": 0,
                    "ledger": "peak",
                    "dispatch": "strict",
                },
                "each_pool": {"batch_max_tokens": 0, "max_running": 0},
            },
            "tenants": [
                {"name": name, "weight": weight, **limit}
                for name, weight in zip(CLIENTS, variant.weights, strict=True)
            ],
        }
    )


def _row(
    workload: str, policy: str, figure: str, value: float, published: float | None, rule: str,
    holds: bool,
) -> Row:  # fmt: skip
    verdict: Verdict = "holds" if holds else "misses"
    return Row(workload, policy, figure, value, published, rule, verdict)


def _figure(entry: dict[str, Any], keys: Keys) -> float:
    value: Any = entry
    for key in keys:
        value = value[key]
    return float(value)


def _text(value: float) -> str:
    return f"{value:,.0f}" if value >= 1_000 else f"{value:,.3g}"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _name(keys: Keys) -> str:
    return _NAMES[keys]
