"""Checks requests in OpenAI's form, field by field.

Fields that vLLM knows and that change neither length nor form of an answer are accepted and ignored
(temperature, top_p, user ...). A field that would change the form is refused.
"""

import json
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from schedsvc_lab.emulator.errors import ApiError
from schedsvc_lab.emulator.tokenizer import TextTokenizer

# The most sequences that one HTTP request may fan out to.
SEQUENCES_MAX = 1_024
INT64_MAX = (1 << 63) - 1

Int64 = Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)]
Count = Annotated[int, Field(ge=0, le=INT64_MAX)]
Limit = Annotated[int, Field(ge=1, le=INT64_MAX)]
Ids = list[int]
Prompt = str | Ids


class StrictBody(BaseModel):
    """Requires numbers where the form has numbers: "5", 5.0 and true are no integers."""

    model_config = ConfigDict(strict=True, extra="ignore")


BodyT = TypeVar("BodyT", bound=StrictBody)


class StreamOptions(StrictBody):
    """Holds the options for usage figures in a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def _unsupported(value: object) -> object:
    if value is not None and value is not False:
        raise ValueError("is not supported by the emulator")
    return value


class GenerationBody(StrictBody):
    """Holds the fields that completions and chat have in common."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    min_tokens: Count | None = None
    ignore_eos: bool = False
    # None: as in vLLM, true for a prompt and false for a chat, whose template writes them.
    add_special_tokens: bool | None = None
    priority: Int64 = 0
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool = False
    # Not in vLLM: the output length at which the emulated model ends by itself, from a trace.
    emulated_output_tokens: Annotated[int, Field(ge=1, le=INT64_MAX)] | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None

    @field_validator("stop")
    @classmethod
    def _stop(cls, stop: str | list[str] | None) -> str | list[str] | None:
        if isinstance(stop, list) and len(stop) > 16:
            raise ValueError("at most 16 stop strings are allowed")
        if stop is not None and "" in ([stop] if isinstance(stop, str) else stop):
            raise ValueError("a stop string must not be empty")
        return stop

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, whichever way they were given."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def check(self) -> None:
        """Refuse options that contradict each other."""
        if self.stream_options is not None and not self.stream:
            raise ApiError("stream_options is only allowed where stream is true", "stream_options")


class CompletionBody(GenerationBody):
    """Describes a request for /v1/completions."""

    prompt: Any
    max_tokens: Limit | None = 16
    echo: Any = None
    suffix: Any = None
    logprobs: Any = None
    prompt_logprobs: Any = None

    _refuse = field_validator("echo", "suffix", "logprobs", "prompt_logprobs")(_unsupported)


class ChatBody(GenerationBody):
    """Describes a request for /v1/chat/completions."""

    messages: Any
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    add_generation_prompt: bool = True
    logprobs: Any = None
    prompt_logprobs: Any = None

    _refuse = field_validator("logprobs", "prompt_logprobs")(_unsupported)


class TokenizeBody(StrictBody):
    """Describes a request for /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    add_generation_prompt: bool = True
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(StrictBody):
    """Describes a request for /detokenize."""

    model: str | None = None
    tokens: Any


def parse_json(data: bytes) -> dict[str, Any]:
    """Parse a body that has to be a JSON object."""
    try:
        body = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(f"the body must be a JSON object, not {_type_name(body)}")
    return body


def parse_body(
    kind: type[BodyT],
    body: Mapping[str, Any],
    nested: frozenset[str] = frozenset(StreamOptions.model_fields),
) -> BodyT:
    """Check an object against a model; the error names the first field that is wrong.

    `nested` are the names of fields of the objects in it.
    """
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        # The location names a union's branches and the type last; the field is what matters.
        where = ".".join(str(part) for part in first["loc"] if part in body or part in nested)
        where = where or str(first["loc"][0])
        message = first["msg"].removeprefix("Value error, ")
        raise ApiError(f"{where}: {message}", where) from error


def parse_prompts(prompt: object, vocab_size: int) -> list[Prompt]:
    """Take a prompt apart: a string, strings, token ids below `vocab_size`, or lists of those.

    O(length). Raises ApiError naming `prompt` or its entry.
    """
    if isinstance(prompt, str):
        return [_text(prompt, "prompt")]
    if not isinstance(prompt, list):
        raise ApiError(f"prompt: must be a string or an array, not {_type_name(prompt)}", "prompt")
    if not prompt:
        raise ApiError("prompt: must not be empty", "prompt")
    if isinstance(prompt[0], int):
        return [_ids(prompt, "prompt", vocab_size)]
    if len(prompt) > SEQUENCES_MAX:
        raise ApiError(f"prompt: at most {SEQUENCES_MAX} prompts are allowed", "prompt")
    return [
        _text(part, f"prompt[{i}]")
        if isinstance(part, str)
        else _ids(part, f"prompt[{i}]", vocab_size)
        for i, part in enumerate(prompt)
    ]


def parse_ids(ids: object, where: str, vocab_size: int) -> Ids:
    """Check a list of token ids below `vocab_size`, which may be empty. O(length)."""
    if not isinstance(ids, list):
        raise ApiError(f"{where}: must be an array of token ids, not {_type_name(ids)}", where)
    # In C if all is well: a prompt can be thousands of ids long.
    if ids and not (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size):
        bad = next(i for i, t in enumerate(ids) if type(t) is not int or not 0 <= t < vocab_size)
        raise ApiError(
            f"{where}[{bad}]: must be a token id from 0 to {vocab_size - 1}, "
            f"not {_shown(ids[bad])}",
            where,
        )
    return ids


def parse_messages(messages: object) -> list[dict[str, str]]:
    """Check a conversation, and reduce each message to its role and its text."""
    if not isinstance(messages, list):
        raise ApiError(
            f"messages: must be an array of messages, not {_type_name(messages)}", "messages"
        )
    if not messages:
        raise ApiError("messages: must not be empty", "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def prompt_tokens(tokenizer: TextTokenizer, prompt: Prompt, add_special_tokens: bool) -> int:
    """Count the tokens of one prompt; ids get no special tokens. O(length)."""
    return tokenizer.count(prompt, add_special_tokens) if isinstance(prompt, str) else len(prompt)


def _text(text: str, where: str) -> str:
    if not text:
        raise ApiError(f"{where}: must not be empty", "prompt")
    return text


def _ids(ids: object, where: str, vocab_size: int) -> Ids:
    if not isinstance(ids, list):
        raise ApiError(
            f"{where}: must be a string or an array of token ids, not {_type_name(ids)}", "prompt"
        )
    if not ids:
        raise ApiError(f"{where}: must not be empty", "prompt")
    try:
        return parse_ids(ids, where, vocab_size)
    except ApiError as error:
        raise ApiError(error.message, "prompt") from error


def _message(message: object, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise ApiError(f"{where}: must be an object, not {_type_name(message)}", where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ApiError(f"{where}.role: must be a string that is not empty", f"{where}.role")
    return {"role": role, "content": _content(message, where)}


def _content(message: Mapping[str, object], where: str) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message.get("role") == "assistant":
        return ""
    where = f"{where}.content"
    if not isinstance(content, list):
        raise ApiError(f"{where}: must be a string or an array of text parts", where)
    texts = []
    for i, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise ApiError(f'{where}[{i}]: must be {{"type": "text", "text": "..."}}', where)
        texts.append(text)
    return "".join(texts)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _shown(value: object) -> str:
    return reprlib.repr(value)[:40]  # of any depth


def _type_name(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    if value is None:
        return "null"
    return names.get(type(value), "a number")
