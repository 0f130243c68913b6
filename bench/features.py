"""Switches on the features beyond the default policies: each by itself, then all together."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from schedsvc._core import Scheduler

__all__ = ["ALL", "DEFAULT", "FEATURES", "Feature", "pools_of"]

_AMPLE = 10**9  # a minute: a limit that is kept count of, and never reached
_HOUR_NS = 3_600_000_000_000
_CLASSES, _GROUPS, _ADAPTERS, _POOLS, _PROMPTS = 4, 16, 32, 8, 1_024
_AUDITED = 8  # each eighth flow is in audit
_BLOCKS = 6  # full ones of a prompt

Options = Mapping[str, int | str]
SetUp = Callable[[Scheduler, range], None]
More = Callable[[int, int], dict[str, Any]]


def _nothing(core: Scheduler, flows: range) -> None:
    pass


def _no_more(flow: int, number: int) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Feature:
    """Holds settings, a set-up of a core with these flows, and further fields of a request.

    The last is asked for with its flow and its number.
    """

    name: str
    label: str
    options: Options | None = None
    set_up: SetUp = _nothing
    more: More = _no_more
    pools: int = 1


def _weights(core: Scheduler, flows: range) -> None:
    for flow in flows:
        core.set_flow(b"tenant-%06d" % flow, 1_000 * (1 + flow % 4))


def _classes(core: Scheduler, flows: range) -> None:
    named = [core.set_class(b"class-%d" % rank, rank) for rank in range(_CLASSES)]
    for flow in flows:
        core.set_flow_class(flow, named[flow % _CLASSES])


def _quotas(core: Scheduler, flows: range) -> None:
    for flow in flows:
        core.set_flow_quota(0, flow, requests=_AMPLE, total_tokens=_AMPLE, concurrency=1 << 20)


def _levels(core: Scheduler, flows: range) -> None:
    top = core.set_quota(0, b"everybody", total_tokens=_AMPLE)
    groups = [core.set_quota(0, b"group-%d" % n, top, requests=_AMPLE) for n in range(_GROUPS)]
    for flow in flows:
        core.set_flow_quota(0, flow, groups[flow % _GROUPS], total_tokens=_AMPLE)
    model = core.set_quota(0, b"model", total_tokens=_AMPLE)
    for pool in range(_POOLS):
        core.set_pool_quota(0, b"gpu-%d" % pool, model)


def _shares(core: Scheduler, flows: range) -> None:
    # The pools are always saturated, and no flow exceeds its share: the core checks the share but
    # holds no request back.
    for flow in flows:
        core.set_flow_quota(0, flow, share=_AMPLE)


def _adapters(core: Scheduler, flows: range) -> None:
    core.set_pool_limits(0, max_loras=_ADAPTERS, adapter_tokens=64)


def _audit(core: Scheduler, flows: range) -> None:
    for flow in flows[_AUDITED - 1 :: _AUDITED]:
        core.set_flow_mode(0, flow, True)


_DEFAULT_SAMPLES = {"samples_min": 1_000}  # more than the core learns: no predictions
_SATURATED: Options = {"saturation_ppm": 1, "saturation_band_ppm": 0}
_DEADLINES: Options = {"flow_order": "deadline"}
_REFUSES: Options = {"early_refusal": 1}
_BY_PREFIX: Options = {"policy": "dlpm"}


def _reports(flow: int, number: int) -> dict[str, Any]:
    return {"reports_progress": True}


def _deadline(flow: int, number: int) -> dict[str, Any]:
    # Never reached, and not in the order of the arrivals.
    return {"deadline_ns": _HOUR_NS + number * 7_919 % 4_093 * 1_000_000}


def _adapter(flow: int, number: int) -> dict[str, Any]:
    return {"adapter": b"adapter-%d" % (flow % _ADAPTERS)}


def _prefix(flow: int, number: int) -> dict[str, Any]:
    first = flow % _PROMPTS * _BLOCKS
    return {"prefix_block_hashes": tuple(range(first + 1, first + _BLOCKS + 1))}


DEFAULT = Feature("default", "the default policies")

FEATURES = (
    Feature(
        "weights",
        "weights alone, nothing predicted",
        {"ledger": "sum", "dispatch": "strict", **_DEFAULT_SAMPLES},
        _weights,
    ),
    Feature("classes", "priority classes, ageing", None, _classes),
    Feature("quotas", "quotas of each tenant", None, _quotas),
    Feature("levels", "quotas of groups and models", None, _levels, pools=_POOLS),
    Feature("shares", "shares that bind", _SATURATED, _shares),
    Feature("peak", "peak form: all report progress", None, _nothing, _reports),
    Feature("prediction", "output charged ahead (vtc-predict)", {"policy": "vtc-predict"}),
    Feature("pools", "8 pools", None, pools=_POOLS),
    Feature("adapters", "32 adapters", None, _adapters, _adapter),
    Feature("deadlines", "earliest deadline first", _DEADLINES, _nothing, _deadline),
    Feature("refusal", "early refusal", _REFUSES, _nothing, _deadline),
    Feature("dlpm", "DLPM: the longest prefix first", _BY_PREFIX, _nothing, _prefix),
    Feature("audit", "every eighth tenant under audit", None, _audit),
)


def _everything(core: Scheduler, flows: range) -> None:
    _weights(core, flows)
    _classes(core, flows)
    _levels(core, flows)
    _adapters(core, flows)
    _audit(core, flows)


def _says_everything(flow: int, number: int) -> dict[str, Any]:
    of = (flow, number)
    return {**_reports(*of), **_deadline(*of), **_adapter(*of), **_prefix(*of)}


ALL = Feature(
    "all",
    "all of it but shares",
    {**_DEADLINES, **_REFUSES, **_BY_PREFIX},
    _everything,
    _says_everything,
    _POOLS,
)


def pools_of(feature: Feature) -> list[bytes]:
    """Return the names of its pools."""
    return [b"gpu-%d" % number for number in range(feature.pools)]
