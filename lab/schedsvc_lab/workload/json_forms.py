"""Reads the JSON forms of traces: one object a line, or an array of them."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields

from schedsvc_lab.workload.fields import Fields
from schedsvc_lab.workload.record import Bad, Message, Record, Skip, block_count
from schedsvc_lab.workload.times import Since, timestamp_ns

Parse = Callable[[Fields], Iterable[Record]]
"""Makes an object records: a request, or the turns of a conversation. Raises Bad and Skip."""

_OWN_KEYS = tuple(field.name for field in fields(Record))
# Keys of our own form that no other form uses; every useful line has one of them.
_OWN_SIGNS = frozenset({"arrival_s", "input_tokens", "messages", "text", "token_ids"})


@dataclass(frozen=True)
class JsonForm:
    """Describes a JSON form: keys that identify it, which one holds the time, how to parse it."""

    name: str
    about: str
    keys: tuple[str, ...]
    time: str
    parser: Callable[[], Parse]


def own_record(data: Fields) -> Record:
    """Read one object of the project's own form. Raises Bad, also for a key that is not known."""
    for key in data.data:
        if key not in _OWN_KEYS:
            raise Bad(key, f"unknown key; known: {', '.join(_OWN_KEYS)}")
    record = Record(
        arrival_s=data.maybe_number("arrival_s"),
        tenant=data.maybe_name("tenant"),
        input_tokens=data.maybe_whole("input_tokens"),
        output_tokens=data.maybe_whole("output_tokens"),
        text=data.maybe_text("text"),
        messages=tuple(data.messages("messages")),
        answer=data.maybe_text("answer"),
        token_ids=data.wholes("token_ids", 2**31 - 1),
        blocks=data.wholes("blocks"),
        block_tokens=data.maybe_whole("block_tokens"),
        conversation=data.maybe_name("conversation"),
        turn=data.maybe_whole("turn"),
        model=data.maybe_name("model"),
        adapter=data.maybe_name("adapter"),
        request_class=data.maybe_name("request_class"),
        deadline_ms=data.maybe_whole("deadline_ms", 1, 2**63 - 1),
    )
    prompts = [record.text is not None, bool(record.messages), bool(record.token_ids)]
    if sum(prompts) > 1:
        raise Bad("text", "give one of text, messages and token_ids")
    if record.token_ids and record.input_tokens not in {None, len(record.token_ids)}:
        raise Bad("input_tokens", f"is {record.input_tokens} for {len(record.token_ids)} token_ids")
    if record.blocks and record.block_tokens is None:
        raise Bad("block_tokens", "missing: blocks are given")
    _check_blocks("blocks", record)
    return record


def own_line(record: Record) -> str:
    """Write a record in the project's own form, without a line's end. Unknown fields are absent.

    `own_record` reads the same record back.
    """
    known = {key: value for key in _OWN_KEYS if (value := getattr(record, key)) not in (None, ())}
    if record.messages:
        known["messages"] = [asdict(message) for message in record.messages]
    return json.dumps(known)


def _own() -> Parse:
    return lambda data: (own_record(data),)


def _check_blocks(key: str, record: Record, *, partial: bool = False) -> None:
    """Compare blocks with tokens. Unless `partial`, a partial last block may have no hash.

    Engines that only cache whole blocks give it none.
    """
    if not record.blocks or record.block_tokens is None or record.input_tokens is None:
        return
    wanted = block_count(record.input_tokens, record.block_tokens)
    whole = wanted if partial else record.input_tokens // record.block_tokens
    if len(record.blocks) not in {wanted, whole}:
        raise Bad(
            key,
            f"{len(record.blocks)} blocks, but {record.input_tokens} tokens fill {wanted} "
            f"of {record.block_tokens}",
        )


def _mooncake() -> Parse:
    def parse(data: Fields) -> Iterator[Record]:
        record = Record(
            arrival_s=data.number("timestamp") / 1_000,
            tenant=data.maybe_name("tenant"),
            input_tokens=data.whole("input_length"),
            output_tokens=data.whole("output_length"),
            blocks=data.wholes("hash_ids"),
            block_tokens=512,
        )
        _check_blocks("hash_ids", record, partial=True)
        yield record

    return parse


def _qwen() -> Parse:
    root_of: dict[int, int] = {}

    def parse(data: Fields) -> Iterator[Record]:
        chat = data.whole("chat_id", 0, 2**63 - 1)
        parent = data.whole("parent_chat_id", -1, 2**63 - 1)
        # A parent from before the trace began still names the conversation.
        root = chat if parent < 0 else root_of.get(parent, parent)
        root_of[chat] = root
        record = Record(
            arrival_s=data.number("timestamp"),
            tenant=data.maybe_name("tenant"),
            input_tokens=data.whole("input_length"),
            output_tokens=data.whole("output_length"),
            blocks=data.wholes("hash_ids"),
            block_tokens=16,
            conversation=str(root),
            turn=data.maybe_whole("turn"),
            request_class=data.maybe_name("type"),
        )
        _check_blocks("hash_ids", record)
        yield record

    return parse


