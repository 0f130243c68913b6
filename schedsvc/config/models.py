"""The keys of a configuration file, with defaults; the sample file explains each key."""

from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, PrivateAttr

from schedsvc.config.cluster import Cluster
from schedsvc.config.explain import type_name
from schedsvc.config.files import path_in
from schedsvc.config.network import (
    STRICT,
    Auth,
    AuthKind,
    Edge,
    FilePath,
    Listener,
    Name,
    Principal,
    Sha256,
    Tls,
    callers_of,
)
from schedsvc.config.outputs import Budget, Log, Metrics, State, Usage

__all__ = [
    "Adapter",
    "Auth",
    "Class",
    "Config",
    "EachPool",
    "Edge",
    "Group",
    "Limits",
    "Listener",
    "Log",
    "Metrics",
    "Model",
    "Pool",
    "PoolLimits",
    "Prices",
    "Principal",
    "Quota",
    "Scheduler",
    "Share",
    "State",
    "Tenant",
    "TenantQuota",
    "TenantRule",
    "Terms",
    "Tls",
    "Usage",
]

_MS = 1_000_000
_MICRO = 1_000_000
_DOMAINS = {"all": 0, "model": 1, "pool": 2}  # of the core
#: The core's own bound: it keeps every product of tokens, price and weight in 64 bits.
_TOKENS_MAX = 1 << 27
POOLS_MAX = 1_024  #: of one process, and of one stream
_TOKENS_OF_A_RANK = 4
AUTO = -1  #: The core finds the number of tokens by itself.


def _fixed_point(places: int, low: str, high: str) -> Callable[[Any], int]:
    """Make a reader of numbers with at most `places` decimals into integer units of the last."""

    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"has to be a number, not {type_name(value)}")
        try:
            number = Decimal(repr(value))
            units = number.scaleb(places)
            whole = units == units.to_integral_value()
        except InvalidOperation:
            raise ValueError("has to be a finite number") from None
        if not number.is_finite() or not Decimal(low) <= number <= Decimal(high):
            raise ValueError(f"is {value}; it has to lie between {low} and {high}")
        if not whole:
            raise ValueError(f"is {value}; it may have at most {places} decimals")
        return int(units)

    return read


def _tokens_or_auto(value: object) -> int:
    """Read a number of tokens, or `auto`."""
    if value == "auto":
        return AUTO
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _TOKENS_MAX:
        raise ValueError(f"has to be auto, or a whole number up to {_TOKENS_MAX}")
    return value


WeightMilli = Annotated[int, BeforeValidator(_fixed_point(3, "0.001", "1000000"))]
DelayMilli = Annotated[int, BeforeValidator(_fixed_point(3, "0", "10"))]
PriceMicro = Annotated[int, BeforeValidator(_fixed_point(6, "0", "10"))]
RatioPpm = Annotated[int, BeforeValidator(_fixed_point(6, "0", "1"))]
HeadroomPpm = Annotated[int, BeforeValidator(_fixed_point(6, "0", "0.9"))]
SurplusPpm = Annotated[int, BeforeValidator(_fixed_point(6, "0", "0.9"))]
HeadroomMinPpm = Annotated[int, BeforeValidator(_fixed_point(6, "-0.9", "0.9"))]
QuantilePpm = Annotated[int, BeforeValidator(_fixed_point(6, "0.5", "0.999"))]
SaturationPpm = Annotated[int, BeforeValidator(_fixed_point(6, "0.01", "1"))]
#: 0: no limit.
QueuedTokens = Annotated[int, Field(ge=0, le=1_000_000_000_000)]
TenantName = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]+$")]
#: The core's own bound.
_QUOTA_MAX = 1_000_000_000_000

Requests = Annotated[int, Field(ge=1, le=_QUOTA_MAX)]
Tokens = Annotated[int, Field(ge=1, le=_QUOTA_MAX)]
#: The least request has a token of input and one of output.
AllTokens = Annotated[int, Field(ge=2, le=_QUOTA_MAX)]
Mode = Literal["enforce", "dry_run"]


class Section(BaseModel):
    """A mapping of the file: no key but the known ones, no value of another type."""

    model_config = STRICT


