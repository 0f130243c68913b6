"""Compares `schedsvc load` with `vllm bench serve`: the same figures, in its form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from schedsvc_lab.load.result import OWN_KEYS

from .load_compare import compare

# They compare times.
pytestmark = pytest.mark.alone

# One round on a machine that stalls shows no more; `python -m tests.vllm.load_compare` holds the
# bars of 3 % and 5 %, on a quiet one. A figure in other units or of other requests is far outside.
THROUGHPUT_OFF_MAX = 0.10
TTFT_OFF_MAX = 0.40


@pytest.fixture(scope="module")
def compared(folder: Path) -> dict[str, Any]:
    place = folder / "load"
    place.mkdir()
    return compare(place, rounds=1, requests=100, rate=5.0, may_be_late=True)


def test_the_figures_agree(compared: dict[str, Any]) -> None:
    off = compared["off"]
    assert abs(off["request_throughput"]) <= THROUGHPUT_OFF_MAX, compared
    assert abs(off["output_throughput"]) <= THROUGHPUT_OFF_MAX, compared
    assert abs(off["median_ttft_ms"]) <= TTFT_OFF_MAX, compared


def test_the_counts_are_the_same(compared: dict[str, Any]) -> None:
    theirs, ours = (compared["runs"][name][0] for name in ("vllm", "ours"))
    for key in ("completed", "failed", "num_prompts", "total_input_tokens", "total_output_tokens"):
        assert ours[key] == theirs[key], key
    assert sorted(ours["output_lens"]) == sorted(theirs["output_lens"])


def test_the_keys_are_exactly_vllms_and_ours(compared: dict[str, Any]) -> None:
    theirs, ours = (set(compared["runs"][name][0]) for name in ("vllm", "ours"))
    # The answers' texts are not kept, and the command asked for percentiles besides the 99th.
    more = {
        f"p{at}_{metric}_ms" for at in (50, 90, 95) for metric in ("ttft", "tpot", "itl", "e2el")
    }
    assert ours - OWN_KEYS - more == theirs - {"generated_texts"}
    types = {
        key: (type(compared["runs"]["vllm"][0][key]), type(compared["runs"]["ours"][0][key]))
        for key in theirs & ours
    }
    plain = {int: "number", float: "number"}
    differing = {
        key: pair
        for key, pair in types.items()
        if plain.get(pair[0], pair[0]) != plain.get(pair[1], pair[1])
    }
    # Theirs are those of the command line; a trace has its own rate.
    differing.pop("request_rate", None)
    differing.pop("tokenizer_id", None)
    assert not differing
