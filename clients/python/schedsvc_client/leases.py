"""Open leases of one client: their totals, what has to be reported, when they must be renewed.

Sans-IO: the caller passes the time to every method. All times are monotonic nanoseconds.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from schedsvc_client import wire
from schedsvc_client.limits import Limit, limits_told
from schedsvc_client.outcomes import Outcome
from schedsvc_client.requests import Asked
from schedsvc_client.v1 import scheduler_pb2 as pb

LEASE_TTL_NS_DEFAULT = 10_000_000_000
# The reports of one Progress call: one takes at most 60 bytes of the scheduler's 64 KiB.
PROGRESS_LEASES_MAX = 1_000

Totals = tuple[int | None, int | None, int | None]
"""Input, cached input and output tokens; None if a total is not known."""
_NAMES = ("input_tokens", "cached_input_tokens", "output_tokens")


def checked_totals(*totals: int | None) -> Totals:
    """Return the three totals. Raises TypeError that names the one which is no integer."""
    for name, total in zip(_NAMES, totals, strict=True):
        if total is not None and not hasattr(total, "__index__"):
            raise TypeError(f"{name} is {total!r}; it has to be an integer")
    input_tokens, cached_input_tokens, output_tokens = totals
    return input_tokens, cached_input_tokens, output_tokens


@dataclass(slots=True)
class Lease:
    """Holds one granted request. Totals that were never reported are None."""

    lease_id: int
    pool: str
    pool_epoch: int
    ttl_ns: int
    reserved_tokens: int
    engine_priority: int
    asked: Asked
    sent_ns: int
    input_tokens: int | None = None
    cached_input_tokens: int | None = None
    output_tokens: int | None = None
    #: The quotas of its tenant and of the groups above it at the grant; empty: none.
    quota: tuple[Limit, ...] = ()

    def raise_totals(self, totals: Totals) -> bool:
        """Take totals that are larger than the known ones; True if one was."""
        input_tokens, cached_input_tokens, output_tokens = totals
        grown = False
        if _larger(input_tokens, self.input_tokens):
            self.input_tokens, grown = input_tokens, True
        if _larger(cached_input_tokens, self.cached_input_tokens):
            self.cached_input_tokens, grown = cached_input_tokens, True
        if _larger(output_tokens, self.output_tokens):
            self.output_tokens, grown = output_tokens, True
        return grown

    def progress(self, report: pb.LeaseProgress | None = None) -> pb.LeaseProgress:
        """Return the running totals, written into a new `report` where one is given: no copy."""
        report = report if report is not None else pb.LeaseProgress()
        report.lease_id = self.lease_id
        report.pool_epoch = self.pool_epoch
        _tell(report, self.input_tokens, self.cached_input_tokens, self.output_tokens)
        return report

    def complete(self, outcome: Outcome, totals: Totals) -> pb.CompleteRequest:
        """Return its end; a total that is not given is the last reported one."""
        request = pb.CompleteRequest(lease_id=self.lease_id, pool_epoch=self.pool_epoch)
        request.outcome = pb.Outcome.ValueType(outcome)
        _tell(request, *self._final(totals))
        return request

    def complete_event(self, outcome: Outcome, totals: Totals) -> bytes:
        """Return its end as an event of a SessionRequest."""
        try:
            return wire.complete_event(
                self.lease_id, self.pool_epoch, outcome, *self._final(totals)
            )
        except wire.ODD:
            event = pb.SessionEvent(complete=self.complete(outcome, totals))
            return pb.SessionRequest(events=[event]).SerializeToString()

    def _final(self, totals: Totals) -> Totals:
        input_tokens, cached_input_tokens, output_tokens = totals
        return (
            self.input_tokens if input_tokens is None else input_tokens,
            self.cached_input_tokens if cached_input_tokens is None else cached_input_tokens,
            self.output_tokens if output_tokens is None else output_tokens,
        )

    def replay(self) -> pb.LeaseReplay:
        """Everything a scheduler needs to take this lease over."""
        request = self.asked.message
        prompts = request.input_tokens
        return pb.LeaseReplay(
            lease_id=self.lease_id,
            request_id=request.request_id,
            tenant=request.tenant,
            api_key_sha256=request.api_key_sha256,
            pool=self.pool,
            pool_epoch=self.pool_epoch,
            reserved_tokens=self.reserved_tokens,
            prompt_tokens=sum(prompts),
            max_output_tokens=request.max_output_tokens,
            input_tokens=self.input_tokens or 0,
            cached_input_tokens=self.cached_input_tokens or 0,
            output_tokens=self.output_tokens or 0,
            sequences=len(prompts) * max(1, request.n),
            adapter=request.adapter,
            request_class=request.request_class,
            tenant_proof=request.tenant_proof,
            client_request_id=request.client_request_id,
            whole_answer=request.whole_answer or not request.reports_progress,
            session=request.session,
        )


def _tell(
    message: pb.LeaseProgress | pb.CompleteRequest,
    input_tokens: int | None,
    cached_input_tokens: int | None,
    output_tokens: int | None,
) -> None:
    """Write the totals that are known.

    A total beyond the contract's limits is brought within them: a scheduler refuses the whole
    report otherwise, and the lease of a Complete would live until its TTL.
    """
    if input_tokens is not None:
        message.input_tokens = _within(input_tokens)
    if cached_input_tokens is not None:
        message.cached_input_tokens = _within(cached_input_tokens)
    if output_tokens is not None:
        message.output_tokens = _within(output_tokens)


def _within(total: int) -> int:
    return total if 0 <= total <= wire.TOKENS_MAX else min(max(total, 0), wire.TOKENS_MAX)


def _larger(told: int | None, known: int | None) -> bool:
    return told is not None and (known is None or told > known)


def lease_of(asked: Asked, grant: pb.Grant, now_ns: int) -> Lease:
    """Return the lease that a grant stands for."""
    ttl_ns = grant.ttl_ms * 1_000_000 or LEASE_TTL_NS_DEFAULT
    # In the order of its fields: names would cost each grant a dictionary.
    lease = Lease(
        grant.lease_id, grant.pool, grant.pool_epoch, ttl_ns, grant.reserved_tokens,
        grant.engine_priority, asked, now_ns,
    )  # fmt: skip
    if grant.HasField("quota"):
        lease.quota = limits_told(grant.quota)
    return lease


class LeaseTable:
    """Keeps the open leases, oldest report first.

    Every operation is O(1) for each lease it touches.
    """

    def __init__(self, progress_delay_ns: int) -> None:
        self._progress_delay_ns = progress_delay_ns
        self._by_age: OrderedDict[int, Lease] = OrderedDict()
        self._dirty: dict[int, Lease] = {}
        self._dirty_since_ns = 0
        self._renew_after_ns = LEASE_TTL_NS_DEFAULT // 3

    def __len__(self) -> int:
        return len(self._by_age)

    def get(self, lease_id: int) -> Lease | None:
        """Return an open lease, or None."""
        return self._by_age.get(lease_id)

    def leases(self) -> list[Lease]:
        """Return all open leases."""
        return list(self._by_age.values())

    def open(self, lease: Lease) -> None:
        """Add a lease that was just granted."""
        if not self._by_age:
            self._renew_after_ns = lease.ttl_ns // 3
        self._renew_after_ns = min(self._renew_after_ns, lease.ttl_ns // 3)
        self._by_age[lease.lease_id] = lease

    def close(self, lease_id: int) -> Lease | None:
        """Take a lease out; None if it is not open."""
        self._dirty.pop(lease_id, None)
        return self._by_age.pop(lease_id, None)

    def note(self, now_ns: int, lease_id: int, totals: Totals) -> None:
        """Raise totals; the report is due `progress_delay_ns` after the first one that waits."""
        lease = self._by_age.get(lease_id)
        if lease is None:
            return
        if lease.raise_totals(totals):
            if not self._dirty:
                self._dirty_since_ns = now_ns
            self._dirty[lease_id] = lease

    def next_deadline_ns(self) -> int | None:
        """Return when `take_due` has something to give; None while there is no lease."""
        if not self._by_age:
            return None
        deadline_ns = next(iter(self._by_age.values())).sent_ns + self._renew_after_ns
        if self._dirty:
            deadline_ns = min(deadline_ns, self._dirty_since_ns + self._progress_delay_ns)
        return deadline_ns

    def take_due(self, now_ns: int) -> list[Lease]:
        """Return the leases to report now: with new totals, or silent for a third of their TTL.

        Renewals gather: once one is due, so is each lease that has used three quarters of its time.
        """
        due: list[Lease] = []
        if self._dirty and now_ns >= self._dirty_since_ns + self._progress_delay_ns:
            due.extend(self._dirty.values())
            self._mark_sent(now_ns, due)
        oldest = next(iter(self._by_age.values()), None)
        if oldest is not None and now_ns >= oldest.sent_ns + self._renew_after_ns:
            aged = []
            for lease in self._by_age.values():
                if now_ns < lease.sent_ns + self._renew_after_ns * 3 // 4:
                    break
                aged.append(lease)
            self._mark_sent(now_ns, aged)
            due.extend(aged)
        return due

    def mark_all_sent(self, now_ns: int) -> None:
        """Every lease was just reported in another way (a replay)."""
        self._mark_sent(now_ns, self.leases())

    def _mark_sent(self, now_ns: int, leases: list[Lease]) -> None:
        for lease in leases:
            lease.sent_ns = now_ns
            self._by_age.move_to_end(lease.lease_id)
            self._dirty.pop(lease.lease_id, None)
