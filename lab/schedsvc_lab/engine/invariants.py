"""Verifies an engine's books from scratch: blocks, holders, queues, seats, adapters."""

from collections import Counter
from collections.abc import Hashable

from schedsvc_lab.engine.block_accounting import BlockAccounting
from schedsvc_lab.engine.errors import EngineInvariantError
from schedsvc_lab.engine.sequence import Sequence, SequenceState


def check_invariants(accounting: BlockAccounting, under_way: bool) -> None:
    """Verify that nothing is lost or counted twice; `under_way`: a step is planned, not finished.

    Raises EngineInvariantError. O(blocks + sequences * log n).
    """
    waiting, units = accounting.waiting.live(), accounting.swapped.units()
    swapped = [sequence for unit in units for sequence in unit]
    tables = [sequence.blocks for sequence in accounting.running]
    if accounting.adapters is not None:
        tables += accounting.adapters.tables()
        users: Counter[Hashable] = Counter(
            s.request.adapter for s in accounting.running if s.request.adapter is not None
        )
        accounting.adapters.check(dict(users))
    accounting.pool.check(tables)
    accounting.host.check(sequence.blocks for sequence in swapped)
    _check(len(waiting) == len(accounting.waiting), "the queue miscounts what waits")
    _check_running(accounting, under_way)
    accounting.lockstep.check(accounting.running)
    for s in waiting:
        _check(s.state == SequenceState.WAITING, "waits in the wrong state", s)
        _check(not s.blocks and s.computed_tokens == 0, "waits and holds blocks", s)
    for s in swapped:
        _check(s.state == SequenceState.SWAPPED, "is swapped in the wrong state", s)
        _check(len(s.blocks) == accounting.blocks_for(s.computed_tokens), "lost blocks", s)
    _check_all_there(accounting, waiting, swapped)


def _check_running(accounting: BlockAccounting, under_way: bool) -> None:
    running = accounting.running
    keys = [s.key for s in running]
    _check(keys == sorted(set(keys)), "the running sequences are out of order")
    _check(accounting.seats_free() >= 0, "too many sequences run")
    groups = {id(s.group): s.group for s in running if s.group is not None}
    _check(len(groups) == accounting.groups_running, "the running groups are miscounted")
    held = sum(len(group.members) - 1 for group in groups.values() if not group.forked)
    _check(held == accounting.seats_held, "the held seats are miscounted")
    for s in running:
        _check(s.state == SequenceState.RUNNING, "runs in the wrong state", s)
        planned = s.scheduled_tokens if under_way else 0
        _check(
            accounting.blocks_for(s.computed_tokens)
            <= len(s.blocks)
            <= accounting.blocks_for(s.computed_tokens + planned),
            "holds more or fewer blocks than its tokens take",
            s,
        )
        _check(s.computed_tokens <= s.known_tokens, "computed more than it knows", s)
        _check(s.produced_tokens < s.output_tokens, "should have ended", s)


def _check_all_there(
    accounting: BlockAccounting, waiting: list[Sequence], swapped: list[Sequence]
) -> None:
    """Every unfinished sequence is in exactly one place."""
    places = Counter(id(s) for s in (*accounting.running, *waiting, *swapped))
    for sequences in accounting.requests.values():
        for s in sequences:
            if s.state == SequenceState.HELD:
                group = s.group
                _check(group is not None and not group.forked, "waits for no prompt", s)
                _check(not s.blocks, "waits for its prompt and holds blocks", s)
                places[id(s)] += 1
            _check(places.pop(id(s), 0) == 1, "a sequence is lost, or counted twice")
    _check(not places, "a sequence is there that no request has")


def _check(condition: bool, what: str, sequence: Sequence | None = None) -> None:
    # The message is built only if it is needed: building takes longer than the test.
    if not condition:
        raise EngineInvariantError(what if sequence is None else f"{sequence} {what}")
