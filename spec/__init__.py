"""Declare the facts of the product once; `make spec` writes what follows from them."""
