"""A scheduler of its own for each script."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START_S = 30.0
STOP_S = 15.0


@contextmanager
def serving(script: dict[str, Any], folder: Path) -> Iterator[str]:
    """Run `schedsvc serve` as the script configures it; gives the target to connect to.

    Raises where it does not start, or does not stop with status 0 once it is told to.
    """
    socket, ready, log = (folder / name for name in ("s.sock", "ready", "log"))
    listener = {"unix": str(socket), **script.get("listener", {})}
    # JSON is YAML.
    config = folder / "config.yaml"
    config.write_text(json.dumps({**script["config"], "listeners": [listener]}))
    command = [Path(sys.executable).parent / "schedsvc", "serve"]
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, "--config", config, "--ready-file", ready], stdout=out, stderr=out
        )
    try:
        deadline = time.monotonic() + START_S
        while not ready.exists():
            assert process.poll() is None, f"it did not start:\n{log.read_text()}"
            assert time.monotonic() < deadline, f"it is not ready:\n{log.read_text()}"
            time.sleep(0.02)
        yield f"unix:{socket}"
        process.send_signal(signal.SIGTERM)
        try:
            status = process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            status = None
        assert status is not None, f"it still drains; was a lease left?\n{log.read_text()}"
        assert status == 0, f"it stopped with status {status}:\n{log.read_text()}"
    finally:
        process.kill()
        process.wait()
