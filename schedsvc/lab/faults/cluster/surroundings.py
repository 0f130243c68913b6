"""The world and its processes, as the other parts of a world see them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from schedsvc.lab.faults.cluster.process_loop import ProcessLoop
from schedsvc.lab.faults.cluster.quota_books import QuotaBooks
from schedsvc.lab.faults.cluster.sum_books import SumBooks
from schedsvc.lab.faults.cluster.term_books import TermBooks
from schedsvc.lab.faults.event_queue import EventQueue

__all__ = ["Host", "Surroundings"]


class Host(Protocol):
    """A process, as the connections of it see it."""

    name: str
    number: int
    loop: ProcessLoop
    is_dead: bool
    cut_until_ns: int
    peers_cut_until_ns: int

    def act(self, what: Callable[[], object]) -> None:
        """Let something reach the process."""

    def delay_ns(self) -> int:
        """Draw the time that a message takes between this process and the store."""


class Surroundings(Protocol):
    """The world, as its processes see it."""

    queue: EventQueue
    books: SumBooks
    quotas: QuotaBooks
    terms: TermBooks
    disks: dict[str, dict[bytes, bytes]]
    #: The process that runs.
    current: Any

    def at(self, process: Any) -> AbstractContextManager[None]:
        """Let a process be the one that runs."""

    def charged(self, life: int, rows: list[tuple[bytes, bytes, bytes, int, int]]) -> None:
        """Look at what a core is charged for service of others."""

    def process_at(self, target: str) -> Any:
        """Return the process that listens at a target; None if none does."""
