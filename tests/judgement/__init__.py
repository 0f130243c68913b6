"""Tests the judgement of Stats on recorded situations, and beside random runs.

`labels.yaml` holds what a person says to each situation, from before there were rules. `record.py`
plays the situations and writes `recorded/`. README.md says how a second reader adds more.
"""
