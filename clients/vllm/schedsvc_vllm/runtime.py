"""Holds the state of the gate between requests: Session, offered pools, local limit."""

from __future__ import annotations

import logging
import time

from schedsvc_client import ChannelCredentials, ClientOptions, tls_credentials
from schedsvc_client.aio import SchedulerSession, SessionState

from schedsvc_vllm.departures import Departures
from schedsvc_vllm.engine import EngineView
from schedsvc_vllm.estimate import TokenRatios
from schedsvc_vllm.fence_file import claim_pool, fence_for
from schedsvc_vllm.limit import LocalLimit
from schedsvc_vllm.metrics_page import Counts
from schedsvc_vllm.offers import Offers
from schedsvc_vllm.reports import Reports
from schedsvc_vllm.request_ids import RequestIds
from schedsvc_vllm.request_sizing import Asking
from schedsvc_vllm.settings import Settings, SettingsError

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
        self.offers = Offers(settings, engine, started_ns)
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
        self.offers.register(self.session)
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
        self.reports = Reports(self.offers.reported)
        #: How much usage streams are asked for, and whether a server is known to take that.
        self.asking = Asking.IN_EVERY_EVENT
        self.asking_is_known = False
        #: Whether prompts are hashed, while the scheduler orders requests by their hashes.
        self.prefix_hashes = settings.prefix_hashes
        self.output_limit, self.serves_beams = settings.output_limit, settings.serves_beams
        self.send_stall_s = settings.send_stall_s
        self.fail_open = settings.fail_open
        self.offers.open(self.session, self.reports)

    async def close(self) -> None:
        """Cancel what is open, and hang up."""
        self.reports.close()
        self.offers.close()
        if self.counter is not None:
            self.counter.close()
        await self.session.close()
        if self._claim is not None:
            self._claim.close()

    def _state_changed(self, state: SessionState) -> None:
        if state is SessionState.CONNECTED:
            self.limit.scheduler_is_back()


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
