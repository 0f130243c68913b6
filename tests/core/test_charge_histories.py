"""Runs histories of clients that leave early, with a model engine of a constant pace.

Whatever they do, each is charged at least the engine's computation for it, less one interval
between two reports, and at most its prompt.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import pytest

from schedsvc import _core as core
from tests.seeds import SEED

from .support import SECOND, make
from .test_quotas import left

STEP_NS = 10_000_000
STEP_TOKENS = 40  # 4,000 tokens a second
PLACES = 4
HONEST, LEAVER = 0, 1


@dataclass
class Run:
    """Holds one request in the engine."""

    flow: int
    prompt: int
    lease: int
    leaves_ns: int  # at the latest; 0: it waits for its answer
    leaves: Callable[[int], int]  # how long its client waits the next time
    done: int = 0


class World:
    """Holds tenants that ask again at once, and an engine that computes prompts in turn.

    Before each prompt the engine takes `fixed_steps`, whatever the size of the prompt.
    """

    def __init__(self, seed: int, fixed_steps: int = 0, **limits: int) -> None:
        self.fixed_tokens = fixed_steps * STEP_TOKENS
        self.random = Random(seed)
        flows = (("honest", 1000), ("leaver", 1000))
        self.core = make(*flows, capacity=1 << 20, max_running=PLACES, **limits)
        self.now_ns = 0
        self.asked = 0
        self.waiting: dict[int, tuple[int, int, Callable[[int], int]]] = {}
        self.running: list[Run] = []
        self.computed: Counter[int] = Counter()
        self.charged: Counter[int] = Counter()
        self.gone: list[tuple[int, int, int]] = []  # for each leaver: computed, charged, prompt

    def ask(self, flow: int, prompt: int, leaves: Callable[[int], int]) -> None:
        """Ask; `leaves`: how long after its grant the client leaves, by the prompt; 0: never."""
        self.asked += 1
        request_id = b"%d" % self.asked
        more = {"reports_progress": True, "tag": self.asked}
        assert self.core.admit(self.now_ns, flow, request_id, prompt, 1, **more) > 0
        self.waiting[self.asked] = flow, prompt, leaves

    def step(self) -> None:
        """Let the engine and the clients act for one step."""
        for decision in self.core.poll(self.now_ns):
            if decision.outcome == core.GRANTED:
                flow, prompt, leaves = self.waiting.pop(decision.tag)
                after_ns = leaves(prompt)
                leaves_ns = self.now_ns + after_ns if after_ns else 0
                run = Run(flow, prompt, decision.lease_id, leaves_ns, leaves, -self.fixed_tokens)
                self.running.append(run)
        self.now_ns += STEP_NS
        budget = STEP_TOKENS
        for run in list(self.running):
            more = min(budget, run.prompt - run.done)
            self.computed[run.flow] += max(0, run.done + more) - max(0, run.done)
            run.done += more
            budget -= more
            if run.done == run.prompt:
                self.core.progress(self.now_ns, run.lease, 1, run.prompt, 0, 1)
                self._end(run, core.COMPLETED)
            elif 0 < run.leaves_ns <= self.now_ns:
                self._end(run, core.CANCELLED)

    def _end(self, run: Run, outcome: int) -> None:
        self.running.remove(run)
        ended = self.core.complete(self.now_ns, run.lease, 1, outcome)
        assert ended is not None
        self.charged[run.flow] += ended.input_tokens
        if outcome == core.CANCELLED:
            self.gone.append((max(0, run.done), ended.input_tokens, run.prompt))
        self.ask(run.flow, run.prompt, run.leaves)


def never(prompt: int) -> int:
    del prompt
    return 0


@pytest.mark.parametrize("seed", range(SEED, SEED + 20))
def test_the_charge_is_between_what_was_computed_and_the_prompt(seed: int) -> None:
    world = World(seed)
    random = world.random

    def early(prompt: int) -> int:
        alone_ns = prompt * SECOND // (STEP_TOKENS * SECOND // STEP_NS)
        if random.random() < 0.3:
            return alone_ns * 9 // 10  # as a prefill that nothing delays
        return random.randint(1, 2 * alone_ns)

    world.ask(HONEST, 400, never)
    while not world.core.stats(world.now_ns)["pools"][0]["prefills_judged"]:
        world.step()  # one prefill by itself shows the pace
    for _ in range(random.randint(1, 12)):
        world.ask(LEAVER, random.randint(50, 3_000), early)
    for _ in range(1_500):
        world.step()
    world.core.check()
    assert len(world.gone) > 5
    for computed, charged, prompt in world.gone:
        assert computed - STEP_TOKENS <= charged <= prompt


@pytest.mark.parametrize("seed", range(SEED, SEED + 10))
def test_a_leaver_pays_what_was_computed_though_only_short_prompts_were_judged(seed: int) -> None:
    world = World(seed, fixed_steps=5)
    random = world.random
    for _ in range(2):
        world.ask(HONEST, random.randint(20, 200), never)
    while world.core.stats(world.now_ns)["pools"][0]["prefills_judged"] < 64:
        world.step()
    for _ in range(3):
        world.ask(LEAVER, random.randint(1_500, 3_000), lambda prompt: prompt * 225_000)
    while len(world.gone) < 6:
        world.step()
    for computed, charged, prompt in world.gone:
        assert computed - STEP_TOKENS <= charged <= prompt, world.gone


@pytest.mark.parametrize("connections", [10, 30])
def test_leaver_before_the_first_token_gets_only_its_share(connections: int) -> None:
    world = World(SEED)
    for _ in range(connections):
        world.ask(LEAVER, 3_000, lambda _: 700_000_000)
    for _ in range(4):
        world.ask(HONEST, 3_000, never)
    for _ in range(6_000):
        world.step()
    assert world.computed[HONEST] >= 0.45 * sum(world.computed.values())
    assert world.charged[LEAVER] >= world.computed[LEAVER] - PLACES * 3_000


def test_a_quota_grants_what_it_holds_to_clients_that_leave() -> None:
    world = World(SEED)
    world.core.set_flow_quota(0, LEAVER, total_tokens=10_000)
    world.ask(HONEST, 400, never)
    for _ in range(10):
        world.ask(LEAVER, 3_000, lambda _: 700_000_000)
    minutes = 5
    for _ in range(minutes * 60 * SECOND // STEP_NS):
        world.step()
    # Full at the start, then filled by the minute.
    assert world.computed[LEAVER] <= 10_000 * (1 + minutes) + 3_000
    assert left(world.core, world.now_ns, LEAVER)["TOKENS_PER_MINUTE"] <= 10_000


def test_leaving_at_90_percent_and_asking_again_costs_the_prompt_once_at_least() -> None:
    world = World(SEED)
    world.ask(LEAVER, 400, never)
    world.step()
    world.running[0].leaves = lambda _: 90_000_000  # the next prompt, at 90 % of its prefill
    while len(world.gone) < 2:
        world.step()
    assert [prompt for _, _, prompt in world.gone] == [400, 400]
    assert all(charged >= 0.9 * 400 for _, charged, _ in world.gone)
    assert world.charged[LEAVER] >= 2 * 400  # with the one that showed the pace
