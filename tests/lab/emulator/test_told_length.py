from typing import Any

import pytest

from schedsvc_lab.emulator.errors import ApiError
from schedsvc_lab.emulator.intake import Intake
from schedsvc_lab.emulator.output import Output
from schedsvc_lab.emulator.tokenizer import Tokenizer


def answer(**fields: Any) -> Output:
    body = {"prompt": [5, 6, 7], "max_tokens": 100, **fields}
    return Intake(Tokenizer(), "m", 1_000).completion(body, {}).plans[0].outputs[0]


@pytest.mark.parametrize(
    ("fields", "tokens", "reason"),
    [
        ({"emulated_output_tokens": 7}, 7, "stop"),
        ({"emulated_output_tokens": 99}, 99, "stop"),
        ({"emulated_output_tokens": 100}, 100, "length"),
        ({"emulated_output_tokens": 5_000}, 100, "length"),
        ({"emulated_output_tokens": 7, "min_tokens": 20}, 20, "stop"),
        ({"emulated_output_tokens": 7, "ignore_eos": True}, 100, "length"),
    ],
)
def test_a_stated_length_ends_the_answer_within_its_limits(
    fields: dict[str, Any], tokens: int, reason: str
) -> None:
    output = answer(**fields)
    assert (output.tokens, output.finish_reason) == (tokens, reason)


@pytest.mark.parametrize("value", [0, -1, 1.5, "7", True, 2**63])
def test_a_wrong_length_is_named(value: object) -> None:
    with pytest.raises(ApiError, match="emulated_output_tokens"):
        answer(emulated_output_tokens=value)
