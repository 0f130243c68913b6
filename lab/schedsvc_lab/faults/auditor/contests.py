"""Decides which of two engines that claim one pool the scheduler has to let have it."""

from typing import Any, NamedTuple

from schedsvc_lab.faults.auditor.ledger import Books
from schedsvc_lab.faults.auditor.records import Pool


class Claim(NamedTuple):
    """Holds a newcomer's offer of a pool: the arguments of `Books.register()` after the time."""

    conn: int
    principal: int
    pool: str
    epoch: int
    capacity: int
    block: int
    max_running: int
    max_model_tokens: int


class Contests:
    """Holds the open ones. With a bound of 0 none begins: a newcomer has the pool at once."""

    def __init__(self, bound_ns: int) -> None:
        self._bound_ns = bound_ns
        self._who: dict[int, tuple[int, str, int]] = {}  # by stream: principal, client, incarnation
        self._due_ns: dict[str, int] = {}
        self._claims: dict[str, dict[int, Claim]] = {}

    def restart(self) -> None:
        """Begin another process, without open contests."""
        self._who.clear()
        self._due_ns.clear()
        self._claims.clear()

    def greet(self, conn: int, principal: int, hello: Any) -> bool:
        """Record the process of a stream; nothing about that is wrong."""
        self._who[conn] = (principal, hello.client_id, hello.incarnation)
        return False

    def register(self, books: Books, now_ns: int, claim: Claim) -> bool:
        """Let a stream offer a pool, or claim it. False: the scheduler refuses it."""
        conn, principal, name = claim.conn, claim.principal, claim.pool
        claimed = [each for each, claims in self._claims.items() if conn in claims]
        if not books.shares.may_register(books, now_ns, conn, principal, name, claimed):
            return False
        pool = books.pools.get(name)
        if pool is None or not self._is_contested(books, now_ns, pool, claim):
            self._claims.get(name, {}).pop(conn, None)
            return books.register(now_ns, *claim)
        if principal != pool.principal:
            return False
        self._due_ns.setdefault(name, now_ns + self._bound_ns)
        self._claims.setdefault(name, {})[conn] = claim
        return True

    def _is_contested(self, books: Books, now_ns: int, pool: Pool, claim: Claim) -> bool:
        if not self._bound_ns or claim.conn in pool.offers or not pool.offers:
            return False
        if claim.principal == pool.principal and claim.epoch == pool.epoch:
            return False
        if claim.conn in self._claims.get(claim.pool, {}):
            return True
        me = self._who.get(claim.conn)
        for conn in [c for c in pool.offers if me is not None and self._who.get(c) == me]:
            _withdraw_offer(books, now_ns, pool, conn)
        return bool(pool.offers)

    def heard(self, books: Books, conn: int) -> list[int]:
        """Take note that a stream lives; return the streams that are refused for it."""
        refused: list[int] = []
        for name in [n for n in self._due_ns if n in books.pools]:
            if conn in books.pools[name].offers:
                del self._due_ns[name]
                refused += self._claims.pop(name)
        return refused

    def waiting(self) -> set[int]:
        """Return the streams whose claims are open: the scheduler sends them nothing else."""
        return {conn for claims in self._claims.values() for conn in claims}

    def closed(self, conn: int) -> None:
        """Take note that a stream has ended."""
        self._who.pop(conn, None)
        for claims in self._claims.values():
            claims.pop(conn, None)

    def due(self, books: Books, now_ns: int) -> tuple[list[int], list[int]]:
        """Give newcomers the pools that are now theirs. Return the superseded, and the refused."""
        superseded: list[int] = []
        refused: list[int] = []
        for name, due_ns in list(self._due_ns.items()):
            pool = books.pools[name]
            if now_ns < due_ns and pool.offers:
                continue
            del self._due_ns[name]
            claims = self._claims.pop(name)
            for conn in list(pool.offers) if claims else ():
                superseded.append(conn)
                _supersede(books, now_ns, conn)
            for conn, claim in claims.items():
                taken = pool.offers and pool.epoch != claim.epoch
                if taken or not books.register(now_ns, *claim):
                    refused.append(conn)
        return superseded, refused


def _withdraw_offer(books: Books, now_ns: int, pool: Pool, conn: int) -> None:
    del pool.offers[conn]
    if not pool.offers:
        pool.owned_until_ns = now_ns + books.terms.lease_ttl_ns + books.terms.lease_grace_ns


def _supersede(books: Books, now_ns: int, conn: int) -> None:
    """End a stream that was silent: its waiting requests are withdrawn."""
    if conn in books.lagging:
        books.is_lost = True  # the verdicts of its requests were not read
        return
    waiting = sum(r.conn == conn and r.queued for r in books.requests.values())
    books.close_stream(now_ns, conn, waiting)
