"""Stubs generated from proto/schedsvc/v1 by `make proto`."""
