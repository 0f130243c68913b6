"""Runs a server in virtual time: a recorded core in front of the emulator's engine model.

It serves requests as gates would have it do, and leaves a recording on the disk.
"""

from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc._core import COMPLETED, GRANTED
from schedsvc.config import Config
from schedsvc.records.recording.start import Recording
from schedsvc_lab.engine import Engine
from schedsvc_lab.sim.runner import EngineRunner
from schedsvc_lab.sim.scheduler_adapter import SchedulerAdapter, Verdict
from schedsvc_lab.sim.world import Settings, World


class RecordedAdapter(SchedulerAdapter):
    """Asks a core by the messages of the contract, as a server does for unary callers."""

    def __init__(self, core, requests, output_tokens_max):
        super().__init__(True)
        self._core, self._requests, self._output_tokens_max = core, requests, output_tokens_max
        self._request_of, self._leases, self._decided = {}, {}, []

    def arrive(self, now_ns, index):
        requests = self._requests
        message = pb.AdmitRequest(
            request_id=f"r{index}",
            tenant=requests.clients[requests.client[index]],
            input_tokens=[requests.prompt_tokens[index]],
            max_output_tokens=max(self._output_tokens_max, requests.output_tokens[index]),
            reports_progress=True,
        )
        answer = self._core.admit_wire(now_ns, 0, message.SerializeToString())
        if isinstance(answer, bytes):
            response = pb.AdmitResponse.FromString(answer)
            grant = response.grant
            if response.outcome == GRANTED:
                self._leases[index] = (grant.lease_id, grant.pool_epoch)
            self._decided.append(Verdict(index, response.outcome, 0))
        else:
            self._request_of[answer] = index

    def progress(self, now_ns, report):
        for index, output in zip(report.requests, report.outputs(), strict=True):
            self._core.progress(
                now_ns, *self._leases[index], self._requests.prompt_tokens[index], 0, output
            )

    def complete(self, now_ns, index, served=True, cached_tokens=0):
        assert served
        self._core.complete(
            now_ns, *self._leases.pop(index), COMPLETED, self._requests.prompt_tokens[index],
            cached_tokens, self._requests.output_tokens[index],
        )  # fmt: skip

    def poll(self, now_ns):
        verdicts, self._decided = self._decided, []
        for decision in self._core.poll(now_ns):
            index = self._request_of.pop(decision.handle)
            if decision.outcome == GRANTED:
                self._leases[index] = (decision.lease_id, decision.pool_epoch)
            verdicts.append(Verdict(index, decision.outcome, decision.pool))
        return verdicts

    def next_ns(self):
        return self._core.next_deadline()

    def digest(self):
        return self._core.digest()

    def check(self, now_ns, ended):
        assert not ended or not self._leases


def record_run(profile, requests, path, *, tenants=(), scheduler=None, output_tokens_max=0):
    """Serve the requests on one engine, and return the world; the recording is at `path`."""
    engine = profile.config()
    config = Config.model_validate(
        {
            "listeners": [{"tcp": "127.0.0.1:0"}],
            "record": str(path),
            "scheduler": scheduler or {},
            "tenants": list(tenants) or [{"name": name} for name in requests.clients],
            "pools": [
                {
                    "name": "gpu",
                    "capacity_tokens": engine.capacity_tokens,
                    "block_size_tokens": engine.block_size_tokens,
                    "max_running": engine.sequences_max,
                    "max_model_tokens": engine.context_tokens_max,
                }
            ],
        }
    )
    recording = Recording(config, 0)
    recording.begin()
    runner = EngineRunner(Engine(engine, profile.step_cost(engine.sequences_max)))
    adapter = RecordedAdapter(recording.core, requests, output_tokens_max)
    world = World(requests, adapter, [runner], Settings())
    world.run()
    recording.close()
    return world
