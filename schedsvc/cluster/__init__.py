"""Shares one fairness among schedulers through a Valkey or Redis server.

The server imports this package only if the configuration has the key `cluster`. A member decides
alone and never waits for the store: a task of its own exchanges totals of service, and what other
members served becomes an event of the core (docs/operate/cluster.md).
"""
