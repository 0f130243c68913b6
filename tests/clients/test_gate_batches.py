"""Tests endpoints that make no tokens (embeddings, scores, classes) and audio: size and charge."""

from __future__ import annotations

import io
import json
import wave
from types import SimpleNamespace
from typing import Any

import pytest
from schedsvc_client.testing import FakeScheduler
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_vllm.answers import BadRequestError
from schedsvc_vllm.audio_routes import PARTS_MAX, parse_form, seconds_of
from schedsvc_vllm.estimate import MESSAGE_TOKENS, PART_TOKENS
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.proxy import Upstream
from schedsvc_vllm.settings import PoolSettings, Settings

from .asgi import Exchange, owner, start
from .test_gate_routes import TEXT, TOKENS, Answering, gates
from .test_gate_token_counter import Processor
from .test_vllm_proxy import Server, behind, started

__all__ = ["behind", "gates"]
SAID = [{"role": "user", "content": TEXT}]
ONE = MESSAGE_TOKENS + TOKENS
PAIR = MESSAGE_TOKENS + 2 * TOKENS
IMAGE = {"type": "image_url", "image_url": {"url": "data:..."}}
USAGE = {"usage": {"prompt_tokens": 9, "total_tokens": 9}}
# As an embedding of many dimensions: were it text, it would be thousands of tokens.
VECTOR = {"data": [{"embedding": [0.125] * 4_096}]}


@pytest.mark.parametrize(
    ("path", "body", "sizes", "is_exact"),
    [
        ("/v1/embeddings", {"input": TEXT}, [TOKENS], False),
        ("/v1/embeddings", {"input": [TEXT, TEXT * 2]}, [TOKENS, 2 * TOKENS], False),
        ("/v1/embeddings", {"input": [1, 2, 3]}, [3], True),
        ("/v1/embeddings", {"input": [[1, 2, 3], [4] * 50]}, [3, 50], True),
        ("/v1/embeddings", {"input": [[1] * 5_000, [2]]}, [1_023, 1], True),
        ("/v1/embeddings", {"input": [1] * 80, "truncate_prompt_tokens": 7}, [7], True),
        ("/v1/embeddings", {"messages": SAID}, [ONE], False),
        ("/pooling", {"input": [[1, 2], [3]]}, [2, 1], True),
        ("/pooling", {"data": {"image": "x" * 85}}, [29], False),
        ("/classify", {"input": [TEXT]}, [TOKENS], False),
        ("/score", {"text_1": TEXT, "text_2": [TEXT, TEXT * 2]}, [PAIR, PAIR + TOKENS], False),
        ("/v1/score", {"text_1": [TEXT, TEXT], "text_2": [TEXT, TEXT]}, [PAIR] * 2, False),
        ("/score", {"queries": TEXT, "documents": TEXT}, [PAIR], False),
        ("/score", {"data_1": {"content": [IMAGE]}, "data_2": TEXT}, [ONE + PART_TOKENS], False),
        ("/rerank", {"query": TEXT, "documents": [TEXT] * 3}, [PAIR] * 3, False),
        ("/v1/rerank", {"query": TEXT, "documents": [{"text": TEXT}]}, [PAIR], False),
        ("/v2/rerank", {"query": TEXT, "documents": [TEXT], "top_n": 1}, [PAIR], False),
        ("/v2/embed", {"texts": [TEXT, TEXT], "input_type": "x"}, [TOKENS] * 2, False),
        ("/v2/embed", {"images": ["data:..."]}, [PART_TOKENS], False),
        ("/v2/embed", {"inputs": [{"content": [{"type": "text", "text": TEXT}]}]}, [TOKENS], False),
    ],
)
@pytest.mark.parametrize("tells_usage", [True, False])
async def test_batches_are_sized_and_charged_without_output(
    fake: FakeScheduler,
    gates: Any,
    path: str,
    body: dict[str, Any],
    sizes: list[int],
    is_exact: bool,
    tells_usage: bool,
) -> None:
    usage: dict[str, Any] = USAGE
    if path == "/v2/embed":
        usage = {"meta": {"billed_units": {"input_tokens": 9}}}
    app = Answering([json.dumps(VECTOR | (usage if tells_usage else {})).encode()])
    answered = await gates(app, path, body)
    assert answered.status == 200, answered.answer
    admit = fake.admits[0]
    # The context of 1,024 bounds a prompt, so that it and a token fit; the engine judges longer.
    assert list(admit.input_tokens) == [min(size, 1_023) for size in sizes]
    assert (admit.n, admit.max_output_tokens, admit.input_estimated) == (1, 1, not is_exact)
    assert json.loads(app.bodies[0]) == body
    end = fake.books[1].end
    assert (end.outcome, end.output_tokens) == (pb.OUTCOME_COMPLETED, 0)
    assert end.input_tokens == (9 if tells_usage else sum(admit.input_tokens))
    assert answered.answer_headers["x-schedsvc-mode"] == "enforced"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": [[]]}, "input"),
        ("/v1/embeddings", {"input": [1.5]}, "input"),
        ("/v1/embeddings", {"input": ["a"] * 16_385}, "input"),
        ("/score", {"text_1": TEXT}, None),
        ("/score", {"text_1": TEXT, "text_2": []}, "text_2"),
        ("/score", {"text_1": [TEXT] * 2, "text_2": [TEXT] * 3}, "text_1"),
        ("/score", {"text_1": [5], "text_2": [TEXT]}, "text_1"),
        ("/rerank", {"documents": [TEXT]}, None),
        ("/rerank", {"query": TEXT, "documents": [{"title": TEXT}]}, "documents"),
        ("/v2/embed", {"texts": []}, "texts"),
    ],
)
async def test_batches_that_cannot_be_sized_name_the_field(
    fake: FakeScheduler, gates: Any, path: str, body: dict[str, Any], param: str | None
) -> None:
    refused = await gates(Answering([b"{}"]), path, body)
    error = json.loads(refused.answer)
    assert (refused.status, error["error"]["param"]) == (400, param)
    assert fake.admits == []


