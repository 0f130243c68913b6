"""The version before of the contract: a process that speaks it, for members and clients.

`python -m tests.cluster.previous serve ...` is `python -m schedsvc serve ...`, except that each
message that comes in or goes out loses what that version does not know. Its contract is in
previous.binpb.

At a release: `python -m tests.cluster.previous --write REVISION` takes the contract of a revision.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from grpc import _channel
from grpc.aio import _channel as aio_channel

FILE = Path(__file__).with_name("previous.binpb")
_PREFIX = "/schedsvc.v1."


@cache
def _pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(FILE.read_bytes()).file:
        pool.Add(file)
    return pool


@cache
def known(method: str) -> tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]] | None:
    """Return what removes from request and answer of a method what that version does not know.

    None: the method is not of the contract, or that version has no such method.
    """
    service, _, name = method.removeprefix("/").partition("/")
    try:
        found = _pool().FindServiceByName(service).methods_by_name[name]
    except KeyError:
        return None
    return _reduce(found.input_type), _reduce(found.output_type)


def _reduce(descriptor: Any) -> Callable[[bytes], bytes]:
    kind = message_factory.GetMessageClass(descriptor)

    def reduced(data: bytes) -> bytes:
        message = kind()
        try:
            message.MergeFromString(data)
        except DecodeError:
            return data  # the receiver says what is wrong with it
        message.DiscardUnknownFields()
        return message.SerializeToString(deterministic=True)

    return reduced


class _Handler(grpc.GenericRpcHandler):  # type: ignore[type-arg] # it has none at run time
    """Another handler, in that version."""

    def __init__(self, inner: "grpc.GenericRpcHandler[Any, Any]") -> None:
        self._inner = inner

    def service(self, handler_call_details: Any) -> Any:
        found, method = self._inner.service(handler_call_details), handler_call_details.method
        if found is None or not method.startswith(_PREFIX):
            return found
        reduces = known(method)
        if reduces is None:
            return None  # unimplemented
        assert found.request_deserializer is None  # all of ours take bytes
        return found._replace(request_deserializer=reduces[0], response_serializer=reduces[1])


def _calls(make: Any) -> Any:
    """Change a method of channels that makes callables."""

    def made(
        self: Any, method: str, request_serializer: Any = None, response_deserializer: Any = None,
        **more: Any,
    ) -> Any:  # fmt: skip
        reduces = known(method) if method.startswith(_PREFIX) else None
        if reduces is None:
            return make(self, method, request_serializer, response_deserializer, **more)
        write, read = request_serializer or _same, response_deserializer or _same
        return make(
            self, method, lambda message: reduces[0](write(message)),
            lambda data: read(reduces[1](data)), **more,
        )  # fmt: skip

    return made


def _same(value: Any) -> Any:
    return value


@contextmanager
def spoken() -> Iterator[None]:
    """Let all servers that are made, and all calls, be of that version within the block."""
    aio_server = grpc.aio.server

    def server(*args: Any, **options: Any) -> Any:
        made = aio_server(*args, **options)
        add = made.add_generic_rpc_handlers
        made.add_generic_rpc_handlers = lambda handlers: add([_Handler(each) for each in handlers])
        return made

    kept = {
        (kind, name): getattr(kind, name)
        for kind in (_channel.Channel, aio_channel.Channel)
        for name in ("unary_unary", "stream_stream")
    }
    grpc.aio.server = server  # type: ignore[assignment]
    for (kind, name), make in kept.items():
        setattr(kind, name, _calls(make))
    try:
        yield
    finally:
        grpc.aio.server = aio_server
        for (kind, name), make in kept.items():
            setattr(kind, name, make)


def write(revision: str) -> None:
    """Take the contract of a revision of this repository. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", revision, "proto"], check=True, capture_output=True
        ).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        proto = Path(folder) / "proto"
        files = [str(path.relative_to(proto)) for path in sorted(proto.rglob("*.proto"))]
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{proto}", "--include_imports"]
        subprocess.run([*command, f"--descriptor_set_out={FILE}", *files], check=True)


def main() -> None:
    if sys.argv[1:2] == ["--write"]:
        write(sys.argv[2])
        return
    with spoken():
        from schedsvc.cli import main as schedsvc

        schedsvc()


if __name__ == "__main__":
    main()
