"""Records the inputs of a core: every event goes to the file, then to the core."""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, cast

from schedsvc._core import Decision, Ended, Scheduler, Session
from schedsvc.records.recording.form import Kind, call_bytes, pack_data, packer

__all__ = ["READS", "SetupLog", "Sink", "check_event", "record"]

#: Methods of the core that change nothing that is decided: they are not recorded.
READS = frozenset(
    {
        "encode",
        "save",
        "save_all",
        "take_served",
        "take_places",
        "forgiven_micro",
        "escrow_is_wanted",
        "escrow_wants",
        "escrow_drawn",
        "escrow_levels",
        "slot_wants",
        "slot_rows",
        "budget_spent",
        "next_deadline",
        "ready",
        "take_notes",
        "take_usage",
        "flow_index",
        "flow_indices",
        "is_known",
        "class_index",
        "quota_index",
        "born_tenants",
        "pool_index",
        "pool_name",
        "stats",
        "flow_stats",
        "histograms",
        "histogram_bounds_ms",
        "show_histograms",
        "list_leases",
        "flow_keys",
        "pool_rows",
        "may_see_tenant",
        "may_see_pool",
        "explain",
        "recent_request_ids",
        "unlisted_stats",
        "check",
        "digest",
        "describe",
    }
)
#: Digests stand in the file this often.
CHECK_NS = 250_000_000


class Sink(Protocol):
    """Takes the events of a recording."""

    def put(self, event: bytes) -> None:
        """Take one event."""


