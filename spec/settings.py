"""Declare the settings: one row for each key of the configuration, and for each of the core alone.

A row holds plain facts. `python -m spec.generate` writes from the rows what the core, its stub, the
configuration, the sample file, the reference and the tests need. To add a setting, add a row, run
`make spec`, and use the setting. The sentences of rows stand in the sample and in the reference.
"""

from dataclasses import dataclass

#: Bounds that code of the core and of the configuration names too, and why each has its value.
BOUNDS = {
    "TOKENS_MAX": (1 << 27, "keeps every product of tokens, price and weight below 2^63"),
    "PRICE_MICRO_MAX": (10_000_000, "the same product: 2^28 * 10^7 * 10^3 < 2.7 * 10^18"),
    "KV_PRICE_MICRO_MAX": (10_000, "a request of 1M tokens costs at most 5 * 10^15 of 9 * 10^15"),
    "POOLS_MAX": (1_024, "pools of one process, and of one stream"),
    "ADAPTERS_MAX": (65_536, "LoRA adapters that have a number"),
    "PREFIX_BLOCKS_MAX": (1 << 24, "blocks in the estimate of the cache of a pool"),
}
TOKENS_MAX, _PRICE_MICRO_MAX, _KV_PRICE_MICRO_MAX, POOLS_MAX, ADAPTERS_MAX, PREFIX_BLOCKS_MAX = (
    bound for bound, _ in BOUNDS.values()
)
PRICE_MAX = _PRICE_MICRO_MAX // 1_000_000
KV_PRICE_MAX = _KV_PRICE_MICRO_MAX / 1_000_000
HOUR_MS = 3_600_000


@dataclass(frozen=True)
class Unit:
    """A unit says how the file writes a value, and how code names its last decimal."""

    text: str = ""
    decimals: int = 0
    suffix: str = ""


COUNT, TOKENS, BYTES, MB, MS = Unit(), Unit("tokens"), Unit("bytes"), Unit("MB"), Unit("ms")
FACTOR, PART, PRICE = Unit("", 3, "_milli"), Unit("", 6, "_ppm"), Unit("", 6, "_micro")
SERVICE = Unit("tokens", 6, "_micro")  # of the counters


@dataclass(frozen=True)
class Setting:
    """A setting is one row of the tables below. With the default `auto` a number is allowed too."""

    name: str
    unit: Unit
    default: bool | float | str
    least: float
    greatest: float
    help: str
    choices: tuple[tuple[str, str], ...] = ()  # of a text, each with its meaning
    page: str = ""  # of docs/, which says more
    source: str = ""  # paper or system
    live: bool = True  # a reload changes it; else a restart does
    core: str = ""  # its name in the core, if that differs
    core_default: int | None = None  # in the core's own unit, if these differ
    core_least: int | None = None
    core_greatest: int | None = None
    numbered: bool = False  # the core gets the number of a choice


@dataclass(frozen=True)
class Section:
    """Describe a mapping of the file; `model` is the class that holds it."""

    path: str
    model: str
    help: str
    settings: tuple[Setting, ...]
    in_core: bool = False  # the core has all of it, else only what names `core`
    in_sample: bool = True


