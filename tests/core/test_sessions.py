"""Tests the Session protocol: a state machine of bytes."""

import pytest
from schedsvc_client.v1 import pool_pb2, quota_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1.leader_pb2 import Leadership

from schedsvc import _core as core

from .stream import (
    HELLO,
    Stream,
    asking,
    cancelling,
    completing,
    fates,
    faults,
    notices,
    offering,
    replaying,
    reporting,
)
from .support import SECOND, admit, is_drained, make, totals

TTL, GRACE = 10 * SECOND, 20 * SECOND


def refused(stream: Stream, *events: pb.SessionEvent) -> str:
    """Return the field for which the stream cannot go on."""
    with pytest.raises(core.CallerError) as caught:
        stream.push(0, *events)
    assert caught.value.code == 3
    stream.core.check()
    return caught.value.field


# Greeting and numbering.


def test_hello_is_welcomed_and_acknowledged() -> None:
    s = core.Scheduler(
        incarnation=77, lease_ttl_ns=3 * SECOND, session_open_max=9, message_bytes_max=2_048
    )
    answer = Stream(s, greets=False).send(0, HELLO)
    assert answer.ack_seq == 1
    assert answer.welcome == pb.SessionWelcome(
        incarnation=77,
        lease_ttl_ms=3_000,
        open_requests_max=9,
        message_bytes_max=2_048,
        beats=True,
    )


def test_the_first_event_is_hello_and_only_the_first() -> None:
    for event in (asking(1, "r"), offering("q"), reporting(1), cancelling(1)):
        assert refused(Stream(make(), greets=False), event) == "events"
    assert refused(Stream(make()), HELLO) == "hello"


def test_a_welcome_states_who_leads() -> None:
    s = make()
    stated = Leadership(term=7, leader="a/1")
    s.set_leadership(0, stated.SerializeToString())
    assert Stream(s, greets=False).send(0, HELLO).welcome.leadership == stated


@pytest.mark.parametrize("client_id", ["", "x" * 129])
def test_hello_names_the_shim(client_id: str) -> None:
    hello = pb.SessionEvent(hello=pb.SessionHello(client_id=client_id))
    assert refused(Stream(make(), greets=False), hello) == "hello.client_id"


@pytest.mark.parametrize("seq", [0, 1, 3, 1 << 63, (1 << 64) - 1])
def test_numbers_grow_by_one(seq: int) -> None:
    stream = Stream(make())
    stream.seq = seq - 1
    with pytest.raises(core.CallerError) as caught:
        stream.session.receive(0, pb.SessionRequest(seq=seq).SerializeToString())
    assert caught.value.field == "seq"
    assert totals(stream.core, 0)["received"] == 0


def test_a_message_without_events_is_fine() -> None:
    stream = Stream(make())
    for _ in range(3):
        assert stream.send(0) == pb.SessionResponse()


def test_a_torn_message_is_refused_before_anything_is_applied() -> None:
    stream = Stream(make())
    whole = pb.SessionRequest(seq=2, events=[asking(1, "r")]).SerializeToString()
    after_seq = 2  # at which it is whole, but without events
    for cut in (1, *range(after_seq + 1, len(whole))):
        with pytest.raises(core.CallerError):
            stream.session.receive(0, whole[:cut])
    assert totals(stream.core, 0)["received"] == 0
    stream.session.receive(0, whole)
    assert totals(stream.core, 0)["received"] == 1


# Requests.


def test_verdicts_carry_their_tags_in_order() -> None:
    stream = Stream(make(capacity=40, queue_max=2))
    answer = stream.send(0, *(asking(tag, f"r{tag}") for tag in (7, 3, 9, 4, 5)))
    full = core.REJECTED_QUEUE_FULL  # nothing is granted before the poll
    assert fates(answer) == [(9, full), (4, full), (5, full), (7, core.GRANTED), (3, core.GRANTED)]
    assert answer.ack_seq == 2


