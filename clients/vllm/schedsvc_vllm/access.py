"""Checks the credential of each request that reaches the engine without being admitted.

If the gate checks keys, tokens or certificates, only a preflight and the paths of `open_paths` pass
without a credential, and those only as they are written here: a server could read another spelling
as another path. A path with a response's id passes for the tenant of that response alone.
"""

from __future__ import annotations

from schedsvc_vllm import metrics_page
from schedsvc_vllm.answers import BadRequestError
from schedsvc_vllm.asgi import Scope
from schedsvc_vllm.caller import Caller
from schedsvc_vllm.identity import Identifier, check_operator, key_is_known
from schedsvc_vllm.paths import READ_METHODS, Place, is_operators, passes_as_written, written_path
from schedsvc_vllm.response_ids import ResponseIds
from schedsvc_vllm.settings import Settings

_PROBES = (b"/health", b"/ping", b"/version")
_MODELS = b"/v1/models"


def open_paths(settings: Settings | None) -> frozenset[bytes]:
    """Return the paths that a client may read without a credential; of no settings, the probes."""
    paths = set(_PROBES)
    if settings is not None and settings.models_open:
        paths.add(_MODELS)
    if settings is not None and settings.metrics_open:
        paths.add(metrics_page.PATH.encode())
    return frozenset(paths)


def is_open(scope: Scope, paths: frozenset[bytes]) -> bool:
    """Return whether a request needs no credential: a preflight, or a read of one of `paths`."""
    method = scope["method"]
    if method == "OPTIONS":
        return passes_as_written(scope)
    return method in READ_METHODS and written_path(scope) in paths


class Access:
    """Checks requests of one gate. `operator_keys_sha256`: keys that open operators' paths."""

    def __init__(
        self, identifier: Identifier, responses: ResponseIds, operator_keys_sha256: frozenset[bytes]
    ) -> None:
        self._identifier = identifier
        self._responses = responses
        self.operator_keys_sha256 = operator_keys_sha256

    async def check(self, caller: Caller, place: Place) -> None:
        """Check the credential of a request. Raises BadRequestError, as `prove()` does.

        It is 404 for a response that is not the caller's. An operator's key reads the metrics, too.
        """
        if place.operators:
            check_operator(caller, place.path, self.operator_keys_sha256)
            return
        if place.path == metrics_page.PATH and key_is_known(caller, self.operator_keys_sha256):
            return
        proved = await self._identifier.prove(caller)
        if place.response_ids:
            owner = self._identifier.owner(caller, proved)
            for response_id in place.response_ids:
                self._responses.check(response_id, owner)

    async def takes_websocket(self, caller: Caller, scope: Scope) -> bool:
        """Return whether a websocket to a path that the gate does not know may be opened."""
        if is_operators(scope):
            return False
        try:
            await self._identifier.prove(caller)
        except BadRequestError:
            return False
        return True
