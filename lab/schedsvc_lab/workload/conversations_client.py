"""Holds conversations with an OpenAI-compatible server, as people do.

Each starts at its time, independently of the others. Its next turn is asked after the answer and
the reader's think time; the prompt holds all earlier turns. Nothing is retried: a conversation ends
with the first turn that is refused or fails.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Any

import aiohttp

from schedsvc_lab.workload.conversations import Chats, Conversation, Limits, Timing, output_tokens
from schedsvc_lab.workload.record import Message, Record

REFUSALS = frozenset({429, 503})
_NOT_YET = float("nan")


class ServerError(RuntimeError):
    """The server cannot be used at all."""


class Fate(Enum):
    """Names the outcome of a turn."""

    COMPLETED = "completed"
    REFUSED = "refused"
    ERROR = "error"


@dataclass(slots=True)
class Turn:
    """Records one turn as it went; times in seconds since the start, NaN if it never happened."""

    conversation: str
    turn: int
    intended_s: float
    sent_s: float = _NOT_YET
    first_s: float = _NOT_YET
    end_s: float = _NOT_YET
    fate: Fate = Fate.ERROR
    reason: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Says where conversations are held, and how.

    With `as_chat` the messages are sent, else the prompt's token ids, which needs a tokenizer. With
    `served` the history holds the server's answers, else the recorded ones. The tenant is sent in
    `tenant_header`, "" for none.
    """

    url: str
    model: str = ""
    as_chat: bool = True
    served: bool = True
    tenant_header: str = "x-tenant-id"
    api_key: str = field(default="", repr=False)

    def address(self, path: str) -> str:
        """Return the address of an endpoint; `url` may end in `/v1` or not."""
        return f"{self.url.rstrip('/').removesuffix('/v1')}/v1/{path}"

    def headers(self, tenant: str | None) -> dict[str, str]:
        """Make the headers of one request."""
        headers = {}
        if self.tenant_header and tenant:
            headers[self.tenant_header] = tenant
        if self.api_key:
            headers["authorization"] = f"Bearer {self.api_key}"
        return headers


