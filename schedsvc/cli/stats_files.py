"""Prints the part of `schedsvc stats` about the files that a scheduler writes."""

from collections.abc import Iterator
from typing import Any

__all__ = ["file_lines"]


def file_lines(snapshot: Any) -> Iterator[str]:
    """Yield a line about the state file while it cannot be written, and one about the ledger."""
    if snapshot.state.problem:
        seconds = snapshot.state.unsaved_ms / 1_000
        yield f"the state has not been saved for {seconds:,.1f} s: {snapshot.state.problem}"
    if snapshot.HasField("usage"):
        yield _usage_line(snapshot.usage)


def _usage_line(usage: Any) -> str:
    """Return how many ended leases the usage ledger has saved, and what keeps it from more."""
    text = f"usage ledger: {usage.saved_rows:,} saved, {usage.waiting_rows:,} waiting"
    text += f", {usage.lost_rows:,} lost" if usage.lost_rows else ""
    return f"{text}; not saved: {usage.problem}" if usage.problem else text
