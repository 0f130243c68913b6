"""Replays a recording under another configuration: figures by hand, no change if unchanged."""

import json
from heapq import heapify, heappop, heappush
from itertools import count
from random import Random

import pytest
from click.testing import CliRunner
from schedsvc_client.v1 import pool_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc._core import CANCELLED, COMPLETED, EVICTED_TTL, GRANTED, REJECTED_FLOW_QUEUE_FULL
from schedsvc.cli import main
from schedsvc.config import load
from schedsvc.records.recording.start import Recording as Recorder
from schedsvc_lab.sim.replay.asks import Collector
from schedsvc_lab.sim.replay.compare import compare
from schedsvc_lab.sim.replay.exact import Exact
from schedsvc_lab.sim.replay.reader import Recording
from schedsvc_lab.sim.replay.whatif import WhatIf
from tests.seeds import fresh

MS = 1_000_000
BASE = """
listeners: [{{tcp: "127.0.0.1:0"}}]
record: recording
scheduler: {{headroom: 0, expert: {{samples_min: 1000}}, {scheduler}}}
tenants: [{{name: a}}, {{name: b, weight: 2}}]
pools: [{{name: p, capacity_tokens: {capacity}}}]
"""


def config_of(folder, capacity=320, scheduler="queue_ttl_ms: 30000"):
    path = folder / "c.yaml"
    path.write_text(BASE.format(capacity=capacity, scheduler=scheduler))
    return load(path)


