"""Follows one HTTP request from its bytes to its verdict and its usage, sans-IO.

    head    the head says who calls, and which endpoint
    body    the body says what the scheduler has to know
    ask     the same, for a door that has fields and no bytes
    asked   what the scheduler is asked
    verdict a grant (go), or the answer that the client gets
    start, piece, end    the answer passes, and what it used (account.py)

A door gives it what it reads, in this order, and does what it returns: it has no task, no queue and
no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from schedsvc_client import (
    CallError,
    InvalidRequest,
    LimitExceeded,
    Refused,
    RequestConflict,
    Unauthenticated,
)
from schedsvc_client.errors import is_decided
from schedsvc_client.requests import Asked, admit_request

from schedsvc_vllm import answers
from schedsvc_vllm.account import Account
from schedsvc_vllm.answers import Answer, BadRequestError
from schedsvc_vllm.asgi import Scope
from schedsvc_vllm.audio_routes import parse_form
from schedsvc_vllm.body_limits import check_bytes, check_elements
from schedsvc_vllm.caller import Caller, Sources, Terms, peer_of, read_caller
from schedsvc_vllm.field_names import check_case
from schedsvc_vllm.identity import Identifier, Identity
from schedsvc_vllm.paths import Place, place_of
from schedsvc_vllm.prefixes import block_hashes
from schedsvc_vllm.refusals import Reason
from schedsvc_vllm.request_sizing import parse_json, size_call
from schedsvc_vllm.response_ids import EARLIER, ResponseIds
from schedsvc_vllm.response_ids import PATH as RESPONSES_PATH
from schedsvc_vllm.routes import FORM_PATHS, ONE_PROMPT_PATHS, route_of
from schedsvc_vllm.runtime import Runtime
from schedsvc_vllm.tracing import OPERATIONS, TEXT_CHARS_MAX, Value

_UNKNOWN_IDENTITY, _NO_TERMS = Identity(), Terms()


@dataclass
class Rules:
    """Holds what all exchanges of one gate judge a request by."""

    identifier: Identifier
    responses: ResponseIds


class Exchange(Account):
    """Represents one request. The methods are called in the order of the module's list."""

    caller: Caller
    place: Place | None
    identity: Identity = _UNKNOWN_IDENTITY
    terms: Terms = _NO_TERMS
    adapter, model = "", None
    #: The id by which the engine knows it, and the scheduler if it was not used there before.
    engine_id = "-"
    #: The pools in which it may run, and those of them that failed before its answer began.
    pools: tuple[str, ...] = ()
    left_pools: frozenset[str] = frozenset()
    #: No engine keeps anything of it, so another one may be asked; and one failed that had it.
    is_repeatable = has_failed = False
    prefix_block_hashes: tuple[int, ...] | list[int] = ()
    #: The first question to the scheduler; None: that has been put.
    first_asked: Asked | None = None

    def head(self, scope: Scope, sources: Sources, open_paths: frozenset[str]) -> Place | None:
        """Read its head; return where it goes, None: its path has no canonical form. O(headers).

        `open_paths` are those that the operator lets through beside the known ones.
        """
        self.caller = read_caller(scope["headers"], peer_of(scope, sources), sources)
        self.place = place_of(scope, open_paths)
        return self.place

    def body(
        self, rules: Rules, runtime: Runtime, proved: Identity | None, raw: bytes, kind: bytes
    ) -> None:
        """Take its body, of which `kind` is the content type. O(bytes).

        `proved`: whom the caller's credential stands for. Raises BadRequestError, RecursionError.
        """
        path = self.place.path if self.place is not None else ""
        if path in ONE_PROMPT_PATHS:
            check_bytes(raw, runtime.offers.context_tokens)
        if path in FORM_PATHS:
            fields: Mapping[str, Any] = parse_form(kind.decode("latin-1"), raw)
        else:
            fields = parse_json(raw)
        self.ask(rules, runtime, proved, path, fields, raw)

    def ask(
        self,
        rules: Rules,
        runtime: Runtime,
        proved: Identity | None,
        path: str,
        fields: Mapping[str, Any],
        raw: bytes = b"",
    ) -> None:
        """Size a request by its fields. O(prompt).

        Without its bytes in `raw` it is not rewritten, and its door reads the usage. Raises
        BadRequestError.
        """
        caller, identifier, engine = self.caller, rules.identifier, runtime.engine
        self.runtime = runtime
        if not engine.is_vllm:
            check_case(fields)
        route = route_of(path, fields)
        check_elements(fields, route.batch_fields)
        identity = proved or identifier.identity(caller, fields, identifier.trusted(caller))
        self.identity = identity
        self.terms = identifier.terms(caller, fields, identity)
        self.id, self.engine_id = identifier.request_ids(caller)
        self.model = model = fields.get("model")
        self.pools = runtime.offers.pools_for(model)
        if runtime.offers.routes is not None:
            self.is_repeatable = route.generates and not _is_kept(path, fields)
        self.tally = tally = runtime.counter.tally() if runtime.counter is not None else None
        sets = {}
        if path == RESPONSES_PATH:
            owner = identifier.owner(caller, proved)
            if fields.get(EARLIER) is not None:
                rules.responses.check(fields[EARLIER], owner, EARLIER)
            sets["request_id"] = rules.responses.make(owner)
        self.call = size_call(
            route,
            raw,
            fields,
            tenant=identity.key,
            reads_answer=tally is None and raw != b"",
            sets=sets,
            sizes=runtime.offers.sizes_of(self.pools),
            count=engine.count_prompt_tokens if route.countable else None,
            ratios=runtime.ratios,
            images=runtime.images,
            asking=runtime.asking,
            is_vllm=engine.is_before_vllm,
            output_limit=runtime.output_limit,
            serves_beams=runtime.serves_beams,
        )
        if tally is not None:
            tally.is_search = self.call.beams
        self.adapter = engine.adapter(model)
        use = runtime.session.prefix_use
        # For placement they are of no use: every request that comes here runs here.
        if use.order and runtime.prefix_hashes and route.generates and not route.is_form:
            self.prefix_block_hashes = block_hashes(route, fields, use)
        self.sequences = len(self.call.prompts.tokens) * self.call.n
        self.first_asked = self.asked(runtime.ids.claim(self.engine_id), self.terms.request_class)

    def asked(self, asked_as: str, request_class: str) -> Asked:
        """Return what the scheduler is asked, under an id and for a class."""
        call, identity, terms = self.call, self.identity, self.terms
        return admit_request(
            tenant=identity.tenant,
            api_key_sha256=identity.api_key_sha256,
            tenant_proof=identity.proof,
            pools=self.runtime.offers.usable(self.pools, self.left_pools),
            input_tokens=call.prompts.tokens,
            n=call.n,
            max_output_tokens=call.max_output_tokens,
            request_class=request_class,
            queue_ttl_ms=terms.queue_ttl_ms,
            deadline_ms=terms.deadline_ms,
            request_id=asked_as,
            client_request_id=self.id if self.id != asked_as else "",
            adapter=self.adapter,
            prefix_block_hashes=self.prefix_block_hashes,
            input_estimated=not call.prompts.exact,
            whole_answer=self.is_counted_at_end,
            session=terms.session,
        )

    def verdict(self, error: Refused | CallError) -> Answer:
        """Return the answer of a request that the scheduler does not let run.

        Raises the error if nothing has been decided about this request.
        """
        route = self.call.route
        if isinstance(error, Refused):
            if self.admission is None:
                raise error
            return answers.refusal(error, self.admission, self.id, route.prompt_field)
        if isinstance(error, InvalidRequest):
            return answers.bad_request(self._wrong_field(error), self.id)
        if isinstance(error, LimitExceeded):
            return answers.unavailable(
                error.message, Reason.SCHEDULER_LIMIT, self.id, error.retry_after_ms
            )
        if isinstance(error, RequestConflict) or not is_decided(error):
            raise error
        field = field_of(error)
        message = f"{field}: {error.message}" if field else error.message
        if isinstance(error, Unauthenticated):
            denied = BadRequestError(message, status=403, code="scheduler_denies")
            return answers.bad_request(denied, self.id)
        return answers.unavailable(message, Reason.SCHEDULER_REFUSED, self.id)

    def again(self) -> None:
        """Begin with another engine, which has to be admitted once more."""
        counter = self.runtime.counter
        self.tally = counter.tally() if counter is not None else None
        if self.tally is not None:
            self.tally.is_search = self.call.beams
        self.admission, self.reader, self.ending = None, None, None
        self._decoder, self.status, self.local_wait_us = None, 0, 0
        self.is_running = self.was_sent = self.broke = False
        self.is_held = self.is_refused = self._has_asked_less = False

    def span_attributes(self) -> dict[str, Value]:
        """Return what its span says of it: the names of tenants, but never an API key's hash."""
        call = self.call
        noted: dict[str, Value] = {
            "http.route": call.route.path,
            "gen_ai.request.max_tokens": call.max_output_tokens,
            "gen_ai.request.stream": call.stream,
            "schedsvc.pool": self.pools[0] if len(self.pools) == 1 else "",
            "schedsvc.tenant": self.identity.tenant[:TEXT_CHARS_MAX],
            "schedsvc.request_class": self.terms.request_class,
            "schedsvc.request_id": self.id,
            "schedsvc.input_tokens.sized": sum(call.prompts.tokens),
        }
        operation = OPERATIONS.get(call.route.path)
        if operation is not None:
            noted["gen_ai.operation.name"] = operation
        if isinstance(self.model, str):
            noted["gen_ai.request.model"] = self.model[:TEXT_CHARS_MAX]
        if call.n != 1:
            noted["gen_ai.request.choice.count"] = call.n
        return {name: value for name, value in noted.items() if value != ""}

    def _wrong_field(self, error: InvalidRequest) -> BadRequestError:
        """Name the field of the body that the scheduler's complaint is about."""
        names = {
            "input_tokens": self.call.route.prompt_field,
            "max_output_tokens": self.call.limit_field,
            "n": "n",
        }
        for theirs, ours in names.items():
            if field_of(error).startswith(theirs):
                return BadRequestError(f"{ours}: {error.violations[0].description}", ours)
        return BadRequestError(error.message)


def _is_kept(path: str, fields: Mapping[str, Any]) -> bool:
    """Return whether an engine may keep something of a request, or has to have kept it."""
    if fields.get(EARLIER) is not None:
        return True
    return bool(fields.get("store", path == RESPONSES_PATH))


def field_of(error: CallError) -> str:
    """Return the field of AdmitRequest that an error names; "": none."""
    return error.violations[0].field.rpartition(".")[2] if error.violations else ""
