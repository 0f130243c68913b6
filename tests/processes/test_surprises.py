"""Tests settings that surprise clients: a small limit of messages, a second engine, a proxy."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from schedsvc_client import ClientOptions
from schedsvc_client.aio import AsyncScheduler, SchedulerSession

from tests import forked
from tests.waiting import until

from .conftest import Stand
from .programs import PATIENT, TENANTS, EngineSizes, at_rest, config, eventually, stream
from .test_kills import client

PATIENTLY = ClientOptions(unavailable_after_s=30.0)


async def test_admissions_beyond_the_limit_of_a_message_are_granted(stand: Stand) -> None:
    """The client sent the same 8 KB for ever, and every admission failed."""
    settings = config(**PATIENT) | {"pools": [{"name": "pool", "capacity_tokens": 160_000}]}
    settings["limits"] |= {"message_max_bytes": 2_048}
    settings["log"] = {"level": "info"}
    programs = stand(settings)
    programs.start_scheduler()
    opened = SchedulerSession(programs.target, client_id="shim", incarnation=1, options=PATIENTLY)
    async with opened as session, AsyncScheduler(programs.target) as scheduler:
        held = [
            session.admission(tenant="a", input_tokens=[10], max_output_tokens=10)
            for _ in range(200)
        ]
        async with asyncio.timeout(60):
            await asyncio.gather(*(one.submit() for one in held))
        for one in held:
            one.complete(input_tokens=10, output_tokens=5)
        totals = (await at_rest(scheduler)).totals
        # The Welcome has the limit, so no message was refused.
        assert session.last_error is None
    assert (totals.received, totals.completed, totals.rejected) == (200, 200, 0)


async def test_second_engine_of_a_pool_is_refused_until_the_first_ends(stand: Stand) -> None:
    """Without a refusal it would void the first one's leases, and both would run unlogged."""
    programs = stand(config({"sign_of_life_ms": 4_000}, **PATIENT), EngineSizes(step_ms=20))
    programs.start_scheduler()
    programs.start_engine()
    async with AsyncScheduler(programs.target) as scheduler, client(programs.engine_url) as first:
        # Longer than the second engine takes to start.
        runs = asyncio.ensure_future(stream(first, TENANTS[0], 2_000))
        await eventually(scheduler, lambda stats: stats.totals.live_leases == 1)
        rival_url = await asyncio.to_thread(programs.start_rival)
        async with client(rival_url) as second:
            refused = await stream(second, TENANTS[1], 5)
            assert refused.status == 503
            sentence = "two engines claim pool default; set SCHEDSVC_POOL"
            assert refused.error["message"].startswith(sentence)
            # Both sides report it.
            assert sentence in programs.log("rival")
            assert "pool_contested" in programs.log("scheduler")
            # The first one continues with its request, and serves others.
            answer = await stream(first, TENANTS[0], 5)
            assert (answer.fate, answer.output_tokens) == ("whole", 5)
            # Nothing was granted to the second one.
            assert (await scheduler.stats()).totals.granted == 2
            await eventually(scheduler, lambda stats: stats.totals.live_leases == 1)
            assert "leases_voided" not in programs.log("scheduler")
            assert not runs.done()
            runs.cancel()
            programs.kill("engine")

            async def served_by_second() -> Any:
                answer = await stream(second, TENANTS[1], 5)
                return None if answer.status == 503 else answer

            served = await until(served_by_second)
            assert (served.fate, served.output_tokens) == ("whole", 5)


class Proxy:
    """Counts callers at a port, and hangs up."""

    def __init__(self, listener: socket.socket) -> None:
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.asked: list[bytes] = []
        self._listener = listener
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self.asked.append(connection.recv(4_096))


@contextmanager
def proxy() -> Iterator[Proxy]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Proxy(listener)
        listener.shutdown(socket.SHUT_RDWR)


async def command(environment: dict[str, str], *words: str) -> tuple[int, str]:
    """Run `schedsvc`; its exit status, and what it says."""
    inherited = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    done = await asyncio.to_thread(
        forked.run,
        [sys.executable, "-m", "schedsvc", *words],
        env=inherited | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


async def test_commands_reach_a_scheduler_here_without_the_proxy(stand: Stand) -> None:
    settings: dict[str, Any] = config() | {"listeners": [{"tcp": "127.0.0.1:0"}]}
    programs = stand(settings)
    programs.start_scheduler()
    unix, tcp = programs.scheduler_targets
    with proxy() as between:
        environment = {"https_proxy": between.url, "http_proxy": between.url}
        for code, said in await asyncio.gather(
            command(environment, "stats", "--target", tcp),
            command(environment, "stats", "--target", f"localhost:{tcp.rpartition(':')[2]}"),
            command(environment | {"SCHEDSVC_TARGET": unix}, "health"),
        ):
            assert code == 0, said
        assert between.asked == []
        programs.kill("scheduler")
        away = "scheduler.invalid:7600"
        gone, there = await asyncio.gather(
            command(environment, "stats", "--target", tcp),
            command(environment, "stats", "--target", away),
        )
        # The error names the address that was tried, and no proxy if none was asked.
        assert gone[0] == there[0] == 1
        assert gone[1].startswith(f"Error: {tcp}: no scheduler answers at ")
        assert "start one with `schedsvc serve`" in gone[1]
        assert "proxy" not in gone[1]
        # Elsewhere the proxy is asked, and the error says so.
        assert between.asked
        assert all(asked.startswith(f"CONNECT {away} ".encode()) for asked in between.asked)
        assert there[1].startswith(f"Error: {away}: no scheduler answers at ")
        assert between.url.removeprefix("http://") in there[1]
        assert "https_proxy names a proxy: unset it" in there[1]
