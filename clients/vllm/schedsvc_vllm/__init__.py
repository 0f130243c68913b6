"""The gate: a pure ASGI middleware that asks schedsvc before a request reaches the engine."""

from schedsvc_vllm.gate import Gate
from schedsvc_vllm.settings import Settings, SettingsError

__all__ = ["Gate", "Settings", "SettingsError"]
