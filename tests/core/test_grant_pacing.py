"""Requests of one length begin one after the other, so that they do not all end at once."""

import random
from typing import Any

import pytest

from schedsvc import _core as core
from tests.seeds import fresh

from .differential import Differential
from .support import SECOND, admit, grant, make, pool

MS = 10**6
CAPACITY = 700
PROMPT, OUTPUT = 50, 20  # ten of them fit whole
#: The part of the capacity that one holds on average, and half a block, of the 100 ms that it runs.
APART_NS = 100 * MS * (PROMPT + (OUTPUT + 1) // 2) // CAPACITY


class Hog:
    """One flow or two, of which the first has shown what its requests are like."""

    def __init__(self, output: tuple[int, ...] = (OUTPUT,), **more: Any) -> None:
        given = {"ledger": "peak", "dispatch": "backfill", "quantile_ppm": 600_000}
        flows = more.pop("flows", (("hog", 1000),))
        self.core = make(*flows, capacity=CAPACITY, **({"samples_min": 4} | given | more))
        self.now_ns = 0
        self.asked = 0
        for n in range(60):
            d = grant(self.core, self.now_ns, f"warm{n}", PROMPT, 100, reports_progress=True)
            self.now_ns += 100 * MS
            self.core.complete(self.now_ns, d.lease_id, 1, output_tokens=output[n % len(output)])

    def ask(self, count: int, **more: Any) -> list[int]:
        given: dict[str, Any] = {"reports_progress": True} | more
        first, self.asked = self.asked, self.asked + count
        return [
            admit(self.core, self.now_ns, f"r{n}", PROMPT, 100, **given)
            for n in range(first, first + count)
        ]

    def granted(self, later_ns: int = 0) -> list[core.Decision]:
        self.now_ns += later_ns
        return [d for d in self.core.poll(self.now_ns) if d.outcome == core.GRANTED]


def test_half_begins_at_once_and_the_others_one_after_the_other() -> None:
    hog = Hog()
    hog.ask(30)
    assert len(hog.granted()) == 5 + 1
    assert pool(hog.core, hog.now_ns)["wait_reason"] == "STAGGER"
    for _ in range(4):
        assert hog.core.next_deadline() == hog.now_ns + APART_NS
        assert hog.granted(APART_NS - 1) == []
        assert len(hog.granted(1)) == 1
    assert pool(hog.core, hog.now_ns)["wait_reason"] == "KV"
    hog.core.check()


def test_a_pool_that_looks_late_makes_up_for_it() -> None:
    hog = Hog()
    hog.ask(30)
    hog.granted()
    late_ns = APART_NS // 2
    assert len(hog.granted(3 * APART_NS + late_ns)) == 3
    assert hog.core.next_deadline() == hog.now_ns + APART_NS - late_ns


def test_time_without_room_is_not_made_up() -> None:
    hog = Hog()
    hog.ask(40)
    leases = [d.lease_id for d in hog.granted()]
    for _ in range(4):
        leases += [d.lease_id for d in hog.granted(APART_NS)]
    hog.now_ns += SECOND
    for lease_id in leases[:5]:
        hog.core.complete(hog.now_ns, lease_id, 1, output_tokens=OUTPUT)
    assert len(hog.granted()) == 1
    assert pool(hog.core, hog.now_ns)["wait_reason"] == "STAGGER"


@pytest.mark.parametrize(
    ("made", "asked"),
    [
        ({"output": (OUTPUT, OUTPUT // 4)}, {}),
        ({"ledger": "sum"}, {}),
        ({"grant_pacing": 0}, {}),
        ({}, {"reports_progress": False}),
        ({"samples_min": 100}, {}),
    ],
    ids=["unlike", "sum", "off", "untold", "unknown"],
)
def test_others_begin_as_there_is_room(made: dict[str, Any], asked: dict[str, Any]) -> None:
    hog = Hog(**made)
    hog.ask(30, **asked)
    hog.granted()
    assert pool(hog.core, hog.now_ns)["wait_reason"] == "KV"


def test_what_fits_begins_at_once() -> None:
    hog = Hog()
    hog.ask(10)
    assert len(hog.granted()) == 10


def test_the_last_of_a_queue_that_fit_begin_at_once() -> None:
    hog = Hog()
    hog.ask(12)
    leases = [d.lease_id for d in hog.granted()]
    assert len(leases) == 6
    for lease_id in leases[:4]:
        hog.core.complete(hog.now_ns, lease_id, 1, output_tokens=OUTPUT)
    assert len(hog.granted()) == 6


def test_a_light_flow_is_not_held() -> None:
    hog = Hog(flows=(("hog", 1000), ("light", 1000)))
    hog.ask(30)
    hog.granted()
    light = admit(hog.core, hog.now_ns, "light", 5, 5, flow=1, reports_progress=True)
    assert [d.handle for d in hog.granted()] == [light]
    assert pool(hog.core, hog.now_ns)["wait_reason"] == "STAGGER"


def test_another_timed_wait_does_not_prolong_its_wait() -> None:
    hog = Hog(flows=(("hog", 1000), ("long", 1000)), credit_max_micro=0)
    hog.ask(30)
    hog.granted()
    hog.core.set_pool_limits(hog.now_ns, batch_max_tokens=7 * PROMPT)
    admit(hog.core, hog.now_ns, "long", 2 * PROMPT, 5, flow=1, reports_progress=True)
    assert hog.granted() == []
    assert pool(hog.core, hog.now_ns)["wait_reason"] == "STAGGER"
    assert hog.core.next_deadline() == hog.now_ns + APART_NS
    assert len(hog.granted(APART_NS)) == 1


def test_those_that_were_not_held_do_not_keep_the_next_away_for_longer() -> None:
    hog = Hog()
    hog.ask(9, queue_ttl_ns=APART_NS // 2)
    asked = hog.ask(30)
    assert len(hog.granted()) == 9
    assert hog.granted(APART_NS - 1) == []
    assert [d.handle for d in hog.granted(1)] == asked[:1]


def test_worse_class_does_not_pass_a_paced_head() -> None:
    hog = Hog(flows=(("hog", 1000), ("later", 1000)), backfill_surplus_ppm=900_000)
    hog.core.set_flow_class(1, hog.core.set_class(b"later", 5))
    hog.ask(30)
    hog.granted()
    admit(hog.core, hog.now_ns, "behind", 5, 5, flow=1, reports_progress=True)
    assert hog.granted() == []
    assert len(hog.granted(APART_NS)) == 1


def test_an_exempt_class_is_not_held() -> None:
    hog = Hog()
    hog.core.set_flow_class(0, 0, (0, hog.core.set_class(b"probe", 0, SECOND, True)))
    hog.ask(30, request_class=b"probe")
    hog.granted()
    assert pool(hog.core, hog.now_ns)["wait_reason"] == "KV"


def test_nothing_is_held_to_its_ttl_and_nothing_that_has_a_deadline() -> None:
    hog = Hog()
    hog.ask(30, queue_ttl_ns=APART_NS // 2)
    assert len(hog.granted()) == 10
    hog = Hog()
    hog.ask(30, deadline_ns=SECOND)
    assert len(hog.granted()) == 10


def test_it_begins_again_with_its_lessons() -> None:
    hog = Hog()
    hog.ask(30)
    assert len(hog.granted()) == 6
    hog.core.reset_learned()
    assert len(hog.granted(1)) == 4  # what is left by what the ten may need


@pytest.mark.parametrize("seed", fresh(2))
def test_the_twin_agrees_where_lengths_are_alike(seed: int) -> None:
    rnd = random.Random(seed)
    pair = Differential(
        rnd.choice(("vtc", "vtc", "dlpm")),
        {"dispatch": rnd.choice(("backfill", "strict"))},
        samples_min=3,
        quantile_ppm=700_000,
        headroom_ppm=rnd.choice((0, 50_000)),
    )
    flows = [pair.flow(name, 1000) for name in ((b"a", b"b", b"c")[: rnd.randint(1, 3)])]
    for name, *figures in ((b"p", 1, 700, 1), (b"q", 1, 1_200, 16))[: rnd.randint(1, 2)]:
        pair.both("set_pool", name, *figures)
    if seed % 2:
        pair.both("set_pool_limits", batch_max_tokens=150)
    held = 0
    for n in range(500):
        for _ in range(rnd.choice((0, 0, 1, 2))):
            flow = flows[0] if rnd.random() < 0.95 else rnd.choice(flows)
            more = {"queue_ttl_ns": 20 * MS} if rnd.random() < 0.02 else {}
            sequences = rnd.choice((1, 1, 1, 2))
            pair.both(
                "admit", flow, b"r%d" % (n * 4 + len(pair.seq_of) % 4),
                (50 if flow == flows[0] else 120) * sequences, 100,
                pool=rnd.choice((-1, -1, 0)), sequences=sequences,
                reports_progress=rnd.random() < 0.97, **more,
            )  # fmt: skip
        pair.poll()
        held += any(p.reason == "STAGGER" for p in pair.twin.pools)
        due_ns = pair.core.next_deadline()
        step_ns = rnd.choice((MS, 3 * MS, 10 * MS))
        if rnd.random() < 0.5 and pair.now_ns < due_ns < pair.now_ns + 50 * MS:
            step_ns = due_ns - pair.now_ns
        pair.now_ns += step_ns
        for r in pair.twin.leases():
            ran_ns = pair.now_ns - r.arrival_ns - r.waited_ns
            output = min(20, ran_ns // (10 * MS)) * r.sequences
            if output == 20 * r.sequences:
                pair.both("complete", r.lease_id, r.epoch, output_tokens=output)
            elif rnd.random() < 0.2:
                pair.both("progress", r.lease_id, r.epoch, output_tokens=output)
        if n % 25 == 0:
            pair.compare()
    assert held > 0
    pair.drain()
