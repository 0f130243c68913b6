"""Measures the cost of admission at each rung: core event, bytes to bytes, stream, unary call.

`python -m bench` measures the whole ladder; the measurements themselves are the pytest-benchmark
tests beside this file, and `pytest bench` runs them at the smallest sizes.
"""
