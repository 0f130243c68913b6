"""Writes reasons of refusals and of waits in a few words, for tables that people read."""

__all__ = ["OUTCOME_WORDS", "WAIT_WORDS"]

#: Refusals and evictions, by their names in the metrics.
OUTCOME_WORDS = {
    "rejected_flow_queue_full": "its queue is full",
    "rejected_queue_full": "all queues are full",
    "rejected_too_large": "too large for any pool",
    "rejected_no_pool": "no such pool",
    "rejected_draining": "refused by a drain",
    "rejected_unknown_tenant": "unknown tenant",
    "rejected_quota": "limit used up",
    "rejected_deadline": "would wait too long",
    "rejected_limit": "limit of the scheduler",
    "rejected_quota_size": "larger than its limit",
    "evicted_ttl": "waited too long",
    "evicted_cancelled": "left by its client",
    "evicted_draining": "evicted by a drain",
    "evicted_too_large": "too large since a change",
    "evicted_deadline": "first token would be late",
}
#: Why a request waits, or the next one of a pool, by the names of the contract; "": it does not.
WAIT_WORDS = {
    "": "",
    "UNSPECIFIED": "",
    "NONE": "",
    "QUEUE": "its own queue",
    "QUOTA": "a limit",
    "SHARE": "its share",
    "TURN": "its turn",
    "KV": "KV cache",
    "MAX_RUNNING": "max_running",
    "OVERDRAWN": "its ledger",
    "DETACHED": "an engine",
    "LIMIT": "leases_max",
    "STRICT": "another pool",
    "HEADROOM": "headroom",
    "MODEL_QUOTA": "its model's limit",
    "MAX_TOTAL": "max_total_tokens",
    "ROUND": "prefills",
    "ADAPTERS": "max_loras",
    "DELAY": "its batch",
    "DRAINING": "a drain's end",
    "SESSION_CAP": "sessions",
}
