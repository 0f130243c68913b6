"""Tests how far service elsewhere keeps a flow back in a pool under `lead_max: auto`."""

import pytest

from schedsvc import _core as core

from .support import admit
from .test_restart import saved

TOKEN = 10**6  # of input, in micro-tokens
# Tokens of input. Each request generates one token of output, which costs two.
LARGE, MIDDLE, SMALL, HUGE = 900, 100, 9, 1_000_000
AS_MANY = (LARGE + 2) // (SMALL + 2)  # small ones cost as much as one large one
FADES = 256  # the largest charge falls by this part of each smaller one
TENANTS = (b"a", b"b")


def bare(groups: tuple[str, str], weight: int) -> core.Scheduler:
    """Make a scheduler with tenants a and b, without pools."""
    s = core.Scheduler(ledger="sum", dispatch="strict", credit_max_micro=0)
    for name, group in zip(TENANTS, groups, strict=True):
        flow = s.set_flow(name, 1_000 if group else weight)
        if group:
            node = s.set_quota(0, b"group:" + group.encode(), -1, weight_milli=weight)
            s.set_flow_quota(0, flow, node)
    return s


def offer(s: core.Scheduler) -> None:
    """Offer a pool for one large request at a time, and one for huge ones."""
    for name, tokens in ((b"here", 1_000), (b"elsewhere", 2 * HUGE)):
        s.set_pool(0, name, 1, tokens, 1)


def serve(s: core.Scheduler, name: str, flow: int, size: int, count: int = 1) -> None:
    for k in range(count):
        admit(s, 0, f"{name}{k}", size, 1, flow, pool=0)
        [granted] = s.poll(0)
        s.complete(0, granted.lease_id, 1, input_tokens=size, output_tokens=1)


def lead(s: core.Scheduler, group_weight: int) -> int:
    """Let both tenants wait for the pool, and return how far huge service elsewhere puts one back
    there, in micro-tokens over the weight of its group, or its own."""
    for k in range(3):
        for flow in (1, 0):
            admit(s, 0, f"last {flow} {k}", LARGE, 1, flow, pool=0)
    admit(s, 0, "huge", HUGE, 1, 0, pool=1)
    assert sorted(d.pool for d in s.poll(0)) == [0, 1]
    s.check()
    served = {f["tenant"]: f["vtc_micro"] for f in s.stats(0, 9)["flows"]}
    return (served["a"] - served["b"]) * 1_000 // group_weight - s.forgiven_micro()


def four_of(charge: int, smaller: int, weight: int = 1_000) -> int:
    """Return four times the largest charge, after smaller charges in all."""
    return round(4 * (charge - smaller / FADES) * TOKEN * 1_000 / weight)


@pytest.mark.parametrize("groups", [("", ""), ("x", "x"), ("x", "y")])
@pytest.mark.parametrize("weight", [1_000, 4_000])
def test_it_is_four_of_the_largest_charge_however_many_small_ones_there_are(
    groups: tuple[str, str], weight: int
) -> None:
    s = bare(groups, weight)
    offer(s)
    serve(s, "large", 1, LARGE)
    serve(s, "small", 0, SMALL, AS_MANY)
    apart = groups[0] != groups[1]
    expected = four_of(LARGE + 2, LARGE + 2, 1_000 if groups == ("x", "x") else weight)
    assert lead(s, weight if apart else 1_000) == pytest.approx(
        expected, abs=4 * AS_MANY
    )  # rounding


def test_a_tenant_of_a_small_weight_makes_it_no_larger_for_others() -> None:
    s = bare(("", ""), 1_000)
    light = s.set_flow(b"c", 1)
    offer(s)
    serve(s, "large", light, LARGE)
    assert lead(s, 1_000) == four_of(LARGE + 2, 0)


def test_a_large_charge_fades_with_the_service_after_it() -> None:
    s = bare(("", ""), 1_000)
    offer(s)
    serve(s, "large", 1, LARGE)
    serve(s, "middle", 0, MIDDLE, FADES * (LARGE + 2) // (MIDDLE + 2))
    assert lead(s, 1_000) == four_of(MIDDLE + 2, 0)


def test_the_largest_charge_outlives_the_process() -> None:
    s = bare(("x", "y"), 4_000)
    offer(s)
    serve(s, "large", 1, LARGE)
    serve(s, "small", 0, SMALL, AS_MANY)
    again = bare(("x", "y"), 4_000)
    again.set_saved(0, [(key, value, 0) for key, value in saved(s, 0).items()])
    offer(again)
    assert lead(again, 4_000) == lead(s, 4_000) > four_of(SMALL + 2, 0, 4_000)


def test_it_forgets_what_earlier_requests_taught() -> None:
    s = bare(("", ""), 1_000)
    offer(s)
    serve(s, "large", 1, LARGE)
    s.reset_learned()
    assert lead(s, 1_000) == 0


def varint(value: int) -> bytes:
    """Write a number as protobuf does."""
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


@pytest.mark.parametrize("passes", [0, 5_000 * TOKEN])
def test_passes_of_a_head_add_to_a_lead_that_is_set(passes: int) -> None:
    s = bare(("", ""), 1_000)
    s.set_options(0, lead_max_micro=700 * TOKEN)
    rows = saved(s, 0)
    rows[b"o"] = varint(17 << 3) + varint(passes)  # the widest lead that passes were given
    s.set_saved(0, [(key, value, 0) for key, value in rows.items()])
    offer(s)
    assert lead(s, 1_000) == 700 * TOKEN + passes
