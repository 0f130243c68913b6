"""Describes a run's inputs and result: an engine profile, a configuration, a policy, a seed."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from schedsvc._core import CallerError, Scheduler
from schedsvc.config import UNKNOWN_TENANT, Config, configure
from schedsvc_lab.engine import Engine, EngineConfig, EngineGauges, Future, Profile
from schedsvc_lab.sim.own_policy import OwnKeys, Policy, PolicyError, policy_name
from schedsvc_lab.sim.requests import Outcomes, Requests
from schedsvc_lab.sim.runner import EngineRunner
from schedsvc_lab.sim.scheduler_adapter import CoreAdapter, DirectAdapter, SchedulerAdapter
from schedsvc_lab.sim.world import Occupancy, Settings, World

POLICIES = {
    "engine": "no scheduler: the engine's own queue, first come, first served",
    "fcfs": "the scheduler, first come, first served",
    "vtc": "the scheduler, fair by virtual token counters",
    "vtc-predict": "VTC that charges the average output at once, and settles at the end",
    "vtc-oracle": "VTC that charges the true output at once (see oracle_error_ppm)",
    "dlpm": "fair by quanta, the longest cached prefix first",
    "lcf": "least counter first: VTC without lift",
    "sif": "shortest input first",
}

# Without a configuration requests wait for up to an hour. Those that fit no engine are refused.
_PATIENT = {"queue_ttl_ms": 3_600_000, "flow_queue_max": 10**6, "queue_max": 10**6}
_EPOCH = 1
_ORACLE = "vtc-oracle"
_PPM = 1_000_000


class ScenarioError(ValueError):
    """The parts do not fit together; the message names what is wrong."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Holds everything about a run but its policy and seed.

    Without `config`, each client is a flow of weight 1, and requests wait for up to an hour. The
    pools of the configuration are the engines; if it names none, there are `engines` like the
    profile.
    `output_tokens_max` is what every request asks for; 0: exactly what it will produce. An oracle's
    estimate is off by up to `oracle_error_ppm` of it, drawn from the seed. With `sessions` the
    conversations of the trace are sessions of agents.
    """

    profile: Profile
    config: Config | None = None
    engines: int = 1
    settings: Settings = field(default_factory=Settings)
    jitter_ns: int = 0
    output_tokens_max: int = 0
    oracle_error_ppm: int = 0
    sessions: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """Holds the result of one run.

    `capacity_tokens` is the KV cache of all engines, `pools` are their names.
    """

    policy: str
    seed: int
    requests: Requests
    outcomes: Outcomes
    occupancy: list[Occupancy]
    capacity_tokens: int
    end_ns: int
    engines: list[EngineGauges]
    pools: tuple[str, ...]
    expired: int
    digest: str

    @property
    def preemptions(self) -> int:
        """Return how many sequences the engines threw out."""
        return sum(each.preemptions for each in self.engines)


def engine_configs(scenario: Scenario) -> dict[str, EngineConfig]:
    """Size each pool's engine, by name. Raises ScenarioError if the sizes do not fit."""
    profile, config = scenario.profile, scenario.config
    # The server of the VTC paper allocates by token, and computes prompts in steps of their own.
    rounds = scenario.settings.round_steps > 0
    pools = () if config is None else config.pools
    try:
        if not pools:
            made = profile.config(
                block_size_tokens=1 if rounds else None,
                prefill="separate" if rounds else None,
                step_tokens_max=max(profile.engine.step_tokens_max, profile.kv_tokens)
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
                step_tokens_max=max(
                    profile.engine.step_tokens_max, pool.capacity_tokens or profile.kv_tokens
                )
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
    policy: Policy,
    seed: int = 0,
    watch: Callable[[int], None] | None = None,
) -> Run:
    """Serve all requests under a policy. `watch` hears how many have ended.

    Policies are those of POLICIES, and classes of the user's own, also named as
    package.module:Class; the configuration's own does not count. Raises PolicyError for what is
    wrong with such a class.

    The seed draws the jitter of the arrivals; the same seed gives the same run.
    """
    jittered = requests.jittered(seed, scenario.jitter_ns)
    configs = engine_configs(scenario)
    if scenario.settings.round_steps and len(configs) > 1:
        raise ScenarioError("rounds of admission need exactly one engine")
    if len(configs) > 1 and "belady" in {config.prefix_cache for config in configs.values()}:
        raise ScenarioError("prefix_cache: belady foresees one engine; there are more")
    runners = [
        EngineRunner(
            Engine(
                config,
                scenario.profile.step_cost(config.sequences_max),
                _future(jittered, config),
            ),
            scenario.settings.round_steps,
        )
        for config in configs.values()
    ]
    adapter: SchedulerAdapter
    if policy == "engine":
        adapter = DirectAdapter(runners)
    else:
        told = _foretold(jittered, seed, scenario.oracle_error_ppm) if policy == _ORACLE else None
        adapter = _core_adapter(scenario, jittered, policy, configs, told)
    world = World(jittered, adapter, runners, scenario.settings)
    try:
        world.run(watch)
    except CallerError as error:
        if error.field not in ("key", "place"):
            raise
        raise PolicyError(f"{policy_name(policy)}.{error}") from error
    return Run(
        policy=policy_name(policy),
        seed=seed,
        requests=jittered,
        outcomes=world.outcomes,
        occupancy=world.occupancy,
        capacity_tokens=sum(config.capacity_tokens for config in configs.values()),
        end_ns=world.now_ns,
        engines=world.gauges(),
        pools=tuple(configs),
        expired=adapter.expired,
        digest=world.digest(),
    )


