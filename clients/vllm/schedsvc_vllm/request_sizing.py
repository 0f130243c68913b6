"""From a request's body to what the scheduler has to know of it: prompts, limit, sequences."""

from __future__ import annotations

import contextlib
import enum
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from schedsvc_vllm import json_parser
from schedsvc_vllm.answers import BadRequestError
from schedsvc_vllm.estimate import TextKind, TokenRatios
from schedsvc_vllm.field_names import check_unique
from schedsvc_vllm.image_sizes import UNKNOWN_MODEL, ImageSizes
from schedsvc_vllm.prompt_forms import PROMPTS_MAX, Measured, Route

INT_MAX = (1 << 31) - 1
_WHOLE = re.compile(r"[+-]?\d{1,18}(\.0*)?", re.ASCII)
_TRUE: frozenset[object] = frozenset((True, 1, 1.0, "1", "on", "t", "true", "y", "yes"))
_FALSE: frozenset[object] = frozenset((False, 0, 0.0, "0", "off", "f", "false", "n", "no"))
_FLAGS = _TRUE | _FALSE
_PROCESSOR = "mm_processor_kwargs"  # vLLM's own name: options of the model's image processor
_PROMPT_FIELDS = frozenset({"prompt", "messages"})
_ASK_ALL = {"include_usage": True, "continuous_usage_stats": True}
_ASK_ALL_TAIL = b',"stream_options":' + json.dumps(_ASK_ALL, separators=(",", ":")).encode() + b"}"

_NOTHING: Mapping[str, Any] = {}
_WIDTHS = frozenset(("n", "best_of"))
# Names under which servers other than vLLM take the limit of a completion or a chat, the first of
# them all of them. The gate writes the limit under that one, so that a server knows it.
_ALIASES = ("max_tokens", "max_completion_tokens", "n_predict", "num_predict", "max_new_tokens")

CountTokens = Callable[[Mapping[str, Any]], Sequence[int]]


class Prompts(NamedTuple):
    """Holds the input tokens of each prompt.

    If they were estimated from text alone, the estimate can learn from `text_bytes`, `frame_tokens`
    (the parts that are no text) and `kind`.
    """

    tokens: list[int]
    exact: bool
    text_bytes: int = 0
    frame_tokens: int = 0
    kind: TextKind | None = None


class Asking(enum.IntEnum):
    """Says how much usage to ask of a server's streams: some refuse an option they do not know."""

    NOTHING = 0
    AT_THE_END = 1
    IN_EVERY_EVENT = 2


class Asked(NamedTuple):
    """Holds a body that asks for usage, and what of it the client is to get."""

    body: bytes
    keep_last: bool
    keep_all: bool
    asking: Asking


class Call(NamedTuple):
    """Describes one request, sized."""

    route: Route
    body: bytes  # as the app gets it
    plain: bytes  # the same, before usage was asked for
    rewritten: bool
    # Usage is read from the answer, for no other part counts it.
    reads_answer: bool
    asked: Asked | None
    prompts: Prompts
    n: int
    max_output_tokens: int
    limit_field: str
    stream: bool
    # A beam search is many short sequences in the engine.
    beams: bool


@dataclass(frozen=True, slots=True)
class Sizes:
    """The engine's limits; 0: not known."""

    context_tokens: int
    capacity_tokens: int
    max_running: int = 0


def parse_json(body: bytes) -> dict[str, Any]:
    """Parse a body that has to be a JSON object. O(bytes). Raises BadRequestError.

    A whole number beyond 64 bits may become a float: none is a valid limit, count or token. No
    object may name a field twice.
    """
    try:
        parsed = json_parser.loads(body)
    except (ValueError, RecursionError):
        # Python's parser takes more, and an engine that uses it serves what it takes: NaN, half a
        # surrogate pair, UTF-16.
        try:
            parsed = _parse_exactly(body)
        except (ValueError, RecursionError) as error:
            raise BadRequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise BadRequestError("the body must be a JSON object")
    try:
        check_unique(body, parsed, _exact)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is not valid JSON: {error}") from None
    return parsed


def _parse_exactly(body: bytes) -> Any:
    """Parse JSON with each number as it was written. Raises ValueError or RecursionError."""
    return json.loads(_exact(body))


