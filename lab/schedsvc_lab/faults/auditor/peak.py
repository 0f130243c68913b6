"""Bounds a pool's load in the peak form, between the least and the most that leases add.

With the leases in descending order of what each sequence has left, the load just before the k-th
ends is the sum over the first k of what they hold and of width times what the k-th has left (the
memory test of LightLLM and S-LoRA). No message gives the predicted output; a reservation shows it
only to a block. So there is a least load, which no grant may bring above the capacity, and a
greatest, below which nothing may be kept waiting.
"""

from collections.abc import Iterable
from typing import NamedTuple

from schedsvc_lab.faults.auditor.records import Lease, Pool


class Run(NamedTuple):
    """Describes the load of one lease: `held` tokens now, `width` more for each of `left` steps."""

    left: int
    held: int
    width: int


def peak_of(runs: Iterable[Run]) -> int:
    """Return the greatest load to come; what has no width stays to the end. O(n log n)."""
    held = width = fixed = most = 0
    for run in sorted(runs, reverse=True):
        if not run.width:
            fixed += run.held
            continue
        held += run.held
        width += run.width
        most = max(most, held + width * run.left)
    return most + fixed


def least_load(pool: Pool, suspect_before_ns: int) -> int:
    """Return what a pool has to hold at least; leases last renewed by then count in full."""
    return peak_of(_least(pool, lease, suspect_before_ns) for lease in pool.leases.values())


def greatest_load(pool: Pool, suspect_before_ns: int) -> int:
    """Return what a pool may have to hold; leases last renewed by then count in full."""
    return peak_of(_greatest(pool, lease, suspect_before_ns) for lease in pool.leases.values())


def _steps_told(pool: Pool, lease: Lease) -> tuple[int, int]:
    """Return the least and the greatest output of each sequence that suit the reservation."""
    if lease.told is not None:
        return lease.told
    r = lease.request
    blocks = -(-lease.reserved_tokens // pool.block)
    room = (blocks - r.sequences) * pool.block - r.prompt_tokens * r.n
    low = max(0, room // r.sequences + 1)
    high = max(low, (room + pool.block) // r.sequences)
    lease.told = min(low, r.max_output_tokens), min(high, r.max_output_tokens)
    return lease.told


def _least(pool: Pool, lease: Lease, suspect_before_ns: int) -> Run:
    r, whole = lease.request, lease.low * pool.block
    if not r.reports_progress or lease.renewed_ns <= suspect_before_ns:
        return Run(0, whole, 0)
    held = min(r.prompt_tokens * r.n + lease.output_tokens, whole)
    each = -(-lease.output_tokens // r.sequences)
    left = max(0, _steps_told(pool, lease)[0] - each)
    return Run(min(left, (whole - held) // r.sequences), held, r.sequences)


def _greatest(pool: Pool, lease: Lease, suspect_before_ns: int) -> Run:
    r, whole = lease.request, lease.high * pool.block
    if not r.reports_progress or lease.renewed_ns <= suspect_before_ns:
        return Run(0, whole, 0)
    held = min(r.prompt_tokens * r.n + lease.output_tokens, whole)
    each = -(-lease.output_tokens // r.sequences)
    low, high = _steps_told(pool, lease)
    if r.ask is None or each > low:  # replayed, or it may have outlived its prediction
        high = r.max_output_tokens
    left = min(max(0, high - each), (whole - held) // r.sequences)
    # Each sequence may have just begun its last block, and its part of the tokens is rounded up.
    unused = r.sequences * pool.block - 1
    return Run(left, min(held + unused, whole), r.sequences)
