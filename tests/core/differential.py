"""Gives the core and its twin the same events; any difference fails."""

from collections import Counter
from typing import Any

from schedsvc import _core as core

from .twin import Twin
from .twin_rejections import most_retry_ms
from .twin_types import ENDED, QUEUED, Request, TwinError, Verdict, may_run
from .twin_view import core_view, view, wait_reasons


class Differential:
    """Drives both, and compares their answers, decisions and views."""

    def __init__(self, policy: str, modes: dict[str, str] | None = None, **limits: int) -> None:
        given: dict[str, Any] = {"policy": policy} | (modes or {}) | limits
        self.core = core.Scheduler(**given)
        self.twin = Twin(**given)
        self._given = given
        self._saved: dict[bytes, tuple[bytes, int]] = {}  # and when
        self.now_ns = 0
        self.seq_of: dict[int, int] = {}  # core handle -> twin's
        self.leases: list[tuple[int, int]] = []  # (lease id, epoch) of every grant, oldest first
        self._looks = 0

    def flow(self, name: bytes, weight_milli: int) -> int:
        index = self.core.set_flow(name, weight_milli)
        assert index == self.twin.set_flow(name, weight_milli)
        return index

    def classes(self, *names: tuple[bytes, int, int, bool]) -> None:
        """Return priority classes: name, rank, ageing time, whether it is exempt."""
        for given in names:
            assert self.core.set_class(*given) == self.twin.classes.set(*given)

    def class_of(self, flow: int, default_class: int, named: tuple[int, ...]) -> None:
        for whom in (self.core, self.twin):
            whom.set_flow_class(flow, default_class, named)

    def both(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Give both one event: they agree. Return the result, None for an error."""
        got, error = self._ask(self.core, method, args, kwargs)
        self.twin.core_says = self._refusal(got) if method == "admit" else got
        want, wanted_error = self._ask(self.twin, method, args, kwargs)
        assert error == wanted_error, f"{method}{args} {kwargs}"
        if error:
            return None
        if method == "admit":
            self._same_handle(got, want)
        else:
            assert got == want, f"{method}{args}: core {got}, twin {want}"
        return got

    def _ask(
        self, whom: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[int, str] | None]:
        try:
            return getattr(whom, method)(self.now_ns, *args, **kwargs), None
        except (core.CallerError, TwinError) as e:
            return None, (e.code, e.field)

    def _refusal(self, got: int | None) -> int:
        """Return why the core refused a request, or would have without the dry run."""
        if not got or got < 0:
            return -(got or 0)
        if not self.twin.audit.flows:
            return 0
        found: Counter[int] = Counter()
        for row in self.core.stats(self.now_ns)["flows"]:
            found.update(row["audited_refusals"])
        return next(iter(found - sum(self.twin.audit.refusals.values(), Counter())), 0)

    def _same_handle(self, got: int, want: int) -> None:
        if got > 0:
            assert self.seq_of.setdefault(got, want) == want, "a handle names one request"
        else:
            assert got == want, f"admit: core {got}, twin {want}"

    def cancel(self, handle: int) -> bool:
        got = self.core.cancel(self.now_ns, handle)
        assert got == self.twin.cancel(self.now_ns, self.seq_of.get(handle, -1))
        return got

    def poll(self) -> list[core.Decision]:
        """Poll once for everything that is due now."""
        got = self.core.poll(self.now_ns)
        self.twin.core_says = [(self.seq_of[d.handle], d.outcome) for d in got]
        want = self.twin.poll(self.now_ns)
        assert [self._plain(d) for d in got] == [self._wanted(v) for v in want]
        for d, v in zip(got, want, strict=True):
            assert d.flow == v.flow
            most_ms = most_retry_ms(v.outcome, v.retry_ms)
            assert v.retry_ms * 900 // 1000 <= d.retry_after_ms <= most_ms * 1100 // 1000
            if d.outcome == core.GRANTED:
                self.leases.append((d.lease_id, d.pool_epoch))
        stats = self.core.stats(self.now_ns)
        assert [p["wait_reason"] for p in stats["pools"]] == wait_reasons(self.twin)
        self._compare_deadline()
        return got

    def _plain(self, d: core.Decision) -> tuple[Any, ...]:
        return (self.seq_of[d.handle], *d[1:7], *d[8:])

    @staticmethod
    def _wanted(v: Verdict) -> tuple[Any, ...]:
        return (*v[:7], *v[8:])

    def _compare_deadline(self) -> None:
        # It may ring early, once, for a lease that was renewed; never late, never twice.
        due, told = self.twin.next_due(), self.core.next_deadline()
        assert (due < 0) == (told < 0)
        if due >= 0:
            assert self.now_ns < told <= due

    def compare(self) -> None:
        """Compare the books of both, and check the core's own proof of them."""
        self.core.check()
        got = core_view(self.core.stats(self.now_ns))
        want = view(self.twin, self.now_ns)
        for section in want:
            assert got[section] == want[section], difference(got[section], want[section])
        returning = self.twin.restart.returning
        assert self.twin.in_minimum == {
            i
            for i in range(len(self.twin.flows))
            if self.twin.quotas.heads(i) or i in returning
            if not self.twin.quotas.is_out(i)
        }
        forgotten = self.twin.tenants.granted_by_forgotten.total()
        granted = sum(f.granted for f in self.twin.flows) + forgotten
        assert self.twin.totals["granted"] == granted
        self._compare_one()

    def _compare_one(self) -> None:
        """Hold what the core explains of one request in turn, mostly of one that waits."""
        self._looks += 1
        known = (self._looks % 4 and self.twin.queued()) or self.twin.known()
        if not known:
            return
        r = known[self._looks % len(known)]
        name = self.twin.flow_names[r.flow]
        (got,) = self.core.explain(self.now_ns, r.request_id, name, r.principal)
        outcome = {QUEUED: 0, ENDED: r.outcome}.get(r.state, core.GRANTED)
        want = (r.state.upper(), outcome, r.is_void, r.prompt_tokens)
        assert (got["state"], got["outcome"], got["is_void"], got["prompt_tokens"]) == want
        queued_ns = self.now_ns - r.arrival_ns if r.state == QUEUED else r.waited_ns
        assert got["queue_duration_us"] == queued_ns // 1000
        unseen_us = queued_ns // 1000 - sum(row["time_us"] for row in got["waited"])
        assert 0 <= unseen_us <= len(core.WAITS)  # each reason's time is rounded down
        if r.state == QUEUED:
            queue = self.twin.order.queue(r.flow, r.target)
            assert got["place"]["queue_ahead"] == queue.index(r)
            nexts = {p for p, row in enumerate(got["pools"]) if row["is_next"]}
            pools = [p for p in range(len(self.twin.pools)) if may_run(r.target, p)]
            assert nexts == {k for k, p in enumerate(pools) if self.twin.head_for(p)[0] is r}

    def save(self) -> None:
        """Save the changes, in slices."""
        while rows := self.core.save(self.now_ns, 7):
            self._saved |= {key: (value, self.now_ns) for key, value in rows}

    def restart(self) -> None:
        """Kill the scheduler, and start it again with the state saved up to that moment."""
        self.save()
        order = "deadline" if self.twin.order.by_deadline else "arrival"
        given = self._given | {"flow_order": order}
        self.core = restarted(given, self.twin, self.now_ns)
        # In the order of the twin's flows, so that they have the same numbers again.
        order = {flow_key(self.twin, i): i for i in range(len(self.twin.flows))}
        keys = sorted(self._saved, key=lambda key: order.get(key, len(order)))
        rows = [(key, self._saved[key][0], self.now_ns - self._saved[key][1]) for key in keys]
        assert self.core.set_saved(self.now_ns, rows) == len(rows)
        self.twin.enter(self.now_ns)
        self.twin.restart.happens()
        self.seq_of = {}

    def told_again(self, r: Request) -> None:
        """Replay a lease of before a restart."""
        f, size = self.twin.flows[r.flow], self.twin.pools[r.pool].block_size
        self.both(
            "replay", f.base, r.request_id, r.lease_id, r.pool, r.epoch, r.reserved_blocks * size,
            r.prompt_tokens, r.output_max_tokens, output_tokens=r.output_tokens,
            sequences=r.sequences, adapter=r.adapter,
            request_class=self.twin.classes.items[f.cls].name,
        )  # fmt: skip

    def drain(self) -> None:
        """Let time pass until every lease and answer has ended: all gauges are 0."""
        self.both("drain")
        limits = self.twin.limits
        for wait in ("queue_ttl_ns", "lease_ttl_ns", "lease_grace_ns", "answer_ttl_ns"):
            self.now_ns += limits[wait]
            self.poll()
        self.compare()
        stats = self.core.stats(self.now_ns)
        gauges = [stats["totals"][k] for k in ("queued", "live_leases", "promised_tokens")]
        gauges.append(stats["totals"]["stored_answers"])
        keys = ("promised_tokens", "posted_tokens", "live_leases", "queued")
        gauges += [row[k] for row in stats["pools"] + stats["flows"] for k in keys]
        assert not any(gauges)
        assert self.core.next_deadline() == -1


def flow_key(twin: Twin, flow: int) -> bytes:
    """Return the key of a flow's row."""
    f = twin.flows[flow]
    name = twin.classes.items[f.cls].name if f.cls else b""
    return b"f" + len(name).to_bytes(2, "big") + name + twin.flow_names[f.base]


def restarted(given: dict[str, Any], twin: Twin, now_ns: int) -> core.Scheduler:
    """Return a fresh core that is configured as the twin is by now."""
    new, quotas = core.Scheduler(**given, lease_id_base=twin.lease_next), twin.quotas
    if twin.positions.shared:
        new.set_shared(now_ns)
    for k, c in enumerate(twin.classes.items):
        new.set_class(c.name or b"gone%d" % k, c.rank, c.ageing_ns, c.exempt)
        if c.gone:
            new.set_class_gone(c.name or b"gone%d" % k)
    for i, f in enumerate(twin.flows):
        if f.base == i:
            new.set_flow(twin.flow_names[i], f.weight_milli)
            default, named = twin.classes.default.get(i, 0), twin.classes.named.get(i, ())
            new.set_flow_class(i, default, named)
    names = {node: name for name, node in quotas.names.items()}
    owners = {node: flow for flow, node in quotas.own.items()}

    def share(node: int) -> tuple[int, int, int]:
        n = quotas.shares.items.get(node)
        return (n.nominal, n.lends, n.borrows) if n else (0, -1, -1)

    def give(node: int, **share: int) -> None:
        if node in names:
            new.set_quota(now_ns, names[node], **share)
        else:
            new.set_flow_quota(now_ns, owners[node], **share)

    for node in range(len(quotas.nodes)):  # nodes keep their numbers
        if node in names:
            assert new.set_quota(now_ns, names[node]) == node
        elif node == quotas.shares.root:  # the first share makes it
            give(0, share=1)
        else:
            new.set_flow_quota(now_ns, owners[node], requests=1)
    for node, n in enumerate(quotas.nodes):
        rates = (n.buckets[k].rate if k in n.buckets else 0 for k in range(4))
        if node in names:
            new.set_quota(now_ns, names[node], n.parent, *rates, n.concurrency, *share(node))
        elif node in owners:
            more = *rates, n.concurrency, *share(node)
            new.set_flow_quota(now_ns, owners[node], n.parent, False, *more)
    tenants = [i for i, f in enumerate(twin.flows) if f.base == i]
    for flow in [flow for flow in tenants if flow in quotas.first]:
        parent = quotas.first[flow]
        refuses = flow in quotas.refusing
        if flow not in quotas.own:
            new.set_flow_quota(now_ns, flow, parent, refuses)
        else:
            n = quotas.nodes[quotas.own[flow]]
            rates = (n.buckets[k].rate if k in n.buckets else 0 for k in range(4))
            more = *rates, n.concurrency, *share(quotas.own[flow])
            new.set_flow_quota(now_ns, flow, n.parent, refuses, *more)
    for pool, node in quotas.models.items():
        new.set_pool_quota(now_ns, pool, node)
    for flow in twin.audit.flows.intersection(tenants):
        new.set_flow_mode(now_ns, flow, True)
    for name, limits in twin.pool_limits.items():
        new.set_pool_limits(now_ns, name, **limits)
    for name, tokens in twin.adapter_weights.items():
        new.set_adapter(now_ns, name, tokens)
    for name, p in zip(twin.pool_names, twin.pools, strict=True):
        figures = (p.engine_tokens, p.block_size, p.engine_max_running)
        new.set_pool(now_ns, name, p.epoch, *figures, p.max_model_tokens)
    return new


def difference(got: Any, want: Any) -> str:
    """Return the differences of two sections."""
    if isinstance(got, list):
        got, want = dict(enumerate(got)), dict(enumerate(want))
    return "\n".join(
        f"{key}: core {got.get(key)}\n{' ' * len(str(key))}  twin {want.get(key)}"
        for key in want
        if got.get(key) != want[key]
    )
