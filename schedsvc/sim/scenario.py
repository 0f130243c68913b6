"""What a run is made of: an engine profile, a configuration, a policy, a seed."""

from collections.abc import Callable
from dataclasses import dataclass, field

from schedsvc._core import Scheduler
from schedsvc.config import UNKNOWN_TENANT, Config, configure
from schedsvc.sim.engine import Engine, EngineConfig, Profile
from schedsvc.sim.front import CoreFront, DirectFront, Front
from schedsvc.sim.peak import PeakFront
from schedsvc.sim.requests import Outcomes, Requests
from schedsvc.sim.runner import EngineRunner
from schedsvc.sim.world import Occupancy, Settings, World

POLICIES = {
    "engine": "no scheduler: the engine's own queue, first come, first served",
    "fcfs": "the scheduler, first come, first served",
    "vtc": "the scheduler, fair by virtual token counters",
}

# Without a configuration nobody is refused: everybody waits, for up to an hour.
_PATIENT = {"queue_ttl_ns": 3_600 * 10**9, "flow_queue_max": 10**6, "queue_max": 10**6}
_EPOCH = 1
# The VTC paper's server admits max(pool / 6, this) input tokens in one round.
_BATCH_TOKENS = 3_072


class ScenarioError(ValueError):
    """The parts do not fit together; the message names what is wrong."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything about a run but its policy and seed.

    Without `config`, each client is a flow of weight 1 and nobody is refused. The pools of the
    configuration are the engines; where it names none, there are `engines` like the profile.
    `output_tokens_max` is what every request asks for; 0: exactly what it will produce.
    """

    profile: Profile
    config: Config | None = None
    engines: int = 1
    settings: Settings = field(default_factory=Settings)
    jitter_ns: int = 0
    output_tokens_max: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """What came of one run. `capacity_tokens` is the KV cache of all engines."""

    policy: str
    seed: int
    requests: Requests
    outcomes: Outcomes
    occupancy: list[Occupancy]
    capacity_tokens: int
    end_ns: int
    preemptions: int
    digest: str


def engine_configs(scenario: Scenario) -> dict[str, EngineConfig]:
    """Size each pool's engine, by name. Raises ScenarioError where something does not fit."""
    profile, config = scenario.profile, scenario.config
    # The server of the VTC paper allocates by token, and computes prompts in steps of their own.
    rounds = scenario.settings.round_steps > 0
    pools = () if config is None else config.pools
    try:
        if not pools:
            made = profile.config(
                block_size_tokens=1 if rounds else None,
                prefill="separate" if rounds else None,
                step_tokens_max=max(profile.engine.step_tokens_max, profile.engine.kv_tokens)
                if rounds
                else None,
            )
            return {f"engine-{number}": made for number in range(1, scenario.engines + 1)}
        return {
            pool.name: profile.config(
                kv_tokens=pool.capacity_tokens,
                block_size_tokens=pool.block_size_tokens,
                sequences_max=pool.max_running or None,
                context_tokens_max=pool.max_model_tokens or None,
                prefill="separate" if rounds else None,
                step_tokens_max=max(profile.engine.step_tokens_max, pool.capacity_tokens)
                if rounds
                else None,
            )
            for pool in pools
        }
    except ValueError as error:
        raise ScenarioError(f"engine {profile.name}: {error}") from None


def simulate(
    scenario: Scenario,
    requests: Requests,
    policy: str,
    seed: int = 0,
    watch: Callable[[int], None] | None = None,
) -> Run:
    """Serve all requests under a policy. `watch` hears how many have ended.

    Policies are those of POLICIES, and "artifact": the VTC paper's own server, first come, first
    served, which needs `round_steps` and one engine.

    The seed draws the jitter of the arrivals; the same seed gives the same run.
    """
    jittered = requests.jittered(seed, scenario.jitter_ns)
    configs = engine_configs(scenario)
    if scenario.settings.round_steps and len(configs) > 1:
        raise ScenarioError("rounds of admission need exactly one engine")
    runners = [
        EngineRunner(
            Engine(config, scenario.profile.step_cost(config.sequences_max)),
            scenario.settings.round_steps,
        )
        for config in configs.values()
    ]
    front: Front
    if policy == "engine":
        front = DirectFront(runners)
    elif policy == "artifact":
        capacity_tokens = runners[0].engine.config.capacity_tokens
        front = PeakFront(jittered, capacity_tokens, max(capacity_tokens // 6, _BATCH_TOKENS))
    else:
        front = _core_front(scenario, jittered, policy, configs)
    world = World(jittered, front, runners, scenario.settings)
    world.run(watch)
    return Run(
        policy=policy,
        seed=seed,
        requests=jittered,
        outcomes=world.outcomes,
        occupancy=world.occupancy,
        capacity_tokens=sum(config.capacity_tokens for config in configs.values()),
        end_ns=world.now_ns,
        preemptions=world.preemptions(),
        digest=world.digest(),
    )


def _core_front(
    scenario: Scenario, requests: Requests, policy: str, configs: dict[str, EngineConfig]
) -> CoreFront:
    config = scenario.config
    options = dict(_PATIENT) if config is None else config.core_options()
    core = Scheduler(**{**options, "policy": policy})
    if config is None:
        flows = [core.set_flow(client.encode(), 1_000) for client in requests.clients]
    else:
        configure(core, config, 0)
        unknown = core.flow_index(UNKNOWN_TENANT.encode())
        known = [core.flow_index(client.encode()) for client in requests.clients]
        flows = [unknown if flow < 0 else flow for flow in known]
    if config is None or not config.pools:
        for name, engine in configs.items():
            core.set_pool(
                0,
                name.encode(),
                _EPOCH,
                engine.capacity_tokens,
                engine.block_size_tokens,
                engine.sequences_max,
                engine.context_tokens_max,
            )
    return CoreFront(core, requests, flows, scenario.output_tokens_max)
