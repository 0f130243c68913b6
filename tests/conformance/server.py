"""Processes for a test: a scheduler of its own for each script, an engine for the sample."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests import forked
from tests.server.certificates import Authority

STOP_S = 15.0
#: The file of the certificate authority of a scheduler with TLS.
AUTHORITY = "authority.pem"


@contextmanager
def running(arguments: list[str], folder: Path) -> Iterator[dict[str, Any]]:
    """Run a `schedsvc` command until its ready file is there, whose content it gives.

    Raises if the command does not start, or does not stop with status 0 when asked to.
    """
    ready, log = folder / f"{arguments[0]}.ready", folder / f"{arguments[0]}.log"
    program = str(Path(sys.executable).parent / "schedsvc")
    command = [program, *arguments, "--ready-file", str(ready)]
    with forked.started(command, ready, log=log) as process:
        yield json.loads(ready.read_text())
        process.send_signal(signal.SIGTERM)
        try:
            status = process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not stop:\n{log.read_text()}") from None
        assert status == 0, f"it stopped with status {status}:\n{log.read_text()}"


@contextmanager
def serving(
    script: dict[str, Any], folder: Path, transport: str = "unix", library: str = "grpcio"
) -> Iterator[str]:
    """Run a scheduler as a script configures it; gives the target to connect to.

    `transport`: unix, tcp, or tls, whose authority is in `folder / AUTHORITY`. `library`: what
    serves gRPC.
    """
    listener = {"tcp": "127.0.0.1:0"} if transport != "unix" else {"unix": f"{folder}/s.sock"}
    listener |= script.get("listener", {})
    if transport == "tls":
        pair = Authority(folder).issue("localhost")
        listener["tls"] = {"cert": str(pair.cert_file), "key": str(pair.key_file)}
    # JSON is YAML.
    config = folder / "config.yaml"
    config.write_text(
        json.dumps({"transport": library, **script["config"], "listeners": [listener]})
    )
    with running(["serve", "--config", str(config)], folder) as ready:
        (target,) = ready["targets"]
        yield target
