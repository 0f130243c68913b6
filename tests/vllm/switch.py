"""Switches the gate: an ASGI middleware by which one process is measured with and without it.

    vllm serve MODEL --middleware switch.Switch

Two processes of one program differ by some percent as long as they live, which is as much as the
effect; one process does not differ from itself.
"""

from __future__ import annotations

from typing import Any

from schedsvc_vllm.gate import Gate

WITHOUT = (b"x-without-gate", b"1")


class Switch:
    """Passes a request to the gate, or past it if its header says so."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._gate = Gate(app)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one scope."""
        if scope["type"] == "http" and WITHOUT in scope["headers"]:
            await self._app(scope, receive, send)
        else:
            await self._gate(scope, receive, send)