class SetupLog:
    """Passes a core its flows and pools, and notes each call for the header of a recording."""

    def __init__(self, core: Scheduler) -> None:
        self.calls: list[list[Any]] = []
        self._core = core

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return the core's method of that name, noted."""
        method = getattr(self._core, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append([name, list(args), kwargs])
            return method(*args, **kwargs)

        return call


def record(core: Scheduler, sink: Sink) -> Scheduler:
    """Return the core as its driver uses it, with every event put into the sink first."""
    return cast(Scheduler, _Recorded(core, sink))


_ADMIT, _CANCEL = packer(Kind.ADMIT).pack, packer(Kind.CANCEL).pack
_PROGRESS, _COMPLETE = packer(Kind.PROGRESS).pack, packer(Kind.COMPLETE).pack
_POLL, _OPEN = packer(Kind.POLL).pack, packer(Kind.OPEN).pack
_RECEIVE, _TAKE, _CLOSE = (packer(k).pack for k in (Kind.RECEIVE, Kind.TAKE, Kind.CLOSE))
_DRAIN, _EVICT = packer(Kind.DRAIN).pack, packer(Kind.EVICT).pack
_CHECK, _SET = packer(Kind.CHECK).pack, packer(Kind.SET).pack
_REVOKE, _PART, _REST = (packer(k).pack for k in (Kind.REVOKE, Kind.PART, Kind.REST))


def check_event(core: Scheduler) -> bytes:
    """Write the digest of all decisions so far as an event."""
    return _CHECK(Kind.CHECK, core.digest())


class _Recorded:
    """Declares the part of the core's interface that a driver uses.

    It notes an event before the core gets it, also if the core refuses it: a replay is refused
    alike. It passes on no method that it does not know, so no call goes unrecorded.
    """

    def __init__(self, core: Scheduler, sink: Sink) -> None:
        self._core = core
        self._put = sink.put
        self._check_ns = 0
        self._now_ns = 0  # of the last poll

    def __getattr__(self, name: str) -> Any:
        if name.startswith("set_"):
            return partial(self._set, name)
        if name not in READS:
            raise AttributeError(f"the recorder does not know Scheduler.{name}()")
        return getattr(self._core, name)

    def _set(self, name: str, *args: Any, **kwargs: Any) -> Any:
        data = call_bytes(name, args, kwargs)
        self._put(_SET(Kind.SET, self._now_ns) + pack_data(data))
        return getattr(self._core, name)(*args, **kwargs)

    def admit_wire(
        self, now_ns: int, principal: int, data: bytes, queue_ttl_ns: int = 0
    ) -> int | bytes:
        self._put(_ADMIT(Kind.ADMIT, now_ns, principal, queue_ttl_ns) + pack_data(data))
        return self._core.admit_wire(now_ns, principal, data, queue_ttl_ns)

    def cancel(self, now_ns: int, handle: int) -> bool:
        self._put(_CANCEL(Kind.CANCEL, now_ns, handle))
        return self._core.cancel(now_ns, handle)

    def progress(
        self,
        now_ns: int,
        lease_id: int,
        pool_epoch: int,
        input_tokens: int = -1,
        cached_input_tokens: int = -1,
        output_tokens: int = -1,
        principal: int = 0,
    ) -> int:
        fields = (lease_id, pool_epoch, input_tokens, cached_input_tokens, output_tokens, principal)
        self._put(_PROGRESS(Kind.PROGRESS, now_ns, *fields))
        return self._core.progress(now_ns, *fields)

    def complete(
        self,
        now_ns: int,
        lease_id: int,
        pool_epoch: int,
        outcome: int,
        input_tokens: int = -1,
        cached_input_tokens: int = -1,
        output_tokens: int = -1,
        principal: int = 0,
    ) -> Ended | None:
        totals = (input_tokens, cached_input_tokens, output_tokens, principal)
        self._put(_COMPLETE(Kind.COMPLETE, now_ns, lease_id, pool_epoch, outcome, *totals))
        return self._core.complete(now_ns, lease_id, pool_epoch, outcome, *totals)

    def drain(self, now_ns: int) -> None:
        self._put(_DRAIN(Kind.DRAIN, now_ns))
        self._core.drain(now_ns)

    def revoke(self, now_ns: int, lease_id: int) -> int:
        self._put(_REVOKE(Kind.REVOKE, now_ns, lease_id))
        return self._core.revoke(now_ns, lease_id)

    def evict_queued(self, now_ns: int) -> int:
        self._put(_EVICT(Kind.EVICT, now_ns))
        return self._core.evict_queued(now_ns)

    def poll(self, now_ns: int) -> list[Decision]:
        self._put(_POLL(Kind.POLL, now_ns))
        self._now_ns = now_ns
        decisions = self._core.poll(now_ns)
        if now_ns >= self._check_ns:
            self._check_ns = now_ns + CHECK_NS
            self._put(check_event(self._core))
        return decisions

    def open_session(self, principal: int = 0) -> "_RecordedSession":
        self._put(_OPEN(Kind.OPEN, principal))
        return _RecordedSession(self._core.open_session(principal), self._put)


class _RecordedSession:
    """Records the inputs of a stream."""

    def __init__(self, session: Session, put: Callable[[bytes], None]) -> None:
        self.owner = session.owner
        self._session = session
        self._put = put

    def receive(self, now_ns: int, data: bytes, events_max: int = 0) -> bool:
        if not events_max:
            self._put(_RECEIVE(Kind.RECEIVE, now_ns, self.owner) + pack_data(data))
            return self._session.receive(now_ns, data)
        self._put(_PART(Kind.PART, now_ns, self.owner, events_max) + pack_data(data))
        return self._session.receive(now_ns, data, events_max)

    def receive_rest(self, now_ns: int, events_max: int) -> bool:
        self._put(_REST(Kind.REST, now_ns, self.owner, events_max))
        return self._session.receive_rest(now_ns, events_max)

    def take(self, now_ns: int) -> bytes | None:
        data = self._session.take(now_ns)
        # The end of a stream depends on which events were sent on it. A call that finds none to
        # send changes nothing.
        if data is not None:
            self._put(_TAKE(Kind.TAKE, now_ns, self.owner))
        return data

    def close(self, now_ns: int) -> None:
        self._put(_CLOSE(Kind.CLOSE, now_ns, self.owner))
        self._session.close(now_ns)
