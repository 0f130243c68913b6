"""Offers one engine's KV cache to the scheduler as a pool, and reports what the engine says."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from schedsvc_client.aio import SchedulerSession
from schedsvc_client.channel import backoff_s

from schedsvc_vllm.engine import EngineView, Pool
from schedsvc_vllm.reports import PROGRESS_PERIOD_S, Reports
from schedsvc_vllm.scrape import (
    SCRAPE_PERIOD_S,
    SCRAPE_PERIOD_S_MAX,
    Fetch,
    ScrapeError,
    parse,
    within,
)
from schedsvc_vllm.settings import PoolSettings, SettingsError
from schedsvc_vllm.telemetry import Reading

TELEMETRY_PERIOD_S = 1.0
# Longer than between two reports of totals: a busy engine's telemetry leaves with those.
_IDLE_PERIOD_S = max(TELEMETRY_PERIOD_S, PROGRESS_PERIOD_S) + 0.2
_log = logging.getLogger("schedsvc_vllm")


class EngineOffer:
    """Keeps the offer of one engine up to date. Raises SettingsError if its size is not known."""

    def __init__(self, engine: EngineView, settings: PoolSettings, started_ns: int) -> None:
        self.engine = engine
        self._settings, self._started_ns = settings, started_ns
        self.pool: Pool = engine.pool(settings, started_ns)
        #: Called when the engine is another one.
        self.on_change: Callable[[], None] = lambda: None
        self._session: SchedulerSession | None = None
        self._looking: asyncio.Task[None] | None = None
        self._telling: asyncio.TimerHandle | None = None
        self._scraping: asyncio.Task[None] | None = None
        self._is_unreadable = False

    def register(self, session: SchedulerSession, target: str) -> None:
        """Offer the pool on the session, which leads to the scheduler at `target`."""
        self._session, self._target = session, target
        self._offer()

    def watch(self, reports: Reports) -> None:
        """Begin to report the engine's telemetry, in the running event loop."""
        if self.engine.offers_telemetry:
            self._tell_engine()
        elif self.engine.metrics is not None:
            self._scraping = asyncio.ensure_future(self._scrape(self.engine.metrics, reports))

    def close(self) -> None:
        """End the reports. The session goes on offering the pool."""
        for work in (self._looking, self._scraping, self._telling):
            if work is not None:
                work.cancel()
        self._telling = None

    def look(self) -> asyncio.Future[None]:
        """Check which engine runs there; calls in the meantime share one check."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(self._look())
        return asyncio.shield(self._looking)

    def reported(self) -> None:
        """Take note that running requests report now: reports of a moment share one message."""
        if self._telling is not None:
            self._tell_engine()

    def _offer(self) -> None:
        assert self._session is not None
        self._session.register_pool(
            pool=self.pool.name,
            epoch=self.pool.epoch,
            capacity_tokens=self.pool.capacity_tokens,
            block_size_tokens=self.pool.block_size_tokens,
            max_running=self.pool.max_running,
            max_model_tokens=self.pool.max_model_tokens,
            gates=self._settings.gates,
        )
        _log.info(
            "admission by the scheduler at %s;"
            " pool %s: %d tokens in blocks of %d, at most %s at once",
            self._target, self.pool.name,
            self.pool.capacity_tokens, self.pool.block_size_tokens,
            f"{self.pool.max_running} requests" if self.pool.max_running else "what fits",
        )  # fmt: skip

    async def _look(self) -> None:
        fetch = self.engine.metrics
        if fetch is not None:
            # If nothing can be seen, the request itself will find out.
            with contextlib.suppress(ScrapeError, SettingsError, OSError, asyncio.TimeoutError):
                await fetch()
                self._look_again()

    def _look_again(self) -> None:
        """Offer the pool again if another engine runs there: leases in the old one are void."""
        pool = self.engine.pool(self._settings, self._started_ns)
        if pool != self.pool:
            self.pool = pool
            self.on_change()
            self._offer()

    def _tell_engine(self) -> None:
        """Report the engine's own telemetry, and again later: a busy engine's with totals."""
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        try:
            self._tell(self.engine.telemetry())
        except Exception:  # of any kind: the engine's next figures may be readable
            self._unreadable()
        else:
            self._is_unreadable = False
        loop = asyncio.get_running_loop()
        self._telling = loop.call_later(_IDLE_PERIOD_S, self._tell_engine)

    async def _scrape(self, fetch: Fetch, reports: Reports) -> None:
        """Read the engine's `/metrics`; ever more seldom while it fails, whatever it answers."""
        failures, runs = 0, False
        while True:
            try:
                page = await fetch()
                self._look_again()
                reading = parse(page, self.pool.capacity_tokens)
                self._tell(reading)
                failures, runs = 0, reading.running > 0
                self._is_unreadable = False
            except (ScrapeError, OSError, asyncio.TimeoutError) as error:
                level = logging.DEBUG if failures else logging.WARNING
                _log.log(level, "no telemetry: %s", error or type(error).__name__)
                failures, runs = failures + 1, False
            except Exception:
                self._unreadable()
                failures, runs = failures + 1, False
            if failures:
                await asyncio.sleep(backoff_s(SCRAPE_PERIOD_S, SCRAPE_PERIOD_S_MAX, failures))
            elif not (reports.running or runs):
                with contextlib.suppress(asyncio.TimeoutError):
                    await within(reports.busy.wait(), SCRAPE_PERIOD_S)
            if reports.running or runs:
                # The scheduler steers by what a busy engine says of itself: busy by what this
                # process runs, or others that share the engine.
                await asyncio.sleep(TELEMETRY_PERIOD_S)

    def _unreadable(self) -> None:
        """Log an error of ours, once until a reading succeeds.

        Telemetry is a hint: the scheduler's own ledger goes on without it.
        """
        if not self._is_unreadable:
            _log.exception("the engine's telemetry cannot be read; the gate tries again")
        self._is_unreadable = True

    def _tell(self, reading: Reading | None) -> None:
        if reading is not None and self._session is not None:
            self._session.telemetry(
                pool=self.pool.name,
                epoch=self.pool.epoch,
                running=reading.running,
                waiting=reading.waiting,
                used_tokens=reading.used_tokens,
                preemptions=reading.preemptions,
            )
