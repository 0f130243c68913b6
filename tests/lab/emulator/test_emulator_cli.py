import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest
from click.testing import CliRunner

from schedsvc.cli import main
from schedsvc_lab.engine import profile_names
from tests import forked

LAYER = """
class Layer:
    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        async def mark(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-layer", NAME)]
            await send(message)
        await self.app(scope, receive, mark)
"""


def run(*args):
    return CliRunner().invoke(main, ["emulate", *args])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--profile", "h100"], "profile 'h100' is unknown; known are a10g-llama2-7b, "),
        (["--profile", "none.yaml"], "none.yaml: cannot be read"),
        (
            ["--kv-tokens", "1000"],
            "--max-model-len: 4096 does not fit into the KV cache of 992 tokens (62 blocks of 16)",
        ),
        (
            ["--kv-tokens", "3"],
            "--kv-tokens: 3 is less than one block of 16 tokens (--block-size); give at least 16",
        ),
        (["--kv-tokens", "0"], "'--kv-tokens': 0 is not in the range"),
        (["--max-num-seqs", "many"], "'many' is not a whole number"),
        (["--no-enable-chunked-prefill"], "--max-num-batched-tokens: must be at least --max-mod"),
        (["--speed", "0"], "'--speed'"),
        (["--speed", "nan"], "'--speed': nan is not a number"),
        (["--port", "70000"], "'--port'"),
        (["--model", ""], "--model: must not be empty"),
        (["--middleware", "Gate"], "must be package.module.Class"),
        (["--middleware", "no_such_module.Gate"], "cannot import: No module named"),
        (["--middleware", "json.Gate"], "json has no Gate"),
        (["--middleware", "json.dumps"], "must be a class whose instances are ASGI"),
        (["--middleware", "decimal.Decimal"], "must be a class whose instances are ASGI"),
        (
            ["--ready-file", "/no/such/folder/ready.json"],
            "--ready-file: the folder /no/such/folder does not",
        ),
        (
            ["--counts", "/no/such/folder/counts"],
            "--counts: the folder /no/such/folder does not exist",
        ),
        (["--uds", "/no/such/folder/e.sock"], "the folder /no/such/folder does not exist; make it"),
        (["--nonsense"], "No such option"),
    ],
)
def test_wrong_flags_say_which_and_why(args, message):
    result = run(*args)
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_an_address_in_use_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("--port", str(port))
        assert result.exit_code == 1
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in result.output
    path = str(tmp_path / "e.sock")
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(path)
        taken.listen()
        result = run("--uds", path)
        assert result.exit_code == 1
        assert "another server does" in result.output
    (tmp_path / "file").write_text("")
    result = run("--uds", str(tmp_path / "file"))
    assert "there is a file which is no socket" in result.output
    assert (tmp_path / "file").exists()


def test_help_lists_the_profiles_and_has_an_example():
    result = run("--help")
    assert result.exit_code == 0
    # Long lines may break at a hyphen.
    assert ",".join(profile_names()) in "".join(result.output.split())
    assert "schedsvc emulate --port 8000 --profile tiny-cpu" in result.output


def start_process(*args, **options):
    command = [
        sys.executable,
        "-c",
        "from schedsvc_lab.emulator.cli import emulate; emulate()",
        *args,
    ]
    return forked.Popen(command, stdout=subprocess.PIPE, text=True, **options)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_process_prints_its_address_and_stops_at_once(tmp_path, number):
    ready = tmp_path / "ready.json"
    profile = ("--profile", "a10g-llama2-7b")
    process = start_process("--port", "0", *profile, "--ready-file", str(ready))
    try:
        line = process.stdout.readline()
        address = json.loads(ready.read_text())
        assert line == f"emulator ready {address['base_url']}\n"
        assert address["pid"] == process.pid
        with urllib.request.urlopen(address["base_url"] + "/v1/models") as response:
            assert response.status == 200
        body = json.dumps({"prompt": "a", "max_tokens": 2000, "stream": True, "ignore_eos": True})
        request = urllib.request.Request(
            address["base_url"] + "/v1/completions", data=body.encode(), method="POST"
        )
        with urllib.request.urlopen(request) as stream:
            stream.readline()
            process.send_signal(number)
            # 2,000 steps of this engine would take a minute.
            assert process.wait(timeout=20) == 0
            assert b"the engine has stopped" in stream.read()
        assert not ready.exists()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


REFUSAL = """
class Layer:
    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        async def refuse(message):
            if message["type"] == "lifespan.startup.complete":
                message = {"type": "lifespan.startup.failed", "message": "no scheduler is named"}
            await send(message)
        await self.app(scope, receive, refuse)
"""


def test_a_layer_that_refuses_to_start_is_an_error_and_no_traceback(tmp_path):
    (tmp_path / "refusing_layer.py").write_text(REFUSAL)
    done = forked.run(
        [
            *(sys.executable, "-m", "schedsvc", "emulate"),
            *("--uds", str(tmp_path / "e.sock"), "--middleware", "refusing_layer.Layer"),
        ],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == 1
    assert "no scheduler is named" in done.stderr
    assert "Error: a middleware refused to start" in done.stderr
    assert "Traceback" not in done.stderr


def test_layers_are_put_around_the_server_the_last_one_outermost(tmp_path):
    for name in ("inner", "outer"):
        (tmp_path / f"{name}_layer.py").write_text(f"NAME = b'{name}'\n{LAYER}")
    uds = str(tmp_path / "e.sock")
    layers = ["--middleware", "inner_layer.Layer", "--middleware", "outer_layer.Layer"]
    process = start_process(
        "--uds", uds, "--profile", "fast", *layers, env={**os.environ, "PYTHONPATH": str(tmp_path)}
    )
    try:
        assert process.stdout.readline() == f"emulator ready unix:{uds}\n"
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(uds)
            client.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
            answer = b"".join(iter(lambda: client.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.1 200")
        assert re.findall(rb"x-layer: (\w+)", answer) == [b"inner", b"outer"]
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()
