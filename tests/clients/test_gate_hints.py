"""Hints that the gate passes on besides sizes: priority, class of a service tier, adapter."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from schedsvc_client.testing import FakeScheduler
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_vllm.settings import Settings

from .asgi import ask
from .bench import TRUST, Bench


def suggesting(fake: FakeScheduler, priority: int) -> Any:
    def decide(request: pb.AdmitRequest) -> pb.AdmitResponse:
        response = fake.granted()
        response.grant.engine_priority = priority
        return response

    return decide


@pytest.mark.parametrize("policy", ["priority", "fcfs"])
async def test_the_engine_gets_the_schedulers_priority_where_it_obeys(
    bench: Bench, policy: str
) -> None:
    bench.owner.state.vllm_config.scheduler_config.policy = policy
    bench.fake.decide = suggesting(bench.fake, -3)
    await bench.ask(headers=TRUST | {"X-Vllm-Priority": "-1000"})
    seen = [
        value for name, value in bench.engine.scopes[0]["headers"] if name == b"x-vllm-priority"
    ]
    # A caller's own wish has no effect.
    assert seen == ([b"-3"] if policy == "priority" else [])
    await bench.settled()


@pytest.mark.usefixtures("gives_up")
async def test_without_the_scheduler_all_are_alike(bench: Bench) -> None:
    bench.owner.state.vllm_config.scheduler_config.policy = "priority"
    await bench.fake.stop()
    done = await bench.ask(headers=TRUST | {"X-Vllm-Priority": "-1000"})
    assert done.answer_headers["x-schedsvc-mode"] == "fail-open"
    assert (b"x-vllm-priority", b"0") in bench.engine.scopes[0]["headers"]


@pytest.mark.parametrize(
    ("on", "tier", "expected"),
    [
        (False, "flex", ""),
        (True, None, ""),
        (True, "auto", ""),
        (True, "default", ""),
        (True, "flex", "flex"),
        (True, 5, ""),
    ],
)
async def test_the_service_tier_names_the_class_where_that_is_on(
    fake: FakeScheduler, on: bool, tier: object, expected: str
) -> None:
    bench = Bench(fake, replace(Settings(target=fake.target), class_from_service_tier=on))
    fields = {} if tier is None else {"service_tier": tier}
    assert (await bench.ask(ask(**fields))).status == 200
    assert fake.admits[0].request_class == expected
    await bench.gate._close()


async def test_a_model_that_is_an_adapter_is_named(bench: Bench) -> None:
    served = SimpleNamespace(lora_requests={"sql": object()})
    bench.owner.state.openai_serving_models = served
    for model in ("sql", "m", 5):
        assert (await bench.ask(ask(model=model))).status == 200
    assert [admit.adapter for admit in bench.fake.admits] == ["sql", "", ""]
    await bench.settled()
