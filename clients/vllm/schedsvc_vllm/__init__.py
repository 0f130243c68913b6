"""Asks schedsvc before a request reaches the engine: the gate, a pure ASGI middleware."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from schedsvc_vllm.gate import Gate
    from schedsvc_vllm.settings import Settings, SettingsError

__all__ = ["Gate", "Settings", "SettingsError"]


def __getattr__(name: str) -> Any:
    # Imported when asked for: the proxy handles signals before imports that take a second.
    if name == "Gate":
        from schedsvc_vllm.gate import Gate

        return Gate
    if name in __all__:
        from schedsvc_vllm import settings

        return getattr(settings, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
