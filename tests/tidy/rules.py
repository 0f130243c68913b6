"""The house rules as data: rooms, who may import whom, sizes, bans. The tests beside it hold them.

A room is a module or package of the project; a module belongs to the room with the longest
matching name. A new edge here is a design decision: imports go one way.
"""

from dataclasses import dataclass

FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70
LINE_CHARS_MAX = 100

# How much a room may know of time.
NO_CLOCK, MONOTONIC, WALL = "no clock: time is passed in", "monotonic clocks only", "any clock"


@dataclass(frozen=True)
class Room:
    """What the modules of one room may use."""

    rooms: frozenset[str]
    packages: frozenset[str]  # outside the standard library
    never: frozenset[str]  # of the standard library
    clock: str
    seeded: bool  # random numbers come only from generators that were given their seed
    prints: bool  # it talks to a person


def room(
    rooms: str = "",
    packages: str = "",
    *,
    never: str = "",
    clock: str = MONOTONIC,
    seeded: bool = False,
    prints: bool = False,
) -> Room:
    """Make a room out of space-separated names."""
    allowed, third_party, banned = (frozenset(names.split()) for names in (rooms, packages, never))
    return Room(allowed, third_party, banned, clock, seeded, prints)


IO = "asyncio threading socket selectors ssl subprocess multiprocessing logging http urllib"

