"""Runs the reference server: the same grpc.aio server as ours, with handlers that do nothing.

`python -m bench.echo --folder DIR` serves Admit and Session on a Unix socket and on TCP. Both give
one constant answer, which `ANSWER_METHOD` sets: so it is as long as the real one.
"""

import argparse
import asyncio
import gc
import json
from pathlib import Path
from typing import Any

import grpc
import uvloop
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc.config.models import Limits
from schedsvc.server.listeners import server_options
from schedsvc.service import SERVICE_NAME

__all__ = ["ANSWER_METHOD", "MESSAGES_METHOD"]

_ECHO = "bench.Echo"
#: Unary: sets the answer of the other methods.
ANSWER_METHOD = f"/{_ECHO}/Answer"
#: A stream like that of a generated servicer: it parses requests to Python messages, and serialises
#: answers from one.
MESSAGES_METHOD = f"/{_ECHO}/Messages"

_EOF = grpc.aio.EOF  # type: ignore[attr-defined] # the stubs lack it


class _Echo:
    def __init__(self) -> None:
        self._answer = b""

    async def answer(self, data: bytes, context: Any) -> bytes:
        self._answer = data
        return b""

    async def admit(self, data: bytes, context: Any) -> bytes:
        return self._answer

    async def session(self, requests: Any, context: Any) -> None:
        read, write, answer = context.read, context.write, self._answer
        while await read() is not _EOF:
            await write(answer)

    async def messages(self, requests: Any, context: Any) -> None:
        read, write = context.read, context.write
        answer = pb.SessionResponse.FromString(self._answer)
        while await read() is not _EOF:
            await write(answer)

    def handlers(self) -> "tuple[grpc.GenericRpcHandler[Any, Any], ...]":
        unary, stream = (
            grpc.unary_unary_rpc_method_handler,
            grpc.stream_stream_rpc_method_handler,
        )
        parsed = stream(
            self.messages,
            request_deserializer=pb.SessionRequest.FromString,
            response_serializer=pb.SessionResponse.SerializeToString,
        )
        ours = {"Admit": unary(self.admit), "Session": stream(self.session)}
        own = {"Answer": unary(self.answer), "Messages": parsed}
        return (
            grpc.method_handlers_generic_handler(SERVICE_NAME, ours),
            grpc.method_handlers_generic_handler(_ECHO, own),
        )


async def _serve(folder: Path) -> None:
    echo = _Echo()
    targets, servers = [], []
    # One server for each address, as the scheduler has it.
    for address in (f"unix:{folder / 'echo.sock'}", "127.0.0.1:0"):
        server = grpc.aio.server(options=server_options(Limits()))
        server.add_generic_rpc_handlers(echo.handlers())
        port = server.add_insecure_port(address)
        await server.start()
        servers.append(server)
        targets.append(address if address.startswith("unix:") else f"127.0.0.1:{port}")
    gc.collect()
    gc.freeze()
    ready = folder / "echo.ready"
    partial = ready.with_suffix(".partial")
    partial.write_text(json.dumps({"targets": targets}))
    partial.replace(ready)
    await asyncio.Event().wait()


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.echo", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="holds socket and ready file")
    uvloop.run(_serve(parser.parse_args().folder))


if __name__ == "__main__":
    _main()
