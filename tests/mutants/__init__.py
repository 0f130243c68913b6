"""Breaks cores, each of which the suite has to catch. A program: `python tests/mutants --help`."""
