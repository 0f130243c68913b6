"""Records what a scheduler was told, so that it can be replayed."""
