"""The facts of the product, each declared once; `python -m spec.generate` writes what follows."""
