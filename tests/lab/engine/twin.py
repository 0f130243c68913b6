"""Allocates blocks with a prefix cache, slowly and obviously: sets, counts, and full scans."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class TwinBlock:
    """Describes one block: the sequences that hold it, and the time of its last change."""

    holders: list[str] = field(default_factory=list)
    key: object = None
    registered: int = 0
    hits: int = 0
    idle: int = 0


class TwinPool:
    """Names blocks by what they are for, so it shows counts and contents, never block numbers."""

    def __init__(self, total, eviction, idle_max, future=()):
        self.total = total
        self.eviction = eviction
        self.idle_max = idle_max
        self.future = list(future)  # [(request, keys)] still to come
        self.blocks: list[TwinBlock] = []  # blocks that are not free
        self.time = 0

    def held(self):
        return [b for b in self.blocks if b.holders]

    def cached(self):
        return [b for b in self.blocks if not b.holders]

    def free(self):
        return self.total - len(self.held())

    def next_use(self, key):
        for place, (_, keys) in enumerate(self.future):
            if key in keys:
                return place
        return len(self.future)

    def rank(self, block):
        if self.eviction == "lru":
            return block.idle
        if self.eviction == "fifo":
            return block.registered
        if self.eviction == "lfu":
            return (block.hits, block.idle)
        return (-self.next_use(block.key), block.idle)

    def evict(self):
        victim = min(self.cached(), key=self.rank)
        self.blocks.remove(victim)

    def allocate(self, count, holder):
        if count > self.free():
            return None
        new = []
        for _ in range(count):
            if len(self.blocks) == self.total:
                self.evict()
            block = TwinBlock([holder])
            self.blocks.append(block)
            new.append(block)
        return new

    def drop(self, block, holder):
        block.holders.remove(holder)
        if block.holders:
            return
        if block.key is None:
            self.blocks.remove(block)
            return
        self.time += 1
        block.idle = self.time
        if self.idle_max is not None and len(self.cached()) > self.idle_max:
            self.evict()

    def find(self, keys):
        found = []
        for key in keys:
            match = [b for b in self.blocks if b.key == key]
            if not match:
                break
            found.append(match[0])
        return found

    def register(self, block, key):
        if block.key is None and not any(b.key == key for b in self.blocks):
            self.time += 1
            block.key = key
            block.registered = self.time

    def pass_by(self, request):
        self.future = [entry for entry in self.future if entry[0] != request]

    def keys(self):
        return {b.key for b in self.blocks if b.key is not None}
