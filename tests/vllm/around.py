"""Measures the time around the engine: HTTP, API server, gate, client, by first tokens.

The engine model ends where the engine does. vLLM reports for each request how long it lay in the
engine's queue and how long until its first token was computed. The rest of the client's time,
without the wait in the scheduler's queue, is around the engine; but for the rest of the step that
ran when the request came: vLLM looks for requests between two steps, and the model has that, too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from statistics import median

from schedsvc_lab.load.samples import Sample


def added_ms(
    samples: Sequence[Sample], requests: Sequence[str], steps: Sequence[str]
) -> list[float]:
    """Return what was added to each first token of a run, in milliseconds.

    `requests` and `steps` are the engine's records. They name no request: those of one size are
    matched in the order of their ends, the last first, since warm-ups were before.
    """
    told: dict[tuple[int, int], list[float]] = {}
    for line in requests:
        made = json.loads(line)
        size = made["prompt_tokens"], made["output_tokens"]
        told.setdefault(size, []).append(made["first_token_s"] * 1e3)
    rest_ms = rest_of_a_step_ms(steps, max(sample.end_s for sample in samples))
    added = []
    for sample in sorted(samples, key=lambda sample: -sample.end_s):
        engine_ms = told[sample.prompt_tokens, sample.output_tokens].pop()
        queue_ms = sample.queue_ms if sample.queue_ms == sample.queue_ms else 0.0
        added.append(sample.ttft_ms - queue_ms - engine_ms - rest_ms)
    return added


def rest_of_a_step_ms(steps: Sequence[str], span_s: float) -> float:
    """Return how long a step goes on, on average, for a request that comes at any time.

    That meets long steps more often than short ones, and none if the engine is idle.
    """
    all_s = [json.loads(line)["duration_s"] for line in steps]
    return 1e3 * sum(each * each for each in all_s) / 2 / max(span_s, sum(all_s))


def around_ms(runs: Sequence[Sequence[float]]) -> float:
    """Return the median of all requests of some runs."""
    return median(chain.from_iterable(runs))
