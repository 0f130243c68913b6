"""`schedsvc workload prompts` gives a trace prompts of exactly the lengths that it holds."""

import json
from pathlib import Path

import click

from schedsvc.text.option_types import WholeRange, check_file
from schedsvc_lab.options import trace_option
from schedsvc_lab.workload.chat import ChatTemplateError
from schedsvc_lab.workload.cli.common import (
    FROM,
    SORT,
    open_trace,
    tell_skipped,
    write_lines,
)
from schedsvc_lab.workload.json_forms import own_line
from schedsvc_lab.workload.prompts import PrefixPlan, PromptError, PromptMaker
from schedsvc_lab.workload.prompts_trace import GROUP_RULES, PromptRule, PromptWriter
from schedsvc_lab.workload.record import Record
from schedsvc_lab.workload.tokenizers import HOW_TO_GIVE_ONE, ModelTokenizer, TokenizerError

_TOKENS = WholeRange(min=0)

EPILOG = """\b
Example:
  schedsvc workload prompts --trace mooncake.jsonl --tokenizer models/llama \\
      --out text.jsonl
  schedsvc workload prompts --trace synthetic.jsonl --tokenizer models/llama \\
      --out prompts.jsonl --common-tokens 64 --prefix-tokens 512 --groups 20 \\
      --group-by tenant --context-tokens 4096
"""

TOKENIZER = click.option(
    "--tokenizer",
    "tokenizer_path",
    type=click.Path(exists=True, path_type=Path),
    metavar="DIR",
    help="Folder with the model's tokenizer.json and tokenizer_config.json.",
)


def load_tokenizer(path: Path | None) -> ModelTokenizer:
    """Load the tokenizer of `--tokenizer`. Raises click.UsageError."""
    if path is None:
        raise click.UsageError(f"--tokenizer is missing: {HOW_TO_GIVE_ONE}")
    try:
        return ModelTokenizer.load(path)
    except (TokenizerError, ChatTemplateError) as error:
        raise click.UsageError(f"--tokenizer: {error}") from None


@click.command(epilog=EPILOG)
@trace_option
@click.option(
    "--out",
    required=True,
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="File to write, in the project's own form.",
)
@TOKENIZER
@click.option(
    "--prefix-tokens",
    type=_TOKENS,
    default=0,
    show_default=True,
    help="Tokens at the beginning that the prompts of a group share, and no more.",
)
@click.option(
    "--common-tokens",
    type=_TOKENS,
    default=0,
    show_default=True,
    help="Tokens at the beginning that all prompts share; they count in --prefix-tokens.",
)
@click.option(
    "--groups", type=WholeRange(min=1), default=1, show_default=True, help="Number of groups."
)
@click.option(
    "--group-by",
    type=click.Choice(GROUP_RULES),
    default=GROUP_RULES[0],
    show_default=True,
    help="Draw each request's group, or take one by its tenant's name.",
)
@click.option(
    "--blocks/--no-blocks",
    default=True,
    show_default=True,
    help="Where a request has block hashes, share what they say instead.",
)
@click.option(
    "--context-tokens",
    type=WholeRange(min=2),
    help="Cut requests so that prompt and output together fit.",
)
@click.option(
    "--seed", type=WholeRange(min=0), default=0, show_default=True, help="Seed of the words."
)
@FROM
@SORT
@click.option("--json", "as_json", is_flag=True, help="Print the counts as JSON.")
def prompts(
    trace: Path,
    out: Path,
    tokenizer_path: Path | None,
    prefix_tokens: int,
    common_tokens: int,
    groups: int,
    group_by: str,
    blocks: bool,
    context_tokens: int | None,
    seed: int,
    form: str,
    sort: bool,
    as_json: bool,
) -> None:
    """Write a trace with prompts of exactly the tokens that it states, by a model's tokenizer.

    Prompts are English-like words drawn from the seed. `schedsvc load` sends them, and forces the
    outputs.
    """
    check_file(out)
    try:
        plan = PrefixPlan(prefix_tokens, common_tokens)
        maker = PromptMaker(load_tokenizer(tokenizer_path), seed)
    except PromptError as error:
        raise click.UsageError(f"--tokenizer: {error}") from None
    except ValueError as error:
        raise click.UsageError(f"--common-tokens: {error}") from None
    rule = PromptRule(
        plan=plan,
        groups=groups,
        group_by=group_by,
        blocks=blocks,
        context_tokens=context_tokens,
        seed=seed,
    )
    writer = PromptWriter(maker, rule)
    written = 0

    def line(record: Record) -> str:
        nonlocal written
        made = writer(record)
        written += made.input_tokens or 0
        return own_line(made)

    reader = open_trace(trace, form, sort)
    count = write_lines(reader, sort, out, line)
    if as_json:
        result = {"requests": count, "input_tokens": written, "skipped": dict(reader.skipped)}
        click.echo(json.dumps({**result, "out": str(out)}, indent=2))
        return
    click.echo(f"{count:,} requests with {written:,} prompt tokens written to {out}")
    tell_skipped(reader)
