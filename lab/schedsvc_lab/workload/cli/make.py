"""`schedsvc workload synth`, `label` and `scale` make traces."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import click
from pydantic import ValidationError

from schedsvc.text.option_types import FiniteRange, WholeRange, check_file
from schedsvc_lab.options import trace_option
from schedsvc_lab.workload.arrivals import REQUESTS_MAX
from schedsvc_lab.workload.cli.common import (
    FROM,
    SORT,
    open_trace,
    progress,
    tell_skipped,
    told,
    write_own,
)
from schedsvc_lab.workload.lengths import KNOWN, Lengths
from schedsvc_lab.workload.make import (
    LABEL_RULES,
    Pairs,
    Synthesis,
    labeller,
    length_pairs,
    long_threshold,
    synthesize,
    total_tokens,
)
from schedsvc_lab.workload.make import scale as scaled
from schedsvc_lab.workload.profiles import (
    CV_MAX,
    INPUT,
    OUTPUT,
    TENANTS_MAX,
    Kind,
    Profile,
    complaints,
    read_profiles,
    synthesize_profiles,
)
from schedsvc_lab.workload.reader import TraceReader
from schedsvc_lab.workload.record import TOKENS_MAX, Record, TraceError
from schedsvc_lab.workload.statistics import Description

_POSITIVE = FiniteRange(min=0, min_open=True)
_ZIPF_HELP = "Exponent: the i-th tenant has a share proportional to i^-exponent; 0: all alike."

_OUT = click.option(
    "--out",
    required=True,
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="File to write, in the project's own form.",
)
_SEED = click.option(
    "--seed",
    type=WholeRange(min=0),
    default=0,
    show_default=True,
    help="Seed of all that is drawn.",
)
_ZIPF = click.option(
    "--zipf",
    type=FiniteRange(0, 20),
    default=1.0,
    show_default=True,
    help=_ZIPF_HELP,
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")

SYNTH_EPILOG = """\b
Example:
  schedsvc workload synth --requests 1000 --rate 5 --tenants 27 --zipf 1.1 \\
      --out synthetic.jsonl
  schedsvc workload synth --duration 600 --rate 2 --arrivals on-off --on 60 \\
      --off 60 --input uniform:256:512 --output lognormal:200:1.0:2048 \\
      --out bursts.jsonl
  schedsvc workload synth --requests 3000 --rate 3 --tenants 10 --zipf 0 \\
      --prefix-tokens 1024 --input uniform:32:512 --output uniform:32:256 \\
      --out shared.jsonl
"""

LABEL_EPILOG = """\b
Example:
  schedsvc workload label --trace azure.csv --tenants 50 --rule zipf \\
      --zipf 1.2 --out azure-50.jsonl
"""

SCALE_EPILOG = """\b
Example:
  schedsvc workload scale --trace azure.csv --speed 100 --out azure-fast.jsonl
  schedsvc workload scale --trace azure.csv --rate 2.5 --out azure-slow.jsonl
