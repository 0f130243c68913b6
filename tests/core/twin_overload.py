"""Rates the load of the twin's pools: levels that rise at once and fall after a calm time."""

from .twin_backfill import Backfill

UNDER, NEARLY, OVER = 1, 2, 3


class Overload(Backfill):
    """Holds the level of each pool, from its figures and its next request."""

    def fill_ppm(self, pool: int) -> int:
        p = self.pools[pool]
        held = self.promised(pool) * p.block_size + p.beyond_tokens
        return held * 10**6 // (p.capacity_blocks * p.block_size)

    def overload_now(self, pool: int, now_ns: int) -> int:
        p = self.pools[pool]
        level = self._level(pool, now_ns, *self._bounds())
        if level >= p.overload:
            return level
        lowest = min(p.overload, self._lowest(pool, now_ns))
        fallen = p.overload
        if p.calm_since_ns is not None:
            fallen -= (now_ns - p.calm_since_ns) // self.limits["overload_hold_ns"]
        return max(lowest, fallen)

    def judge(self, pool: int) -> None:
        p = self.pools[pool]
        self.note_heads()
        level = self.overload_now(pool, self.now_ns)
        calm = self._lowest(pool, self.now_ns) < level
        if level != p.overload or not calm:
            p.calm_since_ns = None
        if calm and p.calm_since_ns is None:
            p.calm_since_ns = self.now_ns
        p.overload = level

    def _bounds(self) -> tuple[int, int]:
        return self.limits["queue_target_ns"], self.limits["saturation_ppm"]

    def _lowest(self, pool: int, now_ns: int) -> int:
        target_ns, saturation_ppm = self._bounds()
        return self._level(pool, now_ns, target_ns // 2, saturation_ppm * 7 // 8)

    def _level(self, pool: int, now_ns: int, target_ns: int, saturation_ppm: int) -> int:
        for_no_room = ("NONE", "DETACHED", "DRAINING", "STRICT", "QUOTA", "DELAY")
        head = None if self.pools[pool].reason in for_no_room else self.head_for(pool)[0]
        if head and now_ns - head.lined_ns > target_ns:  # type: ignore[operator]
            return OVER
        return NEARLY if head or self.fill_ppm(pool) >= saturation_ppm else UNDER
