"""Holds the house rules as data: rooms, imports, sizes, bans. The tests beside it hold them.

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
    """Names the rooms and clocks that the modules of one room may use."""

    rooms: frozenset[str]
    packages: frozenset[str]  # outside the standard library
    never: frozenset[str]  # modules of the standard library
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
    "schedsvc.text": room(),
    "schedsvc.records": room(),
    # Decides. The compiled part is held by CORE_CIMPORTS below, this is its interface.
    "schedsvc._core": room(
        "schedsvc._core_cluster schedsvc._core_settings", never=IO, clock=NO_CLOCK, seeded=True
    ),
    "schedsvc._core_settings": room(never=IO, clock=NO_CLOCK),
    "schedsvc._core_cluster": room("schedsvc._core_usage", never=IO, clock=NO_CLOCK, seeded=True),
    "schedsvc._core_usage": room("schedsvc._core_tenants", never=IO, clock=NO_CLOCK, seeded=True),
    "schedsvc._core_tenants": room(never=IO, clock=NO_CLOCK, seeded=True),
    # Drives.
    "schedsvc.driver.clock": room(clock=WALL),
    "schedsvc.text.printable": room(packages="google", never=IO, clock=NO_CLOCK),
    "schedsvc.text.numerals": room(never=IO, clock=NO_CLOCK),
    "schedsvc.text.reason_words": room(never=IO, clock=NO_CLOCK),
    "schedsvc.text.request_ids": room(never=IO, clock=NO_CLOCK),
    "schedsvc.server.malloc": room(clock=NO_CLOCK),
    "schedsvc.service.gcra": room(never=IO, clock=NO_CLOCK),
    # Pure functions of Stats: no clock, no core.
    "schedsvc.service.judged_tenants": room("schedsvc_client.v1", never=IO, clock=NO_CLOCK),
    "schedsvc.service.judgement": room(
        "schedsvc.service.judged_tenants schedsvc_client.v1", never=IO, clock=NO_CLOCK
    ),
    # Types of options, for every command.
    "schedsvc.text.option_types": room(
        "schedsvc.text.numerals", "click", clock=NO_CLOCK, prints=True
    ),
    # Fits tables to a terminal, for every command that prints them.
    "schedsvc.text.tables": room(packages="rich", clock=NO_CLOCK, prints=True),
    "schedsvc.config": room(
        "schedsvc.text.numerals schedsvc.text.printable", packages="pydantic pydantic_core yaml"
    ),
    "schedsvc.service.status": room("schedsvc._core schedsvc_client.v1", "grpc google grpc_status"),
    "schedsvc.driver.upkeep": room(never=IO, clock=NO_CLOCK),
    "schedsvc.records.held_file": room(never=IO, clock=NO_CLOCK),
    "schedsvc.records.sqlite_files": room("schedsvc.records.sqlite_log", never=IO, clock=NO_CLOCK),
    "schedsvc.records.sqlite_log": room(never=IO, clock=NO_CLOCK),
    "schedsvc.driver": room(
        "schedsvc._core schedsvc._core_cluster schedsvc._core_usage schedsvc.driver.clock"
        " schedsvc.config"
        " schedsvc.driver.calls schedsvc.driver.views schedsvc.driver.upkeep"
    ),
    "schedsvc.driver.views": room("schedsvc._core schedsvc.driver.clock schedsvc.driver.calls"),
    # Reads all rows of the core, for Stats and the pages.
    "schedsvc.driver.slices": room("schedsvc.driver", clock=NO_CLOCK),
    "schedsvc.driver.calls": room("schedsvc._core schedsvc.driver.clock schedsvc.driver.upkeep"),
    # The wall clock determines in which quarter of an hour a lease ended.
    "schedsvc.records.usage": room(
        "schedsvc._core schedsvc._core_usage schedsvc.config schedsvc.driver"
        " schedsvc.records.held_file"
        " schedsvc.records.sqlite_files",
        "structlog",
        clock=WALL,
    ),
    "schedsvc.records.usage.parquet": room(packages="pyarrow"),
    # The wall clock gives the time that a scheduler was away: quotas are credited for it.
    "schedsvc.records.state": room(
        "schedsvc._core schedsvc.driver schedsvc.records.held_file schedsvc.records.sqlite_files"
        " schedsvc.records.sqlite_log",
        "structlog",
        clock=WALL,
    ),
    "schedsvc.records.recording": room("schedsvc._core schedsvc.config schedsvc.records.held_file"),
    "schedsvc.service": room(
        "schedsvc._core schedsvc.driver.clock schedsvc.driver schedsvc.service.gcra"
        " schedsvc.driver.slices schedsvc.service.judgement"
        " schedsvc.service.status schedsvc_client.v1",
        "grpc google structlog",
    ),
    "schedsvc.metrics.rows": room(never=IO, clock=NO_CLOCK),
    "schedsvc.metrics.snapshot": room(
        "schedsvc.driver schedsvc.metrics.rows schedsvc.service.status", clock=NO_CLOCK
    ),
    "schedsvc.metrics.families": room(
        "schedsvc._core schedsvc.driver schedsvc.metrics.rows schedsvc.metrics.snapshot"
        " schedsvc.service.status",
        "prometheus_client",
    ),
    "schedsvc.metrics.page": room(
        "schedsvc.metrics.families schedsvc.metrics.snapshot", "prometheus_client", clock=NO_CLOCK
    ),
    "schedsvc.metrics.groups": room("schedsvc.metrics.rows", never=IO, clock=NO_CLOCK),
    "schedsvc.metrics": room(
        "schedsvc._core schedsvc.driver schedsvc.metrics.groups schedsvc.metrics.page"
        " schedsvc.metrics.rows schedsvc.metrics.snapshot schedsvc.driver.slices"
    ),
    # gRPC for any handlers: it knows nothing of the service.
    "schedsvc.transport": room("schedsvc.transport.wire", "grpc ngh2 structlog"),
    "schedsvc.transport.wire": room(never=IO, clock=NO_CLOCK),
    "schedsvc.server": room(
        "schedsvc.cluster schedsvc.service schedsvc.service.status schedsvc.driver schedsvc.config"
        " schedsvc.metrics.page schedsvc.metrics"
        " schedsvc.driver.clock schedsvc.service.gcra schedsvc.server.malloc"
        " schedsvc.text.printable schedsvc.records.recording"
        " schedsvc.text.reason_words"
        " schedsvc.text.request_ids schedsvc.driver.slices schedsvc.records.state"
        " schedsvc.records.usage schedsvc.transport schedsvc_client.v1",
        "aiohttp grpc grpc_health grpc_reflection structlog uvloop",
    ),
    # Members of a cluster; the server imports it only if the configuration has that key.
    "schedsvc.cluster": room(
        "schedsvc.driver.clock schedsvc.config schedsvc.driver schedsvc_client.v1",
        "grpc redis structlog",
        clock=WALL,
    ),
    # A separate process before it: it knows tokens and bytes, and decides nothing.
    "schedsvc.edge": room(
        "schedsvc.service schedsvc.service.status schedsvc.server schedsvc.config"
        " schedsvc.service.gcra"
        " schedsvc.server.malloc",
        "grpc grpc_health structlog uvloop",
    ),
    # The laboratory: what people use around the service, which knows nothing of it.
    "schedsvc_lab": room(),
    "schedsvc_lab.options": room(packages="click", prints=True),
    # Also drives, in virtual time.
    "schedsvc_lab.workload": room(
        "schedsvc_lab.workload.chat schedsvc_lab.workload.tokenizers",
        "numpy pyarrow pydantic yaml",
        never=IO,
        clock=NO_CLOCK,
        seeded=True,
    ),
    # Counts as a model's own server does. The emulator uses it too, so it knows nothing of traces.
    "schedsvc_lab.workload.chat": room(packages="jinja2", never=IO, clock=NO_CLOCK, seeded=True),
    "schedsvc_lab.workload.tokenizers": room(
        "schedsvc_lab.workload.chat", "tokenizers", never=IO, clock=NO_CLOCK, seeded=True
    ),
    # Talks to the publishers of traces.
    "schedsvc_lab.workload.fetch": room(packages="yaml"),
    "schedsvc_lab.workload.plot": room("schedsvc_lab.workload", "matplotlib numpy"),
    "schedsvc_lab.workload.prefix.figures": room("schedsvc_lab.workload", "matplotlib numpy"),
    # Holds conversations with a server, in real time.
    "schedsvc_lab.workload.conversations_client": room("schedsvc_lab.workload", "aiohttp"),
    "schedsvc_lab.workload.conversations_report": room(
        "schedsvc_lab.workload.conversations_client", "numpy"
    ),
    "schedsvc_lab.sim": room(
        "schedsvc._core schedsvc.config schedsvc_lab.engine schedsvc_lab.workload",
        "numpy",
        never=IO,
        clock=NO_CLOCK,
        seeded=True,
    ),
    "schedsvc_lab.sim.workers": room(never="threading", clock=NO_CLOCK),
    # People call it from Python.
    "schedsvc_lab.sim.notebook": room(
        "schedsvc.config schedsvc_lab.engine schedsvc_lab.sim schedsvc_lab.sim.figures"
        " schedsvc_lab.sim.overrides schedsvc_lab.sim.workers",
        "numpy pandas",
        never=IO,
        seeded=True,
    ),
    "schedsvc_lab.sim.figures": room(
        "schedsvc._core schedsvc_lab.sim", "matplotlib numpy", never=IO, clock=NO_CLOCK, seeded=True
    ),
    # The keys of one tenant or group, checked like those of a file.
    "schedsvc_lab.sim.named_entries": room(
        "schedsvc.config", "pydantic", never=IO, clock=NO_CLOCK, seeded=True
    ),
    "schedsvc_lab.sim.overrides": room(
        "schedsvc.config schedsvc_lab.engine schedsvc_lab.sim.named_entries",
        "pydantic yaml",
        never=IO,
        clock=NO_CLOCK,
        seeded=True,
    ),
    # Reads the messages of the contract that a recording holds.
    "schedsvc_lab.sim.replay": room(
        "schedsvc._core schedsvc.config schedsvc.records.recording schedsvc_lab.sim"
        " schedsvc_client.v1",
        "google numpy",
        never=IO,
        clock=NO_CLOCK,
        seeded=True,
    ),
    # Searches for a configuration by simulations.
    "schedsvc_lab.advise": room(
        "schedsvc._core schedsvc.config schedsvc_lab.sim schedsvc_lab.sim.named_entries",
        "numpy rich yaml",
        never=IO,
        clock=NO_CLOCK,
        seeded=True,
    ),
    # Reads a recording, and fits an engine to it.
    "schedsvc_lab.advise.recorded": room(
        "schedsvc._core schedsvc_lab.engine schedsvc_lab.sim schedsvc_lab.sim.replay"
        " schedsvc_client.v1",
        "numpy",
        never=IO,
        clock=NO_CLOCK,
        seeded=True,
    ),
    "schedsvc_lab.advise.figure": room(
        "schedsvc_lab.advise schedsvc_lab.sim.figures",
        "matplotlib",
        never=IO,
        clock=NO_CLOCK,
        seeded=True,
    ),
    # One engine model for the simulator and the emulator, so it knows neither.
    "schedsvc_lab.engine": room(packages="pydantic yaml", never=IO, clock=NO_CLOCK, seeded=True),
    # Everyone else asks.
    "schedsvc_lab.emulator": room(
        "schedsvc_lab.engine schedsvc_lab.workload",
        "httptools prometheus_client pydantic starlette uvicorn uvloop",
        clock=WALL,
    ),
    "schedsvc_lab.load": room(
        "schedsvc_lab.workload", "aiohttp numpy rich", clock=WALL, seeded=True
    ),
    # The service difference is defined once: a pure function of service over time.
    "schedsvc_lab.load.fairness": room("schedsvc_lab.load schedsvc_lab.sim", "numpy"),
    "schedsvc_lab.load.result": room("schedsvc_lab.load schedsvc_lab.load.fairness", "numpy"),
    "schedsvc_lab.load.plot": room("schedsvc_lab.load", "matplotlib numpy"),
    "schedsvc_lab.load.texts": room(
        "schedsvc_lab.load schedsvc_lab.workload schedsvc_lab.workload.tokenizers",
        "numpy",
        seeded=True,
    ),
    # Starts the other programs as processes: it imports none of them.
    "schedsvc_lab.demo": room(
        "schedsvc_lab.load schedsvc_lab.workload schedsvc_client schedsvc_client.v1",
        "aiohttp grpc matplotlib numpy rich uvloop yaml",
        prints=True,
    ),
    # Commands. Each names the others by text, so it loads only its own code.
    "schedsvc.__main__": room("schedsvc.cli"),
    # The laboratory asks a running scheduler by these two.
    "schedsvc.cli.connect": room(
        "schedsvc.config schedsvc.text.printable schedsvc_client", "click"
    ),
    "schedsvc.cli.tenant_entry": room("schedsvc_client"),
    "schedsvc.cli": room(
        "schedsvc schedsvc.config schedsvc.text.option_types schedsvc.text.printable"
        " schedsvc.text.reason_words schedsvc.text.request_ids"
        " schedsvc.cli.connect schedsvc.cli.tenant_entry"
        " schedsvc.text.tables schedsvc.server schedsvc.edge schedsvc.records.usage"
        " schedsvc.records.usage.parquet"
        " schedsvc.records.sqlite_files schedsvc.records.state schedsvc_client",
        "click rich",
        prints=True,
    ),
    "schedsvc.cli.cluster": room(
        "schedsvc.cli schedsvc.cli.cluster_status schedsvc.cluster schedsvc.config"
        " schedsvc.text.printable",
        "click rich",
        prints=True,
    ),
    "schedsvc.cli.cluster_status": room(
        "schedsvc.cluster schedsvc.text.printable schedsvc.text.tables",
        "click rich",
        prints=True,
    ),
    "schedsvc.cli.top": room(
        "schedsvc.cli schedsvc.cli.connect schedsvc.cli.top_app schedsvc.text.option_types", "click"
    ),
    # A screen of Textual, which only it needs.
    "schedsvc.cli.top_app": room(
        "schedsvc.cli schedsvc.cli.connect schedsvc.text.printable schedsvc.text.reason_words"
        " schedsvc.text.request_ids schedsvc_client schedsvc_client.v1",
        "rich textual",
    ),
    # Asks the standard health service, which is not in the contract and so not in the client.
    "schedsvc.cli.health": room(
        "schedsvc.cli schedsvc.cli.connect schedsvc.text.option_types schedsvc_client",
        "click grpc grpc_health",
        prints=True,
    ),
    "schedsvc_lab.emulator.cli": room(
        "schedsvc_lab.emulator schedsvc_lab.emulator.replay_cli schedsvc_lab.engine"
        " schedsvc_lab.workload.tokenizers schedsvc.text.option_types",
        "click",
        prints=True,
    ),
    "schedsvc_lab.emulator.replay_cli": room(
        "schedsvc_lab.emulator schedsvc_lab.workload", "click uvloop", prints=True
    ),
    "schedsvc_lab.load.cli": room(
        "schedsvc_lab.load schedsvc_lab.load.plot schedsvc_lab.load.result schedsvc_lab.load.texts"
        " schedsvc_lab.workload schedsvc_lab.workload.tokenizers schedsvc.text.option_types"
        " schedsvc.text.tables",
        "click rich uvloop yaml",
        clock=WALL,
        prints=True,
    ),
    "schedsvc_lab.workload.cli": room(
        "schedsvc_lab.workload schedsvc_lab.workload.chat schedsvc_lab.workload.fetch"
        " schedsvc_lab.workload.conversations_client schedsvc_lab.workload.conversations_report"
        " schedsvc_lab.workload.plot schedsvc_lab.workload.prefix.figures"
        " schedsvc_lab.workload.tokenizers schedsvc_lab.options schedsvc.text.option_types"
        " schedsvc.text.tables",
        "click pydantic rich",
        prints=True,
    ),
    # Drives the core and the client's half of the Session protocol against each other.
    "schedsvc_lab.faults": room(
        "schedsvc._core schedsvc.driver.clock schedsvc.records.state schedsvc_client"
        " schedsvc_client.v1"
        " schedsvc_lab.faults.auditor",
        never=IO,
        clock=NO_CLOCK,
        seeded=True,
    ),
    # Believes nothing of the core: it knows the contract alone.
    "schedsvc_lab.faults.auditor": room(
        "schedsvc_client.v1", never=IO, clock=NO_CLOCK, seeded=True
    ),
    # Several schedulers with their own cluster code, in event loops whose time is the world's.
    "schedsvc_lab.faults.cluster": room(
        "schedsvc._core schedsvc.driver.clock schedsvc.cluster schedsvc.config schedsvc.driver"
        " schedsvc.server schedsvc.service schedsvc.records.state schedsvc_lab.faults"
        " schedsvc_lab.faults.auditor schedsvc_client.v1",
        "grpc lupa msgpack redis structlog",
        clock=NO_CLOCK,
        seeded=True,
    ),
    "schedsvc_lab.faults.cli": room(
        "schedsvc_lab.faults schedsvc.text.option_types schedsvc.text.tables",
        "click rich",
        prints=True,
    ),
    "schedsvc_lab.sim.cli": room(
        "schedsvc.config schedsvc_lab.sim schedsvc_lab.engine schedsvc_lab.sim.figures"
        " schedsvc_lab.sim.notebook schedsvc_lab.sim.overrides schedsvc_lab.sim.replay"
        " schedsvc_lab.sim.workers schedsvc_lab.workload"
        " schedsvc_lab.options schedsvc.text.option_types schedsvc.text.tables",
        "click rich",
        prints=True,
    ),
    "schedsvc_lab.advise.cli": room(
        "schedsvc.cli.connect schedsvc.cli.tenant_entry schedsvc_client"
        " schedsvc.config schedsvc_lab.advise schedsvc_lab.advise.figure"
        " schedsvc_lab.advise.recorded schedsvc_lab.engine schedsvc_lab.sim schedsvc_lab.sim.cli"
        " schedsvc.text.option_types schedsvc.text.tables",
        "click yaml",
        prints=True,
    ),
    "schedsvc_lab.demo.cli": room(
        "schedsvc_lab.demo schedsvc_lab.load schedsvc.text.option_types", "click rich", prints=True
    ),
    "schedsvc_lab.quickstart": room("schedsvc_lab.demo schedsvc.config", "click yaml", prints=True),
    # Pure Python that knows nothing of the server: an engine host never compiles anything.
    "schedsvc_client": room("schedsvc_client.v1", "grpc google grpc_status"),
    "schedsvc_client.v1": room(packages="grpc google"),
    "schedsvc_vllm": room("schedsvc_client", "orjson", clock=WALL),
    # Only gates that verify tokens need its packages.
    "schedsvc_vllm.jwt_tokens": room("schedsvc_vllm", "jwt", clock=WALL),
    # Only gates that export spans need its packages.
    "schedsvc_vllm.otel": room("schedsvc_vllm", "opentelemetry", clock=WALL),
    # A process of its own, where the gate cannot be loaded; the gate needs none of its packages.
    "schedsvc_vllm.proxy": room("schedsvc_vllm schedsvc_client schedsvc_vllm.door"),
    "schedsvc_vllm.door": room("schedsvc_vllm", "httptools", clock=WALL),
    # LiteLLM loads it; all but the plug-in itself does without LiteLLM.
    "schedsvc_litellm": room("schedsvc_client"),
    "schedsvc_litellm.plugin": room("schedsvc_litellm", "fastapi litellm"),
    # Declares the facts of the product, and writes what follows; imports nothing of it.
    "spec": room(never=IO, clock=NO_CLOCK),
    # Builds the published artefacts: packages and man pages. Nothing imports it.
    "deploy": room("schedsvc.cli", "click", prints=True),
    # Writes the reference of the contract.
    "deploy.reference": room(packages="google"),
    # Write the reference of what runs: commands, metrics, and the configuration file.
    "deploy.command_pages": room("deploy deploy.reference", "click"),
    "deploy.handbook": room("deploy.command_pages deploy.file_schema deploy.metric_pages"),
    "deploy.file_schema": room("spec schedsvc.config", "pydantic pydantic_core"),
    "deploy.metric_pages": room(
        "deploy deploy.reference schedsvc.driver schedsvc.metrics.families schedsvc.metrics.page"
        " schedsvc.metrics.snapshot schedsvc.server schedsvc_vllm",
        "prometheus_client",
    ),
    # Asks a Prometheus about the last minutes.
    "deploy.panels": room(
        "deploy schedsvc.text.option_types", "click matplotlib", clock=WALL, prints=True
    ),
    "bench": room(
        "schedsvc schedsvc._core schedsvc.driver schedsvc.service schedsvc.server schedsvc.config"
        " schedsvc.driver.clock schedsvc.cluster schedsvc_lab.demo schedsvc_lab.emulator"
        " schedsvc_lab.load"
        " schedsvc_lab.load.result schedsvc_lab.faults schedsvc_lab.faults.cluster"
        " schedsvc.text.option_types"
        " schedsvc_lab.workload schedsvc_client schedsvc_client.v1 schedsvc_vllm",
        "Cython aiohttp click google grpc matplotlib ngh2 numpy pytest pytest_benchmark rich"
        " setuptools uvloop",
        clock=WALL,
        prints=True,
    ),
}

# The compiled core depends on libc and CPython's C interface alone.
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
