"""Finds how many engines goals need, with the settings of today and with a draft."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from schedsvc_lab.sim.scenario import Scenario, ScenarioError, engine_configs

__all__ = ["ENGINES_MAX", "Needed", "fewest", "with_engines"]

ENGINES_MAX = 64


class Needed(NamedTuple):
    """Holds the least numbers of engines that meet all goals; None: ENGINES_MAX do not."""

    today: int | None
    draft: int | None

    def plain(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {**self._asdict(), "most": ENGINES_MAX}


def with_engines(scenario: Scenario, count: int) -> Scenario:
    """Return the scenario with `count` engines like those that it has.

    Raises ScenarioError if these are not alike.
    """
    config = scenario.config
    if config is None or not config.pools:
        return replace(scenario, engines=count)
    if len(set(engine_configs(scenario).values())) > 1:
        raise ScenarioError(
            "the pools are engines of several sizes, which cannot be counted; list pools of one "
            "size, or none and give --profile"
        )
    names = (f"engine-{number}" for number in range(1, count + 1))
    pools = [config.pools[0].model_copy(update={"name": name}) for name in names]
    return replace(scenario, config=config.model_copy(update={"pools": pools}))


def fewest(meets: Callable[[int], bool], most: int = ENGINES_MAX) -> int | None:
    """Return the least count from 1 to `most` that meets the goals; None: `most` does not.

    More engines are taken to be no worse. Asks O(log most) times, and never for more than twice the
    count that it returns.
    """
    low, high = 0, 1  # `low` do not meet them
    while not meets(high):
        if high == most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(middle) else (middle, high)
    return high
