"""Kills scheduler, gate and engine under load, and compares the ledger with the engine's counts.

`make usage-proof` goes on where a former run ended: everything it needs is in its folder.
"""

import argparse
import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from schedsvc.usage.export import Span, plain_rows

# Lease TTL and grace are the defaults, 30 s together. A restarted scheduler refuses replays after
# that time, so with 1 s the proof lost usage whenever the machine stalled for a second.
_EXPIRY_S = 90.0
_CONFIG = f"""
listeners: [{{unix: scheduler.sock}}]
usage: {{path: usage.db}}
tenants: [{", ".join(f"{{name: t{i}}}" for i in range(8))}]
"""
_LOOK_S = 0.02
_LOOK_AT_LEDGER_S = 0.5


@dataclass
class Counts:
    """The counts that the engine wrote, by lease."""

    reports: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    inputs: dict[int, int] = field(default_factory=dict)


def read_counts(folder: Path) -> Counts:
    """Read all counts files. O(lines)."""
    counts = Counts()
    for path in sorted(folder.glob("counts-*")):
        for line in path.read_text().splitlines():
            kind, lease, tenant, asked, output = line.split()
            counts.inputs[int(lease)] = int(asked)
            if kind == "d":
                counts.ends[int(lease)] = (tenant, int(asked), int(output))
            else:
                counts.reports[int(lease)].append(int(output))
    return counts


def compare(folder: Path) -> dict[str, int]:
    """Compare ledger and counts; raise AssertionError at a difference. Returns figures."""
    counts = read_counts(folder)
    with sqlite3.connect(folder / "usage.db") as connection:
        known = {lease for (lease,) in connection.execute("SELECT lease_id FROM leases")}
        rows = connection.execute("SELECT lease_id, input_tokens, output_tokens FROM estimates")
        estimates = {lease: (asked, output) for lease, asked, output in rows}
    connection.close()
    missing = (counts.ends.keys() | counts.reports.keys()) - known
    assert not missing, f"{len(missing)} leases are not in the ledger, such as {min(missing)}"
    expected: Counter[tuple[str, str]] = Counter()
    for lease, (tenant, asked, output) in counts.ends.items():
        if lease not in estimates:
            for name, tokens in (("requests", 1), ("input", asked), ("output", output)):
                expected[tenant, name] += tokens
    found: Counter[tuple[str, str]] = Counter()
    for row in plain_rows(folder / "usage.db", ("tenant", "estimated"), Span()):
        if not row["estimated"]:
            found[row["tenant"], "requests"] = row["requests"]
            found[row["tenant"], "input"] = row["input_tokens"]
            found[row["tenant"], "output"] = row["output_tokens"]
    assert found == expected, f"the ledger differs: {found - expected} {expected - found}"
    for lease, (_, output) in estimates.items():
        reported = [0, *counts.reports[lease]]
        # The last report may have been under way when the process was killed.
        bounds = reported[max(0, len(reported) - 2)], reported[-1]
        assert bounds[0] <= output <= bounds[1], f"lease {lease}: {output} outside {bounds}"
    return {
        "exact_requests": len(counts.ends.keys() - estimates.keys()),
        "exact_tokens": sum(n for (_, name), n in expected.items() if name != "requests"),
        "cut_off": len(estimates),
    }


