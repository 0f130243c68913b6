"""Compares the prefix analysis with slow and obvious second implementations."""

from __future__ import annotations

from array import array
from functools import cache
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedsvc_lab.workload.prefix.blocks import HashBlocks, TokenBlocks
from schedsvc_lab.workload.prefix.capacity import POLICIES, curve, default_capacities
from schedsvc_lab.workload.prefix.sharing import Sharing, distribution

Prompt = list[int]
# Few different tokens, so prompts share prefixes, and equal blocks follow others.
prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=14)


def counted(requests: list[Prompt], block_tokens: int, times: list[float] | None = None) -> Sharing:
    sharing, cut = Sharing(block_tokens), TokenBlocks(block_tokens)
    for at, prompt in enumerate(requests):
        arrival_s = None if times is None else times[at]
        sharing.add(cut.cut(array("I", prompt)), len(prompt), arrival_s)
    return sharing


def prefixes(prompt: Prompt, block_tokens: int) -> list[tuple[int, ...]]:
    """A block is all tokens up to its end."""
    ends = range(block_tokens, len(prompt) + 1, block_tokens)
    return [tuple(prompt[:end]) for end in ends]


@settings(deadline=None)
@given(prompts, st.integers(1, 4), st.data())
def test_sharing_without_end(requests: list[Prompt], block_tokens: int, data: st.DataObject):
    gaps = st.lists(st.integers(0, 9), min_size=len(requests), max_size=len(requests))
    times = [float(sum(data.draw(gaps)[: at + 1])) for at in range(len(requests))]
    times.sort()
    sharing = counted(requests, block_tokens, times)
    uses: dict[tuple[int, ...], list[float]] = {}
    shared_blocks = shared_tokens = 0
    fractions = []
    for prompt, now_s in zip(requests, times, strict=True):
        blocks = prefixes(prompt, block_tokens)
        known = [block for block in blocks if block in uses]
        shared_blocks += len(known)
        shared_tokens += len(known) * block_tokens
        fractions.append(len(known) * block_tokens / len(prompt))
        for block in blocks:
            uses.setdefault(block, []).append(now_s)
    summary = sharing.summary()
    assert summary["blocks"] == sum(map(len, uses.values()))
    assert (summary["shared_blocks"], summary["shared_tokens"]) == (shared_blocks, shared_tokens)
    assert list(sharing.fractions) == fractions
    wanted_gaps = sorted(
        later - sooner for times_s in uses.values() for sooner, later in pairwise(times_s)
    )
    assert sorted(sharing.gaps_s) == wanted_gaps
    assert sorted(sharing.hits) == sorted(map(len, uses.values()))
    if uses:
        again = sum(len(times_s) > 1 for times_s in uses.values())
        assert summary["block_reuse_rate"] == pytest.approx(again / len(uses))
    assert summary["sharing_fraction"] == distribution(array("d", fractions))


class Slow:
    """Keeps a list of what is known of each block; sorts all of it to evict."""

    def __init__(self, policy: str, capacity: int, requests: list[list[tuple[int, ...]]]) -> None:
        self.policy, self.capacity, self.requests = policy, capacity, requests
        self.held: dict[tuple[int, ...], dict[str, int]] = {}
        self.time = 0

    def rank(self, block: tuple[int, ...], now: int) -> tuple[int, int]:
        about = self.held[block]
        if self.policy == "belady":
            later = (at for at, blocks in enumerate(self.requests) if at > now and block in blocks)
            return -next(later, len(self.requests)), -len(block)
        kind = {"lru": "used", "fifo": "came", "lfu": "count"}[self.policy]
        return about[kind], about["used"]

    def serve(self, now: int) -> int:
        blocks = self.requests[now]
        hits = 0
        while hits < len(blocks) and blocks[hits] in self.held:
            hits += 1
        for block in reversed(blocks):
            self.time += 1
            about = self.held.setdefault(block, {"came": self.time, "count": 0})
            about["used"] = self.time
            about["count"] += 1
        while len(self.held) > self.capacity:
            del self.held[min(self.held, key=lambda block: self.rank(block, now))]
        return hits


