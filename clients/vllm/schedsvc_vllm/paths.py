"""Which requests may reach the engine without being admitted.

A server behind the gate may take several spellings for one path: with two slashes, a slash at the
end, dots, or percent signs. So the gate brings each path that can cost the engine anything to one
canonical form, decides by that, and hands only that on. A path that is not known is refused: a list
of what is free cannot miss what another server adds.
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from schedsvc_vllm.asgi import Scope, path_of
from schedsvc_vllm.routes import GATED_PATHS, OPENABLE_PATHS

# They only look, in every server; a preflight has to pass for a browser to ask at all.
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
# Of vLLM 0.32, and none of them runs the model: text to tokens and back, an operator's own.
FREE_PATHS = frozenset(
    {
        "/abort_requests",
        "/detokenize",
        "/fault_tolerance/apply",
        "/is_scaling_elastic_ep",
        "/pause",
        "/ping",
        "/release_kv_cache_memory",
        "/reset_encoder_cache",
        "/reset_mm_cache",
        "/reset_prefix_cache",
        "/resume",
        "/scale_elastic_ep",
        "/sleep",
        "/start_profile",
        "/stop_profile",
        "/tokenize",
        "/v1/chat/completions/derender",
        "/v1/chat/completions/render",
        "/v1/completions/derender",
        "/v1/completions/render",
        "/v1/load_lora_adapter",
        "/v1/messages/count_tokens",
        "/v1/messages/render",
        "/v1/responses/render",
        "/v1/unload_lora_adapter",
        "/wake_up",
    }
)
# All of them are canonical: most requests come with one of these spellings.
_CANONICAL = {path.encode(): path for path in FREE_PATHS | GATED_PATHS}
_FREE = re.compile(r"/v1/responses/[\w-]+/cancel")
# After all decoding: letters, digits and what names of paths are made of.
_PLAIN = re.compile(rb"[\w.~!$&'()*+,:=@/-]*", re.ASCII)
_DECODINGS_MAX = 5


class Place(NamedTuple):
    """Where a request goes: its canonical path, whether it has to be admitted, or is refused."""

    path: str
    gated: bool = False
    known: bool = True


_ALWAYS_GATED = {path.encode(): Place(path, gated=True) for path in GATED_PATHS - OPENABLE_PATHS}


def canonical(path: bytes) -> str | None:
    """Return the one spelling of a path; None where it has none. O(path).

    Percent signs are decoded until none is left, as several servers in a row would; slashes are
    merged, dots resolved, and a slash at the end is dropped.
    """
    if (known := _CANONICAL.get(path)) is not None:
        return known
    for _ in range(_DECODINGS_MAX):
        decoded = unquote_to_bytes(path)
        if decoded == path:
            break
        path = decoded
    if not path.startswith(b"/") or not _PLAIN.fullmatch(path):
        return None
    parts: list[bytes] = []
    for part in path.split(b"/"):
        if part == b"..":
            del parts[-1:]
        elif part not in (b"", b"."):
            parts.append(part)
    return "/" + b"/".join(parts).decode()


def asks_in_vain(scope: Scope) -> bool:
    """Whether a request only looks at what generates: no server needs that but for a preflight."""
    return scope["method"] != "OPTIONS" and canonical(_told(scope)) in GATED_PATHS


def place_of(scope: Scope, open_paths: frozenset[str]) -> Place | None:
    """Decide where a request goes; None: its path has no canonical form.

    `open_paths` are those that the operator lets through beside the known ones.
    """
    told = _told(scope)
    if (gated := _ALWAYS_GATED.get(told)) is not None:
        return gated
    path = canonical(told)
    if path is None:
        return None
    if path in GATED_PATHS and not (path in OPENABLE_PATHS and path in open_paths):
        return Place(path, gated=True)
    is_known = path in FREE_PATHS or path in open_paths or _FREE.fullmatch(path) is not None
    return Place(path, known=is_known)


def _told(scope: Scope) -> bytes:
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
