"""Tests DLPM: fair by quanta, the longest match first within one (arXiv 2501.14312)."""

import random
from typing import Any

import pytest

from schedsvc import _core as core
from tests.seeds import fresh

from .support import SECOND, admit, grant, make, totals, vtc

INPUT, OUTPUT = 1_000_000, 2_000_000


def dlpm(*flows: tuple[str, int], quantum: int = 100, **more: Any) -> core.Scheduler:
    return make(*flows, policy="dlpm", quantum_tokens=quantum, **more)


def order(s: core.Scheduler, now_ns: int, handles: dict[int, str]) -> list[str]:
    """Return the order of grants while each in turn runs alone, and ends at once with one token."""
    found = []
    while decisions := s.poll(now_ns):
        for d in decisions:
            assert d.outcome == core.GRANTED
            found.append(handles[d.handle])
            s.complete(now_ns, d.lease_id, 1, output_tokens=1)
    return found


def ask(s: core.Scheduler, *wanted: tuple[int, str, int, tuple[int, ...]]) -> dict[int, str]:
    return {
        admit(s, 0, name, prompt, 10, flow, prefix_block_hashes=hashes): name
        for flow, name, prompt, hashes in wanted
    }


FLOWS = tuple((name, 1000) for name in "abcd")
MINE, YOURS = tuple(range(10)), tuple(range(50, 60))


def test_among_those_with_a_deficit_the_longest_match_goes_first() -> None:
    s = dlpm(*FLOWS, quantum=1_000, max_running=1)
    grant(s, 0, "seen", 10, 10, 0, prefix_block_hashes=MINE)
    handles = ask(
        s,
        (1, "none", 10, YOURS),
        (2, "half", 10, MINE[:5] + YOURS[:5]),
        (3, "all", 10, MINE),
    )
    s.complete(0, 1, 1, output_tokens=1)
    assert order(s, 0, handles) == ["all", "half", "none"]


def test_ties_go_by_arrival() -> None:
    s = dlpm(*FLOWS, quantum=1_000, max_running=1)
    grant(s, 0, "seen", 10, 10, 0)
    handles = ask(s, (3, "first", 10, ()), (1, "second", 10, YOURS), (2, "third", 10, YOURS))
    s.complete(0, 1, 1, output_tokens=1)
    # Once the second has run, its prefix is known; the one without a prefix came before both.
    assert order(s, 0, handles) == ["first", "second", "third"]


def test_flow_without_quantum_waits_for_all_others() -> None:
    s = dlpm(*FLOWS, quantum=100, max_running=1)
    d = grant(s, 0, "spends", 90, 10, 0, prefix_block_hashes=MINE)
    handles = ask(s, (0, "matches", 10, MINE), (1, "has some left", 10, YOURS))
    s.complete(0, d.lease_id, 1, output_tokens=10)  # 110 of 100
    assert order(s, 0, handles) == ["has some left", "matches"]


def test_a_quantum_of_the_least_size_is_vtc() -> None:
    def run(policy: str, **more: int) -> list[str]:
        rnd = random.Random(5)
        s = make(*FLOWS, policy=policy, max_running=1, **more)  # type: ignore[arg-type]
        grant(s, 0, "runs", 10, 10)
        handles = ask(s, *((rnd.randrange(4), f"r{k}", 2 + 3 * k, ()) for k in range(40)))
        s.complete(0, 1, 1, output_tokens=1)
        return order(s, 0, handles)

    assert run("dlpm", quantum_tokens=1) == run("vtc") != run("dlpm", quantum_tokens=10**6)


def test_cached_forecast_is_charged_and_settled_at_the_end() -> None:
    s = dlpm(("a", 1000), cached_price_ppm=100_000)
    first = grant(s, 0, "a", 40, 10, prefix_block_hashes=MINE, reports_progress=True)
    assert vtc(s, 0, 0) == 40 * INPUT
    second = grant(s, 0, "b", 40, 10, prefix_block_hashes=MINE, reports_progress=True)
    assert vtc(s, 0, 0) == 40 * INPUT + 40 * INPUT // 10
    s.progress(0, second.lease_id, 1, 40, 0, 1)
    assert vtc(s, 0, 0) == 40 * INPUT + 40 * INPUT // 10 + OUTPUT
    s.complete(0, second.lease_id, 1, core.COMPLETED, 40, 0, 1)  # the cache had no hits
    assert vtc(s, 0, 0) == 80 * INPUT + OUTPUT
    s.complete(0, first.lease_id, 1, core.COMPLETED, 40, 0, 1)
    s.check()


