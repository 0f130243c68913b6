"""Counts the lines that people wrote, by room: `python -m tests.tidy.lines [COMMIT] [--json]`.

It reads the files that git knows, at a commit or as they lie in the work tree. It leaves out
generated files, data, and lists of versions.
"""

import argparse
import json
import re
import subprocess
from collections import Counter
from pathlib import Path

from .sources import ROOT, is_generated

#: Files that programs write, that hold data, or whose words are another's.
_NOT_WRITTEN = re.compile(
    r"\.(json|csv|svg|lock)$|(^|/)LICENSE$|^constraints\.txt$|^tests/fuzz/found/"
)
#: The rooms that make up the service.
SERVICE = ("_core", "schedsvc", "clients", "proto", "spec")


def room(path: str) -> str:
    """Return the room of a file: the folder at the root that holds it."""
    if path.startswith("schedsvc/lab/"):  # the laboratory's place up to 1fab9528
        return "lab"
    return path.partition("/")[0] if "/" in path else "(root)"


def count(commit: str | None = None, root: Path = ROOT) -> dict[str, int]:
    """Return the lines of each room, at a commit or, without one, in the work tree."""
    # Git skips links and, for -I, files that are not text.
    command = ["git", "grep", "-I", "-z", "--count"]
    command += ["", commit] if commit else ["--untracked", ""]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    lines: Counter[str] = Counter()
    for row in done.stdout.splitlines():
        path, _, found = row.removeprefix(f"{commit}:").partition("\0")
        if not (is_generated(path) or _NOT_WRITTEN.search(path)):
            lines[room(path)] += int(found)
    return dict(sorted(lines.items()))


def summary(rooms: dict[str, int]) -> dict[str, int]:
    """Return the rooms with the sums of the service and of all."""
    service = sum(rooms.get(name, 0) for name in SERVICE)
    return rooms | {"service": service, "total": sum(rooms.values())}


def main() -> None:
    """Print the lines of each room, of the service, and of all."""
    parser = argparse.ArgumentParser(prog="tests.tidy.lines", description=__doc__)
    parser.add_argument("commit", nargs="?", help="count there; without it, in the work tree")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    given = parser.parse_args()
    try:
        rows = summary(count(given.commit))
    except subprocess.CalledProcessError as error:
        parser.error(f"commit {given.commit!r}: {error.stderr.strip()}")
    if given.json:
        print(json.dumps(rows))
        return
    for name, lines in rows.items():
        print(f"{name:<10}{lines:>9,}")


if __name__ == "__main__":
    main()
