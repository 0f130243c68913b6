import asyncio
import json

import pytest

from schedsvc_lab.emulator.app import Emulator
from schedsvc_lab.emulator.counts import CountsFile
from schedsvc_lab.emulator.settings import EmulatorSettings
from schedsvc_lab.engine import load_profile

BODY = {"prompt": [5] * 30, "max_tokens": 12, "ignore_eos": True}


@pytest.mark.parametrize("stream", [False, True])
async def test_counts_are_written_before_they_are_sent(tmp_path, stream):
    path = tmp_path / "counts"
    counts = CountsFile(path)
    profile = load_profile("tiny-cpu")
    app = Emulator(EmulatorSettings(profile, profile.config(), "m"), counts=counts).app
    sent, written = [], []
    body = json.dumps({**BODY, "stream": stream}).encode()
    inbox = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        return inbox.pop() if inbox else await _never()

    async def send(message):
        sent.append(message)
        if message["type"] == "http.response.body":
            written.append([json.loads(line) for line in path.read_text().splitlines()])

    headers = [(b"x-request-id", b"r"), (b"traceparent", b"00-a-b-01")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    async with app.router.lifespan_context(app):
        await app({**scope, "query_string": b"", "root_path": ""}, receive, send)
    counts.close()
    assert [len(lines) for lines in written] == list(range(1, len(written) + 1))
    last = written[-1][-1]
    assert last.pop("at_ns") > 0
    assert last.pop("request_id").endswith("r")
    assert last == {
        "traceparent": "00-a-b-01",
        "input_tokens": 30,
        "cached_input_tokens": 0,
        "output_tokens": 12,
        "done": True,
    }
    assert [line["done"] for line in written[-1][:-1]] == [False] * (len(written) - 1)


async def _never():
    await asyncio.Event().wait()
