"""Holds the answers of the gate to the table of refusals that all gates share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from schedsvc_client.testing import refusal
from schedsvc_client.v1 import quota_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

from .bench import TRUST, Bench

FILE = Path(__file__).parents[2] / "clients/conformance/gates/refusals.json"
TABLE: dict[str, list[dict[str, Any]]] = json.loads(FILE.read_text())
LIMITS = TABLE["limits"]
OF_GATE = ("retry-after", "x-should-retry", "x-ratelimit", "x-schedsvc")


def quota() -> quota_pb2.QuotaSnapshot:
    """Return the limits of the table."""
    kind = quota_pb2.LimitKind.Value
    return quota_pb2.QuotaSnapshot(
        limits=[
            quota_pb2.Limit(
                kind=kind(row["kind"]), limit=row["limit"], remaining=1, reset_ms=row["reset_ms"]
            )
            for row in LIMITS
        ]
    )


def limit_headers() -> dict[str, str]:
    """Return the headers with these limits."""
    told = {}
    for row in LIMITS:
        if name := row.get("name"):
            told[f"x-ratelimit-limit-{name}"] = str(row["limit"])
            told[f"x-ratelimit-remaining-{name}"] = "1"
            told[f"x-ratelimit-reset-{name}"] = row["reset"]
    return told


def test_the_table_has_each_refusal_of_the_contract() -> None:
    numbers = {pb.Outcome.Value(o) if isinstance(o, str) else o for o in outcomes()}
    known = {number for number in pb.Outcome.values() if 16 <= number < 48}
    assert numbers > known
    assert any(number not in pb.Outcome.values() for number in numbers)
    assert {row["kind"] for row in LIMITS} == set(quota_pb2.LimitKind.keys()[1:])


def outcomes() -> list[str | int]:
    """Return the outcomes of the table: names, and the number of a later version."""
    return [row["outcome"] for row in TABLE["outcomes"]]


@pytest.mark.parametrize("face", TABLE["outcomes"], ids=lambda face: face["reason"])
async def test_each_refusal_is_answered_by_the_table_of_all_gates(
    bench: Bench, face: dict[str, Any]
) -> None:
    outcome = face["outcome"]
    number = pb.Outcome.Value(outcome) if isinstance(outcome, str) else outcome
    for retry in TABLE["retries"]:
        for headers, limits in ((TRUST, limit_headers()), ({}, {})):
            bench.fake.script(
                refusal(
                    number, message="not now", retry_after_ms=retry["retry_after_ms"], quota=quota()
                )
            )
            refused = await bench.ask(headers=headers)
            assert (refused.status, refused.error["type"], refused.error["code"]) == (
                face["status"], face["type"], face["code"],
            )  # fmt: skip
            assert refused.error["message"].startswith("not now")
            told = {n: v for n, v in refused.answer_headers.items() if n.startswith(OF_GATE)}
            assert told == {
                **retry["headers"],
                **limits,
                "x-schedsvc-dropped-reason": face["reason"],
                "x-schedsvc-queue-duration-ms": "2000.000",
                "x-schedsvc-request-id": bench.fake.admits[-1].request_id,
            }
    assert bench.engine.bodies == []
    await bench.settled()
