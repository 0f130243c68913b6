"""Reads the plug-in's settings from the environment; a wrong one names itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

#: The most output tokens of a request that states no limit.
OUTPUT_TOKENS_DEFAULT = 4_096
REFUSE, PASS = "refuse", "pass"


class SettingError(ValueError):
    """Reports a setting with a wrong value."""


@dataclass(frozen=True)
class Settings:
    """Holds the settings. `pass_through`: `refuse`, `pass`, or the pool behind these routes."""

    target: str
    token: str = ""
    token_file: Path | None = None
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    is_open: bool = True
    pass_through: str = REFUSE
    output_tokens_max: int = OUTPUT_TOKENS_DEFAULT


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Read them. Raises SettingError that names the variable."""

    def text(name: str) -> str:
        return environment.get(name, "").strip()

    def file(name: str) -> Path | None:
        return Path(text(name)) if text(name) else None

    target = text("SCHEDSVC_TARGET")
    if not target:
        raise SettingError("SCHEDSVC_TARGET is missing: host:port or unix:/path of the scheduler")
    unreachable = text("SCHEDSVC_UNREACHABLE") or "open"
    if unreachable not in ("open", "closed"):
        raise SettingError(f"SCHEDSVC_UNREACHABLE is {unreachable!r}; write open or closed")
    limit = text("SCHEDSVC_OUTPUT_TOKENS_MAX") or str(OUTPUT_TOKENS_DEFAULT)
    if not limit.isascii() or not limit.isdigit() or int(limit) < 1:
        raise SettingError(f"SCHEDSVC_OUTPUT_TOKENS_MAX is {limit!r}; write a number from 1 on")
    certificate, key = file("SCHEDSVC_TLS_CERT_FILE"), file("SCHEDSVC_TLS_KEY_FILE")
    if (certificate is None) != (key is None):
        raise SettingError("SCHEDSVC_TLS_CERT_FILE and SCHEDSVC_TLS_KEY_FILE go together")
    return Settings(
        target=target,
        token=text("SCHEDSVC_TOKEN"),
        token_file=file("SCHEDSVC_TOKEN_FILE"),
        ca_file=file("SCHEDSVC_TLS_CA_FILE"),
        cert_file=certificate,
        key_file=key,
        is_open=unreachable == "open",
        pass_through=text("SCHEDSVC_PASS_THROUGH") or REFUSE,
        output_tokens_max=int(limit),
    )
