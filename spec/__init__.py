"""Declare the facts of the product once; `python -m spec.generate` writes what follows from
them."""
