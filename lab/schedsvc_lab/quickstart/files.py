"""Writes the folder of a quickstart: a configuration that was checked, and the keys of its tenants.

Only their owner can read them, and no file that exists is written to.
"""

import hashlib
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path

import yaml

from schedsvc.config import ConfigError, load

__all__ = ["CONFIG", "KEYS", "Made", "QuickstartError", "make", "read_tenants"]

CONFIG, KEYS = "schedsvc.yaml", "keys"
_TENANTS_MAX = 100
_HEAD = """\
# Written by `schedsvc quickstart`. The keys of the tenants are in the file `keys` beside it.
# All settings: docs/reference/settings.md. `schedsvc check` checks a change, SIGHUP loads it.
"""


class QuickstartError(Exception):
    """The quickstart cannot begin; the text says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Made:
    """Holds the configuration, the socket that it names, and the API key of each tenant."""

    config: Path
    socket: Path
    keys: Mapping[str, str]


def read_tenants(text: str) -> dict[str, Decimal]:
    """Read tenants with their weights: `research production=4`; 1 is the usual weight.

    Raises QuickstartError.
    """
    tenants: dict[str, Decimal] = {}
    for word in text.replace(",", " ").split():
        name, _, weight = word.partition("=")
        try:
            number = Decimal(weight or "1")
        except InvalidOperation:
            number = Decimal("nan")
        if not name or not number.is_finite() or not 0 < number <= 1_000_000:
            raise QuickstartError(f"{word!r} is no tenant; write NAME, or NAME=WEIGHT")
        if name in tenants:
            raise QuickstartError(f"the tenant {name!r} occurs twice; name it once")
        tenants[name] = number
    if not 0 < len(tenants) <= _TENANTS_MAX:
        raise QuickstartError(f"name 1 to {_TENANTS_MAX} tenants, not {len(tenants)}")
    return tenants


def make(folder: Path, tenants: Mapping[str, Decimal]) -> Made:
    """Make the folder with its files. Raises QuickstartError, and then leaves none behind."""
    folder = folder.absolute()
    try:
        folder.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        text = f"{folder} exists, and is left as it is; name another folder with --folder"
        raise QuickstartError(text) from None
    except OSError as error:
        text = f"the folder {folder} cannot be made: {error.strerror}; name another with --folder"
        raise QuickstartError(text) from None
    made = Made(
        folder / CONFIG,
        folder / "schedsvc.sock",
        {name: f"sk-{secrets.token_urlsafe(24)}" for name in tenants},
    )
    files = {
        made.config: _HEAD + yaml.safe_dump(_config(made, tenants), sort_keys=False),
        folder / KEYS: "".join(f"{name} {key}\n" for name, key in made.keys.items()),
    }
    try:
        for file, text in files.items():
            _write(file, text)
        load(made.config)
    except (ConfigError, OSError) as error:
        for file in files:
            file.unlink(missing_ok=True)
        folder.rmdir()
        raise QuickstartError(str(error)) from None
    return made


def _config(made: Made, tenants: Mapping[str, Decimal]) -> dict[str, object]:
    return {
        "listeners": [{"unix": str(made.socket)}],
        "tenants": [
            {
                "name": name,
                "weight": int(weight) if weight == int(weight) else float(weight),
                "api_keys_sha256": [hashlib.sha256(made.keys[name].encode()).hexdigest()],
            }
            for name, weight in tenants.items()
        ],
        "metrics": {"listen": "127.0.0.1:0"},
        "limits": {"drain_ms": 1_000},
    }


def _write(file: Path, text: str) -> None:
    """Write a new file that its owner alone can read."""
    opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(opened, "w") as stream:
        stream.write(text)
