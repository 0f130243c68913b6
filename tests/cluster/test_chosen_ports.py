"""Tests a member with a role whose port the system chooses: kept over terms, and no change."""

import json
import signal
from pathlib import Path
from typing import Any

from tests.waiting import until

from .member_process import MemberProcess, leads
from .members import ready_store
from .store_server import StoreServer


def events(log: Path, name: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == name]


async def test_chosen_port_is_kept_and_needs_no_restart(store: StoreServer, tmp_path: Path) -> None:
    await ready_store(store)
    a, log = MemberProcess(tmp_path, "a", store.url), tmp_path / "a.log"
    try:
        await a.start()
        await until(lambda: leads(a), "it leads")
        ports = {entry["metrics"] for entry in events(log, "listening") if "metrics" in entry}
        assert ports == {a.metrics_url}
        for number in (1, 2):
            a.send(signal.SIGHUP)
            await until(lambda n=number: len(events(log, "config_unchanged")) == n, "it reloads")
        assert events(log, "config_needs_restart") == []
        text = a._config.read_text()
        assert "listen: 127.0.0.1:0" in text
        a._config.write_text(text.replace("listen: 127.0.0.1:0", "listen: localhost:0"))
        a.send(signal.SIGHUP)
        await until(lambda: events(log, "config_needs_restart"), "a real change needs one")
        assert events(log, "config_needs_restart")[0]["keys"] == ["metrics"]
    finally:
        a.end()
