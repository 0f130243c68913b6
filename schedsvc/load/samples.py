"""What became of each request, and running sums for whoever watches."""

import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

BIN_S = 0.25
"""Width of the bins in which arriving output is counted."""

RECENT_S = 5.0
"""How far back a live view looks."""


class Fate(Enum):
    """How a request ended, as its client saw it."""

    OPEN = "open"
    COMPLETED = "completed"
    REFUSED = "refused"
    ERROR = "error"


@dataclass(slots=True)
class Sample:
    """One request. Times in seconds since the run's start; NaN or -1 where it never happened.

    `intended_s` is when the trace says that it is sent; every latency counts from there, so a
    generator that falls behind makes latencies longer, never shorter. `events_of_bin` counts the
    events with output by the bin in which they came.
    """

    tenant: str
    intended_s: float
    sent_s: float = math.nan
    first_s: float = math.nan
    end_s: float = math.nan
    fate: Fate = Fate.OPEN
    reason: str = ""
    retry_after_ms: int = -1
    queue_ms: float = math.nan
    prompt_tokens: int = 0
    output_tokens: int = 0
    events: int = 0
    events_of_bin: dict[int, int] = field(default_factory=dict)

    @property
    def ttft_ms(self) -> float:
        """Intended send time to the first event with output; NaN without one."""
        return (self.first_s - self.intended_s) * 1e3

    @property
    def e2e_ms(self) -> float:
        """Intended send time to the end."""
        return (self.end_s - self.intended_s) * 1e3

    def output_tokens_between(self, from_s: float, until_s: float) -> float:
        """Output tokens that arrived in a window, to the bin.

        An engine may put several tokens into one event, so the total that the usage states is
        spread over the events.
        """
        if not self.events:
            return 0.0
        low, high = round(from_s / BIN_S), round(until_s / BIN_S)
        inside = sum(count for at, count in self.events_of_bin.items() if low <= at < high)
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
        """Drop what is older than RECENT_S. O(1) amortised."""
        for recent in (self.recent_ttft_ms, self.recent_events):
            while recent and recent[0][0] < now_s - RECENT_S:
                recent.popleft()

    def events_per_s(self, now_s: float) -> float:
        """Rate of events with output over the last RECENT_S."""
        return sum(count for _, count in self.recent_events) / min(RECENT_S, max(now_s, BIN_S))


class Recorder:
    """All samples of a run, and a tally for each tenant."""

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
        if not sample.events:
            sample.first_s = now_s
            tally.waiting -= 1
            tally.streaming += 1
            tally.recent_ttft_ms.append((now_s, sample.ttft_ms))
        sample.events += events
        at = int(now_s / BIN_S)
        sample.events_of_bin[at] = sample.events_of_bin.get(at, 0) + events
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
        else:
            tally.errors += 1
