"""Judges two snapshots of Stats: who is hurt, by whom, and what to do.

A pure function of the snapshots that a caller gets, so the sentence names only what these show.
"ok" is one rule: no finding. A finding is a tenant that was refused, or that waited too long, at or
below its share; a refusal by a limit, or by a fault of its client; a part that does not work; or an
operator's setting that keeps decisions from being as the file says. A tenant beyond its share that
is refused what it asks beyond it is no finding: that is what the scheduler is for.
"""

from collections.abc import Iterator
from typing import Any

from schedsvc_client.v1 import judgement_pb2, mode_pb2
from schedsvc_client.v1.judgement_pb2 import (
    JUDGEMENT_LEVEL_NOTICE,
    JUDGEMENT_LEVEL_OK,
    JUDGEMENT_LEVEL_TROUBLE,
    JUDGEMENT_LEVEL_UNKNOWN,
)

from schedsvc.service.judged_tenants import Finding, Traffic, is_away, listed, named, seconds_text

__all__ = ["AGE_MAX_MS", "judge"]

#: Older figures say nothing about now.
AGE_MAX_MS = 5_000
#: Sequences that an engine runs beyond those that were granted; reports are late by as many.
_STRANGERS_MIN, _STRANGERS_PART = 3, 0.1
#: As many preemptions, and more than requests that complete: an engine computes all again.
_PREEMPTIONS_MIN = 10
#: A write-ahead log that is so large is held by another program's query.
_LOG_BYTES_MAX = 64 << 20
#: Findings that one text holds: each further one says less.
_FINDINGS_MAX = 2
_PROBLEM_CHARS = 120


def judge(then: Any | None, now: Any, age_ms: int, seconds: float) -> judgement_pb2.Judgement:
    """Return the judgement of StatsResponses that are `seconds` apart; `then` is None at a start.

    `age_ms` is how old the later one is, by the clock of the caller. O(flows + pools).
    """
    if age_ms > AGE_MAX_MS:
        text = f"The figures are {seconds_text(age_ms)} old: nothing is known of the time since."
        return _judgement(JUDGEMENT_LEVEL_UNKNOWN, text)
    if now.cluster.set.name and not now.cluster.set.leads:
        return _standing_by(now.cluster.set)
    traffic = Traffic(then, now, seconds)
    found = [*_engines(then, now, traffic), *_works(then, now), *_files(then, now)]
    found += _cluster(now.cluster)
    found += traffic.findings()
    found += _settings(now)
    # sorted() keeps the order of those that are equally urgent.
    found.sort(key=lambda finding: -finding.level)
    level = found[0].level if found else JUDGEMENT_LEVEL_OK
    texts = [finding.text for finding in found[:_FINDINGS_MAX]]
    left = len(found) - len(texts)
    if left:
        texts.append(f"{left} more finding{'s' if left > 1 else ''}.")
    if context := traffic.context():
        texts.append(context)
    return _judgement(level, " ".join(texts))


def _judgement(level: int, text: str) -> judgement_pb2.Judgement:
    return judgement_pb2.Judgement(level=judgement_pb2.JudgementLevel.ValueType(level), text=text)


def _standing_by(role: Any) -> judgement_pb2.Judgement:
    """Judge a member that serves nothing."""
    leader = named(role.leadership.leader.partition("/")[0])
    if role.problem:
        text = f"The store of the cluster cannot be asked who leads: {ended(role.problem)}"
        return _judgement(JUDGEMENT_LEVEL_TROUBLE, text)
    if not leader:
        text = f"No member leads the set {named(role.name)}, so its pools get nothing."
        return _judgement(JUDGEMENT_LEVEL_TROUBLE, f"{text} No leader is known: look at the store.")
    text = f"This scheduler stands by: {leader} leads, at {role.target}."
    return _judgement(JUDGEMENT_LEVEL_OK, text)


def _engines(then: Any | None, now: Any, traffic: "Traffic") -> Iterator[Finding]:
    """Yield engines that are away, and those that run what was not granted."""
    if now.policy and not any(pool.attached or is_away(pool) for pool in now.pools):
        if traffic.without_pool:
            text = "No engine is connected" if now.pools else "No engine has ever connected"
            text += ": all requests are refused. Start a gate."
            yield Finding(JUDGEMENT_LEVEL_TROUBLE, text)
        elif now.HasField("totals"):
            text = "No engine is connected." if now.pools else "No engine has connected yet."
            yield Finding(JUDGEMENT_LEVEL_NOTICE, text)
    away = [pool for pool in now.pools if is_away(pool)]
    if away:
        names = listed([pool.name for pool in away])
        text = f"No engine is connected for {names}: requests for it are refused or wait in vain."
        text += " Look at the engine and its gate."
        yield Finding(JUDGEMENT_LEVEL_TROUBLE, text)
    before = {} if then is None else {pool.name: pool for pool in then.pools}
    for pool in now.pools:
        earlier = before.get(pool.name)
        if earlier is not None and (count := min(strangers(earlier), strangers(pool))):
            text = f"{named(pool.name)} runs {count:,} sequences that were not granted here:"
            text += " a gate lets requests pass (fail-open), or clients reach the engine directly."
            yield Finding(JUDGEMENT_LEVEL_TROUBLE, text)


