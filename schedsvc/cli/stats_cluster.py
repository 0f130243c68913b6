"""The part of `schedsvc stats` about a cluster."""

from collections.abc import Iterator
from typing import Any

__all__ = ["cluster_line", "cluster_lines"]


def cluster_line(cluster: Any) -> str:
    """Return in one line who shares service with this scheduler, and since when not."""
    seconds = cluster.unsynced_ms / 1_000
    text = f"cluster {cluster.cluster}: member {cluster.member}"
    if cluster.problem:
        return f"{text} has served alone for {seconds:,.1f} s: {cluster.problem}"
    names = ", ".join(cluster.members)
    return f"{text} of {len(cluster.members):,} ({names}); last exchange {seconds:.1f} s ago"


def cluster_lines(cluster: Any) -> Iterator[str]:
    """Yield all that is known of a cluster."""
    yield cluster_line(cluster)
    yield f"totals: {cluster.totals_own:,} of this member, {cluster.totals_others:,} of others"
    yield f"charged here for others: {cluster.remote_micro / 1e6:,.0f} priced tokens"
    yield f"forgiven beyond leads: {cluster.forgiven_micro / 1e6:,.0f} weighted tokens"
    yield f"totals sent again: {cluster.repeats:,} times; rows ignored: {cluster.rows_ignored:,}"
