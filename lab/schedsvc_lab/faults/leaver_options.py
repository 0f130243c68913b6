"""Draws clients that leave early and engines that generate too much, for the seeds with them."""

from random import Random
from typing import Any

from schedsvc_lab.faults.cluster_options import CLUSTER

LEAVES = 7 << 51
"""Seeds from here on also draw LEAVER_FAULTS, and engines with a pace for prompts."""

LEAVER_FAULTS = {
    # name: (how often it is chosen, what it does)
    "client-leaves-prefill": (6, "a client leaves at 90 % of the time to its first token; half of"
        " them ask again at once"),
    "client-asks-again": (6, "a client leaves before its first token, and asks again at once"),
    "output-above-limit": (4, "an engine generates up to three times what its request may have"),
}  # fmt: skip


def draw_leavers(seed: int, *, fair: bool) -> frozenset[str]:
    """Draw which of the faults happen in a run; `fair`: none, because they refund service."""
    if seed < LEAVES or fair:
        return frozenset()
    rnd = Random(seed ^ 0x1EA7E)  # noqa: S311 - no secret: one seed is one run
    return frozenset(name for name in LEAVER_FAULTS if rnd.random() < 0.8)


def draw_paces(seed: int, pools: int) -> list[dict[str, Any]]:
    """Draw how long each engine takes for a token of a prompt, and for a prompt besides, in ns."""
    if not LEAVES <= seed < CLUSTER:
        return [{}] * pools
    rnd = Random(seed ^ 0x9ACE)  # noqa: S311 - no secret: one seed is one run
    paces = [rnd.choice((50_000, 500_000, 2_000_000)) for _ in range(pools)]
    return [{"prefill_ns": pace, "prompt_ns": rnd.choice((0, 20, 200)) * pace} for pace in paces]
