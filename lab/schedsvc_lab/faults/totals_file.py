"""Keeps totals of a long run in a file, from which the next command goes on."""

import json
import os
from pathlib import Path

from schedsvc_lab.faults.run import Case, Tally

STORE_EACH = 20
"""Seeds between two writes."""


class TotalsFile:
    """Holds totals over all commands that named this file: seeds in order, from the first."""

    def __init__(self, path: Path, first: int) -> None:
        """Read the file if it exists. Raises ValueError if it was begun at another seed."""
        self.path = path
        self.first = first
        self.cpu_s = 0.0
        self.tally = Tally()
        if path.exists():
            self._read(json.loads(path.read_text()))

    @property
    def next_seed(self) -> int:
        """Return the first seed that no command has run."""
        return self.first + self.tally.seeds

    def _read(self, told: dict[str, object]) -> None:
        if told.get("first_seed") != self.first:
            raise ValueError(
                f"{self.path} was begun at seed {told.get('first_seed')}, not {self.first};"
                " give that seed, or another file"
            )
        tally = self.tally
        tally.seeds, tally.events = int(str(told["seeds"])), int(str(told["events"]))
        faults, failures = told["faults"], told["failures"]
        if isinstance(faults, dict):
            tally.faults |= faults
        if isinstance(failures, list):
            tally.failures += [(Case(one["seed"]), one["violation"]) for one in failures]
        self.cpu_s = float(str(told["cpu_s"]))

    def store(self, cpu_s: float) -> None:
        """Write the totals in one step; `cpu_s`: of this command."""
        tally, all_s = self.tally, self.cpu_s + cpu_s
        told = {
            "first_seed": self.first,
            "next_seed": self.next_seed,
            "seeds": tally.seeds,
            "events": tally.events,
            "violations": len(tally.failures),
            "cpu_s": round(all_s, 3),
            "events_per_s": round(tally.events / max(all_s, 1e-3)),
            "faults": tally.faults,
            "failures": [{"seed": c.seed, "violation": what} for c, what in tally.failures],
        }
        fresh = self.path.with_name(self.path.name + ".new")
        fresh.write_text(json.dumps(told, indent=2) + "\n")
        os.replace(fresh, self.path)
