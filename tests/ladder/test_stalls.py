"""Tests the bench of stalls: its messages are as large as they may be; it sees a long turn."""

import asyncio
import time

import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb

from bench.stalls import MESSAGES, Turns, _message, filled
from schedsvc.config.models import Limits


@pytest.mark.parametrize("what", MESSAGES)
def test_messages_fit_and_leave_no_room_for_another(what: str) -> None:
    events = filled(MESSAGES[what])
    size, most = len(_message(2, events)), Limits().message_max_bytes
    assert size <= most
    following = pb.SessionRequest(events=[pb.SessionEvent(**MESSAGES[what](len(events)))])
    assert len(events) == 4_096 or size + following.ByteSize() > most


def test_longest_turn_is_measured_in_cpu_time() -> None:
    turns = Turns()

    def work() -> None:
        until_ns = time.thread_time_ns() + 3_000_000
        while time.thread_time_ns() < until_ns:
            pass

    async def main() -> None:
        turns.begin()
        asyncio.get_running_loop().call_soon(work)
        await asyncio.sleep(0)

    with turns.watching():
        asyncio.run(main())
    assert turns.longest_ns >= 3_000_000
