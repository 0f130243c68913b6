"""The allocator of KV blocks: free ones, held ones with their holders counted, cached ones."""

from collections import Counter
from collections.abc import Iterable

from schedsvc_lab.engine.cache import PrefixCache
from schedsvc_lab.engine.errors import EngineInvariantError


class BlockPool:
    """Hands out the blocks 0..total-1 of a KV cache; the last freed block is reused first.

    A block is free, or held by one or more tables, or cached: no table holds it, but a later prompt
    may use its contents. Cached blocks are given up when no free one is left.
    """

    __slots__ = ("_extra", "_free", "block_size_tokens", "cache", "total")

    def __init__(
        self, total: int, block_size_tokens: int, cache: PrefixCache | None = None
    ) -> None:
        self.total = total
        self.block_size_tokens = block_size_tokens
        self.cache = cache
        self._free = list(range(total - 1, -1, -1))
        self._extra: dict[int, int] = {}  # holders of a block beyond the first

    @property
    def free(self) -> int:
        """Blocks that can be allocated: free or cached. O(1)."""
        return self.count_free()

    @property
    def unused(self) -> int:
        """Blocks that can be allocated without giving up cached contents. O(1)."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Blocks that no table holds and whose contents are kept. O(1)."""
        return 0 if self.cache is None else len(self.cache)

    @property
    def used(self) -> int:
        """Blocks that some table holds. O(1)."""
        return self.total - self.count_free()

    def count_free(self) -> int:
        """Count what `free` returns, for compiled code."""
        cache = self.cache
        return len(self._free) if cache is None else len(self._free) + len(cache)

    def allocate(self, count: int, table: list[int]) -> bool:
        """Append `count` free blocks to the table, or nothing if there are fewer.

        O(count), with a factor of log(cached) if cached blocks have to be evicted.
        """
        free = self._free
        if count > len(free):
            if count > self.count_free():
                return False
            self.free_up(count)
        if count == 1:
            table.append(free.pop())
        elif count:
            table.extend(reversed(free[-count:]))
            del free[-count:]
        return True

    def free_up(self, count: int) -> None:
        """Give cached blocks up until `count` are unused, for as many calls of `take_one()`.

        As many must be free. O(count), as above.
        """
        free, cache = self._free, self.cache
        while cache is not None and len(free) < count:
            free.append(cache.evict())

    def take_one(self, table: list[int]) -> None:
        """Append an unused block to the table. O(1)."""
        table.append(self._free.pop())

    def share(self, table: Iterable[int]) -> None:
        """Count one more holder of each block of a table that already has a holder. O(blocks)."""
        extra = self._extra
        for block in table:
            extra[block] = extra.get(block, 0) + 1

    def is_shared(self, block: int) -> bool:
        """Return whether a held block has more than one holder."""
        return block in self._extra

    def reuse(self, block: int) -> None:
        """Hold a block whose contents are in the prefix cache. O(log(cached)) amortised."""
        cache = self.cache
        if cache is None or block not in cache:
            self.share((block,))
        else:
            cache.take(block)

    def copy_last(self, table: list[int]) -> bool:
        """Make the table's last block its own before it is written; False if none is free."""
        last = table.pop()
        if not self.allocate(1, table):
            table.append(last)
            return False
        self._drop(last)
        return True

    def release(self, table: list[int]) -> None:
        """Give up the table's hold on each of its blocks and empty it. O(blocks of the table)."""
        table.reverse()
        if self._extra or self.cache is not None:
            for block in table:
                self._drop(block)
        else:
            self._free.extend(table)
        table.clear()

    def trim(self, table: list[int], count: int) -> None:
        """Give up the hold on all but the first `count` blocks of the table."""
        while len(table) > count:
            self._drop(table.pop())

    def _drop(self, block: int) -> None:
        extra = self._extra
        others = extra.get(block)
        if others is None:
            cache = self.cache
            if cache is None:
                self._free.append(block)
            else:
                self._free.extend(cache.keep(block))
        elif others == 1:
            del extra[block]
        else:
            extra[block] = others - 1

    def move(self, tables: Iterable[list[int]], target: "BlockPool") -> int:
        """Move tables into another pool that has room, shared blocks included. O(blocks).

        Returns how many blocks were moved.
        """
        moved: dict[int, int] = {}
        for table in tables:
            there: list[int] = []
            for block in table:
                known = moved.get(block)
                if known is None:
                    if not target.allocate(1, there):
                        raise EngineInvariantError("blocks were moved where no room is")
                    moved[block] = there[-1]
                else:
                    there.append(known)
                    target.share((known,))
            self.release(table)
            table.extend(there)
        return len(moved)

    def check(self, tables: Iterable[list[int]]) -> None:
        """Verify that free + held + cached = total and that holders are counted right. O(total).

        Raises EngineInvariantError.
        """
        held = Counter(block for table in tables for block in table)
        cached = set() if self.cache is None else self.cache.blocks()
        seen = bytearray(self.total)
        for block in (*self._free, *held, *cached):
            if not 0 <= block < self.total or seen[block]:
                raise EngineInvariantError(f"block {block} is unknown, or free and held at once")
            seen[block] = 1
        lost = self.total - sum(seen)
        if lost:
            raise EngineInvariantError(f"{lost} of {self.total} blocks are lost")
        extra = {block: count - 1 for block, count in held.items() if count > 1}
        if extra != self._extra:
            block = min(extra.items() ^ self._extra.items())[0]
            raise EngineInvariantError(
                f"block {block} is held {held[block]} times, and "
                f"{self._extra.get(block, 0) + 1} are counted"
            )
        if self.cache is not None:
            self.cache.check()
