"""Holds the callback of LiteLLM's proxy: `callbacks: [schedsvc_litellm.plugin.admission]`.

Importing it puts the middleware around the proxy's app, which serves no request yet: LiteLLM
imports its callbacks while it starts. Settings come from the environment.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from fastapi import HTTPException
from litellm.integrations.custom_logger import CustomLogger
from litellm.proxy import proxy_server

from schedsvc_litellm.calls import ATTEMPT, CURRENT, Attempt, Call
from schedsvc_litellm.gatekeeper import Gatekeeper
from schedsvc_litellm.identity import tenant_of
from schedsvc_litellm.middleware import Middleware
from schedsvc_litellm.refusals import NOT_GATED, RefusalError
from schedsvc_litellm.settings import PASS, REFUSE, Settings, read_settings
from schedsvc_litellm.usage import has_output, usage_of

_TIMEOUT = 408
_THROUGH = "pass_through_endpoint"
_TEXT_COMPLETION, _STRIPS = "atext_completion", "_litellm_strip_stream_usage"


def pool_of(deployment: Mapping[str, Any]) -> str:
    """Return the pool of a deployment; "": its engine is none of the scheduler's."""
    return str((deployment.get("model_info") or {}).get("schedsvc_pool") or "")


class Plugin(CustomLogger):  # type: ignore[misc] # .venv has no LiteLLM
    """Holds each attempt of a request until its turn, and reports what it used."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._settings = settings
        self._gatekeeper = Gatekeeper(settings)

    async def async_pre_call_hook(
        self, user_api_key_dict: Any, cache: Any, data: dict[str, Any], call_type: Any
    ) -> None:
        """Note who asks. Raises HTTPException for a pass-through route that gets no turn."""
        call = CURRENT.get()
        if call is not None:
            call.tenant = tenant_of(user_api_key_dict)
            # LiteLLM asks each stream for its usage, and takes out what the client has not asked
            # for. For plain completions it does so before this plug-in sees it.
            if str(call_type) == _TEXT_COMPLETION and data.get(_STRIPS):
                del data[_STRIPS]
                call.hides_usage = True
        rule = self._settings.pass_through
        if _THROUGH not in str(call_type) or rule == PASS:
            return
        if rule == REFUSE or call is None:
            # LiteLLM shows the detail of these routes as it stands.
            text = "pass-through routes do not wait for their turn; see SCHEDSVC_PASS_THROUGH"
            raise HTTPException(NOT_GATED, detail=text)
        (await self._admitted(call, [rule], data)).was_sent = True

    async def async_filter_deployments(
        self,
        model: str,
        healthy_deployments: list[dict[str, Any]],
        messages: Any,
        request_kwargs: dict[str, Any] | None = None,
        parent_otel_span: Any = None,
    ) -> list[dict[str, Any]]:
        """Return the deployments of the granted pool. Raises HTTPException for a refusal."""
        pools = [pool for each in healthy_deployments if (pool := pool_of(each))]
        if not pools:
            return healthy_deployments
        fields = dict(request_kwargs or {})
        if messages is not None:
            fields["messages"] = messages
        attempt = await self._admitted(CURRENT.get(), pools, fields)
        return [each for each in healthy_deployments if pool_of(each) in attempt.pools]

    async def async_pre_call_deployment_hook(self, kwargs: dict[str, Any], call_type: Any) -> None:
        """Note that the engine is called. Raises HTTPException for a refusal.

        A request may name a deployment instead of a model. Then no deployments are filtered, and
        it waits for its turn here.
        """
        call, pool = CURRENT.get(), pool_of(kwargs)
        # LiteLLM's own health checks are no request.
        if call is None or not pool:
            return
        attempt = ATTEMPT.get()
        if attempt is None or attempt.has_ended or pool not in attempt.pools:
            attempt = await self._admitted(call, [pool], kwargs)
        attempt.was_sent = True

    async def async_post_call_success_deployment_hook(
        self, request_data: dict[str, Any], response: Any, call_type: Any
    ) -> None:
        """End an attempt with its whole answer. A stream ends in the iterator's hook."""
        attempt, usage = ATTEMPT.get(), usage_of(response)
        if attempt is not None and (usage is not None or not attempt.size.stream):
            attempt.complete(usage)

    async def async_post_call_failure_deployment_hook(
        self,
        request_data: Mapping[str, Any],
        exception: Exception,
        call_type: Any,
        fallback_depth: int | None = None,
    ) -> None:
        """End an attempt that failed: charged for its time if the engine was too slow."""
        attempt = ATTEMPT.get()
        if attempt is None:
            return
        if getattr(exception, "status_code", None) == _TIMEOUT:
            attempt.cancel()
        else:
            attempt.give_back()

    async def async_post_call_streaming_iterator_hook(
        self, user_api_key_dict: Any, response: Any, request_data: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        """Report the progress of a stream, and end its attempt with it."""
        call = CURRENT.get()
        attempt = call.running if call is not None else None
        try:
            async for chunk in response:
                if attempt is not None:
                    usage = usage_of(chunk)
                    attempt.advance(usage, has_output=has_output(chunk))
                    if usage is not None and call is not None and call.hides_usage:
                        continue
                yield chunk
        except BaseException:
            if attempt is not None:
                attempt.cancel()
            raise
        if attempt is not None:
            attempt.complete()

    async def _admitted(
        self, call: Call | None, pools: list[str], fields: Mapping[str, Any]
    ) -> Attempt:
        """Wait for the turn of an attempt. One before it in this task did not reach its end."""
        if call is None:
            raise _refused("requests wait for their turn on HTTP POST alone")
        earlier = ATTEMPT.get()
        if earlier is not None:
            earlier.cancel()
        try:
            return await self._gatekeeper.admit(call, pools, fields)
        except RefusalError as refusal:
            raise _answer(refusal) from None


def _refused(message: str) -> HTTPException:
    return _answer(RefusalError(NOT_GATED, message, "not_gated"))


def _answer(refusal: RefusalError) -> HTTPException:
    """Return the exception to which LiteLLM gives its own form, with these headers."""
    detail = {"error": refusal.message}
    return HTTPException(refusal.status, detail=detail, headers=refusal.headers)


def _install(app: Any) -> None:
    if app.middleware_stack is None:
        app.add_middleware(Middleware)
    else:
        app.middleware_stack = Middleware(app.middleware_stack)


#: The callback that LiteLLM's configuration names.
admission = Plugin(read_settings(os.environ))
_install(proxy_server.app)
