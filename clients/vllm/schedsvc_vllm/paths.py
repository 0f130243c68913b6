"""Says which requests may reach the engine without being admitted.

A server behind the gate may take several spellings for one path: with two slashes, a slash at the
end, dots, or percent signs. So the gate brings each path that can cost the engine anything to one
canonical form, decides by that, and hands only that on. A path that is not known is refused: a list
of what tenants may call cannot miss what another server adds.

GET, HEAD and OPTIONS pass as they were written, because a page may depend on its spelling; so an
operator's path, and a response's id, is looked for in each form that a server could read in it.
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from schedsvc_vllm.asgi import Scope, path_of
from schedsvc_vllm.operator_paths import is_operator_path
from schedsvc_vllm.routes import GATED_PATHS, OPENABLE_PATHS

# Most servers only read these; a preflight has to pass for a browser to ask at all.
READ_METHODS = frozenset({"GET", "HEAD"})
SAFE_METHODS = READ_METHODS | {"OPTIONS"}
#: Endpoints of vLLM 0.32 that tenants may call without a place in the queue: none runs the model,
#: and none acts on the engine.
TENANT_PATHS = frozenset(
    {
        "/detokenize",
        "/ping",
        "/tokenize",
        "/v1/chat/completions/derender",
        "/v1/chat/completions/render",
        "/v1/completions/derender",
        "/v1/completions/render",
        "/v1/messages/count_tokens",
        "/v1/messages/render",
        "/v1/responses/render",
    }
)
# All of them are canonical: most requests come with one of these spellings.
_CANONICAL = {path.encode(): path for path in TENANT_PATHS | GATED_PATHS}
_CANCEL = re.compile(r"/v1/responses/[\w-]+/cancel")
_DELETE = re.compile(r"/v1/responses/[\w-]+")
# Below any prefix, in any case, as a server could read it.
_RESPONSE_ID = re.compile(r"(?<=/responses/)[^/]+", re.ASCII | re.IGNORECASE)
# After all decoding: letters, digits and the other characters of paths.
_PLAIN = re.compile(rb"[\w.~!$&'()*+,:=@/-]*", re.ASCII)
_DECODINGS_MAX = 5


class Place(NamedTuple):
    """Says where a request goes: its canonical path, and whether it is admitted or refused.

    `operators`: only with an operator's key. `as_written`: the server gets the path as it came.
    `response_ids`: those in the path, which belong to tenants.
    """

    path: str
    gated: bool = False
    known: bool = True
    operators: bool = False
    as_written: bool = False
    response_ids: tuple[str, ...] = ()


_ALWAYS_GATED = {path.encode(): Place(path, gated=True) for path in GATED_PATHS - OPENABLE_PATHS}


def canonical(path: bytes) -> str | None:
    """Return the one spelling of a path; None if it has none. O(path).

    Percent signs are decoded until none is left, as several servers in a row would; slashes are
    merged, dots resolved, and a slash at the end is dropped.
    """
    if (known := _CANONICAL.get(path)) is not None:
        return known
    path = _decodings(path)[-1]
    if not path.startswith(b"/") or not _PLAIN.fullmatch(path):
        return None
    parts: list[bytes] = []
    for part in path.split(b"/"):
        if part == b"..":
            del parts[-1:]
        elif part not in (b"", b"."):
            parts.append(part)
    return "/" + b"/".join(parts).decode()


def passes_as_written(scope: Scope) -> bool:
    """Return whether a GET, HEAD or OPTIONS may reach the server as it is.

    It may not if its path is gated or names a response (a preflight may), is an operator's, or has
    no canonical form.
    """
    path = canonical(told := written_path(scope))
    if path is None or _is_operators(told):
        return False
    return scope["method"] == "OPTIONS" or not (path in GATED_PATHS or _names_a_response(told))


def place_of(scope: Scope, open_paths: frozenset[str]) -> Place | None:
    """Decide where a request goes; None: its path has no canonical form.

    `open_paths` are those that the operator lets through beside the known ones.
    """
    told, method = written_path(scope), scope["method"]
    if (gated := _ALWAYS_GATED.get(told)) is not None:
        return gated
    path = canonical(told)
    if path is None:
        return None
    if _is_operators(told):
        return Place(path, operators=True)
    if path in GATED_PATHS and not (path in OPENABLE_PATHS and path in open_paths):
        return Place(path, gated=True)
    if path in TENANT_PATHS:
        return Place(path)
    reads = method in SAFE_METHODS
    is_known = reads or path in open_paths or _CANCEL.fullmatch(path) is not None
    is_known = is_known or (method == "DELETE" and _DELETE.fullmatch(path) is not None)
    ids = tuple(_RESPONSE_ID.findall(path))
    return Place(path, known=is_known, as_written=reads and not ids, response_ids=ids)


def is_operators(scope: Scope) -> bool:
    """Return whether a path is an operator's, however it is written."""
    return _is_operators(written_path(scope))


def _is_operators(path: bytes) -> bool:
    """Look at each form, because servers differ in how often they decode."""
    return any(map(is_operator_path, _decodings(path)))


def _names_a_response(path: bytes) -> bool:
    return any(b"/responses/" in form.lower() for form in _decodings(path))


def _decodings(path: bytes) -> list[bytes]:
    """Return a path as it was written, and after each decoding of its percent signs."""
    forms = [path]
    while len(forms) <= _DECODINGS_MAX and (decoded := unquote_to_bytes(forms[-1])) != forms[-1]:
        forms.append(decoded)
    return forms


def written_path(scope: Scope) -> bytes:
    """Return the path as the caller wrote it, if the server keeps it; else partly decoded."""
    raw = scope.get("raw_path") or b""
    if raw and not scope.get("root_path"):
        return bytes(raw).partition(b"?")[0]
    return path_of(scope).encode("utf-8", "replace")


def with_path(scope: Scope, path: str) -> Scope:
    """Return the scope with its canonical path, where it was written otherwise."""
    told = path_of(scope)
    raw = scope.get("raw_path")
    if told == path and raw in (None, b"", str(scope["path"]).encode("utf-8", "replace")):
        return scope
    whole = str(scope["path"])[: len(str(scope["path"])) - len(told)] + path
    return {**scope, "path": whole, "raw_path": whole.encode()}
