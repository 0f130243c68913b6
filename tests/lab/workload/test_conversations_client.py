"""Holds conversations with servers: the emulator, and one that misbehaves on request."""

from __future__ import annotations

import asyncio
import csv
import json
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from click.testing import CliRunner, Result

from schedsvc.cli import main
from schedsvc_lab.workload.conversations import Chats, Conversation, Limits, Simulation, Timing
from schedsvc_lab.workload.conversations_client import Fate, Server, ServerError, Talks
from schedsvc_lab.workload.conversations_report import report, write_turns
from schedsvc_lab.workload.record import Message, Record
from schedsvc_lab.workload.tokenizers import ModelTokenizer

from .serving import emulator

QUICK = Timing(rate_per_s=200.0, think_s=0.01, seed=2)


def talk(name: str, *questions: str, tenant: str | None = None) -> Conversation:
    turns = (
        Record(messages=(Message("user", question),), answer=f"recorded {at}", turn=at)
        for at, question in enumerate(questions, 1)
    )
    return Conversation(name, tenant, tuple(turns))


class Fake:
    """Answers as the last question asks: 429, 500, error, cut, hang, or else echoes it."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.hanging = asyncio.Event()

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        question = body["messages"][-1]["content"]
        if question in {"429", "503", "500"}:
            error = {"error": {"code": "slow_down", "type": "rate_limit_error"}}
            return web.json_response(error, status=int(question))
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        events: list[Any] = [
            {"choices": [{"delta": {"role": "assistant"}}]},
            {"choices": [{"delta": {"content": "you said "}}]},
            {"choices": [{"delta": {"content": question}}]},
            {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 3}},
        ]
        if question == "error":
            events[2:] = [{"error": {"code": "server_is_overloaded"}}]
        for event in events:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        if question == "hang":
            self.hanging.set()
            await asyncio.sleep(60)
        if question != "cut":
            await response.write(b"data: [DONE]\n\n")
        return response


@asynccontextmanager
async def fake() -> AsyncIterator[tuple[Fake, str]]:
    made = Fake()
    app = web.Application()
    app.router.add_get("/v1/models", made.models)
    app.router.add_post("/v1/chat/completions", made.chat)
    async with TestServer(app) as server:
        yield made, str(server.make_url("/v1"))


@pytest.mark.parametrize("served", [True, False])
async def test_the_next_turn_holds_what_was_said(served: bool) -> None:
    async with fake() as (server, url):
        talks = Talks(Server(url=url, served=served, api_key="k"), None, QUICK, Limits())
        await talks.run([talk("a", "one", "two", tenant="research"), talk("b", "three")])
    first, second = (
        body["messages"] for body in server.bodies if body["messages"][0]["content"] == "one"
    )
    answer = "you said one" if served else "recorded 1"
    assert first == [{"role": "user", "content": "one"}]
    assert second == [
        *first,
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "two"},
    ]
    assert [headers.get("x-tenant-id") for headers in server.headers].count("research") == 2
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer k"}
    assert {body["max_tokens"] for body in server.bodies} == {128}
    assert not any("min_tokens" in body for body in server.bodies)
    assert [(turn.fate, turn.prompt_tokens, turn.output_tokens) for turn in talks.turns] == [
        (Fate.COMPLETED, 11, 3)
    ] * 3
    assert (talks.started, talks.ended) == (2, 2)


async def test_times_are_as_planned() -> None:
    timing = Timing(rate_per_s=40.0, think_s=0.05, seed=9)
    async with fake() as (_, url):
        talks = Talks(Server(url=url), None, timing, Limits(conversations_max=4))
        await talks.run(talk(str(number), "x", "y", "z") for number in range(100))
    starts = [start_s for start_s, _ in zip(timing.starts(), range(4), strict=False)]
    by_name: dict[str, list[Any]] = {}
    for turn in talks.turns:
        by_name.setdefault(turn.conversation, []).append(turn)
    assert sorted(by_name) == ["0", "1", "2", "3"]
    for number, (_, turns) in enumerate(sorted(by_name.items())):
        assert turns[0].intended_s == starts[number]
        thinking = timing.thinking(number)
        for before, after in pairwise(turns):
            assert after.intended_s == before.end_s + next(thinking)
        assert all(turn.intended_s <= turn.sent_s < turn.first_s < turn.end_s for turn in turns)


@pytest.mark.parametrize(
    ("question", "fate", "reason"),
    [
        ("429", Fate.REFUSED, "429 slow_down"),
        ("503", Fate.REFUSED, "503 slow_down"),
        ("500", Fate.ERROR, "500 slow_down"),
        ("error", Fate.ERROR, "error in the stream: server_is_overloaded"),
        ("cut", Fate.ERROR, "the stream broke off"),
    ],
)
async def test_a_conversation_ends_where_it_fails(question: str, fate: Fate, reason: str) -> None:
    async with fake() as (_, url):
        talks = Talks(Server(url=url), None, QUICK, Limits())
        await talks.run([talk("a", "fine", question, "never asked")])
    assert [turn.fate for turn in talks.turns] == [Fate.COMPLETED, fate]
    assert talks.turns[-1].reason == reason
    told = report(talks, Counter(), complete=True)
    assert (told["turns"], told["completed"], told[fate.value]) == (2, 1, 1)
    assert told["reasons"] == {reason: 1}
    assert told["by_turn"].keys() == {"1"}


async def test_requests_given_up_are_reported(tmp_path: Path) -> None:
    async with fake() as (server, url):
        talks = Talks(Server(url=url), None, QUICK, Limits())
        task = asyncio.create_task(talks.run([talk("a", "fine"), talk("b", "hang")]))
        async with asyncio.timeout(60):
            await server.hanging.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    told = report(talks, Counter(), complete=False)
    assert (told["complete"], told["completed"], told["error"]) == (False, 1, 1)
    assert told["reasons"] == {"unfinished": 1}
    write_turns(talks.turns, tmp_path / "turns.csv")
    with (tmp_path / "turns.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["fate"] for row in rows] == ["completed", "error"]
    assert (rows[1]["end_s"], rows[1]["reason"]) == ("", "unfinished")


async def test_an_interrupted_run_writes_what_there_is(tmp_path: Path) -> None:
    said = [("human", "fine"), ("gpt", "yes"), ("human", "hang")]  # so the first turn has ended
    turns = [{"from": who, "value": value} for who, value in said]
    (tmp_path / "talks.json").write_text(json.dumps([{"id": "0", "conversations": turns}]))
    out = tmp_path / "out"
    async with fake() as (server, url):
        process = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-m",
                "schedsvc",
                "converse",
                "--trace",
                str(tmp_path / "talks.json"),
            ),
            *("--url", url, "--rate", "100", "--out", str(out)),
            stderr=asyncio.subprocess.PIPE,
        )
        await asyncio.wait_for(server.hanging.wait(), 30)
        process.send_signal(signal.SIGINT)
        _, errors = await asyncio.wait_for(process.communicate(), 30)
    assert (process.returncode, errors) == (1, b"interrupted\n")
    told = json.loads((out / "report.json").read_text())
    assert (told["complete"], told["turns"], told["completed"]) == (False, 2, 1)
    assert told["reasons"] == {"unfinished": 1}


async def test_no_server() -> None:
    with pytest.raises(ServerError, match=r"127\.0\.0\.1:1/v1/models: "):
        await Talks(Server(url="http://127.0.0.1:1"), None, QUICK, Limits()).run([talk("a", "x")])
    with pytest.raises(ValueError, match="need a tokenizer"):
        Talks(Server(url="", as_chat=False), None, QUICK, Limits())


@pytest.mark.parametrize("as_chat", [True, False])
async def test_the_emulator_counts_as_the_simulation(
    folders: dict[str, Path], as_chat: bool
) -> None:
    """With recorded answers, the prompts are those of the trace, to the token."""
    chats = Chats(ModelTokenizer.load(folders["unigram"]))
    held = [talk(str(number), *["what now"] * (1 + number % 3)) for number in range(12)]
    limits = Limits(turns_max=2, context_tokens=400)
    asks = Simulation(chats, QUICK, limits).asks(held)
    planned = {(a.conversation, a.turn): (len(a.token_ids), a.output_tokens) for a in asks}
    async with emulator(folders["unigram"]) as http:
        server = Server(url=str(http._base_url), as_chat=as_chat, served=False)
        talks = Talks(server, chats, QUICK, limits)
        await talks.run(held)
    assert {turn.fate for turn in talks.turns} == {Fate.COMPLETED}
    counted = {(t.conversation, t.turn): (t.prompt_tokens, t.output_tokens) for t in talks.turns}
    assert counted == planned
    assert talks.cut == {"conversations at the limit of turns": 4}


def converse(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["converse", "--trace", *map(str, arguments)])


async def test_the_command(folders: dict[str, Path], tmp_path: Path) -> None:
    said = [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}]
    file = tmp_path / "talks.json"
    file.write_text(json.dumps([{"id": str(n), "conversations": said * 2} for n in range(5)]))
    out = tmp_path / "out"
    quick = ("--rate", 100, "--think", 0.01, "--tokenizer", folders["unigram"])
    async with emulator(folders["unigram"]) as http:
        where = ("--url", http._base_url, "--out", out)
        result = await asyncio.to_thread(converse, file, *where, *quick)
        assert result.exit_code == 0, result.output
        assert "5 conversations, 10 turns: 10 completed, 0 refused, 0 error" in result.output
        told = json.loads((out / "report.json").read_text())
        assert (told["complete"], told["turns"], told["by_turn"]["2"]["answered"]) == (True, 10, 5)
        assert len((out / "turns.csv").read_text().splitlines()) == 11
        wrong = await asyncio.to_thread(converse, file, *where, *quick, "--model", "x", "--json")
        assert wrong.exit_code == 1
        assert json.loads(wrong.stdout)["reasons"] == {"404 NotFoundError": 5}


def test_the_command_without_a_server(tmp_path: Path) -> None:
    file = tmp_path / "talks.json"
    file.write_text("[]")
    gone = converse(file, "--url", "http://127.0.0.1:1")
    assert gone.exit_code == 1
    assert "http://127.0.0.1:1/v1/models: " in gone.output
    needs = converse(file, "--url", "http://127.0.0.1:1", "--backend", "openai")
    assert needs.exit_code == 2
    assert "--tokenizer is missing" in needs.output
