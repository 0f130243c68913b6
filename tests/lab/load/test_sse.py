import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedsvc_lab.load.sse import Scanner

from .fake import DONE, event, token, usage

STREAM = token("a") + b": ping\n\n" + token('"usage":{ "choices":[{') + usage(7, 2) + DONE


def scan(pieces: list[bytes]) -> tuple[int, Scanner]:
    scanner = Scanner()
    return sum(scanner.feed(piece) for piece in pieces), scanner


@given(st.lists(st.integers(0, len(STREAM))), st.booleans())
def test_pieces_may_be_cut_anywhere(cuts: list[int], crlf: bool) -> None:
    stream = STREAM.replace(b"\n", b"\r\n") if crlf else STREAM
    places = sorted({0, *cuts, len(stream)})
    pieces = [stream[low:high] for low, high in pairwise(places)]
    outputs, scanner = scan(pieces)
    assert outputs == 2
    assert scanner.done
    assert scanner.usage == {"prompt_tokens": 7, "completion_tokens": 2}
    assert scanner.error is None


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_json_with_and_without_spaces(separators: tuple[str, str]) -> None:
    data = {"choices": [{"text": ""}], "usage": {"completion_tokens": 1}}
    outputs, scanner = scan([f"data:{json.dumps(data, separators=separators)}\n\n".encode()])
    assert outputs == 1
    assert scanner.usage == {"completion_tokens": 1}


def test_an_error_in_the_stream() -> None:
    outputs, scanner = scan([token(), event({"error": {"code": "engine_dead"}})])
    assert outputs == 1
    assert scanner.error == {"code": "engine_dead"}
    assert not scanner.done


def test_events_with_names_and_ids() -> None:
    outputs, _ = scan([b"event: message\nid: 3\n" + token(), b"event: ping\n\n", b"\n\n"])
    assert outputs == 1


def test_an_event_without_its_end_does_not_count() -> None:
    assert scan([token()[:-1]])[0] == 0


def test_a_usage_event_that_is_not_json() -> None:
    with pytest.raises(ValueError, match="Expecting"):
        scan([b'data: {"usage":{"prompt_tokens":\n\n'])
