"""Tests the reasons for which a request waits: who may ask, and the words."""

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result
from schedsvc_client.aio import AsyncScheduler
from schedsvc_client.v1 import explain_pb2 as pb
from schedsvc_client.v1 import quota_pb2, scheduler_pb2
from schedsvc_client.v1.explain_pb2_grpc import ExplainServiceStub
from schedsvc_client.v1.scheduler_pb2_grpc import SchedulerServiceStub

from schedsvc._core import WAITS
from schedsvc.cli import main
from schedsvc.server import Server
from schedsvc.service.explanation_text import sentences
from schedsvc.text.reason_words import WAIT_WORDS
from tests.waiting import until

from .conftest import POOL, ask, open_channel, serving, token_of, totals

OPERATORS = [{"tcp": "127.0.0.1:0", "operate": True}]
SHIM, OTHER = "correct-horse-battery", "another-horse-battery"
AUTH = {"principals": [token_of("shim", SHIM), token_of("other", OTHER)]}


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


async def explained(target: str, request_id: str, metadata: Any = ()) -> list[pb.RequestStory]:
    async with open_channel(target) as channel:
        request = pb.ExplainRequest(request_id=request_id)
        answer = await ExplainServiceStub(channel).Explain(request, metadata=metadata)
        return list(answer.requests)


async def request_ids(target: str, metadata: Any = ()) -> list[str]:
    async with open_channel(target) as channel:
        ask_for = ExplainServiceStub(channel).ListRequestIds
        return list((await ask_for(pb.ListRequestIdsRequest(), metadata=metadata)).request_ids)


def queued(server: Server) -> int:
    return totals(server)["queued"]


async def wait_for_two(server: Server, metadata: Any = ()) -> tuple[grpc.aio.Channel, list[Any]]:
    """Queue one request of each tenant behind one request that fills the pool."""
    channel = open_channel(server.targets[0])
    stub = SchedulerServiceStub(channel)
    await stub.Admit(ask(1_500, request_id="runs"), metadata=metadata)
    calls = []
    for name, tenant in (("first", "b"), ("it", "a")):
        request = ask(1_000, request_id=name, tenant=tenant)
        calls.append(stub.Admit(request, metadata=metadata))
        await until(lambda: queued(server) == len(calls), "it waits")
    return channel, calls


