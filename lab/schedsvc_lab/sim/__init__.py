"""Simulates in virtual time: the engine model, and what drives it."""
