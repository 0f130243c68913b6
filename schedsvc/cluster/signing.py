"""Signs rows of the store that carry rights with a secret that only members know.

Without it, a program that can write to the store could create keys, or restore an old row.

    sealed  version | space | HMAC-SHA256 in hexadecimal | space | content

The HMAC covers the place of the row, so that no row can stand for another one.
"""

import hashlib
import hmac
import re

__all__ = ["ForgedRowError", "open_row", "seal_row"]

_SEALED = re.compile(rb"([1-9]\d{0,17}) ([0-9a-f]{64}) (.*)", re.DOTALL)


class ForgedRowError(ValueError):
    """A row was not sealed with this secret, or is older than one that was seen."""


def seal_row(secret: bytes, place: bytes, version: int, content: bytes) -> bytes:
    """Return a row for a place of the store; versions of a place begin at 1 and grow. O(bytes)."""
    return b"%d %s %s" % (version, _proof(secret, place, version, content), content)


def open_row(secret: bytes, place: bytes, row: bytes, version_min: int = 1) -> tuple[int, bytes]:
    """Return version and content of a row. Raises ForgedRowError. O(bytes).

    `version_min`: the highest version of this place that was seen.
    """
    found = _SEALED.fullmatch(row)
    if found is None:
        raise ForgedRowError(f"row {place!r} has no seal")
    version, content = int(found[1]), found[3]
    if not hmac.compare_digest(found[2], _proof(secret, place, version, content)):
        raise ForgedRowError(f"row {place!r} has a wrong seal")
    if version < version_min:
        raise ForgedRowError(f"row {place!r} has version {version}, older than {version_min}")
    return version, content


def _proof(secret: bytes, place: bytes, version: int, content: bytes) -> bytes:
    text = b"%d %d %s %s" % (version, len(place), place, content)
    return hmac.new(secret, text, hashlib.sha256).hexdigest().encode()
