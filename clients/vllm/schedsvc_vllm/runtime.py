"""Holds the state of the gate between requests: Session, pool, telemetry, local limit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from schedsvc_client import ChannelCredentials, ClientOptions, tls_credentials
from schedsvc_client.aio import SchedulerSession, SessionState
from schedsvc_client.channel import backoff_s

from schedsvc_vllm.departures import Departures
from schedsvc_vllm.engine import EngineView, Pool
from schedsvc_vllm.estimate import TokenRatios
from schedsvc_vllm.fence_file import claim_pool, fence_for
from schedsvc_vllm.limit import LocalLimit
from schedsvc_vllm.metrics_page import Counts
from schedsvc_vllm.reports import PROGRESS_PERIOD_S, Reports
from schedsvc_vllm.request_ids import RequestIds
from schedsvc_vllm.request_sizing import Asking
from schedsvc_vllm.scrape import (
    SCRAPE_PERIOD_S,
    SCRAPE_PERIOD_S_MAX,
    Fetch,
    ScrapeError,
    parse,
    within,
)
from schedsvc_vllm.settings import Settings, SettingsError
from schedsvc_vllm.telemetry import Reading

TELEMETRY_PERIOD_S = 1.0
# Longer than between two reports of totals: a busy engine's telemetry leaves with those.
_IDLE_PERIOD_S = max(TELEMETRY_PERIOD_S, PROGRESS_PERIOD_S) + 0.2
# If no request here waits, an end is held back to share a message: mostly with the next request of
# its client. Each message costs the engine's API process a quarter of a millisecond.
_END_DELAY_S = 0.02
# For the log: what becomes of requests while the scheduler is away.
_AWAY_OPEN = "requests run without admission (SCHEDSVC_UNREACHABLE=open)"
_AWAY_CLOSED = "requests get 503 (SCHEDSVC_UNREACHABLE=closed)"
_log = logging.getLogger("schedsvc_vllm")


class Runtime:
    """Connects one process to the scheduler. Make it inside the server's event loop.

    Raises SettingsError if a setting or the engine's size is missing or wrong.
    """

    def __init__(self, settings: Settings, engine: EngineView, started_ns: int) -> None:
        self.engine = engine
        self.counter = engine.counter()
        self.sets_priority = engine.obeys_priority
        self._settings, self._started_ns = settings, started_ns
        self.pool: Pool = engine.pool(settings.pool, started_ns)
        self.fence = fence_for(settings)
        self._claim = claim_pool(settings)
        #: Whether requests wait for the next leader while none serves this gate.
        self.holds = len(settings.targets) > 1
        self.ratios = TokenRatios()
        self.images = settings.images.on_engine(engine.image_patch_pixels, *engine.image_pixels)
        self.limit = LocalLimit(settings.fail_open_concurrency_min)
        self.ids = RequestIds()
        self.departures = Departures()
        self.session = SchedulerSession(
            settings.target,
            client_id=settings.client_id or "gate",
            incarnation=started_ns,
            credentials=credentials_of(settings),
            token=settings.token,
            options=ClientOptions(
                progress_delay_s=0,
                end_delay_s=_END_DELAY_S,
                silent_after_s=settings.unreachable_after_s,
                failover_silent_after_s=settings.unreachable_after_s,
                failover_wait_s=settings.failover_wait_s,
            ),
            on_state=self._state_changed,
            fence=self.fence,
            away=_AWAY_OPEN if settings.fail_open else _AWAY_CLOSED,
        )
        self._offer()
        self.session.start()
        if self.counter is None and engine.is_vllm:
            _log.warning(
                "this vLLM cannot be counted inside: usage is read from answers, at a cost"
            )
        self.counts = Counts(
            lambda: self.session.state is SessionState.CONNECTED,
            lambda: self.limit.running,
            settings.histogram_tenants_max,
            upstream_up=engine.upstream_up,
        )
        self.reports = Reports(self._reported)
        #: How much usage streams are asked for, and whether a server is known to take that.
        self.asking = Asking.IN_EVERY_EVENT
        self.asking_is_known = False
        #: Whether prompts are hashed, while the scheduler orders requests by their hashes.
        self.prefix_hashes = settings.prefix_hashes
        self.output_limit, self.serves_beams = settings.output_limit, settings.serves_beams
        self.send_stall_s = settings.send_stall_s
        self.fail_open = settings.fail_open
        self._looking: asyncio.Task[None] | None = None
        self._telling: asyncio.TimerHandle | None = None
        self._scraping: asyncio.Task[None] | None = None
        self._is_unreadable = False
        if engine.offers_telemetry:
            self._tell_engine()
        elif engine.metrics is not None:
            self._scraping = asyncio.ensure_future(self._scrape(engine.metrics))

    async def close(self) -> None:
        """Cancel what is open, and hang up."""
        self.reports.close()
        for work in (self._looking, self._scraping, self._telling):
            if work is not None:
                work.cancel()
        self._telling = None
        if self.counter is not None:
            self.counter.close()
        await self.session.close()
        if self._claim is not None:
            self._claim.close()

    def look(self) -> asyncio.Future[None]:
        """Check which engine runs there; calls in the meantime share one check."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(self._look())
        return asyncio.shield(self._looking)

    def _offer(self) -> None:
        self.session.register_pool(
            pool=self.pool.name,
            epoch=self.pool.epoch,
            capacity_tokens=self.pool.capacity_tokens,
            block_size_tokens=self.pool.block_size_tokens,
            max_running=self.pool.max_running,
            max_model_tokens=self.pool.max_model_tokens,
            gates=self._settings.pool.gates,
        )
        _log.info(
            "admission by the scheduler at %s;"
            " pool %s: %d tokens in blocks of %d, at most %s at once",
            self._settings.target, self.pool.name,
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
        pool = self.engine.pool(self._settings.pool, self._started_ns)
        if pool != self.pool:
            self.pool = pool
            self._offer()

    def _reported(self) -> None:
        if self._telling is not None:
            # Reports of the same moment share one message.
            self._tell_engine()

    def _state_changed(self, state: SessionState) -> None:
        if state is SessionState.CONNECTED:
            self.limit.scheduler_is_back()

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

    async def _scrape(self, fetch: Fetch) -> None:
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
            elif not (self.reports.running or runs):
                with contextlib.suppress(asyncio.TimeoutError):
                    await within(self.reports.busy.wait(), SCRAPE_PERIOD_S)
            if self.reports.running or runs:
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
        if reading is not None:
            self.session.telemetry(
                pool=self.pool.name,
                epoch=self.pool.epoch,
                running=reading.running,
                waiting=reading.waiting,
                used_tokens=reading.used_tokens,
                preemptions=reading.preemptions,
            )


def now_ns() -> int:
    """Return the wall clock: the engine's epoch and this process's incarnation grow with it."""
    return time.time_ns()


def credentials_of(settings: Settings) -> ChannelCredentials | None:
    """Return how the gate connects to the scheduler. Raises SettingsError."""
    if settings.tls is None:
        return None
    try:
        return tls_credentials(
            ca_file=settings.tls.ca_file,
            certificate_file=settings.tls.certificate_file,
            key_file=settings.tls.key_file,
        )
    except (OSError, ValueError) as error:
        raise SettingsError(f"SCHEDSVC_TLS_...: {error}") from None
