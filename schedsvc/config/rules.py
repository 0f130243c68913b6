"""Checks rules that look at more than one field, or beyond the file.

They read the plain data, so that they are heard also where some field elsewhere is wrong; each
skips quietly what has another type than it needs, because the models name that.
"""

import re
import ssl
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path as FilePath
from typing import Any

from schedsvc.config.auth_rules import has_tokens, principal_advice, principal_findings, proof_kind
from schedsvc.config.class_rules import class_advice, class_findings
from schedsvc.config.cluster import cluster_advice, cluster_findings
from schedsvc.config.file_rules import file_advice, file_findings, socket_findings
from schedsvc.config.files import path_in, unreadable
from schedsvc.config.neighbours import neighbour_advice
from schedsvc.config.pool_rules import pool_findings
from schedsvc.config.quota_rules import quota_findings
from schedsvc.config.rule_helpers import (
    Finding,
    Once,
    is_whole,
    items,
    mapping,
    name_findings,
    one_of,
)
from schedsvc.config.settings import Scheduler
from schedsvc.config.tenant_rules import tenant_rule_advice, tenant_rule_findings
from schedsvc.config.yaml_positions import Path

__all__ = ["RESERVED_TENANTS", "UNKNOWN_TENANT", "advice", "broken_rules", "tenant_findings"]

#: The flow that unknown tenants share, and the series that stands for tenants beyond the cap.
UNKNOWN_TENANT = "unknown"
RESERVED_TENANTS = (UNKNOWN_TENANT, "other")

_OCTAL = re.compile(r"0?[0-7]{3}")
_LOOPBACK = ("127.", "localhost:", "[::1]:")


