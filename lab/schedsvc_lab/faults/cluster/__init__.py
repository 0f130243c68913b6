"""Runs several schedulers in virtual time: their own cluster code, a store, links that fail.

Nothing of `schedsvc.cluster` is written again here: its tasks run in event loops whose time is the
world's, and its Lua runs in this process. Only the commands that the Lua calls are written again,
because the world has no server; a test compares them with a real one.
"""
