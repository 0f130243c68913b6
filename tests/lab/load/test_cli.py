import asyncio
import csv
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from click.testing import CliRunner, Result

from schedsvc.cli import main

from .fake import Answer, Fake, obey, serving

TRACE = "arrival_s,client,prompt_tokens,output_tokens\n0,hog,20,3\n0.01,quiet,5,2\n9,hog,1,1\n"


class Thread:
    """A fake server in a separate thread, since the command runs its own event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.contexts: list[Any] = []

    def serve(self, answer: Answer = obey) -> Fake:
        context = serving(answer)
        self.contexts.append(context)
        return asyncio.run_coroutine_threadsafe(context.__aenter__(), self.loop).result(10)

    def close(self) -> None:
        for context in self.contexts:
            ending = context.__aexit__(None, None, None)
            asyncio.run_coroutine_threadsafe(ending, self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a busy machine that delays the generator."""
    for module in ("report", "result"):
        monkeypatch.setattr(f"schedsvc_lab.load.{module}.CLIENT_LAG_MS_MAX", 60_000.0)


@pytest.fixture
def server() -> Iterator[Thread]:
    thread = Thread()
    try:
        yield thread
    finally:
        thread.close()


def run(tmp_path: Path, url: str, *options: str, trace: str = TRACE) -> Result:
    path = tmp_path / "trace.csv"
    path.write_text(trace)
    return CliRunner().invoke(main, ["load", "--url", url, "--trace", str(path), *options])


def test_json_and_files(tmp_path: Path, server: Thread) -> None:
    out = tmp_path / "deep" / "out"
    fake = server.serve()
    result = run(tmp_path, fake.url, "--duration", "1", "--json", "--out", str(out))
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report == json.loads((out / "result.json").read_text())
    assert report["tenants"]["hog"]["total_output_tokens"] == 3
    assert report["interrupted"] is False
    assert (out / "load.png").read_bytes().startswith(b"\x89PNG")
    with (out / "requests.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["tenant"], row["fate"], row["prompt_tokens"]) for row in rows] == [
        ("hog", "completed", "20"),
        ("quiet", "completed", "5"),
    ]


def test_the_table_for_a_person(tmp_path: Path, server: Thread) -> None:
    result = run(tmp_path, server.serve().url, "--duration", "1")
    assert result.exit_code == 0, result.output
    assert "hog" in result.output
    assert "generator: lag p99" in result.output
    assert not [line for line in result.output.splitlines() if line.endswith(" ")]


def test_any_form_with_times_and_lengths(tmp_path: Path, server: Thread) -> None:
    trace = (
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,"
        "Log Type\n0,1,1,GPT-4,20,3,23,API log\n0,1,1,GPT-4,9,0,9,API log\n"
    )
    fake = server.serve()
    result = run(tmp_path, fake.url, "--json", "--tenant", "burst", trace=trace)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["tenants"]["burst"]["total_output_tokens"] == 3
    assert "1 records left out: failed: 0 response tokens" in result.stderr
    conversations = '[{"conversations": [{"from": "human", "value": "x"}]}]'
    result = run(tmp_path, fake.url, trace=conversations)
    assert result.exit_code == 1
    assert "trace.csv:1:arrival_s: no arrival time: this trace cannot be replayed" in result.output


def test_an_api_key_file(tmp_path: Path, server: Thread) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("hog: sk-1\n")
    fake = server.serve()
    options = ("--duration", "1", "--api-keys", str(keys), "--tenant-header", "")
    assert run(tmp_path, fake.url, *options).exit_code == 0
    hog = [headers for headers in fake.headers if headers.get("authorization") == "Bearer sk-1"]
    assert len(hog) == 4  # three of warm-up
    assert all("x-tenant-id" not in headers for headers in fake.headers)


