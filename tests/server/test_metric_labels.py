"""Tests what the page of metrics names: the build, models, and OpenTelemetry's conventions."""

import platform
from importlib import metadata
from typing import Any

from schedsvc_client.v1 import scheduler_pb2 as pb

from .conftest import POOL, ask, calling, config_of, serving
from .test_metrics import of, scrape

METRICS: dict[str, Any] = {"listen": "127.0.0.1:0"}
GEN_AI = "gen_ai_server_time_to_first_token_seconds"


async def test_build_info_has_the_version() -> None:
    async with serving(metrics=METRICS) as server:
        samples = await scrape(server)
    labels = {"version": metadata.version("schedsvc"), "python": platform.python_version()}
    assert of(samples, "build_info", **labels) == 1


async def test_a_pool_of_a_model_has_its_name_as_vllm_does() -> None:
    models = [{"name": "llama", "pools": [POOL["name"]]}]
    async with serving(metrics=METRICS, models=models) as server:
        samples = await scrape(server)
        labels = {"pool": POOL["name"], "model_name": "llama"}
        for name in ("pool_capacity_tokens", "engine_running_requests", "engine_preemptions_total"):
            of(samples, name, **labels)
        server.reconfigure(config_of(metrics=METRICS))
        samples = await scrape(server)
        of(samples, "pool_capacity_tokens", pool=POOL["name"])


async def test_first_tokens_have_one_metric_and_optionally_opentelemetrys_name() -> None:
    for gen_ai in (False, True):
        async with (
            serving(metrics=METRICS | {"gen_ai": gen_ai}, tenants=[{"name": "a"}]) as server,
            calling(server.targets[0]) as stub,
        ):
            lease = (await stub.Admit(ask(64, tenant="a", reports_progress=True))).grant
            told = {"lease_id": lease.lease_id, "pool_epoch": 1}
            await stub.Progress(pb.ProgressRequest(leases=[{**told, "output_tokens": 1}]))
            samples = await scrape(server)
        names = {name for name, _ in samples}
        assert not {name for name in names if "ttft" in name}
        kinds = {name.removesuffix("_count") for name in names if name.endswith("_count")}
        first = {name for name in kinds if "first_token" in name}
        assert first == {"time_to_first_token_seconds", *([GEN_AI] if gen_ai else [])}
        for name in first:
            labels = {"tenant": "a", "class": "default"}
            assert of(samples, f"{name}_count", **labels) == 1


async def test_opentelemetrys_server_metrics_count_requests_that_completed() -> None:
    kinds = ("request_duration_seconds", "time_per_output_token_seconds")
    async with (
        serving(metrics=METRICS | {"gen_ai": True}, tenants=[{"name": "a"}]) as server,
        calling(server.targets[0]) as stub,
    ):
        for output, outcome in ((5, 0), (1, 0), (5, pb.OUTCOME_CANCELLED)):
            lease = (await stub.Admit(ask(64, tenant="a", reports_progress=True))).grant
            told = {"lease_id": lease.lease_id, "pool_epoch": 1}
            await stub.Progress(pb.ProgressRequest(leases=[{**told, "output_tokens": 1}]))
            end = pb.CompleteRequest(**told, output_tokens=output, outcome=outcome)
            await stub.Complete(end)
        samples = await scrape(server)
    labels = {"tenant": "a", "class": "default"}
    counts = [of(samples, f"gen_ai_server_{kind}_count", **labels) for kind in kinds]
    assert counts == [2, 1]