def test_a_verdict_says_what_a_unary_answer_says() -> None:
    for prompts, fields in (((10, 5), {"n": 2}), ((2_000,), {}), ((1,), {"pools": ["none"]})):
        stream, unary = Stream(make(block=16)), make(block=16)
        (verdict,) = stream.send(0, asking(5, "r", *prompts, **fields)).verdicts
        message = asking(5, "r", *prompts, **fields).admit.request
        answer = unary.admit_wire(0, 0, message.SerializeToString())
        assert isinstance(answer, bytes)
        said, told = verdict.response, pb.AdmitResponse.FromString(answer)
        for response in (said, told):  # spread so that not all return together
            assert response.refusal.retry_after_ms in range(5_501)
            response.refusal.retry_after_ms = 0
            for limit in response.refusal.quota.limits:
                limit.reset_ms = 0
        assert said == told


def test_grant_reports_the_quotas_of_its_tenant() -> None:
    s = make(capacity=10_000)
    group = s.set_quota(0, b"group:g", requests=3, total_tokens=10_000)
    for name, limits in (
        ("acme", {"total_tokens": 600}),
        ("free", {}),
        ("unknown", {"requests": 9}),
    ):
        flow = s.set_flow(name.encode(), 1_000)
        s.set_flow_quota(0, flow, group if name == "acme" else -1, **limits)
    s.set_unknown(flow)
    told = {}
    for tag, name in enumerate(("acme", "free", "stranger"), 1):
        (verdict,) = Stream(s).send(0, asking(tag, "r", 100, tenant=name)).verdicts
        assert verdict.response.outcome == pb.OUTCOME_GRANTED
        limits = verdict.response.grant.quota.limits
        told[name] = {e.kind: (e.limit, e.remaining) for e in limits}
    # For each kind, the limit with the least left; what the stranger shares is not its own.
    tokens, requests = quota_pb2.LIMIT_KIND_TOKENS_PER_MINUTE, 3
    assert told == {"acme": {requests: (3, 2), tokens: (600, 490)}, "free": {}, "stranger": {}}


def test_wrong_events_are_faults_and_the_others_stand() -> None:
    stream = Stream(make(capacity=25))
    stream.grant(0, 1, "runs")
    answer = stream.send(
        0,
        asking(2, "waits"),
        asking(2, "same-tag"),
        asking(0, "no-tag"),
        asking(3, "waits"),
        asking(4, ""),
        asking(5, "r5", 0),
        asking(6, "r6", max_output_tokens=0),
        offering("q", capacity=0),
        offering("p", epoch=0),
        reporting(1, output_tokens=-5),
        completing(1, outcome=core.EXPIRED),
        replaying(9, "x", prompt_tokens=0),
        pb.SessionEvent(telemetry=pool_pb2.EngineTelemetry(pool="none")),
        pb.SessionEvent(),
        asking(7, "r7"),
    )
    assert faults(answer) == [
        (2, 3, "admit.tag"),
        (0, 3, "admit.tag"),
        (3, 6, "admit.request.request_id"),
        (4, 3, "admit.request.request_id"),
        (5, 3, "admit.request.input_tokens[0]"),
        (6, 3, "admit.request.max_output_tokens"),
        (0, 3, "pool.capacity_tokens"),
        (0, 9, "pool.epoch"),
        (0, 3, "progress.output_tokens"),
        (0, 3, "complete.outcome"),
        (0, 3, "replay.prompt_tokens"),
        (0, 5, "telemetry.pool"),
        (0, 3, "events"),
    ]
    assert fates(answer) == []
    assert totals(stream.core, 0)["queued"] == 2
    assert totals(stream.core, 0)["live_leases"] == 1
    stream.core.check()


def test_tenants_by_name_by_key_and_unknown() -> None:
    s = make(("f", 1000), ("keyed", 1000))
    s.set_key(b"k" * 32, 1)
    stream = Stream(s)
    unknown = core.REJECTED_UNKNOWN_TENANT
    answer = stream.send(
        0,
        asking(1, "r1"),
        asking(2, "r2", tenant="", api_key_sha256=b"k" * 32),
        asking(3, "r3", tenant="", api_key_sha256=b"x" * 32),
        asking(4, "r4", tenant=""),
        asking(5, "r5", tenant="nobody", api_key_sha256=b"k" * 32),
    )
    assert sorted(fates(answer)) == [(1, 1), (2, 1), (3, unknown), (4, unknown), (5, unknown)]
    assert [s.flow_stats(0, i)["granted"] for i in range(2)] == [1, 1]
    s.set_unknown(0)
    assert fates(stream.send(0, asking(6, "r6", tenant="nobody"))) == [(6, 1)]


