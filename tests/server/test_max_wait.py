"""Tests the longest wait that a tenant states in the configuration."""

from typing import Any

import pytest

from schedsvc import _core as core
from schedsvc.config import Config, configure, reconfigure
from schedsvc.config.operator_tenants import checked_tenant

SECOND = 10**9


def config(**more: Any) -> Config:
    return Config.model_validate({"listeners": [{"tcp": "127.0.0.1:0"}], **more})


class Full:
    """Return a scheduler whose only pool is full."""

    def __init__(self, given: Config) -> None:
        self.core = core.Scheduler(**given.core_options())
        configure(self.core, given, 0)
        self.core.set_pool(0, b"p", 1, 32, 16)
        runs = self.core.first_sight(0, b"runs")
        self.core.admit(0, runs, b"runs", 10, 10, reports_progress=True)
        (self.lease,) = self.core.poll(0)

    def longest_s(self, tenant: bytes) -> int:
        """Let a request wait until it gives up."""
        flow = self.core.first_sight(0, tenant)
        self.core.admit(0, flow, b"waits", 10, 10, reports_progress=True)
        for second in range(1, 60):
            self.core.progress(second * SECOND, self.lease.lease_id, 1)
            if self.core.poll(second * SECOND):
                return second
        return 60


def test_a_tenant_a_rule_and_the_unknown_state_their_longest_wait() -> None:
    given = config(
        tenants=[{"name": "fast", "max_wait_ms": 2_000}, {"name": "plain"}, {"name": "runs"}],
        tenant_rules=[{"match": "acme/*", "max_wait_ms": 3_000}],
        unknown_tenants_limits={"max_wait_ms": 4_000},
    )
    waits = {b"fast": 2, b"plain": 30, b"acme/a": 3, b"unknown": 4}
    assert {name: Full(given).longest_s(name) for name in waits} == waits


def test_a_reload_changes_it() -> None:
    tenants = [{"name": "fast", "max_wait_ms": 2_000}, {"name": "runs"}]
    before = config(tenants=tenants)
    full = Full(before)
    tenants[0] = {"name": "fast"}
    reconfigure(full.core, config(tenants=tenants), before, 0)
    assert full.longest_s(b"fast") == 30


@pytest.mark.parametrize("wrong", [0, 3_600_001])
def test_it_is_between_a_millisecond_and_an_hour(wrong: int) -> None:
    with pytest.raises(ValueError, match="max_wait_ms"):
        config(tenants=[{"name": "fast", "max_wait_ms": wrong}])


def test_an_operator_may_set_it() -> None:
    tenant = checked_tenant("fast", {"max_wait_ms": 5_000}, config())
    assert tenant.max_wait_ms == 5_000
