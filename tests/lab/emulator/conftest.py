import asyncio
import json
from contextlib import asynccontextmanager

import aiohttp
import pytest

from schedsvc_lab.emulator.app import Emulator
from schedsvc_lab.emulator.server import Address, EmulatorServer
from schedsvc_lab.emulator.settings import EmulatorSettings
from schedsvc_lab.engine import load_profile


class Running:
    """Holds an emulator that listens, and an HTTP client of it."""

    def __init__(self, emulator, server, listening, http):
        self.emulator = emulator
        self.server = server
        self.url = listening.base_url
        self.http = http

    @property
    def gauges(self):
        return self.emulator.driver.engine.gauges()

    async def post(self, path, body, **headers):
        data = body if isinstance(body, bytes | str) else json.dumps(body)
        async with self.http.post(self.url + path, data=data, headers=headers) as response:
            return response.status, await response.json()

    async def get(self, path):
        async with self.http.get(self.url + path) as response:
            return response.status, await response.text()

    async def events(self, path, body):
        """Return all events of a stream, parsed; the last has to be [DONE]."""
        async with self.http.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            text = await response.text()
        assert text.endswith("\n\n")
        events = text[:-2].split("\n\n")
        assert all(event.startswith("data: ") for event in events)
        assert events[-1] == "data: [DONE]"
        return [json.loads(event[len("data: ") :]) for event in events[:-1]]

    async def metrics(self):
        """Return samples of /metrics by name, without the labels that all have."""
        _, text = await self.get("/metrics")
        samples = {}
        for line in text.splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.replace('engine="0",', "").replace('model_name="emulated"', "")
                samples[name.replace(",}", "}").replace("{}", "")] = float(value)
        return samples

    async def until(self, condition):
        """Wait until the engine's gauges satisfy a condition."""
        async with asyncio.timeout(30):
            while not condition(self.gauges):  # noqa: ASYNC110 - the engine has no event
                await asyncio.sleep(0.002)


@asynccontextmanager
async def run_emulator(profile="fast", middleware=(), speed=1.0, uds=None, **sizes):
    profile = load_profile(profile)
    settings = EmulatorSettings(profile, profile.config(**sizes), "emulated", speed)
    emulator = Emulator(settings, middleware)
    ready = asyncio.get_running_loop().create_future()
    server = EmulatorServer(emulator, Address(uds=uds), ready.set_result)
    task = asyncio.create_task(server.listen())
    try:
        await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
        connector = aiohttp.UnixConnector(uds) if uds else aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http:
            yield Running(emulator, server, ready.result(), http)
    finally:
        server.stop()
        await task


@pytest.fixture
def start():
    """Start an emulator: `async with start(...) as running`."""
    return run_emulator


@pytest.fixture
async def running():
    async with run_emulator() as running:
        yield running