def test_open_requests_of_a_stream_are_bounded() -> None:
    stream = Stream(make(capacity=20, session_open_max=2))
    stream.grant(0, 1, "runs")
    answer = stream.send(0, asking(2, "waits"), asking(3, "one-more"))
    assert fates(answer) == [(3, core.REJECTED_LIMIT)]
    stream.send(0, cancelling(2))
    assert fates(stream.send(0, asking(4, "waits"))) == []


def test_verdicts_come_in_portions() -> None:
    stream = Stream(make(capacity=1 << 20, queue_max=1 << 20, flow_queue_max=1 << 20))
    for batch in range(3):
        stream.push(0, *(asking(batch * 2_000 + i + 1, f"r{batch}-{i}") for i in range(2_000)))
    while stream.core.next_deadline() == 0:
        stream.core.poll(0)
    sizes = []
    while (data := stream.session.take(0)) is not None:
        sizes.append(len(pb.SessionResponse.FromString(data).verdicts))
    assert sizes == [4_096, 1_904]


def test_faults_and_notices_come_in_portions_too() -> None:
    stream = Stream(make())
    stream.push(0, *(asking(0, "r") for _ in range(3_000)))
    stream.push(0, *(completing(10**6 + i) for i in range(3_000)))
    stream.push(0, *(event for i in range(2_000) for event in (asking(0, "r"), reporting(7 + i))))
    sizes = []
    while (data := stream.session.take(0)) is not None:
        answer = pb.SessionResponse.FromString(data)
        sizes.append((len(answer.faults), len(answer.leases)))
    assert sizes == [(4_096, 4_096), (904, 904)]


def test_a_stream_that_is_not_read_cannot_go_on() -> None:
    stream = Stream(make(session_open_max=8))
    wrong = [asking(0, "r")] * 4_096
    for _ in range(3):
        stream.push(0, *wrong)
    with pytest.raises(core.CallerError) as caught:
        stream.push(0, *wrong)
    assert caught.value.code == 8
    stream.session.close(0)
    assert is_drained(stream.core, 0)


# Leases.


def test_completes_are_acknowledged_and_unknown_ones_noticed() -> None:
    stream = Stream(make())
    lease_id = stream.grant(0, 1, "r")
    answer = stream.send(0, completing(lease_id, output_tokens=4))
    assert (answer.ack_seq, notices(answer)) == (3, [])
    answer = stream.send(0, completing(lease_id, output_tokens=4), completing(999))
    assert (answer.ack_seq, notices(answer)) == (4, [(999, core.LEASE_UNKNOWN)])
    assert notices(stream.send(0, reporting(lease_id), reporting(998))) == [
        (lease_id, core.LEASE_ENDED),
        (998, core.LEASE_UNKNOWN),
    ]
    assert stream.core.flow_stats(0, 0)["output_tokens"] == 4


def test_a_new_epoch_is_noticed_by_holders_of_leases() -> None:
    s = make()
    holder, engine = Stream(s), Stream(s)
    lease_id = holder.grant(0, 1, "r")
    engine.send(0, offering("p", epoch=2, capacity=500))
    assert holder.session.owner in s.ready()
    assert notices(holder.pull(0)) == [(lease_id, core.LEASE_VOID)]
    assert notices(holder.send(0, reporting(lease_id))) == [(lease_id, core.LEASE_VOID)]
    assert notices(holder.send(0, completing(lease_id))) == []
    s.check()


def test_an_expiry_is_noticed() -> None:
    stream = Stream(make())
    lease_id = stream.grant(0, 1, "r")
    assert stream.core.poll(TTL + GRACE) == []
    assert notices(stream.pull(TTL + GRACE)) == [(lease_id, core.LEASE_ENDED)]