async def test_short_elements_of_a_batch_count_together(fake: FakeScheduler) -> None:
    """More than may run at once would never be granted; all their tokens are charged."""
    pool = PoolSettings(max_running=4)
    gate = Gate(Answering([json.dumps(USAGE).encode()]), Settings(target=fake.target, pool=pool))
    body = json.dumps({"input": [[1] * 300] * 10}).encode()
    assert (await Exchange(gate, body, "/v1/embeddings", owner=owner()).run()).status == 200
    assert list(fake.admits[0].input_tokens) == [900, 900, 900, 300]
    body = json.dumps({"input": [[1] * 300] * 13}).encode()
    refused = await Exchange(gate, body, "/v1/embeddings", owner=owner()).run()
    assert (refused.status, refused.error["param"]) == (400, "input")
    assert "13 elements have about 3900 tokens" in refused.error["message"]
    assert "Send smaller batches" in refused.error["message"]
    await gate._close()


async def test_a_batch_that_the_app_refuses_costs_nothing(fake: FakeScheduler) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(start(400, b"application/json"))
        await send({"type": "http.response.body", "body": b"{}", "more_body": False})

    gate = Gate(app, Settings(target=fake.target))
    body = json.dumps({"input": [1] * 300}).encode()
    assert (await Exchange(gate, body, "/v1/embeddings", owner=owner()).run()).status == 400
    assert gate._runtime is not None
    await gate._runtime.session.flush(5)
    end = fake.books[1].end
    assert (end.outcome, end.input_tokens) == (pb.OUTCOME_CANCELLED, 0)
    await gate._close()


async def test_a_batch_is_counted_inside_the_engine(fake: FakeScheduler) -> None:
    """Its sequences have no detokenizer, which must not end the counting for all."""
    processor = Processor()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        for number in range(2):
            request = SimpleNamespace(request_id=str(number), prompt_len=4)
            processor.add_request(request, None)
            made = processor.request_states[str(number)]
            made.detokenizer, made.is_prefilling = None, False
        await send(start(200, b"application/json"))
        await send({"type": "http.response.body", "body": b"{}", "more_body": False})

    gate = Gate(app, Settings(target=fake.target))
    engine = owner(engine_client=SimpleNamespace(output_processor=processor))
    body = json.dumps({"input": [[1] * 4] * 2}).encode()
    assert (await Exchange(gate, body, "/v1/embeddings", owner=engine).run()).status == 200
    assert gate._runtime is not None
    await gate._runtime.session.flush(5)
    end = fake.books[1].end
    assert (end.outcome, end.input_tokens, end.output_tokens) == (pb.OUTCOME_COMPLETED, 8, 0)
    assert gate._runtime.counter is not None
    assert gate._runtime.counter.working
    await gate._close()


