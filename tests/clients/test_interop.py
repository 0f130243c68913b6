"""Ordinary HTTP clients at the gate and at the proxy."""

from __future__ import annotations

import pytest

from .interop import main


@pytest.mark.slow
def test_every_client_that_is_here_sees_what_the_books_say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["interop"])
    assert main() == 0, capsys.readouterr().err
    assert capsys.readouterr().out.count("as the books say") >= 8