def broken_rules(data: Any, file: FilePath, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield path and message of each broken rule of a file's data. O(file)."""
    if not isinstance(data, dict):
        return
    folder = file.parent
    yield from _listeners(data, folder)
    yield from principal_findings(data, folder, environ)
    yield from tenant_findings(data)
    yield from _pools(data)
    yield from tenant_rule_findings(data)
    yield from class_findings(data)
    yield from quota_findings(data)
    yield from pool_findings(data)
    yield from file_findings(data, file)
    yield from cluster_findings(data, folder)
    scheduler = mapping(data.get("scheduler"))
    for limit in ("queue_max", "queue_tokens_max"):
        yield from _queue_limits(scheduler, limit)


def _queue_limits(scheduler: dict[str, Any], limit: str) -> Iterator[Finding]:
    """Find a limit of one tenant's queue that the limit of all queues makes pointless."""
    of_flow = f"flow_{limit}"
    fields = Scheduler.model_fields
    flow_max = scheduler.get(of_flow, fields[of_flow].default)
    queue_max = scheduler.get(limit, fields[limit].default)
    if not (is_whole(flow_max) and is_whole(queue_max) and flow_max > queue_max > 0):
        return
    if of_flow in scheduler:
        message = (
            f"is {flow_max}, larger than {limit} ({queue_max}), so it would never be reached;"
            f" lower it, or raise {limit}"
        )
        yield ("scheduler", of_flow), message
    else:
        message = (
            f"is {queue_max}, less than the default of {of_flow} ({flow_max}), so one tenant could"
            f" fill the whole queue; set {of_flow} too"
        )
        yield ("scheduler", limit), message


def advice(data: Any, folder: FilePath) -> Iterator[Finding]:
    """Yield path and message of what is allowed and yet worth a second look. O(file)."""
    if not isinstance(data, dict):
        return
    yield from principal_advice(data)
    yield from class_advice(data)
    tokens = has_tokens(data)
    for i, entry in items(data.get("listeners")):
        tcp = entry.get("tcp")
        yield from _open_socket(entry, ("listeners", i), tokens)
        if not isinstance(tcp, str) or tcp.startswith(_LOOPBACK):
            continue
        if proof_kind(entry, tokens) == "none":
            yield (
                ("listeners", i),
                f"{tcp} has no authentication: anyone who can reach it may call",
            )
        elif "tls" not in entry:
            yield ("listeners", i), f"{tcp} has no TLS: tokens travel in clear"
    edge = mapping(data.get("edge"))
    tcp = edge.get("tcp")
    if isinstance(tcp, str) and not tcp.startswith(_LOOPBACK) and "tls" not in edge:
        yield ("edge",), f"{tcp} has no TLS: tokens travel in clear"
    listen = mapping(data.get("metrics")).get("listen")
    if isinstance(listen, str) and ":" in listen and not listen.startswith(_LOOPBACK):
        what = "shows the tenants and their usage to anyone who can reach it"
        yield ("metrics", "listen"), f"{listen} {what}"
        if not mapping(data.get("metrics")).get("hosts"):
            what = "answers requests by an address alone, by default; list names in metrics.hosts"
            yield ("metrics", "listen"), f"{listen} {what}, if Prometheus or a browser uses one"
    if data.get("unknown_tenants") == "refuse" and not data.get("tenants"):
        yield ("unknown_tenants",), "refuses every request, because no tenants are listed"
    if data.get("unknown_tenants") == "refuse" and data.get("unknown_tenants_limits"):
        where = ("unknown_tenants_limits",)
        yield where, "binds only in dry_run, because unknown_tenants says refuse"
    yield from tenant_rule_advice(data)
    yield from file_advice(data, folder)
    yield from cluster_advice(data)
    yield from neighbour_advice(data, folder)


def _open_socket(entry: dict[str, Any], path: Path, tokens: bool) -> Iterator[Finding]:
    """Find a Unix socket without authentication that every user of the host can open."""
    unix, mode = entry.get("unix"), str(entry.get("mode"))
    if not isinstance(unix, str) or proof_kind(entry, tokens) != "none":
        return
    if _OCTAL.fullmatch(mode) and int(mode, 8) & 0o006:
        message = (
            f"{unix} has mode {mode} and no authentication: every user of the host may call; use"
            " 0660, or ask for tokens"
        )
        yield (*path, "mode"), message


def _listeners(data: dict[str, Any], folder: FilePath) -> Iterator[Finding]:
    tokens = has_tokens(data)
    addresses = Once("this address")
    for i, entry in items(data.get("listeners")):
        path: Path = ("listeners", i)
        yield from one_of(entry, ("tcp", "unix"), path)
        tcp, unix, tls = entry.get("tcp"), entry.get("unix"), mapping(entry.get("tls"))
        if isinstance(tcp, str):
            yield from _port(tcp, (*path, "tcp"))
            if not tcp.endswith(":0"):
                yield from addresses.see(tcp, (*path, "tcp"))
        if isinstance(unix, str):
            yield from socket_findings(unix, (*path, "unix"), folder)
            if "tls" in entry:
                yield (*path, "tls"), "is for tcp listeners; a Unix socket never leaves the host"
            yield from addresses.see(path_in(folder, unix), (*path, "unix"))
        elif "mode" in entry:
            yield (*path, "mode"), "is for unix listeners; remove it"
        if entry.get("auth") == "token" and not tokens:
            yield (*path, "auth"), "asks for tokens, and no entry of auth.principals has one"
        if entry.get("operate") is True and proof_kind(entry, tokens) != "none":
            message = (
                "is for listeners without authentication; write `operator: true` to the caller's"
                " entry of auth.principals"
            )
            yield (*path, "operate"), message
        if entry.get("auth") == "certificate" and not tls.get("client_ca"):
            yield (*path, "auth"), "asks for client certificates; give tls.client_ca"
        yield from _tls(tls, (*path, "tls"), folder)
    if isinstance(data.get("edge"), dict):
        yield from _edge(data, folder)
    for where in (("edge", "tcp"), ("metrics", "listen")):
        address = mapping(data.get(where[0])).get(where[1])
        if isinstance(address, str):
            yield from _port(address, where)
            if not address.endswith(":0"):
                yield from addresses.see(address, where)


def _edge(data: dict[str, Any], folder: FilePath) -> Iterator[Finding]:
    """Yield what keeps an edge from passing calls on."""
    tokens, tls = has_tokens(data), mapping(mapping(data["edge"]).get("tls"))
    sockets = [
        entry
        for _, entry in items(data.get("listeners"))
        if isinstance(entry.get("unix"), str) and proof_kind(entry, tokens) == "token"
    ]
    if not tokens:
        yield ("edge",), "lets in callers with a token, and no entry of auth.principals has one"
    elif not sockets:
        message = "passes calls on to a Unix socket that asks for tokens; add to listeners one with"
        yield ("edge",), f"{message} `unix: PATH` and `auth: token`"
    if "client_ca" in tls:
        yield ("edge", "tls", "client_ca"), "is for listeners: an edge goes by tokens; remove it"
    else:
        yield from _tls(tls, ("edge", "tls"), folder)


def _port(address: str, path: Path) -> Iterator[Finding]:
    port = address.rpartition(":")[2]
    if port.isdecimal() and int(port) > 65_535:
        yield path, f"port {port} does not exist; the largest is 65535"


def _tls(tls: dict[str, Any], path: Path, folder: FilePath) -> Iterator[Finding]:
    cert, key, client_ca = (tls.get(name) for name in ("cert", "key", "client_ca"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    readable = True
    for name in ("cert", "key", "client_ca"):
        if isinstance(tls.get(name), str):
            problem = unreadable(path_in(folder, tls[name]))
            if problem:
                yield (*path, name), problem
                readable = False
    if not readable:
        return
    if isinstance(client_ca, str):
        load = partial(context.load_verify_locations, path_in(folder, client_ca))
        yield from _ssl(load, (*path, "client_ca"), "holds no certificate in PEM")
    if isinstance(cert, str) and isinstance(key, str):
        load = partial(context.load_cert_chain, path_in(folder, cert), path_in(folder, key), "")
        yield from _ssl(load, (*path, "cert"), "and tls.key are no matching pair in PEM")


def _ssl(load: Callable[[], None], path: Path, message: str) -> Iterator[Finding]:
    try:
        with warnings.catch_warnings(action="ignore"):
            load()
    except (ssl.SSLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None)
        yield path, f"{message} ({reason.lower().replace('_', ' ')})" if reason else message


def tenant_findings(data: dict[str, Any]) -> Iterator[Finding]:
    """Yield what is wrong with names and API keys of tenants. O(tenants)."""
    names, keys = Once("this tenant"), Once("this API key")
    for i, entry in items(data.get("tenants")):
        path: Path = ("tenants", i)
        name = entry.get("name")
        if isinstance(name, str):
            yield from names.see(name, (*path, "name"))
            yield from name_findings(name, (*path, "name"), 256)
            if name in RESERVED_TENANTS:
                yield (*path, "name"), f"{name!r} is reserved; choose another name"
        hashes = entry.get("api_keys_sha256")
        for k, key in enumerate(hashes if isinstance(hashes, list) else []):
            if isinstance(key, str):
                yield from keys.see(key.lower(), (*path, "api_keys_sha256", k))


def _pools(data: dict[str, Any]) -> Iterator[Finding]:
    names = Once("this pool")
    for i, entry in items(data.get("pools")):
        path: Path = ("pools", i)
        name, capacity = entry.get("name"), entry.get("capacity_tokens")
        block = entry.get("block_size_tokens", 16)
        if isinstance(name, str):
            yield from names.see(name, (*path, "name"))
            yield from name_findings(name, (*path, "name"), 128)
        if isinstance(capacity, int) and isinstance(block, int) and 0 < capacity < block:
            yield (*path, "capacity_tokens"), f"is smaller than one block ({block} tokens)"
        if capacity is None:
            for key in sorted(entry.keys() - {"name", "capacity_tokens"}):
                yield (*path, key), "needs capacity_tokens beside it; a shim states its own figures"
