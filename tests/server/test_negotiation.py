"""Tests the page of metrics in the form and the coding that a client accepts."""

import gzip
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from schedsvc.server.negotiation import accepts_gzip, prefers_openmetrics

from .test_cli import scheduler
from .test_metrics import of, samples_of


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        ("", False),
        ("gzip", True),
        ("GZIP", True),
        ("deflate, gzip;q=0.1", True),
        ("gzip;q=0", False),
        ("gzip; q=0.000", False),
        ("br, gzip ; q=0, *", False),
        ("*", True),
        ("*;q=0", False),
        ("*;q=0, gzip", True),
        ("x-gzip", True),
        ("identity", False),
        ("gzip;q=x", False),
        ("gzip;q=2", False),
        ("gzip;q=-1", False),
        ("gzip;q=nan", False),
        (",;,=;q", False),
    ],
)
def test_gzip_is_accepted_by_name_and_weight(header: str, accepted: bool) -> None:
    assert accepts_gzip(header) is accepted


PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


@pytest.mark.parametrize(
    ("header", "preferred"),
    [
        ("", False),
        ("*/*", False),
        (PROMETHEUS, True),
        ("application/openmetrics-text", True),
        ('application/openmetrics-text; version="1.0.0"', True),
        ("application/openmetrics-text; version=x", False),
        ("application/openmetrics-text; version=9.0.0", False),
        ("application/openmetrics-text; version=1.0.0; q=0", False),
        ("application/openmetrics-text; q=0.2, text/plain", False),
        ("text/plain; q=0.2, application/openmetrics-text", True),
        ("image/png", False),
    ],
)
def test_openmetrics_is_preferred_by_version_and_weight(header: str, preferred: bool) -> None:
    assert prefers_openmetrics(header) is preferred


def page(url: str, **headers: str) -> tuple[bytes, Any]:
    request = urllib.request.Request(
        url, headers={k.replace("_", "-"): headers[k] for k in headers}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read(), answer.headers


def test_page_of_many_tenants_is_a_tenth_with_gzip(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    tenants = json.dumps([{"name": f"t{number}"} for number in range(300)])
    file.write_text(
        f"listeners: [{{unix: s.sock}}]\ntenants: {tenants}\n"
        "metrics: {listen: '127.0.0.1:0', tenants_max: 300}\n"
    )
    with scheduler(file) as (_, ready):
        plain, headers = page(ready["metrics"], Accept_Encoding="gzip;q=0")
        assert headers["Content-Encoding"] is None
        small, headers = page(ready["metrics"], Accept_Encoding="gzip")
        assert headers["Content-Encoding"] == "gzip"
        assert headers["Vary"] == "Accept, Accept-Encoding"
        _, headers = page(ready["metrics"], Accept="application/openmetrics-text; version=7.5.3")
        assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
        openmetrics, headers = page(ready["metrics"], Accept=PROMETHEUS)
    assert headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert openmetrics.endswith(b"# EOF\n")
    assert len(small) < len(plain) / 10
    samples = samples_of(gzip.decompress(small).decode())
    assert of(samples, "output_tokens_total", tenant="t299") == 0
    assert samples.keys() == samples_of(plain.decode()).keys()
