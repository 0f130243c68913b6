"""Runs a scheduler with a role in a set: it stands by, leads for a term, and stands by again.

Each term has a server of its own, with a core that was restored as after a restart, and so has the
time between two terms. Their listeners follow each other at the same addresses. So no decision of
one term reaches another one, and a member that leads again begins like a process that restarts.
"""

import asyncio
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import structlog

from schedsvc.config import Config, in_force
from schedsvc.config.cluster import Cluster
from schedsvc.driver import Driver, Leading
from schedsvc.server.cluster import (
    ClusterError,
    campaign_of,
    following_of,
    secret_digest,
    set_fingerprint,
)
from schedsvc.server.followers import Resume, adopting, forgetting
from schedsvc.server.server import Server
from schedsvc.server.tasks import end_tasks

if TYPE_CHECKING:
    from schedsvc.cluster.following import Following
    from schedsvc.cluster.leading import Campaign
    from schedsvc.service import FollowService

__all__ = ["LedServer", "server_of"]

_log = structlog.get_logger("schedsvc.server")
F = TypeVar("F", bound="Following")
_AGAIN_S = 1.0
#: For the last rows to reach the members that follow.
_FLUSH_S = 0.1
#: For another member to lead and to listen. Clients that the end of a stream sends to it connect at
#: once; without its name each of them pauses first.
_SUCCESSOR_S = 0.3
_LOOK_S = 0.01


def server_of(config: Config) -> "Server | LedServer":
    """Make the server of a configuration; raises as `Server`."""
    if config.cluster is None or config.cluster.role is None:
        return Server(config)
    return LedServer(config, config.cluster)


