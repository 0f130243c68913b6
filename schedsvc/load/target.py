"""Where the load goes and how a request of a trace is written for it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from schedsvc.workload import TraceRequest

TENANT_HEADER = "x-tenant-id"


class OutputMode(Enum):
    """Who decides how long an answer gets.

    FORCED: the trace, through `ignore_eos` and `min_tokens` = `max_tokens`; any engine of vLLM's
    family obeys. EMULATED: the trace, through `emulated_output_tokens`, which tells schedsvc's
    emulator where its model ends by itself; `max_tokens` stays a cap, as real clients send it, so
    nobody in front of the engine knows the length beforehand. FREE: the model, below the cap.
    """

    FORCED = "forced"
    EMULATED = "emulated"
    FREE = "free"


@dataclass(frozen=True, slots=True)
class Target:
    """An OpenAI-compatible endpoint and the form of the requests to it.

    `tenant_header` carries the tenant's name ("" for none); `api_keys` gives some tenants a bearer
    token. Prompts are token ids drawn from [`token_id_min`, `token_id_max`], fresh for each
    request, so that no prefix cache helps. `max_tokens` is the cap that clients ask for;
    `max_tokens_of` gives some tenants another.
    """

    url: str
    model: str = ""
    tenant_header: str = TENANT_HEADER
    api_keys: Mapping[str, str] = field(default_factory=dict)
    output: OutputMode = OutputMode.FORCED
    max_tokens: int = 1024
    max_tokens_of: Mapping[str, int] = field(default_factory=dict)
    token_id_min: int = 100
    token_id_max: int = 1999

    @property
    def completions_url(self) -> str:
        """The endpoint for prompts that are token ids; `url` may end in `/v1` or not."""
        return self.url.rstrip("/").removesuffix("/v1") + "/v1/completions"

    @property
    def models_url(self) -> str:
        """The endpoint that lists what is served."""
        return self.url.rstrip("/").removesuffix("/v1") + "/v1/models"

    def headers(self, tenant: str, request_id: str) -> dict[str, str]:
        """Make the headers of one request."""
        headers = {"content-type": "application/json", "x-request-id": request_id}
        if self.tenant_header:
            headers[self.tenant_header] = tenant
        if tenant in self.api_keys:
            headers["authorization"] = f"Bearer {self.api_keys[tenant]}"
        return headers

    def body(self, request: TraceRequest, model: str, ids: np.random.Generator) -> bytes:
        """Write a request whose prompt is exactly `prompt_tokens` ids. O(prompt tokens)."""
        prompt = ids.integers(self.token_id_min, self.token_id_max + 1, request.prompt_tokens)
        body = {
            "model": model,
            "prompt": prompt.tolist(),
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._length(request),
        }
        return json.dumps(body, separators=(",", ":")).encode()

    def _length(self, request: TraceRequest) -> dict[str, int | bool]:
        if self.output is OutputMode.FORCED:
            exact = request.output_tokens
            return {"max_tokens": exact, "min_tokens": exact, "ignore_eos": True}
        cap = self.max_tokens_of.get(request.tenant, self.max_tokens)
        if self.output is OutputMode.EMULATED:
            return {"max_tokens": cap, "emulated_output_tokens": request.output_tokens}
        return {"max_tokens": cap}
