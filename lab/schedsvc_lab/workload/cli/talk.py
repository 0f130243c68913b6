"""Defines the options of the commands that hold conversations."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from schedsvc.text.option_types import FiniteRange, WholeRange
from schedsvc_lab.workload.conversations import Limits, Timing

_POSITIVE = FiniteRange(min=0, min_open=True)
_COUNT = WholeRange(min=1)
_Command = TypeVar("_Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--rate",
        type=_POSITIVE,
        default=1.0,
        show_default=True,
        help="Conversations that start per second, as a Poisson process.",
    ),
    click.option(
        "--think",
        type=FiniteRange(min=0),
        default=10.0,
        show_default=True,
        metavar="SECONDS",
        help="Mean seconds between an answer and the next turn, exponentially distributed.",
    ),
    click.option(
        "--output-speed",
        type=_POSITIVE,
        default=30.0,
        show_default=True,
        help="Output tokens per second with which answers are taken to be written.",
    ),
    click.option("--conversations", type=_COUNT, help="Hold at most this many conversations."),
    click.option("--turns", type=_COUNT, help="Hold at most this many turns of each."),
    click.option(
        "--context-tokens",
        type=_COUNT,
        help="End a conversation before its prompt and output together have more tokens.",
    ),
    click.option("--output-tokens-max", type=_COUNT, help="Longest answer."),
    click.option(
        "--unanswered-tokens",
        type=_COUNT,
        default=128,
        show_default=True,
        help="Length of an answer that was not recorded.",
    ),
    click.option(
        "--seed",
        type=WholeRange(min=0),
        default=0,
        show_default=True,
        help="Seed of starts and think times.",
    ),
)


def talk_options(command: _Command) -> _Command:
    """Add the options that `timing_and_limits` takes."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def timing_and_limits(
    *,
    rate: float,
    think: float,
    output_speed: float,
    conversations: int | None,
    turns: int | None,
    context_tokens: int | None,
    output_tokens_max: int | None,
    unanswered_tokens: int,
    seed: int,
) -> tuple[Timing, Limits]:
    """Make what the options ask for."""
    timing = Timing(rate_per_s=rate, think_s=think, output_tokens_per_s=output_speed, seed=seed)
    limits = Limits(
        conversations_max=conversations,
        turns_max=turns,
        context_tokens=context_tokens,
        output_tokens_max=output_tokens_max,
        unanswered_tokens=unanswered_tokens,
    )
    return timing, limits