class Proof:
    """One folder: a scheduler, a shim, and what both left behind."""

    def __init__(self, folder: Path, requests: int, kills: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._requests, self._kills = requests, kills
        (folder / "schedsvc.yaml").write_text(_CONFIG)
        self._done = self._read_progress()
        self._read: dict[Path, tuple[int, int]] = {}  # bytes and ends, by counts file
        self._scheduler: subprocess.Popen[bytes] | None = None
        self._shim: subprocess.Popen[bytes] | None = None

    def run(self) -> dict[str, int]:
        """Do what is left; return the figures of `compare()`."""
        try:
            self._start_scheduler()
            while (ended := self._ended()) < self._requests:
                if self._shim is None or self._shim.poll() is not None:
                    assert self._shim is None or self._shim.returncode in (0, -signal.SIGKILL)
                    self._start_shim(self._requests - ended)
                if self._done < self._kills and ended >= self._next_kill():
                    self._kill()
                time.sleep(_LOOK_S)
            assert self._shim is not None
            assert self._shim.wait(120) == 0
            self._wait_for_expiry()
        finally:
            for process in (self._shim, self._scheduler):
                if process is not None and process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                    process.wait(60)
        return compare(self._folder) | {"kills": self._done}

    def _next_kill(self) -> int:
        return self._requests * (self._done + 1) // (self._kills + 1)

    def _kill(self) -> None:
        """Kill the scheduler, the gate with its engine, or the engine alone, in turn."""
        what = ("scheduler", "gate", "engine")[self._done % 3]
        assert self._scheduler is not None
        assert self._shim is not None
        if what == "scheduler":
            self._scheduler.kill()
            self._scheduler.wait()
            self._start_scheduler()
        elif what == "gate":
            self._shim.kill()
            self._shim.wait()
            # A scheduler that is killed before the leases expire would not know of them.
            self._wait_for_expiry()
        else:
            self._shim.send_signal(signal.SIGUSR1)
        self._done += 1
        (self._folder / "progress.json").write_text(json.dumps({"kills": self._done}))

    def _wait_for_expiry(self) -> None:
        """Wait until the ledger knows every lease of the counts, or `_EXPIRY_S` have passed."""
        counts = read_counts(self._folder)
        for _ in range(int(_EXPIRY_S / _LOOK_AT_LEDGER_S)):
            with sqlite3.connect(self._folder / "usage.db") as connection:
                rows = connection.execute("SELECT lease_id FROM leases")
                known = {lease for (lease,) in rows}
            connection.close()
            if (counts.ends.keys() | counts.reports.keys()) <= known:
                return
            time.sleep(_LOOK_AT_LEDGER_S)

    def _start_scheduler(self) -> None:
        ready = self._folder / "ready.json"
        ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", "schedsvc", "serve", "--config", "schedsvc.yaml"]
        with (self._folder / "scheduler.log").open("ab") as log:
            self._scheduler = subprocess.Popen(
                [*command, "--ready-file", "ready.json"], cwd=self._folder, stderr=log
            )
        while not ready.exists():
            assert self._scheduler.poll() is None, "see scheduler.log"
            time.sleep(_LOOK_S)

    def _start_shim(self, requests: int) -> None:
        number = len(list(self._folder.glob("counts-*")))
        counts = self._folder / f"counts-{number:03}"
        counts.touch()
        command = [sys.executable, "-m", "tests.usage.shim"]
        target = f"unix:{self._folder / 'scheduler.sock'}"
        self._shim = subprocess.Popen([*command, target, str(counts), str(requests), str(number)])

    def _ended(self) -> int:
        """Count the ends. O(new lines): the files have 30 MB in the end."""
        for path in self._folder.glob("counts-*"):
            offset, ends = self._read.get(path, (0, 0))
            with path.open("rb") as file:
                file.seek(offset)
                lines = file.read().splitlines(keepends=True)
            if lines and not lines[-1].endswith(b"\n"):
                lines.pop()
            ends += sum(line.startswith(b"d ") for line in lines)
            self._read[path] = offset + sum(map(len, lines)), ends
        return sum(ends for _, ends in self._read.values())

    def _read_progress(self) -> int:
        path = self._folder / "progress.json"
        return int(json.loads(path.read_text())["kills"]) if path.exists() else 0


def main() -> None:
    """Run the proof and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("out/usage-proof"))
    given = parser.parse_args()
    print(json.dumps(Proof(given.out.absolute(), given.requests, given.kills).run()))


if __name__ == "__main__":
    main()
