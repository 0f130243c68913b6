"""Makes sure that descriptors 0 to 2 are open before anything else is.

A supervisor may start a command with closed standard streams (`2>&-`). Then the next socket or file
gets descriptor 2, and what a library writes to stderr goes into it, as into a state file.
"""

import codecs
import os
import sys
from io import TextIOWrapper

__all__ = ["escape_unprintable", "open_missing"]


def open_missing() -> None:
    """Open each missing standard stream on the null device. O(1)."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # It gets the lowest free number, which is this one.
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
    # If a stream was closed when Python started, it is None.
    for name, mode, descriptor in (("stdin", "r", 0), ("stdout", "w", 1), ("stderr", "w", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115 - it stays


def escape_unprintable() -> None:
    """Let a stream of another encoding than UTF-8 print any name; Python would raise.

    The locale C names no encoding, so its streams are UTF-8 unless PYTHONIOENCODING sets another.
    """
    names_none = not os.environ.get("PYTHONIOENCODING")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            is_ascii = names_none and codecs.lookup(stream.encoding).name == "ascii"
            encoding = "utf-8" if is_ascii else stream.encoding
            stream.reconfigure(encoding=encoding, errors="backslashreplace")


open_missing()
escape_unprintable()
