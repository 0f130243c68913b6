"""Holds rules on who may call: each principal has a proof, and no two have the same."""

from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any

from schedsvc.config.file_rules import file_to_write
from schedsvc.config.files import path_in
from schedsvc.config.rule_helpers import Finding, Once, items, mapping
from schedsvc.config.tokens import token_digest
from schedsvc.config.yaml_positions import Path

__all__ = ["has_tokens", "principal_advice", "principal_findings", "proof_kind"]

_TOKENS = ("sha256", "env", "token_file")
_PROOFS = (*_TOKENS, "certificate", "listener")


def _principals(data: Mapping[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    return items(mapping(data.get("auth")).get("principals"))


def has_tokens(data: Mapping[str, Any]) -> bool:
    """Return whether a principal proves who it is by a token. O(principals)."""
    return any(entry.get(key) for _, entry in _principals(data) for key in _TOKENS)


def proof_kind(listener: Mapping[str, Any], tokens: bool) -> object:
    """Return how callers of a listener prove who they are."""
    certified = "client_ca" in mapping(listener.get("tls"))
    given = listener.get("auth")
    return given or ("certificate" if certified else "token" if tokens else "none")


def principal_findings(
    data: Mapping[str, Any], folder: FilePath, environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield what is wrong with the principals. O(principals), and reads their token files."""
    names, digests = Once("this name"), Once("this token")
    certificates, listeners = Once("this certificate"), Once("this listener")
    kinds = _kinds(data)
    for i, entry in _principals(data):
        path: Path = ("auth", "principals", i)
        if isinstance(entry.get("name"), str):
            yield from names.see(entry["name"], (*path, "name"))
        if not any(entry.get(key) for key in _PROOFS):
            yield path, f"has no proof of who calls; give one of {', '.join(_PROOFS)}"
        made = entry.get("make_token") is True
        if made and not isinstance(entry.get("token_file"), str):
            yield (*path, "make_token"), "needs token_file beside it, the file to write a token to"
        for key in _TOKENS:
            if made and key == "token_file" and isinstance(entry.get(key), str):
                file = path_in(folder, entry[key])
                if not file.exists():
                    yield from file_to_write(file, (*path, key))
                    continue
            if isinstance(entry.get(key), str):
                yield from _token(entry[key], key, (*path, key), folder, environ, digests)
        certificate, listener = entry.get("certificate"), entry.get("listener")
        if isinstance(certificate, str):
            yield from certificates.see(certificate, (*path, "certificate"))
            if "certificate" not in kinds.values():
                message = "no listener asks for client certificates; give one tls.client_ca"
                yield (*path, "certificate"), message
        if isinstance(listener, str):
            yield from listeners.see(listener, (*path, "listener"))
            if kinds.get(listener) != "none":
                message = "is no `tcp` or `unix` of a listener without authentication"
                yield (*path, "listener"), message
            if entry.get("operator") is True:
                message = "is not for a listener's callers; write `operate: true` to the listener"
                yield (*path, "operator"), message
            if entry.get("member") is True:
                message = "is not for a listener's callers; give members a token or a certificate"
                yield (*path, "member"), message


def _open_ports(data: Mapping[str, Any]) -> Iterator[Finding]:
    """Find a TCP port for all beside listeners that bound who calls."""
    tokens = has_tokens(data)
    named = [entry.get("listener") for _, entry in _principals(data)]
    listeners = items(data.get("listeners"))
    if not any("unix" in entry or proof_kind(entry, tokens) != "none" for _, entry in listeners):
        return
    for i, entry in listeners:
        tcp = entry.get("tcp")
        if isinstance(tcp, str) and tcp not in named and proof_kind(entry, tokens) == "none":
            message = (
                f"{tcp} has no authentication, beside a listener that has one or a file mode: by"
                " default its callers ask for every tenant and offer no pool, so a pool that"
                " registers itself takes only requests that name it. Ask for tokens, or say in"
                " auth.principals what `listener:` may do"
            )
            yield ("listeners", i), message


def _kinds(data: Mapping[str, Any]) -> dict[str, object]:
    """Return how callers prove who they are, by the address of each listener."""
    tokens = has_tokens(data)
    return {
        entry[key]: proof_kind(entry, tokens)
        for _, entry in items(data.get("listeners"))
        for key in ("tcp", "unix")
        if isinstance(entry.get(key), str)
    }


def _token(
    value: str, key: str, path: Path, folder: FilePath, environ: Mapping[str, str], digests: Once
) -> Iterator[Finding]:
    source: Any = path_in(folder, value) if key == "token_file" else value
    try:
        digest = token_digest(**{key: source}, environ=environ)
    except ValueError as error:
        # A hash that is no hash is named by the models, without its text.
        if key != "sha256":
            yield path, str(error)
    else:
        yield from digests.see(digest, path)


def principal_advice(data: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield what lets one principal harm another. O(principals + listeners)."""
    yield from _open_ports(data)
    callers = [entry for _, entry in _principals(data) if not entry.get("operator")]
    if len(callers) > 1 and not any("share_of_places" in entry for entry in callers):
        message = (
            f"{len(callers)} callers, and none has share_of_places: one of them can take every"
            " place in the queue; give each a share below 1"
        )
        yield ("auth", "principals"), message
    yield from _strangers(data)
    shims = [entry for _, entry in _principals(data) if entry.get("pools")]
    free = [str(entry.get("name")) for entry in shims if entry.get("tenants") is None]
    if len(free) > 1:
        message = (
            f"{len(free)} callers ({', '.join([*free[:3], *['...'] * (len(free) > 3)])}) have pools"
            " and no tenants, so each may spend the share and the quotas of every tenant, and they"
            " divide the places in a tenant's queue; give each the tenants that it serves, or"
            ' tenants: ["*"] if each serves all'
        )
        yield ("auth", "principals"), message


def _strangers(data: Mapping[str, Any]) -> Iterator[Finding]:
    """Find callers who ask and may not offer every pool, where others offer pools."""
    tokens, entries = has_tokens(data), [entry for _, entry in _principals(data)]
    named = [entry.get("listener") for entry in entries]
    listeners = [entry for _, entry in items(data.get("listeners")) if "unix" in entry]
    some_open = any(
        proof_kind(entry, tokens) == "none" and entry["unix"] not in named for entry in listeners
    )
    bound = [
        str(entry.get("name"))
        for entry in entries
        if entry.get("tenants", entry.get("pools"))
        and "*" not in (entry.get("pools") or ())
        and (
            some_open
            or any(
                set(other.get("pools") or ()) - set(entry.get("pools") or ()) for other in entries
            )
        )
    ]
    if bound:
        message = (
            f"{', '.join([*bound[:3], *['...'] * (len(bound) > 3)])} may ask, and may not offer"
            " every pool: a pool that registers itself and that one of them may not offer takes"
            " only requests that name it; list it in `pools` to let requests without a pool run"
            " there"
        )
        yield ("auth", "principals"), message
