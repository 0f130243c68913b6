"""Runs LiteLLM's real proxy with the plug-in and two workers, two emulated engines, a scheduler."""

from __future__ import annotations

import json
import os
import secrets
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from schedsvc_lab.demo.processes import free_port
from tests.processes.programs import Programs

ROOT = Path(__file__).resolve().parents[2]
#: Where `make test-litellm` installs LiteLLM.
VENV = ROOT / ".venv-litellm"
POOLS = ("gpu-1", "gpu-2")
CAPACITY_TOKENS, CONTEXT_TOKENS = 4_096, 2_048
ENGINE = (
    *("--profile", "tiny-cpu", "--block-size", "16"),
    *("--kv-tokens", str(CAPACITY_TOKENS), "--max-model-len", str(CONTEXT_TOKENS)),
)
#: The key of a tenant names its team, its user and itself.
AUTH = """\
from litellm.proxy._types import UserAPIKeyAuth


async def check(request, api_key):
    team, user, alias = api_key.removeprefix("sk-").split(".")
    return UserAPIKeyAuth(api_key=api_key, team_id=team, user_id=user, key_alias=alias)
"""


def settings(**more: Any) -> dict[str, Any]:
    """Return the scheduler's configuration: no gate offers these pools."""
    sizes = {"capacity_tokens": CAPACITY_TOKENS, "max_model_tokens": CONTEXT_TOKENS}
    return {
        "pools": [{"name": name, **sizes} for name in POOLS],
        "limits": {"drain_ms": 0},
        "log": {"level": "warning"},
        **more,
    }


class Stand(Programs):
    """Holds the programs."""

    def __init__(
        self,
        folder: Path,
        keys: dict[str, Any] | None = None,
        engine: tuple[str, ...] = ENGINE,
    ) -> None:
        super().__init__(folder, keys or settings(), engine=engine, gated=False)
        self.url = ""
        self.engines: dict[str, str] = {}

    def start_engines(self) -> None:
        """Start an engine for each pool, which writes its own counts."""
        for name in POOLS:
            counts = ("--counts", str(self.folder / f"{name}.counts"))
            self.engines[name] = self.emulate(name, "0", *counts)

    def counted(self) -> Counter[str]:
        """Return the tokens that the engines counted, of answers that they made whole."""
        total: Counter[str] = Counter()
        for name in POOLS:
            path = self.folder / f"{name}.counts"
            for line in path.read_text().splitlines() if path.exists() else ():
                entry = json.loads(line)
                if entry["done"]:
                    total["input"] += entry["input_tokens"]
                    total["output"] += entry["output_tokens"]
        return total

    def start_litellm(
        self, *, workers: int = 2, is_plugged: bool = True, **environment: str
    ) -> None:
        """Start the proxy. `is_plugged`: with the plug-in."""
        self._write_litellm(is_plugged=is_plugged)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [
            *(str(VENV / "bin/litellm"), "--config", str(self.folder / "litellm.yaml")),
            # Not with gunicorn: it forks while a thread imports, so a worker may hang as it starts.
            *("--host", "127.0.0.1", "--port", str(port), "--num_workers", str(workers)),
        ]
        variables = {
            "SCHEDSVC_TARGET": self.target,
            "PYTHONPATH": str(self.folder),
            # A map of prices that it would fetch from the network.
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        self.spawn("litellm", command, variables | environment, self._litellm_answers)

    def _write_litellm(self, *, is_plugged: bool) -> None:
        (self.folder / "own_auth.py").write_text(AUTH)
        callbacks = ["schedsvc_litellm.plugin.admission"] if is_plugged else []
        config = {
            "model_list": [
                self._deployment(model, name, url)
                for name, url in self.engines.items()
                for model in ("m", "plain")
            ]
            # Nothing listens there.
            + [self._deployment("broken", POOLS[0], "http://127.0.0.1:9")],
            "litellm_settings": {"callbacks": callbacks, "num_retries": 1},
            "router_settings": {"disable_cooldowns": True},
            "general_settings": {
                "master_key": f"sk-{secrets.token_hex(24)}",
                "custom_auth": "own_auth.check",
                "pass_through_endpoints": [
                    {"path": "/through", "target": f"{self.engines[POOLS[0]]}/v1/completions"}
                ],
            },
        }
        (self.folder / "litellm.yaml").write_text(json.dumps(config))

    @staticmethod
    def _deployment(model: str, pool: str, url: str) -> dict[str, Any]:
        return {
            "model_name": model,
            "litellm_params": {
                "model": "hosted_vllm/emulated",
                "api_base": f"{url}/v1",
                "api_key": "none",
            },
            # The engines of `plain` are none of the scheduler's.
            "model_info": {
                "m": {"id": pool, "schedsvc_pool": pool},
                "plain": {},
                "broken": {"schedsvc_pool": pool},
            }[model],
        }

    def _litellm_answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health/liveliness", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False


def needs_litellm() -> None:
    """Skip the test without LiteLLM, or fail in CI."""
    if not (VENV / "bin/litellm").exists():
        (pytest.fail if "SCHEDSVC_CI" in os.environ else pytest.skip)(
            "no LiteLLM; `make test-litellm` installs it"
        )


def client(stand: Stand) -> aiohttp.ClientSession:
    """Return a client of the proxy with no limit of connections."""
    timeout = aiohttp.ClientTimeout(total=None)
    return aiohttp.ClientSession(
        stand.url, connector=aiohttp.TCPConnector(limit=0), timeout=timeout
    )


def key(tenant: str) -> dict[str, str]:
    """Return the header of a tenant's key."""
    return {"authorization": f"Bearer sk-{tenant.replace('/', '.')}"}


def chat(output_tokens: int, **fields: Any) -> dict[str, Any]:
    """Return the body of a chat with an answer of exactly this length."""
    messages = [{"role": "user", "content": "how are you"}]
    exact = {"max_tokens": output_tokens, "ignore_eos": True}
    return {"model": "m", "messages": messages} | exact | fields
