"""Sends requests of ordinary HTTP clients, as their documentation does, to gate and proxy.

    make test-interop                    installs SDKs into an environment of their own first
    python -m tests.clients.interop

Each client asks for a whole answer, reads a stream, leaves a stream after its first event, is
refused over a quota, and is granted when it retries. Its answers are compared with the
scheduler's books. A client that is not installed here is skipped and named. The exit status is 1 if
anything differs.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from schedsvc_client.sync import Scheduler

from tests.processes.programs import GATE, Programs, standing
from tests.waiting import wait_until

from .interop_clients import ROOT, Client, Seen, body, clients
from .test_end_to_end import CONFIG, ENGINE

TOKENS, LONG = 8, 1_900
#: "limited" may run one request at once; a second one is refused.
TENANTS = [
    {"name": "asks", "weight": 1},
    {"name": "leaves", "weight": 1},
    {"name": "limited", "weight": 1, "quota": {"concurrency": 1, "over": "refuse"}},
]
#: So slow that LONG tokens take longer than any client to start.
SLOW = (*ENGINE, "--speed", "0.1", "--middleware", "tests.clients.messages_layer.Messages")


class Stand(Programs):
    """Runs a scheduler, an engine with the gate, and another behind the proxy."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, CONFIG | {"tenants": TENANTS}, engine=SLOW, gated=False)

    def start_all(self) -> dict[str, str]:
        self.start_scheduler()
        path = {"PYTHONPATH": str(ROOT)}
        gated = self.emulate("gated", "0", *GATE, SCHEDSVC_POOL="gated", **path)
        self.wait_until_connected(gated)
        self.start_engine(**path)
        self.start_proxy()
        return {"gate": gated, "proxy": self.proxy_url}

    def flow(self, tenant: str, *, at_rest: bool = True) -> Any:
        """Return a tenant's books, once nothing runs."""
        with Scheduler(self.target) as scheduler:
            if at_rest:
                wait_until(lambda: not scheduler.stats().totals.live_leases)
            stats = scheduler.stats()
        return next(flow for flow in stats.flows if flow.tenant == tenant)

    def refusals(self) -> int:
        """Return how often "limited" has been refused."""
        books = self.flow("limited", at_rest=False)
        return int(books.received - books.granted - books.queued)


def check(stand: Stand, url: str, ask: Client) -> None:
    """Let one client make all requests. Raises AssertionError if the books differ."""
    before = stand.flow("asks")
    whole = ask(url, "asks", "whole", TOKENS)
    assert whole.usage is not None, whole
    assert (whole.status, whole.usage[1]) == (200, TOKENS), whole
    streamed = ask(url, "asks", "stream", TOKENS)
    assert (streamed.status, streamed.ended) == (200, True), streamed
    assert 0 < streamed.events <= TOKENS + 3, streamed
    assert streamed.usage in (None, whole.usage), streamed
    after = stand.flow("asks")
    assert after.completed - before.completed == 2
    assert after.output_tokens - before.output_tokens == 2 * TOKENS
    assert after.input_tokens - before.input_tokens == 2 * whole.usage[0]

    before = stand.flow("leaves")
    left = ask(url, "leaves", "leave", LONG)
    # One read may bring several events.
    assert left.status == 200, left
    assert 0 < left.events < LONG, left
    after = stand.flow("leaves")
    assert after.cancelled - before.cancelled == 1
    assert 0 < after.output_tokens - before.output_tokens < LONG

    with hogging(url):
        refused = ask(url, "limited", "whole", TOKENS)
    assert refused.status == 429, refused
    assert refused.code in ("rate_limit_exceeded", ""), refused
    assert int(refused.after) >= 1
    check_retry(stand, url, ask)


def check_retry(stand: Stand, url: str, ask: Client) -> None:
    """Let a client be refused once, and be granted when it asks again."""
    before = stand.flow("limited")
    refused = stand.refusals()
    with ThreadPoolExecutor(1) as pool:
        with hogging(url):
            asking = pool.submit(ask, url, "limited", "retry", TOKENS)
            while stand.refusals() == refused:
                assert not asking.done(), asking.result()
                time.sleep(0.02)
        seen: Seen = asking.result()
    assert seen.usage is not None, seen
    assert (seen.status, seen.usage[1]) == (200, TOKENS), seen
    after = stand.flow("limited")
    assert after.completed - before.completed == 1


class hogging:
    """While the block runs, one request of "limited" runs."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)

    def __enter__(self) -> None:
        headers = {"x-tenant-id": "limited", "content-type": "application/json"}
        text = json.dumps(body(LONG, stream=True))
        self._connection.request("POST", "/v1/completions", text, headers)
        answer = self._connection.getresponse()
        assert answer.status == 200
        assert answer.readline()

    def __exit__(self, *_: object) -> None:
        self._connection.close()


def main() -> int:
    """Let every installed client make all requests at the gate and at the proxy."""
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    failures = 0
    with standing(Stand) as stand:
        servers = stand.start_all()
        missing: list[str] = []
        for server, url in servers.items():
            found, missing = clients(stand.folder, server)
            for name, ask in found.items():
                try:
                    check(stand, url, ask)
                    print(f"{name} at the {server}: as the books say", flush=True)
                except AssertionError as error:
                    failures += 1
                    print(f"{name} at the {server}: {error}", file=sys.stderr, flush=True)
        for sentence in missing:
            print(sentence)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
