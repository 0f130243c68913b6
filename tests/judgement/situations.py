"""Reads the recorded situations, and the labels that people gave them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from google.protobuf.json_format import ParseDict
from schedsvc_client.v1 import scheduler_pb2 as pb

from .plays import Pair

__all__ = ["HERE", "LEVELS", "Label", "labels", "recorded"]

HERE = Path(__file__).parent
LEVELS = ("ok", "notice", "trouble", "unknown")


@dataclass(frozen=True)
class Label:
    """Holds what a person says to a situation."""

    name: str
    level: str
    names: tuple[str, ...]
    silent: tuple[str, ...]

    def faults(self, level: str, text: str) -> list[str]:
        """Return what is wrong with a judgement; none: it is right."""
        said = text.lower()
        found = [f"is {level}, not {self.level}"] if level != self.level else []
        found += [f"does not name {name}" for name in self.names if name.lower() not in said]
        return found + [f"names {name}" for name in self.silent if name.lower() in said]


def labels() -> list[Label]:
    """Return the labels of the first reader, and of the second if there are any."""
    found: list[Label] = []
    for file in ("labels.yaml", "second.yaml"):
        if (HERE / file).exists():
            rows: dict[str, Any] = yaml.safe_load((HERE / file).read_text()) or {}
            found += [
                Label(name, row["level"], tuple(row["names"]), tuple(row.get("silent", ())))
                for name, row in rows.items()
            ]
    return found


def recorded(name: str) -> Pair:
    """Return the snapshots of a situation."""
    found = json.loads((HERE / "recorded" / f"{name}.json").read_text())

    def read(answer: dict[str, Any]) -> pb.StatsResponse:
        return ParseDict(answer, pb.StatsResponse(), ignore_unknown_fields=True)

    then = None if found["then"] is None else read(found["then"])
    return Pair(then, read(found["now"]), found["age_ms"])
