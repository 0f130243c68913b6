"""The fair parts: max-min over both shards of each tenant, by weight.

Tenants with the same shards and the same kind of demand are one group, whose fair parts differ by
their weights alone. The shards can divide what they serve in many ways. The max-min fair one has
the least sum of squares of the groups' levels (service over weight), weighted by their weights. One
shard after the other divides its service so that the levels of its groups become equal, given what
they get elsewhere. Each step lowers that sum, so the rounds lead to the fair parts.
"""

import numpy as np
from numpy.typing import NDArray

__all__ = ["fair_parts"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_ROUNDS_MAX, _HALVINGS = 200, 60
#: The rounds end when no level changes by more than this part of itself.
_CHANGE = 1e-7


def fair_parts(
    first: Ints, second: Ints, thin: NDArray[np.bool_], weight: Floats, cap: Floats, served: Floats
) -> Floats:
    """Return the fair part of each tenant of what the shards serve together.

    `served`: the service of each shard. `cap`: the most that a thin tenant asks of its second
    shard. O(tenants + rounds * groups).
    """
    members = len(served)
    low, high = np.minimum(first, second), np.maximum(first, second)
    # Tenants with much demand at both shards do not depend on the order of the two.
    key = np.where(thin, members * members + first * members + second, low * members + high)
    keys, group = np.unique(key, return_inverse=True)
    weights = np.bincount(group, weights=weight)
    caps = np.bincount(group, weights=np.where(thin, cap, 0.0))
    is_thin = keys >= members * members
    pair = keys % (members * members)
    places = np.stack([pair // members, pair % members])
    limits = np.full((2, len(keys)), np.inf)
    limits[1, is_thin] = caps[is_thin]
    got = np.zeros((2, len(keys)))
    sides = [[np.flatnonzero(places[side] == shard) for side in (0, 1)] for shard in range(members)]
    for _ in range(_ROUNDS_MAX):
        before = got.sum(axis=0) / weights
        for shard, (mine, other) in enumerate(sides):
            at = np.concatenate([mine, other])
            side = np.repeat((0, 1), (len(mine), len(other)))
            if at.size:
                got[side, at] = _divide(
                    served[shard], weights[at], got[1 - side, at], limits[side, at]
                )
        change = np.abs(got.sum(axis=0) / weights - before)
        if (change <= _CHANGE * np.maximum(before, 1e-9)).all():
            break
    level = got.sum(axis=0) / weights
    return np.asarray(weight * level[group])


def _divide(amount: float, weights: Floats, elsewhere: Floats, limits: Floats) -> Floats:
    """Divide an amount so that levels become equal, as far as the service elsewhere allows."""
    low, high = 0.0, float((amount + elsewhere.sum()) / weights.min())
    for _ in range(_HALVINGS):
        level = (low + high) / 2
        if np.clip(weights * level - elsewhere, 0.0, limits).sum() < amount:
            low = level
        else:
            high = level
    return np.clip(weights * high - elsewhere, 0.0, limits)
