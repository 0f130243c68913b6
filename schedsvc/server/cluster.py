"""Makes the scheduler a member of a cluster, if its configuration says so."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from schedsvc.config import Config
from schedsvc.config.cluster import Cluster
from schedsvc.config.files import read_file
from schedsvc.driver import Driver, Leading

if TYPE_CHECKING:
    from schedsvc.cluster.following import Following
    from schedsvc.cluster.leading import Campaign
    from schedsvc.cluster.member import Member

__all__ = [
    "ClusterError",
    "campaign_of",
    "following_of",
    "member_of",
    "secret_digest",
    "set_fingerprint",
]


class ClusterError(Exception):
    """The configuration has `cluster`, and what that needs is not installed."""


def member_of(driver: Driver, config: Config, incarnation: int) -> "Member | None":
    """Return the task's object for this scheduler; None without `cluster`.

    Raises ClusterError.
    """
    if config.cluster is None:
        return None
    with _named():
        from schedsvc.cluster.member import Member
    return Member(driver, config, config.cluster, incarnation)


def campaign_of(
    config: Config, settings: Cluster, incarnation: int, leading: Leading
) -> "Campaign":
    """Return the task's object of a member with a role. Raises ClusterError and OSError."""
    with _named():
        from schedsvc.cluster.joining import Identity
        from schedsvc.cluster.leading import Campaign
    if config.state is None:
        raise ClusterError("cluster.role needs the section state")
    who = Identity(settings.name, settings.member_name, incarnation)
    return Campaign(settings, config.resolve, who, leading, config.resolve(config.state.file))


def following_of(
    config: Config, settings: Cluster, leading: Leading, campaign: "Campaign"
) -> "Following":
    """Return the task's object of a standby."""
    from schedsvc.cluster.following import Following

    return Following(settings, config.resolve, set_fingerprint(config), leading, campaign)


def secret_digest(config: Config) -> bytes:
    """Return a digest of the secret of a set, which is read at the start only. Raises OSError."""
    if config.cluster is None or config.cluster.secret_file is None:
        return b""
    return hashlib.sha256(read_file(config.resolve(config.cluster.secret_file)).strip()).digest()


def set_fingerprint(config: Config) -> str:
    """Return a digest of what all members of a set have to agree on. O(tenants + principals).

    The proofs of principals may differ, because files have other paths at other members.
    """
    from schedsvc.cluster.joining import fingerprint_of

    grants = [
        principal.model_dump(
            exclude={"sha256", "env", "token_file", "make_token", "certificate", "listener"}
        )
        for principal in config.auth.principals
    ]
    text = fingerprint_of(config) + json.dumps(grants, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@contextmanager
def _named() -> Iterator[None]:
    """Say which package an import lacks."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise ClusterError(
            f"cluster needs the package {package}: pip install 'schedsvc[cluster]'"
        ) from None
