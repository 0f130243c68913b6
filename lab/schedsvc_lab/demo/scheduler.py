"""Configures the scheduler of the demo, and reads its books."""

import asyncio
import time
from pathlib import Path

import grpc
import yaml
from schedsvc_client.v1 import scheduler_pb2, scheduler_pb2_grpc

from schedsvc_lab.demo.processes import DemoError
from schedsvc_lab.demo.traffic import TENANTS

QUEUE_TTL_MS = 5_000
"""The longest wait in the queue. The flood's excess is refused after it, with a Retry-After."""

SETTLE_S_MAX = 2.0
"""How long after the last answer the books may still change: ends are reported in batches."""

WATCH_PERIOD_S = 0.5
_SETTLE_PERIOD_S = 0.1
_CALL_S_MAX = 5.0


def write_config(folder: Path, socket: Path) -> Path:
    """Write the configuration: the tenants with equal weights, defaults but for the queue TTL."""
    config = {
        "listeners": [{"unix": str(socket)}],
        "scheduler": {"queue_ttl_ms": QUEUE_TTL_MS},
        "tenants": [{"name": tenant.name, "weight": 1} for tenant in TENANTS],
        "limits": {"drain_ms": 1_000},
    }
    path = folder / "scheduler.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


class Books:
    """Reads the scheduler's Stats."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        self.totals = scheduler_pb2.Totals()

    async def ask(self) -> scheduler_pb2.Totals:
        """Ask once. Raises DemoError."""
        try:
            answer = await self._stub.Stats(scheduler_pb2.StatsRequest(), timeout=_CALL_S_MAX)
        except grpc.aio.AioRpcError as error:
            raise DemoError(f"the scheduler's Stats failed: {error.details()}") from None
        self.totals = answer.totals
        return self.totals

    async def keep_asking(self) -> None:
        """Ask every WATCH_PERIOD_S until cancelled."""
        while True:
            await self.ask()
            await asyncio.sleep(WATCH_PERIOD_S)

    async def leftovers(self) -> dict[str, int]:
        """Say what is still promised, leased and queued once the books have settled."""
        deadline = time.monotonic() + SETTLE_S_MAX
        while True:
            totals = await self.ask()
            left = {
                "promised_tokens": totals.promised_tokens,
                "live_leases": totals.live_leases,
                "queued": totals.queued,
            }
            if not any(left.values()) or time.monotonic() > deadline:
                return left
            await asyncio.sleep(_SETTLE_PERIOD_S)

    def line(self) -> str:
        """Write the last answer on one line."""
        return (
            f"scheduler: {self.totals.queued} queued, {self.totals.live_leases} running, "
            f"{self.totals.promised_tokens:,} tokens promised"
        )