class Talks:
    """Runs once. `turns` may be watched meanwhile; `cut` counts what limits left out, by reason.

    Without `chats` outputs are free, at most `limits.output_tokens_max` (or the unanswered length).
    """

    def __init__(self, server: Server, chats: Chats | None, timing: Timing, limits: Limits) -> None:
        if chats is None and not server.as_chat:
            raise ValueError("prompts as token ids need a tokenizer")
        self.turns: list[Turn] = []
        self.cut: Counter[str] = Counter()
        self.started = 0
        self.ended = 0
        self._server = server
        self._chats = chats
        self._timing = timing
        self._limits = limits
        self._model = server.model
        self._zero = time.perf_counter()

    def now_s(self) -> float:
        """Return the seconds since the start."""
        return time.perf_counter() - self._zero

    async def run(self, held: Iterable[Conversation]) -> None:
        """Hold all conversations.

        Raises ServerError if the server names no model, and the errors of `held`; turns under way
        then, or when the run is cancelled, are given up.
        """
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
            read_bufsize=2**18,
        ) as http:
            self._model = self._model or await self._first_model(http)
            self._zero = time.perf_counter()
            numbered = enumerate(zip(self._timing.starts(), held, strict=False))
            tasks: list[asyncio.Task[None]] = []
            try:
                limit = self._limits.conversations_max
                for number, (start_s, conversation) in islice(numbered, limit):
                    await self._until(start_s)
                    holding = self._hold(http, conversation, number, start_s)
                    tasks.append(asyncio.create_task(holding))
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _until(self, at_s: float) -> None:
        await asyncio.sleep(max(0.0, at_s - self.now_s()))

    async def _hold(
        self, http: aiohttp.ClientSession, conversation: Conversation, number: int, start_s: float
    ) -> None:
        self.started += 1
        said: list[Message] = []
        thinking = self._timing.thinking(number)
        intended_s = start_s
        for at, added in enumerate(conversation.turns, 1):
            said += added.messages
            body = self._body(said, added, at)
            if body is None:
                break
            await self._until(intended_s)
            turn = Turn(conversation.name, at, intended_s)
            self.turns.append(turn)
            headers = self._server.headers(added.tenant or conversation.tenant)
            answer = await self._ask(http, body, headers, turn)
            if turn.fate is not Fate.COMPLETED:
                break
            text = answer if self._server.served else added.answer or ""
            said.append(Message("assistant", text))
            intended_s = turn.end_s + next(thinking)
        self.ended += 1

    def _body(self, said: list[Message], added: Record, turn: int) -> dict[str, Any] | None:
        """Write a request; None if the conversation has come to a limit."""
        limits = self._limits
        if limits.turns_max is not None and turn > limits.turns_max:
            self.cut["conversations at the limit of turns"] += 1
            return None
        body: dict[str, Any] = {"model": self._model, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self._chats is None:
            body["max_tokens"] = limits.output_tokens_max or limits.unanswered_tokens
        else:
            tokens = output_tokens(added, self._chats.tokenizer, limits)
            body |= {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}
            ids = self._chats.prompt(said)
            context = limits.context_tokens
            if context is not None and len(ids) + tokens > context:
                self.cut["conversations at the end of the context"] += 1
                return None
            if not self._server.as_chat:
                return {**body, "prompt": ids}
        messages = [{"role": message.role, "content": message.content} for message in said]
        return {**body, "messages": messages}

    async def _ask(
        self,
        http: aiohttp.ClientSession,
        body: dict[str, Any],
        headers: dict[str, str],
        turn: Turn,
    ) -> str:
        """Ask one turn, and return the answer."""
        path = "completions" if "prompt" in body else "chat/completions"
        turn.sent_s = self.now_s()
        answer = ""
        try:
            async with http.post(
                self._server.address(path), json=body, headers=headers
            ) as response:
                if response.status == 200:
                    answer = await self._listen(response, turn)
                else:
                    refused = response.status in REFUSALS
                    turn.fate = Fate.REFUSED if refused else Fate.ERROR
                    turn.reason = f"{response.status} {_code(await response.read())}".rstrip()
        except asyncio.CancelledError:
            turn.reason = "unfinished"
            raise
        except (aiohttp.ClientError, OSError, ValueError) as error:
            turn.reason = str(error) or type(error).__name__
        turn.end_s = self.now_s()
        return answer

    async def _listen(self, response: aiohttp.ClientResponse, turn: Turn) -> str:
        """Read a stream to its end. Raises ValueError if an event is not what it should be."""
        parts: list[str] = []
        async for line in response.content:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                turn.fate = Fate.COMPLETED
                break
            event = json.loads(data)
            if "error" in event:
                turn.reason = f"error in the stream: {event['error'].get('code') or 'unnamed'}"
                return ""
            for choice in event.get("choices") or ():
                if turn.first_s != turn.first_s:
                    turn.first_s = self.now_s()
                parts.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
            usage = event.get("usage") or {}
            turn.prompt_tokens = usage.get("prompt_tokens") or turn.prompt_tokens
            turn.output_tokens = usage.get("completion_tokens") or turn.output_tokens
        if turn.fate is not Fate.COMPLETED:
            turn.reason = "the stream broke off"
        return "".join(parts)

    async def _first_model(self, http: aiohttp.ClientSession) -> str:
        """Ask for the first model that the server serves."""
        url = self._server.address("models")
        try:
            async with http.get(url, headers=self._server.headers(None)) as response:
                text = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise ServerError(f"{url}: {error or type(error).__name__}") from None
        try:
            return str(json.loads(text)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            what = f"{url} names no model (status {response.status}); give one with --model"
            raise ServerError(what) from None


def _code(text: bytes) -> str:
    """Read the code of an answer in OpenAI's error format, "" where there is none."""
    try:
        error = json.loads(text)["error"]
        code = error.get("code")
        # vLLM repeats the status there.
        return code if isinstance(code, str) else str(error.get("type") or "")
    except (ValueError, LookupError, TypeError, AttributeError):
        return ""
