"""Serves the engine model behind an OpenAI-compatible HTTP server, in real time.

It stands where `vllm serve` would: the same endpoints, metrics and `--middleware`, but its answers
are pseudo-words and its speed and its KV cache are those of a cost profile.
"""
