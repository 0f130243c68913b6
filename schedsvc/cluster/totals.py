"""Keeps totals of service: its own, and those of others as it saw them.

Totals are Python's integers, so they never wrap. Time comes in as `now_ns`. A total that was idle
for long is forgotten, first by its readers and later by its owner; the store forgets it before
both. So when a forgotten total changes again, its readers count from its owner's last
report, and no service is charged twice.
"""

from schedsvc.cluster.rows import Key, Totals

__all__ = ["BATCH_MAX", "OwnTotals", "SeenTotals"]

#: Totals in one call.
BATCH_MAX = 200
_HOUR_NS = 3_600 * 1_000_000_000
SEEN_KEPT_NS = 2 * _HOUR_NS
OWN_KEPT_NS = 3 * _HOUR_NS
#: Totals of a kind in memory, about 250 bytes each. Beyond it the longest idle are forgotten early;
#: what their tenants were served elsewhere may then count less than it was.
TOTALS_MAX = 1_000_000


class _Own:
    __slots__ = ("changed_ns", "charged", "charged_sent", "refunded", "refunded_sent")

    def __init__(self) -> None:
        self.charged = self.refunded = self.charged_sent = self.refunded_sent = 0
        self.changed_ns = 0

    @property
    def totals(self) -> Totals:
        return Totals(self.charged, self.refunded, self.charged_sent, self.refunded_sent)


class OwnTotals:
    """Counts this member's service since its start by key, and what the store may lack of it."""

    def __init__(self) -> None:
        self._rows: dict[Key, _Own] = {}  # that changed last, last
        self._unsent: dict[Key, None] = {}

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def unsent(self) -> int:
        """Return how many totals the store may lack."""
        return len(self._unsent)

    def add(self, key: Key, charged: int, refunded: int, now_ns: int) -> None:
        """Count service and refunds. O(1)."""
        row = self._rows.pop(key, None) or _Own()
        self._rows[key] = row
        row.charged += charged
        row.refunded += refunded
        row.changed_ns = now_ns
        self._unsent[key] = None

    def batch(self) -> list[tuple[Key, Totals]]:
        """Return the next totals to send. O(BATCH_MAX)."""
        keys = [key for key, _ in zip(self._unsent, range(BATCH_MAX), strict=False)]
        return [(key, self._rows[key].totals) for key in keys]

    def acknowledge(self, batch: list[tuple[Key, Totals]]) -> None:
        """Note that the store has these totals. O(BATCH_MAX)."""
        for key, totals in batch:
            row = self._rows.get(key)
            if row is None:
                continue
            row.charged_sent, row.refunded_sent = totals.charged, totals.refunded
            self._unsent.pop(key, None)
            if (row.charged, row.refunded) != (totals.charged, totals.refunded):
                self._unsent[key] = None

    def send_all_again(self) -> None:
        """Let all totals be sent, because the store may have lost some. O(totals)."""
        self._unsent = dict.fromkeys(self._rows)

    def forget(self, now_ns: int) -> None:
        """Forget totals that were idle for long. O(1) amortised."""
        while self._rows:
            key = next(iter(self._rows))
            is_old = now_ns - self._rows[key].changed_ns >= OWN_KEPT_NS
            if len(self._rows) <= TOTALS_MAX and (key in self._unsent or not is_old):
                break
            self._unsent.pop(key, None)
            del self._rows[key]


class _Seen:
    __slots__ = ("changed_ns", "charged", "refunded")

    def __init__(self, charged: int, refunded: int) -> None:
        self.charged, self.refunded, self.changed_ns = charged, refunded, 0


class SeenTotals:
    """Holds the highest total of each origin and key that this member has seen."""

    def __init__(self) -> None:
        self._rows: dict[tuple[bytes, Key], _Seen] = {}  # that changed last, last

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, origin: bytes, key: Key, totals: Totals, now_ns: int) -> tuple[int, int]:
        """Return by how much a total and its refunds grew; a fall counts as nothing. O(1).

        If this member has not seen a total, only what its owner stated last is growth.
        """
        place = (origin, key)
        row = self._rows.pop(place, None)
        if row is None:
            row = _Seen(
                min(totals.charged, totals.charged_before),
                min(totals.refunded, totals.refunded_before),
            )
        self._rows[place] = row
        grown = max(0, totals.charged - row.charged), max(0, totals.refunded - row.refunded)
        row.charged += grown[0]
        row.refunded += grown[1]
        row.changed_ns = now_ns
        return grown

    def forget(self, now_ns: int) -> None:
        """Forget totals that were idle for long. O(1) amortised."""
        while self._rows:
            place = next(iter(self._rows))
            is_old = now_ns - self._rows[place].changed_ns >= SEEN_KEPT_NS
            if len(self._rows) <= TOTALS_MAX and not is_old:
                break
            del self._rows[place]
