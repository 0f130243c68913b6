"""Makes workloads: drawn from distributions, or out of a trace by labels and other times.

Everything is drawn from the seed; each aspect has a random stream of its own, so that more tenants
change no arrival.
"""

import math
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate, islice
from itertools import count as counting

import numpy as np
from numpy.typing import NDArray

from schedsvc_lab.workload import zipf
from schedsvc_lab.workload.arrivals import Arrivals, draw_arrivals, gap_error
from schedsvc_lab.workload.lengths import Lengths
from schedsvc_lab.workload.record import Record

Pairs = NDArray[np.int64]
LABEL_RULES = ("random", "zipf", "sticky", "adversarial")
_ARRIVALS, _TENANTS, _INPUTS, _OUTPUTS = range(4)


@dataclass(frozen=True, kw_only=True)
class Synthesis:
    """Describes a workload to draw: arrivals, lengths, tenants whose shares follow Zipf's law.

    `pairs` (rows of input and output tokens) replaces the two distributions by rows drawn with
    replacement, so that outputs depend on inputs as they do in the rows. With `prefix_tokens` every
    prompt begins with that many tokens of its tenant's own, besides those drawn, and the record
    holds its block hashes.
    """

    arrivals: Arrivals
    inputs: Lengths
    outputs: Lengths
    pairs: Pairs | None = None
    tenants: int = 1
    zipf_exponent: float = 1.0
    requests: int | None = None
    duration_s: float = math.inf
    prefix_tokens: int = 0
    block_tokens: int = 16
    seed: int = 0
    #: Separates the random streams of workloads with the same seed.
    stream: tuple[int, ...] = ()
    #: The tenant's name; for several, the prefix of their names.
    name: str = "tenant"
    request_class: str | None = None
    adapter: str | None = None
    deadline_ms: int | None = None


def tenant_names(count: int, name: str = "tenant") -> list[str]:
    """Name tenants by rank, so that they sort."""
    digits = len(str(count))
    return [f"{name}-{rank:0{digits}}" for rank in range(1, count + 1)]


def synthesize(wanted: Synthesis) -> Iterator[Record]:
    """Yield the requests of a drawn workload by arrival. Raises ValueError if it cannot be."""
    streams = [np.random.default_rng([wanted.seed, *wanted.stream, aspect]) for aspect in range(4)]
    times_s = draw_arrivals(
        wanted.arrivals,
        streams[_ARRIVALS],
        requests=wanted.requests,
        duration_s=wanted.duration_s,
    )
    if missed := gap_error(wanted.arrivals, times_s):
        raise RuntimeError(f"the drawn arrivals are not what was asked: {missed}")
    number = len(times_s)
    single = wanted.tenants == 1
    names = [wanted.name] if single else tenant_names(wanted.tenants, wanted.name)
    weights = zipf.shares(wanted.tenants, wanted.zipf_exponent)
    tenants = streams[_TENANTS].choice(wanted.tenants, number, p=weights)
    if wanted.pairs is None:
        inputs = wanted.inputs.draw(streams[_INPUTS], number)
        outputs = wanted.outputs.draw(streams[_OUTPUTS], number)
    else:
        inputs, outputs = wanted.pairs[streams[_INPUTS].integers(len(wanted.pairs), size=number)].T
    shared = wanted.prefix_tokens
    blocks = _blocks(wanted)
    for at in range(number):
        input_tokens = shared + int(inputs[at])
        yield Record(
            # To the microsecond: shorter files, and the same on every machine.
            arrival_s=round(float(times_s[at]), 6),
            tenant=names[tenants[at]],
            input_tokens=input_tokens,
            output_tokens=int(outputs[at]),
            adapter=wanted.adapter,
            request_class=wanted.request_class,
            deadline_ms=wanted.deadline_ms,
            blocks=blocks(int(tenants[at]), input_tokens) if shared else (),
            block_tokens=wanted.block_tokens if shared else None,
        )


def _blocks(wanted: Synthesis) -> Callable[[int, int], tuple[int, ...]]:
    """Return what names the full blocks of a prompt by its tenant and its tokens."""
    shared = wanted.prefix_tokens // wanted.block_tokens
    fresh = counting(shared * wanted.tenants)

    def named(tenant: int, tokens: int) -> tuple[int, ...]:
        own = tokens // wanted.block_tokens - shared
        return (*range(shared * tenant, shared * (tenant + 1)), *islice(fresh, own))

    return named


def length_pairs(records: Iterable[Record]) -> Pairs:
    """Gather the input and output tokens of the records that have both, one row each."""
    flat = array("q")
    for record in records:
        if record.input_tokens is not None and record.output_tokens is not None:
            flat.extend((record.input_tokens, record.output_tokens))
    return np.array(flat, np.int64).reshape(-1, 2)


def scale(records: Iterable[Record], speed: float) -> Iterator[Record]:
    """Yield records with their times divided by `speed`; nothing else changes."""
    for record in records:
        if record.arrival_s is None:
            yield record
        else:
            yield replace(record, arrival_s=record.arrival_s / speed)


def long_threshold(lengths: Counter[int]) -> int:
    """Find the length from which on the longest requests hold half of all tokens, or more."""
    half = sum(length * count for length, count in lengths.items()) / 2
    held = 0
    length = 0
    for length, count in sorted(lengths.items(), reverse=True):
        held += length * count
        if held >= half:
            break
    return length


def total_tokens(record: Record) -> int:
    """Return input and output tokens, as far as they are known."""
    return (record.input_tokens or 0) + (record.output_tokens or 0)


def labeller(
    rule: str, tenants: int, exponent: float, seed: int, long_tokens: int = 0
) -> Callable[[Record], str]:
    """Return the rule that names a request's tenant.

    random: all are equally likely. zipf: the i-th with a share proportional to i^-exponent. sticky:
    as zipf, but a conversation stays with its tenant. adversarial: the first asks every request of
    `long_tokens` or more tokens, the others share the rest alike.
    """
    names = tenant_names(tenants)
    rng = np.random.default_rng([seed, _TENANTS])
    flat = 0.0 if rule in {"random", "adversarial"} else exponent
    first = 1 if rule == "adversarial" else 0
    edges = list(accumulate(zipf.shares(tenants - first, flat)))

    def named(record: Record) -> str:
        if first and total_tokens(record) >= long_tokens:
            return names[0]
        share = float(rng.uniform())
        if rule == "sticky" and record.conversation is not None:
            # A hash, since a table of conversations would grow with the trace.
            key = f"{seed}/{record.conversation}".encode(errors="surrogatepass")
            share = int.from_bytes(blake2b(key, digest_size=7).digest()) / 2**56
        return names[min(first + bisect_right(edges, share), tenants - 1)]

    return named
