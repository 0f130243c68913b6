"""The judge of the conformance scripts is itself judged."""

import pytest

from .matching import Json, fill, look_up, matches, mismatches


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        ({"a": 1}, {"a": "1", "b": 2}),
        ({"a": "18446744073709551615"}, {"a": 18446744073709551615}),
        ({"a": None}, {}),
        ([1, {"b": "x"}], ["1", {"b": "x", "c": 3}]),
        ({"$min": 1, "$max": 3}, "3"),
        ({"$one_of": [1, 2]}, 2),
        ({"$not": 1}, 2),
        ({"$has": {"k": 1}}, [{"k": 0}, {"k": "1"}]),
        ({"$has": "token"}, "input_tokens"),
        (True, True),
    ],
)
def test_actual_value_matches(expected: Json, actual: Json) -> None:
    assert matches(expected, actual)


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        ({"a": 1}, {"a": "2"}),
        ({"a": 1}, {}),
        ({"a": 1}, None),
        ({"a": None}, {"a": {}}),
        ([1], [1, 2]),
        (1, True),
        (True, 1),
        ({"$min": 1}, 0),
        ({"$min": 1}, None),
        ({"$max": 3}, "4"),
        ({"$one_of": [1, 2]}, 3),
        ({"$not": 2}, 2),
        ({"$has": {"k": 1}}, [{"k": 0}]),
        ({"$has": "x"}, None),
    ],
)
def test_actual_value_does_not_match(expected: Json, actual: Json) -> None:
    assert not matches(expected, actual)


def test_a_mismatch_names_its_place() -> None:
    found = list(mismatches({"a": [{"b": 1}]}, {"a": [{"b": 2}]}))
    assert found == ["a[0].b is 2, not 1"]


def test_an_unknown_operator_is_an_error() -> None:
    with pytest.raises(ValueError, match="no operator"):
        list(mismatches({"$gt": 1}, 2))


def test_values_are_filled_in() -> None:
    assert fill({"a": ["$x", {"$repeat": ["ab", 2]}]}, {"x": 7}) == {"a": [7, "abab"]}
    assert fill({"$repeat": [{"k": "$x"}, 2]}, {"x": 7}) == [{"k": 7}, {"k": 7}]
    with pytest.raises(KeyError, match="nothing was saved"):
        fill("$missing", {})


def test_a_path_is_followed() -> None:
    assert look_up({"v": [{"g": {"id": "5"}}]}, "v[0].g.id") == "5"
