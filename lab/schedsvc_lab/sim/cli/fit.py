"""`schedsvc sim fit` makes a profile of an engine from steps that were measured on it."""

import json
from dataclasses import asdict
from pathlib import Path

import click
from rich.table import Table

from schedsvc.text.option_types import WholeRange, check_file
from schedsvc.text.tables import table_console
from schedsvc_lab.engine import (
    CostFields,
    EngineFields,
    ProfileError,
    dump_profile,
    load_profile,
)
from schedsvc_lab.sim.fit import FitError, Measured, Quality, fit, make_profile, read_measured

_SIZE = WholeRange(1, 1 << 40)

_FIELDS = {
    "kv_tokens": "kv_tokens",
    "block_size": "block_size_tokens",
    "max_num_seqs": "sequences_max",
    "max_num_batched_tokens": "step_tokens_max",
    "max_model_len": "context_tokens_max",
}

EPILOG = """\b
Example:
  schedsvc sim fit steps.jsonl --like cpu-tiny-llama --out again.yaml
  schedsvc sim fit steps.jsonl --name my-engine --kv-tokens 20480 \\
      --block-size 128 --max-num-seqs 64 --max-num-batched-tokens 2048 \\
      --max-model-len 2048 --out my-engine.yaml
  schedsvc sim --profile my-engine.yaml --trace trace.csv --policy vtc

A step is one line: {"duration_s": 0.0123, "prompt_tokens": 512, "running": 7, "kv_tokens": 9000}.
Instead, lines may be samples of an engine's counters: at_s, steps_total, prompt_tokens_total,
generation_tokens_total, running, kv_tokens. Files that end in .csv have a header instead.
"""


@click.command("fit", epilog=EPILOG)
@click.argument(
    "files",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE...",
)
@click.option(
    "--name", default="fitted", show_default=True, metavar="NAME", help="Name of the profile."
)
@click.option("--source", help="Where the figures come from; default: the files.")
@click.option("--like", metavar="PROFILE", help="Sizes that are not given are this profile's.")
@click.option("--kv-tokens", type=_SIZE, help="KV cache in tokens.")
@click.option("--block-size", type=_SIZE, help="Tokens of a KV block.")
@click.option("--max-num-seqs", type=WholeRange(1, 1 << 16), help="Sequences in a step.")
@click.option("--max-num-batched-tokens", type=_SIZE, help="Tokens in a step.")
@click.option("--max-model-len", type=_SIZE, help="Context in tokens.")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the profile here."
)
@click.option("--json", "as_json", is_flag=True, help="Print cost and quality as JSON.")
def fit_command(
    files: tuple[Path, ...],
    name: str,
    source: str | None,
    like: str | None,
    out: Path | None,
    as_json: bool,
    **sizes: int | None,
) -> None:
    """Fit the step cost of an engine to measured steps, and write its profile.

    Least squares over FILE...; prints how well the fit describes them.
    """
    if out is not None and out.suffix != ".yaml":
        raise click.BadParameter("must end in .yaml, as --profile wants it", param_hint="--out")
    if out is not None:
        check_file(out)
    engine = _engine(like, sizes)
    measured: list[Measured] = []
    try:
        for file in files:
            measured += read_measured(file)
        cost, quality = fit(measured)
    except FitError as error:
        raise click.ClickException(str(error)) from None
    listed = ", ".join(file.name for file in files)
    profile = make_profile(
        name,
        source or f"Fitted to {quality.steps} steps of {listed} by schedsvc sim fit.",
        cost,
        engine,
    )
    try:
        profile.config()
    except ValueError as error:
        raise click.ClickException(f"these sizes do not go together: {error}") from None
    if out is not None:
        out.write_text(dump_profile(profile), encoding="utf-8")
    if as_json:
        report = {"name": name, "cost": cost.model_dump(), "quality": asdict(quality)}
        click.echo(json.dumps(report, indent=2))
    else:
        _show(cost, quality, out)


def _engine(like: str | None, sizes: dict[str, int | None]) -> EngineFields:
    """Take the given sizes, and the others from the named profile."""
    given = {_FIELDS[name]: size for name, size in sizes.items() if size is not None}
    if like is not None:
        try:
            return load_profile(like).engine.model_copy(update=given)
        except ProfileError as error:
            raise click.BadParameter(str(error), param_hint="--like") from None
    missing = [name for name in _FIELDS if sizes[name] is None]
    if missing:
        flags = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise click.UsageError(f"give {flags}, or --like PROFILE for its sizes")
    return EngineFields.model_validate(given)


def _show(cost: CostFields, quality: Quality, out: Path | None) -> None:
    console = table_console(markup=True)
    table = Table(title="step cost", title_justify="left")
    table.add_column("part")
    table.add_column("ms", justify="right")
    table.add_row("a step, fixed part", f"{cost.decode_ns[0][1] / 1e6:,.4f}")
    table.add_row("the same with prompts", f"{cost.prefill_ns / 1e6:,.4f}")
    table.add_row("each prompt token", f"{cost.prefill_token_ns / 1e6:,.6f}")
    table.add_row("each KV token read", f"{cost.decode_kv_token_ns / 1e6:,.6f}")
    for sequences, ns in cost.decode_ns[1:]:
        table.add_row(f"{sequences} decoding, fixed part included", f"{ns / 1e6:,.4f}")
    console.print(table)
    console.print(
        f"R² {quality.r2:.3f} over {quality.intervals:,} intervals of {quality.steps:,} steps; "
        f"median error of a step {quality.median_abs_error_ms:.3f} ms, median step "
        f"{quality.median_duration_ms:.3f} ms; fitted / measured time {quality.total_ratio:.3f}",
        highlight=False,
    )
    if out is not None:
        console.print(f"written: {out}", highlight=False)