class Prices(Section):
    """The price of a token for a flow, and the part of it if the prefix cache held the token."""

    input_micro: Annotated[PriceMicro, Field(alias="input")] = 1_000_000
    output_micro: Annotated[PriceMicro, Field(alias="output")] = 2_000_000
    cached_ppm: Annotated[RatioPpm, Field(alias="cached")] = 100_000


TokensOrAuto = Annotated[int, BeforeValidator(_tokens_or_auto)]
SomeTokens = Annotated[int, Field(ge=0, le=_TOKENS_MAX)]
CacheTokens = Annotated[int, Field(ge=0, le=1 << 40)]
Sequences = Annotated[int, Field(ge=0, le=1_000_000)]
Adapters = Annotated[int, Field(ge=0, le=65_536)]


class EachPool(Section):
    """Limits of every pool that has none of its own; 0 is no limit."""

    batch_max_tokens: TokensOrAuto = AUTO
    max_total_tokens: SomeTokens = 0
    max_running: Sequences = 1_000
    max_request_total_tokens: SomeTokens = 0
    max_request_input_tokens: SomeTokens = 0
    max_loras: Adapters = 0
    adapter_tokens: SomeTokens = 0
    sessions_max_tokens: CacheTokens = 0


class PoolLimits(Section):
    """Limits of some pools; one that is absent is that of every pool."""

    pools: Annotated[list[Name], Field(min_length=1, max_length=POOLS_MAX)]
    batch_max_tokens: TokensOrAuto | None = None
    max_total_tokens: SomeTokens | None = None
    max_running: Sequences | None = None
    max_request_total_tokens: SomeTokens | None = None
    max_request_input_tokens: SomeTokens | None = None
    max_loras: Adapters | None = None
    adapter_tokens: SomeTokens | None = None
    sessions_max_tokens: CacheTokens | None = None


class Adapter(Section):
    """The tokens that a LoRA adapter takes of a pool in which it is active."""

    name: TenantName
    tokens: SomeTokens | None = None
    rank: Annotated[int, Field(ge=1, le=65_536)] | None = None

    @property
    def taken_tokens(self) -> int:
        """Tokens of the cache; by its rank as in S-LoRA (arXiv 2311.03285)."""
        return _TOKENS_OF_A_RANK * (self.rank or 0) if self.tokens is None else self.tokens


class Scheduler(Section):
    """The core's settings."""

    policy: Literal["vtc", "vtc-predict", "dlpm", "lcf", "fcfs", "sif"] = "vtc"
    credit_max_tokens: Annotated[TokensOrAuto, Field(alias="credit_max")] = AUTO
    lead_max_tokens: Annotated[TokensOrAuto, Field(alias="lead_max")] = AUTO
    fairness_domain: Literal["all", "model", "pool"] = "model"
    flow_order: Literal["arrival", "deadline"] = "arrival"
    prices: Prices = Prices()
    queue_ttl_ms: Annotated[int, Field(ge=1, le=3_600_000)] = 30_000
    lease_ttl_ms: Annotated[int, Field(ge=100, le=3_600_000)] = 10_000
    lease_grace_ms: Annotated[int, Field(ge=0, le=3_600_000)] = 20_000
    sign_of_life_ms: Annotated[int, Field(ge=1, le=4_000)] = 3_000
    flow_queue_max: Annotated[int, Field(ge=1, le=1_000_000)] = 1_000
    queue_max: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    flow_queue_tokens_max: QueuedTokens = 0
    queue_tokens_max: QueuedTokens = 0
    queue_target_ms: Annotated[int, Field(ge=1, le=3_600_000)] = 2_000
    overload_hold_ms: Annotated[int, Field(ge=1, le=3_600_000)] = 5_000
    saturation_ppm: Annotated[SaturationPpm, Field(alias="saturation")] = 800_000
    early_refusal: bool = False
    leases_max: Annotated[int, Field(ge=1, le=1_000_000)] = 65_536
    flows_max: Annotated[int, Field(ge=1, le=10_000_000)] = 200_000
    adapters_max: Annotated[int, Field(ge=1, le=65_536)] = 1_024
    answers_max: Annotated[int, Field(ge=1, le=10_000_000)] = 100_000
    answer_ttl_ms: Annotated[int, Field(ge=1, le=86_400_000)] = 300_000
    ledger: Literal["peak", "sum"] = "peak"
    dispatch: Literal["backfill", "strict"] = "backfill"
    bypass_max: Annotated[int, Field(ge=0, le=1_000_000)] = 32
    bypass_ms: Annotated[int, Field(ge=0, le=3_600_000)] = 5_000
    backfill_surplus_ppm: Annotated[SurplusPpm, Field(alias="backfill_surplus")] = 0
    headroom_ppm: Annotated[HeadroomPpm, Field(alias="headroom")] = 20_000
    headroom_min_ppm: Annotated[HeadroomMinPpm, Field(alias="headroom_min")] = -300_000
    headroom_max_ppm: Annotated[HeadroomPpm, Field(alias="headroom_max")] = 300_000
    quantile_ppm: Annotated[QuantilePpm, Field(alias="quantile")] = 900_000
    samples_min: Annotated[int, Field(ge=1, le=1_000)] = 10
    adapter_affinity_ppm: Annotated[RatioPpm, Field(alias="adapter_affinity")] = 100_000
    prefix_affinity_ppm: Annotated[RatioPpm, Field(alias="prefix_affinity")] = 100_000
    prefix_blocks_max: Annotated[int, Field(ge=0, le=16_777_216)] = 65_536
    quantum_tokens: Annotated[int, Field(ge=1, le=_TOKENS_MAX)] = 10_000
    delay_factor_milli: Annotated[DelayMilli, Field(alias="delay_factor")] = 0
    each_pool: EachPool = EachPool()
    saturation_band_ppm: Annotated[RatioPpm, Field(alias="saturation_band")] = 50_000

    @property
    def credit_max_micro(self) -> int:
        """The credit in the unit of the counters; AUTO: what one request is charged."""
        return AUTO if self.credit_max_tokens == AUTO else self.credit_max_tokens * _MICRO

    @property
    def lead_max_micro(self) -> int:
        """The lead in that unit; AUTO: two average requests and a second of the pool's rate."""
        return AUTO if self.lead_max_tokens == AUTO else self.lead_max_tokens * _MICRO


