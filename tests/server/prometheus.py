"""A real Prometheus that scrapes pages of metrics and evaluates rules."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from schedsvc_lab.demo.processes import free_port


class Prometheus:
    """Answers queries of tests. During its start, it has no answer."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self._http = http

    async def values(self, query: str) -> list[float]:
        """Return the values of a query now."""
        found = await self._get("/api/v1/query", query=query)
        return [float(row["value"][1]) for row in found.get("result", ())]

    async def firing(self) -> list[dict[str, str]]:
        """Return the labels of the alerts that fire."""
        found = await self._get("/api/v1/alerts")
        return [row["labels"] for row in found.get("alerts", ()) if row["state"] == "firing"]

    async def _get(self, path: str, **words: str) -> dict[str, Any]:
        try:
            async with self._http.get(path, params=words) as answer:
                if answer.status == 503:
                    return {}
                found = await answer.json()
        except aiohttp.ClientConnectionError:
            return {}
        assert found["status"] == "success", (words, found)
        return dict(found["data"])


@asynccontextmanager
async def scraping(
    folder: Path, urls: Sequence[str], rules: dict[str, Any] | None = None
) -> AsyncIterator[Prometheus]:
    """Run it on these pages, as the job `schedsvc`, with a file of rules."""
    address = f"127.0.0.1:{free_port()}"
    targets = [url.removeprefix("http://").removesuffix("/metrics") for url in urls]
    job = {"job_name": "schedsvc", "static_configs": [{"targets": targets}]}
    times = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
    config: dict[str, Any] = {"global": times, "scrape_configs": [job]}
    if rules is not None:
        (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
        config["rule_files"] = ["rules.yaml"]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    options = {
        "config.file": folder / "prometheus.yml",
        "storage.tsdb.path": folder / "data",
        "web.listen-address": address,
    }
    log = (folder / "log").open("wb")
    words = [f"--{name}={value}" for name, value in options.items()]
    process = await asyncio.create_subprocess_exec("prometheus", *words, stdout=log, stderr=log)
    try:
        async with aiohttp.ClientSession(f"http://{address}") as http:
            yield Prometheus(http)
    finally:
        process.terminate()
        await process.wait()
        log.close()
