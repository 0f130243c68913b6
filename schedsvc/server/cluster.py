"""The scheduler as a member of a cluster, if its configuration says so."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from schedsvc.config import Config
from schedsvc.config.cluster import Cluster
from schedsvc.driver import Driver, Leading

if TYPE_CHECKING:
    from schedsvc.cluster.leading import Campaign
    from schedsvc.cluster.member import Member

__all__ = ["ClusterError", "campaign_of", "member_of"]


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
    who = Identity(settings.name, settings.member_name, incarnation)
    return Campaign(settings, config.resolve, who, leading)


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