class Server:
    """Drives a recorded core in virtual time, as unary calls or on one stream."""

    def __init__(self, config, *, stream=False):
        self.recorder = Recorder(config, 0)
        self.recorder.begin()
        self.core = self.recorder.core
        self.runs = {}  # how long request number n runs, and its output
        self.gone = set()  # requests that their clients leave then, before anything is counted
        self.due = []
        self.order = count()
        self.tags = {}
        self.waiting = {}
        self.seq = 0
        self.session = self.core.open_session(0) if stream else None
        if stream:
            self.send(0, pb.SessionEvent(hello=pb.SessionHello(client_id="s", incarnation=1)))

    def at(self, at_ns, act):
        heappush(self.due, (at_ns, next(self.order), act))

    def ask(
        self, at_ns, number, run_ns, *, tenant="a", tokens=128, output=32, leaves_ns=None,
        session="",
    ):  # fmt: skip
        self.runs[number] = (run_ns, tokens, output)
        request = pb.AdmitRequest(
            request_id=f"r{number}", tenant=tenant, input_tokens=[tokens], max_output_tokens=32,
            reports_progress=True, session=session,
        )  # fmt: skip
        self.at(at_ns, lambda now_ns: self.arrive(now_ns, number, request, leaves_ns))

    def send(self, now_ns, event):
        self.seq += 1
        self.session.receive(
            now_ns, pb.SessionRequest(seq=self.seq, events=[event]).SerializeToString()
        )

    def arrive(self, now_ns, number, request, leaves_ns):
        if self.session is not None:
            self.tags[number + 1] = number
            self.send(
                now_ns, pb.SessionEvent(admit=pb.SessionAdmit(tag=number + 1, request=request))
            )
        else:
            answer = self.core.admit_wire(now_ns, 0, request.SerializeToString(), 0)
            if isinstance(answer, bytes):
                self.verdict(now_ns, number, pb.AdmitResponse.FromString(answer))
            else:
                self.waiting[answer] = number
                if leaves_ns is not None:
                    self.at(now_ns + leaves_ns, lambda at_ns: self.leave(at_ns, answer))

    def leave(self, now_ns, handle):
        if self.waiting.pop(handle, None) is not None:
            self.core.cancel(now_ns, handle)

    def verdict(self, now_ns, number, response):
        if response.outcome == GRANTED:
            self.granted(now_ns, number, response.grant.lease_id, response.grant.pool_epoch)

    def granted(self, now_ns, number, lease_id, epoch):
        run_ns, tokens, output = self.runs[number]
        if number in self.gone:
            self.at(
                now_ns + run_ns, lambda at_ns: self.core.complete(at_ns, lease_id, epoch, CANCELLED)
            )
            return
        for part in (1, 2, 3):
            totals = (tokens, -1, output * part // 4)
            self.at(
                now_ns + run_ns * part // 4,
                lambda at_ns, totals=totals: self.core.progress(at_ns, lease_id, epoch, *totals),
            )
        self.at(
            now_ns + run_ns,
            lambda at_ns: self.core.complete(
                at_ns, lease_id, epoch, COMPLETED, tokens, -1, output, 0
            ),
        )

    def poll(self, now_ns):
        for decision in self.core.poll(now_ns):
            number = self.waiting.pop(decision.handle, None)
            if number is not None and decision.outcome == GRANTED:
                self.granted(now_ns, number, decision.lease_id, decision.pool_epoch)
        self.core.ready()
        while self.session is not None and (data := self.session.take(now_ns)) is not None:
            for verdict in pb.SessionResponse.FromString(data).verdicts:
                self.verdict(now_ns, self.tags.pop(verdict.tag), verdict.response)

    def run(self):
        heapify(self.due)
        while True:
            deadline_ns = self.core.next_deadline()
            nexts = [at for at in (deadline_ns, self.due[0][0] if self.due else -1) if at >= 0]
            if not nexts:
                break
            now_ns = min(nexts)
            if self.due and self.due[0][0] == now_ns:
                heappop(self.due)[2](now_ns)
            self.poll(now_ns)
        self.recorder.close()


def what_if(folder, config):
    recording = Recording(folder / "recording")
    collector = Collector(recording)
    Exact(recording, collector).run()
    asks = collector.finish()
    return collector, asks, WhatIf(collector, asks, config).run()


def three(folder):
    """Record two requests that run for a second; a third, 0.1 s later, waits for the first end."""
    server = Server(config_of(folder))
    for number, (at_ms, run_ms) in enumerate([(0, 1_000), (0, 1_500), (100, 1_000)]):
        server.ask(at_ms * MS, number, run_ms * MS)
    server.run()


@pytest.mark.parametrize(
    ("capacity", "scheduler", "verdicts", "waits_ms"),
    [
        (320, "queue_ttl_ms: 30000", [GRANTED] * 3, [0, 0, 900]),
        (480, "queue_ttl_ms: 30000", [GRANTED] * 3, [0, 0, 0]),
        # One at a time: the second runs from 1.0 to 2.5 s.
        (160, "queue_ttl_ms: 30000", [GRANTED] * 3, [0, 1_000, 2_400]),
        (320, "queue_ttl_ms: 500", [GRANTED, GRANTED, EVICTED_TTL], [0, 0, 500]),
        (160, "queue_ttl_ms: 30000, flow_queue_max: 1",
         [GRANTED, GRANTED, REJECTED_FLOW_QUEUE_FULL], [0, 1_000, 0]),
    ],
)  # fmt: skip
def test_verdicts_and_waits_equal_those_by_hand(tmp_path, capacity, scheduler, verdicts, waits_ms):
    three(tmp_path)
    collector, asks, fates = what_if(tmp_path, config_of(tmp_path, capacity, scheduler))
    assert [ask.outcome for ask in asks] == [GRANTED] * 3
    assert [ask.waited_ns // MS for ask in asks] == [0, 0, 900]
    assert [fate.outcome for fate in fates] == verdicts
    assert [fate.waited_ns // MS for fate in fates] == waits_ms
    assert collector.repeats == 0


@pytest.mark.parametrize("stream", [False, True])
def test_recordings_know_sessions_of_agents(tmp_path, stream):
    """One request is sent at a time: two sessions take turns, also in the replays."""
    config = config_of(tmp_path, 160)
    server = Server(config, stream=stream)
    for number, session in enumerate("aaaabb"):
        server.ask(10 * MS * (session == "b"), number, 1_000 * MS, session=session)
    server.run()
    _, asks, fates = what_if(tmp_path, config)
    waits_ms = [0, 2_000, 4_000, 5_000, 990, 2_990]
    assert [ask.waited_ns // MS for ask in asks] == waits_ms
    assert [fate.waited_ns // MS for fate in fates] == waits_ms


def test_refused_request_takes_its_tenants_median_when_run(tmp_path):
    """It was refused then; now it runs for a second, so the one behind it waits that long."""
    tight = "queue_ttl_ms: 30000, flow_queue_max: 1"
    server = Server(config_of(tmp_path, 160, tight))
    for number, at_ms in enumerate((0, 10, 20)):
        server.ask(at_ms * MS, number, 1_000 * MS)
    server.run()
    _, asks, fates = what_if(tmp_path, config_of(tmp_path, 160, "flow_queue_max: 2"))
    assert [ask.outcome for ask in asks] == [GRANTED, GRANTED, REJECTED_FLOW_QUEUE_FULL]
    assert [fate.outcome for fate in fates] == [GRANTED] * 3
    assert [fate.assumed for fate in fates] == [False, False, True]
    assert fates[2].waited_ns // MS == 1_980
    report = compare(asks, fates)
    assert (report["requests"], report["changed"], report["assumed"]) == (3, 1, 1)
    assert report["tenants"]["a"]["verdicts"] == {
        "GRANTED": [2, 3],
        "REJECTED_FLOW_QUEUE_FULL": [1, 0],
    }
    assert report["tenants"]["a"]["waited_ms"]["p50"] == [495.0, 990.0]


@pytest.mark.parametrize("stream", [False, True])
# With 16682543010963, a report and another run's end come at one time.
@pytest.mark.parametrize("seed", [16682543010963, *fresh(5)])
def test_the_same_configuration_changes_nothing(tmp_path, seed, stream):
    """No verdict is changed, and no wait by more than the microsecond that a message states."""
    draws = Random(seed)
    config = config_of(tmp_path, 640, "queue_ttl_ms: 2000, flow_queue_max: 8")
    server = Server(config, stream=stream)
    for number in range(150):
        server.ask(
            draws.randrange(5_000) * MS + number,
            number,
            draws.randint(50, 600) * MS,
            tenant=draws.choice("aab"),
            tokens=draws.randint(16, 300),
            output=draws.randint(1, 32),
            leaves_ns=draws.choice([None, None, 300 * MS]),
        )
    server.run()
    _, asks, fates = what_if(tmp_path, config)
    assert len(asks) == 150
    assert len({ask.outcome for ask in asks}) >= 2
    assert [fate.outcome for fate in fates] == [ask.outcome for ask in asks]
    for ask, fate in zip(asks, fates, strict=True):
        assert abs(ask.waited_ns - fate.waited_ns) < 1_000


@pytest.mark.parametrize("stream", [False, True])
def test_both_replays_charge_a_client_that_left_early_the_same(tmp_path, stream):
    config = config_of(tmp_path, 640)
    server = Server(config, stream=stream)
    server.gone = {1, 2}
    for number, run_ms in enumerate((1_000, 100, 40)):
        server.ask(number * 2_000 * MS, number, run_ms * MS)
    server.run()
    recording = Recording(tmp_path / "recording")
    collector = Collector(recording)
    exact = Exact(recording, collector)
    exact.run()
    again = WhatIf(collector, collector.finish(), config)
    again.run()

    def charged(core):
        rows = core.stats(1 << 50)["flows"]
        return [
            (row["input_tokens"], row["output_tokens"], row["vtc_micro"])
            for row in rows if row["tenant"] == "a"
        ]  # fmt: skip

    # The first token came after 250 ms: 128 tokens, and of the others 40 % and 16 %.
    ((inputs, outputs, micro),) = told = charged(server.core)
    assert (inputs, outputs) == (128 + 52 + 21, 32)
    assert micro == (inputs + 2 * outputs) * 1_000_000
    assert charged(exact.core) == charged(again.core) == told


def test_pools_of_streams_are_offered_at_the_same_times(tmp_path):
    server = Server(config_of(tmp_path, 16), stream=True)
    pool = pool_pb2.PoolRegistration(pool="gpu", epoch=3, capacity_tokens=640, block_size_tokens=16)
    server.at(500 * MS, lambda now_ns: server.send(now_ns, pb.SessionEvent(pool=pool)))
    server.ask(100 * MS, 0, 100 * MS)
    server.ask(600 * MS, 1, 100 * MS)
    server.at(800 * MS, lambda now_ns: server.session.close(now_ns))
    server.run()
    _, asks, fates = what_if(tmp_path, config_of(tmp_path, 16))
    assert [fate.outcome for fate in fates] == [ask.outcome for ask in asks]
    assert [fate.outcome == GRANTED for fate in fates] == [False, True]


def test_an_engine_that_was_refused_does_not_take_the_pool(tmp_path):
    """The first of two engines that claim one pool is the one that answers; both report."""
    server = Server(config_of(tmp_path, 16), stream=True)
    figures = {"capacity_tokens": 640, "block_size_tokens": 16, "gates": 1}
    first = pool_pb2.PoolRegistration(pool="gpu", epoch=3, **figures)
    server.at(100 * MS, lambda now_ns: server.send(now_ns, pb.SessionEvent(pool=first)))
    second = pool_pb2.PoolRegistration(pool="gpu", epoch=4, **figures)
    hello = pb.SessionHello(client_id="second", incarnation=2)
    events = [pb.SessionEvent(hello=hello), pb.SessionEvent(pool=second)]
    message = pb.SessionRequest(seq=1, events=events).SerializeToString()
    newcomer = server.core.open_session(0)
    server.at(300 * MS, lambda now_ns: newcomer.receive(now_ns, message))
    server.ask(200 * MS, 0, 400 * MS)
    server.ask(400 * MS, 1, 100 * MS)
    told = []
    server.at(500 * MS, lambda now_ns: told.append(newcomer.take(now_ns)))
    server.at(900 * MS, lambda now_ns: server.session.close(now_ns))
    server.run()
    assert pb.SessionResponse.FromString(told[0]).faults[0].field == "pool.pool"
    recorded, asks, fates = what_if(tmp_path, config_of(tmp_path, 16))
    assert [pool.owner for pool in recorded.pools if pool.data] == [server.session.owner]
    assert [fate.outcome for fate in fates] == [ask.outcome for ask in asks] == [GRANTED] * 2


def test_a_lost_holder_is_lost_again(tmp_path):
    """Its lease gets no end: requests behind it wait for TTL and grace of the other, too."""
    text = "lease_ttl_ms: 1000, lease_grace_ms: 500"
    server = Server(config_of(tmp_path, 160, text))
    server.ask(0, 0, 10**6 * MS)
    server.granted = lambda *_: None
    server.at(100 * MS, lambda _: vars(server).pop("granted"))
    server.ask(200 * MS, 1, 100 * MS)
    server.run()
    _, asks, fates = what_if(
        tmp_path, config_of(tmp_path, 160, "lease_ttl_ms: 3000, lease_grace_ms: 1000")
    )
    assert [ask.waited_ns // MS for ask in asks] == [0, 1_300]
    assert [fate.waited_ns // MS for fate in fates] == [0, 3_800]


def sim(*arguments):
    return CliRunner().invoke(main, ["sim", *map(str, arguments)])


def test_the_command(tmp_path):
    three(tmp_path)
    path = tmp_path / "recording"
    plain = sim("--replay", path)
    assert plain.exit_code == 0, plain.output
    assert "reproduced" in plain.output
    other = tmp_path / "other.yaml"
    other.write_text(BASE.format(capacity=480, scheduler="policy: fcfs"))
    result = sim("--replay", path, "--config", other, "--json", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report == json.loads((tmp_path / "out" / "replay.json").read_text())
    assert report["digest"] in plain.output
    assert report["what_if"]["changed"] == 0
    assert report["what_if"]["tenants"]["a"]["waited_ms"]["mean"] == [300.0, 0.0]
    rows = (tmp_path / "out" / "changes.csv").read_text().splitlines()
    assert rows[3] == "0.100000,a,GRANTED,GRANTED,0.900000,0.000000"
    table = sim("--replay", path, "--config", other, "--set", "scheduler.queue_ttl_ms=1")
    assert "0 of 3 requests get another verdict" in table.output


def test_replay_under_a_policy_that_no_service_has(tmp_path):
    config = config_of(tmp_path, 160, "policy: fcfs")
    server = Server(config)
    server.ask(0, 0, 1_000 * MS)
    server.ask(10 * MS, 1, 1_000 * MS)
    server.ask(20 * MS, 2, 1_000 * MS, tenant="b", tokens=64)
    server.run()
    arguments = ("--replay", tmp_path / "recording", "--config", tmp_path / "c.yaml", "--json")
    own = json.loads(sim(*arguments).stdout)["what_if"]
    result = sim(*arguments, "--policy", "sif", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    shortest = json.loads(result.stdout)["what_if"]
    assert (own["policy"], shortest["policy"]) == ("fcfs", "sif")
    assert own["tenants"]["b"]["waited_ms"]["mean"] == [1_980.0, 1_980.0]
    assert shortest["tenants"]["b"]["waited_ms"]["mean"] == [1_980.0, 980.0]
    rows = (tmp_path / "out" / "changes.csv").read_text().splitlines()
    assert rows[2] == "0.010000,a,GRANTED,GRANTED,0.990000,1.990000"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--set", "scheduler.headroom=0"], "--set needs --config"),
        (["--config", "CONFIG", "--set", "engine.kv_tokens=5"], "a replay has no engine"),
        (["--config", "CONFIG", "--set", "weight.c=5"], "no tenant of that name"),
        (["--policy", "vtc"], "--policy needs --config"),
        (["--config", "CONFIG", "--policy", "engine"], "a replay takes one of dlpm, fcfs, lcf"),
        (["--config", "CONFIG", "--policy", "vtc-oracle"], "a replay takes one of"),
        (["--config", "CONFIG", "--policy", "vtc", "--policy", "sif"], "a replay takes one of"),
        (["--config", "CONFIG", "--set", "scheduler.policy=fcfs"], "its policy from --policy"),
        (["--config", "nowhere.yaml"], "cannot read"),
    ],
)
def test_wrong_arguments_are_named(tmp_path, arguments, complaint):
    three(tmp_path)
    given = [str(tmp_path / "c.yaml") if each == "CONFIG" else each for each in arguments]
    result = sim("--replay", tmp_path / "recording", *given)
    assert result.exit_code != 0
    assert complaint in result.output


def test_a_damaged_recording_fails_the_command(tmp_path):
    three(tmp_path)
    path = tmp_path / "recording"
    path.write_bytes(b"schedsvc-recording 1\n")
    result = sim("--replay", path)
    assert result.exit_code == 1
    assert "ends before its header was written" in result.output
