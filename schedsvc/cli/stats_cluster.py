"""Prints the part of `schedsvc stats` about a cluster."""

from collections.abc import Iterator
from typing import Any

__all__ = ["cluster_line", "cluster_lines"]


def cluster_line(cluster: Any) -> str:
    """Return in one line who shares service with this scheduler, and since when not."""
    if not cluster.cluster:
        leader = cluster.set.leadership.leader.partition("/")[0]
        text = f"member {cluster.member} stands by in set {cluster.set.name}"
        return f"{text}; {_leader_of(leader, cluster.set.target)}"
    seconds = cluster.unsynced_ms / 1_000
    text = f"cluster {cluster.cluster}: member {cluster.member}"
    if cluster.problem:
        return f"{text} has served alone for {seconds:,.1f} s: {cluster.problem}"
    names = ", ".join(cluster.members)
    return f"{text} of {len(cluster.members):,} ({names}); last exchange {seconds:.1f} s ago"


def _leader_of(leader: str, target: str) -> str:
    return f"the leader is {leader} at {target}" if leader else "no leader is known"


def cluster_lines(cluster: Any) -> Iterator[str]:
    """Yield all that is known of a cluster."""
    yield cluster_line(cluster)
    if cluster.cluster:
        yield from _shared_lines(cluster)
    if cluster.HasField("set"):
        yield from _set_lines(cluster.set)


def _shared_lines(cluster: Any) -> Iterator[str]:
    yield f"totals: {cluster.totals_own:,} of this member, {cluster.totals_others:,} of others"
    yield f"charged here for others: {cluster.remote_micro / 1e6:,.0f} priced tokens"
    yield f"forgiven beyond leads: {cluster.forgiven_micro / 1e6:,.0f} weighted tokens"
    yield f"totals sent again: {cluster.repeats:,} times; rows ignored: {cluster.rows_ignored:,}"
    if cluster.HasField("quotas"):
        yield _quota_line(cluster.quotas)
        yield from _slot_lines(cluster.quotas)
    if cluster.HasField("settings"):
        yield from _settings_lines(cluster.settings)
    else:
        yield "operators' tenants, keys and modes are not shared: cluster.secret_file is not set"


def _slot_lines(quotas: Any) -> Iterator[str]:
    text = f"shared concurrency: {quotas.slots:,} slots held here"
    if quotas.concurrency_overlap:
        text += (
            f"; {quotas.concurrency_overlap:,} requests run beyond the caps (concurrency_overlap)"
        )
    yield text
    if quotas.budgets:
        yield f"shared budgets: {quotas.budgets:,}"


def _settings_lines(settings: Any) -> Iterator[str]:
    yield f"shared settings: {settings.rows:,} rows; {settings.applied:,} taken from others"
    if settings.rows_forged:
        yield f"forged settings: {settings.rows_forged:,}; see cluster_row_forged in the log"
    if settings.rows_refused:
        yield f"refused settings: {settings.rows_refused:,}; see cluster_setting_refused in the log"
    if settings.problem:
        yield f"changes of settings stay here: {settings.problem}"


def _quota_line(quotas: Any) -> str:
    text = f"shared quotas: {quotas.buckets:,} held here; {quotas.chunks:,} chunks drawn"
    if quotas.losses:
        text += f"; lost by the store {quotas.losses:,} times"
    if not quotas.problem:
        return text
    spends = f"1/{quotas.divided_by:,} of each limit" if quotas.divided_by else "what it holds"
    if quotas.divided_by == 1:
        spends = "the whole of each limit"
    return f"{text}; without the store this member spends {spends}: {quotas.problem}"


def _set_lines(pool_set: Any) -> Iterator[str]:
    role, known = "leader" if pool_set.leads else "standby", pool_set.leadership
    text = f"set {pool_set.name}: {role}; term {known.term:,}"
    leader = f"led by {known.leader} at {pool_set.target}" if known.leader else "no leader known"
    yield f"{text}, {leader}"
    if pool_set.leads:
        yield f"followers that may lead next: {', '.join(pool_set.followers) or 'none'}"
    else:
        yield f"requests that would keep their places here: {pool_set.places:,}"
    yield f"terms taken: {pool_set.terms_taken:,}; lost: {pool_set.terms_lost:,}"
    if pool_set.rows_forged:
        yield f"forged rows: {pool_set.rows_forged:,}; see cluster_row_forged in the log"
    if pool_set.problem:
        yield f"terms are unknown: {pool_set.problem}"
