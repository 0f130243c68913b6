"""Asks the scheduler for each attempt of a request, and keeps the rule while it is away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from schedsvc_client import CallError, Refused, TenantProof, tls_credentials
from schedsvc_client.aio import Admission, AsyncScheduler
from schedsvc_client.channel import ChannelCredentials
from schedsvc_client.errors import is_decided

from schedsvc_litellm import refusals
from schedsvc_litellm.calls import ATTEMPT, Attempt, Call
from schedsvc_litellm.refusals import RefusalError
from schedsvc_litellm.settings import Settings
from schedsvc_litellm.sizing import Ratios, size_of
from schedsvc_litellm.usage import Usage

_log = logging.getLogger("schedsvc_litellm")
_ID_CHARS_MAX = 128


class Gatekeeper:
    """Admits attempts by one client of the scheduler, which the first one opens in its event loop.

    While the scheduler is away and `is_open`, at most as many run at once as ran at its last grant.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ratios = Ratios()
        self._scheduler: AsyncScheduler | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running = 0
        self._level = 1
        self._is_away = False

    async def admit(self, call: Call, pools: Iterable[str], fields: Mapping[str, Any]) -> Attempt:
        """Hold an attempt until its turn in one of the pools. Raises RefusalError."""
        offered = tuple(dict.fromkeys(pools))
        call.check(offered)
        size = size_of(call.path, fields, self._settings.output_tokens_max)
        tokens = self._ratios.tokens(call.tenant, size)
        admission = self._client().admission(
            tenant=call.tenant,
            tenant_proof=TenantProof.API_KEY if call.tenant else TenantProof.UNSPECIFIED,
            pools=offered,
            input_tokens=tokens,
            n=size.n,
            max_output_tokens=size.output_tokens_max,
            input_estimated=not size.exact,
            whole_answer=not size.stream,
            client_request_id=_short(fields.get("litellm_call_id")),
        )
        attempt = Attempt(
            admission, frozenset(offered), size, sum(tokens), partial(self._ended, call.tenant)
        )
        try:
            await self._wait(call, attempt, admission)
        except RefusalError as refusal:
            call.remember(offered, refusal)
            raise
        call.attempts.append(attempt)
        ATTEMPT.set(attempt)
        return attempt

    async def _wait(self, call: Call, attempt: Attempt, admission: Admission) -> None:
        future = admission.submit()
        try:
            await call.wait(future)
        except asyncio.CancelledError:
            # The grant may have come in the same moment.
            future.cancel()
            admission.give_back()
            if call.has_left:
                raise refusals.left() from None
            raise
        except Refused as error:
            self._note_away(is_away=False)
            raise refusals.refusal_of(error) from None
        except CallError as error:
            if is_decided(error):
                self._note_away(is_away=False)
                raise refusals.refusal_of(error) from None
            self._go_on(attempt, error)
            return
        self._note_away(is_away=False)
        if call.has_left:
            admission.give_back()
            raise refusals.left()
        if admission.lease is not None:
            attempt.pools = frozenset((admission.lease.pool,))
        self._running += 1
        self._level = self._running

    def _go_on(self, attempt: Attempt, error: CallError) -> None:
        """Let an attempt run without a lease, if the setting and the level allow it."""
        self._note_away(is_away=True, why=str(error))
        if not self._settings.is_open or self._running >= self._level:
            raise refusals.away() from None
        attempt.admission = None
        self._running += 1

    def _ended(self, tenant: str, attempt: Attempt, usage: Usage | None) -> None:
        self._running -= 1
        if usage is not None and not attempt.size.exact:
            self._ratios.learn(tenant, attempt.size, usage.input_tokens)

    def _note_away(self, *, is_away: bool, why: str = "") -> None:
        """Say once that the scheduler went, and once that it is back."""
        if is_away == self._is_away:
            return
        self._is_away = is_away
        if not is_away:
            _log.warning("the scheduler is back: each request waits for its turn again")
        elif self._settings.is_open:
            _log.warning("the scheduler is away; %d requests may run at once: %s", self._level, why)
        else:
            _log.warning("the scheduler is away; requests get 503: %s", why)

    def _client(self) -> AsyncScheduler:
        loop = asyncio.get_running_loop()
        if self._scheduler is None or self._loop is not loop:
            self._loop = loop
            self._scheduler = AsyncScheduler(
                self._settings.target, credentials=self._credentials(), token=self._token()
            )
        return self._scheduler

    async def close(self) -> None:
        """End all leases, and hang up."""
        if self._scheduler is not None:
            await self._scheduler.close()

    def _credentials(self) -> ChannelCredentials | None:
        given = self._settings
        if given.ca_file is None and given.cert_file is None:
            return None
        files = (given.ca_file, given.cert_file, given.key_file)
        ca_file, certificate_file, key_file = (str(each) if each else None for each in files)
        return tls_credentials(
            ca_file=ca_file, certificate_file=certificate_file, key_file=key_file
        )

    def _token(self) -> Any:
        file = self._settings.token_file
        if file is not None:
            return lambda: file.read_text().strip()
        return self._settings.token or None


def _short(call_id: object) -> str:
    """Return LiteLLM's id of a call, by which `schedsvc why` finds it; "": none that fits."""
    fits = isinstance(call_id, str) and call_id.isascii() and len(call_id) <= _ID_CHARS_MAX
    return str(call_id) if fits else ""
