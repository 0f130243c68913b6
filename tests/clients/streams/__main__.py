"""Plays random byte streams through the proxy and compares its upstream with h11.

    python -m tests.clients.streams --count 200000 --seed 1

It ends with status 1 at the first stream that the upstream reads otherwise, and prints its bytes.
"""

from __future__ import annotations

import argparse
import logging
import sys

import uvloop

from .runs import play
from .world import Disagreement


def main() -> int:
    """Read the command line, and play."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.clients.streams", description="Play random byte streams.",
        epilog="example: python -m tests.clients.streams --count 200000 --seed 1",
    )  # fmt: skip
    parser.add_argument("--count", type=int, default=10_000, help="how many (10000)")
    parser.add_argument("--seed", type=int, default=1, help="of all of them (1)")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    try:
        kinds = uvloop.run(play(given.count, given.seed, shows=True))
    except Disagreement as error:
        print(error, file=sys.stderr)
        return 1
    print(f"the upstream was asked what h11 reads: {kinds}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
