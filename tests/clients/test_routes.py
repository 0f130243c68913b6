"""Tests the router's table of upstreams alone."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from schedsvc_vllm.answers import BadRequestError
from schedsvc_vllm.router import Member, Routes
from schedsvc_vllm.upstream_list import Named


class Listing:
    """Stands for an upstream that lists models."""

    def __init__(self, *models: str) -> None:
        self.state = SimpleNamespace()
        self.models: list[Mapping[str, Any]] = [{"id": model, "of": self} for model in models]

    async def __call__(self, *_: Any) -> None: ...

    async def greet(self) -> None: ...

    async def check(self) -> bool:
        return True

    def give_up(self) -> None: ...

    def close(self) -> None: ...


def added(routes: Routes, name: str, *lists: str, models: tuple[str, ...] = ()) -> Member:
    """Add an upstream that is known already."""
    member = Member(Named(name, f"http://{name}", models), Listing(*lists))
    member.is_greeted = True
    member.read_models()
    routes.members[name] = member
    routes.offer(member)
    return member


@pytest.fixture
def routes() -> Routes:
    made = Routes()
    made.open(lambda name, app: "", lambda name: None)
    return made


def test_a_model_is_served_by_those_that_list_it_or_are_said_to(routes: Routes) -> None:
    added(routes, "a", "m", "lora")
    added(routes, "b", "m")
    added(routes, "c", models=("x",))
    assert routes.pools_for("m") == ("a", "b")
    assert routes.pools_for("lora") == ("a",)
    assert routes.pools_for("x") == ("c",)
    for wrong in ("none", 5, ["m"], ""):
        with pytest.raises(BadRequestError) as refused:
            routes.pools_for(wrong)
        assert (refused.value.status, refused.value.code) == (404, "model_not_found")


def test_a_model_that_is_loaded_later_is_found(routes: Routes) -> None:
    member = added(routes, "a", "m")
    added(routes, "b", "m")
    assert routes.pools_for("m") == ("a", "b")
    member.server.models = [{"id": "other"}]
    assert member.read_models()
    routes.changed()
    assert (routes.pools_for("m"), routes.pools_for("other")) == (("b",), ("a",))
    routes.take_out(member)
    with pytest.raises(BadRequestError):
        routes.pools_for("other")


def test_a_request_without_a_model_needs_upstreams_that_are_alike(routes: Routes) -> None:
    added(routes, "a", "m", "n")
    added(routes, "b", "n", "m")
    assert routes.pools_for(None) == ("a", "b")
    added(routes, "c", "other")
    with pytest.raises(BadRequestError, match="model: is required"):
        routes.pools_for(None)


def test_an_upstream_that_is_out_is_left_out_while_another_answers(routes: Routes) -> None:
    a, b = added(routes, "a", "m"), added(routes, "b", "m")
    pools, nothing = ("a", "b"), frozenset[str]()
    assert routes.usable(pools, nothing) == pools
    assert routes.usable(pools, frozenset({"a"})) == ("b",)
    a.is_out = True
    assert routes.usable(pools, nothing) == ("b",)
    # Rather one that has failed than none.
    assert routes.usable(pools, frozenset({"b"})) == ("b",)
    b.is_out = True
    assert routes.usable(pools, nothing) == pools
    assert routes.usable(("gone",), nothing) == ("gone",)


def test_without_a_grant_the_least_busy_one_is_taken(routes: Routes) -> None:
    added(routes, "a", "m").running = 2
    added(routes, "b", "m").running = 1
    assert routes.least(("a", "b")) == "b"


def test_the_first_upstream_describes_a_model_that_two_list(routes: Routes) -> None:
    first = added(routes, "a", "m")
    added(routes, "b", "m", "n", models=("m", "x"))
    listed = routes.listed()
    assert [entry["id"] for entry in listed] == ["m", "x"]
    assert listed[0]["of"] is first.server
    assert listed[1]["owned_by"] == "b"


def test_an_upstream_of_unknown_size_gets_no_requests(caplog: pytest.LogCaptureFixture) -> None:
    routes = Routes()
    with caplog.at_level(logging.ERROR, "schedsvc_vllm"):
        routes.open(lambda name, app: "give the KV cache", lambda name: None)
        member = added(routes, "a", "m")
        routes.offer(member)
    assert [record.getMessage() for record in caplog.records] == [
        "upstream a gets no requests: give the KV cache"
    ]
    with pytest.raises(BadRequestError):
        routes.pools_for("m")
