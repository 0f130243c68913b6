"""State that outlives a restart: counters, quotas, predictions, and charges of replayed leases."""

import random
from typing import Any

import pytest

from schedsvc import _core as core
from tests.seeds import fresh

from .support import SECOND, admit, grant, make, outcomes, pool, vtc

FLOWS = (("a", 1000), ("b", 1000), ("c", 1000))
TTL_NS, GRACE_NS = 10 * SECOND, 20 * SECOND


def saved(scheduler: core.Scheduler, now_ns: int, at_once: int = 1_000) -> dict[bytes, bytes]:
    rows = []
    while some := scheduler.save(now_ns, at_once):
        rows += some
    return dict(rows)


def reborn(old: core.Scheduler, now_ns: int, away_ns: int = 0, **options: Any) -> core.Scheduler:
    """Return another process with the same configuration; its clock begins at 0."""
    rows = [(key, value, away_ns) for key, value in saved(old, now_ns).items()]
    new = make(*FLOWS, **{"lease_id_base": 1_000_000, **options})
    assert new.set_saved(0, rows) == len(rows)
    new.check()
    return new


def serve(s: core.Scheduler, now_ns: int, name: str, flow: int, output: int = 10) -> None:
    d = grant(s, now_ns, name, flow=flow)
    assert s.complete(now_ns, d.lease_id, 1, output_tokens=output)


def backlog(s: core.Scheduler, now_ns: int, flows: tuple[int, ...], serial: str) -> None:
    """Queue twenty requests of each flow, of lengths that make no two counters equal."""
    for k in range(20):
        for flow in flows:
            admit(s, now_ns, f"{serial}{flow}-{k}", 300 + 7 * flow + k, flow=flow)


def turns(s: core.Scheduler, now_ns: int, live: core.Decision, count: int) -> list[int]:
    """Run one after the other; a request whose turn it was leaves out the running one."""
    found = []
    for _ in range(count):
        s.complete(now_ns, live.lease_id, live.pool_epoch, output_tokens=10)
        (live,) = s.poll(now_ns)
        assert live.outcome == core.GRANTED
        found.append(live.flow)
    return found


