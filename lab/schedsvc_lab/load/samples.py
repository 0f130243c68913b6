"""The outcome and times of each request, and running sums for a live view."""

import math
from array import array
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

RECENT_S = 5.0
"""How far back a live view looks."""

_START_S = 0.25


class Fate(Enum):
    """Says how a request ended for its client; INTERRUPTED: the run was stopped before it."""

    OPEN = "open"
    COMPLETED = "completed"
    REFUSED = "refused"
    ERROR = "error"
    INTERRUPTED = "interrupted"


@dataclass(slots=True)
class Sample:
    """Follows one request. Times are seconds since the run's start; NaN or -1 if it never happened.

    `intended_s` is the time in the trace (in a closed loop, the time of its turn). Every latency
    counts from it, so a generator that falls behind makes latencies longer, never shorter. `itls_s`
    are the times between events with output: 0 within one piece of the answer.
    `asked_prompt_tokens` and `asked_output_tokens` are the trace's, the other two are those of the
    server's usage.
    """

    tenant: str
    intended_s: float
    asked_prompt_tokens: int = 0
    asked_output_tokens: int = 0
    sent_s: float = math.nan
    first_s: float = math.nan
    last_s: float = math.nan
    end_s: float = math.nan
    fate: Fate = Fate.OPEN
    reason: str = ""
    retry_after_ms: int = -1
    queue_ms: float = math.nan
    prompt_tokens: int = 0
    output_tokens: int = 0
    events: int = 0
    itls_s: "array[float]" = field(default_factory=lambda: array("d"))

    @property
    def ttft_ms(self) -> float:
        """Return intended send time to the first event with output; NaN without one."""
        return (self.first_s - self.intended_s) * 1e3

    @property
    def e2e_ms(self) -> float:
        """Return intended send time to the end."""
        return (self.end_s - self.intended_s) * 1e3

    def event_times_s(self) -> NDArray[np.float64]:
        """Return when each event with output arrived. O(events)."""
        if not self.events:
            return np.empty(0)
        return np.cumsum(np.concatenate(([self.first_s], np.frombuffer(self.itls_s))))

    def output_tokens_between(self, from_s: float, until_s: float) -> float:
        """Return the output tokens that arrived in a window. O(events).

        An engine may put several tokens into one event, so the total that the usage states is
        spread over the events.
        """
        if not self.events:
            return 0.0
        times_s = self.event_times_s()
        inside = int(((times_s >= from_s) & (times_s < until_s)).sum())
        return inside * (self.output_tokens or self.events) / self.events


@dataclass(slots=True)
class Tally:
    """The running sums of one tenant."""

    sent: int = 0
    waiting: int = 0
    streaming: int = 0
    completed: int = 0
    refused: int = 0
    errors: int = 0
    events: int = 0
    recent_ttft_ms: deque[tuple[float, float]] = field(default_factory=deque)
    recent_events: deque[tuple[float, int]] = field(default_factory=deque)

    def forget(self, now_s: float) -> None:
        """Drop samples older than RECENT_S. O(1) amortised."""
        for recent in (self.recent_ttft_ms, self.recent_events):
            while recent and recent[0][0] < now_s - RECENT_S:
                recent.popleft()

    def events_per_s(self, now_s: float) -> float:
        """Return the rate of events with output over the last RECENT_S."""
        return sum(count for _, count in self.recent_events) / min(RECENT_S, max(now_s, _START_S))


class Recorder:
    """Holds all samples of a run, and a tally for each tenant."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.tallies: dict[str, Tally] = {}
        self.connect_ms: list[float] = []
        self.send_lag_ms: list[float] = []

    def tally(self, tenant: str) -> Tally:
        """Give the tally of a tenant, made on first use."""
        if tenant not in self.tallies:
            self.tallies[tenant] = Tally()
        return self.tallies[tenant]

    def sent(self, sample: Sample, now_s: float) -> None:
        """Note that the request goes out."""
        sample.sent_s = now_s
        self.samples.append(sample)
        self.send_lag_ms.append(max(0.0, (now_s - sample.intended_s) * 1e3))
        tally = self.tally(sample.tenant)
        tally.sent += 1
        tally.waiting += 1

    def output(self, sample: Sample, events: int, now_s: float) -> None:
        """Note that events with output arrived."""
        tally = self.tallies[sample.tenant]
        if sample.events:
            sample.itls_s.append(now_s - sample.last_s)
        else:
            sample.first_s = now_s
            tally.waiting -= 1
            tally.streaming += 1
            tally.recent_ttft_ms.append((now_s, sample.ttft_ms))
        if events > 1:
            sample.itls_s.extend([0.0] * (events - 1))
        sample.last_s = now_s
        sample.events += events
        tally.events += events
        tally.recent_events.append((now_s, events))

    def ended(self, sample: Sample, fate: Fate, now_s: float, reason: str = "") -> None:
        """Note that the request is over."""
        sample.fate, sample.end_s, sample.reason = fate, now_s, reason
        tally = self.tallies[sample.tenant]
        if sample.events:
            tally.streaming -= 1
        else:
            tally.waiting -= 1
        if fate is Fate.COMPLETED:
            tally.completed += 1
        elif fate is Fate.REFUSED:
            tally.refused += 1
        elif fate is Fate.ERROR:
            tally.errors += 1
