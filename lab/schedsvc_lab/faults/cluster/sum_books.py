"""Keeps books over all members of a cluster, from messages and what cores are charged.

It holds three promises of docs/operate/cluster.md, "One fairness". A member is charged by how much
the totals of others grew, once. The totals of an origin do not fall. At rest, each member has read
of each living origin exactly its service of the tenants that both serve.
"""

import struct
from collections import defaultdict
from typing import Any

from schedsvc_lab.faults.auditor.records import require

__all__ = ["Reader", "SumBooks"]

_SIZES = struct.Struct(">HH")
_MICRO = 1_000_000
Row = tuple[int, int]


def key_of(row: bytes) -> tuple[str, bytes, bytes]:
    """Return origin, and tenant and the rest, of a row of the store."""
    member, life, rest = row.split(b"/", 2)
    [size] = struct.unpack_from(">H", rest)
    return (member + b"/" + life).decode(), rest[2 : 2 + size], rest[2 + size :]


class Reader:
    """Keeps the totals that one life of a member has read, and its charges."""

    def __init__(self) -> None:
        #: Tenants whose totals it has stated: it reads no others.
        self.stated: set[bytes] = set()
        self.seen: dict[bytes, Row] = {}
        #: The sums charged and refunded, by tenant.
        self.grown: dict[bytes, list[int]] = defaultdict(lambda: [0, 0])
        self.charged: dict[bytes, list[int]] = defaultdict(lambda: [0, 0])

    def read(self, row: bytes, told: tuple[int, int, int, int]) -> None:
        """Count the growth of a total; see rows.py for its parts."""
        charged, refunded, charged_before, refunded_before = told
        before = self.seen.get(row)
        if before is None:
            before = min(charged, charged_before), min(refunded, refunded_before)
        tenant = key_of(row)[1]
        grown = max(0, charged - before[0]), max(0, refunded - before[1])
        for k in (0, 1):
            self.grown[tenant][k] += grown[k]
        self.seen[row] = before[0] + grown[0], before[1] + grown[1]


class SumBooks:
    """Keeps the books of a run."""

    def __init__(self) -> None:
        self.readers: dict[int, Reader] = {}
        #: Used by ended leases, in micro-tokens times price: by life and tenant.
        self.used: dict[tuple[int, bytes], int] = defaultdict(int)
        #: The last value that a row's origin wrote into the store, by row.
        self.stated: dict[bytes, Row] = {}
        self._calls: dict[int, int] = {}
        #: All verdicts in their order.
        self.digest = 0

    def began(self, life: int) -> None:
        """Open the books of a process."""
        self.readers[life] = Reader()

    def completed(self, life: int, tenant: str, tokens: int) -> None:
        """Count the tokens that a lease used: input, and output twice."""
        self.used[life, tenant.encode()] += tokens * _MICRO

    def stored(self, life: int, words: tuple[Any, ...], answer: Any) -> None:
        """Look at a call that the store has run."""
        if "schedsvc_sync" not in words[:2] or len(answer) != 5:
            return
        args = words[3 + int(words[2]) :]
        call = int(args[4])
        if call <= self._calls.get(life, 0):
            return  # it was under way for long, and the store has lost the calls after it
        self._calls[life] = call
        for at in range(9, len(args), 2):
            charged, refunded, *_ = map(int, args[at + 1].split())
            last = self.stated.get(args[at], (0, 0))
            require(
                charged >= last[0] and refunded >= last[1],
                "the total of an origin fell",
                f"{args[at]!r}: {last} to {(charged, refunded)}",
            )
            self.stated[args[at]] = charged, refunded

    def heard(self, life: int, words: tuple[Any, ...], answer: Any) -> None:
        """Look at an answer that its caller reads."""
        if "schedsvc_sync" not in words[:2] or len(answer) != 5:
            return
        args = words[3 + int(words[2]) :]
        reader, blob, at = self.readers[life], answer[3], 0
        reader.stated.update(key_of(row)[1] for row in args[9::2])
        while at < len(blob):
            row_size, size = _SIZES.unpack_from(blob, at)
            middle = at + 4 + row_size
            row, totals = blob[at + 4 : middle], blob[middle : middle + size]
            at = middle + size
            a, b, c, d = map(int, totals.split())
            reader.read(row, (a, b, c, d))

    def charged(self, life: int, rows: list[tuple[bytes, bytes, bytes, int, int]]) -> None:
        """Look at what a core is charged for service of others."""
        reader = self.readers[life]
        for tenant, _, _, charged, refunded in rows:
            found, grown = reader.charged[tenant], reader.grown[tenant]
            found[0] += charged
            found[1] += refunded
            require(
                found[0] <= grown[0] and found[1] <= grown[1],
                "a member was charged for service that no other member stated",
                f"life {life}, {tenant!r}: charged {found}, stated {grown}",
            )

    def check_rest(self, living: dict[int, str]) -> None:
        """Hold what each member was charged to what the others served. O(members^2 * tenants).

        `living`: lives of members that run, and their origins. All leases have ended, and the last
        of them long enough ago.
        """
        for life, origin in living.items():
            reader = self.readers[life]
            for tenant, grown in reader.grown.items():
                require(
                    reader.charged[tenant] == grown,
                    "a member was not charged for what others stated",
                    f"{origin}, {tenant!r}: charged {reader.charged[tenant]}, stated {grown}",
                )
            for other, name in living.items():
                if other != life:
                    self._check_pair(reader, origin, other, name)

    def _check_pair(self, reader: Reader, origin: str, other: int, name: str) -> None:
        read: dict[bytes, int] = defaultdict(int)
        for row, (charged, refunded) in reader.seen.items():
            place, tenant, _ = key_of(row)
            if place == name:
                read[tenant] += charged - refunded
        served = {t for life, t in self.used if life == other}
        tenants = served & reader.stated | read.keys()
        for tenant in sorted(tenants):
            require(
                read[tenant] == self.used[other, tenant],
                "after all has ended, a member has not read what another one served",
                f"{origin} has read {read[tenant]} of {name} for {tenant!r}, which served"
                f" {self.used[other, tenant]}",
            )