@pytest.mark.parametrize("back", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_order_of_service_goes_on(back: tuple[int, ...]) -> None:
    """The flow that was served least before the kill is first after it, in any order of arrival."""
    s = make(*FLOWS, capacity=500, flow_queue_max=100)
    small = [grant(s, 0, f"small{k}", prompt, 1, flow=k) for k, prompt in enumerate((5, 300, 90))]
    backlog(s, 0, (0, 1, 2), "before")
    for d in small:
        s.complete(0, d.lease_id, 1)
    (live,) = s.poll(0)
    assert live.flow == 0
    new = reborn(s, 0, capacity=500, flow_queue_max=100)
    forgetful = make(*FLOWS, capacity=500, flow_queue_max=100)
    for k in (new, forgetful):
        held = live.reserved_tokens
        state = k.replay(0, 0, b"before0-0", live.lease_id, 0, 1, held, 300, 10)
        assert state == core.LEASE_LIVE
        backlog(k, 0, back, "before")  # asked again
        assert not k.poll(0)
        k.check()
    want = turns(s, 0, live, 30)
    assert turns(new, 0, live, 30) == want
    assert turns(forgetful, 0, live, 30) != want
    assert [vtc(new, 0, flow) for flow in range(3)] == [vtc(s, 0, flow) for flow in range(3)]
    new.check()


def test_active_flow_stays_active_for_a_lease_ttl() -> None:
    s = make(*FLOWS, capacity=100, credit_max_micro=0)
    serve(s, 0, "a0", flow=0)
    level = vtc(s, 0, 0)  # at the pick of the next one
    serve(s, 0, "a1", flow=0)
    admit(s, 0, "c", flow=2)
    assert vtc(s, 0, 2) == level < vtc(s, 0, 0)
    rows = [(key, value, 0) for key, value in saved(s, 0).items()]
    # c, which has not returned, counts as active; then it does not any more.
    for now_ns, lifted_to in ((TTL_NS - 1, level), (TTL_NS, vtc(s, 0, 0))):
        new = make(*FLOWS, capacity=100, credit_max_micro=0)
        new.set_saved(0, rows)
        admit(new, now_ns, "a", flow=0)
        admit(new, now_ns, "b", flow=1)
        assert vtc(new, now_ns, 1) == lifted_to
        new.check()


def test_a_replayed_lease_is_charged_once() -> None:
    s = make(*FLOWS, capacity=1_000)
    d = grant(s, 0, "r", 100, 50)
    s.progress(0, d.lease_id, 1, 100, 0, 20)
    before = vtc(s, 0)
    new = reborn(s, 0, capacity=1_000)
    assert vtc(new, 0) == before
    told = new.replay(0, 0, b"r", d.lease_id, 0, 1, d.reserved_tokens, 100, 50, 100, 0, 20)
    assert told == core.LEASE_LIVE
    assert vtc(new, 0) == before
    new.complete(0, d.lease_id, 1, output_tokens=25)
    s.complete(0, d.lease_id, 1, output_tokens=25)
    assert vtc(new, 0) == vtc(s, 0)
    # One that never ran is charged like any other.
    new.replay(0, 0, b"x", 7, 0, 1, 100, 100, 50, 100)
    assert vtc(new, 0) > vtc(s, 0)
    new.check()


def test_a_lease_that_is_never_replayed_stays_charged() -> None:
    s = make(*FLOWS, capacity=1_000)
    grant(s, 0, "r", 100, 50)
    new = reborn(s, 0, capacity=1_000)
    new.poll(TTL_NS + GRACE_NS)
    assert vtc(new, TTL_NS + GRACE_NS) == vtc(s, 0)
    # No debt is left: a second process knows nothing of it.
    third = reborn(new, TTL_NS + GRACE_NS, capacity=1_000)
    third.replay(0, 0, b"r", 7, 0, 1, 100, 100, 50)
    assert vtc(third, 0) == 2 * vtc(s, 0)


def test_repaid_debt_is_saved_as_such() -> None:
    """The time is all that has changed: a third process neither holds nor forgives anything."""
    s = make(*FLOWS, capacity=100)
    grant(s, 0, "r", 60, 30)
    new = reborn(s, 0, capacity=100)
    rows = saved(new, 0)
    later_ns = TTL_NS + GRACE_NS
    new.poll(later_ns)
    rows |= saved(new, later_ns)
    third = make(*FLOWS, capacity=100)
    third.set_saved(0, [(key, value, 0) for key, value in rows.items()])
    before = vtc(third, 0)
    admit(third, 0, "next", 40, 10)
    assert outcomes(third.poll(0)) == [core.GRANTED]
    third.replay(0, 0, b"r", 7, 0, 1, 50, 30, 10)
    assert vtc(third, 0) > before + 40_000_000
    third.check()


def test_blocks_of_leases_are_not_granted_before_their_replay() -> None:
    s = make(*FLOWS, capacity=100)
    d = grant(s, 0, "r", 60, 30)
    new = reborn(s, 0, capacity=100)
    admit(new, 0, "next", 40, 10)
    assert not new.poll(0)
    assert pool(new, 0)["wait_reason"] == "KV"
    assert new.next_deadline() <= TTL_NS + GRACE_NS
    # Replayed and ended: there is room.
    new.replay(SECOND, 0, b"r", d.lease_id, 0, 1, 90, 60, 30)
    assert not new.poll(SECOND)
    new.complete(SECOND, d.lease_id, 1)
    assert outcomes(new.poll(SECOND)) == [core.GRANTED]
    new.check()


def test_a_lease_never_replayed_is_held_for_its_ttl_and_grace() -> None:
    s = make(*FLOWS, capacity=100)
    grant(s, 0, "r", 60, 30)
    new = reborn(s, 0, capacity=100, queue_ttl_ns=60 * SECOND)
    admit(new, 0, "next", 40, 10)
    assert not new.poll(TTL_NS + GRACE_NS - 1)
    assert new.next_deadline() == TTL_NS + GRACE_NS
    assert outcomes(new.poll(TTL_NS + GRACE_NS)) == [core.GRANTED]


def test_a_new_epoch_owes_nothing() -> None:
    s = make(*FLOWS, capacity=100)
    grant(s, 0, "r", 60, 30)
    new = reborn(s, 0, capacity=100)
    new.set_pool(0, b"p", 2, 100, 1)
    admit(new, 0, "next", 40, 10)
    assert outcomes(new.poll(0)) == [core.GRANTED]


def test_a_pool_that_comes_later_finds_its_headroom_and_what_it_owes() -> None:
    s = core.Scheduler(headroom_ppm=20_000)
    s.set_flow(b"f", 1000)
    s.set_pool(0, b"late", 5, 1_000, 1)
    grant(s, 0, "r", 800, 10)
    s.telemetry(0, 0, 5, 1, 0, 800, 0)
    s.telemetry(SECOND, 0, 5, 1, 0, 800, 3)  # preempted: more headroom
    headroom = pool(s, SECOND)["headroom_tokens"]
    assert headroom > 20
    rows = [(key, value, 0) for key, value in saved(s, SECOND).items()]
    new = core.Scheduler(headroom_ppm=20_000)
    new.set_flow(b"f", 1000)
    assert new.set_saved(0, rows) == len(rows)
    # Also a process in between that the pool never came to keeps it.
    rows = [(key, value, 0) for key, value in saved(new, 0).items()]
    new = core.Scheduler(headroom_ppm=20_000)
    new.set_flow(b"f", 1000)
    new.set_saved(0, rows)
    new.set_pool(0, b"late", 5, 1_000, 1)
    assert pool(new, 0)["headroom_tokens"] == headroom
    admit(new, 0, "next", 400, 10)
    assert not new.poll(0)


def test_buckets_are_credited_for_the_time_away() -> None:
    s = make(*FLOWS, capacity=3_000)
    s.set_flow_quota(0, 0, total_tokens=6_000)
    d = grant(s, 0, "r", 2_990, 10)
    s.complete(0, d.lease_id, 1, output_tokens=10)
    rows = saved(s, 0)
    for away_s, left in ((0, 3_000), (12, 4_200), (3_600, 6_000)):
        new = make(*FLOWS, capacity=1_000)
        new.set_flow_quota(0, 0, total_tokens=6_000)
        new.set_saved(0, [(key, value, away_s * SECOND) for key, value in rows.items()])
        assert new.flow_stats(0, 0)["quotas"][0]["remaining"] == left


def test_open_bills_are_paid_once() -> None:
    def limited() -> core.Scheduler:
        s = make(*FLOWS, capacity=1_000)
        group = s.set_quota(0, b"team", requests=60, total_tokens=6_000)
        s.set_flow_quota(0, 0, group, total_tokens=3_000, concurrency=2)
        return s

    s = limited()
    d = grant(s, 0, "r", 500, 100)
    rows = [(key, value, 0) for key, value in saved(s, 0).items()]
    new = limited()
    new.set_saved(0, rows)
    before = new.flow_stats(0, 0)["quotas"]
    new.replay(0, 0, b"r", d.lease_id, 0, 1, d.reserved_tokens, 500, 100)
    after = new.flow_stats(0, 0)["quotas"]
    assert after[0] == before[0]  # requests
    assert after[1] == before[1]  # tokens
    assert (before[2]["remaining"], after[2]["remaining"]) == (2, 1)  # at once
    new.complete(0, d.lease_id, 1, output_tokens=100)
    new.check()
    assert new.flow_stats(0, 0)["quotas"][1] == before[1]


def test_another_limit_keeps_what_was_taken() -> None:
    s = make(*FLOWS, capacity=1_000)
    s.set_flow_quota(0, 0, total_tokens=6_000)
    d = grant(s, 0, "r", 900, 100)
    s.complete(0, d.lease_id, 1, output_tokens=100)
    rows = [(key, value, 0) for key, value in saved(s, 0).items()]
    for limit, left in ((10_000, 9_000), (2_000, 1_000), (500, 0)):
        new = make(*FLOWS, capacity=1_000)
        new.set_flow_quota(0, 0, total_tokens=limit)
        new.set_saved(0, rows)
        assert new.flow_stats(0, 0)["quotas"][0]["remaining"] == left
        new.check()


@pytest.mark.parametrize("samples_min", [5, 60])
def test_predictions_are_those_of_before(samples_min: int) -> None:
    rnd = random.Random(samples_min)
    s = make(*FLOWS, capacity=100_000, samples_min=samples_min)
    for k in range(700):
        adapter = rnd.choice((b"", b"x", b"y%d" % rnd.randrange(30)))
        flow = rnd.choice((0, 0, 1))
        d = grant(s, 0, f"r{k}", output=2_000, flow=flow, adapter=adapter)
        s.complete(0, d.lease_id, 1, output_tokens=int(rnd.expovariate(0.01)))
    new = reborn(s, 0, capacity=100_000, samples_min=samples_min)
    kept = ("predicted_p50_tokens", "predicted_quantile_tokens", "predictor_judged")
    kept += ("predictor_level_ppm", "predictor_coverage_ppm", "reserved_to_used_ppm")
    for flow in range(3):
        rows = [x.flow_stats(0, flow) for x in (s, new)]
        assert [rows[0][k] for k in kept] == [rows[1][k] for k in kept]
    for adapter in (b"x", *(b"y%d" % k for k in range(30))):
        first, second = (
            grant(x, 0, f"last{adapter!r}", output=2_000, adapter=adapter) for x in (s, new)
        )
        assert first.reserved_tokens == second.reserved_tokens
        for x, d in ((s, first), (new, second)):
            x.complete(0, d.lease_id, 1, output_tokens=50)
    assert saved(new, 0)[b"o"] == saved(s, 0)[b"o"]


def test_saving_is_bounded_and_returns_only_changes() -> None:
    s = core.Scheduler()
    for k in range(500):
        s.set_flow(b"f%d" % k, 1000)
    s.set_pool(0, b"p", 1, 10**6, 16)
    slices = []
    while rows := s.save(0, 64):
        slices.append(len(rows))
    assert sum(slices) == 502  # and of all flows, and the pool
    assert max(slices) <= 64 + 2
    assert not s.save(0, 64)
    d = grant(s, 0, "r", flow=7)
    assert [key for key, _ in s.save(0, 64)] == [b"f\0\0f7", b"o", b"pp"]
    s.complete(0, d.lease_id, 1, output_tokens=3)
    assert {key for key, _ in s.save(0, 64)} == {b"f\0\0f7", b"l\0\0f7", b"o", b"pp"}
    with pytest.raises(core.CallerError, match="rows_max"):
        s.save(0, 0)


def test_only_a_fresh_scheduler_is_restored() -> None:
    s = make(*FLOWS)
    rows = [(key, value, 0) for key, value in saved(s, 0).items()]
    admit(s, 0, "r")
    with pytest.raises(core.CallerError, match="saw no request"):
        s.set_saved(0, rows)
    new = make(*FLOWS)
    new.set_saved(0, rows)
    with pytest.raises(core.CallerError, match="saw no request"):
        new.set_saved(0, rows)


def test_rows_of_what_is_not_configured_are_left_out() -> None:
    s = make(*FLOWS)
    s.set_flow_quota(0, 0, requests=5)
    s.set_quota(0, b"team", requests=5)
    rows = [(key, value, 0) for key, value in saved(s, 0).items()]
    new = make(("z", 1000))
    assert new.set_saved(0, rows) == 2  # a row for all flows, and one for the pool
    new.check()


WRONG = {
    b"f\0\0a": (
        b"\x08",
        b"\xff",
        b"\x08" + b"\xff" * 9 + b"\x01",
        b"\x18\x7f",
        b"\x10\x0a",
        b"\x42\x03\x1a\x01\xc0",  # a position in a pool whose name is not UTF-8
    ),
    b"l\0\0a": (
        b"\x0a\x02\x08\x05",  # five lengths, and none of them
        b"\x0a\x05\x08\x01\x2a\x01\x01",  # a bucket without its count
        b"\x0a\x08\x08\x01\x10\x01\x2a\x02\x00\x01",  # a step of 0
        b"\x0a\x0a\x08\x01\x10\x01\x2a\x04\x80\x06\x80\x04",  # more than the window holds
        b"\x0a\x09\x08\x01\x10\x01\x2a\x03\x81\x06\x01",  # beyond the last bucket
        b"\x12\x04\x08\x01\x22\x00",  # an adapter without its hash
        b"\x0a\xff\xff\xff\xff\x0f",  # longer than all
        b"\x18\x01\x20\x02",  # more held than judged
    ),
    b"qteam": (
        b"\x0a\x02\x08\x04",
        b"\x0a\x04\x10\x01\x18\x7f\x00",
        b"\x10" + b"\xff" * 9 + b"\x01",
    ),
    b"pp": (b"\x08" + b"\xff" * 9 + b"\x01", b"\x20\x02", b"\x28\x02"),
    b"p": (b"",),
    b"p\xc0": (b"\x28\x01",),  # a name that is not UTF-8
    b"p\x1b": (b"\x28\x01",),  # a control character
    b"o": (
        b"\x10" + b"\xff" * 9 + b"\x01",
        b"\x42\xff\x7f",
        b"\x0a\x02\x08\x05",
        b"\x48\x02",
    ),
    b"s" + b"\1" * 16 + b"\0\0a": (b"\x08", b"\x08" + b"\xff" * 9 + b"\x01"),
    b"s\0\0a": (b"",),  # without the hash of its name
    b"x": (b"",),
    b"fa": (b"",),
    b"f\0\x09a": (b"",),
    b"l\xff\xffa": (b"",),
    b"": (b"",),
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in WRONG.items() for value in values]
)
def test_a_wrong_row_is_refused_and_none_counts(key: bytes, value: bytes) -> None:
    s = make(*FLOWS)
    good = (b"f\0\0b", b"\x08\x64\x10\xc8\x01", 0)
    with pytest.raises(core.CallerError):
        s.set_saved(0, [good, (key, value, 0)])
    assert vtc(s, 0, 1) == 0
    assert s.set_saved(0, [good]) == 1
    assert vtc(s, 0, 1) == 100