@dataclass(frozen=True, slots=True)
class _Turn:
    """Holds messages added before an answer, and the answer; `at`: places, the answer's last."""

    messages: tuple[Message, ...]
    answer: str | None
    at: tuple[int, ...]

    @property
    def by_weight(self) -> tuple[int, ...]:
        """Places by how well their time dates the request: the question first, then its answer."""
        questions = len(self.messages)
        return (*reversed(self.at[:questions]), *self.at[questions:])


def _turns(messages: list[Message]) -> Iterator[_Turn]:
    """Cut a conversation into requests: each ends with the last message of a person (or tool).

    Answers without a question (a first one, or a second in a row) become part of the next request's
    prompt, so nothing is lost. Raises Skip if no request is left.
    """
    added: list[Message] = []
    places: list[int] = []
    asked = False
    count = 0
    for at, message in enumerate(messages):
        if message.role == "assistant" and asked:
            yield _Turn(tuple(added), message.content, (*places, at))
            count += 1
            added, places, asked = [], [], False
            continue
        added.append(message)
        places.append(at)
        asked = asked or message.role in {"user", "tool"}
    if asked:
        yield _Turn(tuple(added), None, tuple(places))
    elif count == 0:
        raise Skip("no message of a user or tool" if messages else "the conversation is empty")


def _conversation(data: Fields, key: str, role: str, content: str) -> list[Message]:
    """Read the messages of a record that people made: a broken one is skipped, not fatal."""
    try:
        return data.messages(key, role, content)
    except Bad as bad:
        kind = bad.column.rpartition(".")[2].split("[")[0]
        raise Skip(f"{kind}: {str(bad).partition(':')[0]}") from None


def _sharegpt() -> Parse:
    count = 0

    def parse(data: Fields) -> Iterator[Record]:
        nonlocal count
        count += 1
        raw = data.data.get("conversations")
        first = raw[0] if isinstance(raw, list) and raw else None
        plain = isinstance(first, dict) and "role" in first
        role, content = ("role", "content") if plain else ("from", "value")
        name = data.data.get("id")
        conversation = str(name) if isinstance(name, str | int) and name != "" else f"line-{count}"
        messages = _conversation(data, "conversations", role, content)
        for number, turn in enumerate(_turns(messages), 1):
            yield Record(
                messages=turn.messages, answer=turn.answer, conversation=conversation, turn=number
            )

    return parse


def _moment_ns(key: str, value: object) -> int:
    """Read a time: text, or seconds or (from 10^11) milliseconds since 1970."""
    try:
        if isinstance(value, str):
            return timestamp_ns(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return round(value * (10**6 if abs(value) >= 10**11 else 10**9))
    except (ValueError, OverflowError):
        pass
    raise Bad(key, f"not a time: {value!r}")


def _wildchat() -> Parse:
    since = Since()

    def parse(data: Fields) -> Iterator[Record]:
        messages = _conversation(data, "conversation", "role", "content")
        raw = data.data.get("conversation")
        said = raw if isinstance(raw, list) else []
        for number, turn in enumerate(_turns(messages), 1):
            # The question's own time, else its answer's, else the conversation's.
            times = [said[at].get("timestamp") for at in turn.by_weight]
            times.append(data.data.get("timestamp"))
            known = next((time for time in times if time is not None), None)
            tenants = [data.maybe_name("hashed_ip"), *(said[at].get("hashed_ip") for at in turn.at)]
            tenant = next((name for name in tenants if name), None)
            yield Record(
                arrival_s=since(_moment_ns("timestamp", known)),
                tenant=tenant if isinstance(tenant, str) else None,
                messages=turn.messages,
                answer=turn.answer,
                conversation=data.maybe_name("conversation_hash"),
                turn=number,
                model=data.maybe_name("model"),
            )

    return parse


_LENGTH_KEYS = ("timestamp", "input_length", "output_length")

# In the order in which they are tried: Qwen's keys include Mooncake's.
JSON_FORMS = (
    JsonForm(
        "qwen",
        "Qwen Bailian usage traces (arXiv 2506.02634): 16 tokens a block",
        ("chat_id", "parent_chat_id", *_LENGTH_KEYS),
        "timestamp",
        _qwen,
    ),
    JsonForm(
        "mooncake",
        "Mooncake traces (FAST 2025): 512 tokens a block",
        (*_LENGTH_KEYS, "hash_ids"),
        "timestamp",
        _mooncake,
    ),
    JsonForm(
        "wildchat",
        "WildChat 1M and 4.8M as JSON lines (arXiv 2405.01470); the tenant is hashed_ip",
        ("conversation_hash", "conversation"),
        "timestamp",
        _wildchat,
    ),
    JsonForm(
        "sharegpt",
        "ShareGPT conversations, array or lines, from/value or role/content",
        ("conversations",),
        "conversations",
        _sharegpt,
    ),
    JsonForm("schedsvc", "the project's own form, docs/use/workloads.md", (), "arrival_s", _own),
)


def is_own(keys: Iterable[str]) -> bool:
    """Return whether an object with these keys looks like the project's own form."""
    return not _OWN_SIGNS.isdisjoint(keys)
