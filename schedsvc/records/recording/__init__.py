"""Records the calls of a scheduler's core, so that they can be replayed."""