def _future(requests: Requests, config: EngineConfig) -> Future | None:
    """Foresee which blocks will be asked for, if the engine's cache needs that."""
    if config.prefix_cache != "belady":
        return None
    if requests.contents is None:
        return Future(())
    return requests.contents.future(
        requests.place, requests.prompt_tokens, config.block_size_tokens
    )


def patient_config(clients: Sequence[str]) -> Config:
    """Configure a scheduler that refuses no request and weighs clients alike. O(clients).

    Raises ScenarioError if a client cannot be the name of a tenant.
    """
    try:
        return Config.model_validate(
            {
                "listeners": [{"tcp": "127.0.0.1:0"}],
                "scheduler": _PATIENT,
                "unknown_tenants": "refuse",
                "tenants": [{"name": client} for client in clients],
            }
        )
    except ValueError as error:
        raise ScenarioError(f"the trace's clients: {error}") from None


def _foretold(requests: Requests, seed: int, error_ppm: int) -> "array[int]":
    """Draw what an oracle says of each request's output, at least one token. O(requests)."""
    draws = Random(f"oracle {seed}")  # noqa: S311 - a simulation, no secret
    return array(
        "i",
        (
            max(1, tokens * (_PPM + draws.randint(-error_ppm, error_ppm)) // _PPM)
            for tokens in requests.output_tokens
        ),
    )


def _make_core(
    config: Config, policy: Policy, requests: Requests, output_tokens_max: int
) -> Scheduler:
    """Make the core under a policy of its own, or under one of the user's."""
    options = config.core_options()
    if isinstance(policy, str) and ":" not in policy:
        return Scheduler(**{**options, "policy": policy})
    keys = OwnKeys(policy, requests, output_tokens_max)
    options["policy"] = "external"
    return Scheduler(**options, key=keys.key, place=keys.place if keys.has_places else None)


def _core_adapter(
    scenario: Scenario,
    requests: Requests,
    policy: Policy,
    configs: dict[str, EngineConfig],
    told: "array[int] | None",
) -> CoreAdapter:
    config = scenario.config or patient_config(requests.clients)
    core = _make_core(config, policy, requests, scenario.output_tokens_max)
    configure(core, config, 0)
    unknown = core.flow_index(UNKNOWN_TENANT.encode())
    known = [core.flow_index(client.encode()) for client in requests.clients]
    sized = {pool.name for pool in config.pools if pool.capacity_tokens}
    for name, engine in configs.items():
        if name not in sized:
            core.set_pool(
                0,
                name.encode(),
                _EPOCH,
                engine.capacity_tokens,
                engine.block_size_tokens,
                engine.sequences_max,
                engine.context_tokens_max,
            )
    flows = [unknown if flow < 0 else flow for flow in known]
    caches = any(engine.prefix_cache != "off" for engine in configs.values())
    return CoreAdapter(
        core,
        requests,
        flows,
        scenario.output_tokens_max,
        told,
        prefixes=caches,
        sessions=scenario.sessions,
    )
