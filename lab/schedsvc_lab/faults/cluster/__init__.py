"""A world of several schedulers in virtual time: their own cluster code, a store, links that fail.

Nothing of `schedsvc.cluster` is written again here: its tasks run in event loops whose time is the
world's. Only the store's functions are, because the world has no server; a test holds them to the
Lua functions in a real one.
"""