class LedServer:
    """Runs the servers of one process, one after the other; used like a single one."""

    def __init__(
        self, config: Config, settings: Cluster, make: "Callable[..., Server]" = Server
    ) -> None:
        """Begin to stand by; nothing listens yet. Raises ClusterError and as `Server`.

        `make`: makes the server of a term, or of the time between two.
        """
        self._make = make
        incarnation = secrets.randbits(63) + 1
        me = f"{settings.member_name}/{incarnation:016x}"
        self.leading = Leading(settings.set or "", me)
        try:
            self._secret = secret_digest(config)
            self._campaign: Campaign = campaign_of(config, settings, incarnation, self.leading)
        except OSError as error:
            raise ClusterError(f"cluster.secret_file: {error}") from None
        self._following: Following = following_of(config, settings, self.leading, self._campaign)
        self._config = config
        self._server = make(config, self.leading)
        self._server.outdated = self._outdated
        self._loading = self._server.driver.loading
        self._task: asyncio.Task[None] | None = None
        self._change: asyncio.Task[None] | None = None
        self._follower: asyncio.Task[None] | None = None
        #: Addresses as a client's targets, in the order of the configuration, once started.
        self.targets: list[str] = []
        #: Where Prometheus may scrape, once started.
        self.metrics_url: str | None = None

    @property
    def driver(self) -> Driver:
        """Return the driver of the present server."""
        return self._server.driver

    @property
    def follow_services(self) -> "list[FollowService]":
        """Return the handlers that serve followers; none while this member stands by."""
        return self._server.follow_services

    def follow_with(self, kind: "type[F]") -> "F":
        """Follow in another way than over gRPC, before the start."""
        resolve, fingerprint = self._config.resolve, set_fingerprint(self._config)
        settings = self._config.cluster
        assert settings is not None
        found = kind(settings, resolve, fingerprint, self.leading, self._campaign)
        self._following = found
        return found

    @property
    def stop_s_max(self) -> float:
        """Return the seconds that `drain()` and `stop()` take at most together, with a margin."""
        return self._server.stop_s_max

    async def start(self) -> None:
        """Listen on every address, and begin to ask for a term. Raises as `Server`."""
        await self._server.start()
        self.targets, self.metrics_url = self._server.targets, self._server.metrics_url
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._run())
        self._follower = loop.create_task(self._following.run())

    def reconfigure(self, config: Config) -> None:
        """Put another valid file in force; raises as `Server`."""
        self._server.reconfigure(config)
        # The next term has a server of its own, and yet what needs a restart stays until one.
        self._config = in_force(config, self._config)
        self._following.configured(set_fingerprint(self._config))

    def _outdated(self) -> list[str]:
        """Name the files that were read at the start, and hold something else by now."""
        return [] if secret_digest(self._config) == self._secret else ["cluster.secret_file"]

    async def drain(self) -> None:
        """Hand the term over; a member that stands by has nothing to end."""
        await self._cancel()
        if self._is_leading:
            self.leading.until_ns = 0  # it grants nothing more, so the last rows are the last
            follows = self._server.follow_services
            for each in follows:
                each.ending.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(_FLUSH_S):
                    await asyncio.gather(*(each.flush() for each in follows))
            await self._campaign.hand_over()
            for each in follows:
                each.ended.set()
            if self.leading.followers:
                await self._await_successor()
            await self._server.step_down()

    async def _await_successor(self) -> None:
        """Wait until the next leader serves, so that the ends of the streams name it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_SUCCESSOR_S):
                target = await self._campaign.successor()
                is_waiting = bool(target)
                while is_waiting:
                    await asyncio.sleep(_LOOK_S)
                    is_waiting = not await self._following.serves(target)

    async def stop(self, grace_s: float | None = None) -> None:
        """Stop listening. Idempotent."""
        await self._cancel()
        if self._follower is not None:
            await end_tasks([self._follower])
        await self._server.stop(grace_s)
        await self._campaign.close()

    @property
    def _is_leading(self) -> bool:
        return self._server.driver.is_under_term

    async def _cancel(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            await end_tasks([task])
        if self._change is not None:
            await asyncio.wait({self._change})

    async def _run(self) -> None:
        while True:
            await self._campaign.stand_by(self._following.leader_lives, self._following.differs)
            renewing = asyncio.get_running_loop().create_task(self._campaign.lead())
            try:
                await self._follow_up()
                await renewing
                await self._server.step_down()
                await self._follow_up()
            except Exception:
                _log.exception("term_failed", effect="another member can take the next term")
                await self._campaign.hand_over()
                await asyncio.sleep(_AGAIN_S)
                with suppress(Exception):
                    await self._follow_up()
            finally:
                await end_tasks([renewing])

    async def _follow_up(self) -> None:
        """Put a new server in the place of the present one. Raises as `Server`."""
        # Not cancelled half-way: a listener that is not closed keeps its address.
        self._change = asyncio.get_running_loop().create_task(self._replace())
        await asyncio.shield(self._change)

    async def _replace(self) -> None:
        await self._server.stop(None)
        self._server = server = self._make(self._config, self.leading, self._resume())
        server.on_promise = self._campaign.promised
        server.driver.loading, server.outdated = self._loading, self._outdated
        # Not in its configuration, with which a reload compares the file.
        server.placed = lambda config: _at(config, self.targets, self.metrics_url)
        await server.start()
        role = "leader" if self._is_leading else "standby"
        _log.info("role", role=role, set=self.leading.pool_set, term=self.leading.term)

    def _resume(self) -> Resume | None:
        """Say what a new leader continues from.

        From the rows that it followed, if those are the last leader's; from its own state file if
        it was the last leader itself; else from nothing: its rows would be too old.
        """
        self.leading.places, self.leading.is_cold = [], False
        if not self.leading.until_ns:
            return None
        followed, last = self._following, self._campaign.last
        me = self.leading.me.partition("/")[0]
        if last is None or last.leader.partition("/")[0] == me:
            return None
        if followed.term == last.number:
            self.leading.places = followed.waits()
            return adopting(followed.rows, followed.operators)
        self.leading.is_cold = True
        effect = "quotas and counters begin at 0; pools grant once their gates have replayed"
        _log.warning("leads_cold", last_leader=last.leader, effect=effect)
        return forgetting


def _at(config: Config, targets: list[str], metrics_url: str | None) -> Config:
    """Return the configuration with the ports that were chosen when the process started."""
    listeners = [
        listener if listener.tcp is None else listener.model_copy(update={"tcp": target})
        for listener, target in zip(config.listeners, targets, strict=False)
    ]
    update: dict[str, object] = {"listeners": listeners}
    if config.metrics is not None and metrics_url is not None:
        address = metrics_url.partition("//")[2].partition("/")[0]
        update["metrics"] = config.metrics.model_copy(update={"listen": address})
    return config.model_copy(update=update)
