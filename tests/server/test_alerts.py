"""Tests the rules for Prometheus: valid, firing when they should, about metrics that exist."""

import asyncio
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from schedsvc.server import Server
from tests.cluster.members import member

from .conftest import config_of

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/alerts/schedsvc.rules.yaml"
RUNBOOK = ROOT / "docs/operate/operations.md"
#: Series that other programs add to those of the page.
FOREIGN = {"up"}
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is missing; install prometheus"
)

ONE = {"job": "schedsvc", "instance": "s:7690"}
TENANT = ONE | {"tenant": "acme"}
POOL = ONE | {"pool": "gpu-1"}
#: The labels of each alert, and the series that provoke it, with each minute's value in promtool's
#: notation.
PROVOKED: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "SchedsvcDown": (ONE, {"up{}": "0x99"}),
    "SchedsvcBroken": (ONE, {"schedsvc_up{}": "0x99"}),
    "SchedsvcStateFailing": (ONE, {"schedsvc_state_failing{}": "1x99"}),
    "SchedsvcStateLost": (ONE, {"schedsvc_state_files_lost_total{}": "0+1x99"}),
    "SchedsvcUsageFailing": (ONE, {"schedsvc_usage_failing{}": "1x99"}),
    "SchedsvcUsageLost": (ONE, {"schedsvc_usage_files_lost_total{}": "0+1x99"}),
    "SchedsvcWriteAheadLogHeld": (ONE, {"schedsvc_state_log_bytes{}": "67108864x99"}),
    "SchedsvcReloadFailed": (ONE, {"schedsvc_config_last_reload_successful{}": "0x99"}),
    "SchedsvcPoolDetached": (
        POOL,
        {
            "schedsvc_pool_attached{}": "0x99",
            "schedsvc_pool_draining{}": "0x99",
            "schedsvc_pool_said_goodbye{}": "0x99",
        },
    ),
    "SchedsvcRequestsEvicted": (
        {"tenant": "acme"},
        {
            'schedsvc_refusals_total{reason="evicted_ttl"}': "0+6x99",
            "schedsvc_requests_received_total{}": "0+60x99",
        },
    ),
    "SchedsvcFirstTokenSlow": (
        {"tenant": "acme"},
        {
            'schedsvc_time_to_first_token_seconds_bucket{le="30.0"}': "0x99",
            'schedsvc_time_to_first_token_seconds_bucket{le="60.0"}': "0+60x99",
            'schedsvc_time_to_first_token_seconds_bucket{le="+Inf"}': "0+60x99",
        },
    ),
    "SchedsvcLeasesExpire": (TENANT, {"schedsvc_requests_expired_total{}": "0+1x99"}),
    "SchedsvcEnginePreempts": (POOL, {"schedsvc_engine_preemptions_total{}": "0+60x99"}),
    "SchedsvcFairnessGap": (
        ONE,
        {"schedsvc_fairness_gap_tokens{}": "9x99", "schedsvc_fairness_bound_tokens{}": "8x99"},
    ),
    "SchedsvcReportsLimited": (ONE, {"schedsvc_reports_limited_total{}": "0+30x99"}),
    "SchedsvcStoreRefusesWrites": (ONE, {"schedsvc_cluster_store_refuses_writes{}": "1x99"}),
    "SchedsvcStoreMayEvict": (ONE, {"schedsvc_cluster_store_may_evict{}": "1x99"}),
    "SchedsvcUnsynced": (ONE, {"schedsvc_cluster_unsynced_seconds{}": "31x99"}),
    "SchedsvcNoLeader": (ONE, {"schedsvc_cluster_leader_known{}": "0x99"}),
    "SchedsvcTermsUnknown": (ONE, {"schedsvc_cluster_terms_unknown{}": "1x99"}),
    "SchedsvcLogLinesDropped": (ONE, {"schedsvc_log_lines_dropped_total{}": "0+1x99"}),
    "SchedsvcDescriptorsExhausted": (ONE, {"schedsvc_descriptors_exhausted_total{}": "0+1x99"}),
    "SchedsvcLoopLags": (
        ONE,
        {
            'schedsvc_event_loop_lag_seconds_bucket{le="0.1"}': "0x99",
            'schedsvc_event_loop_lag_seconds_bucket{le="0.25"}': "0+60x99",
            'schedsvc_event_loop_lag_seconds_bucket{le="+Inf"}': "0+60x99",
        },
    ),
}
#: From the first sample on, so that a rate is known and the rules before it have run.
BEGINS_MINUTES = 2


def rules() -> list[dict[str, Any]]:
    loaded = yaml.safe_load(RULES.read_text())
    return [rule for group in loaded["groups"] for rule in group["rules"]]


ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}


def series(text: str, labels: dict[str, str]) -> str:
    """Return a series with more labels."""
    inner = text.partition("{")[2].rstrip("}")
    pairs = [f"{name}={json.dumps(value)}" for name, value in labels.items()]
    return f"{text.partition('{')[0]}{{{','.join([*pairs, *filter(None, [inner])])}}}"


