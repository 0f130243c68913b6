"""What the gate keeps between requests: the Session, the pool, telemetry, the local limit."""

from __future__ import annotations

import asyncio
import logging
import time

from schedsvc_client import ChannelCredentials, ClientOptions, tls_credentials
from schedsvc_client.aio import SchedulerSession, SessionState

from schedsvc_vllm.engine import EngineView, Pool
from schedsvc_vllm.estimate import TokenRatios
from schedsvc_vllm.limit import LocalLimit
from schedsvc_vllm.settings import Settings, SettingsError

TELEMETRY_PERIOD_S = 1.0
# Every report costs the engine's API process a write. In this time a sequence grows by a few
# tokens of a block, and ends carry their totals themselves.
PROGRESS_DELAY_S = 0.1
_log = logging.getLogger("schedsvc_vllm")


class Runtime:
    """One process's connection to the scheduler. Make it inside the server's event loop.

    Raises SettingsError where a setting or the engine's size is missing or wrong.
    """

    def __init__(self, settings: Settings, engine: EngineView, started_ns: int) -> None:
        self.engine = engine
        self.pool: Pool = engine.pool(settings.pool, started_ns)
        self.ratios = TokenRatios()
        self.limit = LocalLimit(settings.fail_open_concurrency_min)
        self.session = SchedulerSession(
            settings.target,
            client_id=settings.client_id or "gate",
            incarnation=started_ns,
            credentials=_credentials(settings),
            token=settings.token,
            options=ClientOptions(progress_delay_s=PROGRESS_DELAY_S),
            on_state=self._state_changed,
        )
        self.session.register_pool(
            pool=self.pool.name,
            epoch=self.pool.epoch,
            capacity_tokens=self.pool.capacity_tokens,
            block_size_tokens=self.pool.block_size_tokens,
            max_running=self.pool.max_running,
            max_model_tokens=self.pool.max_model_tokens,
        )
        self.session.start()
        self._telemetry: asyncio.Task[None] | None = None
        if engine.offers_telemetry:
            self._telemetry = asyncio.ensure_future(self._report())

    async def close(self) -> None:
        """Cancel what is open, and hang up."""
        if self._telemetry is not None:
            self._telemetry.cancel()
        await self.session.close()

    def _state_changed(self, state: SessionState) -> None:
        if state is SessionState.CONNECTED:
            self.limit.scheduler_is_back()

    async def _report(self) -> None:
        """Tell the engine's state each second."""
        while True:
            try:
                told = self.engine.telemetry()
            except Exception:
                # Telemetry is a hint: the scheduler's own ledger goes on without it.
                _log.exception("the engine's telemetry cannot be read; it is not reported any more")
                return
            if told is not None:
                self.session.telemetry(pool=self.pool.name, epoch=self.pool.epoch, **told)
            await asyncio.sleep(TELEMETRY_PERIOD_S)


def now_ns() -> int:
    """Return the wall clock: the engine's epoch and this process's incarnation grow with it."""
    return time.time_ns()


def _credentials(settings: Settings) -> ChannelCredentials | None:
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
