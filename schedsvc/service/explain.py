"""The handler of schedsvc.v1.ExplainService: why a request waits."""

from collections.abc import Callable
from typing import Any

import grpc
from schedsvc_client.v1 import explain_pb2 as pb

from schedsvc._core import CallerError
from schedsvc.driver import Broken, Driver
from schedsvc.service.auth import Authenticator, Unauthenticated
from schedsvc.service.explanation_text import sentences
from schedsvc.service.servicer_base import ServicerBase, parse

__all__ = ["EXPLAIN_SERVICE_NAME", "ExplainService"]

EXPLAIN_SERVICE_NAME = pb.DESCRIPTOR.services_by_name["ExplainService"].full_name
#: For the core: whoever has asked for it.
_ANYBODY = -1


class ExplainService(ServicerBase):
    """ExplainService on one listener."""

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
        methods = {"Explain": grpc.unary_unary_rpc_method_handler(self.explain)}
        return self._guarded(EXPLAIN_SERVICE_NAME, methods)

    async def explain(self, data: bytes, context: Any) -> bytes:
        """Answer Explain. O(tenants) where none is named; bounded work for each that is found."""
        try:
            principal = self._principal(context)
            sees_all = self._sees_all(principal)
            request = parse(pb.ExplainRequest, data)
            rows = self._driver.explain(
                request.request_id.encode(),
                request.tenant.encode(),
                _ANYBODY if sees_all else principal,
            )
        except (CallerError, Broken, Unauthenticated) as error:
            await self._fail(context, "Explain", error)
        stories = [_story(row, sees_all=sees_all) for row in rows]
        return pb.ExplainResponse(requests=stories).SerializeToString()


def _story(row: dict[str, Any], *, sees_all: bool) -> pb.RequestStory:
    state = pb.RequestState.Value("REQUEST_STATE_" + row["state"])
    story = pb.RequestStory(**{**row, "state": state})
    if not sees_all:
        for pool in story.pools:
            pool.ClearField("next_tenant")
    story.message = sentences(story)
    return story
