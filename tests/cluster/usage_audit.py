"""Compares the usage that an engine's client reported with what the members' ledgers export."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc.records.usage.export import Span, plain_rows


class Sums(NamedTuple):
    """Counts leases that ended, and their tokens."""

    requests: int
    input_tokens: int
    output_tokens: int


class UsageBooks:
    """Keeps the first end of each lease. The client repeats ends, with the same totals."""

    def __init__(self) -> None:
        self._ends: dict[int, Sums] = {}
        self.repeats = 0
        #: Ends without a count: the scheduler estimates their input.
        self.uncounted = 0

    def ended(self, end: pb.CompleteRequest) -> None:
        """Record an end. An end before any token by a cancel is no usage. O(1)."""
        used = Sums(1, end.input_tokens, end.output_tokens)
        if end.outcome == pb.OUTCOME_CANCELLED and not any(used[1:]):
            self.uncounted += not end.HasField("input_tokens")
            return
        self.repeats += end.lease_id in self._ends
        self._ends.setdefault(end.lease_id, used)

    def sums(self) -> Sums:
        """Sum all ends up. O(leases)."""
        columns = zip(*self._ends.values(), strict=True)
        return Sums(*(sum(column) for column in columns)) if self._ends else Sums(0, 0, 0)


def exported(ledgers: Sequence[Path], *, estimated: bool = False) -> Sums:
    """Return what all ledgers together export, of reports or of estimates."""
    found = plain_rows(ledgers[0], ("estimated",), Span(), ledgers[1:])
    for row in found:
        if row["estimated"] == estimated:
            return Sums(row["requests"], row["input_tokens"], row["output_tokens"])
    return Sums(0, 0, 0)


def differences(books: UsageBooks, ledgers: Sequence[Path]) -> list[str]:
    """Say in which way the ledgers differ from the client's books, where nothing was cut off.

    An estimate may be for a grant that the client never had: it has no token. Or its client left
    before any token and counted nothing: it has no output.
    """
    served, found = books.sums(), exported(ledgers)
    wrong = []
    if found != served:
        wrong.append(f"usage: the engine served {served}, and the ledgers have {found}")
    guessed = exported(ledgers, estimated=True)
    if guessed.output_tokens or (guessed.input_tokens and not books.uncounted):
        wrong.append(f"usage: the ledgers have estimates of leases that ended: {guessed}")
    return wrong
