"""Changes files under a running process: in steps, alike in size, rotated, reordered."""

import itertools
import json
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

import grpc
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1 import scheduler_pb2_grpc as stubs

from tests.waiting import Stopwatch

from .certificates import Authority
from .conftest import SHIM, ask
from .test_cli import scheduler
from .test_metrics import Samples, samples_of
from .test_signals import read_until

WATCH_S = 0.2
STEP_S, STEPS = 0.02, 30


def file_of(*tenants: str) -> str:
    return "listeners: [{tcp: '127.0.0.1:0'}]\ntenants:\n" + "".join(tenants)


def write_in_steps(file: Path, parts: list[str]) -> bool:
    """Write a file slowly, each step a valid configuration; return whether no step took long."""
    steady = True
    with file.open("w") as stream:
        for part in parts:
            step = Stopwatch()
            stream.write(part)
            stream.flush()
            time.sleep(STEP_S)
            steady = steady and not step.ran_for(WATCH_S)
    return steady


def test_watched_file_is_loaded_once_when_quiet(tmp_path: Path) -> None:
    """Half a file was loaded, which here is valid too."""
    file = tmp_path / "c.yaml"
    file.write_text(file_of("- {name: a}\n"))
    results = "config_reloaded", "config_rejected"
    with scheduler(file, "--watch-config", str(WATCH_S)) as (process, _):
        for attempt in itertools.count():
            steps = [f"- {{name: t{number}}}\n" for number in range(STEPS)]
            steady = write_in_steps(file, [file_of(f"- {{name: a{attempt}}}\n"), *steps])
            loaded = read_until(process, *results)[-1]
            if steady:
                break
            # This machine stood still in a step, so the file was quiet before its end.
            while loaded["tenants"] != 1 + STEPS:
                loaded = read_until(process, *results)[-1]
        assert (loaded["event"], loaded["tenants"]) == ("config_reloaded", 1 + STEPS)


def weight_milli(stub: stubs.SchedulerServiceStub) -> int:
    [flow] = stub.Stats(pb.StatsRequest(tenants=["a"])).flows
    return flow.weight_milli


def reload(process: Any) -> list[dict[str, Any]]:
    """Send a SIGHUP; return the log up to the SIGHUP's effect."""
    process.send_signal(signal.SIGHUP)
    return read_until(process, "config_reloaded", "config_unchanged", "config_rejected")


def scrape(url: str) -> Samples:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return samples_of(answer.read().decode())


def of_other(samples: Samples) -> dict[tuple[str, Any], float]:
    return {
        key: value
        for key, value in samples.items()
        if key[0].endswith("_total") and ("tenant", "other") in key[1]
    }


def test_counters_of_other_survive_a_reload_that_shows_others(tmp_path: Path) -> None:
    names = [f"t{number}" for number in range(5)]

    def write(order: list[str]) -> None:
        (tmp_path / "c.yaml").write_text(
            json.dumps(
                {
                    "listeners": [{"tcp": "127.0.0.1:0"}],
                    "metrics": {"listen": "127.0.0.1:0", "tenants_max": 2},
                    "pools": [{"name": "pool", "capacity_tokens": 1_600}],
                    "tenants": [{"name": name} for name in order],
                }
            )
        )

    write(names)
    with (
        scheduler(tmp_path / "c.yaml") as (process, ready),
        grpc.insecure_channel(ready["targets"][0]) as channel,
    ):
        stub = stubs.SchedulerServiceStub(channel)
        for number, name in enumerate(names):
            grant = stub.Admit(ask(64, tenant=name)).grant
            used = {"lease_id": grant.lease_id, "pool_epoch": 1, "output_tokens": 10 + number}
            stub.Complete(pb.CompleteRequest(**used))
            stub.Admit(ask(100_000, tenant=name))  # refused
        before = of_other(scrape(ready["metrics"]))
        assert before["output_tokens_total", (("tenant", "other"),)] == 12 + 13 + 14
        # Tenants that were in `other` get separate series, and the file loses one of them.
        write(names[:1:-1][:2] + names[:2])
        assert reload(process)[-1]["event"] == "config_reloaded"
        samples = scrape(ready["metrics"])
        after = of_other(samples)
        shown = {labels[0][1] for name, labels in samples if name == "output_tokens_total"}
        assert shown == {"t4", "t3", "other"}
        assert after.keys() >= before.keys()
        assert {key: after[key] for key in before if after[key] < before[key]} == {}
        assert after["output_tokens_total", (("tenant", "other"),)] >= 12 + 13 + 14


