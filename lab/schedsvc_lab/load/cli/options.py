"""Checks the options of `schedsvc load` and turns them into settings of a run."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import yaml

from schedsvc_lab.load.prompts import PromptError, TextMaker
from schedsvc_lab.load.result import GOALS

EMULATOR = "emulator"


class LoadCommand(click.Command):
    """Takes several values behind one `--goodput`, as vLLM's benchmark does."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Give each further goal a `--goodput` of its own."""
        spread: list[str] = []
        behind = False
        for word in args:
            if behind and not word.startswith("-"):
                if spread[-1] != "--goodput":
                    spread.append("--goodput")
            else:
                behind = word == "--goodput"
            spread.append(word)
        return super().parse_args(ctx, spread)


def read_goals(values: Sequence[str]) -> dict[str, float]:
    """Read goals such as `ttft:200`, in ms."""
    goals: dict[str, float] = {}
    for value in values:
        name, colon, limit = value.partition(":")
        try:
            goal_ms = float(limit)
        except ValueError:
            goal_ms = math.nan
        if name not in GOALS or not colon or not 0 <= goal_ms < math.inf:
            raise click.BadParameter(
                f"{value!r} must be NAME:MILLISECONDS, where NAME is one of {', '.join(GOALS)}",
                param_hint="--goodput",
            )
        goals[name] = goal_ms
    return goals


def read_percentiles(value: str) -> tuple[float, ...]:
    """Read percentiles such as `50,90,99.9`."""
    try:
        percents = tuple(float(part) for part in value.split(","))
    except ValueError:
        percents = (math.nan,)
    if not all(0 <= percent <= 100 for percent in percents):
        raise click.BadParameter(
            f"{value!r} must be numbers from 0 to 100 with commas between, as in 50,90,99",
            param_hint="--percentiles",
        )
    return percents


def read_headers(values: Sequence[str]) -> dict[str, str]:
    """Read headers such as `X-Team: research`."""
    headers: dict[str, str] = {}
    for value in values:
        name, colon, content = value.partition(":")
        if not colon or not name.strip():
            raise click.BadParameter(f"{value!r} must be 'NAME: VALUE'", param_hint="--header")
        headers[name.strip().lower()] = content.strip()
    return headers


def read_extra(value: str | None) -> dict[str, Any]:
    """Read a JSON object that is added to each body."""
    if value is None:
        return {}
    try:
        extra = json.loads(value)
    except json.JSONDecodeError as error:
        raise click.BadParameter(
            f"not JSON: {error.msg} at character {error.pos + 1}", param_hint="--extra-body"
        ) from None
    if not isinstance(extra, dict):
        raise click.BadParameter("must be a JSON object", param_hint="--extra-body")
    return extra


def read_keys(path: Path | None) -> dict[str, str]:
    """Read tenants and API keys from a YAML mapping. The keys themselves appear in no message."""
    keys = _read_mapping(path, "--api-keys")
    if not all(isinstance(key, str) for key in keys.values()):
        raise click.BadParameter(
            f"{path}: must map each tenant to its key, as in `tenant: sk-...`",
            param_hint="--api-keys",
        )
    return {str(tenant): key for tenant, key in keys.items()}


def read_tenant_headers(path: Path | None) -> dict[str, dict[str, str]]:
    """Read tenants and headers from YAML mappings. The values appear in no message."""
    found: dict[str, dict[str, str]] = {}
    for tenant, headers in _read_mapping(path, "--headers-of").items():
        if not isinstance(headers, dict):
            raise click.BadParameter(
                f"{path}: {tenant}: must map names of headers to values, as in "
                "`tenant: {x-team: research}`",
                param_hint="--headers-of",
            )
        found[str(tenant)] = {str(name).lower(): str(value) for name, value in headers.items()}
    return found


def _read_mapping(path: Path | None, option: str) -> dict[Any, Any]:
    if path is None:
        return {}
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise click.BadParameter(f"{path}: {why}", param_hint=option) from None
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}:{mark.column + 1}" if mark is not None else ""
        raise click.BadParameter(f"{path}{where}: not YAML", param_hint=option) from None
    if not isinstance(found, dict):
        raise click.BadParameter(
            f"{path}: must map tenants, as in `tenant: ...`", param_hint=option
        )
    return found


def text_maker(tokenizer: str | None, seed: int) -> TextMaker | None:
    """Return what makes texts: by a tokenizer's folder, for the emulator, or nothing."""
    if tokenizer is None:
        return None
    # Takes a moment to import, which only this needs.
    from schedsvc_lab.load.texts import EmulatorTexts, TokenizerTexts
    from schedsvc_lab.workload.tokenizers import ModelTokenizer

    if tokenizer == EMULATOR:
        return EmulatorTexts(seed)
    try:
        return TokenizerTexts(ModelTokenizer.load(Path(tokenizer)), seed)
    except (PromptError, ValueError) as error:
        raise click.BadParameter(str(error), param_hint="--tokenizer") from None
