"""A server records its events; a replay of them decides the same, to the digest."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import grpc
import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1 import scheduler_pb2_grpc as stubs

from schedsvc_lab.sim.replay.exact import Exact
from schedsvc_lab.sim.replay.reader import Recording, ReplayError
from tests import forked
from tests.waiting import wait_for_start, wait_until

from .replay_traffic import CONFIG, drive


@contextmanager
def recording_server(folder, config=CONFIG):
    """Run `schedsvc serve` as a process; hand over it and its target."""
    (folder / "c.yaml").write_text(config)
    ready = folder / "ready.json"
    command = [sys.executable, "-m", "schedsvc", "serve", "--config", str(folder / "c.yaml")]
    process = forked.Popen([*command, "--ready-file", str(ready)], stderr=subprocess.PIPE)
    try:
        wait_for_start(process, ready.exists)
        yield process, json.loads(ready.read_text())["targets"][0]
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stderr.close()


def ask_until(target, holds):
    """Ask for Stats until something holds of them."""
    with grpc.insecure_channel(target) as channel:
        stub = stubs.SchedulerServiceStub(channel)
        wait_until(lambda: holds(stub.Stats(pb.StatsRequest())))
        return stub.Stats(pb.StatsRequest())


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return the file of a server that was asked, drained and stopped, its digest and totals."""
    folder = tmp_path_factory.mktemp("recorded")
    with recording_server(folder) as (process, target):
        granted = asyncio.run(drive(target))
        stats = ask_until(target, lambda told: not told.totals.live_leases)  # the lost expire
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0
    return folder / "recording", stats, granted


def test_a_replay_has_the_servers_digest_and_totals(recorded):
    path, stats, granted = recorded
    replay = Exact(Recording(path))
    replayed = replay.run()
    assert replayed.digest == stats.digest != 0
    assert replayed.checks > 3
    totals = replay.core.stats(2**62, 0)["totals"]
    for name in ("received", "granted", "completed", "cancelled", "expired", "rejected", "evicted"):
        assert totals[name] == getattr(stats.totals, name), name
    assert totals["granted"] >= granted > 20
    # The traffic was worth it: every kind of end was among it.
    assert min(totals[n] for n in ("completed", "cancelled", "expired", "rejected", "evicted")) > 0
    replay.core.check()


def test_a_killed_server_leaves_what_can_be_replayed(tmp_path):
    with recording_server(tmp_path) as (process, target):
        asyncio.run(drive(target, requests=60, seed=2))
        path = tmp_path / "recording"

        def is_flushed(told):
            at_rest = not told.totals.live_leases
            return at_rest and Exact(Recording(path)).run().digest == told.digest

        stats = ask_until(target, is_flushed)
        process.kill()
    replay = Exact(Recording(path))
    assert replay.run().digest == stats.digest
    assert replay.core.stats(2**62, 0)["totals"]["granted"] == stats.totals.granted


def test_a_bad_tail_is_cut(recorded, tmp_path):
    whole = recorded[0].read_bytes()
    last = Recording(recorded[0])._frames[-1][0]
    path = tmp_path / "cut"
    for size in (len(whole) - 1, last, last - 5, last - 19):
        path.write_bytes(whole[:size])
        recording = Recording(path)
        assert recording.cut_bytes == size - (last - 20)
        Exact(recording).run()
    # A machine that goes down may leave this: the size is right, the bytes are missing.
    path.write_bytes(whole[: last + 3] + bytes(len(whole) - last - 3))
    assert Recording(path).cut_bytes == len(whole) - last + 20


def test_a_bad_middle_is_refused_with_its_offset(recorded, tmp_path):
    whole = bytearray(recorded[0].read_bytes())
    payload, size = Recording(recorded[0])._frames[2]
    for at in (payload + size // 2, payload - 20, payload - 10):
        damaged = whole.copy()
        damaged[at] ^= 0x40
        path = tmp_path / "damaged"
        path.write_bytes(damaged)
        with pytest.raises(ReplayError, match=f"damaged: offset {payload - 20}: .* follows at"):
            Recording(path)
    # A frame that is missing.
    path.write_bytes(whole[: payload - 20] + whole[payload + size :])
    with pytest.raises(ReplayError, match="frame 3 stands where 2 belongs"):
        Recording(path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is no recording of schedsvc"),
        (b"arrival_s,client,prompt_tokens\n", "is no recording of schedsvc"),
        (b"schedsvc-recording 9\nxxxxxxx", "is of version 9; this program reads 1"),
        (b"schedsvc-recording 1\n", "ends before its header"),
        (b"schedsvc-recording 1\n\xf5REC", "ends before its header"),
    ],
)
def test_another_file_is_reported(tmp_path, content, complaint):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(ReplayError, match=complaint):
        Recording(tmp_path / "f")


def test_another_core_is_noticed(recorded, monkeypatch):
    """If this version decided otherwise, the first digest that differs is named."""
    recording = Recording(recorded[0])
    recording.header["options"]["headroom_ppm"] = 500_000
    with pytest.raises(ReplayError, match=r"after event \d+ the digest is"):
        Exact(recording).run()
    recording.header["options"]["no_such_setting"] = 1
    with pytest.raises(ReplayError, match="no_such_setting"):
        Exact(recording)


def test_hash_order_changes_no_replay(recorded):
    """Another process with another hash seed has the same digest."""
    code = (
        "import sys; from pathlib import Path; from schedsvc_lab.sim.replay.exact import Exact;"
        "from schedsvc_lab.sim.replay.reader import Recording;"
        "print(Exact(Recording(Path(sys.argv[1]))).run().digest)"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code, str(recorded[0])],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert digests == {f"{recorded[1].digest}\n"}
