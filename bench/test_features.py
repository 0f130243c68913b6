"""Measures the cost that each further feature adds to an Admit, a pair and a pick, by size."""

import pytest

from bench.compare import Comparison, Slice, abba, compare
from bench.featured import AT_ONCE, Featured
from bench.features import ALL, DEFAULT, FEATURES, Feature
from bench.record import Recorder
from bench.sizes import SIZES

_PAIR_FLOWS = 1_000
_POLLS = 4


class _States:
    """Holds a core with the feature in each state that is compared."""

    def __init__(self, feature: Feature) -> None:
        few, queued, short = SIZES.admit_flows[0], SIZES.queued, SIZES.queued_short
        running, crowd = SIZES.running
        self.many = Featured(feature, SIZES.admit_flows[-1], queued, running)
        self.few = Featured(feature, few, queued, running)
        self.short = Featured(feature, few, short, running)
        self.crowd = Featured(feature, few, short, crowd)
        self.idle = Featured(feature, min(_PAIR_FLOWS, SIZES.admit_flows[-1]), 0, running)
        # As many are granted as were queued: the cores of the comparison have run for long, too.
        # Most of the requests that are queued then belong to heavy flows.
        self.many.picks(max(1, queued // AT_ONCE))

    def check(self) -> int:
        """Verify all books. Returns the digest of the decisions at the largest size."""
        for each in (self.many, self.few, self.short, self.crowd, self.idle):
            each.core.check()
        return self.many.core.digest()


@pytest.fixture(scope="module")
def default() -> _States:
    """Make what every feature is compared with, once."""
    return _States(DEFAULT)


def _admits(one: Featured, other: Featured) -> Comparison:
    steps = SIZES.slice_steps
    return _compared(lambda: one.admits(steps), lambda: other.admits(steps))


def _pairs(one: Featured, other: Featured) -> Comparison:
    steps = SIZES.slice_steps
    return _compared(lambda: one.pairs(steps), lambda: other.pairs(steps))


def _picks(one: Featured, other: Featured) -> Comparison:
    return _compared(lambda: one.picks(_POLLS), lambda: other.picks(_POLLS))


def _compared(one: Slice, other: Slice) -> Comparison:
    return compare(abba(one, other, SIZES.feature_rounds)[:, :, 0])


@pytest.mark.parametrize("feature", [DEFAULT, *FEATURES, ALL], ids=lambda each: each.name)
def test_feature(record: Recorder, default: _States, feature: Feature) -> None:
    """Measure a feature beside the default policies, and at its largest beside smaller ones."""
    states = _States(feature)
    flows, queued = (
        (SIZES.admit_flows[0], SIZES.admit_flows[-1]),
        (SIZES.queued_short, SIZES.queued),
    )
    record.once(lambda: states.many.admits(SIZES.slice_steps))
    record.feature(
        feature.name,
        feature.label,
        {
            "admit": _admits(states.many, default.many),
            "pair": _pairs(states.idle, default.idle),
            "pick": _picks(states.many, default.many),
        },
        {
            "flows": (_admits(states.many, states.few), flows),
            "queued_admit": (_admits(states.few, states.short), queued),
            "queued_pick": (_picks(states.few, states.short), queued),
            "running_pick": (_picks(states.crowd, states.short), SIZES.running),
        },
        digest=states.check(),
    )
