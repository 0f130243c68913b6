"""Shares what operators have set with the other members: tenants, API keys, modes.

Nothing waits for it: a change is in force where it was made, and reaches the others with their next
exchange.

Rules:
- Each setting has a place, a version and a content. The higher version wins; of equal versions the
  greater content, which begins with the member that made the change. So all members end alike,
  whatever the order in which they read.
- Rows are sealed with the cluster's secret, with their place and version. A row with a wrong seal,
  or of a lower version than this place had in the store before, has no effect: it is logged,
  counted, and replaced if this member knows a better one.
- A deleted setting leaves a row that says so. It is removed after the longest time for which a
  member may be away.
- All rows are read again from time to time, so that a row which another program put back unseen
  does not wait there for a member that joins.
"""

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import structlog

from schedsvc.cluster.errors import StoreError
from schedsvc.cluster.joining import Identity
from schedsvc.cluster.library import settings_keys_of
from schedsvc.cluster.outage import Outage
from schedsvc.cluster.signing import ForgedRowError, open_row, seal_row
from schedsvc.cluster.store import CALL_S, StoreConnection, open_any
from schedsvc.config.cluster import Cluster
from schedsvc.driver import Broken, SettingsShared
from schedsvc.driver.clock import boot_ns

__all__ = ["Settings", "SettingsSync"]

_log = structlog.get_logger("schedsvc.cluster")

#: Between two exchanges, if nothing changes here.
_PAUSE_S = 0.5
_READ_MAX, _WRITE_MAX = 500, 100
#: Rows that are put in force before the event loop has its turn.
_ROWS_AT_ONCE = 10
#: So often deleted settings are looked at, and forged rows replaced once more.
_LOOK_NS = 10_000_000_000
#: So often all rows are read again; with many rows less often.
_READ_NS, _READ_NS_A_ROW = 60_000_000_000, 3_000_000


class Settings(Protocol):
    """Holds the settings of a scheduler, by their places."""

    #: Called with each place whose setting has changed.
    on_change: Callable[[bytes], None]

    def places(self) -> list[bytes]:
        """Return the places of all settings, deleted ones too. O(settings)."""

    def saved(self, place: bytes) -> tuple[int, bytes] | None:
        """Return version and content of a setting; None: there is none. O(its size)."""

    def put(self, place: bytes, version: int, content: bytes) -> None:
        """Put another member's setting in force. Raises ValueError if this one cannot."""

    def forget_gone(self) -> list[bytes]:
        """Forget what was deleted long ago; return the places. O(deleted)."""


def _sha1(row: bytes) -> bytes:
    """Name a row as the store does; it only says whether two rows are the same."""
    return hashlib.sha1(row, usedforsecurity=False).hexdigest().encode() if row else b""