async def test_the_proxy_gates_batches(fake: FakeScheduler, behind: tuple[Server, str]) -> None:
    async with started(Gate(Upstream(behind[1]), Settings(target=fake.target))) as gate:
        body = json.dumps({"input": [[1, 2], [3]]}).encode()
        assert (await Exchange(gate, body, "/v1/embeddings").run()).status == 200
        assert gate._runtime is not None
        await gate._runtime.session.flush(5)
    assert list(fake.admits[0].input_tokens) == [2, 1]
    # The scripted server claims 5 tokens of output, which an embedding does not have.
    assert (fake.books[1].end.input_tokens, fake.books[1].end.output_tokens) == (7, 0)


# Audio.


def wav(seconds: float, rate: int = 16_000, channels: int = 1) -> bytes:
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(b"\0\0" * int(seconds * rate) * channels)
    return made.getvalue()


def form(sound: bytes, boundary: str = "b", **fields: str) -> bytes:
    parts = [
        f'content-disposition: form-data; name="{name}"\r\n\r\n{value}'.encode()
        for name, value in fields.items()
    ]
    file = b'Content-Disposition: form-data; name="file"; filename="a.wav"\r\n'
    parts.append(file + b"Content-Type: audio/wav\r\n\r\n" + sound)
    mark = f"--{boundary}".encode()
    return b"".join(mark + b"\r\n" + part + b"\r\n" for part in parts) + mark + b"--\r\n"


FORM = {"content-type": "multipart/form-data; boundary=b"}


