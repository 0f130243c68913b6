"""Runs a real Chromium with a real scheduler's page, and load on that scheduler."""

import asyncio
import base64
import hashlib
import os
import shutil
import subprocess
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import grpc
import pytest
from playwright.async_api import Browser, Page, async_playwright, expect
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1.scheduler_pb2_grpc import SchedulerServiceStub

from schedsvc.server import Server
from tests.cluster.member_process import MemberProcess
from tests.server.conftest import ask, calling, serving

expect.set_options(timeout=30_000)  # on a busy machine a page shows what it reads seconds later

ROOT = Path(__file__).resolve().parents[2]
#: The folder of the screenshots, for a person to look at.
SCREENS = ROOT / "out/console"
SCRIPT = "<script>document.title = 'forged'</script>"
IMAGE = "<img src=x onerror=\"document.title = 'forged'\">"
Scheme = Literal["light", "dark"]
#: Widths of a telephone and of a desktop, and both colour schemes.
LOOKS: tuple[tuple[int, Scheme], ...] = (
    (390, "light"), (390, "dark"), (1_440, "light"), (1_440, "dark"),
)  # fmt: skip

_FLAGS = (
    "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
_AXE = "axe-core@4.14.1"
_AXE_SHA512 = (
    "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="
)


def missing(text: str) -> None:
    """Skip the calling test; fail in CI, which installs all that is needed."""
    (pytest.fail if "SCHEDSVC_CI" in os.environ else pytest.skip)(text)


@pytest.fixture(scope="session")
def chromium() -> str:
    """Return the path of Chromium, as Debian's package `chromium` installs it."""
    found = shutil.which("chromium")
    if found is None:
        missing("not found: chromium; `.ci/tools chromium` installs Debian's package")
    return str(found)


@pytest.fixture(scope="session")
def axe() -> str:
    """Return the source of axe-core, from npm's registry or from an earlier run."""
    folder = ROOT / "build/axe-core"
    archive = folder / "axe-core-4.14.1.tgz"
    if not archive.exists():
        npm = shutil.which("npm")
        if npm is None:
            missing("not found: npm, which fetches axe-core once")
        folder.mkdir(parents=True, exist_ok=True)
        got = subprocess.run(
            [str(npm), "pack", "--silent", _AXE],
            cwd=folder, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        if got.returncode:
            missing(f"npm cannot fetch {_AXE}: {got.stderr.strip()[-200:]}")
    digest = hashlib.sha512(archive.read_bytes()).digest()
    assert base64.b64encode(digest).decode() == _AXE_SHA512, f"{archive} is not {_AXE}: delete it"
    with tarfile.open(archive) as files:
        source = files.extractfile("package/axe.min.js")
        assert source is not None
        return source.read().decode()


@dataclass
class Screen:
    """Holds a page, and its violations."""

    page: Page
    #: The listener's address: the only one that the page may use.
    origin: str
    problems: list[str] = field(default_factory=list)

    def watch(self) -> None:
        """Note errors, dialogs and requests to elsewhere from now on."""
        note = self.problems.append
        self.page.on("pageerror", lambda error: note(f"error: {error}"))
        self.page.on("dialog", lambda dialog: note(f"dialog: {dialog.message}"))
        self.page.on("console", lambda m: note(m.text) if m.type in ("error", "warning") else None)
        self.page.on(
            "request",
            lambda r: None if r.url.startswith(self.origin) else note(f"asked {r.url}"),
        )


@asynccontextmanager
async def browsing(chromium: str) -> AsyncIterator[Browser]:
    """Run a headless Chromium with a new profile."""
    flags = [*_FLAGS, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=flags)
        try:
            yield browser
        finally:
            await browser.close()


async def opened(
    browser: Browser,
    server: Server | MemberProcess,
    width: int = 1_440,
    scheme: Scheme = "light",
) -> Screen:
    """Open the console of a server in a new page."""
    assert server.metrics_url is not None
    origin = server.metrics_url.removesuffix("metrics")
    page = await browser.new_page(
        viewport={"width": width, "height": 900}, color_scheme=scheme, locale="en-GB"
    )
    screen = Screen(page, origin)
    screen.watch()
    await page.goto(origin)
    return screen


TENANTS: list[dict[str, Any]] = [
    {"name": "research"},
    {"name": "production", "weight": 4},
    {"name": "batch-jobs", "quota": {"requests_per_minute": 30, "concurrency": 6}},
    {"name": SCRIPT, "group": "trials"},
]
GROUPS = [{"name": "trials", "quota": {"tokens_per_minute": 10_000}}]


@asynccontextmanager
async def scheduling(**keys: Any) -> AsyncIterator[tuple[Server, SchedulerServiceStub]]:
    """Run a scheduler with the console, and a client of it."""
    given: dict[str, Any] = {
        "listeners": [{"tcp": "127.0.0.1:0", "operate": True}],
        "metrics": {"listen": "127.0.0.1:0"},
        "tenants": TENANTS,
        "groups": GROUPS,
    }
    async with serving(**given | keys) as server, calling(server.targets[0]) as stub:
        yield server, stub


@asynccontextmanager
async def loading(stub: SchedulerServiceStub, **clients: int) -> AsyncIterator[None]:
    """Let `clients` of each tenant send requests without a pause."""
    tasks = [
        asyncio.ensure_future(_client(stub, tenant.replace("_", "-")))
        for tenant, count in clients.items()
        for _ in range(count)
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def running(stub: SchedulerServiceStub, tenant: str) -> AsyncIterator[None]:
    """Keep one request running."""
    grant = (await stub.Admit(ask(100, tenant=tenant, reports_progress=True))).grant
    lease = {"lease_id": grant.lease_id, "pool_epoch": 1}

    async def renew() -> None:
        while True:
            await stub.Progress(pb.ProgressRequest(leases=[lease]))
            await asyncio.sleep(1)

    task = asyncio.ensure_future(renew())
    try:
        yield
    finally:
        task.cancel()
        await stub.Complete(pb.CompleteRequest(**lease, input_tokens=100, output_tokens=1))


async def _client(stub: SchedulerServiceStub, tenant: str) -> None:
    while True:
        try:
            await _request(stub, tenant)
        except grpc.aio.AioRpcError:
            await asyncio.sleep(0.2)


async def _request(stub: SchedulerServiceStub, tenant: str) -> None:
    """Send one request: its first token comes after 50 ms, its end after 150."""
    asked = ask(100, tenant=tenant, max_output_tokens=64, reports_progress=True)
    answer = await stub.Admit(asked)
    if not answer.HasField("grant"):
        await asyncio.sleep(0.2)
        return
    lease = {"lease_id": answer.grant.lease_id, "pool_epoch": 1}
    await asyncio.sleep(0.05)
    await stub.Progress(pb.ProgressRequest(leases=[{**lease, "output_tokens": 1}]))
    await asyncio.sleep(0.1)
    await stub.Complete(pb.CompleteRequest(**lease, input_tokens=100, output_tokens=64))
