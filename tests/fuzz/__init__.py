"""Fuzzes every parser: `python -m tests.fuzz`, or in CI `make test-fuzz`."""
