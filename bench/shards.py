"""`python -m bench.shards` measures what sharing one fairness costs the store, and each member.

Members with real cores exchange totals through a real store. Each tenant is served at a few of
them. The members live in one process and take turns in one event loop, so their CPU time is that of
the process, less that of serving the requests.
"""

import asyncio
import json
import random
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import uvloop
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.machine import cpu_ns
from bench.messages import tenant
from schedsvc.cluster.admin import init_store
from schedsvc.cluster.member import Member
from schedsvc.cluster.store import Address, StoreConnection, connect
from schedsvc.config import Config
from schedsvc.driver import Driver, new_core
from schedsvc.driver.clock import SteadyClock
from schedsvc.server.logs import configure_logs
from schedsvc_lab.demo.members import Store
from schedsvc_lab.demo.processes import free_port

__all__ = ["main", "measure"]

#: The parts of a core that the store, and each member, take.
STORE_MAX, SYNC_MAX = 0.05, 0.02
#: The members begin one after the other, as processes do.
_BEGIN_S = 0.1
_TICK_S = 0.02
_INPUT_TOKENS = 200
_EPILOG = """\b
Examples:
  python -m bench.shards
  python -m bench.shards --members 16 --tenants 10000 --rate 2 --json

Exit status 1: the store or a member needed more than the bounds.
"""


@dataclass(frozen=True)
class Plan:
    """Describes a load: `rate` requests a second of each tenant at each of its members."""

    members: int
    tenants: int
    places: int
    rate: float
    seconds: float


@dataclass
class Shard:
    """Holds a scheduler of the cluster, and the tenants that it serves."""

    driver: Driver
    member: Member
    tenants: list[bytes]
    at: float = 0.0
    served: int = 0
    flows: dict[bytes, int] = field(default_factory=dict)

    def serve(self, count: float) -> None:
        """Serve requests of the next tenants in turn: one grant and its end for each."""
        core, clock = self.driver._core, self.driver.clock
        self.at += count
        while self.at >= 1:
            self.at -= 1
            now_ns = clock.now_ns()
            name = self.tenants[self.served % len(self.tenants)]
            self.served += 1
            if name not in self.flows:
                core.set_flow(name, 1_000)
                self.flows[name] = core.flow_index(name)
            core.admit(now_ns, self.flows[name], b"%d" % self.served, _INPUT_TOKENS, 16)
            [granted] = core.poll(now_ns)
            core.complete(now_ns, granted.lease_id, 1, input_tokens=_INPUT_TOKENS, output_tokens=8)


def _config(name: str, port: int) -> Config:
    return Config.model_validate(
        {
            "listeners": [{"tcp": "127.0.0.1:0"}],
            "scheduler": {"lease_ttl_ms": 600_000},
            "pools": [{"name": f"pool-{name}", "capacity_tokens": 1 << 27, "epoch": 1}],
            "cluster": {
                "name": "bench",
                "member": name,
                "store": {"urls": [f"redis://127.0.0.1:{port}"]},
            },
        }
    )


def _shards(plan: Plan, port: int) -> list[Shard]:
    rnd = random.Random(7)
    places: list[list[bytes]] = [[] for _ in range(plan.members)]
    for number in range(plan.tenants):
        for place in rnd.sample(range(plan.members), plan.places):
            places[place].append(tenant(number).encode())
    shards = []
    for number, names in enumerate(places):
        config = _config(f"m{number:03}", port)
        assert config.cluster is not None
        clock = SteadyClock()
        driver = Driver(new_core(config, clock.now_ns()), clock)
        shards.append(Shard(driver, Member(driver, config, config.cluster, number + 1), names))
    return shards


async def _stats(link: StoreConnection) -> dict[str, int]:
    text = (await link.command("INFO")).decode()
    lines = (line.partition(":") for line in text.splitlines())
    return {name: int(value) for name, _, value in lines if value.isdigit()}


