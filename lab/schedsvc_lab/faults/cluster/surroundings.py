"""Shows the world and its processes to the other parts of a world."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import structlog

from schedsvc.cluster import store as store_port
from schedsvc.driver.clock import boot_source
from schedsvc_lab.faults.cluster.process_loop import ProcessLoop
from schedsvc_lab.faults.cluster.quota_books import QuotaBooks
from schedsvc_lab.faults.cluster.sum_books import SumBooks
from schedsvc_lab.faults.cluster.term_books import TermBooks
from schedsvc_lab.faults.event_queue import EventQueue

__all__ = ["Host", "StoreWorld", "Surroundings", "Words", "cluster_code"]

#: A command, as the client's library takes it.
Words = tuple[str | bytes | int, ...]


class Host(Protocol):
    """Shows a process to its connections."""

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


class StoreWorld(Protocol):
    """Shows the world to the store and its connections."""

    queue: EventQueue

    def store_took(self, sender: Host, words: Words, found: Any) -> None:
        """Look at a command that the store has carried out, and at its answer."""

    def store_heard(self, sender: Host, words: Words, found: Any) -> None:
        """Look at an answer that has reached the process that asked."""


class Surroundings(StoreWorld, Protocol):
    """Shows the world to its processes."""

    books: SumBooks
    quotas: QuotaBooks
    terms: TermBooks
    disks: dict[str, dict[bytes, bytes]]
    #: The process that runs.
    current: Any

    def at(self, process: Any) -> AbstractContextManager[None]:
        """Run in the context of a process."""

    def charged(self, life: int, rows: list[tuple[bytes, bytes, bytes, int, int]]) -> None:
        """Look at what a core is charged for service of others."""

    def process_at(self, target: str) -> Any:
        """Return the process that listens at a target; None if none does."""


def _drop(*_: object) -> str:
    """Turn the log off for a run: its members log much about the faults done to them."""
    raise structlog.DropEvent


@contextmanager
def cluster_code(dial: Callable[[Any], Any], boot_ns: Callable[[], int]) -> Iterator[None]:
    """Let the cluster's code read a world's clock, and make its connections by `dial`."""
    before, store_port.dial = store_port.dial, dial
    logged = structlog.get_config()["processors"]
    structlog.configure(processors=[_drop])
    try:
        with boot_source(boot_ns):
            yield
    finally:
        store_port.dial = before
        structlog.configure(processors=logged)