class Limits(Section):
    """Limits of the service itself."""

    message_max_bytes: Annotated[int, Field(ge=1_024, le=16_777_216)] = 65_536
    connections_max: Annotated[int, Field(ge=1, le=1_000_000)] = 1_024
    streams_max: Annotated[int, Field(ge=1, le=1_000_000)] = 16_384
    sessions_max: Annotated[int, Field(ge=1, le=1_000_000)] = 4_096
    session_open_max: Annotated[int, Field(ge=1, le=1_000_000)] = 16_384
    write_stall_ms: Annotated[int, Field(ge=10, le=600_000)] = 10_000
    drain_ms: Annotated[int, Field(ge=0, le=3_600_000)] = 25_000
    handshake_ms: Annotated[int, Field(ge=100, le=120_000)] = 10_000
    keepalive_ms: Annotated[int, Field(ge=1_000, le=7_200_000)] = 30_000
    record_max_mb: Annotated[int, Field(ge=1, le=1_000_000)] = 1_024


class Quota(Section):
    """Limits of one level; one that is absent does not limit."""

    requests_per_minute: Requests | None = None
    input_tokens_per_minute: Tokens | None = None
    output_tokens_per_minute: Tokens | None = None
    tokens_per_minute: AllTokens | None = None
    concurrency: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = None

    def core_limits(self) -> dict[str, int]:
        """Keyword arguments for the core; 0 is no limit."""
        return {
            "requests": self.requests_per_minute or 0,
            "input_tokens": self.input_tokens_per_minute or 0,
            "output_tokens": self.output_tokens_per_minute or 0,
            "total_tokens": self.tokens_per_minute or 0,
            "concurrency": self.concurrency or 0,
        }


class TenantQuota(Quota):
    """Limits of one tenant, and what becomes of a request that exceeds them."""

    over: Literal["wait", "refuse"] = "wait"


class Share(Section):
    """The service that a tenant or a group can count on while the pools are saturated."""

    tokens_per_minute: AllTokens
    lends: Annotated[int, Field(ge=0, le=_QUOTA_MAX)] | None = None
    borrows: Annotated[int, Field(ge=0, le=_QUOTA_MAX)] | None = None

    def core_share(self) -> dict[str, int]:
        """Keyword arguments for the core; -1 is no limit."""
        return {
            "share": self.tokens_per_minute,
            "lends": -1 if self.lends is None else self.lends,
            "borrows": -1 if self.borrows is None else self.borrows,
        }