def test_errors_make_the_command_fail(tmp_path: Path, server: Thread) -> None:
    async def reject(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(body["prompt"]) == 5:
            return web.json_response({"error": {"code": "bad"}}, status=400)
        return await obey(request, body)

    result = run(tmp_path, server.serve(reject).url, "--duration", "1")
    assert result.exit_code == 1
    assert "1 requests ended in an error" in result.output
    assert "quiet errors: 1 x 400 bad" in result.output


@pytest.mark.parametrize(
    ("options", "trace", "message"),
    [
        ((), "client\n", "trace.csv:1:header: column missing"),
        ((), TRACE + "x,y\n", "trace.csv:5:arrival_s: not a number of seconds: 'x'"),
        (("--rate-scale", "0"), TRACE, "--rate-scale"),
        (("--duration", "1"), TRACE.replace("\n0", "\n5"), "no request arrives within --duration"),
    ],
)
def test_bad_input_is_named(
    tmp_path: Path, options: tuple[str, ...], trace: str, message: str
) -> None:
    result = run(tmp_path, "http://127.0.0.1:9", *options, trace=trace)
    assert result.exit_code != 0
    assert message in result.output


@pytest.mark.parametrize("text", ["- a\n", "hog: [1]\n", "hog: {\n"])
def test_a_bad_key_file(tmp_path: Path, text: str) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(text)
    result = run(tmp_path, "http://127.0.0.1:9", "--api-keys", str(keys))
    assert result.exit_code != 0
    assert "--api-keys" in result.output
    assert "keys.yaml" in result.output


def test_an_unreachable_url(tmp_path: Path) -> None:
    result = run(tmp_path, "http://127.0.0.1:9")
    assert result.exit_code == 1
    assert "http://127.0.0.1:9" in result.output
    result = run(tmp_path, "127.0.0.1:9")
    assert "--url" in result.output


def test_goals_are_given_as_vllm_takes_them(tmp_path: Path, server: Thread) -> None:
    options = ("--duration", "1", "--json", "--goodput", "ttft:60000", "tpot:50000", "--detail")
    result = run(tmp_path, server.serve().url, *options, "--percentiles", "25,99.9")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["request_goodput"] == pytest.approx(2 / report["duration"])
    assert {"p25_ttft_ms", "p99.9_itl_ms", "p99_e2el_ms"} <= set(report)
    assert report["output_lens"] == [3, 2]


def test_headers_and_extra_fields(tmp_path: Path, server: Thread) -> None:
    headers = tmp_path / "headers.yaml"
    headers.write_text("hog: {X-Team: blue, x-n: 1}\n")
    fake = server.serve()
    options = ("--duration", "1", "--headers-of", str(headers), "--header", "X-All: yes")
    result = run(tmp_path, fake.url, *options, "--extra-body", '{"temperature": 0.5}')
    assert result.exit_code == 0, result.output
    assert {headers["x-all"] for headers in fake.headers} == {"yes"}
    teams = {(h["x-tenant-id"], h.get("x-team"), h.get("x-n")) for h in fake.headers}
    assert teams == {("hog", "blue", "1"), ("quiet", None, None)}
    assert {body["temperature"] for body in fake.bodies} == {0.5}


def test_a_number_of_requests_in_a_closed_loop(tmp_path: Path, server: Thread) -> None:
    options = ("--concurrency", "1", "--requests", "2", "--warmup", "0", "--json", "--label", "x")
    result = run(tmp_path, server.serve().url, *options)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["loop"], report["sent"], report["label"]) == ("closed", 2, "x")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--goodput", "ttft"), "--goodput"),
        (("--goodput", "speed:3"), "one of ttft, tpot, e2el"),
        (("--goodput", "ttft:-1"), "--goodput"),
        (("--goodput", "ttft:nan"), "--goodput"),
        (("--percentiles", "50,101"), "--percentiles"),
        (("--percentiles", "x"), "--percentiles"),
        (("--header", "nothing"), "'NAME: VALUE'"),
        (("--extra-body", "{"), "--extra-body"),
        (("--extra-body", "[1]"), "must be a JSON object"),
        (("--tokenizer", "no/such/folder"), "--tokenizer"),
        (("--backend", "telepathy"), "'openai', 'openai-chat', 'generate_stream'"),
        (("--backend", "openai-chat", "--model", "m"), "--tokenizer DIR"),
        (("--concurrency", "0"), "--concurrency"),
        (("--ramp", "-1"), "--ramp"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    result = run(tmp_path, "http://127.0.0.1:9", *options)
    assert result.exit_code != 0
    assert message in result.output


@pytest.mark.parametrize("text", ["hog: 3\n", "- a\n", "hog: {\n"])
def test_a_bad_file_of_headers(tmp_path: Path, text: str) -> None:
    headers = tmp_path / "headers.yaml"
    headers.write_text(text)
    result = run(tmp_path, "http://127.0.0.1:9", "--headers-of", str(headers))
    assert result.exit_code != 0
    assert "--headers-of" in result.output
    assert "headers.yaml" in result.output
