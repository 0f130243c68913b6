"""Adds the gate's own lines to the engine's `/metrics`: whether it enforces, and its counts.

The page is asked for as plain text, without compression, so that lines can be added to it.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate
from typing import Protocol

from schedsvc_vllm.asgi import Message, Scope, Send

PATH = "/metrics"
#: Upper bounds of the buckets of the histogram, in seconds, inclusive; the last has none.
BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
#: The tenant of all that have no histogram of their own.
OTHER = "other"
_NEGOTIATED = frozenset({b"accept", b"accept-encoding"})


class _Times:
    """Counts the times of one tenant, by bucket."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0


class KeySet(Protocol):
    """Counts the keys that verify tokens. `failures`: fetches that gave no key set."""

    failures: int

    @property
    def age_s(self) -> float:
        """Return the seconds since the keys were fetched; infinite before the first time."""


class Counts:
    """Holds the gate's own counts. The functions are called when the page is read.

    The first `tenants_max` tenants have histograms of their own. The others share `other`, and so
    do requests without a tenant's name: an unknown tenant's, or those with an API key alone.
    """

    def __init__(
        self, connected: Callable[[], bool], running: Callable[[], int], tenants_max: int = 50,
        *, upstream_up: Callable[[], bool] | None = None,
    ) -> None:  # fmt: skip
        self.enforced = 0
        self.fail_open = 0
        #: The key set by which the gate verifies tokens; None: it verifies none.
        self.key_set: KeySet | None = None
        self._times = {OTHER: _Times()}
        self._tenants_max = tenants_max
        self._connected = connected
        self._running = running
        self._upstream_up = upstream_up

    def observe(self, seconds: float, tenant: str) -> None:
        """Count how long the gate took until a grant. O(1)."""
        seconds = max(seconds, 0.0)
        times = self._times.get(tenant)
        if times is None:
            times = self._times[OTHER]
            if tenant and len(self._times) <= self._tenants_max:
                times = self._times[tenant] = _Times()
        times.counts[bisect_left(BOUNDS_S, seconds)] += 1
        times.sum_s += seconds

    def _histogram(self) -> list[str]:
        name = "schedsvc_gate_overhead_seconds"
        lines = [
            f"# HELP {name} Time from a request's body to its grant, without its time in the "
            "scheduler's queue, in seconds.",
            f"# TYPE {name} histogram",
        ]
        bounds = [*(str(bound) for bound in BOUNDS_S), "+Inf"]
        for tenant, times in self._times.items():
            labels = f'process="{os.getpid()}",tenant="{escaped(tenant)}"'
            totals = list(accumulate(times.counts))
            lines += [
                f'{name}_bucket{{{labels},le="{bound}"}} {total}'
                for bound, total in zip(bounds, totals, strict=True)
            ]
            lines += [f"{name}_sum{{{labels}}} {times.sum_s}"]
            lines += [f"{name}_count{{{labels}}} {totals[-1]}"]
        return lines

    def text(self) -> str:
        """Write the lines. Each API process of a server reports its own."""
        label = f'{{process="{os.getpid()}"}}'
        lines = self._histogram()
        rows: list[tuple[str, str, str, float]] = [
            ("gate_connected", "gauge", "1 while the scheduler answers.", int(self._connected())),
            ("gate_running", "gauge", "Requests that run behind the gate.", self._running()),
            ("gate_enforced_total", "counter", "Requests the scheduler let run.", self.enforced),
            (
                "gate_fail_open_total",
                "counter",
                "Requests run without the scheduler.",
                self.fail_open,
            ),
        ]
        if (keys := self.key_set) is not None:
            age, failures = (
                "Seconds since the key set was fetched.",
                "Fetches that gave no key set.",
            )
            rows.append(("gate_jwks_age_seconds", "gauge", age, keys.age_s))
            rows.append(("gate_jwks_failures_total", "counter", failures, keys.failures))
        if self._upstream_up is not None:
            up = "1 while the server behind the proxy answers."
            rows.append(("proxy_upstream_up", "gauge", up, int(self._upstream_up())))
        for name, kind, meaning, value in rows:
            full = f"schedsvc_{name}"
            lines += [
                f"# HELP {full} {meaning}",
                f"# TYPE {full} {kind}",
                f"{full}{label} {_number(value)}",
            ]
        return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return "+Inf" if value == math.inf else str(value)


def escaped(value: str) -> str:
    """Write a label's value as Prometheus reads it."""
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def plain_scope(scope: Scope) -> Scope:
    """Return the scope as of a client that takes plain text alone."""
    headers = [pair for pair in scope["headers"] if pair[0] not in _NEGOTIATED]
    return {**scope, "headers": headers}


def adding(counts: Counts, send: Send) -> Send:
    """Return a `send` that puts the gate's lines behind a page of plain text."""
    ours = b""

    async def send_more(message: Message) -> None:
        nonlocal ours
        if message["type"] == "http.response.start":
            headers = [(bytes(name).lower(), bytes(value)) for name, value in message["headers"]]
            told = dict(headers)
            is_page = message["status"] == 200 and told.get(b"content-type", b"").startswith(
                b"text/plain"
            )
            if is_page and b"content-encoding" not in told:
                ours = counts.text().encode()
                size = int(told.get(b"content-length", b"0")) + len(ours)
                headers = [
                    (name, str(size).encode() if name == b"content-length" else value)
                    for name, value in headers
                ]
                message = {**message, "headers": headers}
        elif ours and not message.get("more_body", False):
            message = {**message, "body": bytes(message.get("body", b"")) + ours}
        await send(message)

    return send_more
