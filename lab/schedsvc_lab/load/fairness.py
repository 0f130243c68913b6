"""Measures how alike the tenants were served, as the simulator does."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from schedsvc_lab.load.samples import Sample
from schedsvc_lab.sim.metrics import WINDOW_S, Floats, Service, service_difference

INPUT_PRICE = 1
OUTPUT_PRICE = 2


def jain_index(values: Floats) -> float | None:
    """Return jain's index (sum x)^2 / (n * sum x^2): 1 where all are alike, 1/n where one has all.

    None for fewer than two, or if all values are 0. R. Jain, D. Chiu, W. Hawe, DEC-TR-301, 1984.
    """
    squares = float((values**2).sum())
    if len(values) < 2 or squares == 0:
        return None
    return float(values.sum() ** 2 / (len(values) * squares))


def fairness(samples: Sequence[Sample], wall_s: float) -> dict[str, Any]:
    """Measure the service of a run's tenants: input tokens + 2 * output tokens.

    A request's input counts once its first token came, its output as far as it came. Returns each
    tenant's service and demand, the VTC paper's service difference (arXiv 2401.00588, section 5.1)
    in service per second over windows of WINDOW_S, and Jain's index of the service and of the
    share of the demand that was served. O(samples).
    """
    names = sorted({sample.tenant for sample in samples})
    number = {name: index for index, name in enumerate(names)}
    got, wanted = np.zeros(len(names)), np.zeros(len(names))
    cost = np.zeros(len(samples))
    for index, sample in enumerate(samples):
        served = _served(sample)
        asked = _price(sample.asked_prompt_tokens, sample.asked_output_tokens)
        cost[index] = served or asked
        got[number[sample.tenant]] += served
        wanted[number[sample.tenant]] += max(served, asked)
    service = Service(
        arrival_s=np.array([sample.intended_s for sample in samples]),
        first_s=np.array([sample.first_s for sample in samples]),
        end_s=np.array([sample.last_s for sample in samples]),
        client=np.array([number[sample.tenant] for sample in samples], dtype=np.int64),
        cost=cost,
        clients=len(names),
    )
    difference = service_difference(service, wall_s) if samples else None
    shares = got / np.where(wanted > 0, wanted, 1)
    return {
        "service": {name: float(got[at]) for name, at in number.items()},
        "demand": {name: float(wanted[at]) for name, at in number.items()},
        "service_difference_per_s": None
        if difference is None
        else {"max": difference.max, "mean": difference.mean, "window_s": WINDOW_S},
        "jain_index": jain_index(got),
        "jain_index_of_served_share": jain_index(shares),
    }


def _served(sample: Sample) -> float:
    if not sample.events:
        return 0.0
    output = sample.output_tokens or sample.events
    return _price(sample.prompt_tokens or sample.asked_prompt_tokens, output)


def _price(input_tokens: int, output_tokens: int) -> float:
    return float(INPUT_PRICE * input_tokens + OUTPUT_PRICE * output_tokens)
