"""Holds the house rules: `make check` runs this folder."""