"""


@click.command(epilog=SYNTH_EPILOG)
@_OUT
@click.option("--requests", type=WholeRange(1, REQUESTS_MAX), help="Number of requests.")
@click.option(
    "--duration", "duration_s", type=_POSITIVE, metavar="SECONDS", help="Seconds of arrivals."
)
@click.option("--rate", type=_POSITIVE, help="Requests per second.")
@click.option(
    "--arrivals",
    type=click.Choice(get_args(Kind)),
    help="Kind of arrivals; default: poisson.",
)
@click.option(
    "--cv",
    type=FiniteRange(0, CV_MAX),
    help="Coefficient of variation of the gaps, for gamma, on-off and ramp; default 1: Poisson."
    " vLLM's burstiness is 1/cv^2.",
)
@click.option(
    "--on",
    "on_s",
    type=_POSITIVE,
    metavar="SECONDS",
    help="Seconds with arrivals, for on-off; default: 60.",
)
@click.option(
    "--off",
    "off_s",
    type=_POSITIVE,
    metavar="SECONDS",
    help="Seconds without arrivals, for on-off; default: 60.",
)
@click.option("--end-rate", type=_POSITIVE, help="Rate at the end of --duration, for ramp.")
@click.option("--tenants", type=WholeRange(1, TENANTS_MAX), help="Number of tenants; default: 1.")
@click.option("--zipf", type=FiniteRange(0, 20), help=f"{_ZIPF_HELP} Default: 1.")
@click.option(
    "--input",
    metavar="KIND:VALUE:...",
    help=f"Prompt tokens: {KNOWN}. Default: {INPUT}.",
)
@click.option(
    "--output",
    metavar="KIND:VALUE:...",
    help=f"Output tokens, given as the prompt tokens are. Default: {OUTPUT}.",
)
@click.option(
    "--prefix-tokens",
    type=WholeRange(0, TOKENS_MAX // 2),
    default=0,
    show_default=True,
    help="Tokens that every prompt of a tenant begins with, besides those drawn; the file then"
    " holds block hashes.",
)
@click.option(
    "--block-tokens",
    type=WholeRange(1, 65_536),
    default=16,
    show_default=True,
    help="Tokens of a block; of --prefix-tokens, full blocks are shared.",
)
@click.option(
    "--lengths-from",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Instead draw requests of this trace, and take both of their lengths.",
)
@click.option(
    "--profiles",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="YAML file of several kinds of tenants, instead of the options on rate, arrivals, tenants "
    "and lengths; needs --duration.",
)
@_SEED
@_JSON
def synth(
    out: Path,
    requests: int | None,
    duration_s: float | None,
    lengths_from: Path | None,
    profiles: Path | None,
    prefix_tokens: int,
    block_tokens: int,
    seed: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Draw a workload: arrivals, tenants and lengths. The same seed draws the same file.

    With --requests the mean rate is exactly the asked one.
    """
    check_file(out)
    given = {name: value for name, value in options.items() if value is not None}
    try:
        if profiles is not None:
            others = lengths_from or prefix_tokens or requests is not None
            if given or others or duration_s is None:
                raise click.UsageError("--profiles goes with --duration, --seed and --out alone")
            records = synthesize_profiles(read_profiles(profiles), duration_s, seed)
        else:
            wanted = _wanted(given, requests, duration_s, lengths_from, seed)
            wanted = replace(wanted, prefix_tokens=prefix_tokens, block_tokens=block_tokens)
            records = synthesize(wanted)
        _write(records, out, as_json)
    except (ValueError, OSError) as error:
        raise told(error) from None


def _wanted(
    given: dict[str, Any],
    requests: int | None,
    duration_s: float | None,
    lengths_from: Path | None,
    seed: int,
) -> Synthesis:
    """Make what the options ask for."""
    if requests is None and duration_s is None:
        raise click.UsageError("give --requests, --duration or both")
    if "rate" not in given:
        raise click.UsageError("give --rate or --profiles")
    if lengths_from is not None and given.keys() & {"input", "output"}:
        raise click.UsageError("give --lengths-from, or --input and --output")
    try:
        profile = Profile.model_validate(given)
    except ValidationError as error:
        found = (f"--{field}: {reason}" if field else reason for field, reason in complaints(error))
        raise click.UsageError("; ".join(found)) from None
    if profile.arrivals == "ramp" and duration_s is None:
        raise click.UsageError("--arrivals ramp needs --duration")
    return Synthesis(
        arrivals=profile.arriving(duration_s),
        inputs=Lengths.parse(profile.input),
        outputs=Lengths.parse(profile.output),
        pairs=None if lengths_from is None else _pairs(lengths_from),
        tenants=profile.tenants,
        zipf_exponent=profile.zipf,
        requests=requests,
        duration_s=math.inf if duration_s is None else duration_s,
        seed=seed,
    )


def _pairs(trace: Path) -> Pairs:
    pairs = length_pairs(_through(TraceReader(trace, in_order=False)))
    if not len(pairs):
        raise click.UsageError(f"--lengths-from: {trace} has no lengths")
    return pairs