def run(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


def test_every_reason_has_words() -> None:
    names = [name.removeprefix("WAIT_REASON_") for name, _ in pb.WaitReason.items()]
    assert [name for name in names if name not in WAIT_WORDS] == []
    words = [WAIT_WORDS[name] for name in names[1:]]
    assert len(set(words)) == len(words)


def test_reasons_are_numbered_as_in_the_core() -> None:
    names = {n: name.removeprefix("WAIT_REASON_") for name, n in pb.WaitReason.items()}
    ours = {n: name for n, name in enumerate(WAITS) if name}
    assert ours == {n: name for n, name in names.items() if n}


async def test_a_request_that_waits_is_explained() -> None:
    async with serving(listeners=OPERATORS) as server:
        channel, calls = await wait_for_two(server)
        (story,) = await explained(server.targets[0], "it")
        assert (story.tenant, story.state) == ("a", pb.REQUEST_STATE_QUEUED)
        (pool,) = story.pools
        assert (pool.next_tenant, pool.reason) == ("b", pb.WAIT_REASON_KV)
        assert story.place.reason == pb.WAIT_REASON_TURN
        assert "flow b goes first" in story.message
        (story,) = await explained(server.targets[0], "first")
        assert story.pools[0].is_next
        assert story.message.count("It is next; pool pool needs KV cache: with its") == 1
        (story,) = await explained(server.targets[0], "runs")
        assert story.state == pb.REQUEST_STATE_LIVE
        assert story.message.startswith("It runs in pool pool since")
        assert await explained(server.targets[0], "nobody asked for it") == []
        for call in calls:
            call.cancel()
        await channel.close()


async def test_others_hear_nothing(tmp_path: Path) -> None:
    listeners = [{"tcp": "127.0.0.1:0"}, {"unix": str(tmp_path / "s"), "auth": "none"}]
    async with serving(listeners=listeners, auth=AUTH) as server:
        port, socket = server.targets
        channel, calls = await wait_for_two(server, bearer(SHIM))
        (story,) = await explained(port, "it", bearer(SHIM))
        assert (story.pools[0].next_tenant, story.pools[0].is_next) == ("", False)
        assert "another flow goes first" in story.message
        assert await explained(port, "it", bearer(OTHER)) == []
        assert await request_ids(port, bearer(SHIM)) == ["it", "first", "runs"]
        assert await request_ids(port, bearer(OTHER)) == []
        assert await request_ids(socket) == ["it", "first", "runs"]
        (story,) = await explained(socket, "it")  # its file mode decides who operates
        assert story.pools[0].next_tenant == "b"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await explained(port, "it")
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await request_ids(port)
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        for call in calls:
            call.cancel()
        await channel.close()


@pytest.mark.parametrize("stats", ["own", "all"])
async def test_figures_of_a_pool_are_for_callers_that_see_it(stats: str) -> None:
    """Such a caller may ask for the pool, and not offer it; Stats and refusals are alike."""
    own = token_of("alice", SHIM, pools=[], tenants=["*"], stats=stats)
    async with serving(auth={"principals": [own, AUTH["principals"][1]]}) as server:
        channel, calls = await wait_for_two(server, bearer(SHIM))
        (first,) = await explained(server.targets[0], "first", bearer(SHIM))
        (second,) = await explained(server.targets[0], "it", bearer(SHIM))
        seen = stats == "all"
        for story in (first, second):
            (pool,) = story.pools
            assert (pool.pool, pool.reason) == ("pool", pb.WAIT_REASON_KV)
            figures = (pool.need_tokens, pool.load_tokens, pool.load_max_tokens)
            assert all(figures) if seen else not any(figures)
            place = (story.place.work_ahead_tokens, story.place.flows_ahead)
            assert (min(place) >= 0) if seen else (place == (-1, -1))
        assert first.pools[0].is_next
        assert ("tokens it would hold" in first.message) == seen
        assert "It is next; pool pool needs KV cache" in first.message
        assert (second.pools[0].next_lead_tokens > 0) == seen
        words = ("--target", server.targets[0], "--token-env", "T")
        shown = await asyncio.to_thread(
            CliRunner().invoke, main, ["why", "first", *words], env={"T": SHIM}
        )
        assert ("1,600" in shown.output, "work before it" in shown.output) == (seen, seen)
        for call in calls:
            call.cancel()
        await channel.close()


@pytest.mark.parametrize("stats", ["own", "all"])
async def test_limits_of_a_pool_are_for_callers_that_see_it(stats: str) -> None:
    """The limits are the quota of its model, and the places of its sessions of agents."""
    own = token_of("alice", SHIM, pools=[], tenants=["*"], stats=stats)
    limits: dict[str, Any] = {
        "pools": [{**POOL, "name": name} for name in ("metered", "agents")],
        "models": [{"name": "m", "pools": ["metered"], "quota": {"requests_per_minute": 1}}],
        "pool_limits": [{"pools": ["agents"], "sessions_max_tokens": 200}],
    }
    async with (
        serving(auth={"principals": [own]}, **limits) as server,
        open_channel(server.targets[0]) as channel,
    ):
        stub, calls = SchedulerServiceStub(channel), []
        for name, fields in {"quota": {"pools": ["metered"]}, "cap": {"pools": ["agents"]}}.items():
            for k in range(2):
                more = {"session": f"s{k}"} if name == "cap" else {}
                request = ask(100, request_id=f"{name}-{k}", **fields, **more)
                calls.append(stub.Admit(request, metadata=bearer(SHIM)))
                if k == 0:
                    await calls[-1]
        await until(lambda: queued(server) == 2, "the second of each waits")
        (quota,) = await explained(server.targets[0], "quota-1", bearer(SHIM))
        (cap,) = await explained(server.targets[0], "cap-1", bearer(SHIM))
        seen = stats == "all"
        assert quota.place.reason == pb.WAIT_REASON_MODEL_QUOTA
        assert quota.HasField("limit") == seen
        assert ("requests a minute" if seen else "waits for the quota of its model") in (
            quota.message
        )
        held = cap.session.cap
        assert (held.pool, held.needs_tokens) == ("agents", 116)
        figures = (held.active_tokens, held.active_sessions, held.limit_tokens)
        assert figures == ((116, 1, 200) if seen else (0, 0, 0))
        assert ("hold 116 of 200" if seen else "there leave less") in cap.message
        for call in calls:
            call.cancel()


async def test_an_id_that_two_clients_chose_shows_both(tmp_path: Path) -> None:
    """Both are shown to callers that may see them."""
    listeners = [{"tcp": "127.0.0.1:0"}, {"unix": str(tmp_path / "s"), "auth": "none"}]
    async with (
        serving(listeners=listeners, auth=AUTH) as server,
        open_channel(server.targets[0]) as channel,
    ):
        stub, (port, socket) = SchedulerServiceStub(channel), server.targets
        for token, tenant in ((SHIM, "a"), (OTHER, "b")):
            request = ask(10, request_id=f"gate-{tenant}", tenant=tenant)
            request.client_request_id = "mine"
            await stub.Admit(request, metadata=bearer(token))
        for token, tenants in ((SHIM, ["a"]), (OTHER, ["b"])):
            assert [s.tenant for s in await explained(port, "mine", bearer(token))] == tenants
        assert [story.tenant for story in await explained(socket, "mine")] == ["b", "a"]
        for more, words in (
            (
                (),
                (
                    "1 of 2 requests with this id:\nIt runs",
                    "2 of 2 requests with this id:\nIt runs",
                ),
            ),
            (("--tenant", "a"), ("It runs", "tenant a")),
        ):
            shown = await asyncio.to_thread(run, "why", "mine", "--target", socket, *more)
            assert all(word in shown.output for word in words), shown.output
        assert "tenant b" not in shown.output


async def test_why_says_it_in_a_sentence_first() -> None:
    async with serving(listeners=OPERATORS) as server:
        target = server.targets[0]
        channel, calls = await wait_for_two(server)
        shown = await asyncio.to_thread(run, "why", "it", "--target", target)
        assert shown.exit_code == 0, shown.output
        assert shown.output.startswith("It has waited for ")
        for part in (
            "flow b goes first",
            "its turn",
            "KV cache",
            "time to first token",
            "1,000 tokens of",
        ):
            assert part in shown.output
        plain = await asyncio.to_thread(run, "why", "it", "--target", target, "--json")
        story = json.loads(plain.output)["requests"][0]
        assert story["place"]["reason"] == "WAIT_REASON_TURN"
        unknown = await asyncio.to_thread(run, "why", "it", "--tenant", "b", "--target", target)
        assert unknown.exit_code == 1
        assert "nothing is known of request 'it'" in unknown.output
        for call in calls:
            call.cancel()
        await channel.close()
    gone = await asyncio.to_thread(run, "why", "it", "--target", target)
    assert gone.exit_code == 1
    assert target in gone.output


async def test_every_client_learns_why_a_request_was_refused() -> None:
    async with serving(listeners=OPERATORS) as server:
        target = server.targets[0]
        async with open_channel(target) as channel:
            await SchedulerServiceStub(channel).Admit(ask(100_000, request_id="it", tenant="a"))
        async with AsyncScheduler(target) as client:
            (story,) = (await client.explain("it", "a")).requests
            assert not (await client.explain("it", "b")).requests
        assert story.state == pb.REQUEST_STATE_REFUSED
        assert story.outcome == scheduler_pb2.OUTCOME_REJECTED_TOO_LARGE
        assert (story.prompt_tokens, story.wait_told_ms) == (100_000, -1)
        shown = await asyncio.to_thread(run, "why", "it", "--target", target, "--watch", "0.1")
        assert shown.exit_code == 0, shown.output
        assert "It was refused" in shown.output
        assert "larger than any pool" in shown.output


async def test_why_finds_an_id_in_the_form_of_a_body(server: Server) -> None:
    target = server.targets[0]
    async with open_channel(target) as channel:
        stub = SchedulerServiceStub(channel)
        for request_id in ("it-1", "chatcmpl-own"):
            await stub.Admit(ask(100_000, request_id=request_id))
    for given in ("it-1", "cmpl-it-1", "chatcmpl-it-1", "embd-it-1", "chatcmpl-own"):
        shown = await asyncio.to_thread(run, "why", given, "--target", target, "--json")
        assert shown.exit_code == 0, shown.output
        (story,) = json.loads(shown.output)["requests"]
        assert story["state"] == "REQUEST_STATE_REFUSED"
    for given in ("xcmpl-it-1", "cmpl-", "own"):
        unknown = await asyncio.to_thread(run, "why", given, "--target", target)
        assert unknown.exit_code == 1
        assert f"nothing is known of request {given!r}" in unknown.output


@pytest.mark.parametrize(
    "words", [("--watch", "it"), ("it", "--watch"), ("--watch", "0.1", "it"), ("--watch=0.1", "it")]
)
async def test_why_watch_takes_an_id_or_seconds(server: Server, words: tuple[str, ...]) -> None:
    target = server.targets[0]
    async with open_channel(target) as channel:
        await SchedulerServiceStub(channel).Admit(ask(100_000, request_id="it"))
    shown = await asyncio.to_thread(run, "why", "--target", target, *words)
    assert shown.exit_code == 0, shown.output
    assert "It was refused" in shown.output


async def test_watching_ends_with_the_request(server: Server) -> None:
    target = server.targets[0]
    async with open_channel(target) as channel:
        stub = SchedulerServiceStub(channel)
        granted = await stub.Admit(ask(10, request_id="it"))
        watch = asyncio.to_thread(run, "why", "it", "--target", target, "--json", "--watch", "0.1")
        watching = asyncio.create_task(watch)
        await asyncio.sleep(0.3)
        complete = {"lease_id": granted.grant.lease_id, "pool_epoch": granted.grant.pool_epoch}
        await stub.Complete(_completing(**complete))
        shown = await asyncio.wait_for(watching, 30)
    states = [json.loads(line)["requests"][0]["state"] for line in shown.output.splitlines()]
    assert states[-1] == "REQUEST_STATE_ENDED"


def _completing(**fields: int) -> Any:
    return scheduler_pb2.CompleteRequest(**fields)


QUEUED: dict[str, Any] = {
    "state": pb.REQUEST_STATE_QUEUED, "queue_duration_us": 1_500_000, "wait_left_ms": 2_000,
    "wait_error_ms": 300, "request_class": "default",
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"place": {"reason": 1, "queue_ahead": 1}}, "1 of its own flow is before it."),
        ({"place": {"reason": 1, "queue_ahead": 1_025}}, "more than 1,024 of its own flow are"),
        (
            {"place": {"reason": 1}, "session": {"sessions_ahead": 1, "requests_ahead": 2}},
            "1 other session of its tenant goes before its own, in which 2 requests are before it.",
        ),
        (
            {"place": {"reason": 1}, "session": {"sessions_ahead": 33, "requests_ahead": 1}},
            "more than 32 other sessions of its tenant go before its own, in which 1 request is",
        ),
        (
            {
                "place": {"reason": 20},
                "pools": [{"pool": "p", "reason": 6}],  # its engine is full, too
                "session": {
                    "cap": {
                        "pool": "p",
                        "needs_tokens": 1_100,
                        "active_tokens": 2_000,
                        "active_sessions": 2,
                        "limit_tokens": 2_500,
                        "sessions_ahead": 3,
                        "next_in_ms": 12_000,
                    }
                },
            },
            "Its session waits to begin in pool p: it needs 1,100 tokens, and the active sessions"
            " there (2) hold 2,000 of 2,500 (sessions_max_tokens). Sessions of its tenant that wait"
            " before it: 3. The first of all that wait there begins in 12.0 s at the latest.",
        ),
        (
            {
                "place": {"reason": 2},
                "limit": {
                    "quota": "team",
                    "kind": quota_pb2.LIMIT_KIND_INPUT_TOKENS_PER_MINUTE,
                    "limit": 600,
                    "remaining": 100,
                    "needs": 300,
                    "due_ms": 20_000,
                },
            },
            "It needs 300 of quota team of 600 input tokens a minute, of which 100 are left; it"
            " has enough in 20.0 s.",
        ),
        (
            {"place": {"reason": 2}, "limit": {"behind_others": True}},
            "Other requests wait for its tenant's quota, too, and precede it.",
        ),
        (
            {"place": {"reason": 2}, "limit": {"kind": 7, "limit": 4, "due_ms": -1}},
            "As many run at once as its tenant's quota allows (4)",
        ),
        (
            {"place": {"reason": 3}, "limit": {"limit": 600, "due_ms": 500}},
            "Its tenant is beyond its share of 600 tokens a minute; it has some again in 500 ms.",
        ),
        ({"place": {"reason": 8}}, "No pool that it may go to is connected."),
        (
            {
                "place": {"reason": 4},
                "pools": [
                    {
                        "pool": "p",
                        "reason": 6,
                        "next_tenant": "x",
                        "next_class": "high",
                        "next_lead_tokens": 0,
                    }
                ],
            },
            "In pool p flow x, of class high goes first, and the pool runs as many",
        ),
        (
            {
                "place": {"reason": 4},
                "pools": [
                    {
                        "pool": "p",
                        "reason": 6,
                        "next_tenant": "x",
                        "next_class": QUEUED["request_class"],
                        "next_lead_tokens": 70,
                        "level": 2,
                        "own_group": "group:sales",
                        "next_group": "group:lab",
                    }
                ],
            },
            "In pool p group lab (flow x in it), at level 2 of the groups beside group sales, goes"
            " first by 70 tokens of service, and the pool runs as many",
        ),
        (
            {"place": {"reason": 4, "evicted_in_ms": 2_001}},
            "It is expected to run in 2.0 s (give or take 300 ms); it gives up in 2.0 s.",
        ),
        (
            {"place": {"reason": 4, "evicted_in_ms": 1_800}},
            "It will probably not be served: its turn is expected in 2.0 s (give or take 300 ms),"
            " and it gives up in 1.8 s.",
        ),
        (
            {"place": {"reason": 4, "evicted_in_ms": 1_000}},
            "It will not be served: its turn is expected in 2.0 s (give or take 300 ms), and it"
            " gives up in 1.0 s.",
        ),
    ],
)
def test_each_reason_has_its_sentence(fields: dict[str, Any], said: str) -> None:
    text = sentences(pb.RequestStory(**QUEUED, **fields))
    assert text.startswith("It has waited for 1.5 s. ")
    assert said in text


def test_every_refusal_has_words() -> None:
    state, ended = pb.REQUEST_STATE_REFUSED, scheduler_pb2.OUTCOME_COMPLETED
    for name, outcome in scheduler_pb2.Outcome.items():
        if scheduler_pb2.OUTCOME_GRANTED < outcome < ended and "TENANT" not in name:
            story = pb.RequestStory(state=state, outcome=outcome, state_ms=1_500)
            text = sentences(story)
            assert text.startswith("It was refused 1.5 s ago: ")
            assert name.removeprefix("OUTCOME_").lower() not in text
    story.queue_duration_us = 30_000_000
    story.waited.add(reason=pb.WAIT_REASON_KV, time_us=20_000_000)
    assert "after 30.0 s in the queue, most of it for KV (20.0 s): " in sentences(story)


def test_every_reason_of_a_pool_has_words() -> None:
    for reason in pb.WaitReason.values():
        place = {"reason": reason}
        pools = [{"pool": "p", "reason": reason, "is_next": True}]
        text = sentences(pb.RequestStory(**QUEUED, place=place, pools=pools))
        assert "has no room" not in text or not reason, pb.WaitReason.Name(reason)
