"""Measures how often early refusal is right: a load without and with it, and the refused let in.

Requests are hopeless if they miss their deadlines when none is refused for it. Each sample of
the refused is let in by itself, in a fork of the run, otherwise unchanged.
"""

import json
from collections import Counter
from random import Random

import click

from schedsvc import _core as core

from .deadlines import Deadlines, Load

FOR_DEADLINES = (core.REJECTED_DEADLINE, core.EVICTED_DEADLINE)
#: The part of the requests by which the core has learned which deadlines can be met.
LEARNT = 0.2
LOADS = {
    "a fifth": Load(12_000, 5.7, (0.5, 20.0)),
    "few": Load(8_000, 6.3, (0.5, 20.0)),
    "some": Load(4_000, 8.0, (0.5, 20.0), seed=2),
    "many": Load(4_000, 10.0, (1.0, 60.0), seed=4, wave=0.2),
    "half": Load(4_000, 10.3, (0.5, 20.0), seed=5),
}
_EPILOG = """\b
Example:
  python -m tests.lab.sim.early_refusal --samples 500

What has to hold: 20 % to 50 % are hopeless, 90 % of the refused would have missed their deadlines,
95 % of the admitted meet theirs. Exit status 1 where it does not.
"""


def play(load: Load, samples: int) -> dict[str, float]:
    """Play a load without and with early refusal, and let in a sample of the refused, each in a
    run of its own."""
    requests, deadlines = load.draw()
    plain = Deadlines(requests, deadlines)
    plain.run()
    early = Deadlines(requests, deadlines, early_refusal=1)
    early.run()
    outcomes, settled = early.outcomes.outcome, range(int(LEARNT * load.count), load.count)
    # Whose deadline has come in the queue is not refused early.
    decided_ns, came_ns = early.outcomes.decided_ns, requests.arrival_ns
    refused = [
        i
        for i in settled
        if outcomes[i] in FOR_DEADLINES and decided_ns[i] < came_ns[i] + deadlines[i]
    ]
    admitted = [i for i in settled if outcomes[i] == core.GRANTED]
    chosen = Random(load.seed).sample(refused, min(samples, len(refused)))
    again = Deadlines(requests, deadlines, early_refusal=1)
    met = again.let_in_each(chosen)
    assert again.digest() == early.digest(), "the run that is forked is the run that was"
    return {
        "hopeless": sum(not plain.met(i) for i in settled) / len(settled),
        "refused": len(refused),
        "samples": len(met),
        "rightly": sum(not each for each in met.values()) / len(met),
        "in_time": sum(early.met(i) for i in admitted) / len(admitted),
        "in_time_without": sum(plain.met(i) for i in settled)
        / sum(plain.outcomes.outcome[i] == core.GRANTED for i in settled),
        "served_in_time": sum(early.met(i) for i in settled),
        "served_in_time_without": sum(plain.met(i) for i in settled),
        **{f"outcome_{k}": n for k, n in Counter(outcomes[i] for i in settled).items()},
    }


def holds(found: dict[str, float], samples: int) -> bool:
    """Return whether a load was as hopeless as it should be, and early refusal right enough."""
    return (
        0.2 <= found["hopeless"] <= 0.5
        and found["samples"] >= samples
        and found["rightly"] >= 0.90
        and found["in_time"] >= 0.95
    )


@click.command(epilog=_EPILOG)
@click.option("--samples", default=500, show_default=True, help="Refused requests to let in.")
@click.option("--load", "names", type=click.Choice(list(LOADS)), multiple=True, help="This alone.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each load.")
def main(samples: int, names: tuple[str, ...], as_json: bool) -> None:
    """Measure how often early refusal is right, under several loads."""
    good = True
    for name in names or LOADS:
        found = play(LOADS[name], samples)
        good = good and holds(found, samples)
        if as_json:
            click.echo(json.dumps({"load": name, **found}))
            continue
        click.echo(
            f"{name}: {found['hopeless']:.1%} hopeless; {found['refused']} refused, of"
            f" {found['samples']} let in {found['rightly']:.1%} were too late; of those admitted"
            f" {found['in_time']:.1%} in time (without: {found['in_time_without']:.1%})"
        )
    if not good:
        raise SystemExit(1)


if __name__ == "__main__":
    main(prog_name="python -m tests.lab.sim.early_refusal")
