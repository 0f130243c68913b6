"""Explains a request's state in sentences for a person."""

from schedsvc_client.v1 import explain_pb2 as pb
from schedsvc_client.v1 import quota_pb2, scheduler_pb2

__all__ = ["pool_needs", "sentences"]

#: The reason why a pool, or its next request, waits.
_POOL_NEEDS = {
    pb.WAIT_REASON_KV: "needs KV cache",
    pb.WAIT_REASON_MAX_RUNNING: "runs as many sequences as it may (max_running)",
    pb.WAIT_REASON_OVERDRAWN: "holds more than its ledger allows",
    pb.WAIT_REASON_DETACHED: "has no shim connected",
    pb.WAIT_REASON_LIMIT: "cannot grant beyond scheduler.leases_max",
    pb.WAIT_REASON_STRICT: "is kept by a request that waits for another pool",
    pb.WAIT_REASON_HEADROOM: "keeps the rest of its KV cache for growth and for lighter flows",
    pb.WAIT_REASON_MODEL_QUOTA: "waits for the quota of its model",
    pb.WAIT_REASON_MAX_TOTAL: "needs KV cache below its max_total_tokens",
    pb.WAIT_REASON_ROUND: "has input to compute before it takes more (batch_max_tokens)",
    pb.WAIT_REASON_ADAPTERS: "has as many LoRA adapters active as it may (max_loras)",
    pb.WAIT_REASON_DELAY: "holds requests for a moment so that prefills batch (delay_factor)",
    pb.WAIT_REASON_DRAINING: "is drained by an operator",
    pb.WAIT_REASON_SESSION_CAP: "lets no further session begin until active ones pause"
    " (sessions_max_tokens)",
    pb.WAIT_REASON_SHARE: "serves no tenant that is beyond its share",
}
_ROOM = frozenset({pb.WAIT_REASON_KV, pb.WAIT_REASON_MAX_TOTAL, pb.WAIT_REASON_HEADROOM})
_KINDS = {
    quota_pb2.LIMIT_KIND_REQUESTS_PER_MINUTE: "requests a minute",
    quota_pb2.LIMIT_KIND_INPUT_TOKENS_PER_MINUTE: "input tokens a minute",
    quota_pb2.LIMIT_KIND_OUTPUT_TOKENS_PER_MINUTE: "output tokens a minute",
    quota_pb2.LIMIT_KIND_TOKENS_PER_MINUTE: "tokens a minute",
    quota_pb2.LIMIT_KIND_CONCURRENT_REQUESTS: "requests at once",
}


#: Why a request is refused, and what would change it.
_REFUSED = {
    scheduler_pb2.OUTCOME_REJECTED_FLOW_QUEUE_FULL: "the queue of its tenant, in its class, is full"
    " (flow_queue_max, flow_queue_tokens_max)",
    scheduler_pb2.OUTCOME_REJECTED_QUEUE_FULL: "all queues together are full (queue_max,"
    " queue_tokens_max)",
    scheduler_pb2.OUTCOME_REJECTED_TOO_LARGE: "it is larger than any pool that it may go to",
    scheduler_pb2.OUTCOME_REJECTED_NO_POOL: "no pool that it may go to is connected"
    " (without a name it may go to those that `pools` lists or that every caller may offer)",
    scheduler_pb2.OUTCOME_REJECTED_DRAINING: "every pool that could run it is being drained",
    scheduler_pb2.OUTCOME_REJECTED_QUOTA: "a quota of its tenant, or of a group above, is used up"
    " (over: refuse)",
    scheduler_pb2.OUTCOME_REJECTED_DEADLINE: "its expected wait was longer"
    " than it may wait, or than its deadline allows (early_refusal)",
    scheduler_pb2.OUTCOME_REJECTED_LIMIT: "a limit of the scheduler itself is reached",
    scheduler_pb2.OUTCOME_REJECTED_QUOTA_SIZE: "it is larger than a quota of its tenant, or of a"
    " group above, will ever hold",
    scheduler_pb2.OUTCOME_EVICTED_TTL: "it had waited for as long as it may (queue_ttl_ms)",
    scheduler_pb2.OUTCOME_EVICTED_CANCELLED: "its caller has withdrawn it",
    scheduler_pb2.OUTCOME_EVICTED_DRAINING: "the scheduler, or its pool, was being drained",
    scheduler_pb2.OUTCOME_EVICTED_TOO_LARGE: "no pool that it may go to is large enough any more",
    scheduler_pb2.OUTCOME_EVICTED_DEADLINE: "its deadline could not be met any more",
}