class SettingsSync:
    """Keeps the shared settings of this member."""

    def __init__(
        self,
        cluster: Cluster,
        resolve: Callable[[str], Path],
        who: Identity,
        secret: bytes,
        settings: Settings,
    ) -> None:
        self._cluster, self._resolve, self._secret = cluster, resolve, secret
        self._keys, self._settings = settings_keys_of(who.cluster), settings
        self._seal_place = f"settings:{who.cluster}:".encode()
        self._link: StoreConnection | None = None
        self._outage = Outage()
        self._since, self._number, self._life = 0, 0, b""
        #: Sealed rows of the store: their versions, and the SHA-1 of whatever row stands there.
        self._versions: dict[bytes, int] = {}
        self._stored: dict[bytes, bytes] = {}
        self._unsent: dict[bytes, None] = {}
        #: Places whose forged row this member has replaced since the last look.
        self._replaced: set[bytes] = set()
        self._looked_ns = self._read_ns = 0
        self._is_read = False  # all rows were read once on this connection
        #: The places that a reading of all rows has met so far; None: there is none on its way.
        self._met: set[bytes] | None = None
        self._woken = asyncio.Event()
        self.state = SettingsShared()
        settings.on_change = self._changed

    def _changed(self, place: bytes) -> None:
        self._unsent[place] = None
        self._woken.set()

    async def begin(self) -> None:
        """Read all settings once, before the first request; takes at most CALL_S."""
        try:
            async with asyncio.timeout(CALL_S):
                await self.exchange()
        except (StoreError, TimeoutError) as error:
            await self._failed(error)

    async def run(self) -> None:
        """Exchange settings until cancelled; then write what has changed here."""
        try:
            while True:
                try:
                    await self.exchange()
                except StoreError as error:
                    await self._failed(error)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_PAUSE_S):
                        await self._woken.wait()
                self._woken.clear()
        except Broken:
            return  # the driver has said why
        finally:
            await self._end()

    async def exchange(self) -> None:
        """Write what changed here, and put in force what changed elsewhere. Raises StoreError."""
        link = self._link or await self._connect()
        self._look()
        is_done = False
        while not is_done:
            is_done = await self._sync(link)
        if self._outage.answered() and self.state.problem:
            self.state.problem = ""
            _log.info("cluster_settings_shared")
        self.state.rows = len(self._versions)

    async def _connect(self) -> StoreConnection:
        link = await open_any(self._cluster, self._resolve, refused=self._outage.refused)
        self._link = link
        self._read_again()
        return link

    def _read_again(self) -> None:
        """Read all rows with the next calls, and write those that the store lacks."""
        self._since = self._number = 0
        self._is_read = False
        self._met, self._read_ns = set(), boot_ns()
        self._stored.clear()
        self._versions.clear()
        self._unsent = dict.fromkeys(self._settings.places())

    def _look(self) -> None:
        now_ns = boot_ns()
        if now_ns - self._looked_ns < _LOOK_NS:
            return
        self._looked_ns = now_ns
        self._replaced.clear()
        self._unsent.update(dict.fromkeys(self._settings.forget_gone()))
        if now_ns - self._read_ns >= max(_READ_NS, len(self._versions) * _READ_NS_A_ROW):
            self._since, self._met, self._read_ns = 0, set(), now_ns

    async def _sync(self, link: StoreConnection) -> bool:
        """Make one call; return whether nothing is left to write or read."""
        batch = self._batch()
        words: list[str | bytes | int] = [self._since, _READ_MAX, secrets.token_hex(8)]
        for place, row in batch.items():
            words += (place, self._stored.get(place, b""), row)
        answer = await link.call("schedsvc_settings", self._keys, *words)
        try:
            number, life, upto = int(answer[0]), bytes(answer[1]), int(answer[2])
            rows, kept = _pairs(answer[3]), _pairs(answer[4])
        except (ValueError, TypeError, IndexError):
            raise StoreError(
                f"store {link.address.text}: unknown answer to schedsvc_settings"
            ) from None
        if self._life and self._number and (number < self._number or life != self._life):
            # The store lost data: what this member or others wrote may be gone.
            self._life = life
            self._read_again()
            return False
        self._number, self._life = number, life
        others = dict(kept)
        for place, row in batch.items():
            self._unsent.pop(place, None)
            if place not in others:
                self._note(place, row)
        await self._take([*kept, *rows])
        if self._met is not None:
            self._met.update(place for place, _ in rows)
        self._since = upto
        if upto < number:
            return False
        self._is_read = True
        self._write_missing()
        return not self._batch(1)

    def _write_missing(self) -> None:
        """After a reading of all rows, write what the store lacks. O(settings), else O(1)."""
        met, self._met = self._met, None
        if met is None:
            return
        for place in self._settings.places():
            if place not in met:
                self._note(place, b"")
                self._unsent[place] = None

    def _batch(self, rows_max: int = _WRITE_MAX) -> dict[bytes, bytes]:
        """Return rows to write: those of which the store has another one, or none. O(unsent)."""
        found: dict[bytes, bytes] = {}
        # First all is read, for most of it is there already.
        for place in list(self._unsent) if self._is_read else ():
            held = self._settings.saved(place)
            row = b"" if held is None else seal_row(self._secret, self._seal_place + place, *held)
            is_behind = held is not None and held[0] < self._versions.get(place, 0)
            if is_behind or _sha1(row) == self._stored.get(place, b""):
                del self._unsent[place]
                continue
            found[place] = row
            if len(found) == rows_max:
                break
        return found

    def _note(self, place: bytes, row: bytes) -> None:
        """Note what stands in the store at a place."""
        if row:
            self._stored[place] = _sha1(row)
            self._versions[place] = int(row.partition(b" ")[0])
        else:
            self._stored.pop(place, None)
            self._versions.pop(place, None)

    async def _take(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        forged, reason = 0, ""
        for k, (place, row) in enumerate(rows, 1):
            try:
                self._read(place, row)
            except ForgedRowError as error:
                forged, reason = forged + 1, str(error)
                self._replace(place, row)
            if k % _ROWS_AT_ONCE == 0:
                await asyncio.sleep(0)
        if forged:
            self.state.forged += forged
            _log.error(
                "cluster_row_forged", peer="store", rows=forged, reason=reason,
                effect="the rows are ignored",
            )  # fmt: skip

    def _read(self, place: bytes, row: bytes) -> None:
        """Put a row in force, if it says more than this member knows. Raises ForgedRowError."""
        if not row:
            self._note(place, row)
            self._unsent[place] = None
            return
        if _sha1(row) == self._stored.get(place) and place in self._versions:
            return
        least = self._versions.get(place, 1)
        version, content = open_row(self._secret, self._seal_place + place, row, least)
        self._note(place, row)
        held = self._settings.saved(place)
        if held is not None and (version, content) <= held:
            if (version, content) != held:
                self._unsent[place] = None
            return
        try:
            self._settings.put(place, version, content)
        except ValueError as error:
            self.state.refused += 1
            _log.error(
                "cluster_setting_refused", peer="store", place=place.decode(errors="replace"),
                reason=str(error), effect="this member goes on without it",
            )  # fmt: skip
        else:
            self.state.applied += 1

    def _replace(self, place: bytes, row: bytes) -> None:
        """Let this member's setting, if it has one, take the place of a forged row."""
        if place not in self._replaced and self._settings.saved(place) is not None:
            self._replaced.add(place)
            self._stored[place] = _sha1(row)
            self._unsent[place] = None

    async def _failed(self, error: Exception) -> None:
        reason = str(error) or f"no answer within {CALL_S:g} s"
        if self._outage.failed(error, reason):
            effect = "changes of tenants, keys and modes stay with this member"
            _log.warning("cluster_settings_lost", reason=reason, effect=effect)
        self.state.problem = reason
        await self._drop()

    async def _end(self) -> None:
        # Perhaps a call was cut off, whose answer would still come on this connection.
        await self._drop()
        if self._unsent and not self.state.problem:
            with suppress(StoreError, Broken, TimeoutError):
                async with asyncio.timeout(CALL_S):
                    await self.exchange()
        await self._drop()

    async def _drop(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link.close()


def _pairs(flat: Any) -> list[tuple[bytes, bytes]]:
    words = [bytes(word) for word in flat]
    return list(zip(words[::2], words[1::2], strict=True))