def _works(then: Any | None, now: Any) -> Iterator[Finding]:
    """Yield engines that stand still with requests in them, and those that throw work away."""
    before = {} if then is None else {pool.name: pool for pool in then.pools}
    completed = sum(flow.completed for flow in now.flows)
    completed -= 0 if then is None else sum(flow.completed for flow in then.flows)
    for pool in now.pools:
        earlier = before.get(pool.name)
        if earlier is None or earlier.epoch != pool.epoch:
            continue
        if is_still(earlier, pool):
            text = f"The engine of {named(pool.name)} stands still: it has {pool.live_leases:,}"
            text += (
                f" requests, and has reported nothing for {seconds_text(pool.telemetry_age_ms)}."
            )
            yield Finding(JUDGEMENT_LEVEL_TROUBLE, f"{text} Look at the engine and its gate.")
        count = pool.engine_preemptions - earlier.engine_preemptions
        if count >= max(_PREEMPTIONS_MIN, completed):
            text = (
                f"The engine of {named(pool.name)} preempted {count:,} times, while {completed:,}"
            )
            text += " requests completed. Compare its KV cache with the pool's capacity."
            yield Finding(JUDGEMENT_LEVEL_NOTICE, text)


def is_still(earlier: Any, pool: Any) -> bool:
    """Return whether an engine that reported its figures has stopped with requests in it."""
    is_silent = pool.attached and pool.telemetry_age_ms > AGE_MAX_MS
    has_work = bool(earlier.live_leases and pool.live_leases)
    return bool(is_silent and has_work and earlier.posted_tokens == pool.posted_tokens)


def strangers(pool: Any) -> int:
    """Return how many sequences an engine runs that were not granted; 0: few, or not known."""
    count = int(pool.engine_running + pool.engine_waiting - pool.running_sequences)
    is_fresh = 0 <= pool.telemetry_age_ms <= AGE_MAX_MS and pool.engine_running
    if not is_fresh or count <= max(_STRANGERS_MIN, _STRANGERS_PART * pool.running_sequences):
        return 0
    return count


def ended(problem: str) -> str:
    """Return a problem as the end of a sentence, cut if it is long."""
    cut = problem if len(problem) <= _PROBLEM_CHARS else f"{problem[: _PROBLEM_CHARS - 1]}…"
    return cut if cut.endswith(".") else f"{cut}."


def _files(then: Any | None, now: Any) -> Iterator[Finding]:
    """Yield what keeps the state and the ledger from being written."""
    if now.state.problem:
        text = f"The state has not been saved for {seconds_text(now.state.unsaved_ms)}:"
        text += f" {ended(now.state.problem)} A restart now loses counters and quotas."
        yield Finding(JUDGEMENT_LEVEL_TROUBLE, text)
    if now.usage.problem:
        text = f"The usage ledger cannot be written: {ended(now.usage.problem)}"
        yield Finding(JUDGEMENT_LEVEL_TROUBLE, text)
    lost = now.usage.lost_rows - (0 if then is None else then.usage.lost_rows)
    if lost > 0:
        text = f"The usage ledger lost the usage of {lost:,} requests. Its log has the reason."
        yield Finding(JUDGEMENT_LEVEL_TROUBLE, text)
    for file, bytes_ in (("state file", now.state.log_bytes), ("ledger", now.usage.log_bytes)):
        if bytes_ >= _LOG_BYTES_MAX:
            text = f"The log of the {file} has {bytes_ >> 20:,} MiB, and grows until the disk is"
            text += " full: another program is in the middle of a query. End that program."
            yield Finding(JUDGEMENT_LEVEL_NOTICE, text)


def _cluster(cluster: Any) -> Iterator[Finding]:
    """Yield what keeps members from sharing, and from taking over."""
    problem = cluster.problem or cluster.set.problem
    problem = problem or cluster.quotas.problem or cluster.settings.problem
    if problem:
        text = f"The store of the cluster does not do its work: {ended(problem)}"
        if cluster.problem:
            text += f" This member has served alone for {seconds_text(cluster.unsynced_ms)}."
        if cluster.quotas.divided_by > 1:
            text += f" It spends one part in {cluster.quotas.divided_by:,} of each limit."
        yield Finding(JUDGEMENT_LEVEL_TROUBLE, text)
    if cluster.set.leads and not cluster.set.followers:
        text = "No member follows this leader: if it ends, no other continues from it."
        yield Finding(JUDGEMENT_LEVEL_NOTICE, text)


def _settings(now: Any) -> Iterator[Finding]:
    """Yield settings that are not as the file says, or that keep requests out."""
    if now.config.problem:
        text = f"The last reload changed nothing: {ended(now.config.problem)}"
        yield Finding(JUDGEMENT_LEVEL_NOTICE, text)
    if now.config.needs_restart:
        text = f"{listed(list(now.config.needs_restart))} of the file counts after a restart only."
        yield Finding(JUDGEMENT_LEVEL_NOTICE, text)
    drained = [pool.name for pool in now.pools if pool.draining]
    if now.draining:
        text = "The scheduler drains: new requests are refused."
        yield Finding(JUDGEMENT_LEVEL_NOTICE, text)
    elif drained:
        # A caller that sees some of the pools may have another one beyond them.
        is_all = now.HasField("totals") and len(drained) == len(now.pools)
        what = "are refused" if is_all else "go elsewhere, or are refused"
        text = f"An operator drains {listed(drained)}: new requests {what}."
        yield Finding(JUDGEMENT_LEVEL_NOTICE, text)
    modes = now.mode
    if mode_pb2.MODE_AUDIT in (modes.overlay or modes.configured, *(t.mode for t in modes.tenants)):
        text = "It is a dry run: decisions are only counted, and every request passes."
        if modes.overlay != mode_pb2.MODE_AUDIT and modes.configured != mode_pb2.MODE_AUDIT:
            text = "Some tenants are in dry run: their requests pass whatever is decided."
        yield Finding(JUDGEMENT_LEVEL_NOTICE, text)