def expected(name: str, labels: dict[str, str]) -> dict[str, Any]:
    rule = ALERTS[name]
    annotations = {
        key: re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: labels[found[1]], text)
        for key, text in rule["annotations"].items()
    }
    return {"exp_labels": {**labels, **rule["labels"]}, "exp_annotations": annotations}


def promtool(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["promtool", *map(str, words)], capture_output=True, text=True, check=False
    )


def played(tmp_path: Path, name: str) -> subprocess.CompletedProcess[str]:
    """Play an alert's series: it is silent before its `for`, fires after it, and then alone."""
    labels, given = PROVOKED[name]
    waits = int(ALERTS[name]["for"].removesuffix("m"))
    alone = {"alertname": name, "eval_time": f"{BEGINS_MINUTES + waits + 3}m"}
    early = {"alertname": name, "eval_time": f"{waits - 1}m", "exp_alerts": []}
    case = {
        "interval": "1m",
        "input_series": [
            {"series": series(text, {**labels, **ONE}), "values": values}
            for text, values in given.items()
        ],
        "alert_rule_test": [
            early,
            {**alone, "exp_alerts": [expected(name, labels)]},
            *({**alone, "alertname": other, "exp_alerts": []} for other in ALERTS if other != name),
        ],
    }
    file = tmp_path / "test.yaml"
    whole = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [case]}
    file.write_text(yaml.safe_dump(whole))
    return promtool("test", "rules", file)


@needs_promtool
def test_rules_are_valid() -> None:
    run = promtool("check", "rules", RULES)
    assert run.returncode == 0, run.stdout + run.stderr


@needs_promtool
@pytest.mark.parametrize("name", ALERTS)
def test_alert_fires_after_its_time_and_alone(name: str, tmp_path: Path) -> None:
    run = played(tmp_path, name)
    assert run.returncode == 0, run.stdout + run.stderr


@needs_promtool
def test_alert_that_does_not_fire_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PROVOKED, "SchedsvcBroken", (ONE, {"schedsvc_up{}": "1x99"}))
    assert played(tmp_path, "SchedsvcBroken").returncode != 0


def test_every_alert_has_a_runbook() -> None:
    assert PROVOKED.keys() == ALERTS.keys()
    headings = re.findall(r"^### (\w+)$", RUNBOOK.read_text(), re.MULTILINE)
    assert [heading for heading in headings if heading.startswith("Schedsvc")] == list(ALERTS)
    for name, rule in ALERTS.items():
        assert rule["annotations"]["runbook_url"].endswith(
            f"/docs/operate/operations.md#{name.lower()}"
        )
        assert rule["labels"]["severity"] in ("warning", "critical")


def unknown_metrics(expressions: list[str], page: str) -> set[str]:
    """Metrics that a rule names, and neither the page nor a rule has."""
    samples = set(re.findall(r"^(\w+)[ {]", page, re.MULTILINE))
    known = samples | FOREIGN | set(re.findall(r"^# TYPE (\w+) ", page, re.MULTILINE))
    known |= {rule["record"] for rule in rules() if "record" in rule}
    plain = [re.sub(r'"[^"]*"|\b(?:by|without|on|ignoring) \([^)]*\)', "", e) for e in expressions]
    named = {
        name for text in plain for name in re.findall(r"\b(?:\w+:)*schedsvc_[\w:]+|\bup\b", text)
    }
    return named - known


async def test_rules_name_metrics_that_exist(tmp_path: Path) -> None:
    server = Server(
        config_of(
            metrics={"listen": "127.0.0.1:0"},
            state={"file": str(tmp_path / "state.db")},
            usage={"path": str(tmp_path / "usage.db")},
            cluster={"name": "c", "member": "a", "store": {"urls": ["redis://127.0.0.1:1"]}},
        )
    )
    page = (await server.metrics.page()).decode()
    await server.stop(None)
    standby = member(tmp_path, "b", "redis://127.0.0.1:1")
    page += (await standby._server.metrics.page()).decode()
    await standby.stop(None)
    expressions = [rule["expr"] for rule in rules()]
    assert len(expressions) > 10
    assert unknown_metrics(expressions, page) == set()
    assert unknown_metrics(["rate(schedsvc_no_total[5m]) > 0"], page) == {"schedsvc_no_total"}
    for text in expressions:
        assert "or vector(" not in text
        assert "absent(" not in text


async def page() -> bytes:
    server = Server(config_of(metrics={"listen": "127.0.0.1:0"}))
    found = await server.metrics.page()
    await server.stop(None)
    return found


@needs_promtool
def test_page_passes_the_linter_of_prometheus() -> None:
    good = asyncio.run(page())
    for text, status in [(good, 0), (good.replace(b"wait_seconds", b"wait_minutes"), 3)]:
        command = ["promtool", "check", "metrics"]
        run = subprocess.run(command, input=text, capture_output=True, check=False)
        assert run.returncode == status, run.stderr
