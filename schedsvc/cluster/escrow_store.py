"""Makes one call to the functions of escrow.lua, in which the store keeps buckets of quotas.

A bucket has four kinds of amounts, in whole units: requests, input, output, and all tokens. An
amount of a kind without a limit is 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from schedsvc.cluster.errors import StoreError
from schedsvc.cluster.library import escrow_keys_of
from schedsvc.cluster.store import StoreConnection

__all__ = [
    "CHUNK_MS",
    "KINDS",
    "WRAP",
    "Amounts",
    "Answer",
    "Ask",
    "Part",
    "Stated",
    "ask_store",
]

KINDS = 4
#: As in escrow.lua: a chunk counts as spent if its member does not report it within this time.
CHUNK_MS = 3_000
#: Drawn amounts are counted modulo this number, so that they stay exact in the store.
WRAP = 1 << 52

Amounts = tuple[int, ...]
_NONE: Amounts = (0,) * KINDS


@dataclass(frozen=True, slots=True)
class Stated:
    """Holds the amounts of a bucket that a member states in a call."""

    bucket: bytes
    #: A minute.
    limits: Amounts
    #: Since the member began, less what it returned; modulo WRAP.
    drawn: Amounts
    #: The part of it that is not spent; below 0: owed.
    held: Amounts
    #: The amounts left for all members, held ones included, as far as this one knows, less those
    #: that it has spent since; and these.
    left: Amounts = _NONE
    spent: Amounts = _NONE
    #: The bucket's beginning as this member knows it, and the call that said so; b"": it does not.
    born: bytes = b""
    known: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """Describes the part of an ask that is about one bucket: at least, and at most."""

    bucket: bytes
    least: Amounts
    most: Amounts


@dataclass(frozen=True, slots=True)
class Ask:
    """Asks for a path of buckets, all or none of it. Its buckets are stated in the same call."""

    name: bytes
    path: Sequence[Part]


@dataclass(slots=True)
class Answer:
    """Holds the answer of the store to one call."""

    given: dict[bytes, Amounts] = field(default_factory=dict)
    #: The amount in each bucket now, for all members; below 0: it owes.
    left: dict[bytes, Amounts] = field(default_factory=dict)
    #: The amounts of each bucket that all members hold.
    outstanding: dict[bytes, Amounts] = field(default_factory=dict)
    #: Names of the store's data and of each bucket's beginning; another one: they were lost.
    life: bytes = b""
    born: dict[bytes, bytes] = field(default_factory=dict)
    #: For each ask the time until it can be served, at the least, in ms; 0: it was.
    waits_ms: list[int] = field(default_factory=list)
    #: The bucket at which each ask waits; None: it was served.
    waits_at: list[bytes | None] = field(default_factory=list)
    #: Other members wait for these buckets: return what is not used.
    recalled: list[bytes] = field(default_factory=list)


async def ask_store(
    link: StoreConnection,
    cluster: str,
    origin: bytes,
    call: int,
    stated: Sequence[Stated],
    asks: Sequence[Ask] = (),
    withdrawn: Sequence[bytes] = (),
) -> Answer | None:
    """Report buckets, ask for more, and withdraw asks of these buckets by their names.

    `call` grows with each call of an origin. Returns None if the store knows a later one. Raises
    StoreError. O(buckets * members).
    """
    words: list[str | bytes | int] = [origin, call, len(withdrawn), *withdrawn]
    for each in stated:
        words += (*each.limits, *each.drawn, *each.held, *each.left, *each.spent)
        words += (each.born, each.known)
    places = {each.bucket: k for k, each in enumerate(stated, 1)}
    for ask in asks:
        words += (ask.name, len(ask.path))
        for part in ask.path:
            words += (places[part.bucket], *part.least, *part.most)
    buckets = list(places)
    keys = escrow_keys_of(cluster, origin, buckets)
    found = await link.call("schedsvc_escrow", keys, *words)
    if not found:
        return None
    try:
        return _answer(found, keys, buckets, asks)
    except (ValueError, TypeError, IndexError, KeyError):
        raise StoreError(f"store {link.address.text}: unknown answer to schedsvc_escrow") from None


def _answer(
    found: list[Any], keys: list[bytes], buckets: list[bytes], asks: Sequence[Ask]
) -> Answer:
    amounts, waits, recalled, life, births = found
    places = [None, *buckets]
    answer = Answer(waits_ms=list(map(int, waits[::2])), life=bytes(life))
    answer.waits_at = [places[int(at)] for at in waits[1::2]]
    if len(amounts) != 3 * KINDS * len(buckets) or len(waits) != 2 * len(asks):
        raise ValueError
    for k, (bucket, born) in enumerate(zip(buckets, births, strict=True)):
        given, left, outstanding = (
            tuple(map(int, amounts[at : at + KINDS]))
            for at in range(3 * KINDS * k, 3 * KINDS * (k + 1), KINDS)
        )
        answer.given[bucket] = tuple(max(0, n) for n in given)
        answer.left[bucket], answer.outstanding[bucket] = left, outstanding
        answer.born[bucket] = bytes(born)
    head = len(keys[0].partition(b"}:")[0]) + len(b"}:bucket:")
    answer.recalled = [bytes(key)[head:] for key in recalled]
    return answer
