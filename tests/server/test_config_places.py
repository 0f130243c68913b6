"""Tests checks of names, of queues, and of the files and folders on this machine."""

import os
import socket
from pathlib import Path

import pytest

from schedsvc.records.state import Store
from schedsvc.server import ListenError, Server

from .conftest import config_of
from .test_cli import run
from .test_config import MINIMAL, found, reading


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "scheduler: {queue_max: 500}",
            "scheduler.queue_max: is 500, less than the default of flow_queue_max (1000), so one"
            " tenant could fill the whole queue; set flow_queue_max too",
        ),
        (
            "scheduler: {queue_max: 500, flow_queue_max: 501}",
            "scheduler.flow_queue_max: is 501, larger than queue_max (500), so it would never be"
            " reached; lower it, or raise queue_max",
        ),
        (
            "scheduler: {queue_tokens_max: 500, flow_queue_tokens_max: 501}",
            "scheduler.flow_queue_tokens_max: is 501, larger than queue_tokens_max (500), so it"
            " would never be reached; lower it, or raise queue_tokens_max",
        ),
        ("scheduler: {queue_max: 500, flow_queue_max: 500}", ""),
        ("scheduler: {queue_max: 1000}", ""),
        ("scheduler: {queue_tokens_max: 500}", ""),
    ],
)
def test_queue_limits_that_cannot_both_bind_are_found(
    tmp_path: Path, text: str, problem: str
) -> None:
    problems = [line.partition(" ")[2] for line in found(tmp_path, MINIMAL + text + "\n")]
    assert problems == ([problem] if problem else [])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "scheduler: {queue_max: 1e6}",
            "scheduler.queue_max: has to be a whole number, not 1e6, which YAML reads as text;"
            " write 1000000",
        ),
        (
            "tenants: [{name: a, weight: 2.5e1}]",
            "tenants[0].weight: has to be a number, not 2.5e1, which YAML reads as text; write 25",
        ),
        ("scheduler: {queue_max: 1e999}", "write all its digits"),
        ("scheduler: {queue_max: secret}", "has to be a whole number, not text"),
        ("scheduler: {headroom: 5}", "scheduler.headroom: is 5; it has to lie between 0 and 0.9"),
    ],
)
def test_number_with_an_exponent_is_shown_written_out(
    tmp_path: Path, text: str, problem: str
) -> None:
    [found_here] = found(tmp_path, MINIMAL + text + "\n")
    assert found_here.endswith(problem)


NAMED = [
    "tenants: [{name: NAME}]",
    "groups: [{name: NAME, quota: {concurrency: 1}}]",
    "models: [{name: NAME, pools: [p], quota: {concurrency: 1}}]",
    "pools: [{name: NAME, capacity_tokens: 100}]",
    "classes: [{name: NAME, rank: 1}]",
    "adapters: [{name: NAME, tokens: 1}]",
]


@pytest.mark.parametrize("text", NAMED)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ('"acme "', "'acme ' ends with a space, which no HTTP header can carry; remove it"),
        ('" acme"', "' acme' begins with a space"),
        ('"ac\\u202eme"', "holds the unprintable character U+202E; remove it"),
        ('"ac\\u200bme"', "holds the unprintable character U+200B; remove it"),
    ],
)
def test_name_that_no_request_can_carry_is_found(
    tmp_path: Path, text: str, name: str, words: str
) -> None:
    [problem] = found(tmp_path, MINIMAL + text.replace("NAME", name) + "\n")
    assert ".name: " in problem
    assert words in problem


def test_name_with_a_space_inside_is_valid(tmp_path: Path) -> None:
    assert found(tmp_path, MINIMAL + 'tenants: [{name: "acme west"}]\n') == []


def test_socket_in_a_missing_folder_is_found(tmp_path: Path) -> None:
    [problem] = found(tmp_path, "listeners: [{unix: nowhere/s.sock}]\n")
    folder = tmp_path / "nowhere"
    assert problem.endswith(f"listeners[0].unix: the folder {folder} does not exist; make it")
    folder.mkdir()
    (folder / "s.sock").mkdir()
    [problem] = found(tmp_path, "listeners: [{unix: nowhere/s.sock}]\n")
    assert problem.endswith("s.sock is a folder; name a socket in it")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_file_that_cannot_be_written_is_found(tmp_path: Path) -> None:
    file = tmp_path / "state.db"
    file.touch(0o400)
    [problem] = found(tmp_path, MINIMAL + f"state: {{file: {file}}}\n")
    assert f"cannot write to {file}; change its owner or mode" in problem


def test_state_file_open_to_others_is_closed(tmp_path: Path) -> None:
    file = tmp_path / "state.db"
    Store(file).close()
    text = MINIMAL + f"state: {{file: {file}}}\n"
    assert reading(tmp_path, text).warnings == []
    beside = file.with_name("state.db-wal")
    for path in (file, beside):
        path.touch()
        path.chmod(0o644)
    [warning] = reading(tmp_path, text).warnings
    assert warning.message == f"{file} is open to others (mode 0644); serve makes it 0600"
    store = Store(file)
    for path in (file, beside):
        assert path.stat().st_mode & 0o777 == 0o600
    store.close()


async def test_taken_metrics_port_is_named_before_calls_are_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        server = Server(config_of(metrics={"listen": address}))
        with pytest.raises(ListenError) as caught:
            await server.start()
    assert str(caught.value) == (
        f"metrics.listen: cannot listen on {address}: address already in use;"
        " stop the other program or choose another port"
    )


@pytest.mark.parametrize("key", ["tcp", "unix"])
async def test_listener_that_cannot_start_is_named(tmp_path: Path, key: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        values = {
            "tcp": f"127.0.0.1:{taken.getsockname()[1]}",
            "unix": str(tmp_path / "nowhere" / "s.sock"),
        }
        server = Server(config_of(listeners=[{"tcp": "127.0.0.1:0"}, {key: values[key]}]))
        with pytest.raises(ListenError) as caught:
            await server.start()
    assert str(caught.value).startswith(f"listeners[1].{key}: cannot listen on {values[key]}: ")


def test_serve_refuses_a_socket_in_a_missing_folder(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("listeners: [{unix: nowhere/s.sock}]\n")
    result = run("serve", "--config", str(config))
    assert result.exit_code == 1
    assert f"the folder {tmp_path / 'nowhere'} does not exist; make it" in result.output
