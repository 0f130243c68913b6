from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from virtual import run

from schedsvc_lab.load import generator, lag


@pytest.fixture
def in_virtual_time(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Run a coroutine in virtual time; the generator reads the loop's clock."""

    def now_s() -> float:
        return asyncio.get_running_loop().time()

    for module in (generator, lag):
        clock = SimpleNamespace(perf_counter=now_s, time_ns=time.time_ns)
        monkeypatch.setattr(module, "time", clock)
    return run
