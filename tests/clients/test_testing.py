"""Tests the fake scheduler of `schedsvc_client.testing` as users' tests use it."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import grpc
import pytest
from schedsvc_client import (
    CallError,
    ClientOptions,
    InvalidRequest,
    LeaseState,
    Outcome,
    Refused,
    SchedulerUnavailable,
)
from schedsvc_client.aio import AsyncScheduler, SchedulerSession
from schedsvc_client.operator import Operator
from schedsvc_client.sync import Scheduler
from schedsvc_client.testing import Delayed, Failure, FakeScheduler, grant, refusal
from schedsvc_client.v1 import scheduler_pb2 as pb

from tests.waiting import until, wait_until

SHAPE = {"tenant": "red", "input_tokens": 9, "max_output_tokens": 9}
GONE = Failure(grpc.StatusCode.UNAVAILABLE, "gone")
QUOTA = refusal(pb.OUTCOME_REJECTED_QUOTA, retry_after_ms=700, message="a quota is spent")


def test_threads_get_verdicts_as_scripted_then_as_decided() -> None:
    with FakeScheduler() as fake, Scheduler(fake.target) as scheduler:
        fake.script(grant(70, pool="gpu-2"), QUOTA, GONE)
        with scheduler.admission(**SHAPE) as admission:
            assert admission.lease is not None
            assert (admission.lease.lease_id, admission.lease.pool) == (70, "gpu-2")
            admission.progress(output_tokens=3)
        assert fake.books[70].end.output_tokens == 3
        with (
            pytest.raises(Refused, match="a quota is spent") as refused,
            scheduler.admission(**SHAPE),
        ):
            pass
        assert (refused.value.outcome, refused.value.retry_after_ms) == (
            Outcome.REJECTED_QUOTA, 700,
        )  # fmt: skip
        with pytest.raises(SchedulerUnavailable, match="gone"), scheduler.admission(**SHAPE):
            pass
        fake.decide = lambda request: QUOTA if request.tenant == "red" else fake.granted()
        with scheduler.admission(**{**SHAPE, "tenant": "blue"}):
            assert fake.live == {1}
        with pytest.raises(Refused), scheduler.admission(**SHAPE):
            pass
        assert [request.tenant for request in fake.admits] == [*("red",) * 3, "blue", "red"]
        assert fake.live == set()


def test_a_thread_waits_until_its_verdict_is_released() -> None:
    with FakeScheduler() as fake, Scheduler(fake.target) as scheduler:
        fake.script(Delayed(0.02, fake.granted()), None)
        with scheduler.admission(**SHAPE):
            pass
        admission = scheduler.admission(request_id="held", **SHAPE)

        async def enter() -> None:
            await asyncio.to_thread(admission.__enter__)

        async def both() -> None:
            entering = asyncio.ensure_future(enter())
            await until(lambda: "held" in fake.held)
            fake.release("held")
            await entering

        asyncio.run(both())
        admission.complete(output_tokens=4)
        assert fake.books[2].end.output_tokens == 4
        with pytest.raises(KeyError):
            fake.release("held")


@pytest.mark.parametrize("kind", [AsyncScheduler, SchedulerSession])
async def test_asyncio_gets_each_verdict(kind: type[AsyncScheduler | SchedulerSession]) -> None:
    options = {"client_id": "c", "incarnation": 1} if kind is SchedulerSession else {}
    async with FakeScheduler() as fake, kind(fake.target, **options) as client:
        fake.script(Delayed(0.02, QUOTA), Failure(grpc.StatusCode.INVALID_ARGUMENT, "wrong"), None)
        with pytest.raises(Refused):
            await client.admission(**SHAPE).__aenter__()
        with pytest.raises(Exception, match="wrong"):
            await client.admission(**SHAPE).__aenter__()
        waiting = asyncio.ensure_future(client.admission(request_id="r", **SHAPE).__aenter__())
        await until(lambda: "r" in fake.held)
        waiting.cancel()
        await until(lambda: fake.cancelled == ["r"])
        async with client.admission(**SHAPE) as admission:
            admission.progress(input_tokens=9, output_tokens=2)
        (book,) = fake.books.values()
        await until(lambda: book.completes)
        assert (book.end.outcome, book.end.output_tokens) == (pb.OUTCOME_COMPLETED, 2)


def test_a_lease_that_the_test_voids_is_lost() -> None:
    lost: list[LeaseState] = []
    with FakeScheduler() as fake, Scheduler(fake.target) as scheduler:
        fake.lease_ttl_ms = 60
        with scheduler.admission(**SHAPE) as admission:
            admission.on_lost = lost.append
            fake.statuses[1] = pb.LEASE_STATE_VOID
            wait_until(lambda: lost)
    assert lost == [LeaseState.VOID]


async def test_a_fake_keeps_its_port_over_a_stop() -> None:
    async with FakeScheduler() as fake, AsyncScheduler(fake.target) as client:
        target = fake.target
        await fake.stop()
        with pytest.raises(SchedulerUnavailable):
            await client.stats()
        await fake.start()
        assert fake.target == target

        async def answers() -> bool:
            try:
                return bool(await client.stats())
            except SchedulerUnavailable:
                return False

        await until(answers)


ANY: Any = "UNAVAILABLE"
WRONG_VERDICTS: list[tuple[Any, str]] = [
    ([QUOTA, QUOTA], r" is no verdict; it has to be grant\(\), refusal\(\), Failure\(\), "),
    (refusal, "<function .* is no verdict"),
    (grpc.StatusCode.UNAVAILABLE, "StatusCode.UNAVAILABLE.* is no verdict"),
    (Failure(ANY), "a Failure has one of grpc.StatusCode, and not OK; not 'UNAVAILABLE'"),
    (Failure(grpc.StatusCode.OK), "a Failure has one of grpc.StatusCode, .*; not <StatusCode.OK"),
    (Delayed(ANY, QUOTA), "Delayed has seconds, 0 or more; not 'UNAVAILABLE'"),
    (Delayed(math.nan, QUOTA), "Delayed has seconds, 0 or more; not nan"),
    (Delayed(1, ANY), "Delayed has a grant, a refusal or a Failure; not 'UNAVAILABLE'"),
    (Delayed(1, Failure(ANY)), "a Failure has one of .*; not 'UNAVAILABLE'"),
]


@pytest.mark.parametrize(("verdict", "message"), WRONG_VERDICTS)
def test_a_wrong_verdict_is_named(verdict: Any, message: str) -> None:
    with FakeScheduler() as fake, Scheduler(fake.target) as scheduler:
        with pytest.raises(TypeError, match=message):
            fake.script(QUOTA, verdict)
        fake.decide = lambda request: verdict
        told = f"(?s)FakeScheduler.decide: TypeError: .*{message}"
        with pytest.raises(CallError, match=told), scheduler.admission(**SHAPE):
            pass


@pytest.mark.parametrize("outcome", [pb.OUTCOME_GRANTED, 5, "REJECTED_QUOTA"])
def test_a_refusal_has_the_outcome_of_one(outcome: Any) -> None:
    with pytest.raises(ValueError, match=f"{outcome!r} is not the outcome of a refusal"):
        refusal(outcome)


def test_a_wrong_use_of_the_fake_is_named() -> None:
    fake: Any = FakeScheduler()
    with pytest.raises(AttributeError, match=r"has no decides; did you mean decide"):
        fake.decides = refusal
    with pytest.raises(AttributeError, match=r"has no ttl_ms; did you mean lease_ttl_ms"):
        fake.ttl_ms = 5
    with pytest.raises(TypeError, match=r"a lease's state is one of .*; not 'VOID'"):
        fake.statuses[1] = "VOID"
    with pytest.raises(KeyError, match="no Admit of r waits"):
        fake.release("r")


WRONG_ENDS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"input_tokens": "9"}, TypeError, "input_tokens is '9'; it has to be an integer"),
    ({"cached_input_tokens": 1.5}, TypeError, "cached_input_tokens is 1.5; it has to be"),
    ({"output_tokens": math.nan}, TypeError, "output_tokens is nan; it has to be an integer"),
    ({"outcome": Outcome.GRANTED}, ValueError, "a lease ends as COMPLETED or CANCELLED"),
    ({"outcome": "COMPLETED"}, ValueError, "outcome is 'COMPLETED'; a lease ends as"),
]


@pytest.mark.parametrize(("wrong", "kind", "message"), WRONG_ENDS)
def test_a_wrong_end_is_named_and_the_lease_is_cancelled(
    wrong: dict[str, Any], kind: type[Exception], message: str
) -> None:
    def ask(scheduler: Scheduler, name: str) -> None:
        with scheduler.admission(**SHAPE) as admission:
            admission.progress(output_tokens=3)
            getattr(admission, name)(**wrong)

    with FakeScheduler() as fake, Scheduler(fake.target) as scheduler:
        for name in ("complete",) if "outcome" in wrong else ("complete", "progress"):
            with pytest.raises(kind, match=message):
                ask(scheduler, name)
        for book in fake.books.values():
            assert (book.end.outcome, book.end.output_tokens) == (pb.OUTCOME_CANCELLED, 3)
        assert fake.live == set()


@pytest.mark.parametrize("kind", [AsyncScheduler, SchedulerSession])
async def test_a_wrong_total_is_named_and_the_lease_is_cancelled(
    kind: type[AsyncScheduler | SchedulerSession],
) -> None:
    options = {"client_id": "c", "incarnation": 1} if kind is SchedulerSession else {}
    wrong: Any = "3"
    async with FakeScheduler() as fake, kind(fake.target, **options) as client:
        for name in ("complete", "progress"):
            with pytest.raises(TypeError, match="output_tokens is '3'; it has to be an integer"):
                async with client.admission(**SHAPE) as admission:
                    getattr(admission, name)(output_tokens=wrong)
        await until(lambda: len(fake.books) == 2 and not fake.live)


@pytest.mark.parametrize("target", [None, ["127.0.0.1:7600"]])
def test_a_target_that_is_no_text_is_named(target: Any) -> None:
    with pytest.raises(TypeError, match=r"target is .*; it has to be a str"):
        Scheduler(target)


@pytest.mark.parametrize("kind", [AsyncScheduler, SchedulerSession, Scheduler, Operator])
@pytest.mark.parametrize("options", [{}, {"call_deadline_s": 1}, 5])
def test_options_of_another_kind_are_named(kind: Any, options: Any) -> None:
    named = {"client_id": "c", "incarnation": 1} if kind is SchedulerSession else {}
    with pytest.raises(TypeError, match=r"options is .*; it has to be a ClientOptions"):
        kind("127.0.0.1:1", options=options, **named)


@pytest.mark.parametrize("value", [None, "1", math.nan])
def test_an_option_that_is_no_number_is_named(value: Any) -> None:
    with pytest.raises(TypeError, match=r"call_deadline_s is .*; it has to be a number"):
        ClientOptions(call_deadline_s=value)


@pytest.mark.parametrize(
    "field", ["input_tokens", "max_output_tokens", "n", "deadline_ms", "tenant", "reports_progress"]
)
def test_none_in_a_request_is_named(field: str) -> None:
    wrong: Any = {**SHAPE, field: None}
    with FakeScheduler() as fake, Scheduler(fake.target) as scheduler:
        with pytest.raises(InvalidRequest, match=f"{field}: is None; it has to have a value"):
            scheduler.admission(**wrong)
        assert not fake.admits


async def test_none_in_another_message_is_named() -> None:
    none: Any = None
    pool: Any = {
        "pool": "p", "epoch": 1, "capacity_tokens": 64, "block_size_tokens": 16,
        "max_running": None,
    }  # fmt: skip
    async with (
        FakeScheduler() as fake,
        AsyncScheduler(fake.target) as scheduler,
        SchedulerSession(fake.target, client_id="c", incarnation=1) as session,
    ):
        with pytest.raises(InvalidRequest, match="flow_limit: is None"):
            await scheduler.stats(flow_limit=none)
        with pytest.raises(InvalidRequest, match="request_id: is None"):
            await scheduler.explain(none)
        with pytest.raises(InvalidRequest, match="max_running: is None"):
            session.register_pool(**pool)


async def test_an_unknown_attribute_of_an_admission_is_named() -> None:
    async with FakeScheduler() as fake, AsyncScheduler(fake.target) as scheduler:
        with Scheduler(fake.target) as threads:
            for asker in (scheduler, threads):
                admission: Any = asker.admission(**SHAPE)
                with pytest.raises(AttributeError, match="on_lots"):
                    admission.on_lots = print


async def test_a_stopped_fake_leaves_no_task() -> None:
    tasks = asyncio.all_tasks()
    async with FakeScheduler() as fake:
        async with SchedulerSession(fake.target, client_id="c", incarnation=1):
            await until(lambda: fake.streams)
            await fake.stop()
        await until(lambda: asyncio.all_tasks() == tasks)
