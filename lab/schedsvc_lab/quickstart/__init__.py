"""Starts all that a first request needs, for a new user: `schedsvc quickstart`."""
