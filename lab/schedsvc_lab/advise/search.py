"""Searches for a draft: one lever at a time, the best value of each kept.

It begins with today's settings. Each lever has a short list of values; all of them are simulated on
the trace, and one is kept if it is better than the best so far. The levers follow one another until
a pass over all of them finds nothing better, or the budget of simulations is spent. If today's
settings meet every goal by a wide margin, nothing is changed. Nothing is drawn at random, so the
same arguments give the same draft.

A draft is better if it misses its goals by less. Drafts that miss nothing are compared with the
same requests in two thirds of the time. Then the draft with the larger margin of its worst
goal is better (down to 0.7 of the bound), then the one with fewer refusals, then the one with
sooner first tokens. A goal has to hold in the whole trace and in each half of it, so one good
moment is not enough. At the end the search restores each kind of setting that differs from today's,
and keeps it so if only first tokens become later.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from schedsvc.config import Config
from schedsvc_lab.advise.draft import WEIGHT_MILLI_MAX, Draft, apply, draft_of
from schedsvc_lab.advise.goals import Goal, Subject
from schedsvc_lab.advise.measure import FLOOR, Judged, Table, goal_figures
from schedsvc_lab.sim.requests import Requests
from schedsvc_lab.sim.scenario import Run

__all__ = ["STRESS", "Found", "Load", "Trial", "budget_of", "judge_run", "load_of", "search"]

#: Under stress, this many times the requests come in the same time.
STRESS = 1.5
#: Requests that a search simulates, and the bounds of its number of simulations.
REQUESTS_SIMULATED = 400_000
TRIALS_MIN, TRIALS_MAX = 12, 100
#: The whole trace and its halves.
_PARTS = ((0.0, 1.0), (0.0, 0.5), (0.5, 1.0))
_RAISES = (4, 16, 64, 256)
# Half: a request that has waited for all of its goal has no time left for its input.
_TTL_TIMES = (0.5, 1, 2, 4)
_HEADROOMS_PPM = (100_000, 200_000, 0)
_CAPS = (1.0, 0.6, 0.3)
_PROMISES = (1.0, 2.0)
_TOKENS_LEAST = 2

#: The part that is left of the prices of tokens, in millionths, and the price of the KV cache.
_CACHE_PRICES = ((1_000_000, 1_000), (1_000_000, 10_000), (100_000, 10_000), (1_000, 10_000))

#: Kinds of settings, in the order in which the search tries to restore them.
_KINDS = ("headroom_ppm", "shares", "quotas", "queue_ttl_ms", "weights_milli")

#: Simulates drafts; None for one that the rules forbid.
Evaluate = Callable[[Sequence[Draft]], Sequence["Trial | None"]]


class Trial(NamedTuple):
    """Holds a simulated draft: each goal in the whole trace, and in its worst part."""

    draft: Draft
    goals: tuple[Judged, ...]
    badness: tuple[float, ...]
    refused: float
    first_mean_s: float
    stress: tuple[Judged, ...] = ()

    @property
    def key(self) -> tuple[float, float, float, float, float]:
        """Order trials: the least is the best. One without a run under stress has missed a goal."""
        stressed = _missing([judged.badness for judged in self.stress])
        worst = max([FLOOR, *self.badness])
        return (
            _missing(self.badness),
            stressed,
            round(worst, 2),
            round(self.refused, 3),
            self.first_mean_s,
        )

    @property
    def needs_stress(self) -> bool:
        """Return whether every goal is met in every part, so drafts differ only under more load."""
        return _missing(self.badness) == 0.0

    @property
    def simulations(self) -> int:
        """Return the number of runs that this took."""
        return 2 if self.stress else 1

    @property
    def is_met(self) -> bool:
        """Return whether every goal is met over the whole trace."""
        return all(judged.badness <= 1.0 for judged in self.goals)


class Found(NamedTuple):
    """Holds a search's result: today's settings, the best, and the number of simulations."""

    today: Trial
    best: Trial
    trials: int


@dataclass(frozen=True, slots=True)
class Load:
    """Holds the trace as the search sees it: tenants of the goals, and tokens per minute of each.

    `favoured` are places of tenants, and `served` the tokens per minute that today's engines serve.
    """

    favoured: tuple[int, ...]
    goals: tuple[Goal, ...]
    subjects: tuple[Subject, ...]
    demand: tuple[float, ...]
    request_cost: tuple[float, ...]
    tenants: tuple[str, ...]
    tenant_class: tuple[str, ...]
    served: float


def budget_of(requests: int) -> int:
    """Return the number of simulations for a trace; a lever that was begun is finished."""
    return min(max(REQUESTS_SIMULATED // max(requests, 1), TRIALS_MIN), TRIALS_MAX)


def judge_run(
    run: Run,
    draft: Draft,
    tenant_class: Sequence[str],
    goals: Sequence[Goal],
    subjects: Sequence[Subject],
) -> Trial:
    """Hold a run to the goals, as a whole and in parts. O(n log n)."""
    table = Table.of(run, tenant_class)
    parts = [goal_figures(table.part(*part), goals, subjects) for part in _PARTS]
    worst = [max(judged.badness for judged in each) for each in zip(*parts, strict=True)]
    first = table.first_s[~table.refused]
    return Trial(
        draft,
        tuple(parts[0]),
        tuple(worst),
        float(table.refused.mean()) if len(table.refused) else 0.0,
        float(first.mean()) if len(first) else 0.0,
    )


def load_of(
    config: Config,
    requests: Requests,
    table: Table,
    goals: Sequence[Goal],
    subjects: Sequence[Subject],
    minutes: float,
) -> Load:
    """Sum up the trace for the levers; `table` is today's run. O(requests)."""
    names = tuple(tenant.name for tenant in config.tenants)
    place = {name: at for at, name in enumerate(names)}
    # Clients that nothing lists have a place behind all tenants, which is left out.
    places = np.array([place.get(client, len(names)) for client in requests.clients])
    tokens = np.array(requests.prompt_tokens) + np.array(requests.output_tokens)
    owner = places[np.array(requests.client)]
    sums = np.bincount(owner, tokens, len(names) + 1)[:-1]
    counts = np.bincount(owner, minlength=len(names) + 1)[:-1]
    favoured: set[int] = set()
    for subject in subjects:
        if subject[0] != "all":
            mine = np.unique(table.client[table.mask(subject)])
            favoured.update(int(each) for each in places[mine] if each < len(names))
    served = float((table.service * ~table.refused).sum())
    whole = float(table.service.sum())
    return Load(
        favoured=tuple(sorted(favoured)),
        goals=tuple(goals),
        subjects=tuple(subjects),
        demand=tuple((sums / minutes).tolist()),
        request_cost=tuple((sums / np.maximum(counts, 1)).tolist()),
        tenants=names,
        tenant_class=tuple(tenant.request_class or "default" for tenant in config.tenants),
        served=float(sums.sum()) / minutes * (served / whole if whole else 1.0),
    )


