"""Counts the instructions of this process and all its threads under callgrind.

Valgrind understands a few requests of the program that it runs. They are instructions in C, so a
library of a few lines is compiled from valgrind's own header. A count does not depend on what else
the machine does, as a time does.
"""

import ctypes
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

_SOURCE = """#include <valgrind/callgrind.h>
void dump(void) { CALLGRIND_DUMP_STATS; }
void zero(void) { CALLGRIND_ZERO_STATS; }
int runs(void) { return RUNNING_ON_VALGRIND; }
"""
_NAME = re.compile(r"(c?fn)=(\(\d+\))(?: (.+))?")
_SUM = re.compile(rb"^totals: (\d+)$", re.MULTILINE)


def under_callgrind(command: Sequence[str], folder: Path) -> list[str]:
    """Return the command by which callgrind runs `command`; its counts go to `folder`."""
    out = folder / "callgrind.out"
    return ["valgrind", "-q", "--tool=callgrind", f"--callgrind-out-file={out}", *command]


class Counter:
    """Counts instructions since its last reading. `folder` is that of `under_callgrind`.

    Raises RuntimeError if valgrind does not run this process, or its header or gcc is missing.
    """

    def __init__(self, folder: Path) -> None:
        self._out = folder / "callgrind.out"
        self._dumps = 0
        source, library = folder / "requests.c", folder / "requests.so"
        source.write_text(_SOURCE)
        compiler = shutil.which("gcc")
        if compiler is None:
            raise RuntimeError("counting instructions needs gcc, which is not installed")
        command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(source)]
        made = subprocess.run(command, check=False, capture_output=True, text=True)
        if made.returncode:
            raise RuntimeError(f"valgrind's header cannot be compiled: {made.stderr[:300]}")
        self._requests = ctypes.CDLL(str(library))
        if not self._requests.runs():
            raise RuntimeError("valgrind does not run this process")

    def look(self) -> int:
        """Return the instructions since the last look, or since the start. O(functions run)."""
        found = _SUM.search(self._dump())
        if found is None:
            raise RuntimeError("callgrind wrote no sum")
        count = int(found[1])
        self._requests.zero()
        return count

    def look_at(self, pattern: str) -> dict[str, int]:
        """Return the instructions since the last look in calls of certain functions.

        The counts include the functions that these call. They are keyed by the first group of
        `pattern`, which has to match the whole name. O(functions run).
        """
        counts = calls(self._dump().decode(), re.compile(pattern))
        self._requests.zero()
        return counts

    def _dump(self) -> bytes:
        self._requests.dump()
        self._dumps += 1
        file = Path(f"{self._out}.{self._dumps}")
        text = file.read_bytes()
        file.unlink()
        return text


def calls(dump: str, pattern: re.Pattern[str]) -> dict[str, int]:
    """Return the instructions in calls of the functions that `Counter.look_at` means.

    In callgrind's format a call is three lines: the callee, whose name follows its number where it
    occurs first; how many calls; a line of source and what these calls cost.
    """
    names: dict[str, str] = {}
    found: dict[str, int] = {}
    lines = iter(dump.splitlines())
    callee = ""
    for line in lines:
        if named := _NAME.match(line):
            names.setdefault(named[2], named[3] or "")
            callee = names[named[2]] if named[1] == "cfn" else callee
        elif line.startswith("calls="):
            cost = int(next(lines).split()[1])
            if matched := pattern.fullmatch(callee):
                found[matched[1]] = found.get(matched[1], 0) + cost
    return found
