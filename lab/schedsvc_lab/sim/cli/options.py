"""Reads the options that the commands of `schedsvc sim` share, and makes their scenario."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import click

from schedsvc.config import Config
from schedsvc.text.option_types import FiniteRange, WholeRange
from schedsvc_lab.engine import profile_names
from schedsvc_lab.sim.cli.inputs import config_of, profile_of, requests_of
from schedsvc_lab.sim.overrides import OverrideError, override, parse
from schedsvc_lab.sim.own_policy import PolicyError, load_policy
from schedsvc_lab.sim.requests import TOKENS_MAX, Requests
from schedsvc_lab.sim.scenario import (
    POLICIES,
    Scenario,
    ScenarioError,
    engine_configs,
    patient_config,
)
from schedsvc_lab.sim.world import Settings

P = ParamSpec("P")
R = TypeVar("R")

_NS_PER_MS = 1_000_000
_POSITIVE = FiniteRange(min=0, min_open=True)


class PolicyName(click.ParamType[str]):
    """Takes the name of a policy, or package.module:Class, also from the working folder."""

    name = "policy"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check that there is such a policy."""
        text = str(value)
        if text in POLICIES:
            return text
        if ":" not in text:
            known = ", ".join(POLICIES)
            self.fail(f"{text!r} is none of {known}, nor package.module:Class", param, ctx)
        if (folder := str(Path.cwd())) not in sys.path:
            sys.path.insert(0, folder)
        try:
            load_policy(text)
        except PolicyError as error:
            self.fail(str(error), param, ctx)
        return text


_WORLD = (
    click.option(
        "--trace",
        "trace_file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Trace with times and lengths; CSV in the LMSYS or the Azure form among others.",
    ),
    click.option(
        "--tenant",
        default="default",
        show_default=True,
        metavar="NAME",
        help="Tenant of requests that name none.",
    ),
    click.option(
        "--policy",
        "policies",
        multiple=True,
        type=PolicyName(),
        metavar="POLICY",
        help=f"Policy that decides the grants, whatever the configuration's is: "
        f"{', '.join(POLICIES)}, or package.module:Class of your own "
        "(docs/use/researcher.md); repeat it to compare several.",
    ),
    click.option(
        "--profile",
        "profile_name",
        default="a10g-llama2-7b",
        show_default=True,
        metavar="NAME",
        help=f"Costs and capacity of an engine: {', '.join(profile_names())}, or a .yaml file.",
    ),
    click.option(
        "--engines",
        type=WholeRange(1, 64),
        default=1,
        show_default=True,
        help="Number of engines, if the configuration names no pools.",
    ),
    click.option(
        "--config",
        "config_file",
        type=click.Path(dir_okay=False, path_type=Path),
        help="The server's configuration file; without it all tenants weigh the same, and requests "
        "wait for up to an hour.",
    ),
    click.option(
        "--set",
        "changes",
        multiple=True,
        metavar="NAME=VALUE",
        help="Change engine.FIELD or cost.FIELD of the profile, or scheduler.KEY, tenants.NAME.KEY "
        "or groups.NAME.KEY of the configuration, such as tenants.a.quota.tokens_per_minute=9000.",
    ),
    click.option(
        "--jitter",
        "jitter_ms",
        type=FiniteRange(0, 3_600_000),
        default=0.0,
        show_default=True,
        metavar="MS",
        help="Delay each arrival by up to this many ms, drawn from the seed.",
    ),
    click.option(
        "--max-tokens",
        type=WholeRange(0, TOKENS_MAX),
        default=0,
        show_default=True,
        help="Output that each request asks for; 0: exactly what it produces.",
    ),
    click.option(
        "--progress",
        "progress_ms",
        type=FiniteRange(1, 60_000),
        default=200.0,
        show_default=True,
        metavar="MS",
        help="Time between two reports of a shim on its running requests, in ms.",
    ),
    click.option(
        "--report-delay",
        "report_delay_ms",
        type=FiniteRange(0, 60_000),
        default=0.0,
        show_default=True,
        metavar="MS",
        help="Time until a report reaches the scheduler, in ms.",
    ),
    click.option(
        "--round-steps",
        type=WholeRange(0, 10_000),
        default=0,
        show_default=True,
        help="Consider new work only after this many decode steps, as the VTC paper's server does.",
    ),
    click.option(
        "--sessions",
        is_flag=True,
        help="Conversations of the trace are sessions of agents, as if clients had named them.",
    ),
)

JOBS = click.option(
    "--jobs",
    type=WholeRange(1, 256),
    default=1,
    show_default=True,
    help="Processes that work side by side.",
)

SPAN = click.option(
    "--span",
    "span_s",
    type=_POSITIVE,
    metavar="SECONDS",
    help="Seconds over which service differences are measured; default: to the last arrival.",
)


def world_options(command: Callable[P, R]) -> Callable[P, R]:
    """Add the options that describe trace, engines and scheduler."""
    for option in reversed(_WORLD):
        command = option(command)
    return command


def world(
    *,
    trace_file: Path,
    tenant: str,
    profile_name: str,
    engines: int,
    config_file: Path | None,
    changes: tuple[str, ...],
    jitter_ms: float,
    max_tokens: int,
    progress_ms: float,
    report_delay_ms: float,
    round_steps: int,
    sessions: bool,
) -> tuple[Scenario, Requests]:
    """Read everything that the options name; nothing starts before all of it is right."""
    profile, config = profile_of(profile_name), config_of(config_file)
    settings = dict(_parsed(change, "--set") for change in changes)
    base = Scenario(
        profile=profile,
        config=config,
        engines=engines,
        settings=Settings(
            progress_ns=round(progress_ms * _NS_PER_MS),
            report_delay_ns=round(report_delay_ms * _NS_PER_MS),
            round_steps=round_steps,
        ),
        jitter_ns=round(jitter_ms * _NS_PER_MS),
        output_tokens_max=max_tokens,
        sessions=sessions,
    )
    # Before the trace, which may take long to read; a weight can only be set of a known tenant.
    _checked(base)
    requests = requests_of(trace_file, tenant)
    if config is not None:
        _say_unknown(config, requests)
    return changed(base, requests, settings, "--set"), requests


def changed(base: Scenario, requests: Requests, settings: dict[str, Any], hint: str) -> Scenario:
    """Return the scenario with settings changed by name; `hint` is the option that gave them."""
    if not settings:
        return base
    try:
        config = base.config or patient_config(requests.clients)
        profile, config = override(base.profile, config, settings)
    except OverrideError as error:
        raise click.BadParameter(str(error), param_hint=hint) from None
    except ScenarioError as error:
        raise click.ClickException(str(error)) from None
    return _checked(replace(base, profile=profile, config=config))


def _say_unknown(config: Config, requests: Requests) -> None:
    """Warn if the configuration does not name the trace's clients."""
    named = {each.name for each in config.tenants}
    unknown = [client for client in requests.clients if client not in named]
    if unknown:
        fate = "are refused" if config.unknown_tenants == "refuse" else "share one flow"
        click.echo(
            f"{len(unknown):,} of {len(requests.clients):,} clients are no tenants of the "
            f"configuration ({unknown[0]!r} is one): they {fate}",
            err=True,
        )


def _checked(scenario: Scenario) -> Scenario:
    """Refuse parts that do not fit together."""
    try:
        engine_configs(scenario)
    except ScenarioError as error:
        raise click.ClickException(str(error)) from None
    return scenario


def _parsed(text: str, hint: str) -> tuple[str, Any]:
    try:
        return parse(text)
    except OverrideError as error:
        raise click.BadParameter(str(error), param_hint=hint) from None
