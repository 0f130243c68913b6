"""Tests `bench/`; a folder of that name here would hide it."""
