"""Names stored responses by ids that show the gate whose a response is, without a table.

vLLM and SGLang take a response's id from the body's `request_id`, and keep the response under it.
The gate sets that field, so no client can choose the id of another tenant's response. The id holds
a keyed MAC of its tenant. A gate that has the same key knows it again after a restart.
"""

from __future__ import annotations

import hmac
import re
import secrets

from schedsvc_vllm.answers import BadRequestError

#: The endpoint that makes responses, and the field of its body that names an earlier one.
PATH = "/v1/responses"
EARLIER = "previous_response_id"
_ID = re.compile(r"resp_([0-9a-f]{32})([0-9a-f]{32})", re.ASCII)
_MAC_BYTES = 16


class ResponseIds:
    """Makes ids of responses, and checks whose they are.

    `key`: a secret of the gates that share an engine; b"": one that ends with this process.
    """

    def __init__(self, key: bytes = b"") -> None:
        self._key = key or secrets.token_bytes(32)

    def make(self, owner: str | bytes) -> str:
        """Return a new id for a response of this tenant."""
        nonce = secrets.token_hex(16)
        return f"resp_{nonce}{self._mac(nonce, owner)}"

    def check(self, response_id: object, owner: str | bytes, param: str | None = None) -> None:
        """Check that an id is one of this tenant. Raises BadRequestError (404).

        `param`: the field of the body that names it.
        """
        found = _ID.fullmatch(response_id) if isinstance(response_id, str) else None
        if found is None or not hmac.compare_digest(found[2], self._mac(found[1], owner)):
            shown = str(response_id)[:100]
            raise BadRequestError(
                f"response {shown!r} was not found", param, status=404, code="response_not_found"
            )

    def _mac(self, nonce: str, owner: str | bytes) -> str:
        kind, name = (b"name", owner.encode()) if isinstance(owner, str) else (b"hash", owner)
        digest = hmac.digest(self._key, b"\0".join((nonce.encode(), kind, name)), "sha256")
        return digest[:_MAC_BYTES].hex()
