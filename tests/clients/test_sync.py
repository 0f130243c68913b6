"""Tests the client of plain threads beyond what it asks: forks, interrupts, callbacks, its end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from schedsvc_client import ClientOptions, LeaseState, Outcome, Refused
from schedsvc_client.operator import Operator
from schedsvc_client.requests import RequestIds
from schedsvc_client.sync import Admission, Scheduler
from schedsvc_client.testing import FakeScheduler, refusal
from schedsvc_client.v1 import scheduler_pb2 as pb

from tests import forked
from tests.waiting import until

QUICK = ClientOptions(backoff_min_s=0.01, backoff_max_s=0.02, progress_delay_s=0.005)
ASK = {"input_tokens": 5, "max_output_tokens": 9}
BEGIN = """
import os, sys
from schedsvc_client.sync import Scheduler
ask = {"input_tokens": 5, "max_output_tokens": 9}
"""
FORK = """
scheduler = Scheduler(sys.argv[1])
with scheduler.admission(tenant="parent", **ask) as held:
    child = os.fork()
    if not child:
        held.progress(output_tokens=8)
        held.complete(output_tokens=8)
        with scheduler.admission(tenant="child", **ask) as own:
            own.progress(output_tokens=2)
        with Scheduler(sys.argv[1]) as another:
            another.stats()
        scheduler.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    held.progress(output_tokens=1)
with scheduler.admission(tenant="parent", **ask):
    pass
scheduler.close()
"""
WAIT = """
with Scheduler(sys.argv[1]) as scheduler:
    try:
        with scheduler.admission(**ask):
            print("granted")
    except KeyboardInterrupt:
        print("interrupted")
"""


async def program(text: str, target: str) -> subprocess.Popen[str]:
    """Start a program that uses the client."""
    words = [sys.executable, "-c", BEGIN + text, target]
    return await asyncio.to_thread(
        forked.Popen, words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


async def output(process: subprocess.Popen[str]) -> str:
    said, _ = await asyncio.to_thread(process.communicate)
    return said


async def test_a_forked_process_asks_by_itself_and_ends_no_lease_of_its_parent(
    fake: FakeScheduler,
) -> None:
    process = await program(FORK, fake.target)
    said = await output(process)
    assert process.returncode == 0, said
    used = {book.tenant: book.end.output_tokens for book in fake.books.values()}
    assert used == {"parent": 0, "child": 2}
    assert fake.books[1].end.output_tokens == 1
    assert [len(book.completes) for book in fake.books.values()] == [1, 1, 1]
    assert len({admit.request_id for admit in fake.admits}) == 3


async def test_an_interrupt_withdraws_what_waits(fake: FakeScheduler) -> None:
    fake.decide = lambda request: None
    process = await program(WAIT, fake.target)
    await until(lambda: fake.held)
    process.send_signal(signal.SIGINT)
    assert await output(process) == "interrupted\n"
    await until(lambda: fake.cancelled == [fake.admits[0].request_id])


async def test_a_closed_client_leaves_no_thread_and_no_descriptor(fake: FakeScheduler) -> None:
    def use() -> None:
        with Scheduler(fake.target, options=QUICK) as scheduler:
            with scheduler.admission(**ASK) as admission:
                admission.progress(output_tokens=1)
            scheduler.close()
            with pytest.raises(RuntimeError, match="the client is closed"):
                scheduler.stats()
            admission.progress(output_tokens=2)
            admission.complete()
        with Operator(fake.target, options=QUICK) as operator:
            operator.stats()
        Scheduler(fake.target).close()

    def threads() -> list[str]:
        return [each.name for each in threading.enumerate() if each.name.startswith("schedsvc")]

    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def work() -> None:
        use()
        first = descriptors()
        for _ in range(20):
            use()
        assert threads() == []
        assert descriptors() <= first + 10  # for 80 clients; gRPC keeps some for its own

    await asyncio.to_thread(work)


async def test_a_callback_may_ask_the_scheduler(fake: FakeScheduler) -> None:
    fake.lease_ttl_ms = 60
    live: list[int] = []

    def work() -> None:
        with Scheduler(fake.target, options=QUICK) as scheduler:
            asked = threading.Event()
            with scheduler.admission(**ASK) as admission:

                def on_lost(state: LeaseState) -> None:
                    live.append(scheduler.stats().totals.live_leases)
                    admission.complete(outcome=Outcome.CANCELLED)
                    asked.set()

                admission.on_lost = on_lost
                fake.statuses[1] = pb.LEASE_STATE_VOID
                assert asked.wait(60)
                assert admission.lost is LeaseState.VOID

    await asyncio.to_thread(work)
    assert live == [1]
    assert fake.books[1].end.outcome == pb.OUTCOME_CANCELLED


async def test_an_error_shows_who_asked(fake: FakeScheduler) -> None:
    fake.decide = lambda request: refusal(message="full")

    def the_caller(admission: Admission) -> None:
        admission.__enter__()

    def work() -> None:
        with Scheduler(fake.target, options=QUICK) as scheduler:
            admission = scheduler.admission(**ASK)
            with pytest.raises(Refused, match="full") as caught:
                the_caller(admission)
        names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert names.index("the_caller") < names.index("_ask")
        assert admission.lease is None

    await asyncio.to_thread(work)


async def test_an_end_that_fails_waits_for_no_second_try(fake: FakeScheduler) -> None:
    fake.complete_errors = [(grpc.StatusCode.UNAVAILABLE, "later")] * 2
    slow = ClientOptions(backoff_min_s=30, backoff_max_s=60, progress_delay_s=0.005)
    done = threading.Event()

    def work() -> None:
        scheduler = Scheduler(fake.target, options=slow)
        with scheduler.admission(**ASK):
            pass
        done.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert await asyncio.to_thread(done.wait, 20)
    assert len(fake.complete_errors) == 1
    assert not fake.books[1].completes


def in_child(work: Callable[[], str]) -> str:
    """Return what a forked process says."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.write(writes, work().encode())
        os._exit(0)
    os.close(writes)
    os.waitpid(child, 0)
    with os.fdopen(reads) as said:
        return said.read()


def test_a_forked_process_makes_other_ids() -> None:
    ids = RequestIds()
    ids.next()
    assert in_child(ids.next) != ids.next()