@pytest.mark.parametrize("stranger", [0, 2])
def test_principals_cannot_touch_each_others_leases(stranger: int) -> None:
    s = make()
    owner, other = Stream(s, principal=1), Stream(s, principal=stranger)
    lease_id = owner.grant(0, 1, "r")
    unknown = [(lease_id, core.LEASE_UNKNOWN)]
    assert notices(other.send(0, reporting(lease_id, output_tokens=5))) == unknown
    assert notices(other.send(0, completing(lease_id))) == unknown
    assert notices(other.send(0, replaying(lease_id, "r"))) == unknown
    assert notices(other.send(0, replaying(lease_id, "s"))) == unknown
    other.session.close(0)
    assert totals(s, 0)["live_leases"] == 1
    assert s.flow_stats(0, 0)["output_tokens"] == 0
    assert notices(owner.send(0, reporting(lease_id))) == []


@pytest.mark.parametrize(
    ("event", "field"),
    [
        (b"\x4a\x01\x6c", "goodbye"),  # a body that is no message
        (b"\x4a\x00\x4a\x00", "events"),  # two members of a oneof
        (b"\x2a\x01\x03\x4a\x00", "events"),  # the first of them no message
    ],
)
def test_malformed_goodbye_is_a_fault_and_releases_nothing(event: bytes, field: str) -> None:
    """The body of a goodbye is checked too."""
    s = core.Scheduler(headroom_ppm=0)
    owner, other = Stream(s, principal=1), Stream(s, principal=2)
    owner.send(0, offering("gpu"))
    data = b"\x08" + bytes([owner.seq + 1]) + b"\x12" + bytes([len(event)]) + event
    owner.session.receive(0, data)
    owner.seq += 1
    assert faults(owner.pull(0)) == [(0, 3, field)]
    owner.session.close(0)
    assert faults(other.send(0, offering("gpu", epoch=2))) == [(0, 9, "pool.pool")]


# Streams beside unary calls.


def test_a_unary_call_and_a_stream_may_ask_for_the_same() -> None:
    s = make(capacity=20)
    stream = Stream(s)
    lease_id = stream.grant(0, 1, "runs")
    stream.send(0, asking(2, "r"))
    message = asking(2, "r").admit.request.SerializeToString()
    handle = s.admit_wire(0, 0, message)  # the call that asked last gets the verdict
    assert isinstance(handle, int)
    stream.session.receive(
        0, pb.SessionRequest(seq=4, events=[completing(lease_id)]).SerializeToString()
    )
    (granted,) = s.poll(0)
    assert (granted.handle, granted.outcome) == (handle, core.GRANTED)
    assert fates(stream.pull(0)) == []
    stream.seq = 4
    assert fates(stream.send(0, asking(3, "r"))) == [(3, core.GRANTED)]  # the stored answer
    assert totals(s, 0)["granted"] == 2
    s.check()


def test_draining_is_a_verdict_on_a_stream() -> None:
    s = make(capacity=20)
    stream = Stream(s)
    stream.grant(0, 1, "runs")
    stream.send(0, asking(2, "waits"))
    s.drain(0)
    assert fates(stream.send(0, asking(3, "new"))) == [(3, core.REJECTED_DRAINING)]
    assert s.evict_queued(0) == 1
    assert fates(stream.pull(0)) == [(2, core.EVICTED_DRAINING)]


def test_verdicts_of_unary_calls_stay_out_of_streams() -> None:
    s = make(capacity=40)
    stream = Stream(s)
    handle = admit(s, 0, "unary")
    stream.session.receive(
        0, pb.SessionRequest(seq=2, events=[asking(1, "streamed")]).SerializeToString()
    )
    assert [d.handle for d in s.poll(0)] == [handle]
    assert fates(stream.pull(0)) == [(1, core.GRANTED)]


# Inputs that fuzzers have found.


