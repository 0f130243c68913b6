from __future__ import annotations

from pathlib import Path

import pytest

from . import trained


class Folders:
    """Makes folders with trained tokenizers, each when it is asked for first."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __getitem__(self, kind: str) -> Path:
        folder = self._root / kind
        if not folder.exists():
            config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
            if kind == "unigram":
                config["chat_template"] = trained.TEMPLATE
            trained.save(trained.KINDS[kind](), folder, **config)
        return folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("tokenizers"))
