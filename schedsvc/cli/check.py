"""Checks a configuration file: `schedsvc check`."""

import json
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from schedsvc.cli.starting import usable_config
from schedsvc.config import Config, Problem, Reading, path_text, problem_text, read
from schedsvc.config.models import Listener, Principal
from schedsvc.config.network import is_wildcard
from schedsvc.config.settings import Prices
from schedsvc.text.tables import table_console

_EPILOG = """\b
Example:
  schedsvc check schedsvc.yaml
  schedsvc check schedsvc.yaml --json

Without FILE it checks the one that SCHEDSVC_CONFIG names, else /etc/schedsvc/schedsvc.yaml. The
exit status is 1 where the file has an error. Environment variables and files that it names are
looked up as `schedsvc serve` would.
"""
_TENANTS_SHOWN = 10


@click.command(epilog=_EPILOG)
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--config", type=click.Path(path_type=Path), metavar="FILE", help="The same as FILE.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def check(file: Path | None, config: Path | None, as_json: bool) -> None:
    """Name every error of a configuration FILE with its place, or sum the file up."""
    if file is not None and config is not None:
        raise click.UsageError("give one configuration file, as FILE or as --config FILE")
    _check(usable_config(file or config), as_json)


def _check(file: Path, as_json: bool) -> None:
    reading = read(file)
    if as_json:
        click.echo(json.dumps(_as_json(file, reading), indent=2))
    else:
        for problem in reading.problems:
            click.echo(problem_text(file, problem), err=True)
        for problem in reading.warnings:
            click.echo(f"warning: {problem_text(file, problem)}", err=True)
        if reading.config is None:
            count = len(reading.problems)
            click.echo(f"{file}: {count} error{'s' if count != 1 else ''}", err=True)
        else:
            _show(file, reading.config)
    if reading.config is None:
        raise SystemExit(1)


def _as_json(file: Path, reading: Reading) -> dict[str, Any]:
    def plain(problem: Problem) -> dict[str, Any]:
        return {
            "file": str(problem.file or file),
            "line": problem.place.line,
            "column": problem.place.column,
            "path": path_text(problem.path),
            "message": problem.message,
        }

    config = reading.config
    return {
        "valid": config is not None,
        "errors": [plain(problem) for problem in reading.problems],
        "warnings": [plain(problem) for problem in reading.warnings],
        "summary": None if config is None else dict(_summary(config)),
    }


def _show(file: Path, config: Config) -> None:
    # Names may hold brackets: nothing here is markup.
    console = table_console()
    console.print(f"{file} is valid", style="bold green", soft_wrap=True, highlight=False)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for key, text in _summary(config):
        table.add_row(key, text)
    console.print(table, highlight=False)


def _summary(config: Config) -> list[tuple[str, str]]:
    """Return what a reader wants to see at a glance, as label and text."""
    settings, prices = config.scheduler, config.scheduler.prices
    unknown = "refused"
    if config.unknown_tenants != "refuse":
        bounds = "with limits of its own" if config.unknown_limits.is_limited else "without limits"
        weight = config.unknown_weight_milli / 1_000
        unknown = f"share one flow of weight {weight:g}, {bounds}"
    if config.unknown_tenants == "own":
        rules = len(config.tenant_rules)
        by = f"{rules:,} rule{'s' if rules != 1 else ''}" if rules else "weight 1, without limits"
        unknown = f"with a proved name a flow of their own ({by}), others {unknown}"
    metrics = "none"
    if config.metrics is not None:
        metrics = f"http://{config.metrics.listen}/metrics{_families(config.metrics.listen)}"
    return [
        ("listeners", "\n".join(_listener(config, entry) for entry in config.listeners)),
        ("edge", _edge(config)),
        (
            "connections",
            f"{config.limits.connections_max:,} on each listener; one without a token or a"
            " certificate is closed after 10 s",
        ),
        ("principals", "\n".join(map(_principal, config.callers())) or "none listed"),
        (
            "policy",
            f"{settings.policy}; an output token costs"
            f" {prices.output_micro / max(prices.input_micro, 1):g} input tokens,"
            f" a cached one {prices.cached_ppm / 1e6:g}{_cache(prices)}",
        ),
        (
            "queue",
            f"by {settings.flow_order}, at most {settings.queue_ttl_ms / 1_000:g} s,"
            f" {settings.flow_queue_max:,} requests a tenant, {settings.queue_max:,} in all",
        ),
        (
            "lease",
            f"renewed within {settings.lease_ttl_ms / 1_000:g} s,"
            f" released {settings.lease_grace_ms / 1_000:g} s later",
        ),
        ("mode", _mode(config)),
        ("tenants", _tenants(config)),
        ("quotas", _quotas(config)),
        ("unknown tenants", unknown),
        ("pools", ", ".join(pool.name for pool in config.pools) or "as shims register them"),
        ("metrics", metrics),
        ("state", _state(config)),
        *_cluster(config),
        ("log", f"{config.log.format}, {config.log.level}"),
    ]


