"""Sets how much is measured: the full ladder, a quick look, or just enough to see that it works."""

import os
from dataclasses import dataclass, field

__all__ = ["ENVIRONMENT", "FULL", "QUICK", "SIZES", "SMOKE", "Sizes", "chosen"]

#: Names the sizes for the pytest process; `python -m bench` sets it.
ENVIRONMENT = "SCHEDSVC_BENCH_SIZES"


@dataclass(frozen=True)
class Sizes:
    """Holds the sizes of one run."""

    name: str
    #: Flows of the core's Admit, and the requests that are queued meanwhile.
    admit_flows: tuple[int, ...]
    queued: int
    #: Fewer flows, with few and with many running requests: the growth of the cost.
    queued_short: int
    running: tuple[int, int]
    #: Flows that are all backlogged when the next one is picked.
    pick_flows: tuple[int, ...]
    #: Operations that are timed one by one.
    steps: int
    calls: int
    #: Ended requests with stored answers before the timing starts (default limit: 100,000).
    answers: int
    #: Rounds of A B B A, and the size of their slices.
    rounds: int
    feature_rounds: int
    slice_steps: int
    slice_calls: int
    #: Messages of a slice, by events a message.
    slice_messages: dict[int, int] = field(hash=False)


FULL = Sizes(
    name="full",
    admit_flows=(100, 1_000, 100_000),
    queued=100_000,
    queued_short=1_000,
    running=(256, 2_048),
    pick_flows=(1_000, 100_000),
    steps=20_000,
    answers=100_000,
    calls=2_000,
    rounds=60,
    feature_rounds=20,
    slice_steps=500,
    slice_calls=50,
    slice_messages={1: 1_000, 16: 600, 128: 400},
)
QUICK = Sizes(
    name="quick",
    admit_flows=FULL.admit_flows,
    queued=FULL.queued,
    queued_short=FULL.queued_short,
    running=FULL.running,
    pick_flows=FULL.pick_flows,
    steps=5_000,
    answers=100_000,
    calls=500,
    rounds=15,
    feature_rounds=10,
    slice_steps=200,
    slice_calls=30,
    slice_messages={1: 300, 16: 200, 128: 150},
)
SMOKE = Sizes(
    name="smoke",
    admit_flows=(10, 100),
    queued=200,
    queued_short=100,
    running=(64, 128),
    pick_flows=(50, 100),
    steps=100,
    answers=200,
    calls=10,
    rounds=3,
    feature_rounds=3,
    slice_steps=10,
    slice_calls=3,
    slice_messages={1: 20, 16: 6, 128: 3},
)
_BY_NAME = {sizes.name: sizes for sizes in (FULL, QUICK, SMOKE)}


def chosen() -> Sizes:
    """Return the sizes that the environment names; the smallest where it names none."""
    name = os.environ.get(ENVIRONMENT, SMOKE.name)
    if name not in _BY_NAME:
        raise ValueError(f"{ENVIRONMENT}={name}: known sizes are {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


SIZES = chosen()
