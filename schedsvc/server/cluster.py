"""The scheduler as a member of a cluster, if its configuration says so."""

from typing import TYPE_CHECKING

from schedsvc.config import Config
from schedsvc.driver import Driver

if TYPE_CHECKING:
    from schedsvc.cluster.member import Member

__all__ = ["ClusterError", "member_of"]


class ClusterError(Exception):
    """The configuration has `cluster`, and what that needs is not installed."""


def member_of(driver: Driver, config: Config, incarnation: int) -> "Member | None":
    """Return the task's object for this scheduler; None without `cluster`.

    Raises ClusterError.
    """
    if config.cluster is None:
        return None
    try:
        from schedsvc.cluster.member import Member
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise ClusterError(
            f"cluster needs the package {package}: pip install 'schedsvc[cluster]'"
        ) from None
    return Member(driver, config, config.cluster, incarnation)
