"""Chooses the next flow as the artifact of the VTC paper does: the reference."""

import time

__all__ = ["DictScan"]

#: Flows that a slice looks at in all: a few milliseconds.
_LOOKS = 20_000


class DictScan:
    """Keeps counters in a dict; looks at each to find the least (arXiv 2401.00588, artifact).

    As in its `generate_new_batch`, the pick is `min(counters, key=counters.get)`, and the input's
    price over the flow's weight is then charged. The other work of that method for each pick
    (queues, the memory test) and for each batch (a copy of the dict) is left out.
    """

    def __init__(self, names: list[str], input_tokens: int, input_price: float = 1.0) -> None:
        self._served = dict.fromkeys(names, 0.0)
        self._weights = dict.fromkeys(names, 1.0)
        self._input_tokens = input_tokens
        self._input_price = input_price

    def pick(self) -> str:
        """Return the flow with the least service, and charge it. O(flows)."""
        served = self._served
        name = min(served, key=served.get)  # type: ignore[arg-type] # every name is in it
        served[name] += self._input_tokens * self._input_price / self._weights[name]
        return name

    def slice(self) -> list[float]:
        """Return the mean time of a pick in ns, over as many as take a few milliseconds."""
        times = max(1, _LOOKS // len(self._served))
        began_ns = time.perf_counter_ns()
        for _ in range(times):
            self.pick()
        return [(time.perf_counter_ns() - began_ns) / times]
