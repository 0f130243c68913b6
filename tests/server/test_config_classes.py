"""Priority classes in the configuration file."""

from pathlib import Path

import pytest

from schedsvc._core import CallerError
from schedsvc.driver import new_core

from .test_config import MINIMAL, found, reading


def test_classes_reach_the_core(tmp_path: Path) -> None:
    text = MINIMAL + (
        "classes: [{name: fast, rank: -3, ageing_ms: 700}, {name: ops, exempt: true}]\n"
        "tenants: [{name: a, class: fast}, {name: b, classes: [ops]}, {name: c}]\n"
        "pools: [{name: p, capacity_tokens: 1000}]\n"
    )
    config = reading(tmp_path, text).config
    assert config is not None
    core = new_core(config, 0)
    rows = {row["name"]: row for row in core.stats(0)["classes"]}
    assert list(rows) == ["ops", "fast", "default"]
    assert (rows["fast"]["rank"], rows["fast"]["ageing_ms"]) == (-3, 700)
    a, b, c = (core.flow_index(name) for name in (b"a", b"b", b"c"))
    asked = [(a, b""), (a, b"default"), (b, b"ops"), (b, b""), (c, b"fast")]
    for i, (flow, name) in enumerate(asked):
        assert core.admit(0, flow, b"r%d" % i, 10, 10, request_class=name) > 0
    assert [d.engine_priority for d in core.poll(0)] == [-1_001, -3, -3, 0, 0]
    for flow, name in ((b, b"fast"), (c, b"ops")):
        with pytest.raises(CallerError, match="may not name"):
            core.admit(0, flow, b"x", 10, 10, request_class=name)


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
