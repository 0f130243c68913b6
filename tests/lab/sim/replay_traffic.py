"""Sends traffic to a recording server: both protocols, every way in which a request ends."""

import asyncio
import time
from contextlib import suppress
from random import Random

import grpc
from schedsvc_client import SchedulerError
from schedsvc_client.aio import AsyncScheduler, SchedulerSession
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1 import scheduler_pb2_grpc as stubs

CONFIG = """
listeners: [{tcp: "127.0.0.1:0"}]
record: recording
scheduler:
  {queue_ttl_ms: 400, lease_ttl_ms: 300, lease_grace_ms: 100, flow_queue_max: 20,
   prices: {kv: 0.001}}
limits: {drain_ms: 500}
unknown_tenants: refuse
tenants: [{name: hog}, {name: quiet, weight: 2}]
pools: [{name: fixed, capacity_tokens: 800}]
"""


async def drive(target, *, requests=150, seed=1):
    """Ask `requests` times in all; returns how many were granted."""
    draws = Random(seed)
    granted = 0

    async def one(client, tenant, number):
        nonlocal granted
        await asyncio.sleep(draws.random())
        tokens, output = draws.randint(50, 300), draws.randint(20, 200)
        way = draws.choice(["done"] * 6 + ["cancelled", "impatient", "silent"])
        asking = client.admission(
            tenant=tenant, input_tokens=tokens, max_output_tokens=256, request_id=f"r{number}"
        )
        with suppress(SchedulerError, TimeoutError, KeyboardError):
            async with asyncio.timeout(0.1 if way == "impatient" else None), asking as admission:
                granted += 1
                for step in range(1, 4):
                    await asyncio.sleep(draws.random() * 0.06)
                    admission.progress(input_tokens=tokens, output_tokens=output * step // 4)
                if way == "cancelled":
                    raise KeyboardError
                admission.complete(input_tokens=tokens, output_tokens=output)

    options = {"incarnation": time.time_ns()}
    async with (
        SchedulerSession(target, client_id="shim-1", **options) as first,
        SchedulerSession(target, client_id="shim-2", **options) as second,
        AsyncScheduler(target) as unary,
    ):
        first.register_pool(pool="gpu", epoch=5, capacity_tokens=1_600, block_size_tokens=16)
        first.telemetry(pool="gpu", epoch=5, running=1, waiting=0, used_tokens=64, preemptions=0)
        await asyncio.sleep(0.1)
        tenants = ["hog"] * 8 + ["quiet"] * 2 + ["stranger"]
        work = [
            one(draws.choice([first, second, unary]), draws.choice(tenants), number)
            for number in range(requests)
        ]
        await asyncio.gather(_rudeness(target), *work)
    return granted


class KeyboardError(Exception):
    """Stands for a person who pressed a key."""


def _ask(number):
    ask = pb.AdmitRequest(
        request_id=f"long-{number % 300}", tenant="hog", input_tokens=[16], max_output_tokens=16
    )
    return pb.SessionEvent(admit=pb.SessionAdmit(tag=number + 1, request=ask))


async def _rudeness(target):
    """Break the contract, and leave without a word."""
    async with grpc.aio.insecure_channel(target) as channel:
        stub = stubs.SchedulerServiceStub(channel)
        for request in (
            pb.AdmitRequest(request_id="bad"),
            pb.AdmitRequest(request_id="big", tenant="hog", input_tokens=[9_999],
                            max_output_tokens=1),
        ):  # fmt: skip
            with suppress(grpc.aio.AioRpcError):
                await stub.Admit(request)
        # Granted, and never heard of again.
        for number in range(3):
            await stub.Admit(
                pb.AdmitRequest(request_id=f"lost-{number}", tenant="quiet", input_tokens=[16],
                                max_output_tokens=16)
            )  # fmt: skip
        # More events than the scheduler applies in one turn.
        stream = stub.Session()
        hello = pb.SessionEvent(hello=pb.SessionHello(client_id="long"))
        asks = [_ask(number) for number in range(600)]
        await stream.write(pb.SessionRequest(seq=1, events=[hello, *asks]))
        await stream.read()
        stream.cancel()
        stream = stub.Session()
        await stream.write(pb.SessionRequest(seq=7))
        with suppress(grpc.aio.AioRpcError):
            await stream.read()
        stream.cancel()