FIRST, SECOND = "first-token-of-enough", "second-token-of-enough"


class Rotated:
    """Holds a scheduler's token file and certificates, which a test replaces."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authorities = {name: Authority(folder, name) for name in ("first", "second")}

    def use(self, name: str, token: str) -> None:
        authority = self.authorities[name]
        own = authority.issue("scheduler")
        for file, held in (("cert", own.cert), ("key", own.key), ("ca", authority.cert)):
            (self.folder / file).write_bytes(held)
        (self.folder / "token").write_text(token)

    def code(self, target: str, name: str, token: str) -> str:
        """Return the status of a call with the certificate of an authority, and with a token."""
        authority = self.authorities[name]
        pair = authority.issue("gate")
        proof = grpc.ssl_channel_credentials(authority.cert, pair.key, pair.cert)
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.secure_channel(target, proof, options) as channel:
            stub = stubs.SchedulerServiceStub(channel)
            try:
                metadata = (("authorization", f"Bearer {token}"),)
                stub.Stats(pb.StatsRequest(), metadata=metadata, timeout=20)
            except grpc.RpcError as error:
                return str(error.code().name)  # type: ignore[attr-defined]
        return "OK"


def test_hangup_loads_rotated_tokens_and_certificates(tmp_path: Path) -> None:
    """They are loaded even if the configuration is unchanged."""
    rotated = Rotated(tmp_path)
    rotated.use("first", FIRST)
    tls = {"cert": "cert", "key": "key", "client_ca": "ca"}
    data = {
        "listeners": [{"tcp": "127.0.0.1:0", "tls": tls, "auth": "token"}],
        "auth": {"principals": [{"name": "gate", "token_file": "token", **SHIM}]},
        "state": {"file": "state.db"},
    }
    file = tmp_path / "c.yaml"
    file.write_text(json.dumps(data))
    with scheduler(file) as (process, ready):
        target = ready["targets"][0]
        assert rotated.code(target, "first", FIRST) == "OK"
        assert rotated.code(target, "first", SECOND) == "UNAUTHENTICATED"
        assert rotated.code(target, "second", FIRST) == "UNAVAILABLE"
        rotated.use("second", SECOND)
        process.send_signal(signal.SIGHUP)
        result = read_until(process, "callers_reloaded", "config_unchanged", "config_rejected")[-1]
        assert result["event"] == "callers_reloaded"
        assert rotated.code(target, "second", SECOND) == "OK"
        assert rotated.code(target, "second", FIRST) == "UNAUTHENTICATED"
        assert rotated.code(target, "first", SECOND) == "UNAVAILABLE"
        # Files that a running process cannot change to are named, in each reload.
        tls["cert"] = "other-cert"
        (tmp_path / "other-cert").write_bytes((tmp_path / "cert").read_bytes())
        file.write_text(json.dumps({**data, "state": {"file": "other.db"}, "record": "recording"}))
        for repeats in range(2):
            process.send_signal(signal.SIGHUP)
            entries = read_until(process, "config_needs_restart", "config_rejected")
            waiting, events = entries[-1], [entry["event"] for entry in entries]
            assert waiting["event"] == "config_needs_restart"
            # The line is of the reload before, after that of the callers.
            assert ("certificates_reloaded" in events) == (repeats == 0)
            assert waiting["keys"] == ["listeners", "record", "state"]
        assert rotated.code(target, "second", SECOND) == "OK"
        assert not (tmp_path / "other.db").exists()
