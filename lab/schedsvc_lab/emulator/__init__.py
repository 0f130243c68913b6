"""Serves the engine model behind an OpenAI-compatible HTTP server, in real time.

It replaces `vllm serve`: with the same endpoints, metrics and `--middleware`. But its answers are
pseudo-words, and a cost profile sets its speed and its KV cache.
"""
