"""Measures the noisy neighbour of `make demo` through LiteLLM, without and with the plug-in.

`python -m tests.litellm.neighbour`. Two engines have half of the demo's engine each: half of its
speed and half of its KV cache. The proxy has two workers.
"""

from __future__ import annotations

import asyncio

from schedsvc_lab.demo.engine import PROFILE
from schedsvc_lab.demo.scheduler import QUEUE_TTL_MS
from schedsvc_lab.demo.traffic import TENANTS, WARMUP_S, bundled, only
from schedsvc_lab.load.generator import LoadRun, Pace
from schedsvc_lab.load.report import client_lag_ms_p99, run_report
from schedsvc_lab.load.target import Backend, OutputMode, Target
from schedsvc_lab.load.texts import EmulatorTexts
from schedsvc_lab.workload import TraceRequest
from tests.processes.programs import standing

from .stand import POOLS, Stand

_KV_TOKENS = 5_000
_ENGINE = (
    *("--profile", str(PROFILE), "--kv-tokens", str(_KV_TOKENS), "--speed", "0.5"),
    *("--max-model-len", "4096"),
)
_CONFIG = {
    "pools": [{"name": name, "capacity_tokens": _KV_TOKENS} for name in POOLS],
    "scheduler": {"queue_ttl_ms": QUEUE_TTL_MS},
    "tenant_rules": [{"match": "*"}],
}


async def _run(name: str, trace: list[TraceRequest], *, is_plugged: bool) -> None:
    with standing(lambda folder: Stand(folder, _CONFIG, _ENGINE)) as stand:
        stand.start_scheduler()
        stand.start_engines()
        stand.start_litellm(is_plugged=is_plugged)
        target = Target(
            url=stand.url,
            model="m",
            backend=Backend.OPENAI_CHAT,
            texts=EmulatorTexts(0),
            output=OutputMode.EMULATED,
            api_keys={tenant.name: f"sk-{tenant.name}.u.k" for tenant in TENANTS},
            max_tokens_of={tenant.name: tenant.output_tokens_max for tenant in TENANTS},
        )
        pace = Pace(warmup_requests=6, warmup_s=WARMUP_S, drain_s=60.0)
        result = await LoadRun(target, trace, pace).run()
        report = run_report(result, 0)
        print(f"{name}: generator late by {client_lag_ms_p99(result):.0f} ms (p99)", flush=True)
        for tenant, row in report["tenants"].items():
            print(
                f"  {tenant}: sent {row['sent']}, completed {row['completed']}, refused"
                f" {row['refused']}, errors {row['errors']}; first token p50 / p99"
                f" {row['ttft_ms']['p50']} / {row['ttft_ms']['p99']} ms"
            )
        print(f"  output tokens per second: {report['output_tokens_per_s']}", flush=True)


async def _main() -> None:
    trace = bundled()
    await _run("quiet alone", only(trace, "quiet"), is_plugged=False)
    await _run("without", trace, is_plugged=False)
    await _run("with", trace, is_plugged=True)
    await _run("with, second run", trace, is_plugged=True)


if __name__ == "__main__":
    asyncio.run(_main())
