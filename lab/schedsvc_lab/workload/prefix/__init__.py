"""Measures what a cache of prompt blocks would serve, without end or within a capacity."""
