"""Draws the panels of the Grafana dashboard from a Prometheus: `python -m deploy.panels URL`.

Grafana is not needed. The variables are filled in as Grafana fills them in, all tenants chosen.
"""

import json
import math
import re
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from deploy.dashboard import PANELS, Panel, steps_of
from schedsvc.text.option_types import check_file

__all__ = ["Line", "draw", "lines_of"]

_POINTS_MAX = 400
_INK, _GRID = "#2b2d42", "#e6e8ec"
_COLORS = ("#00798c", "#d1495b", "#edae49", "#66a182", "#2e4057", "#8d96a3")
_LEVELS = {"green": "#2e7d32", "orange": "#b26a00", "red": "#b3261e"}
_STYLES = ("-", "--", ":")
_LEGEND_MAX = 9


class Line(NamedTuple):
    """Describes one series: its legend, times in s since 1970, and values."""

    legend: str
    times: list[float]
    values: list[float]


def lines_of(answer: Any, legend: str) -> list[Line]:
    """Return the series of an answer to query_range; those without any value are left out.

    Raises ValueError if the answer is an error.
    """
    if answer.get("status") != "success":
        raise ValueError(f"Prometheus: {answer.get('error', answer)}")
    lines = []
    for row in answer["data"]["result"]:
        # Every other part is the name of a label.
        parts = re.split(r"{{(\w+)}}", legend)
        parts[1::2] = [row["metric"].get(label, "") for label in parts[1::2]]
        name = "".join(parts)
        points = [(at, float(value)) for at, value in row["values"]]
        known = [(at, value) for at, value in points if math.isfinite(value)]
        if known:
            lines.append(Line(name, [at for at, _ in known], [value for _, value in known]))
    return sorted(lines)


def ask(url: str, query: str, begin_s: float, end_s: float) -> Any:
    """Ask for a query over a time. Raises OSError."""
    step = max(1, round((end_s - begin_s) / _POINTS_MAX))
    for variable, value in (("$__rate_interval", f"{max(20, 4 * step)}s"), ("$tenant", ".*")):
        query = query.replace(variable, value)
    words = urllib.parse.urlencode({"query": query, "start": begin_s, "end": end_s, "step": step})
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url}: must be a URL of a Prometheus, such as http://127.0.0.1:9090")
    asked = f"{url}/api/v1/query_range?{words}"
    with urllib.request.urlopen(asked, timeout=30) as found:  # noqa: S310 - its scheme was checked
        return json.load(found)


def draw(panels: Sequence[tuple[Panel, list[Line]]], path: Path) -> None:
    """Draw panels beside and below each other into a PNG, times in minutes since the first."""
    stats = [found for found in panels if found[0].is_stat]
    charts = [found for found in panels if not found[0].is_stat]
    rows = math.ceil(len(charts) / 3)
    heights = (1.0, 2.4 * rows)
    figure = Figure(figsize=(16, sum(heights)), dpi=80, facecolor="white", layout="constrained")
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=heights)[:, 0]
    for at, (panel, lines) in enumerate(stats):
        _stat(above.add_subplot(1, len(stats), at + 1), panel, lines)
    begin_s = min((line.times[0] for _, lines in charts for line in lines), default=0.0)
    for at, (panel, lines) in enumerate(charts):
        _panel(below.add_subplot(rows, 3, at + 1), panel, lines, begin_s)
    figure.savefig(path)


def _stat(axes: Axes, panel: Panel, lines: list[Line]) -> None:
    """Draw the last value of a panel, in the colour of its thresholds."""
    axes.set_title(panel.title, loc="left", fontsize=10, color=_INK)
    axes.set_axis_off()
    color, shown = _INK, "no data"
    if lines:
        value = lines[0].values[-1]
        shown = _value(float(f"{value:.3g}"), panel.unit)
        for step in steps_of(panel) if panel.thresholds else ():
            if step["value"] is None or value >= step["value"]:
                color = _LEVELS[step["color"]]
    axes.text(0.0, 0.4, shown, fontsize=22, color=color, transform=axes.transAxes, va="center")


def _panel(axes: Axes, panel: Panel, lines: list[Line], begin_s: float) -> None:
    axes.set_title(panel.title, loc="left", fontsize=10, color=_INK)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _value(value, panel.unit)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda minutes, _: f"{minutes:g} min"))
    axes.grid(color=_GRID)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    # A series that is 0 throughout says nothing, unless all are.
    shown = [line for line in lines if any(line.values)] or lines
    heads = list(dict.fromkeys(line.legend.partition(" ")[0] for line in shown))
    tails = list(dict.fromkeys(line.legend.partition(" ")[2] for line in shown))
    for at, line in enumerate(shown):
        head, _, tail = line.legend.partition(" ")
        axes.plot(
            [(time_s - begin_s) / 60 for time_s in line.times],
            line.values,
            color=_COLORS[heads.index(head) % len(_COLORS)],
            linestyle=_STYLES[tails.index(tail) % len(_STYLES)],
            lw=1.3,
            label=line.legend if at < _LEGEND_MAX else None,
        )
    top = max((max(line.values) for line in shown), default=0.0)
    for step in steps_of(panel) if panel.thresholds else ():
        # One far above all values would flatten them.
        if step["value"] is not None and step["value"] <= 2 * top:
            axes.axhline(step["value"], color=_LEVELS[step["color"]], lw=1, ls=(0, (4, 3)))
    axes.set_ylim(bottom=0)
    if shown:
        axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    else:
        axes.text(0.5, 0.5, "no data", ha="center", transform=axes.transAxes, color=_INK)


def _value(value: float, unit: str) -> str:
    """Write a value as Grafana does for this unit."""
    if unit == "s":
        return f"{value * 1e3:g} ms" if 0 < value < 1 else f"{value:g} s"
    if unit == "percentunit":
        return f"{value:.0%}"
    number = f"{value / 1e3:g} k" if value >= 1e4 else f"{value:g}"
    return number + {"reqps": "/s", "ops": "/s"}.get(unit, "")


@click.command()
@click.argument("url")
@click.option("--seconds", default=300.0, show_default=True, help="Draw the last SECONDS.")
@click.option("--out", default="docs/operate/dashboard.png", show_default=True, type=click.Path())
def main(url: str, seconds: float, out: str) -> None:
    """Draw all panels from the Prometheus at URL."""
    check_file(Path(out))
    end_s = time.time()
    panels = [
        (
            panel,
            [
                line
                for query, legend in panel.queries
                for line in lines_of(ask(url, query, end_s - seconds, end_s), legend)
            ],
        )
        for panel in PANELS
    ]
    draw(panels, Path(out))
    click.echo(
        f"{out}: {sum(bool(lines) for _, lines in panels)} of {len(panels)} panels with data"
    )


if __name__ == "__main__":
    sys.exit(main())
