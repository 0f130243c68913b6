"""A beam search is sized and charged, and no value of its field switches counting off."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from schedsvc_client.testing import FakeScheduler
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_vllm.answers import BadRequestError
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.proxy import Upstream
from schedsvc_vllm.settings import Settings

from tests.waiting import until

from .asgi import Exchange, ask, owner, start
from .test_gate_parts import size
from .test_gate_token_counter import Processor
from .test_usage_truth import STREAMS, WHOLE, Server, upstream_of

VALUES = [True, "false", "yes", 1]
BODIES = {path: body for path, body, _ in WHOLE}
BODIES["/generate_stream"] = BODIES["/generate"]


def asks_for_beams(path: str, value: object, **fields: Any) -> bytes:
    """A body of an endpoint that has the field wherever a server may look for it."""
    field = {"use_beam_search": value}
    body = BODIES[path] | field | fields
    return json.dumps(body | ({"parameters": field} if "generate" in path else {})).encode()


async def end_of(fake: FakeScheduler, server: Server, path: str, body: bytes) -> Any:
    async with upstream_of(server) as url:
        upstream = Upstream(url)
        gate = Gate(upstream, Settings(target=fake.target))
        done = await Exchange(gate, body, path, owner=owner()).run()
        assert done.status == 200, done.answer
        assert gate._runtime is not None
        await gate._runtime.session.flush(5)
        await gate._close()
        upstream.close()
    return fake.books[1].end


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(("path", "_", "answer"), WHOLE, ids=[path for path, *_ in WHOLE])
async def test_a_whole_answer_is_charged_as_the_engine_states(
    fake: FakeScheduler, path: str, _: Any, answer: dict[str, Any], value: object
) -> None:
    server = Server()
    server.pieces = [json.dumps(answer).encode()]
    end = await end_of(fake, server, path, asks_for_beams(path, value))
    told = (end.outcome, end.input_tokens, end.output_tokens)
    assert told == (pb.OUTCOME_COMPLETED, 2_000, 12)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(("path", "events"), STREAMS, ids=[path for path, _ in STREAMS])
async def test_a_stream_is_charged_as_the_engine_states(
    fake: FakeScheduler, path: str, events: list[bytes], value: object
) -> None:
    server = Server()
    server.headers = {"content-type": "text/event-stream"}
    server.pieces = events
    end = await end_of(fake, server, path, asks_for_beams(path, value, stream=True))
    told = (end.outcome, end.input_tokens, end.output_tokens)
    assert told == (pb.OUTCOME_COMPLETED, 2_000, 12)


@pytest.mark.parametrize("value", VALUES)
async def test_inside_vllm_every_step_of_every_beam_counts(
    fake: FakeScheduler, value: object
) -> None:
    """Its client leaves, so no usage is left; 3 beams have made 1,000 tokens each."""
    processor = Processor()
    client = SimpleNamespace(output_processor=processor)
    kept: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/metrics":
            await send(start(404, b"text/plain"))
            return
        await receive()
        for step in range(1_000 if value != "false" else 1):
            for beam in range(3):
                name = f"{beam}-{step}"
                request = SimpleNamespace(request_id=name, prompt_len=7 + step)
                processor.add_request(request, None)
                state = processor.request_states[name]
                state.is_prefilling = False
                state.made.append(step)
                del processor.request_states[name]
        assert gate._runtime is not None
        kept.extend(len(gated.exchange.tally._prompts) for gated in gate._runtime.reports.running)
        assert (await receive())["type"] == "http.disconnect"

    gate = Gate(app, Settings(target=fake.target))
    body = ask(use_beam_search=value, n=3, max_tokens=1_000)
    exchange = Exchange(gate, body, owner=owner(engine_client=client))
    running = asyncio.ensure_future(exchange.run())
    await until(lambda: kept)
    exchange.left.set()
    await running
    assert gate._runtime is not None
    await gate._runtime.session.flush(5)
    await gate._close()
    end = fake.books[1].end
    assert (end.outcome, end.output_tokens) == (
        pb.OUTCOME_CANCELLED, 3_000 if value != "false" else 3,
    )  # fmt: skip
    assert max(kept) < 512  # only the sum is kept for sequences that have ended


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages"])
def test_the_width_of_a_beam_search_is_its_n(path: str, value: object) -> None:
    call = size(path, **BODIES[path] | {"use_beam_search": value, "n": 4, "max_tokens": 20})
    has_n = path != "/v1/messages"
    assert call.n == (4 if has_n or value != "false" else 1)
    assert call.max_output_tokens == 20
    assert call.beams is (value != "false")


@pytest.mark.parametrize("value", ["maybe", 2, [], {}, "null"])
def test_a_value_that_servers_read_differently_is_refused(value: object) -> None:
    with pytest.raises(BadRequestError, match="use_beam_search: must be true or false"):
        size(prompt="x", use_beam_search=value)


async def test_an_operator_can_refuse_it(fake: FakeScheduler) -> None:
    server = Server()
    async with upstream_of(server) as url:
        upstream = Upstream(url)
        gate = Gate(upstream, Settings(target=fake.target, serves_beams=False))
        done = await Exchange(gate, ask(use_beam_search="yes"), owner=owner()).run()
        await gate._close()
        upstream.close()
    assert (done.status, done.error["code"], done.error["param"]) == (
        501, "not_served", "use_beam_search",
    )  # fmt: skip
    assert "SCHEDSVC_BEAM_SEARCH" in done.error["message"]
    assert not fake.admits
    assert not server.bodies
