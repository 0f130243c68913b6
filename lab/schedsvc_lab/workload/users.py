"""Writes a document on the users of a trace: who asks how often, in figures and in words."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from schedsvc_lab.workload.powerlaw import Counts, PowerLaw, ZipfFit, fit_counts, fit_ranks
from schedsvc_lab.workload.record import Record

KEYS = ("tenant", "conversation", "adapter", "model", "request_class")
USERS_MIN = 10
# Clauset, Shalizi, Newman 2009, section 4.1: below it the law is ruled out.
P_VALUE_MIN = 0.1
UNEQUAL_GINI = 0.4

REFERENCES = (
    "Y. Wang et al., BurstGPT: A Real-World Workload Dataset to Optimize LLM Serving Systems, "
    "arXiv 2401.17644, section 3.2 (users of LLM services)",
    "Y. Sheng et al., Fairness in Serving Large Language Models, OSDI 2024, arXiv 2401.00588 "
    "(clients of the LMSYS arena, and what unequal demand does to a queue)",
    "A. Clauset, C. Shalizi, M. Newman, Power-Law Distributions in Empirical Data, SIAM Review "
    "51(4), 2009 (estimators, choice of the least count, goodness of fit)",
    "B. Efron, R. Tibshirani, An Introduction to the Bootstrap, Chapman & Hall, 1993 (intervals)",
)


class TooFewUsersError(ValueError):
    """There are too few users to say anything about their distribution."""


@dataclass(frozen=True, slots=True)
class Users:
    """Holds the findings: totals, concentration, and the two fits.

    `counts` are requests per user, descending. `top` maps a percentage of users, the busiest
    first, to the percentage of all requests that are theirs.
    """

    by: str
    counts: Counts
    requests: int
    unnamed: int
    duration_s: float
    gini: float
    top: dict[int, float]
    power_law: PowerLaw
    zipf: ZipfFit

    def summary(self) -> dict[str, Any]:
        """Return everything but the counts as plain data for JSON."""
        return {
            "by": self.by,
            "users": len(self.counts),
            "requests": self.requests,
            "requests_without_user": self.unnamed,
            "duration_s": self.duration_s,
            "requests_per_user": {
                "mean": float(self.counts.mean()),
                "median": float(np.median(self.counts)),
                "max": int(self.counts.max()),
            },
            "gini": self.gini,
            "top_percent": self.top,
            "power_law": asdict(self.power_law),
            "zipf": asdict(self.zipf),
        }


def count(records: Iterable[Record], by: str) -> tuple[Counter[str], int, float]:
    """Count requests by user; returns also those without one, and the seconds from first to last.

    Memory grows with the number of users.
    """
    counts: Counter[str] = Counter()
    unnamed = 0
    times: list[float] = []
    for record in records:
        name = getattr(record, by)
        if name is None:
            unnamed += 1
        else:
            counts[name] += 1
        if record.arrival_s is not None:
            times = [times[0], record.arrival_s] if times else [record.arrival_s] * 2
    return counts, unnamed, times[1] - times[0] if times else 0.0


def study(
    counts: Mapping[str, int],
    unnamed: int,
    duration_s: float,
    *,
    by: str,
    rounds: int,
    seed: int,
    step: Callable[[], None] | None = None,
) -> Users:
    """Fit and test both laws. `step` is called 2 * `rounds` times. Raises TooFewUsersError."""
    if len(counts) < USERS_MIN:
        hint = (
            "; give the trace tenants with `schedsvc workload label`, or count by something else"
            if not counts
            else ""
        )
        raise TooFewUsersError(
            f"{len(counts)} different values of {by}, and at least {USERS_MIN} are needed{hint}"
        )
    values = np.array(sorted(counts.values(), reverse=True), dtype=np.int64)
    streams = np.random.default_rng(seed).spawn(2)
    return Users(
        by=by,
        counts=values,
        requests=int(values.sum()),
        unnamed=unnamed,
        duration_s=duration_s,
        gini=_gini(values),
        top={percent: _top(values, percent) for percent in (1, 10, 20, 50)},
        power_law=fit_counts(values, rounds, streams[0], step),
        zipf=fit_ranks(values, rounds, streams[1], step),
    )


def _gini(descending: Counts) -> float:
    """Return the Gini coefficient: 0 where all ask alike, towards 1 where one asks everything."""
    users = len(descending)
    ranks = np.arange(users, 0, -1)
    return float(2 * (ranks * descending).sum() / (users * descending.sum()) - (users + 1) / users)


def _top(descending: Counts, percent: int) -> float:
    first = max(1, round(len(descending) * percent / 100))
    return 100 * float(descending[:first].sum() / descending.sum())


def markdown(users: Users, title: str, picture: str) -> str:
    """Write the document: two paragraphs, the picture, the fits as a table, and references."""
    law, zipf = users.power_law, users.zipf
    rows = (
        ("users", f"{len(users.counts):,}"),
        ("requests", f"{users.requests:,}"),
        ("requests per user: mean, median, largest", _per_user(users)),
        ("Gini coefficient", f"{users.gini:.3f}"),
        ("Zipf exponent over ranks, 95 % interval", _fitted(zipf.exponent, zipf.low, zipf.high)),
        ("its KS distance, p-value", f"{zipf.distance:.3f}, {zipf.p_value:.3f}"),
        ("power law of counts, exponent, 95 % interval", _fitted(law.alpha, law.low, law.high)),
        ("from this count on, users in the tail", f"{law.least:,}, {law.users:,}"),
        ("its KS distance, p-value", f"{law.distance:.3f}, {law.p_value:.3f}"),
    )
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    references = "\n".join(f"{at}. {text}" for at, text in enumerate(REFERENCES, 1))
    return (
        f"# Users of {title}\n\n{_behaviour(users)}\n\n{_fit(users)}\n\n"
        f"![Requests by user]({picture})\n\n| | |\n| --- | --- |\n{table}\n\n"
        f"## References\n\n{references}\n"
    )


def _per_user(users: Users) -> str:
    counts = users.counts
    return f"{counts.mean():,.1f}, {np.median(counts):,.0f}, {counts.max():,}"


def _fitted(value: float, low: float, high: float) -> str:
    return f"{value:.3f} ({low:.3f} to {high:.3f})"


def _behaviour(users: Users) -> str:
    """Write who asks how much."""
    counts, top = users.counts, users.top
    lead = 100 * float(counts[0] / counts.sum())
    span = f" over {users.duration_s:,.0f} seconds" if users.duration_s else ""
    how = "very unequally" if users.gini >= UNEQUAL_GINI else "rather alike"
    text = (
        f"The trace holds {users.requests:,} requests of {len(counts):,} users{span} (a user is a "
        f"{users.by.replace('_', ' ')}). They ask {how}: the busiest sends {lead:.1f} % of all "
        f"requests, the busiest tenth {top[10]:.1f} %, "
        f"and the less active half {100 - top[50]:.1f} %; half of the users send "
        f"{np.median(counts):,.0f} requests or fewer, where the mean is {counts.mean():,.1f}. "
        f"The Gini coefficient is {users.gini:.2f}. "
    )
    if users.unnamed:
        text += f"A further {users.unnamed:,} requests name no user and are left out. "
    if users.gini >= UNEQUAL_GINI:
        text += "Heavy users beside many light ones are also what is known of other services [1]. "
    return text + (
        "In a queue in the order of arrival, the share of a busy server that a user gets is the "
        "share of the work it sends, so these shares are what a fair queue has to even out [2]."
    )


def _fit(users: Users) -> str:
    """Write what the fits say, and how far to trust them."""
    law, zipf = users.power_law, users.zipf
    zipf_holds, law_holds = zipf.p_value >= P_VALUE_MIN, law.p_value >= P_VALUE_MIN
    verdict = (
        "so over all ranks the data do not contradict the law"
        if zipf_holds
        else "so over all ranks the data differ from the law by more than chance, and the exponent "
        "is a summary of them rather than a model"
    )
    tail = (
        "which is plausible"
        if law_holds
        else "which is ruled out: the tail is not a power law, or is cut off"
    )
    few = (
        f" With {law.users:,} users in the tail the test has little power: it could hardly "
        "distinguish a power law from a lognormal."
        if law_holds and law.users < 100
        else ""
    )
    return (
        f"By rank, the i-th busiest user's share of the requests is fitted best by i^-"
        f"{zipf.exponent:.2f} (maximum likelihood; 95 % interval {zipf.low:.2f} to {zipf.high:.2f} "
        f"by bootstrap over requests [4]). The largest distance between the two cumulative "
        f"distributions is {zipf.distance:.3f}, and {100 * zipf.p_value:.1f} % of samples drawn "
        f"from the law itself are as far from their own fit, {verdict}. Counted by user, the "
        f"numbers of requests from {law.least:,} on, of {law.users:,} users, are fitted best by a "
        f"power law with exponent {law.alpha:.2f} (95 % interval {law.low:.2f} to {law.high:.2f} "
        f"by profile likelihood; estimator, least count and test as in [3]), {tail} "
        f"(p = {law.p_value:.2f}).{few} To draw tenants like these, use `schedsvc workload synth "
        f"--tenants {len(users.counts)} --zipf {zipf.exponent:.2f}`."
    )
