"""Measures the quality of promises: coverage, pinball loss, and reserved tokens over time."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedsvc_lab.sim.predict.play import Columns, Played

__all__ = ["TENTHS", "coverage_by_part", "pinball", "report", "token_seconds"]

TENTHS = 10
#: Reserved token-seconds are compared with a reservation of this many tokens for every request.
COMMON_MAX_TOKENS = 1_024
Tokens = NDArray[np.int64] | int


def pinball(promised: Tokens, output: NDArray[np.int64], quantile: float) -> float:
    """Return the mean pinball loss: `quantile` for each token too few, the rest for one too many.

    Its least expectation is at the quantile (Koenker and Bassett, 1978). 0 without requests.
    """
    if not len(output):
        return 0.0
    short = output - promised
    return float(np.maximum(quantile * short, (quantile - 1) * short).mean())


def static_quantile(output: NDArray[np.int64], quantile: float) -> int:
    """Find the one number of tokens with the least pinball loss on these outputs."""
    return int(np.quantile(output, quantile, method="inverted_cdf")) if len(output) else 0


def token_seconds(
    promised: Tokens, output: NDArray[np.int64], tokens_per_s: float
) -> NDArray[np.float64]:
    """Return reserved output tokens of each request, integrated over its run.

    If the output outgrows its promise, the reservation grows with it token by token.
    """
    kept = np.minimum(promised, output)
    grown = (output.astype(float) ** 2 - kept.astype(float) ** 2) / 2
    whole: NDArray[np.float64] = (promised * kept.astype(float) + grown) / tokens_per_s
    return whole


def coverage_by_part(played: Played, requests: Columns, parts: int = TENTHS) -> list[float | None]:
    """Return the share of predictions that held, by equal parts of the trace; None: none."""
    held = requests.output_tokens <= played.promised
    cut = zip(np.array_split(held, parts), np.array_split(played.predicted, parts), strict=True)
    return [float(part[of].mean()) if of.any() else None for part, of in cut]


def _losses(
    of: NDArray[np.bool_], requests: Columns, played: Played, one_flow: Played, quantile: float
) -> dict[str, Any]:
    """Return the pinball losses of the predictor and its yardsticks over some requests."""
    output = requests.output_tokens[of]
    static = static_quantile(output, quantile)
    hindsight = np.zeros(len(output), dtype=np.int64)
    for tenant in range(len(requests.tenants)):
        own = requests.tenant[of] == tenant
        hindsight[own] = static_quantile(output[own], quantile)
    ours = pinball(played.promised[of], output, quantile)
    best = pinball(static, output, quantile)
    shared = pinball(one_flow.promised[of], output, quantile)
    return {
        "predictor": ours,
        "best_static": best,
        "best_static_tokens": static,
        "best_static_by_tenant": pinball(hindsight, output, quantile),
        "one_global_quantile": shared,
        "max_tokens": pinball(played.output_tokens_max, output, quantile),
        "oracle": 0.0,
        "predictor_to_best_static": ours / best if best else None,
        "predictor_to_one_global_quantile": ours / shared if shared else None,
    }


def _tenants(requests: Columns, played: Played) -> dict[str, dict[str, Any]]:
    held = requests.output_tokens <= played.promised
    rows = {}
    for tenant, name in enumerate(requests.tenants):
        own = requests.tenant == tenant
        of = own & played.predicted
        rows[name] = {
            "requests": int(own.sum()),
            "predicted": int(of.sum()),
            "coverage": float(held[of].mean()) if of.any() else None,
        }
    return rows


def report(
    requests: Columns, played: Played, one_flow: Played, quantile: float, tokens_per_s: float
) -> dict[str, Any]:
    """Return all figures of a replay; `one_flow` is the same with one quantile for all.

    Coverage and `pinball` are over requests that were predicted; for the others, the most that they
    might produce was reserved. `pinball_of_all` counts these as predictions too.
    """
    output, of = requests.output_tokens, played.predicted
    held = output <= played.promised
    everything = np.ones(len(requests), dtype=np.bool_)
    reserved = token_seconds(played.promised, output, tokens_per_s).sum()
    common = token_seconds(COMMON_MAX_TOKENS, output, tokens_per_s).sum()
    return {
        "requests": len(requests),
        "predicted": int(of.sum()),
        "quantile": quantile,
        "coverage": float(held[of].mean()) if of.any() else None,
        "coverage_by_tenth": coverage_by_part(played, requests),
        "coverage_of_all": float(held.mean()),
        "reserved_to_used": float(played.promised.sum() / max(1, output.sum())),
        "output_token_seconds_ratio_to_1024": float(reserved / common) if common else None,
        "pinball": _losses(of, requests, played, one_flow, quantile),
        "pinball_of_all": _losses(everything, requests, played, one_flow, quantile),
        "tenants": _tenants(requests, played),
        "output_tokens_max": played.output_tokens_max,
    }
