"""Builds the core with AddressSanitizer, UBSan and counted coverage, and runs it."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.other_core import CORE, built, compile_extension, core_sources, load

ROOT = Path(__file__).parents[2]
_VARIABLE = "SCHEDSVC_SANITISED_CORE"
_INPUT = "SCHEDSVC_FUZZED_INPUT"
FOUND = Path(__file__).parent / "found"
"""Inputs that broke something once, a folder for each target."""
#: Python's own flags have -fwrapv, which would switch the checks of signed overflow off.
FLAGS = [
    "-O1", "-g1", "-fno-strict-aliasing", "-fno-wrapv", "-w", "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fsanitize-coverage=trace-pc", "-DSCHEDSVC_GROW_BY_ONE",
]  # fmt: skip
_COVERAGE = Path(__file__).parent / "coverage.c"


def _library(name: str) -> str:
    command = ["gcc", f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _build() -> Path:
    """Build the core under build/, unless that has been done."""
    texts = [path.read_bytes() for path in (*core_sources().values(), _COVERAGE)]
    return built("sanitised", (texts, FLAGS), _compile)


def _compile(folder: Path) -> None:
    shutil.copytree(CORE, folder / "source", ignore=shutil.ignore_patterns("*.c"))
    counter = folder / "coverage.o"
    command = ["gcc", "-O2", "-fPIC", "-c", "-o", str(counter), str(_COVERAGE)]
    subprocess.run(command, check=True)
    links = ["-fsanitize=address,undefined", str(counter)]
    compile_extension(folder / "source" / "core.pyx", folder, FLAGS, links)


def run_again(arguments: list[str]) -> int:
    """Run this program once more, with the core that watches its memory. Returns its status."""
    libraries = [_library(name) for name in ("libasan.so", "libubsan.so")]
    if not all(Path(library).is_absolute() for library in libraries):
        print("gcc has no libasan.so or libubsan.so here: fuzzing the core as it is built")
        return subprocess.run([sys.executable, "-m", "tests.fuzz", *arguments]).returncode
    environment = os.environ | {
        _VARIABLE: str(_build()),
        "LD_PRELOAD": " ".join(libraries),
        # Python itself keeps much until its end; its own small blocks would hide overruns.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:allocator_may_return_null=1",
        "UBSAN_OPTIONS": os.environ.get("UBSAN_OPTIONS", "print_stacktrace=1:halt_on_error=1"),
        "PYTHONMALLOC": "malloc",
    }
    command = [sys.executable, "-m", "tests.fuzz", *arguments]
    with tempfile.NamedTemporaryFile() as current:
        environment[_INPUT] = current.name
        child = subprocess.Popen(command, env=environment, cwd=ROOT, stderr=subprocess.PIPE)
        assert child.stderr is not None
        said = []
        for line in child.stderr:
            sys.stderr.buffer.write(line)
            if b"runtime error" in line or b"ERROR: AddressSanitizer" in line:
                said.append(line.decode(errors="replace"))
        status = child.wait()
        if status < 0 or said:
            keep(current.read(), "".join(said))
    return status


def keep(noted: bytes, said: str) -> None:
    """Keep the input at which a sanitizer ended a process, and print its path below the report."""
    name, _, data = noted.partition(b"\n")
    if name:
        path = found(name.decode(), data)
        print(
            f"{said}{name.decode()}: the process ended at this input\n  {data[:400]!r}\n"
            f"  python -m tests.fuzz {name.decode()} --sanitised --input {path}"
        )


def found(name: str, data: bytes) -> Path:
    """Keep an input that broke something. Returns its path."""
    path = FOUND / name / hashlib.sha256(data).hexdigest()[:12]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


class Noted:
    """Records each input before it runs: a sanitizer ends the process without a report of it."""

    def __init__(self) -> None:
        path = os.environ.get(_INPUT)
        self._file = None if path is None else open(path, "r+b", buffering=0)  # noqa: SIM115

    def note(self, name: str, data: bytes) -> None:
        """Replace the recorded input. O(bytes)."""
        if self._file is not None:
            self._file.seek(0)
            self._file.write(name.encode() + b"\n" + data)
            self._file.truncate()


def take_over() -> None:
    """Use the core that the environment names, if it names one."""
    path = os.environ.get(_VARIABLE)
    if path:
        load(Path(path))
