"""Random exchanges through the proxy: upstream, client and scheduler keep the same books."""

from __future__ import annotations

import pytest

from tests.seeds import fresh

from .exchanges import play


@pytest.mark.parametrize("seed", fresh(1))
async def test_the_three_books_agree(seed: int) -> None:
    kinds = await play(400, seed)
    assert min(kinds[kind] for kind in ("whole", "cut", "error")) > 0
