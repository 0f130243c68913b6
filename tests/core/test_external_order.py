"""Tests the order from outside: keys that a function returns, beside policies that the core has."""

import random
from collections import Counter
from typing import Any

import pytest

from schedsvc import _core as core
from tests.seeds import fresh

SECOND = 10**9
TENANTS, POOLS = 4, 3
LIGHTEST = 20  # tokens; cache is kept only for requests that are an eighth of a pool, or less


class Beside:
    """Drives two cores with the same events: one has a policy, one gets its keys from outside."""

    def __init__(self, seed: int, policy: str, **settings: Any) -> None:
        self.random = random.Random(seed)
        self.prompts: dict[int, int] = {}
        keys = {
            "sif": lambda tag, charged_micro, queued, now_ns: self.prompts[tag],
            "lcf": lambda tag, charged_micro, queued, now_ns: charged_micro,
        }
        settings |= {"queue_ttl_ns": 20 * SECOND, "saturation_ppm": 1, "early_refusal": 0}
        self.own = core.Scheduler(policy="external", key=keys[policy], **settings)
        self.cores = (core.Scheduler(policy=policy, **settings), self.own)
        self.now_ns = 1
        self.met: Counter[str] = Counter()
        self.live: dict[int, int] = {}  # the epoch of each lease
        self.handles: list[int] = []
        for at in range(TENANTS):
            self.both("set_flow", b"t%d" % at, self.random.choice((500, 1_000, 3_000)))
        self.both("set_class", b"low", 5, 2 * SECOND)
        for at in range(TENANTS):
            self.both("set_flow_class", at, 0, (0, 1))
        for at in range(POOLS):
            self.both("set_pool", self.now_ns, b"p%d" % at, 1, (90, 60, 150)[at], 1)

    def both(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of both cores, which have to answer alike."""
        expected, own = (getattr(each, name)(*arguments, **named) for each in self.cores)
        if name == "poll":  # a wait is forecast from counters only where they are the order
            expected, own = ([d._replace(retry_after_ms=0) for d in ds] for ds in (expected, own))
        assert own == expected, name
        return own

    def limit(self) -> None:
        """Draw quotas and shares that are hardly ever enough."""
        rnd = self.random
        group = self.both("set_quota", self.now_ns, b"group", concurrency=rnd.choice((0, 2, 4)))
        for flow in range(TENANTS):
            limits = {
                "requests": rnd.choice((0, 0, 20, 200)),
                "total_tokens": rnd.choice((0, 0, 500)),
                "concurrency": rnd.choice((0, 0, 1, 2)),
                "share": rnd.choice((0, 60, 100, 1_000)),
                "borrows": rnd.choice((-1, 0, 0, 50)),
            }
            parent, refuse = rnd.choice((-1, group)), rnd.random() < 0.2
            self.both("set_flow_quota", self.now_ns, flow, parent, refuse, **limits)

    def ask(self) -> None:
        rnd, tag = self.random, len(self.prompts) + 1
        self.prompts[tag] = rnd.randrange(LIGHTEST, 40)
        handle = self.both(
            "admit", self.now_ns, rnd.randrange(TENANTS), b"r%d" % tag, self.prompts[tag], 10,
            pool=rnd.choice((-1, -1, *range(POOLS))), tag=tag, reports_progress=True,
            request_class=rnd.choice((b"", b"", b"low")),
        )  # fmt: skip
        if handle > 0:
            self.handles.append(handle)

    def step(self) -> None:
        rnd, event = self.random, self.random.random()
        if event < 0.02:
            self.limit()
        elif event < 0.06 and self.handles:
            self.both("cancel", self.now_ns, self.handles.pop(rnd.randrange(len(self.handles))))
        elif event < 0.5 and self.live:
            lease = rnd.choice(list(self.live))
            epoch = self.live[lease]
            total = rnd.randrange(1, 11)
            if event < 0.25:
                self.both("progress", self.now_ns, lease, epoch, output_tokens=total)
            else:
                self.both("complete", self.now_ns, lease, epoch, output_tokens=total)
                del self.live[lease]
        else:
            self.ask()
        self.now_ns += rnd.choice((0, SECOND // 10, SECOND // 2, SECOND))
        self.poll()

    def poll(self) -> None:
        for d in self.both("poll", self.now_ns):
            self.met[core_names[d.outcome]] += 1
            if d.outcome == core.GRANTED:
                self.live[d.lease_id] = d.pool_epoch
            else:
                self.live.pop(d.lease_id, None)
        self.both("digest")
        self.own.check()


core_names = {
    value: name
    for name, value in vars(core).items()
    if isinstance(value, int) and name.startswith(("GRANTED", "EVICTED_", "EXPIRED", "CANCELLED"))
}


# Other policies than those by counters differ in whom they let pass a head, not in the order.
@pytest.mark.parametrize(
    ("policy", "settings"),
    [("sif", {}), ("lcf", {"dispatch": "strict", "headroom_ppm": 0})],
)
@pytest.mark.parametrize("seed", fresh(4))
def test_the_keys_of_a_known_policy_decide_as_it_does(
    policy: str, settings: dict[str, Any], seed: int
) -> None:
    pair = Beside(seed, policy, **settings)
    pair.limit()
    for _ in range(600):
        pair.step()
    assert pair.met["GRANTED"] > 100
    assert pair.met["EVICTED_TTL"]


def made(**functions: Any) -> core.Scheduler:
    """Make a core with two tenants and a pool that runs one request at a time."""
    scheduler = core.Scheduler(policy="external", **functions)
    for name in (b"a", b"b"):
        scheduler.set_flow(name, 1_000)
    scheduler.set_pool(0, b"p", 1, 1_000, 1, 1)
    return scheduler


def granted(scheduler: core.Scheduler, now_ns: int = 1) -> list[int]:
    """Let one request after the other run to its end; return their tags."""
    order = []
    while found := scheduler.poll(now_ns):
        scheduler.check()
        (one,) = found
        order.append(one.tag)
        scheduler.complete(now_ns, one.lease_id, 1, input_tokens=10, output_tokens=1)
    return order


def test_negative_keys_go_first_and_ties_by_arrival() -> None:
    scheduler = made(key=lambda tag, *_: -5 if tag == 3 else 0)
    for tag, flow in ((1, 0), (2, 0), (3, 1), (4, 1)):
        scheduler.admit(1, flow, b"%d" % tag, 10, 1, tag=tag)
    assert granted(scheduler) == [3, 1, 2, 4]


def test_requests_of_one_tenant_keep_their_order_without_places() -> None:
    scheduler = made(key=lambda tag, *_: -tag)
    for tag in (1, 2, 3):
        scheduler.admit(1, 0, b"%d" % tag, 10, 1, tag=tag)
    assert granted(scheduler) == [1, 2, 3]


def test_places_order_the_requests_of_one_tenant() -> None:
    asked = []

    def key(tag: int, charged_micro: int, queued: int, now_ns: int) -> int:
        asked.append(tag)
        return 0

    scheduler = made(key=key, place=lambda tag: -tag)
    for tag in (1, 2, 3):
        scheduler.admit(1, 0, b"%d" % tag, 10, 1, tag=tag)
        scheduler.check()
    assert asked == [1, 2, 3]  # each became the first of the queue
    assert granted(scheduler) == [3, 2, 1]


def test_a_key_is_asked_for_at_each_charge_of_a_tenant_that_waits() -> None:
    asked: list[tuple[int, int, int]] = []

    def key(tag: int, charged_micro: int, queued: int, now_ns: int) -> int:
        asked.append((tag, charged_micro // 10**6, queued))
        return charged_micro

    scheduler = made(key=key)
    for tag in (1, 2, 3):
        scheduler.admit(1, 0, b"%d" % tag, 10, 9, tag=tag, reports_progress=True)
    (first,) = scheduler.poll(1)
    asked.clear()
    charges = []
    for total in (1, 2, 5):
        scheduler.progress(1, first.lease_id, 1, input_tokens=10, output_tokens=total)
        charges.append(asked[-1])
    input_price, output_price = 1, 2
    spent = [input_price * 10 + output_price * total for total in (1, 2, 5)]
    assert charges == [(2, each, 2) for each in spent]
    scheduler.complete(1, first.lease_id, 1, input_tokens=10, output_tokens=5)
    granted(scheduler)


@pytest.mark.parametrize("value", [0.5, True, None, 1 << 60, -(1 << 60), "1"])
def test_a_key_that_is_no_integer_is_named(value: Any) -> None:
    for functions in ({"key": lambda *_: value}, {"key": lambda *_: 0, "place": lambda _: value}):
        scheduler = made(**functions)
        with pytest.raises(core.CallerError, match=r"must be an int from -2\^60 \+ 1") as caught:
            scheduler.admit(1, 0, b"1", 10, 1, tag=1)
        assert caught.value.field == list(functions)[-1]


def test_a_core_lets_the_error_of_a_function_through() -> None:
    with pytest.raises(ZeroDivisionError):
        made(key=lambda *_: 1 // 0).admit(1, 0, b"1", 10, 1, tag=1)


@pytest.mark.parametrize(
    "given", [{"policy": "external"}, {"key": print}, {"policy": "vtc", "place": print}]
)
def test_functions_and_policy_go_together(given: dict[str, Any]) -> None:
    with pytest.raises(core.CallerError, match="policy external takes it, and no other"):
        core.Scheduler(**given)


@pytest.mark.parametrize(("policy", "other"), [("external", "vtc"), ("vtc", "external")])
def test_the_order_from_outside_is_for_the_life_of_a_core(policy: str, other: str) -> None:
    functions = {"key": lambda *_: 0} if policy == "external" else {}
    scheduler = core.Scheduler(policy=policy, **functions)
    with pytest.raises(core.CallerError, match="chosen when a core is made"):
        scheduler.set_options(1, policy=other)


def test_places_exclude_another_order_in_a_queue() -> None:
    scheduler = made(key=lambda *_: 0, place=lambda _: 0)
    with pytest.raises(core.CallerError, match="places from outside"):
        scheduler.set_options(1, flow_order="deadline")


@pytest.mark.parametrize("seed", fresh(6))
@pytest.mark.parametrize("has_places", [False, True])
def test_books_hold_under_any_keys_and_places(seed: int, has_places: bool) -> None:
    """Sessions, classes, quotas, shares and weighted groups do not mind the order."""
    rnd = random.Random(seed)
    place = (lambda tag: tag * 7_919 % 13 - 6) if has_places else None
    scheduler = core.Scheduler(
        policy="external", place=place, queue_ttl_ns=20 * SECOND, saturation_ppm=1,
        key=lambda tag, charged_micro, queued, now_ns: (charged_micro * 31 ^ tag) % 1_000 - 500,
        flow_order=rnd.choice(("arrival", "deadline")),
    )  # fmt: skip
    scheduler.set_class(b"low", 5, 2 * SECOND)
    for at in range(TENANTS):
        scheduler.set_flow_class(scheduler.set_flow(b"t%d" % at, 1_000), 0, (0, 1))
    for at in range(rnd.choice((1, POOLS))):
        scheduler.set_pool(1, b"p%d" % at, 1, (90, 60, 150)[at], 1)
    now_ns, live, verdicts = 1, {}, Counter[int]()
    for tag in range(1, 400):
        if tag % 50 == 1:
            weight_milli = rnd.choice((0, 1_000))
            group = scheduler.set_quota(now_ns, b"g", concurrency=3, weight_milli=weight_milli)
            for flow in range(TENANTS):
                share = rnd.choice((0, 60, 1_000))
                parent = rnd.choice((-1, group))
                scheduler.set_flow_quota(now_ns, flow, parent, requests=90, share=share)
        if live and rnd.random() < 0.7:
            lease, epoch = live.popitem()
            scheduler.complete(now_ns, lease, epoch, output_tokens=rnd.randrange(1, 11))
        scheduler.admit(
            now_ns, rnd.randrange(TENANTS), b"r%d" % tag, rnd.randrange(5, 40), 10, tag=tag,
            request_class=rnd.choice((b"", b"low")), session=rnd.choice((b"", b"s1", b"s2")),
            deadline_ns=rnd.choice((0, 5 * SECOND)), reports_progress=True,
        )  # fmt: skip
        now_ns += rnd.choice((0, SECOND // 10, SECOND // 2))
        for d in scheduler.poll(now_ns):
            verdicts[d.outcome] += 1
            if d.outcome == core.GRANTED:
                live[d.lease_id] = d.pool_epoch
            else:
                live.pop(d.lease_id, None)
        scheduler.check()
    assert verdicts[core.GRANTED] > 50
