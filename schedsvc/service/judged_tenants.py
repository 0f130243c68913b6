"""Judges what tenants asked for and got between two snapshots of Stats."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from schedsvc_client.v1 import quota_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1.judgement_pb2 import JUDGEMENT_LEVEL_NOTICE, JUDGEMENT_LEVEL_TROUBLE

__all__ = ["Finding", "Traffic", "is_away", "listed", "named", "rate_text", "seconds_text"]

#: Refusals because others are served: by the expected wait, after the wait, or by full queues.
_CAPACITY = frozenset(
    {
        pb.OUTCOME_REJECTED_FLOW_QUEUE_FULL,
        pb.OUTCOME_REJECTED_QUEUE_FULL,
        pb.OUTCOME_REJECTED_DEADLINE,
        pb.OUTCOME_REJECTED_LIMIT,
        pb.OUTCOME_EVICTED_TTL,
        pb.OUTCOME_EVICTED_DEADLINE,
    }
)
_TOO_LARGE = frozenset({pb.OUTCOME_REJECTED_TOO_LARGE, pb.OUTCOME_EVICTED_TOO_LARGE})
_DRAINED = frozenset({pb.OUTCOME_REJECTED_DRAINING, pb.OUTCOME_EVICTED_DRAINING})
#: Part of the service beyond its share from which on a tenant counts as above it, and below it.
_ABOVE, _BELOW = 1.1, 0.9
#: A tenant asks for more than its share in a way that is worth a word.
_ASKS_MORE = 1.5
#: A share that is so small, by a weight that is so small beside the largest, is a mistake.
_SMALL_SHARE, _SMALL_WEIGHT = 0.05, 0.05
#: A tenant whose oldest request has waited for longer is not well.
_WELL_MS = 5_000
#: A tenant within its share that has waited for more than this part of its longest wait is hurt:
#: after the whole of it, its request is refused.
_TOO_LONG_PART = 0.5
#: A pool of which nothing is left was taken away on purpose, if it has been away for this time.
_GONE_MS = 3_600_000
_NAME_CHARS, _NAMES_MAX = 40, 3


class Finding(NamedTuple):
    """States what is wrong, in one or two sentences, and how urgent it is."""

    level: int
    text: str


@dataclass
class Tenant:
    """Holds what happened to a tenant in one class between the snapshots."""

    name: str
    weight: float
    request_class: str = ""
    #: The class with the least rank runs first.
    rank: int = 0
    served: float = 0.0
    granted: int = 0
    received: int = 0
    refused: Mapping[int, int] = field(default_factory=dict)
    queued: int = 0
    oldest_ms: int = 0
    longest_wait_ms: int = 0
    first_ms: int = 0
    running: int = 0
    waits_for_quota: bool = False
    #: It waits for its share a minute, or for the cap of sessions.
    is_held: bool = False
    limits: Sequence[Any] = ()
    #: Part of the class's service that it got, and that its weight gives it; None: not known.
    share: float | None = None
    entitled: float | None = None
    #: Times its share that it asks for.
    asks: float = 0.0

    def count(self, outcomes: frozenset[int]) -> int:
        """Return how many requests were refused for one of these reasons."""
        return sum(count for outcome, count in self.refused.items() if outcome in outcomes)

    @property
    def by_quota(self) -> int:
        """Return refusals by a limit, those after a wait for one included."""
        count = self.count(frozenset({pb.OUTCOME_REJECTED_QUOTA}))
        return count + (self.count(_CAPACITY) if self.waits_for_quota else 0)

    @property
    def by_capacity(self) -> int:
        """Return refusals because the engines serve others."""
        return 0 if self.waits_for_quota else self.count(_CAPACITY)

    @property
    def is_above(self) -> bool:
        """Return whether it gets more than its share, so that it may be refused the rest."""
        if self.share is None or self.entitled is None:
            return False
        return self.share > _ABOVE * self.entitled

    @property
    def waits_too_long(self) -> bool:
        """Return whether it has waited too long for an engine, at or below its share."""
        by_limit = self.waits_for_quota or self.is_held
        too_long_ms = max(_WELL_MS, _TOO_LONG_PART * self.longest_wait_ms)
        return self.oldest_ms > too_long_ms and not by_limit and not self.is_above

    @property
    def is_well(self) -> bool:
        """Return whether it asked, and was served without harm."""
        refused = self.count(frozenset(self.refused) - {pb.OUTCOME_EVICTED_CANCELLED})
        return bool(self.granted) and not (refused or self.oldest_ms > _WELL_MS)


class Traffic:
    """Compares the flows of two snapshots. `then` is None at a start: no rate is known."""

    def __init__(self, then: Any | None, now: Any, seconds: float) -> None:
        self._seconds = seconds
        self._is_start = then is None
        self._sees_all = now.HasField("totals")
        before = {} if then is None else {_key(flow): flow for flow in then.flows}
        # A flow that was left out of a long list has counts of before.
        is_whole = then is not None and len(then.flows) >= then.totals.flows
        prefill_ms = max((pool.last_prefill_us for pool in now.pools), default=0) // 1_000
        self.tenants: list[Tenant] = []
        classes: dict[str, list[Tenant]] = {}
        ranks = {row.name: row.rank for row in now.classes}
        for flow in now.flows:
            was = before.get(_key(flow), pb.FlowStats() if is_whole else flow)
            tenant = _tenant(flow, was, now.prices, prefill_ms)
            tenant.entitled = flow.entitled_ppm / 1e6
            tenant.rank = ranks.get(flow.request_class, 0)
            self.tenants.append(tenant)
            classes.setdefault(flow.request_class, []).append(tenant)
        #: The service of each class by its rank, and the tenant of it that got most.
        self._served: dict[int, float] = {}
        self._most_served: dict[int, Tenant] = {}
        for rows in classes.values():
            self._share_out(rows)
            rank = rows[0].rank
            self._served[rank] = sum(row.served for row in rows)
            self._most_served[rank] = max(rows, key=lambda row: row.served)
        self._unknown = _growth(then, now, pb.OUTCOME_REJECTED_UNKNOWN_TENANT)
        no_pool = frozenset({pb.OUTCOME_REJECTED_NO_POOL})
        self.without_pool = sum(tenant.count(no_pool) for tenant in self.tenants)
        self._are_there = not any(is_away(pool) for pool in now.pools)
        self._has_pools = self._are_there and any(pool.attached for pool in now.pools)

    def _share_out(self, rows: list[Tenant]) -> None:
        """Work out shares among the flows of a class. A caller that sees few knows none."""
        served = sum(row.served for row in rows)
        entitled = sum(row.entitled or 0.0 for row in rows)
        for row in rows:
            part = row.entitled or 0.0
            row.share = row.entitled = None
            if self._sees_all and served and part:
                row.share, row.entitled = row.served / served, part / entitled
                each = (
                    row.served / row.granted
                    if row.granted
                    else served / max(1, sum(other.granted for other in rows))
                )
                asked = row.served + each * (row.by_capacity)
                row.asks = asked / served / row.entitled

    def findings(self) -> list[Finding]:
        """Return tenants that are hurt though they stay within their shares. O(tenants)."""
        found = [*self._crowded(), *self._limited()]
        large = [tenant for tenant in self.tenants if tenant.count(_TOO_LARGE)]
        if large:
            rate = self._rate(sum(tenant.count(_TOO_LARGE) for tenant in large))
            text = f"{listed([t.name for t in large])} sends requests that are too large for any"
            text += f" engine: {rate}. Let it send a smaller max_tokens or prompt."
            found.append(Finding(JUDGEMENT_LEVEL_NOTICE, text))
        no_pool = frozenset({pb.OUTCOME_REJECTED_NO_POOL})
        lost = [tenant for tenant in self.tenants if tenant.count(no_pool)]
        if lost and self._has_pools:
            rate = self._rate(self.without_pool)
            text = f"{listed([t.name for t in lost])} names an engine that is not here: {rate}."
            found.append(Finding(JUDGEMENT_LEVEL_NOTICE, text))
        if self._unknown > 0:
            text = f"Requests of an unknown tenant are refused: {self._rate(self._unknown)}."
            found.append(Finding(JUDGEMENT_LEVEL_NOTICE, f"{text} List it, or look at its key."))
        return found

    def _crowded(self) -> list[Finding]:
        """Return tenants that are refused or late at or below their shares."""
        hurt = [
            tenant for tenant in self.tenants
            if (tenant.by_capacity and not tenant.is_above) or self._is_late(tenant)
        ]  # fmt: skip
        hurt.sort(key=lambda tenant: -tenant.by_capacity)
        heaviest = max((tenant.weight for tenant in self.tenants), default=0.0)
        light = [
            tenant for tenant in hurt
            if tenant.entitled is not None and tenant.entitled <= _SMALL_SHARE
            and tenant.weight <= _SMALL_WEIGHT * heaviest
        ]  # fmt: skip
        found = [self._light(tenant) for tenant in light]
        below = [tenant for tenant in hurt if tenant not in light and self._is_starved(tenant)]
        for tenant in below:
            text = f"{named(tenant.name)} gets {_percent(tenant.share)} of the service, less than"
            text += f" its share of {_percent(tenant.entitled)}, and {self._harm(tenant)}."
            text += " Look at `schedsvc why` for its requests."
            found.append(Finding(JUDGEMENT_LEVEL_TROUBLE, text))
        full = []
        for tenant in (row for row in hurt if row not in light and row not in below):
            if before := self._before(tenant):
                found.append(self._behind(tenant, before))
            else:
                full.append(tenant)
        if full:
            found.append(self._full(full))
        return found

    def _before(self, tenant: Tenant) -> Tenant | None:
        """Return the one of better classes that got most, if these got more than its class.

        O(classes).
        """
        better = [rank for rank in self._served if rank < tenant.rank]
        if sum(self._served[rank] for rank in better) <= self._served[tenant.rank]:
            return None
        return max((self._most_served[rank] for rank in better), key=lambda row: row.served)

    def _behind(self, tenant: Tenant, before: Tenant) -> Finding:
        text = f"{named(tenant.name)} {self._harm(tenant)}. {named(before.name)} runs before"
        text += f" {named(tenant.name)}, by its class {named(before.request_class)}:"
        return Finding(JUDGEMENT_LEVEL_NOTICE, f"{text} add an engine, or let it send less.")

    def _is_starved(self, tenant: Tenant) -> bool:
        """Return whether a tenant gets less than its share while another gets more."""
        if tenant.share is None or tenant.entitled is None:
            return False
        return tenant.share < _BELOW * tenant.entitled and any(t.is_above for t in self.tenants)

    def _light(self, tenant: Tenant) -> Finding:
        text = f"{named(tenant.name)} {self._harm(tenant)}. Its weight of {tenant.weight:g} gives"
        text += f" it {_percent(tenant.entitled)} of the service: raise its weight."
        return Finding(JUDGEMENT_LEVEL_NOTICE, text)

    def _harm(self, tenant: Tenant) -> str:
        if tenant.by_capacity:
            return f"is refused: {self._rate(tenant.by_capacity)}"
        return f"has waited for {seconds_text(tenant.oldest_ms)} by now"

    def _is_late(self, tenant: Tenant) -> bool:
        """Return whether a tenant waits too long though all engines are there."""
        return self._are_there and tenant.waits_too_long

    def _full(self, hurt: list[Tenant]) -> Finding:
        said = []
        for tenant in hurt[:_NAMES_MAX]:
            is_more = tenant.by_capacity and tenant.asks > _ABOVE
            text = f"{_asks_text(tenant)}: {self._rate(tenant.by_capacity)}"
            said.append(f"{named(tenant.name)}{text if is_more else f' {self._harm(tenant)}'}")
        text = f"{'; '.join(said)}. The engines are full: add an engine,"
        advice = "or let it send less." if len(hurt) == 1 else "or let them send less."
        return Finding(JUDGEMENT_LEVEL_NOTICE, f"{text} {advice}")

    def _limited(self) -> list[Finding]:
        """Return tenants whose requests a limit refused."""
        found = []
        for tenant in self.tenants:
            size = frozenset({pb.OUTCOME_REJECTED_QUOTA_SIZE})
            if count := tenant.by_quota:
                text = f"{named(tenant.name)} has used up its limit{_limit_text(tenant.limits)}:"
                text += f" {self._rate(count)}. Raise the limit, or let it send less."
                found.append(Finding(JUDGEMENT_LEVEL_NOTICE, text))
            if count := tenant.count(size):
                text = f"{named(tenant.name)} sends requests that are larger than its limit"
                text += f"{_limit_text(tenant.limits)} ever allows: {self._rate(count)}."
                found.append(Finding(JUDGEMENT_LEVEL_NOTICE, text))
        return found

    def context(self) -> str:
        """Return a word on the tenants without a finding: who is well, who asks for too much.

        O(tenants).
        """
        if self._is_start:
            return "What tenants ask for and get is known after some seconds."
        well = [tenant for tenant in self.tenants if tenant.is_well and not self._is_heavy(tenant)]
        texts = []
        if well:
            well.sort(key=lambda tenant: -tenant.weight)
            first_ms = max(tenant.first_ms for tenant in well[:_NAMES_MAX])
            text = f"{listed([tenant.name for tenant in well])}"
            text += f" {'is' if len(well) == 1 else 'are'} well"
            texts.append(f"{text}: first token {_duration(first_ms)}." if first_ms else f"{text}.")
        for tenant in self.tenants:
            if self._is_heavy(tenant):
                texts.append(self._heavy(tenant))
        texts += [self._waiting(tenant) for tenant in self.tenants if self._waits_long(tenant)]
        if not any(t.received or t.queued or t.running for t in self.tenants):
            texts.append("No tenant asks for anything.")
        return " ".join(texts[:_NAMES_MAX])

    def _is_heavy(self, tenant: Tenant) -> bool:
        """Return whether a tenant asks for much more than its share, and waits for it."""
        return tenant.is_above and (
            tenant.by_capacity > 0
            or (tenant.queued > 0 and tenant.share is not None and tenant.entitled is not None
                and tenant.share > _ASKS_MORE * tenant.entitled and not tenant.waits_for_quota)
        )  # fmt: skip

    def _waits_long(self, tenant: Tenant) -> bool:
        is_said = tenant.by_quota or tenant.by_capacity or self._is_late(tenant)
        is_said = is_said or self._is_heavy(tenant)
        return tenant.oldest_ms > _WELL_MS and not is_said

    def _waiting(self, tenant: Tenant) -> str:
        text = f"{named(tenant.name)} waits for"
        if tenant.waits_for_quota:
            text += f" its limit{_limit_text(tenant.limits)},"
        return f"{text} {seconds_text(tenant.oldest_ms)} by now."

    def _heavy(self, tenant: Tenant) -> str:
        text = f"{named(tenant.name)}{_asks_text(tenant)}"
        if tenant.by_capacity:
            return f"{text}: {self._rate(tenant.by_capacity)}."
        return f"{text}: {tenant.queued:,} of its requests wait."

    def _rate(self, count: int) -> str:
        return rate_text(count, self._seconds)


def is_away(pool: Any) -> bool:
    """Return whether an engine is missed. One that is drained, or said goodbye, is not."""
    if pool.attached or pool.draining:
        return False
    if pool.live_leases or pool.queued:
        return True
    return not pool.said_goodbye and bool(pool.owned_ms or 0 < pool.detached_ms < _GONE_MS)


def _asks_text(tenant: Tenant) -> str:
    digits = 1 if tenant.asks < 10 else 0
    return f" asks for {tenant.asks:.{digits}f} times its share"


def _key(flow: Any) -> tuple[str, str]:
    return flow.tenant, flow.request_class


def _tenant(flow: Any, was: Any, prices: Any, prefill_ms: int) -> Tenant:
    fresh = flow.input_tokens - flow.cached_input_tokens
    fresh -= was.input_tokens - was.cached_input_tokens
    cached = flow.cached_input_tokens - was.cached_input_tokens
    output = flow.output_tokens - was.output_tokens
    micro = fresh * prices.input_micro + cached * prices.cached_micro + output * prices.output_micro
    micro += (flow.kv_token_steps - was.kv_token_steps) * prices.kv_micro
    earlier = {row.outcome: row.count for row in was.refusals}
    waited = flow.ttft_judged > was.ttft_judged
    granted = flow.granted - was.granted
    return Tenant(
        name=flow.tenant,
        weight=flow.weight_milli / 1_000,
        request_class=flow.request_class,
        served=max(0, micro) / 1e6,
        granted=granted,
        received=flow.received - was.received,
        refused={
            row.outcome: row.count - earlier.get(row.outcome, 0)
            for row in flow.refusals
            if row.count > earlier.get(row.outcome, 0)
        },
        queued=flow.queued,
        oldest_ms=flow.oldest_queued_ms if flow.queued else 0,
        longest_wait_ms=flow.longest_wait_ms,
        first_ms=flow.ttft_ms if waited else (prefill_ms if granted else 0),
        waits_for_quota=flow.waits_for_quota or was.waits_for_quota,
        running=flow.live_leases,
        is_held=flow.held_to_share or flow.held_by_session_cap > 0,
        limits=flow.quotas,
    )


def _growth(then: Any | None, now: Any, outcome: int) -> int:
    """Return how many requests without a flow were refused for a reason."""
    counts = [
        sum(row.count for row in each.totals.refusals if row.outcome == outcome)
        for each in (now, now if then is None else then)
    ]
    return int(counts[0] - counts[1])


def named(name: str) -> str:
    """Return a name, cut if it is long."""
    return name if len(name) <= _NAME_CHARS else f"{name[: _NAME_CHARS - 1]}…"


def listed(names: Sequence[str]) -> str:
    """Return names for a sentence: a, b and 3 others."""
    shown = [named(name) for name in dict.fromkeys(names)]
    if len(shown) > _NAMES_MAX:
        shown = [*shown[:_NAMES_MAX], f"{len(shown) - _NAMES_MAX} others"]
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))


def rate_text(count: int, seconds: float) -> str:
    """Return how many requests were refused in a second, or a minute if they are few."""
    rate = count / max(seconds, 1e-3)
    if rate >= 1.5:
        return f"{rate:.0f} refusals a second"
    a_minute = max(1, round(60 * rate))
    return f"{a_minute} refusal{'s' if a_minute > 1 else ''} a minute"


def seconds_text(ms: float) -> str:
    """Write a time in whole seconds, or minutes if they are many."""
    return f"{ms / 60_000:.0f} min" if ms >= 120_000 else f"{ms / 1_000:.0f} s"


def _duration(ms: float) -> str:
    return f"{ms:.0f} ms" if ms < 1_000 else f"{ms / 1_000:.1f} s"


def _percent(part: float | None) -> str:
    value = 100 * (part or 0.0)
    return f"{value:.0f} %" if value >= 2 else f"{value:.1g} %"


def _limit_text(limits: Sequence[Any]) -> str:
    """Return the limit of which the least is left: ` of 30 requests per minute`."""
    if not limits:
        return ""
    tightest = min(limits, key=lambda row: row.remaining / max(1, row.limit))
    kind = quota_pb2.LimitKind.Name(tightest.kind).removeprefix("LIMIT_KIND_")
    return f" of {tightest.limit:,} {kind.lower().replace('_', ' ')}"
