"""Handles schedsvc.v1.ExplainService, which says why a request waits."""

from collections.abc import Callable
from typing import Any

import grpc
from schedsvc_client.v1 import explain_pb2 as pb

from schedsvc._core import CallerError
from schedsvc.driver import Broken, Driver
from schedsvc.service.auth import Authenticator, Unauthenticated
from schedsvc.service.explanation_text import sentences
from schedsvc.service.servicer_base import ServicerBase, parse

__all__ = ["EXPLAIN_SERVICE_NAME", "ExplainService", "stories"]

EXPLAIN_SERVICE_NAME = pb.DESCRIPTOR.services_by_name["ExplainService"].full_name
#: For the core: requests of any principal.
_ANY = -1
#: The value of a figure that the caller may not see.
_HIDDEN = -1
_STATES = {name.removeprefix("REQUEST_STATE_"): n for name, n in pb.RequestState.items()}


class ExplainService(ServicerBase):
    """Serves ExplainService on one listener."""

    def __init__(
        self,
        driver: Driver,
        sees_all: Callable[[int], bool],
        *,
        authenticator: Authenticator,
        on_failure: Callable[[str, grpc.StatusCode], None] | None = None,
    ) -> None:
        """Serve a driver. `sees_all`: whether a principal hears of what others have asked for."""
        super().__init__(authenticator, on_failure)
        self._driver = driver
        self._sees_all = sees_all

    def handler(self) -> "grpc.GenericRpcHandler[bytes, bytes]":
        """Return the handler to add to a grpc.aio server; its method takes and gives bytes."""
        methods = {
            "Explain": grpc.unary_unary_rpc_method_handler(self.explain),
            "ListRequestIds": grpc.unary_unary_rpc_method_handler(self.list_request_ids),
        }
        return self._guarded(EXPLAIN_SERVICE_NAME, methods, self._driver)

    async def explain(self, data: bytes, context: Any) -> bytes:
        """Answer Explain. O(tenants) where none is named; bounded work for each that is found."""
        try:
            principal = await self._turn(context, len(data))
            sees_all = self._sees_all(principal)
            request = parse(pb.ExplainRequest, data)
            found = stories(
                self._driver, request.request_id, request.tenant, None if sees_all else principal
            )
        except (CallerError, Broken, Unauthenticated) as error:
            await self._fail(context, "Explain", error)
        return pb.ExplainResponse(requests=found).SerializeToString()

    async def list_request_ids(self, data: bytes, context: Any) -> bytes:
        """Answer ListRequestIds. O(256)."""
        try:
            principal = await self._turn(context, len(data))
            parse(pb.ListRequestIdsRequest, data)
            seen = self._driver.recent_request_ids(_ANY if self._sees_all(principal) else principal)
        except (CallerError, Broken, Unauthenticated) as error:
            await self._fail(context, "ListRequestIds", error)
        ids = list(dict.fromkeys(each.decode(errors="replace") for each in seen))
        return pb.ListRequestIdsResponse(request_ids=ids).SerializeToString()


def stories(
    driver: Driver, request_id: str, tenant: str = "", principal: int | None = None
) -> list[pb.RequestStory]:
    """Return what is known of a request, one story for each tenant that used the id.

    A `principal` sees only its own requests, not which flow precedes them, and no figures of a
    pool that Stats would not show it; None sees all. O(tenants) if no tenant is named. Raises
    CallerError and Broken.
    """
    rows = driver.explain(
        request_id.encode(), tenant.encode(), _ANY if principal is None else principal
    )
    found = [pb.RequestStory(**row | {"state": _STATES[row["state"]]}) for row in rows]
    for story in found:
        if principal is not None:
            _hide_others(story, lambda pool: driver.may_see_pool(principal, pool.encode()))
        story.message = sentences(story)
    return found


def _hide_others(story: pb.RequestStory, sees_pool: Callable[[str], bool]) -> None:
    """Clear which flow is next, and how full each pool is that the caller may not see."""
    unseen = {pool.pool for pool in story.pools if not sees_pool(pool.pool)}
    for pool in story.pools:
        pool.ClearField("next_tenant")
        pool.ClearField("next_group")
        if pool.pool in unseen:
            for field in ("need_tokens", "load_tokens", "load_max_tokens", "next_lead_tokens"):
                pool.ClearField(field)
    if unseen:  # the work and the flows ahead are those of all pools that it may go to
        story.place.work_ahead_tokens = story.place.flows_ahead = _HIDDEN
        if story.place.reason == pb.WAIT_REASON_MODEL_QUOTA:
            story.ClearField("limit")
        if story.session.HasField("cap") and story.session.cap.pool in unseen:
            story.session.cap.ClearField("active_tokens")
            story.session.cap.ClearField("active_sessions")
            story.session.cap.ClearField("limit_tokens")
