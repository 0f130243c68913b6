"""Compares the books of the proof: the counts of the engine, the whole answers, the ledger."""

import json
import sqlite3
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from schedsvc.records.usage.export import Span, plain_rows

from .clients import Attempt

#: The gate reports a running request's tokens once in this time; its machine may stall besides.
INTERVAL_S, STALL_S = 1.0, 4.0


@dataclass
class Count:
    """Counts the lines that the engine wrote of one attempt."""

    done: bool = False
    output_tokens: int = 0
    at: list[tuple[int, int]] = field(default_factory=list)

    def least(self) -> int:
        """Return the tokens that it had one interval, and a stall, before the last."""
        before_ns = self.at[-1][0] if self.at else 0
        before_ns -= int((INTERVAL_S + STALL_S) * 1e9)
        return max((tokens for at_ns, tokens in self.at if at_ns <= before_ns), default=0)


def read_counts(folder: Path) -> dict[int, Count]:
    """Read the engine's counts by attempt. O(lines)."""
    counts: dict[int, Count] = defaultdict(Count)
    with (folder / "counts").open() as lines:
        for line in lines:
            told = json.loads(line)
            count = counts[number_of(told["request_id"])]
            count.output_tokens, count.done = told["output_tokens"], told["done"]
            count.at.append((told["at_ns"], told["output_tokens"]))
    return counts


def number_of(request_id: str) -> int:
    """Return the attempt's number in an id of the engine's: a second try has a suffix."""
    return int(request_id.split("~")[0])


def compare(folder: Path) -> dict[str, int]:
    """Compare ledger, counts and answers; return figures. Raises AssertionError."""
    counts = read_counts(folder)
    whole = {int(line) for line in (folder / "whole").read_text().split()}
    missing = [number for number in whole if not counts[number].done]
    assert not missing, f"{len(missing)} whole answers are not in the counts, such as {missing[0]}"
    cut_off = counts.keys() - whole
    estimates = _estimates(folder)
    marked = set()
    for (tenant, input_tokens), (lease, output) in estimates.items():
        # Also of a whole answer, if the proxy was killed before the scheduler knew of its end.
        number = Attempt.found(tenant, input_tokens).number
        # Before its first report, an estimate has its prompt alone.
        count = counts.get(number, Count())
        assert count.least() <= output <= count.output_tokens, f"lease {lease}: {output}"
        marked.add(number)
    least, most = _bounds(counts, whole - marked, cut_off - marked)
    found_tokens = _exact_rows(folder)
    for key in least.keys() | most.keys() | found_tokens.keys():
        bounds = least[key], most[key]
        assert bounds[0] <= found_tokens[key] <= bounds[1], (
            f"the ledger differs: {key} is {found_tokens[key]}, not within {bounds}"
        )
    exact = [key for key in most if least[key] == most[key]]
    return {
        "whole": len(whole),
        "cut_off": len(cut_off),
        "estimates": len(estimates),
        "sums": len(most),
        "sums_without_a_cut_off": len(exact),
        "tokens": sum(n for (_, kind), n in found_tokens.items() if kind != "requests"),
        "tokens_equal": sum(found_tokens[key] for key in exact if key[1] != "requests"),
    }


def _key(number: int) -> tuple[str, int]:
    return Attempt(number).tenant, Attempt(number).input_tokens


def _bounds(
    counts: dict[int, Count], whole: set[int], cut_off: set[int]
) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]:
    """Return the least and the most that rows of each tenant may have that are no estimates."""
    least: Counter[tuple[str, str]] = Counter()
    most: Counter[tuple[str, str]] = Counter()
    for number in whole | cut_off:
        tenant, input_tokens = _key(number)
        count = counts[number]
        for name, tokens in (
            ("requests", 1), ("input", input_tokens), ("output", count.output_tokens),
        ):  # fmt: skip
            most[tenant, name] += tokens
            if number in whole:
                least[tenant, name] += tokens
        if number in cut_off:
            least[tenant, "output"] += count.least()
    return least, most


def _estimates(folder: Path) -> dict[tuple[str, int], tuple[int, int]]:
    query = "SELECT tenant, input_tokens, lease_id, output_tokens FROM estimates"
    with sqlite3.connect(folder / "usage.db") as connection:
        rows = connection.execute(query).fetchall()
    connection.close()
    return {(tenant, asked): (lease, output) for tenant, asked, lease, output in rows}


def _exact_rows(folder: Path) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for row in plain_rows(folder / "usage.db", ("tenant", "estimated"), Span()):
        if not row["estimated"]:
            found[row["tenant"], "requests"] = row["requests"]
            found[row["tenant"], "input"] = row["input_tokens"]
            found[row["tenant"], "output"] = row["output_tokens"]
    return found
