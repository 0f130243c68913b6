"""Replays the output-length predictor over a trace: what it would have promised to each request."""