class Group(Section):
    """A quota that tenants and other groups share, and, if it has a weight, their service."""

    name: Name
    parent: Name | None = None
    weight_milli: Annotated[WeightMilli | None, Field(alias="weight")] = None
    quota: Quota = Quota()
    share: Share | None = None
    budget: Budget | None = None


class Model(Section):
    """A quota of whatever runs in some pools, for all tenants."""

    name: Name
    pools: Annotated[list[Name], Field(min_length=1, max_length=POOLS_MAX)]
    quota: Quota = Quota()


class Class(Section):
    """A priority class: the least rank goes first, and one that is exempt before all."""

    name: Name
    rank: Annotated[int, Field(ge=-1_000, le=1_000)] | None = None
    ageing_ms: Annotated[int, Field(ge=1, le=3_600_000)] = 5_000
    exempt: bool = False


class Terms(Section):
    """The limits of a flow, and the classes of its requests."""

    group: Name | None = None
    quota: TenantQuota | None = None
    share: Share | None = None
    request_class: Annotated[Name | None, Field(alias="class")] = None
    classes: Annotated[list[Name], Field(min_length=1, max_length=8)] | None = None

    @property
    def is_limited(self) -> bool:
        """Whether a quota, a share or a group says how much."""
        return (self.quota, self.share, self.group) != (None, None, None)

    @property
    def names_classes(self) -> bool:
        """Whether it says of which class requests are, or may be."""
        return self.request_class is not None or self.classes is not None


class Tenant(Terms):
    """A tenant with a flow of its own in each class."""

    name: TenantName
    weight_milli: Annotated[WeightMilli, Field(alias="weight")] = 1_000
    api_keys_sha256: list[Sha256] = []
    mode: Mode | None = None
    budget: Budget | None = None

    @property
    def is_limited(self) -> bool:
        """Whether a quota, a share, a group or a budget says how much."""
        return super().is_limited or self.budget is not None


class TenantRule(Terms):
    """The terms of an unlisted tenant whose name fits `match` (* is any text)."""

    match: TenantName
    weight_milli: Annotated[WeightMilli, Field(alias="weight")] = 1_000


class Pool(Section):
    """A pool that no shim registers: always attached."""

    name: Name
    capacity_tokens: Annotated[int, Field(ge=1, le=_TOKENS_MAX)]
    block_size_tokens: Annotated[int, Field(ge=1, le=65_536)] = 16
    max_running: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    max_model_tokens: Annotated[int, Field(ge=0, le=_TOKENS_MAX)] = 0
    epoch: Annotated[int, Field(ge=1, le=(1 << 62))] = 1