ROOMS: dict[str, Room] = {
    "schedsvc": room(),
    # Decides. The compiled part is held by CORE_CIMPORTS below, this is its interface.
    "schedsvc._core": room(never=IO, clock=NO_CLOCK, seeded=True),
    # Drives.
    "schedsvc.clock": room(clock=WALL),
    "schedsvc.config": room(packages="pydantic pydantic_core yaml"),
    "schedsvc.status": room("schedsvc._core schedsvc_client.v1", "grpc google grpc_status"),
    "schedsvc.driver": room("schedsvc._core schedsvc.clock schedsvc.config"),
    # The wall clock tells how long a scheduler was away: quotas are credited for it.
    "schedsvc.state": room("schedsvc._core schedsvc.driver", "structlog", clock=WALL),
    "schedsvc.recording": room("schedsvc._core schedsvc.config"),
    "schedsvc.service": room(
        "schedsvc._core schedsvc.driver schedsvc.status schedsvc_client.v1",
        "grpc google structlog",
    ),
    "schedsvc.metrics": room("schedsvc.driver schedsvc.status", "prometheus_client"),
    "schedsvc.server": room(
        "schedsvc.service schedsvc.status schedsvc.driver schedsvc.config schedsvc.metrics"
        " schedsvc.clock schedsvc.recording schedsvc.state schedsvc_client.v1",
        "aiohttp grpc grpc_health grpc_reflection prometheus_client structlog uvloop",
    ),
    # A process of its own before it: knows tokens and bytes, and decides nothing.
    "schedsvc.edge": room(
        "schedsvc.service schedsvc.status schedsvc.server schedsvc.config",
        "grpc grpc_health structlog uvloop",
    ),
    # Also drives, in virtual time.
    "schedsvc.workload": room(
        "schedsvc.workload.chat schedsvc.workload.tokenizers",
        "numpy pyarrow pydantic yaml",
        never=IO,
        clock=NO_CLOCK,
        seeded=True,
    ),
    # As a model's own server counts. The emulator uses them too, so they know nothing of traces.
    "schedsvc.workload.chat": room(packages="jinja2", never=IO, clock=NO_CLOCK, seeded=True),
    "schedsvc.workload.tokenizers": room(
        "schedsvc.workload.chat", "tokenizers", never=IO, clock=NO_CLOCK, seeded=True
    ),
    # Talks to the publishers of traces.
    "schedsvc.workload.fetch": room(packages="yaml"),
    "schedsvc.workload.plot": room("schedsvc.workload", "matplotlib numpy"),
    "schedsvc.workload.prefix.figures": room("schedsvc.workload", "matplotlib numpy"),
    # Holds conversations with a server, in real time.
    "schedsvc.workload.conversations_client": room("schedsvc.workload", "aiohttp"),
    "schedsvc.workload.conversations_report": room(
        "schedsvc.workload.conversations_client", "numpy"
    ),
    "schedsvc.sim": room(
        "schedsvc._core schedsvc.config schedsvc.sim.engine schedsvc.workload",
        "numpy",
        never=IO,
        clock=NO_CLOCK,
        seeded=True,
    ),
    "schedsvc.sim.figures": room(
        "schedsvc._core schedsvc.sim", "matplotlib numpy", never=IO, clock=NO_CLOCK, seeded=True
    ),
    "schedsvc.sim.overrides": room(
        "schedsvc.config schedsvc.sim.engine",
        "pydantic yaml",
        never=IO,
        clock=NO_CLOCK,
        seeded=True,
    ),
    # Reads the messages of the contract that a recording holds.
    "schedsvc.sim.replay": room(
        "schedsvc._core schedsvc.config schedsvc.recording schedsvc.sim schedsvc_client.v1",
        "google numpy",
        never=IO,
        clock=NO_CLOCK,
        seeded=True,
    ),
    # One engine model for the simulator and the emulator, so it knows neither.
    "schedsvc.sim.engine": room(packages="pydantic yaml", never=IO, clock=NO_CLOCK, seeded=True),
    # Everyone else asks.
    "schedsvc.emulator": room(
        "schedsvc.sim.engine schedsvc.workload",
        "httptools prometheus_client pydantic starlette uvicorn uvloop",
        clock=WALL,
    ),
    "schedsvc.load": room("schedsvc.workload", "aiohttp numpy rich", clock=WALL, seeded=True),
    # The service difference is defined once: a pure function of what was served when.
    "schedsvc.load.fairness": room("schedsvc.load schedsvc.sim", "numpy"),
    "schedsvc.load.result": room("schedsvc.load schedsvc.load.fairness", "numpy"),
    "schedsvc.load.plot": room("schedsvc.load", "matplotlib numpy"),
    "schedsvc.load.texts": room(
        "schedsvc.load schedsvc.workload schedsvc.workload.tokenizers", "numpy", seeded=True
    ),
    # Starts the other programs as processes: it imports none of them.
    "schedsvc.demo": room(
        "schedsvc.load schedsvc.workload schedsvc_client schedsvc_client.v1",
        "aiohttp grpc matplotlib numpy rich uvloop yaml",
        prints=True,
    ),
    # Commands. Each names the others by text, so that it loads only what it runs.
    "schedsvc.__main__": room("schedsvc.cli"),
    "schedsvc.cli": room(
        "schedsvc schedsvc.config schedsvc.server schedsvc.edge schedsvc_client",
        "click rich",
        prints=True,
    ),
    "schedsvc.emulator.cli": room(
        "schedsvc.emulator schedsvc.emulator.replay_cli schedsvc.sim.engine"
        " schedsvc.workload.tokenizers",
        "click",
        prints=True,
    ),
    "schedsvc.emulator.replay_cli": room(
        "schedsvc.emulator schedsvc.workload", "click uvloop", prints=True
    ),
    "schedsvc.load.cli": room(
        "schedsvc.load schedsvc.load.plot schedsvc.load.result schedsvc.load.texts"
        " schedsvc.workload schedsvc.workload.tokenizers",
        "click rich uvloop yaml",
        clock=WALL,
        prints=True,
    ),
    "schedsvc.workload.cli": room(
        "schedsvc.workload schedsvc.workload.chat schedsvc.workload.conversations_client"
        " schedsvc.workload.conversations_report schedsvc.workload.fetch schedsvc.workload.plot"
        " schedsvc.workload.prefix.figures schedsvc.workload.tokenizers",
        "click pydantic rich",
        prints=True,
    ),
    # Drives the core and the client's half of the Session protocol against each other.
    "schedsvc.sim.faults": room(
        "schedsvc._core schedsvc.clock schedsvc.state schedsvc_client schedsvc_client.v1"
        " schedsvc.sim.faults.auditor",
        never=IO,
        clock=NO_CLOCK,
        seeded=True,
    ),
    # Believes nothing of the core: it knows the contract alone.
    "schedsvc.sim.faults.auditor": room(
        "schedsvc_client.v1", never=IO, clock=NO_CLOCK, seeded=True
    ),
    "schedsvc.sim.faults.cli": room("schedsvc.sim.faults", "click rich", prints=True),
    "schedsvc.sim.cli": room(
        "schedsvc.config schedsvc.sim schedsvc.sim.engine schedsvc.sim.figures"
        " schedsvc.sim.overrides schedsvc.sim.replay schedsvc.workload",
        "click rich",
        prints=True,
    ),
    "schedsvc.demo.cli": room("schedsvc.demo schedsvc.load", "click", prints=True),
    # Pure Python that knows nothing of the server: an engine host never compiles anything.
    "schedsvc_client": room("schedsvc_client.v1", "grpc google grpc_status"),
    "schedsvc_client.v1": room(packages="grpc google"),
    "schedsvc_vllm": room("schedsvc_client", clock=WALL),
    # A process of its own, where the gate cannot be loaded; the gate needs none of its packages.
    "schedsvc_vllm.proxy": room("schedsvc_vllm schedsvc_client", "aiohttp yarl"),
    "bench": room(
        "schedsvc schedsvc._core schedsvc.driver schedsvc.service schedsvc.server schedsvc.config"
        " schedsvc.clock schedsvc.emulator schedsvc.load schedsvc.load.result schedsvc.workload"
        " schedsvc_client"
        " schedsvc_client.v1"
        " schedsvc_vllm",
        "Cython click google grpc matplotlib numpy pytest pytest_benchmark rich setuptools uvloop",
        clock=WALL,
        prints=True,
    ),
}

# The compiled core stands on libc and CPython's C interface alone.
CORE_CIMPORTS = frozenset({"libc", "cpython", "cython"})
CORE_IMPORTS = frozenset({"collections", "heapq", "typing"})

WALL_CLOCKS = frozenset(
    {
        "datetime.date.today",
        "datetime.datetime.now",
        "datetime.datetime.today",
        "datetime.datetime.utcnow",
        "time.gmtime",
        "time.localtime",
        "time.time",
        "time.time_ns",
    }
)
MONOTONIC_CLOCKS = frozenset(
    {
        "time.monotonic",
        "time.monotonic_ns",
        "time.perf_counter",
        "time.perf_counter_ns",
        "time.process_time",
        "time.process_time_ns",
        "time.sleep",
    }
)
# Makers of generators: fine once they are given a seed.
SEEDED_MAKERS = frozenset(
    {
        "numpy.random.Generator",
        "numpy.random.PCG64",
        "numpy.random.Philox",
        "numpy.random.SeedSequence",
        "numpy.random.default_rng",
        "random.Random",
    }
)
