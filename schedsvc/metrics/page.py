"""Writes the page of metrics: the families of a snapshot, and what the server itself counts.

Imported for the first page, because a scheduler that no one scrapes needs no such library.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, chain

from prometheus_client import ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from schedsvc.metrics.families import families, in_parts
from schedsvc.metrics.snapshot import LAG_BOUNDS_S, Counts, Snapshot

__all__ = ["Encoder", "encoder_of", "own_families", "written"]

Encoder = Callable[[Collector], bytes]

_OPENMETRICS = "application/openmetrics-text; version=1.0.0"
#: How a page in the OpenMetrics format ends.
_END = b"# EOF\n"
_LE = [*map(str, LAG_BOUNDS_S), "+Inf"]
_PROCESS = ProcessCollector(registry=None)


def encoder_of(*, openmetrics: bool) -> tuple[Encoder, str]:
    """Return the encoder of plain text or of OpenMetrics 1.0, and its content type."""
    # Not what a client asked for: the library raises at a version that is no number.
    return choose_encoder(_OPENMETRICS if openmetrics else "")


def written(taken: Snapshot | None, counts: Counts, encoder: Encoder) -> Iterator[bytes]:
    """Write the page in parts. Those of one family come in a row, under one heading. O(series)."""
    name, heading = "", 0
    for family in chain(families(taken), own_families(counts)):
        text = encoder(_Page([family])).removesuffix(_END)
        if family.name == name:
            yield text[heading:]
        else:
            yield text
            name, heading = family.name, len(_heading(encoder, family))
    yield encoder(_PROCESS)


def own_families(counts: Counts) -> Iterator[Metric]:
    """Yield what is counted by the server, and not in the core. O(series)."""
    for name, (text, count) in counts.process.items():
        family = CounterMetricFamily(name, text)
        family.add_metric((), count())
        yield family
    series = list(counts.failures.items())
    text = "Calls that ended in a gRPC error."
    yield from in_parts(CounterMetricFamily, "rpc_failures", text, ("method", "code"), series)
    text = "Calls refused and Sessions read later, because a caller had used up its budget."
    held = list(counts.throttled.items())
    yield from in_parts(CounterMetricFamily, "throttled", text, ("caller", "what"), held)
    yield HistogramMetricFamily(
        "schedsvc_event_loop_lag_seconds",
        "How late the event loop served a timer, in seconds.",
        buckets=list(zip(_LE, accumulate(counts.lags), strict=True)),
        sum_value=counts.lag_sum_s,
    )


class _Page(Collector):
    """Holds families as prometheus_client's encoders want them."""

    def __init__(self, found: Iterable[Metric]) -> None:
        self._found = found

    def collect(self) -> Iterable[Metric]:
        return self._found


def _heading(encoder: Encoder, family: Metric) -> bytes:
    empty = Metric(family.name, family.documentation, family.type, family.unit)
    return encoder(_Page([empty])).removesuffix(_END)