def test_it_changes_while_everything_runs() -> None:
    s = make(*FLOWS, policy="vtc", max_running=1)
    grant(s, 0, "seen", 10, 10, 0, prefix_block_hashes=MINE)
    handles = ask(s, (1, "b", 10, YOURS), (2, "c", 10, MINE), (3, "d", 10, MINE))
    s.set_options(0, policy="dlpm")
    s.check()
    s.complete(0, 1, 1, output_tokens=1)
    [d] = s.poll(0)
    assert handles[d.handle] == "c"
    s.set_options(0, quantum_tokens=1)
    s.check()
    s.set_options(0, policy="vtc")
    s.check()
    s.complete(0, d.lease_id, 1, output_tokens=1)
    assert order(s, 0, handles) == ["b", "d"]


def served(policy: str, seed: int, steps: int, **more: Any) -> tuple[float, float, float]:
    """Serve flows that always wait, each with prompts of its own beginning, at an engine whose
    cache holds few of them: return the widest difference of their service, the bound that Stats
    shows, and the part of the input that was cached."""
    rnd = random.Random(seed)
    capacity, count = 400, 6
    flows = [(f"f{i}", 1000) for i in range(count)]
    s = make(*flows, policy=policy, capacity=capacity, lease_ttl_ns=10**6 * SECOND, **more)
    chains = {i: tuple(range(1_000 * i, 1_000 * i + 60)) for i in range(count)}
    service = [0] * count
    asked: dict[int, tuple[int, int, int]] = {}
    running: list[list[Any]] = []
    serial = 0
    hits = inputs = 0
    cached: dict[int, int] = {}  # last use of each flow's prefix in the engine
    widest = shown = 0.0

    def fill(flow: int) -> None:
        nonlocal serial
        serial += 1
        prompt, output = rnd.randint(60, 80), rnd.randint(2, 30)
        handle = admit(
            s, step, f"r{serial}", prompt, output, flow, reports_progress=True,
            prefix_block_hashes=chains[flow],
        )  # fmt: skip
        asked[handle] = flow, prompt, output

    step = 0
    for flow in range(count):
        for _ in range(12):
            fill(flow)
    for step in range(1, steps):
        for d in s.poll(step):
            flow, prompt, output = asked.pop(d.handle)
            hit = 60 if flow in cached else 0
            cached.pop(flow, None)
            cached[flow] = step
            while len(cached) > 3:  # the number of prefixes that the engine keeps
                del cached[next(iter(cached))]
            hits, inputs = hits + hit, inputs + prompt
            service[flow] += INPUT * (prompt - hit) + INPUT // 10 * hit
            running.append([d, flow, prompt, hit, output, 0])
            fill(flow)
        for entry in running:
            entry[5] += 1
            service[entry[1]] += OUTPUT
            d, _, prompt, hit, output, produced = entry
            if produced == output:
                s.complete(step, d.lease_id, 1, core.COMPLETED, prompt, hit, produced)
            else:
                s.progress(step, d.lease_id, 1, prompt, hit, produced)
        running = [entry for entry in running if entry[5] < entry[4]]
        widest = max(widest, max(service) - min(service))
        shown = max(shown, totals(s, step)["fairness_bound_micro"])
    s.check()
    return widest, shown, hits / inputs


@pytest.mark.parametrize("seed", fresh(3))
@pytest.mark.parametrize("quantum", [100, 1_000, 5_000])
def test_service_of_backlogged_flows_stays_within_the_bound(quantum: int, seed: int) -> None:
    """The bound is 2 * (U + Q), with U = max(wp * L_input, wq * M)."""
    widest, shown, _ = served("dlpm", seed, 1_200, quantum_tokens=quantum, credit_max_micro=0)
    bound = 2 * (max(INPUT * 80, OUTPUT * 400) + quantum * INPUT)
    assert shown == bound
    assert 0 < widest <= bound


def test_a_larger_quantum_finds_more_in_the_cache() -> None:
    few, _, plain = served("vtc", 1, 1_200)
    _, _, some = served("dlpm", 1, 1_200, quantum_tokens=500)
    many, _, most = served("dlpm", 1, 1_200, quantum_tokens=5_000)
    assert plain < some < most
    assert few < many
