"""Messages of the core to streams about prefix hashes: whether to send them, and their key."""

from typing import Any

import pytest
from schedsvc_client.v1 import pool_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc import _core as core

from .stream import HELLO, Stream, asking
from .support import make

NONE, PLACEMENT, ORDER = (0, False, False), (512, True, False), (512, False, True)


def figures(use: pool_pb2.PrefixUse) -> tuple[int, bool, bool]:
    return use.hashes_max, use.placement, use.order


def told(answer: pb.SessionResponse) -> tuple[int, bool, bool] | None:
    return figures(answer.prefix_use) if answer.HasField("prefix_use") else None


def greeting(s: core.Scheduler) -> pb.SessionResponse:
    return Stream(s, greets=False).send(0, HELLO)


@pytest.mark.parametrize(
    ("policy", "pools", "options", "expected"),
    [
        ("vtc", 1, {}, None),
        ("vtc", 2, {}, PLACEMENT),
        ("vtc", 2, {"prefix_affinity_ppm": 0}, None),
        ("dlpm", 1, {}, ORDER),
        ("dlpm", 2, {}, (512, True, True)),
        ("dlpm", 2, {"prefix_affinity_ppm": 0}, ORDER),
        ("dlpm", 2, {"prefix_blocks_max": 0}, None),
    ],
)
def test_the_welcome_states_the_use_of_hashes(
    policy: str, pools: int, options: dict[str, Any], expected: object
) -> None:
    s = make(policy=policy, **options)
    for number in range(1, pools):
        s.set_pool(0, f"p{number}".encode(), 1, 1_000, 1)
    assert told(greeting(s)) == expected


def test_a_change_is_sent_once_with_the_next_message() -> None:
    s = make()
    stream = Stream(s, greets=False)
    assert told(stream.send(0, HELLO)) is None
    heard = []
    for number, policy in enumerate(("vtc", "dlpm", "dlpm", "vtc", "vtc", "dlpm"), 1):
        s.set_options(number, policy=policy)
        heard.append(told(stream.send(number, asking(number, f"r{number}"))))
    assert heard == [None, ORDER, None, NONE, None, ORDER]


def test_all_streams_have_one_key_and_each_scheduler_its_own() -> None:
    s = make(policy="dlpm", hash_key=b"3" * 16)
    keys = {greeting(s).prefix_use.key for _ in range(3)}
    other = greeting(make(policy="dlpm", hash_key=b"4" * 16)).prefix_use.key
    assert len(keys | {other, 0}) == 3
    assert int.from_bytes(b"3" * 8) not in keys
