"""Runs a shim in its own process, which holds leases in its own pool, reports and ends them.

It measures the time of Progress and Complete at the scheduler, without the load generator.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1.scheduler_pb2_grpc import SchedulerServiceStub

from bench.harness import percentiles
from bench.processes import ROOT

__all__ = ["probing"]

_PERIOD_S = 0.050
_CALL_S_MAX = 30.0


@contextmanager
def probing(target: str, seconds: float) -> Iterator[dict[str, Any]]:
    """Probe for `seconds` while the block runs. The figures, in ms, are there after the block."""
    found: dict[str, Any] = {}
    command = [sys.executable, "-m", "bench.overload_probe", target, str(seconds)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    try:
        yield found
        out, _ = process.communicate(timeout=seconds + 60)
        found |= json.loads(out)
    finally:
        process.kill()
        process.wait()


def _probe(target: str, seconds: float) -> dict[str, Any]:
    rounds = round(seconds / _PERIOD_S)
    progress_ms, complete_ms = [], []
    with grpc.insecure_channel(target) as channel:
        stub: Any = SchedulerServiceStub(channel)
        leases = [_lease(stub, number) for number in range(rounds)]
        began_s = time.perf_counter()
        for step, lease in enumerate(leases):
            time.sleep(max(0.0, began_s + step * _PERIOD_S - time.perf_counter()))
            report = pb.LeaseProgress(
                lease_id=lease.lease_id, pool_epoch=lease.pool_epoch, output_tokens=1
            )
            progress_ms.append(
                _timed(lambda r=report: stub.Progress(_batch(r), timeout=_CALL_S_MAX))
            )
            ended = pb.CompleteRequest(
                lease_id=lease.lease_id, pool_epoch=lease.pool_epoch, output_tokens=2
            )
            complete_ms.append(_timed(lambda e=ended: stub.Complete(e, timeout=_CALL_S_MAX)))
    return {"progress_ms": percentiles(progress_ms), "complete_ms": percentiles(complete_ms)}


def _lease(stub: Any, number: int) -> pb.Grant:
    request = pb.AdmitRequest(
        request_id=f"probe-{time.time_ns()}-{number}",
        tenant="probe",
        pools=["probe"],
        input_tokens=[10],
        max_output_tokens=10,
        reports_progress=True,
    )
    grant: pb.Grant = stub.Admit(request, timeout=_CALL_S_MAX).grant
    if not grant.lease_id:
        raise RuntimeError("the probe got no lease")
    return grant


def _batch(report: pb.LeaseProgress) -> pb.ProgressRequest:
    return pb.ProgressRequest(leases=[report])


def _timed(call: Any) -> float:
    began_s = time.perf_counter()
    call()
    return (time.perf_counter() - began_s) * 1e3


if __name__ == "__main__":
    print(json.dumps(_probe(sys.argv[1], float(sys.argv[2]))))
