"""Runs the clients of the proof: they ask the proxy, and note which answers came whole.

Each attempt has a number, a tenant and an input length, by which the ledger's rows and the engine's
counts identify it.
"""

import asyncio
import json
import os
import random
from dataclasses import dataclass
from pathlib import Path

import aiohttp

TENANTS = 2_000
AT_ONCE = 48
_LONG_ONES = 0.002
_SHORT_TOKENS, _LONG_TOKENS = 6, 800
_RETRY_S = 0.05


@dataclass(frozen=True)
class Attempt:
    """Describes one request, as its number makes it."""

    number: int

    @classmethod
    def found(cls, tenant: str, input_tokens: int) -> "Attempt":
        """Return the attempt of a tenant with a prompt of that length."""
        return cls(int(tenant[1:]) + TENANTS * (input_tokens - 1))

    @property
    def tenant(self) -> str:
        """Return the tenant that asks."""
        return f"t{self.number % TENANTS}"

    @property
    def input_tokens(self) -> int:
        """Return the length of its prompt: another one for each attempt of a tenant."""
        return 1 + self.number // TENANTS

    @property
    def output_tokens(self) -> int:
        """Return the tokens that the engine makes, unless it is cut off."""
        draw = random.Random(self.number)
        if draw.random() < _LONG_ONES:
            return _LONG_TOKENS
        return draw.randint(1, _SHORT_TOKENS)

    @property
    def body(self) -> bytes:
        """Return the body of its request; long ones and some others stream."""
        tokens = self.output_tokens
        asked = {"model": "emulated", "prompt": [7] * self.input_tokens, "max_tokens": tokens}
        stream = tokens == _LONG_TOKENS or self.number % 8 == 0
        return json.dumps({**asked, "emulated_output_tokens": tokens, "stream": stream}).encode()


class Clients:
    """Asks until `stop` is set; `next` is the number of the next attempt."""

    def __init__(self, url: str, whole: Path, begin: int) -> None:
        self.next = begin
        self.whole = 0
        self.stop = False
        self._url = url
        self._file = os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    async def run(self) -> None:
        """Ask with many clients at once."""
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(self._url, connector=connector) as http:
            await asyncio.gather(*(self._work(http) for _ in range(AT_ONCE)))
        os.close(self._file)

    async def _work(self, http: aiohttp.ClientSession) -> None:
        while not self.stop:
            attempt, self.next = Attempt(self.next), self.next + 1
            if await self._ask(http, attempt):
                self.whole += 1
                os.write(self._file, b"%d\n" % attempt.number)
            else:
                await asyncio.sleep(_RETRY_S)

    async def _ask(self, http: aiohttp.ClientSession, attempt: Attempt) -> bool:
        """Ask once; whether the whole answer came, with the scheduler's leave."""
        headers = {"x-tenant-id": attempt.tenant, "x-request-id": str(attempt.number)}
        headers["content-type"] = "application/json"
        try:
            async with http.post("/v1/completions", data=attempt.body, headers=headers) as answer:
                text = await answer.read()
        except (aiohttp.ClientError, OSError):
            return False
        is_ours = answer.headers.get("x-schedsvc-mode") == "enforced"
        return answer.status == 200 and is_ours and b'"error"' not in text
