"""Sends one request, reads its answer, and writes the outcome into its sample."""

import asyncio
import json
from collections.abc import Callable

import aiohttp

from schedsvc_lab.load.samples import Fate, Recorder, Sample
from schedsvc_lab.load.sse import Scanner, TokenScanner
from schedsvc_lab.load.target import Backend, Target

REFUSALS = frozenset({429, 503})


class BadAnswerError(RuntimeError):
    """The answer breaks the protocol."""


class Exchange:
    """Sends requests to a target over one HTTP session; never retries."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        target: Target,
        recorder: Recorder,
        now_s: Callable[[], float],
        interrupted: Callable[[], bool],
    ) -> None:
        self._http = http
        self._target = target
        self._recorder = recorder
        self._now_s = now_s
        self._interrupted = interrupted
        self._url = target.generate_url
        tokens = target.backend is Backend.GENERATE_STREAM
        self._scanner: type[Scanner] = TokenScanner if tokens else Scanner

    async def send(self, sample: Sample, body: bytes, request_id: str) -> None:
        """Send one request and record its outcome."""
        self._recorder.sent(sample, self._now_s())
        headers = self._target.headers(sample.tenant, request_id)
        try:
            async with self._http.post(self._url, data=body, headers=headers) as response:
                if response.status == 200:
                    fate, reason = await self._stream(response, sample)
                else:
                    fate, reason = await _refusal_of(response, sample)
        except asyncio.CancelledError:
            stopped = self._interrupted()
            fate, reason = (
                (Fate.INTERRUPTED, "interrupted") if stopped else (Fate.ERROR, "unfinished")
            )
            self._recorder.ended(sample, fate, self._now_s(), reason)
            raise
        except BadAnswerError as error:
            fate, reason = Fate.ERROR, str(error)
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            fate, reason = Fate.ERROR, type(error).__name__
        self._recorder.ended(sample, fate, self._now_s(), reason)

    async def _stream(self, response: aiohttp.ClientResponse, sample: Sample) -> tuple[Fate, str]:
        """Read a streamed answer to its end. Raises BadAnswerError if it breaks off."""
        if response.content_type != "text/event-stream":
            raise BadAnswerError(f"answered {response.content_type} instead of an event stream")
        sample.queue_ms = _number(response.headers.get("x-schedsvc-queue-duration-ms"))
        scanner = self._scanner()
        content = response.content
        while piece := await content.readany():
            try:
                events = scanner.feed(piece)
            except ValueError:
                raise BadAnswerError("an event is not JSON") from None
            if events:
                self._recorder.output(sample, events, self._now_s())
        if scanner.refused:
            return Fate.REFUSED, scanner.refused
        if scanner.error is not None:
            raise BadAnswerError(f"error in the stream: {scanner.error.get('code') or 'unnamed'}")
        if not scanner.done:
            raise BadAnswerError("the stream broke off")
        usage = scanner.usage
        if usage is None:
            raise BadAnswerError("the stream has no usage")
        # If the protocol does not count the prompt, its planned length counts.
        prompt_tokens = usage.get("prompt_tokens")
        if prompt_tokens is None and self._target.backend is Backend.GENERATE_STREAM:
            prompt_tokens = sample.asked_prompt_tokens
        sample.prompt_tokens = int(prompt_tokens or 0)
        sample.output_tokens = int(usage.get("completion_tokens") or 0)
        return Fate.COMPLETED, ""


async def _refusal_of(response: aiohttp.ClientResponse, sample: Sample) -> tuple[Fate, str]:
    """Read an answer that is not 200, and say what it means."""
    text = await response.read()
    try:
        error = json.loads(text)["error"]
        code = str(error.get("code") or error.get("type") or "")
    except (ValueError, LookupError, TypeError, AttributeError):
        code = ""
    if response.status not in REFUSALS:
        return Fate.ERROR, f"{response.status} {code}".rstrip()
    sample.queue_ms = _number(response.headers.get("x-schedsvc-queue-duration-ms"))
    retry_after_ms = _number(response.headers.get("retry-after-ms"))
    if retry_after_ms != retry_after_ms:
        retry_after_ms = _number(response.headers.get("retry-after")) * 1e3
    if retry_after_ms == retry_after_ms:
        sample.retry_after_ms = round(retry_after_ms)
    reason = response.headers.get("x-schedsvc-dropped-reason") or code
    return Fate.REFUSED, f"{response.status} {reason}".rstrip()


def _number(text: str | None) -> float:
    """Read a header's number; NaN where there is none."""
    try:
        return float(text) if text is not None else float("nan")
    except ValueError:
        return float("nan")
