"""Declares the keys of a configuration file; the sample file explains each key."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr

from schedsvc.config.cluster import Cluster
from schedsvc.config.files import path_in
from schedsvc.config.network import (
    Auth,
    AuthKind,
    Edge,
    FilePath,
    Listener,
    Name,
    Principal,
    Sha256,
    Tls,
    Transport,
    callers_of,
)
from schedsvc.config.outputs import Budget, Log, Metrics, State, Usage
from schedsvc.config.settings import (
    POOLS_MAX,
    TOKENS_MAX,
    Limits,
    Scheduler,
    SomePools,
    core_options,
)
from schedsvc.config.values import Section, fixed_point

__all__ = [
    "Adapter",
    "Auth",
    "Class",
    "Config",
    "Edge",
    "Group",
    "Limits",
    "Listener",
    "Log",
    "Metrics",
    "Model",
    "Pool",
    "PoolLimits",
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

_TOKENS_OF_A_RANK = 4


WeightMilli = Annotated[int, fixed_point(3, "0.001", "1000000")]
TenantName = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]+$")]
#: The core's own bound.
_QUOTA_MAX = 1_000_000_000_000

Requests = Annotated[int, Field(ge=1, le=_QUOTA_MAX)]
Tokens = Annotated[int, Field(ge=1, le=_QUOTA_MAX)]
#: The least request has a token of input and one of output.
AllTokens = Annotated[int, Field(ge=2, le=_QUOTA_MAX)]
Mode = Literal["enforce", "dry_run"]
#: People write the words of a command and of a file alike.
WrittenMode = Annotated[
    Mode,
    BeforeValidator(
        lambda v: "dry_run" if v == "dry-run" else v,
        json_schema_input_type=Literal["enforce", "dry_run", "dry-run"],
    ),
]


class PoolLimits(SomePools):
    """Limits some pools."""

    pools: Annotated[list[Name], Field(min_length=1, max_length=POOLS_MAX)]


SomeTokens = Annotated[int, Field(ge=0, le=TOKENS_MAX)]


class Adapter(Section):
    """States the tokens that a LoRA adapter takes of a pool in which it is active."""

    name: TenantName
    tokens: SomeTokens | None = None
    rank: Annotated[int, Field(ge=1, le=65_536)] | None = None

    @property
    def taken_tokens(self) -> int:
        """Return the tokens of the cache; by its rank as in S-LoRA (arXiv 2311.03285)."""
        return _TOKENS_OF_A_RANK * (self.rank or 0) if self.tokens is None else self.tokens


class Quota(Section):
    """States the limits of one level; one that is absent does not limit."""

    requests_per_minute: Requests | None = None
    input_tokens_per_minute: Tokens | None = None
    output_tokens_per_minute: Tokens | None = None
    tokens_per_minute: AllTokens | None = None
    concurrency: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = None

    def core_limits(self) -> dict[str, int]:
        """Return keyword arguments for the core; 0 is no limit."""
        return {
            "requests": self.requests_per_minute or 0,
            "input_tokens": self.input_tokens_per_minute or 0,
            "output_tokens": self.output_tokens_per_minute or 0,
            "total_tokens": self.tokens_per_minute or 0,
            "concurrency": self.concurrency or 0,
        }


class TenantQuota(Quota):
    """States the limits of one tenant, and what becomes of a request that exceeds them."""

    over: Literal["wait", "refuse"] = "wait"


class Share(Section):
    """States the service that a tenant or a group can count on while the pools are saturated."""

    tokens_per_minute: AllTokens
    lends: Annotated[int, Field(ge=0, le=_QUOTA_MAX)] | None = None
    borrows: Annotated[int, Field(ge=0, le=_QUOTA_MAX)] | None = None

    def core_share(self) -> dict[str, int]:
        """Return keyword arguments for the core; -1 is no limit."""
        return {
            "share": self.tokens_per_minute,
            "lends": -1 if self.lends is None else self.lends,
            "borrows": -1 if self.borrows is None else self.borrows,
        }


class Group(Section):
    """Holds a quota that tenants and other groups share, and, if it has a weight, their service."""

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
    """Describes a priority class: the least rank runs first, and an exempt one before all."""

    name: Name
    rank: Annotated[int, Field(ge=-1_000, le=1_000)] | None = None
    ageing_ms: Annotated[int, Field(ge=1, le=3_600_000)] = 5_000
    exempt: bool = False


class Terms(Section):
    """States the limits of a flow, and the classes of its requests."""

    group: Name | None = None
    quota: TenantQuota | None = None
    share: Share | None = None
    max_wait_ms: Annotated[int, Field(ge=1, le=3_600_000)] | None = None
    request_class: Annotated[Name | None, Field(alias="class")] = None
    classes: Annotated[list[Name], Field(min_length=1, max_length=8)] | None = None

    @property
    def is_limited(self) -> bool:
        """Return whether a quota, a share, a group or a longest wait limits it."""
        return (self.quota, self.share, self.group, self.max_wait_ms) != (None,) * 4

    @property
    def names_classes(self) -> bool:
        """Return whether it says of which class requests are, or may be."""
        return self.request_class is not None or self.classes is not None


class Tenant(Terms):
    """Describes a tenant with a flow of its own in each class."""

    name: TenantName
    weight_milli: Annotated[WeightMilli, Field(alias="weight")] = 1_000
    api_keys_sha256: list[Sha256] = []
    mode: WrittenMode | None = None
    budget: Budget | None = None

    @property
    def is_limited(self) -> bool:
        """Return whether a quota, a share, a group or a budget says how much."""
        return super().is_limited or self.budget is not None


class TenantRule(Terms):
    """States the terms of an unlisted tenant whose name fits `match` (* is any text)."""

    match: TenantName
    weight_milli: Annotated[WeightMilli, Field(alias="weight")] = 1_000


class Pool(Section):
    """Names a pool that takes requests which name none, by any caller that offers it.

    With `capacity_tokens` no shim need register it: it is always attached.
    """

    name: Name
    capacity_tokens: Annotated[int, Field(ge=1, le=TOKENS_MAX)] | None = None
    block_size_tokens: Annotated[int, Field(ge=1, le=65_536)] = 16
    max_running: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    max_model_tokens: Annotated[int, Field(ge=0, le=TOKENS_MAX)] = 0
    epoch: Annotated[int, Field(ge=1, le=(1 << 62))] = 1


class Config(Section):
    """Holds a whole configuration file."""

    listeners: Annotated[list[Listener], Field(min_length=1, max_length=64)]
    transport: Transport = "grpcio"
    edge: Edge | None = None
    auth: Auth = Auth()
    scheduler: Scheduler = Scheduler()
    mode: WrittenMode = "enforce"
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
        """Return whether the requests of a tenant are decided and counted, but never refused."""
        return (tenant.mode or self.mode) == "dry_run"

    def limits_of_pools(self) -> dict[str, dict[str, int]]:
        """Return keyword arguments for the core, by pool; "" stands for all that are not named."""
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
        """Return the Unix socket of the scheduler for the edge: the first that asks for tokens."""
        for listener in self.listeners:
            if listener.unix is not None and self.auth_kind(listener) == "token":
                return listener.unix
        return None

    def may_operate(self, listener: Listener) -> bool:
        """Return whether operators may call here; `operate` overrides the default."""
        if listener.operate is not None:
            return listener.operate
        return listener.unix is not None or self.auth_kind(listener) != "none"

    def core_options(self) -> dict[str, Any]:
        """Return keyword arguments for the core's Scheduler."""
        return {
            **core_options(self.scheduler, self.limits),
            "pools_max": POOLS_MAX,
            "session_pools_max": POOLS_MAX,
        }