@pytest.mark.parametrize(
    "rows",
    [
        [(b"fa", b"")],
        [(b"fa", "text", 0)],
        [("fa", b"", 0)],
        [(b"fa", b"", -1)],
        [(b"fa", b"", 1 << 70)],
        [(b"fa", b"", 0), (b"fa", b"", 0)],
        [7],
    ],
)
def test_bytes_that_are_no_row_are_refused(rows: Any) -> None:
    with pytest.raises(core.CallerError, match="rows"):
        make(*FLOWS).set_saved(0, rows)


def test_mutated_rows_never_break_the_books() -> None:
    """The bytes of a real state are changed at random: refused, or a scheduler that works."""
    rnd = random.Random(1)
    s = make(*FLOWS, capacity=500, samples_min=5)
    group = s.set_quota(0, b"team", requests=60, total_tokens=6_000)
    s.set_flow_quota(0, 0, group, total_tokens=3_000, concurrency=2)
    for k in range(200):
        d = grant(s, k * SECOND, f"r{k}", flow=k % 3, adapter=b"x" if k % 2 else b"")
        s.complete(k * SECOND, d.lease_id, 1, output_tokens=rnd.randint(0, 10))
    grant(s, 200 * SECOND, "runs")
    real = list(saved(s, 200 * SECOND).items())
    refused = 0
    for _ in range(600):
        rows = [(key, mutated(rnd, value), rnd.choice((0, SECOND, 1 << 58))) for key, value in real]
        new = make(*FLOWS, capacity=500, samples_min=5)
        group = new.set_quota(0, b"team", requests=60, total_tokens=6_000)
        new.set_flow_quota(0, 0, group, total_tokens=3_000, concurrency=2)
        try:
            new.set_saved(0, rows)
        except core.CallerError:
            refused += 1
        new.check()
        for k in range(6):
            admit(new, k * SECOND, f"n{k}", flow=k % 3, adapter=b"x")
            for d in new.poll(k * SECOND):
                if d.outcome == core.GRANTED:
                    new.complete(k * SECOND, d.lease_id, 1, output_tokens=5)
            new.check()
        new.poll(100 * SECOND)
        new.stats(100 * SECOND)
        new.check()
    assert 100 < refused < 590