def sentences(story: pb.RequestStory) -> str:
    """Say where a request stands, why, and what is expected."""
    waited = _seconds(story.queue_duration_us / 1e6)
    if story.state == pb.REQUEST_STATE_REFUSED:
        name = scheduler_pb2.Outcome.Name(story.outcome).removeprefix("OUTCOME_").lower()
        why = _REFUSED.get(story.outcome, name)
        after = f" after {waited} in the queue{_most(story)}" if story.queue_duration_us else ""
        return f"It was refused {_seconds(story.state_ms / 1e3)} ago{after}: {why}."
    if story.state == pb.REQUEST_STATE_ENDED:
        how = scheduler_pb2.Outcome.Name(story.outcome).removeprefix("OUTCOME_").lower()
        ago = _seconds(story.state_ms / 1e3)
        return f"It ended {ago} ago ({how}), after {waited} in the queue{_most(story)}."
    if story.state != pb.REQUEST_STATE_QUEUED:
        lease = "is overdue for a report" if story.state == pb.REQUEST_STATE_SUSPECT else "runs"
        void = "; it holds no reservation any more" if story.is_void else ""
        since = _seconds(story.state_ms / 1e3)
        return f"It {lease} in pool {story.pool} since {since}, after {waited} in the queue" + (
            f"{_most(story)}{void}."
        )
    return f"It has waited for {waited}. {_now(story)} {_outlook(story)}"


def pool_needs(wait_reason: str) -> str:
    """Return what a pool waits for, from `wait_reason` of its PoolStats; empty: for nothing."""
    name = "MODEL_QUOTA" if wait_reason == "QUOTA" else wait_reason
    numbers = pb.WaitReason.DESCRIPTOR.values_by_name
    found = numbers.get(f"WAIT_REASON_{name}")
    return "" if found is None else _POOL_NEEDS.get(pb.WaitReason.ValueType(found.number), "")


def _now(story: pb.RequestStory) -> str:
    reason, place = story.place.reason, story.place
    if reason == pb.WAIT_REASON_SESSION_CAP:
        return _session_cap(story.session.cap)
    if reason == pb.WAIT_REASON_QUEUE:
        if story.HasField("session"):
            return _in_session(story.session)
        ahead = place.queue_ahead
        return f"{_number(ahead, 1_024)} of its own flow {'is' if ahead == 1 else 'are'} before it."
    if reason == pb.WAIT_REASON_QUOTA or (
        reason == pb.WAIT_REASON_MODEL_QUOTA and story.HasField("limit")
    ):
        return _quota(story.limit)
    if reason == pb.WAIT_REASON_SHARE:
        whose = f"Group {story.limit.quota}" if story.limit.quota else "Its tenant"
        return (
            f"{whose} is beyond its share of {story.limit.limit:,} tokens a minute"
            f"{_due(story.limit, 'has some again')}."
        )
    if reason == pb.WAIT_REASON_TURN:
        return _turn(story)
    rows = [pool for pool in story.pools if pool.reason == reason]
    rows.sort(key=lambda pool: not pool.is_next)
    if not rows:
        return "No pool that it may go to is connected."
    return f"It is next; pool {rows[0].pool} {_lack(rows[0])}."


def _in_session(session: pb.SessionPlace) -> str:
    others, same = session.sessions_ahead, session.requests_ahead
    go = "session of its tenant goes" if others == 1 else "sessions of its tenant go"
    are = "request is" if same == 1 else "requests are"
    return (
        f"{_number(others, 32)} other {go} before its own, in which {_number(same, 1_024)} {are}"
        " before it."
    )


