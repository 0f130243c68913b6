"""Keeps the prompts that the engines probably have cached, and the order by them."""

from .twin_state import State
from .twin_types import QUEUED, Request

KEPT_MAX = 512
LOOKAHEAD = 8


class Prefixes(State):
    """Keeps for each pool a list of the blocks that it was given, the oldest first."""

    def keep_hashes(self, r: Request, hashes: tuple[int, ...]) -> int:
        """Keep what is said of a prompt while it is queued; its handle."""
        if not hashes or r.hashes or r.state != QUEUED or not self.limits["prefix_blocks_max"]:
            return r.seq
        r.hashes = hashes[:KEPT_MAX]
        sizes = (2**k for k in range(25))
        fitting = (size for size in sizes if size * len(hashes) <= r.prompt_max_tokens)
        r.hash_tokens = max(fitting, default=1)
        return r.seq

    def matched(self, pool: int, r: Request) -> int:
        """Return the tokens of its prompt that the pool probably has."""
        known = self.pools[pool].blocks
        count = next(
            (k for k, h in enumerate(r.hashes) if (r.adapter, h) not in known), len(r.hashes)
        )
        return min(count * r.hash_tokens, r.prompt_max_tokens)

    def note_prefix(self, r: Request) -> None:
        p = self.pools[r.pool]
        if not r.hashes:
            return
        p.asked_tokens += r.prompt_tokens
        p.matched_tokens += self.matched(r.pool, r)
        if self.policy == "dlpm":
            r.matched_tokens = self.matched(r.pool, r)
        for h in reversed(r.hashes):
            p.blocks[r.adapter, h] = p.blocks.pop((r.adapter, h), r.hash_tokens)
        while sum(p.blocks.values()) > p.capacity_blocks * p.block_size:
            del p.blocks[next(iter(p.blocks))]
        self.trim(self.limits["prefix_blocks_max"])
        r.hashes = ()

    def trim(self, blocks_max: int) -> None:
        for p in self.pools:
            while len(p.blocks) > blocks_max:
                del p.blocks[next(iter(p.blocks))]

    def longest(self, pool: int, first: Request) -> Request:
        """Return the head whose prompt the pool has most of, of those that stand with the first."""
        cls = self.flows[first.flow].cls
        heads = self.heads(pool, cls) + self.heads(-1, cls)
        stand = [
            r
            for r in sorted(heads, key=lambda r: self.rank(r, pool))[:LOOKAHEAD]
            if self.rank(r, pool)[0] == self.rank(first, pool)[0] and self.can_hold(pool, r)
        ]
        return max([first, *stand], key=lambda r: self.matched(pool, r))
