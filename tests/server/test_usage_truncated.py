"""Tests a ledger that another program truncates: counted, loud, and no silent restart."""

import json
import os
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc
import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1.scheduler_pb2_grpc import SchedulerServiceStub

from tests.usage.test_ledger import KEY, lease, opened, sums
from tests.waiting import wait_until

from .conftest import POOL, ask
from .test_cli import events_of, scheduler
from .test_metrics import of, samples_of
from .test_second_start import second_start

#: More rows than SQLite keeps in memory.
EARLIER = 60_000


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    ledger = opened(tmp_path)
    now_s = int(time.time())
    ledger.add([lease(i, at_s=now_s, key=KEY._replace(tenant=f"t-{i}")) for i in range(EARLIER)])
    ledger.close()
    keys = {
        "listeners": [{"tcp": "127.0.0.1:0"}],
        "metrics": {"listen": "127.0.0.1:0"},
        "log": {"format": "json"},
        "pools": [POOL],
        "usage": {"path": str(tmp_path / "usage.db")},
    }
    (tmp_path / "c.yaml").write_text(json.dumps(keys))
    return keys


def use(stub: SchedulerServiceStub, request_id: str) -> None:
    grant = stub.Admit(ask(request_id=request_id)).grant
    ended = pb.CompleteRequest(
        lease_id=grant.lease_id, pool_epoch=grant.pool_epoch, input_tokens=10, output_tokens=5
    )
    stub.Complete(ended)


@pytest.mark.parametrize("size", [0, 4_096, 1 << 20])
def test_running_scheduler_counts_the_rows_of_a_truncated_ledger(
    tmp_path: Path, config: dict[str, Any], size: int
) -> None:
    with scheduler(tmp_path / "c.yaml") as (process, ready):

        def figure(name: str) -> float:
            with urlopen(ready["metrics"], timeout=10) as page:
                return of(samples_of(page.read().decode()), f"usage_{name}")

        with grpc.insecure_channel(ready["targets"][0]) as channel:
            stub = SchedulerServiceStub(channel)
            use(stub, "before")
            wait_until(lambda: figure("rows_saved_total") == 1)
            os.truncate(tmp_path / "usage.db", size)
            wait_until(lambda: figure("files_lost_total") == 1)
            use(stub, "after")
            wait_until(lambda: figure("rows_saved_total") == 2)
            lost = figure("rows_lost_total")
            assert figure("failing") == 0
        process.terminate()
        events = {each["event"]: each for each in events_of(process)}
        assert process.returncode == 0
    [(kept, *_)] = sums(tmp_path)
    assert (0 < lost < EARLIER, kept) == (True, EARLIER + 2 - lost)
    assert events["usage_file_lost"]["level"] == "error"
    assert events["usage_file_written_again"]["level"] == "error"
    assert events["usage_file_written_again"]["lost_rows"] == lost
    assert os.path.getsize(tmp_path / "usage.db.aside") == size


@pytest.mark.parametrize("size", [0, 4_096, 1 << 20])
def test_start_with_a_truncated_ledger_is_refused(
    tmp_path: Path, config: dict[str, Any], size: int
) -> None:
    folder = tmp_path / "second"
    folder.mkdir()
    with scheduler(tmp_path / "c.yaml") as (process, _):
        process.kill()
        process.wait()
        os.truncate(tmp_path / "usage.db", size)
        for _ in range(2):
            said = second_start(folder, config, folder / "ready.json")
            assert "usage.db is damaged (" in said
            assert "and then restore a backup or begin without one" in said
            assert os.path.getsize(tmp_path / "usage.db") == size
