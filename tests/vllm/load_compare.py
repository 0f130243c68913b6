"""Compares `vllm bench serve` with `schedsvc load`: the same workload, against the emulator.

`python -m tests.vllm.load_compare --rounds 2` runs them in turns (A B B A), since a machine that
grows slower must not favour either, and compares the means. One trace in Mooncake's form gives
both the same arrivals and lengths; vLLM's client replays it as its dataset `timed_trace`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from . import programs

THROUGHPUT_OFF_MAX = 0.03
TTFT_OFF_MAX = 0.05
RUN_S_MAX = 150.0
MODEL = "emulated"

Result = dict[str, Any]


def write_trace(path: Path, requests: int, rate: float, seed: int) -> None:
    """Write Poisson arrivals and lengths as the engine of the profile can serve them."""
    stream = np.random.default_rng(seed)
    times_ms = np.cumsum(stream.exponential(1_000 / rate, requests))
    inputs = stream.integers(50, 500, requests)
    outputs = stream.integers(10, 80, requests)
    with path.open("w") as file:
        for at, (time_ms, asked, given) in enumerate(zip(times_ms, inputs, outputs, strict=True)):
            line = {
                "timestamp": round(float(time_ms)),
                "input_length": int(asked),
                "output_length": int(given),
                "hash_ids": [at],
            }
            file.write(json.dumps(line) + "\n")


def run_vllm(url: str, trace: Path, folder: Path, requests: int) -> Result:
    """Drive it by vLLM's own benchmark."""
    file = "vllm.json"
    command = [str(programs.ENVIRONMENT / "bin" / "vllm"), "bench", "serve", "--backend", "openai"]
    command += ["--base-url", url, "--endpoint", "/v1/completions", "--model", MODEL]
    command += ["--tokenizer", str(programs.ENVIRONMENT / "model"), "--disable-tqdm"]
    command += ["--dataset-name", "timed_trace", "--dataset-path", str(trace)]
    command += ["--timed-trace-chunk-hash-size", "512", "--timed-trace-sec-multiplier", "0.001"]
    command += ["--num-prompts", str(requests), "--percentile-metrics", "ttft,tpot,itl,e2el"]
    command += ["--goodput", "ttft:1000", "--save-result", "--save-detailed"]
    _run([*command, "--result-dir", str(folder), "--result-filename", file], folder / "vllm.log")
    result: Result = json.loads((folder / file).read_text())
    return result


def run_ours(url: str, trace: Path, folder: Path, *, may_be_late: bool) -> Result:
    """Drive it by ours. If it was late itself, it calls the run void, but has written it."""
    command = [sys.executable, "-m", "schedsvc", "load", "--url", url, "--trace", str(trace)]
    command += ["--goodput", "ttft:1000", "--detail", "--out", str(folder / "ours")]
    written = folder / "ours" / "result.json"
    try:
        _run(command, folder / "ours.log")
    except RuntimeError as error:
        if not (may_be_late and written.exists() and "Error: void: " in str(error)):
            raise
    result: Result = json.loads(written.read_text())
    return result


def _run(command: list[str], log: Path) -> None:
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("wb") as output:
        status = subprocess.run(
            command, stdout=output, stderr=output, env=variables, timeout=RUN_S_MAX
        ).returncode
    if status:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
        raise RuntimeError(f"{command[:4]} ended with status {status}:\n{tail}")


def compare(
    folder: Path,
    *,
    rounds: int,
    requests: int,
    rate: float,
    seed: int = 3,
    may_be_late: bool = False,
) -> Result:
    """Run both `rounds` times each; returns their figures, and how far ours are off vLLM's."""
    trace, ready = folder / "trace.jsonl", folder / "emulator.json"
    write_trace(trace, requests, rate, seed)
    command = [sys.executable, "-m", "schedsvc", "emulate", "--port", "0", "--model", MODEL]
    command += ["--ready-file", str(ready)]
    runs: dict[str, list[Result]] = {"vllm": [], "ours": []}
    with programs.program(command, folder / "emulator.log", ready.exists, {}):
        url = json.loads(ready.read_text())["base_url"]
        for number in range(rounds):
            order = ("vllm", "ours") if number % 2 == 0 else ("ours", "vllm")
            for name in order:
                place = folder / f"{name}-{number}"
                place.mkdir()
                if name == "vllm":
                    runs[name].append(run_vllm(url, trace, place, requests))
                else:
                    runs[name].append(run_ours(url, trace, place, may_be_late=may_be_late))
    figures = ("request_throughput", "output_throughput", "median_ttft_ms", "median_tpot_ms")
    told: Result = {
        name: {figure: [run[figure] for run in of] for figure in figures}
        for name, of in runs.items()
    }
    told["off"] = {
        figure: fmean(told["ours"][figure]) / fmean(told["vllm"][figure]) - 1 for figure in figures
    }
    return {**told, "runs": runs}


def main() -> None:
    """Compare them, print the figures as JSON, and fail if they are too far apart."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rate", type=float, default=5.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        told = compare(
            Path(folder),
            rounds=arguments.rounds,
            requests=arguments.requests,
            rate=arguments.rate,
        )
    told.pop("runs")
    print(json.dumps(told, indent=2))
    off = told["off"]
    within = (
        abs(off["request_throughput"]) <= THROUGHPUT_OFF_MAX
        and abs(off["output_throughput"]) <= THROUGHPUT_OFF_MAX
        and abs(off["median_ttft_ms"]) <= TTFT_OFF_MAX
    )
    sys.exit(0 if within else 1)


if __name__ == "__main__":
    main()
