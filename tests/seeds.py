"""Makes seeds for random tests, fresh with each change and yet the same for all who run it.

They follow the hash of HEAD's tree: constant seeds find nothing new on constant code. A failing run
prints SCHEDSVC_SEED, which repeats its tests' draws.
"""

import os
from pathlib import Path

from tests.lanes.change import tree_number

VARIABLE = "SCHEDSVC_SEED"
SEED = int(os.environ.get(VARIABLE) or tree_number(Path(__file__).resolve().parents[1]))


def fresh(count: int) -> range:
    """Return seeds that no earlier change has drawn."""
    return range(SEED, SEED + count)