def _exact(body: bytes) -> str | bytes:
    """Return a body as Python's parser takes it."""
    # It looks for UTF-16 and UTF-32 first; in them a zero is among the first two bytes.
    is_utf8 = body[:1] == b"{" and body[1:2] != b"\0"
    return body.decode("utf-8", "surrogatepass") if is_utf8 else body


def size_call(
    route: Route,
    raw: bytes,
    body: Mapping[str, Any],
    *,
    sizes: Sizes,
    count: CountTokens | None,
    ratios: TokenRatios,
    tenant: str | bytes,
    reads_answer: bool,
    images: ImageSizes = UNKNOWN_MODEL,
    asking: Asking = Asking.IN_EVERY_EVENT,
    sets: Mapping[str, Any] = _NOTHING,
    serves_beams: bool = True,
    is_vllm: bool = True,
    output_limit: int = 0,
) -> Call:
    """Work out what a request may use. O(prompt). Raises BadRequestError naming the field.

    `reads_answer`: only the answer states the usage, so a stream has to report as much of it as
    `asking` says. `sets`: fields that the gate sets in the body, instead of the caller. Unless
    `is_vllm`, only the server knows its default limit: `output_limit` takes its place, or the
    context.
    """
    given = raw
    params = _params(route, body)
    n, beams = _width(route, params, serves_beams)
    stream = body.get("stream")
    if type(stream) is not bool:
        stream = _flag(body, "stream")
    limit_field, limit = _limit(route, params)
    if not is_vllm and route.stream_options and not route.params_field:
        limit_field, limit = _limit_elsewhere(body)
        limit = limit or output_limit or None
        if limit is not None and not body.get("max_tokens"):
            sets = {**sets, "max_tokens": limit}
    if _PROCESSOR in body:
        images = images.asked(body[_PROCESSOR])
    measured = route.measure(body, images)
    prompts = _prompts(route, body, measured, count if route.countable else None, ratios, tenant)
    tokens = prompts.tokens
    if not route.generates:
        _fit_batch(route, prompts, sizes)
    if len(tokens) * n > PROMPTS_MAX:
        raise BadRequestError(
            f"n: {len(tokens)} prompts times {n} are more than {PROMPTS_MAX} sequences", "n"
        )
    if sizes.context_tokens and route.generates:
        limit = _fit(route, prompts, limit, sizes.context_tokens)
    room = (sizes.capacity_tokens or INT_MAX) - max(tokens)
    if raw and not route.is_form and (sets or body.get("priority")):
        raw = _forwarded(raw, body, sets)
    asks = stream and reads_answer and route.stream_options
    asked = _ask_usage(raw, body, asking) if asks and asking else None
    sent = raw if asked is None else asked.body
    most = max(1, room if limit is None else limit)
    rewritten = sent is not given
    # In the order of its fields: names would cost each request a dictionary.
    return Call(
        route, sent, raw, rewritten, reads_answer, asked, prompts, n, most, limit_field, stream,
        beams,
    )  # fmt: skip


def _width(route: Route, params: Mapping[str, Any], serves_beams: bool) -> tuple[int, bool]:
    """Return how many sequences are made of each prompt, and whether they are beams."""
    beams = route.generates and "use_beam_search" in params and _flag(params, "use_beam_search")
    if beams and not serves_beams:
        raise BadRequestError(
            "use_beam_search: this server does not serve beam search (its operator can open it"
            " with SCHEDSVC_BEAM_SEARCH); leave it out",
            "use_beam_search",
            status=501,
            code="not_served",
        )
    # The width of a beam search is its n.
    if _WIDTHS.isdisjoint(params) or not (route.has_n or beams):
        return 1, beams
    return max(_count(params, "n", 1), _count(params, "best_of", 1)), beams


def _forwarded(raw: bytes, body: Mapping[str, Any], sets: Mapping[str, Any]) -> bytes:
    """Return the body with the fields that the gate sets, and without the engine's priority.

    The scheduler alone sets that, by a header. O(body) if a field of the caller goes, else a copy.
    """
    removes = bool(body.get("priority"))
    if not removes and sets.keys().isdisjoint(body):
        appended = _with_tail(raw, b"," + json.dumps(sets).encode()[1:])
        if appended is not None:
            return appended
    kept = {name: value for name, value in _parse_exactly(raw).items() if name != "priority"}
    return json.dumps({**kept, **sets}).encode()


