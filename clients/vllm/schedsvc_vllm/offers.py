"""Holds the pools that this process offers: one engine's, or those of the proxy's upstreams."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from schedsvc_client.aio import SchedulerSession

from schedsvc_vllm.asgi import App
from schedsvc_vllm.engine import EngineView
from schedsvc_vllm.engine_offer import EngineOffer
from schedsvc_vllm.reports import Reports
from schedsvc_vllm.request_sizing import Sizes
from schedsvc_vllm.settings import Settings, SettingsError


class Offers:
    """Says in which pools a request may run. Raises SettingsError if an engine's size is missing.

    `routes`: the table of the upstreams; None: one engine is behind the gate, `alone`.
    """

    def __init__(self, settings: Settings, engine: EngineView, started_ns: int) -> None:
        self._settings, self._started_ns = settings, started_ns
        self.routes = engine.routes
        self.alone: EngineOffer | None = None
        self._offers: dict[str, EngineOffer] = {}
        # The limits of sets of pools, until an engine changes.
        self._sizes: dict[tuple[str, ...], Sizes] = {}
        self._opened: tuple[SchedulerSession, Reports] | None = None
        if self.routes is None:
            self.alone = EngineOffer(engine, settings.pool, started_ns)
            self._offers[settings.pool.name] = self.alone

    def register(self, session: SchedulerSession) -> None:
        """Offer the one engine's pool on a session that has not started."""
        if self.alone is not None:
            self.alone.register(session, self._settings.target)

    def open(self, session: SchedulerSession, reports: Reports) -> None:
        """Begin to report engines, and to offer the pools of upstreams as they become known."""
        self._opened = session, reports
        if self.alone is not None:
            self.alone.watch(reports)
        elif self.routes is not None:
            self.routes.open(self._offer, self._withdraw)

    def close(self) -> None:
        """End the reports, and offer no further upstream."""
        if self.routes is not None:
            self.routes.close()
        for offer in self._offers.values():
            offer.close()

    def reported(self) -> None:
        """Take note that running requests report now."""
        for offer in self._offers.values():
            offer.reported()

    def of(self, pool: str) -> EngineOffer | None:
        """Return the offer of a pool; None: its upstream has left. O(1)."""
        return self.alone or self._offers.get(pool)

    def pools_for(self, model: object) -> tuple[str, ...]:
        """Return the pools that serve a model, as a body names it. Raises BadRequestError."""
        if self.routes is not None:
            return self.routes.pools_for(model)
        return tuple(self._offers)

    def usable(self, pools: tuple[str, ...], left: frozenset[str]) -> tuple[str, ...]:
        """Return those pools whose engines answer, without those in `left`. O(pools)."""
        return pools if self.routes is None else self.routes.usable(pools, left)

    def sizes_of(self, pools: tuple[str, ...]) -> Sizes:
        """Return the limits of one request that may run in any of the pools. O(pools)."""
        if self.alone is not None:
            return self.alone.pool.sizes
        if (known := self._sizes.get(pools)) is not None:
            return known
        told = [self._offers[pool].pool.sizes for pool in pools if pool in self._offers]
        made = self._sizes[pools] = Sizes(
            _widest(each.context_tokens for each in told),
            _widest(each.capacity_tokens for each in told),
            _widest(each.max_running for each in told),
        )
        return made

    @property
    def context_tokens(self) -> int:
        """Return the longest context of an engine here; 0: it is not known. O(pools)."""
        return self.sizes_of(tuple(self._offers)).context_tokens

    def _offer(self, name: str, app: App) -> str:
        """Offer the pool of an upstream; return what is wrong with it, "" for nothing."""
        assert self._opened is not None
        session, reports = self._opened
        settings = replace(self._settings.pool, name=name)
        try:
            offer = EngineOffer(EngineView({"app": app}, app), settings, self._started_ns)
        except SettingsError as error:
            return str(error)
        self._offers[name] = offer
        offer.on_change = self._sizes.clear
        self._sizes.clear()
        offer.register(session, self._settings.target)
        offer.watch(reports)
        return ""

    def _withdraw(self, name: str) -> None:
        """End the reports of an upstream that has left: nothing is asked for its pool any more."""
        offer = self._offers.pop(name, None)
        self._sizes.clear()
        if offer is not None:
            offer.close()


def _widest(limits: Iterable[int]) -> int:
    """Return the largest limit; 0, which stands for none, is larger than all."""
    told = list(limits)
    return max(told) if told and all(told) else 0
