"""vLLM serves no endpoint that the gate's lists do not know, and tenants reach no operator's."""

from __future__ import annotations

import aiohttp
import pytest

from tests.clients.path_lists import lists_of

from .stack import Stack


async def served(session: aiohttp.ClientSession) -> dict[str, set[str]]:
    """Return the methods of each path that vLLM describes, its development endpoints included."""
    async with session.get("/openapi.json") as response:
        assert response.status == 200
        described = await response.json()
    return {path: set(methods) for path, methods in described["paths"].items()}


async def test_every_endpoint_of_vllm_is_in_one_list(stack: Stack) -> None:
    async with aiohttp.ClientSession(stack.url) as session:
        paths = await served(session)
    assert {"/v1/completions", "/reset_prefix_cache", "/server_info"} <= set(paths)
    found = {path: lists_of(path) for path in sorted(paths)}
    assert {path: lists for path, lists in found.items() if len(lists) != 1} == {}


@pytest.mark.parametrize("key", [{}, {"authorization": "Bearer tenant"}])
async def test_no_tenant_reaches_an_operator_endpoint_of_vllm(
    stack: Stack, key: dict[str, str]
) -> None:
    async with aiohttp.ClientSession(stack.url, headers=key) as session:
        paths = await served(session)
        for path in (path for path in paths if lists_of(path) == ["operators"]):
            for method in paths[path]:
                async with session.request(method, path.replace("{", "").replace("}", "")) as tried:
                    error = (await tried.json())["error"]
                assert (tried.status, error["code"]) == (501, "operator_endpoint"), (method, path)
