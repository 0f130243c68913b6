"""A gate and an emulated engine in one process; they write down what was used, then send it.

Each line of the counts file is `kind lease tenant input output`: `p` for a report, `d` for an end.
It is written with one system call, so a killed process loses no line.
"""

import argparse
import asyncio
import os
import random
import signal
import time
from pathlib import Path

from schedsvc_client import Outcome
from schedsvc_client.aio import Admission, SchedulerSession
from schedsvc_client.errors import SchedulerError

STEP_S = 0.06
_AT_ONCE = 48
_LONG_ONES = 0.02
_RETRY_S = 0.02
_TRIES_MAX = 3_000


class Shim:
    """Sends requests until a given number has ended."""

    def __init__(self, target: str, counts: Path, requests: int, seed: int) -> None:
        self._file = os.open(counts, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._left = requests
        self._random = random.Random(seed)
        # Each start of this process is another one of the same gate.
        self._session = SchedulerSession(target, client_id="shim", incarnation=time.time_ns())
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._offer)

    def _offer(self) -> None:
        """Offer the pool as an engine that has just started: leases of the former one are void."""
        self._session.register_pool(
            pool="pool", epoch=time.time_ns(), capacity_tokens=1 << 20, block_size_tokens=16
        )

    async def run(self) -> None:
        self._offer()
        async with self._session:
            await asyncio.gather(*(self._work() for _ in range(_AT_ONCE)))
            assert await self._session.flush(60.0), "not all ends were saved within 60 s"

    async def _work(self) -> None:
        while self._left > 0:
            self._left -= 1
            tenant = f"t{self._random.randrange(8)}"
            asked, longest = self._random.randrange(1, 500), self._random.randrange(1, 200)
            for _ in range(_TRIES_MAX):
                if await self._request(tenant, asked, longest):
                    break
                await asyncio.sleep(_RETRY_S)
            else:
                raise AssertionError("the scheduler granted nothing for a minute")

    async def _request(self, tenant: str, asked: int, longest: int) -> bool:
        """Serve one request; False if the scheduler did not grant it."""
        admission = self._session.admission(
            input_tokens=asked, max_output_tokens=longest, tenant=tenant, pool="pool"
        )
        try:
            await admission.submit()
        except SchedulerError:
            return False
        output = 1
        if self._random.random() < _LONG_ONES:
            for output in range(1, min(longest, 6)):
                self._note("p", admission, tenant, asked, output)
                admission.progress(input_tokens=asked, output_tokens=output)
                await asyncio.sleep(STEP_S)
                if admission.lost is not None:
                    break
        outcome = Outcome.COMPLETED if admission.lost is None else Outcome.CANCELLED
        self._note("d", admission, tenant, asked, output)
        admission.complete(outcome=outcome, input_tokens=asked, output_tokens=output)
        return True

    def _note(self, kind: str, admission: Admission, tenant: str, asked: int, output: int) -> None:
        assert admission.lease is not None
        line = f"{kind} {admission.lease.lease_id} {tenant} {asked} {output}\n"
        os.write(self._file, line.encode())


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("counts", type=Path)
    parser.add_argument("requests", type=int)
    parser.add_argument("seed", type=int)
    given = parser.parse_args()
    await Shim(given.target, given.counts, given.requests, given.seed).run()


if __name__ == "__main__":
    asyncio.run(_main())
