"""Tests which servers the proxy's command line and its file name."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from schedsvc_vllm import proxy_cli
from schedsvc_vllm.launcher import LaunchError
from schedsvc_vllm.proxy import Upstream
from schedsvc_vllm.router import Router
from schedsvc_vllm.upstream_list import ListError, Named, UpstreamList, named_all, parse

TARGET = {"SCHEDSVC_TARGET": "unix:/s"}


def test_an_upstream_is_named_or_is_called_by_its_address() -> None:
    named = named_all(["gpu-1=http://h:1/", "https://user:word@h:2", "http://[::1]:3"])
    assert named == (
        Named("gpu-1", "http://h:1"),
        Named("h:2", "https://user:word@h:2"),
        Named("[::1]:3", "http://[::1]:3"),
    )


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["a=http://h:1", "a=http://h:2"], "two upstreams have the name a"),
        (["a=http://h:1", "b=http://h:1/"], "two upstreams have the url http://h:1"),
        (["a=h:1", "b=http://h:2"], "--upstream a=h:1: must be http://HOST:PORT"),
        (["a=http://h:1/v1"], "without /v1"),
        (["a=http://h:99999"], "the port is not valid"),
        (["http://:80"], "the host or the port is not valid"),
        (["a b=http://h:1"], "'a b'"),
        (["dns+http://h:1", "http://h:2"], "names of DNS are not looked up"),
        ([f"http://h:{port}" for port in range(1, 66)], "65 upstreams; at most 64"),
    ],
)
def test_a_wrong_upstream_is_named(arguments: list[str], named: str) -> None:
    words = [word for argument in arguments for word in ("--upstream", argument)]
    with pytest.raises(LaunchError, match=named.replace("+", r"\+")):
        proxy_cli.prepare(words, dict(TARGET))


@pytest.mark.parametrize(
    ("words", "environment", "named"),
    [
        ([], {}, "give one of them"),
        (["--upstream", "http://h:1", "--upstreams-file", "/f"], {}, "give one of them"),
        (["--upstreams-file", "/none"], {}, "/none: cannot be read"),
        (["--upstream", "a=http://h:1"], {"SCHEDSVC_POOL": "x"}, "SCHEDSVC_POOL: is of one"),
        (["--upstream", "a=http://h:1"], {"SCHEDSVC_POOL_EPOCH": "1"}, "SCHEDSVC_POOL_EPOCH"),
    ],
)
def test_options_that_do_not_fit_are_named(
    words: list[str], environment: dict[str, str], named: str
) -> None:
    with pytest.raises(LaunchError, match=named):
        proxy_cli.prepare(words, TARGET | environment)


def test_one_upstream_without_a_name_is_no_router() -> None:
    for words, kind in (
        (["--upstream", "http://h:1"], Upstream),
        (["--upstream", "a=http://h:1"], Router),
        (["--upstream", "http://h:1", "--upstream", "http://h:2"], Router),
    ):
        gate = proxy_cli.build(*proxy_cli.prepare(words, dict(TARGET)))
        assert isinstance(gate.app, kind)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("a: [", "while parsing"),
        ("- a", "must have one field, upstreams"),
        ("upstreams: []", r"upstreams: must be a list with at least one"),
        ("upstreams: [{name: a}]", r"upstreams\[0\]: must have a url"),
        ("upstreams: [{url: 'http://h:1', weight: 2}]", r"upstreams\[0\]: must have a url"),
        ("upstreams: [{url: 'http://h:1', models: m}]", r"upstreams\[0\].models: must be a list"),
        ("upstreams: [{url: 'h:1'}]", r"upstreams\[0\]: must be http"),
    ],
)
def test_a_wrong_file_is_named(text: str, named: str) -> None:
    with pytest.raises(ListError, match=named):
        parse(text.encode(), "f.yaml")


def test_a_file_that_changes_is_read_again(tmp_path: Path, caplog: Any) -> None:
    file = tmp_path / "upstreams.yaml"
    row = {"name": "a", "url": "http://h:1", "models": ["m"]}
    file.write_text(json.dumps({"upstreams": [row]}))
    listed = UpstreamList((), str(file))
    assert listed.first == (Named("a", "http://h:1", ("m",)),)
    assert listed.changed() is None
    with caplog.at_level(logging.ERROR, "schedsvc_vllm"):
        file.write_text("upstreams: 5")
        assert listed.changed() is None
        assert listed.changed() is None
        file.unlink()
        assert listed.changed() is None
    assert len(caplog.records) == 2  # each problem once
    file.write_text(json.dumps({"upstreams": [row, {"url": "http://h:2"}]}))
    changed = listed.changed()
    assert changed is not None
    assert [each.name for each in changed] == ["a", "h:2"]
    assert listed.changed() is None
