"""Makes the store ready, and looks at it, for an operator."""

from dataclasses import dataclass
from typing import Any

from schedsvc.cluster.errors import StoreError, StoreRefusedError
from schedsvc.cluster.library import (
    LIBRARY,
    LIBRARY_VERSION,
    acl_rules,
    info_problem,
    is_replica,
    keys_of,
    library_source,
)
from schedsvc.cluster.set_status import SetSeen, sets_of
from schedsvc.cluster.store import Address, StoreConnection, connect, open_checked, version_of

__all__ = ["MemberSeen", "Prepared", "StoreStatus", "init_store", "status_of"]


@dataclass(frozen=True)
class MemberSeen:
    """Describes a member as the store knows it."""

    name: str
    incarnation: str
    fingerprint: str
    #: Milliseconds until the store counts it as gone; below 0: since then.
    left_ms: int


@dataclass(frozen=True)
class Prepared:
    """States the result of `init_store` at a server."""

    #: Its primary gives it the functions; users do not come that way.
    is_replica: bool
    #: Whether the server still knows the user after its restart.
    keeps_user: bool
    #: The version of the functions that it had until now; empty: none, or this one.
    before: str = ""


@dataclass(frozen=True)
class StoreStatus:
    """Holds the contents of the store for a cluster."""

    change_number: int
    rows: int
    members: list[MemberSeen]
    sets: list[SetSeen]


async def init_store(
    address: Address, cluster: str, user: str | None, password: str | None
) -> Prepared:
    """Load the functions, and let `user`, if any, do what members do with this password.

    The address carries an operator's credentials. A replica gets the user only. Raises StoreError.
    """
    connection = await connect(address)
    try:
        info = (await connection.command("INFO")).decode(errors="replace")
        if problem := info_problem(info):
            raise StoreRefusedError(f"store {address.text} {problem}")
        follows = is_replica(info)
        before = "" if follows else await _load(connection)
        if user is None:
            return Prepared(follows, keeps_user=True, before=before)
        rules = ["reset", "on", *acl_rules(cluster), *([f">{password}"] if password else [])]
        await connection.command("ACL", "SETUSER", user, *rules)
        try:
            await connection.command("ACL", "SAVE")
        except StoreRefusedError:
            raise
        except StoreError:  # it was started without an ACL file
            return Prepared(follows, keeps_user=False, before=before)
        return Prepared(follows, keeps_user=True, before=before)
    finally:
        await connection.close()


async def _load(connection: StoreConnection) -> str:
    """Load the functions over those of an earlier version, which it returns; "" if none were there.

    Raises StoreRefusedError if the store has functions of a later version.
    """
    before = ""
    if await connection.command("FUNCTION", "LIST", "LIBRARYNAME", LIBRARY):
        before = await version_of(connection)
    if before.isdecimal() and int(before) > int(LIBRARY_VERSION):
        raise StoreRefusedError(
            f"store {connection.address.text} has functions of version {before}, and this schedsvc"
            f" has version {LIBRARY_VERSION}: run `schedsvc cluster init` of the later schedsvc; to"
            f" go back, stop its schedulers, run `FUNCTION DELETE {LIBRARY}` at the store, and then"
            " this command again"
        )
    await connection.command("FUNCTION", "LOAD", "REPLACE", library_source())
    return "" if before == LIBRARY_VERSION else before


async def status_of(
    address: Address, cluster: str, own_set: str | None = None, secret: bytes | None = None
) -> StoreStatus:
    """Return what the store holds of a cluster. Raises StoreError. O(members).

    `own_set`: shown also if it has never had a leader. `secret`: of the cluster, by which
    the row of the leader is checked.
    """
    connection = await open_checked(address)
    try:
        found: list[Any] = await connection.call("schedsvc_status", keys_of(cluster))
        sets = await sets_of(connection, cluster, own_set, secret)
    finally:
        await connection.close()
    number, _, rows, now_ms = found[:4]
    members = []
    for name, value in zip(found[4::2], found[5::2], strict=True):
        due_ms, incarnation, _, fingerprint = value.decode().split(" ")
        left_ms = int(due_ms) - int(now_ms)
        members.append(MemberSeen(name.decode(), incarnation, fingerprint, left_ms))
    members.sort(key=lambda member: member.name)
    return StoreStatus(int(number), int(rows), members, sets)
