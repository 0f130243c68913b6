"""Kills scheduler, proxy and engine under load, and compares the ledger with the engine's counts.

The clients ask the real proxy, which stands before the emulator; the emulator writes its counts
before it sends. `make usage-proof` continues an earlier run: everything is in its folder.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.request import urlopen

from schedsvc_client.aio import AsyncScheduler
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc_lab.demo.processes import free_port
from tests import forked

from .attacks import delete, delete_all, delete_log, move, rename_over
from .books import compare
from .clients import TENANTS, Clients

# Lease TTL and grace are the defaults, 30 s together. A restarted scheduler refuses replays after
# that time, so with 1 s the proof lost usage whenever the machine stalled for a second.
_EXPIRY_S = 180.0
_START_S = 120.0
_LOOK_S = 0.05
_SAVE_S = 2.0
_RESERVED = 10_000
_ENGINE = ("--profile", "tiny-cpu", "--speed", "5", "--kv-tokens", "262144", "--block-size", "16")
_KILLED = ("scheduler", "proxy", "engine")
_ATTACKS = (delete, rename_over, delete_log, delete_all, move)
_WRITTEN_AGAIN = b"usage_file_written_again"


class Proof:
    """Holds one folder: a scheduler, a proxy, an engine, and what they left behind."""

    def __init__(self, folder: Path, requests: int, kills: int, attacks: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._requests, self._kills, self._attacks = requests, kills, attacks
        tenants = ", ".join(f"{{name: t{number}}}" for number in range(TENANTS))
        (folder / "schedsvc.yaml").write_text(
            f"listeners: [{{unix: scheduler.sock}}]\nusage: {{path: usage.db}}\n"
            f"scheduler: {{flow_queue_max: 256}}\ntenants: [{tenants}]\n"
        )
        self._target = f"unix:{folder / 'scheduler.sock'}"
        self._progress = self._read_progress()
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def run(self) -> dict[str, int]:
        """Do the remaining attempts; return the figures of `compare()`."""
        try:
            asyncio.run(self._run())
        finally:
            for process in reversed(self._running.values()):
                process.terminate()
                process.wait(_EXPIRY_S)
        return compare(self._folder) | {name: self._progress[name] for name in ("kills", "attacks")}

    async def _run(self) -> None:
        for name in ("scheduler", "engine", "proxy"):
            await self._start(name)
        url = f"http://127.0.0.1:{self._progress['proxy_port']}"
        whole = self._folder / "whole"
        whole.touch()
        before = len(whole.read_bytes().split())
        clients = Clients(url, whole, self._progress["next"])
        asking = asyncio.ensure_future(clients.run())
        saved_s = 0.0
        while not asking.done():
            ended = before + clients.whole
            if ended >= self._requests and self._is_done():
                break
            if time.monotonic() > saved_s + _SAVE_S:
                saved_s = time.monotonic()
                # A proof that is killed goes on with numbers that were not used.
                self._save(next=clients.next + _RESERVED, whole=ended)
            if self._progress["kills"] < self._kills and ended >= self._next_kill():
                await self._kill()
            if self._progress["attacks"] < self._attacks and ended >= self._next_attack():
                await self._attack()
            await asyncio.sleep(_LOOK_S)
        clients.stop = True
        await asking
        self._save(next=clients.next, whole=before + clients.whole)
        await self._wait_for_rest()

    def _is_done(self) -> bool:
        left = self._kills - self._progress["kills"], self._attacks - self._progress["attacks"]
        return max(left) <= 0

    def _next_attack(self) -> int:
        return self._requests * (2 * self._progress["attacks"] + 1) // (2 * self._attacks)

    async def _attack(self) -> None:
        """Delete the ledger, its log, or both, or replace it; wait until it is written again.

        Each second attack kills the scheduler at once, so only its next start can notice.
        """
        attack = _ATTACKS[self._progress["attacks"] % len(_ATTACKS)]
        kills = self._progress["attacks"] % 2 == 1
        written = self._times_written_again()
        attack(self._folder / "usage.db")
        if kills:
            self._running["scheduler"].kill()
        self._save(attacks=self._progress["attacks"] + 1)
        print(f"{time.strftime('%H:%M:%S')} {attack.__name__}: {self._progress}", flush=True)
        if kills:
            self._running.pop("scheduler").wait()
            await self._start("scheduler")
        until_s = time.monotonic() + _START_S
        while self._times_written_again() == written:
            assert time.monotonic() < until_s, "the ledger is not written again; see scheduler.log"
            await asyncio.sleep(_LOOK_S)

    def _times_written_again(self) -> int:
        return (self._folder / "scheduler.log").read_bytes().count(_WRITTEN_AGAIN)

    def _next_kill(self) -> int:
        return self._requests * (self._progress["kills"] + 1) // (self._kills + 1)

    async def _kill(self) -> None:
        """Kill the scheduler, the proxy with its gate, or the engine, in turn."""
        name = _KILLED[self._progress["kills"] % len(_KILLED)]
        process = self._running.pop(name)
        process.kill()
        process.wait()
        self._save(kills=self._progress["kills"] + 1)
        print(f"{time.strftime('%H:%M:%S')} killed {name}: {self._progress}", flush=True)
        await self._start(name)
        if name == "proxy":
            # A scheduler that is killed before the leases expire would not know of them.
            await self._wait_for_orphans()

    async def _wait_for_orphans(self) -> None:
        """Wait until no lease is left without a holder."""
        await self._wait_until(lambda stats: stats.totals.expired > 0, 60.0)
        await asyncio.sleep(1.0)

    async def _wait_for_rest(self) -> None:
        """Wait until no lease is left, and the ledger has them all."""
        await self._wait_until(
            lambda stats: not stats.totals.live_leases and not stats.usage.waiting_rows, _EXPIRY_S
        )
        await asyncio.sleep(1.0)

    async def _wait_until(
        self, condition: Callable[[pb.StatsResponse], bool], within_s: float
    ) -> None:
        until_s = time.monotonic() + within_s
        async with AsyncScheduler(self._target) as scheduler:
            while time.monotonic() < until_s:
                if condition(await scheduler.stats()):
                    return
                await asyncio.sleep(_LOOK_S)

    async def _start(self, name: str) -> None:
        self._running[name] = await asyncio.to_thread(self._open, name)
        until_s = time.monotonic() + _START_S
        while not await asyncio.to_thread(self._is_up, name):
            assert self._running[name].poll() is None, f"see {name}.log"
            assert time.monotonic() < until_s, f"{name} did not start; see {name}.log"
            await asyncio.sleep(_LOOK_S)

    def _open(self, name: str) -> subprocess.Popen[bytes]:
        command = getattr(self, f"_{name}")()
        variables = os.environ | self._variables()
        with (self._folder / f"{name}.log").open("ab") as log:
            return forked.Popen(command, cwd=self._folder, stdout=log, stderr=log, env=variables)

    def _variables(self) -> dict[str, str]:
        return {
            "SCHEDSVC_TARGET": self._target,
            "SCHEDSVC_TENANT_HEADERS": "x-tenant-id",
            "SCHEDSVC_TRUST_REQUEST_ID": "on",
            "SCHEDSVC_UNREACHABLE": "closed",
            "SCHEDSVC_CLIENT_ID": "proof",
        }

    def _scheduler(self) -> list[str]:
        ready = self._folder / "ready.json"
        ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", "schedsvc", "serve", "--config", "schedsvc.yaml"]
        return [*command, "--ready-file", "ready.json"]

    def _engine(self) -> list[str]:
        port = str(self._progress["engine_port"])
        command = [sys.executable, "-m", "schedsvc", "emulate", "--port", port, *_ENGINE]
        return [*command, "--counts", "counts"]

    def _proxy(self) -> list[str]:
        command = [sys.executable, "-c", "from schedsvc_vllm.proxy_cli import main; main()"]
        command += ["--upstream", f"http://127.0.0.1:{self._progress['engine_port']}"]
        return [*command, "--port", str(self._progress["proxy_port"])]

    def _is_up(self, name: str) -> bool:
        if name == "scheduler":
            return (self._folder / "ready.json").exists()
        try:
            with urlopen(f"http://127.0.0.1:{self._progress[f'{name}_port']}/health", timeout=5):
                return True
        except OSError:
            return False

    def _save(self, **figures: int) -> None:
        self._progress |= figures
        part = self._folder / "progress.part"
        part.write_text(json.dumps(self._progress))
        part.rename(self._folder / "progress.json")

    def _read_progress(self) -> dict[str, int]:
        path = self._folder / "progress.json"
        if path.exists():
            return dict(json.loads(path.read_text()))
        ports = {"engine_port": free_port(), "proxy_port": free_port()}
        return {"kills": 0, "attacks": 0, "next": 0, "whole": 0, **ports}


def main() -> None:
    """Run the proof and print its figures."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # end the processes that it has started
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("out/usage-proof"))
    parser.add_argument(
        "--attacks", type=int, default=0, help="take the ledger's file away N times"
    )
    given = parser.parse_args()
    proof = Proof(given.out.absolute(), given.requests, given.kills, given.attacks)
    print(json.dumps(proof.run()))


if __name__ == "__main__":
    main()
