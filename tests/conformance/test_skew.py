"""Clients one minor version older or newer than the server work, and so do servers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from schedsvc_client import ClientOptions, Outcome, Refused
from schedsvc_client.aio import AsyncScheduler, SchedulerSession
from schedsvc_client.sync import Scheduler
from schedsvc_client.v1 import scheduler_pb2 as pb

from .runner import run
from .server import serving
from .skew import LATEST, UNKNOWN, Relay, changed, newer, older, other_outcomes, parts
from .test_conformance import SCRIPTS, read

QUICK = ("lifecycle", "session")
CONFIG: dict[str, Any] = {
    "tenants": [{"name": "a"}, {"name": "b"}],
    "scheduler": {"headroom": 0},
    "limits": {"drain_ms": 0},
    "pools": [{"name": "p", "capacity_tokens": 1_600}],
}
ASK: dict[str, Any] = {"tenant": "a", "input_tokens": 100, "max_output_tokens": 60}
OPTIONS = ClientOptions(backoff_min_s=0.01, unavailable_after_s=10)


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=() if path.stem in QUICK else pytest.mark.slow) for path in SCRIPTS],
    ids=lambda path: path.stem,
)
async def test_scripts_hold_where_each_side_says_more_than_the_other_knows(
    path: Path, tmp_path: Path
) -> None:
    """Unknown fields are added to every message: of a newer client, and of a newer server."""
    script = read(path)
    with serving(script, tmp_path) as target:
        async with Relay(target, changed("Request", newer), changed("Response", newer)) as relay:
            await run(script["steps"], relay.target)
            assert relay.changed > 0


async def served(target: str) -> None:
    """Each of our clients runs a request, waits for one, and is refused one."""
    async with (
        AsyncScheduler(target, options=OPTIONS) as unary,
        SchedulerSession(target, client_id="shim", incarnation=1, options=OPTIONS) as session,
    ):
        for asker in (unary, session):
            async with asker.admission(**ASK) as held:
                held.progress(input_tokens=100, output_tokens=5)
                held.complete(input_tokens=100, output_tokens=9)
            with pytest.raises(Refused) as caught:
                async with asker.admission(**ASK | {"input_tokens": 100_000}):
                    pass
            assert caught.value.outcome in (Outcome.REJECTED_TOO_LARGE, Outcome.UNSPECIFIED)
            large = ASK | {"input_tokens": 1_500}
            async with asker.admission(**large):
                waiting = asyncio.ensure_future(asker.admission(**large).__aenter__())
                await asyncio.sleep(0.05)
                assert not waiting.done()
            second = await asyncio.wait_for(waiting, 60)
            second.complete(input_tokens=1_500, output_tokens=1)
        assert await session.flush(5)

    def synchronous() -> None:
        with Scheduler(target) as scheduler, scheduler.admission(**ASK) as held:
            held.complete(input_tokens=100, output_tokens=9)

    await asyncio.to_thread(synchronous)


@pytest.mark.parametrize(
    "who",
    [
        "older client",
        pytest.param("older server", marks=pytest.mark.slow),
        pytest.param("newer server", marks=pytest.mark.slow),
        "both newer",
    ],
)
async def test_our_clients_work_beside_another_version(who: str, tmp_path: Path) -> None:
    requests, responses = {
        "older client": ((older,), ()),
        "older server": ((), (older,)),
        "newer server": ((), (newer, other_outcomes)),
        "both newer": ((newer,), (newer, other_outcomes)),
    }[who]
    with serving({"config": CONFIG}, tmp_path) as target:
        async with Relay(
            target, changed("Request", *requests), changed("Response", *responses)
        ) as relay:
            await served(relay.target)
            assert relay.changed > 0
        async with AsyncScheduler(target) as scheduler:
            totals = (await scheduler.stats()).totals
    assert (totals.completed, totals.live_leases, totals.queued) == (7, 0, 0)
    assert totals.promised_tokens == 0


async def test_an_event_of_a_later_version_costs_only_itself(tmp_path: Path) -> None:
    """A newer shim sends something new in between: it gets a fault, and the rest is served."""

    def with_new_event(message: Any) -> None:
        message.events.add().MergeFromString(UNKNOWN)

    with serving({"config": CONFIG}, tmp_path) as target:
        async with (
            Relay(target, changed("Request", with_new_event)) as relay,
            SchedulerSession(
                relay.target, client_id="shim", incarnation=1, options=OPTIONS
            ) as session,
        ):
            # The first event of a stream has to be Hello, also in a later version.
            for _ in range(3):
                async with session.admission(**ASK) as held:
                    held.complete(input_tokens=100, output_tokens=9)
            assert await session.flush(5)
            assert session.open_leases == session.open_requests == 0


def test_fields_that_the_relay_removes_are_in_the_contract() -> None:
    from schedsvc_client.v1 import pool_pb2

    for name, fields in LATEST.items():
        kind = getattr(pb, name, None) or getattr(pool_pb2, name)
        known = set(kind.DESCRIPTOR.fields_by_name)
        assert known >= set(fields), name


def test_relay_adds_unknown_fields_at_every_level() -> None:
    message = pb.SessionRequest(
        events=[pb.SessionEvent(admit=pb.SessionAdmit(tag=1, request=pb.AdmitRequest(n=2)))]
    )
    plain = message.SerializeToString()
    newer(message)
    assert len(parts(message)) == 4
    assert message.SerializeToString().count(UNKNOWN) == 4
    assert pb.SessionRequest.FromString(plain).events[0].admit.request.n == 2
    older(message)
    assert message.events[0].admit.request.n == 2
