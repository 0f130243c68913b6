"""Reads goals in words, such as `production p99 first token <= 2 s`, and selects their requests.

A goal is SUBJECT MEASURE BOUND. SUBJECT is a tenant, a class, or `*` (all requests); if a tenant
and a class have one name, `tenant:NAME` or `class:NAME` says which. MEASURE and BOUND are one of:

- `pNN first token <= X s|ms`: the NNth percentile of the time to the first token;
- `pNN wait <= X s|ms`: the same for the time in the scheduler's queue;
- `refusals <= X %`: the part of the requests that get no grant;
- `share >= X %`: the part of all served service (input + 2 * output tokens);
- `throughput >= X tokens/s`: the service in a second, from the first arrival to the last end.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["EVERYONE", "Goal", "GoalError", "Subject", "parse_goal", "subject_of"]

EVERYONE = "*"
Kind = Literal["first token", "wait", "refusals", "share", "throughput"]
Subject = tuple[Literal["tenant", "class", "all"], str]

_FORMS = (
    "SUBJECT pNN first token <= X s, SUBJECT pNN wait <= X s, SUBJECT refusals <= X %,"
    " SUBJECT share >= X %, or SUBJECT throughput >= X tokens/s"
)
_GOAL = re.compile(r"(?P<left>.*?)\s*(?P<sign><=|>=|≤|≥|<|>|=)\s*(?P<right>[^<>=≤≥]*)", re.DOTALL)
_LEFT = re.compile(
    r"(?P<subject>.*\S)\s+(?:p(?P<percent>\d+(?:\.\d+)?)\s+(?P<time>first\s+token|wait)"
    r"|(?P<part>refusals|share|throughput))"
)
_RIGHT = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>\S*)")
_SECONDS = {"s": 1.0, "ms": 1e-3}
_NAMES_SHOWN = 20


class GoalError(ValueError):
    """A goal cannot be read, or its subject is unknown; the message quotes it."""


@dataclass(frozen=True, slots=True)
class Goal:
    """States one goal. `limit` is in seconds, tokens a second, or a part of 1.

    `percent` is that of a percentile.
    """

    text: str
    subject: str
    kind: Kind
    limit: float
    percent: float = 0.0

    @property
    def is_time(self) -> bool:
        """Return whether it bounds a percentile of a time."""
        return self.kind in ("first token", "wait")

    @property
    def measure(self) -> str:
        """Name what is measured, without the subject."""
        return f"p{self.percent:g} {self.kind}" if self.is_time else self.kind


def parse_goal(text: str) -> Goal:
    """Read a goal. Raises GoalError. O(length)."""
    whole = _GOAL.fullmatch(text.strip())
    if whole is None:
        raise GoalError(f"{text!r}: has no bound; write {_FORMS}")
    left = _LEFT.fullmatch(whole["left"])
    if left is None:
        raise GoalError(f"{text!r}: {whole['left']!r} is no subject with a measure; write {_FORMS}")
    right = _RIGHT.fullmatch(whole["right"].strip())
    if right is None:
        raise GoalError(f"{text!r}: {whole['right'].strip()!r} is no number with a unit")
    measure = left["part"] or "a time"
    wanted = "≥" if measure in ("share", "throughput") else "≤"
    if whole["sign"] not in (wanted, "<=" if wanted == "≤" else ">="):
        sign = "<=" if wanted == "≤" else ">="
        raise GoalError(f"{text!r}: {measure} takes {sign}, not {whole['sign']}")
    number, unit = float(right["number"]), right["unit"]
    if measure == "throughput":
        if unit != "tokens/s" or not number:
            raise GoalError(f"{text!r}: the bound of throughput has to be above 0, in tokens/s")
        return Goal(text, left["subject"], "throughput", number)
    if left["part"]:
        if unit != "%" or not 0 <= number <= 100 or (measure == "share" and not number):
            raise GoalError(f"{text!r}: the bound of {measure} has to be a percentage, as in 5 %")
        kind: Kind = "share" if measure == "share" else "refusals"
        return Goal(text, left["subject"], kind, number / 100)
    if unit not in _SECONDS or not 0 < number * _SECONDS[unit] <= 3_600:
        raise GoalError(f"{text!r}: the bound of a time has to be up to 3600 s, in s or ms")
    percent = float(left["percent"])
    if not 1 <= percent <= 99.9:
        raise GoalError(f"{text!r}: p{left['percent']} has to lie between p1 and p99.9")
    kind = "wait" if left["time"] == "wait" else "first token"
    return Goal(text, left["subject"], kind, number * _SECONDS[unit], percent)


def subject_of(
    goal: Goal, tenants: Sequence[str], classes: Sequence[str], refused: Sequence[str] = ()
) -> Subject:
    """Find what a goal is about. `refused`: tenants that the configuration refuses as unknown.

    Raises GoalError: unknown, refused, or two things have that name.
    """
    name = goal.subject.removeprefix("tenant:")
    if name in refused and goal.subject not in classes:
        raise GoalError(
            f"{goal.text!r}: the configuration refuses {name!r}, a tenant that it does not list; "
            "list it"
        )
    if goal.subject == EVERYONE:
        return "all", ""
    kind, colon, rest = goal.subject.partition(":")
    if colon and kind in ("tenant", "class") and rest in (tenants if kind == "tenant" else classes):
        return ("tenant", rest) if kind == "tenant" else ("class", rest)
    named = (goal.subject in tenants, goal.subject in classes)
    if all(named):
        both = f"tenant:{goal.subject} or class:{goal.subject}"
        raise GoalError(f"{goal.text!r}: a tenant and a class have this name; write {both}")
    if not any(named):
        raise GoalError(
            f"{goal.text!r}: {goal.subject!r} sends no request; tenants: {_some(tenants)};"
            f" classes: {_some(classes)}; * is all requests"
        )
    return ("tenant", goal.subject) if named[0] else ("class", goal.subject)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN:,} more" if len(names) > _NAMES_SHOWN else ""
    return (", ".join(names[:_NAMES_SHOWN]) or "none") + more
