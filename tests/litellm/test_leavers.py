"""Tests that clients which leave at any moment leave nothing behind."""

from __future__ import annotations

import pytest
from schedsvc_client.aio import AsyncScheduler

from tests.processes.programs import at_rest
from tests.seeds import SEED

from .leavers import MOMENTS, leave_all
from .stand import Stand

pytestmark = pytest.mark.litellm

COUNT = 300


async def test_clients_that_leave_leave_nothing(stand: Stand, scheduler: AsyncScheduler) -> None:
    before = (await at_rest(scheduler)).totals
    left = await leave_all(stand, COUNT, SEED)
    assert set(MOMENTS) <= set(left), left
    totals = (await at_rest(scheduler)).totals
    assert totals.expired == before.expired == 0
    assert totals.cancelled > before.cancelled
