"""Follows the answer to one request: what its client gets, and what it used. Sans-IO.

The door of the request passes the status, the headers and the pieces of the answer through here,
asks for the totals from time to time, and for the completion at the end.
"""

from __future__ import annotations

from typing import NamedTuple

from schedsvc_client import Outcome
from schedsvc_client.aio import Admission

from schedsvc_vllm.answer_readers import Reader, reader_for
from schedsvc_vllm.answers import granted_headers, queue_duration
from schedsvc_vllm.asgi import Headers
from schedsvc_vllm.decoding import Decoder, DecodingError
from schedsvc_vllm.request_sizing import Asking, Call, ask_less
from schedsvc_vllm.response_end import ResponseEnd
from schedsvc_vllm.runtime import Runtime
from schedsvc_vllm.token_counter import TokenTotals, Usage
from schedsvc_vllm.usage import ByteReader

Totals = tuple[int | None, int | None, int | None]
"""Input, cached input and output tokens; None if a total is not known."""

# Headers of an answer that the gate writes itself.
_REPLACED = frozenset((b"x-request-id",))
# The limits of an upstream are those of all tenants together.
_OF_ALL = (b"x-ratelimit-", b"anthropic-ratelimit-")
_UNKNOWN: Totals = (None, None, None)
_NOTHING_USED: Totals = (0, 0, 0)


class Completion(NamedTuple):
    """Says how a lease ends."""

    outcome: Outcome
    totals: Totals


