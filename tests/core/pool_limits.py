"""Random limits of pools for a pair, small enough to block."""

import random

from .differential import Differential

CHOICES: dict[str, tuple[int, ...]] = {
    "batch_max_tokens": (0, -1, -1, 1, 20, 60),
    "max_total_tokens": (0, 0, 0, 5, 30, 60, 110),
    "max_running": (0, 0, 0, 1, 2, 5),
    "max_request_total_tokens": (0, 0, 0, 30, 80),
    "max_request_input_tokens": (0, 0, 0, 8, 20),
    "max_loras": (0, 0, 1, 2),
    "adapter_tokens": (0, 0, 3, 25),
}


def change_pool_limits(rnd: random.Random, pair: Differential) -> None:
    """Give other limits to one pool, or to all without their own; or none to all."""
    if rnd.random() < 0.2:
        pair.both("set_adapter", rnd.choice((b"x", b"y")), rnd.choice((-1, 0, 10, 40)))
        return
    if rnd.random() < 0.2:
        pair.both("set_no_pool_limits")
        return
    limits = {name: rnd.choice(values) for name, values in CHOICES.items() if rnd.random() < 0.7}
    pair.both("set_pool_limits", rnd.choice((b"", b"", *pair.twin.pool_names)), **limits)