def _write(records: Iterable[Record], out: Path, as_json: bool) -> None:
    """Write records and describe them."""
    described = Description()

    def counted() -> Iterator[Record]:
        for record in records:
            described.add(record)
            yield record

    if write_own(counted(), out) == 0:
        raise click.ClickException(f"no request arrives within --duration; {out} is empty")
    summary = described.summary(tenants_max=0)
    keys = ("requests", "tenants", "duration_s", "input_tokens", "output_tokens")
    told_keys = (*keys, "rate_per_s", "gap_cv")
    if as_json:
        result = {key: summary[key] for key in told_keys}
        click.echo(json.dumps({**result, "out": str(out)}, indent=2))
        return
    rate, cv = summary["rate_per_s"], summary["gap_cv"]
    click.echo(
        f"{summary['requests']:,} requests, tenants: {summary['tenants']:,}, "
        f"{summary['duration_s']:,.1f} s"
        + (f", {rate:,.3f} requests/s" if rate is not None else "")
        + (f", cv of the gaps {cv:.3f}" if cv is not None else "")
        + f"; written to {out}"
    )


def _rewrite(
    trace: Path,
    form: str,
    sort: bool,
    out: Path,
    change: Callable[[Iterable[Record]], Iterable[Record]],
    as_json: bool,
) -> None:
    """Write a changed copy of a trace, record by record."""
    reader = open_trace(trace, form, sort)
    try:
        with progress(reader, sort) as records:
            _write(change(records), out, as_json)
    except (TraceError, OSError) as error:
        raise told(error) from None
    tell_skipped(reader)


def _through(reader: TraceReader, sort: bool = False) -> Iterator[Record]:
    """Read a trace for what must be known before something is made of it."""
    try:
        with progress(reader, sort) as records:
            yield from records
    except (TraceError, OSError) as error:
        raise told(error) from None


@click.command(epilog=LABEL_EPILOG)
@trace_option
@_OUT
@click.option(
    "--tenants", type=WholeRange(2, TENANTS_MAX), required=True, help="Number of tenants."
)
@click.option(
    "--rule",
    type=click.Choice(LABEL_RULES),
    default="zipf",
    show_default=True,
    help="Which tenant a request gets. random: all alike. zipf: shares by Zipf's law."
    " sticky: so, but a conversation stays with its tenant. adversarial: the first asks the"
    " longest requests, half of all tokens.",
)
@_ZIPF
@FROM
@SORT
@_SEED
@_JSON
def label(
    trace: Path,
    out: Path,
    tenants: int,
    rule: str,
    zipf: float,
    form: str,
    sort: bool,
    seed: int,
    as_json: bool,
) -> None:
    """Write a trace with tenants by a rule, which replace those that it has."""
    check_file(out)
    long_tokens = 0
    if rule == "adversarial":
        lengths = Counter(map(total_tokens, _through(open_trace(trace, form, sort))))
        long_tokens = long_threshold(lengths)
        if long_tokens == 0:
            raise click.UsageError("--rule adversarial needs a trace with token counts")
    named = labeller(rule, tenants, zipf, seed, long_tokens)

    def change(records: Iterable[Record]) -> Iterator[Record]:
        for record in records:
            yield replace(record, tenant=named(record))

    _rewrite(trace, form, sort, out, change, as_json)


@click.command(epilog=SCALE_EPILOG)
@trace_option
@_OUT
@click.option("--speed", type=_POSITIVE, help="Divide all times by this.")
@click.option("--rate", "rate_per_s", type=_POSITIVE, help="Mean requests per second to reach.")
@FROM
@SORT
@_JSON
def scale(
    trace: Path,
    out: Path,
    speed: float | None,
    rate_per_s: float | None,
    form: str,
    sort: bool,
    as_json: bool,
) -> None:
    """Write a trace faster or slower. Its changing density stays; nothing but times changes."""
    if (speed is None) == (rate_per_s is None):
        raise click.UsageError("give one of --speed and --rate")
    check_file(out)
    if rate_per_s is not None:
        described = Description()
        for record in _through(open_trace(trace, form, sort), sort):
            described.add(record)
        if described.rate_per_s is None:
            raise click.UsageError("--rate needs a trace with at least two different times")
        speed = rate_per_s / described.rate_per_s
    assert speed is not None
    factor = speed
    _rewrite(trace, form, sort, out, lambda records: scaled(records, factor), as_json)
