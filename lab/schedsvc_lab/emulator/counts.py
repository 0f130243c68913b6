"""Writes the emulator's own counts: a line for each part of an answer, before the part is sent.

Tests and proofs compare a gate's reports and a scheduler's ledger with this file.
"""

import json
import os
import time
from pathlib import Path

from schedsvc_lab.emulator.realtime import Generation


class CountsFile:
    """Appends JSON lines to a file.

    A line is written with one system call, so a process that is killed loses none of them. Raises
    OSError if the file cannot be opened or written.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(self, request_id: str, traceparent: str, generation: Generation) -> None:
        """Write a request's tokens so far. `done`: it has made all of them."""
        line = {
            "at_ns": time.time_ns(),
            "request_id": request_id,
            "traceparent": traceparent,
            "input_tokens": generation.prompt_tokens,
            "cached_input_tokens": generation.cached_tokens,
            "output_tokens": generation.completion_tokens,
            "done": generation.finished,
        }
        os.write(self._file, json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
