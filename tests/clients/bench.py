"""Puts a gate between a scripted engine and a scripted scheduler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from schedsvc_client.testing import FakeScheduler
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.settings import Settings

from .asgi import Engine, Exchange, ask, owner

TRUST = {"x-tenant-id": "acme"}


def gives_up_soon(gate: Gate) -> None:
    """Make a gate that has found its scheduler give it up as fast as it does in production."""
    assert gate._runtime is not None
    session = gate._runtime.session
    session._options = replace(session._options, unavailable_after_s=1.0)


class Bench:
    """Holds a gate, its engine and its scheduler."""

    def __init__(self, fake: FakeScheduler, settings: Settings) -> None:
        self.fake = fake
        self.engine = Engine()
        self.owner = owner()
        self.gate = Gate(self.engine, settings)

    def exchange(self, body: bytes = b"", **changes: Any) -> Exchange:
        given: dict[str, Any] = {"headers": TRUST, "owner": self.owner}
        return Exchange(self.gate, body or ask(), **(given | changes))

    async def ask(self, body: bytes = b"", **changes: Any) -> Exchange:
        return await self.exchange(body, **changes).run()

    async def settled(self) -> None:
        """Wait until the scheduler knows all that the gate knows."""
        assert self.gate._runtime is not None
        await self.gate._runtime.session.flush(20)
        assert not self.fake.live
        assert self.gate._runtime.limit.running == 0
        assert self.gate._runtime.session.open_requests == 0
