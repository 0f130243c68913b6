"""Tests priority classes in the configuration file."""

from pathlib import Path

import grpc
import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1 import tenants_pb2

from schedsvc._core import CallerError
from schedsvc.config import path_text
from schedsvc.driver import new_core

from .conftest import ask, calling, failure, serving
from .test_config import MINIMAL, found, reading


def test_classes_reach_the_core(tmp_path: Path) -> None:
    text = MINIMAL + (
        "classes: [{name: fast, rank: -3, ageing_ms: 700}, {name: ops, exempt: true}]\n"
        "tenants: [{name: a, class: fast}, {name: b, classes: [ops]},"
        " {name: c, classes: [fast]}, {name: d}]\n"
        "pools: [{name: p, capacity_tokens: 1000}]\n"
    )
    config = reading(tmp_path, text).config
    assert config is not None
    core = new_core(config, 0)
    rows = {row["name"]: row for row in core.stats(0)["classes"]}
    assert list(rows) == ["ops", "fast", "default"]
    assert (rows["fast"]["rank"], rows["fast"]["ageing_ms"]) == (-3, 700)
    a, b, c, d = (core.flow_index(name) for name in (b"a", b"b", b"c", b"d"))
    asked = [(a, b""), (a, b"fast"), (b, b"ops"), (b, b""), (c, b"fast"), (d, b"default")]
    for i, (flow, name) in enumerate(asked):
        assert core.admit(0, flow, b"r%d" % i, 10, 10, request_class=name) > 0
    assert [d.engine_priority for d in core.poll(0)] == [-1_001, -3, -3, -3, 0, 0]
    for flow, name in ((a, b"default"), (b, b"fast"), (c, b"ops"), (d, b"fast")):
        with pytest.raises(CallerError, match="may not name"):
            core.admit(0, flow, b"x", 10, 10, request_class=name)


async def test_a_tenant_names_its_own_class_alone_by_default() -> None:
    """It is so if the tenant is listed, of a rule, or without a flow of its own."""
    keys = {
        "classes": [{"name": "priority", "rank": -10}, {"name": "flex", "rank": 5}],
        "tenants": [{"name": "a"}, {"name": "b", "class": "flex"}],
        "tenant_rules": [{"match": "*", "class": "flex"}],
    }
    own = {"a": "default", "b": "flex", "by-rule": "flex", "by-header": "default"}
    async with serving(**keys) as server, calling(server.targets[0]) as stub:
        for tenant, cls in own.items():
            proof = tenants_pb2.TENANT_PROOF_HEADER if tenant == "by-rule" else 0
            for name in ("priority", "flex", "default", ""):
                request = ask(1, tenant=tenant, request_class=name, tenant_proof=proof)
                if name in (cls, ""):
                    assert (await stub.Admit(request)).outcome == pb.OUTCOME_GRANTED
                else:
                    error = await failure(stub.Admit(request))
                    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
                    assert "request_class: the tenant may not name" in (error.details() or "")


def test_check_names_a_class_that_no_request_can_be_of(tmp_path: Path) -> None:
    text = (
        MINIMAL + "classes: [{name: fast, rank: -3}, {name: slow, rank: 3}, {name: ops, rank: 9}]\n"
    )
    warnings = reading(tmp_path, text + "tenants: [{name: a, classes: [slow]}]\n").warnings
    found = [(path_text(each.path), each.message.split(",")[0]) for each in warnings]
    assert [each for each in found if each[0].startswith("classes")] == [
        ("classes[0].name", "'fast' is of no use"),
        ("classes[2].name", "'ops' is of no use"),
    ]
    used = "tenants: [{name: a, class: fast}]\ntenant_rules: [{match: x, classes: [ops]}]\n"
    used += "unknown_tenants_limits: {classes: [slow]}\n"
    warnings = reading(tmp_path, text + used).warnings
    assert not [each for each in warnings if each.path[0] == "classes"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "classes: [{name: a}, {name: b, rank: 1}, {name: c, rank: 1}, {name: d, rank: 0}]\n",
            [
                "2:11 classes[0]: the key 'rank' is missing; add it: the least goes first,"
                " 'default' has 0",
                "2:58 classes[2].rank: this rank stands twice, first at classes[1].rank;"
                " remove one",
                "2:78 classes[3].rank: is that of the class 'default'; choose another",
            ],
        ),
        (
            "classes:\n  - {name: a, exempt: true, rank: 1}\n  - {name: default, exempt: true}\n",
            [
                "3:35 classes[0].rank: is of no use: an exempt class precedes all; remove it",
                "4:29 classes[1].exempt: would let every request pass; make another class exempt",
            ],
        ),
        (
            "scheduler: {queue_ttl_ms: 900}\n"
            "classes: [{name: a, rank: 1, ageing_ms: 900}, {name: a, rank: 1001}]\n",
            [
                "3:41 classes[0].ageing_ms: ageing_ms is not shorter than scheduler.queue_ttl_ms"
                " (900): what waits so long is evicted before",
                "3:47 classes[1]: ageing_ms is not shorter than scheduler.queue_ttl_ms"
                " (900): what waits so long is evicted before",
                "3:54 classes[1].name: this class stands twice, first at classes[0].name;"
                " remove one",
                "3:63 classes[1].rank: is 1001; it has to be at most 1000",
            ],
        ),
        (
            "classes: [{name: a, rank: 1}]\ntenants:\n  - {name: x, class: b}\n"
            "  - {name: y, classes: [a, c]}\n",
            [
                "4:22 tenants[0].class: 'b' is no class; add it to classes (known: 'default', 'a')",
                "5:28 tenants[1].classes[1]: 'c' is no class; add it to classes"
                " (known: 'default', 'a')",
            ],
        ),
    ],
)
def test_wrong_classes_are_named_by_place(text: str, expected: list[str], tmp_path: Path) -> None:
    assert found(tmp_path, MINIMAL + text) == expected
