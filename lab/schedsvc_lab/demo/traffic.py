"""Describes the demo's workload: three tenants of one chat service, one of which floods.

Arrivals are Poisson; prompt and output lengths are lognormal, the usual fit for chat traffic. For
scale: in the LMSYS arena sample of the VTC paper the median prompt is 40 tokens and the median
output 211, with a spread (sigma of the logarithm) of 1.6 and 1.4 over all clients together; in
Azure's conversation trace of 2023 the medians are 1,020 and 129. Each tenant here is one
application, so its spread is smaller:

- `quiet`: short questions, short answers, a few requests a second;
- `steady`: a chat with some history;
- `hog`: a batch job with long prompts that starts after HOG_START_S and sends about twice what
  the engine can serve.

`trace.csv` beside this file is `generate(SEED)`, in the LMSYS form; a test holds it to that.
"""

import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np

from schedsvc_lab.workload import TraceRequest, read_trace

SEED = 1
DURATION_S = 14.0
HOG_START_S = 2.0
QUICK_S = 3.0
"""`--quick` sends only this part of it; every tenant has requests by then."""
WARMUP_S = 4.0
"""Throughput counts from here to the last arrival: the flood has begun to fill the engine."""

TRACE_FILE = Path(__file__).with_name("trace.csv")


@dataclass(frozen=True, slots=True)
class Tenant:
    """Describes one tenant's traffic: medians and spreads of lognormal lengths, in tokens.

    `output_tokens_max` is the client's `max_tokens`; few answers are as long.
    """

    name: str
    rate_per_s: float
    start_s: float
    prompt_median: float
    prompt_sigma: float
    output_median: float
    output_sigma: float
    output_tokens_max: int


TENANTS = (
    Tenant("hog", 12.0, HOG_START_S, 300, 0.6, 100, 0.7, 512),
    Tenant("quiet", 3.0, 0.0, 40, 0.7, 40, 0.6, 256),
    Tenant("steady", 2.0, 0.0, 120, 0.6, 100, 0.6, 512),
)
PROMPT_TOKENS_MIN, PROMPT_TOKENS_MAX = 8, 1_024
OUTPUT_TOKENS_MIN = 4


def generate(
    seed: int, duration_s: float = DURATION_S, tenants: Sequence[Tenant] = TENANTS
) -> list[TraceRequest]:
    """Draw a workload in the order of arrival. Each tenant has a random stream of its own."""
    streams = np.random.default_rng(seed).spawn(len(tenants))
    drawn = [
        request
        for tenant, stream in zip(tenants, streams, strict=True)
        for request in _draw(tenant, stream, duration_s)
    ]
    return sorted(drawn, key=lambda request: request.arrival_s)


def _draw(tenant: Tenant, stream: np.random.Generator, duration_s: float) -> Iterator[TraceRequest]:
    def length(median: float, sigma: float, least: int, most: int) -> int:
        return min(max(round(stream.lognormal(math.log(median), sigma)), least), most)

    arrival_s = tenant.start_s
    while True:
        arrival_s += stream.exponential(1 / tenant.rate_per_s)
        if arrival_s >= duration_s:
            return
        yield TraceRequest(
            arrival_s=round(arrival_s, 6),
            tenant=tenant.name,
            prompt_tokens=length(
                tenant.prompt_median, tenant.prompt_sigma, PROMPT_TOKENS_MIN, PROMPT_TOKENS_MAX
            ),
            output_tokens=length(
                tenant.output_median,
                tenant.output_sigma,
                OUTPUT_TOKENS_MIN,
                tenant.output_tokens_max,
            ),
        )


def write(requests: Iterable[TraceRequest], file: TextIO) -> None:
    """Write a workload in the LMSYS form."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(("arrival_s", "client", "prompt_tokens", "output_tokens"))
    for request in requests:
        writer.writerow(
            (request.arrival_s, request.tenant, request.prompt_tokens, request.output_tokens)
        )


def bundled() -> list[TraceRequest]:
    """Read the workload that comes with the package."""
    return list(read_trace(TRACE_FILE))


def only(requests: Iterable[TraceRequest], tenant: str) -> list[TraceRequest]:
    """Keep the requests of one tenant, at their times."""
    return [request for request in requests if request.tenant == tenant]
