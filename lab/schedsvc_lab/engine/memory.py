"""Sizes a KV cache: what the device has, less what the model and its work take."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

_PPM = 1_000_000
Bytes = Annotated[int, Field(ge=0, le=1 << 50)]


class MemoryProfile(BaseModel):
    """Describes the memory of one device, as an engine profiles it at its start.

    The engine may use `utilization_ppm` millionths of `device_bytes`. From that go the weights,
    what a step of the most tokens needs for activations, and a slot for each adapter that may be
    loaded; the rest is KV cache.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    device_bytes: Bytes
    utilization_ppm: Annotated[int, Field(ge=1, le=_PPM)]
    weights_bytes: Bytes
    activation_bytes_per_token: Bytes
    kv_bytes_per_token: Annotated[int, Field(ge=1, le=1 << 40)]
    adapter_bytes: Bytes = 0

    def kv_tokens(self, step_tokens_max: int, adapters_max: int) -> int:
        """Return the tokens of KV cache. Raises ValueError if nothing is left for it."""
        usable = self.device_bytes * self.utilization_ppm // _PPM
        taken = (
            self.weights_bytes
            + self.activation_bytes_per_token * step_tokens_max
            + self.adapter_bytes * adapters_max
        )
        tokens = (usable - taken) // self.kv_bytes_per_token
        if tokens < 1:
            raise ValueError(
                f"memory: weights, activations and adapters take {taken} bytes of the {usable} "
                "that may be used, and leave nothing for the KV cache"
            )
        return tokens
