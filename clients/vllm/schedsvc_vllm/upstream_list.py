"""Reads which servers are behind the proxy: from the command line, or from a YAML file."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

#: The scheduler takes at most this number of pools for a request.
UPSTREAMS_MAX = 64
_FIELDS = frozenset({"name", "url", "models"})
_NAME_BYTES_MAX = 128
_NAMED = re.compile(r"([^=/]+)=(.*)")
_log = logging.getLogger("schedsvc_vllm")


class ListError(Exception):
    """Reports what is wrong with a list of upstreams."""


@dataclass(frozen=True, slots=True)
class Named:
    """Names an upstream's pool and its root. `models`: those that it serves; empty: as it says."""

    name: str
    url: str
    models: tuple[str, ...] = ()


class UpstreamList:
    """Holds the upstreams of the command line, or those of a file that may change."""

    def __init__(self, first: Sequence[Named], file: str = "") -> None:
        self.first = tuple(first)
        self._file = file
        self._text: bytes | None = None
        self._problem = ""
        if file:
            self._text = _read(file)
            self.first = parse(self._text, file)

    def changed(self) -> tuple[Named, ...] | None:
        """Read the file again; None: it is the same, or wrong, which the log says once."""
        if not self._file:
            return None
        try:
            text = _read(self._file)
            if text == self._text:
                self._problem = ""
                return None
            listed = parse(text, self._file)
        except ListError as error:
            if str(error) != self._problem:
                _log.error("the upstreams stay as they were: %s", error)
            self._problem = str(error)
            return None
        self._text, self._problem = text, ""
        return listed


def named_all(arguments: Sequence[str]) -> tuple[Named, ...]:
    """Read the upstreams of the command line, each `URL` or `NAME=URL`. Raises ListError."""
    named = []
    for argument in arguments:
        found = _NAMED.fullmatch(argument)
        name, url = (found[1], found[2]) if found else ("", argument)
        named.append(_checked(name, url, (), f"--upstream {argument}"))
    return _apart(named, "--upstream")


def parse(text: bytes, file: str) -> tuple[Named, ...]:
    """Read a file's upstreams. Raises ListError."""
    try:
        yaml: Any = importlib.import_module("yaml")
    except ModuleNotFoundError:
        raise ListError(
            f"{file}: PyYAML is not installed: pip install 'schedsvc-vllm[proxy]'"
        ) from None
    try:
        told = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ListError(f"{file}: {' '.join(str(error).split())}") from None
    if not isinstance(told, dict) or set(told) != {"upstreams"}:
        raise ListError(f"{file}: must have one field, upstreams")
    rows = told["upstreams"]
    if not isinstance(rows, list) or not rows:
        raise ListError(f"{file}: upstreams: must be a list with at least one")
    return _apart(
        [_row(row, f"{file}: upstreams[{number}]") for number, row in enumerate(rows)], file
    )


def _row(row: object, where: str) -> Named:
    if not isinstance(row, dict) or not set(row) <= _FIELDS or "url" not in row:
        raise ListError(f"{where}: must have a url, and may have a name and models")
    models = row.get("models") or []
    if not isinstance(models, list) or not all(isinstance(each, str) and each for each in models):
        raise ListError(f"{where}.models: must be a list of names")
    return _checked(str(row.get("name") or ""), str(row["url"]), tuple(models), where)


def check_url(url: str, where: str) -> None:
    """Raise ListError unless a URL is a server's root."""
    parts = urlsplit(url)
    if parts.scheme.startswith("dns"):
        raise ListError(f"{where}: names of DNS are not looked up for upstreams; list each server")
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
        raise ListError(f"{where}: must be http://HOST:PORT of the server")
    try:
        is_whole = bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_whole = False
    if not is_whole:
        raise ListError(f"{where}: the host or the port is not valid")
    if parts.path.strip("/"):
        raise ListError(f"{where}: give the server's root, without {parts.path}")


def _checked(name: str, url: str, models: tuple[str, ...], where: str) -> Named:
    check_url(url, where)
    name = name or urlsplit(url).netloc.rpartition("@")[2]
    if not name.isprintable() or " " in name or len(name.encode()) > _NAME_BYTES_MAX:
        raise ListError(
            f"{where}: the name {name!r} must have at most {_NAME_BYTES_MAX} bytes, and no space"
        )
    return Named(name, url.rstrip("/"), models)


def _apart(found: list[Named], where: str) -> tuple[Named, ...]:
    if len(found) > UPSTREAMS_MAX:
        raise ListError(f"{where}: {len(found)} upstreams; at most {UPSTREAMS_MAX} are possible")
    for what in ("name", "url"):
        told = [getattr(each, what) for each in found]
        twice = sorted({each for each in told if told.count(each) > 1})
        if twice:
            raise ListError(f"{where}: two upstreams have the {what} {twice[0]}")
    return tuple(found)


def _read(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ListError(f"{file}: cannot be read: {error.strerror}") from None
