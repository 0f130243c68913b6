"""Reads the sets of a cluster from its store: who leads, and the last notes of the members.

Notes are for people. A program with the store's password can write one, so `leader` counts only
what is sealed with the cluster's secret, if that is known here.
"""

import json
from dataclasses import dataclass
from typing import Any

from schedsvc.cluster.library import notes_key_of, term_keys_of
from schedsvc.cluster.signing import ForgedRowError, open_row
from schedsvc.cluster.store import StoreConnection

__all__ = ["MemberNote", "SetSeen", "sets_of"]

#: A member leaves a note each second.
_ALIVE_MS = 4_000
_LEADER, _STANDBY, _FOLLOWER = "leader", "standby", "follower"


@dataclass(frozen=True)
class MemberNote:
    """Holds the last note of a member of a set."""

    name: str
    #: `leader`, `standby` (it may take the next term), or `follower` (it never leads).
    role: str
    term: int
    address: str
    #: Milliseconds since it began to follow the leader, and since it heard of it; None: it does not
    #: follow one.
    followed_ms: int | None
    lag_ms: int | None
    #: Milliseconds since the note.
    age_ms: int

    @property
    def alive(self) -> bool:
        """Return whether it reached the store within the last seconds."""
        return self.age_ms < _ALIVE_MS


@dataclass(frozen=True)
class SetSeen:
    """Describes one set of pools."""

    name: str
    #: The member that leads, with its term and address; "" and 0: none does.
    leader: str
    term: int
    address: str
    members: tuple[MemberNote, ...]

    @property
    def problems(self) -> list[str]:
        """Return the lacks of the set, for an operator; none if it is well."""
        found = [] if self.leader else [f"set {self.name} has no leader"]
        others = [member for member in self.members if member.name != self.leader]
        follow = [m for m in others if m.alive and m.role == _STANDBY and m.followed_ms is not None]
        if others and not follow:
            found.append(f"set {self.name} has no standby that follows the leader")
        return found


async def sets_of(
    link: StoreConnection, cluster: str, own: str | None, secret: bytes | None
) -> list[SetSeen]:
    """Return the sets of a cluster that have had a leader, and `own`. Raises StoreError."""
    names = await link.call("schedsvc_sets", [term_keys_of(cluster, "")[1]])
    known = {name.decode(errors="replace") for name in names} | ({own} if own else set())
    return [await _set_of(link, cluster, name, secret) for name in sorted(known)]


async def _set_of(link: StoreConnection, cluster: str, name: str, secret: bytes | None) -> SetSeen:
    keys = [*term_keys_of(cluster, name), notes_key_of(cluster, name)]
    now, hold, _, *notes = await link.call("schedsvc_set_show", keys, name)
    members = [
        _member(member.decode(errors="replace"), note, int(now))
        for member, note in zip(notes[::2], notes[1::2], strict=True)
    ]
    term, leader, address = _leader(hold, name, secret)
    ranks = {_LEADER: 0, _STANDBY: 1}
    members.sort(key=lambda m: (m.name != leader, ranks.get(m.role, 2), m.name))
    return SetSeen(name, leader, term, address, tuple(members))


def _leader(hold: bytes, name: str, secret: bytes | None) -> tuple[int, str, str]:
    """Return term, member and address of a set's hold; 0 and "" if there is none that counts."""
    try:
        if secret is not None:
            term, content = open_row(secret, f"term:{name}".encode(), hold)
        else:
            number, _, content = hold.split(b" ", 2)
            term = int(number)
    except (ForgedRowError, ValueError):
        return 0, "", ""
    leader, _, address = content.decode(errors="replace").partition(" ")
    return term, leader.partition("/")[0], address


def _member(name: str, note: bytes, now_ms: int) -> MemberNote:
    """Read a note; a field that is malformed counts as missing."""
    left, _, text = note.partition(b" ")
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    said: dict[str, Any] = found if isinstance(found, dict) else {}
    age_ms = max(0, now_ms - int(left)) if left.isdigit() else now_ms
    role = said.get("role")
    return MemberNote(
        name,
        role if role in (_LEADER, _STANDBY, _FOLLOWER) else "unknown",
        _whole(said.get("term")) or 0,
        str(said.get("address", "")),
        _later(said.get("followed_ms"), age_ms),
        _later(said.get("lag_ms"), age_ms),
        age_ms,
    )


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _later(value: object, age_ms: int) -> int | None:
    """Return a duration as of now."""
    known = _whole(value)
    return None if known is None else known + age_ms
