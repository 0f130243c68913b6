"""`schedsvc sim` shows what a configuration would have done to a trace."""

from importlib import import_module
from pathlib import Path
from typing import Any

import click

from schedsvc.text.option_types import WholeRange, make_folder
from schedsvc_lab.sim.cli.options import JOBS, SPAN, world, world_options

__all__ = ["sim"]

EPILOG = """\b
Example:
  schedsvc sim --trace trace.csv --policy engine --policy fcfs --policy vtc \\
      --out out/sim --figures
  schedsvc sim --trace trace.csv --policy vtc --config schedsvc.yaml \\
      --seeds 5 --jitter 50 --json
  schedsvc sim --suite vtc-paper
  schedsvc sim --replay recording --config other.yaml

The same arguments give the same digests.
"""

#: Subcommand: where it is defined, and its description in one line.
_COMMANDS: dict[str, tuple[str, str]] = {
    "fit": ("schedsvc_lab.sim.cli.fit:fit_command", "An engine's profile from measured steps."),
    "sweep": ("schedsvc_lab.sim.cli.sweep:sweep", "The figures when settings vary."),
}


class _Sim(click.Group):
    """Lists subcommands without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command when it is first used."""
        if cmd_name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of subcommands."""
        if _COMMANDS:
            with formatter.section("Commands"):
                formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.group("sim", cls=_Sim, epilog=EPILOG, invoke_without_command=True)
@world_options
@click.option(
    "--seeds", type=WholeRange(1, 1_000), help="Number of seeds; default: 1, or 5 with --suite."
)
@SPAN
@JOBS
@click.option(
    "--suite",
    type=click.Choice(["vtc-paper"]),
    help="Published experiments instead of a trace, each figure with a verdict.",
)
@click.option(
    "--replay",
    "recording",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A server's recording instead of a trace; with --config, what that would have changed, "
    "under its own policy or that of --policy.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for report.json, and requests and decisions as CSV.",
)
@click.option(
    "--figures", is_flag=True, help="Draw PNG figures of the first seed into --out of a trace, too."
)
@click.pass_context
def sim(
    ctx: click.Context,
    /,
    policies: tuple[str, ...],
    seeds: int | None,
    span_s: float | None,
    jobs: int,
    suite: str | None,
    recording: Path | None,
    as_json: bool,
    out: Path | None,
    figures: bool,
    **options: Any,
) -> None:
    """Simulate engines behind the scheduler, in virtual time, under one or several policies."""
    # Imported here, so that a subcommand loads only its own code.
    from schedsvc_lab.sim.cli.suite import refuse_others, run_suite
    from schedsvc_lab.sim.cli.trace import run_trace

    if ctx.invoked_subcommand is not None:
        refuse_others(ctx, f"{ctx.invoked_subcommand}: give options behind it", ())
        return
    if suite is not None:
        refuse_others(ctx, "--suite", ("suite", "seeds", "as_json", "out"))
        _make(out)
        run_suite(seeds, out, as_json)
        return
    if recording is not None:
        from schedsvc_lab.sim.cli.replay import run_replay

        allowed = ("recording", "config_file", "changes", "policies", "as_json", "out")
        refuse_others(ctx, "--replay", allowed)
        _make(out)
        given = options["config_file"], options["changes"], policies
        run_replay(recording, *given, out, as_json=as_json)
        return
    if options["trace_file"] is None or not policies:
        raise click.UsageError(
            "give --trace FILE and at least one --policy, --suite NAME or --replay FILE"
        )
    if figures and out is None:
        raise click.UsageError("--figures: give --out DIRECTORY for them")
    scenario, requests = world(**options)
    _make(out)
    run_trace(
        scenario,
        requests,
        tuple(dict.fromkeys(policies)),
        seeds or 1,
        span_s=span_s,
        jobs=jobs,
        out=out,
        figures=figures,
        as_json=as_json,
    )


def _make(out: Path | None) -> None:
    if out is not None:
        make_folder(out)
