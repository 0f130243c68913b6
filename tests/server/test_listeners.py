"""Tests addresses: those to be had, those not, and the message then."""

import asyncio
import os
import socket
import stat
from pathlib import Path

import grpc
import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc.config.file_rules import UNIX_PATH_BYTES_MAX
from schedsvc.server import ListenError, Server

from .conftest import ask, calling, config_of, serving

pytestmark = pytest.mark.usefixtures("both_transports")


async def refused(listeners: list[dict[str, object]], **keys: object) -> str:
    server = Server(config_of(listeners=listeners, **keys))
    with pytest.raises(ListenError) as caught:
        await server.start()
    return str(caught.value)


async def test_a_port_in_use_is_an_error_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        what = await refused([{"tcp": address}])
        assert address in what
        assert "in use" in what
        assert "metrics.listen" in await refused(
            [{"tcp": "127.0.0.1:0"}], metrics={"listen": address}
        )


async def test_two_schedulers_cannot_share_a_port() -> None:
    async with serving() as server:
        assert "in use" in await refused([{"tcp": server.targets[0]}])
        async with calling(server.targets[0]) as stub:
            assert (await stub.Admit(ask(10))).outcome == pb.OUTCOME_GRANTED


async def test_a_host_that_is_not_here() -> None:
    assert "no.such.host.invalid:1" in await refused([{"tcp": "no.such.host.invalid:1"}])


async def test_the_socket_has_the_mode_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    async with serving(listeners=[{"unix": str(path), "mode": "0600"}]) as server:
        assert server.targets == [f"unix:{path}"]
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()


async def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    listeners = [{"unix": str(path)}]
    async with serving(listeners=listeners) as server, calling(server.targets[0]) as stub:
        assert (await stub.Admit(ask(10))).outcome == pb.OUTCOME_GRANTED


async def test_socket_of_a_successor_outlives_the_predecessor(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    listeners = [{"unix": str(path)}]
    predecessor = Server(config_of(listeners=listeners))
    await predecessor.start()
    path.unlink()  # an operator does that while it drains
    async with serving(listeners=listeners) as server:
        made = path.stat().st_ino
        await predecessor.stop(None)
        assert path.stat().st_ino == made
        async with calling(server.targets[0]) as stub:
            assert (await stub.Admit(ask(10))).outcome == pb.OUTCOME_GRANTED
    assert os.listdir(tmp_path) == []


async def test_longest_path_of_a_socket_is_served(tmp_path: Path) -> None:
    fill = "x" * (UNIX_PATH_BYTES_MAX - len(bytes(tmp_path)) - len("//s.sock"))
    folder = tmp_path / fill
    folder.mkdir()
    async with serving(listeners=[{"unix": str(folder / "s.sock")}]) as server:
        assert server.targets == [f"unix:{folder}/s.sock"]
    folder = tmp_path / (fill + "xxxxx")
    folder.mkdir()
    told = await refused([{"unix": str(folder / "s")}])
    assert "shorten its folder's path by 4 bytes" in told


async def test_a_live_socket_is_left_alone(tmp_path: Path) -> None:
    listeners: list[dict[str, object]] = [{"unix": str(tmp_path / "s.sock")}]
    async with serving(listeners=listeners) as server:
        assert "another server" in await refused(listeners)
        async with calling(server.targets[0]) as stub:
            assert (await stub.Admit(ask(10))).outcome == pb.OUTCOME_GRANTED


async def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    assert "no socket" in await refused([{"unix": str(path)}])
    assert path.read_text() == "data"
    missing = str(tmp_path / "nowhere" / "s.sock")
    assert missing in await refused([{"unix": missing}])


async def test_connections_beyond_the_limit_are_closed_and_others_go_on() -> None:
    async with serving(limits={"connections_max": 2}) as server:
        target = server.targets[0]
        async with calling(target) as stub:
            assert (await stub.Admit(ask(10))).outcome == pb.OUTCOME_GRANTED
            host, _, port = target.rpartition(":")
            silent = [socket.create_connection((host, int(port))) for _ in range(6)]
            for connection in silent:
                connection.settimeout(5)
            # A server that takes a connection begins to speak at once, and takes twice as many.
            heard = [bool(await asyncio.to_thread(hear, connection)) for connection in silent]
            assert heard.count(True) == 3
            assert (await stub.Admit(ask(10))).outcome == pb.OUTCOME_GRANTED
            for connection in silent:
                connection.close()
        for _ in range(100):
            async with calling(target) as again:
                try:
                    answer = await again.Admit(ask(10))
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.05)  # it has not yet heard that they have gone
                    continue
            assert answer.outcome == pb.OUTCOME_GRANTED
            break


def hear(connection: socket.socket) -> bytes:
    """Return the first bytes that come; nothing if the other end hangs up."""
    try:
        return connection.recv(1)
    except ConnectionError:
        return b""


async def test_a_start_that_fails_listens_nowhere(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        await refused([{"unix": str(path)}, {"tcp": address}])
    assert not path.exists()
    async with serving(listeners=[{"unix": str(path)}]):
        pass
