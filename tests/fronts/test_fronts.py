"""Behind the fronts that docs/operate/fronts.md configures, no client is another tenant.

The proxy stands behind each front, and before a scheduler that records the charged tenant. A client
with a key, with a certificate, or with neither claims another tenant in each place of the matrix.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.clients import identity_matrix as matrix
from tests.clients.identity_matrix import OWN, UNKNOWN, VICTIM, Evidence, Source

from .programs import PROGRAMS, Changes, Running, started

pytestmark = pytest.mark.fronts

#: The gate behind the front believes its header, or the certificate that it forwards.
GATES = {
    "header": {"SCHEDSVC_TENANT_HEADERS": "x-tenant-id", "SCHEDSVC_HEADER_SET_BY": "front"},
    "certificate": {
        "SCHEDSVC_CERTIFICATE_TENANTS": f"{matrix.DOMAIN}/{{tenant}}",
        "SCHEDSVC_XFCC_SET_BY": "front",
    },
}
CLIENTS = ("key", "certificate", "stranger")
MODES = ("streamed", "buffered")
#: A client, the field in which it claims another tenant, and its place; "": it claims none.
Cell = tuple[str, str, str]
HONEST: tuple[Cell, ...] = tuple((client, "", "") for client in CLIENTS)
FORGED: tuple[Cell, ...] = tuple(
    (client, claim, "copy before")
    for client, claim in itertools.product(CLIENTS, ("x-tenant-id", matrix.XFCC))
)


class Behind:
    """Runs a front, and the proxy behind it."""

    def __init__(self, running: Running, served: matrix.Served, name: str, gate: str) -> None:
        self._running, self._served, self._name, self._gate = running, served, name, gate

    def rightful(self, client: str, tenant: str) -> str:
        """Return as whom a client runs; "": it is refused."""
        if self._gate == "certificate":
            return tenant if (self._name, client) == ("envoy", "certificate") else ""
        by_header = ("key",) if self._name == "envoy" else ("key", "certificate")
        return tenant if client in by_header else UNKNOWN

    async def charged(self, cell: Cell, tenant: str) -> tuple[list[str], int]:
        """Send a client's request; return the tenant that the scheduler charges, and the status."""
        client, claim, place = cell
        connect = self._running.connect(tenant if client == "certificate" else "")
        key = [("authorization", f"Bearer {matrix.key_of(tenant)}")] if client == "key" else []
        own, field = Evidence(key, {}), claim.partition(":")[0]
        write = matrix.PLACES.get(place)
        stream = write(own, field, matrix.CLAIMS[claim]) if write else matrix.request(own)
        return await self._served.charged(stream, connect)

    async def wrong(
        self, cells: Iterable[Cell], tenant: str = OWN
    ) -> dict[Cell, tuple[list[str], int]]:
        """Return the cells in which another than the rightful tenant is charged."""
        found = {}
        for client, claim, place in cells:
            charged, status = await self.charged((client, claim, place), tenant)
            one = self.rightful(client, tenant)
            # A client may spoil its own key, or write a further request without it.
            spoils = client == "key" and claim.startswith("authorization")
            is_first_right = charged[:1] in ([one], [UNKNOWN] if spoils else [one])
            are_right = is_first_right and set(charged[1:]) <= {one, UNKNOWN}
            may_be_refused = claim or not one
            is_right = are_right if charged else may_be_refused and matrix.is_refusal(status)
            if not is_right:
                found[client, claim, place] = (charged, status)
        return found


@asynccontextmanager
async def standing(
    name: str, gate: str, folder: Path, changes: Changes = ()
) -> AsyncIterator[Behind]:
    """Run a front before the proxy; `changes`: of its configuration in the guide."""
    source = Source(GATES[gate], lambda _: Evidence([], {}))
    async with (
        matrix.serving(source, "proxy", folder) as served,
        started(PROGRAMS[name], served.port, folder, changes) as running,
    ):
        yield Behind(running, served, name, gate)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PROGRAMS)
async def test_no_client_is_another_tenant(name: str, mode: str, gate: str, folder: Path) -> None:
    changes = PROGRAMS[name].buffers if mode == "buffered" else ()
    async with standing(name, gate, folder, changes) as behind:
        for tenant in (OWN, VICTIM):
            assert await behind.wrong(HONEST, tenant) == {}
        cells = itertools.product(CLIENTS, matrix.CLAIMS, matrix.PLACES)
        assert await behind.wrong(cells) == {}


@pytest.mark.parametrize(
    ("name", "duty"), [(name, duty) for name in PROGRAMS for duty in PROGRAMS[name].duties()]
)
async def test_a_front_without_a_duty_charges_another(name: str, duty: str, folder: Path) -> None:
    changes, wrong = PROGRAMS[name].without(duty), {}
    for gate in GATES:
        (folder / gate).mkdir()
        async with standing(name, gate, folder / gate, changes) as behind:
            wrong |= await behind.wrong((*HONEST, *FORGED))
    assert wrong


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_duties_of_each_front_are_listed(name: str) -> None:
    assert len(PROGRAMS[name].duties()) >= 3