def mutated(rnd: random.Random, value: bytes) -> bytes:
    """Return it mostly as it is; else with a byte changed, lost or added, or cut."""
    if rnd.random() < 0.85 or not value:
        return value
    at = rnd.randrange(len(value))
    return rnd.choice(
        (
            value[:at] + bytes([rnd.randrange(256)]) + value[at + 1 :],
            value[:at] + value[at + 1 :],
            value[:at] + bytes([rnd.randrange(256)]) + value[at:],
            value[:at],
        )
    )


@pytest.mark.parametrize("seed", [10_227_429_564_796, *fresh(3)])  # first: windows of light flows
def test_a_drained_scheduler_decides_as_if_it_had_never_stopped(seed: int) -> None:
    """The scheduler is saved and restored between two bursts: the second is alike, to the token."""
    rnd = random.Random(seed)
    first = make(*FLOWS, capacity=900, samples_min=5, queue_ttl_ns=3 * SECOND)
    burst(first, rnd, 0)
    now_ns = 400 * SECOND
    first.poll(now_ns)  # its answers are forgotten
    second = make(*FLOWS, capacity=900, samples_min=5, queue_ttl_ns=3 * SECOND)
    second.poll(now_ns)
    second.set_saved(now_ns, [(key, value, 0) for key, value in saved(first, now_ns).items()])
    seed_of_second = rnd.random()
    logs = [burst(s, random.Random(seed_of_second), now_ns) for s in (first, second)]
    assert logs[0] == logs[1]