# A row of the tables stands in few lines.
# fmt: off
_SCHEDULER = (
    Setting("policy", COUNT, "vtc", 0, 0, source="arXiv 2401.00588", page="understand/locality.md",
            help="The policy orders the requests of different tenants.", choices=(
                ("vtc", "weighted fair sharing by tokens"),
                ("dlpm", "fair by quanta, and the longest cached prefix first within a quantum"),
                ("fcfs", "first come, first served"))),
    Setting("fairness_domain", COUNT, "model", 0, 0, numbered=True, page="understand/pools.md",
            help="A tenant's service counts in all pools of this domain.", choices=(
                ("all", "all pools"),
                ("model", "the pools of a model, or all if there are no models"),
                ("pool", "each pool alone"))),
    Setting("flow_order", COUNT, "arrival", 0, 0, page="understand/queues.md",
            help="The order of one tenant's requests in a class.", choices=(
                ("arrival", "first come, first served"),
                ("deadline", "requests with a deadline or a queue TTL by urgency, then the others"
                 " by arrival"))),
    Setting("queue_ttl_ms", MS, 30_000, 1, HOUR_MS,
            help="A request waits in its queue for at most this time."),
    Setting("lease_ttl_ms", MS, 10_000, 100, HOUR_MS,
            help="A client has to report a running request at least this often."),
    Setting("lease_grace_ms", MS, 20_000, 0, HOUR_MS,
            help="The reservation of a request that nothing reports is released this time after"
            " `lease_ttl_ms`."),
    Setting("flow_queue_max", COUNT, 1_000, 1, 1_000_000,
            help="The queue of one tenant holds at most this number of requests. A caller with"
            " less than its part of a full queue still finds a place: the places divided by the"
            " callers there."),
    Setting("queue_max", COUNT, 10_000, 1, 1_000_000,
            help="The queues of all tenants together hold at most this number of requests."),
    Setting("flow_queue_tokens_max", TOKENS, 0, 0, 10**12,
            help="The queued requests of one tenant have at most this input; 0: no limit. A"
            " request that is alone in its queue may be larger."),
    Setting("queue_tokens_max", TOKENS, 0, 0, 10**12,
            help="The queued requests of all tenants together have at most this input; 0: no"
            " limit."),
    Setting("early_refusal", COUNT, True, 0, 1, page="operate/operations.md",
            help="If on, a request that cannot be served within its longest wait, or have its first"
            " token by its deadline, is refused at once; by its deadline also at its turn."),
    Setting("saturation", PART, 0.8, 0.01, 1, core_least=1,
            help="A pool is nearly overloaded if this part of it is promised, or if a request"
            " waits for room."),
    Setting("leases_max", COUNT, 65_536, 1, 1_000_000,
            help="At most this number of requests run at once, in all pools together."),
    Setting("headroom", PART, 0.02, 0, 0.9, live=False, page="understand/pools.md",
            help="This part of each pool is not promised, at the start; it grows when the engine"
            " preempts, and shrinks slowly while its cache stays unfilled."),
)
_EXPERT = (
    Setting("credit_max", SERVICE, "auto", 0, TOKENS_MAX, source="arXiv 2401.00588",
            help="A tenant that becomes backlogged precedes the others for at most this service,"
            " at weight 1; auto: the average cost of a request; 0: none, as in the VTC paper. A"
            " large value stalls the other tenants."),
    Setting("lead_max", SERVICE, "auto", 0, TOKENS_MAX, page="understand/pools.md",
            help="Service in other pools keeps a tenant behind the others in a pool by at most"
            " this; auto: four of the largest requests of late, over its weight, and one second of"
            " what the pool serves."),
    Setting("quantum_tokens", TOKENS, 10_000, 1, TOKENS_MAX, page="understand/locality.md",
            source="arXiv 2501.14312",
            help="Under `dlpm` this service of weight 1 is ordered by prefix. A larger quantum"
            " finds more in the caches, and lets shares differ for longer."),
    Setting("sign_of_life_ms", MS, 3_000, 1, 4_000, core_default=0, core_least=0,
            help="If a second engine claims a pool, the first one has this time to answer;"
            " otherwise the second one gets the pool. Clients wait for their Welcome for 5 s."),
    Setting("saturation_band", PART, 0.05, 0, 1, page="use/tenants.md",
            help="Shares of tenants bind from `saturation` on, until the load is lower than that"
            " by this part."),
    Setting("queue_target_ms", MS, 2_000, 1, HOUR_MS,
            help="A pool is overloaded if its next request has waited for longer than this, or if"
            " the engine preempts."),
    Setting("overload_hold_ms", MS, 5_000, 1, HOUR_MS,
            help="An overloaded pool counts as such until it has been calm for this time."),
    Setting("flows_max", COUNT, 200_000, 1, 10_000_000, page="use/tenants.md",
            help="At most this number of tenants have flows; beyond it, new unlisted tenants"
            " share one."),
    Setting("adapters_max", COUNT, 1_024, 1, ADAPTERS_MAX, live=False,
            help="Queued and running requests use at most this number of LoRA adapters."),
    Setting("answers_max", COUNT, 100_000, 1, 10_000_000, core_least=0,
            help="At most this number of verdicts are kept for repeated calls."),
    Setting("answer_ttl_ms", MS, 300_000, 1, 24 * HOUR_MS,
            help="A verdict is kept for repeated calls for this time."),
    Setting("ledger", COUNT, "peak", 0, 0, live=False, page="understand/pools.md",
            help="The ledger counts what running requests may need.", choices=(
                ("peak", "the most that they need together, because they end at different times"),
                ("sum", "the most that each of them needs"))),
    Setting("dispatch", COUNT, "backfill", 0, 0, live=False, page="understand/pools.md",
            source="EASY backfill",
            help="The rule for a request that fits while the next one does not.", choices=(
                ("backfill", "it may pass if its tenant would come next after that one, and if it"
                 " does not delay that one's start"),
                ("strict", "it waits"))),
    Setting("bypass_max", COUNT, 32, 0, 1_000_000, live=False, page="understand/pools.md",
            help="A tenant below its share with one request queued may delay the next request of"
            " a tenant above its share this number of times."),
    Setting("bypass_ms", MS, 5_000, 0, HOUR_MS, live=False, page="understand/pools.md",
            help="The delays of one request end this time after the first of them."),
    Setting("backfill_surplus", PART, 0, 0, 0.9, live=False, page="understand/pools.md",
            help="Above 0, requests that pass are charged 1 minus this part of their work, for"
            " more tokens per second at the cost of equal shares. So one tenant may get up to 1 /"
            " (1 - this) of another's service, and lower classes may pass with this part of what"
            " is granted."),
    Setting("headroom_min", PART, -0.3, -0.9, 0.9, live=False, page="understand/pools.md",
            help="The headroom shrinks to this; below 0 the scheduler promises more than the pool"
            " has."),
    Setting("headroom_max", PART, 0.3, 0, 0.9, live=False, page="understand/pools.md",
            help="The headroom grows to this. If all three are equal, the headroom is fixed."),
    Setting("quantile", PART, 0.9, 0.5, 0.999, live=False, core_least=1, core_greatest=1_000_000,
            help="A grant reserves this quantile of the tenant's output lengths."),
    Setting("samples_min", COUNT, 10, 1, 1_000, live=False,
            help="A tenant's own output lengths count after this number of completed requests."),
    Setting("adapter_affinity", PART, 0.1, 0, 1, page="understand/pools.md",
            help="A request prefers a pool in which its LoRA adapter is active, if that is fuller"
            " by at most this part of a pool."),
    Setting("prefix_affinity", PART, 0.1, 0, 1, page="understand/locality.md",
            help="A request prefers the pool that has most of its prompt, if that is fuller by at"
            " most this part of a pool, and if callers send hashes of its blocks."),
    Setting("prefix_blocks_max", COUNT, 65_536, 0, PREFIX_BLOCKS_MAX,
            page="understand/locality.md",
            help="The estimate of each pool's cache has at most this number of blocks; 0: hashes"
            " do not matter."),
    Setting("delay_factor", FACTOR, 0, 0, 10, page="understand/pools.md", source="vLLM",
            help="While requests run in a pool, new ones are held for this multiple of its last"
            " prefill, so that prefills batch; 0: not at all."),
)
_PRICES = (
    Setting("input", PRICE, 1, 0, PRICE_MAX, core="input_price_micro",
            help="The price of an input token."),
    Setting("output", PRICE, 2, 0, PRICE_MAX, core="output_price_micro",
            help="The price of an output token."),
    Setting("cached", PART, 0.1, 0, 1, core="cached_price_ppm",
            help="Input from the prefix cache costs this part of the input price."),
    Setting("kv", PRICE, 0, 0, KV_PRICE_MAX, core="kv_price_micro",
            page="understand/prices.md",
            help="The price of a token that is held in the KV cache for one step of output."),
)
#: In the core each is 0 unless the configuration gives it.
_EACH_POOL = (
    Setting("batch_max_tokens", TOKENS, "auto", 0, TOKENS_MAX,
            help="At most this input is granted and not yet computed; auto: a sixth of the pool,"
            " at least its longest request."),
    Setting("max_total_tokens", TOKENS, 0, 0, TOKENS_MAX,
            help="Requests use at most this part of the cache, if that is less than the engine"
            " has."),
    Setting("max_running", COUNT, 1_000, 0, 1_000_000,
            help="At most this number of sequences run at once."),
    Setting("max_request_total_tokens", TOKENS, 0, 0, TOKENS_MAX,
            help="A request with more input and output together is refused."),
    Setting("max_request_input_tokens", TOKENS, 0, 0, TOKENS_MAX,
            help="A request with more input is refused."),
    Setting("max_loras", COUNT, 0, 0, ADAPTERS_MAX, source="S-LoRA, arXiv 2311.03285",
            help="Requests run with at most this number of LoRA adapters at once."),
    Setting("adapter_tokens", TOKENS, 0, 0, TOKENS_MAX, source="S-LoRA, arXiv 2311.03285",
            help="Each active adapter takes this of the cache, unless `adapters` lists it."),
    Setting("sessions_max_tokens", TOKENS, 0, 0, 1 << 40,
            help="The last turns of all active sessions of agents have at most this size; further"
            " sessions wait."),
)
_LIMITS = (
    Setting("message_max_bytes", BYTES, 65_536, 1_024, 1 << 24, live=False,
            help="A message of a client has at most this size."),
    Setting("connections_max", COUNT, 1_024, 1, 1_000_000, live=False,
            help="Each listener keeps at most this number of connections. Beyond it, the oldest"
            " on which no call had a token or a certificate are closed, and each one beyond twice"
            " as many. A connection without such a call is closed after 10 s in any case. Give"
            " untrusted callers another listener."),
    Setting("streams_max", COUNT, 16_384, 1, 1_000_000, live=False,
            help="One connection has at most this number of calls at once."),
    Setting("sessions_max", COUNT, 4_096, 1, 1_000_000, core="sessions_max",
            help="At most this number of Session streams are open."),
    Setting("session_open_max", COUNT, 16_384, 1, 1_000_000, core="session_open_max",
            help="One Session stream has at most this number of requests without a verdict."),
    Setting("write_stall_ms", MS, 10_000, 10, 600_000, live=False,
            help="A Session whose peer does not read for this time is closed."),
    Setting("drain_ms", MS, 25_000, 0, HOUR_MS,
            help="After SIGTERM, queued and running requests have this time. The end takes about"
            " 2 s more, and Kubernetes kills after 30 s by default."),
    Setting("handshake_ms", MS, 10_000, 100, 120_000, live=False,
            help="A connection that has sent nothing after this time is dropped."),
    Setting("keepalive_ms", MS, 30_000, 1_000, 7_200_000, live=False,
            help="A connection that is silent for this time is asked whether its peer lives."),
    Setting("record_max_mb", MB, 1_024, 1, 1_000_000, live=False,
            help="A recording (`record`) ends at this size."),
)
_CORE = (
    Setting("lease_id_base", COUNT, 1, 1, 1 << 62, live=False,
            help="The first lease id, if ids count up."),
    Setting("refusal_samples_min", COUNT, 10, 0, 1_000, live=False,
            help="Early refusal needs this number of estimates that proved right."),
    Setting("pools_max", COUNT, 64, 1, POOLS_MAX, live=False,
            help="At most this number of pools; one that is free again is used before the 65th."),
    Setting("session_pools_max", COUNT, 8, 1, POOLS_MAX, live=False,
            help="One stream offers at most this number of pools."),
    Setting("message_bytes_max", BYTES, 0, 0, 1 << 30, live=False,
            help="The Welcome states this limit of the transport; 0: it states none."),
    Setting("work_max", COUNT, 1_024, 1, 1 << 30, live=False,
            help="One poll ends and grants at most this number."),
)
# fmt: on

SECTIONS = (
    Section(
        "scheduler",
        "Scheduler",
        "The policy, the queues, and what runs.",
        _SCHEDULER,
        True,
    ),
    Section(
        "scheduler.prices",
        "Prices",
        "The prices at which tokens count as service of a tenant, and the cache that they hold.",
        _PRICES,
        True,
    ),
    Section(
        "scheduler.each_pool",
        "EachPool",
        "Limits of each pool, whichever caller registers it; 0: no limit"
        " (docs/understand/pools.md).",
        _EACH_POOL,
    ),
    Section(
        "scheduler.expert",
        "Expert",
        "Settings whose defaults fit almost everyone; the sample file leaves them out.",
        _EXPERT,
        in_core=True,
        in_sample=False,
    ),
    Section("limits", "Limits", "Limits of the service itself.", _LIMITS),
)
#: The file has no keys for these: the service decides them.
CORE_ONLY = Section("", "", "Settings of the core alone.", _CORE, True)
