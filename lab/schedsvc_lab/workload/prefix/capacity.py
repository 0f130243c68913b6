"""Measures hit rate against capacity: miss-ratio curves of finite caches."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from schedsvc_lab.workload.prefix.caches import Belady, Cache, Fifo, Lfu, Lru, next_uses
from schedsvc_lab.workload.prefix.sharing import Sharing, Uses

POLICIES = ("lru", "fifo", "lfu", "belady")
CAPACITIES = 9


class CachePoint(NamedTuple):
    """Holds the hits of one cache over a trace."""

    block_tokens: int
    policy: str
    capacity_tokens: int
    capacity_blocks: int
    hit_blocks: int
    hit_tokens: int
    block_hit_rate: float
    token_hit_rate: float


def default_capacities(sharing: Sharing) -> list[int]:
    """Choose capacities in tokens: all different blocks, half of them, a quarter, and so on."""
    blocks = len(sharing.hits)
    halves = {max(1, -(-blocks // (1 << by))) for by in range(CAPACITIES)}
    return [halved * sharing.block_tokens for halved in sorted(halves)]


def curve(
    sharing: Sharing,
    policies: Sequence[str],
    capacities_tokens: Sequence[int],
    served: Callable[[int], None] = lambda requests: None,
) -> Iterator[CachePoint]:
    """Yield a point for each policy and capacity; a capacity counts whole blocks.

    O(uses) for each point, with a logarithm for lfu and belady. `served` is called now and then
    with the number of requests served since the last call. Raises KeyError for an unknown policy.
    """
    uses = sharing.uses
    following = next_uses(uses) if "belady" in policies else array("q")
    makers: dict[str, Callable[[int], Cache]] = {
        "lru": Lru,
        "fifo": Fifo,
        "lfu": Lfu,
        "belady": lambda blocks: Belady(blocks, following),
    }
    for policy in policies:
        for tokens in capacities_tokens:
            capacity = tokens // sharing.block_tokens
            hits, hit_tokens = _run(makers[policy](capacity), uses, sharing.block_tokens, served)
            yield CachePoint(
                block_tokens=sharing.block_tokens,
                policy=policy,
                capacity_tokens=tokens,
                capacity_blocks=capacity,
                hit_blocks=hits,
                hit_tokens=hit_tokens,
                block_hit_rate=hits / max(1, len(uses.blocks)),
                token_hit_rate=hit_tokens / max(1, sum(uses.tokens)),
            )


def _run(
    cache: Cache, uses: Uses, block_tokens: int, served: Callable[[int], None]
) -> tuple[int, int]:
    hit_blocks = hit_tokens = told = start = 0
    for number, (end, tokens) in enumerate(zip(uses.ends, uses.tokens, strict=True), 1):
        hits = cache.serve(uses.blocks[start:end])
        start = end
        hit_blocks += hits
        hit_tokens += min(hits * block_tokens, tokens)
        if number % 1_024 == 0 or number == len(uses.ends):
            served(number - told)
            told = number
    return hit_blocks, hit_tokens
