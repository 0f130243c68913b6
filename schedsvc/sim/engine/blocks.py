"""The allocator of KV blocks."""

from collections.abc import Iterable

from schedsvc.sim.engine.errors import EngineInvariantError


class BlockPool:
    """Hands out the blocks 0..total-1 of a KV cache; the last one freed is the first one reused."""

    __slots__ = ("_free", "block_size_tokens", "total")

    def __init__(self, total: int, block_size_tokens: int) -> None:
        self.total = total
        self.block_size_tokens = block_size_tokens
        self._free = list(range(total - 1, -1, -1))

    @property
    def free(self) -> int:
        """Blocks that nobody holds. O(1)."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks that some table holds. O(1)."""
        return self.total - len(self._free)

    def allocate(self, count: int, table: list[int]) -> bool:
        """Append `count` free blocks to the table, or nothing where fewer are free. O(count)."""
        free = self._free
        if count > len(free):
            return False
        for _ in range(count):
            table.append(free.pop())
        return True

    def release(self, table: list[int]) -> None:
        """Take back every block of the table and empty it. O(blocks of the table)."""
        table.reverse()
        self._free.extend(table)
        table.clear()

    def check(self, tables: Iterable[list[int]]) -> None:
        """Verify that each block is free once or in one table once. O(total).

        Raises EngineInvariantError.
        """
        seen = bytearray(self.total)
        count = 0
        for table in (self._free, *tables):
            for block in table:
                if not 0 <= block < self.total or seen[block]:
                    raise EngineInvariantError(f"block {block} is unknown or held twice")
                seen[block] = 1
            count += len(table)
        if count != self.total:
            raise EngineInvariantError(f"{self.total - count} of {self.total} blocks are lost")
