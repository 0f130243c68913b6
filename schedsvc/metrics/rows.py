"""Says which figures of the core's snapshot are metrics, and states their HELP texts."""

from dataclasses import dataclass

__all__ = [
    "CLASS_ROWS",
    "FLOW_ROWS",
    "GEN_AI_ROWS",
    "GROUP_ROWS",
    "HISTOGRAM_ROWS",
    "POOL_ROWS",
    "QUOTA_ROWS",
    "TENANT_ROWS",
    "TOTAL_ROWS",
    "Row",
]


@dataclass(frozen=True, slots=True)
class Row:
    """Describes a metric: its name, its kind, and its key and unit in the core's snapshot."""

    name: str
    is_counter: bool
    key: str
    help: str
    divisor: int = 1


FLOW_ROWS = (
    Row("input_tokens", True, "input_tokens", "Input tokens served, cached ones included."),
    Row("cached_input_tokens", True, "cached_input_tokens", "Input tokens served from a cache."),
    Row("output_tokens", True, "output_tokens", "Output tokens served."),
    Row(
        "kv_posted_tokens",
        False,
        "posted_tokens",
        "KV tokens that callers report as computed; without reports, the input of what runs.",
    ),
    Row("kv_promised_tokens", False, "promised_tokens", "KV tokens reserved by live leases."),
    Row("live_leases", False, "live_leases", "Requests that run now."),
    Row("queued_requests", False, "queued", "Requests that wait in the queue."),
    Row(
        "queued_input_tokens",
        False,
        "queued_input_tokens",
        "Input tokens of the requests that wait.",
    ),
    Row(
        "wait_expected_seconds",
        False,
        "wait_expected_ms",
        "Time that one more request would wait in the queue, in seconds.",
        1_000,
    ),
    Row(
        "wait_error_seconds",
        False,
        "wait_error_ms",
        "Average error of the predicted waits, in seconds.",
        1_000,
    ),
    Row(
        "deadline_probes_judged",
        True,
        "deadline_probes_judged",
        "Requests that were admitted although predicted to be late.",
    ),
    Row(
        "deadline_probes_missed",
        True,
        "deadline_probes_missed",
        "Deadline probes that missed their deadline.",
    ),
    Row(
        "oldest_queued_seconds",
        False,
        "oldest_queued_ms",
        "Age of the oldest request in the queue, in seconds.",
        1_000,
    ),
    Row("requests_received", True, "received", "Requests that were received."),
    Row("requests_granted", True, "granted", "Requests that were granted."),
    Row("requests_completed", True, "completed", "Requests that ended as completed."),
    Row("requests_cancelled", True, "cancelled", "Requests that ended before they were completed."),
    Row("requests_expired", True, "expired", "Requests whose lease expired without a renewal."),
    Row(
        "waits_for_quota",
        False,
        "waits_for_quota",
        "1 while a quota delays the tenant's next request.",
    ),
    Row(
        "share_left_tokens",
        False,
        "share_left_tokens",
        "Tokens that are left of the tenant's share.",
    ),
    Row(
        "borrowed_tokens", True, "borrowed_tokens", "Tokens that the tenant used beyond its share."
    ),
    Row("lent_tokens", True, "lent_tokens", "Tokens of the tenant's share that others used."),
    Row(
        "held_to_share",
        False,
        "held_to_share",
        "1 while the tenant waits because it is beyond its share.",
    ),
    Row("audit", False, "audit", "1 while decisions on the tenant are only counted."),
    Row(
        "audited_waits",
        True,
        "audited_waits",
        "Requests that would have waited if decisions were enforced.",
    ),
)
POOL_ROWS = (
    Row("pool_capacity_tokens", False, "capacity_tokens", "KV cache of the pool, in tokens."),
    Row(
        "pool_headroom_tokens",
        False,
        "headroom_tokens",
        "KV tokens that are kept free; below 0 the pool is overcommitted.",
    ),
    Row(
        "pool_load_tokens",
        False,
        "load_tokens",
        "Most KV tokens that the pool will hold at one time.",
    ),
    Row(
        "pool_kept_tokens",
        False,
        "kept_tokens",
        "KV tokens that are left for tenants below their share.",
    ),
    Row(
        "pool_round_tokens",
        False,
        "round_tokens",
        "Input tokens that were granted and are not computed yet.",
    ),
    Row("pool_active_adapters", False, "active_adapters", "LoRA adapters that leases use now."),
    Row(
        "pool_adapter_tokens",
        False,
        "adapter_tokens",
        "KV tokens that the active LoRA adapters take.",
    ),
    Row(
        "pool_sessions_active",
        False,
        "sessions_active",
        "Sessions of agents that had a turn in the last minute.",
    ),
    Row(
        "pool_sessions_tokens",
        False,
        "sessions_tokens",
        "Prompts and outputs of the last turns of these sessions.",
    ),
    Row(
        "pool_sessions_waiting",
        False,
        "sessions_waiting",
        "Sessions that wait for sessions_max_tokens.",
    ),
    Row(
        "pool_prefix_blocks",
        False,
        "prefix_blocks",
        "Blocks that the prefix cache is estimated to hold.",
    ),
    Row(
        "pool_prefix_asked_tokens",
        True,
        "prefix_asked_tokens",
        "Input tokens that were granted with prefix hashes.",
    ),
    Row(
        "pool_prefix_matched_tokens",
        True,
        "prefix_matched_tokens",
        "Input tokens granted with hashes that were estimated as cached.",
    ),
    Row("pool_promised_tokens", False, "promised_tokens", "KV tokens that live leases reserve."),
    Row(
        "pool_posted_tokens",
        False,
        "posted_tokens",
        "KV tokens that callers report as computed; without reports, the input of what runs.",
    ),
    Row("pool_live_leases", False, "live_leases", "Requests that run now."),
    Row(
        "pool_suspect_leases",
        False,
        "suspect_leases",
        "Leases whose holder is overdue with a report.",
    ),
    Row("pool_queued_requests", False, "queued", "Requests that wait for this pool alone."),
    Row(
        "pool_max_running",
        False,
        "max_running",
        "Most requests that may run at once; 0 is no limit.",
    ),
    Row(
        "pool_overload_state",
        False,
        "overload_state",
        "Load: 1 is underloaded, 2 nearly overloaded, 3 overloaded.",
    ),
    Row(
        "pool_drain_tokens_per_second",
        False,
        "drain_tokens_per_minute",
        "Charged tokens that are granted in a second while requests wait.",
        60,
    ),
    Row(
        "pool_prefill_tokens_per_second",
        False,
        "prefill_tokens_per_s",
        "Input tokens that are computed in a second, from the grant to the first output.",
    ),
    Row(
        "pool_fill_ratio", False, "fill_ppm", "Ratio of promised tokens to the capacity.", 1_000_000
    ),
    Row("pool_overdrawn", False, "overdrawn", "1 while the promises exceed the capacity."),
    Row("pool_saturated", False, "saturated", "1 while the pool is saturated and shares bind."),
    Row("pool_draining", False, "draining", "1 while the pool is drained."),
    Row(
        "pool_attached",
        False,
        "attached",
        "1 while a shim offers the pool, or the configuration lists it.",
    ),
    Row(
        "pool_said_goodbye",
        False,
        "said_goodbye",
        "1 if no shim offers the pool, and the last one that did sent a Goodbye.",
    ),
    Row("pool_epoch", False, "epoch", "Epoch of the pool; it grows when the engine restarts."),
    Row(
        "engine_running_requests",
        False,
        "engine_running",
        "Requests that run, as the engine last reported.",
    ),
    Row(
        "engine_waiting_requests",
        False,
        "engine_waiting",
        "Requests that wait, as the engine last reported.",
    ),
    Row(
        "engine_used_tokens",
        False,
        "engine_used_tokens",
        "KV tokens in use, as the engine last reported.",
    ),
    Row(
        "pool_output_above_limit_tokens",
        True,
        "output_above_limit_tokens",
        "Output that was charged above what its requests can use, as final counts state it.",
    ),
    Row("engine_preemptions", True, "engine_preemptions", "Preemptions since the engine started."),
    Row(
        "engine_telemetry_age_seconds",
        False,
        "telemetry_age_ms",
        "Age of the engine's last report, in seconds.",
        1_000,
    ),
)
# Only where there are several.
CLASS_ROWS = (
    Row("class_live_leases", False, "live_leases", "Requests of the class that run."),
    Row("class_queued_requests", False, "queued", "Requests of the class that wait."),
    Row("class_requests_granted", True, "granted", "Requests of the class that were granted."),
    Row(
        "class_requests_brought_forward",
        True,
        "brought_forward",
        "Requests of the class that were granted early because of ageing.",
    ),
)
# Rows of groups, of models, and (without a name) of the pool of all shares.
QUOTA_ROWS = (
    Row(
        "quota_open_requests",
        False,
        "open_requests",
        "Requests that took from the quota and have not ended.",
    ),
    Row(
        "quota_waiting",
        False,
        "waiting",
        "Flows, or pools of a model, whose next request waits for the quota.",
    ),
    Row(
        "quota_held_flows",
        False,
        "held_flows",
        "Flows of the group that wait because they are beyond their shares.",
    ),
    Row(
        "quota_share_left_tokens",
        False,
        "share_left_tokens",
        "Tokens that members of the group can borrow.",
    ),
    Row(
        "quota_borrowed_tokens",
        True,
        "borrowed_tokens",
        "Tokens that members of the group borrowed from outside it.",
    ),
    Row("quota_lent_tokens", True, "lent_tokens", "Tokens that others borrowed from the group."),
)
# Rows of groups with a weight.
GROUP_ROWS = (
    Row("group_weight", False, "weight_milli", "Weight of the group among its siblings.", 1_000),
    Row(
        "group_entitled_ratio",
        False,
        "entitled_ppm",
        "Part of all service that the group is due by its weight while others are active.",
        1_000_000,
    ),
    Row("group_queued_requests", False, "queued", "Requests of the group that wait."),
    Row("group_live_leases", False, "live_leases", "Requests of the group that run."),
    Row("group_requests_granted", True, "granted", "Requests of the group that were granted."),
    Row(
        "group_input_tokens",
        True,
        "input_tokens",
        "Input tokens served to the group, cached ones included.",
    ),
    Row(
        "group_cached_input_tokens",
        True,
        "cached_input_tokens",
        "Input tokens served to the group from a cache.",
    ),
    Row("group_output_tokens", True, "output_tokens", "Output tokens served to the group."),
)
TOTAL_ROWS = (
    Row(
        "fairness_gap_tokens",
        False,
        "fairness_gap_micro",
        "Widest gap of service between backlogged tenants, in weighted tokens.",
        1_000_000,
    ),
    Row(
        "fairness_bound_tokens",
        False,
        "fairness_bound_micro",
        "Most that the fairness gap may be, in weighted tokens; 0: the policy promises none.",
        1_000_000,
    ),
    Row(
        "predictor_coverage_ratio",
        False,
        "predictor_coverage_ppm",
        "Ratio of outputs that stayed within the predicted quantile.",
        1_000_000,
    ),
    Row(
        "predictor_level_ratio",
        False,
        "predictor_level_ppm",
        "Quantile of all output lengths in use, steered by the coverage.",
        1_000_000,
    ),
    Row(
        "predictor_samples",
        False,
        "predictor_samples",
        "Outputs that the predictor has learned from, decayed.",
    ),
    Row(
        "reserved_to_used_ratio",
        False,
        "reserved_to_used_ppm",
        "Ratio of reserved to used output tokens of completed requests.",
        1_000_000,
    ),
    Row("open_sessions", False, "open_sessions", "Session streams that are open."),
    Row("stored_answers", False, "stored_answers", "Verdicts that are kept for repeated calls."),
    Row(
        "replays_refused", True, "replays_refused", "Replays of unknown leases that were rejected."
    ),
    Row(
        "reports_limited",
        True,
        "reports_limited",
        "Leases of which a report stated more than was charged.",
    ),
)
# Rows of tenants that the configuration does not list.
TENANT_ROWS = (
    Row("first_sight_tenants", False, "first_sight", "Unlisted tenants with a flow of their own."),
    Row(
        "forgotten_tenants", True, "forgotten", "Tenants forgotten so that others got their flows."
    ),
    Row("flows_max", False, "flows_max", "Tenants beyond which new names share one flow."),
    Row(
        "shared_flow_requests",
        True,
        "shared_requests",
        "Requests with a proved name that shared a flow because there were flows_max flows.",
    ),
)
# Histograms by tenant and class; sums in microseconds.
HISTOGRAM_ROWS = (
    Row(
        "queue_wait_seconds",
        False,
        "queue_wait",
        "Time from the admission to the grant of granted requests, in seconds.",
        1_000_000,
    ),
    Row(
        "evicted_wait_seconds",
        False,
        "evicted_wait",
        "Time that requests waited before they left the queue without a grant, in seconds.",
        1_000_000,
    ),
    Row(
        "time_to_first_token_seconds",
        False,
        "time_to_first_token",
        "Time from the admission to the first report of output before the end, in seconds.",
        1_000_000,
    ),
)
# Written beside the others if `metrics.gen_ai` is on, by the names that OpenTelemetry's exporter
# for Prometheus gives to the metrics of its conventions.
GEN_AI_ROWS = (
    Row(
        "gen_ai_server_time_to_first_token_seconds",
        False,
        "time_to_first_token",
        "Time from the admission to the first report of output before the end, in seconds.",
        1_000_000,
    ),
    Row(
        "gen_ai_server_request_duration_seconds",
        False,
        "completed",
        "Time from the admission to the end of requests that completed, in seconds.",
        1_000_000,
    ),
    Row(
        "gen_ai_server_time_per_output_token_seconds",
        False,
        "output_token",
        "Mean time per output token after the first, of requests that completed, in seconds.",
        1_000_000,
    ),
)
