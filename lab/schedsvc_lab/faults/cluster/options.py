"""Draws everything that one cluster run chooses from its seed."""

from dataclasses import dataclass, replace
from random import Random
from typing import Any

from schedsvc_lab.faults.cluster_options import (
    CLUSTER_ENDED,
    CLUSTER_FAULTS,
    CLUSTER_REFUSES,
    CLUSTER_SETS,
    ENDED,
    REFUSING,
    SETS,
    STRICT,
)

__all__ = ["PHASE_S", "ClusterOptions", "Tenant", "draw_cluster"]

PHASE_S = 20
"""Virtual seconds of the phase with faults."""

_S, _MS = 1_000_000_000, 1_000_000
#: Faults that only later seeds draw, so that earlier ones stay the runs that they are.
_LATER = (ENDED, CLUSTER_ENDED), (SETS, CLUSTER_SETS), (REFUSING, CLUSTER_REFUSES)


@dataclass(frozen=True)
class Tenant:
    """Describes a tenant, its weight, and its limits a minute (0: none)."""

    name: str
    weight: float
    requests: int = 0
    input_tokens: int = 0

    def interval_ns(self, usual_ns: int, input_mean: int, members: int) -> int:
        """Return the mean time between two requests at a member that ask for twice the limits."""
        limits = [self.requests, self.input_tokens // input_mean]
        rate = min((limit for limit in limits if limit), default=0)
        if rate == 0:
            return usual_ns
        # Full buckets at the begin last for a minute at the limit.
        return max(usual_ns // 4, PHASE_S * _S * members // (2 * rate))


@dataclass(frozen=True)
class ClusterOptions:
    """Holds the options of one run."""

    seed: int
    events: int
    faults: frozenset[str]
    members: tuple[str, ...]
    tenants: tuple[Tenant, ...]
    sync_ms: int | str
    outage: str
    #: The size of each pool. In runs with quotas there is room for everything.
    capacity_tokens: int
    has_quotas: bool
    #: The members lead one set in turn; otherwise each has a separate pool.
    is_set: bool
    dispatch: str
    lead_tokens: int
    credit_tokens: int
    input_max: int
    output_max: int
    token_ns: int
    #: Requests that a tenant keeps open at a member; in runs with quotas the mean time between two.
    open_each: int
    interval_ns: int
    fault_ns: int

    def target(self, member: str) -> str:
        """Return where clients reach a member of the set."""
        return f"{member}.sim:7600"

    def set_config(self, member: str, folder: str) -> dict[str, Any]:
        """Return the configuration of a member of the set; `folder` has its secret."""
        found = self.config(member)
        found["pools"][0]["name"] = "pool"
        # No client replays its leases at the next leader, so they end by themselves.
        found["scheduler"] |= {"lease_ttl_ms": 4_000, "lease_grace_ms": 500}
        found["state"] = {"file": f"{folder}/{member}.db"}
        found["cluster"] |= {
            "set": "main",
            "role": "auto",
            "advertise": self.target(member),
            "secret_file": f"{folder}/secret",
        }
        return found

    def config(self, member: str) -> dict[str, Any]:
        """Return the configuration of a member."""
        tenants = []
        for tenant in self.tenants:
            quota = {"requests_per_minute": tenant.requests}
            quota["input_tokens_per_minute"] = tenant.input_tokens
            quota = {name: limit for name, limit in quota.items() if limit}
            row: dict[str, Any] = {"name": tenant.name, "weight": tenant.weight}
            tenants.append(row | ({"quota": quota} if quota else {}))
        return {
            "listeners": [{"tcp": "127.0.0.1:1"}],
            "scheduler": {
                "headroom": 0, "queue_ttl_ms": 3_600_000, "lease_ttl_ms": 60_000,
                "expert": {
                    "lead_max": self.lead_tokens, "credit_max": self.credit_tokens,
                    "dispatch": self.dispatch,
                },
            },
            "tenants": tenants,
            "pools": [{"name": f"pool-{member}", "capacity_tokens": self.capacity_tokens,
                       "block_size_tokens": 1}],
            "cluster": {
                "name": "sim", "member": member, "sync_ms": self.sync_ms, "outage": self.outage,
                "store": {"urls": ["redis://store:6379"]},
            },
        }  # fmt: skip


def draw_cluster(seed: int, events: int, only: frozenset[str] | None) -> ClusterOptions:
    """Draw a run."""
    rnd = Random(seed)  # noqa: S311 - no secret: one seed is one run
    is_set = rnd.random() < 0.35
    has_quotas = not is_set and rnd.random() < 0.5
    count = rnd.choice((2, 2, 3, 3, 4, 5))
    tenants = []
    for k in range(rnd.choice((2, 3, 4))):
        weight = rnd.choice((1, 1, 2.5, 4))
        requests, tokens = 0, 0
        if has_quotas and rnd.random() < 0.8:
            requests = rnd.choice((0, 10, 60, 600))
            tokens = rnd.choice((0, 0, 10_000, 60_000))
        tenants.append(Tenant(f"t{k}", weight, requests, tokens))
    names = sorted(CLUSTER_FAULTS.keys() - {base[1] for base in _LATER})
    faults = frozenset(n for n in names if rnd.random() < 0.6)
    found = ClusterOptions(
        seed=seed,
        events=events,
        faults=faults if only is None else only & CLUSTER_FAULTS.keys(),
        members=tuple("abcde"[:count]),
        tenants=tuple(tenants),
        sync_ms=rnd.choice(("auto", "auto", 50, 100, 1_000)),
        outage=rnd.choice(("share", "hold")),
        capacity_tokens=10_000_000 if has_quotas else rnd.choice((300, 800)),
        has_quotas=has_quotas,
        is_set=is_set,
        dispatch="strict" if seed >= STRICT and not is_set else "backfill",
        lead_tokens=rnd.choice((0, 100, 1_000)),
        credit_tokens=rnd.choice((0, 50)),
        input_max=rnd.choice((20, 100)),
        output_max=rnd.choice((5, 40)),
        token_ns=rnd.choice((10, 50)) * _MS,
        open_each=rnd.choice((2, 5, 10)),
        interval_ns=rnd.choice((100, 300)) * _MS,
        fault_ns=rnd.choice((300, 1_000, 3_000)) * _MS,
    )
    for base, name in _LATER:
        if only is None and seed >= base and rnd.random() < 0.6:
            found = replace(found, faults=found.faults | {name})
    return found