def test_a_fault_names_the_largest_tag_and_spoils_no_stream() -> None:
    s = make()
    liar, other = Stream(s), Stream(s)
    most = (1 << 64) - 1
    liar.push(0, asking(most, "r", n=-1))
    other.push(0, asking(1, "r"))
    assert faults(liar.pull(0)) == [(most, 3, "admit.request.n")]
    assert fates(other.pull(0)) == [(1, core.GRANTED)]


def test_a_cancel_that_is_no_message_cancels_nothing_and_faults() -> None:
    s = make(capacity=20)
    stream = Stream(s)
    stream.grant(0, 1, "first")
    stream.send(0, asking(2, "second"))
    stream.seq += 1
    cut = b"\x42\x04" + b"\x08\x02\x00\x08"  # tag 2, then a field 0
    stream.session.receive(0, b"\x08%c\x12%c%s" % (stream.seq, len(cut), cut))
    assert faults(stream.pull(0)) == [(2, 3, "cancel")]
    assert totals(s, 0)["queued"] == 1


def test_a_replay_names_its_pool_in_utf8() -> None:
    stream = Stream(make())
    event = replaying(7, "r", pool="x").SerializeToString().replace(b"\x2a\x01x", b"\x2a\x01\xe5")
    stream.seq += 1
    stream.session.receive(0, b"\x08%c\x12%c%s" % (stream.seq, len(event), event))
    answer = stream.pull(0)
    assert (faults(answer), notices(answer)) == ([(0, 3, "replay.pool")], [])


# Pool ownership.


def offers(s: core.Scheduler, principal: int, at_ns: int, epoch: int = 1) -> str:
    """Offer pool p as a principal, on a new stream; return the fault, "" if there is none."""
    said = Stream(s, principal, greets=False).send(at_ns, HELLO, offering("p", epoch, capacity=50))
    return str(said.faults[0].description) if said.faults else ""


def test_pool_stays_reserved_for_an_owner_that_reconnects() -> None:
    """Otherwise another caller's registration would void all running leases within a second."""
    s = core.Scheduler(lease_ttl_ns=TTL, lease_grace_ns=GRACE)
    s.set_flow(b"f", 1_000)
    owner = Stream(s, 1)
    owner.send(0, offering("p", capacity=100))
    owner.send(0, asking(1, "r", pools=["p"]))
    owner.session.close(SECOND)
    free_ns = SECOND + TTL + GRACE
    assert "was offered by another caller until a moment ago" in offers(s, 2, SECOND, epoch=9)
    assert "retry in 1 s" in offers(s, 2, free_ns - 1, epoch=9)
    assert s.stats(free_ns - 1)["pools"][0]["epoch"] == 1
    assert offers(s, 1, free_ns - 1) == ""  # its owner may reconnect at any time
    assert "two engines claim pool p" in offers(s, 2, free_ns, epoch=9)


def test_pool_is_free_after_ttl_and_grace_or_a_goodbye() -> None:
    for goodbye in (False, True):
        s = core.Scheduler(lease_ttl_ns=TTL, lease_grace_ns=GRACE)
        owner = Stream(s, 1)
        owner.send(0, offering("p", capacity=100))
        if goodbye:
            said = owner.send(0, pb.SessionEvent(goodbye=pb.SessionGoodbye()))
            assert said.ack_seq == 3  # it is acknowledged
        owner.session.close(0)
        assert offers(s, 2, 0 if goodbye else TTL + GRACE, epoch=9) == ""
        assert s.stats(TTL + GRACE)["pools"][0]["epoch"] == 9


def test_goodbye_on_one_of_two_streams_keeps_the_pool_owned() -> None:
    s = core.Scheduler(lease_ttl_ns=TTL, lease_grace_ns=GRACE)
    streams = [Stream(s, 1), Stream(s, 1)]
    for stream in streams:
        stream.send(0, offering("p", capacity=100))
    streams[0].send(0, pb.SessionEvent(goodbye=pb.SessionGoodbye()))
    streams[0].session.close(0)
    assert "two engines claim pool p" in offers(s, 2, 0)
    streams[1].session.close(0)
    assert "until a moment ago" in offers(s, 2, 0)
