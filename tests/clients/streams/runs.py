"""Plays streams from a seed, and minimises one that fails."""

from __future__ import annotations

import tempfile
from random import Random

from .grammar import Grammar
from .world import Disagreement, Hang, Stream, World

_TRIES_MAX = 600


async def play(count: int, seed: int, *, shows: bool = False) -> dict[str, int]:
    """Play streams; return the number of each kind. Raises Disagreement."""
    with tempfile.TemporaryDirectory(prefix="streams-") as folder:
        world = World(folder)
        await world.start()
        grammar = Grammar(Random(seed))
        try:
            for number in range(count):
                stream = grammar.stream()
                try:
                    await world.check(stream)
                except Disagreement as error:
                    small, said = await _smaller(world, stream, error)
                    cuts = f", cut at {small.cuts}" if small.cuts else ""
                    raise Disagreement(
                        f"seed {seed}, stream {number}: {said}\nmade small: {small.data!r}{cuts}"
                    ) from error
                if shows and number % 20_000 == 19_999:
                    print(f"{number + 1:,} streams: {dict(world.kinds)}", flush=True)
        finally:
            await world.stop()
        return dict(world.kinds)


async def _smaller(
    world: World, stream: Stream, error: Disagreement
) -> tuple[Stream, Disagreement]:
    """Return a stream of fewer bytes that fails, too, and how it does."""
    # To see that a stream hangs takes long.
    tries, size = 0 if isinstance(error, Hang) else _TRIES_MAX, len(stream.data) // 2
    while size and tries:
        at = 0
        while at < len(stream.data) and tries:
            tries -= 1
            shorter = _without(stream, at, at + size)
            try:
                await world.check(shorter)
                at += size
            except Disagreement as found:
                stream, error = shorter, found
        size //= 2
    return stream, error


def _without(stream: Stream, begin: int, end: int) -> Stream:
    data = stream.data[:begin] + stream.data[end:]
    moved = (cut if cut <= begin else max(begin, cut - (end - begin)) for cut in stream.cuts)
    return Stream(data, tuple(min(cut, len(data)) for cut in moved))
