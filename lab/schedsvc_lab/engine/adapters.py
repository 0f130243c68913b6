"""Keeps LoRA adapters: which are loaded, who uses them, what they hold."""

from collections import OrderedDict
from collections.abc import Hashable

from schedsvc_lab.engine.blocks import BlockPool
from schedsvc_lab.engine.errors import EngineInvariantError


class Adapters:
    """At most `slots` adapters are loaded, each with `blocks_each` blocks of the pool.

    An unused adapter stays loaded until its slot or its blocks are needed; the adapter that has
    been idle longest is dropped first. All calls are O(1), or O(dropped blocks).
    """

    __slots__ = ("_active", "_idle", "_pool", "_tables", "blocks_each", "loads", "slots")

    def __init__(self, slots: int, blocks_each: int, pool: BlockPool) -> None:
        self.slots = slots
        self.blocks_each = blocks_each
        self.loads = 0
        self._pool = pool
        self._active: dict[Hashable, int] = {}  # users
        self._idle: OrderedDict[Hashable, None] = OrderedDict()
        self._tables: dict[Hashable, list[int]] = {}

    @property
    def active(self) -> int:
        """Return the number of adapters that sequences use."""
        return len(self._active)

    @property
    def loaded(self) -> int:
        """Return the number of adapters that are loaded."""
        return len(self._tables)

    def has_slot(self, name: Hashable) -> bool:
        """Whether the adapter is loaded, or a slot could be had for it."""
        return name in self._tables or len(self._active) < self.slots

    def blocks_needed(self, name: Hashable) -> int:
        """Count the blocks that loading it would take; None is no adapter."""
        return 0 if name is None or name in self._tables else self.blocks_each

    def reclaimable(self, but: Hashable = None) -> int:
        """Count the blocks of unused adapters, other than `but`."""
        count = len(self._idle) - (1 if but in self._idle else 0)
        return count * self.blocks_each

    def use(self, name: Hashable, free_min: int) -> bool:
        """Count one more user, and leave `free_min` blocks free beside it if there are as many.

        Returns whether the adapter had to be loaded. The caller has seen that it can be.
        """
        users = self._active.get(name)
        if users is not None or name in self._idle:
            self._idle.pop(name, None)
            self._active[name] = (users or 0) + 1
            self.reclaim(free_min)
            return False
        if len(self._tables) >= self.slots:
            self._drop_one()
        self.reclaim(free_min + self.blocks_each)
        table: list[int] = []
        if not self._pool.allocate(self.blocks_each, table):
            raise EngineInvariantError(f"no blocks are left for adapter {name!r}")
        self._tables[name] = table
        self._active[name] = 1
        self.loads += 1
        return True

    def leave(self, name: Hashable) -> bool:
        """Count one user less. Returns whether it was the last user."""
        users = self._active[name] - 1
        if users:
            self._active[name] = users
            return False
        del self._active[name]
        self._idle[name] = None
        return True

    def reclaim(self, free_min: int) -> bool:
        """Drop unused adapters until `free_min` blocks are free. Returns whether they are.

        If adapters hold no blocks, or all of them are not enough, none is dropped.
        """
        free = self._pool.count_free()
        if free >= free_min:
            return True
        if free + self.reclaimable() < free_min:
            return False
        while self._pool.count_free() < free_min:
            self._drop_one()
        return True

    def _drop_one(self) -> None:
        name, _ = self._idle.popitem(last=False)
        self._pool.release(self._tables.pop(name))

    def tables(self) -> list[list[int]]:
        """List the block tables of all loaded adapters."""
        return list(self._tables.values())

    def check(self, users: dict[Hashable, int]) -> None:
        """Verify the books against the users that there are. Raises EngineInvariantError."""
        if users != self._active:
            raise EngineInvariantError("an adapter's users are miscounted")
        if self._tables.keys() != self._active.keys() | self._idle.keys():
            raise EngineInvariantError("an adapter is used and not loaded, or lost")
        if len(self._tables) > self.slots:
            raise EngineInvariantError("more adapters are loaded than there are slots")
