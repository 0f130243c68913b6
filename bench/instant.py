"""Answers at once as a server, so what is left of a latency is the load generator's own.

`python -m bench.instant --ready-file FILE` serves completions on a free port of 127.0.0.1 and
writes the port to the file. It reads no more of a request than where it ends.
"""

import argparse
import asyncio
import json
from pathlib import Path
from typing import cast

import uvloop

TOKENS = 8

_CHOICE = {"index": 0, "text": " token", "logprobs": None, "finish_reason": None}
_CHUNK = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": "instant"}
_USAGE = {"prompt_tokens": 1, "completion_tokens": TOKENS, "total_tokens": 1 + TOKENS}


def _answers() -> tuple[bytes, bytes]:
    """Write the answer to a completion, and the list of models."""
    events = [{**_CHUNK, "choices": [_CHOICE], "usage": None}] * TOKENS
    parts = [f"data: {json.dumps(event)}\n\n" for event in events]
    parts.append(f"data: {json.dumps({**_CHUNK, 'choices': [], 'usage': _USAGE})}\n\n")
    body = "".join((*parts, "data: [DONE]\n\n")).encode()
    models = json.dumps({"object": "list", "data": [{"id": "instant"}]}).encode()
    head = "HTTP/1.1 200 OK\r\ncontent-type: {}\r\ncontent-length: {}\r\n\r\n"
    return (
        head.format("text/event-stream", len(body)).encode() + body,
        head.format("application/json", len(models)).encode() + models,
    )


class _Instant(asyncio.Protocol):
    """Serves one connection: an answer for each request that is complete."""

    answer, models = _answers()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports write, though they are no asyncio.WriteTransport.
        self._transport = cast(asyncio.WriteTransport, transport)
        self._data = b""

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = self._data[:end].lower()
            _, _, length = head.partition(b"content-length:")
            whole = end + 4 + (int(length.split(b"\r\n", 1)[0]) if length else 0)
            if len(self._data) < whole:
                return
            self._data = self._data[whole:]
            self._transport.write(self.models if head.startswith(b"get ") else self.answer)


async def _serve(ready_file: Path) -> None:
    server = await asyncio.get_running_loop().create_server(_Instant, "127.0.0.1", 0)
    # A process that waits for the file must not read half of it.
    partial = ready_file.with_suffix(".partial")
    partial.write_text(str(server.sockets[0].getsockname()[1]))
    partial.replace(ready_file)
    await server.serve_forever()


def main() -> None:
    """Serve until ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ready-file", type=Path, required=True)
    arguments = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(arguments.ready_file))


if __name__ == "__main__":
    main()
