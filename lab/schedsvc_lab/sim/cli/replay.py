"""`schedsvc sim --replay` replays a recording exactly, and under another configuration."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from schedsvc.config import Config
from schedsvc.text.tables import table_console
from schedsvc_lab.sim.cli.bars import progress_bar, watch
from schedsvc_lab.sim.cli.inputs import config_of, profile_of
from schedsvc_lab.sim.overrides import OverrideError, override, parse
from schedsvc_lab.sim.replay.asks import Collector
from schedsvc_lab.sim.replay.compare import compare, write_changes
from schedsvc_lab.sim.replay.exact import Exact
from schedsvc_lab.sim.replay.reader import Recording, ReplayError
from schedsvc_lab.sim.replay.whatif import POLICIES, WhatIf
from schedsvc_lab.sim.report import write_report


def run_replay(
    path: Path,
    config_file: Path | None,
    changes: tuple[str, ...],
    policies: tuple[str, ...],
    out: Path | None,
    *,
    as_json: bool,
) -> None:
    """Replay a recording; fail if its digest differs."""
    config = _config(config_file, changes)
    policy = _policy(policies, config)
    try:
        report = _replay(path, config, policy, out)
    except ReplayError as error:
        raise click.ClickException(str(error)) from None
    if out is not None:
        write_report(report, out / "replay.json")
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        _show(report, table_console(markup=True))


def _config(path: Path | None, changes: tuple[str, ...]) -> Config | None:
    config = config_of(path)
    if config is None:
        if changes:
            raise click.UsageError("--set needs --config FILE here: a recording has no such names")
        return None
    try:
        settings = dict(parse(change) for change in changes)
        if any(name.startswith(("engine.", "cost.")) for name in settings):
            raise OverrideError("a replay has no engine: set scheduler.KEY or tenants.NAME.KEY")
        return override(profile_of("fast"), config, settings)[1]
    except OverrideError as error:
        raise click.BadParameter(str(error), param_hint="--set") from None


def _policy(policies: tuple[str, ...], config: Config | None) -> str | None:
    """Return the policy beside the configuration; None: the configuration's own."""
    if not policies:
        return None
    if config is None:
        raise click.UsageError("--policy needs --config FILE here: it stands beside that")
    if len(policies) > 1 or policies[0] not in POLICIES:
        raise click.BadParameter(
            f"a replay takes one of {', '.join(POLICIES)}", param_hint="--policy"
        )
    return policies[0]


def _replay(
    path: Path, config: Config | None, policy: str | None, out: Path | None
) -> dict[str, Any]:
    recording = Recording(path)
    collector = Collector(recording)
    with progress_bar("events") as progress:
        task = progress.add_task("replay", total=None)
        exact = Exact(recording, None if config is None else collector)
        replayed = exact.run(partial(watch, progress, task))
    report: dict[str, Any] = {
        "recording": path.name,
        "recorded_by": recording.header.get("schedsvc"),
        "events": replayed.events,
        "checks": replayed.checks,
        "cut_bytes": recording.cut_bytes,
        "duration_s": replayed.duration_ns / 1e9,
        "digest": f"{replayed.digest:016x}",
        "totals": exact.core.stats(0, 0)["totals"],
    }
    if config is not None:
        asks = collector.finish()
        what_if = WhatIf(collector, asks, config, policy)
        with progress_bar("requests") as progress:
            task = progress.add_task("with the other configuration", total=len(asks))
            fates = what_if.run(partial(watch, progress, task))
        report["what_if"] = {
            "policy": policy or config.scheduler.policy,
            "repeats": collector.repeats,
            "digest": f"{what_if.core.digest():016x}",
            **compare(asks, fates),
        }
        if out is not None:
            write_changes(asks, fates, out / "changes.csv")
    return report


def _show(report: dict[str, Any], console: Console) -> None:
    totals = report["totals"]
    console.print(
        f"{report['recording']}: {report['events']:,} events in {report['duration_s']:,.1f} s, "
        f"recorded by schedsvc {report['recorded_by']}\n"
        f"{totals['received']:,} requests: {totals['granted']:,} granted, "
        f"{totals['rejected']:,} rejected, {totals['evicted']:,} evicted",
        highlight=False,
        markup=False,
    )
    if report["cut_bytes"]:
        console.print(f"{report['cut_bytes']:,} bytes at its end were never finished: left out")
    console.print(
        f"digest {report['digest']}: reproduced, at {report['checks']:,} places", highlight=False
    )
    if "what_if" in report:
        _show_changes(report["what_if"], console)


def _show_changes(what_if: dict[str, Any], console: Console) -> None:
    console.print(
        f"\nwith the other configuration, under {what_if['policy']}, {what_if['changed']:,} of "
        f"{what_if['requests']:,} requests get another verdict",
        highlight=False,
    )
    table = Table("tenant", "", title_justify="left")
    table.add_column("as recorded", justify="right")
    table.add_column("now", justify="right")
    for name, tenant in what_if["tenants"].items():
        label = name
        for verdict, (then, now) in tenant["verdicts"].items():
            table.add_row(label, verdict, f"{then:,}", f"{now:,}")
            label = ""
        for figure, pair in tenant["waited_ms"].items():
            cells = ("-" if value is None else f"{value:,.1f}" for value in pair)
            table.add_row("", f"wait for a grant, {figure} (ms)", *cells)
        table.add_section()
    console.print(table)
    if what_if["assumed"]:
        console.print(
            f"{what_if['assumed']:,} of them did not run in the recording: taken to run like the "
            "median of their tenant",
            highlight=False,
        )