@settings(deadline=None)
@given(prompts, st.integers(1, 3), st.integers(0, 8))
def test_finite_caches(requests: list[Prompt], block_tokens: int, capacity: int) -> None:
    sharing = counted(requests, block_tokens)
    blocks = [prefixes(prompt, block_tokens) for prompt in requests]
    for point in curve(sharing, POLICIES, [capacity * block_tokens]):
        slow = Slow(point.policy, capacity, blocks)
        served = [slow.serve(at) for at in range(len(blocks))]
        assert point.hit_blocks == sum(served), point.policy
        assert point.hit_tokens == sum(served) * block_tokens
        asked = sum(map(len, blocks))
        assert point.block_hit_rate == (sum(served) / asked if asked else 0)
        assert point.token_hit_rate == point.hit_tokens / sum(map(len, requests))


few = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=4), min_size=1, max_size=6)


@settings(deadline=None, max_examples=60)
@given(few, st.integers(0, 4))
def test_beladys_cache_is_the_best_of_all(requests: list[Prompt], capacity: int) -> None:
    """Belady's hits are the most of all choices of blocks to keep after each request."""
    blocks = [tuple(prefixes(prompt, 1)) for prompt in requests]

    @cache
    def best(at: int, held: frozenset[tuple[int, ...]]) -> int:
        if at == len(blocks):
            return 0
        hits = 0
        while hits < len(blocks[at]) and blocks[at][hits] in held:
            hits += 1
        there = held | set(blocks[at])
        kept = min(capacity, len(there))
        return hits + max(best(at + 1, frozenset(some)) for some in combinations(there, kept))

    points = {point.policy: point for point in curve(counted(requests, 1), POLICIES, [capacity])}
    assert points["belady"].hit_blocks == best(0, frozenset())
    assert max(point.hit_blocks for point in points.values()) == points["belady"].hit_blocks


@settings(deadline=None)
@given(prompts, st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_joined_hashes_are_larger_blocks(
    requests: list[Prompt], hash_tokens: int, joined: int, partial: bool
) -> None:
    """The hashes are of the tokens alone, and do not depend on those before them."""
    by_hash, by_token = HashBlocks(hash_tokens, joined), TokenBlocks(hash_tokens * joined)
    same: dict[int, int] = {}
    for prompt in requests:
        length = len(prompt) if partial else len(prompt) // hash_tokens * hash_tokens
        parts = [tuple(prompt[at : at + hash_tokens]) for at in range(0, length, hash_tokens)]
        found = by_hash.cut([hash(part) for part in parts], len(prompt))
        wanted = by_token.cut(array("I", prompt))
        size = hash_tokens * joined
        # A partial last block is known if it has a hash, or if nothing follows.
        known = partial or len(prompt) % hash_tokens == 0
        assert len(found) == (-(-len(prompt) // size) if known else len(prompt) // size)
        for one, other in zip(found, wanted, strict=False):
            assert same.setdefault(other, one) == one
    assert len(set(same.values())) == len(same)


def test_blocks_are_numbered_by_first_use() -> None:
    cut = TokenBlocks(2)
    assert cut.cut(array("I", [7, 8, 9, 9, 1])) == [0, 1]
    assert cut.cut(array("I", [9, 9, 7, 8])) == [2, 3]
    assert cut.cut(array("I", [7, 8, 9, 9])) == [0, 1]
    assert cut.cut(array("I", [7])) == []


def test_a_partial_last_block_serves_what_it_holds() -> None:
    sharing, cut = Sharing(512), HashBlocks(512)
    for _ in range(2):
        served = sharing.add(cut.cut([1, 2], 600), 600, None)
    assert (served.shared_blocks, served.shared_tokens, served.sharing_fraction) == (2, 600, 1.0)
    (point,) = curve(sharing, ["lru"], [1024])
    assert (point.hit_blocks, point.hit_tokens) == (2, 600)
    assert sharing.summary()["reuse_gap_s"] is None
    assert sharing.block_use(0).gap_mean_s is None


def test_capacities_end_with_room_for_all() -> None:
    sharing = counted([[at] for at in range(300)], 1)
    assert default_capacities(sharing) == [2, 3, 5, 10, 19, 38, 75, 150, 300]
    assert default_capacities(counted([[1, 1]], 4)) == [4]
    told: list[int] = []
    list(curve(sharing, ["lru"], [5], told.append))
    assert sum(told) == 300