class Config(Section):
    """A whole configuration file."""

    listeners: Annotated[list[Listener], Field(min_length=1, max_length=64)]
    edge: Edge | None = None
    auth: Auth = Auth()
    scheduler: Scheduler = Scheduler()
    mode: Mode = "enforce"
    limits: Limits = Limits()
    unknown_tenants: Literal["own", "share", "refuse"] = "own"
    tenant_rules: Annotated[list[TenantRule], Field(max_length=1_000)] = []
    unknown_weight_milli: Annotated[WeightMilli, Field(alias="unknown_tenants_weight")] = 100
    unknown_limits: Annotated[Terms, Field(alias="unknown_tenants_limits")] = Terms()
    #: With `default`, which is always there, eight: half of what the core has places for.
    classes: Annotated[list[Class], Field(max_length=7)] = []
    tenants: list[Tenant] = []
    tenants_dir: FilePath | None = None
    groups: Annotated[list[Group], Field(max_length=1_000)] = []
    models: Annotated[list[Model], Field(max_length=64)] = []
    pools: Annotated[list[Pool], Field(max_length=POOLS_MAX)] = []
    pool_limits: Annotated[list[PoolLimits], Field(max_length=POOLS_MAX)] = []
    adapters: Annotated[list[Adapter], Field(max_length=65_536)] = []
    metrics: Metrics | None = None
    log: Log = Log()
    record: FilePath | None = None
    state: State | None = None
    usage: Usage | None = None
    cluster: Cluster | None = None

    _folder: Path = PrivateAttr(default=Path())

    def resolve(self, path: str) -> Path:
        """Return a path of the file; a relative one starts in the file's own folder."""
        return path_in(self._folder, path)

    def is_dry_run(self, tenant: Tenant) -> bool:
        """Whether the requests of a tenant are decided and counted, but never refused."""
        return (tenant.mode or self.mode) == "dry_run"

    def limits_of_pools(self) -> dict[str, dict[str, int]]:
        """Keyword arguments for the core, by pool; "" stands for all that are not named."""
        every = self.scheduler.each_pool.model_dump()
        found = {"": every}
        for entry in self.pool_limits:
            own = entry.model_dump(exclude={"pools"}, exclude_none=True)
            found |= dict.fromkeys(entry.pools, every | own)
        return found

    def auth_kind(self, listener: Listener) -> AuthKind:
        """Return how callers of a listener prove who they are."""
        if listener.auth is not None:
            return listener.auth
        if listener.tls is not None and listener.tls.client_ca is not None:
            return "certificate"
        return "token" if self.auth.has_tokens else "none"

    def callers(self) -> list[Principal]:
        """Return the principals, and one for each other port that bounds its callers."""
        return callers_of(self.auth, [(each, self.auth_kind(each)) for each in self.listeners])

    @property
    def edge_socket(self) -> str | None:
        """The Unix socket to which the edge passes calls on: the first that asks for tokens."""
        for listener in self.listeners:
            if listener.unix is not None and self.auth_kind(listener) == "token":
                return listener.unix
        return None

    def may_operate(self, listener: Listener) -> bool:
        """Whether operators may call here: by default on Unix sockets, or with authentication."""
        if listener.operate is not None:
            return listener.operate
        return listener.unix is not None or self.auth_kind(listener) != "none"

    def core_options(self) -> dict[str, Any]:
        """Keyword arguments for the core's Scheduler."""
        settings = self.scheduler
        return {
            "policy": settings.policy,
            "queue_ttl_ns": settings.queue_ttl_ms * _MS,
            "lease_ttl_ns": settings.lease_ttl_ms * _MS,
            "lease_grace_ns": settings.lease_grace_ms * _MS,
            "sign_of_life_ns": settings.sign_of_life_ms * _MS,
            "flow_queue_max": settings.flow_queue_max,
            "queue_max": settings.queue_max,
            "flow_queue_tokens_max": settings.flow_queue_tokens_max,
            "queue_tokens_max": settings.queue_tokens_max,
            "queue_target_ns": settings.queue_target_ms * _MS,
            "overload_hold_ns": settings.overload_hold_ms * _MS,
            "saturation_ppm": settings.saturation_ppm,
            "early_refusal": int(settings.early_refusal),
            "leases_max": settings.leases_max,
            "flows_max": settings.flows_max,
            "adapters_max": settings.adapters_max,
            "answers_max": settings.answers_max,
            "answer_ttl_ns": settings.answer_ttl_ms * _MS,
            "input_price_micro": settings.prices.input_micro,
            "output_price_micro": settings.prices.output_micro,
            "cached_price_ppm": settings.prices.cached_ppm,
            "credit_max_micro": settings.credit_max_micro,
            "lead_max_micro": settings.lead_max_micro,
            "fairness_domain": _DOMAINS[settings.fairness_domain],
            "flow_order": settings.flow_order,
            "ledger": settings.ledger,
            "dispatch": settings.dispatch,
            "bypass_max": settings.bypass_max,
            "bypass_ns": settings.bypass_ms * _MS,
            "backfill_surplus_ppm": settings.backfill_surplus_ppm,
            "headroom_ppm": settings.headroom_ppm,
            "headroom_min_ppm": settings.headroom_min_ppm,
            "headroom_max_ppm": settings.headroom_max_ppm,
            "quantile_ppm": settings.quantile_ppm,
            "samples_min": settings.samples_min,
            "adapter_affinity_ppm": settings.adapter_affinity_ppm,
            "prefix_affinity_ppm": settings.prefix_affinity_ppm,
            "prefix_blocks_max": settings.prefix_blocks_max,
            "quantum_tokens": settings.quantum_tokens,
            "delay_factor_milli": settings.delay_factor_milli,
            "saturation_band_ppm": settings.saturation_band_ppm,
            "pools_max": POOLS_MAX,
            "session_pools_max": POOLS_MAX,
            "session_open_max": self.limits.session_open_max,
            "sessions_max": self.limits.sessions_max,
        }
