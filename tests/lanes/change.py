"""Finds the files that differ from the base commit, and a number made of the tree's hash."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

HOURS = 24
QUARTERS = 4


@dataclass(frozen=True)
class Change:
    """Names the files that differ from a base; None if there is none: then everything runs."""

    base: str
    paths: frozenset[str] | None
    tree: int = 0

    @property
    def quarter(self) -> int:
        """Return the part of the lanes that runs whatever changed."""
        return self.tree % QUARTERS

    def __str__(self) -> str:
        if self.paths is None:
            return self.base
        return f"{len(self.paths)} files differ from {self.base}"


def git(root: Path, *arguments: str) -> str | None:
    """Run git; None if it fails, as it does outside a checkout."""
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else None


def tracked(root: Path) -> frozenset[str]:
    """Return the files of the tree, those that git does not know yet included."""
    listed = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    return frozenset(p for p in (listed or "").split("\0") if p and (root / p).is_file())


def tree_number(root: Path) -> int:
    """Return a number that is new with each change, and the same for all who run it."""
    found = git(root, "rev-parse", "--verify", "-q", "HEAD^{tree}") or "0"
    return int(found[:11], 16)


def change(root: Path, base: str | None = None) -> Change:
    """Return what differs from `base`, else from `CI_BASE`, else from a day before."""
    tree = tree_number(root)
    named = os.environ.get("CI_BASE", "") if base is None else base
    found = git(root, "rev-parse", "--verify", "-q", f"{named}^{{commit}}") if named else None
    if named and not found:
        return Change(f"CI_BASE={named} is no commit here", None, tree)
    if not named:
        found = git(root, "rev-list", "-1", f"--before={HOURS} hours ago", "HEAD")
    if not found:
        return Change(f"no commit here is older than {HOURS} hours", None, tree)
    differ = git(root, "diff", "--name-only", "--no-renames", "-z", found)
    added = git(root, "ls-files", "-z", "--others", "--exclude-standard")
    if differ is None or added is None:
        return Change(f"git cannot compare with {found[:8]}", None, tree)
    against = f"{found[:8]} ({'CI_BASE' if named else f'the newest older than {HOURS} hours'})"
    return Change(against, frozenset(filter(None, f"{differ}\0{added}".split("\0"))), tree)
