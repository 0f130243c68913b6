"""Holds the stubs that `make proto` generates from proto/schedsvc/v1."""
