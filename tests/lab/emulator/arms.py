"""Compares arms: stated or predicted lengths, for a real and for a virtual scheduler.

An oracle of the lengths is a caller that asks for exactly its output (`max_tokens`), from a
scheduler that rarely reserves less: it predicts nothing before 1,000 requests have ended, and then
a length that 999 of 1,000 stay below. Configuration alone sets this.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from schedsvc_vllm.reports import FIRST_TOKEN_PERIOD_S, PROGRESS_PERIOD_S

from schedsvc.config import Config
from schedsvc_lab.engine import Profile, load_profile
from schedsvc_lab.load.target import OutputMode, Target
from schedsvc_lab.sim.requests import Requests
from schedsvc_lab.sim.runner import Report
from schedsvc_lab.workload import TraceRequest
from tests.lab.sim.filling import CAPACITY, ORACLE, OUTPUT_MAX, Filled, Filling, Traffic

OVERLOAD = 1.5
_TICKS = round(PROGRESS_PERIOD_S / FIRST_TOKEN_PERIOD_S)
# No request is refused, as in virtual time: each waits until its turn.
_PATIENT = {"queue_ttl_ms": 3_600_000, "flow_queue_max": 10**6, "queue_max": 10**6}


@dataclass(frozen=True)
class Arm:
    """Describes one side: changed defaults of the scheduler, and if clients ask for their output.

    `short` names its files.
    """

    name: str
    short: str
    oracle: bool
    expert: Mapping[str, Any] = field(default_factory=dict)

    def settings(self, tenants: Sequence[str], listener: Mapping[str, Any]) -> dict[str, Any]:
        """Return the configuration file as data."""
        return {
            "listeners": [dict(listener)],
            "scheduler": {**_PATIENT, "expert": dict(self.expert)},
            "unknown_tenants": "refuse",
            "tenants": [{"name": tenant} for tenant in tenants],
            "limits": {"drain_ms": 0},
        }

    def target(self, url: str) -> Target:
        """Return the endpoint as this side's clients use it; the lengths are the trace's."""
        output = OutputMode.FORCED if self.oracle else OutputMode.EMULATED
        return Target(url, output=output, max_tokens=OUTPUT_MAX)


PREDICTED = Arm("P90 peak form", "p90", oracle=False)
FORETOLD = Arm("oracle of the lengths", "oracle", oracle=True, expert=ORACLE)
ARMS = (PREDICTED, FORETOLD)


def traffic(profile: str, speed: float, seconds: int, seed: int) -> Requests:
    """Draw 20 tenants that ask for OVERLOAD times what the engine serves at this speed.

    The few prompts are left out that with OUTPUT_MAX exceed the engine's context: a server answers
    them with an error, and an oracle's callers ask for less.
    """
    per_s, _ = CAPACITY[profile]
    drawn = Traffic(OVERLOAD * per_s * speed, seconds, seed).draw()
    prompt_max = load_profile(profile).engine.context_tokens_max - OUTPUT_MAX
    return Requests(drawn.clients, [row for row in _rows(drawn) if row[2] <= prompt_max])


def _rows(requests: Requests) -> Iterator[tuple[int, int, int, int]]:
    return zip(
        requests.arrival_ns,
        requests.client,
        requests.prompt_tokens,
        requests.output_tokens,
        strict=True,
    )


def trace_of(requests: Requests) -> list[TraceRequest]:
    """Return the same requests for the load generator."""
    return [
        TraceRequest(at_ns / 1e9, requests.clients[client], prompt, output)
        for at_ns, client, prompt, output in _rows(requests)
    ]


def faster(profile: Profile, speed: float) -> Profile:
    """Return the engine whose steps take as long as the emulator's do at this speed."""

    def scaled(value: Any) -> Any:
        if isinstance(value, list):
            return [[count, round(ns / speed)] for count, ns in value]
        return round(value / speed)

    fields = {name: scaled(value) for name, value in profile.cost.model_dump().items()}
    cost = type(profile.cost).model_validate(fields)
    return profile.model_copy(update={"cost": cost})


class Twin(Filling):
    """Repeats the run in virtual time, with reports as the gate makes them.

    It reports first tokens soon, but all totals and the figures of the engine only once a second.
    The plain run reports everything five times a second.
    """

    def __init__(self, requests: Requests, profile: Profile, arm: Arm) -> None:
        self._ticks = 0
        self._told: set[int] = set()
        config = Config.model_validate(arm.settings(requests.clients, {"tcp": "127.0.0.1:0"}))
        super().__init__(
            requests,
            profile,
            oracle=arm.oracle,
            config=config,
            progress_ns=round(FIRST_TOKEN_PERIOD_S * 1e9),
        )

    def _tick(self) -> None:
        self._ticks += 1
        live = self._runners[0].live
        if self._ticks % _TICKS == 0:
            super()._tick()
            self._told = set(live)
            return
        self._told &= live.keys()
        report = self._runners[0].report(self.now_ns)
        first = {
            index: output
            for index, output in zip(report.requests, report.outputs(), strict=True)
            if output and index not in self._told
        }
        if first:
            self._told.update(first)
            outputs = array("q", first.values()).tobytes()
            self._tell(Report(tuple(first), outputs, 0, report.used_tokens))
        self._tick_ns = self.now_ns + self._progress_ns


def imitate(requests: Requests, profile: Profile, arm: Arm, learnt: float) -> Filled:
    """Play it in virtual time; sums up from this part of the run on."""
    run = Twin(requests, profile, arm)
    run.play()
    run.core.check()
    return run.since(learnt)
