"""Records the situations: `python -m tests.judgement.record [NAME]...`."""

import json
import sys
from pathlib import Path

from google.protobuf.json_format import MessageToDict

from .second_plays import PLAYS

RECORDED = Path(__file__).parent / "recorded"


def record(name: str) -> None:
    """Play a situation, and write it."""
    pair = PLAYS[name]()
    then = None if pair.then is None else MessageToDict(pair.then, preserving_proto_field_name=True)
    now = MessageToDict(pair.now, preserving_proto_field_name=True)
    found = {"age_ms": pair.age_ms, "then": then, "now": now}
    (RECORDED / f"{name}.json").write_text(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    for each in sys.argv[1:] or PLAYS:
        record(each)
