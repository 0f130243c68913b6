"""Runs sessions of agents that together hold four times the KV cache, with a cap and without.

    python -m schedsvc_lab.sim.cli.agent_sessions
    python -m schedsvc_lab.sim.cli.agent_sessions --cap 0.6 --seconds 3600 --seed 2 --json

The engine is simulated, with an LRU prefix cache; the scheduler is the production core. A client
asks for the next turn of its session when the answer has come and its tool has run; a turn's prompt
is all that was said before it. A session that has had its turns is followed by a new one.

The table shows the cap as a part of the KV cache (0: none), and the part of the prompts that the
cache held. Then come turns a minute, sessions that had all their turns, and the waits of turns,
in the median and at most. `begin` is the longest wait of a first turn, `ratio` the hit rate over
that without a cap.
"""

import heapq
import random
from dataclasses import dataclass, field
from typing import Any

from schedsvc import _core as core
from schedsvc_lab.engine import Engine, load_profile
from schedsvc_lab.sim.requests import NEVER
from schedsvc_lab.sim.runner import EngineRunner

SECOND = 10**9
PROGRESS_NS = SECOND // 5
FIRST_TOKENS, ADDED_TOKENS, ANSWER_TOKENS, TURNS = 240, 40, 60, 8
#: Prompt and output of the last turn.
FOOTPRINT_TOKENS = FIRST_TOKENS + TURNS * (ADDED_TOKENS + ANSWER_TOKENS)
TOOL_S = 2.0
TIMES_KV = 4


@dataclass
class Agent:
    """Simulates a client with one session at a time."""

    number: int
    serial: int = 0
    turn: int = 0
    asked_ns: int = 0
    began: bool = False

    @property
    def session(self) -> bytes:
        """Return the name of the session."""
        return b"agent-%d-%d" % (self.number, self.serial)

    @property
    def prompt_tokens(self) -> int:
        """Return the tokens of this turn's prompt: all said before, and what the turn adds."""
        return FIRST_TOKENS + self.turn * (ADDED_TOKENS + ANSWER_TOKENS) + ADDED_TOKENS


