"""Shows a prefix analysis on the terminal, in 80 columns."""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

_SHARING = ("shared", "mean", "median", "reused", "hits", "most", "gap")
_CAPACITIES_SHOWN = 6
_LEGEND = (
    "shared: of all prompt tokens; mean, median: of a request's prompt; reused: blocks that are "
    "used "
    "again; hits: requests that use a block, mean and most; gap: median time between two of them"
)


def show(statistics: dict[str, Any], console: Console) -> None:
    """Print sharing and cache hit rates of all names."""
    for name, found in statistics.items():
        title = f"{name}: {found['requests']:,} requests, {found['input_tokens']:,} prompt tokens"
        table = _table(title, "block", *_SHARING)
        sizes = sorted(found["block_sizes"], key=int)
        for size in sizes:
            table.add_row(size, *_cells(found["block_sizes"][size]))
        console.print(table)
        for size in sizes:
            own = [point for point in found["caches"] if point["block_tokens"] == int(size)]
            if own:
                console.print(_curves(f"token hit rate, blocks of {size}, by capacity", own))
    console.print(_LEGEND, highlight=False)


def _cells(sharing: dict[str, Any]) -> list[str]:
    fractions, hits, gaps = (
        sharing[name] for name in ("sharing_fraction", "block_hits", "reuse_gap_s")
    )
    return [
        f"{sharing['shared_tokens_share']:.1%}",
        f"{fractions['mean']:.1%}",
        f"{fractions['p50']:.1%}",
        f"{sharing['block_reuse_rate']:.1%}",
        f"{hits['mean']:.2f}" if hits else "-",
        f"{hits['max']:,.0f}" if hits else "-",
        f"{gaps['p50']:,.1f} s" if gaps else "-",
    ]


def _curves(title: str, points: list[dict[str, Any]]) -> Table:
    """Show the largest capacities, as many as fit a line."""
    capacities = sorted({point["capacity_tokens"] for point in points})[-_CAPACITIES_SHOWN:]
    table = _table(title, "policy", *map(short_tokens, capacities))
    for policy in dict.fromkeys(point["policy"] for point in points):
        rates = {p["capacity_tokens"]: p["token_hit_rate"] for p in points if p["policy"] == policy}
        table.add_row(policy, *(f"{rates[capacity]:.1%}" for capacity in capacities))
    return table


def short_tokens(tokens: float) -> str:
    """Write a number of tokens with three digits, as in 93.6M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if tokens >= size:
            return f"{tokens / size:.3g}{unit}"
    return f"{tokens:.0f}"


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, min_width=8)
    for column in columns:
        table.add_column(column, justify="right", min_width=7)
    return table
