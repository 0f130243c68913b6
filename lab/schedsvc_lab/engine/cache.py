"""Caches prefixes: finds blocks again by the chained hash of what they hold."""

from collections.abc import Hashable, Sequence

from schedsvc_lab.engine.config import Eviction
from schedsvc_lab.engine.errors import EngineInvariantError
from schedsvc_lab.engine.eviction import (
    Candidate,
    Future,
    IdleBlocks,
    Key,
    Rank,
    belady,
    fifo,
    lfu,
    lru,
)

_RANKS: dict[str, Rank] = {"lru": lru, "fifo": fifo, "lfu": lfu}


class PrefixCache:
    """Maps contents to blocks, and ranks the blocks that no table holds. `len()` counts these.

    A key names a whole prefix, so a prompt's blocks are found one after the other until the first
    that is missing. If two blocks have the same contents, only the first is known here. At most
    `idle_max` blocks that no table holds are kept (None: no limit). Belady's rule needs the future.
    """

    def __init__(
        self, eviction: Eviction, idle_max: int | None = None, future: Future | None = None
    ) -> None:
        if eviction == "belady":
            if future is None:
                raise ValueError("prefix_cache: belady needs the future of the trace")
            rank = belady(future)
        else:
            rank = _RANKS[eviction]
        self._future = future
        self._idle_max = idle_max
        self._idle = IdleBlocks(rank)
        self._block_of: dict[Key, int] = {}
        self._entry_of: dict[int, Candidate] = {}
        self._registered = 0
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._idle)

    def __contains__(self, block: int) -> bool:
        """Whether no table holds the block and its contents are kept."""
        return block in self._idle

    def blocks(self) -> set[int]:
        """List the blocks that no table holds. O(n)."""
        return self._idle.blocks()

    def keys(self) -> set[Key]:
        """List all contents that could be found. O(n)."""
        return set(self._block_of)

    def find(self, keys: Sequence[Key], count_max: int) -> list[int]:
        """Find the blocks of the longest known prefix, at most `count_max`. O(blocks found)."""
        found = []
        block_of = self._block_of
        for key in keys[:count_max]:
            block = block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def take(self, block: int) -> None:
        """Mark an idle block as held again."""
        self._idle.remove(block)

    def count_hits(self, blocks: Sequence[int]) -> None:
        """Note that a prompt has used these blocks."""
        for block in blocks:
            self._entry_of[block].hits += 1

    def pass_by(self, request_id: Hashable, keys: Sequence[Key]) -> None:
        """Report to Belady's rule a request that has come, or never will; no-op for other rules."""
        future = self._future
        if future is None:
            return
        future.pass_by(request_id, keys)
        for key in keys:
            block = self._block_of.get(key)
            if block is not None and block in self._idle:
                self._idle.put(block, self._entry_of[block])

    def register(self, key: Key, block: int) -> None:
        """Make a held block that has just been computed known, unless its contents are."""
        if key not in self._block_of and block not in self._entry_of:
            self._registered += 1
            self._block_of[key] = block
            self._entry_of[block] = Candidate(key, self._registered, 0)

    def keep(self, block: int) -> list[int]:
        """Keep a block that its last holder gave up. Returns the blocks that are free by that."""
        entry = self._entry_of.get(block)
        if entry is None:
            return [block]
        self._idle.put(block, entry)
        if self._idle_max is not None and len(self._idle) > self._idle_max:
            return [self.evict()]
        return []

    def evict(self) -> int:
        """Evict one idle block and its contents."""
        block = self._idle.pop()
        del self._block_of[self._entry_of.pop(block).key]
        self.evictions += 1
        return block

    def check(self) -> None:
        """Verify that both directions agree. O(n). Raises EngineInvariantError."""
        there = {block: entry.key for block, entry in self._entry_of.items()}
        back = {block: key for key, block in self._block_of.items()}
        if there != back or not self._idle.blocks() <= there.keys():
            raise EngineInvariantError("the prefix cache's books do not agree")
        if self._idle_max is not None and len(self._idle) > self._idle_max:
            raise EngineInvariantError("the prefix cache holds more than it may")