def search(config: Config, load: Load, evaluate: Evaluate, budget: int) -> Found:
    """Search for a draft with at most `budget` simulations, today's settings included."""
    [today] = evaluate([draft_of(config)])
    if today is None:
        raise ValueError("the configuration of today breaks its own rules")
    best, seen, trials = today, {today.draft}, today.simulations
    kinds = (*_KINDS, "prices_micro") if _wants_throughput(load) else _KINDS
    budget -= len(kinds)
    while today.key[:3] > (0.0, 0.0, FLOOR):
        before = best
        for lever in _LEVERS:
            fresh = [d for d in dict.fromkeys(lever(load, best.draft)) if d not in seen]
            fresh = [d for d in fresh if apply(config, d) is not None]
            if trials >= budget:
                break
            seen.update(fresh)
            for trial in evaluate(fresh) if fresh else ():
                if trial is not None:
                    trials += trial.simulations
                    best = min(best, trial, key=lambda each: each.key)
        if best is before or trials >= budget:
            break
    for kind in kinds:
        kept = getattr(today.draft, kind)
        if getattr(best.draft, kind) == kept:
            continue
        [trial] = evaluate([replace(best.draft, **{kind: kept})])
        if trial is None:
            continue
        trials += trial.simulations
        if trial.key[:4] <= best.key[:4]:
            best = trial
    return Found(today, best, trials)


def _missing(badness: Sequence[float]) -> float:
    return round(sum(max(value - 1.0, 0.0) for value in badness), 3)


