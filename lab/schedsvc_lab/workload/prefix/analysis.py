"""Runs a prefix analysis over the requests of a trace."""

from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

from schedsvc_lab.workload.prefix.files import RequestFiles
from schedsvc_lab.workload.prefix.requests import Asked, cutter
from schedsvc_lab.workload.prefix.sharing import Sharing

DEFAULT_SIZES = (16, 8, 32)


def analyse(
    requests: Iterable[Asked], sizes: Sequence[int], folder: Path | None, name: str
) -> dict[int, Sharing]:
    """Count what requests share, for each block size; without sizes, the trace's own or the usual.

    Writes the requests' rows, and a trace with blocks of the first size, into `folder`. Raises
    ValueError if a size does not fit the trace's own blocks, Bad, and the errors of `requests`.
    """
    rest = iter(requests)
    first = next(rest, None)
    if first is None:
        return {}
    sizes = sizes or (DEFAULT_SIZES if first.hash_tokens is None else (first.hash_tokens,))
    cuts = {size: cutter(size, first.hash_tokens) for size in sizes}
    found = {size: Sharing(size) for size in sizes}
    files = None if folder is None else RequestFiles(folder, name, sizes[0])
    complete = False
    try:
        for number, asked in enumerate(chain((first,), rest)):
            for size, cut in cuts.items():
                blocks = cut(asked)
                served = found[size].add(blocks, asked.input_tokens, asked.arrival_s)
                if files is not None:
                    files.add(number, asked, size, blocks, served)
        complete = True
    finally:
        if files is not None:
            files.close(complete=complete)
    return found
