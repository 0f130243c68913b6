"""Measures what a price of the KV cache gives each tenant, in the simulator.

    python -m tests.lab.sim.kv_mixes
    python -m tests.lab.sim.kv_mixes --profile tiny-cpu --mix 60:1

Two tenants have a backlog from the first moment until one of them has nothing queued any more.
Each mix runs with equal tokens, and with a price of the cache, from a small part of the charge to
nearly all of it. A row gives each tenant's input plus twice its output in a second, the total over
that of equal tokens, and what the tenant of small requests held of the cache over what the other
held: in token-steps by the counts, and in tokens times seconds in the engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import click

from schedsvc_lab.engine import load_profile
from schedsvc_lab.sim.overrides import override
from schedsvc_lab.sim.requests import Requests

from .audited import Audited, service_of
from .setups import config_of
from .size_mixes import MIXES, PROFILES, Mix, measured_ns

#: Prices of input, output and a token-step of the cache.
TOKENS = (1.0, 2.0, 0.0)
PRICES = (
    (1.0, 2.0, 0.001), (1.0, 2.0, 0.01), (0.1, 0.2, 0.01), (0.07, 0.14, 0.01), (0.001, 0.002, 0.01),
)  # fmt: skip
#: The last lets both hold as many token-steps, the one before as many tokens times seconds.
SECONDS, CACHE = PRICES[-2:]
_TWO = tuple(mix for mix in MIXES if len(mix.sizes) == 2 and not mix.weights)
_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Held:
    """Holds each tenant's service in a second, and what it held of the cache."""

    service: Sequence[float]
    token_steps: Sequence[float]
    token_seconds: Sequence[float]
    gap_of_bound: float

    @property
    def total(self) -> float:
        """Return the service of all tenants in a second."""
        return sum(self.service)


def play(profile: str, mix: Mix, prices: Sequence[float], *, large: int) -> Held:
    """Run a mix, and measure while both tenants wait. O(requests)."""
    priced = zip(("input", "output", "kv"), prices, strict=True)
    engine, config = override(
        load_profile(profile),
        config_of(("large", "small"), (1, 1), 0),
        {**mix.headroom, **{f"scheduler.prices.{name}": price for name, price in priced}},
    )
    cost = [service_of(config.scheduler.prices, *size) for size in mix.sizes]
    rows = [
        (0, tenant, *size)
        for tenant, size in enumerate(mix.sizes)
        for _ in range(round(large * max(cost) / cost[tenant]))
    ]
    run = Audited(engine, config, Requests(("large", "small"), rows))
    run.run()
    ends_ns = measured_ns(run)
    service, steps, seconds = [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]
    for at, tenant in enumerate(run.requests.client):
        first, end = run.outcomes.first_ns[at], run.outcomes.end_ns[at]
        if first >= ends_ns:
            continue
        part = min(1.0, (ends_ns - first) / max(1, end - first))
        prompt, output = run.requests.prompt_tokens[at], run.requests.output_tokens[at] * part
        service[tenant] += (prompt + 2 * output) / ends_ns * _NS
        steps[tenant] += output * (prompt + output / 2)
        seconds[tenant] += (min(end, ends_ns) - first) / _NS * (prompt + output / 2)
    return Held(service, steps, seconds, run.books.gaps.of_bound)


@click.command()
@click.option("--profile", "profiles", multiple=True, default=PROFILES[:1], help="Engine profile.")
@click.option(
    "--mix", "names", multiple=True, default=("17:1",), help="A mix of two tenants; repeat it."
)
@click.option("--large", default=300, help="Requests of the tenant with the larger ones.")
def main(profiles: Sequence[str], names: Sequence[str], large: int) -> None:
    """Print one row for each profile, mix and prices."""
    columns = ("input", "output", "kv", "large", "small", "total", "steps", "seconds", "gap")
    click.echo(f"{'profile':16}{'mix':8}" + "".join(f"{column:>9}" for column in columns))
    for profile in profiles:
        for mix in (mix for mix in _TWO if mix.name in names):
            equal = play(profile, mix, TOKENS, large=large)
            for prices in (TOKENS, *PRICES):
                it = equal if prices is TOKENS else play(profile, mix, prices, large=large)
                ratios = [of[1] / of[0] for of in (it.token_steps, it.token_seconds)]
                click.echo(
                    f"{profile:16}{mix.name:8}"
                    + "".join(f"{price:9g}" for price in prices)
                    + "".join(f"{rate:9.0f}" for rate in it.service)
                    + f"{it.total / equal.total:9.2f}{ratios[0]:9.2f}{ratios[1]:9.2f}"
                    + f"{it.gap_of_bound:9.2f}"
                )


if __name__ == "__main__":
    main()
