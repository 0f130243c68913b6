"""Tests ordinary HTTP clients at the gate and at the proxy."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import interop_clients
from .interop import main


def test_a_client_that_is_not_here_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(interop_clients, "ENVIRONMENT", tmp_path / "none")
    monkeypatch.setenv("PATH", str(tmp_path))
    found, missing = interop_clients.clients(tmp_path, "gate")
    assert sorted(found) == ["OpenAI SDK (Python)", "aiohttp", "http.client", "httpx"]
    assert missing == [
        "curl: skipped; not installed here: curl",
        "fetch (Node): skipped; not installed here: node",
        "HttpClient (Java): skipped; not installed here: java, javac",
        "Anthropic SDK (Python): skipped; `make test-interop` installs it",
        "LangChain: skipped; `make test-interop` installs it",
        "OpenAI SDK (Node): skipped; `make test-interop` installs it",
    ]


@pytest.mark.slow
def test_every_client_that_is_here_sees_what_the_books_say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["interop"])
    assert main() == 0, capsys.readouterr().err
    assert capsys.readouterr().out.count("as the books say") >= 8
