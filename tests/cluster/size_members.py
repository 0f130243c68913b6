"""Measures how two tenants whose requests differ in size share the engines of two members.

    python -m tests.cluster.size_members
    python -m tests.cluster.size_members --profile tiny-cpu --mix 17:1 --alone

Each member has an engine, the second one of four places, so equal shares are possible even if one
tenant does not use it. The members are real, with real cores, and share one fairness by a store in
virtual time. A tenant has a permanent backlog at a member, or sends it nothing. A row has the ratio
of the larger to the lesser weighted service at both members together, and the widest gap of that
service over the sum of both bounds in Stats, compared at every report. `--alone`: the members share
nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from bench.virtual_shards.fleet import BEGIN_NS, Fleet, membership
from schedsvc.config import Config
from schedsvc.driver import Driver
from schedsvc.driver.clock import SteadyClock
from schedsvc_lab.engine import load_profile
from schedsvc_lab.sim.overrides import override
from schedsvc_lab.sim.requests import Requests
from tests.lab.sim.audited import SECOND, Audited
from tests.lab.sim.floods import PACES, flood, need_queue, service
from tests.lab.sim.setups import config_of
from tests.lab.sim.size_mixes import MIXES, PROFILES, Mix

__all__ = ["LAYOUTS", "PAIRS", "Found", "shared"]

PAIRS = {mix.name: mix for mix in MIXES if len(mix.sizes) == 2}
#: The tenants that ask each member.
LAYOUTS = {"both": ((0, 1), (0, 1)), "large": ((0, 1), (0,)), "small": ((0, 1), (1,))}
_NAMES = ("large", "small")
#: When the requests arrive, and when measuring begins: members have joined, and share.
_ARRIVE_S, _FROM_S = 5, 30
_MARGIN_S = 60  # requests of the measured time end within it
_PLACES = 4
_LARGE = 400  # requests of the largest kind, at least, that a tenant is served


class _Driver(Driver):
    """Leaves the verdicts of its core to the engine's world, which asks for them at once."""

    settled: Any = None

    def _settle(self, now_ns: int) -> None:
        if self.settled is not None:
            self.settled()


class _Members(Fleet):
    """Runs members with an engine each. `run_until()` within `running()`."""

    def __init__(self) -> None:
        super().__init__(members=2, seed=1)
        self.runs: list[Audited] = []
        self._due_ns: list[int] = []

    def begin(self, run: Audited, config: Config, *, joins: bool) -> None:
        """Attach the core of a run to a member; its events happen from then on."""
        number = len(self.runs)
        self.runs.append(run)
        self._due_ns.append(0)
        driver = self.drive(run.books.core, SteadyClock(self.now_ns), _Driver)
        assert isinstance(driver, _Driver)
        driver.settled = lambda: self._plan(number, self.now_ns())
        if joins:
            self.join(driver, config, number)
        self._plan(number, self.now_ns())

    def _plan(self, number: int, at_ns: int) -> None:
        self._due_ns[number] = at_ns
        self.queue.at(at_ns - SECOND + BEGIN_NS, self._step, number)

    def _step(self, number: int) -> None:
        run, now_ns = self.runs[number], self.now_ns()
        if now_ns == self._due_ns[number]:
            run.step(now_ns)
            self._plan(number, max(now_ns, run.next_ns()))
            self.run_loop()


@dataclass(frozen=True, slots=True)
class Found:
    """Holds how two tenants shared two members."""

    ratio: float
    gap_of_bound: float
    broken: str
    remote_micro: int  # service elsewhere that members were charged, in micro-tokens
    at_first: Sequence[float]  # weighted service of each tenant at the first member


def shared(profile: str, mix: Mix, layout: str, *, joins: bool = True) -> Found:
    """Run a mix at two members. O(requests)."""
    members = _Members()
    seconds = _FROM_S + round(2 * _LARGE * sum(mix.sizes[0]) / PACES[profile] * 2)
    weights = [mix.weight(tenant) for tenant in (0, 1)]
    with members.running():
        for number, tenants in enumerate(LAYOUTS[layout]):
            rows = [
                row
                for tenant in tenants
                for row in flood(profile, tenant, mix.sizes[tenant], seconds + _MARGIN_S, _ARRIVE_S)
            ]
            config = config_of(_NAMES, weights, 0, cluster=membership(number))
            engine, config = override(load_profile(profile), config, mix.headroom)
            if number:
                engine, config = override(engine, config, {"engine.sequences_max": _PLACES})
            members.begin(Audited(engine, config, Requests(_NAMES, rows)), config, joins=joins)
        books = [run.books for run in members.runs]
        for each in books:
            each.gaps, each.sharing = books[0].gaps, books
        members.run_until(seconds + _MARGIN_S)
        for run, tenants in zip(members.runs, LAYOUTS[layout], strict=True):
            need_queue(run, tenants)
        remote = sum(member.sharing.charged_micro for member in members.members)
    served = [
        [service(run, tenant, _FROM_S, seconds) / weights[tenant] for tenant in (0, 1)]
        for run in members.runs
    ]
    each = [sum(of_one) for of_one in zip(*served, strict=True)]
    broken = books[0].gaps.broken or next(filter(None, (b.stats_broken for b in books)), "")
    return Found(max(each) / min(each), books[0].gaps.of_bound, broken, remote, served[0])


@click.command()
@click.option("--profile", "profiles", multiple=True, default=PROFILES, help="Engine profile.")
@click.option("--mix", "names", multiple=True, type=click.Choice(list(PAIRS)))
@click.option("--alone", is_flag=True, help="Let the members share nothing.")
def main(profiles: Sequence[str], names: Sequence[str], alone: bool) -> None:
    """Print a row for each profile, mix and layout."""
    for profile in profiles:
        for name in names or PAIRS:
            for layout in LAYOUTS:
                it = shared(profile, PAIRS[name], layout, joins=not alone)
                click.echo(
                    f"{profile:16}{name:14}{layout:8}{it.ratio:8.2f}{it.gap_of_bound:8.2f}"
                    f" {it.broken}"
                )


if __name__ == "__main__":
    main()