def _weights(load: Load, draft: Draft) -> Iterator[Draft]:
    """Raise the tenants of the goals; give goals of shares their exact weights."""
    shared = _shared(load, draft)
    if shared is not None:
        yield shared
    if load.favoured and len(load.favoured) < len(load.tenants):
        for factor in _RAISES:
            yield _raised(draft, load.favoured, factor)
    elif not load.favoured:
        # Goals of all requests: those of tenants with small requests cost the others little.
        mean = sum(load.request_cost) / max(sum(cost > 0 for cost in load.request_cost), 1)
        weights = [
            _milli(weight * mean / cost) if cost else weight
            for weight, cost in zip(draft.weights_milli, load.request_cost, strict=True)
        ]
        yield replace(draft, weights_milli=tuple(weights))


def _shared(load: Load, draft: Draft) -> Draft | None:
    """Weigh tenants so that the goals of shares come out if all tenants always wait."""
    wanted = {
        load.tenants.index(subject[1]): goal.limit
        for goal, subject in zip(load.goals, load.subjects, strict=True)
        if goal.kind == "share" and subject[0] == "tenant" and subject[1] in load.tenants
    }
    rest = 1.0 - sum(wanted.values())
    others = sum(w for at, w in enumerate(draft.weights_milli) if at not in wanted)
    if not wanted or rest <= 0 or not others:
        return None
    weights = list(draft.weights_milli)
    for at, part in wanted.items():
        # A fifth more, because tenants do not always wait.
        weights[at] = _milli(1.2 * part / rest * others)
    return replace(draft, weights_milli=tuple(weights))


def _wants_throughput(load: Load) -> bool:
    return any(goal.kind == "throughput" for goal in load.goals)


def _prices(load: Load, draft: Draft) -> Iterator[Draft]:
    """Let the KV cache be a part of the charge, up to nearly all of it."""
    for left_ppm, kv in _CACHE_PRICES if _wants_throughput(load) else ():
        of_input, of_output = (
            max(price * left_ppm // 1_000_000, min(price, 1)) for price in draft.prices_micro[:2]
        )
        yield replace(draft, prices_micro=(of_input, of_output, kv))


def _one_by_one(load: Load, draft: Draft) -> Iterator[Draft]:
    """Move the weight of one goal's tenants against the weights of the others."""
    for subject in load.subjects:
        if subject[0] == "tenant" and subject[1] in load.tenants:
            at = load.tenants.index(subject[1])
            for factor in (4, 0.25):
                yield _raised(draft, (at,), factor)


def _queue_ttl(load: Load, draft: Draft) -> Iterator[Draft]:
    """Let requests wait as long as a goal allows, half of that, or a multiple of it."""
    limits = sorted({goal.limit for goal in load.goals if goal.is_time}, reverse=True)
    for limit in limits:
        for times in _TTL_TIMES:
            ttl_ms = min(max(round(limit * times * 1_000), 100), 3_600_000)
            yield replace(draft, queue_ttl_ms=ttl_ms)


def _headroom(load: Load, draft: Draft) -> Iterator[Draft]:
    """Keep more of the cache free for tenants below their share, or none."""
    for headroom_ppm in _HEADROOMS_PPM:
        yield replace(draft, headroom_ppm=headroom_ppm)


def _quotas(load: Load, draft: Draft) -> Iterator[Draft]:
    """Bound the tenants that no goal is about; for goals of all requests, the busiest ones."""
    others = [at for at in range(len(load.tenants)) if at not in load.favoured and load.demand[at]]
    if not others or not load.served:
        return
    for cap in _CAPS:
        limit = max(round(cap * load.served / len(others)), _TOKENS_LEAST)
        quotas = list(draft.quotas)
        for at in others:
            quotas[at] = limit if load.demand[at] > limit else draft.quotas[at]
        yield replace(draft, quotas=tuple(quotas))
    yield replace(draft, quotas=(0,) * len(load.tenants))


def _shares(load: Load, draft: Draft) -> Iterator[Draft]:
    """Guarantee the tenants of the goals the tokens that they ask for, or twice these."""
    for promise in _PROMISES:
        shares = list(draft.shares)
        for at in load.favoured:
            shares[at] = max(round(promise * load.demand[at]), _TOKENS_LEAST)
        yield replace(draft, shares=tuple(shares))


_LEVERS = (_prices, _weights, _queue_ttl, _quotas, _headroom, _shares, _one_by_one)


def _raised(draft: Draft, places: Sequence[int], factor: float) -> Draft:
    weights = list(draft.weights_milli)
    for at in places:
        weights[at] = _milli(weights[at] * factor)
    return replace(draft, weights_milli=tuple(weights))


def _milli(weight: float) -> int:
    return min(max(round(weight), 1), WEIGHT_MILLI_MAX)
