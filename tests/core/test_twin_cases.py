"""Repeats histories in which core and twin once disagreed, as the state machine found them."""

from typing import Any

import pytest

from .test_twin import Twins, ask_of

BEGIN: dict[str, Any] = {
    "policy": "vtc",
    "modes": {
        "credit_max_micro": -1,
        "ledger": "peak",
        "dispatch": "backfill",
        "flow_order": "arrival",
    },
    "bypass_max": 0,
    "pools": 3,
    "shared": False,
    "classes": 1,
    "headroom_ppm": 0,
    "grace": 0,
    "leases_max": 2,
    "answers_max": 0,
    "adapters_max": 1,
    "samples_min": 1,
    "prefix_affinity_ppm": 0,
    "prefix_blocks_max": 0,
    "quantum_tokens": 1,
    "adapter_affinity_ppm": 0,
    "quantile_ppm": 500_000,
    "flow_queue_tokens_max": 0,
    "queue_tokens_max": 0,
    "saturation_ppm": 1,
    "lead_max_micro": -1,
    "fairness_domain": 0,
    "saturation_band_ppm": 0,
    "early_refusal": 0,
    "refusal_samples_min": 0,
}


@pytest.fixture
def twins() -> Twins:
    state = Twins()
    state.begin(**BEGIN)
    return state


def admit(state: Twins, *numbers: tuple[int, int], polls: bool = False) -> None:
    state.admit(asks=[ask_of(half) for half in numbers], polls=polls)


def test_flows_return_to_all_pools_of_a_quota_at_once(twins: Twins) -> None:
    """Dry runs grant requests that are in no line, too."""
    admit(twins, (3, 0), (9, 0), (0, 0), (1, 0), polls=True)
    for seed in (13_821, 0):
        twins.limit(seed=seed)
    twins.serve(outputs=[0, 1])
    admit(twins, (3, 0))
    for _ in range(2):
        twins.limit(seed=0)
    admit(twins, (2, 0))
    for _ in range(7):
        twins.limit(seed=0)
    admit(twins, (0, 0), (0, 96))
    twins.drain_pool(draining=False, pool=0)
    twins.limit(seed=635)
    twins.teardown()


def test_a_change_of_order_displaces_heads_of_two_flows(twins: Twins) -> None:
    admit(twins, (3, 0), (9, 0), (0, 0), (0, 0), (0, 0), (1, 0), polls=True)
    admit(twins, (1066, 0), polls=True)
    twins.serve(outputs=[9, 17, 7, 31, 5])
    twins.limit(seed=129_511)
    twins.serve(outputs=[29, 19, 0, 26, 27])
    asks = (
        *((494, 600), (10_964, 744), (24_800, 200)),
        *((270, 363_123), (3_488, 672_433), (634, 21_726)),
    )
    admit(twins, *asks, polls=True)
    twins.reorder(order="deadline")
    twins.teardown()


def test_a_restart_leaves_room_for_replays_of_what_its_pools_owe() -> None:
    """The twin counted replays of before the restart against those after it."""
    state = Twins()
    state.begin(**(BEGIN | {"classes": 0}))
    lease = {
        "adapter": b"", "flow": 0, "index": 0, "output": 1, "pool": 1, "produced": 0,
        "prompt": 1, "request_class": b"", "request_id": 0, "sequences": 1, "stale": 0,
        "whole_answer": False,
    }  # fmt: skip
    state.drain_pool(draining=False, pool=0)
    state.replay(reserved=57, **lease)
    for _ in range(15):
        state.wait_until_due()
    state.resize(block=0, percent=40, pool=1, restart=0)
    for _ in range(5):
        state.wait_until_due()
    admit(state, (0, 0), (0, 0), (0, 0))
    state.wait_until_due()
    state.limit(seed=0)
    state.restart(told=[], wait=0)
    state.replay(reserved=0, **lease)
    state.teardown()
