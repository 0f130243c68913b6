"""Drains, revokes and sets modes as an operator, and undoes most of it after a while."""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedsvc._core import CallerError
from schedsvc_lab.faults.auditor import UNKNOWN_FLOW, ViolationError
from schedsvc_lab.faults.configured import list_pools
from schedsvc_lab.faults.event_queue import EventQueue
from schedsvc_lab.faults.options import Options

if TYPE_CHECKING:
    from schedsvc_lab.faults.server import Server

_S = 1_000_000_000


class Operator:
    """Calls OperatorService, as the server's handles pass the calls to the core.

    Modes end with the process here: the core does not keep them.
    """

    def __init__(self, events: EventQueue, server: Server, options: Options) -> None:
        self._events = events
        self._server = server
        self._options = options

    def rest(self) -> None:
        """Take everything back."""
        for pool in self._options.pools:
            self._undo(pool.name)
        self._undo("")
        if "pools-relisted" in self._options.faults:
            self._server.enter((self._list, frozenset()))
        self._enforce(self._tenants())

    # Drains.

    def drain(self, pool: str) -> bool:
        """Drain a pool or ("") everything, for seconds. False: there is no scheduler."""
        if not self._server.is_up:
            return False
        self._server.enter((self._drain, (pool, True)))
        self._events.after(self._events.soon(3 * _S), self._undo, pool)
        return True

    def _undo(self, pool: str) -> None:
        self._server.enter((self._drain, (pool, False)))

    def _drain(self, what: tuple[str, bool]) -> None:
        pool, draining = what
        server = self._server

        def drain(now_ns: int) -> None:
            try:
                server.core.set_draining(now_ns, pool.encode(), draining)
            except CallerError as error:
                server.auditor.no_pool(pool, str(error))
            else:
                server.auditor.drain(pool, draining=draining)

        server.act(drain)

    # Pools that take only requests that name them.

    def relist(self) -> bool:
        """List other pools. False: there is no scheduler, or no pool would close."""
        hostile, rnd = self._options.hostile, self._events.rnd
        if hostile is None or not self._server.is_up:
            return False
        names = [pool.name for pool in self._options.pools]
        closed = {name for name in names if rnd.random() < 0.4}
        if not closed or hostile.grants.pools != ("mal-*",):
            return False
        self._server.enter((self._list, frozenset(closed)))
        return True

    def _list(self, closed: frozenset[str]) -> None:
        server, options = self._server, self._options

        def change(now_ns: int) -> None:
            list_pools(server.core, options, now_ns, closed)
            server.auditor.books.closed = set(closed)

        server.act(change)

    # Leases.

    def revoke(self) -> bool:
        """Revoke a lease: usually one that runs, else one that has ended or never was."""
        server, random = self._server, self._events.rnd.random
        books = server.auditor.books
        of = list(books.live if random() < 0.8 else books.ended)
        if not of or not server.is_up:
            return False
        lease_id = of[int(random() * len(of))] + (1 << 50 if random() < 0.05 else 0)
        server.enter((self._revoke, lease_id))
        return True

    def _revoke(self, lease_id: int) -> None:
        server = self._server

        def revoke(now_ns: int) -> None:
            state = server.core.revoke(now_ns, lease_id)
            wanted = server.auditor.revoke(lease_id)
            if state != wanted and not server.auditor.is_asleep:
                raise ViolationError(f"a revoked lease was {state}, not {wanted}")

        server.act(revoke)

    # Modes.

    def _tenants(self) -> list[str]:
        shared = [UNKNOWN_FLOW] if self._options.shares_unknown else []
        return list(self._options.tenants) + shared

    def dry_run(self) -> bool:
        """Refuse and delay nothing of a tenant, or of all, for seconds."""
        if not self._server.is_up:
            return False
        tenants, random = self._tenants(), self._events.rnd.random
        if random() < 0.7:
            tenants = [tenants[int(random() * len(tenants))]]
        self._server.enter((self._say, (tenants, True)))
        self._events.after(self._events.soon(2 * _S), self._enforce, tenants)
        return True

    def _enforce(self, tenants: list[str]) -> None:
        self._server.enter((self._say, (tenants, False)))

    def _say(self, what: tuple[list[str], bool]) -> None:
        tenants, dry_run = what
        server = self._server

        def say(now_ns: int) -> None:
            for name in tenants:
                server.core.set_flow_mode(now_ns, server.core.flow_index(name.encode()), dry_run)
                server.auditor.say_mode(name, dry_run=dry_run)

        server.act(say)
