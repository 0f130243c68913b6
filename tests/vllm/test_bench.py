"""Runs `vllm bench serve` through the gate, as it is."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from . import programs
from .stack import Stack

REQUESTS, INPUT_TOKENS, OUTPUT_TOKENS = 60, 64, 40


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_the_engines_own_benchmark_runs_through_the_gate(
    stack: Stack, tmp_path: Path, backend: str
) -> None:
    books, generated = stack.flow("bench-0"), stack.gauges()["generation_tokens_total"]
    path = "/v1/chat/completions" if backend.endswith("chat") else "/v1/completions"
    command = [str(programs.ENVIRONMENT / "bin" / "vllm"), "bench", "serve"]
    command += ["--base-url", stack.url, "--backend", backend, "--endpoint", path]
    command += ["--model", programs.MODEL, "--tokenizer", str(programs.ENVIRONMENT / "model")]
    command += ["--dataset-name", "random", "--random-input-len", str(INPUT_TOKENS)]
    command += ["--random-output-len", str(OUTPUT_TOKENS), "--ignore-eos", "--disable-tqdm"]
    command += ["--num-prompts", str(REQUESTS), "--request-rate", "40", "--seed", "3"]
    command += ["--header", "x-tenant-id=bench-0"]
    command += ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json"]
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
    )
    assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-2_000:]
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["completed"], result["failed"]) == (REQUESTS, 0)
    assert result["total_output_tokens"] == REQUESTS * OUTPUT_TOKENS
    assert result["mean_ttft_ms"] > 0
    stack.rest()
    after = stack.flow("bench-0")
    # It asks once more, to see whether the server answers.
    assert after.completed - books.completed >= REQUESTS
    made = stack.gauges()["generation_tokens_total"] - generated
    assert after.output_tokens - books.output_tokens == made >= REQUESTS * OUTPUT_TOKENS
