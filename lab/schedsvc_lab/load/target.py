"""Says where the load goes, in which protocol, and how a request of a trace is written for it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from schedsvc_lab.load.prompts import Prompts, TextMaker
from schedsvc_lab.workload import TraceRequest

TENANT_HEADER = "x-tenant-id"


class Backend(Enum):
    """Names the protocol of the endpoint.

    OPENAI: completions, whose prompts are token ids. OPENAI_CHAT: chat completions.
    GENERATE_STREAM: the endpoint of that name in LightLLM and S-LoRA.
    """

    OPENAI = "openai"
    OPENAI_CHAT = "openai-chat"
    GENERATE_STREAM = "generate_stream"


class OutputMode(Enum):
    """Names the side that decides the length of an answer.

    FORCED: the trace, through `ignore_eos` and `min_tokens` = `max_tokens`; any engine of vLLM's
    family obeys. EMULATED: the trace, through `emulated_output_tokens`, from which schedsvc's
    emulator takes the end of its model's text. `max_tokens` stays a cap, as real clients send it,
    so no component in front of the engine knows the length beforehand. FREE: the model, below the
    cap.
    """

    FORCED = "forced"
    EMULATED = "emulated"
    FREE = "free"


_PATHS = {
    Backend.OPENAI: "/v1/completions",
    Backend.OPENAI_CHAT: "/v1/chat/completions",
    Backend.GENERATE_STREAM: "/generate_stream",
}
# Fields that the protocol's clients may leave out, with the servers' defaults (LightLLM, S-LoRA).
_SAMPLING: dict[str, Any] = {
    "do_sample": False,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "stop_sequences": None,
}


@dataclass(frozen=True, slots=True)
class Target:
    """Describes an endpoint and the form of the requests to it.

    `tenant_header` carries the tenant's name ("" for none); `api_keys` gives some tenants a bearer
    token, `headers` all of them, and `headers_of` some, headers of their own. Prompts that the
    trace does not hold are token ids from [`token_id_min`, `token_id_max`] or made by `texts`.
    `max_tokens` is the cap that clients ask for; `max_tokens_of` gives some tenants another.
    `extra` is added to each body, for generate_stream to its `parameters`.
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
    backend: Backend = Backend.OPENAI
    headers_for_all: Mapping[str, str] = field(default_factory=dict)
    headers_of: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    texts: TextMaker | None = None

    @property
    def base_url(self) -> str:
        """Return the server; `url` may end in `/v1` or not."""
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def generate_url(self) -> str:
        """Where requests are sent."""
        return self.base_url + _PATHS[self.backend]

    @property
    def models_url(self) -> str:
        """Return the endpoint that lists what is served."""
        return self.base_url + "/v1/models"

    def prompts(self, seed: int) -> Prompts:
        """Return a maker of prompts for a run."""
        return Prompts(seed, self.token_id_min, self.token_id_max, self.texts)

    def headers(self, tenant: str, request_id: str) -> dict[str, str]:
        """Make the headers of one request."""
        headers = {"content-type": "application/json", "x-request-id": request_id}
        if self.tenant_header:
            headers[self.tenant_header] = tenant
        if tenant in self.api_keys:
            headers["authorization"] = f"Bearer {self.api_keys[tenant]}"
        headers.update(self.headers_for_all)
        headers.update(self.headers_of.get(tenant, {}))
        return headers

    def body(self, request: TraceRequest, model: str, prompts: Prompts) -> bytes:
        """Write a request. O(prompt tokens). Raises PromptError."""
        adapter = None if request.record is None else request.record.adapter
        if self.backend is Backend.GENERATE_STREAM:
            return _dump(
                {
                    "model_dir": model,
                    "lora_dir": adapter,
                    "inputs": prompts.text(request),
                    "parameters": {**_SAMPLING, **self._new_tokens(request), **self.extra},
                }
            )
        body = {
            # An adapter is served under a separate name, as in vLLM.
            "model": adapter or model,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._length(request),
            **self.extra,
        }
        if self.backend is Backend.OPENAI_CHAT:
            return _dump({**body, "messages": prompts.messages(request)})
        return _dump(body)[:-1] + b',"prompt":' + prompts.completion(request).encode() + b"}"

    def _cap(self, request: TraceRequest) -> int:
        return self.max_tokens_of.get(request.tenant, self.max_tokens)

    def _length(self, request: TraceRequest) -> dict[str, int | bool]:
        if self.output is OutputMode.FORCED:
            exact = request.output_tokens
            return {"max_tokens": exact, "min_tokens": exact, "ignore_eos": True}
        cap = {"max_tokens": self._cap(request)}
        if self.output is OutputMode.EMULATED:
            return {**cap, "emulated_output_tokens": request.output_tokens}
        return {**cap}

    def _new_tokens(self, request: TraceRequest) -> dict[str, int | bool]:
        if self.output is OutputMode.FORCED:
            return {"ignore_eos": True, "max_new_tokens": request.output_tokens}
        cap = {"ignore_eos": False, "max_new_tokens": self._cap(request)}
        if self.output is OutputMode.EMULATED:
            return {**cap, "emulated_output_tokens": request.output_tokens}
        return cap


def _dump(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()