def _principal(principal: Principal) -> str:
    """Return what a caller may do, in one line."""
    share = "" if principal.share_of_places == 1 else f", {principal.share_of_places:.0%} of places"
    name = principal.certificate or ""
    by = f", by the DNS SAN {name} (without SANs the common name)" if name else ""
    by = by if "://" not in name else f", by the URI SAN {name}"
    return (
        f"{principal.name}{' (operator)' if principal.operator else ''}: offers"
        f" {_some(principal.pools)}, vouches for {_some(principal.may_vouch_for)}{share}{by}"
    )


def _some(patterns: list[str]) -> str:
    more = f" and {len(patterns) - 3} more" if len(patterns) > 3 else ""
    return (", ".join(patterns[:3]) or "none") + more


def _state(config: Config) -> str:
    if config.state is None:
        return "lost with the process"
    return f"{config.resolve(config.state.file)}, every {config.state.every_ms / 1_000:g} s"


def _cluster(config: Config) -> list[tuple[str, str]]:
    if config.cluster is None:
        return []
    name, member = config.cluster.name, config.cluster.member_name
    spends = {"share": "its part of each quota", "hold": "the chunks of quotas that it holds"}
    text = f"{name}, as member {member}; store {', '.join(config.cluster.store.urls)}"
    return [("cluster", f"{text}; without it a member spends {spends[config.cluster.outage]}")]


def _mode(config: Config) -> str:
    others = [tenant.name for tenant in config.tenants if tenant.mode not in (None, config.mode)]
    but = f"; not so for {', '.join(others[:_TENANTS_SHOWN])}" if others else ""
    return f"{config.mode}{but}{' and others' if len(others) > _TENANTS_SHOWN else ''}"


def _quotas(config: Config) -> str:
    own = sum(tenant.quota is not None for tenant in config.tenants)
    parts = [
        f"{count:,} {name}{'s' if count != 1 else ''}"
        for count, name in (
            (own, "tenant"),
            (len(config.groups), "group"),
            (len(config.models), "model"),
        )
        if count
    ]
    return f"of {', '.join(parts)}" if parts else "none"


def _listener(config: Config, listener: Listener) -> str:
    words = {"none": "no authentication", "token": "tokens", "certificate": "certificates"}
    proof = words[config.auth_kind(listener)]
    if listener.unix is not None:
        return f"unix:{config.resolve(listener.unix)} (mode {listener.mode}, {proof})"
    tls = "TLS" if listener.tls is not None else "no TLS"
    return f"{listener.tcp} ({tls}, {proof}){_families(listener.tcp or '')}"


def _families(address: str) -> str:
    """Return what a wildcard opens: one family is chosen by a real address."""
    return ": all addresses of this host, IPv4 and IPv6" if is_wildcard(address) else ""


def _cache(prices: Prices) -> str:
    """Say what the KV cache costs, if it costs anything."""
    if not prices.kv_micro:
        return ""
    return f", a token-step of the KV cache {prices.kv_micro / max(prices.input_micro, 1):g}"


def _edge(config: Config) -> str:
    if config.edge is None or config.edge_socket is None:
        return "none"
    tls = "TLS" if config.edge.tls is not None else "no TLS"
    most = f"{config.edge.connections_max:,} connections"
    shown = f"{config.edge.tcp} ({tls}, tokens, {most}){_families(config.edge.tcp)}"
    return f"{shown} to unix:{config.resolve(config.edge_socket)}"


def _tenants(config: Config) -> str:
    total = sum(tenant.weight_milli for tenant in config.tenants)
    if config.unknown_tenants != "refuse":
        total += config.unknown_weight_milli
    heaviest = sorted(config.tenants, key=lambda tenant: -tenant.weight_milli)
    lines = [
        f"{tenant.name}: weight {tenant.weight_milli / 1_000:g},"
        f" {tenant.weight_milli / total:.1%} when all are busy"
        for tenant in heaviest[:_TENANTS_SHOWN]
    ]
    if len(heaviest) > _TENANTS_SHOWN:
        lines.append(f"and {len(heaviest) - _TENANTS_SHOWN:,} more")
    return "\n".join(lines) or "none"
