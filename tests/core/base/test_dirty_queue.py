"""Compares the line of what has changed with an ordered dictionary."""

from hypothesis import given

from . import many, probe


@given(many(lambda rnd: rnd.choice((None, rnd.randrange(90), rnd.randrange(90))), 1_000))
def test_each_row_is_queued_once_and_the_oldest_comes_first(changes):
    queue, model, numbers = probe().ProbeQueue(on=True), {}, 0
    for number in changes:
        if number is None:
            assert queue.take() == next(iter(model), -1)
            model.pop(next(iter(model), None), None)
            continue
        numbers = max(numbers, number + 1)
        queue.reserve(numbers)
        queue.mark(number)
        model[number] = None
    assert [queue.take() for _ in range(len(model) + 1)] == [*model, -1]


def test_without_saving_nothing_is_queued_to_save():
    queue = probe().ProbeQueue(on=False)
    queue.reserve(10)
    queue.mark(3)
    assert queue.take() == -1