@dataclass
class Figures:
    """Sums over one run."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    turns: int = 0
    sessions: int = 0
    waits_s: list[float] = field(default_factory=list)
    begins_s: list[float] = field(default_factory=list)

    def row(self, seconds: float) -> dict[str, Any]:
        """Return the figures that the table shows."""
        waits = sorted(self.waits_s)
        return {
            "hit_rate": round(self.cached_tokens / max(1, self.prompt_tokens), 3),
            "turns_per_minute": round(self.turns * 60 / seconds, 1),
            "sessions": self.sessions,
            "wait_p50_s": round(waits[len(waits) // 2], 2),
            "wait_max_s": round(waits[-1], 1),
            "begin_max_s": round(max(self.begins_s), 1),
        }


class Run:
    """Runs agents, the core and an engine, in virtual time."""

    def __init__(self, cap: float, seconds: int, seed: int) -> None:
        profile = load_profile("a10g-llama2-7b")
        config = profile.config(prefix_cache="lru")
        self.engine = EngineRunner(Engine(config, profile.step_cost(config.sequences_max)))
        self.core = core.Scheduler(queue_ttl_ns=3_600 * SECOND)
        self.flow = self.core.set_flow(b"agents", 1_000)
        self.core.set_pool(0, b"p", 1, config.capacity_tokens, config.block_size_tokens)
        if cap:
            most = int(config.capacity_tokens * cap)
            self.core.set_pool_limits(0, sessions_max_tokens=most)
        self.block = config.block_size_tokens
        self.end_ns = seconds * SECOND
        self.random = random.Random(seed)  # noqa: S311 - a simulation, no secret
        count = TIMES_KV * config.capacity_tokens // FOOTPRINT_TOKENS
        self.agents = [Agent(number) for number in range(count)]
        self.due: list[tuple[int, int]] = []
        for agent in self.agents:
            self._think(0, agent)
        self.asking: dict[int, Agent] = {}  # by request
        self.leases: dict[int, int] = {}
        self.requests = 0
        self.figures = Figures()

    def play(self) -> Figures:
        """Run until the end of the virtual time."""
        now_ns = tick_ns = 0
        while now_ns < self.end_ns:
            if self.engine.end_ns == now_ns:
                self._finish(now_ns)
            if now_ns >= tick_ns:
                self._report(now_ns)
                tick_ns = now_ns + PROGRESS_NS
            while self.due and self.due[0][0] <= now_ns:
                self._ask(now_ns, self.agents[heapq.heappop(self.due)[1]])
            self._decide(now_ns)
            if self.engine.end_ns == NEVER:
                self.engine.plan(now_ns)
            now_ns = self._next_ns(now_ns, tick_ns)
        self.core.check()
        waiting = [now_ns - a.asked_ns for a in self.asking.values()]
        # Sessions that wait at the end have waited, too.
        self.figures.waits_s += [ns / SECOND for ns in waiting]
        return self.figures

    def _next_ns(self, now_ns: int, tick_ns: int) -> int:
        times = [self.due[0][0]] if self.due else []
        times += [self.engine.end_ns] if self.engine.end_ns != NEVER else []
        times += [tick_ns] if self.engine.live else []
        deadline_ns = self.core.next_deadline()
        times += [deadline_ns] if deadline_ns >= 0 else []
        return max(now_ns, min(times))

    def _think(self, now_ns: int, agent: Agent) -> None:
        tool_ns = int(self.random.expovariate(1 / TOOL_S) * SECOND)
        heapq.heappush(self.due, (now_ns + 1 + tool_ns, agent.number))

    def _ask(self, now_ns: int, agent: Agent) -> None:
        agent.asked_ns = now_ns
        self.requests += 1
        self.asking[self.requests] = agent
        self.core.admit(
            now_ns, self.flow, b"%d" % self.requests, agent.prompt_tokens, ANSWER_TOKENS,
            reports_progress=True, tag=self.requests, session=agent.session,
        )  # fmt: skip

    def _decide(self, now_ns: int) -> None:
        for decision in self.core.poll(now_ns):
            if decision.outcome != core.GRANTED:
                raise core.InvariantError(f"a turn was not granted: outcome {decision.outcome}")
            agent = self.asking[decision.tag]
            waited_s = (now_ns - agent.asked_ns) / SECOND
            self.figures.waits_s.append(waited_s)
            if not agent.began:
                agent.began = True
                self.figures.begins_s.append(waited_s)
            self.leases[decision.tag] = decision.lease_id
            blocks = agent.prompt_tokens // self.block
            keys = tuple((agent.session, k) for k in range(blocks))
            self.engine.add(now_ns, decision.tag, agent.prompt_tokens, ANSWER_TOKENS, keys)

    def _report(self, now_ns: int) -> None:
        report = self.engine.report(now_ns)
        for request, output in zip(report.requests, report.outputs(), strict=True):
            self.core.progress(now_ns, self.leases[request], 1, -1, -1, output)
        running, waiting, preemptions = self.engine.engine.counts()
        self.core.telemetry(now_ns, 0, 1, running, waiting, report.used_tokens, preemptions)

    def _finish(self, now_ns: int) -> None:
        _, finished = self.engine.finish()
        for request in finished:
            agent = self.asking.pop(request)
            cached = self.engine.cached.get(request, 0)
            self.figures.prompt_tokens += agent.prompt_tokens
            self.figures.cached_tokens += cached
            self.figures.turns += 1
            self.core.complete(
                now_ns, self.leases.pop(request), 1, core.COMPLETED, agent.prompt_tokens, cached,
                ANSWER_TOKENS,
            )  # fmt: skip
            agent.turn += 1
            if agent.turn == TURNS:
                self.figures.sessions += 1
                agent.serial, agent.turn, agent.began = agent.serial + 1, 0, False
            self._think(now_ns, agent)


def compare(caps: tuple[float, ...], seconds: int, seed: int) -> list[dict[str, Any]]:
    """Run once for each cap (0: none); a row for each."""
    rows = []
    for cap in caps:
        figures = Run(cap, seconds, seed).play()
        rows.append({"cap": cap, **figures.row(seconds)})
    without = rows[0]["hit_rate"]
    for row in rows:
        row["hit_rate_ratio"] = round(row["hit_rate"] / without, 2) if without else None
    return rows