def _session_cap(cap: pb.SessionCapWait) -> str:
    held = "the active sessions there leave less"
    if cap.limit_tokens:  # else the caller may not see the pool
        held = (
            f"the active sessions there ({cap.active_sessions:,}) hold {cap.active_tokens:,} of"
            f" {cap.limit_tokens:,}"
        )
    return (
        f"Its session waits to begin in pool {cap.pool}: it needs {cap.needs_tokens:,} tokens, and"
        f" {held} (sessions_max_tokens). Sessions of its tenant that wait before it:"
        f" {_number(cap.sessions_ahead, 32)}. The first of all that wait there begins in"
        f" {_seconds(cap.next_in_ms / 1e3)} at the latest."
    )


def _number(number: int, most: int) -> str:
    """Return a number that is counted up to `most`."""
    return f"{number:,}" if number <= most else f"more than {most:,}"


def _lack(pool: pb.PoolWait) -> str:
    needs = _POOL_NEEDS.get(pool.reason, "has no room")
    if pool.reason in _ROOM and pool.is_next and pool.need_tokens:  # else it may not see the pool
        needs += (
            f": with its {pool.need_tokens:,} tokens it would hold {pool.load_tokens:,},"
            f" and {pool.load_max_tokens:,} are allowed"
        )
    return needs


def _turn(story: pb.RequestStory) -> str:
    if not story.pools:
        return "No pool that it may go to is connected."
    rows = [pool for pool in story.pools if not pool.is_next and pool.reason]
    if not rows:
        return "It waits for its turn."
    pool = rows[0]
    who = _who(pool)
    if pool.next_class != story.request_class:
        who += f", of class {pool.next_class}"
    lead = ""
    if pool.next_lead_tokens > 0:
        lead = f" by {pool.next_lead_tokens:,} tokens of service"
    return f"In pool {pool.pool} {who} goes first{lead}, and the pool {_lack(pool)}."


def _who(pool: pb.PoolWait) -> str:
    """Say who goes first: of groups, the one at the level at which the two part."""
    flow = f"flow {pool.next_tenant}" if pool.next_tenant else "another flow"
    if not pool.level:
        return flow
    mine = f"group {_bare(pool.own_group)}" if pool.own_group else "its tenant"
    first = f"group {_bare(pool.next_group)} ({flow} in it)" if pool.next_group else flow
    return f"{first}, at level {pool.level} of the groups beside {mine},"


def _bare(group: str) -> str:
    return group.removeprefix("group:")


def _quota(limit: pb.LimitWait) -> str:
    whose = f"quota {limit.quota}" if limit.quota else "its tenant's quota"
    if limit.behind_others or limit.kind not in _KINDS:
        return f"Other requests wait for {whose}, too, and precede it."
    if limit.kind == quota_pb2.LIMIT_KIND_CONCURRENT_REQUESTS:
        return f"As many run at once as {whose} allows ({limit.limit:,}): until one of them ends."
    return (
        f"It needs {limit.needs:,} of {whose} of {limit.limit:,} {_KINDS[limit.kind]},"
        f" of which {limit.remaining:,} are left{_due(limit, 'has enough')}."
    )


def _due(limit: pb.LimitWait, what: str) -> str:
    return f"; it {what} in {_seconds(limit.due_ms / 1e3)}" if limit.due_ms >= 0 else ""


def _outlook(story: pb.RequestStory) -> str:
    gives_up = f"gives up in {_seconds(story.place.evicted_in_ms / 1e3)}"
    if story.wait_left_ms < 0:
        return f"How much longer is not known yet; it {gives_up}."
    turn = _seconds(story.wait_left_ms / 1e3)
    if story.wait_error_ms:
        turn += f" (give or take {_seconds(story.wait_error_ms / 1e3)})"
    late_ms = story.wait_left_ms - story.place.evicted_in_ms
    if late_ms < 0:
        return f"It is expected to run in {turn}; it {gives_up}."
    probably = "probably " if late_ms <= story.wait_error_ms else ""
    return f"It will {probably}not be served: its turn is expected in {turn}, and it {gives_up}."


def _most(story: pb.RequestStory) -> str:
    """Say what it waited for longest."""
    if not story.waited:
        return ""
    longest = max(story.waited, key=lambda row: row.time_us)
    name = pb.WaitReason.Name(longest.reason).removeprefix("WAIT_REASON_")
    return f", most of it for {name} ({_seconds(longest.time_us / 1e6)})"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1_000:.0f} ms" if seconds < 1 else f"{seconds:,.1f} s"
