"""Lets a scheduler become a member, and finds what keeps it from becoming one."""

import hashlib
import json
from dataclasses import dataclass

from schedsvc.cluster.errors import StoreError, StoreRefusedError
from schedsvc.cluster.library import keys_of
from schedsvc.cluster.store import StoreConnection
from schedsvc.config import Config

__all__ = ["Identity", "fingerprint_of", "join", "leave"]

#: Sections that all members have to agree on; else they would weigh the same service differently.
_SHARED = (
    "tenants",
    "tenant_rules",
    "unknown_tenants",
    "unknown_weight_milli",
    "unknown_limits",
    "classes",
    "groups",
)
_SHARED_SETTINGS = ("prices", "fairness_domain")


@dataclass(frozen=True)
class Identity:
    """Identifies a member by its name in a cluster and this life of its process."""

    cluster: str
    member: str
    incarnation: int

    @property
    def life(self) -> str:
        """Return the incarnation as the store holds it."""
        return f"{self.incarnation:016x}"

    @property
    def prefix(self) -> bytes:
        """Return the prefix of the rows of this origin."""
        return f"{self.member}/{self.life}/".encode()

    @property
    def keys(self) -> list[str]:
        """Return the keys that the functions take."""
        return keys_of(self.cluster)


def fingerprint_of(config: Config) -> str:
    """Return a digest of what all members have to agree on. O(tenants)."""
    settings = config.scheduler.model_dump(include=set(_SHARED_SETTINGS))
    shared = config.model_dump(include=set(_SHARED)) | {"scheduler": settings}
    return hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()[:32]


async def join(connection: StoreConnection, who: Identity, fingerprint: str, ttl_ms: int) -> None:
    """Announce a member. Raises StoreError, and StoreRefusedError with what has to be changed."""
    args = (who.member, who.life, fingerprint, ttl_ms)
    what, detail = await connection.call("schedsvc_join", who.keys, *args)
    if what == b"name":
        raise StoreRefusedError(
            f"another scheduler is member {who.member} of cluster {who.cluster}; set cluster.member"
            " to another name, or, if that one was killed, wait until its entry expires, for at"
            " most 18 s"
        )
    if what == b"fingerprint":
        raise StoreRefusedError(
            f"member {detail.decode(errors='replace')} of cluster {who.cluster} has another"
            " configuration of tenants, classes, groups, prices or fairness_domain; give all"
            " members the same"
        )
    if what != b"joined":
        raise StoreError(f"store {connection.address.text}: unknown answer to schedsvc_join")


async def leave(connection: StoreConnection, who: Identity) -> None:
    """Take a member's entry away, so that its name is free at once. Raises StoreError."""
    await connection.call("schedsvc_leave", who.keys, who.member, who.life)
