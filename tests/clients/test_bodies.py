"""Tests the limits of bodies: one of all connections together, and a time for each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable

import pytest
from schedsvc_client.testing import FakeScheduler
from schedsvc_vllm.answers import BadRequestError
from schedsvc_vllm.asgi import BodyTooLargeError, ClientLeftError, Message, Receive
from schedsvc_vllm.bodies import UNCOUNTED_BYTES, Bodies, BodiesFullError
from schedsvc_vllm.proxy import Upstream
from schedsvc_vllm.settings import Settings

from .bench import Bench

SCOPE = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
LARGE = UNCOUNTED_BYTES + 1_000


def from_address(number: int) -> str:
    return f"10.0.0.{number}"


def sending(*sizes: int, ends: bool = True) -> Receive:
    """A client that sends parts of these sizes, and then stops if it does not end."""
    parts = iter(sizes)

    async def receive() -> Message:
        size = next(parts, None)
        if size is None:
            await asyncio.Event().wait()
        is_last = ends and parts.__length_hint__() == 0
        return {"type": "http.request", "body": b"x" * (size or 0), "more_body": not is_last}

    return receive


async def status_of(bodies: Bodies, receive: Receive) -> int:
    with pytest.raises(BadRequestError) as caught:
        await bodies.open("").read(SCOPE, receive)
    return caught.value.status


async def test_unfinished_bodies_leave_no_room_for_large_ones() -> None:
    bodies = Bodies(1 << 20, 2_500)
    held = [bodies.open(from_address(number)) for number in range(2)]
    tasks = [asyncio.ensure_future(b.read(SCOPE, sending(LARGE, ends=False))) for b in held]
    for _ in range(4):
        await asyncio.sleep(0)
    assert bodies.total == 2_000
    assert await status_of(bodies, sending(LARGE)) == 503
    assert len(await bodies.open("").read(SCOPE, sending(UNCOUNTED_BYTES))) == UNCOUNTED_BYTES
    assert bodies.total == 2_000
    for task, body in zip(tasks, held, strict=True):
        task.cancel()
        body.release()
        body.release()
    assert bodies.total == 0
    assert len(await bodies.open("").read(SCOPE, sending(1_000, LARGE))) == LARGE + 1_000


async def test_one_caller_holds_half_of_the_sum() -> None:
    mib = 1 << 20
    whole = mib + UNCOUNTED_BYTES
    bodies = Bodies(whole, 4 * mib)
    held = [bodies.open(from_address(number)) for number in (1, 1, 2, 2, 1, 3)]
    for body in held[:4]:
        assert len(await body.read(SCOPE, sending(whole))) == whole
    held[3].release()
    with pytest.raises(BodiesFullError, match=f"of one caller .* {2 * mib} bytes"):
        await held[4].read(SCOPE, sending(whole))
    assert len(await held[5].read(SCOPE, sending(whole))) == whole
    for body in held:
        body.release()
    assert bodies.total == 0
    assert not bodies._of_callers


def test_one_body_of_the_largest_size_always_fits() -> None:
    assert Bodies(32, 40).caller_max == 32
    assert Bodies(32, 16).caller_max == 16


async def test_body_that_does_not_end_gets_408_in_time() -> None:
    bodies = Bodies(1 << 20, 1 << 20, seconds=0.01)
    assert await status_of(bodies, sending(1, ends=False)) == 408
    await asyncio.sleep(0)  # the task goes on, and is not cancelled


async def test_read_that_is_cancelled_from_outside_stays_cancelled() -> None:
    task = asyncio.ensure_future(Bodies(9, 9).open("").read(SCOPE, sending(ends=False)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("sizes", [(11,), (5, 5, 1)])
async def test_body_beyond_its_own_limit_is_refused(sizes: Iterable[int]) -> None:
    with pytest.raises(BodyTooLargeError):
        await Bodies(10, 1 << 20).open("").read(SCOPE, sending(*sizes))


async def test_client_that_leaves_is_not_an_error_of_the_body() -> None:
    async def receive() -> Message:
        return {"type": "http.disconnect"}

    with pytest.raises(ClientLeftError):
        await Bodies(10, 10).open("").read(SCOPE, receive)


async def test_gate_counts_a_body_until_its_request_ends(fake: FakeScheduler) -> None:
    bench = Bench(fake, Settings(target=fake.target, bodies_bytes_max=2 * LARGE))
    bodies = bench.gate._bodies
    large = json.dumps({"prompt": "x" * LARGE, "max_tokens": 1}).encode()
    assert (await bench.ask(large)).status == 200
    assert bodies.total == 0
    bodies.total = 2 * LARGE
    exchange = await bench.ask(large)
    assert exchange.status == 503
    assert exchange.answer_headers["x-schedsvc-dropped-reason"] == "bodies_full"
    assert (await bench.ask()).status == 200
    assert bodies.total == 2 * LARGE
    await bench.gate._close()


async def test_tenants_behind_one_router_have_parts_of_their_own(fake: FakeScheduler) -> None:
    settings = Settings(
        target=fake.target,
        tenant_headers=("x-tenant-id",),
        body_bytes_max=2 * LARGE,
        bodies_bytes_max=4 * LARGE,
    )
    bench = Bench(fake, settings)
    bodies = bench.gate._bodies
    bodies.count("a", bodies.caller_max)
    large = json.dumps({"prompt": "x" * LARGE, "max_tokens": 1}).encode()
    for tenant, status in (("a", 503), ("b", 200)):
        assert (await bench.ask(large, headers={"x-tenant-id": tenant})).status == status
    bodies.discount("a", bodies.caller_max)
    assert bodies.total == 0
    await bench.gate._close()


async def test_proxy_refuses_bodies_beyond_the_sum() -> None:
    upstream = Upstream("http://127.0.0.1:9", bodies_bytes_max=100)
    said: list[Message] = []

    async def send(message: Message) -> None:
        said.append(message)

    await upstream(SCOPE, sending(LARGE, ends=False), send)
    assert said[0]["status"] == 503
    assert upstream._bodies.total == 0
