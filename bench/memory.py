"""Reads the memory and files of a process from Linux."""

from pathlib import Path

__all__ = ["files", "peak_mb", "resident_mb"]


def resident_mb(pid: int | str) -> float:
    """Return the memory of a process that is in use now, in MB."""
    return _field(pid, "VmRSS:")


def peak_mb(pid: int | str) -> float:
    """Return the most that it ever had in use, in MB."""
    return _field(pid, "VmHWM:")


def files(pid: int) -> int:
    """Return how many files and sockets it has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _field(pid: int | str, name: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(name))
    return int(line.split()[1]) * 1_024 / 1e6
