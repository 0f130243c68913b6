"""Compares the heap with a sorted dictionary."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from . import many, probe


def key(rnd):
    return rnd.choice((rnd.randint(-5, 5), rnd.randrange(-(1 << 63), 1 << 63)))


def change(rnd):
    return rnd.randrange(40), rnd.choice((None, (key(rnd), key(rnd)), (key(rnd), key(rnd))))


CHANGES = many(change, 150)


def filled(changes):
    heap, model = probe().ProbeHeap(), {}
    for id, place in changes:
        if place is None:
            heap.remove(id)
            model.pop(id, None)
        else:
            heap.put(id, *place)
            model[id] = place
        yield heap, model


def last(changes):
    """Return the heap and the model after all changes."""
    return deque(filled(changes), maxlen=1).pop() if changes else (probe().ProbeHeap(), {})


def in_order(model):
    return sorted((*place, id) for id, place in model.items())


@given(CHANGES)
def test_the_least_is_first_after_every_change(changes):
    for heap, model in filled(changes):
        assert heap.is_valid()
        assert len(heap) == len(model)
        assert {id for id in range(50) if id in heap} == set(model)
        assert all(heap.key_of(id) == key for id, (key, _) in model.items())
        if model:
            # Equal places may come in any order.
            assert heap.first()[:2] == min(model.values())
            assert model[heap.first()[2]] == min(model.values())


@given(CHANGES)
def test_it_empties_in_order(changes):
    heap, model = last(changes)
    found = []
    while len(heap):
        found.append(heap.first())
        heap.remove(heap.first()[2])
    assert [place[:2] for place in found] == [place[:2] for place in in_order(model)]


@given(CHANGES, CHANGES)
def test_the_best_of_two_heaps_are_the_least_of_both(own, other):
    heaps = []
    for number, changes in enumerate((own, other)):
        heap, model = probe().ProbeHeap(), {}
        for id, place in changes:
            heap.remove(id + 100 * number)
            model.pop(id + 100 * number, None)
            if place is not None:
                heap.put(id + 100 * number, *place)
                model[id + 100 * number] = place
        heaps.append((heap, model))
    both = heaps[0][1] | heaps[1][1]
    pairs = heaps[0][0].best_first(heaps[1][0])
    assert all((id in heaps[1][1]) == of_other for id, of_other in pairs)
    found = [id for id, _ in pairs]
    assert len(found) == len(set(found)) == min(8, len(both))
    assert [both[id] for id in found] == sorted(both.values())[:8]


@given(CHANGES, st.integers(-1, 5))
def test_the_first_key_is_the_lesser_of_the_heap_and_another(changes, other):
    changes = [(id, place and (abs(place[0]) % 7, place[1])) for id, place in changes]
    heap, model = last(changes)
    known = [key for key, _ in model.values()] + [other] * (other >= 0)
    assert heap.first_key(other) == (min(known) if known else -1)


def test_earlier_of_two_times_ignores_minus_one():
    earlier_of = probe().earlier_of
    assert [earlier_of(*pair) for pair in ((3, 5), (5, 3), (-1, 5), (5, -1), (-1, -1))] == [
        3, 3, 5, 5, -1,
    ]  # fmt: skip
