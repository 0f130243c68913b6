"""Attacks the file of a ledger that a scheduler holds, as another program would."""

import shutil
from pathlib import Path


def delete(path: Path) -> None:
    path.unlink()


def delete_all(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink()


def delete_log(path: Path) -> None:
    path.with_name(path.name + "-wal").unlink()


def rename_over(path: Path) -> None:
    other = path.with_name("other")
    shutil.copy(path, other)
    other.replace(path)


def move(path: Path) -> None:
    path.rename(path.with_name("moved"))
