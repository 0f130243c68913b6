"""Chooses the form and coding of an answer that a client accepts (RFC 9110, section 12.5).

A header from outside is never an error here: an element that breaks the grammar counts for nothing.
"""

import re
from collections.abc import Iterator

__all__ = ["accepts_gzip", "prefers_openmetrics"]

_QUALITY = re.compile(r"[01](\.[0-9]{0,3})?")
_TEXT, _OPENMETRICS = "text/plain", "application/openmetrics-text"
_OPENMETRICS_VERSIONS = ("", "0.0.1", "1.0.0")


def accepts_gzip(accept_encoding: str) -> bool:
    """Return whether the client accepts gzip: by name or by `*`, and not with `q=0`."""
    found = {name: quality for name, _, quality in _elements(accept_encoding)}
    return max(found.get("gzip", found.get("*", 0.0)), found.get("x-gzip", 0.0)) > 0


def prefers_openmetrics(accept: str) -> bool:
    """Return whether the client asks for OpenMetrics 1.0 with at least the weight of plain text."""
    weights = {_TEXT: 0.0, _OPENMETRICS: 0.0}
    for name, version, quality in _elements(accept):
        is_known = name == _TEXT or version in _OPENMETRICS_VERSIONS
        if name in weights and is_known:
            weights[name] = max(weights[name], quality)
    return 0 < weights[_OPENMETRICS] >= weights[_TEXT]


def _elements(header: str) -> Iterator[tuple[str, str, float]]:
    """Yield name, version, and weight of each element of a list."""
    for element in header.split(","):
        name, *parameters = (part.strip().lower() for part in element.split(";"))
        version, quality = "", "1"
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key == "q":
                quality = value
            elif key == "version":
                version = value.strip('"')
        if _QUALITY.fullmatch(quality) and float(quality) <= 1:
            yield name, version, float(quality)
