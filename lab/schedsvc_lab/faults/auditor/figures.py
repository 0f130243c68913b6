"""Holds figures of requests and reports to the limits of the contract."""

from typing import Any

from schedsvc_lab.faults.auditor.records import (
    COMPLETIONS_MAX,
    PROMPT_TOKENS_MAX,
    SEQUENCES_MAX,
    TOTAL_TOKENS_MAX,
)


def are_wrong(prompts: tuple[int, ...], given: int, output: int) -> bool:
    """Return whether a request's figures break the contract; `given` is its n, 0 if absent."""
    n = given or 1
    sequences = len(prompts) * n
    return (
        not prompts
        or min(prompts) < 1
        or max(prompts) > PROMPT_TOKENS_MAX
        or not 0 <= given <= COMPLETIONS_MAX
        or sequences > SEQUENCES_MAX
        or not 1 <= output <= PROMPT_TOKENS_MAX
        or sum(prompts) * n + output * sequences > TOTAL_TOKENS_MAX
    )


def totals_of(report: Any) -> tuple[int, int, int] | None:
    """Return the totals of a report, -1 if absent; None if one is out of range."""
    has = report.HasField
    totals = (
        report.input_tokens if has("input_tokens") else -1,
        report.cached_input_tokens if has("cached_input_tokens") else -1,
        report.output_tokens if has("output_tokens") else -1,
    )
    for name, value in zip(
        ("input_tokens", "cached_input_tokens", "output_tokens"), totals, strict=True
    ):
        if value > TOTAL_TOKENS_MAX or (value < 0 and has(name)):
            return None
    return totals
