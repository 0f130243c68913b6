"""Keeps what outlives the process: counters and quotas, the usage ledger, recordings."""