class Account:
    """Keeps the account of one request's answer."""

    runtime: Runtime
    call: Call
    tally: TokenTotals | None = None
    #: The number of sequences that the engine makes of it.
    sequences = 1
    #: The id by which its client knows it.
    id = "-"
    #: The scheduler's grant; None: it runs without one.
    admission: Admission | None = None
    local_wait_us = 0
    #: It was let run; the app has got it; the app has failed.
    is_running = was_sent = broke = False
    #: Its client is gone; and was so before the engine failed.
    has_left = left_first = False
    status = 0
    #: The start of the answer has not been sent yet, for its text cannot be read so far.
    is_held = False
    #: The app refused what it was asked for beside the request.
    is_refused = False
    reader: Reader | None = None
    ending: ResponseEnd | None = None
    _decoder: Decoder | None = None
    _has_asked_less = False

    @property
    def has_begun(self) -> bool:
        """Return whether the client has got the beginning of an answer."""
        return self.status != 0 and not self.is_held

    @property
    def is_whole(self) -> bool:
        """Return whether the client was given all of the answer."""
        return self.ending is not None and self.ending.is_whole

    @property
    def is_answer(self) -> bool:
        """Return whether this may be an engine's output, and states no error so far."""
        return self.status < 400 and not (self.reader is not None and self.reader.failed)

    @property
    def is_read(self) -> bool:
        """Return whether the tokens are read from the answer: nothing else counts them."""
        return self.tally is None or self.tally.broken

    @property
    def is_counted_at_end(self) -> bool:
        """Return whether no token of it is counted before its answer is there."""
        call = self.call
        if not call.route.generates:
            return True
        # The stream of a beam search has only the end, too.
        return (call.beams or not call.stream) and self.is_read

    # The answer.

    def start(self, status: int, told: Headers) -> Headers | None:
        """Take the start of the answer; return the headers that its client gets.

        None: the app refused what it was asked for beside the request, see `asks_less()`.
        """
        if self._refuses_options(status):
            return None
        self.status = status
        headers = [(bytes(key).lower(), bytes(value)) for key, value in told]
        dropped = _REPLACED
        if self.is_read:
            self.reader, self._decoder, changed = reader_for(self.call, status, dict(headers))
            dropped |= changed
        headers = [
            pair for pair in headers if pair[0] not in dropped and not pair[0].startswith(_OF_ALL)
        ]
        self.ending = ending = ResponseEnd(headers)
        if self.has_left:
            ending.close()
        self.is_held = self._decoder is not None
        admission, counts = self.admission, self.runtime.counts
        headers.append((b"x-request-id", self.id.encode()))
        if admission is None:
            counts.fail_open += 1
            headers.append(queue_duration(self.local_wait_us))
            headers.append((b"x-schedsvc-mode", b"fail-open"))
        else:
            counts.enforced += 1
            headers.append(queue_duration(admission.queue_duration_us))
            headers.append((b"x-schedsvc-mode", b"enforced"))
            headers += granted_headers(admission)
        return headers

    def piece(self, body: bytes, more: bool) -> bytes:
        """Take a piece of the answer; return what its client gets. O(bytes).

        Raises DecodingError; an answer that states no counts is then charged by its bytes.
        """
        ending = self.ending
        if ending is None:
            return body
        if self._decoder is not None:
            body = self._decoded(self._decoder, body, more)
        if self.reader is not None:
            body = self.reader.feed(body, not more)
        if not more:
            ending.end()
        elif body:
            ending.feed(body)  # looked through with the next report
        return body

    def asks_less(self) -> bool:
        """Return whether the app refused what it was asked for beside the request: then ask less.

        Its refusal has been kept from the client, who did not ask for that.
        """
        if not self.is_refused:
            return False
        self.is_refused, self.status = False, 0
        self.call = ask_less(self.call)
        return True

    def client_left(self) -> None:
        """Take note that nothing reaches the client from now on."""
        self.has_left = True
        self.left_first = self.left_first or not (self.broke or not self.is_answer)
        if self.ending is not None:
            self.ending.close()

    # The usage.

    def progress(self) -> Totals | None:
        """Return the totals so far; None: there is no output yet."""
        counted = self.counted()
        return counted if counted is not None and counted[2] else None

    def is_done(self) -> bool:
        """Return whether the engine has made all of it, although its answer has not ended yet."""
        tally, call = self.tally, self.call
        if tally is None or tally.broken or call.beams or not call.route.leaves_usage:
            return False  # a response asks the engine several times, a beam search very often
        # If the client has left, the engine may have dropped the sequences unfinished.
        return self.status == 200 and not self.has_left and tally.is_done(self.sequences)

    def counted(self) -> Totals | None:
        """Return input, cached input and output tokens, as far as they have been counted."""
        if self.tally is not None and not self.tally.broken:
            return self.tally.totals()
        reader = self.reader
        if reader is None or not reader.is_told:
            return None
        input_tokens = reader.input_tokens
        # With several prompts, an event counts only its own.
        if not input_tokens or len(self.call.prompts.tokens) != 1:
            return None, None, reader.output_tokens
        return input_tokens, reader.cached_input_tokens, reader.output_tokens

    def end(self, told: Usage | None, *, aborted: bool, is_stale: bool) -> Completion:
        """Learn from what was used, and return how the lease ends.

        `told`: the usage that vLLM leaves at its end; `aborted`: it left its sign of an abort;
        `is_stale`: another engine stands there.
        """
        counted, is_sound = self.counted(), self.is_whole and self.is_answer
        completion = self._completion(told, counted, is_sound and not aborted, is_stale)
        self._learn(told, counted if is_sound else None)
        return completion

    def settle(self, completion: Completion) -> None:
        """End the lease, if it has one."""
        admission, self.admission = self.admission, None
        if admission is not None:
            outcome, (input_tokens, cached_tokens, output_tokens) = completion
            admission.complete(
                outcome=outcome,
                input_tokens=input_tokens,
                cached_input_tokens=cached_tokens,
                output_tokens=output_tokens,
            )

    def _completion(
        self, told: Usage | None, counted: Totals | None, is_sound: bool, is_stale: bool
    ) -> Completion:
        """Return how the lease ends; `is_sound`: the answer is whole, and no error."""
        route = self.call.route
        if self.reader is not None and (route.is_form or not route.generates):
            counted = self._sized(counted)
        if told is not None:
            # vLLM's answers state cached tokens only if an option says so; its states always do.
            cached_tokens = counted[1] if counted is not None else None
            cached_tokens = max(told.cached_input_tokens, cached_tokens or 0)
            totals: Totals = (told.input_tokens, cached_tokens, told.output_tokens)
            return Completion(Outcome.COMPLETED, totals)
        # Embeddings have no output to be charged for.
        totals = counted or (_UNKNOWN if route.generates else (None, None, 0))
        if not totals[2] and self._is_free(is_stale):
            return Completion(Outcome.CANCELLED, _NOTHING_USED)
        # Only an answer shows that a prompt alone was wanted: inside vLLM, no output is an abort.
        tells_prompts = self.reader is not None or not route.generates
        is_told = bool(totals[2]) or (counted is not None and tells_prompts)
        done = is_told and is_sound
        return Completion(Outcome.COMPLETED if done else Outcome.CANCELLED, totals)

    def _learn(self, told: Usage | None, counted: Totals | None) -> None:
        """Teach the tenant's ratio the tokens of its text; `counted`: in a whole answer."""
        prompts = self.call.prompts
        if not prompts.text_bytes or prompts.kind is None:
            return
        if told is not None:
            input_tokens: int | None = told.input_tokens
        else:
            input_tokens = counted[0] if counted is not None else None
        if input_tokens:
            learned = input_tokens - prompts.frame_tokens
            self.runtime.ratios.learn(prompts.kind, prompts.text_bytes, learned)

    def _sized(self, counted: Totals | None) -> Totals | None:
        """Return what was used of a sound or a batch: as the answer says, else as it was sized."""
        if not self.is_answer or not (self.is_whole or counted):
            return counted
        route, reader = self.call.route, self.reader
        input_tokens = reader.input_tokens if reader is not None else None
        if input_tokens is None:
            input_tokens = sum(self.call.prompts.tokens)
        output_tokens = counted[2] if counted is not None and route.generates else 0
        return input_tokens, None, output_tokens

    def _is_free(self, is_stale: bool) -> bool:
        """Return whether the engine never had it, or failed while its client waited.

        Otherwise the engine may have computed what no count shows; the scheduler charges its time.
        """
        tally = self.tally
        if not self.is_running or not self.was_sent:
            return True
        if tally is not None and not tally.broken and not tally.has_begun:
            return True
        return not self.left_first and (is_stale or self.broke or not self.is_answer)

    def _decoded(self, decoder: Decoder, body: bytes, more: bool) -> bytes:
        try:
            return decoder.feed(body, not more)
        except DecodingError:
            if self.reader is None or not self.reader.is_told:
                self.reader = ByteReader(max(decoder.bytes_in, decoder.bytes_out))
            raise

    def _refuses_options(self, status: int) -> bool:
        """Take note of how the app takes being asked for usage; True: it may be that it does not.

        Once it has taken it, a refusal is about the request itself.
        """
        asked, runtime = self.call.asked, self.runtime
        is_ours = asked is not None and asked.body is not self.call.plain
        if status == 200:
            if self._has_asked_less:
                runtime.asking = asked.asking if asked is not None else Asking.NOTHING
            runtime.asking_is_known = runtime.asking_is_known or is_ours
            return False
        if status not in (400, 422) or not is_ours or runtime.asking_is_known:
            return False
        self.is_refused = self._has_asked_less = True
        return True
