"""Times at the server's edge: a middleware around everything else, the same in both arms.

From a request's arrival here to the first byte of its answer. `GET /edge` returns the times since
its last call, one `[tenant, status, ttft_ms]` for each request.
"""

import json
import time
from typing import Any


class Edge:
    """Is loaded by `vllm serve ... --middleware edge.Edge`, as the last of them: the outermost."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.rows: list[tuple[str, int, float]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one scope."""
        if scope["type"] == "http" and scope["path"] == "/edge":
            rows, self.rows = self.rows, []
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": json.dumps(rows).encode()})
            return
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        arrived_s = time.perf_counter()
        status = 0
        timed = False

        async def first_byte(message: Any) -> None:
            nonlocal status, timed
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not timed and message.get("body"):
                timed = True
                ttft_ms = (time.perf_counter() - arrived_s) * 1e3
                tenant = dict(scope["headers"]).get(b"x-tenant-id", b"").decode()
                self.rows.append((tenant, status, ttft_ms))
            await send(message)

        await self.app(scope, receive, first_byte)
