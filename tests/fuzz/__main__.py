"""Fuzzes every parser, or one; and walks through the core at random.

    python -m tests.fuzz                       all of them, 8 seconds each, the walks 16
    python -m tests.fuzz session --seconds 600 --seed 7
    python -m tests.fuzz --sanitised           with a core that watches its memory
    python -m tests.fuzz trace --input FILE    one input again

An input that breaks is made smaller, kept under tests/fuzz/found/TARGET and named; the exit status
is 1.
"""

import argparse
import secrets
import sys
import time
import traceback
from random import Random

from tests.fuzz import sanitised

sanitised.take_over()  # before anything that uses the core is imported

from tests.fuzz import http  # noqa: E402
from tests.fuzz.guide import Guide  # noqa: E402
from tests.fuzz.mutate import mutated  # noqa: E402
from tests.fuzz.targets import TARGETS, Target, regressions  # noqa: E402

_KEPT_MAX = 4_000


def breaks(target: Target, data: bytes) -> str:
    """Return the failure of an input: the kind of the exception and its place; "": none."""
    try:
        target.run(data)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} in {frame.name}"
    return ""


def shrink(target: Target, data: bytes, broken: str) -> bytes:
    """Remove bytes that the failure does not need. O(bytes log bytes) runs."""
    step = len(data)
    while step:
        at = 0
        while at < len(data):
            smaller = data[:at] + data[at + step :]
            if breaks(target, smaller) == broken:
                data = smaller
            else:
                at += step
        step //= 2
    return data


def fuzz(name: str, seconds: float, seed: int) -> bool:
    """Run one target for a while. Returns whether all held."""
    target, rnd, guide, noted = TARGETS[name], Random(seed), Guide(), sanitised.Noted()
    kept = target.corpus() + regressions(name)
    fresh = list(kept)
    until_s = time.monotonic() + seconds * target.times
    runs = 0
    while fresh or time.monotonic() < until_s:
        data = fresh.pop() if fresh else mutated(rnd, rnd.choice(kept), kept, target.words)
        noted.note(name, data)
        guide.begin()
        broken = breaks(target, data)
        runs += 1
        if broken:
            return report(name, data, broken)
        if guide.is_new() and len(kept) < _KEPT_MAX:
            kept.append(data)
    seen = f", {guide.places():,} places of the core" if guide.counts else ""
    print(f"{name:10} {runs:>8,} inputs{seen}, nothing broke (seed {seed})", flush=True)
    return True


def report(name: str, data: bytes, broken: str) -> bool:
    """Keep an input that breaks something, and say so."""
    small = shrink(TARGETS[name], data, broken) if len(data) < 5_000 else data
    path = sanitised.found(name, small)
    print(f"{name}: {broken}\n  {small[:200]!r}\n  python -m tests.fuzz {name} --input {path}")
    try:
        TARGETS[name].run(small)
    except Exception:
        traceback.print_exc()
    return False


def main() -> int:
    """Read the arguments, and fuzz."""
    parser = argparse.ArgumentParser(
        "tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=float, default=8.0, help="for each target; twice of walk")
    parser.add_argument("--seed", type=int, help="of the inputs; default: a fresh one")
    parser.add_argument("--sanitised", action="store_true", help="with AddressSanitizer and UBSan")
    parser.add_argument("--input", help="run this file once, instead of fuzzing")
    given = parser.parse_args()
    unknown = set(given.targets) - set(TARGETS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(TARGETS)}")
    if given.sanitised:
        return sanitised.run_again([a for a in sys.argv[1:] if a != "--sanitised"])
    names = given.targets or list(TARGETS)
    if given.input:
        with open(given.input, "rb") as file:
            TARGETS[names[0]].run(file.read())
        return 0
    seed = secrets.randbits(32) if given.seed is None else given.seed
    held = [fuzz(name, given.seconds, seed) for name in names]
    http.close()
    return int(not all(held))


if __name__ == "__main__":
    sys.exit(main())