def burst(s: core.Scheduler, rnd: random.Random, start_ns: int) -> list[tuple[Any, ...]]:
    log: list[tuple[Any, ...]] = []
    live: list[core.Decision] = []
    now_ns = start_ns
    for k in range(800):
        now_ns += int(rnd.expovariate(1 / 2e7))
        s.admit(
            now_ns, rnd.randrange(3), b"%d-%d" % (start_ns, k), rnd.randint(1, 100),
            rnd.choice((10, 80)), adapter=rnd.choice((b"", b"x", b"y")), tag=k,
            reports_progress=rnd.random() < 0.5,
        )  # fmt: skip
        for d in s.poll(now_ns):
            log.append((d.tag, d.outcome, d.reserved_tokens, d.retry_after_ms, d.waited_ns))
            live += [d] if d.outcome == core.GRANTED else []
        while len(live) > rnd.randint(3, 8):
            d = live.pop(rnd.randrange(len(live)))
            s.complete(now_ns, d.lease_id, 1, output_tokens=rnd.randint(0, 60))
    for d in live:
        s.complete(now_ns, d.lease_id, 1, output_tokens=30)
    while (due_ns := s.next_deadline()) >= 0:
        now_ns = max(now_ns, due_ns)
        for d in s.poll(now_ns):
            if d.outcome == core.GRANTED:
                s.complete(now_ns, d.lease_id, 1, output_tokens=9)
    return log


def test_a_revoked_lease_is_owed_nothing_after_a_restart() -> None:
    s = make(*FLOWS)
    d = grant(s, 0, "runs", 10, 10)
    assert saved(s, 0)
    assert s.revoke(0, d.lease_id) == core.LEASE_LIVE
    rows = saved(s, 0)
    assert b"pp" in rows
    new = make(*FLOWS)
    new.set_saved(0, [(key, value, 0) for key, value in rows.items()])
    assert pool(new, 0)["load_tokens"] == 0
