"""Tests the measurement of the proxy beside others: each side is served and has its figures."""

import shutil

import pytest

from bench import proxies


@pytest.mark.skipif(not shutil.which("nginx"), reason="nginx is not installed")
def test_each_proxy_is_measured() -> None:
    found = proxies.measure(None, None, rounds=1, requests=16, at_once=2)
    own = {"schedsvc-proxy now", "schedsvc-proxy now, with admission"}
    assert own | {"nginx", "the origin itself"} <= set(found)
    for name, row in found.items():
        assert row["requests_s"] > 0
        assert row["first_ms"] > 0
        assert ("cpu_us" in row) == (name != "the origin itself")
