"""Holds a simulated run to goals: each goal's figure, and how far it is from its bound.

A request that is refused counts as one that waits for ever. So no configuration meets a goal by
refusing the requests that the goal is about. Two kinds of requests are left out, which no draft
changes: those that no engine can hold, and those whose tenant is refused as unknown.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedsvc._core import GRANTED, REJECTED_TOO_LARGE, REJECTED_UNKNOWN_TENANT
from schedsvc_lab.advise.goals import Goal, Subject
from schedsvc_lab.sim.details import Floats, waits_s
from schedsvc_lab.sim.requests import NEVER
from schedsvc_lab.sim.scenario import Run

__all__ = ["Judged", "Table", "goal_figures", "judge", "tenant_rows"]

Mask = NDArray[np.bool_]

#: A goal's badness is never below this: that much below its bound, less is no gain.
FLOOR = 0.7
_WORST = 1e6


class Judged(NamedTuple):
    """Judges one goal in one run: the figure (s, or a part of 1), and `badness`: at most 1 if met.

    Within the bound the badness is the figure's part of the bound. Beyond it, it grows with the
    part of the requests that miss the bound, which is finite where a percentile is not.
    """

    figure: float
    badness: float


@dataclass(frozen=True, slots=True)
class Table:
    """Holds the requests of a run in columns: waits in s (inf: refused), and who sent what.

    `span_s` is the time from the first arrival to the last end, or a part's part of it.
    """

    client: NDArray[np.int64]
    first_s: Floats
    wait_s: Floats
    refused: Mask
    service: Floats
    classes: NDArray[np.str_]
    clients: tuple[str, ...]
    span_s: float

    @classmethod
    def of(cls, run: Run, tenant_class: Sequence[str]) -> "Table":
        """Take a run's columns; `tenant_class`: the class of each client's requests by default."""
        requests = run.requests
        outcome = np.array(run.outcomes.outcome)
        kept = (outcome != REJECTED_TOO_LARGE) & (outcome != REJECTED_UNKNOWN_TENANT)
        first, wait = (np.nan_to_num(values, nan=inf)[kept] for values in waits_s(run))
        client = np.array(requests.client, dtype=np.int64)[kept]
        refused = outcome[kept] != GRANTED
        tokens = np.array(requests.prompt_tokens) + 2.0 * np.array(requests.output_tokens)
        named = np.array(tenant_class)[client]
        if requests.classes is not None:
            own = np.array([requests.classes[place] for place in requests.place])[kept]
            named = np.where(own == "", named, own)
        ends_ns = np.array(run.outcomes.end_ns)
        ends_ns = ends_ns[ends_ns != NEVER]
        span_s = float(ends_ns.max() - min(requests.arrival_ns)) / 1e9 if len(ends_ns) else 0.0
        return cls(client, first, wait, refused, tokens[kept], named, requests.clients, span_s)

    def part(self, begin: float, end: float) -> "Table":
        """Take the requests between two parts of all, in order of arrival. O(requests)."""
        low, high = round(begin * len(self.client)), round(end * len(self.client))
        return Table(
            self.client[low:high],
            self.first_s[low:high],
            self.wait_s[low:high],
            self.refused[low:high],
            self.service[low:high],
            self.classes[low:high],
            self.clients,
            self.span_s * (end - begin),
        )

    def rate(self, mine: Mask) -> float:
        """Return the service of some requests in a second, in tokens. O(requests)."""
        served = float((self.service * ~self.refused)[mine].sum())
        return served / self.span_s if self.span_s else 0.0

    def mask(self, subject: Subject) -> Mask:
        """Mark the requests that a subject stands for. O(requests)."""
        kind, name = subject
        if kind == "all":
            return np.ones(len(self.client), dtype=bool)
        found: Mask = self.classes == name
        return found if kind == "class" else self.client == self.clients.index(name)


def judge(table: Table, goal: Goal, subject: Subject) -> Judged:
    """Hold the requests of a table to a goal; without a request of the subject it is met.

    O(n log n).
    """
    mine = table.mask(subject)
    count = int(mine.sum())
    if not count:
        return Judged(0.0, 0.0)
    if goal.kind == "share":
        served = table.service * ~table.refused
        total = served.sum()
        figure = float(served[mine].sum() / total) if total else 0.0
        return Judged(figure, min(goal.limit / figure, _WORST) if figure else _WORST)
    if goal.kind == "throughput":
        figure = table.rate(mine)
        return Judged(figure, min(goal.limit / figure, _WORST) if figure else _WORST)
    if goal.kind == "refusals":
        figure = float(table.refused[mine].mean())
        if not goal.limit:
            return Judged(figure, 1.0 + figure * 1e3 if figure else 0.0)
        return Judged(figure, figure / goal.limit)
    values = (table.first_s if goal.kind == "first token" else table.wait_s)[mine]
    allowed = 1 - goal.percent / 100
    figure = float(np.partition(values, at := ceil(count * goal.percent / 100) - 1)[at])
    if figure <= goal.limit:
        return Judged(figure, figure / goal.limit)
    missed = float((values > goal.limit).mean())
    return Judged(figure, 1.0 + missed / allowed)


def goal_figures(table: Table, goals: Sequence[Goal], subjects: Sequence[Subject]) -> list[Judged]:
    """Hold a table to all goals."""
    return [judge(table, goal, subject) for goal, subject in zip(goals, subjects, strict=True)]


def tenant_rows(table: Table) -> dict[str, dict[str, float | None]]:
    """Sum up each client: requests, refused part, share and rate of service, and waits.

    Percentiles are of the requests that were served; None: none was. O(n log n).
    """
    rows: dict[str, dict[str, float | None]] = {}
    total = float((table.service * ~table.refused).sum())
    for at, name in enumerate(table.clients):
        mine = table.client == at
        count = int(mine.sum())
        served = mine & ~table.refused
        row: dict[str, float | None] = {
            "requests": float(count),
            "refused": float(table.refused[mine].mean()) if count else 0.0,
            "share": float(table.service[served].sum()) / total if total else 0.0,
            "tokens_s": table.rate(mine),
        }
        for key, values in (("first_token", table.first_s), ("wait", table.wait_s)):
            for percent in (50, 99):
                some = values[served]
                value = float(np.percentile(some, percent)) if len(some) else None
                row[f"{key}_p{percent}_s"] = value
        rows[name] = row
    return rows