def _with_tail(raw: bytes, tail: bytes) -> bytes | None:
    """Return an object that has a field, with more fields; None if it is written unusually."""
    if raw[:1] != b"{" or b"\0" in raw[:4]:
        return None
    return raw.rstrip(b" \t\r\n")[:-1] + tail


def _params(route: Route, body: Mapping[str, Any]) -> Mapping[str, Any]:
    if not route.params_field:
        return body
    params = body.get(route.params_field)
    if params is None and route.params_optional:
        return {}
    if not isinstance(params, dict):
        raise BadRequestError(f"{route.params_field}: must be an object", route.params_field)
    return params


def _fit(route: Route, prompts: Prompts, limit: int | None, context: int) -> int:
    """Bring a request into the context, and return the most tokens of each output. O(prompts).

    Whether it is too long is the engine's to say: most cut the output, and refuse a long prompt.
    An estimate is cut, for the engine will count. If the context cuts the outputs of some prompts
    only, all count as equally long: then the sums stay what the engine can use.
    """
    tokens = prompts.tokens
    most = context - 1
    if not prompts.exact:
        # A sound leaves half of the context to its text: encoders have a context of their own.
        most = context - (limit or (context // 2 if route.is_form else 1))
    if len(tokens) == 1:  # as nearly all, and what follows would do the same
        tokens[0] = prompt = min(tokens[0], max(1, most))
        return max(1, min(context - prompt, limit or context))
    tokens[:] = [min(prompt, max(1, most)) for prompt in tokens]
    rooms = [min(context - prompt, limit or context) for prompt in tokens]
    if min(rooms) == max(rooms):
        return max(1, rooms[0])
    output = -(-sum(rooms) // len(rooms))
    quotient, rest = divmod(sum(tokens), len(tokens))
    even = [quotient + (number < rest) for number in range(len(tokens))]
    tokens[:] = [min(prompt, context - output) for prompt in even]
    return output


def _fit_batch(route: Route, prompts: Prompts, sizes: Sizes) -> None:
    """Bring a batch without output into what the pool takes: long prompts are the app's to judge.

    Short ones next to each other count as one, so that as many are left as may run at once; their
    tokens stay the same. Raises BadRequestError if that is not enough. O(prompts).
    """
    tokens = prompts.tokens
    most = max(1, (sizes.context_tokens or sizes.capacity_tokens or INT_MAX) - 1)
    tokens[:] = [min(prompt, most) for prompt in tokens]
    count_max = min(PROMPTS_MAX, sizes.max_running or PROMPTS_MAX)
    if len(tokens) <= count_max:
        return
    joined: list[int] = [0]
    for prompt in tokens:
        if joined[-1] + prompt > most:
            joined.append(0)
        joined[-1] += prompt
    # No fewer than may run: the engine spreads them.
    if len(joined) > count_max:
        raise BadRequestError(
            f"{route.prompt_field}: its {len(tokens)} elements have about {sum(tokens)} tokens; the"
            f" server takes {count_max} times {most} at once. Send smaller batches",
            route.prompt_field,
        )
    tokens[:] = joined


def _count(body: Mapping[str, Any], name: str, default: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    number = _whole(value)
    if number is None or not 1 <= number <= INT_MAX:
        raise BadRequestError(f"{name}: must be a whole number from 1 to {INT_MAX}", name)
    return number


def _whole(value: object) -> int | None:
    """Read a whole number as vLLM's own models do: 16, 16.0, "16"; None for anything else."""
    if isinstance(value, str) and _WHOLE.fullmatch(value.strip()):
        return int(value.strip().partition(".")[0])
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if type(value) is int else None


def _flag(body: Mapping[str, Any], name: str) -> bool:
    """Read a flag as vLLM's own models do: true, "true", 1 and so on."""
    value = body.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    if isinstance(value, str):
        value = value.lower()
    is_plain = isinstance(value, int | float | str)
    if not (is_plain and value in _FLAGS):
        raise BadRequestError(f"{name}: must be true or false", name)
    return value in _TRUE


def _limit(route: Route, params: Mapping[str, Any]) -> tuple[str, int | None]:
    """Return the most output tokens and their field; None: up to the context."""
    if not route.generates:
        return route.prompt_field, 1
    for name in route.limit_fields:
        value = params.get(name)
        if value is None:
            continue
        number = value if type(value) is int else _whole(value)
        # vLLM takes 0 if only the prompt is to be scored, and judges a large value by the context.
        if number is None or number < 0:
            raise BadRequestError(f"{name}: must be a whole number from 1 to {INT_MAX}", name)
        return name, min(max(1, number), INT_MAX)
    name = route.limit_fields[-1]
    return name, None if name in params else route.output_tokens_default


def _limit_elsewhere(body: Mapping[str, Any]) -> tuple[str, int]:
    """Return the largest limit that a server may take, and its field; 0: none, or without end."""
    found = "max_tokens", 0
    for name in _ALIASES:
        if name not in body or (value := body[name]) is None:
            continue
        number = value if type(value) is int else _whole(value)
        if number is None or number < 0:
            raise BadRequestError(f"{name}: must be a whole number from 1 to {INT_MAX}", name)
        if number > found[1]:
            found = name, min(number, INT_MAX)
    return found


def _prompts(
    route: Route,
    body: Mapping[str, Any],
    measured: Measured,
    count: CountTokens | None,
    ratios: TokenRatios,
    tenant: str | bytes,
) -> Prompts:
    """Size each prompt: exactly for token ids or if the server counts, else estimated."""
    sized = measured.prompts
    if measured.exact:
        return Prompts([_truncated(body, size.tokens) for size in sized], exact=True)
    if count is not None:
        others = _PROMPT_FIELDS - {route.prompt_field}
        with contextlib.suppress(Exception):  # the app will judge it
            counted = count({name: body[name] for name in body if name not in others})
            if len(counted) == len(sized):
                exact = [_truncated(body, max(1, tokens)) for tokens in counted]
                return Prompts(exact, exact=True)
    kind = TextKind(tenant, route.path, measured.has_tools)
    estimated = [
        _truncated(body, tokens + (ratios.tokens(kind, size) if size else 0))
        for tokens, size in sized
    ]
    if not measured.only_text:
        return Prompts(estimated, exact=False)
    frame_tokens, text_bytes = (sum(column) for column in zip(*sized, strict=True))
    return Prompts(estimated, False, text_bytes, frame_tokens, kind)


def _truncated(body: Mapping[str, Any], tokens: int) -> int:
    most = body.get("truncate_prompt_tokens")
    return min(tokens, most) if type(most) is int and most > 0 else tokens


def ask_less(call: Call) -> Call:
    """Return the same call asking for less usage than it does. It must have asked for some.

    A body that Python's parser cannot take asks for none.
    """
    asked = None
    if call.asked is not None and call.asked.asking is Asking.IN_EVERY_EVENT:
        with contextlib.suppress(ValueError, RecursionError):
            asked = _ask_usage(call.plain, _parse_exactly(call.plain), Asking.AT_THE_END)
    body = call.plain if asked is None else asked.body
    return call._replace(body=body, rewritten=True, asked=asked)


def _ask_usage(raw: bytes, body: Mapping[str, Any], asking: Asking) -> Asked:
    """Return the body that asks for usage."""
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise BadRequestError("stream_options: must be an object", "stream_options")
    options = options or {}
    last = _option(options, "include_usage")
    every = last and _option(options, "continuous_usage_stats")
    if every or (last and asking is Asking.AT_THE_END):
        return Asked(raw, last, every, asking)
    if "stream_options" not in body and asking is Asking.IN_EVERY_EVENT:
        text = _with_tail(raw, _ASK_ALL_TAIL)
        if text is not None:
            return Asked(text, last, every, asking)
    wanted = _ASK_ALL if asking is Asking.IN_EVERY_EVENT else {"include_usage": True}
    asked = {**_parse_exactly(raw), "stream_options": {**options, **wanted}}
    return Asked(json.dumps(asked).encode(), last, every, asking)


def _option(options: Mapping[str, Any], name: str) -> bool:
    try:
        return _flag(options, name)
    except BadRequestError as error:
        raise BadRequestError(f"stream_options.{error.message}", "stream_options") from None
