import pytest

from schedsvc_lab.demo.engine import EngineState, parse
from schedsvc_lab.demo.processes import DemoError

METRICS = """\
# HELP vllm:num_requests_running Running.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 7.0
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:num_preemptions_total{engine="0",model_name="m"} 1e+02
vllm:e2e_request_latency_seconds_bucket{le="0.3"} 1.0
"""


def test_vllm_metrics() -> None:
    assert parse(METRICS) == EngineState(7, 3, 0.25, 100)


def test_a_missing_metric_is_named() -> None:
    with pytest.raises(DemoError, match="vllm:num_preemptions_total"):
        parse(METRICS.replace("num_preemptions_total", "other"))
