"""Compares the core's reader of AdmitRequest with protobuf's (upb), and tests the writer."""

from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from schedsvc_client.v1 import quota_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1.leader_pb2 import Leadership

from schedsvc import _core as core

from .encoding import FIXED32, FIXED64, LENGTH, VARINT, Field, field, message, varint
from .support import admit_message, make, totals

TOKENS_MAX, PROMPT_MAX = 1 << 27, 1 << 24
QUICK = settings(
    max_examples=400,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


CONTROL = {*range(0x20), *range(0x7F, 0xA0), *range(0x2028, 0x202F), *range(0x2066, 0x206A)}


def is_plain(text: str) -> bool:
    return CONTROL.isdisjoint(map(ord, text))


def wrong_fields(m: pb.AdmitRequest) -> set[str]:
    """Fields that the contract and the core's documented limits do not allow."""
    tokens, sequences = sum(m.input_tokens), len(m.input_tokens) * max(1, m.n)
    limits = {
        "request_id": 1 <= len(m.request_id.encode()) <= 128 and is_plain(m.request_id),
        "tenant": len(m.tenant.encode()) <= 256 and is_plain(m.tenant),
        "api_key_sha256": len(m.api_key_sha256) in (0, 32),
        "pools": len(m.pools) <= 64
        and len(set(m.pools)) == len(m.pools)
        and all(1 <= len(name.encode()) <= 128 and is_plain(name) for name in m.pools),
        "adapter": len(m.adapter.encode()) <= 256 and is_plain(m.adapter),
        "request_class": m.request_class == "",  # none is configured
        "session": len(m.session.encode()) <= 256 and is_plain(m.session),
        "input_tokens": 1 <= len(m.input_tokens) <= 1024
        and all(1 <= p <= PROMPT_MAX for p in m.input_tokens)
        and tokens * max(1, m.n) <= TOKENS_MAX,
        "n": 0 <= m.n <= 128 and sequences <= 1024,
        "max_output_tokens": 1 <= m.max_output_tokens <= PROMPT_MAX
        and tokens * max(1, m.n) + m.max_output_tokens * sequences <= TOKENS_MAX,
        "prefix_block_hashes": len(m.prefix_block_hashes) <= 4_096,
        "deadline_ms": 0 <= m.deadline_ms <= 1 << 40,
        "queue_ttl_ms": 0 <= m.queue_ttl_ms <= 1 << 40,
    }
    return {name for name, holds in limits.items() if not holds}


def pair_of_cores() -> tuple[core.Scheduler, core.Scheduler]:
    made = make(block=16, capacity=1 << 20), make(block=16, capacity=1 << 20)
    for s in made:
        s.set_flow(b"other", 500)
        s.set_key(b"k" * 32, 1)
        s.set_pool(0, b"q", 1, 4_096, 1, 8, 2_000)
    return made


def judge(data: bytes) -> None:
    """Tests that the core accepts what protobuf accepts and the contract allows, and does it."""
    s, twin = pair_of_cores()
    try:
        answer = s.admit_wire(0, 0, data)
    except core.CallerError as e:
        error: core.CallerError | None = e
    else:
        error = None
    s.check()
    try:
        m = pb.AdmitRequest.FromString(data)
    except DecodeError:
        assert error, "protobuf cannot read it, the core could"
        return
    wrong = wrong_fields(m)
    if error:
        assert error.code == 3
        assert error.field.split("[")[0] in wrong, f"{error} for {m}"
        assert totals(s, 0)["received"] == 0
        return
    assert not wrong, f"accepted {m}"
    compare_with_arguments(s, twin, m, answer)


def posted(s: core.Scheduler, pool: int) -> int:
    found: int = s.stats(0)["pools"][pool]["posted_tokens"]
    return found


def compare_with_arguments(
    s: core.Scheduler, twin: core.Scheduler, m: pb.AdmitRequest, answer: int | bytes
) -> None:
    flow = {"f": 0, "other": 1}.get(m.tenant, -1)
    if not m.tenant and m.api_key_sha256 == b"k" * 32:
        flow = 1
    known = tuple({"p": 0, "q": 1}[name] for name in m.pools if name in ("p", "q"))
    if flow < 0 or (m.pools and not known):
        want = core.REJECTED_UNKNOWN_TENANT if flow < 0 else core.REJECTED_NO_POOL
        assert isinstance(answer, bytes)
        assert pb.AdmitResponse.FromString(answer).outcome == want
        return
    n = max(1, m.n)
    outcome = twin.admit(
        0, flow, m.request_id.encode(), sum(m.input_tokens), m.max_output_tokens,
        -1, len(m.input_tokens) * n, reports_progress=m.reports_progress, n=n,
        whole_answer=m.whole_answer, pools=known,
    )  # fmt: skip
    decisions = twin.poll(0)
    if isinstance(answer, int):
        assert outcome > 0
        assert not decisions
        return
    response = pb.AdmitResponse.FromString(answer)
    assert response.SerializeToString() == answer
    if outcome < 0:
        # The mean prompt of plain arguments may fit a context that the longest does not.
        assert response.outcome == -outcome
    elif decisions and response.outcome == core.GRANTED:
        (d,) = decisions
        grant = pb.Grant(
            lease_id=d.lease_id, pool=twin.pool_name(d.pool).decode(), pool_epoch=1,
            ttl_ms=10_000, reserved_tokens=d.reserved_tokens,
        )  # fmt: skip
        assert response.grant == grant
        assert posted(s, d.pool) == posted(twin, d.pool)
    else:
        longest, mean = max(m.input_tokens), sum(m.input_tokens) / len(m.input_tokens)
        assert longest > mean, f"{response} for {m}"


small = st.integers(-1, 40)
text = st.sampled_from(("", "f", "other", "p", "q", "r", "ü", "\0", "x" * 128, "x" * 257))
asks = st.fixed_dictionaries(
    {},
    optional={
        "request_id": st.one_of(st.just("r"), st.text(max_size=140)),
        "tenant": st.sampled_from(("f", "f", "other", "", "nobody", "y" * 256, "y" * 257)),
        "api_key_sha256": st.sampled_from((b"", b"k" * 32, b"z" * 32, b"k" * 31, b"k" * 33)),
        "pools": st.lists(
            st.sampled_from(("p", "p", "q", "q", "none", "z" * 128, "z" * 129, "")), max_size=3
        ),
        "n": st.sampled_from((0, 1, 2, 128, 129, -1, 1 << 30)),
        "max_output_tokens": st.sampled_from((0, 1, 100, PROMPT_MAX, PROMPT_MAX + 1, -1, 1 << 62)),
        "prefix_block_hashes": st.lists(st.integers(0, (1 << 64) - 1), max_size=3),
        "adapter": st.sampled_from(("", "lora", "a" * 257)),
        "request_class": st.sampled_from(("", "", "", "batch")),
        "deadline_ms": st.sampled_from((0, 5, 1 << 40, (1 << 40) + 1, -1)),
        "queue_ttl_ms": st.sampled_from((0, 5, 1 << 40, (1 << 40) + 1, -(1 << 63))),
        "reports_progress": st.booleans(),
        "whole_answer": st.booleans(),
        "session": st.sampled_from(("", "", "talk", "s" * 256, "s" * 257, "\0")),
        "input_tokens": st.one_of(
            st.lists(st.integers(1, 600), min_size=1, max_size=5),
            st.lists(st.sampled_from((0, 1, -1, PROMPT_MAX, PROMPT_MAX + 1, 1 << 40)), max_size=9),
        ),
    },
)


@QUICK
@given(asks)
def test_random_messages(ask: dict[str, Any]) -> None:
    judge(pb.AdmitRequest(**ask).SerializeToString())


@QUICK
@given(asks)
def test_random_messages_that_are_mostly_right(ask: dict[str, Any]) -> None:
    right: dict[str, Any] = {
        "request_id": "r",
        "tenant": "f",
        "input_tokens": [7],
        "max_output_tokens": 9,
    }
    for name, value in list(ask.items()):
        if wrong_fields(pb.AdmitRequest(**(right | {name: value}))):
            ask[name] = right.get(name, type(value)())
    judge(pb.AdmitRequest(**(right | ask)).SerializeToString())


numbers = st.one_of(
    st.integers(1, 14), st.integers(1, 14), st.sampled_from((15, 16, 2047, 1 << 28, (1 << 29) - 1))
)
scalars = st.one_of(small, st.integers(-(1 << 63), (1 << 64) - 1))
packed = st.lists(small, max_size=6).map(lambda values: b"".join(varint(v) for v in values))
fields = st.one_of(
    st.tuples(numbers, st.just(VARINT), scalars),
    st.tuples(numbers, st.just(FIXED64), scalars),
    st.tuples(numbers, st.just(FIXED32), scalars),
    st.tuples(numbers, st.just(LENGTH), st.one_of(text.map(str.encode), packed)),
)
VALID: list[Field] = [
    (1, LENGTH, b"r"),
    (2, LENGTH, b"f"),
    (5, VARINT, 10),
    (7, VARINT, 10),
]


@QUICK
@given(st.lists(fields, max_size=12), st.booleans())
@example([(5, LENGTH, varint(3) + varint(4)), (5, VARINT, 5), (5, LENGTH, varint(6))], True)
@example([((1 << 28) + 2, LENGTH, b"other"), (1 << 28, VARINT, 1), (2, VARINT, 7)], True)
@example([(1, LENGTH, b"a"), (1, LENGTH, b"b"), (7, VARINT, 3), (7, FIXED64, 4)], True)
@example([(6, VARINT, (1 << 32) + 2), (13, VARINT, 1 << 40)], True)
def test_random_fields_in_any_order(extra: list[Field], starts_valid: bool) -> None:
    judge(message([*VALID, *extra] if starts_valid else extra))
    judge(message([*extra, *VALID]))


@QUICK
@given(st.integers(0, 9), st.integers(0, 9))
def test_overlong_numbers(padding: int, tag_padding: int) -> None:
    whole = message(VALID[:3])
    judge(whole + field(7, VARINT, 10, padding))
    judge(whole + varint(7 << 3 | VARINT, tag_padding) + varint(10))
    judge(whole + field(5, LENGTH, varint(3, padding)) + field(7, VARINT, 1))


def test_a_replaced_text_must_be_valid_too() -> None:
    bad = field(1, LENGTH, b"\x80")
    judge(bad + message(VALID))
    judge(message(VALID) + bad + field(1, LENGTH, b"r"))


@QUICK
@given(asks, st.integers(0, 400), st.binary(max_size=6), st.integers(0, 2))
def test_mutated_bytes(ask: dict[str, Any], place: int, junk: bytes, drop: int) -> None:
    whole = bytearray(
        admit_message("r" * 9, [3, 400, 7], n=2, pools=["p"]).SerializeToString()
        + pb.AdmitRequest(**ask).SerializeToString()
    )
    place %= len(whole) + 1
    whole[place : place + drop] = junk
    assume(not has_group(bytes(whole)))
    judge(bytes(whole))


@QUICK
@given(st.integers(0, 400), st.integers(0, 7))
def test_a_flipped_bit(place: int, bit: int) -> None:
    whole = bytearray(
        admit_message(
            "request", [3, 400], n=2, api_key_sha256=b"k" * 32, deadline_ms=99, adapter="l",
            prefix_block_hashes=[1, 2],
        ).SerializeToString()
    )  # fmt: skip
    whole[place % len(whole)] ^= 1 << bit
    assume(not has_group(bytes(whole)))
    judge(bytes(whole))


def has_group(data: bytes) -> bool:
    """Whether a reader would come to a group, which the contract does not have."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while at < len(data):
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        return value

    while at < len(data):
        kind = number() & 7
        if kind in (3, 4):
            return True
        if kind == VARINT:
            number()
        elif kind == LENGTH:
            size = number()  # moves `at`
            at += size
        else:
            at += 8 if kind == FIXED64 else 4
    return False


@pytest.mark.parametrize("cut", range(1, 40))
def test_truncated_messages(cut: int) -> None:
    whole = admit_message("request", [300, 400], n=2, pools=["p"]).SerializeToString()
    judge(whole[:cut])


@pytest.mark.parametrize(
    "bad",
    [
        b"\xff",
        b"\xc0\x80",
        b"\xed\xa0\x80",
        b"\xf4\x90\x80\x80",
        b"\xe2\x82",
        b"a\x80",
        b"\xf8\x88",
    ],
)
@pytest.mark.parametrize("number", [1, 2, 4, 9, 10])
def test_bad_utf8_is_refused(bad: bytes, number: int) -> None:
    judge(message([*VALID, (number, LENGTH, bad)]))


@pytest.mark.parametrize(
    "good", ["é", "€", "\U0001f600", "\ud7ff", "\U0010ffff", "\u2027\u202f\u2065\u206a", "\xa0"]
)
def test_good_utf8_is_taken(good: str) -> None:
    s = make()
    data = message([*VALID, (1, LENGTH, good.encode())])
    assert isinstance(s.admit_wire(0, 0, data), bytes)
    assert totals(s, 0)["granted"] == 1


@pytest.mark.parametrize("code", sorted(CONTROL))
def test_control_characters_are_refused(code: int) -> None:
    s = make()
    for number, name in ((1, "request_id"), (2, "tenant")):
        data = message([*VALID, (number, LENGTH, f"a{chr(code)}b".encode())])
        with pytest.raises(core.CallerError, match="control character") as wrong:
            s.admit_wire(0, 0, data)
        assert (wrong.value.code, wrong.value.field) == (3, name)
    assert totals(s, 0)["received"] == 0


def test_large_and_many() -> None:
    s = make(capacity=1 << 20)
    name = "x" * (64 << 10)
    for changes, expected in (
        ({"tenant": name}, "tenant"),
        ({"request_id": name}, "request_id"),
        ({"pools": [name]}, "pools[0]"),
        ({"pools": [f"p{k}" for k in range(65)]}, "pools"),
        ({"prefix_block_hashes": [7] * 4_097}, "prefix_block_hashes"),
        ({"prompts": [1] * 1_025}, "input_tokens"),
        ({"prompts": [1] * 9, "n": 128}, "n"),
    ):
        arguments: dict[str, Any] = {"request_id": "r"} | changes
        with pytest.raises(core.CallerError) as caught:
            s.admit_wire(0, 0, admit_message(**arguments).SerializeToString())
        assert caught.value.field == expected
    data = admit_message(
        "r" * 128, [1] * 1_024, prefix_block_hashes=[7] * 4_096
    ).SerializeToString()
    assert isinstance(s.admit_wire(0, 0, data), bytes)
    s.check()


@pytest.mark.parametrize("size", [0, 1, 7, 64, 1_000])
def test_zeros_and_noise_are_no_message(size: int) -> None:
    s = make()
    for data in (b"\0" * size, b"\xff" * size, bytes(i * 37 % 256 for i in range(size))):
        with pytest.raises(core.CallerError):
            s.admit_wire(0, 0, data)
    s.check()
    assert totals(s, 0)["received"] == 0


def test_encode_writes_what_the_call_would_have_answered() -> None:
    s, other = make(block=16), make(block=16)
    (d,) = (s.admit_wire(0, 0, admit_message("r").SerializeToString()),)
    other.admit(0, 0, b"r", 10, 10)
    (decision,) = other.poll(0)
    assert other.encode(decision) == d
    far = decision._replace(lease_id=1 << 62, waited_ns=1 << 62, pool_epoch=1 << 62)
    response = pb.AdmitResponse.FromString(other.encode(far))
    assert response.queue_duration_us == (1 << 62) // 1_000
    assert (response.grant.lease_id, response.grant.pool_epoch) == (1 << 62, 1 << 62)


def test_a_leadership_is_stated_and_decides_nothing() -> None:
    s, other = make(block=16), make(block=16)
    stated = Leadership(term=1 << 40, leader="a/" + "f" * 16)
    s.set_leadership(0, stated.SerializeToString())
    answer = s.admit_wire(0, 0, admit_message("r").SerializeToString())
    plain = other.admit_wire(0, 0, admit_message("r").SerializeToString())
    assert isinstance(answer, bytes)
    assert isinstance(plain, bytes)
    response = pb.AdmitResponse.FromString(answer)
    assert response.leadership == stated
    response.ClearField("leadership")
    assert response == pb.AdmitResponse.FromString(plain)
    assert answer[:2] == plain[:2]  # the outcome comes first
    assert s.digest() == other.digest()
    with pytest.raises(core.CallerError, match="leadership"):
        s.set_leadership(0, b"x" * 513)


@pytest.mark.parametrize("outcome", sorted(core.OUTCOME_TEXT))
def test_every_refusal_says_why_and_when(outcome: int) -> None:
    s = make()
    s.admit(0, 0, b"r", 10, 10)
    (d,) = s.poll(0)
    d = d._replace(
        outcome=outcome, retry_after_ms=7, position=3, queue_max=10, queue_left=4,
        pool_capacity_tokens=100, pool_free_tokens=30, waited_ns=5_000,
    )  # fmt: skip
    response = pb.AdmitResponse.FromString(s.encode(d))
    assert response.outcome == outcome
    assert response.queue_duration_us == 5
    if outcome == core.GRANTED:
        assert response.HasField("grant") != response.HasField("refusal")
        return
    limits = [
        quota_pb2.Limit(
            kind=quota_pb2.LIMIT_KIND_QUEUED_REQUESTS, limit=10, remaining=4, reset_ms=7
        ),
        quota_pb2.Limit(kind=quota_pb2.LIMIT_KIND_POOL_TOKENS, limit=100, remaining=30, reset_ms=7),
    ]
    assert response.refusal == pb.Refusal(
        retry_after_ms=7,
        quota=quota_pb2.QuotaSnapshot(limits=limits),
        queue_position=3,
        message=core.OUTCOME_TEXT[outcome],
    )
