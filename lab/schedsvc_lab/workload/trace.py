"""Holds the fields of a trace that a replay needs: tenant, lengths, time of each request."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from schedsvc_lab.workload.reader import TraceReader
from schedsvc_lab.workload.record import Record

__all__ = ["TraceRequest", "read_trace", "rescale"]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """Holds one request of a trace: who asked, when (seconds after the trace's start), how much.

    `record` is the whole record of the trace, if the caller asked for it.
    """

    arrival_s: float
    tenant: str
    prompt_tokens: int
    output_tokens: int
    record: Record | None = None


def read_trace(
    path: Path,
    *,
    tenant: str = "default",
    skipped: Counter[str] | None = None,
    keep_records: bool = False,
) -> Iterator[TraceRequest]:
    """Yield the requests of a trace in its order, which must be the order of arrival.

    Takes every form that has times and lengths. `tenant` labels the requests of a form that names
    none; `skipped` is given the reasons of records that are no requests; `keep_records` gives each
    request its record. Memory does not grow with the file. Raises TraceError if the file is wrong,
    holds no request, or lacks times or lengths, and OSError.
    """
    reader = TraceReader(path)
    if skipped is not None:
        reader.skipped = skipped
    for record in reader:
        if record.arrival_s is None:
            raise reader.wrong("arrival_s", "no arrival time: this trace cannot be replayed")
        if record.input_tokens is None or record.output_tokens is None:
            raise reader.wrong(
                "output_tokens" if record.input_tokens else "input_tokens",
                "no token counts: this trace cannot be replayed",
            )
        yield TraceRequest(
            arrival_s=record.arrival_s,
            tenant=record.tenant or tenant,
            prompt_tokens=record.input_tokens,
            output_tokens=record.output_tokens,
            record=record if keep_records else None,
        )


def rescale(
    requests: Iterable[TraceRequest],
    *,
    rate_scale: float = 1.0,
    ramp_s: float = 0.0,
    duration_s: float = math.inf,
) -> Iterator[TraceRequest]:
    """Yield requests at `rate_scale` times their rate, up to `duration_s` of the scaled time.

    The changing density of the arrivals is kept, but over the first `ramp_s` seconds the rate grows
    linearly from 0 to the scaled rate; later requests are shifted by half the ramp.
    """
    for request in requests:
        arrival_s = request.arrival_s / rate_scale
        if arrival_s < ramp_s / 2:
            # In a ramp of R seconds, t^2 / 2R seconds of the trace have passed after t.
            arrival_s = math.sqrt(2 * ramp_s * arrival_s)
        else:
            arrival_s += ramp_s / 2
        if arrival_s >= duration_s:
            return
        yield replace(request, arrival_s=arrival_s)
