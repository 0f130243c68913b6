"""Lets simulations work side by side, in processes."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any, TypeVar

__all__ = ["WorkerError", "work_all"]

T = TypeVar("T")
R = TypeVar("R")
C = TypeVar("C")


class WorkerError(RuntimeError):
    """Says that a worker process died before its work was done."""


# Values that all tasks of a worker process share; each process receives them once.
_common: list[Any] = []


def _begin(common: Any) -> None:
    _common[:] = [common]


def _call(work: Callable[[Any, T], R], task: T) -> R:
    return work(_common[0], task)


def work_all(
    work: Callable[[C, T], R], tasks: Sequence[T], common: C, jobs: int = 1
) -> Iterator[R]:
    """Yield `work(common, task)` for each task, in their order, up to `jobs` at a time.

    With one job it happens in this process, else all that is given and returned is pickled. Raises
    what `work` raises, and WorkerError.
    """
    if min(jobs, len(tasks)) <= 1:
        for task in tasks:
            yield work(common, task)
        return
    # Not forked: this process may have threads.
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(min(jobs, len(tasks)), context, _begin, (common,)) as pool:
            yield from pool.map(partial(_call, work), tasks)
    except BrokenProcessPool:
        raise WorkerError(
            "a worker process died, perhaps for lack of memory; try fewer jobs"
        ) from None
