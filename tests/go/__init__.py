"""Runs tests of the Go client, which are a lane of their own: `make test-go`."""