async def _load(shards: list[Shard], plan: Plan, seconds: float) -> tuple[float, float]:
    """Serve for a while; returns the CPU seconds of serving, and the longest unsynced time."""
    until_s, served_ns, unsynced_ns = time.monotonic() + seconds, 0, 0
    last_s = time.monotonic()
    while last_s < until_s:
        await asyncio.sleep(_TICK_S)
        now_s = time.monotonic()
        began_ns = time.thread_time_ns()
        for shard in shards:
            shard.serve((now_s - last_s) * plan.rate * len(shard.tenants))
        served_ns += time.thread_time_ns() - began_ns
        unsynced_ns = max(unsynced_ns, *(shard.driver.unsynced_ns() for shard in shards))
        last_s = now_s
    return served_ns / 1e9, unsynced_ns / 1e9


async def measure(plan: Plan) -> dict[str, Any]:
    """Run the load, and measure once all members know all of their tenants."""
    with tempfile.TemporaryDirectory() as folder:
        async with AsyncExitStack() as stack:
            port = free_port()
            store = Store(Path(folder), port)
            await store.start()
            stack.push_async_callback(store.end)
            await init_store(Address("127.0.0.1", port, None, None), "bench", None, None)
            link = await connect(Address("127.0.0.1", port, None, None))
            stack.push_async_callback(link.close)
            shards = _shards(plan, port)
            tasks = []
            for shard in shards:
                tasks.append(asyncio.create_task(shard.member.run()))
                await asyncio.sleep(_BEGIN_S)
            await _load(shards, plan, plan.seconds / 2)
            pid, before = store.pid, await _stats(link)
            store_ns, own_ns = cpu_ns(pid), time.process_time_ns()
            began_s, began = time.monotonic(), sum(shard.served for shard in shards)
            serving_s, unsynced_s = await _load(shards, plan, plan.seconds)
            took_s = time.monotonic() - began_s
            after = await _stats(link)
            store_s = (cpu_ns(pid) - store_ns) / 1e9
            sync_s = (time.process_time_ns() - own_ns) / 1e9 - serving_s
            problems = {shard.member.sharing.problem for shard in shards} - {""}
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            if problems:
                raise click.ClickException(f"a member lost the store: {sorted(problems)[0]}")
    requests = sum(shard.served for shard in shards) - began
    read = after["total_net_output_bytes"] - before["total_net_output_bytes"]
    written = after["total_net_input_bytes"] - before["total_net_input_bytes"]
    found = {
        "requests_per_s": round(requests / took_s),
        "store": round(store_s / took_s, 4),
        "member": round(sync_s / took_s / plan.members, 4),
        "written_bytes_per_s": round(written / took_s),
        "read_bytes_per_s": round(read / took_s),
        "store_memory_mb": round(after["used_memory"] / 1e6, 1),
        "totals_each": max(shard.member.sharing.seen for shard in shards),
        "unsynced_s_max": round(unsynced_s, 2),
    }
    return found | {"holds": found["store"] <= STORE_MAX and found["member"] <= SYNC_MAX}


@click.command(epilog=_EPILOG)
@click.option("--members", type=click.IntRange(2, 512), default=16, show_default=True)
@click.option("--tenants", type=click.IntRange(1), default=10_000, show_default=True)
@click.option(
    "--places", type=click.IntRange(1), default=2, show_default=True,
    help="Members that serve a tenant.",
)  # fmt: skip
@click.option(
    "--rate", type=click.FloatRange(0, min_open=True), default=0.5, show_default=True,
    help="Requests a second of a tenant at each of its members.",
)  # fmt: skip
@click.option("--seconds", type=click.FloatRange(1), default=20.0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def main(
    members: int, tenants: int, places: int, rate: float, seconds: float, as_json: bool
) -> None:
    """Measure what sharing one fairness costs the store and each member."""
    machine.need_release_core()
    if places > members:
        raise click.UsageError(f"--places {places} is more than --members {members}")
    configure_logs("console", "error")
    found = uvloop.run(measure(Plan(members, tenants, places, rate, seconds)))
    if as_json:
        click.echo(json.dumps({"machine": machine.describe(), "commit": machine.commit(), **found}))
    else:
        table = Table("", "")
        for name, value in found.items():
            table.add_row(name, f"{value:,}" if not isinstance(value, bool) else str(value))
        Console().print(table)
    sys.exit(0 if found["holds"] else 1)


if __name__ == "__main__":
    main(prog_name="python -m bench.shards")