@pytest.mark.parametrize("task", ["transcriptions", "translations"])
@pytest.mark.parametrize(
    ("sound", "fields", "sizes", "n", "limit"),
    [
        (wav(4), {"max_completion_tokens": "40"}, [201], 1, 40),
        (wav(4, rate=44_100, channels=2), {"max_completion_tokens": "40"}, [201], 1, 40),
        (wav(70), {"max_completion_tokens": "40", "n": "2"}, [984] * 3, 2, 40),
        (b"\xff" * 40_000, {"max_completion_tokens": "40"}, [500], 1, 40),
        (b"\xff" * 40_000, {"prompt": TEXT}, [512], 1, 512),
        (wav(70), {}, [512] * 3, 1, 512),
    ],
)
async def test_audio_is_sized_by_how_long_it_plays(
    fake: FakeScheduler,
    task: str,
    sound: bytes,
    fields: dict[str, str],
    sizes: list[int],
    n: int,
    limit: int,
) -> None:
    app = Answering([b'{"text": "twelve words", "usage": {"type": "duration", "seconds": 4}}'])
    gate = Gate(app, Settings(target=fake.target))
    raw = form(sound, model="whisper", **fields)
    path = f"/v1/audio/{task}"
    done = await Exchange(gate, raw, path, FORM, owner=owner()).run()
    assert done.status == 200, done.answer
    assert app.bodies == [raw]
    admit = fake.admits[0]
    assert (admit.n, admit.max_output_tokens) == (n, limit)
    assert list(admit.input_tokens) == sizes
    assert gate._runtime is not None
    await gate._runtime.session.flush(5)
    end = fake.books[1].end
    assert (end.outcome, end.input_tokens) == (pb.OUTCOME_COMPLETED, sum(sizes))
    assert end.output_tokens == -(-len(app.pieces[0]) // 4)
    await gate._close()


@pytest.mark.parametrize(
    ("raw", "content_type", "status", "part"),
    [
        (b"{}", "application/json", 415, "send multipart/form-data"),
        (form(b"x"), "multipart/form-data", 415, "send multipart/form-data"),
        (form(b"x"), "multipart/form-data; boundary=other", 400, "not whole"),
        (form(b"x")[:-6], FORM["content-type"], 400, "not whole"),
        (form(b""), FORM["content-type"], 400, "file: must be an uploaded file"),
        (form(b"x", file="text"), FORM["content-type"], 400, "file: occurs twice"),
        (form(b"x", n="1", m="2", stream="maybe"), FORM["content-type"], 400, "stream: must be"),
        (form(b"x", n="1", N="2"), FORM["content-type"], 400, "N: is not a field here"),
        (form(b"x", n="many"), FORM["content-type"], 400, "n: must be a whole number"),
        (form(b"x", **{f"f{i}": "" for i in range(PARTS_MAX)}), FORM["content-type"], 400, "more"),
        (form(b"x" * (33 << 20)), FORM["content-type"], 413, "bytes"),
        (
            b"--b\r\ncontent-disposition: form-data\r\n\r\nx\r\n--b--",
            FORM["content-type"],
            400,
            "name",
        ),
        (b"--b\r\nno header\r\n--b--", FORM["content-type"], 400, "no header"),
    ],
)
async def test_forms_that_cannot_be_read_are_refused(
    fake: FakeScheduler, raw: bytes, content_type: str, status: int, part: str
) -> None:
    app = Answering([b"{}"])
    gate = Gate(app, Settings(target=fake.target))
    headers = {"content-type": content_type}
    refused = await Exchange(gate, raw, "/v1/audio/transcriptions", headers, owner=owner()).run()
    assert (refused.status, part in refused.error["message"]) == (status, True), refused.error
    assert app.bodies == fake.admits == []
    await gate._close()


async def test_audio_that_plays_too_long_is_refused(fake: FakeScheduler, gates: Any) -> None:
    slow = bytearray(wav(20))
    slow[24:28] = (8).to_bytes(4, "little")  # samples a second, of two bytes
    gate = Gate(Answering([b"{}"]), Settings(target=fake.target))
    path = "/v1/audio/transcriptions"
    refused = await Exchange(gate, form(bytes(slow)), path, FORM, owner=owner()).run()
    assert (refused.status, refused.error["param"]) == (400, "file")
    assert "plays longer than 8.5 h" in refused.error["message"]
    assert fake.admits == []
    await gate._close()


def test_a_form_is_read_as_written() -> None:
    boundary = "x y"
    raw = b"preamble\r\n" + form(b"a\r\n--b\r\nc", boundary, **{"t[]": "word", "language": "é"})
    parsed = parse_form('Multipart/Form-Data; boundary="x y"', raw)
    assert parsed["language"] == "é"
    assert parsed["file"].size == len(b"a\r\n--b\r\nc")
    with pytest.raises(BadRequestError, match="UTF-8"):
        parse_form(
            "multipart/form-data; boundary=b", form(b"", n="\xff").replace(b"\xc3\xbf", b"\xff")
        )


NAMED = b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.wav"'
REST = b"\r\n\r\n" + b"y" * 9_000 + b"\r\n--b--\r\n"


@pytest.mark.parametrize(
    "raw",
    [
        NAMED + b'\r\n\r\nx\r\n--bX\r\ncontent-disposition: form-data; name="j"' + REST,
        NAMED + b'; name="j"' + REST,
        NAMED + b'\r\nContent-Disposition: form-data; name="j"' + REST,
        NAMED + b"\r\n\r\nx\r\n--b--" + NAMED.replace(b"file", b"j", 1) + REST,
    ],
)
def test_a_form_that_two_parsers_read_differently_is_refused(raw: bytes) -> None:
    """Starlette's parser sees one file of 9,057 bytes in the first, and takes the last name."""
    with pytest.raises(BadRequestError):
        parse_form("multipart/form-data; boundary=b", raw)


@pytest.mark.parametrize("second", ["; boundary=c", " ;BOUNDARY=c", "; boundary*=utf-8''c"])
def test_a_form_with_two_boundaries_is_refused(second: str) -> None:
    """Starlette's parser takes the last."""
    raw = NAMED + REST
    with pytest.raises(BadRequestError, match="two boundaries"):
        parse_form(f"multipart/form-data; boundary=b{second}", raw + raw.replace(b"--b", b"--c"))
    assert parse_form('multipart/form-data; boundary=b; x="; boundary=c"', raw)["file"].size


def test_a_file_with_its_name_in_two_encodings_is_taken() -> None:
    raw = NAMED + b"; filename*=UTF-8''%C3%A4.wav" + REST
    assert parse_form("multipart/form-data; boundary=b", raw)["file"].size == 9_000


def test_seconds_come_from_the_header_or_the_bytes() -> None:
    assert seconds_of(wav(3)) == pytest.approx(3, abs=0.01)
    assert seconds_of(b"\0" * 8_000) == 2
    broken = bytearray(wav(1))
    broken[22:24] = b"\0\0"  # no channels
    assert seconds_of(bytes(broken)) == len(broken) / 4_000
    for size in range(60):
        assert seconds_of(wav(0.1)[:size]) >= 0
